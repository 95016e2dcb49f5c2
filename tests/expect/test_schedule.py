"""Pipeline schedules against the order of calls in recordings, real scheduling code, and a simulation of their time."""

from __future__ import annotations

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import schedule
from traceanalyzer.expect.schedule import Action, Exchange, Schedule
from traceanalyzer.job import Job


def _random_schedules(count: int, seed: int = 7) -> Iterator[Schedule]:
    choose = random.Random(seed)
    while count:
        stages, microbatches = choose.randint(2, 6), choose.randint(1, 16)
        chunks = choose.choice((1, 2, 2, 3, 4))
        options: dict[str, Any] = {"stages": stages, "microbatches": microbatches, "batched": choose.random() < 0.5}
        if chunks > 1:
            group = choose.choice((stages, choose.randint(stages, stages + 4)))
            if group > microbatches or 0 < microbatches % group < stages:
                continue
            early = not options["batched"] and choose.random() < 0.5
            options |= {"chunks": chunks, "group": group, "receive_early": early, "merged": choose.random() < 0.3}
        count -= 1
        yield Schedule(kind="interleaved" if chunks > 1 else "1f1b", **options)


# -- order against real code -----------------------------------------------------------------------------------------


def test_recorded_order(recording: Any) -> None:
    """Operation, peer and group of every message, in order, on every recorded rank of every recorded sequence."""
    path = recording.path.parent / "sequences" / f"{recording.name}.json.gz"
    planned = schedule.of_job(recording.job, (0, 16))
    if planned is None or not path.exists():
        assert recording.job.pipeline_model_parallel_size == 1 or recording.name.startswith(("r2_", "w1024_"))
        return
    layout = recording.job.layout
    ranks = json.loads(gzip.decompress(path.read_bytes()))["ranks"]
    assert len(ranks) == layout.world_size
    for rank, calls in ranks.items():
        recorded = [
            (op.removeprefix("i"), int(peer.split("=")[1]), group)
            for _, _, _, group, op, _, _, peer in calls
            if op in ("isend", "irecv") and group in ("PIPELINE_MODEL_PARALLEL_GROUP", "WORLD")
        ]
        stage = layout.stage(int(rank))
        group_of_rank = layout.group_of("pp", int(rank))
        assert group_of_rank is not None
        messages = [message for exchange in schedule.exchanges(planned, stage) for message in exchange.messages]
        expected = [
            (
                message.op,
                group_of_rank[message.peer],
                "WORLD"
                if schedule.on_default_group(stages=planned.stages, stage=stage, op=message.op, batched=planned.batched)
                else "PIPELINE_MODEL_PARALLEL_GROUP",
            )
            for message in messages
        ]
        assert recorded == expected, rank
        assert len(recorded) >= 2 * planned.microbatches


_SIGN = {("send", "next"): ">", ("send", "previous"): "<", ("recv", "next"): ")", ("recv", "previous"): "("}


def _text(planned: Schedule, stage: int) -> str:
    """Passes as F and micro-batch, or B; > and < are sends to next and previous, ) and ( receives from them.

    Messages of one batch stand together.
    """
    words: list[str] = []
    for step in schedule.program(planned, stage):
        if isinstance(step, Action):
            words.append(f"F{step.microbatch}" if step.kind == "F" else step.kind)
        else:
            signs = [_SIGN[message.op, message.toward] for message in step.messages]
            words += ["".join(signs)] if step.batched else signs
    return " ".join(words)


