"""What is installed: every subpackage is listed, and wheel and sdist hold what they should and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = {".py", ".sql", ".html", ".css", ".js", ".txt", ".c", ".h"}
CONFIG = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
SETUPTOOLS = CONFIG["tool"]["setuptools"]


def shipped(root: Path) -> dict[str, str]:
    """Every file to install -> the package it belongs to: where it goes in a wheel, and by which name it is found."""
    return {
        "/".join((*name.split("."), *file.relative_to(root / folder).parts)): ".".join(
            (name, *file.parent.relative_to(root / folder).parts)
        )
        for name, folder in SETUPTOOLS["package-dir"].items()
        for file in (root / folder).rglob("*.*")
        if file.suffix in SHIPPED
    }


def test_every_package_is_listed() -> None:
    """A folder left out works in the checkout and is missing from the wheel."""
    assert set(shipped(ROOT).values()) == set(SETUPTOOLS["packages"])


@dataclass(frozen=True)
class Built:
    """A copy of the checkout, and the wheel and the sdist that were built from it."""

    source: Path
    wheel: Path
    sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The sdist, and the wheel built from that sdist, as a release would have them."""
    try:
        setuptools = metadata.version("setuptools")
    except metadata.PackageNotFoundError:
        pytest.skip("setuptools is not installed: nothing can be built without a build environment of its own")
    if Version(setuptools) < Version("77"):
        pytest.skip(f"setuptools {setuptools} is older than the 77 that pyproject.toml asks for")
    source = tmp_path_factory.mktemp("checkout") / "source"
    leave = shutil.ignore_patterns(
        ".git", ".venv*", ".hypothesis", ".*_cache", "build", "dist", "*.egg-info", "__pycache__", "demo.parquet"
    )
    shutil.copytree(ROOT, source, ignore=leave)
    out = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "build", "--no-isolation", "--outdir", str(out), str(source)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    (sdist,) = out.glob("*.tar.gz")
    return Built(source, wheel, sdist)


def test_wheel_holds_the_whole_package_and_nothing_else(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as archive:
        names = {name for name in archive.namelist() if not name.endswith("/")}
    info = f"traceanalyzer-{CONFIG['project']['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"traceanalyzer", info}
    assert {name for name in names if not name.startswith(f"{info}/")} == {
        *shipped(built.source),
        "traceanalyzer/py.typed",
    }
    assert f"{info}/licenses/LICENSE" in names


def test_sdist_holds_tests_and_fixtures(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        names = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    beside = {
        file.relative_to(built.source).as_posix()
        for folder in ("fixtures", "tests")
        for file in (built.source / folder).rglob("*")
        if file.is_file()
    }
    assert "tests/test_packaging.py" in beside
    assert beside <= names
    assert {"LICENSE", "README.md", "CHANGELOG.md", "Makefile", "docs/tables.md"} <= names
