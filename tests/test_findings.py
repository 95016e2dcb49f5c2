"""Every finding by itself: what it says of literal tables, its ceiling and place, and what it does not fire on."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest

from traceanalyzer.causes import Cause
from traceanalyzer.diff import Coverage, Diff, JobConflict, Unattributed
from traceanalyzer.findings import TABLE, Facts, Finding, find, ranked
from traceanalyzer.job import Job
from traceanalyzer.matching import Cell

MS = 1_000_000
JOB = Job(world_size=4, tensor_model_parallel_size=2, bf16=True)

Row = dict[str, Any]


def steps(*numbers: int, ranks: int = 4, dur_ns: int = 100 * MS, **changes: Any) -> list[Row]:
    """Whole steps of 100 ms of four ranks."""
    return [
        {"rank": r, "step": n, "dur_ns": dur_ns, "complete": True, **changes}
        for n in (numbers or (1,))
        for r in range(ranks)
    ]


def rank_rows(*ranks: int, world: int | None = 4, **changes: Any) -> list[Row]:
    """Recorded ranks, two a host."""
    return [
        {
            "rank": r,
            "source": "kineto",
            "source_file": f"rank{r}.json",
            "host": f"node{r // 2}",
            "world_size": world,
            **changes,
        }
        for r in (ranks or range(4))
    ]


def facts(**given: Any) -> Facts:
    """Facts of four ranks and one step of 100 ms; ``given``: tables, or job, diff, refused, expected_bubble."""
    fields = {k: given.pop(k) for k in ("job", "diff", "refused", "expected_bubble") if k in given}
    return Facts({"step_time": steps(), "rank": rank_rows(), **given}, **fields)


def codes(found: list[Finding]) -> list[str]:
    return [f.code for f in found]


def only(found: list[Finding]) -> Finding:
    (one,) = found
    return one


def coverage(**changes: Any) -> Coverage:
    fields: dict[str, Any] = {
        "ranks_present": (0, 1, 2, 3), "ranks_declared": 4, "steps": (1,), "step_evidence": ("profiler_step",), "calls": 100,
        "calls_outside_steps": 0, "kernels": 100, "kernels_attributed": 100, "kernels_before_window": 0, "bytes_known": 1000,
        "bytes_attributed": 1000, "calls_of_unknown_bytes": 0, "kernel_time_ns": MS, "kernel_time_attributed_ns": MS,
        "role_evidence": (("description", 100),), "attributed": 1.0, "judged": 1.0, "unattributed": (),
        "import_status": "complete",
    }  # fmt: skip
    return Coverage(**{**fields, **changes})


def cell(verdict: str = "match", **changes: Any) -> Cell:
    """tp all-gathers of all ranks in step 1: 10 expected, of 100 off-rank bytes each, 5 ms exposed."""
    fields: dict[str, Any] = {
        "role": "tp", "op": "all_gather", "phase": "forward", "stage": 0, "dtype": "bfloat16", "group_size": 2,
        "payload_bytes_each": 200, "components": ("attention.qkv",), "calls_expected": 10, "calls_measured": 10,
        "payload_bytes_expected": 2000, "payload_bytes_measured": 2000, "off_rank_bytes_expected": Fraction(1000),
        "off_rank_bytes_measured": Fraction(1000), "avoidable_bytes": 0, "avoidable": (), "verdict": verdict,
        "time_ns": 8 * MS, "exposed_ns": 5 * MS, "ranks": (0, 1, 2, 3), "steps": (1,),
    }  # fmt: skip
    return Cell(**{**fields, **changes})


def diff(*cells: Cell, verdict: str = "differs", conflicts: tuple[JobConflict, ...] = (), **of_coverage: Any) -> Diff:
    return Diff(
        "run.parquet", JOB, "intended", "megatron", "all", ("all",), cells, coverage(**of_coverage), conflicts, (), verdict,
        0.99, 0.0,
    )  # fmt: skip


def classes(compute: int = 60, communication: int = 20, starved: int | None = 5, **changes: Any) -> list[Row]:
    """What four ranks did in step 1, in ms; ``changes``: column -> {rank: ms}."""
    columns = {
        "compute_ns": compute,
        "communication_ns": communication,
        "pp_ns": 0,
        "copy_ns": 0,
        "launch_starved_ns": starved,
        "idle_ns": 5,
    }
    return [
        {
            "rank": r,
            "step": 1,
            "complete": True,
            **{n: None if ms is None else changes.get(n, {}).get(r, ms) * MS for n, ms in columns.items()},
        }
        for r in range(4)
    ]


# -- order and noise ---------------------------------------------------------------------------------------------------


def finding(code: str, kind: Any, gain: int | None = None, **more: Any) -> Finding:
    return Finding(code, kind, f"{code}.", "proven", gain, **more)


def test_order() -> None:
    """What forbids judging, wrong traffic, conflicts, causes by ceilings, data, and last what nothing can be done about."""
    slow = finding("slow", "time", 9)
    found = [
        finding("drift", "data"),
        finding("regather", "avoidable", 99),
        Finding("exposed", "time", "exposed.", "limit", 98, place={"axis": "DP"}),
        Finding("late", "time", "late.", "limit", 1, place={"ranks": [3]}),
        finding("bubble", "time", 50, because_of=slow),
        finding("waiting", "time", 70, because_of=slow),
        finding("fp32", "avoidable", 10, remedy="grad_reduce_in_bf16"),
        finding("mask", "avoidable", gain_bytes=2**20 - 1, remedy="reset_attention_mask"),
        finding("padding", "avoidable", gain_bytes=2**20, remedy="ddp_pad_buckets"),
        slow,
        finding("conflict", "conflict"),
        finding("missing", "verdict"),
        finding("twice", "data", forbids=True),
    ]
    assert codes(ranked(found)) == [
        "twice", "missing", "conflict", "fp32", "slow", "waiting", "bubble", "late", "padding", "drift", "regather",
        "exposed", "mask",
    ]  # fmt: skip


def test_an_effect_of_an_effect_stands_behind_both() -> None:
    owner = finding("slow", "time", 9)
    effect = finding("waiting", "time", 8, because_of=owner)
    assert codes(ranked([finding("bubble", "time", 7, because_of=effect), effect, owner])) == [
        "slow",
        "waiting",
        "bubble",
    ]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((5, 6, 7, 6), 6),
        ((0, 0, 0, 90), None),  # once is no habit
        ((1, 40, 2, 30), None),  # more spread than size
        ((0, 0, 0, 0), None),
    ],
)
def test_what_lasts_over_steps(values: tuple[int, ...], expected: int | None) -> None:
    """The lower median of the steps, if it exceeds the distance of the quartiles. Half a percent of 100 ms is 0.5 ms."""
    known = facts(step_time=steps(1, 2, 3, 4))
    lasting = known.lasting({n + 1: v * MS for n, v in enumerate(values)})
    assert lasting == (None if expected is None else expected * MS)


def test_steps_that_no_profiler_saw_say_nothing_of_time() -> None:
    """A hook records every step, a profiler a few: of the others the time is unknown, not zero."""
    known = facts(step_time=steps(1, 2, 3, 4), time_classes=classes())
    assert known.timed_steps == (1,)
    assert known.lasting({1: 6 * MS}) == 6 * MS


def test_what_is_less_than_a_step_can_show() -> None:
    assert facts().lasting({1: 499_999}) is None
    assert facts().lasting({1: 500_000}) == 500_000


def test_what_clocks_leave_open_is_not_claimed_between_ranks() -> None:
    known = facts(clocks=[{"rank": 0, "open_ns": 3 * MS}])
    assert known.lasting({1: 2 * MS}) == 2 * MS
    assert known.lasting({1: 2 * MS}, between_ranks=True) is None


def test_a_run_without_anything_odd() -> None:
    clean = facts(time_classes=classes(starved=0), diff=diff(cell(), verdict="match"), job=JOB)
    assert find(clean) == []


def test_every_rule_copes_with_nothing() -> None:
    assert [list(rule(Facts({}), ())) for rule in TABLE] == [[] for _ in TABLE]


# -- the recording -----------------------------------------------------------------------------------------------------


def test_a_rank_in_two_files() -> None:
    rows = [*rank_rows(), *rank_rows(2, source_file="again.json")]
    one = only(find(facts(rank=rows, refused="rank 2 was recorded more than once")))
    assert (one.code, one.forbids, one.place) == ("rank_twice", True, {"ranks": [2]})
    assert one.sentence == (
        "Rank 2 was recorded more than once (again.json and rank2.json): traffic and time would count twice, so nothing is "
        "judged."
    )


def test_one_rank_of_two_sources_is_no_duplicate() -> None:
    assert find(facts(rank=[*rank_rows(), *rank_rows(source="hook")])) == []


def test_a_refused_comparison() -> None:
    one = only(find(facts(refused="the job lacks hidden_size")))
    assert (one.code, one.forbids) == ("not_compared", True)
    assert one.sentence.endswith("the job lacks hidden_size")


LOST = {"rank": 1, "severity": "data_loss", "code": "buffer_full", "sentence": "...", "source_file": "rank1.json"}


def test_lost_events_explain_what_looks_missing_on_their_rank() -> None:
    found = find(facts(issue=[LOST], diff=diff(cell("missing", ranks=(1,), calls_measured=8))))
    assert codes(found) == ["lost_events", "missing"]
    assert found[0].forbids
    assert found[1].because_of is found[0]


def test_lost_events_elsewhere_explain_nothing() -> None:
    found = find(facts(issue=[LOST], diff=diff(cell("missing", ranks=(2,), calls_measured=8))))
    assert codes(found) == ["missing", "lost_events"]
    assert found[0].because_of is None


def test_warnings_are_no_loss() -> None:
    assert find(facts(issue=[{**LOST, "severity": "warning"}])) == []


def test_missing_ranks() -> None:
    one = only(find(facts(rank=rank_rows(0, 1, 3))))
    assert (one.code, one.place) == ("ranks_missing", {"ranks": [2]})
    assert one.sentence.startswith("1 of 4 ranks is not in this run (2)")


def test_a_world_of_unknown_size_lacks_nobody() -> None:
    assert find(facts(rank=rank_rows(0, 1, world=None))) == []


def test_a_cut_step() -> None:
    one = only(find(facts(step_time=[*steps(1), *steps(2, ranks=2, complete=False)])))
    assert (one.code, one.place, one.forbids) == ("step_cut", {"ranks": [0, 1], "step": 2}, False)


def test_calls_behind_the_last_whole_step() -> None:
    """A mark is written when it ends, so a step that was cut has none: 60 of 100 calls of step 2, 3 of a log on rank 1."""
    rows = [{"rank": r, "last_step": 1, "calls": n, "calls_of_step": 100} for r, n in ((0, 60), (1, 3))]
    one = only(find(facts(after_steps=rows)))
    assert (one.code, one.place, one.forbids) == ("step_cut", {"ranks": [0], "step": 2}, False)
    assert one.sentence == (
        "Behind step 1, the last whole one, rank 0 recorded up to 60 calls more, of 100 a step: the recording ends in the "
        "middle of a step, which is left out of every figure."
    )


def test_a_step_that_a_lost_file_cut_is_its_effect() -> None:
    found = find(facts(issue=[LOST], step_time=[*steps(1), {**steps(2, complete=False)[0], "rank": LOST["rank"]}]))
    assert [(f.code, f.because_of and f.because_of.code) for f in found] == [
        ("lost_events", None),
        ("step_cut", "lost_events"),
    ]


def test_only_a_cut_step_forbids_judging() -> None:
    assert only(find(facts(step_time=steps(2, complete=False)))).forbids


def test_unattributed_communication() -> None:
    left = Unattributed("deep_ep::dispatch", 640, 180 * MS, "no recorded call explains it")
    one = only(find(facts(diff=diff(cell(), verdict="cannot be judged", attributed=0.5, unattributed=(left,)))))
    assert (one.code, one.forbids) == ("unattributed_communication", True)
    assert one.sentence == (
        "640 communication kernels of 180.000 ms are explained by no call (most: deep_ep::dispatch, no recorded call "
        "explains it): their bytes are unknown."
    )


def test_low_coverage() -> None:
    one = only(find(facts(diff=diff(cell(), verdict="cannot be judged", judged=0.8379))))
    assert (one.code, one.forbids) == ("low_coverage", True)
    assert one.sentence == "Only 83.7 % of the communication can be judged, less than the 99 % that a verdict needs."


def clock(rank: int, offset: int = 0, drift: float = 0.0, since: int | None = None, **changes: Any) -> Row:
    return {
        "rank": rank, "host": f"node{rank // 2}", "reference_rank": 0, "since_ns": since, "offset_ns": offset,
        "drift_ppb": drift, "calls": 50, "open_ns": 1000, "residual_p95_ns": 900, "residual_max_ns": 2000, **changes,
    }  # fmt: skip


def test_of_clocks_with_few_calls_that_one_was_set_by_which_a_step_lasted_longer() -> None:
    rows = [clock(r, residual_max_ns=10 * MS) for r in range(4)]
    longer = {(2, 2): 120 * MS, (3, 2): 120 * MS}
    durations = [{**r, "dur_ns": longer.get((r["rank"], r["step"]), r["dur_ns"])} for r in steps(1, 2, 3)]
    one = only(find(facts(clocks=rows, step_time=durations)))
    assert (one.code, one.place) == ("clock_step", {"ranks": [2, 3], "host": "node1"})


def test_a_clock_that_was_set() -> None:
    rows = [clock(0), clock(2), clock(2, 20 * MS, since=5)]
    one = only(find(facts(clocks=rows)))
    assert (one.code, one.place) == ("clock_step", {"ranks": [2], "host": "node1"})
    assert "jumped during the recording by up to 20.000 ms" in one.sentence


def test_a_drift_that_no_quartz_has_is_a_clock_that_was_set() -> None:
    assert codes(find(facts(clocks=[clock(0), clock(2, 0, 4.2e7)]))) == ["clock_step"]


def test_a_clock_that_was_set_where_few_calls_tell() -> None:
    """The fit follows the calls after it was set; those before end 10 ms apart."""
    rows = [clock(0, residual_max_ns=10 * MS), clock(2, 20 * MS, residual_max_ns=10 * MS)]
    one = only(find(facts(clocks=rows)))
    assert (one.code, one.place["ranks"]) == ("clock_step", [2])
    assert "end up to 10.000 ms apart on rank 2" in one.sentence


def test_a_clock_that_drifts() -> None:
    one = only(find(facts(clocks=[clock(0), clock(2, 0, -400_000.0), clock(3, 0, -400_000.0)])))
    assert (one.code, one.place) == ("clock_drift", {"ranks": [2, 3], "host": "node1"})
    assert one.sentence == "The clock of ranks 2-3 runs 400 ppm slow against rank 0; it is corrected."


def test_clocks_apart() -> None:
    one = only(find(facts(clocks=[clock(0), clock(2, -50 * MS)])))
    assert one.code == "clock_offset"
    assert one.sentence == "The clock of rank 2 is up to 50.000 ms behind that of rank 0; it is corrected."


def test_sound_clocks() -> None:
    assert find(facts(clocks=[clock(0), clock(1, 9 * MS, 90_000.0), clock(2, 50 * MS, calls=0)])) == []


# -- traffic -----------------------------------------------------------------------------------------------------------


def test_calls_in_another_order() -> None:
    rows = [
        {"rank": 1, "role": "tp", "reason": "its number names another operation on another rank", "calls": 3},
        {"rank": 2, "role": "dp", "reason": "its peer is not known", "calls": 9},
    ]
    one = only(find(facts(unmatched_calls=rows)))
    assert (one.code, one.kind, one.place) == ("order_mismatch", "verdict", {"ranks": [1], "role": "tp"})
    assert one.sentence.startswith("Rank 1 made 3 calls of tp in another order than their peers")


def test_a_cause_joins_its_cells() -> None:
    """12 of 22 calls are beyond the expected 10: 12/22 of 11 ms; the recomputed ones are all beyond, 4 ms."""
    cause = Cause("recompute_full", "12 forward calls are repeated.", "likely")
    cells = (
        cell("excess", calls_measured=22, off_rank_bytes_measured=Fraction(2200), exposed_ns=11 * MS, cause=cause),
        cell("unexpected", phase="recompute", calls_expected=0, off_rank_bytes_expected=Fraction(0), exposed_ns=4 * MS,
             cause=cause),
        cell(),
    )  # fmt: skip
    one = only(find(facts(diff=diff(*cells))))
    assert (one.code, one.kind, one.confidence, one.sentence) == ("recompute_full", "verdict", "likely", cause.sentence)
    assert (one.gain_ns_at_most, one.gain_bytes) == (6 * MS + 4 * MS, 1200 + 1000)
    assert "ranks" not in one.place
    assert [r["calls_measured"] for r in one.evidence[0].rows] == [22, 10]


def test_cells_without_a_cause_name_their_ranks() -> None:
    one = only(find(facts(diff=diff(cell("unexpected", calls_expected=0, ranks=(0, 3), op="barrier", components=())))))
    assert (one.code, one.place["ranks"]) == ("unexpected", [0, 3])
    assert one.sentence == (
        "0 calls expected and 10 made of tp, forward (barrier) on ranks 0, 3: unexpected, and nothing explains it."
    )


def test_a_rank_with_fewer_layers() -> None:
    """8 of 10 calls on one rank of four, in every cell of layers."""
    cells = (
        cell("missing", ranks=(2,), calls_measured=8),
        cell("missing", ranks=(2,), op="reduce_scatter", components=("mlp.fc2",), calls_measured=8),
        cell(ranks=(0, 1, 3)),
    )
    one = only(find(facts(diff=diff(*cells))))
    assert (one.code, one.place["ranks"]) == ("layers_differ", [2])
    assert one.sentence.startswith("Rank 2 made 4/5 of the calls per layer that the other ranks of the stage made")


def test_a_conflict_that_the_traffic_shows_is_one_matter() -> None:
    sequence = JobConflict("sequence_parallel", True, False, "sequence_parallel: intended True, captured False")
    other = JobConflict("seed", 1, 2, "seed: intended 1, captured 2")
    cause = Cause("sequence_parallel_off", "It was off in this run.", "proven")
    found = find(facts(diff=diff(cell("excess", cause=cause), conflicts=(sequence, other))))
    assert [(f.code, f.because_of and f.because_of.code) for f in found] == [
        ("sequence_parallel_off", None),
        ("job_conflict", "sequence_parallel_off"),
        ("job_conflict", None),
    ]


def test_avoidable_bytes() -> None:
    """400 of 1000 bytes: 2/5 of 5 ms, of which 3/4 is transfer."""
    split = [
        {
            "rank": 0,
            "step": 1,
            "role": "tp",
            "exposed_ns": 4000,
            "transfer_ns": 3000,
            "waiting_ns": 1000,
            "unsplit_ns": 0,
        }
    ]
    wasteful = cell(avoidable_bytes=400, avoidable=(("fp32_reduction", "--grad-reduce-in-bf16"),))
    one = only(find(facts(diff=diff(wasteful, verdict="match"), exposed_split=split)))
    assert (one.code, one.kind, one.gain_bytes, one.gain_ns_at_most) == ("fp32_reduction", "avoidable", 400, 1_500_000)
    assert one.remedy == "--grad-reduce-in-bf16"


def test_avoidable_bytes_of_several_roles() -> None:
    """The roles are named, those of most bytes first; the place says only what all rows share."""
    ways = (("fp32_reduction", "--grad-reduce-in-bf16"),)
    rows = [
        cell(avoidable_bytes=100, avoidable=ways, components=("norm gradients",)),
        cell(avoidable_bytes=400, avoidable=ways, role="dp_cp", components=("gradients",)),
    ]
    one = only(find(facts(diff=diff(*rows, verdict="match"))))
    assert one.sentence == (
        "500 B off-rank a rank and step of dp_cp, tp need not be sent (fp32 reduction; norm gradients, gradients), at most "
        "2.500 ms a step (2.5 %)."
    )
    assert one.place == {}


def test_avoidable_bytes_that_cost_nothing_are_no_finding() -> None:
    hidden = cell(avoidable_bytes=400, avoidable=(("fp32_reduction", ""),), exposed_ns=0)
    assert find(facts(diff=diff(hidden, verdict="match"))) == []


# -- who is late -------------------------------------------------------------------------------------------------------


def like(
    rank: int = 2, cause: str | None = "device", compute: int = 80, starved: int = 1, kernels: int = 100
) -> list[Row]:
    """slow_ranks of four ranks of 60 ms and 1 ms, one of which differs."""
    return [
        {
            "step": 1, "rank": r, "compute_ns": (compute if r == rank else 60) * MS, "usual_compute_ns": 60 * MS,
            "launch_starved_ns": (starved if r == rank else 1) * MS, "usual_launch_starved_ns": MS,
            "kernels": kernels if r == rank else 100, "usual_kernels": 100, "cause": cause if r == rank else None,
            "slow": r == rank and cause is not None, "like_ranks": 4,
        }
        for r in range(4)
    ]  # fmt: skip


def waits(owner: int | None, ms: int, *, role: str = "tp", ranks: tuple[int, ...] = (2, 3), slow: bool = True) -> Row:
    return {
        "step": 1, "role": role, "member_ranks": list(ranks), "owner_rank": owner, "calls": 10,
        "caused_waiting_ns": ms * MS * (len(ranks) - 1), "share_of_waiting": 0.9, "slow": slow, "finding": None,
    }  # fmt: skip


@pytest.mark.parametrize(("cause", "code"), [("device", "slow_gpu"), ("kernel", "slow_kernel"), ("work", "more_work")])
def test_a_rank_that_computes_longer(cause: str, code: str) -> None:
    """The excess over its like is the ceiling, however long several groups waited for it."""
    rows = [waits(2, 25), waits(2, 30, role="dp", ranks=(0, 2))]
    one = only(find(facts(slow_ranks=like(cause=cause), stragglers=rows)))
    assert (one.code, one.gain_ns_at_most, one.confidence) == (code, 20 * MS, "proven")
    assert one.place == {"ranks": [2], "host": "node1"}
    assert [e.query for e in one.evidence] == ["slow_ranks", "stragglers"]


def test_a_slow_gpu_nobody_was_seen_waiting_for() -> None:
    one = only(find(facts(slow_ranks=like())))
    assert (one.code, one.confidence, one.gain_ns_at_most) == ("slow_gpu", "likely", 20 * MS)


def test_a_host_that_launches_late() -> None:
    rows = [waits(2, 18, ranks=(1, 2)), waits(3, 19, ranks=(1, 3))]
    slow = [like(2, "host", 60, 21), like(3, "host", 60, 22)]
    both = [a if a["cause"] else b for a, b in zip(*slow, strict=True)]
    one = only(find(facts(slow_ranks=both, stragglers=rows)))
    assert (one.code, one.place, one.gain_ns_at_most) == ("slow_host", {"ranks": [2, 3], "host": "node1"}, 21 * MS)


def test_a_device_that_starves_with_nobody_waiting_is_no_finding() -> None:
    assert find(facts(slow_ranks=like(2, "host", 60, 21))) == []


def test_ranks_of_a_host_that_launch_late_together() -> None:
    """No call leads back to either of them, as they do not wait for each other: 30 ms waited, 20 ms without launches."""
    slow = [like(r, "host", 60, 21) for r in (2, 3)]
    both = [a if a["cause"] else b for a, b in zip(*slow, strict=True)]
    rows = [{**waits(None, 30, role="dp", ranks=(0, 2), slow=False), "share_of_step": 0.3}]
    one = only(find(facts(slow_ranks=both, stragglers=rows)))
    assert (one.code, one.place, one.gain_ns_at_most) == ("slow_host", {"ranks": [2, 3], "host": "node1"}, 30 * MS)


def rare(owner: int | None, step: int, calls: int = 1) -> Row:
    return {**waits(owner, 25, role="dp", slow=False), "step": step, "calls": calls, "share_of_step": 0.25}


def test_few_calls_that_wait_for_one_rank_in_every_step() -> None:
    """Gradients are exchanged once a step: three steps are three calls, two steps may be chance."""
    known = {"slow_ranks": [{**r, "step": n} for n in (1, 2, 3) for r in like()]}
    found = only(find(facts(step_time=steps(1, 2, 3), stragglers=[rare(2, n) for n in (1, 2, 3)], **known)))
    assert (found.code, found.confidence, found.place["ranks"]) == ("slow_gpu", "proven", [2])
    for rows in ([rare(2, 1), rare(2, 2), rare(3, 3)], [rare(2, 1), rare(2, 3)]):
        assert only(find(facts(step_time=steps(1, 2, 3), stragglers=rows, **known))).confidence == "likely"


def test_a_rank_with_hot_experts_is_no_slow_gpu() -> None:
    known = facts(
        slow_ranks=like(1),
        expert_rows=expert_rows((80, 160, 80, 80)),
        expert_gain=[{"step": 1, "at_most_ns": 15 * MS}],
        stragglers=[waits(1, 18, role="ep", ranks=(0, 1, 2, 3))],
    )
    assert [(f.code, f.because_of and f.because_of.code) for f in find(known)] == [
        ("hot_rank", None),
        ("slow_gpu", "hot_rank"),
    ]


def test_hot_experts_do_not_excuse_a_gpu_that_is_slower_by_far_more() -> None:
    rows = expert_rows((80, 160, 80, 80))
    known = facts(slow_ranks=like(1), expert_rows=rows, expert_gain=[{"step": 1, "at_most_ns": 9 * MS}])
    assert [(f.code, f.because_of) for f in find(known)] == [("slow_gpu", None), ("hot_rank", None)]


def test_lateness_that_passes_through_a_rank_is_laid_at_the_owners_door() -> None:
    rows = [waits(2, 25), waits(1, 24, role="dp", ranks=(0, 1))]
    found = find(facts(slow_ranks=like(), stragglers=rows))
    assert [(f.code, f.place["ranks"], f.because_of and f.because_of.code) for f in found] == [
        ("slow_gpu", [2], None),
        ("late_rank", [1], "slow_gpu"),
    ]


def test_too_few_like_it_are_compared_by_classes_of_time() -> None:
    alone = [{**r, "cause": None, "slow": False, "like_ranks": 2} for r in like()]
    known = facts(slow_ranks=alone, time_classes=classes(starved=0, idle_ns={2: 30}), stragglers=[waits(2, 25)])
    one = only(find(known))
    assert (one.code, one.gain_ns_at_most) == ("late_device", 25 * MS)


def test_a_run_without_devices_has_no_late_device() -> None:
    alone = [{**r, "cause": None, "slow": False, "like_ranks": 2} for r in like()]
    rows = [{**r, "basis": "host"} for r in classes(starved=None, idle_ns={2: 30})]
    one = only(find(facts(slow_ranks=alone, time_classes=rows, stragglers=[waits(2, 25)])))
    assert one.code == "slow_host"
    assert one.sentence == (
        "Rank 2 is late, and the other ranks of tp wait: it neither computes nor communicates for longer (25.000 ms a step "
        "more than its like), at most 25.000 ms a step (25 %)."
    )


def test_lateness_that_nothing_explains() -> None:
    """Of 2 % of a step at least."""
    sound = like(cause=None, compute=60)
    assert (
        find(facts(slow_ranks=sound, time_classes=classes(starved=0, compute_ns={2: 70}), stragglers=[waits(2, 1)]))
        == []
    )
    one = only(find(facts(slow_ranks=sound, stragglers=[waits(2, 2)])))
    assert (one.code, one.confidence, one.gain_ns_at_most) == ("late_rank", "limit", 2 * MS)


def test_a_straggler_within_the_clocks_error_is_not_named() -> None:
    known = facts(stragglers=[waits(2, 2)], clocks=[clock(0, open_ns=3 * MS)])
    assert find(known) == []


def test_lateness_from_outside() -> None:
    one = only(find(facts(stragglers=[waits(None, 25)])))
    assert (one.code, one.confidence, one.gain_ns_at_most) == ("late_from_outside", "limit", 25 * MS)
    assert one.place == {"role": "tp", "axis": "TP", "ranks": [2, 3]}


def heads(head: dict[int, int], late: dict[int, int]) -> list[Row]:
    return [
        {
            "rank": r,
            "step": 1,
            "head_ns": head.get(r, 2) * MS,
            "first_late_ns": late.get(r, 0) * MS,
            "first_op": "broadcast",
        }
        for r in range(4)
    ]


def test_a_late_data_loader_owns_the_lateness_of_its_rank() -> None:
    known = facts(step_head=heads({1: 32}, {1: 28}), stragglers=[waits(1, 27, ranks=(0, 1))])
    found = find(known)
    assert [(f.code, f.gain_ns_at_most) for f in found] == [("late_data", 28 * MS), ("late_rank", 27 * MS)]
    assert found[1].because_of is found[0]


def test_a_late_begin_that_no_call_waits_for() -> None:
    assert find(facts(step_head=heads({1: 32}, {}))) == []


def link(hosts: list[str], usual: int, got: int, op: str = "send", calls: int = 10, role: str = "pp") -> Row:
    return {
        "role": role, "op": op, "dtype": "bfloat16", "payload_bytes": 1 << 20, "span": "inter", "hosts": hosts,
        "calls": calls, "median_transfer_ns": got * MS, "usual_transfer_ns": usual * MS, "links": 4, "residual_ns": 0,
        "slow": got > usual,
    }  # fmt: skip


def test_one_direction_of_a_link() -> None:
    """10 messages of 3 ms instead of 1 over two pairs of ranks at a time: 10 ms."""
    rows = [link(["node0", "node1"], 1, 3), link(["node1", "node0"], 1, 1)]
    groups = [{"role": "pp", "op": "send", "payload_bytes": 1 << 20, "hosts": ["node0", "node1"], "groups": 2}]
    one = only(find(facts(slow_links=rows, link_groups=groups)))
    assert (one.code, one.gain_ns_at_most, one.place["host"]) == ("slow_direction", 10 * MS, "node0, node1")
    assert one.sentence.startswith("Data moves 3.00 times as long from node0 to node1, and not back,")


def test_both_directions_of_a_link_are_one_finding() -> None:
    rows = [link(["node0", "node1"], 1, 3), link(["node1", "node0"], 1, 3)]
    assert codes(find(facts(slow_links=rows))) == ["slow_link"]


def group(ranks: list[int], sender: int | None, got: int, op: str = "all_reduce") -> Row:
    return {
        "role": "dp", "op": op, "dtype": "bfloat16", "payload_bytes": 1 << 20, "member_ranks": ranks, "sender_rank": sender,
        "calls": 10, "median_transfer_ns": got * MS, "usual_transfer_ns": MS, "groups": 4, "slow": got > 1,
    }  # fmt: skip


def test_a_slow_group() -> None:
    one = only(find(facts(slow_groups=[group([0, 2], None, 4), group([1, 3], None, 1)])))
    assert (one.code, one.gain_ns_at_most, one.place["ranks"]) == ("slow_link", 30 * MS, [0, 2])


def test_a_slow_direction_between_two_ranks() -> None:
    one = only(find(facts(slow_groups=[group([0, 2], 2, 4, "send"), group([0, 2], 0, 1, "send")])))
    assert one.code == "slow_direction"
    assert "from rank 2 to rank 0, and not back," in one.sentence


def test_a_slow_direction_slows_the_collectives_too() -> None:
    rows = [group([0, 2], 2, 4, "send"), group([0, 2], 0, 1, "send"), group([0, 2], None, 6)]
    one = only(find(facts(slow_groups=rows)))
    assert (one.code, one.gain_ns_at_most) == ("slow_direction", 80 * MS)
    assert one.sentence.startswith("send of dp (1.0 MiB) takes 4.00 times as long from rank 2 to rank 0, and not back,")
    between = [
        link(["node0", "node1"], 1, 3),
        link(["node1", "node0"], 1, 1),
        link(["node0", "node1"], 1, 5, "all_reduce"),
    ]
    one = only(find(facts(slow_links=between)))
    assert (one.code, one.gain_ns_at_most, one.place["role"]) == ("slow_direction", 60 * MS, "pp")


def test_what_a_slow_link_exposes_is_its_ceiling_and_nobody_elses() -> None:
    """Calls launched as one are not compared one by one: 30 ms are, and 40 - 6 ms more are exposed there than elsewhere."""
    rows = [*split("dp", 40, ranks=(0, 2)), *split("dp", 6, ranks=(1, 3))]
    found = find(facts(slow_groups=[group([0, 2], None, 4), group([1, 3], None, 1)], exposed_split=rows))
    assert [(f.code, f.gain_ns_at_most) for f in found] == [("slow_link", 34 * MS), ("exposed_dp", 6 * MS)]


def test_links_between_clocks_one_of_which_was_set_are_not_judged() -> None:
    clocks = [clock(0), clock(2), clock(2, 20 * MS, since=5)]
    assert codes(find(facts(slow_groups=[group([0, 2], None, 4)], clocks=clocks))) == ["clock_step"]


# -- where the step goes -----------------------------------------------------------------------------------------------

STAGES = [{"rank": r, "pipeline": r % 2, "stage": r // 2, "stages": 2} for r in range(4)]


def test_uneven_stages() -> None:
    """Stages of 60 and 80 ms: 10 ms beyond the mean."""
    known = facts(time_classes=classes(starved=0, compute_ns={2: 80, 3: 80}), rank_stage=STAGES)
    one = only(find(known))
    assert (one.code, one.gain_ns_at_most, one.place) == ("uneven_stages", 10 * MS, {"stage": 1, "axis": "PP"})


def test_stages_on_hosts_are_not_compared() -> None:
    rows = [{**r, "basis": "host"} for r in classes(starved=None, compute_ns={2: 80, 3: 80})]
    assert find(facts(time_classes=rows, rank_stage=STAGES)) == []


def test_nearly_even_stages() -> None:
    assert find(facts(time_classes=classes(starved=0, compute_ns={2: 63, 3: 63}), rank_stage=STAGES)) == []


def test_a_slow_rank_is_no_uneven_stage() -> None:
    """Three ranks of the stage compute as long as the other stage's."""
    rows = [{**r, "rank": r["rank"] + 4 * i} for i in (0, 1) for r in classes(starved=0)]
    rows[7]["compute_ns"] = 90 * MS
    stages = [{"rank": r, "pipeline": r % 4, "stage": r // 4, "stages": 2} for r in range(8)]
    assert find(facts(rank=rank_rows(*range(8), world=8), time_classes=rows, rank_stage=stages)) == []


def bubble_rows(*parts: tuple[int, int, int], window: int = 80) -> list[Row]:
    return [
        {
            "pipeline": 0, "step": 1, "stage": i, "rank": i, "window_ns": window * MS, "bubble_ns": sum(p) * MS,
            "warm_up_ns": p[0] * MS, "steady_ns": p[1] * MS, "cool_down_ns": p[2] * MS, "stages_recorded": len(parts),
            "stages": len(parts), "clocks": "as recorded",
        }
        for i, p in enumerate(parts)
    ]  # fmt: skip


def test_more_bubble_than_the_schedule_causes() -> None:
    """20 of 80 ms on the mean, 10 ms by the formula of 1/8."""
    known = facts(bubble=bubble_rows((0, 10, 6), (8, 10, 6)), expected_bubble=Fraction(1, 8))
    one = only(find(known))
    assert (one.code, one.gain_ns_at_most) == ("bubble", 10 * MS)
    assert one.sentence == (
        "The pipeline's bubble is 25 % of its window, and 12.5 % by the schedule with equal stages; most of what is beyond "
        "lies in the steady state, at most 10.000 ms a step (10 %)."
    )


def test_the_bubble_of_a_slow_rank_is_its_effect() -> None:
    known = facts(
        bubble=bubble_rows((0, 10, 6), (8, 10, 6)), expected_bubble=Fraction(1, 8), slow_ranks=like(),
    )  # fmt: skip
    assert [(f.code, f.because_of and f.because_of.code) for f in find(known)] == [
        ("slow_gpu", None),
        ("bubble", "slow_gpu"),
    ]


def test_the_schedules_own_bubble() -> None:
    assert find(facts(bubble=bubble_rows((0, 0, 10), (10, 0, 0)), expected_bubble=Fraction(1, 8))) == []


def split(
    role: str, transfer: int, waiting: int = 0, unsplit: int = 0, ranks: tuple[int, ...] = (0, 1, 2, 3)
) -> list[Row]:
    return [
        {
            "rank": r, "step": 1, "role": role, "exposed_ns": (transfer + waiting + unsplit) * MS,
            "transfer_ns": transfer * MS, "waiting_ns": waiting * MS, "unsplit_ns": unsplit * MS,
        }
        for r in ranks
    ]  # fmt: skip


def busy(role: str, overlapped: int, exposed: int) -> list[Row]:
    return [
        {"rank": r, "step": 1, "role": role, "busy_ns": (overlapped + exposed) * MS, "overlapped_ns": overlapped * MS}
        for r in range(4)
    ]


def test_exposed_communication_by_axis() -> None:
    """Roles of one axis add up on a rank; the rank with most is the ceiling."""
    rows = [*split("dp_cp", 6), *split("edp", 2, ranks=(3,)), *split("pp", 50)]
    one = only(find(facts(exposed_split=rows, job=JOB)))
    assert (one.code, one.gain_ns_at_most, one.place["axis"]) == ("exposed_dp", 8 * MS, "DP")
    assert one.sentence == (
        "6 % of a step is DP communication that no compute hides (6.000 ms on a typical rank, waiting left out), at most "
        "8.000 ms a step (8 %)."
    )
    assert one.remedy is not None


def test_exposed_communication_of_no_axis() -> None:
    rows = [*split("embedding", 4, ranks=(3,)), *split("mp", 0, ranks=(0, 1, 2))]
    one = only(find(facts(exposed_split=rows)))
    assert (one.code, one.place["role"], one.remedy) == ("exposed_other", "embedding", None)
    assert one.sentence.startswith(
        "Up to 4 % of a step is embedding, mp communication that no compute hides (0 ns on a"
    )


def test_overlap_flags_without_overlap() -> None:
    job = Job(world_size=4, overlap_grad_reduce=True)
    one = only(find(facts(exposed_split=split("dp_cp", 9), exposed_by_role=busy("dp_cp", 1, 9), job=job)))
    assert (one.code, one.confidence) == ("overlap_without_effect", "proven")
    assert one.sentence.startswith("overlap_grad_reduce is set, but only 10 % of the DP transfers run beside compute")


def test_what_a_host_shares_between_compute_and_communication_is_no_lack_of_overlap() -> None:
    job = Job(world_size=4, overlap_grad_reduce=True)
    on_host = [{**r, "basis": "host"} for r in classes(starved=None)]
    known = facts(
        exposed_split=split("dp_cp", 9), exposed_by_role=busy("dp_cp", 1, 9), job=job, time_classes=on_host
    )  # fmt: skip
    assert codes(find(known)) == ["exposed_dp"]


def test_with_waiting_in_it_the_typical_rank_is_the_ceiling() -> None:
    """Nobody's calls are matched: the rank of 40 ms waited."""
    rows = [*split("dp_cp", 0, 0, 5, ranks=(0, 1, 2)), *split("dp_cp", 0, 0, 40, ranks=(3,))]
    one = only(find(facts(exposed_split=rows)))
    assert one.gain_ns_at_most == 5 * MS
    assert "waiting for peers included" in one.sentence


def test_overlap_that_works() -> None:
    job = Job(world_size=4, overlap_grad_reduce=True)
    one = only(find(facts(exposed_split=split("dp_cp", 6), exposed_by_role=busy("dp_cp", 4, 6), job=job)))
    assert (one.code, one.remedy) == ("exposed_dp", None)


def test_ranks_of_whole_groups_speak_for_the_others() -> None:
    """Rank 3's peer was not recorded: its 40 ms may be waiting."""
    rows = [*split("tp", 5, ranks=(0, 1, 2)), *split("tp", 0, 0, 40, ranks=(3,))]
    assert only(find(facts(exposed_split=rows))).gain_ns_at_most == 5 * MS


def test_waiting_is_an_effect_of_the_late_rank() -> None:
    found = find(facts(exposed_split=split("tp", 0, 18), slow_ranks=like(), stragglers=[waits(2, 18)]))
    assert [(f.code, f.because_of and f.because_of.code) for f in found] == [
        ("slow_gpu", None),
        ("waiting_tp", "slow_gpu"),
    ]


def test_waiting_that_nobody_owns() -> None:
    one = only(find(facts(exposed_split=split("tp", 0, 18))))
    assert one.sentence == (
        "A typical rank waits 18.000 ms a step (18 %) in TP communication for peers that come later; no single rank owns it."
    )


def test_waiting_of_a_rank_is_that_of_all_roles_of_an_axis() -> None:
    one = only(find(facts(exposed_split=[*split("mp", 0, 8), *split("embedding", 0, 10, ranks=(0, 3))])))
    assert (one.code, one.gain_ns_at_most) == ("waiting_other", 8 * MS)  # 18, 8, 8 and 18 ms: the lower median
    assert one.sentence == (
        "A typical rank waits 8.000 ms a step (8 %) in embedding, mp communication for peers that come later; no single rank "
        "owns it."
    )
    three = [*split("mp", 0, 8), *split("embedding", 0, 10, ranks=(0, 1, 3))]
    assert only(find(facts(exposed_split=three))).gain_ns_at_most == 18 * MS


def test_devices_that_starve() -> None:
    one = only(find(facts(time_classes=classes(starved=12))))
    assert (one.code, one.gain_ns_at_most) == ("launch_starved", 12 * MS)
    assert one.sentence == (
        "On a typical rank the device has nothing to run because the host has launched nothing: at most 12.000 ms a step "
        "(12 %)."
    )


def test_unknown_launches_are_no_starvation() -> None:
    assert find(facts(time_classes=classes(starved=None))) == []


def expert_rows(*layers: tuple[int, ...]) -> list[Row]:
    return [
        {
            "layer": i, "rank": r, "rows": n, "total_rows": sum(rows), "ranks": len(rows), "mean_rows": sum(rows) / len(rows),
        }
        for i, rows in enumerate(layers)
        for r, n in enumerate(rows)
    ]  # fmt: skip


def test_a_hot_rank() -> None:
    """160 of 400 rows over 4 ranks is 1.6 times the mean, in both layers."""
    one = only(find(facts(expert_rows=expert_rows((80, 160, 80, 80), (70, 160, 90, 80)))))
    assert (one.code, one.place["ranks"], one.gain_ns_at_most) == ("hot_rank", [1], None)
    assert "Rank 1 receives 1.60 times the mean rows" in one.sentence


def test_hot_ranks_of_several_groups() -> None:
    rows = [{**r, "rank": r["rank"] + 4 * i} for i in (0, 1) for r in expert_rows((80, 160 - 10 * i, 80, 80 + 10 * i))]
    one = only(find(facts(expert_rows=rows)))
    assert one.place["ranks"] == [1, 5]
    assert one.sentence.startswith("Ranks 1, 5 receive up to 1.60 times the mean rows of their expert-parallel group")


def test_a_hot_expert() -> None:
    one = only(find(facts(expert_rows=expert_rows((100, 100, 100, 100), (80, 80, 80, 160), (100, 101, 99, 100)))))
    assert (one.code, one.place["ranks"], one.place["layer"]) == ("hot_expert", [3], 1)


def test_balanced_experts() -> None:
    assert find(facts(expert_rows=expert_rows((100, 110, 95, 95)))) == []


def test_an_imbalance_known_to_cost_nothing() -> None:
    rows = expert_rows((80, 160, 80, 80))
    assert find(facts(expert_rows=rows, expert_gain=[{"step": 1, "at_most_ns": 1000}])) == []
    assert (
        only(find(facts(expert_rows=rows, expert_gain=[{"step": 1, "at_most_ns": 3 * MS}]))).gain_ns_at_most == 3 * MS
    )


def test_what_recomputation_costs() -> None:
    job = Job(world_size=4, recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    rows = [{"rank": r, "step": 1, "kernels": 10, "dur_ns": (15 + r) * MS} for r in range(4)]
    one = only(find(facts(recompute=rows, job=job)))
    assert (one.code, one.gain_ns_at_most) == ("recompute_cost", 18 * MS)
    assert find(facts(recompute=rows, job=JOB)) == []


def test_memory_beyond_the_job() -> None:
    rows = [
        {"rank": 0, "stage": 0, "what": "gradients", "expected_bytes": 1 << 30, "measured_bytes": 2 << 30},
        {"rank": 1, "stage": 0, "what": "gradients", "expected_bytes": 1 << 30, "measured_bytes": (1 << 30) + 1},
        {"rank": 0, "stage": 0, "what": "peak", "expected_bytes": 1 << 30, "measured_bytes": 2 << 30},
    ]
    one = only(find(facts(memory=rows)))
    assert (one.code, one.kind, one.place) == ("memory", "conflict", {"ranks": [0], "component": "gradients"})
    assert one.sentence.startswith("Gradients take 2.0 GiB on rank 0, and 1.0 GiB by the job")


def history(profiled: int, *others: int) -> list[Row]:
    return [
        {"iteration": 9, "step_ns": profiled * MS, "profiled": True},
        *({"iteration": i, "step_ns": ns * MS, "profiled": False} for i, ns in enumerate(others)),
    ]


def test_what_the_profiler_costs() -> None:
    one = only(find(facts(history=history(130, 99, 100, 101, 100))))
    assert (one.code, one.kind) == ("profiler_cost", "data")
    assert one.sentence.startswith("Profiled steps take 30.000 ms longer than the others of the log (30 %)")


def test_a_cheap_profiler() -> None:
    assert find(facts(history=history(104, 99, 100, 101, 100))) == []
    assert find(facts(history=history(130, 60, 100, 140, 180))) == []