# What the schedules of megatron-core 0.16.1 called, with model steps that only return a tensor (no process group).
# The same code of 0.11.0, 0.13.1, 0.17.0 and 0.19.0 gave the same for the options that these have.
REAL: list[tuple[dict[str, Any], list[str]]] = [
    (
        {"kind": "1f1b", "stages": 3, "microbatches": 4},
        [
            "F0 > F1 > F2 >) B F3 >) B ) B ) B",
            "( F0 > ( F1 >) B <( F2 >) B <( F3 >) B < ) B <",
            "( F0 B <( F1 B <( F2 B <( F3 B <",
        ],
    ),
    (
        {"kind": "1f1b", "stages": 4, "microbatches": 2},
        [
            "F0 > F1 > ) B ) B",
            "( F0 > ( F1 > ) B < ) B <",
            "( F0 > ( F1 >) B < ) B <",
            "( F0 B <( F1 B <",
        ],
    ),
    (  # batch_p2p_comm=False
        {"kind": "1f1b", "stages": 4, "microbatches": 4, "batched": False},
        [
            "F0 > F1 > F2 > F3 > ) B ) B ) B ) B",
            "( F0 > ( F1 > ( F2 > ) B ( < F3 > ) B < ) B < ) B <",
            "( F0 > ( F1 > ) B ( < F2 > ) B ( < F3 > ) B < ) B <",
            "( F0 B ( < F1 B ( < F2 B ( < F3 B <",
        ],
    ),
    (
        {"kind": "1f1b", "stages": 4, "microbatches": 4, "batched": False, "forward_only": True},
        ["F0 > F1 > F2 > F3 >"] + 2 * ["( F0 > ( F1 > ( F2 > ( F3 >"] + ["( F0 ( F1 ( F2 ( F3"],
    ),
    (
        {"kind": "interleaved", "stages": 3, "microbatches": 5, "chunks": 2, "group": 5},
        [
            "F0 > F1 > F2 (> F3 (> F4 (> F0 (> F1 (> F2 > F3 >) F4 B <>) B <) B <) B <) B <) B ) B ) B ) B ) B",
            "( F0 (> F1 (> F2 (> F3 (> F4 (> F0 (> F1 (>) F2 B <(>) F3 B <(>) F4 B <>) B <) B <) B <) B <) B <) B <) B <",
            "( F0 (> F1 (> F2 (> F3 (> F4 (> F0 B <( F1 B <( F2 B <() F3 B <() F4 B <) B <) B <) B < B < B <",
        ],
    ),
    (
        {"kind": "interleaved", "stages": 3, "microbatches": 3, "chunks": 3, "batched": False},
        [
            "F0 > F1 > F2 > ( F0 > ( F1 > ( F2 > ( F0 > ( F1 > ( F2 > ) B < ) B < ) B < ) B < ) B < ) B < ) B ) B ) B",
            (
                "( F0 ( > F1 ( > F2 ( > F0 ( > F1 ( > F2 ( > F0 ( > F1 ( > ) F2 > B ) < B ) < B ) < B ) < B ) < B ) < B ) < "
                "B ) < B <"
            ),
            "( F0 > ( F1 > ( F2 > ( F0 > ( F1 > ( F2 > ( F0 ( B < F1 ( B < F2 B < ) B < ) B < ) B < ) B < ) B < ) B <",
        ],
    ),
    (  # overlap_p2p_comm_warmup_flush
        {
            "kind": "interleaved",
            "stages": 4,
            "microbatches": 4,
            "chunks": 2,
            "batched": False,
            "receive_early": True,
        },
        [
            "F0 > F1 > F2 > F3 > ( F0 > ( F1 > ( F2 > ( F3 > ) ) B < ) B < ) B < ) B < ) B ) B ) B B",
            "( ( F0 > ( F1 > ( F2 > ( F3 > ( F0 > ( F1 > ( F2 > F3 > ) ) B < ) B < ) B < ) B < ) B < ) B < ) B < B <",
            "( ( F0 > ( F1 > ( F2 > ( F3 > ( F0 > ( F1 > ) F2 > ( B < ) F3 > B < ) ) B < ) B < ) B < ) B < ) B < B <",
            "( ( F0 > ( F1 > ( F2 > ( F3 > F0 ( B < F1 ( B < F2 ( B < F3 B ) < B ) < B ) < B ) < B <",
        ],
    ),
    (  # overlap_moe_expert_parallel_comm and overlap_p2p_comm_warmup_flush
        {
            "kind": "interleaved",
            "stages": 3,
            "microbatches": 6,
            "chunks": 2,
            "batched": False,
            "receive_early": True,
            "merged": True,
        },
        [
            (
                "F0 > F1 > F2 > ( F0 > ( F1 > ( F2 > F3 > F4 > ) F5 B > ( < ) F3 B > ( < ) F4 B > ( < ) F5 B > ) ) B ) B ) "
                "B < ) B < ) B < ) B ) B B"
            ),
            (
                "( ( F0 > ( F1 > ( F2 > ( F0 > ( F1 > ( F2 > ) F3 B ( > ) < F4 B ( > ) < F5 B ( > ) < F3 B ( > ) < F4 B ( > "
                ") < F5 B > ) < ) B < ) B < ) B < ) B < ) B < B <"
            ),
            (
                "( ( F0 > ( F1 > ( F2 > ( F0 F1 B ( < F2 B ( < F3 B > ( < ) F4 B > ( < ) F5 B > ( < ) F3 B ( < F4 B ( < F5 B "
                "< B < ) B < ) B < ) B <"
            ),
        ],
    ),
]


