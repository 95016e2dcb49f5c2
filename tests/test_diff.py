"""The diff of tiny runs: literal calls in, whole cells out.

The job: one layer, hidden 8, sequence 4, micro-batch 2, one micro-batch, TP 2 over two ranks, forward only. So a rank
sums 64 bf16 elements (128 bytes) behind the attention projection, behind the MLP and behind the embedding, and 8 floats
three times for the loss. Off-rank: 2(N-1)/N = 1 times the payload.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import schema
from traceanalyzer.diff import Diff, JobConflict, Unattributed, diff
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job
from traceanalyzer.matching import Cell
from traceanalyzer.run import Run

STATED: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "forward_only": True,
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "num_layers": 1,
    "hidden_size": 8,
    "num_attention_heads": 2,
    "seq_length": 4,
    "micro_batch_size": 2,
    "num_microbatches": 1,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "padded_vocab_size": 16,
    "bf16": True,
}


def job_with(**changes: Any) -> Job:
    """The job with other fields; they count as stated by its owner."""
    fields = {**STATED, **changes}
    return Job(**fields, given=frozenset(fields))


JOB = job_with()

Row = dict[str, Any]

ROW = ["_ReduceFromModelParallelRegion"]
LOSS = ["_VocabParallelCrossEntropy"]
LINEAR = "LinearWithGradAccumulationAndAsyncCommunication"
BACKWARD = [f"{LINEAR}Backward", f"autograd::engine::evaluate_function: {LINEAR}Backward"]

GROUPS = {
    "tp": ("TENSOR_MODEL_PARALLEL_GROUP", [0, 1]),
    "mp": ("MODEL_PARALLEL_GROUP", [0, 1]),
    "dp_cp": ("DATA_PARALLEL_GROUP_WITH_CP", [0]),
    "?": (None, [0, 1]),
}


def calls(n: int, elems: int, path: Sequence[str] | None = None, **fields: Any) -> list[Row]:
    """So many all-reduces of so many bf16 elements on the tensor-parallel group."""
    row = {
        "op": "all_reduce",
        "dtype": "bfloat16",
        "in_elems": elems,
        "out_elems": elems,
        "group_id": "tp",
        "group_size": 2,
        "call_path": path,
        "completeness": "full",
    }
    return [{**row, **fields} for _ in range(n)]


LAYERS = calls(2, 64, ROW, in_dims="[[4,2,8]]")
EMBEDDING = calls(1, 64, ROW, in_dims="[[2,4,8]]")
LOSSES = calls(3, 8, LOSS, dtype="float32")
FORWARD = [*EMBEDDING, *LAYERS, *LOSSES]


@pytest.fixture
def compare(tmp_path: Path) -> Iterator[Callable[..., Diff]]:
    """Writes a run and compares it with a job.

    by_rank: the calls of each rank in order of issue, 10 ns apart from 1000 ns on. steps: name of each step mark -> how
    many calls lie in it. more: rows of other kinds. groups: name -> description and ranks. The rest goes to diff().
    """
    runs: list[Run] = []

    def make(
        by_rank: Mapping[int, Sequence[Row]],
        job: Job | None = JOB,
        *,
        steps: Mapping[str, int] | None = None,
        more: Mapping[str, Sequence[Row]] | None = None,
        metadata: Mapping[str, Job] | None = None,
        world: int | None = 2,
        groups: Mapping[str, tuple[str | None, list[int]]] = GROUPS,
        **options: Any,
    ) -> Diff:
        rows: dict[str, list[Row]] = {kind: list(given) for kind, given in (more or {}).items()}
        for rank, issued in by_rank.items():
            common = {"rank": rank, "source": "kineto"}
            for number, row in enumerate(issued):
                place = {"call_id": number, "coalesce_id": number, "t_issue_ns": 1000 + 10 * number}
                rows.setdefault("comm_record", []).append({**common, **place, **row})
            first = 1000
            for name, count in (steps or {}).items():
                mark = {"name": name, "start_ns": first, "dur_ns": 10 * count, "category": "user_annotation"}
                rows.setdefault("span", []).append({**common, **mark})
                first += 10 * count
            rows.setdefault("rank", []).append(
                {**common, "world_size": world, "window_start_ns": 0, "host_start_ns": 0}
            )
            for name, (description, ranks) in groups.items():
                group = {"group_id": name, "description": description, "group_size": len(ranks), "ranks": ranks}
                rows.setdefault("process_group", []).append({**common, **group})
        path = tmp_path / f"run{len(runs)}.parquet"
        entries = {key: stored.to_json() for key, stored in (metadata or {}).items()}
        with RunWriter(path, {schema.META_IMPORT: '{"status": "complete"}', **entries}) as out:
            for kind in sorted(rows):
                out.write(kind, [table_of(kind, rows[kind])])
        runs.append(Run.open(path))
        return diff(runs[-1], job, **options)

    yield make
    for run in runs:
        run.close()


def both(*rows: Row) -> dict[int, list[Row]]:
    """The same calls on both ranks."""
    return {0: list(rows), 1: list(rows)}


def short(cell: Cell) -> tuple[Any, ...]:
    """What most tests look at: role, phase, operation, type, bytes each, calls expected and measured, verdict."""
    return (
        cell.role,
        cell.phase,
        cell.op,
        cell.dtype,
        cell.payload_bytes_each,
        cell.calls_expected,
        cell.calls_measured,
        cell.verdict,
    )


def cells(found: Diff, *, differing: bool = False) -> list[tuple[Any, ...]]:
    """All cells, or those that do not match."""
    return [short(c) for c in found.cells if not differing or c.verdict != "match"]


LAYERS_MATCH = ("tp", "forward", "all_reduce", "bfloat16", 128, 2, 2, "match")
EMBEDDING_MATCH = ("tp", "forward", "all_reduce", "bfloat16", 128, 1, 1, "match")
LOSS_MATCH = ("tp", "forward", "all_reduce", "float32", 32, 3, 3, "match")
ALL_MATCH = [LAYERS_MATCH, EMBEDDING_MATCH, LOSS_MATCH]


# -- verdicts --------------------------------------------------------------------------------------------------------


def test_match(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD))
    assert cells(found) == ALL_MATCH
    assert (found.verdict, found.exit_code, found.not_in_window) == ("match", 0, ())
    layers, embedding, loss = found.cells
    assert layers.components == ("attention.proj", "mlp.fc2")
    assert embedding.components == ("embedding",)
    assert loss.components == ("loss: max", "loss: predicted logit", "loss: sum of exponentials")
    assert layers == Cell(
        role="tp",
        op="all_reduce",
        phase="forward",
        stage=0,
        dtype="bfloat16",
        group_size=2,
        payload_bytes_each=128,
        components=("attention.proj", "mlp.fc2"),
        calls_expected=2,
        calls_measured=2,
        payload_bytes_expected=256,
        payload_bytes_measured=256,
        off_rank_bytes_expected=Fraction(256),
        off_rank_bytes_measured=Fraction(256),
        avoidable_bytes=0,
        avoidable=(),
        verdict="match",
        role_evidence=("description",),
        ranks=(0, 1),
        steps=(0,),
    )
    assert layers.axis == "TP"
    assert [c.calls for c in layers.expected] == [1, 1]


def test_excess_and_missing(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD, *LAYERS[:1]))
    assert cells(found) == [
        ("tp", "forward", "all_reduce", "bfloat16", 128, 2, 3, "excess"),
        EMBEDDING_MATCH,
        LOSS_MATCH,
    ]
    assert (found.verdict, found.exit_code) == ("differs", 1)
    found = compare(both(*EMBEDDING, *LAYERS, *LOSSES[:2]))
    assert cells(found, differing=True) == [("tp", "forward", "all_reduce", "float32", 32, 3, 2, "missing")]


def test_nothing_of_a_kind_is_missing_and_a_new_kind_unexpected(compare: Callable[..., Diff]) -> None:
    found = compare(both(*EMBEDDING, *LAYERS, *calls(7, 5, ["f"], op="broadcast", dtype="int64")))
    assert cells(found, differing=True) == [
        ("tp", "forward", "broadcast", "int64", 40, 0, 7, "unexpected"),
        ("tp", "forward", "all_reduce", "float32", 32, 3, 0, "missing"),
    ]
    unexpected, missing = found.cells[0], found.cells[1]
    assert (missing.payload_bytes_expected, missing.payload_bytes_measured) == (96, 0)
    assert (missing.off_rank_bytes_measured, missing.time_ns) == (0, None)
    assert (unexpected.payload_bytes_expected, unexpected.off_rank_bytes_measured) == (0, 280)


def test_components_that_do_not_say_theirs_share_a_cell(compare: Callable[..., Diff]) -> None:
    """Without shapes the embedding and the layers look the same."""
    found = compare(both(*calls(3, 64, ROW), *LOSSES))
    assert cells(found) == [("tp", "forward", "all_reduce", "bfloat16", 128, 3, 3, "match"), LOSS_MATCH]
    assert found.cells[0].components == ("embedding", "attention.proj", "mlp.fc2")


def test_unknown_role(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD, *calls(1, 9, group_id="?")), min_coverage=0.5)
    assert cells(found, differing=True) == [(None, "other", "all_reduce", "bfloat16", 18, None, 1, "unknown")]
    unknown = found.cells[0]
    assert (unknown.reason, unknown.axis, unknown.off_rank_bytes_expected) == ("role unknown", None, None)
    assert (found.verdict, found.exit_code) == ("match", 0)


def test_missing_calls_that_may_be_the_unknown_ones(compare: Callable[..., Diff]) -> None:
    found = compare(both(*EMBEDDING, *LOSSES, *calls(3, 64, ["f"], group_id="?")), min_coverage=0.1)
    assert [(short(c), c.reason) for c in found.cells if c.verdict == "unknown"] == [
        (
            ("tp", "forward", "all_reduce", "bfloat16", 128, 2, 0, "unknown"),
            "calls that look like the missing ones have no known role",
        ),
        ((None, "forward", "all_reduce", "bfloat16", 128, None, 3, "unknown"), "role unknown"),
    ]


def test_many_sizes_of_unknown_role_are_one_cell(compare: Callable[..., Diff]) -> None:
    sized = [row for n in range(100, 105) for row in calls(1, n, ["f"], group_id="?")]
    few = compare(both(*FORWARD, *sized[:4]), min_coverage=0)
    assert len([c for c in few.cells if c.role is None]) == 4
    many = compare(both(*FORWARD, *sized), min_coverage=0)
    assert [short(c) for c in many.cells if c.role is None] == [
        (None, "forward", "all_reduce", "bfloat16", None, None, 5, "unknown")
    ]
    assert many.cells[0].payload_bytes_measured == 2 * (100 + 101 + 102 + 103 + 104)


def test_sizes_of_an_uneven_exchange_are_one_cell(compare: Callable[..., Diff]) -> None:
    """Two rows and one stay, one and three go: off-rank bytes are exact from the splits."""
    rows = [
        *calls(1, 24, ["f"], op="all_to_all", group_id="mp", in_splits=[2, 1], out_splits=[2, 2], group_rank=0),
        *calls(1, 32, ["f"], op="all_to_all", group_id="mp", in_splits=[1, 3], out_splits=[1, 1], group_rank=0),
    ]
    found = compare({0: [*FORWARD, *rows], 1: FORWARD})
    (exchange,) = [c for c in found.cells if c.op == "all_to_all"]
    assert (exchange.payload_bytes_each, exchange.calls_measured, exchange.payload_bytes_measured) == (None, 2, 112)
    assert exchange.off_rank_bytes_measured == 2 * (1 * 8 + 3 * 8)


def test_a_pattern_settles_what_is_left(compare: Callable[..., Diff]) -> None:
    """Three float calls of 8 elements outside autograd functions' names: only the loss looks like that."""
    found = compare(both(*EMBEDDING, *LAYERS, *calls(3, 8, ["f"], dtype="float32", group_id="?")))
    assert cells(found) == ALL_MATCH
    assert found.cells[2].role_evidence == ("pattern",)
    assert found.coverage.role_evidence == (("description", 6), ("pattern", 6))
    assert found.coverage.attributed == 1


