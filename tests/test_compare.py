"""Run against run: what moved and what did not, of literal runs with figures worked out by hand.

A step of such a run: a gemm of 500 ns that begins 10 ns into it, then an all-reduce of tp on two ranks, both launched at its
begin; 90 ns after the call it ends. So of a call of x ns: step 600 + x, compute 500, exposed tp x, idle 10,
launch-starved 90.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import schema
from traceanalyzer.compare import (
    Comparison,
    Selection,
    Side,
    Spread,
    compare,
    job_differences,
    judge,
    lay,
    measure,
    selection,
)
from traceanalyzer.errors import InputError
from traceanalyzer.importers import import_traces
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job, parse_mapping
from traceanalyzer.run import Run
from traceanalyzer.simulate import Costs, simulate

Row = dict[str, Any]
Rows = dict[str, list[Row]]
OpenRun = Callable[..., Run]

GROUPS = {"tp": "TENSOR_MODEL_PARALLEL_GROUP", "ep": "EXPERT_MODEL_PARALLEL_GROUP"}


class Literal:
    """Rows of a literal run, step by step, the same on each rank."""

    def __init__(self, ranks: int = 2, first: int = 0) -> None:
        self.rows: Rows = {}
        self.ranks = range(ranks)
        self.number = first
        self.at = 0
        self.calls = 0
        for rank in self.ranks:
            group = [rank // 2 * 2, rank // 2 * 2 + 1]
            self.add("rank", rank=rank, window_start_ns=0, window_end_ns=10**9, host_start_ns=0, world_size=ranks)
            for role, words in GROUPS.items():
                self.add("process_group", rank=rank, group_id=role, description=words, ranks=group, group_size=2)

    def add(self, kind: str, **row: Any) -> None:
        self.rows.setdefault(kind, []).append({"source": "kineto", **row})

    def work(self, rank: int, what: str, start: int, dur: int, launch: int, **more: Any) -> None:
        correlation = len(self.rows.get("kernel", ())) + 1
        self.add(
            "kernel", rank=rank, name=what, kernel_class=what, start_ns=start, dur_ns=dur, correlation=correlation, device=0,
            stream=7, **more,
        )  # fmt: skip
        self.add(
            "cpu_op", rank=rank, name="cudaLaunchKernel", category="cuda_runtime", start_ns=launch, dur_ns=1, tid=1,
            correlation=correlation,
        )  # fmt: skip

    def call(self, rank: int, start: int, dur: int, launch: int, **more: Any) -> None:
        call = {
            "op": "all_reduce", "group_id": "tp", "group_size": 2, "dtype": "bfloat16", "in_elems": 512, "out_elems": 512,
            "completeness": "full", "time_source": "kernel", **more,
        }  # fmt: skip
        self.add(
            "comm_record", rank=rank, call_id=self.calls, coalesce_id=self.calls, start_ns=start, dur_ns=dur,
            t_issue_ns=launch, **call,
        )  # fmt: skip
        self.work(rank, "comm", start, dur, launch, coalesce_id=self.calls, completeness="full")
        self.calls += 1

    def step(self, exposed: int, *, calls: Sequence[Row] = ({},), gemm: int = 500) -> Literal:
        """One step; ``calls``: one after another, that share the exposed time."""
        begin = self.at
        for rank in self.ranks:
            self.add(
                "span", rank=rank, name=f"ProfilerStep#{self.number}", category="user_annotation", start_ns=begin,
                dur_ns=100 + gemm + exposed,
            )  # fmt: skip
            self.work(rank, "gemm", begin + 10, gemm, begin)
            each = exposed // len(calls)
            for i, more in enumerate(calls):
                self.call(rank, begin + 10 + gemm + i * each, each, begin, **more)
        self.at += 2000
        self.number += 1
        return self

    def steps(self, *exposed: int, first: int | None = None, **more: Any) -> Literal:
        """Steps of these exposed times; ``first``: their numbers go on from here."""
        self.number = self.number if first is None else first
        for one in exposed:
            self.step(one, **more)
        return self


@pytest.fixture(scope="module")
def open_run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenRun]:
    """Writes the rows of a run and opens it; closed after the tests."""
    opened: list[Run] = []

    def make(literal: Literal, job: Job | None = None) -> Run:
        path = tmp_path_factory.mktemp("run") / "run.parquet"
        metadata = {} if job is None else {schema.META_JOB_CAPTURED: job.to_json()}
        with RunWriter(path, metadata) as out:
            for kind in sorted(literal.rows):
                out.write(kind, [table_of(kind, literal.rows[kind])])
        opened.append(Run.open(path))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


@pytest.fixture(scope="module")
def timed(open_run: OpenRun) -> Run:
    """Steps whose calls take these times, in ns."""
    literal = Literal().steps(100, 104, 98).steps(150, 154, 148, first=10).steps(100, 120, 90, first=20)
    return open_run(literal.steps(112, 112, 113, first=30).steps(100, 100, first=40).steps(106, 106, first=50))


@pytest.fixture(scope="module")
def side(timed: Run) -> Side:
    return measure(timed)


def steps(low: int, high: int) -> Selection:
    return Selection("run", ((low, high),))


def figure(found: Comparison, what: str, role: str | None = None, stage: int | None = None) -> Row:
    (row,) = (
        r for r in found.as_document()["rows"] if (r["what"], r["role"], r["stage"]) == (what, role, stage)
    )  # fmt: skip
    return row


def summary(found: Comparison) -> list[tuple[Any, ...]]:
    return [
        (r["what"], r["role"], r["a"] and r["a"]["median"], r["b"] and r["b"]["median"], r["verdict"])
        for r in found.as_document()["rows"]
    ]


# -- selection, bands, verdicts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "source", "steps"),
    [
        ("run.parquet", "run.parquet", None),
        ("run.parquet@100-120", "run.parquet", ((100, 120),)),
        ("a@b/run@3,5,8-9", "a@b/run", ((3, 3), (5, 5), (8, 9))),
        ("user@host/run.parquet", "user@host/run.parquet", None),
        ("s3://bucket/run@7", "s3://bucket/run", ((7, 7),)),
    ],
)
def test_selection(argument: str, source: str, steps: Any) -> None:
    assert selection(argument) == Selection(source, steps)
    assert str(selection(argument)) == argument


def test_a_file_of_that_name_is_no_selection(tmp_path: Path) -> None:
    path = tmp_path / "run@3"
    path.touch()
    assert selection(str(path)) == Selection(str(path))


@pytest.mark.parametrize("steps", ["120-100", "1-2-3", "1,,2", "5-"])
def test_no_ranges(steps: str) -> None:
    with pytest.raises(InputError, match=r"is no range of steps\. Write RUN@100-120"):
        selection(f"run@{steps}")


def test_bands() -> None:
    assert Spread.of([100]) == Spread(1, 100, None, None, "one step")
    assert Spread.of([100, 90]) == Spread(2, 90, 90, 100, "min-max")
    assert Spread.of([100, 120, 90, 101]) == Spread(4, 100, 90, 120, "min-max")
    # distances from 100: 0 1 0 1 50, their median 1, times 4.4478, rounded up
    assert Spread.of([100, 101, 100, 99, 150]) == Spread(5, 100, 95, 105, "mad")
    assert Spread.of([7] * 5) == Spread(5, 7, 7, 7, "mad")
    # of decimals: distances 0 0.5 0.5 1 1, median 0.5
    assert Spread.of([2.0, 2.5, 1.5, 3.0, 1.0]) == Spread(5, 2.0, 2.0 - 2.2239, 2.0 + 2.2239, "mad")


@pytest.mark.parametrize(
    ("a", "b", "verdict", "reason"),
    [
        ([100, 98, 104], [150, 148, 154], "moved", "outside both bands"),
        ([100, 98, 104], [100, 1, 1000], "not moved", "equal"),
        ([100, 98, 104], [102, 102, 102], "not moved", "smaller than the least share"),
        ([100, 90, 120], [112, 112, 113], "not moved", "within the band of A"),
        ([112, 112, 113], [100, 90, 120], "not moved", "within the band of B"),
        ([100, 90, 120], [112, 99, 130], "not moved", "within the band of A and B"),
        ([100], [150, 148, 154], "no band", "A has one step"),
        ([100], [150], "no band", "A and B have one step"),
        ([100], [150, 90], "not moved", "within the band of B"),
    ],
)
def test_verdicts(a: list[int], b: list[int], verdict: str, reason: str) -> None:
    """A difference below 7 is too small."""
    assert judge(Spread.of(a), Spread.of(b), Fraction(7)) == (verdict, reason)


def test_unknown_figures() -> None:
    one = Spread.of([1, 1])
    assert judge(None, one, Fraction(0)) == ("unknown", "not known of A")
    assert judge(one, None, Fraction(0)) == ("unknown", "not known of B")
    assert judge(None, None, Fraction(0)) == ("unknown", "not known of both")


# -- literal runs ------------------------------------------------------------------------------------------------------


def test_the_same_steps_twice(side: Side) -> None:
    found = lay(side, side, steps(0, 2), steps(0, 2))
    document = found.as_document()
    assert document["verdict"] == {
        "word": "did not move",
        "sentence": "Step time is the same, 700 ns (3 and 3 steps). Calls and bytes are the same.",
        "next": None,
    }
    assert summary(found) == [
        ("step time", None, 700, 700, "not moved"),
        ("compute", None, 500, 500, "not moved"),
        ("busy", "tp", 100, 100, "not moved"),
        ("exposed", "tp", 100, 100, "not moved"),
        ("launch_starved", None, 90, 90, "not moved"),
        ("idle", None, 10, 10, "not moved"),
    ]
    assert figure(found, "step time")["a"] == {
        "steps": 3, "median": 700, "low": 698, "high": 704, "method": "min-max",
    }  # fmt: skip
    assert document["job_differences"] == document["setting_differences"] == document["slow_ranks"] == []
    assert [t["differs"] for t in document["traffic"]] == [[]]
    assert document["gates"]["moved"] == document["gates"]["traffic"] == {"count": 0}


def test_one_role_slower(side: Side) -> None:
    """The calls take 50 ns longer: 7.1 % of a step of 700 ns, beyond 698-704 and 748-754."""
    found = lay(side, side, steps(0, 2), steps(10, 12))
    document = found.as_document()
    assert summary(found) == [
        ("step time", None, 700, 750, "moved"),
        ("busy", "tp", 100, 150, "moved"),
        ("exposed", "tp", 100, 150, "moved"),
        ("compute", None, 500, 500, "not moved"),
        ("launch_starved", None, 90, 90, "not moved"),
        ("idle", None, 10, 10, "not moved"),
    ]
    assert figure(found, "exposed", "tp") == {
        "what": "exposed", "role": "tp", "axis": "TP", "stage": None, "unit": "ns", "part_of_step": True,
        "a": {"steps": 3, "median": 100, "low": 98, "high": 104, "method": "min-max"},
        "b": {"steps": 3, "median": 150, "low": 148, "high": 154, "method": "min-max"},
        "change": 50, "ratio": 1.5, "share_of_step": 50 / 700, "verdict": "moved", "reason": "outside both bands",
    }  # fmt: skip
    assert document["verdict"]["sentence"] == (
        "Step time moved from 700 ns to 750 ns (+7.1 %), outside the bands of both (3 and 3 steps). 3 figures of time moved. "
        "Of its parts exposed tp changed most: +50 ns. Calls and bytes are the same."
    )
    (call,) = document["traffic"]
    assert (call["differs"], call["verdict"], call["change"], call["calls_a"], call["bytes_b"]) == (
        [], "moved", 50, 1, 1024,
    )  # fmt: skip
    gates = document["gates"]
    assert gates["step_time"] == {"ns": 750, "times": 750 / 700}
    assert gates["exposed.tp"] == gates["exposed"] == {"share": 150 / 750, "ns": 150, "times": 1.5}
    assert gates["compute"] == {"share": 500 / 750, "ns": 500, "times": 1.0}
    # the three figures above, and the time of the calls
    assert (gates["moved"], gates["traffic"]) == ({"count": 4}, {"count": 0})


def test_within_noise(side: Side) -> None:
    """12 ns of 700 are more than 1 %, but A's own steps reach from 690 to 720 ns."""
    found = lay(side, side, steps(20, 22), steps(30, 32))
    assert found.as_document()["verdict"]["word"] == "did not move"
    step = figure(found, "step time")
    assert (step["change"], step["verdict"], step["reason"]) == (12, "not moved", "within the band of A")


