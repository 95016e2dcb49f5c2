"""What every command owes a shell: quiet, pipes, no colours where none are wanted, narrow terminals."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from traceanalyzer.cli import main

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron_tp2_sp"
JOB = str(FIXTURE / "job.toml")

COMMANDS = {
    "info": ["info", "RUN", "--job", JOB],
    "diff": ["diff", "RUN", "--job", JOB],
    "expect": ["expect", JOB, "--rank", "0"],
    "query": ["query", "RUN", "time_classes"],
    "sql": ["sql", "RUN", "SELECT op, count(*) AS calls FROM comm GROUP BY ALL ORDER BY ALL"],
    "review": ["review", "RUN", "--job", JOB],
    "compare": ["compare", "RUN", "RUN"],
    "export": ["export", "RUN", "--csv", "-", "--view", "process_group"],
}


@pytest.fixture(scope="module")
def run_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run of two ranks, imported quietly."""
    out = tmp_path_factory.mktemp("manners") / "run.parquet"
    traces = [str(FIXTURE / f"rank{r}.json.gz") for r in (0, 1)]
    done = CliRunner().invoke(main, ["import", *traces, "-o", str(out), "--quiet"], catch_exceptions=False)
    assert (done.exit_code, done.output) == (0, "")
    return out


@pytest.fixture(scope="module")
def said(run_file: Path) -> Callable[[str, int], Result]:
    """Runs a command in a pipe with COLUMNS set; each is run once for each width."""
    known: dict[tuple[str, int], Result] = {}
    plain = {"FORCE_COLOR": None, "CLICOLOR_FORCE": None, "TERM": None, "NO_COLOR": None}

    def run(command: str, columns: int) -> Result:
        if (command, columns) not in known:
            arguments = [str(run_file) if a == "RUN" else a for a in COMMANDS[command]]
            environment = {**plain, "COLUMNS": str(columns)}
            known[command, columns] = CliRunner(env=environment).invoke(main, arguments, catch_exceptions=False)
        return known[command, columns]

    return run


SLOW = ("compare", "review")
EVERY = [pytest.param(name, marks=pytest.mark.slow) if name in SLOW else name for name in COMMANDS]


@pytest.mark.parametrize("command", EVERY)
def test_a_pipe_gets_no_control_characters(said: Callable[[str, int], Result], command: str) -> None:
    done = said(command, 60)
    assert done.exit_code in (0, 1, 3)
    assert "\x1b" not in done.output
    assert "\r" not in done.output
    assert done.stdout.strip()
    assert "Traceback" not in done.output


@pytest.mark.parametrize("command", ["info", "diff", "expect"])
def test_a_narrow_terminal_breaks_no_number(said: Callable[[str, int], Result], command: str) -> None:
    """Every number of the narrow text is one of the wide text, and no piece of one."""
    wide, narrow = (set(re.findall(r"\d[\d,.]*\d", said(command, n).stdout)) for n in (240, 60))
    assert len(narrow) > 10
    assert narrow <= wide


@pytest.mark.parametrize("command", ["info", "diff", "expect", pytest.param("review", marks=pytest.mark.slow)])
def test_lines_keep_to_a_narrow_terminal(said: Callable[[str, int], Result], command: str) -> None:
    assert [line for line in said(command, 60).stdout.splitlines() if len(line) > 60] == []


def test_forced_colours_and_none() -> None:
    """NO_COLOR wins over FORCE_COLOR: no colour is set, bold and dim may stay."""
    arguments = ["expect", JOB, "--rank", "0"]
    runner = CliRunner(env={"FORCE_COLOR": "1", "NO_COLOR": "1", "COLUMNS": "120", "TERM": "xterm-256color"})
    done = runner.invoke(main, arguments, catch_exceptions=False)
    assert not re.search(r"\x1b\[[\d;]*(?:3[0-8]|4[0-8]|9[0-7])", done.stdout)


def test_a_reader_that_goes_away_early(run_file: Path) -> None:
    """What does not fit into a pipe's buffer is written to nobody: no traceback, nothing on stderr."""
    arguments = ["export", str(run_file), "--csv", "-", "--view", "cpu_op"]
    done = subprocess.Popen(
        [sys.executable, "-P", "-m", "traceanalyzer", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=os.environ,
    )
    assert done.stdout is not None
    assert done.stderr is not None
    assert done.stdout.readline().startswith(b"rank,source,")
    done.stdout.close()
    assert done.stderr.read() == b""
    assert done.wait(timeout=60) == 1
    done.stderr.close()
