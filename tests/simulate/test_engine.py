"""Timelines worked out by hand. A FLOP, a byte, a call and a launch take 1 ns each, a link's latency is 100 ns."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from traceanalyzer.errors import InputError
from traceanalyzer.simulate import DeadlockError, SimulationError, simulate_programs
from traceanalyzer.simulate.costs import Clock, Costs, Link, SlowLink
from traceanalyzer.simulate.engine import run
from traceanalyzer.simulate.program import Call, Compute, Group, Host, Instruction, Program, Sync, Wait, Walked, Where
from traceanalyzer.simulate.timeline import NEVER

Make = Callable[..., Any]


def groups(*listed: tuple[str, tuple[int, ...]]) -> list[Group]:
    return [Group(role, ranks, role.upper()) for role, ranks in listed]


def times(walked: Walked, costs: Costs, program: int = 0, **more: Any) -> list[tuple[list[int], list[int]]]:
    """Start and end of every instruction of one program's first step, by rank."""
    found = run(walked, costs, **more).programs[program]
    return [(s.tolist(), e.tolist()) for s, e in zip(found.start[0], found.end[0], strict=True)]


def test_a_collective_ends_for_all_when_the_last_has_come(plain_costs: Costs, kernel: Make, call: Make) -> None:
    # 25 floats all-reduced by 2 ranks: 2 (2-1)/2 x 100 bytes = 100 ns, latency 100 ns
    walked = Walked(
        [Program((0, 1), [kernel([10, 50]), call("all_reduce", "tp", 25), kernel(5)])], groups(("tp", (0, 1)))
    )
    assert times(walked, plain_costs) == [
        ([1, 1], [11, 51]),  # launched in 1 ns
        ([11, 51], [251, 251]),  # 51 + 100 + 100
        ([251, 251], [256, 256]),
    ]


