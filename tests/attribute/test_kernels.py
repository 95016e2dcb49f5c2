"""The place of kernels: what host ranges say, how they nest, and the view kernel of tiny runs worked out by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.attribute.kernels import (
    BACKWARD,
    CHECKPOINT,
    FUNCTION,
    KERNEL_COLUMNS,
    MARK,
    NOWHERE,
    OPTIMIZER,
    PLACE,
    SCRIPT,
    Place,
    Said,
    changes,
    component_of,
    inside,
    of_kernels,
    said_by,
)
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.run import Run

OpenRun = Callable[..., Run]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("Optimizer.step#Adam.step", OPTIMIZER),
        ("CheckpointFunctionBackward", CHECKPOINT),
        ("autograd::engine::evaluate_function: MulBackward0", BACKWARD),
        ("MulBackward0", BACKWARD),
        ("FSDP::post_backward_reduce", BACKWARD),
        ("LinearWithGradAccumulationAndAsyncCommunication", FUNCTION),
        ("nn.Module: ParallelMLP_0", PLACE),
        ("ta:microbatch 2", MARK),
        ("megatron/core/transformer/moe/experts.py(80): forward", SCRIPT),
        ("megatron/training/training.py(80): train", None),
        ("aten::convolution_backward", None),
        ("aten::mm", None),
        ("cudaLaunchKernel", None),
        ("ProfilerStep#3", None),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", None),
    ],
)
def test_what_a_range_decides(name: str, kind: int | None) -> None:
    found = said_by(name)
    assert (None if found is None else found.kind) == kind


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("ta:microbatch 2", {"microbatch": 2, "microbatch_evidence": "mark"}),
        ("ta:layer 5", {"layer": 5, "layer_evidence": "mark"}),
        ("ta:forward", {"phase": "forward", "phase_evidence": "mark"}),
        ("ta:phase optimizer", {"phase": "optimizer", "phase_evidence": "mark"}),
        ("nn.Module: SelfAttention_4", {"component": "attention", "component_evidence": "module"}),
        ("nn.Module: GPTModel_0", {}),
        ("a/moe/router.py(9): forward", {"component": "router", "component_evidence": "call_path"}),
        ("_VocabParallelCrossEntropy", {"component": "loss", "tensor_parallel": True}),
        ("autograd::engine::evaluate_function: _LinearBackward", {"tensor_parallel": True}),
    ],
)
def test_what_a_range_says(name: str, facts: dict[str, Any]) -> None:
    found = said_by(name)
    assert found is not None
    assert found.facts == Place(**facts)


@pytest.mark.parametrize(
    ("name", "component"),
    [
        ("TEDotProductAttention", "attention"), ("attention", "attention"), ("MLP", "mlp"), ("TEGroupedMLP", "experts"),
        ("experts", "experts"), ("MoELayer", "experts"), ("TopKRouter", "router"), ("RMSNorm", "norm"),
        ("LanguageModelEmbedding", "embedding"), ("CrossEntropyLoss", "loss"), ("ColumnParallelLinear", None),
        ("LayerNormColumnParallelLinear", None), ("TransformerLayer", None),
    ],
)  # fmt: skip
def test_components(name: str, component: str | None) -> None:
    assert component_of(name) == component


# nesting ------------------------------------------------------------------------------------------------------------------

KINDS = [Said(kind) for kind in range(7)]


def phases(ranges: list[tuple[int, int, int]]) -> list[tuple[int, str | None]]:
    """Times at which the phase of one thread changes."""
    starts, ends, kinds = ([r[i] for r in ranges] for i in range(3))
    found = changes([1] * len(ranges), starts, ends, kinds, KINDS)
    said = [(int(t), found.places[p].phase) for t, p in zip(found.at_ns, found.place, strict=True)]
    return [s for i, s in enumerate(said) if s[1] != (said[i - 1][1] if i else None)]


@pytest.mark.parametrize(
    ("ranges", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param(
            [(10, 50, PLACE), (20, 30, FUNCTION), (60, 70, OPTIMIZER)],
            [(10, "forward"), (50, None), (60, "optimizer"), (70, None)],
            id="modules, then the optimizer",
        ),
        pytest.param(
            [(10, 90, BACKWARD), (10, 80, CHECKPOINT), (20, 40, FUNCTION), (50, 70, BACKWARD)],
            [(10, "recompute"), (50, "backward"), (70, "recompute"), (80, "backward"), (90, None)],
            id="a checkpoint repeats its forward work, then goes backward",
        ),
        pytest.param(
            [(10, 40, BACKWARD), (20, 30, FUNCTION)],
            [(10, "backward"), (20, "recompute"), (30, "backward"), (40, None)],
            id="forward work in the backward pass",
        ),
        pytest.param(
            [(10, 20, PLACE), (20, 30, BACKWARD)], [(10, "forward"), (20, "backward"), (30, None)], id="touching"
        ),
        pytest.param([(10, 20, PLACE), (15, 30, PLACE)], [(10, "forward"), (20, None)], id="badly nested: cut"),
        pytest.param([(10, 20, MARK), (12, 18, SCRIPT)], [], id="marks and files say no phase by themselves"),
    ],
)
def test_phases_of_a_thread(ranges: list[tuple[int, int, int]], expected: list[tuple[int, str | None]]) -> None:
    assert phases(ranges) == expected


def test_inner_parts_of_experts_and_attention_stay_theirs() -> None:
    experts, mlp, norm = (said_by(f"nn.Module: {name}_0") for name in ("SequentialMLP", "MLP", "RMSNorm"))
    assert experts is not None
    assert mlp is not None
    assert norm is not None
    assert inside(inside(NOWHERE, experts), mlp).component == "experts"
    assert inside(inside(NOWHERE, mlp), norm).component == "norm"


def by_instants(ranges: Iterable[tuple[int, int, int]], end: int) -> Iterator[tuple[str | None, int | None]]:
    """Phase and micro-batch at each instant by walking down from the outermost range that holds it."""
    listed = list(ranges)
    for t in range(end):
        place = NOWHERE
        for start, stop, word in listed:
            if start <= t < stop:
                place = inside(place, WORDS[word])
        yield place.phase, place.microbatch


WORDS = [*KINDS[:5], Said(MARK, Place(microbatch=1, microbatch_evidence="mark")), Said(MARK, Place(microbatch=2))]


@pytest.mark.parametrize("seed", range(4))
def test_nesting_by_instants(seed: int) -> None:
    """Ranges that nest, in random trees on two threads: the same place at every instant as by walking down."""
    chance = random.Random(seed)

    def grow(low: int, high: int, deep: int) -> Iterator[tuple[int, int, int]]:
        at = low
        while deep and at < high and chance.random() < 0.9:
            start = chance.randrange(at, high)
            stop = chance.randrange(start + 1, high + 1)
            yield start, stop, chance.randrange(len(WORDS))
            yield from grow(start, stop, deep - 1)
            at = stop

    trees = {tid: [(0, 110, 4), *grow(0, 110, 6)] for tid in (4, 9)}
    rows = [(tid, *r) for tid, tree in trees.items() for r in tree]
    tids, starts, ends, words = (list(column) for column in zip(*rows, strict=True))
    found = changes(tids, starts, ends, words, WORDS)
    for tid, tree in trees.items():
        mine = {int(t): found.places[p] for i, t, p in zip(*found[:3], strict=True) if i == tid}
        now, seen = NOWHERE, []
        for t in range(120):
            now = mine.get(t, now)
            seen.append((now.phase, now.microbatch))
        assert seen == list(by_instants(tree, 120))


# runs ---------------------------------------------------------------------------------------------------------------------

RANK = {"rank": 0, "window_start_ns": 0, "window_end_ns": 1000, "host_start_ns": 0, "import_status": "complete"}


class Rows(dict[str, list[dict[str, Any]]]):
    """Rows of rank 0 in one step [0, 1000)."""

    def __init__(self) -> None:
        super().__init__(cpu_op=[], kernel=[], comm_record=[], process_group=[], rank=[RANK])
        self["span"] = [
            {"rank": 0, "name": "ProfilerStep#1", "category": "user_annotation", "start_ns": 0, "dur_ns": 1000}
        ]

    def range(self, name: str, start: int, end: int, tid: int = 1, **more: Any) -> None:
        self["cpu_op"].append({"rank": 0, "name": name, "start_ns": start, "dur_ns": end - start, "tid": tid, **more})

    def launch(self, what: str, at: int, tid: int = 1, **more: Any) -> None:
        """A kernel of this class, launched then; it runs 500 ns later for 2 ns."""
        number = len(self["kernel"]) + 1
        self.range("cudaLaunchKernel", at, at + 1, tid, correlation=number)
        self["kernel"].append(
            {
                "rank": 0,
                "name": f"{what} {at}",
                "kernel_class": what,
                "device": 0,
                "start_ns": at + 500,
                "dur_ns": 2,
                "correlation": number,
                **more,
            }
        )


def seen(open_run: OpenRun, rows: Rows, job: Job | None, *columns: str) -> dict[str, tuple[Any, ...]]:
    """Columns of the attributed view kernel by the kernels' names."""
    run = open_run(rows)
    attach(run, job)
    of_kernels(run, job)
    return {
        name: tuple(row)
        for name, *row in run.tuples(f"SELECT name, {', '.join(columns)} FROM kernel ORDER BY start_ns")
    }


