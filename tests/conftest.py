"""What every test may ask for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

_SHARED = Path(__file__).resolve().parents[1].parent / "shared"


@pytest.fixture(scope="session")
def shared() -> Callable[[str], Path]:
    """Path of a file or folder of the shared reference material; the test is skipped where that is missing.

    A test that asks for it is marked ``shared``.
    """

    def find(path: str) -> Path:
        found = _SHARED / path
        if not found.exists():
            pytest.skip(f"shared/{path} is not beside the checkout")
        return found

    return find
