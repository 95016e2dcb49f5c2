"""The collectors' state is the process's own: no test inherits what another left in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from traceanalyzer.collectors.state import state


@pytest.fixture(autouse=True)
def _own_state() -> Iterator[None]:
    yield
    state.on = state.marking = False
    state.step, state.place, state.place_of_tensor = None, 0, None
    state.log = state.disabled = None
    state.errors, state.errors_allowed = 0, 20
    state.on_disable.clear()