def test_the_view_has_every_column_with_its_type(open_run: OpenRun) -> None:
    rows = Rows()
    rows.launch("gemm", 10)
    run = open_run(rows)
    before = {row[0]: row[1] for row in run.tuples("DESCRIBE kernel")}
    attach(run, None)
    assert {row[0]: row[1] for row in run.tuples("DESCRIBE kernel")} == before
    of_kernels(run)
    after = {row[0]: row[1] for row in run.tuples("DESCRIBE kernel")}
    assert after == before | {name: kind for name, (kind, _) in KERNEL_COLUMNS.items()}
    attach(run, None)
    assert {row[0]: row[1] for row in run.tuples("DESCRIBE kernel")} == before


def test_marks_hold_for_the_backward_thread_too(open_run: OpenRun) -> None:
    rows = Rows()
    rows.range("ta:microbatch 3", 10, 100)
    rows.range("ta:forward", 12, 50)
    rows.range("ta:layer 7", 20, 30)
    rows.range("ta:backward", 60, 90)
    rows.range("autograd::engine::evaluate_function: AddmmBackward0", 65, 80, 2)
    rows.range("ta:phase optimizer", 200, 240)
    for at, tid in ((25, 1), (40, 1), (70, 2), (85, 2), (210, 1), (300, 1)):
        rows.launch("gemm", at, tid)
    found = seen(
        open_run, rows, None, "phase", "phase_evidence", "microbatch", "microbatch_evidence", "layer", "layer_evidence"
    )
    assert found == {
        "gemm 25": ("forward", "mark", 3, "mark", 7, "mark"),
        "gemm 40": ("forward", "mark", 3, "mark", None, None),
        "gemm 70": ("backward", "call_path", 3, "mark", None, None),
        "gemm 85": ("other", "no_path", None, None, None, None),  # the thread does nothing of the backward pass then
        "gemm 210": ("optimizer", "mark", None, None, None, None),
        "gemm 300": ("other", "no_path", None, None, None, None),
    }