def test_a_pattern_that_known_calls_fill_settles_nothing(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD, *calls(3, 8, ["f"], dtype="float32", group_id="?")), min_coverage=0)
    assert [c.verdict for c in found.cells] == ["unknown", "match", "match", "match"]


UNMODELLED = "decoder_seq_length"


def test_not_modelled_is_never_a_match(compare: Callable[..., Diff]) -> None:
    """Whatever is seen or not seen of the tensor-parallel group settles nothing."""
    job = job_with(decoder_seq_length=2)
    for rows in (FORWARD, []):
        found = compare(both(*rows), job, min_coverage=0)
        assert {(c.role, c.verdict, c.reason) for c in found.cells} == {
            ("tp", "unknown", f"not modelled: {UNMODELLED}")
        }
        assert sum(c.calls_measured for c in found.cells) == len(rows)


def test_not_modelled_reaches_cells_of_unknown_phase(compare: Callable[..., Diff]) -> None:
    """Beside a kernel without a host there is no telling what it belongs to."""
    rows = calls(2, 7, op="all_gather", dtype="int64", completeness="kernel_only")
    found = compare(both(*LOSSES, *rows), job_with(decoder_seq_length=2), min_coverage=0)
    (cell,) = [c for c in found.cells if c.phase is None]
    assert (cell.verdict, cell.reason) == ("unknown", f"not modelled: {UNMODELLED}")
    assert (cell.calls_expected, cell.calls_measured) == (None, 2)
    assert cell.payload_bytes_expected is cell.off_rank_bytes_expected is None


def test_not_modelled_reaches_optimizer_calls_outside_the_optimizers_range(compare: Callable[..., Diff]) -> None:
    """Megatron sums the gradient norm before torch's own range begins: such calls show as "other"."""
    job = job_with(forward_only=False, extra={"optimizer": "muon"})
    rows = [*FORWARD, *BACK, *AFTER, *calls(1, 5, dtype="float32", group_id="mp")]
    found = compare(both(*rows), job, min_coverage=0)
    assert [(c.phase, c.reason) for c in found.cells if c.role == "mp"] == [
        ("other", "not modelled: optimizer muon"),
        ("optimizer", "not modelled: optimizer muon"),
    ]


def test_an_element_type_that_was_not_recorded(compare: Callable[..., Diff]) -> None:
    found = compare(both(*EMBEDDING, *LAYERS, *calls(3, 8, LOSS, dtype=None)))
    assert [(short(c), c.reason) for c in found.cells if c.verdict != "match"] == [
        (("tp", "forward", "all_reduce", "float32", 32, 3, 3, "unknown"), "element type not recorded")
    ]
    assert found.cells[0].payload_bytes_measured is None
    assert (found.coverage.calls_of_unknown_bytes, found.coverage.judged) == (6, 0.5)
    assert found.verdict == "cannot be judged"


def test_a_size_and_an_operation_that_are_not_known(compare: Callable[..., Diff]) -> None:
    rows = [*calls(1, 8, ["f"], in_elems=None, out_elems=None), *calls(1, 8, ["f"], op=None, op_raw="new_op")]
    found = compare(both(*FORWARD, *rows), min_coverage=0)
    assert [(c.op, c.reason) for c in found.cells if c.verdict == "unknown"] == [
        (None, "operation unknown"),
        ("all_reduce", "size not recorded"),
    ]


# -- the second pass -------------------------------------------------------------------------------------------------


