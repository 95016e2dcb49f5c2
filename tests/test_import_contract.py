"""The import contract of pyproject.toml holds, and would say so if it did not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

RUN_LINTER = "from importlinter.cli import lint_imports_command; lint_imports_command()"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A folder with all of traceanalyzer.* under one roof (the linter does not know package-dir) and the contracts."""
    package = tmp_path / "traceanalyzer"
    package.mkdir()
    for entry in (ROOT / "traceanalyzer").iterdir():
        if entry.name != "__pycache__":
            (package / entry.name).symlink_to(entry)
    for folder in ("collectors", "queries", "reports"):
        (package / folder).symlink_to(ROOT / folder)
    (tmp_path / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
    return tmp_path


def lint(tree: Path) -> tuple[int, str]:
    """Exit status and report of import-linter, run in ``tree``."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_LINTER, "--no-cache"],
        cwd=tree,
        env={**os.environ, "PYTHONPATH": str(tree)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def plant(tree: Path, folder: str, statement: str) -> None:
    """Put a module ``planted`` with one import into a subpackage, in a copy: the checkout stays as it is."""
    target = tree / "traceanalyzer" / folder
    source = target.resolve()
    target.unlink()
    shutil.copytree(source, target)
    (target / "__init__.py").touch()
    (target / "planted.py").write_text(f"{statement}\n", encoding="utf-8")


def test_arrows_go_one_way(tree: Path) -> None:
    status, report = lint(tree)
    assert status == 0, report
    assert "0 broken" in report


@pytest.mark.parametrize(
    ("folder", "statement", "contract", "breach"),
    [
        (
            "expect",
            "from traceanalyzer import run",
            "expectations never see a trace",
            "traceanalyzer.expect.planted -> traceanalyzer.run",
        ),
        (
            "expect",
            "import duckdb",
            "expectations never see a trace",
            "traceanalyzer.expect.planted -> duckdb",
        ),
        (
            "importers",
            "from traceanalyzer import job",
            "importers never see a job",
            "traceanalyzer.importers.planted -> traceanalyzer.job",
        ),
        (
            "collectors",
            "import pyarrow",
            "collectors import nothing but the standard library and torch",
            "traceanalyzer.collectors.planted -> pyarrow",
        ),
        (
            "collectors",
            "from traceanalyzer import schema",
            "collectors import nothing but the standard library and torch",
            "traceanalyzer.collectors.planted -> traceanalyzer.schema",
        ),
        (
            "attribute",
            "from traceanalyzer import diff",
            "arrows go one way",
            "traceanalyzer.attribute.planted -> traceanalyzer.diff",
        ),
    ],
)
def test_a_planted_breach_is_named(tree: Path, folder: str, statement: str, contract: str, breach: str) -> None:
    plant(tree, folder, statement)
    status, report = lint(tree)
    assert status != 0
    assert f"{contract} BROKEN" in report
    assert breach in report
