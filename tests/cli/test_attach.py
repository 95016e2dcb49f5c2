"""``traceanalyzer attach``: before the job, the job, after it; and processes that run already."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
from click.testing import Result

from traceanalyzer.cli import attach
from traceanalyzer.collectors import launch, reach

Cli = Callable[..., Result]
JOB = Path(__file__).resolve().parents[1] / "collectors" / "launch_job.py"
MEGATRON = [
    "pretrain_gpt.py",
    "--num-layers",
    "32",
    "--hidden-size",
    "64",
    "--num-attention-heads",
    "8",
    "--seq-length",
    "32",
    "--micro-batch-size",
    "1",
    "--global-batch-size",
    "64",
]


def command(nodes: int, *options: str) -> list[str]:
    return ["torchrun", "--nnodes", str(nodes), "--nproc-per-node", "8", *MEGATRON, *options]


def chosen(*words: str) -> attach.Profiled:
    return attach.profiled_ranks("auto", attach._job(words))


# Ranks and volume -----------------------------------------------------------------------------------------------------


def test_auto_is_a_replica_and_whole_groups() -> None:
    """TP 2, PP 2 on 32 ranks, so DP 8; EP 4, ETP 2. Order tp-cp-ep-dp-pp: a stage is 16 ranks.

    Replica of rank 0: 0, 1 and 16, 17. Its data-parallel group: 0, 2, ..., 14. Expert grid: ETP 2, EP 4: group 0, 2, 4, 6.
    """
    options = ("--tensor-model-parallel-size", "2", "--pipeline-model-parallel-size", "2", "--sequence-parallel")
    moe = ("--num-experts", "8", "--expert-model-parallel-size", "4")
    found = chosen(*command(4, *options, *moe))
    assert found.ranks == [0, 1, 2, 4, 6, 8, 10, 12, 14, 16, 17]
    assert found.why == "one model-parallel replica, and rank 0's whole data- and expert-parallel groups"


def test_auto_where_the_degrees_are_not_told() -> None:
    first = "the first ones: the command does not tell the job's degrees"
    assert chosen("torchrun", "--nproc-per-node", "16", "train.py") == (list(range(8)), first)
    assert chosen("torchrun", "--nproc-per-node", "4", "train.py") == (None, "all")
    assert chosen("srun", "python", "train.py") == (list(range(8)), first)
    assert chosen(*command(4, "--tensor-model-parallel-size", "$TP")) == (list(range(8)), first)
    assert chosen(*command(1)) == (
        None,
        attach.profiled_ranks("auto", attach._job(command(1))).why,
    )  # DP 8: all of them


VOLUME = (
    "volume   about 2.0 MiB of compressed trace per profiled rank and step, 11.7 MiB in all (estimate: 16 layers, 4 "
    "micro-batches)"
)


def test_what_is_said_before() -> None:
    job = attach._job(command(4, "--pipeline-model-parallel-size", "2"))
    lines = attach.announced(Path("run.d"), launch.config(steps=[10, 12]), attach.profiled_ranks([0, 3], job), job)
    # 16 layers on a rank, 4 micro-batches: 17 + 4 x (11 + 16 x 31) kB
    assert lines == [
        "records  run.d",
        "profiler ranks 0, 3 (as given), steps 10 to 12",
        VOLUME,
    ]
    all_ranks = attach.profiled_ranks("all", None)
    assert attach.announced(Path("run.d"), launch.config(), all_ranks, None)[1] == (
        "profiler none: hooks record every step; --steps A-B names the steps that torch.profiler records"
    )
    assert attach.announced(Path("run.d"), launch.config(dormant=True), all_ranks, None)[1:] == [
        "profiler all ranks, when traceanalyzer capture asks for it",
        "volume   unknown: the command does not tell layers and micro-batches",
    ]
    assert attach.announced(Path("run.d"), launch.config(), attach.Profiled([], "none"), job)[1] == "profiler none"


# Usage ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "give the command that starts the job (after --), or --env, or --pid."),
        (("--env", "--", "job"), "give the command that starts the job (after --), or --env, or --pid."),
        (("--inject", "--", "job"), "--inject and --explain go with --pid."),
        (("--steps", "5-2", "--", "job"), "5-2: the last step comes before the first."),
        (("--ranks", "x", "--", "job"), "'x' is no rank: give all, auto, or a list such as 0,3,8-15."),
        (("--pid", "4194304"), "there is no process 4194304."),
    ],
)
def test_usage(run_cli: Cli, arguments: tuple[str, ...], sentence: str) -> None:
    result = run_cli("attach", *arguments)
    assert result.exit_code == 2
    assert sentence in " ".join(result.stderr.split())


def test_env(run_cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is printed is for a shell and nothing else; the job's options are the user's."""
    monkeypatch.delenv("SLURM_NNODES", raising=False)
    result = run_cli(
        "attach", "--env", "--out", "my.parquet", "--steps", "3", "--ranks", "1", "--hooks", "methods", "--drop-raw"
    )
    assert result.exit_code == 0
    code = 'eval "$LINES_"; printf "%s\\n%s" "$TRACEANALYZER_RUN_DIR" "$TRACEANALYZER_CONFIG"'
    done = subprocess.run(
        ["sh", "-euc", code], env={"LINES_": result.stdout}, capture_output=True, text=True, check=True
    )
    folder, config = done.stdout.split("\n")
    assert folder == str(tmp_path / "my.d")
    assert json.loads(config) == {
        "steps": [3, 3],
        "ranks": [1],
        "profile_ranks": [1],
        "hooks": "methods",
        "marks": True,
        "dormant": False,
        "keep_raw": False,
    }
    assert "NCCL" not in result.stdout
    assert "${TORCH_NCCL_ENABLE_TIMING:-1}" in run_cli("attach", "--env", "--nccl-timing").stdout


