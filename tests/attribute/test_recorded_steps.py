"""Steps that a hook recorded: whole by their own spans, and calls belong to them by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from traceanalyzer import attribute
from traceanalyzer.attribute.steps import Step
from traceanalyzer.run import Run

END = 2**63 - 1


def span(step: int, start: int, dur: int | None, completeness: str = "full") -> dict[str, Any]:
    """A step's span in the hook's rows."""
    about = {"rank": 0, "source": "hook", "category": "step", "name": f"step {step}", "recorded_step": step}
    return {**about, "start_ns": start, "dur_ns": dur, "completeness": completeness}


def call(number: int, step: int | None, at: int, **more: Any) -> dict[str, Any]:
    """A call in the hook's rows."""
    about = {"rank": 0, "source": "hook", "op": "all_reduce", "dtype": "float32", "in_elems": 8, "out_elems": 8}
    return {**about, "call_id": number, "recorded_step": step, "t_issue_ns": at, **more}


RANK = [{"rank": 0, "source": "hook", "window_start_ns": 100, "import_status": "partial"}]


def test_spans_say_which_steps_are_whole(open_run: Callable[..., Run]) -> None:
    calls = [call(0, 3, 110), call(1, 4, 210), call(2, 5, 310), call(3, 6, 410)]
    spans = [span(3, 100, 50), span(4, 200, 50, "cut"), span(5, 300, None)]
    with open_run({"comm_record": calls, "rank": RANK, "span": spans}) as run:
        assert attribute.steps.of_ranks(run) == [
            Step(0, 3, 100, 150, "recorded", True),
            Step(0, 4, 200, 250, "recorded", False),
            Step(0, 5, 300, END, "recorded", False),
            Step(0, 6, 410, 411, "recorded", False),  # killed in it: its span was never written
        ]


def test_a_call_belongs_to_the_step_it_names(open_run: Callable[..., Run]) -> None:
    calls = [
        call(0, 3, 110),
        call(1, 3, 155),  # another thread issued it behind the end of the step
        call(2, None, 120, source="kineto"),  # not seen by the hook: by its time
        call(3, None, 180),
        call(4, 4, 210),
    ]
    spans = [span(3, 100, 50), span(4, 200, 50, "cut")]
    with open_run({"comm_record": calls, "rank": RANK, "span": spans}) as run:
        attribute.attach(run, None)
        assert run.tuples("SELECT call_id, step, step_evidence, step_complete FROM comm ORDER BY call_id") == [
            (0, 3, "recorded", True),
            (1, 3, "recorded", True),
            (2, 3, "recorded", True),
            (3, None, None, None),
            (4, 4, "recorded", False),
        ]


def test_what_a_hook_recorded_is_the_first_evidence(open_run: Callable[..., Run]) -> None:
    place = {"recorded_phase": "optimizer", "recorded_component": "gradients", "recorded_microbatch": 2}
    hook = call(0, 3, 110, **place)
    trace = {"rank": 0, "call_id": 0, "op": "all_reduce", "t_issue_ns": 112, "call_path": ["Fn", "ta:microbatch 7"]}
    with open_run(
        {"comm_record": [hook, {**trace, "source": "kineto"}], "rank": RANK, "span": [span(3, 100, 50)]}
    ) as run:
        attribute.attach(run, None)
        asked = (
            "phase, phase_evidence, component, component_evidence, microbatch, microbatch_evidence, source, t_issue_ns"
        )
        assert run.tuples(f"SELECT {asked} FROM comm") == [
            ("optimizer", "recorded", "gradients", "recorded", 2, "recorded", "hook, kineto", 112)
        ]


def test_what_a_hook_does_not_know_comes_from_the_trace(open_run: Callable[..., Run]) -> None:
    trace = {
        "rank": 0,
        "call_id": 0,
        "op": "all_reduce",
        "t_issue_ns": 112,
        "call_path": ["FnBackward", "ta:microbatch 7"],
    }
    with open_run({"comm_record": [call(0, 3, 110), {**trace, "source": "kineto"}], "rank": RANK}) as run:
        attribute.attach(run, None)
        assert run.tuples("SELECT phase, phase_evidence, microbatch, microbatch_evidence FROM comm") == [
            ("backward", "call_path", 7, "mark")
        ]
