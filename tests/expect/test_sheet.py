"""Sheets: the expectation of a rank, a stage and a whole job; sums; what tells releases apart; the two rule sets beside."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import against
from traceanalyzer.expect.errata import ERRATA, in_words
from traceanalyzer.expect.model import Avoidable, Evidence, ExpectedCall
from traceanalyzer.expect.sheet import sheet
from traceanalyzer.expect.totals import Total, total, totals
from traceanalyzer.job import Job

PIPELINE = {"world_size": 8, "pipeline_model_parallel_size": 2}


def _call(role: str = "tp", op: str = "all_gather", calls: int = 3, **more: object) -> ExpectedCall:
    sizes = {"all_gather": (512, 1024), "reduce_scatter": (1024, 512)}.get(op, (1024, 1024))
    return ExpectedCall(
        rule="test",
        role=role,
        op=op,
        phase=str(more.pop("phase", "forward")),
        component=str(more.pop("component", "somewhere")),
        dtype=str(more.pop("dtype", "bfloat16")),
        in_elems=sizes[0],
        out_elems=sizes[1],
        group_size=2,
        calls=calls,
        evidence=Evidence("source", "here"),
        **more,  # type: ignore[arg-type]
    )


# -- sums ------------------------------------------------------------------------------------------------------------


def test_total_counts_sends_and_shows_receives_beside_them() -> None:
    """1,024 bf16 elements: 2,048 B payload, half of it leaves the rank of an all-gather of two, all of a message."""
    rows = [
        (_call(avoidable=Avoidable(1024, "code", "flag")), 1),
        (_call("pp", "send", 2), 4),
        (_call("pp", "recv", 2), 4),
        (_call("tp_ep", "all_to_all", 1, transport="deepep", off_rank=Fraction(1, 3)), 1),
    ]
    assert total(rows) == Total(
        calls=3 + 8 + 1,
        receives=8,
        payload_bytes=3 * 2048 + 8 * 2048 + 2048,
        off_rank_bytes=3 * 1024 + 8 * 2048 + Fraction(1, 3),
        received_bytes=8 * 2048,
        avoidable_bytes=3 * 1024,
        outside_bytes=Fraction(1, 3),
    )


def test_totals_by_role_and_axis() -> None:
    rows = [(_call(), 1), (_call("etp"), 1), (_call("mp", "all_reduce", 1), 1)]
    assert {key: one.calls for key, one in totals(rows, "role").items()} == {"tp": 3, "etp": 3, "mp": 1}
    assert {key: one.calls for key, one in totals(rows, "axis").items()} == {"TP": 6, "other": 1}


# -- parts -----------------------------------------------------------------------------------------------------------


def test_a_job_is_its_stages(tiny: Callable[..., Job]) -> None:
    found = sheet(tiny(**PIPELINE))
    assert [(part.kind, part.number, part.ranks) for part in found.parts] == [("stage", 0, 4), ("stage", 1, 4)]
    assert found.releases == "0.16"
    where = {row.call.component: [part.number for part in row.parts] for row in found.rows}
    assert where["embedding"] == [0]
    assert where["loss: max"] == [1]
    assert where["attention.qkv"] == [0, 1]


def test_one_rank_and_one_stage(tiny: Callable[..., Job]) -> None:
    job = tiny(**PIPELINE)
    (rank,) = sheet(job, rank=5).parts
    (stage,) = sheet(job, stage=1).parts
    assert (rank.name, rank.ranks, stage.name, stage.ranks) == ("rank 5", 1, "stage 1", 4)
    assert rank.expectation.calls == stage.expectation.calls


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"rank": 8}, "rank 8 is outside the world of 8"),
        ({"stage": 2}, "stage 2: the job has stages 0 to 1"),
        ({"stage": -1}, "stage -1"),
        ({"rank": 0, "stage": 0}, "a rank or a stage, not both"),
    ],
)
def test_what_does_not_exist(tiny: Callable[..., Job], asked: dict[str, int], words: str) -> None:
    with pytest.raises(JobError, match=words):
        sheet(tiny(**PIPELINE), **asked)  # type: ignore[arg-type]


def test_a_job_without_a_release_says_what_tells_the_others_apart(tiny: Callable[..., Job]) -> None:
    found = sheet(tiny(megatron_core_version=None, forward_only=True))
    assert found.releases == ">=0.8"
    (old,) = found.apart
    assert old.releases == "<=0.7"
    assert [(row.component, row.op) for row in old.only_there] == [("embedding", "all_reduce")]
    assert [(row.component, row.op) for row in old.missing_there] == [("embedding", "reduce_scatter")]


# -- beside the document ---------------------------------------------------------------------------------------------


def test_rule_sets_side_by_side() -> None:
    same = _call(component="a")
    megatron = [same, _call(component="b", dtype="float32", document="E34"), _call(component="c", document="E34")]
    document = [same, _call(component="b", calls=1), _call(component="d")]
    found = [(row.component, row.verdict, row.calls, row.cause) for row in against.beside(megatron, document)]
    assert found == [
        ("a", "same", (3, 3), ""),
        (
            "b",
            "differs",
            (3, 1),
            f"type float32 instead of bfloat16; 3 calls instead of 1 (E34: {ERRATA['E34']})",
        ),
        ("c", "only megatron", (3, 0), "E34: real Megatron makes these calls, the document does not mention them"),
        ("d", "only document", (0, 3), "real Megatron does not make these calls"),
    ]


def test_every_difference_has_a_cause(document_job: Callable[..., Job]) -> None:
    job = document_job(
        world_size=1024,
        context_parallel_size=2,
        pipeline_model_parallel_size=4,
        expert_model_parallel_size=8,
        num_experts=64,
        moe_layer_freq=4,
        moe_token_dispatcher_type="alltoall",
        use_distributed_optimizer=True,
        num_microbatches=8,
    )
    megatron, document = sheet(job, stage=1), sheet(job, stage=1, rules="document")
    rows = against.beside(megatron.parts[0].expectation.calls, document.parts[0].expectation.calls)
    assert {row.verdict for row in rows} >= {"same", "only megatron"}
    assert all(bool(row.cause) == (row.verdict != "same") for row in rows)
    regather = [row for row in rows if row.component == "mlp.fc1 input re-gather"]
    assert [row.verdict for row in regather] == ["only megatron"]
    assert regather[0].cause == f"E34: {ERRATA['E34']}"


def test_errata_in_words() -> None:
    assert in_words("E9, E13") == f"E9: {ERRATA['E9']}; E13: {ERRATA['E13']}"
    assert in_words("the document has no expert tensor parallelism") == "the document has no expert tensor parallelism"
    assert in_words("E99") == "E99"
