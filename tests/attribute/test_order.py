"""Phase, micro-batch and layer by the order of the calls: sequences worked out by hand, and real traces without marks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.attribute.order import (
    Call,
    Pass,
    Place,
    ScheduleConflict,
    direction_of,
    layers,
    of_schedule,
    passes_of,
    places,
)
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.run import Run
from traceanalyzer.schedule_order import Exchange, Schedule, program


@pytest.mark.parametrize(
    ("op", "stage", "peer", "stages", "interleaved", "direction"),
    [
        ("send", 1, 2, 4, None, "forward"),
        ("recv", 1, 0, 4, None, "forward"),
        ("send", 1, 0, 4, None, "backward"),
        ("recv", 1, 2, 4, None, "backward"),
        # over the end of an interleaved pipeline
        ("send", 3, 0, 4, True, "forward"),
        ("recv", 0, 3, 4, True, "forward"),
        # two stages: both neighbours are one rank
        ("send", 0, 1, 2, False, "forward"),
        ("recv", 0, 1, 2, False, "backward"),
        ("recv", 1, 0, 2, False, "forward"),
        ("send", 1, 0, 2, False, "backward"),
        ("send", 0, 1, 2, True, None),
        ("send", 0, 1, 2, None, None),
        # the peer was not recorded
        ("send", 0, None, 4, False, "forward"),
        ("recv", 3, None, 4, False, "forward"),
        ("send", 1, None, 4, False, None),
        ("send", 0, None, 4, None, None),
        # no neighbour
        ("send", 0, 2, 4, False, None),
    ],
)
def test_the_direction_of_a_message(
    op: str, stage: int, peer: int | None, stages: int, interleaved: bool | None, direction: str | None
) -> None:
    assert direction_of(op, stage, peer, stages, interleaved) == direction


def sequence(text: str) -> list[Call]:
    """F, B, R: a tensor-parallel call of the forward or backward pass or of recomputation; sf, rf, sb, rb: messages sent and
    received forward and backward; x: a data-parallel call."""
    made = {
        "F": ("all_reduce", "tp", "forward", None),
        "B": ("all_reduce", "tp", "backward", None),
        "R": ("all_reduce", "tp", "recompute", None),
        "sf": ("send", "pp", None, "forward"),
        "rf": ("recv", "pp", None, "forward"),
        "sb": ("send", "pp", None, "backward"),
        "rb": ("recv", "pp", None, "backward"),
        "s?": ("send", "pp", None, None),
        "x": ("all_gather", "dp_cp", "forward", None),
    }
    return [Call(i, *made[word], 8) for i, word in enumerate(text.split())]  # pyright: ignore[reportCallIssue]


def batches(text: str, stages: int, microbatches: int | None = None, stage: int = 0, **more: Any) -> str:
    found = places(sequence(text), stage, stages, microbatches, **more)
    return " ".join(
        str(n) if (n := found.get(i, Place()).microbatch) is not None else "-" for i in range(len(text.split()))
    )


def test_microbatches_of_a_first_stage() -> None:
    """Two forward passes to warm up, then one forward, one backward; each pass ends with what it sends, or its call."""
    found = places(sequence("F sf F sf rb B F sf rb B rb B"), 0, 2, None)
    assert [found[i].microbatch for i in range(12)] == [0, 0, 1, 1, 0, 0, 2, 2, 1, 1, 2, 2]
    assert [found[i].phase for i in (0, 1, 4)] == [None, "forward", "backward"]


def test_microbatches_of_a_middle_and_a_last_stage() -> None:
    assert batches("rf F sf rf F sf rb B sb rb B sb", 3, 2, stage=1) == "0 0 0 1 1 1 0 0 0 1 1 1"
    assert batches("rf F B sb rf F R B sb", 3, 2, stage=2) == "0 0 0 0 1 1 1 1 1"


def test_without_a_pipeline_passes_alternate() -> None:
    assert batches("F F B R B x F F B B", 1) == "0 0 0 0 0 - 1 1 1 1"
    assert batches("F F B B", 1, 2) == "- - - -", "the job has two micro-batches, the calls show one"
    assert batches("F F F F", 1) == "- - - -", "passes without calls cannot be told apart"
    assert batches("B F", 1) == "- -"
    assert batches("F F", 1, 1, forward_only=True) == "0 0"


@pytest.mark.parametrize(
    "text",
    ["F sf F sf rb B", "F sf s? rb B rb B", "F sf F sf rb B rb B", "F sf F sf"],
    ids=["one lost", "one unclear", "not as many", "one direction"],
)
def test_counts_that_do_not_agree_say_nothing_of_microbatches(text: str) -> None:
    expected = 3 if text == "F sf F sf rb B rb B" else None
    assert set(batches(text, 2, expected).split()) == {"-"}


def calls(*sizes: int) -> list[Call]:
    return [Call(i, "all_reduce", "tp", "forward", None, size) for i, size in enumerate(sizes)]


def test_layers_repeat() -> None:
    """Embedding, 3 layers of two calls, 3 calls of the loss."""
    assert layers(calls(8, 8, 8, 8, 8, 8, 8, 1, 1, 1), (0, 1, 2), first=True, last=True) == {
        1: 0, 2: 0, 3: 1, 4: 1, 5: 2, 6: 2,
    }  # fmt: skip
    # a middle stage: nothing but layers
    assert layers(calls(8, 8, 8, 8), (4, 5), first=False, last=False) == {0: 4, 1: 4, 2: 5, 3: 5}


def test_what_does_not_repeat_has_no_layers() -> None:
    assert layers(calls(8, 8, 8, 8, 8), (4, 5), first=False, last=False) == {}, "one is left over"
    assert layers(calls(8, 4, 4, 8), (4, 5), first=False, last=False) == {}, "sizes differ"
    assert layers(calls(8, 8), (0,), first=False, last=True) == {}, "one layer repeats nothing"
    assert layers([], (0, 1), first=True, last=True) == {}


# -- the schedule's order, worked out by hand: two stages of two chunks, two micro-batches ----------------------------------

FOUR = Schedule(kind="interleaved", stages=2, microbatches=2, chunks=2)
FIRST_STAGE = "F s F s r F s r F s r B s r B s r B r B"
SENT = [
    ("forward", 0, 0),
    ("forward", 1, 0),
    ("forward", 0, 1),
    ("forward", 1, 1),
    ("backward", 0, 1),
    ("backward", 1, 1),
]
RECEIVED = [
    ("forward", 0, 1),
    ("forward", 1, 1),
    ("backward", 0, 1),
    ("backward", 1, 1),
    ("backward", 0, 0),
    ("backward", 1, 0),
]


def messages(text: str, peer: int | None = 1) -> list[Call]:
    """F, B: a tensor-parallel call; s, r: a message sent or received."""
    made = {"F": ("all_reduce", "tp", "forward"), "B": ("all_reduce", "tp", "recompute"), "s": ("send", "pp", None)}
    found = []
    for i, word in enumerate(text.split()):
        op, role, phase = made.get(word, ("recv", "pp", None))
        found.append(Call(i, op, role, phase, None, 8, peer if role == "pp" else None, role == "pp"))
    return found


def test_messages_and_passes_of_an_interleaved_first_stage() -> None:
    calls = messages(FIRST_STAGE)
    found, conflicts = of_schedule(calls, 0, [FOUR])
    assert conflicts == []
    for op, expected in (("send", SENT), ("recv", RECEIVED)):
        mine = [found[c.call_id] for c in calls if c.op == op]
        assert [(p.phase, p.microbatch, p.chunk) for p in mine] == expected
    inside = [found[c.call_id] for c in calls if c.op == "all_reduce"]
    passes = [(0, 0), (1, 0), (0, 1), (1, 1), (0, 1), (1, 1), (0, 0), (1, 0)]
    assert inside == [Place(None, microbatch, None, chunk) for microbatch, chunk in passes]


def test_passes_that_are_not_the_schedules_keep_their_messages() -> None:
    """A pass without its calls: messages are counted by themselves, the other passes cannot be told."""
    calls = messages(FIRST_STAGE.replace("F s F", "s F", 1))
    found, _ = of_schedule(calls, 0, [FOUR])
    assert {c.op for c in calls if c.call_id in found} == {"send", "recv"}


@pytest.mark.parametrize(
    ("text", "peer", "conflicts"),
    [
        (FIRST_STAGE + " s", 1, [ScheduleConflict("send", 0, 6, 7)]),
        (FIRST_STAGE.replace("r B", "B"), 1, [ScheduleConflict("recv", 0, 6, 2)]),
        (FIRST_STAGE, 0, []),
    ],
    ids=["one too many", "too few", "to itself"],
)
def test_what_does_not_fit_says_nothing(text: str, peer: int, conflicts: list[ScheduleConflict]) -> None:
    assert of_schedule(messages(text, peer), 0, [FOUR]) == ({}, conflicts)


def test_schedules_that_differ_settle_nothing() -> None:
    """Two or four micro-batches through one chunk before the next: as many messages, in another order."""
    pairs, fours = (
        Schedule(kind="interleaved", stages=2, microbatches=4, chunks=2, group=group, batched=True) for group in (2, 4)
    )
    made = [m for x in program(pairs, 0) if isinstance(x, Exchange) for m in x.messages]
    calls = [Call(i, m.op, "pp", None, None, 8, None, True) for i, m in enumerate(made)]
    assert len(of_schedule(calls, 0, [pairs])[0]) == len(of_schedule(calls, 0, [fours])[0]) == len(calls) == 24
    assert of_schedule(calls, 0, [pairs, fours]) == ({}, [])


def test_passes_without_a_pipeline() -> None:
    job = Job(world_size=1, num_microbatches=2)
    alternating = [Pass(way, 0, 0) for way in "FBFB"]
    assert passes_of(job, 0, alternating) == [(0, 0), (0, 0), (1, 0), (1, 0)]
    assert passes_of(job, 0, alternating[:2]) is None
    assert passes_of(job, 7, alternating) is None, "outside of the job's world"


# -- real traces without marks, megatron-core 0.16.1, 4 layers, 4 micro-batches -------------------------------------------

MODEL: dict[str, Any] = {"num_layers": 4, "num_microbatches": 4, "micro_batch_size": 2, "seq_length": 32}


def imported(shared: Callable[[str], Path], tmp_path: Path, folder: str) -> Run:
    import_traces(sorted(shared(f"traces/{folder}").glob("rank*.json.gz")), tmp_path / "run.parquet")
    return Run.open(tmp_path / "run.parquet")


@pytest.mark.shared
def test_a_real_pipeline(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """TP 2 x PP 2 with sequence parallelism: every micro-batch has its messages and each layer 2 gathers and 2 scatters."""
    job = Job(
        world_size=4, tensor_model_parallel_size=2, pipeline_model_parallel_size=2, sequence_parallel=True, **MODEL
    )
    with imported(shared, tmp_path, "mcore_gloo_tp2pp2_sp") as run:
        attach(run, job)
        found = Counter(
            run.tuples(
                """SELECT rank, op, phase, phase_evidence, microbatch FROM comm
                   WHERE op IN ('send', 'recv') AND rank IN (0, 3) AND microbatch_evidence = 'order'"""
            )
        )
        assert found == {
            (rank, op, phase, "order", n): 1
            for rank, op, phase in [
                (0, "send", "forward"), (0, "recv", "backward"), (3, "recv", "forward"), (3, "send", "backward"),
            ]
            for n in range(4)
        }  # fmt: skip
        layered = Counter(
            run.tuples(
                """SELECT rank, op, microbatch, layer FROM comm
                   WHERE layer_evidence = 'pattern' AND rank IN (0, 3)"""
            )
        )
        assert layered == {
            (rank, op, n, layer): 2
            for rank, its in ((0, (0, 1)), (3, (2, 3)))
            for op in ("all_gather", "reduce_scatter")
            for n in range(4)
            for layer in its
        }
        # the embedding's scatter on the first stage, the output layer's gather and the loss on the last
        outside = Counter(
            run.tuples(
                """SELECT rank, op, count(*) FROM comm WHERE phase = 'forward' AND microbatch = 2 AND layer IS NULL
                   AND role = 'tp' AND rank IN (0, 3) GROUP BY ALL"""
            )
        )
        assert outside == {(0, "reduce_scatter", 1): 1, (3, "all_gather", 1): 1, (3, "all_reduce", 3): 1}


INTERLEAVED: dict[str, Any] = {
    "world_size": 2, "pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2, **MODEL,
}  # fmt: skip


@pytest.mark.shared
@pytest.mark.parametrize(
    ("folder", "flags"),
    [("mcore_gloo_pp2_vpp2", {}), ("mcore_gloo_pp2_vpp2_overlap", {"overlap_p2p_comm": True, "batch_p2p_comm": False})],
)
def test_a_real_interleaved_pipeline(
    shared: Callable[[str], Path], tmp_path: Path, folder: str, flags: dict[str, Any]
) -> None:
    """Two stages of two chunks: what one sends as its n-th message the other receives as its n-th, in the chunk behind it.

    Each stage is decided by itself, so that both must agree: activations of chunk c go from stage 0 to chunk c of stage 1
    and from there to chunk c + 1 of stage 0, gradients the other way; each of the 4 micro-batches once.
    """
    with imported(shared, tmp_path, folder) as run:
        assert attach(run, Job(**INTERLEAVED, **flags)).conflicts == []
        found = {
            (rank, op): run.tuples(
                """SELECT phase, microbatch, chunk, phase_evidence, microbatch_evidence, chunk_evidence FROM comm
                   WHERE rank = ? AND op = ? ORDER BY t_issue_ns, call_id""",
                [rank, op],
            )
            for rank in (0, 1)
            for op in ("send", "recv")
        }
    assert {row[3:] for rows in found.values() for row in rows} == {("order", "order", "order")}
    for sender in (0, 1):
        sent, received = found[sender, "send"], found[1 - sender, "recv"]
        forth, back = (0, -1) if sender == 0 else (1, 0)
        assert [row[:3] for row in received] == [
            (phase, microbatch, chunk + (forth if phase == "forward" else back))
            for phase, microbatch, chunk, *_ in sent
        ]
        assert Counter(row[:3] for row in sent) == {
            (phase, n, chunk): 1
            for n in range(4)
            for phase, chunks in (
                ("forward", (0, 1) if sender == 0 else (0,)),
                ("backward", (1,) if sender == 0 else (0, 1)),
            )
            for chunk in chunks
        }


@pytest.mark.shared
def test_messages_that_do_not_fit_the_schedule_are_a_conflict(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Declared 6 micro-batches, recorded 4: a first stage sends v * M activations and (v - 1) * M gradients."""
    with imported(shared, tmp_path, "mcore_gloo_pp2_vpp2") as run:
        found = attach(run, Job(**{**INTERLEAVED, "num_microbatches": 6}))
        said = run.value("SELECT count(microbatch) + count(chunk) FROM comm WHERE op IN ('send', 'recv')")
        steps = {s.evidence for s in found.steps}
    assert said == 0
    sentences = [c.sentence for c in found.conflicts if isinstance(c, ScheduleConflict)]
    told = [
        f"declared a pipeline schedule in which stage {stage} {done} 18 messages a step, observed 12"
        for stage in (0, 1)
        for done in ("sends", "receives")
    ]
    assert sentences == (told if steps & {"profiler_step", "mark"} else [])


