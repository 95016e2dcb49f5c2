"""Every cause by itself: when it is given, how sure it is, which cells it joins, and what it does not fire on."""

from __future__ import annotations

from typing import Any

import pytest

from traceanalyzer.causes import TABLE, Cause, CellView, Facts, explain
from traceanalyzer.expect.model import Avoidable, Evidence, ExpectedCall
from traceanalyzer.job import Job

JOB = Job(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True, num_microbatches=4, bf16=True)


def expected(op: str = "all_gather", calls: int = 32, **changes: Any) -> ExpectedCall:
    """Calls on a whole tensor of 4096 bf16 (8192 bytes) over a group of two."""
    sizes = {"all_gather": (2048, 4096), "reduce_scatter": (4096, 2048)}.get(op, (4096, 4096))
    fields: dict[str, Any] = {
        "rule": "test",
        "role": "tp",
        "op": op,
        "phase": "forward",
        "component": "attention.qkv",
        "dtype": "bfloat16",
        "in_elems": sizes[0],
        "out_elems": sizes[1],
        "group_size": 2,
        "calls": calls,
        "evidence": Evidence("inferred", "test"),
    }
    return ExpectedCall(**{**fields, **changes})


def cell(verdict: str, wanted: int = 32, got: int = 32, **changes: Any) -> CellView:
    """A cell of tp / forward / all_gather / bfloat16, 8192 bytes a call."""
    fields: dict[str, Any] = {
        "role": "tp",
        "op": "all_gather",
        "phase": "forward",
        "dtype": "bfloat16",
        "payload": 8192,
        "calls_expected": wanted,
        "calls_measured": got,
        "verdict": verdict,
        "expected": (expected(calls=wanted),) if wanted else (),
    }
    return CellView(**{**fields, **changes})


def found(cells: list[CellView], facts: Facts | None = None) -> dict[int, tuple[str, str, tuple[int, ...]]]:
    """Cell -> code, confidence, related cells."""
    return {
        i: (cause.code, cause.confidence, related)
        for i, (cause, related) in explain(cells, facts or Facts(JOB)).items()
    }


def sentence(cells: list[CellView], facts: Facts | None = None) -> str:
    """The sentence of the one cause that these cells have."""
    (words,) = {cause.sentence for cause, _ in explain(cells, facts or Facts(JOB)).values()}
    return words


def test_a_match_and_an_unknown_have_no_cause() -> None:
    assert found([cell("match"), cell("unknown", got=3), cell("unknown", phase="recompute", wanted=0)]) == {}


def test_an_unexplained_difference_has_none() -> None:
    assert found([cell("missing", got=31), cell("match", op="reduce_scatter")]) == {}


# -- recomputation ---------------------------------------------------------------------------------------------------

REPEATED = [
    cell("unexpected", wanted=0, phase="recompute"),
    cell("unexpected", wanted=0, phase="recompute", op="reduce_scatter", got=16),
    cell("match"),
]


def test_recompute_full_likely() -> None:
    assert found(REPEATED) == {0: ("recompute_full", "likely", (1,)), 1: ("recompute_full", "likely", (0,))}
    assert sentence(REPEATED) == (
        "48 forward calls are repeated inside the backward pass: recomputation is on, the job does not ask for it."
    )


def test_recompute_full_proven_by_the_captured_job() -> None:
    selective = Job(recompute_granularity="selective")
    full = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert found(REPEATED, Facts(selective, captured=full))[0][1] == "proven"
    assert sentence(REPEATED, Facts(selective, captured=full)) == (
        "48 forward calls are repeated inside the backward pass: recomputation is on, the job says selective, and the "
        "captured job has recompute_granularity full."
    )
    assert found(REPEATED, Facts(selective, captured=selective))[0][1] == "likely"


def test_recompute_full_counts_one_rank_and_step() -> None:
    other = cell("unexpected", wanted=0, phase="recompute", got=99, ranks=(1,))
    assert sentence([REPEATED[0], other]).startswith("32 forward calls")


@pytest.mark.parametrize("verdict", ["missing", "match", "unknown"])
def test_recompute_full_near_misses(verdict: str) -> None:
    assert "recompute_full" not in str(found([cell(verdict, phase="recompute")]))
    asked = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert found(REPEATED, Facts(asked)) == {}


