"""Orders of passes and messages: small tables by hand, and the expectation's schedules over random numbers."""

from __future__ import annotations

import random

import pytest

from traceanalyzer.errors import JobError
from traceanalyzer.expect import schedule as expected
from traceanalyzer.simulate import schedules
from traceanalyzer.simulate.schedules import Await, Exchange, Launch, Order, Pass


def _words(order: Order, stage: int) -> str:
    """Passes as F0 B0 (one chunk) or F0.1: micro-batch and chunk."""
    many = order.chunks > 1
    return " ".join(
        f"{one.kind}{one.microbatch}{f'.{one.chunk}' if many else ''}" for one in schedules.passes(order, stage)
    )


@pytest.mark.parametrize(
    ("order", "wanted"),
    [
        (Order(kind="none", microbatches=2), ["F0 B0 F1 B1"]),
        (Order(kind="none", microbatches=2, forward_only=True), ["F0 F1"]),
        (
            Order(kind="1f1b", stages=3, microbatches=4),
            ["F0 F1 F2 B0 F3 B1 B2 B3", "F0 F1 B0 F2 B1 F3 B2 B3", "F0 B0 F1 B1 F2 B2 F3 B3"],
        ),
        (Order(kind="1f1b", stages=3, microbatches=1), ["F0 B0", "F0 B0", "F0 B0"]),
        (Order(kind="gpipe", stages=2, microbatches=3), ["F0 F1 F2 B2 B1 B0", "F0 F1 F2 B2 B1 B0"]),
        (  # the paper's figure 3 for three stages: no stage holds more than 3, 2, 1 micro-batches
            Order(kind="zb-h1", stages=3, microbatches=4),
            [
                "F0 F1 F2 B0 W0 F3 B1 W1 B2 W2 B3 W3",
                "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3",
                "F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 W2 W3",
            ],
        ),
        (  # two chunks, groups of two micro-batches: 2 + 2 passes of warm-up before stage 0, 2 before stage 1
            Order(kind="interleaved", stages=2, microbatches=2, chunks=2),
            ["F0.0 F1.0 F0.1 F1.1 B0.1 B1.1 B0.0 B1.0", "F0.0 F1.0 F0.1 B0.1 F1.1 B1.1 B0.0 B1.0"],
        ),
        (  # groups of three: 2 + 3 passes of warm-up before stage 0, 3 before stage 1
            Order(kind="interleaved", stages=2, microbatches=3, chunks=2, group=3),
            [
                "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 B0.1 B1.1 B2.1 B0.0 B1.0 B2.0",
                "F0.0 F1.0 F2.0 F0.1 B0.1 F1.1 B1.1 F2.1 B2.1 B0.0 B1.0 B2.0",
            ],
        ),
    ],
)
def test_passes(order: Order, wanted: list[str]) -> None:
    assert [_words(order, stage) for stage in range(order.stages)] == wanted


def test_exchanges_of_1f1b() -> None:
    """Stage 1 of 3 with 2 micro-batches: what arrives before a pass, and sends that share a batch with receives."""
    events = schedules.order_of(Order(kind="1f1b", stages=3, microbatches=2), 1)
    found = [
        [f"{m.op} {m.content} {m.microbatch} {m.toward}" for m in event.messages]
        if isinstance(event, Exchange)
        else f"{event.kind}{event.microbatch}"
        if isinstance(event, Pass)
        else type(event).__name__
        for event in events
    ]
    assert found == [
        ["recv activation 0 previous"],
        "F0",
        ["send activation 0 next"],
        ["recv activation 1 previous"],
        "F1",
        ["send activation 1 next", "recv gradient 0 next"],
        "B0",
        ["send gradient 0 previous"],
        ["recv gradient 1 next"],
        "B1",
        ["send gradient 1 previous"],
        "Launch",
    ]


def test_every_handle_is_awaited_once_after_its_message() -> None:
    """But for the last activation of a stage, which Megatron leaves alone."""
    for early in (False, True):
        order = Order(
            kind="interleaved", stages=4, microbatches=8, chunks=2, batched=False, overlapped=True, early=early
        )
        for stage in range(4):
            known: list[int] = []
            sends: set[int] = set()
            awaited: list[int] = []
            for event in schedules.order_of(order, stage):
                if isinstance(event, Exchange):
                    known += [m.handle for m in event.messages if m.handle is not None]
                    sends |= {m.handle for m in event.messages if m.handle is not None and m.op == "send"}
                elif isinstance(event, Await):
                    assert event.handle in known
                    awaited.append(event.handle)
            assert len(awaited) == len(set(awaited))
            left = set(known) - set(awaited)
            assert left <= sends
            assert len(left) <= 1