@pytest.mark.shared
def test_a_real_job_without_a_pipeline(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """TP 2: 12 forward calls a micro-batch (embedding, 2 a layer, 3 of the loss), 9 backward (2 a layer, output layer)."""
    with imported(shared, tmp_path, "mcore_gloo_tp2") as run:
        attach(run, Job(world_size=2, tensor_model_parallel_size=2, **MODEL))
        by_pass = run.tuples(
            """SELECT microbatch, phase, count(*), count(layer) FROM comm WHERE rank = 0 AND role = 'tp'
               GROUP BY ALL ORDER BY ALL"""
        )
        assert by_pass == [row for n in range(4) for row in ((n, "backward", 9, 0), (n, "forward", 12, 8))]


def test_a_hooks_word_comes_first(tmp_path: Path) -> None:
    """Where a hook recorded the micro-batch, nothing is inferred for the call."""
    from traceanalyzer.importers.spool import RunWriter, table_of

    common = {
        "source": "hook",
        "rank": 0,
        "op": "all_reduce",
        "group_id": "1",
        "recorded_step": 1,
        "recorded_phase": "forward",
    }
    rows = [{**common, "call_id": 0, "t_issue_ns": 10, "recorded_microbatch": 7, "recorded_layer": 5}]
    with RunWriter(tmp_path / "run.parquet", {}) as out:
        out.write("comm_record", [table_of("comm_record", rows)])
        out.write(
            "rank", [table_of("rank", [{"source": "hook", "rank": 0, "window_start_ns": 0, "window_end_ns": 50}])]
        )
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, None)
        assert run.tuples("SELECT microbatch, microbatch_evidence, layer, layer_evidence FROM comm") == [
            (7, "recorded", 5, "recorded")
        ]
