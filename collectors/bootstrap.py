"""Inside a process of the job: waits for torch.distributed, then opens the session. Started by inject/sitecustomize.py.

A finder in front of ``sys.meta_path`` sees modules being imported; it finds none itself. When
``torch.distributed.distributed_c10d`` has been imported, ``init_process_group`` is wrapped, and the session opens when
that is called: a process that never joins a group (torchrun's agent, workers of a data loader or of the compiler, a
script that only imports torch) has no session and leaves nothing. Modules that marks and hooks name are handed to them
right after their import, before anybody can copy names out of them.

Standard library only; nothing here raises into the job.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from traceanalyzer.collectors.state import state

__all__ = ["start", "started"]

C10D = "torch.distributed.distributed_c10d"
RUN_DIR = "TRACEANALYZER_RUN_DIR"

_HELPERS = ("traceanalyzer.collectors.marks", "traceanalyzer.collectors.hooks")
"""Modules with WATCHED (names of modules) and after_import(name)."""


class _Finder:
    """Calls ``arrived(name)`` after the import of each watched module."""

    def __init__(self, arrived: Callable[[str], None]) -> None:
        self.watched: set[str] = {C10D}
        self.late: set[str] = set()
        self._arrived = arrived
        self._searching: set[str] = set()

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if self.late:
            self.look_again()
        if name not in self.watched or name in self._searching:
            return None
        self._searching.add(name)
        try:
            spec = _spec_by_others(self, name, path, target)
            if spec is not None and spec.loader is not None:
                self._follow(name, spec.loader)
        except Exception as error:  # noqa: BLE001 - the next finder gives the same answer without us
            state.failed(f"import of {name}", error)
            return None
        finally:
            self._searching.discard(name)
        return spec

    def _follow(self, name: str, loader: Any) -> None:
        """Has the loader tell when it has run the module; the loader stays what it is."""
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == name:
                with contextlib.suppress(Exception):
                    del loader.exec_module
                self.arrive(name)

        loader.exec_module = exec_module

    def arrive(self, name: str) -> None:
        """One watched module is there. Never raises."""
        if name not in self.watched:
            return
        self.watched.discard(name)
        try:
            self._arrived(name)
        except Exception as error:  # noqa: BLE001 - the job's import has succeeded
            state.failed(f"after the import of {name}", error)
        if not self.watched and not self.late:
            self.leave()

    def watch(self, names: set[str]) -> None:
        """More names; those that are there already arrive at once, half-imported ones when they are done."""
        self.watched |= names
        for name in sorted(names):
            if name in sys.modules:
                self.late.add(name)
        self.look_again()

    def look_again(self) -> None:
        """Lets those of ``late`` arrive whose import has ended."""
        for name in sorted(self.late):
            module = sys.modules.get(name)
            if module is None or not getattr(getattr(module, "__spec__", None), "_initializing", False):
                self.late.discard(name)
                if module is not None:
                    self.arrive(name)

    def leave(self) -> None:
        with contextlib.suppress(ValueError):
            sys.meta_path.remove(self)


def _spec_by_others(own: object, name: str, path: Sequence[str] | None, target: ModuleType | None) -> Any:
    for finder in list(sys.meta_path):
        if finder is not own and (find := getattr(finder, "find_spec", None)) is not None:
            spec = find(name, path, target)
            if spec is not None:
                return spec
    return None


_finder: _Finder | None = None


def started() -> bool:
    """Whether this process waits for torch.distributed or has seen it."""
    return _finder is not None


def start() -> bool:
    """Waits for torch.distributed; where the process is in a group already, opens the session now. Never raises.

    False without TRACEANALYZER_RUN_DIR. A second call does nothing.
    """
    global _finder
    if not os.environ.get(RUN_DIR):
        return False
    if _finder is not None:
        return True
    _finder = _Finder(_arrived)
    try:
        module = sys.modules.get(C10D)
        sys.meta_path.insert(0, _finder)
        if module is None:
            return True
        if getattr(getattr(module, "__spec__", None), "_initializing", False):
            _finder.watch({C10D})
        else:
            _finder.arrive(C10D)
            if module.is_initialized():
                _open()
    except Exception as error:  # noqa: BLE001 - the job goes on
        state.failed("start", error)
    return True


def _arrived(name: str) -> None:
    if name != C10D:
        for helper in _helpers():
            if name in getattr(helper, "WATCHED", ()):
                helper.after_import(name)
        return
    _wrap(sys.modules[C10D])
    names: set[str] = set()
    for helper in _helpers():
        names |= set(getattr(helper, "WATCHED", ()))
    names.discard(C10D)
    if _finder is not None:
        _finder.watch(names)


def _helpers() -> list[Any]:
    found = []
    for name in _HELPERS:
        try:
            found.append(importlib.import_module(name))
        except Exception as error:  # noqa: BLE001 - one missing part leaves the others
            state.failed(f"import of {name}", error)
    return found


def _wrap(c10d: Any) -> None:
    """Opens the session at ``init_process_group``."""
    original = c10d.init_process_group
    if getattr(original, "_traceanalyzer", False):
        return

    @functools.wraps(original)
    def init_process_group(*args: Any, **kwargs: Any) -> Any:
        session = _open()
        result = original(*args, **kwargs)
        if session is not None:
            session.learn_rank()
        return result

    wrapped: Any = init_process_group  # functions have attributes that types do not know
    wrapped._traceanalyzer = True
    c10d.init_process_group = wrapped
    package: Any = sys.modules.get("torch.distributed")
    if getattr(package, "init_process_group", None) is original:
        package.init_process_group = wrapped


def _open() -> Any:
    """The session of this process, opened if it is not; None where it cannot be. Never raises."""
    try:
        from traceanalyzer.collectors import launch, session

        if _finder is not None:
            _finder.look_again()
        if session.current() is None:
            launch.write_run_json(
                os.environ[RUN_DIR],
                {"command": [sys.executable, *sys.argv], "started_by": "first process"},
            )
        return session.open_session()
    except Exception as error:  # noqa: BLE001 - the job goes on
        state.disable(f"{type(error).__name__} at the start: {error}")
        return None