def test_recompute_off() -> None:
    job = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    cells = [cell("missing", got=0, phase="recompute"), cell("missing", got=0, phase="recompute", op="reduce_scatter")]
    assert found(cells, Facts(job)) == {0: ("recompute_off", "proven", (1,)), 1: ("recompute_off", "proven", (0,))}
    assert sentence(cells, Facts(job)) == (
        "recompute_granularity is full, but no forward call is repeated in the backward pass: the run does not recompute."
    )
    assert found(cells) == {}
    assert found([*cells, cell("match", phase="recompute", op="all_reduce", got=1)], Facts(job)) == {}
    assert found([cell("missing", got=0)], Facts(job)) == {}


# -- sequence parallelism --------------------------------------------------------------------------------------------


def test_sequence_parallel_off() -> None:
    cells = [
        cell("missing", got=0),
        cell("excess", op="all_reduce", expected=(expected("reduce_scatter"),)),
        cell("missing", wanted=1, got=0, op="all_reduce", phase="other", dtype="float32"),
    ]
    assert found(cells) == {
        0: ("sequence_parallel_off", "proven", (1,)),
        1: ("sequence_parallel_off", "proven", (0,)),
    }
    assert sentence(cells) == (
        "The job has sequence parallelism on, but its tensor-parallel layers all-reduce: it was off in this run."
    )
    some = [*cells[1:], cell("missing", got=2)]
    assert found(some)[0] == ("sequence_parallel_off", "likely", (2,))
    said = Facts(JOB, captured=Job(tensor_model_parallel_size=2, world_size=2))
    assert found(some, said)[0][1] == "proven"


def test_sequence_parallel_on() -> None:
    off = Facts(Job(world_size=2, tensor_model_parallel_size=2, num_microbatches=4, bf16=True))
    cells = [
        cell("missing", expected=(expected("all_reduce"),)),
        cell("unexpected", wanted=0, op="reduce_scatter"),
        cell("unexpected", wanted=0, phase="backward", op="all_gather"),
    ]
    assert set(found(cells, off).values()) == {
        ("sequence_parallel_on", "proven", (1, 2)),
        ("sequence_parallel_on", "proven", (0, 2)),
        ("sequence_parallel_on", "proven", (0, 1)),
    }
    assert sentence(cells, off) == (
        "The job has sequence parallelism off, but its tensor-parallel layers all-gather and reduce-scatter: it was on in "
        "this run."
    )


@pytest.mark.parametrize(
    "near",
    [
        pytest.param([cell("unexpected", wanted=0, op="all_reduce")], id="all-reduces with nothing missing"),
        pytest.param([cell("missing", got=30)], id="some gathers missing"),
        pytest.param(
            [cell("missing", got=0, role="dp"), cell("unexpected", wanted=0, op="all_reduce", role="dp")], id="dp"
        ),
        pytest.param(
            [cell("missing", got=0), cell("unexpected", wanted=0, op="all_reduce", dtype="float32")], id="another type"
        ),
        pytest.param(
            [cell("missing", got=0), cell("unexpected", wanted=0, op="all_reduce", phase="other")],
            id="outside the layers",
        ),
    ],
)
def test_sequence_parallel_near_misses(near: list[CellView]) -> None:
    assert "sequence_parallel" not in str(found(near))


# -- micro-batches ---------------------------------------------------------------------------------------------------


def test_microbatch_count() -> None:
    cells = [cell("missing", got=24), cell("missing", wanted=12, got=9, op="all_reduce"), cell("match", phase="other")]
    assert found(cells) == {0: ("microbatch_count", "likely", (1,)), 1: ("microbatch_count", "likely", (0,))}
    assert sentence(cells) == ("Every count is 3/4 of the expected one: the step had 3 micro-batches, the job says 4.")
    assert found(cells, Facts(JOB, captured=Job(num_microbatches=3)))[0][1] == "proven"
    assert found(cells, Facts(JOB, captured=Job(num_microbatches=4)))[0][1] == "likely"


def test_microbatch_count_of_one_bad_step() -> None:
    good = [cell("match", steps=(1, 3)), cell("match", steps=(1, 3), phase="backward")]
    bad = [cell("excess", got=40, steps=(2,)), cell("excess", got=40, steps=(2,), phase="backward")]
    assert found([*good, *bad]) == {2: ("microbatch_count", "likely", (3,)), 3: ("microbatch_count", "likely", (2,))}


