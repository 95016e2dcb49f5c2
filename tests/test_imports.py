"""What an import drags in. Collectors load inside a training job, so none of the analyzer's weight may come along."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

SHOW_MODULES = "import json, sys; print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"


def modules_after(statement: str, folder: Path) -> set[str]:
    """Top-level modules a fresh interpreter holds after ``statement``, run away from the checkout."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{statement}\n{SHOW_MODULES}"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout))


def test_collectors_leave_the_analyzer_out_of_the_job(tmp_path: Path) -> None:
    modules = modules_after("import traceanalyzer, traceanalyzer.collectors", tmp_path)
    assert "traceanalyzer" in modules
    assert modules & {"duckdb", "pandas", "pyarrow", "click", "rich", "msgspec", "yaml", "isal"} == set()


def test_the_package_itself_needs_the_standard_library_alone(tmp_path: Path) -> None:
    before = modules_after("", tmp_path)
    assert modules_after("import traceanalyzer", tmp_path) - before == {"traceanalyzer"}


def test_the_command_line_does_not_need_torch(tmp_path: Path) -> None:
    modules = modules_after("from traceanalyzer.cli import main\nassert callable(main)", tmp_path)
    assert "click" in modules
    assert "torch" not in modules


def test_collectors_import_the_standard_library_and_torch_alone() -> None:
    allowed = {*sys.stdlib_module_names, "torch", "traceanalyzer.collectors", "traceanalyzer"}
    for file in sorted((ROOT / "collectors").rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            for name in names:
                inside = name.startswith("traceanalyzer")
                known = name == "traceanalyzer" or name.startswith("traceanalyzer.collectors")
                assert known if inside else name.split(".")[0] in allowed, f"{file.name} imports {name}"
