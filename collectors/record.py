"""The log that a collector leaves: its layout, its writer, and its reader. Standard library only, inside the job.

A log file begins with MAGIC. Then come frames: length of the payload and its CRC-32, both 32 bit little-endian, and the
payload, zlib-compressed JSON: a list of records. A file that was cut ends in the middle of a frame; everything before it
is whole. Records are lists whose first item says what they are. Times are unix nanoseconds (time.time_ns); null is
unknown.

=========  ===================================================================================================
record     items
=========  ===================================================================================================
"run"      {facts of the process}: rank, world_size, local_rank, pid, host, python, torch, argv, started_ns,
           restart, config, hooks (what was installed and why), clock (time_ns and perf_counter_ns together)
"group"    number, {name, description, backend, ranks, size, rank}: one process group, said before its first use
"place"    number, {microbatch, chunk, layer, phase, component}: said before its first use; step is not part of it
"call"     one call of c10d: the fields of CALL in their order
"form"     number, group, op, method: what the short records of calls have in common that begin with this number
number     of a "form": one call of c10d in short, the fields of SHORT in their order, the others of CALL are null. Readers
           see a "call"
"span"     kind (step, microbatch, forward, backward, layer, module, optimizer, window), name, start_ns, end_ns, tid,
           step, place
"experts"  number, {dispatcher, first, local, ranks, tensor_ranks}: the local experts of a layer, said before their first
           "rows": class of the dispatcher, number of the first expert, how many, global ranks of their expert-parallel
           group, ranks that share each expert (expert tensor parallelism)
"rows"     number of an "experts" record, time at which they are called, step, place, [rows of each local expert]
"metric"   key, value, unit, step
"job"      {what the job says of itself}
"window"   {file, step_from, step_to, start_ns, end_ns, state}: one profiler window; state "open" when it begins, and
           another when its file is written: complete, cut: ..., failed: ...
"issue"    severity, code, sentence, occurrences
"end"      {calls, recorded, dropped, errors, disabled}: the last record of a process that ended in order
=========  ===================================================================================================
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

__all__ = ["CALL", "MAGIC", "Contents", "Log", "read"]

MAGIC = b"TALOG\x00\x00\x02"
"""First bytes of a log; the last one is the version of the layout. A reader refuses a newer one."""

CALL: tuple[str, ...] = (
    "number",  # of the call on this process, from 0; also in the range's args as "call", which ties both together
    "group",  # number of a "group" record
    "op",  # all_reduce, all_gather, ... as traffic.OPS
    "method",  # what was called: the ProcessGroup method or the c10d operator
    "seq",  # of the call in its group, collectives and point-to-point apart
    "dtype",
    "in_elems",
    "out_elems",
    "reduce_op",  # null: the call does not reduce, or C++ issued it, whose argument is not shown to Python
    "root",
    "peer",
    "in_splits",
    "out_splits",
    "tensors",
    "coalesce",  # number of the block between _start_coalescing and _end_coalescing on this process, null outside
    "is_async",
    "t_issue_ns",
    "t_issue_end_ns",
    "step",
    "place",  # number of a "place" record, 0: nothing known
    "tid",
)
"""Fields of a "call" record after its first item, in order."""

SHORT = (
    *("form", "number", "seq", "dtype", "in_elems", "out_elems", "reduce_op", "coalesce", "is_async", "t_issue_ns"),
    *("t_issue_end_ns", "step", "place", "tid"),
)
"""Fields of a short record of a call, in order: the form is its first item."""

_FRAME = struct.Struct("<II")
_BATCH = 256
"""Records in one frame at most: a frame is made in well under a millisecond, during which Python threads wait."""


class Log:
    """Appends records to one file from a background thread. No method raises, none blocks on the disk but ``close``.

    path: of the file; its folder is made. max_queue: records that wait at most; further ones are dropped and counted.
    max_bytes: of the file; when it is reached, records are dropped and counted. interval_s: between two writes.
    on_failure: called once, on the log's thread, with why nothing more is written. waiting: the queue; what is quicker than
    ``put`` may append to it while it holds fewer than ``max_queue``, and counts in ``dropped`` what it does not append.
    """

    def __init__(
        self,
        path: Path,
        *,
        max_queue: int = 200_000,
        max_bytes: int = 2 << 30,
        interval_s: float = 0.5,
        on_failure: Callable[[str], None] | None = None,
    ) -> None:
        self.path = path
        self.dropped = 0
        self.written = 0
        self.failure: str | None = None
        self.waiting: deque[Any] = deque()
        self.max_queue = max_queue
        self._max_bytes = max_bytes
        self._interval_s = interval_s
        self._on_failure = on_failure
        self._bytes = 0
        self._issues: dict[tuple[str, str], int] = {}
        self._file: IO[bytes] | None = None
        self.put: Callable[[Sequence[Any]], bool] = self._putter()
        """Queues one record; what does not fit is dropped and counted. False: it was dropped."""
        self._wake = threading.Event()
        self._stop = False
        self._writing = threading.Lock()
        self._pid = os.getpid()
        self._thread: threading.Thread | None = None

    # -- from the job's threads ------------------------------------------------------------------------------------

    def _putter(self) -> Callable[[Sequence[Any]], bool]:
        """``put``, as a function that has at hand what it needs: it is called often."""
        waiting, limit = self.waiting, self.max_queue
        append = waiting.append

        def put(record: Sequence[Any]) -> bool:
            if len(waiting) >= limit:
                self.dropped += 1
                return False
            append(record)
            return True

        return put

    def issue(self, severity: str, code: str, sentence: str) -> None:
        """Queues an issue; equal ones are counted, the first of them is written."""
        with contextlib.suppress(Exception):
            key = (code, sentence[:400])
            seen = self._issues.get(key, 0)
            if len(self._issues) < 1000 or seen:
                self._issues[key] = seen + 1
            if not seen:
                self.put(["issue", severity, code, sentence[:400], 1])

    # -- life --------------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Makes the file and starts the thread; False if the file cannot be written (``failure`` says why).

        A file that is there already is left as it is (a process number comes again, also on another machine): ``path``
        then gets a number behind its name.
        """
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            wanted = self.path
            for number in range(2, 10_000):
                try:
                    self._file = self.path.open("xb", buffering=0)
                    break
                except FileExistsError:
                    self.path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
            else:
                raise FileExistsError(f"{wanted} and all its successors exist")
            self._file.write(MAGIC)
            self._bytes = len(MAGIC)
        except OSError as error:
            self.failure = f"{type(error).__name__}: {error}"
            return False
        self._thread = threading.Thread(target=self._run, name="traceanalyzer-log", daemon=True)
        self._thread.start()
        return True

    def close(self, timeout_s: float = 5.0) -> None:
        """Writes what waits and closes the file. In a forked child it only lets go of the file."""
        self._stop = True
        self._wake.set()
        if os.getpid() != self._pid:
            self._file = None
            return
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)
        with contextlib.suppress(Exception):
            self.flush()
        with contextlib.suppress(Exception), self._writing:
            if self._file is not None:
                self._file.close()
                self._file = None

    def flush(self) -> None:
        """Writes what waits, on the calling thread."""
        while self.waiting and self.failure is None:
            self._write_batch()

    def _run(self) -> None:
        while not self._stop:
            self._wake.wait(self._interval_s)
            self._wake.clear()
            try:
                self.flush()
            except Exception as error:  # noqa: BLE001 - the job does not depend on us
                self.failure = self.failure or f"{type(error).__name__}: {error}"
            if self.failure is not None:
                with contextlib.suppress(Exception):
                    if self._on_failure is not None:
                        self._on_failure(self.failure)
                return

    def _write_batch(self) -> None:
        with self._writing:
            batch: list[Any] = []
            while self.waiting and len(batch) < _BATCH:
                batch.append(self.waiting.popleft())
            if not batch or self._file is None:
                self.dropped += len(batch)
                return
            payload = zlib.compress(_encoded(batch), 1)
            if self._bytes + _FRAME.size + len(payload) > self._max_bytes:
                self.dropped += len(batch)
                return
            frame = _FRAME.pack(len(payload), zlib.crc32(payload)) + payload
            try:
                written = self._file.write(frame)
            except OSError as error:
                self.failure = f"{type(error).__name__}: {error}"
                self.dropped += len(batch)
                return
            if written != len(frame):  # a full disk takes a part: the frame is torn, nothing may follow it
                self.failure = f"only {written} of {len(frame)} bytes were written"
                self.dropped += len(batch)
                return
            self._bytes += len(frame)
            self.written += len(batch)