@pytest.mark.parametrize(("options", "stages"), REAL)
def test_order_of_real_code(options: dict[str, Any], stages: list[str]) -> None:
    planned = Schedule(**options)
    assert [_text(planned, stage) for stage in range(planned.stages)] == stages


def test_batches_of_a_middle_stage() -> None:
    """Reference 2.10: PP4, M6, stage 1 makes 17 batches, 10 of one message and 7 of two."""
    planned = Schedule(kind="1f1b", stages=4, microbatches=6)
    sizes = Counter(len(exchange.messages) for exchange in schedule.exchanges(planned, 1))
    assert sizes == {1: 10, 2: 7}
    for microbatches in range(1, 9):
        for stage in (1, 2):
            planned = Schedule(kind="1f1b", stages=4, microbatches=microbatches)
            warm_up = min(microbatches, 3 - stage)
            rest = microbatches - warm_up
            exchanges = schedule.exchanges(planned, stage)
            # Every steady pass but the last of the backward ones saves one batch.
            assert len(exchanges) == 4 * microbatches - rest - max(0, rest - 1)


def test_order_of_passes() -> None:
    """The example in get_schedule_table's neighbourhood: PP2, groups of 3, M5, 2 chunks."""
    planned = Schedule(kind="interleaved", stages=2, microbatches=5, chunks=2, group=3)
    microbatches, chunks = zip(*schedule.order_of_passes(planned), strict=True)
    assert microbatches == (0, 1, 2, 0, 1, 2, 3, 4, 3, 4)
    assert chunks == (0, 0, 0, 1, 1, 1, 0, 0, 1, 1)


def test_orders_outside_megatron() -> None:
    """GPipe: all forwards, then backwards in reverse. ZB-H1: stage p's W are p micro-batches late."""
    gpipe = Schedule(kind="gpipe", stages=3, microbatches=2)
    assert _text(gpipe, 1) == "( F0 > ( F1 > ) B < ) B <"
    assert [action.microbatch for action in schedule.actions(gpipe, 2)] == [0, 1, 1, 0]
    bubbles = Schedule(kind="zb-h1", stages=3, microbatches=4)
    passes = [
        " ".join(f"{action.kind}{action.microbatch}" for action in schedule.actions(bubbles, stage))
        for stage in range(3)
    ]
    assert passes == [
        "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
        "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
        "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
    ]


# -- counts ----------------------------------------------------------------------------------------------------------


def test_warm_up() -> None:
    one = Schedule(kind="1f1b", stages=4, microbatches=8)
    assert [schedule.warm_up(one, stage) for stage in range(4)] == [3, 2, 1, 0]
    assert [schedule.warm_up(Schedule(kind="1f1b", stages=4, microbatches=2), stage) for stage in range(4)] == [
        2,
        2,
        1,
        0,
    ]
    two = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2)
    assert [schedule.warm_up(two, stage) for stage in range(4)] == [10, 8, 6, 4]
    merged = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2, merged=True)
    assert [schedule.warm_up(merged, stage) for stage in range(4)] == [11, 9, 7, 5]
    wide = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2, group=8)
    assert [schedule.warm_up(wide, stage) for stage in range(4)] == [14, 12, 10, 8]
    assert schedule.warm_up(Schedule(kind="gpipe", stages=4, microbatches=8), 3) == 8
    assert schedule.warm_up(Schedule(kind="1f1b", stages=4, microbatches=8, forward_only=True), 3) == 8