def test_a_hooks_spans_come_first_and_are_the_process(open_run: OpenRun) -> None:
    rows = Rows()
    place = {"recorded_phase": "backward", "recorded_microbatch": 1, "recorded_chunk": 0, "recorded_layer": 4}
    rows["span"].append(
        {
            "rank": 0,
            "source": "hook",
            "category": "layer",
            "name": "layer 4",
            "start_ns": 60,
            "dur_ns": 40,
            "tid": 1,
            **place,
        }
    )
    rows.range("autograd::engine::evaluate_function: AddmmBackward0", 55, 80, 2)
    for at in (57, 70):
        rows.launch("gemm", at, 2)
    found = seen(
        open_run, rows, None, "phase_evidence", "microbatch", "chunk", "chunk_evidence", "layer", "layer_evidence"
    )
    assert found == {
        "gemm 57": ("call_path", None, None, None, None, None),
        "gemm 70": ("recorded", 1, 0, "recorded", 4, "recorded"),
    }


def modules(rows: Rows) -> None:
    """Two layers and what is in them, forward on thread 1; backward on thread 2 by autograd's numbers."""
    rows.range("nn.Module: GPTModel_0", 10, 100)
    for layer, start in ((0, 20), (1, 50)):
        rows.range(f"nn.Module: TransformerLayer_{layer}", start, start + 25)
        rows.range(f"nn.Module: SelfAttention_{layer}", start + 2, start + 10)
        rows.range("aten::linear", start + 3, start + 6, sequence_nr=5 + 10 * layer)
        rows.range("aten::addmm", start + 4, start + 6, sequence_nr=5 + 10 * layer)
        rows.range("nn.Module: MLP_" + str(layer), start + 12, start + 20)
        rows.range("aten::mul", start + 13, start + 15, sequence_nr=6 + 10 * layer)
        rows.launch("gemm", start + 5)
        rows.launch("elementwise", start + 14)
        rows.launch("norm", start + 22)
    rows.range("aten::view", 46, 47, sequence_nr=6)  # makes no node: has the number of the next that does, not of mul
    for number, start in ((16, 120), (15, 140), (6, 160), (5, 180), (4, 200)):
        name = "MulBackward0" if number % 10 == 6 else "AddmmBackward0"
        rows.range(f"autograd::engine::evaluate_function: {name}", start, start + 15, 2, sequence_nr=number)
        rows.range(name, start + 1, start + 14, 2, sequence_nr=number)
        rows.launch("gemm", start + 5, 2)