def _encoded(batch: list[Any]) -> bytes:
    try:
        return json.dumps(batch, separators=(",", ":"), default=str).encode()
    except (TypeError, ValueError):
        kept = []
        for record in batch:
            with contextlib.suppress(TypeError, ValueError):
                json.dumps(record, default=str)
                kept.append(record)
        return json.dumps(kept, separators=(",", ":"), default=str).encode()


# -- reading -----------------------------------------------------------------------------------------------------------


@dataclass
class Contents:
    """What a log holds. records: in the order of writing, only with ``read``. torn_bytes: what was cut from its end.

    problem: why reading stopped before the end of the file, None at its end.
    """

    records: list[list[Any]] = field(default_factory=list)
    torn_bytes: int = 0
    problem: str | None = None


def frames(path: Path, decode: Callable[[bytes], Any] = json.loads) -> Iterator[list[list[Any]] | str]:
    """The records of each whole frame, in order; a last item of text says why the rest could not be read.

    Short records of calls come as "call" records; one whose form the log lacks comes as it is.

    ``decode`` reads the JSON of a frame: a reader that has a faster library than Python's own brings it. Raises ValueError
    for a file that is no log or has a newer layout; OSError as opening does.
    """
    with path.open("rb") as file:
        forms: dict[Any, list[Any]] = {}
        start = file.read(len(MAGIC))
        if start[:-1] != MAGIC[:-1]:
            raise ValueError(f"{path.name}: not a collector's log")
        if start[-1] > MAGIC[-1]:
            raise ValueError(f"{path.name}: layout {start[-1]} of the log is newer than this program knows")
        while head := file.read(_FRAME.size):
            if len(head) < _FRAME.size:
                yield f"{len(head)} bytes of a torn frame"
                return
            size, checksum = _FRAME.unpack(head)
            payload = file.read(size)
            if len(payload) < size:
                yield f"{len(head) + len(payload)} bytes of a torn frame"
                return
            if zlib.crc32(payload) != checksum:
                rest = len(head) + len(payload) + len(file.read())
                yield f"{rest} bytes from a frame with a wrong checksum on"
                return
            yield _whole(decode(zlib.decompress(payload)), forms)


def _whole(records: Any, forms: dict[Any, list[Any]]) -> Any:
    """A frame's records without short ones; remembers the forms that it says."""
    if not isinstance(records, list):
        return records
    found: list[Any] = records
    nothing = [None] * 5
    kept: list[Any] = []
    for item in found:
        first = item[0] if isinstance(item, list) and item else None
        if type(first) is int and len(item) == len(SHORT) and first in forms:
            # in the order of CALL: number, the form, seq to reduce_op, five that such a call has not, the rest
            kept.append(["call", item[1], *forms[first], *item[2:7], *nothing, *item[7:]])
        elif first == "form" and len(item) == 5 and type(item[1]) is int:
            forms[item[1]] = item[2:]
        else:
            kept.append(item)
    return kept


def read(path: Path) -> Contents:
    """Everything a log holds; errors as in frames."""
    found = Contents()
    for part in frames(path):
        if isinstance(part, str):
            found.problem = part
            found.torn_bytes = int(part.split()[0])
        else:
            found.records += part
    return found
