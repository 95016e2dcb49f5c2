"""The review's document: of our own recording, of Megatron on eight A100, of a simulated pipeline, and of odd runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import links, schema
from traceanalyzer.errors import InputError
from traceanalyzer.importers import import_traces
from traceanalyzer.importers.spool import RunWriter, table_of
from traceanalyzer.job import Job, read_job
from traceanalyzer.reports import diff as diff_report
from traceanalyzer.review import DEFINITIONS, METRICS, Review, iterations, review
from traceanalyzer.run import Run
from traceanalyzer.simulate import Collected, Costs, simulate

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "megatron_tp2_sp"

KEYS = [
    "schema", "run", "verdict", "steps", "peak", "history", "findings", "time", "pipelines", "ledger", "ranks", "skew",
    "experts", "bandwidth", "peers", "memory", "issues", "appendix", "empty", "left_out",
]  # fmt: skip


# -- our own recording -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("fixture") / "run.parquet"
    import_traces([FIXTURE / f"rank{r}.json.gz" for r in (0, 1)], out)
    return out


@pytest.fixture(scope="module")
def reviewed(fixture: Path) -> Review:
    with Run.open(fixture) as run:
        return review(run, read_job(FIXTURE / "job.toml"))


def test_the_fixture(reviewed: Review) -> None:
    document = reviewed.as_document()
    assert list(document) == KEYS
    assert (document["schema"], document["verdict"]["word"]) == ("traceanalyzer.review/1", "match")
    assert reviewed.exit_code == 0
    assert reviewed.diff is not None
    ledger = diff_report.document(reviewed.diff)
    assert [{k: v for k, v in c.items() if k != "expected"} for c in document["ledger"]["cells"]] == ledger["cells"]
    assert {k: v for k, v in document["ledger"].items() if k != "cells"} == {
        k: v for k, v in ledger.items() if k != "cells"
    }
    first = document["ledger"]["cells"][0]
    assert sum(e["calls"] for e in first["expected"]) == first["calls_expected"] == 10
    assert document["verdict"]["coverage"] == document["ledger"]["coverage"]
    assert document["run"]["ranks_recorded"] == [0, 1]
    assert (document["run"]["world_size"], document["run"]["steps"]) == (2, [1])
    # gloo hides nothing; the re-gathers for the weight gradients cannot be switched off, so they come last
    assert [(f["code"], f["kind"], f["confidence"]) for f in document["findings"]] == [
        ("exposed_tp", "time", "limit"),
        ("waiting_tp", "time", "limit"),
        ("sp_input_regather", "avoidable", "proven"),
    ]
    assert [(r["rank"], r["tp"], r["pp"], r["dp"]) for r in document["ranks"]["rows"]] == [(0, 0, 0, 0), (1, 1, 0, 0)]
    assert document["history"] is None
    assert {row["what"] for row in document["memory"]} >= {
        "parameters",
        "gradients",
        "optimizer",
        "activations",
        "peak",
    }


def test_the_document_is_json_and_its_evidence_can_be_asked_again(reviewed: Review) -> None:
    document = reviewed.as_document()
    assert json.loads(json.dumps(document, allow_nan=False)) == document
    named = {q["name"] for q in document["appendix"]["queries"]}
    assert {"time_classes", "stragglers", "bubble"} <= named
    assert [d["term"] for d in document["appendix"]["definitions"]] == [term for term, _ in DEFINITIONS]


@pytest.fixture
def tiny(tmp_path: Path) -> Callable[..., Path]:
    """A run of these ranks, each with step 1 of 100 ms and nothing in it; more rows by kind."""

    def write(*ranks: int, **rows: list[dict[str, Any]]) -> Path:
        path = tmp_path / "run.parquet"
        steps = [
            {"rank": r, "name": "ProfilerStep#1", "category": "user_annotation", "start_ns": 0, "dur_ns": 100_000_000}
            for r in dict.fromkeys(ranks)
        ]
        known = [
            {"rank": r, "world_size": 2, "source_file": f"{i}.json", "window_start_ns": 0, "window_end_ns": 100_000_000}
            for i, r in enumerate(ranks)
        ]
        with RunWriter(path, {schema.META_IMPORT: '{"source": "kineto", "status": "complete"}'}) as out:
            for kind, content in sorted({"rank": known, "span": steps, **rows}.items()):
                out.write(kind, [table_of(kind, [{"source": "kineto", **row} for row in content])])
        return path

    return write


def test_without_a_job(tiny: Callable[..., Path]) -> None:
    with Run.open(tiny(0, 1)) as run:
        found = review(run)
    document = found.as_document()
    assert (document["verdict"]["word"], document["ledger"], found.exit_code) == ("no expectation", None, 0)
    assert document["run"]["job"] is None
    assert [row["tp"] for row in document["ranks"]["rows"]] == [None, None]
    assert [(s["step"], s["step_ns"], s["ranks"]) for s in document["steps"]] == [(1, 100_000_000, [0, 1])]
    assert document["findings"] == []


def test_a_job_that_lacks_a_size_cannot_be_judged(tiny: Callable[..., Path]) -> None:
    with Run.open(tiny(0, 1)) as run:
        found = review(run, Job(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True))
    assert found.document["verdict"]["word"] == "cannot be judged"
    assert found.exit_code == 3
    assert found.findings[0].code == "not_compared"


def test_a_rank_that_was_recorded_twice(tiny: Callable[..., Path]) -> None:
    with Run.open(tiny(0, 1, 1)) as run:
        found = review(run, Job(world_size=2))
    assert (found.document["verdict"]["word"], found.findings[0].code) == ("cannot be judged", "rank_twice")
    assert found.findings[0].place == {"ranks": [1]}
    assert "1.json and 2.json" in found.findings[0].sentence


def test_experts_whose_rows_were_counted(tiny: Callable[..., Path]) -> None:
    """No all-to-all brings the rows: in layer 0 rank 1 gets 90 of 120, in layer 1 both 60. Rank 0 alone counted layer 2."""
    place = {"recorded_step": 1, "recorded_microbatch": 0, "recorded_phase": "forward", "ranks": [0, 1]}
    counts = {(0, 0): [10, 20], (0, 1): [0, 90], (1, 0): [30, 30], (1, 1): [50, 10], (2, 0): [1, 1]}
    routed = [
        {"rank": rank, "recorded_layer": layer, "local_expert_rows": rows, "start_ns": layer, **place}
        for (layer, rank), rows in counts.items()
    ]
    with Run.open(tiny(0, 1, expert_rows=routed)) as run:
        found = review(run).as_document()["experts"]
    assert [(r["layer"], r["rank"], r["rows_received"], r["mean"], r["max_over_mean"]) for r in found] == [
        (0, 0, 30, 60.0, 0.5),
        (0, 1, 90, 60.0, 1.5),
        (1, 0, 60, 60.0, 1.0),
        (1, 1, 60, 60.0, 1.0),
    ]


def test_names_from_traces_stay_text(tiny: Callable[..., Path]) -> None:
    """Nothing here escapes: who shows the document does."""
    issue = {"severity": "warning", "code": "x", "sentence": "<script>alert(1)</script>", "rank": 0}
    with Run.open(tiny(0, issue=[issue], rank=[{"rank": 0, "host": "h" * 10_000}])) as run:
        document = review(run).as_document()
    assert document["issues"][0]["sentence"] == "<script>alert(1)</script>"
    assert document["ranks"]["rows"][0]["host"] == "h" * 10_000


# -- eight A100 --------------------------------------------------------------------------------------------------------

A100 = Job(
    num_layers=40,
    hidden_size=4096,
    num_attention_heads=32,
    seq_length=2048,
    micro_batch_size=4,
    num_microbatches=1,
    tensor_model_parallel_size=8,
    fp16=True,
    forward_only=True,
)


@pytest.mark.shared
def test_megatron_on_eight_a100(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """The recording's README: ranks 0 and 6 arrive late. Their devices starve about 190 to 200 ms longer than the others'."""
    traces = sorted(shared("traces/megatron_tp8_a100").glob("megatron_kineto_*.json.gz"))
    import_traces(traces, tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        document = review(run, A100).as_document()
    assert document["verdict"]["word"] == "match"
    # 2048 x 4 tokens in the 625.731 ms of rank 6 on 8 ranks; of the ranges in the traces 604.842 ms is the lower median.
    # Operations and memory need the vocabulary, which the job does not say.
    (step,) = document["steps"]
    assert (step["step_ns"], step["median_rank_ns"], step["mfu"]) == (625_731_000, 604_842_000, None)
    assert step["tokens_per_s_per_gpu"] == pytest.approx(8192 / 0.625731 / 8)
    assert document["memory"] == []
    assert document["empty"]["memory"].startswith(
        "What memory to expect is not known: the job does not say padded_vocab_size"
    )
    assert (document["empty"]["pipelines"], document["empty"]["experts"]) == (
        "The job has one pipeline stage.",
        "The job has no experts.",
    )
    found = [(f["code"], f["place"].get("ranks"), f["because_of"]) for f in document["findings"]]
    assert found[0] == ("slow_host", [0], None)
    assert ("slow_host", [6], None) in found
    waiting = next(f for f in document["findings"] if f["code"] == "waiting_tp")
    assert document["findings"][waiting["because_of"] - 1]["code"] == "slow_host"
    (stage,) = document["time"]
    assert stage["step_ns"] == sum(c["dur_ns"] for c in stage["classes"]) == sum(
        r["step_ns"] for r in document["ranks"]["rows"]
    )  # fmt: skip
    assert stage["ranks"] == list(range(8))


# -- a simulated pipeline ----------------------------------------------------------------------------------------------

PIPELINE = Job(
    num_layers=4, hidden_size=1024, num_attention_heads=8, seq_length=1024, micro_batch_size=1, bf16=True,
    padded_vocab_size=4096, pipeline_model_parallel_size=2, global_batch_size=16, world_size=8, max_position_embeddings=1024,
    position_embedding_type="rope", megatron_core_version="0.16.1",
)  # fmt: skip


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Two stages of four ranks, four micro-batches, two steps; the kernels of rank 6 take twice their time."""
    path = tmp_path_factory.mktemp("pipeline") / "run.parquet"
    simulate(PIPELINE, steps=2, costs=Costs(ranks_per_node=4, slow_gpu={6: 2.0}), seed=3).write(path)
    with Run.open(path) as run:
        return review(run).as_document()