def test_each_group_ends_by_itself(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [kernel([10, 20, 30, 40]), call("all_gather", "tp", 20)]  # half of 80 bytes from each rank
    walked = Walked([Program((0, 1, 2, 3), body)], groups(("tp", (0, 2)), ("tp", (1, 3))))
    assert times(walked, plain_costs)[1] == ([11, 21, 31, 41], [171, 181, 171, 181])


def test_links_roles_and_slow_links(plain_costs: Costs, kernel: Make, call: Make) -> None:
    walked = Walked(
        [Program((0, 1, 4, 5), [kernel(0), call("all_gather", "tp", 20)])], groups(("tp", (0, 4)), ("tp", (1, 5)))
    )
    inter = plain_costs.with_changes(links={"intra": Link(100, 1e9), "inter": Link(300, 5e8)})
    assert times(walked, inter)[1][1] == [382] * 4  # call returns at 2, 300 + 40 bytes at half a byte a ns
    tp = inter.with_changes(roles={"tp": {"inter": Link(7, 1e9)}})
    assert times(walked, tp)[1][1] == [49] * 4
    slow = inter.with_changes(slow_link=(SlowLink(1, 5, 3.0),))
    assert times(walked, slow)[1][1] == [382, 542, 382, 542]


def test_a_stream_runs_its_calls_in_order(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [
        call("all_gather", "tp", 20, handle=1),
        call("all_gather", "tp", 20, handle=2),
        kernel(3),
        Wait(2),
        kernel(4),
    ]
    walked = Walked([Program((0, 1), body)], groups(("tp", (0, 1))))
    found = times(walked, plain_costs)
    assert [f[0][0] for f in found] == [1, 141, 3, NEVER, 281]  # the kernel does not wait for calls with a handle
    assert [f[1][0] for f in found] == [141, 281, 6, NEVER, 285]


def test_a_call_waits_for_the_compute_before_it_alone(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [kernel(50), call("reduce_scatter", "dp", 20, handle=1), kernel(500), Wait(1), kernel(1)]
    walked = Walked([Program((0, 1), body)], groups(("dp", (0, 1))))
    found = times(walked, plain_costs)
    assert found[1] == ([51, 51], [191, 191])
    assert found[4] == ([551, 551], [552, 552])  # hidden: the last kernel follows the one before at once


def test_hosts_wait_only_for_what_they_are_told_to(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [call("all_gather", "tp", 20, handle=1), kernel(500), Wait(1, host=True), Host("data"), kernel(2), Sync()]
    walked = Walked([Program((0, 1), body)], groups(("tp", (0, 1))))
    found = run(walked, plain_costs).programs[0]
    assert found.issue[0, :, 0].tolist() == [0, 1, 2, 141, 1141, 1142]
    assert found.end[0, 4].tolist() == [1144, 1144]  # launched at 1142, long behind the kernel of 500
    assert found.finish.tolist() == [1144, 1144]


def test_calls_launched_as_one_are_one_kernel(plain_costs: Costs, call: Make) -> None:
    body = [call("all_gather", "tp", 20, coalesce=0), call("all_gather", "tp", 60, coalesce=0)]
    walked = Walked([Program((0, 1), body)], groups(("tp", (0, 1))))
    # both calls take 1 ns of the host; one latency, 40 and 120 bytes
    assert times(walked, plain_costs) == [([2, 2], [262, 262])] * 2


def test_messages_end_together_and_a_batch_with_its_last(plain_costs: Costs, kernel: Make, call: Make) -> None:
    def ring(of: tuple[int, ...], to: list[int], back: list[int]) -> list[Call]:
        more = {"role": "cp", "coalesce": 0}
        return [
            call("send", elems=5, peer=np.array(to), **more),
            call("recv", elems=5, peer=np.array(back), **more),
        ]

    body = [kernel([10, 20, 60]), *ring((0, 1, 2), [1, 2, 0], [2, 0, 1])]
    walked = Walked([Program((0, 1, 2), body)], groups(("cp", (0, 1, 2))))
    # of 0, 1, 2 the last of the two neighbours comes at 61, 61, 61: each has rank 2 beside it
    assert times(walked, plain_costs)[1:] == [([11, 21, 61], [181, 181, 181])] * 2
    # ranks 0 and 1 alone exchange at 21 if rank 2 has nothing to do with them
    pair = [kernel([10, 20]), *ring((0, 1), [1, 0], [1, 0])]
    walked = Walked([Program((0, 1), pair)], groups(("cp", (0, 1))))
    assert times(walked, plain_costs)[1] == ([11, 21], [141, 141])


def test_a_collective_behind_batches_that_not_all_made(plain_costs: Costs, call: Make) -> None:
    """The middle of three ranks makes two batches, the others one: the all-reduce is one call all the same."""

    def batch(op: str, peer: int, number: int) -> Call:
        made: Call = call(op, "pp", 5, peer=np.array([peer]), coalesce=number)
        return made

    bodies = [
        [batch("send", 1, 0)],
        [batch("recv", 0, 0), batch("send", 2, 1)],
        [batch("recv", 1, 0)],
    ]
    programs = [Program((rank,), [*body, call("all_reduce", "pp", 3, 3)]) for rank, body in enumerate(bodies)]
    walked = Walked(programs, groups(("pp", (0, 1, 2))))
    # a message of 20 bytes takes 120 ns: 0 to 1 from 1 on, 1 to 2 behind it; the reduction of 12 bytes 100 + 16
    assert [times(walked, plain_costs, rank)[-1][1] for rank in range(3)] == [[357], [357], [357]]


def test_a_slow_direction_slows_one_message(plain_costs: Costs, call: Make) -> None:
    send = [call("send", "pp", 5, peer=np.array([1])), call("recv", "pp", 5, peer=np.array([1]))]
    answer = [call("recv", "pp", 5, peer=np.array([0])), call("send", "pp", 5, peer=np.array([0]))]
    walked = Walked([Program((0,), send), Program((1,), answer)], groups(("pp", (0, 1))))
    assert [t[1] for t in times(walked, plain_costs)] == [[121], [241]]
    slow = plain_costs.with_changes(slow_link=(SlowLink(1, 0, 10.0),))
    assert [t[1] for t in times(walked, slow)] == [[121], [421]]


def test_groups_span_programs(plain_costs: Costs, kernel: Make, call: Make) -> None:
    first = Program((0, 3), [kernel([10, 90]), call("all_reduce", "world", 0)])
    second = Program((1, 2), [kernel(40), kernel(5), call("all_reduce", "world", 0)])
    walked = Walked([first, second], groups(("world", (0, 1, 2, 3))))
    assert times(walked, plain_costs, 0)[1] == ([11, 91], [191, 191])
    assert times(walked, plain_costs, 1)[2] == ([46, 46], [191, 191])


def test_steps_go_on_where_the_last_one_ended(plain_costs: Costs, kernel: Make, call: Make) -> None:
    walked = Walked([Program((0, 1), [kernel([5, 10]), call("all_reduce", "tp", 0)])], groups(("tp", (0, 1))))
    found = run(walked, plain_costs, steps=3, start_ns=1000).programs[0]
    assert found.end[:, 1, 0].tolist() == [1111, 1221, 1331]
    assert found.issue[:, 0, 0].tolist() == [1000, 1002, 1004]  # nothing holds the host


def test_slow_ranks_and_jitter(plain_costs: Costs, kernel: Make) -> None:
    walked = Walked([Program((0, 1), [Host("data"), kernel(1000), kernel(1000)])], [])
    slow = plain_costs.with_changes(slow_gpu={1: 1.5}, slow_host={0: 2.0}, slow_host_cost={(0, "data"): 3.0})
    found = times(walked, slow)
    assert found[0] == ([0, 0], [6000, 1000])
    assert found[2][1] == [6002 + 2000, 1001 + 3000]  # a slow host launches in 2 ns
    noisy = plain_costs.with_changes(jitter=0.1)
    once, again, other = (run(walked, noisy, seed=s, steps=2).programs[0].end for s in (1, 1, 2))
    assert (once == again).all()
    assert (once != other).any()
    # a rank's noise is its own: it does not depend on who is simulated with it
    alone = run(Walked([Program((1,), walked.programs[0].instructions)], []), noisy, seed=1, steps=2).programs[0].end
    assert (alone[..., 0] == once[..., 1]).all()
    assert (run(walked, noisy, seed=1, steps=2, keep=[1]).programs[0].end[..., 0] == once[..., 1]).all()


def one_forward_one_backward(stages: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    orders = []
    for stage in range(stages):
        ahead = min(stages - 1 - stage, microbatches)
        order = [("F", 0, m) for m in range(ahead)]
        for m in range(microbatches - ahead):
            order += [("F", 0, ahead + m), ("B", 0, m)]
        orders.append(order + [("B", 0, m) for m in range(microbatches - ahead, microbatches)])
    return orders


def interleaved(stages: int, chunks: int, microbatches: int) -> list[list[tuple[str, int, int]]]:
    """The order of Narayanan et al. 2021, section 2.2, as Megatron walks it."""
    total, block = chunks * microbatches, stages * chunks
    orders = []
    for stage in range(stages):
        forward = [("F", k % block // stages, k // block * stages + k % stages) for k in range(total)]
        backward = [("B", chunks - 1 - c, m) for _, c, m in forward]
        ahead = min(total, (stages - stage - 1) * 2 + (chunks - 1) * stages)
        order = forward[:ahead]
        for k in range(total - ahead):
            order += [forward[ahead + k], backward[k]]
        orders.append(order + backward[total - ahead :])
    return orders


@pytest.mark.parametrize(
    ("orders", "expected"),
    [
        (one_forward_one_backward(4, 8), Fraction(3, 11)),
        (one_forward_one_backward(2, 3), Fraction(1, 4)),
        (interleaved(2, 2, 4), Fraction(1, 9)),
        (interleaved(4, 2, 8), Fraction(3, 19)),
    ],
)
def test_bubbles_are_those_of_the_schedule(
    pipeline: Make, free_links: Costs, orders: list[Any], expected: Fraction
) -> None:
    found = simulate_programs(pipeline(orders, 1000, 2000), costs=free_links).truth()["bubble"]
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["rows"]]
    assert [Fraction(r["bubble_ns"], r["window_ns"]) for r in rows] == [expected] * len(orders)


def test_orders_that_do_not_meet_are_named(plain_costs: Costs, kernel: Make, call: Make) -> None:
    first = Program((0,), [call("all_reduce", "tp", 1), call("all_reduce", "dp", 1)])
    second = Program((1,), [call("all_reduce", "dp", 1), call("all_reduce", "tp", 1)])
    walked = Walked([first, second], groups(("tp", (0, 1)), ("dp", (0, 1))))
    with pytest.raises(DeadlockError) as raised:
        run(walked, plain_costs)
    assert sorted((h.rank, h.call, h.waits_for) for h in raised.value.hang) == [
        (0, "all_reduce on tp (forward, step 0)", (1,)),
        (1, "all_reduce on dp (forward, step 0)", (0,)),
    ]


def test_hang_is_allowed(plain_costs: Costs, kernel: Make, call: Make) -> None:
    body = [kernel(5), call("all_reduce", "tp", 1), kernel(5)]
    walked = Walked([Program((0,), body), Program((1,), [kernel(5)])], groups(("tp", (0, 1))))
    with pytest.raises(DeadlockError, match=r"rank 0 waits in all_reduce on tp \(forward, step 0\) for rank 1"):
        run(walked, plain_costs)
    found = run(walked, plain_costs, allow_hang=True)
    assert found.programs[0].start[0, :, 0].tolist() == [1, 6, NEVER]
    assert found.programs[0].end[0, :, 0].tolist() == [6, NEVER, NEVER]
    assert found.hang is not None
    assert found.hang[0].waits_for == (1,)


def test_messages_that_nobody_sends(plain_costs: Costs, call: Make) -> None:
    walked = Walked(
        [Program((0,), [call("recv", "pp", 5, peer=np.array([1]))]), Program((1,), [])], groups(("pp", (0, 1)))
    )
    with pytest.raises(DeadlockError, match="rank 0 waits in recv from rank 1 on pp"):
        run(walked, plain_costs)


def test_another_operation_on_the_other_side(plain_costs: Costs, call: Make) -> None:
    programs = [Program((0,), [call("all_reduce", "tp", 2)]), Program((1,), [call("all_gather", "tp", 2)])]
    with pytest.raises(
        DeadlockError, match="rank 0 waits in all_reduce on tp, where others call all_gather, for rank 1"
    ):
        run(Walked(programs, groups(("tp", (0, 1)))), plain_costs)


def test_programs_that_cannot_run(plain_costs: Costs, call: Make) -> None:
    with pytest.raises(SimulationError, match="no group of it"):
        run(Walked([Program((0, 1), [call("all_reduce", "tp", 1)])], []), plain_costs)
    with pytest.raises(SimulationError, match="handle 7"):
        run(Walked([Program((0,), [Wait(7)])], []), plain_costs)
    with pytest.raises(SimulationError, match="rank 0 is in two groups of role tp"):
        run(Walked([Program((0, 1), [])], groups(("tp", (0, 1)), ("tp", (0,)))), plain_costs)


def test_costs_from_a_file(tmp_path: Any) -> None:
    path = tmp_path / "costs.toml"
    path.write_text(
        """
ranks_per_node = 4
jitter = 0.02
[flops_per_s.gemm]
bfloat16 = 1e14
[links.inter]
alpha_ns = 7
[roles.pp.inter]
bytes_per_s = 1e10
[host_ns]
data = 9
[slow_gpu]
3 = 1.5
[[slow_link]]
from = 0
to = 8
factor = 4
[clocks.node-0001]
offset_ns = -5
""",
        encoding="utf-8",
    )
    costs = Costs.read(path)
    assert (costs.rate("gemm", "bfloat16"), costs.rate("gemm", "float32"), costs.rate("norm", "bfloat16")) == (
        1e14,
        2.5e14,
        3e13,
    )
    assert costs.link("tp", "inter") == Link(7, 4.5e10)
    assert costs.link("pp", "inter") == Link(25_000, 1e10)
    assert costs.host_ns == {"data": 9, "python": 50_000}
    assert (costs.slow_gpu, costs.slow_link) == ({3: 1.5}, (SlowLink(0, 8, 4.0),))
    assert (costs.clock_of(3), costs.clock_of(4)) == (Clock(), Clock(offset_ns=-5))
    for text, said in (
        ("speed = 1", "no such cost: speed"),
        ("jitter = 2", "below 1"),
        ("[links.intra]\nbeta = 1", "beta"),
    ):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(InputError, match=said):
            Costs.read(path)


def test_compute_takes_the_larger_of_flops_and_bytes(plain_costs: Costs) -> None:
    where = Where("forward")
    body: list[Instruction] = [Compute("a", "gemm", 30, 20, where), Compute("b", "norm", 10, np.array([20, 5]), where)]
    found = times(Walked([Program((0, 1), body)], []), plain_costs)
    assert found == [([1, 1], [31, 31]), ([31, 31], [51, 41])]