def test_another_type_is_one_cell(compare: Callable[..., Diff]) -> None:
    found = compare(both(*EMBEDDING, *calls(2, 64, ROW, in_dims="[[4,2,8]]", dtype="float32"), *LOSSES))
    assert cells(found, differing=True) == [
        ("tp", "forward", "all_reduce", "float32", 256, 2, 2, "excess"),
    ]
    found = compare(both(*calls(3, 64, ROW, dtype="float32"), *LOSSES))
    assert cells(found) == [("tp", "forward", "all_reduce", "float32", 256, 3, 3, "excess"), LOSS_MATCH]
    wide = found.cells[0]
    assert (wide.off_rank_bytes_expected, wide.off_rank_bytes_measured) == (384, 768)
    assert wide.cause is not None
    assert (wide.cause.code, wide.cause.sentence, wide.cause.confidence) == (
        "dtype_differs",
        "Sent as float32 instead of bfloat16, 2 times the bytes.",
        "proven",
    )


def test_fewer_bytes_are_missing_ones(compare: Callable[..., Diff]) -> None:
    found = compare(both(*EMBEDDING, *LAYERS, *calls(3, 8, LOSS)))
    assert cells(found, differing=True) == [("tp", "forward", "all_reduce", "bfloat16", 16, 3, 3, "missing")]


SP = job_with(sequence_parallel=True)
GATHERS = calls(3, 32, [LINEAR], op="all_gather", out_elems=64)
SCATTERS = calls(3, 64, ["_ReduceScatterToSequenceParallelRegion"], op="reduce_scatter", out_elems=32)


def test_another_operation(compare: Callable[..., Diff]) -> None:
    assert compare(both(*GATHERS, *SCATTERS, *LOSSES), SP).verdict == "match"
    found = compare(both(*GATHERS, *calls(3, 64, ROW), *LOSSES), SP)
    assert cells(found, differing=True) == [("tp", "forward", "all_reduce", "bfloat16", 128, 3, 3, "excess")]
    assert found.cells[0].off_rank_bytes_expected == 3 * 64
    assert found.cells[0].off_rank_bytes_measured == 3 * 128


def test_a_padded_size(compare: Callable[..., Diff]) -> None:
    found = compare(both(*calls(3, 72, ROW), *LOSSES))
    assert cells(found, differing=True) == [("tp", "forward", "all_reduce", "bfloat16", 144, 3, 3, "excess")]
    assert found.cells[0].cause is not None
    assert found.cells[0].cause.sentence == (
        "144 bytes a call instead of 128 (1.125 times): padding, another shape, or a size of the job that is not what the "
        "job says."
    )


def test_what_has_too_little_in_common_stays_apart(compare: Callable[..., Diff]) -> None:
    """Type, elements and number of calls differ."""
    found = compare(both(*FORWARD[:3], *calls(7, 5, ["f"], dtype="int64")))
    assert [c.verdict for c in found.cells] == ["unexpected", "missing", "match", "match"]


def test_causes_join_cells(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD), SP)
    assert [(short(c), c.cause and c.cause.code, c.related) for c in found.cells if c.verdict != "match"] == [
        (("tp", "forward", "all_gather", "bfloat16", 128, 3, 0, "missing"), "sequence_parallel_off", (1,)),
        (("tp", "forward", "all_reduce", "bfloat16", 128, 3, 3, "excess"), "sequence_parallel_off", (0,)),
    ]


# -- tolerance, steps, ranks -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tolerance", "verdict"), [(0.0, "excess"), (0.32, "excess"), (0.34, "match")])
def test_tolerance_of_calls(compare: Callable[..., Diff], tolerance: float, verdict: str) -> None:
    found = compare(both(*EMBEDDING, *LAYERS, *calls(4, 8, LOSS, dtype="float32")), tolerance=tolerance)
    assert next(c for c in found.cells if c.dtype == "float32").verdict == verdict


@pytest.mark.parametrize(("tolerance", "verdict"), [(0.0, "excess"), (0.124, "excess"), (0.125, "match")])
def test_tolerance_of_bytes(compare: Callable[..., Diff], tolerance: float, verdict: str) -> None:
    found = compare(both(*calls(3, 72, ROW), *LOSSES), tolerance=tolerance)
    assert next(c for c in found.cells if c.dtype == "bfloat16").verdict == verdict


def test_a_tolerance_forgives_no_other_type(compare: Callable[..., Diff]) -> None:
    found = compare(both(*calls(3, 64, ROW, dtype="float16"), *LOSSES), tolerance=0.5)
    assert cells(found, differing=True) == [("tp", "forward", "all_reduce", "float16", 128, 3, 3, "excess")]


def test_every_step_is_judged_by_itself(compare: Callable[..., Diff]) -> None:
    """Step 8 repeats one call: the mean over three steps would be 2.33 calls."""
    marks = {"ProfilerStep#7": 6, "ProfilerStep#8": 7, "ProfilerStep#9": 6}
    found = compare(both(*FORWARD, *FORWARD, *LAYERS[:1], *FORWARD), steps=marks)
    assert [(short(c), c.steps) for c in found.cells] == [
        (("tp", "forward", "all_reduce", "bfloat16", 128, 2, 3, "excess"), (8,)),
        (LAYERS_MATCH, (7, 9)),
        (EMBEDDING_MATCH, (7, 8, 9)),
        (LOSS_MATCH, (7, 8, 9)),
    ]
    assert found.coverage.steps == (7, 8, 9)
    assert found.coverage.step_evidence == ("profiler_step",)


def test_a_step_without_calls_misses_everything(compare: Callable[..., Diff]) -> None:
    later = [{**row, "t_issue_ns": 2000 + n} for n, row in enumerate(FORWARD)]
    marks = [
        {
            "rank": rank,
            "name": f"ProfilerStep#{step}",
            "start_ns": start,
            "dur_ns": 100,
            "category": "user_annotation",
        }
        for rank in (0, 1)
        for step, start in ((7, 1000), (8, 1500), (9, 2000))
    ]
    found = compare(both(*FORWARD, *later), more={"span": marks})
    assert [(short(c), c.steps) for c in found.cells if c.verdict != "match"] == [
        (("tp", "forward", "all_reduce", "bfloat16", 128, 3, 0, "missing"), (8,)),
        (("tp", "forward", "all_reduce", "float32", 32, 3, 0, "missing"), (8,)),
    ]


def test_calls_outside_steps_are_counted_apart(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD, *LAYERS), steps={"ProfilerStep#7": 6})
    assert cells(found) == ALL_MATCH
    assert (found.coverage.calls, found.coverage.calls_outside_steps) == (12, 4)


def test_ranks_that_differ_have_their_own_cells(compare: Callable[..., Diff]) -> None:
    found = compare({0: FORWARD, 1: [*FORWARD, *LOSSES[:1]]})
    assert [(short(c), c.ranks) for c in found.cells] == [
        (("tp", "forward", "all_reduce", "float32", 32, 3, 4, "excess"), (1,)),
        (LAYERS_MATCH, (0, 1)),
        (EMBEDDING_MATCH, (0, 1)),
        (LOSS_MATCH, (0,)),
    ]


def test_ranks_and_steps_of_a_cell_hold_together(compare: Callable[..., Diff]) -> None:
    """Rank 0 repeats a call in step 1, rank 1 in step 2: no cell may claim both ranks and both steps."""
    long, marks = [*FORWARD, *LOSSES[:1]], {0: (7, 6), 1: (6, 7)}
    spans = [
        {
            "rank": rank,
            "name": f"ProfilerStep#{step}",
            "start_ns": start,
            "dur_ns": end - start,
            "category": "user_annotation",
        }
        for rank, (first, _) in marks.items()
        for step, start, end in ((1, 1000, 1000 + 10 * first), (2, 1000 + 10 * first, 1130))
    ]
    found = compare({0: [*long, *FORWARD], 1: [*FORWARD, *long]}, more={"span": spans})
    assert [(c.verdict, c.ranks, c.steps, c.places) for c in found.cells if c.dtype == "float32"] == [
        ("excess", (0,), (1,), 1),
        ("excess", (1,), (2,), 1),
        ("match", (0,), (2,), 1),
        ("match", (1,), (1,), 1),
    ]


def test_a_silent_rank_misses_everything(compare: Callable[..., Diff]) -> None:
    found = compare({0: FORWARD, 1: []})
    assert [(c.calls_measured, c.verdict, c.ranks) for c in found.cells] == [
        (0, "missing", (1,)),
        (0, "missing", (1,)),
        (2, "match", (0,)),
        (1, "match", (0,)),
        (3, "match", (0,)),
    ]