@pytest.mark.parametrize(
    "near",
    [
        pytest.param([cell("missing", got=24)], id="one count"),
        pytest.param([cell("missing", got=24), cell("match", op="all_reduce")], id="not every count"),
        pytest.param([cell("missing", got=24), cell("missing", got=16, op="all_reduce")], id="two factors"),
        pytest.param([cell("missing", got=31), cell("missing", got=31, op="all_reduce")], id="no whole number"),
        pytest.param([cell("missing", got=0), cell("missing", got=0, op="all_reduce")], id="nothing measured"),
        pytest.param(
            [
                cell("excess", got=64),
                cell("excess", got=64, phase="backward"),
                cell("match", op="reduce_scatter", ranks=(0, 1)),
            ],
            id="right in a cell shared with another rank",
        ),
    ],
)
def test_microbatch_near_misses(near: list[CellView]) -> None:
    assert "microbatch_count" not in str(found(near))
    assert found([cell("missing", got=24), cell("missing", got=24, phase="backward")], Facts(Job())) == {}


# -- one field -------------------------------------------------------------------------------------------------------


def test_dtype_differs() -> None:
    wide = [cell("excess", dtype="float32", payload=16384)]
    assert found(wide) == {0: ("dtype_differs", "proven", ())}
    assert sentence(wide) == "Sent as float32 instead of bfloat16, 2 times the bytes."
    assert sentence([cell("missing", dtype="float8_e4m3fn", payload=4096)]) == (
        "Sent as float8_e4m3fn instead of bfloat16, 0.5 times the bytes."
    )
    assert sentence([cell("excess", dtype="float16")]) == "Sent as float16 instead of bfloat16, 1 times the bytes."


@pytest.mark.parametrize(
    "near",
    [
        pytest.param(cell("excess", dtype="float32"), id="as many bytes, so not the same elements"),
        pytest.param(cell("unexpected", wanted=0, dtype="float32", payload=16384), id="nothing to compare"),
        pytest.param(cell("missing", got=0, dtype="float32", payload=16384), id="nothing measured"),
        pytest.param(cell("unknown", dtype="float32", payload=16384), id="unknown"),
        pytest.param(cell("excess", got=33), id="same type"),
        pytest.param(cell("excess", dtype=None, payload=None), id="type not recorded"),
    ],
)
def test_dtype_near_misses(near: CellView) -> None:
    assert found([near]) == {}


def test_operation_differs() -> None:
    cells = [cell("excess", role="dp_cp", op="all_reduce", expected=(expected("reduce_scatter"),))]
    assert found(cells) == {0: ("operation_differs", "likely", ())}
    assert sentence(cells) == "all_reduce instead of reduce_scatter."
    assert found([cell("unexpected", wanted=0, op="all_reduce")]) == {}
    assert found([cell("missing", got=0, op="all_reduce", expected=(expected("reduce_scatter"),))]) == {}


def test_size_differs() -> None:
    assert found([cell("excess", payload=10240)]) == {0: ("size_differs", "likely", ())}
    assert sentence([cell("excess", payload=10240)]) == (
        "10,240 bytes a call instead of 8,192 (1.25 times): padding, another shape, or a size of the job that is not what "
        "the job says."
    )
    assert found([cell("excess", got=33)]) == {}
    assert found([cell("excess", payload=None)]) == {}


def test_size_differs_from_an_empty_call() -> None:
    empty = expected("broadcast", in_elems=0, out_elems=0, dtype="int32", calls=1)
    cells = [cell("excess", 1, 1, op="broadcast", dtype="int32", payload=64, expected=(empty,))]
    assert sentence(cells).startswith("64 bytes a call instead of 0: padding")


# -- the document's rules --------------------------------------------------------------------------------------------

BACKWARD = expected(phase="backward", component="mlp.fc2")
REGATHER = expected(
    phase="backward", component="mlp.fc1 input re-gather", avoidable=Avoidable(4096, "sp_input_regather", "")
)
DOCUMENT = Facts(JOB, rules="document", megatron={0: (expected(), BACKWARD, REGATHER)})


