"""Outside the job's processes: the environment that attaches a job, RUN_DIR, and the job as a child.

RUN_DIR holds run.json (what was started, when, how it ended), log/ (one per process), trace/, flight/ and control/.
Standard library only: this runs where nothing but torch and this package is installed.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import shlex
import signal
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traceanalyzer import __version__

__all__ = [
    "INJECT",
    "Ended",
    "Prepared",
    "Volume",
    "config",
    "default_run_dir",
    "environment",
    "exports",
    "finish",
    "first_ranks",
    "logs",
    "nodes",
    "parse_ranks",
    "parse_steps",
    "prepare",
    "read_run_json",
    "run",
    "several",
    "speaks",
    "volume",
    "why_no_log",
    "write_run_json",
]

INJECT = Path(__file__).resolve().parent / "inject"
"""The folder that goes first on PYTHONPATH."""

RUN_JSON = "run.json"
SCHEMA = "traceanalyzer.run_dir/1"
PROFILED_WHERE_UNKNOWN = 8
JOIN_S = 600.0
"""A launcher on another node may follow the first one by this much, and still belong to the same run."""


# -- options -----------------------------------------------------------------------------------------------------------


def parse_steps(text: str) -> list[int]:
    """``10-12`` or ``10`` as [first, last], both included. Raises ValueError with a sentence."""
    found = re.fullmatch(r"(\d+)(?:-(\d+))?", text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no range of steps: give 10 or 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise ValueError(f"{text}: the last step comes before the first")
    return [first, last]


def parse_ranks(text: str) -> str | list[int]:
    """``all``, ``auto``, or ``0,3,8-15`` as a sorted list. Raises ValueError with a sentence."""
    if text.strip() in ("all", "auto"):
        return text.strip()
    ranks: set[int] = set()
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if found is None:
            raise ValueError(f"{part.strip()!r} is no rank: give all, auto, or a list such as 0,3,8-15")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"{part.strip()}: the last rank comes before the first")
        if last - first > 10_000_000:
            raise ValueError(f"{part.strip()}: more than ten million ranks")
        ranks.update(range(first, last + 1))
    return sorted(ranks)


def first_ranks(world: int | None) -> list[int]:
    """The ranks that are profiled where nothing tells the groups: the first eight, or fewer in a smaller world."""
    return list(range(min(world or PROFILED_WHERE_UNKNOWN, PROFILED_WHERE_UNKNOWN)))


def config(
    *,
    steps: list[int] | None = None,
    ranks: str | list[int] = "auto",
    profile_ranks: list[int] | None = None,
    hooks: str = "auto",
    dormant: bool = False,
    keep_raw: bool = True,
    **more: Any,
) -> dict[str, Any]:
    """What TRACEANALYZER_CONFIG says. ranks: what the user asked for; hooks are on all ranks whatever it is.

    profile_ranks: ranks that run torch.profiler; None: all, []: none.
    """
    return {
        "steps": steps,
        "ranks": ranks,
        "profile_ranks": profile_ranks,
        "hooks": hooks,
        "marks": True,
        "dormant": dormant,
        "keep_raw": keep_raw,
        **more,
    }


# -- environment -------------------------------------------------------------------------------------------------------


def environment(run_dir: Path, settings: Mapping[str, Any], environ: Mapping[str, str]) -> dict[str, str]:
    """``environ`` with the collector in it. What the user's own PYTHONPATH holds stays behind our folder."""
    ours = str(INJECT)
    path = [ours, *(p for p in environ.get("PYTHONPATH", "").split(os.pathsep) if p != ours)]
    if path[1:] == [""]:
        path = path[:1]
    return {
        **environ,
        "PYTHONPATH": os.pathsep.join(path),
        "TRACEANALYZER_RUN_DIR": str(run_dir.absolute()),
        "TRACEANALYZER_CONFIG": json.dumps(settings, separators=(",", ":")),
    }


def exports(run_dir: Path, settings: Mapping[str, Any]) -> str:
    """Lines for ``eval`` in any POSIX shell: the variables of environment(), PYTHONPATH extended where they run."""
    ours = shlex.quote(str(INJECT))
    return (
        f'PYTHONPATH={ours}"${{PYTHONPATH:+:$PYTHONPATH}}"; export PYTHONPATH\n'
        f"TRACEANALYZER_RUN_DIR={shlex.quote(str(run_dir.absolute()))}; export TRACEANALYZER_RUN_DIR\n"
        f"TRACEANALYZER_CONFIG={shlex.quote(json.dumps(settings, separators=(',', ':')))}; export TRACEANALYZER_CONFIG\n"
    )