def test_one_rank_of_two(compare: Callable[..., Diff]) -> None:
    found = compare({1: FORWARD})
    assert cells(found) == ALL_MATCH
    assert (found.coverage.ranks_present, found.coverage.ranks_declared) == ((1,), 2)


# -- groups of one, unknown phases -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("group", "role"), [("dp_cp", "dp_cp"), ("nobody's", None)])
def test_a_group_of_one_moves_nothing(compare: Callable[..., Diff], group: str, role: str | None) -> None:
    found = compare(both(*FORWARD, *calls(2, 5, group_id=group, group_size=1)))
    (alone,) = [c for c in found.cells if c.group_size == 1]
    assert short(alone) == (role, "other", "all_reduce", "bfloat16", 10, None, 2, "match")
    assert alone.cause is not None
    assert (alone.cause.code, alone.cause.confidence) == ("group_of_one", "proven")
    assert (alone.off_rank_bytes_measured, found.coverage.attributed, found.verdict) == (0, 1, "match")


def test_counts_on_a_group_of_one_do_not_differ(compare: Callable[..., Diff]) -> None:
    """TP 1: the loss is summed over one rank, here twice instead of three times, or not at all."""
    alone = job_with(world_size=1, tensor_model_parallel_size=1)
    for times in (2, 0):
        rows = calls(times, 8, LOSS, dtype="float32", group_size=1) + calls(1, 1, group_id="dp_cp", group_size=1)
        found = compare({0: rows}, alone, world=1)
        (loss,) = [c for c in found.cells if c.role == "tp"]
        assert (loss.calls_expected, loss.calls_measured, loss.verdict) == (3, times, "match")
        assert loss.cause is not None


TRAINING = job_with(forward_only=False)
BACK = calls(3, 64, BACKWARD)
AFTER = [
    *calls(1, 1, dtype="float32", group_id="mp"),
    *calls(1, 968, dtype="float32", group_id="dp_cp", group_size=1),
]


def test_a_training_step(compare: Callable[..., Diff]) -> None:
    """Gradients: 16/2 * 8 embedding, 8 * 24/2 + 4 * 8 attention, 2 * 8 * 32/2 mlp, 3 * 2 * 8 LayerNorms."""
    found = compare(both(*FORWARD, *BACK, *AFTER), TRAINING)
    assert cells(found) == [
        *ALL_MATCH,
        ("tp", "backward", "all_reduce", "bfloat16", 128, 3, 3, "match"),
        ("dp_cp", "other", "all_reduce", "float32", 3872, 1, 1, "match"),
        ("mp", "optimizer", "all_reduce", "float32", 4, 1, 1, "match"),
    ]


def test_calls_of_unknown_phase_are_laid_beside_all_phases(compare: Callable[..., Diff]) -> None:
    kernels = calls(6, 64, completeness="kernel_only")
    found = compare(both(*LOSSES, *kernels, *AFTER), TRAINING)
    pooled = ("tp", None, "all_reduce", "bfloat16", 128, 6, 6, "match")
    assert [c for c in cells(found) if c[0] == "tp"] == [LOSS_MATCH, pooled]
    assert found.verdict == "match"
    named = [{**row, "group_id": "?"} for row in FORWARD]  # their roles rest on other evidence, so they come later
    mixed = compare(both(*named, *kernels[:3], *AFTER), TRAINING)
    assert pooled in cells(mixed)
    assert mixed.verdict == "match"


def test_another_type_in_an_unknown_phase_is_still_a_pair(compare: Callable[..., Diff]) -> None:
    rows = calls(3, 64, completeness="kernel_only", dtype="float32")
    found = compare(both(*LOSSES, *rows))
    assert cells(found, differing=True) == [("tp", None, "all_reduce", "float32", 256, 3, 3, "excess")]


OPERATORS = [{"rank": 0, "name": "aten::mm", "category": "cpu_op", "start_ns": 1000, "dur_ns": 5}]
ENGINE = {"rank": 0, "name": "autograd::engine::evaluate_function: MmBackward0", "start_ns": 1010, "dur_ns": 5}


def test_phases_that_are_not_in_the_window_are_not_missing(compare: Callable[..., Diff]) -> None:
    """Neither the backward pass nor what follows it: norm gradients, gradients, gradient norm."""
    found = compare(both(*FORWARD), job_with(forward_only=False, qk_layernorm=True), more={"cpu_op": OPERATORS})
    assert cells(found) == ALL_MATCH
    assert found.not_in_window == ("backward", "optimizer")
    assert found.verdict == "match"


def test_an_optimizer_outside_the_window(compare: Callable[..., Diff]) -> None:
    operators = {"cpu_op": [*OPERATORS, ENGINE]}
    found = compare(both(*FORWARD, *BACK, *AFTER[1:]), TRAINING, more=operators)
    assert (found.verdict, found.not_in_window) == ("match", ("optimizer",))
    seen = compare(both(*FORWARD, *BACK, *AFTER), TRAINING, more=operators)
    assert (seen.verdict, seen.not_in_window) == ("match", ())
    assert ("mp", "optimizer", "all_reduce", "float32", 4, 1, 1, "match") in cells(seen)


def test_a_window_that_begins_behind_the_backward_pass(compare: Callable[..., Diff]) -> None:
    step = {"rank": 0, "name": "Optimizer.step#Adam.step", "start_ns": 1050, "dur_ns": 5}
    found = compare(both(*FORWARD, *AFTER), TRAINING, more={"cpu_op": [*OPERATORS, step]})
    assert (found.verdict, found.not_in_window) == ("match", ("backward",))


# -- time ------------------------------------------------------------------------------------------------------------


def kernel(start: int, dur: int, coalesce: int | None = None, **fields: Any) -> Row:
    """One communication kernel of rank 0, or another with its class."""
    row = {"rank": 0, "name": "ncclDevKernel_AllReduce", "kernel_class": "comm", "completeness": "full"}
    return {**row, "start_ns": start, "dur_ns": dur, "coalesce_id": coalesce, **fields}


def test_time_and_exposed_time(compare: Callable[..., Diff]) -> None:
    """Two 10 ns kernels of the layers; 4 ns of the first and all of the second lie under compute."""
    timed = [{**row, "time_source": "kernel", "start_ns": 2000 + 100 * i, "dur_ns": 10} for i, row in enumerate(LAYERS)]
    kernels = [
        kernel(2000, 10, 1),
        kernel(2100, 10, 2),
        kernel(1990, 12, kernel_class="gemm", name="gemm"),
        kernel(2001, 3, kernel_class="gemm", name="gemm"),
        kernel(2095, 20, kernel_class="gemm", name="gemm"),
        kernel(2006, 3, kernel_class="copy", name="copy"),
    ]
    found = compare({0: [*EMBEDDING, *timed, *LOSSES]}, more={"kernel": kernels})
    layers, embedding, _ = found.cells
    assert (layers.time_ns, layers.exposed_ns) == (20, 6)
    assert (embedding.time_ns, embedding.exposed_ns) == (None, None)
    assert layers.bus_bandwidth_bytes_per_s == 256 * 1e9 / 20
    assert embedding.bus_bandwidth_bytes_per_s is None


def test_exposed_time_is_exact_in_nanoseconds(compare: Callable[..., Diff]) -> None:
    """Beyond 2**53 a float would lose the last digit."""
    late = 2**60 + 1
    timed = [{**row, "time_source": "kernel", "start_ns": late + 10 * i, "dur_ns": 5} for i, row in enumerate(LAYERS)]
    kernels = [kernel(late, 5, 1), kernel(late + 10, 5, 2), kernel(late + 1, 1, kernel_class="gemm", name="gemm")]
    found = compare({0: [*EMBEDDING, *timed, *LOSSES]}, more={"kernel": kernels})
    assert (found.cells[0].time_ns, found.cells[0].exposed_ns) == (10, 9)


