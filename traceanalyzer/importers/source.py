"""The text of a trace file: unpacked where it is gzipped, hashed as it lies on disk, and read up to where it is damaged."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from isal import igzip_lib, isal_zlib

from traceanalyzer.errors import InputError

_MAGIC = b"\x1f\x8b"
_PLAIN_PIECE = 1 << 20
# Small, because a damaged piece of compressed text is lost whole.
_PACKED_PIECE = 1 << 14
_GZIP = 31
_TRAILER = 8
_UnpackError: Any = igzip_lib.IsalError  # typed as an instance in isal's stubs


class TraceText:
    """Reads one file, plain or gzip by its first bytes. Use as a context manager.

    ``packed_bytes`` is how much of the file is read so far, ``sha256`` the hash of the whole file (``drain`` first). Python's
    own gzip reader throws away up to a megabyte of good text in front of the place where a file is cut; this one gives
    all of it, then raises EOFError (cut) or OSError (damaged). Raises InputError if the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._file = path.open("rb", buffering=0)
        except OSError as error:
            raise InputError(f"{path}: cannot be opened ({error.strerror}).") from error
        self.packed_bytes = 0
        self._size = os.fstat(self._file.fileno()).st_size
        self._hash = hashlib.sha256()
        self._held = b""
        first = self._next(_PLAIN_PIECE)
        self._unpack: Any = isal_zlib.decompressobj(_GZIP) if first.startswith(_MAGIC) else None
        self._packed = first if self._unpack is not None else b""
        if self._unpack is None:
            self._held = first
        self._damage: str | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def drain(self) -> None:
        """Reads on to the end, for the hash of the whole file."""
        while self._next(_PLAIN_PIECE):
            pass

    def read1(self, size: int, /) -> bytes:
        """At most ``size`` bytes of text as they become available; b"" at the end."""
        while not self._held:
            if self._unpack is None:
                self._held = self._next(_PLAIN_PIECE)
                if not self._held:
                    return b""
            elif not self._unpack_more():
                return b""
        given, self._held = self._held[:size], self._held[size:]
        return given

    def _next(self, size: int) -> bytes:
        piece = self._file.read(size)
        self._hash.update(piece)
        self.packed_bytes += len(piece)
        return piece

    def _unpack_more(self) -> bool:
        """Unpacks one piece into ``_held``; False at the end of the file."""
        if self._damage is not None:
            raise OSError(self._damage)
        if not self._packed:
            self._packed = self._next(_PLAIN_PIECE)
        if (
            self._unpack.eof
        ):  # another member may follow; zeros and other bytes behind the last are ignored, as gzip does
            if not self._packed.lstrip(b"\x00").startswith(_MAGIC):
                return False
            self._packed = self._packed.lstrip(b"\x00")
            self._unpack = isal_zlib.decompressobj(_GZIP)
        if not self._packed:
            raise EOFError("the compressed file ends early")
        end = _PACKED_PIECE
        if self.packed_bytes >= self._size and len(self._packed) > _TRAILER:
            end = min(end, len(self._packed) - _TRAILER)  # a wrong checksum must not take text with it
        piece, self._packed = self._packed[:end], self._packed[end:]
        try:
            self._held = self._unpack.decompress(piece)
        except _UnpackError as error:
            self._damage = f"the compressed file is damaged: {error}"
            raise OSError(self._damage) from error
        if self._unpack.eof:
            self._packed = self._unpack.unused_data + self._packed
        return True