EXPECTED_MODULES = {
    "gemm 25": (0, "module", "attention", "module"),
    "elementwise 34": (0, "module", "mlp", "module"),
    "norm 42": (0, "module", None, None),
    "gemm 55": (1, "module", "attention", "module"),
    "elementwise 64": (1, "module", "mlp", "module"),
    "norm 72": (1, "module", None, None),
    "gemm 125": (1, "autograd", "mlp", "autograd"),
    "gemm 145": (1, "autograd", "attention", "autograd"),
    "gemm 165": (None, None, None, None),  # its last forward operator lies between the layers
    "gemm 185": (0, "autograd", "attention", "autograd"),
    "gemm 205": (None, None, None, None),  # its forward operator was not recorded
}


@pytest.mark.parametrize(
    ("job", "shift"),
    [
        (None, 0),
        (Job(world_size=1, num_layers=2), 0),
        (Job(world_size=2, pipeline_model_parallel_size=2, num_layers=4), 0),
    ],
    ids=["no job and no messages", "of the job", "of the first stage"],
)
def test_layers_by_modules_and_by_autograds_numbers(open_run: OpenRun, job: Job | None, shift: int) -> None:
    rows = Rows()
    modules(rows)
    found = seen(open_run, rows, job, "layer", "layer_evidence", "component", "component_evidence")
    assert found == EXPECTED_MODULES


def test_modules_that_are_not_as_many_as_layers_say_none(open_run: OpenRun) -> None:
    rows = Rows()
    modules(rows)
    found = seen(open_run, rows, Job(world_size=1, num_layers=3), "layer")
    assert set(found.values()) == {(None,)}