def test_the_time_of_some_calls_is_not_the_time_of_all(compare: Callable[..., Diff]) -> None:
    """The profiler's window began between the layers: the time of one of them would read as that of both."""
    timed = {"time_source": "kernel", "start_ns": 2000, "dur_ns": 5}
    rows = [*EMBEDDING, {**LAYERS[0], "completeness": "not_profiled"}, {**LAYERS[1], **timed}, *LOSSES]
    found = compare({0: rows}, more={"kernel": [kernel(2000, 5, 2)]})
    assert cells(found) == ALL_MATCH
    assert (found.cells[0].time_ns, found.cells[0].exposed_ns) == (None, None)
    assert found.cells[0].bus_bandwidth_bytes_per_s is None


def test_a_kernel_of_several_calls_counts_once(compare: Callable[..., Diff]) -> None:
    """Both layers and the first call of the loss are launched as one: the time is the first call's."""
    together = [{**row, "coalesce_id": 50, "time_source": "kernel"} for row in (*LAYERS, LOSSES[0])]
    rows = [*EMBEDDING, *together, *LOSSES[1:]]
    found = compare({0: rows}, more={"kernel": [kernel(2000, 30, 50), kernel(2040, 12, 50)]})
    assert [(c.calls_measured, c.time_ns, c.exposed_ns) for c in found.cells] == [
        (2, 42, 42),
        (1, None, None),
        (3, None, None),  # of two of the three it is not known
    ]
    assert found.coverage.kernels == found.coverage.kernels_attributed == 2


def test_calls_without_a_coalesce_id_have_their_own_times(compare: Callable[..., Diff]) -> None:
    rows = [{**row, "coalesce_id": None, "time_source": "backend_range", "dur_ns": 7} for row in FORWARD]
    found = compare(both(*rows))
    assert [(c.time_ns, c.exposed_ns) for c in found.cells] == [(14, None), (7, None), (21, None)]


def test_times_are_means_over_ranks_and_steps(compare: Callable[..., Diff]) -> None:
    def taking(dur: int) -> list[Row]:
        return [{**row, "time_source": "backend_range", "dur_ns": dur} for row in FORWARD]

    found = compare({0: [*taking(1), *taking(2)], 1: [*taking(3), *taking(6)]}, steps={"ta:step 1": 6, "ta:step 2": 6})
    assert [c.time_ns for c in found.cells] == [6, 3, 9]


# -- avoidable bytes -------------------------------------------------------------------------------------------------


def regathers(number: int) -> list[Row]:
    """So many backward gathers of 64 elements; 5 are wanted, 3 of them to gather inputs again."""
    return calls(number, 32, BACKWARD, op="all_gather", out_elems=64)


@pytest.mark.parametrize(("number", "avoidable"), [(6, 3 * 64), (7, 3 * 64), (5, 2 * 64), (3, 0), (0, 0)])
def test_avoidable_bytes_of_the_calls_that_were_made(compare: Callable[..., Diff], number: int, avoidable: int) -> None:
    """Six gathers are wanted, three of which repeat; missing ones count as the ones that need not be sent."""
    job = job_with(forward_only=False, sequence_parallel=True)
    found = compare(both(*GATHERS, *SCATTERS, *LOSSES, *regathers(number)), job)
    (cell,) = [c for c in found.cells if (c.phase, c.op) == ("backward", "all_gather")]
    assert (cell.calls_expected, cell.avoidable_bytes) == (6, avoidable)
    assert cell.avoidable == (("sp_input_regather", ""),)


# -- sizes that depend on the routing --------------------------------------------------------------------------------

EXPERTS = job_with(
    tensor_model_parallel_size=1, expert_model_parallel_size=2, num_experts=4, moe_router_topk=2,
    moe_token_dispatcher_type="alltoall",
)  # fmt: skip
EP_GROUPS: dict[str, tuple[str | None, list[int]]] = {
    "ep": ("EXPERT_MODEL_PARALLEL_GROUP", [0, 1]),
    "tp_ep": ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", [0, 1]),
}
COUNTS = calls(1, 4, ["f"], op="all_gather", dtype="int64", out_elems=8, group_id="tp_ep")


def exchange(rank: int, sent: list[int], received: list[int], width: int = 8, **fields: Any) -> Row:
    """One all-to-all of these rows to and from each rank."""
    (row,) = calls(
        1,
        sum(sent) * width,
        ["f"],
        op="all_to_all",
        out_elems=sum(received) * width,
        in_splits=sent,
        out_splits=received,
        group_id="ep",
        group_rank=rank,
        **fields,
    )
    return row


def routed(rank: int, sent: list[int], received: list[int]) -> list[Row]:
    """A layer of one rank: 8 tokens to 2 experts each are 16 rows of 8, with a probability each, there and back."""
    there = exchange(rank, sent, received)
    return [*COUNTS, there, exchange(rank, sent, received, 1), exchange(rank, received, sent)]


UNEVEN = {0: routed(0, [6, 10], [6, 4]), 1: routed(1, [4, 12], [10, 12])}


def test_rows_that_the_router_decides(compare: Callable[..., Diff]) -> None:
    """Rank 0 gets 10 rows and rank 1 gets 22, where balanced routing gives 16; 16 go out either way."""
    found = compare(UNEVEN, EXPERTS, groups=EP_GROUPS)
    assert (found.verdict, found.exit_code) == ("match", 0)
    rows, probabilities = [c for c in found.cells if c.role == "ep"]
    assert (rows.components, rows.calls_expected, rows.calls_measured) == (
        ("experts.dispatch", "experts.combine"),
        2,
        2,
    )
    assert (rows.varies, rows.spread, rows.conserved, rows.ranks) == (True, (32, 20, 44), True, (0, 1))
    assert (rows.payload_bytes_each, rows.payload_bytes_expected, rows.off_rank_bytes_expected) == (None, 512, 256)
    # rank 0 sends 10 of 16 rows away and 4 of 10 back, rank 1 sends 4 of 16 and 10 of 22; a row is 16 bytes
    assert rows.off_rank_bytes_measured == Fraction((10 + 4) + (4 + 10), 2) * 16
    assert (probabilities.components, probabilities.spread) == (("experts.dispatch probabilities",), (16, 10, 22))


def test_roles_of_routed_calls_by_their_width(compare: Callable[..., Diff]) -> None:
    """Groups without a name: no other expected exchange has rows of 8 elements, or of one."""
    nameless = {
        rank: [
            {**row, "group_id": "?", "group_size": None, "group_rank": None} if row["op"] == "all_to_all" else row
            for row in rows
        ]
        for rank, rows in UNEVEN.items()
    }
    found = compare(nameless, EXPERTS, groups={**EP_GROUPS, "?": (None, [0, 1])})
    cells_ = [c for c in found.cells if c.role == "ep"]
    assert [(c.verdict, c.conserved, c.role_evidence) for c in cells_] == [("match", True, ("pattern",))] * 2
    # which rows stay is told by the rank's place in the group: as in the test above
    assert cells_[0].off_rank_bytes_measured == Fraction((10 + 4) + (4 + 10), 2) * 16
    assert found.exit_code == 0


def test_own_rows_are_exact(compare: Callable[..., Diff]) -> None:
    """A rank that sends 14 of its 16 rows has dropped two."""
    dropped = {0: routed(0, [4, 10], [4, 4]), 1: routed(1, [4, 12], [10, 12])}
    found = compare(dropped, EXPERTS, groups=EP_GROUPS)
    assert [(c.ranks, c.verdict, c.cause and c.cause.code) for c in found.cells if c.role == "ep"] == [
        ((0,), "missing", "capacity"),
        ((0,), "missing", "capacity"),
        ((1,), "match", None),
        ((1,), "match", None),
    ]


def test_routed_calls_are_counted(compare: Callable[..., Diff]) -> None:
    found = compare({r: [*rows, rows[1]] for r, rows in UNEVEN.items()}, EXPERTS, groups=EP_GROUPS)
    (cell,) = [c for c in found.cells if c.verdict == "excess"]
    assert (cell.role, cell.calls_expected, cell.calls_measured) == ("ep", 2, 3)