def test_sp_input_regather() -> None:
    cells = [cell("excess", got=64, phase="backward", expected=(BACKWARD,)), cell("match")]
    assert found(cells, DOCUMENT) == {0: ("sp_input_regather", "proven", ())}
    assert sentence(cells, DOCUMENT) == (
        "The document lets the backward pass mirror the forward one; real Megatron gathers the input of every "
        "column-parallel layer again for its weight gradient: 32 of the 32 calls beyond the document "
        "(32 mlp.fc1 input re-gather). The megatron rules explain 64 calls."
    )
    short = [cell("excess", got=60, phase="backward", expected=(BACKWARD,))]
    assert found(short, DOCUMENT) == {0: ("sp_input_regather", "likely", ())}
    assert sentence(short, DOCUMENT).endswith("The megatron rules explain 64 calls of 60.")


def test_recompute_repeats_collectives() -> None:
    repeated = expected(phase="recompute", avoidable=Avoidable(4096, "recompute_repeats_collectives", "selective"))
    facts = Facts(
        Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        rules="document",
        megatron={0: (repeated,)},
    )
    cells = [cell("unexpected", wanted=0, phase="recompute")]
    assert found(cells, facts) == {0: ("recompute_repeats_collectives", "proven", ())}
    assert sentence(cells, facts) == (
        "Recomputation repeats forward collectives, which the document does not mention: 32 attention.qkv. The megatron "
        "rules explain 32 calls."
    )


def test_not_in_document() -> None:
    norm = expected("all_reduce", 1, role="mp", phase="optimizer", component="gradient norm", in_elems=1, out_elems=1)
    facts = Facts(JOB, rules="document", megatron={3: (norm,)})
    cells = [cell("unexpected", 0, 1, role="mp", op="all_reduce", phase="other", payload=2, ranks=(3, 4))]
    assert found(cells, facts) == {0: ("not_in_document", "proven", ())}
    assert sentence(cells, facts) == (
        "The document does not mention these calls, real Megatron makes them: 1 gradient norm. The megatron rules explain "
        "1 call."
    )


@pytest.mark.parametrize(
    ("near", "facts"),
    [
        pytest.param(cell("excess", got=64, phase="backward"), Facts(JOB), id="the megatron rules"),
        pytest.param(cell("missing", got=31, phase="backward"), DOCUMENT, id="missing"),
        pytest.param(cell("excess", got=64, phase="backward", payload=1), DOCUMENT, id="another size"),
        pytest.param(cell("excess", got=33, expected=(expected(),)), DOCUMENT, id="nothing beyond"),
        pytest.param(cell("excess", got=64, phase="backward", ranks=(1,)), DOCUMENT, id="another rank"),
    ],
)
def test_document_near_misses(near: CellView, facts: Facts) -> None:
    assert not {"sp_input_regather", "not_in_document"} & {code for code, _, _ in found([near], facts).values()}


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_fits_wins() -> None:
    """Repeated forward calls under the document's rules: the lookup stands before the suspicion."""
    repeated = expected(phase="recompute", avoidable=Avoidable(4096, "recompute_repeats_collectives", ""))
    cells = [cell("unexpected", wanted=0, phase="recompute")]
    assert (
        found(cells, Facts(JOB, rules="document", megatron={0: (repeated,)}))[0][0] == "recompute_repeats_collectives"
    )
    assert found(cells, Facts(JOB, rules="document"))[0][0] == "recompute_full"


def test_every_rule_says_what_it_is_for() -> None:
    assert all(rule.__doc__ for rule in TABLE)
    assert Cause("a", "b", "likely") == Cause("a", "b", "likely")


def test_the_document_knows_the_part_in_another_cell() -> None:
    layers = expected("all_reduce", calls=32, component="attention.proj")
    embedding = expected("all_reduce", calls=4, component="embedding")
    cells = [
        cell("unexpected", wanted=0, got=4, op="all_reduce", expected=()),
        cell("match", op="all_reduce", expected=(layers,)),
    ]
    facts = Facts(JOB, rules="document", megatron={0: (embedding, layers)})
    assert sentence(cells, facts) == (
        "The document does not mention these calls, real Megatron makes them: 4 embedding. The megatron "
        "rules explain 36 calls."
    )


def test_scatters_alone_do_not_say_that_sequence_parallelism_was_off() -> None:
    cells = [
        cell("match"),
        cell("excess", op="all_reduce", expected=(expected("reduce_scatter"),)),
    ]
    assert "sequence_parallel" not in str(found(cells))
