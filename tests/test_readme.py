"""The README shows what the program prints: its block is the diff of the bundled recording, to the letter."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from traceanalyzer.cli import main

ROOT = Path(__file__).resolve().parents[1]
FIXTURE = ROOT / "fixtures" / "megatron_tp2_sp"


def test_the_block_in_the_readme_is_what_make_demo_prints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    traces = [str(FIXTURE / f"rank{rank}.json.gz") for rank in (0, 1)]
    job = str(FIXTURE / "job.toml")
    assert CliRunner().invoke(main, ["import", *traces, "--job", job, "-o", "demo.parquet"]).exit_code == 0
    printed = CliRunner().invoke(main, ["diff", "demo.parquet"])
    assert printed.exit_code == 0
    shown = re.search(r"```text\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None
    assert shown[1] == printed.stdout