def test_the_least_share_is_stated(side: Side) -> None:
    """Without noise 6 of 700 ns did not move at 1 %, and moved at 0.5 %."""
    assert lay(side, side, steps(40, 41), steps(50, 51)).document["verdict"]["word"] == "did not move"
    found = lay(side, side, steps(40, 41), steps(50, 51), Fraction(1, 200))
    assert figure(found, "step time")["verdict"] == "moved"
    assert found.document["rules"]["least_ns"] == 3


def test_one_step_has_no_band(side: Side) -> None:
    found = lay(side, side, steps(40, 40), steps(10, 12))
    document = found.as_document()
    assert document["verdict"]["word"] == "cannot be told"
    assert figure(found, "step time")["reason"] == "A has one step"
    assert document["notes"][0] == "A has one step: nothing says how much its times vary, so it has no band."
    assert document["gates"]["moved"] == {"count": None}
    assert document["gates"]["step_time"]["times"] == 750 / 700


def test_ranges_of_one_run(timed: Run) -> None:
    found = compare(timed, timed, steps_a=steps(0, 2), steps_b=steps(10, 19))
    assert figure(found, "step time")["verdict"] == "moved"
    assert (found.document["a"]["steps"], found.document["b"]["steps"]) == ([0, 1, 2], [10, 11, 12])
    assert found.document["a"]["selected"] == "0-2"
    with pytest.raises(InputError, match=r"run@7: the run has no such step. It has: 0-2, 10-12, 20-22, 30-32, 40-41,"):
        compare(timed, timed, steps_a=Selection("run", ((7, 7),)))