def test_rows_sent_are_rows_received(compare: Callable[..., Diff]) -> None:
    """Rank 1 gets one row more than was sent to it, and sends it on."""
    more = {0: UNEVEN[0], 1: routed(1, [4, 12], [11, 12])}
    found = compare(more, EXPERTS, groups=EP_GROUPS)
    differing = [c for c in found.cells if c.verdict != "match"]
    # one row too many arrives with the probabilities; the rows come back, so there both sides grow alike
    assert [(c.components, c.conserved, c.cause and c.cause.code) for c in differing] == [
        (("experts.dispatch probabilities",), False, "rows_not_conserved")
    ]


def test_conservation_needs_every_rank(compare: Callable[..., Diff]) -> None:
    found = compare({1: UNEVEN[1]}, EXPERTS, groups=EP_GROUPS)
    assert [(c.verdict, c.conserved) for c in found.cells if c.role == "ep"] == [("match", None)] * 2


def test_a_width_that_was_not_recorded(compare: Callable[..., Diff]) -> None:
    """Without splits the expected size that is nearest tells hidden states from probabilities."""
    bare = {r: [{**row, "in_splits": None, "out_splits": None} for row in rows] for r, rows in UNEVEN.items()}
    found = compare(bare, EXPERTS, groups=EP_GROUPS)
    assert [(c.verdict, c.calls_measured) for c in found.cells if c.role == "ep"] == [("match", 2), ("match", 1)]


# -- outside torch.distributed ---------------------------------------------------------------------------------------

OVERLAPPED = job_with(sequence_parallel=True, tp_comm_overlap=True)
OUTSIDE = ("tp", "forward", "reduce_scatter", "bfloat16", 128, 2, 0, "unknown")


def test_what_torch_does_not_carry_is_not_missing(compare: Callable[..., Diff]) -> None:
    """userbuffers scatter behind both layers; the embedding is still torch's."""
    found = compare(both(*GATHERS, *SCATTERS[:1], *LOSSES), OVERLAPPED)
    assert [(short(c), c.reason, c.transport) for c in found.cells if c.verdict != "match"] == [
        (OUTSIDE, "not carried by torch.distributed: userbuffers", "userbuffers")
    ]
    assert (found.verdict, found.exit_code) == ("match", 0)


def test_kernels_of_the_transport_are_named(compare: Callable[..., Diff]) -> None:
    kernels = [kernel(2000 + 100 * i, 10, name="userbuffers_fp16_sum_inplace_gpu_rr_rs") for i in range(2)]
    found = compare(both(*GATHERS, *SCATTERS[:1], *LOSSES), OVERLAPPED, more={"kernel": kernels}, min_coverage=0)
    (cell,) = [c for c in found.cells if c.verdict == "unknown"]
    assert cell.reason == "not carried by torch.distributed: userbuffers (the run holds 2 kernels of it)"


def test_calls_that_torch_should_not_have_made(compare: Callable[..., Diff]) -> None:
    found = compare(both(*GATHERS, *SCATTERS, *LOSSES), OVERLAPPED)
    assert [(short(c), c.cause and c.cause.code, c.related) for c in found.cells if c.verdict != "match"] == [
        (("tp", "forward", "reduce_scatter", "bfloat16", 128, 1, 3, "excess"), "tp_comm_overlap_off", (1,)),
        (OUTSIDE, "tp_comm_overlap_off", (0,)),
    ]


# -- the first step --------------------------------------------------------------------------------------------------

REPLICAS = job_with(
    tensor_model_parallel_size=1, forward_only=False, overlap_grad_reduce=True, padded_vocab_size=16
)  # fmt: skip
DP_GROUPS: dict[str, tuple[str | None, list[int]]] = {"dp_cp": ("DATA_PARALLEL_GROUP_WITH_CP", [0, 1])}
# 16 * 8 embedding, 8 * 24 + 8 * 8 attention, 2 * 8 * 32 mlp, 3 * 2 * 8 LayerNorms
GRADIENTS = 128 + 256 + 512 + 48
AFTER_BACKWARD = calls(1, GRADIENTS, dtype="float32", group_id="dp_cp")
ACCUMULATE = ["torch::autograd::AccumulateGrad", "autograd::engine::evaluate_function: torch::autograd::AccumulateGrad"]
IN_BACKWARD = calls(1, GRADIENTS, ACCUMULATE, dtype="float32", group_id="dp_cp")


@pytest.mark.parametrize(
    ("steps", "first", "differing"),
    [
        ((AFTER_BACKWARD, IN_BACKWARD), 3, ()),
        ((IN_BACKWARD, IN_BACKWARD), None, ()),
        ((IN_BACKWARD, AFTER_BACKWARD), None, (4,)),
        ((AFTER_BACKWARD, AFTER_BACKWARD), 3, (4,)),
    ],
)
def test_a_first_step(
    compare: Callable[..., Diff], steps: tuple[list[Row], list[Row]], first: int | None, differing: tuple[int, ...]
) -> None:
    """In the first step of a process gradients are summed behind the backward pass: in the earliest step, and no other."""
    marks = {"ProfilerStep#3": len(steps[0]), "ProfilerStep#4": len(steps[1])}
    found = compare(both(*steps[0], *steps[1]), REPLICAS, steps=marks, groups=DP_GROUPS)
    assert found.first_step == first
    assert {s for c in found.cells for s in c.steps if c.verdict != "match"} == set(differing)


# -- causes of gradients that differ ---------------------------------------------------------------------------------

FLOATS: Row = {"dtype": "float32", "group_id": "dp_cp"}
SCATTERED = calls(1, 1024, op="reduce_scatter", dtype="float32", out_elems=512, group_id="dp_cp")
GATHERED = calls(1, 512, op="all_gather", out_elems=1024, group_id="dp_cp")


@pytest.mark.parametrize(
    ("rows", "changes", "given"),
    [
        pytest.param(
            AFTER_BACKWARD,
            {"use_distributed_optimizer": True},
            [("all_reduce", "distributed_optimizer_off"), ("all_gather", "distributed_optimizer_off")],
            id="no distributed optimizer",
        ),
        pytest.param(
            [*SCATTERED, *GATHERED],
            {},
            [("reduce_scatter", "distributed_optimizer_on"), ("all_gather", "distributed_optimizer_on")],
            id="a distributed optimizer",
        ),
        pytest.param(
            calls(2, GRADIENTS // 2, **FLOATS),
            {},
            [("all_reduce", "bucket_size")],
            id="two buckets",
        ),
        pytest.param(
            [*calls(1, GRADIENTS - 100, **FLOATS), *calls(1, 100, **FLOATS)],
            {},
            [("all_reduce", "bucket_size"), ("all_reduce", "bucket_size")],
            id="unequal buckets",
        ),
        pytest.param(
            AFTER_BACKWARD, {"grad_reduce_in_bf16": True}, [("all_reduce", "fp32_reduction")], id="in 32 bits"
        ),
        pytest.param(IN_BACKWARD, {}, [("all_reduce", "overlap_grad_reduce_on")] * 2, id="overlapped"),
    ],
)
def test_causes_of_gradients(
    compare: Callable[..., Diff], rows: list[Row], changes: dict[str, Any], given: list[tuple[str, str]]
) -> None:
    """Two replicas; expected is one all-reduce of 944 floats, unless the job says otherwise."""
    job = job_with(tensor_model_parallel_size=1, forward_only=False, **changes)
    found = compare(both(*rows), job, groups=DP_GROUPS)
    differing = [c for c in found.cells if c.verdict in ("excess", "missing", "unexpected") and c.role == "dp_cp"]
    assert [(c.op, c.cause and c.cause.code) for c in differing] == given


# -- messages between stages -----------------------------------------------------------------------------------------

STAGES = job_with(
    tensor_model_parallel_size=1, pipeline_model_parallel_size=4, world_size=4, num_layers=4, forward_only=False
)  # fmt: skip
PP_GROUPS: dict[str, tuple[str | None, list[int]]] = {"pp": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1, 2, 3])}


