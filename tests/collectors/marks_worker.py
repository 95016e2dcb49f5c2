"""Runs a job of tests/integration/jobs under the marks, with a bare recorder of the ProcessGroup's calls.

    torchrun ... marks_worker.py FOLDER JOB ARGUMENTS...

Leaves ``r<rank>.talog`` in FOLDER, whose "call" records are: number, group's description, method, step, place. Modules
are hooked as they are imported, as the collector's bootstrap does it.
"""

import importlib.abc
import importlib.util
import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed  # before the marks, so that both ways of installing are used

from traceanalyzer.collectors import marks, record
from traceanalyzer.collectors.state import state

METHODS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "send",
    "recv",
    "all_gather_single",
    "reduce_scatter_single",
    "all_to_all_single",
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
)


class Watch(importlib.abc.MetaPathFinder):
    """Tells the marks of every module they want to hear of, when its code has run."""

    busy = False

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname not in marks.WATCHED or self.busy:
            return None
        self.busy = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.busy = False
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def exec_module(module: Any) -> None:
                execute(module)
                marks.after_import(fullname)

            loader.exec_module = exec_module
        return spec


class Session:
    """Records from the first step on."""

    steps: list[tuple[str, int]] = []  # noqa: RUF012 - one session in this process

    def step_begins(self, step: int) -> None:
        self.steps.append(("begins", step))
        state.on = True
        marks.sync()

    def step_ends(self, step: int) -> None:
        self.steps.append(("ends", step))


def wrap(log: record.Log, group_class: Any, name: str, count: list[int]) -> None:
    call = getattr(group_class, name)

    def wrapper(group: Any, *args: Any, **kwargs: Any) -> Any:
        if state.on:
            place = state.place
            if name in ("send", "recv") and state.place_of_tensor is not None:
                place = state.place_of_tensor[id(args[0][0])]
            log.put(["call", count[0], group.group_desc, name, state.step, place])
            count[0] += 1
        return call(group, *args, **kwargs)

    setattr(group_class, name, wrapper)


def main() -> None:
    folder, job = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    log = record.Log(folder / f"r{rank}.talog")
    assert log.start()
    state.log = log
    marks.install(Session())
    sys.meta_path.insert(0, Watch())
    core: Any = torch._C
    count = [0]
    for name in METHODS:
        wrap(log, core._distributed_c10d.ProcessGroup, name, count)
    sys.argv = sys.argv[2:]
    sys.path.insert(0, str(Path(job).resolve().parent))
    try:
        runpy.run_path(job, run_name="__main__")
    finally:
        facts = {"hooked": marks.hooked(), "errors": state.errors, "steps": Session.steps}
        marks.uninstall()
        log.close()
        (folder / f"facts{rank}.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    main()