def test_a_communication_kernel_has_its_calls_place(open_run: OpenRun) -> None:
    rows = Rows()
    call = {
        "rank": 0,
        "op": "all_reduce",
        "group_id": "1",
        "t_issue_ns": 20,
        "completeness": "full",
        "recorded_layer": 2,
    }
    for number, phase in enumerate(("forward", "backward")):
        rows["comm_record"].append({**call, "call_id": number, "coalesce_id": number, "recorded_phase": phase})
    rows["comm_record"].append({**call, "call_id": 2, "coalesce_id": 1, "recorded_phase": "forward"})
    rows["process_group"].append({"rank": 0, "group_id": "1", "description": "TENSOR_MODEL_PARALLEL_GROUP"})
    rows.launch("comm", 20, coalesce_id=0)
    rows.launch("comm", 30, coalesce_id=1)
    found = seen(open_run, rows, None, "role", "axis", "phase", "phase_evidence", "layer", "layer_evidence")
    assert found == {
        "comm 20": ("tp", "TP", "forward", "call", 2, "call"),
        # its two calls have the role and the layer in common; no range was recorded
        "comm 30": ("tp", "TP", None, None, 2, "call"),
    }


def test_the_axis_that_computation_serves(open_run: OpenRun) -> None:
    rows = Rows()
    rows.range("nn.Module: MoELayer_0", 10, 50)
    rows.range("nn.Module: TEGroupedMLP_0", 20, 30)
    rows.range("LinearWithGradAccumulationAndAsyncCommunication", 60, 70)
    rows.range("Optimizer.step#Adam.step", 80, 90)
    for what, at in (
        ("gemm", 25), ("attention", 55), ("grouped_gemm", 57), ("gemm", 65), ("elementwise", 75), ("optimizer", 85),
        ("copy", 86),
    ):  # fmt: skip
        rows.launch(what, at)
    job = Job(
        world_size=16, tensor_model_parallel_size=2, context_parallel_size=2, expert_model_parallel_size=2, num_experts=4,
        use_distributed_optimizer=True, sequence_parallel=True,
    )  # fmt: skip
    columns = ("component", "component_evidence", "served_axis", "served_axis_evidence")
    expected = {
        "gemm 25": ("experts", "module", "EP", "component"),
        "attention 55": ("attention", "kernel_name", "CP", "kernel_class"),
        "grouped_gemm 57": ("experts", "kernel_name", "EP", "component"),
        "gemm 65": (None, None, "TP", "call_path"),
        "elementwise 75": (None, None, None, None),
        "optimizer 85": (None, None, "DP", "phase"),
        "copy 86": (None, None, None, None),
    }
    assert seen(open_run, rows, job, *columns) == expected
    # of one rank on every axis nothing is split
    alone = seen(open_run, rows, Job(world_size=1), *columns)
    assert {row[2] for row in alone.values()} == {None}
    # without a job the groups say it
    rows["process_group"] += [
        {"rank": 0, "group_id": "c", "description": "CONTEXT_PARALLEL_GROUP", "ranks": [0, 1]},
        {"rank": 0, "group_id": "t", "description": "TENSOR_MODEL_PARALLEL_GROUP", "ranks": [0]},
    ]
    groups = seen(open_run, rows, None, "served_axis")
    assert {name: axis for name, (axis,) in groups.items() if axis} == {"attention 55": "CP"}


def test_without_host_work_nothing_is_outside_of_it(open_run: OpenRun) -> None:
    rows = Rows()
    rows["kernel"].append({"rank": 0, "name": "k", "kernel_class": "gemm", "start_ns": 10, "dur_ns": 5})
    assert seen(open_run, rows, None, "phase", "phase_evidence", "step", "step_evidence") == {
        "k": (None, None, 1, "profiler_step")
    }


# passes by the schedule ---------------------------------------------------------------------------------------------------