def routed(rows: int) -> Row:
    """An all-to-all of experts that sends so many rows of 8 bytes."""
    return {
        "op": "all_to_all", "group_id": "ep", "in_elems": rows * 4, "out_elems": 400, "in_splits": [rows, 0],
        "out_splits": [50, 50], "splits_known": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def called(open_run: OpenRun) -> Side:
    """Steps that make different calls."""
    scatter = {"op": "reduce_scatter", "in_elems": 512, "out_elems": 256}
    literal = Literal().steps(100, 104, 98)
    literal.steps(100, first=10).step(104, calls=({}, {})).step(98, calls=({}, scatter))
    literal.steps(100, 100, first=20, calls=({"dtype": "float32"},))
    for first, rows in ((30, (100, 90, 110)), (40, (105, 95, 108)), (50, (200, 190, 210))):
        literal.number = first
        for one in rows:
            literal.step(100, calls=(routed(one),))
    return measure(open_run(literal))


def test_calls_and_bytes_are_exact(called: Side) -> None:
    """B makes one all-reduce more in one of its 3 steps: 4 calls in 3 steps against 3; no band hides it."""
    found = lay(called, called, steps(0, 2), steps(10, 12)).as_document()
    rows = [(t["op"], t["only_in"], t["differs"], t["calls_a"], t["calls_b"], t["bytes_b"]) for t in found["traffic"]]
    assert sorted(rows) == [
        ("all_reduce", None, ["calls", "bytes"], 1, 4 / 3, 1024 * 4 / 3),
        ("reduce_scatter", "B", ["calls", "bytes"], 0, 1 / 3, 1024 / 3),
    ]
    exact = next(t for t in found["traffic"] if t["op"] == "all_reduce")
    assert (exact["total_calls_a"], exact["total_calls_b"], exact["rank_steps_a"]) == (6, 8, 6)
    assert found["verdict"]["word"] == "moved"
    assert found["gates"]["traffic"] == {"count": 2}


def test_another_type_of_as_many_calls(called: Side) -> None:
    (call,) = lay(called, called, steps(0, 2), steps(20, 21)).as_document()["traffic"]
    assert (call["dtypes_a"], call["dtypes_b"], call["sizes_a"], call["sizes_b"]) == (
        ["bfloat16"], ["float32"], [1024], [2048],
    )  # fmt: skip
    assert call["differs"] == ["bytes", "type", "size"]


def test_bytes_that_the_router_decides_have_a_band(called: Side) -> None:
    (near,) = lay(called, called, steps(30, 32), steps(40, 42)).as_document()["traffic"]
    assert (near["by_data"], near["differs"], near["total_bytes_a"]) == (True, [], 2 * 300 * 8)
    (far,) = lay(called, called, steps(30, 32), steps(50, 52)).as_document()["traffic"]
    assert far["differs"] == ["bytes"]


def test_no_common_figure(called: Side) -> None:
    """A selection of steps that were not recorded whole, or a run without any."""
    cut = replace(called, complete=frozenset(), incomplete=called.complete)
    found = lay(called, cut, steps(0, 2), steps(0, 2))
    assert not found.comparable
    assert found.document["verdict"]["sentence"] == "B has no step that was recorded whole."
    assert "B: steps 0-2 were not recorded whole, left out." in found.document["notes"]
    assert found.document["gates"]["moved"] == found.document["gates"]["traffic"] == {"count": None}


def test_calls_of_unknown_role_may_be_those_that_lack(open_run: OpenRun, called: Side) -> None:
    """A's call is on a group that nothing names: whether it is B's tp call is not known, and neither is 0."""
    strange = {"group_id": None, "group_size": None}
    one = measure(open_run(Literal(4).steps(100, 104, calls=(strange,))))
    found = lay(one, called, Selection("run"), steps(0, 2)).as_document()
    rows = {t["role"]: (t["only_in"], t["calls_a"], t["calls_b"], t["differs"]) for t in found["traffic"]}
    assert rows == {None: ("A", 1, 0, ["calls", "bytes"]), "tp": ("B", None, 1, ["unknown"])}
    tp = next(r for r in found["rows"] if (r["what"], r["role"]) == ("exposed", "tp"))
    assert (tp["a"], tp["verdict"], tp["reason"]) == (None, "unknown", "not known of A")
    assert "A has communication of unknown role: roles that it lacks are not known to be absent." in found["notes"]
    # and of different worlds: means per rank
    assert "Different worlds (4 and 2 ranks): all figures are means per rank." in found["notes"]
    assert {"name": "world size", "a": 4, "b": 2} in found["setting_differences"]
    step = next(r for r in found["rows"] if r["what"] == "step time")
    assert (step["a"]["median"], step["b"]["median"]) == (700, 700)


JOB = {
    "num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "seq_length": 32, "max_position_embeddings": 32,
    "micro_batch_size": 1, "global_batch_size": 1, "padded_vocab_size": 128, "tensor_model_parallel_size": 2, "bf16": True,
    "world_size": 2,
}  # fmt: skip


def test_jobs_that_differ(open_run: OpenRun) -> None:
    one = parse_mapping(JOB)
    two = parse_mapping({**JOB, "hidden_size": 128, "sequence_parallel": True})
    differ = [
        {"field": "hidden_size", "a": 64, "b": 128, "stated": "both"},
        {"field": "sequence_parallel", "a": False, "b": True, "stated": "b"},
    ]
    assert [d for d in job_differences(one, two) if d["field"] in ("hidden_size", "sequence_parallel")] == differ
    assert job_differences(one, one) == []
    run = open_run(Literal().steps(100, 100), one)
    found = compare(run, run, job_b=two).as_document()
    assert found["job_differences"] == job_differences(one, two)
    assert found["a"]["job"].startswith("2 layers, hidden 64")
    # what the run says of itself stays beside a job that is given
    bare = measure(run)
    other = replace(bare, ran=two)
    assert lay(bare, other, Selection("a"), Selection("b")).document["job_differences"] == job_differences(one, two)
    # tokens/s: 32 tokens in 700 ns on 2 ranks
    rate = next(r for r in found["rows"] if r["what"] == "tokens/s per device")
    assert rate["a"]["median"] == pytest.approx(32 / 700e-9 / 2)


# -- real and simulated runs -------------------------------------------------------------------------------------------


@pytest.mark.shared
def test_sequence_parallelism_of_recorded_runs(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """TP2 with and without sequence parallelism: every bf16 all-reduce of 8 KiB became scatters and gathers.

    Calls per rank of 4 layers and 4 micro-batches, counted in the traces: 36 all-reduces in either direction; 36 gathers and
    scatters forward, 72 and 36 backward. With it an all-reduce of the layer norms' gradients (576 float32) is added.
    """
    runs = []
    for name in ("mcore_gloo_tp2", "mcore_gloo_tp2_sp"):
        runs.append(tmp_path / f"{name}.parquet")
        import_traces(sorted(shared(f"traces/{name}").glob("rank*.json.gz")), runs[-1])
    with Run.open(runs[0]) as one, Run.open(runs[1]) as two:
        document = compare(one, two).as_document()
    differ = {
        (t["phase"], t["op"], t["only_in"], t["calls_a"], t["calls_b"]) for t in document["traffic"] if t["differs"]
    }
    assert differ == {
        ("forward", "all_reduce", "A", 36, 0),
        ("backward", "all_reduce", "A", 36, 0),
        ("forward", "all_gather", "B", 0, 36),
        ("forward", "reduce_scatter", "B", 0, 36),
        ("backward", "all_gather", "B", 0, 72),
        ("backward", "reduce_scatter", "B", 0, 36),
        ("other", "all_reduce", "B", 0, 1),
    }
    assert document["verdict"]["word"] == "moved"


def test_a_slow_device_of_a_simulated_pipeline(tmp_path: Path) -> None:
    """Rank 3 of TP2 x PP2 x DP2 computes 1.5 times as long: stage 0 (ranks 0-3) moves, stage 1 does not."""
    job = parse_mapping(
        {**JOB, "hidden_size": 256, "num_attention_heads": 8, "seq_length": 128, "max_position_embeddings": 128,
         "global_batch_size": 8, "pipeline_model_parallel_size": 2, "world_size": 8},
    )  # fmt: skip
    paths = [tmp_path / "usual.parquet", tmp_path / "slow.parquet"]
    for path, costs in zip(paths, (Costs(jitter=0.02), Costs(jitter=0.02, slow_gpu={3: 1.5})), strict=True):
        simulate(job, steps=3, costs=costs).write(path)
    with Run.open(paths[0]) as one, Run.open(paths[1]) as two:
        found = compare(one, two)
    compute = [figure(found, "compute", stage=s) for s in (0, 1)]
    assert [r["verdict"] for r in compute] == ["moved", "not moved"]
    # one of four ranks computes half as long again: 1/8 of their mean
    assert compute[0]["change"] / compute[0]["a"]["median"] == pytest.approx(1 / 8, rel=0.05)
    assert [(r["rank"], r["only_in"]) for r in found.document["slow_ranks"]] == [(3, "B")]
    assert all(not t["differs"] for t in found.document["traffic"])