# Jobs -----------------------------------------------------------------------------------------------------------------


def attached(tmp_path: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TRACEANALYZER_", "SLURM_", "RANK", "PYTHONPATH"))}
    return subprocess.run(
        [sys.executable, "-m", "traceanalyzer", "attach", *map(str, arguments)],
        cwd=tmp_path,
        env={**kept, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=200,
    )


def test_a_job_without_a_log(tmp_path: Path) -> None:
    done = attached(tmp_path, "--no-profile", "--", sys.executable, "-c", "print('ran'); raise SystemExit(3)")
    assert (done.returncode, done.stdout) == (3, "ran\n")
    assert done.stderr.splitlines()[:3] == ["records  run.d", "profiler none", "job      ended with exit code 3"]
    assert "note: run.d has no log: no process of the job joined a process group of torch.distributed" in done.stderr
    assert not (tmp_path / "run.parquet").exists()


def test_a_command_that_is_not_there(tmp_path: Path) -> None:
    done = attached(tmp_path, "--", "no-such-command")
    assert done.returncode == 127
    assert "Error: no-such-command: No such file or directory" in done.stderr


@pytest.mark.skipif(find_spec("torch") is None, reason="a real job needs torch")
def test_a_job_becomes_a_run(tmp_path: Path) -> None:
    """Two gloo ranks, their exit code 5 (torchrun makes 1 of it), and a run of both."""
    done = attached(tmp_path, "-o", "my.parquet", "--", *torchrun(), JOB, "five")
    assert done.returncode == 1
    assert done.stdout.count("[2.0, 2.0, 2.0, 2.0]") == 2
    assert "job      ended with exit code 1" in done.stderr
    assert "\nranks    0-1\ncalls    2 in " in done.stderr
    assert "\nnext     traceanalyzer diff my.parquet\n" in done.stderr
    assert (tmp_path / "my.parquet").is_file()
    assert launch.read_run_json(tmp_path / "my.d")["exit_code"] == 1


def test_drop_raw_reaches_the_import(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def merge_run_dir(run_dir: Path, out: Path, *, drop_raw: bool) -> None:
        asked.append(drop_raw)
        raise ValueError("that is enough")

    monkeypatch.setattr("traceanalyzer.cli.merge.merge_run_dir", merge_run_dir)
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "r00000-1.talog").touch()
    for drop_raw in (True, False):
        attach._collect(tmp_path, tmp_path / "my.parquet", launch.Ended(0, None, 0, 0), ["job"], False, drop_raw)
        assert (capfd.readouterr().err.splitlines()[-1].endswith("my.parquet --drop-raw")) is drop_raw
    assert asked == [True, False]


def torchrun() -> list[str]:
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


# Processes that run ---------------------------------------------------------------------------------------------------


def test_pid_says_what_is_possible(run_cli: Cli) -> None:
    running = subprocess.Popen(["sleep", "60"], env={"RANK": "4"})
    try:
        end = time.monotonic() + 10  # the kernel shows the environment a moment after the start
        while not Path(f"/proc/{running.pid}/environ").read_bytes() and time.monotonic() < end:
            time.sleep(0.01)
        explained = run_cli("attach", "--pid", str(running.pid), "--explain")
        tried = run_cli("attach", "--pid", str(running.pid))
    finally:
        running.kill()
        running.wait()
    assert explained.exit_code == 0
    lines = explained.stdout.splitlines()
    assert lines[0] == f"process  {running.pid}   rank 4   no CPython   sleep 60"
    assert [line.split()[:2] for line in lines[1:5]] == [
        ["no", "collector:"],
        ["no", "kineto_daemon:"],
        ["no", "remote_exec:"],
        ["no", "debugger:"],
    ]
    assert tried.exit_code == 1
    assert tried.stdout.splitlines()[-1] == f"process {running.pid}: nothing is possible."


def test_pid_does_the_gentlest(run_cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The collector that is there is pointed to; the debugger waits for --inject."""
    yes, no = (reach.Way(name, True, "because", f"do {name}") for name in ("collector", "debugger")), reach.Way
    collector, debugger = yes
    others = (no("kineto_daemon", False, "x"), no("remote_exec", False, "x"))
    here = reach.Process(os.getpid(), ("python", "train.py"), {}, (3, 11))
    entered: list[bool] = []

    def enter(pid: int, run_dir: Path, config: object, *, debugger: bool, say: object) -> reach.Entered:
        entered.append(debugger)
        return reach.Entered("debugger", run_dir / "log" / "r00000-1.talog", None, 250_000_000, 1)

    monkeypatch.setattr(reach, "enter", enter)
    monkeypatch.setattr(reach, "explain", lambda pid: reach.Reach(here, (collector, *others, debugger)))
    result = run_cli("attach", "--pid", "1", "--inject")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "next     do collector"
    monkeypatch.setattr(
        reach, "explain", lambda pid: reach.Reach(here, (no("collector", False, "x"), *others, debugger))
    )
    result = run_cli("attach", "--pid", "1")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[-1] == f"process {os.getpid()}: nothing is possible without --inject."
    result = run_cli("attach", "--pid", "1", "--inject")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-2:] == [
        f"process {os.getpid()}: entered (debugger), held for 250 ms in 1 stops; it writes r00000-1.talog",
        f"next     traceanalyzer capture {Path('run.d')} --steps 3",
    ]
    assert entered == [True]