def messages(peers: tuple[int | None, int | None], **fields: Any) -> list[Row]:
    """What stage 1 exchanges for one micro-batch with the previous and the next stage."""
    previous, following = peers
    common: Row = {"group_id": "pp", "group_size": 4, **fields}
    return [
        *calls(1, 64, op="recv", peer=previous, **common),
        *calls(1, 64, op="send", peer=following, **common),
        *calls(1, 64, op="recv", peer=following, **common),
        *calls(1, 64, op="send", peer=previous, **common),
    ]


def test_the_peer_tells_activations_from_gradients(compare: Callable[..., Diff]) -> None:
    found = compare({1: messages((0, 2))}, STAGES, world=4, groups=PP_GROUPS, min_coverage=0)
    assert [short(c) for c in found.cells if c.role == "pp"] == [
        ("pp", phase, op, "bfloat16", 128, 1, 1, "match")
        for phase in ("forward", "backward")
        for op in ("recv", "send")
    ]


def test_without_a_peer_both_are_one_cell(compare: Callable[..., Diff]) -> None:
    found = compare({1: messages((None, None))}, STAGES, world=4, groups=PP_GROUPS, min_coverage=0)
    assert [short(c) for c in found.cells if c.role == "pp"] == [
        ("pp", None, op, "bfloat16", 128, 2, 2, "match") for op in ("recv", "send")
    ]
    assert {c.components for c in found.cells if c.role == "pp"} == {("activations", "gradients")}


def test_messages_to_the_wrong_side(compare: Callable[..., Diff]) -> None:
    """Two activations sent back instead of on: one too many there, one too few here."""
    rows = messages((0, 2))
    rows[1]["peer"] = 0
    found = compare({1: rows}, STAGES, world=4, groups=PP_GROUPS, min_coverage=0)
    assert [short(c) for c in found.cells if c.role == "pp" and c.verdict != "match"] == [
        ("pp", "forward", "send", "bfloat16", 128, 1, 0, "missing"),
        ("pp", "backward", "send", "bfloat16", 128, 1, 2, "excess"),
    ]


def test_kinds_of_several_roles_that_look_alike(compare: Callable[..., Diff]) -> None:
    """The norms of the dense and of the expert gradients: one number each, on groups that the recording does not tell."""
    job = job_with(
        forward_only=False, tensor_model_parallel_size=1, expert_model_parallel_size=2, num_experts=4, moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
    )  # fmt: skip
    found = compare(both(*calls(2, 1, dtype="float32", group_id="?", group_size=None)), job, min_coverage=0)
    norms = [c for c in found.cells if c.components == ("gradient norm",)]
    assert [(c.role, c.calls_measured, c.verdict, c.role_evidence) for c in norms] == [
        ("mp", 1, "match", ("shared pattern",)),
        ("tp_ep_pp", 1, "match", ("shared pattern",)),
    ]


# -- coverage and exit codes -----------------------------------------------------------------------------------------


def test_coverage(compare: Callable[..., Diff]) -> None:
    timed = [{**row, "time_source": "kernel"} for row in FORWARD]
    kernels = [
        *(kernel(2000 + 100 * i, 10, i) for i in range(6)),
        kernel(1, 5, completeness="launched_before_window"),
        kernel(3000, 50, kernel_class="gemm", name="gemm"),
    ]
    c = compare({0: timed, 1: FORWARD}, more={"kernel": kernels}).coverage
    assert c.ranks_present == (0, 1)
    assert (c.ranks_declared, c.steps, c.step_evidence) == (2, (0,), ("window",))
    assert (c.calls, c.calls_outside_steps, c.calls_of_unknown_bytes) == (12, 0, 0)
    assert (c.kernels, c.kernels_attributed, c.kernels_before_window) == (6, 6, 1)
    assert (c.kernel_time_ns, c.kernel_time_attributed_ns) == (60, 60)
    assert (c.bytes_known, c.bytes_attributed) == (960, 960)
    assert (c.attributed, c.judged, c.unattributed) == (1, 1, ())
    assert c.role_evidence == (("description", 12),)
    assert c.import_status == "complete"


def test_the_unattributed_share_decides_even_if_cells_differ(compare: Callable[..., Diff]) -> None:
    """4 of 484 bytes have no role: 99.17 %."""
    rows = both(*FORWARD, *LOSSES[:1], *calls(1, 2, group_id="?"))
    found = compare(rows)
    share = 1 - 4 / (480 + 32 + 4)
    assert found.coverage.attributed == found.coverage.judged == pytest.approx(share)
    assert (found.verdict, found.exit_code) == ("differs", 1)
    strict = compare(rows, min_coverage=0.995)
    assert (strict.verdict, strict.exit_code) == ("cannot be judged", 3)
    assert compare(both(*FORWARD, *calls(1, 2, group_id="?"))).exit_code == 0


def test_kernels_that_no_call_explains(compare: Callable[..., Diff]) -> None:
    """Bytes say 100 %, kernels 6 of 8, their time 60 of 140 ns: the lowest counts."""
    kernels = [
        *(kernel(2000 + 100 * i, 10, i) for i in range(6)),
        *(kernel(3000 + 100 * i, 40, name="deep_ep::intranode::dispatch") for i in range(2)),
    ]
    timed = [{**row, "time_source": "kernel"} for row in FORWARD]
    found = compare({0: timed, 1: FORWARD}, more={"kernel": kernels})
    assert found.coverage.attributed == 60 / 140
    assert found.coverage.unattributed == (
        Unattributed("deep_ep::intranode::dispatch", 2, 80, "no recorded call explains it"),
    )
    assert {c.verdict for c in found.cells} == {"match"}
    assert found.exit_code == 3
    assert compare({0: timed, 1: FORWARD}, more={"kernel": kernels}, min_coverage=0.4).exit_code == 0


def test_kernels_of_unknown_role_are_named(compare: Callable[..., Diff]) -> None:
    rows = [*FORWARD, *calls(1, 2, group_id="?", time_source="kernel", coalesce_id=77)]
    found = compare({0: rows, 1: FORWARD}, more={"kernel": [kernel(2000, 9, 77)]})
    assert found.coverage.unattributed == (Unattributed("ncclDevKernel_AllReduce", 1, 9, "role of its group unknown"),)


def test_nothing_known_is_no_match(compare: Callable[..., Diff]) -> None:
    """No element type anywhere: no byte is known, and no cell has a verdict."""
    found = compare(both(*({**row, "dtype": None} for row in FORWARD)))
    assert {c.verdict for c in found.cells} == {"unknown"}
    assert (found.coverage.attributed, found.coverage.judged, found.exit_code) == (1, 0, 3)


def test_calls_without_bytes_are_judged_too(compare: Callable[..., Diff]) -> None:
    alone = job_with(world_size=2, micro_batch_size=2)
    barrier = calls(1, 0, op="barrier", dtype=None, in_elems=None, out_elems=None, group_id="tp")
    found = compare(both(*barrier), alone)
    assert [c.verdict for c in found.cells] == ["missing", "missing", "unexpected"]
    assert (found.coverage.attributed, found.coverage.judged, found.exit_code) == (1, 1, 1)


# -- the job ---------------------------------------------------------------------------------------------------------


def test_the_intended_job_is_used_and_conflicts_are_said(compare: Callable[..., Diff]) -> None:
    captured = job_with(num_layers=2)
    stored = {schema.META_JOB_CAPTURED: captured, schema.META_JOB_INTENDED: JOB}
    found = compare(both(*FORWARD), None, metadata=stored)
    assert (found.job_used, found.verdict) == ("intended", "match")
    assert found.job_conflicts == (
        JobConflict("num_layers", 1, 2, "num_layers: intended 1, captured 2 (the diff uses intended)"),
    )
    given = compare(both(*FORWARD), captured, metadata=stored)
    assert (given.job_used, given.verdict, given.job_conflicts) == ("intended", "differs", ())
    alone = compare(both(*FORWARD), None, metadata={schema.META_JOB_CAPTURED: JOB})
    assert (alone.job_used, alone.verdict, alone.job_conflicts) == ("captured", "match", ())