# -- RUN_DIR -----------------------------------------------------------------------------------------------------------


def default_run_dir(out: Path) -> Path:
    """The folder beside ``out``: run.d for run.parquet."""
    return out.with_name(out.name.removesuffix(".parquet") + ".d")


def nodes(command: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Machines of the job as far as command or Slurm say; None where the number is not stated as one."""
    for word, following in itertools.pairwise([*command, ""]):
        if word.endswith(".py"):
            break
        name, equals, value = word.partition("=")
        if name in ("--nnodes", "--nodes", "-N"):
            stated = value if equals else following
            return int(stated) if stated.isdigit() else None
    for name in ("SLURM_NNODES", "SLURM_JOB_NUM_NODES"):
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 1


_TASKS = (
    ("SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_SIZE", "PMI_RANK"),
    ("WORLD_SIZE", "RANK"),
)
"""Environment of one of several launchers: how many there are, and which this is."""


def several(command: Sequence[str], environ: Mapping[str, str]) -> bool:
    """Whether other launchers start other parts of the same job: one on each node, or one for each rank."""
    tasks = (environ.get(size, "") for size, _ in _TASKS)
    return nodes(command, environ) != 1 or any(size.isdigit() and int(size) > 1 for size in tasks)


def speaks(environ: Mapping[str, str]) -> bool:
    """Whether this launcher is the one of several that says what there is to say: the first, or the only one."""
    return all(environ.get(number, "0") in ("", "0") for _, number in _TASKS)


def logs(run_dir: Path) -> list[Path]:
    """The logs in RUN_DIR, in order of their names."""
    with contextlib.suppress(OSError):
        return sorted((run_dir / "log").glob("*.talog"))
    return []


@dataclass(frozen=True)
class Prepared:
    """run_dir: the folder to use, None where there is none. note: what to say about it, None if it is the wanted one."""

    run_dir: Path | None
    note: str | None = None


def prepare(
    wanted: Path, command: Sequence[str] | None, settings: Mapping[str, Any], *, shared: bool = False
) -> Prepared:
    """Makes RUN_DIR: the folder wanted, or where that holds the logs of an earlier run, one beside it (run-2.d).

    shared: several launchers start parts of the job; a folder whose run began in the last ten minutes is joined. Without a
    command the first process of the job writes run.json.
    """
    for number in range(1, 10_000):
        run_dir = wanted if number == 1 else wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / "log").mkdir(exist_ok=True)
        except OSError as error:
            return Prepared(None, f"{run_dir}: {error.strerror or error}")
        if not os.access(run_dir / "log", os.W_OK | os.X_OK):
            return Prepared(None, f"{run_dir}: Permission denied")
        began = read_run_json(run_dir).get("started_ns")
        joined = shared and isinstance(began, int) and time.time_ns() - began < JOIN_S * 1e9
        if logs(run_dir) and not joined:
            continue
        if not joined:
            with contextlib.suppress(OSError):
                (run_dir / RUN_JSON).unlink()
        if command is not None:
            write_run_json(run_dir, {"command": list(command), "config": dict(settings), "started_by": "launcher"})
        note = None if number == 1 else f"{wanted} holds the logs of an earlier run: this one goes to {run_dir}"
        return Prepared(run_dir, note)
    return Prepared(None, f"{wanted}: ten thousand runs are beside it")


def write_run_json(run_dir: str | Path, facts: Mapping[str, Any]) -> bool:
    """Writes run.json unless it is there; False if it is, or cannot be written."""
    about = {
        "schema": SCHEMA,
        "traceanalyzer": __version__,
        "started_ns": time.time_ns(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "cwd": os.getcwd(),
        **facts,
    }
    try:
        Path(run_dir).mkdir(parents=True, exist_ok=True)
        with (Path(run_dir) / RUN_JSON).open("x", encoding="utf-8") as file:
            file.write(json.dumps(about, indent=1) + "\n")
    except OSError:
        return False
    return True


def read_run_json(run_dir: Path) -> dict[str, Any]:
    """What run.json says; {} where there is none or it cannot be read."""
    try:
        found = json.loads((run_dir / RUN_JSON).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def finish(run_dir: Path, ended: Ended) -> None:
    """Adds to run.json how the job ended, if this process wrote it."""
    about = read_run_json(run_dir)
    if about.get("pid") != os.getpid() or about.get("host") != socket.gethostname():
        return
    about |= {"ended_ns": ended.ended_ns, "exit_code": ended.code, "signal": ended.signal}
    with contextlib.suppress(OSError):
        beside = run_dir / f".{RUN_JSON}.{os.getpid()}"
        beside.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        beside.replace(run_dir / RUN_JSON)


# -- the job -----------------------------------------------------------------------------------------------------------

_FORWARDED = tuple(
    getattr(signal, name)
    for name in ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
)
_FROM_KERNEL = 0x80  # SI_KERNEL: from the terminal, which signals the whole foreground group


@dataclass(frozen=True)
class Ended:
    """How the job ended. code: its exit code, 128 + n where signal n killed it, as a shell says; 127, 126: no start."""

    code: int
    signal: int | None
    started_ns: int
    ended_ns: int
    problem: str | None = None


def run(command: Sequence[str], environ: Mapping[str, str]) -> Ended:
    """Runs the job as a child in this process group and waits for it.

    A signal sent to this process goes on to the job once; one from the terminal, or from Slurm's step daemon, has
    reached the job already. Call it on the main thread, before other threads are started.
    """
    started = time.time_ns()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_FORWARDED, signal.SIGCHLD})
    old_child = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    try:
        try:
            pid = os.posix_spawnp(
                command[0], list(command), dict(environ), setsigmask=before, setsigdef=_python_ignores()
            )
        except OSError as error:
            code = 127 if isinstance(error, FileNotFoundError) else 126
            return Ended(code, None, started, time.time_ns(), f"{command[0]}: {error.strerror or error}")
        status = _wait(pid)
        while signal.sigtimedwait(_FORWARDED, 0) is not None:
            pass  # came for a job that has ended
    finally:
        signal.signal(signal.SIGCHLD, old_child or signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    killed = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    code = 128 + killed if killed is not None else os.waitstatus_to_exitcode(status)
    return Ended(code, killed, started, time.time_ns())


def _python_ignores() -> list[int]:
    """Signals that this Python ignores of its own accord; the job gets them as they were."""
    return [getattr(signal, name) for name in ("SIGPIPE", "SIGXFSZ") if hasattr(signal, name)]


def _wait(pid: int) -> int:
    while True:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended == pid:
            return status
        # The timeout is for a SIGCHLD that somebody else's handler took.
        came = signal.sigtimedwait({*_FORWARDED, signal.SIGCHLD}, 1.0)
        if came is None or came.si_signo == signal.SIGCHLD:
            continue
        if came.si_code != _FROM_KERNEL and _name(came.si_pid) != "slurmstepd":
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, came.si_signo)


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def why_no_log(command: Sequence[str], environ: Mapping[str, str]) -> str:
    """Why a job may have left no log, as one sentence; what the command shows comes first."""
    for word, following in itertools.pairwise([*command, ""]):
        if Path(word).name.startswith("python") and re.fullmatch(r"-[a-zA-Z]*[SIE][a-zA-Z]*", following):
            return (
                f"{Path(word).name} {following} does not read PYTHONPATH or sitecustomize: start it without that option"
            )
    if environ.get("TRACEANALYZER_RUN_DIR"):
        return "this job was started inside another attached job"
    return (
        "no process of the job joined a process group of torch.distributed, or the job sets PYTHONPATH itself, or runs "
        "where this folder cannot be seen (container, other machine)"
    )


# -- volume ------------------------------------------------------------------------------------------------------------

# torch 2.13's profiler with shapes on real megatron-core 0.16.1 (TP 2 with sequence parallelism, local layers, CPU),
# one step, .json.gz: 162 kB with 2 layers and 2 micro-batches, 408 kB with 6 and 2, 451 kB with 2 and 6.
_STEP_BYTES = 17_000
_MICROBATCH_BYTES = 11_000
_LAYER_BYTES = 31_000


@dataclass(frozen=True)
class Volume:
    """What is to be written, estimated: compressed bytes of one rank's trace per step, and of all traces."""

    per_rank_and_step: int
    total: int | None


def volume(layers: int, microbatches: int, ranks: Iterable[int] | int | None, steps: int | None) -> Volume:
    """Estimate for ``layers`` on one rank. An accelerator's kernels add to it, fused layers take away."""
    one = _STEP_BYTES + microbatches * (_MICROBATCH_BYTES + layers * _LAYER_BYTES)
    count = ranks if isinstance(ranks, int) or ranks is None else len(list(ranks))
    return Volume(one, None if count is None or steps is None else one * count * steps)