def test_messages_of_the_reference() -> None:
    """Reference 2.4 and 2.10: PP4, 2 chunks, M8 on the first stage 16 and 8 sends, 16 and 8 receives."""
    two = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2)
    assert schedule.message_counts(two, 0) == {
        ("send", "activation", "next"): 16,
        ("recv", "activation", "previous"): 8,
        ("send", "gradient", "previous"): 8,
        ("recv", "gradient", "next"): 16,
    }
    assert set(schedule.message_counts(two, 1).values()) == {16}
    assert schedule.message_counts(two, 3) == {
        ("send", "activation", "next"): 8,
        ("recv", "activation", "previous"): 16,
        ("send", "gradient", "previous"): 16,
        ("recv", "gradient", "next"): 8,
    }
    one = Schedule(kind="1f1b", stages=4, microbatches=6)
    assert schedule.message_counts(one, 0) == {("send", "activation", "next"): 6, ("recv", "gradient", "next"): 6}
    assert schedule.message_counts(one, 3) == {
        ("recv", "activation", "previous"): 6,
        ("send", "gradient", "previous"): 6,
    }
    evaluation = Schedule(kind="1f1b", stages=4, microbatches=6, forward_only=True)
    assert schedule.message_counts(evaluation, 1) == {
        ("send", "activation", "next"): 6,
        ("recv", "activation", "previous"): 6,
    }


def test_conservation() -> None:
    """Every message is received by the neighbour it is sent to, in the order in which it is sent; counts are closed."""
    for planned in _random_schedules(200):
        sent: dict[tuple[int, str], list[tuple[int, int]]] = {}
        received: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for stage in range(planned.stages):
            messages = [message for exchange in schedule.exchanges(planned, stage) for message in exchange.messages]
            counted = Counter((message.op, message.content, message.toward) for message in messages)
            assert counted == schedule.message_counts(planned, stage)
            for message in messages:
                # A stage of the whole pipeline: chunk and stage; the receiver's is the next or previous one.
                place = message.chunk * planned.stages + stage
                step = 1 if message.content == "activation" else -1
                if message.op == "send":
                    assert message.peer == (stage + step) % planned.stages
                    sent.setdefault((message.peer, message.content), []).append((message.microbatch, place + step))
                else:
                    assert message.peer == (stage - step) % planned.stages
                    received.setdefault((stage, message.content), []).append((message.microbatch, place))
        assert sent == received
        assert len(sent) == 2 * planned.stages - (2 if planned.chunks == 1 else 0)


def test_every_pass_once() -> None:
    kinds: list[schedule.Kind] = ["gpipe", "zb-h1"]
    others = [Schedule(kind=kind, stages=stages, microbatches=5) for kind in kinds for stages in (1, 3)]
    for planned in (*_random_schedules(50), *others):
        for stage in range(planned.stages):
            passes = Counter(schedule.actions(planned, stage))
            assert set(passes.values()) == {1}
            per_kind = Counter(action.kind for action in passes)
            assert set(per_kind.values()) == {planned.microbatches * planned.chunks}
            assert set(per_kind) == ({"F", "B", "W"} if planned.kind == "zb-h1" else {"F", "B"})


def test_message_in_time() -> None:
    """No pass starts before the exchange that brings its input."""
    for planned in _random_schedules(60, seed=11):
        for stage in range(planned.stages):
            here: set[tuple[str, int, int]] = set()
            last = planned.chunks - 1
            for step in schedule.program(planned, stage):
                if isinstance(step, Exchange):
                    here |= {(m.content, m.microbatch, m.chunk) for m in step.messages if m.op == "recv"}
                elif step.kind == "F" and (stage, step.chunk) != (0, 0):
                    assert ("activation", step.microbatch, step.chunk) in here
                elif step.kind == "B" and (stage, step.chunk) != (planned.stages - 1, last):
                    assert ("gradient", step.microbatch, step.chunk) in here