def test_groups_that_contradict_the_layout(compare: Callable[..., Diff]) -> None:
    """Declared TP 1 x DP 2; the run's tensor-parallel groups have two ranks."""
    found = compare(both(*FORWARD), job_with(tensor_model_parallel_size=1))
    assert found.job_conflicts == (
        JobConflict("layout", "DP2", "TP2", "declared DP2, observed groups imply TP2 (proven)"),
        JobConflict("groups of role tp", 1, 2, "declared tp groups of 1 rank, observed groups of 2"),
        JobConflict("groups of role dp_cp", 2, 1, "declared dp_cp groups of 2 ranks, observed groups of 1"),
        JobConflict("groups of role mp", 1, 2, "declared mp groups of 1 rank, observed groups of 2"),
    )


def test_messages_that_contradict_the_schedule(compare: Callable[..., Diff]) -> None:
    """Two chunks a stage and 2 micro-batches, forward only: the first stage sends both chunks of each, 4; recorded is 1."""
    job = job_with(
        tensor_model_parallel_size=1, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, num_layers=4,
        num_microbatches=2,
    )  # fmt: skip
    groups = {"pp": ("PIPELINE_MODEL_PARALLEL_GROUP", [0, 1])}
    sent = calls(1, 64, op="send", group_id="pp", peer=1, out_elems=None)
    found = compare({0: sent}, job, groups=groups, steps={"ProfilerStep#1": 1})
    assert (
        JobConflict(
            "schedule",
            4,
            1,
            "declared a pipeline schedule in which stage 0 sends 4 messages a step, observed 1",
        )
        in found.job_conflicts
    )


def test_the_world_size_is_the_runs_unless_stated(compare: Callable[..., Diff]) -> None:
    found = compare(both(*FORWARD), job_with(world_size=None), world=2)
    assert (found.job.world_size, found.coverage.ranks_declared, found.verdict) == (2, 2, "match")
    larger = compare(both(*FORWARD), job_with(world_size=4), world=2)
    assert larger.coverage.ranks_declared == 4
    assert larger.job_conflicts[0] == JobConflict(
        "world_size", 4, 2, "world_size: the job says 4, the run recorded 2 (the diff uses the job's)"
    )


def test_the_releases_that_fit(compare: Callable[..., Diff]) -> None:
    """With sequence parallelism the embedding is reduce-scattered since 0.8, and all-reduced before."""
    unknown = job_with(sequence_parallel=True, megatron_core_version=None)
    new = compare(both(*GATHERS, *SCATTERS, *LOSSES), unknown)
    assert (new.versions_tried, new.version, new.verdict) == (("<=0.7", ">=0.8"), ">=0.8", "match")
    old = compare(both(*GATHERS, *SCATTERS[:2], *EMBEDDING, *LOSSES), unknown)
    assert (old.versions_tried, old.version, old.verdict) == (("<=0.7", ">=0.8"), "<=0.7", "match")
    neither = compare(both(*GATHERS, *LOSSES), unknown)
    assert (neither.version, neither.verdict) == (">=0.8", "differs")
    said = compare(both(*GATHERS, *SCATTERS, *LOSSES), SP)
    assert (said.versions_tried, said.version) == (("0.16",), "0.16")
    assert said.versions_apart == ()


def test_what_tells_the_other_releases_apart(compare: Callable[..., Diff]) -> None:
    unknown = job_with(sequence_parallel=True, megatron_core_version=None)
    new = compare(both(*GATHERS, *SCATTERS, *LOSSES), unknown)
    (apart,) = new.versions_apart
    assert (apart.releases, [short(c) for c in apart.cells]) == (
        "<=0.7",
        [
            ("tp", "forward", "reduce_scatter", "bfloat16", 128, 2, 3, "excess"),
            ("tp", "forward", "all_reduce", "bfloat16", 128, 1, 0, "missing"),
        ],
    )
    assert apart.cells[1].components == ("embedding",)


def test_the_documents_rules(compare: Callable[..., Diff]) -> None:
    """It knows no embedding and no loss; which group a call is on does not depend on it."""
    rows = both(*EMBEDDING, *LAYERS, *calls(3, 8, ["f"], dtype="float32", group_id="?"))
    found = compare(rows, rules="document")
    assert [(short(c), c.cause and c.cause.code) for c in found.cells] == [
        (("tp", "forward", "all_reduce", "bfloat16", 128, 0, 1, "unexpected"), "not_in_document"),
        (("tp", "forward", "all_reduce", "float32", 32, 0, 3, "unexpected"), "not_in_document"),
        (LAYERS_MATCH, None),
    ]
    assert found.exit_code == 1


# -- errors ----------------------------------------------------------------------------------------------------------


def test_without_a_job(compare: Callable[..., Diff], tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        compare(both(*FORWARD), None)
    assert str(error.value) == (
        f"{tmp_path}/run0.parquet: no job is known for this run, so nothing can be expected of it. Give --job FILE (TOML, "
        "YAML, a Megatron log or command line)."
    )


def test_without_calls_everything_is_missing(compare: Callable[..., Diff]) -> None:
    found = compare({0: []})
    assert {(c.calls_measured, c.verdict) for c in found.cells} == {(0, "missing")}
    assert (found.verdict, found.exit_code) == ("differs", 1)


def test_without_a_complete_step_nothing_can_be_judged(compare: Callable[..., Diff]) -> None:
    cut = {"rank": 0, "source": "hook", "import_status": "partial", "window_start_ns": 0, "host_start_ns": 0}
    found = compare({0: FORWARD}, more={"rank": [cut]})
    assert (found.cells, found.verdict, found.exit_code) == ((), "cannot be judged", 3)
    assert found.coverage.calls_outside_steps == len(FORWARD)


def test_conflicts_are_named_without_a_complete_step_too(compare: Callable[..., Diff]) -> None:
    cut = {"rank": 0, "source": "hook", "import_status": "partial", "window_start_ns": 0, "host_start_ns": 0}
    metadata = {schema.META_JOB_CAPTURED: job_with(num_layers=3)}
    found = compare({0: FORWARD}, more={"rank": [cut]}, metadata=metadata)
    assert [(c.field, c.intended, c.captured) for c in found.job_conflicts] == [("num_layers", 1, 3)]


def test_without_a_rank_there_is_nothing_to_expect(compare: Callable[..., Diff], tmp_path: Path) -> None:
    with pytest.raises(InputError) as error:
        compare({}, more={"rank": [{"rank": None, "source": "kineto", "window_start_ns": 0, "host_start_ns": 0}]})
    assert str(error.value) == (
        f"{tmp_path}/run0.parquet: no rank is known in it, so nothing can be expected of it. Import the trace with --rank N."
    )


def test_a_rank_outside_the_world(compare: Callable[..., Diff]) -> None:
    with pytest.raises(JobError) as error:
        compare({0: FORWARD, 5: FORWARD})
    assert str(error.value) == ("world_size=2: the run holds rank 5. Correct the job file's world_size or degrees.")


def test_a_size_that_the_job_does_not_say(compare: Callable[..., Diff]) -> None:
    with pytest.raises(JobError, match="the job does not say hidden_size: give it in the job file"):
        compare(both(*FORWARD), job_with(hidden_size=None))
    with pytest.raises(JobError, match="the job does not say world_size"):
        compare(both(*FORWARD), job_with(world_size=None), world=None)


def test_a_rank_recorded_twice_is_refused(compare: Callable[..., Diff]) -> None:
    again = {"rank": 0, "source": "kineto", "source_file": "second.json", "world_size": 2, "window_start_ns": 0}
    with pytest.raises(InputError) as caught:
        compare({0: FORWARD, 1: FORWARD}, more={"rank": [again]})
    assert str(caught.value).partition(": ")[2] == (
        "rank 0 was recorded more than once, in an unnamed file and second.json, so its traffic would count twice. Open "
        "the files of one recording only."
    )