def test_the_slow_gpu_comes_first_of_what_takes_time(pipeline: dict[str, Any]) -> None:
    times = [f for f in pipeline["findings"] if f["kind"] == "time"]
    assert (times[0]["code"], times[0]["place"]["ranks"], times[0]["place"]["stage"]) == ("slow_gpu", [6], 1)
    assert all(f["because_of"] is not None for f in times if f["code"] in ("bubble", "late_rank"))


def test_time_by_stage_sums_to_the_steps(pipeline: dict[str, Any]) -> None:
    assert [(t["step"], t["stage"], t["ranks"]) for t in pipeline["time"]] == [
        (step, stage, ranks) for step in (0, 1) for stage, ranks in ((0, [0, 1, 2, 3]), (1, [4, 5, 6, 7]))
    ]  # fmt: skip
    for row in pipeline["time"]:
        assert row["step_ns"] == sum(c["dur_ns"] for c in row["classes"])
    compute = {
        (t["step"], t["stage"]): sum(c["dur_ns"] for c in t["classes"] if c["class"] == "compute")
        for t in pipeline["time"]
    }
    assert compute[0, 1] > compute[0, 0]  # the output layer, and one rank of twice the time


def test_the_boxes_of_a_pipeline_are_numbered_as_one_forward_one_backward_runs(pipeline: dict[str, Any]) -> None:
    first = next(p for p in pipeline["pipelines"] if p["boxes"])
    order: dict[int, list[str]] = {0: [], 1: []}
    for box in first["boxes"]:
        order[box["stage"]].append(f"{box['kind'][0]}{box['microbatch']}")
    assert order == {
        0: ["f0", "f1", "b0", "f2", "b1", "f3", "b2", "b3"],
        1: ["f0", "b0", "f1", "b1", "f2", "b2", "f3", "b3"],
    }
    for stage in (0, 1):
        boxes = [b for b in first["boxes"] if b["stage"] == stage]
        assert all(a["start_ns"] + a["dur_ns"] <= b["start_ns"] for a, b in pairwise(boxes))
    assert min(b["start_ns"] for b in first["boxes"]) == 0
    assert first["formula_share"] == pytest.approx(1 / 5)
    assert len(pipeline["pipelines"]) == 4
    assert [row["what"] for row in pipeline["left_out"]] == [
        f"boxes of pipelines other than {first['pipeline']}",
        f"pipelines of steps other than {first['step']}",
        "bandwidth: groups and pairs that are no slower than the shown ones",
    ]