# -- memory ----------------------------------------------------------------------------------------------------------


def test_in_flight_counted_and_closed() -> None:
    kinds: list[schedule.Kind] = ["gpipe", "zb-h1"]
    others = [
        Schedule(kind=kind, stages=stages, microbatches=microbatches)
        for kind in kinds
        for stages in (1, 2, 4)
        for microbatches in range(1, 10)
    ]
    for planned in (*_random_schedules(200), *others):
        for stage in range(planned.stages):
            held = schedule.in_flight(planned, stage)
            assert max(held) == schedule.peak_in_flight(planned, stage)
            assert held[-1] == 0
            assert min(held) >= 0


def test_in_flight_numbers() -> None:
    """1F1B min(M, PP-p) (errata E13); interleaved 11, 9, 7, 5 chunks: 1.375 times on the first stage (errata E10)."""
    one = Schedule(kind="1f1b", stages=4, microbatches=8)
    assert [schedule.peak_in_flight(one, stage) for stage in range(4)] == [4, 3, 2, 1]
    two = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2)
    assert [schedule.peak_in_flight(two, stage) for stage in range(4)] == [11, 9, 7, 5]
    assert schedule.peak_in_microbatches(two, 0) == Fraction(11, 2)
    assert schedule.peak_in_microbatches(two, 0) / schedule.peak_in_flight(one, 0) == Fraction(1375, 1000)
    for stages in (2, 4, 8):
        for chunks in (2, 3, 5):
            planned = Schedule(kind="interleaved", stages=stages, microbatches=4 * stages, chunks=chunks)
            factor = 1 + Fraction(stages - 1, stages * chunks)
            assert schedule.peak_in_microbatches(planned, 0) == stages * factor
    merged = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2, merged=True)
    assert schedule.peak_in_flight(merged, 0) == 12
    assert schedule.peak_in_flight(Schedule(kind="gpipe", stages=4, microbatches=8), 3) == 8
    # ZB-H1 (errata E31): no stage holds more than the first one of 1F1B.
    zero = Schedule(kind="zb-h1", stages=4, microbatches=8)
    assert {schedule.peak_in_flight(zero, stage) for stage in range(4)} == {4}
    evaluation = Schedule(kind="1f1b", stages=4, microbatches=3, forward_only=True)
    assert schedule.in_flight(evaluation, 0) == (0, 0, 0)
    assert schedule.peak_in_flight(evaluation, 0) == 0


# -- time ------------------------------------------------------------------------------------------------------------


def _simulate(planned: Schedule, t_f: Any, t_b: Any, t_w: Any) -> list[tuple[Fraction, Fraction]]:
    """Start of the first and end of the last pass of every stage: each pass as early as order and inputs allow."""
    split = planned.kind == "zb-h1"
    times = {"F": Fraction(t_f), "B": Fraction(t_b) if split else Fraction(t_b) + t_w, "W": Fraction(t_w)}
    ends: dict[tuple[str, int, int], Fraction] = {}
    todo = [list(reversed(schedule.actions(planned, stage))) for stage in range(planned.stages)]
    begun: list[Fraction | None] = [None] * planned.stages
    free = [Fraction(0)] * planned.stages
    last = planned.stages * planned.chunks - 1
    while any(todo):
        moved = False
        for stage, waiting in enumerate(todo):
            while waiting:
                action = waiting[-1]
                place = action.chunk * planned.stages + stage
                inputs = {
                    "F": [("F", place - 1)] if place else [],
                    "B": [("F", place), *([("B", place + 1)] if place < last else [])],
                    "W": [("B", place)],
                }[action.kind]
                needed = [(kind, action.microbatch, where) for kind, where in inputs]
                if not all(need in ends for need in needed):
                    break
                start = max([free[stage], *(ends[need] for need in needed)])
                begun[stage] = start if begun[stage] is None else begun[stage]
                free[stage] = start + times[action.kind] / planned.chunks
                ends[action.kind, action.microbatch, place] = free[stage]
                waiting.pop()
                moved = True
        assert moved, "the schedule waits for itself"
    return [(start or Fraction(0), end) for start, end in zip(begun, free, strict=True)]