def test_receives_are_there_before_their_pass() -> None:
    """Overlapped exchanges: the activation of a forward pass, and the gradient of a backward pass, was waited for."""
    order = Order(kind="interleaved", stages=3, microbatches=6, chunks=2, batched=False, overlapped=True)
    for stage in range(3):
        arrived: set[tuple[str, int, int]] = set()
        of_handle: dict[int, tuple[str, int, int]] = {}
        for event in schedules.order_of(order, stage):
            if isinstance(event, Exchange):
                for m in event.messages:
                    if m.op == "recv":
                        assert m.handle is not None
                        of_handle[m.handle] = (m.content, m.microbatch, m.chunk)
            elif isinstance(event, Await) and event.handle in of_handle:
                arrived.add(of_handle[event.handle])
            elif isinstance(event, Pass):
                content, end = ("activation", (0, 0)) if event.kind == "F" else ("gradient", (2, 1))
                if (stage, event.chunk) != end:
                    assert (content, event.microbatch, event.chunk) in arrived


def test_launches() -> None:
    """Interleaved: gradients of a chunk start as many backward passes late as the stage's number, the rest at the end;
    the parameters of the first two chunks at once, later ones as early as the stage's number."""
    order = Order(kind="interleaved", stages=2, microbatches=2, chunks=3)
    for stage, wanted in ((0, "p0 p1 p2 g2 g1 g0"), (1, "p0 p1 p2 g2 g1 g0")):
        events = schedules.order_of(order, stage)
        launches = [f"{e.what[0]}{e.chunk}" for e in events if isinstance(e, Launch)]
        assert " ".join(launches) == wanted
        passes_before = [
            sum(isinstance(b, Pass) and b.kind == "B" for b in events[: events.index(e)])
            for e in events
            if isinstance(e, Launch) and e.what == "gradients"
        ]
        assert passes_before == ([2, 4, 6] if stage == 0 else [3, 5, 6])


@pytest.mark.parametrize(
    ("order", "words"),
    [
        (Order(kind="1f1b", stages=2, microbatches=4, chunks=2), "only 'interleaved'"),
        (Order(kind="interleaved", stages=4, microbatches=6, chunks=2), "leaves 2 over groups of 4"),
        (Order(kind="interleaved", stages=4, microbatches=2, chunks=2), "must be from pipeline_model_parallel_size=4"),
        (Order(kind="none", stages=2, microbatches=2), "it is for 1"),
        (Order(kind="1f1b", stages=2, microbatches=0), "microbatches=0"),
    ],
)
def test_numbers_that_make_no_schedule(order: Order, words: str) -> None:
    with pytest.raises(JobError, match=words):
        schedules.order_of(order, 0)


def test_no_such_stage() -> None:
    with pytest.raises(JobError, match="stages 0 to 1"):
        schedules.order_of(Order(kind="1f1b", stages=2, microbatches=2), 2)


def _random(rng: random.Random) -> tuple[expected.Schedule, Order] | None:
    """The same random numbers for both; None where they make no schedule, which both must say."""
    kind = rng.choice(["gpipe", "1f1b", "interleaved", "zb-h1"])
    interleaved = kind == "interleaved"
    stages, microbatches = rng.randint(2, 6), rng.randint(1, 14)
    batched = rng.random() < 0.5
    overlapped = interleaved and not batched and rng.random() < 0.7
    early, combined = overlapped and rng.random() < 0.4, interleaved and rng.random() < 0.2
    common = {
        "kind": kind,
        "stages": stages,
        "microbatches": microbatches,
        "chunks": rng.randint(2, 4) if interleaved else 1,
        "group": rng.choice([0, stages, stages + 1, microbatches]) if interleaved else 0,
        "forward_only": rng.random() < 0.2,
        "batched": batched,
        "overlapped": overlapped,
    }
    order = Order(**common, early=early, combined=combined)
    try:
        other = expected.Schedule(**common, receive_early=early, merged=combined)
    except JobError:
        with pytest.raises(JobError):
            schedules.order_of(order, 0)
        return None
    return other, order


def test_agrees_with_the_expectation() -> None:
    """Passes, and messages with their partners in each exchange, in order."""
    rng = random.Random(20)
    compared = 0
    for _ in range(120):
        pair = _random(rng)
        if pair is None:
            continue
        other, order = pair
        for stage in range(order.stages):
            theirs = [
                (step.kind, step.microbatch, step.chunk)
                if isinstance(step, expected.Action)
                else [(m.op, m.content, m.microbatch, m.chunk, m.toward, m.peer) for m in step.messages]
                for step in expected.program(other, stage)
            ]
            ours = [
                (step.kind, step.microbatch, step.chunk)
                if isinstance(step, Pass)
                else [(m.op, m.content, m.microbatch, m.chunk, m.toward, m.peer) for m in step.messages]
                for step in schedules.order_of(order, stage)
                if isinstance(step, Pass | Exchange)
            ]
            assert ours == theirs, (order, stage)
            compared += 1
    assert compared > 250
