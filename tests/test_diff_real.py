"""The diff of real traces: our own recording, Megatron on eight A100, and megatron-core over gloo."""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.diff import Diff, diff
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job, read_job
from traceanalyzer.matching import Cell
from traceanalyzer.run import Run

FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "megatron_tp2_sp"


def compared(traces: list[Path], out: Path, job: Job, **options: Any) -> Diff:
    """Imports traces and compares them with a job."""
    import_traces(traces, out)
    with Run.open(out) as run:
        return diff(run, job, **options)


def figures(cell: Cell) -> tuple[Any, ...]:
    """Where, what, how large, how often, and with which verdict."""
    return (
        cell.role,
        cell.phase,
        cell.op,
        cell.dtype,
        cell.payload_bytes_each,
        cell.calls_expected,
        cell.calls_measured,
        cell.off_rank_bytes_measured,
        cell.verdict,
    )


# -- our own recording -----------------------------------------------------------------------------------------------


def test_the_fixture(tmp_path: Path) -> None:
    """Sizes and counts are those of calls.csv, which its counter wrote apart from the trace."""
    job = read_job(FIXTURE / "job.toml")
    found = compared([FIXTURE / f"rank{r}.json.gz" for r in (0, 1)], tmp_path / "run.parquet", job)
    assert [figures(c) for c in found.cells] == [
        ("tp", "forward", "all_gather", "bfloat16", 8192, 10, 10, 40960, "match"),
        ("tp", "forward", "reduce_scatter", "bfloat16", 8192, 10, 10, 40960, "match"),
        ("tp", "forward", "all_reduce", "float32", 256, 6, 6, 1536, "match"),
        ("tp", "backward", "all_gather", "bfloat16", 8192, 20, 20, 81920, "match"),
        ("tp", "backward", "reduce_scatter", "bfloat16", 8192, 10, 10, 40960, "match"),
        ("tp", "other", "all_reduce", "float32", 1280, 1, 1, 1280, "match"),
        ("dp_cp", "other", "all_reduce", "float32", 296192, 1, 1, 0, "match"),
        ("mp", "optimizer", "all_reduce", "float32", 4, 1, 1, 4, "match"),
    ]
    with (FIXTURE / "calls.csv").open(newline="", encoding="utf-8") as text:
        counted: Counter[tuple[str, str]] = Counter()
        for row in csv.DictReader(text):
            counted[row["rank"], row["phase"]] += int(row["count"])
    for rank in ("0", "1"):
        ours: Counter[str] = Counter()
        for cell in found.cells:
            ours[str(cell.phase)] += cell.calls_measured
        assert ours == {phase: n for (r, phase), n in counted.items() if r == rank}
    assert {(c.role_evidence, c.ranks, c.steps) for c in found.cells} == {(("description",), (0, 1), (1,))}
    assert found.cells[3].avoidable_bytes == 10 * 4096
    assert (found.verdict, found.exit_code) == ("match", 0)


# -- eight A100 ------------------------------------------------------------------------------------------------------

A100: dict[str, Any] = {
    "num_layers": 40,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "seq_length": 2048,
    "micro_batch_size": 4,
    "num_microbatches": 1,
    "tensor_model_parallel_size": 8,
    "fp16": True,
}
FORWARD_ONLY = Job(**A100, forward_only=True)