def _idle(planned: Schedule, t_f: Any, t_b: Any, t_w: Any) -> Fraction:
    """Idle time of a stage in the pipeline's window, from the simulation."""
    spans = _simulate(planned, t_f, t_b, t_w)
    busy = planned.microbatches * (Fraction(t_f) + (0 if planned.forward_only else Fraction(t_b) + t_w))
    return max(end for _, end in spans) - min(start for start, _ in spans) - busy


def test_bubble_is_simulated() -> None:
    """Also with groups larger than PP, micro-batches left over and merged passes: the same formula."""
    choose = random.Random(3)
    for planned in _random_schedules(150, seed=5):
        times = choose.randint(1, 5), choose.randint(0, 5), Fraction(choose.randint(0, 9), 2)
        assert schedule.bubble(planned, *times).idle == _idle(planned, *times), (planned, times)
    for microbatches in range(1, 9):
        planned = Schedule(kind="gpipe", stages=3, microbatches=microbatches)
        assert schedule.bubble(planned, 2, 3, 1).idle == _idle(planned, 2, 3, 1) == 12
    older = Schedule(kind="interleaved", stages=4, microbatches=4, chunks=2, all_warm_up=True)
    assert schedule.bubble(older, 1, 2).idle == _idle(older, 1, 2, 0) == Fraction(9, 2)
    evaluation = Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2, forward_only=True)
    assert schedule.bubble(evaluation, 2, 5).idle == _idle(evaluation, 2, 5, 0) == 3


@pytest.mark.parametrize("times", [(1, 1, 1), (2, 2, 1), (1, 2, 1), (2, 1, 1), (3, 5, 2), (4, 3, 0)])
def test_zero_bubble_is_simulated(times: tuple[int, int, int]) -> None:
    for stages in (1, 2, 3, 5):
        for microbatches in range(stages, 12):
            planned = Schedule(kind="zb-h1", stages=stages, microbatches=microbatches)
            t_f, t_b, t_w = times
            assert schedule.bubble(planned, *times).idle == _idle(planned, *times) == (stages - 1) * (t_f + t_b - t_w)


def test_zero_bubble_formula_has_limits() -> None:
    """Beyond them the simulation gives more idle time than the formula would: it is refused, not wrong."""
    late = Schedule(kind="zb-h1", stages=4, microbatches=8)
    assert _idle(late, 1, 1, 2) > 0
    with pytest.raises(JobError, match="t_w <= t_f, t_b"):
        schedule.bubble(late, 1, 1, 2)
    short = Schedule(kind="zb-h1", stages=4, microbatches=3)
    assert _idle(short, 1, 1, 1) > 3
    with pytest.raises(JobError, match="M >= PP"):
        schedule.bubble(short, 1, 1, 1)


def test_bubble_numbers() -> None:
    """PP4, M8: 3/11 of total = 27.3 %, 3/8 of ideal; 2 chunks 3/19 = 15.8 %; ZB-H1 1/9 with equal times."""
    one = schedule.bubble(Schedule(kind="1f1b", stages=4, microbatches=8), 1, 2)
    assert [one.idle, one.busy, one.total] == [9, 24, 33]
    assert [one.of_total, one.of_ideal] == [Fraction(3, 11), Fraction(3, 8)]
    assert round(float(one.of_total), 3) == 0.273
    assert schedule.bubble(Schedule(kind="gpipe", stages=4, microbatches=8), 1, 2) == one
    two = schedule.bubble(Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2), 1, 2)
    assert (two.of_total, two.of_ideal) == (Fraction(3, 19), Fraction(3, 16))
    zero = schedule.bubble(Schedule(kind="zb-h1", stages=4, microbatches=8), 1, 1, 1)
    assert [zero.idle, zero.of_total] == [3, Fraction(1, 9)]
    # Errata E29: with the forward time alone the document's fraction would be 9.1 %.
    assert round(float(3 * 1 / one.total), 3) == 0.091
    assert schedule.bubble(Schedule(kind="1f1b", stages=1, microbatches=8), 1, 2).idle == 0


