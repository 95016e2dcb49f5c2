"""Starting a job attached: environment, RUN_DIR, the job as a child, and the way into its processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import traceanalyzer
from traceanalyzer.collectors import launch, record

JOB = Path(__file__).with_name("launch_job.py")
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="real jobs need torch")
Start = Callable[..., "subprocess.Popen[str]"]


def environment(more: Mapping[str, str] | None = None) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRACEANALYZER_", "PYTHONPATH", "SLURM_", "RANK"))}
    return {**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **(more or {})}


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts a program in tmp_path, in a process group of its own that ends with the test."""
    running: list[subprocess.Popen[str]] = []

    def begin(*command: str | Path, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            list(map(str, command)),
            cwd=tmp_path,
            env=environment(env),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        running.append(process)
        return process

    yield begin
    for process in running:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def attached(start: Start, *command: str | Path, options: tuple[str, ...] = (), **more: Any) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``python -m traceanalyzer.collectors OPTIONS -- COMMAND``."""
    process = start(sys.executable, "-m", "traceanalyzer.collectors", *options, "--", *command, **more)
    out, error = process.communicate(timeout=180)
    return process.returncode, out, error


def ranks_in(run_dir: Path) -> list[int]:
    """Ranks that left a log, one entry for each log."""
    found = []
    for log in launch.logs(run_dir):
        (said, *_) = [r[1]["rank"] for r in record.read(log).records if r[0] == "run" and r[1]["rank"] is not None]
        found.append(said)
    return sorted(found)


# Options ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("auto", "auto"), ("all", "all"), ("3", [3]), ("0,3,8-10", [0, 3, 8, 9, 10]), ("2,1,1-2", [1, 2])],
)
def test_ranks(text: str, wanted: object) -> None:
    assert launch.parse_ranks(text) == wanted


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "1,,2", "0-99999999999"])
def test_ranks_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        launch.parse_ranks(text)


def test_steps() -> None:
    assert launch.parse_steps("10-12") == [10, 12]
    assert launch.parse_steps("7") == [7, 7]
    for text in ("12-10", "x", "1-2-3", ""):
        with pytest.raises(ValueError, match=r"step"):
            launch.parse_steps(text)


@pytest.mark.parametrize(
    ("command", "environ", "wanted"),
    [
        (["torchrun", "--nnodes", "4", "a.py"], {}, 4),
        (["torchrun", "--nnodes=1:4", "a.py"], {}, None),
        (["torchrun", "a.py", "--nnodes", "4"], {}, 1),
        (["srun", "python", "a.py"], {"SLURM_NNODES": "2"}, 2),
        (["python", "a.py"], {}, 1),
    ],
)
def test_nodes(command: list[str], environ: dict[str, str], wanted: int | None) -> None:
    assert launch.nodes(command, environ) == wanted


@pytest.mark.parametrize(
    ("environ", "several", "speaks"),
    [
        ({}, False, True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0"}, True, True),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, True, False),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False, True),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, True, False),
        ({"SLURM_NNODES": "2"}, True, True),
    ],
)
def test_one_of_several_launchers(environ: dict[str, str], several: bool, speaks: bool) -> None:
    assert launch.several(["python", "a.py"], environ) is several
    assert launch.speaks(environ) is speaks


def test_volume_is_what_was_measured() -> None:
    """The three recordings the constants come from: within a tenth."""
    for layers, microbatches, measured in ((2, 2, 161_881), (6, 2, 408_236), (2, 6, 451_517)):
        assert launch.volume(layers, microbatches, 3, 2).per_rank_and_step == pytest.approx(measured, rel=0.1)
    assert launch.volume(2, 2, 3, 2).total == 6 * launch.volume(2, 2, None, None).per_rank_and_step
    assert launch.volume(2, 2, None, 2).total is None


# Environment ----------------------------------------------------------------------------------------------------------


def test_our_folder_goes_first_once_and_the_users_stay() -> None:
    made = launch.environment(Path("run.d"), launch.config(steps=[1, 2]), {"PYTHONPATH": "/a::/b", "X": "1"})
    assert made["PYTHONPATH"].split(":") == [str(launch.INJECT), "/a", "", "/b"]
    assert made["X"] == "1"
    assert made["TRACEANALYZER_RUN_DIR"] == str(Path.cwd() / "run.d")
    assert json.loads(made["TRACEANALYZER_CONFIG"])["steps"] == [1, 2]
    again = launch.environment(Path("run.d"), {}, made)
    assert again["PYTHONPATH"] == made["PYTHONPATH"]
    assert launch.environment(Path("run.d"), {}, {"PYTHONPATH": ""})["PYTHONPATH"] == str(launch.INJECT)


@pytest.mark.parametrize("before", [None, "", "/has space/and'quote"])
def test_exports_survive_a_shell(tmp_path: Path, before: str | None) -> None:
    """What sh makes of the lines, with a folder that needs every kind of quoting."""
    run_dir = tmp_path / 'it\'s a "$HOME" `run`; $(x)\\'
    lines = launch.exports(run_dir, launch.config(ranks=[0, 3]))
    show = f"{sys.executable} -S -c 'import json, os; print(json.dumps(dict(os.environ)))'"
    env = {"PATH": os.environ["PATH"], **({} if before is None else {"PYTHONPATH": before})}
    done = subprocess.run(
        ["sh", "-euc", f'eval "$LINES_"; {show}'], env={**env, "LINES_": lines}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["TRACEANALYZER_RUN_DIR"] == str(run_dir)
    assert json.loads(found["TRACEANALYZER_CONFIG"])["ranks"] == [0, 3]
    assert found["PYTHONPATH"] == f"{launch.INJECT}:{before}" if before else found["PYTHONPATH"] == str(launch.INJECT)


# RUN_DIR --------------------------------------------------------------------------------------------------------------


def test_an_earlier_run_is_left_alone(tmp_path: Path) -> None:
    wanted = launch.default_run_dir(tmp_path / "run.parquet")
    assert wanted == tmp_path / "run.d"
    first = launch.prepare(wanted, ["job"], {})
    assert (first.run_dir, first.note) == (wanted, None)
    assert launch.read_run_json(wanted)["command"] == ["job"]
    assert launch.prepare(wanted, ["next"], {}).run_dir == wanted  # it left no log: nothing is lost
    assert launch.read_run_json(wanted)["command"] == ["next"]
    (wanted / "log" / "r00000-1.talog").touch()
    second = launch.prepare(wanted, ["job"], {})
    assert second.run_dir == tmp_path / "run-2.d"
    assert second.note == f"{wanted} holds the logs of an earlier run: this one goes to {tmp_path / 'run-2.d'}"


def test_launchers_of_several_nodes_share_a_folder(tmp_path: Path) -> None:
    first = launch.prepare(tmp_path / "run.d", ["node 0"], {}, shared=True)
    (tmp_path / "run.d" / "log" / "r00000-1.talog").touch()
    second = launch.prepare(tmp_path / "run.d", ["node 1"], {}, shared=True)
    assert first.run_dir == second.run_dir
    assert launch.read_run_json(tmp_path / "run.d")["command"] == ["node 0"]
    began = json.loads((tmp_path / "run.d" / "run.json").read_text())
    (tmp_path / "run.d" / "run.json").write_text(json.dumps(began | {"started_ns": time.time_ns() - 3600 * 10**9}))
    assert launch.prepare(tmp_path / "run.d", ["later"], {}, shared=True).run_dir == tmp_path / "run-2.d"


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    prepared = launch.prepare(tmp_path / "file" / "run.d", ["job"], {})
    assert prepared == launch.Prepared(None, f"{tmp_path / 'file' / 'run.d'}: Not a directory")


# The child ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "wanted"),
    [("pass", (0, None)), ("raise SystemExit(3)", (3, None)), ("import os; os.kill(os.getpid(), 9)", (137, 9))],
)
def test_exit_code_is_the_jobs(code: str, wanted: tuple[int, int | None]) -> None:
    ended = launch.run([sys.executable, "-S", "-c", code], os.environ)
    assert (ended.code, ended.signal) == wanted
    assert ended.ended_ns >= ended.started_ns


def test_a_command_that_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "job").touch(mode=0o644)
    assert launch.run(["no-such-command-here"], os.environ).code == 127
    assert launch.run([str(tmp_path / "job")], os.environ).code == 126


def test_the_child_has_the_signals_it_would_have_had(tmp_path: Path, start: Start) -> None:
    """Neither our blocked signals nor Python's own ignored ones reach the job."""
    show = tmp_path / "show.py"
    show.write_text(  # the standard ones: glibc's posix_spawn leaves its own real-time signal ignored
        "print([int(l[8:], 16) & 0x7fffffff for l in open('/proc/self/status') if l[:6] in ('SigBlk', 'SigIgn')])"
    )
    alone = start(sys.executable, "-S", show).communicate()[0]
    code, out, _ = attached(start, sys.executable, "-S", show)
    assert (code, out) == (0, alone)


@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1"])
def test_signals_go_on_to_the_job_once(start: Start, name: str) -> None:
    code = textwrap.dedent(f"""
        import signal, sys, time
        came = []
        signal.signal(signal.{name}, lambda n, f: came.append(n))
        print("ready", flush=True)
        end = time.monotonic() + 20
        while not came and time.monotonic() < end: time.sleep(0.01)
        time.sleep(0.3)
        print(len(came)); sys.exit(9)
    """)
    process = start(sys.executable, "-m", "traceanalyzer.collectors", "--", sys.executable, "-S", "-c", code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(getattr(signal, name))
    out, _ = process.communicate(timeout=30)
    assert (out, process.returncode) == ("1\n", 9)


# The way in -----------------------------------------------------------------------------------------------------------


def python(
    tmp_path: Path, code: str, *options: str, path: tuple[Path, ...] = (), run_dir: bool = True
) -> subprocess.CompletedProcess[str]:
    env = environment({"PYTHONPATH": os.pathsep.join(map(str, (launch.INJECT, *path)))})
    if run_dir:
        env["TRACEANALYZER_RUN_DIR"] = str(tmp_path / "run.d")
    return subprocess.run([sys.executable, *options, "-c", code], env=env, capture_output=True, text=True, check=True)


def test_it_does_nothing_without_its_variable(tmp_path: Path) -> None:
    done = python(tmp_path, "import sys; print([m for m in sys.modules if 'traceanalyzer.' in m])", run_dir=False)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_it_imports_little_and_no_torch(tmp_path: Path) -> None:
    done = python(
        tmp_path, "import sys; print(sorted(m for m in sys.modules if m.startswith(('traceanalyzer.', 'torch'))))"
    )
    assert json.loads(done.stdout.replace("'", '"')) == [
        "traceanalyzer.collectors",
        "traceanalyzer.collectors.bootstrap",
        "traceanalyzer.collectors.state",
    ]
    assert not (tmp_path / "run.d").exists()


def test_the_users_sitecustomize_runs_as_itself(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('mine', __name__, __file__); MARK = 1")
    done = python(tmp_path, "import sitecustomize as s; print(s.MARK, s.__spec__.origin)", path=(tmp_path / "site",))
    file = tmp_path / "site" / "sitecustomize.py"
    assert done.stdout == f"mine sitecustomize {file}\n1 {file}\n"
    assert done.stderr == ""


def test_an_error_in_the_users_sitecustomize_is_reported_as_without_us(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("raise RuntimeError('theirs')")
    ours = python(tmp_path, "print('on')", path=(tmp_path,))
    env = environment({"PYTHONPATH": str(tmp_path)})
    alone = subprocess.run([sys.executable, "-c", "print('on')"], env=env, capture_output=True, text=True)
    assert (ours.stdout, ours.stderr) == (alone.stdout, alone.stderr)
    assert "theirs" in ours.stderr


@pytest.mark.parametrize("option", ["-S", "-I", "-E"])
def test_a_python_without_site_runs_and_the_launcher_says_so(start: Start, option: str) -> None:
    code, out, error = attached(start, sys.executable, option, "-c", "print('ran')")
    assert (code, out) == (0, "ran\n")
    name = Path(sys.executable).name
    assert error == (
        f"traceanalyzer: run.d has no log: {name} {option} does not read PYTHONPATH or sitecustomize: start it without that "
        "option\n"
    )


def test_modules_arrive_after_their_code_and_keep_their_loader(tmp_path: Path) -> None:
    """The watcher against a package of its own: nested imports, a failing import, one that is imported twice."""
    package = tmp_path / "pkg"
    package.mkdir()
    (package / "__init__.py").write_text("from pkg import a\nDONE = 1")
    (package / "a.py").write_text("VALUE = 2")
    (package / "bad.py").write_text("raise ValueError('theirs')")
    code = textwrap.dedent("""
        import sys
        from traceanalyzer.collectors import bootstrap
        came = []
        finder = bootstrap._Finder(lambda name: came.append((name, vars(sys.modules[name]).get("VALUE"))))
        finder.watched = {"pkg", "pkg.a", "pkg.bad", "json"}
        sys.meta_path.insert(0, finder)
        import pkg, pkg.a
        loader = pkg.a.__loader__
        print(came, type(loader).__name__, "exec_module" in vars(loader), pkg.a.__spec__.loader is loader)
        for _ in range(2):
            try:
                import pkg.bad
            except ValueError as error:
                print(error, "pkg.bad" in sys.modules)
        finder.watched = {"pkg.a"}
        finder.watch({"pkg.a"})
        print(came[-1], finder in sys.meta_path)
    """)
    done = python(tmp_path, code, path=(tmp_path,))
    assert done.stdout.splitlines() == [
        "[('pkg.a', 2), ('pkg', None)] SourceFileLoader False True",
        "theirs False",
        "theirs False",
        "('pkg.a', 2) False",
    ]


# Real jobs ------------------------------------------------------------------------------------------------------------


@needs_torch
@pytest.mark.parametrize("how", ["spawn", "fork"])
def test_torchrun_leaves_one_log_per_rank(tmp_path: Path, start: Start, how: str) -> None:
    """Not the agent, nor data loader workers, nor subprocesses of workers that import torch.distributed."""
    code, out, error = attached(start, *TORCHRUN, JOB, "loader", how, options=("--run-dir", str(tmp_path / "run.d")))
    assert code == 0, error
    results = sorted(re.findall(r"rank \d: \[[^]]*\]", out))  # two processes print: lines may run together
    assert results == ["rank 0: [8.0, 8.0, 8.0, 8.0]", "rank 1: [8.0, 8.0, 8.0, 8.0]"]
    assert ranks_in(tmp_path / "run.d") == [0, 1]
    assert not list((tmp_path / "run.d" / "log").glob("p*"))
    for log in launch.logs(tmp_path / "run.d"):
        records = record.read(log).records
        assert [r[3] for r in records if r[0] == "call"] == ["all_reduce"]
        assert records[-1][0] == "end"
    about = launch.read_run_json(tmp_path / "run.d")
    assert about["command"] == [*TORCHRUN, str(JOB), "loader", how]
    assert about["exit_code"] == 0


@needs_torch
def test_a_job_that_fails_and_one_that_does_not_parse(tmp_path: Path, start: Start) -> None:
    code, _, error = attached(
        start, sys.executable, JOB, "one", tmp_path / "store", env={"PYTHONDONTWRITEBYTECODE": "1"}
    )
    assert code == 0, error
    assert ranks_in(tmp_path / "run.d") == [0]
    (tmp_path / "broken.py").write_text("def (:\n")
    code, _, error = attached(start, sys.executable, "broken.py")
    assert code == 1
    assert "SyntaxError" in error
    assert "run-2.d has no log: no process of the job joined a process group of torch.distributed" in error


@needs_torch
def test_where_the_folder_cannot_be_written_the_job_runs(tmp_path: Path, start: Start) -> None:
    (tmp_path / "file").touch()
    options = ("--run-dir", str(tmp_path / "file" / "run.d"))
    code, out, error = attached(start, sys.executable, JOB, "one", tmp_path / "store", options=options)
    assert (code, out) == (0, "rank 0: [1.0, 1.0, 1.0, 1.0]\n")
    assert "Not a directory" in error
    assert "the job runs without the collector" in error


@needs_torch
def test_a_job_through_env_alone(tmp_path: Path, start: Start) -> None:
    script = tmp_path / "batch.sh"
    script.write_text(f"""
        set -eu
        lines="$({sys.executable} -m traceanalyzer.collectors --env --run-dir "{tmp_path}/my run")"
        eval "$lines"
        exec {sys.executable} {JOB} one "{tmp_path}/store"
    """)
    process = start("sh", script)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "rank 0: [1.0, 1.0, 1.0, 1.0]\n"), error
    assert ranks_in(tmp_path / "my run") == [0]
    assert launch.read_run_json(tmp_path / "my run")["command"][1:] == [str(JOB), "one", f"{tmp_path}/store"]


@needs_torch
def test_a_copy_without_the_package_being_installed(tmp_path: Path, start: Start) -> None:
    """Only these files and torch: the job's Python finds the collector by the folder, not by an installation."""
    copy = tmp_path / "copy"
    shutil.copytree(launch.INJECT.parent, copy / "collectors", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(Path(traceanalyzer.__file__).parent, copy / "traceanalyzer", symlinks=True)
    site = tmp_path / "site"
    site.mkdir()
    # The editable installation of the checkout is switched off: its finder would find the other copy.
    (site / "sitecustomize.py").write_text(
        "import sys\nsys.meta_path[:] = [f for f in sys.meta_path if 'editable' not in getattr(f, '__module__', '') + "
        "getattr(f, '__name__', '')]\n"
    )
    env = launch.environment(tmp_path / "run.d", launch.config(), environment())
    env["PYTHONPATH"] = f"{copy / 'collectors' / 'inject'}{os.pathsep}{site}"
    process = start(sys.executable, JOB, "one", tmp_path / "store", env=env)
    out, error = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "rank 0: [1.0, 1.0, 1.0, 1.0]\n"), error
    assert ranks_in(tmp_path / "run.d") == [0]


_ANALYSIS = ("duckdb", "pandas", "pyarrow", "click", "rich", "msgspec")
_BLOCK = f"""
import importlib.machinery, sys

class Finder(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in {_ANALYSIS} else super().find_spec(name, path, target)

kept = [f for f in sys.meta_path if "editable" not in getattr(f, "__module__", "") + getattr(f, "__name__", "")]
sys.meta_path[:] = [Finder if f is importlib.machinery.PathFinder else f for f in kept]
"""
_WHOLE_RUN = """
import sys
import traceanalyzer.collectors as collectors
first = [m for m in sys.modules if m.split(".")[0] in {"torch", "numpy", *ANALYSIS}]
import torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=0, world_size=1)
linear = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(linear.parameters(), lr=0.1)
for step in range(3):
    linear(torch.ones(1, 4)).sum().backward()
    dist.all_reduce(linear.weight.grad)
    optimizer.step()
dist.destroy_process_group()
from traceanalyzer.collectors import session
session.current().close()
parts = sorted(m.split(".")[2] for m in sys.modules if m.startswith("traceanalyzer.collectors."))
print(first, [m for m in sys.modules if m.split(".")[0] in ANALYSIS], parts)
"""


@needs_torch
def test_with_torch_alone_a_whole_run_imports_nothing_else(tmp_path: Path, start: Start) -> None:
    """What ``pip install --no-deps`` leaves: hooks, marks, a window of the profiler and the log, without the analysis."""
    installed = tmp_path / "installed" / "traceanalyzer"
    installed.mkdir(parents=True)
    shutil.copy(Path(traceanalyzer.__file__), installed)
    shutil.copytree(launch.INJECT.parent, installed / "collectors", ignore=shutil.ignore_patterns("__pycache__"))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(_BLOCK)
    (tmp_path / "job.py").write_text(_WHOLE_RUN.replace("ANALYSIS", str(_ANALYSIS)))
    job = [sys.executable, tmp_path / "job.py", tmp_path / "store"]
    path = {"PYTHONPATH": f"{site}{os.pathsep}{installed.parent}"}
    options = ("--run-dir", str(tmp_path / "run.d"), "--steps", "1-2", "--ranks", "all")
    code, out, error = attached(start, *job, options=options, env=path)
    assert code == 0, error
    first, last, parts = out.strip().split("] [")
    assert first == "["
    assert last == ""
    assert {"hooks", "marks", "session", "window", "control", "flight", "record"} <= set(re.findall(r"\w+", parts))
    (log,) = launch.logs(tmp_path / "run.d")
    found = record.read(log).records
    assert [r[1]["state"] for r in found if r[0] == "window"] == ["open", "complete"]
    assert sum(r[0] == "call" for r in found) == 3
    assert len(list((tmp_path / "run.d" / "trace").iterdir())) == 1
