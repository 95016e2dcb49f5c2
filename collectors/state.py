"""What the hooks ask on every call: whether to record, and where in the step the job is. One object per process.

While ``state.on`` is False, torch's methods are its own (hooks.switched()), and what is left in the job, marks of schedules
and steps, reads it and does little else: that is the whole cost of a dormant collector. Attributes are plain, so that
reading them costs one lookup; they are written at step boundaries and by marks, on the thread that runs the model. Calls
from other threads (autograd's) see the same place.

Nothing here raises into the job: ``failed`` counts what went wrong, and after ``errors_allowed`` of them switches the
collector off for good, with one line on stderr.

Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["State", "state"]


class State:
    """Switches and place of one process.

    on: whether calls are recorded. marking: whether ranges are opened around them (a profiler may be recording).
    step: number of the step that runs, None outside of one. place: number of the current place record (record.py:
    "place"), 0 where nothing is known. place_of_tensor: None, or, while messages of several places are issued together
    (pipeline stages send activations and receive gradients at once), ``id`` of each tensor -> its place, which a hook on
    send and recv takes before ``place``. log: where records go; None until a session is open. disabled: why the collector
    switched itself off, None while it works. errors: how often something of ours went wrong.
    """

    __slots__ = (
        "_lock",
        "disabled",
        "errors",
        "errors_allowed",
        "log",
        "marking",
        "on",
        "on_disable",
        "place",
        "place_of_tensor",
        "step",
    )

    def __init__(self) -> None:
        self.on = False
        self.marking = False
        self.step: int | None = None
        self.place = 0
        self.place_of_tensor: dict[int, int] | None = None
        self.log: Any = None
        self.disabled: str | None = None
        self.errors = 0
        self.errors_allowed = 20
        self.on_disable: list[Callable[[], None]] = []
        self._lock = threading.Lock()

    def failed(self, where: str, error: BaseException) -> None:
        """Counts an error of ours; the one that is too many disables the collector. Never raises."""
        try:
            with self._lock:
                self.errors += 1
                too_many = self.errors > self.errors_allowed and self.disabled is None
            words = f"{type(error).__name__} in {where}"
            with contextlib.suppress(Exception):  # the text of an error is code too
                words = f"{words}: {error}"
            log = self.log
            if log is not None:
                log.issue("warning", "collector_error", words)
            if too_many:
                self.disable(f"{self.errors} errors, the last: {words}")
        except Exception:  # noqa: BLE001 - nothing is left to say it to
            self.on = self.marking = False

    def disable(self, reason: str) -> None:
        """Switches the collector off for good and says so once. Never raises."""
        self.on = self.marking = False
        if self.disabled is not None:
            return
        self.disabled = reason
        try:
            sys.stderr.write(f"traceanalyzer: collector switched off: {reason}\n")
            for call in self.on_disable:
                call()
        except Exception:  # noqa: BLE001 - the job goes on without us, whatever is wrong with our exit
            pass


state = State()
"""The process's own."""