@pytest.fixture(scope="module")
def a100(shared: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The eight traces, imported."""
    out = tmp_path_factory.mktemp("a100") / "run.parquet"
    import_traces(sorted(shared("traces/megatron_tp8_a100").glob("megatron_kineto_*.json.gz")), out)
    return out


@pytest.mark.shared
def test_megatron_on_eight_a100(a100: Path) -> None:
    """Off-rank bytes: 2 * 7/8 of 67,108,864 each; the scalar is summed over one rank, without a kernel."""
    with Run.open(a100) as run:
        found = diff(run, FORWARD_ONLY)
    assert [(figures(c), c.components) for c in found.cells] == [
        (
            ("tp", "forward", "all_reduce", "float16", 67_108_864, 80, 80, 9_395_240_960, "match"),
            ("attention.proj", "mlp.fc2"),
        ),
        (("tp", "forward", "all_reduce", "float16", 67_108_864, 1, 1, 117_440_512, "match"), ("embedding",)),
        (
            ("tp", "forward", "all_reduce", "float32", 32_768, 3, 3, 172_032, "match"),
            ("loss: max", "loss: predicted logit", "loss: sum of exponentials"),
        ),
        ((None, "other", "all_reduce", "float32", 4, None, 1, 0, "match"), ()),
    ]
    layers, _, _, scalar = found.cells
    assert layers.role_evidence == ("layout and call_path",)
    assert scalar.cause is not None
    assert (scalar.cause.code, scalar.group_size) == ("group_of_one", 1)
    assert (layers.ranks, layers.steps) == (tuple(range(8)), (3,))
    c = found.coverage
    assert (c.ranks_present, c.ranks_declared, c.calls) == (tuple(range(8)), 8, 680)
    assert (c.kernels, c.kernels_attributed, c.attributed, c.judged) == (672, 672, 1, 1)
    assert c.unattributed == ()
    assert found.not_in_window == ("backward", "optimizer")
    assert (found.verdict, found.version, found.job_conflicts) == ("match", "all", ())
    # rank by rank the longest kernels wait for ranks 0 and 6, so no figure here is a bandwidth of the links
    assert layers.time_ns is not None
    assert layers.time_ns == layers.exposed_ns


@pytest.mark.shared
def test_a_training_job_misses_nothing_outside_the_window(a100: Path) -> None:
    with Run.open(a100) as run:
        found = diff(run, Job(**A100))
    assert (found.verdict, found.not_in_window) == ("match", ("backward", "optimizer"))


@pytest.mark.shared
def test_one_layer_more(a100: Path) -> None:
    with Run.open(a100) as run:
        found = diff(run, Job(**{**A100, "num_layers": 41}))
    assert [figures(c) for c in found.cells if c.verdict != "match"] == [
        ("tp", "forward", "all_reduce", "float16", 67_108_864, 82, 80, 9_395_240_960, "missing")
    ]
    assert found.exit_code == 1


@pytest.mark.shared
def test_another_layout_is_contradicted(a100: Path) -> None:
    """The groups have no names; that they are of eight ranks shows in who calls on them."""
    with Run.open(a100) as run:
        found = diff(run, Job(**{**A100, "tensor_model_parallel_size": 4}))
    assert [c.sentence for c in found.job_conflicts] == [
        "declared TP4 x DP2, observed groups imply TP8 (proven)",
        "declared tp groups of 4 ranks, observed groups of 8",
    ]
    assert found.exit_code == 3


@pytest.mark.shared
def test_one_rank_alone(shared: Callable[[str], Path], tmp_path: Path) -> None:
    """Nobody lists the group's ranks then: its caller and its size remain."""
    trace = shared("traces/megatron_tp8_a100/megatron_kineto_3.json.gz")
    found = compared([trace], tmp_path / "run.parquet", FORWARD_ONLY)
    assert (found.verdict, found.coverage.ranks_present) == ("match", (3,))
    assert [c.calls_measured for c in found.cells] == [80, 1, 3, 1]


# -- megatron-core over gloo -----------------------------------------------------------------------------------------


def gloo_job(**changes: Any) -> Job:
    """The job of these recordings: 4 layers, hidden 64, sequence 32, micro-batch 2, 4 micro-batches, TP 2."""
    fields = {
        "megatron_core_version": "0.16.1",
        "world_size": 2,
        "tensor_model_parallel_size": 2,
        "num_layers": 4,
        "hidden_size": 64,
        "ffn_hidden_size": 256,
        "num_attention_heads": 4,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "padded_vocab_size": 256,
        "seq_length": 32,
        "micro_batch_size": 2,
        "num_microbatches": 4,
        "bf16": True,
    }
    return Job(**{**fields, **changes})


RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
JOBS: dict[str, Job] = {
    "tp2": gloo_job(),
    "tp2_sp": gloo_job(sequence_parallel=True),
    "tp2_sp_recompute_full": gloo_job(sequence_parallel=True, **RECOMPUTE),
}


@pytest.fixture(scope="module")
def gloo(shared: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The run of a recording, imported once."""
    folder = tmp_path_factory.mktemp("gloo")

    def run(name: str) -> Path:
        out = folder / f"{name}.parquet"
        if not out.exists():
            import_traces([shared(f"traces/mcore_gloo_{name}")], out)
        return out

    return run


def recorded(path: Path, rank: int) -> Counter[tuple[str, str, int, int]]:
    """Calls of one rank in the first step on its tensor-parallel group, by operation, type, input and output elements."""
    found: Counter[tuple[str, str, int, int]] = Counter()
    with gzip.open(path, "rt", newline="") as text:
        for row in csv.DictReader(text):
            ours = row["group_desc"] == "TENSOR_MODEL_PARALLEL_GROUP" and row["phase"].startswith("step0:")
            if ours and int(row["rank"]) == rank:
                key = (row["op"].removesuffix("_into_tensor").removesuffix("_tensor"), row["dtype"])
                found[(*key, int(row["nelems_in"]), int(row["nelems_out"]))] += int(row["count"])
    return found


@pytest.mark.shared
@pytest.mark.parametrize("name", JOBS)
def test_every_tensor_parallel_call_is_found(
    gloo: Callable[[str], Path], shared: Callable[[str], Path], name: str
) -> None:
    """As the recorder inside the job counted them."""
    with Run.open(gloo(name)) as run:
        found = diff(run, JOBS[name])
        rows = run.tuples(
            "SELECT rank, op, dtype, in_elems, out_elems, count(*) FROM comm WHERE role = 'tp' GROUP BY ALL ORDER BY ALL"
        )
    measured = {rank: Counter({tuple(key): n for r, *key, n in rows if r == rank}) for rank in (0, 1)}
    counted = {rank: recorded(shared(f"megatron_recorded/{name}.csv.gz"), rank) for rank in (0, 1)}
    assert measured == counted
    assert sum(c.calls_expected or 0 for c in found.cells if c.role == "tp") == counted[0].total()
    assert {c.verdict for c in found.cells} == {"match"}
    assert (found.verdict, found.exit_code) == ("match", 0)
    evidence = {e for c in found.cells for e in c.role_evidence}
    assert evidence == {"call_path", "pattern"}
    assert {
        c.role_evidence for c in found.cells if c.role == "tp" and c.phase in ("forward", "backward", "recompute")
    } == {("call_path",)}


@pytest.mark.shared
def test_the_cells_of_sequence_parallelism_with_recomputation(gloo: Callable[[str], Path]) -> None:
    """Gathered tensors of 32 * 2 * 64 bf16 elements; half of each leaves the rank."""
    with Run.open(gloo("tp2_sp_recompute_full")) as run:
        found = diff(run, JOBS["tp2_sp_recompute_full"])
    assert [figures(c) for c in found.cells] == [
        ("tp", "forward", "all_gather", "bfloat16", 8192, 36, 36, 147_456, "match"),
        ("tp", "forward", "reduce_scatter", "bfloat16", 8192, 36, 36, 147_456, "match"),
        ("tp", "forward", "all_reduce", "float32", 256, 12, 12, 3072, "match"),
        ("tp", "recompute", "all_gather", "bfloat16", 8192, 32, 32, 131_072, "match"),
        ("tp", "recompute", "reduce_scatter", "bfloat16", 8192, 32, 32, 131_072, "match"),
        ("tp", "backward", "all_gather", "bfloat16", 8192, 72, 72, 294_912, "match"),
        ("tp", "backward", "reduce_scatter", "bfloat16", 8192, 36, 36, 147_456, "match"),
        ("tp", "other", "all_reduce", "float32", 2304, 1, 1, 2304, "match"),
        ("dp_cp", "other", "all_reduce", "float32", 559_360, 1, 1, 0, "match"),
        ("mp", "optimizer", "all_reduce", "float32", 4, 1, 1, 4, "match"),
    ]
    assert [c.avoidable_bytes for c in found.cells] == [0, 0, 0, 131_072, 131_072, 147_456, 0, 1152, 0, 0]


@pytest.mark.shared
def test_the_documents_rules_name_the_regather(gloo: Callable[[str], Path]) -> None:
    with Run.open(gloo("tp2_sp")) as run:
        found = diff(run, JOBS["tp2_sp"], rules="document")
    assert {(c.role, c.phase, c.op): (c.verdict, c.cause and c.cause.code) for c in found.cells} == {
        ("tp", "forward", "all_gather"): ("excess", "not_in_document"),
        ("tp", "forward", "reduce_scatter"): ("excess", "not_in_document"),
        ("tp", "forward", "all_reduce"): ("unexpected", "not_in_document"),
        ("tp", "backward", "all_gather"): ("excess", "sp_input_regather"),
        ("tp", "backward", "reduce_scatter"): ("excess", "not_in_document"),
        ("tp", "other", "all_reduce"): ("unexpected", "not_in_document"),
        ("mp", "other", "all_reduce"): ("unexpected", "not_in_document"),
        ("dp_cp", "other", "all_reduce"): ("match", "group_of_one"),
    }
    (regather,) = [c for c in found.cells if c.cause is not None and c.cause.code == "sp_input_regather"]
    assert (regather.calls_expected, regather.calls_measured) == (32, 72)
    assert regather.cause is not None
    assert regather.cause.confidence == "proven"
    assert regather.cause.sentence.startswith(
        "The document lets the backward pass mirror the forward one; real Megatron gathers the input of every "
        "column-parallel layer again for its weight gradient: 36 of the 40 calls beyond the document"
    )
    assert found.exit_code == 1


@pytest.mark.shared
@pytest.mark.parametrize(
    ("run_name", "job_name", "code", "confidence", "differing"),
    [
        ("tp2_sp_recompute_full", "tp2_sp", "recompute_full", "likely", 2),
        ("tp2_sp", "tp2_sp_recompute_full", "recompute_off", "proven", 2),
        ("tp2", "tp2_sp", "sequence_parallel_off", "proven", 5),
        ("tp2_sp", "tp2", "sequence_parallel_on", "proven", 4),
    ],
)
def test_a_run_that_is_not_the_job(
    gloo: Callable[[str], Path], run_name: str, job_name: str, code: str, confidence: str, differing: int
) -> None:
    with Run.open(gloo(run_name)) as run:
        found = diff(run, JOBS[job_name])
    given = [(c.cause.code, c.cause.confidence, len(c.related)) for c in found.cells if c.cause is not None]
    assert given == [(code, confidence, differing - 1)] * differing
    assert found.exit_code == 1


@pytest.mark.shared
def test_three_micro_batches_instead_of_four(gloo: Callable[[str], Path]) -> None:
    with Run.open(gloo("tp2")) as run:
        found = diff(run, gloo_job(num_microbatches=3))
    given = {c.cause.sentence for c in found.cells if c.cause is not None}
    assert given == {"Every count is 4/3 of the expected one: the step had 4 micro-batches, the job says 3."}


# -- every configuration of megatron-core over gloo ------------------------------------------------------------------

DATA = {"tensor_model_parallel_size": 1}
DISTRIBUTED = {**DATA, "use_distributed_optimizer": True}
MOE = {**DATA, "expert_model_parallel_size": 2, "num_experts": 4, "moe_router_topk": 2}
CONTEXT = {
    **DATA,
    "context_parallel_size": 2,
    "group_query_attention": True,
    "num_query_groups": 2,
}
ALL_JOBS: dict[str, Job] = {
    **JOBS,
    "dp2": gloo_job(**DATA),
    "dp2_distopt": gloo_job(**DISTRIBUTED),
    "dp2_distopt_overlap": gloo_job(
        **DISTRIBUTED, overlap_grad_reduce=True, overlap_param_gather=True, ddp_bucket_size=40_000
    ),
    "dp2_megatron_fsdp": gloo_job(
        **DISTRIBUTED, use_megatron_fsdp=True, data_parallel_sharding_strategy="optim_grads_params"
    ),
    "dp2_torch_fsdp2": gloo_job(
        **DATA,
        bf16=False,
        use_torch_fsdp2=True,
        untie_embeddings_and_output_weights=True,
        transformer_impl="local",
    ),
    "cp2_te_p2p": gloo_job(**CONTEXT, cp_comm_type=("p2p",)),
    "cp2_te_all_gather": gloo_job(**CONTEXT, cp_comm_type=("all_gather",)),
    "cp2_te_a2a": gloo_job(**CONTEXT, cp_comm_type=("a2a",)),
    "pp2": gloo_job(**DATA, pipeline_model_parallel_size=2),
    "pp2_vpp2": gloo_job(**DATA, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2),
    "pp2_vpp2_overlap": gloo_job(
        **DATA, pipeline_model_parallel_size=2, virtual_pipeline_model_parallel_size=2, overlap_p2p_comm=True
    ),
    "pp4": gloo_job(**DATA, pipeline_model_parallel_size=4, world_size=4),
    "tp2pp2_sp": gloo_job(pipeline_model_parallel_size=2, sequence_parallel=True, world_size=4),
    "ep2_alltoall": gloo_job(**MOE, moe_token_dispatcher_type="alltoall"),
    "ep2_allgather": gloo_job(**MOE, moe_token_dispatcher_type="allgather"),
}
FIRST_STEPS = {"dp2_distopt_overlap", "dp2_megatron_fsdp"}
"""What overlaps runs at other places in the first step, and these recordings are of the first step."""


def recorded_calls(path: Path, rank: int) -> int:
    """Calls of one rank in its first step, on groups of any size, as the recorder inside the job counted them."""
    with gzip.open(path, "rt", newline="") as text:
        rows = [r for r in csv.DictReader(text) if r["phase"].startswith("step0:") and int(r["rank"]) == rank]
    return sum(int(r["count"]) for r in rows)


@pytest.mark.shared
@pytest.mark.parametrize("name", ALL_JOBS)
def test_every_configuration_matches(gloo: Callable[[str], Path], shared: Callable[[str], Path], name: str) -> None:
    """Every call of every rank has a cell, every cell matches, and no expected call is left over."""
    job = ALL_JOBS[name]
    with Run.open(gloo(name)) as run:
        found = diff(run, job)
    assert {(c.verdict, c.reason) for c in found.cells} == {("match", None)}
    assert (found.verdict, found.exit_code, found.coverage.attributed, found.coverage.judged) == ("match", 0, 1, 1)
    assert found.coverage.ranks_present == tuple(range(job.world_size or 0))
    assert found.first_step == (0 if name in FIRST_STEPS else None)
    for rank in found.coverage.ranks_present:
        mine = [c for c in found.cells if rank in c.ranks]
        moving = [c for c in mine if c.group_size != 1]  # gloo makes no call on a group of one rank
        assert sum(c.calls_expected or 0 for c in moving) == sum(c.calls_measured for c in moving)
        assert sum(c.calls_measured for c in mine) <= recorded_calls(shared(f"megatron_recorded/{name}.csv.gz"), rank)


@pytest.mark.shared
def test_the_stages_in_between_send_both_ways(gloo: Callable[[str], Path]) -> None:
    """Activations on, gradients back, of one size; the recording does not name the peers, so they share a cell."""
    with Run.open(gloo("pp4")) as run:
        found = diff(run, ALL_JOBS["pp4"])
    assert {(c.stage, c.op, c.phase, c.calls_measured, c.components) for c in found.cells if c.role == "pp"} == {
        (0, "send", "forward", 4, ("activations",)),
        (0, "recv", "backward", 4, ("gradients",)),
        (1, "send", None, 8, ("activations", "gradients")),
        (1, "recv", None, 8, ("activations", "gradients")),
        (2, "send", None, 8, ("activations", "gradients")),
        (2, "recv", None, 8, ("activations", "gradients")),
        (3, "recv", "forward", 4, ("activations",)),
        (3, "send", "backward", 4, ("gradients",)),
    }


@pytest.mark.shared
def test_rows_that_the_router_decided(gloo: Callable[[str], Path]) -> None:
    """16 exchanges (4 layers, 4 micro-batches) of 128 rows: exact are the own ones, and that none is lost."""
    with Run.open(gloo("ep2_alltoall")) as run:
        found = diff(run, ALL_JOBS["ep2_alltoall"])
        ((received,),) = run.tuples(
            "SELECT sum(out_elems)::BIGINT FROM comm WHERE rank = 0 AND op = 'all_to_all' AND out_elems < 512 "
            "AND phase = 'forward' AND role = 'ep'"
        )
    exchanges = [c for c in found.cells if c.op == "all_to_all"]
    assert [(c.role, c.phase, c.calls_measured, c.varies, c.conserved) for c in exchanges] == [
        ("ep", "forward", 32, True, True),
        ("ep", "forward", 16, True, True),
        ("ep", "backward", 32, True, True),
        ("ep", "backward", 16, True, True),
    ]
    probabilities = exchanges[1].spread
    assert probabilities is not None
    assert probabilities.balanced == 16 * 128
    # two ranks: what one gets beyond its half the other one lacks
    assert probabilities.least + probabilities.most == 2 * probabilities.balanced
    assert received in (probabilities.least, probabilities.most)


@pytest.mark.shared
def test_expert_tensor_parallelism_as_gloo_does_it(gloo: Callable[[str], Path]) -> None:
    """gloo has no uneven gather and scatter: the recording has a broadcast from each of two ranks, or an all-reduce.

    Only where two ranks happened to get as many rows it has the operation itself. All else matches.
    """
    job = gloo_job(
        world_size=4,
        sequence_parallel=True,
        expert_model_parallel_size=2,
        num_experts=4,
        moe_router_topk=2,
        moe_token_dispatcher_type="alltoall",
    )
    with Run.open(gloo("tp2ep2_sp_alltoall")) as run:
        found = diff(run, job)
    assert {c.role for c in found.cells if c.verdict != "match"} == {"etp", None}
    assert {c.verdict for c in found.cells} == {"match", "unknown"}
    for rank in range(4):
        wanted: Counter[tuple[str | None, str | None]] = Counter()
        made: Counter[tuple[str | None, str | None]] = Counter()
        for c in found.cells:
            if c.role == "etp" and rank in c.ranks:
                wanted[c.op, c.phase] += c.calls_expected or 0
            if c.role is None and rank in c.ranks:
                made[c.op, c.phase] += c.calls_measured
        for phase, gathers, scatters in (("forward", 32, 16), ("backward", 16, 32)):
            assert (wanted["all_gather", phase], wanted["reduce_scatter", phase]) == (gathers, scatters)
            assert made["all_gather", phase] + made["broadcast", phase] // 2 == gathers
            assert made["reduce_scatter", phase] + made["all_reduce", phase] == scatters
    assert found.exit_code == 3


@pytest.mark.shared
def test_the_release_of_a_recording(gloo: Callable[[str], Path]) -> None:
    """megatron-core 0.16.1: earlier ones overlap gradients in the first step too, later ones agree on a norm's groups."""
    job = gloo_job(
        **{**DISTRIBUTED, "megatron_core_version": None},
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=40_000,
    )
    with Run.open(gloo("dp2_distopt_overlap")) as run:
        found = diff(run, job)
    assert (found.version, found.verdict) == ("0.16-0.18", "match")
    apart = {a.releases: {(c.role, c.op, c.components, c.verdict) for c in a.cells} for a in found.versions_apart}
    assert apart[">=0.19"] == {("dist_opt", "all_reduce", ("gradient norm groups",), "missing")}
    assert ("dp_cp", "reduce_scatter", ("gradients",), "missing") in apart["0.13-0.15"]