def test_the_slowest_peers_of_each_kind_of_call(pipeline: dict[str, Any]) -> None:
    """Four pairs of stages send messages of 2 MiB both ways, all between the two nodes. The slowest four are shown."""
    rows = [r for r in pipeline["peers"] if r["role"] == "pp"]
    assert {r["peers"] for r in rows} <= {f"{a} to {b}" for n in range(4) for a, b in ((n, n + 4), (n + 4, n))}
    assert {(r["op"], r["payload_bytes"], r["span"], r["groups"]) for r in rows} == {("send", 2 << 20, "inter", 8)}
    assert len(rows) == 4
    for row in rows:
        assert row["median_transfer_ns"] >= row["usual_transfer_ns"]
        assert row["bus_gb_per_s"] == pytest.approx((2 << 20) / row["median_transfer_ns"])


def test_the_rank_grid_holds_every_rank_and_says_what_its_figures_are(pipeline: dict[str, Any]) -> None:
    ranks = pipeline["ranks"]
    assert [(r["rank"], r["pp"], r["dp"]) for r in ranks["rows"]] == [(r, r // 4, r % 4) for r in range(8)]
    keys = [m["key"] for m in ranks["metrics"]]
    assert {"step_ns", "compute_ns", "bubble_ns", "own_late_ns"} <= set(keys) <= {key for key, *_ in METRICS}
    slowest = max(ranks["rows"], key=lambda r: r["compute_ns"])
    assert slowest["rank"] == 6


# -- logs and links ----------------------------------------------------------------------------------------------------

LOG = """
[default7]: iteration       18/     500 | consumed samples:          288 | elapsed time per iteration (ms): 812.3 | lm loss: 8.1E+00 |
 [2026-01-01 00:00:00] iteration 19/500 | consumed samples: 304 | elapsed time per iteration (s): 0.9 | lm loss: nan | grad norm: 1.0
validation loss at iteration 19 | lm loss value: 7.0
 iteration       20/     500 | elapsed time per iteration (ms): garbled | lm loss: 7.9
"""  # noqa: E501


def test_iteration_lines() -> None:
    assert list(iterations(LOG.splitlines())) == [
        {"iteration": 18, "step_ns": 812_300_000, "loss": 8.1, "consumed_samples": 288},
        {"iteration": 19, "step_ns": 900_000_000, "loss": None, "consumed_samples": 304},
        {"iteration": 20, "step_ns": None, "loss": 7.9, "consumed_samples": None},
    ]


def test_history_knows_the_profiled_steps(tiny: Callable[..., Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    lines = [
        f" iteration {i}/ 9 | elapsed time per iteration (ms): {ms} |\n"
        for i, ms in ((1, 150), (2, 100), (3, 101), (4, 99))
    ]
    log.write_text("".join(lines), encoding="utf-8")
    with Run.open(tiny(0, 1)) as run:
        document = review(run, log=log).as_document()
    assert [(r["iteration"], r["profiled"], r["step_ns"]) for r in document["history"]] == [
        (1, True, 150_000_000), (2, False, 100_000_000), (3, False, 101_000_000), (4, False, 99_000_000),
    ]  # fmt: skip
    assert [f["code"] for f in document["findings"]] == ["profiler_cost"]


def test_a_log_without_iterations_is_refused(tiny: Callable[..., Path], tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("training ...\n", encoding="utf-8")
    with Run.open(tiny(0)) as run, pytest.raises(InputError, match="elapsed time per iteration"):
        review(run, log=log)


def test_links_stand_beside_what_was_measured(fixture: Path, tmp_path: Path) -> None:
    """1 GB/s: a gather of 8192 bytes over two ranks moves half of it, 4096 ns; the ledger's first row has ten of them."""
    file = tmp_path / "links.toml"
    file.write_text("[[link]]\ngb_per_s = 1\n", encoding="utf-8")
    with Run.open(fixture) as run:
        document = review(run, read_job(FIXTURE / "job.toml"), links=links.read(file)).as_document()
    assert document["ledger"]["cells"][0]["link_time_ns"] == 10 * 4096
    rows = [r for r in document["bandwidth"] if r["op"] == "all_gather" and r["payload_bytes"] == 8192]
    assert {r["link_time_ns"] for r in rows} == {4096}


def test_passes_without_a_message_between_them_are_boxes_of_their_own(tmp_path: Path) -> None:
    """Two stages of two chunks and eight micro-batches: 16 forward and 16 backward passes each.

    Where warm-up ends, a stage runs two forward passes with no message between: their micro-batch or chunk tells them apart.
    """
    job = Job(
        num_layers=8, hidden_size=256, num_attention_heads=4, seq_length=128, micro_batch_size=1, bf16=True,
        padded_vocab_size=1024, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, num_microbatches=8,
        world_size=2, max_position_embeddings=128, position_embedding_type="rope", megatron_core_version="0.16.1",
    )  # fmt: skip
    path = tmp_path / "run.parquet"
    simulate(job, collected=Collected(hooks=False)).write(path)
    with Run.open(path) as run:
        first = next(p for p in review(run).as_document()["pipelines"] if p["boxes"])
    found = sorted((b["stage"], b["kind"], b["chunk"], b["microbatch"]) for b in first["boxes"])
    assert found == [
        (stage, kind, chunk, n)
        for stage in (0, 1)
        for kind in ("backward", "forward")
        for chunk in (0, 1)
        for n in range(8)
    ]