def passes(rows: Rows, text: str) -> None:
    """F, B: a kernel of a pass, forward on thread 1, backward on 2; s, r: a message sent or received; every 10 ns."""
    for i, what in enumerate(text.split()):
        at = 10 + 10 * i
        if what == "F":
            rows.range("nn.Module: GPTModel_0", at, at + 5)
            rows.launch("gemm", at + 1)
        elif what == "B":
            rows.range("autograd::engine::evaluate_function: AddmmBackward0", at, at + 5, 2)
            rows.launch("gemm", at + 1, 2)
        else:
            rows["comm_record"].append(
                {
                    "rank": 0, "call_id": i, "op": {"s": "send", "r": "recv"}[what], "peer": 1, "dtype": "bfloat16",
                    "t_issue_ns": at, "completeness": "full", "in_elems": 8,
                }
            )  # fmt: skip


@pytest.mark.parametrize(
    ("job", "text", "expected"),
    [
        pytest.param({"num_microbatches": 2}, "F F B F B B", "0 0 0 1 1 1", id="no pipeline: passes alternate"),
        pytest.param({"num_microbatches": 3}, "F F B F B B", "- - - - - -", id="one pass less than declared"),
        pytest.param({}, "F B", "- -", id="nobody says how many"),
        # 1F1B, first of two stages: one forward pass ahead
        pytest.param(
            {"pipeline_model_parallel_size": 2, "num_microbatches": 2},
            "F s F s r B r B", "0 1 0 1", id="first of two stages",
        ),
        pytest.param(
            {"pipeline_model_parallel_size": 2, "num_microbatches": 2},
            "F s F s B r B r", "- - - -", id="backward before its message",
        ),
    ],
)  # fmt: skip
def test_passes_follow_the_schedule(open_run: OpenRun, job: dict[str, Any], text: str, expected: str) -> None:
    rows = Rows()
    passes(rows, text)
    world = job.get("pipeline_model_parallel_size", 1)
    found = seen(
        open_run, rows, Job(world_size=world, num_layers=2, **job), "microbatch", "microbatch_evidence", "chunk"
    )
    assert " ".join("-" if row[0] is None else str(row[0]) for row in found.values()) == expected
    assert {row[1] for row in found.values()} == ({None} if "-" in expected else {"order"})
    assert {row[2] for row in found.values()} == {None}


def test_passes_of_an_interleaved_pipeline(open_run: OpenRun) -> None:
    """First of two stages with two chunks and two micro-batches: all forward passes, then the backward ones, chunks from
    the end. What it sends after the first chunk comes back from the other stage one pass later."""
    rows = Rows()
    passes(rows, "F s F s r F s r F s r B s r B s r B r B")
    job = Job(
        world_size=2,
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_microbatches=2,
        num_layers=4,
    )
    found = seen(open_run, rows, job, "phase", "microbatch", "chunk", "chunk_evidence")
    assert list(found.values()) == [
        ("forward", 0, 0, "order"),
        ("forward", 1, 0, "order"),
        ("forward", 0, 1, "order"),
        ("forward", 1, 1, "order"),
        ("backward", 0, 1, "order"),
        ("backward", 1, 1, "order"),
        ("backward", 0, 0, "order"),
        ("backward", 1, 0, "order"),
    ]


@pytest.mark.shared
def test_kernels_of_a_real_trace(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """DDP on one of two A100: phases counted by brute force over the JSON (launch inside a range on its thread, or not)."""
    import_traces([shared("traces/hta_nccl_metadata_a100_x2")], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, None)
        of_kernels(run)
        found = run.tuples(
            """SELECT phase, kernel_class = 'comm', count(*) FROM kernel WHERE kernel_class NOT IN ('copy', 'memset')
               GROUP BY ALL ORDER BY ALL"""
        )
        evidence = run.tuples("SELECT DISTINCT kernel_class = 'comm', phase_evidence FROM kernel ORDER BY ALL")
    assert found == [
        ("backward", False, 1761),
        ("backward", True, 15),
        ("forward", False, 891),
        ("forward", True, 6),
        ("optimizer", False, 27),
    ]
    assert evidence == [(False, "call_path"), (True, "call")]
