"""The view comm with roles and places: every rule, each fact with its evidence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import attribute
from traceanalyzer.attribute import ATTRIBUTED_COLUMNS, attach
from traceanalyzer.attribute.roles import Look, settle
from traceanalyzer.job import Job
from traceanalyzer.run import Run

ROW = ["_ReduceFromModelParallelRegion"]
COLUMN = ["LinearWithGradAccumulationAndAsyncCommunication"]
RANK = {"rank": 0, "window_start_ns": 0, "host_start_ns": 0, "import_status": "complete"}
TP_RANKS = [0, 1, 2, 3]


def group(name: str, ranks: list[int] | None, description: str | None = None) -> dict[str, Any]:
    """One group as rank 0 knows it."""
    return {
        "rank": 0,
        "group_id": name,
        "description": description,
        "ranks": ranks,
        "group_size": len(ranks or ()) or None,
    }


def call(number: int, **fields: Any) -> dict[str, Any]:
    """One call of rank 0: an all-reduce of 8 bfloat16, issued at 10 ns times its number."""
    common = {"rank": 0, "op": "all_reduce", "dtype": "bfloat16", "in_elems": 8, "out_elems": 8, "completeness": "full"}
    return {**common, "call_id": number, "t_issue_ns": 10 * number, **fields}


def facts(run: Run, *names: str) -> list[tuple[Any, ...]]:
    """Columns of the view comm, by call."""
    return run.tuples(f"SELECT {', '.join(names)} FROM comm ORDER BY rank, call_id")


def test_the_view_has_every_column_with_its_type(open_run: Callable[..., Run]) -> None:
    run = open_run({"rank": [RANK], "comm_record": [call(0)]})
    before = run.tuples("DESCRIBE comm")
    attach(run, None)
    after = {row[0]: row[1] for row in run.tuples("DESCRIBE comm")}
    assert after == {row[0]: row[1] for row in before} | {name: kind for name, (kind, _) in ATTRIBUTED_COLUMNS.items()}
    evidenced = {"role", "step", "phase", "microbatch", "component"}
    assert {f"{fact}_evidence" for fact in evidenced} < set(after)
    assert len(run.tuples("FROM comm")) == 1


@pytest.mark.parametrize(
    ("groups", "fields", "role", "evidence"),
    [
        pytest.param(
            [group("a", TP_RANKS, "MODEL_PARALLEL_GROUP")],
            {"group_id": "a", "call_path": ROW},
            "mp",
            "description",
            id="the description comes first",
        ),
        pytest.param([group("a", [0, 4])], {"group_id": "a"}, None, None, id="ranks that fit several"),
        pytest.param(
            [group("a", TP_RANKS)],
            {"group_id": "a", "call_path": ROW},
            "tp",
            "layout and call_path",
            id="the caller settles it",
        ),
        pytest.param([group("a", [0, 1])], {"group_id": "a", "call_path": ROW}, None, None, id="ranks that fit none"),
        pytest.param(
            [group("a", [0, 4])], {"group_id": "a", "call_path": ROW}, None, None, id="the caller fits none of them"
        ),
        pytest.param([], {"call_path": ROW}, "tp", "call_path", id="no group named"),
        pytest.param([], {"call_path": ["f"]}, None, None, id="an unknown caller"),
        pytest.param([], {}, None, None, id="nothing"),
        pytest.param([], {"call_path": ROW, "group_size": 4}, "tp", "call_path", id="and its size agrees"),
        pytest.param([], {"call_path": ROW, "group_size": 2}, None, None, id="but its size contradicts"),
        pytest.param(
            [group("a", None)],
            {"group_id": "a", "group_size": 4, "call_path": ROW},
            "tp",
            "call_path",
            id="a group of unknown ranks",
        ),
        pytest.param(
            [], {"group_id": "ptr:1", "group_size": 4, "call_path": ROW}, "tp", "call_path", id="a group nobody lists"
        ),
        pytest.param(
            [],
            {"op": "all_gather", "in_elems": 8, "out_elems": 32, "call_path": COLUMN},
            "tp",
            "call_path",
            id="the size an all-gather implies agrees",
        ),
        pytest.param(
            [],
            {"op": "all_gather", "in_elems": 8, "out_elems": 16, "call_path": COLUMN},
            None,
            None,
            id="the size an all-gather implies contradicts",
        ),
        pytest.param(
            [],
            {"op": "reduce_scatter", "in_elems": 16, "out_elems": 8, "call_path": COLUMN},
            None,
            None,
            id="the size a reduce-scatter implies contradicts",
        ),
    ],
)
def test_role(
    open_run: Callable[..., Run],
    job: Callable[..., Job],
    groups: list[dict[str, Any]],
    fields: dict[str, Any],
    role: str | None,
    evidence: str | None,
) -> None:
    run = open_run({"rank": [RANK], "process_group": groups, "comm_record": [call(0, **fields)]})
    attach(run, job())
    assert facts(run, "role", "role_evidence") == [(role, evidence)]


def test_one_fitting_role_is_the_layouts(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    pipeline = job(
        context_parallel_size=1, pipeline_model_parallel_size=2, num_layers=2, untie_embeddings_and_output_weights=True
    )
    run = open_run({"rank": [RANK], "process_group": [group("a", [0, 4])], "comm_record": [call(0, group_id="a")]})
    attach(run, pipeline)
    assert facts(run, "role", "role_evidence", "axis") == [("pp", "layout", "PP")]


def test_without_a_job_callers_still_tell(open_run: Callable[..., Run]) -> None:
    run = open_run(
        {"rank": [RANK], "process_group": [group("a", TP_RANKS)], "comm_record": [call(0, group_id="a", call_path=ROW)]}
    )
    attach(run, None)
    assert facts(run, "role", "role_evidence", "axis") == [("tp", "call_path", "TP")]


def test_patterns_fill_what_is_left(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    run = open_run({"rank": [RANK], "comm_record": [call(0), call(1, in_elems=9), call(2, call_path=ROW)]})
    attach(run, job())
    settle(run, {(0, 0, Look("all_reduce", "bfloat16", 8, 8, "other", None)): "mp"})
    assert facts(run, "role", "role_evidence", "axis") == [
        ("mp", "pattern", "other"),
        (None, None, None),
        ("tp", "call_path", "TP"),
    ]


def test_places_and_their_evidence(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    hook = {
        "recorded_phase": "backward",
        "recorded_microbatch": 5,
        "recorded_component": "mlp.fc1",
        "recorded_step": 8,
        "source": "hook",
    }
    calls = [
        call(0, call_path=[*ROW, "ta:microbatch 2"], in_dims="[[2,16,4]]"),
        call(1),
        call(2, completeness="kernel_only"),
        call(3, source="hook"),
        call(4, **hook, call_path=ROW),
    ]
    run = open_run({"rank": [RANK], "comm_record": calls[:4]})
    attach(run, job())
    names = ("phase", "phase_evidence", "microbatch", "microbatch_evidence", "component", "component_evidence")
    assert facts(run, *names) == [
        ("forward", "call_path", 2, "mark", "embedding", "call_path and shape"),
        ("other", "no_path", None, None, None, None),
        (None, None, None, None, None, None),
        (None, None, None, None, None, None),
    ]
    run = open_run({"rank": [RANK], "comm_record": calls[4:]})
    attach(run, job())
    assert facts(run, *names, "step", "step_evidence", "step_complete") == [
        ("backward", "recorded", 5, "recorded", "mlp.fc1", "recorded", 8, "recorded", True)
    ]


def test_a_message_between_stages_says_no_phase(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    """Outside of every range it may be an activation or a gradient; inside an autograd function it has a place."""
    calls = [
        call(0, op="send"),
        call(1, op="recv", call_path=["AttnFuncWithCPAndKVP2P"]),
        call(2, op="send", source="hook", recorded_phase="other"),
        call(3, op="send", source="hook", recorded_phase="backward"),
        call(4, source="hook", recorded_phase="other"),
    ]
    run = open_run({"rank": [RANK], "comm_record": calls})
    attach(run, job())
    assert facts(run, "phase", "phase_evidence") == [
        (None, None),
        ("forward", "call_path"),
        (None, None),
        ("backward", "recorded"),
        ("other", "recorded"),
    ]


def test_steps_of_calls(open_run: Callable[..., Run]) -> None:
    """Steps from 10 to 20 and 30 to 40; the issue counts, and the start only where nothing was issued."""
    marks = [
        {"rank": 0, "name": f"ProfilerStep#{n}", "start_ns": 10 * n, "dur_ns": 10, "category": "user_annotation"}
        for n in (1, 3)
    ]
    calls = [
        call(0, t_issue_ns=9),
        call(1, t_issue_ns=10),
        call(2, t_issue_ns=19, start_ns=35, dur_ns=9),
        call(3, t_issue_ns=20),
        call(4, t_issue_ns=None, start_ns=39, dur_ns=100),
        call(5, t_issue_ns=40),
        call(6, t_issue_ns=None),
    ]
    run = open_run({"rank": [{**RANK, "import_status": "partial"}], "span": marks, "comm_record": calls})
    attach(run, None)
    nothing = (None, None, None)
    assert facts(run, "step", "step_evidence", "step_complete") == [
        nothing,
        (1, "profiler_step", True),
        (1, "profiler_step", True),
        nothing,
        (3, "profiler_step", False),
        nothing,
        nothing,
    ]


def test_calls_of_a_file_without_a_rank(open_run: Callable[..., Run]) -> None:
    run = open_run({"rank": [{**RANK, "rank": None}], "comm_record": [call(0, rank=None)]})
    assert [s.rank for s in attach(run, None).steps] == [None]
    assert facts(run, "rank", "step", "step_evidence") == [(None, 0, "window")]


def test_attaching_twice_gives_the_same(open_run: Callable[..., Run], job: Callable[..., Job]) -> None:
    run = open_run({"rank": [RANK], "comm_record": [call(0, call_path=ROW)]})
    attach(run, None)
    first = run.rows("FROM comm")
    attribute.attach(run, None)
    assert run.rows("FROM comm") == first


def test_groups_show_their_role(open_run: Callable[..., Run]) -> None:
    groups = [group("a", TP_RANKS, "MODEL_PARALLEL_GROUP"), group("b", [0, 2], None), group("c", None, "undefined")]
    run = open_run({"rank": [RANK], "process_group": groups, "comm_record": [call(0)]})
    for _ in range(2):  # attaching again must not join the view with itself
        attach(run, None)
        assert run.tuples("SELECT group_id, role, role_evidence FROM process_group ORDER BY group_id") == [
            ("a", "mp", "description"),
            ("b", None, None),
            ("c", None, None),
        ]