def test_own_window_is_not_the_bubble() -> None:
    """With each stage's own window 1F1B at PP4, M8 gives 27, 20, 11 and 0 %; with the pipeline's 27 % for all."""
    planned = Schedule(kind="1f1b", stages=4, microbatches=8)
    own = [1 - Fraction(24) / (end - start) for start, end in _simulate(planned, 1, 2, 0)]
    assert [round(100 * float(share)) for share in own] == [27, 20, 11, 0]


# -- refusals and jobs -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "dualpipe"}, "must be one of"),
        ({"stages": 0}, "stages=0"),
        ({"microbatches": 0}, "microbatches=0"),
        ({"chunks": 2}, "only 'interleaved'"),
        ({"kind": "interleaved", "stages": 1, "chunks": 2}, "at least 2"),
        ({"kind": "interleaved", "chunks": 2, "group": 3}, "between pipeline_model_parallel_size=4"),
        ({"kind": "interleaved", "chunks": 2, "group": 9}, "num_microbatches=8"),
        ({"kind": "interleaved", "chunks": 2, "group": 7}, "leaves 1 over"),
        ({"kind": "interleaved", "chunks": 2, "receive_early": True}, "needs overlap_p2p_comm"),
        ({"kind": "interleaved", "chunks": 2, "overlapped": True}, "at most one of them"),
    ],
)
def test_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        Schedule(**{"kind": "1f1b", "stages": 4, "microbatches": 8, **options})


def test_refused_stage_and_times() -> None:
    planned = Schedule(kind="1f1b", stages=4, microbatches=8)
    for function in (schedule.warm_up, schedule.message_counts, schedule.program, schedule.peak_in_flight):
        with pytest.raises(JobError, match="stages 0 to 3"):
            function(planned, 4)
    for times in ((0, 1, 1), (1, -1, 1), (1, 1, -1)):
        with pytest.raises(JobError, match="t_f must be positive"):
            schedule.bubble(planned, *times)


def test_of_job(tiny: Callable[..., Job]) -> None:
    release = (0, 16)
    assert schedule.of_job(tiny(), release) is None
    four: dict[str, Any] = {"world_size": 8, "pipeline_model_parallel_size": 4, "num_layers": 8, "num_microbatches": 8}
    assert schedule.of_job(tiny(**four), release) == Schedule(kind="1f1b", stages=4, microbatches=8)
    unbatched = schedule.of_job(tiny(**four, batch_p2p_comm=False), release)
    assert unbatched == Schedule(kind="1f1b", stages=4, microbatches=8, batched=False)
    chunks = {**four, "virtual_pipeline_model_parallel_size": 2}
    merged: dict[str, Any] = {
        "overlap_moe_expert_parallel_comm": True,
        "num_experts": 4,
        "expert_model_parallel_size": 2,
        "expert_tensor_parallel_size": 1,
        "moe_token_dispatcher_type": "alltoall",
    }
    assert schedule.of_job(tiny(**chunks), release) == Schedule(
        kind="interleaved", stages=4, microbatches=8, chunks=2, batched=False
    )
    assert schedule.of_job(
        tiny(
            **chunks,
            overlap_p2p_comm=False,
            microbatch_group_size_per_vp_stage=8,
            **merged,
            forward_only=True,
        ),
        release,
    ) == Schedule(kind="interleaved", stages=4, microbatches=8, chunks=2, group=8, merged=True, forward_only=True)
    flush = schedule.of_job(tiny(**chunks, overlap_p2p_comm_warmup_flush=True), release)
    assert flush is not None
    assert flush.receive_early
    # Up to 0.9 a step of PP micro-batches ran all forward passes first.
    for number, all_first in (((0, 9), True), ((0, 10), False)):
        short = schedule.of_job(tiny(**{**chunks, "num_microbatches": 4}), number)
        assert short is not None
        assert short.all_warm_up is all_first
        assert schedule.warm_up(short, 3) == (8 if all_first else 4)
    single = schedule.of_job(tiny(**chunks, overlap_p2p_comm=False, batch_p2p_comm=False), release)
    assert single is not None
    assert (single.batched, single.overlapped) == (False, False)
