"""Properties that hold for every job: what is sent is received, gradients are parameters, sums agree however they are cut."""

from __future__ import annotations

from collections import Counter, defaultdict
from fractions import Fraction
from typing import Any

from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from traceanalyzer import expect, traffic
from traceanalyzer.errors import JobError
from traceanalyzer.expect import parameters, versions
from traceanalyzer.expect.place import Place
from traceanalyzer.expect.sheet import sheet
from traceanalyzer.expect.totals import total, totals
from traceanalyzer.job import Job


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Valid jobs of every kind; what Megatron refuses is drawn again."""
    one_of: Any = lambda *values: draw(st.sampled_from(values))  # noqa: E731
    tp, cp, pp, ep = one_of(1, 2, 4), one_of(1, 2, 4), one_of(1, 2, 4), one_of(1, 2, 4)
    experts = one_of(None, 8)
    chunks = one_of(1, 2) if pp > 1 else 1
    layers = pp * chunks * one_of(1, 2)
    options: dict[str, Any] = {
        "framework": one_of("megatron-core", "megatron-lm"),
        "megatron_core_version": one_of(*(f"0.{minor}.0" for minor in range(12, 20))),
        "transformer_engine_version": "2.13",
        "world_size": tp * cp * pp * one_of(1, 2, 3, 4),
        "tensor_model_parallel_size": tp,
        "sequence_parallel": tp > 1 and (experts is not None or one_of(True, False)),
        "context_parallel_size": cp,
        "cp_comm_type": (one_of("p2p", "all_gather", "a2a"),),
        "pipeline_model_parallel_size": pp,
        "virtual_pipeline_model_parallel_size": chunks if chunks > 1 else None,
        "overlap_p2p_comm": one_of(True, False),
        "micro_batch_size": one_of(1, 2),
        "num_microbatches": pp * one_of(1, 2),
        "seq_length": 64,
        "num_layers": layers,
        "hidden_size": 128,
        "num_attention_heads": 16,
        "group_query_attention": one_of(True, False),
        "num_query_groups": 16,
        "swiglu": one_of(True, False),
        "add_bias_linear": False,
        "normalization": one_of("RMSNorm", "LayerNorm"),
        "position_embedding_type": "rope",
        "padded_vocab_size": 256,
        "untie_embeddings_and_output_weights": one_of(True, False),
        "bf16": True,
        "grad_reduce_in_bf16": one_of(True, False),
        "use_distributed_optimizer": one_of(True, False),
        "recompute_granularity": one_of(None, "full"),
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    }
    if options["recompute_granularity"] is None:
        del options["recompute_method"], options["recompute_num_layers"]
    if experts is not None:
        options |= {
            "num_experts": experts,
            "expert_model_parallel_size": ep,
            "expert_tensor_parallel_size": one_of(1, tp),
            "moe_router_topk": one_of(1, 2),
            "moe_ffn_hidden_size": 256,
            "moe_layer_freq": one_of(1, 2),
            "moe_token_dispatcher_type": one_of("alltoall", "allgather"),
            "moe_router_dtype": one_of(None, "fp32"),
        }
    try:
        return Job(**options)
    except JobError:
        assume(False)
        raise


QUICK = settings(
    max_examples=40, deadline=None, suppress_health_check=(HealthCheck.too_slow, HealthCheck.filter_too_much)
)


@given(jobs())
@QUICK
def test_every_message_that_is_sent_is_received(job: Job) -> None:
    """Over the pipeline and over each ring: stage to stage and peer to peer, as many messages, as long, of one type."""
    stages = job.pipeline_model_parallel_size
    calls = [expect.expected(job, job.layout.rank_of(pp=stage)).calls for stage in range(stages)]
    crossing: dict[tuple[str, int, int], Counter[tuple[str, int]]] = defaultdict(Counter)
    for stage, rows in enumerate(calls):
        for row in rows:
            if row.role not in ("pp", "world") or row.op not in ("send", "recv"):
                continue
            other = (stage + (1 if row.peer == "next" else -1)) % stages
            between = (stage, other) if row.op == "send" else (other, stage)
            # with two stages a neighbour is both next and previous: what it carries tells the directions apart
            crossing[(row.component, *between)][row.dtype, row.in_elems] += row.calls * (1 if row.op == "send" else -1)
    assert all(count == 0 for found in crossing.values() for count in found.values())
    for rows in calls:
        ring: Counter[tuple[str, str, str, int]] = Counter()
        for row in rows:
            if row.role in ("cp", "cp_l1") and row.op in ("send", "recv"):
                sign = 1 if row.op == "send" else -1
                ring[row.role, row.phase, row.dtype, row.in_elems] += sign * row.calls
        assert not any(ring.values())


@given(jobs())
@QUICK
def test_exchanges_are_even_in_balance(job: Job) -> None:
    """With balanced routing every rank of a stage sends as many rows over the experts' group as it receives."""
    for stage in range(job.pipeline_model_parallel_size):
        rows = expect.expected(job, job.layout.rank_of(pp=stage)).calls
        for row in rows:
            if row.op == "all_to_all":
                assert row.in_elems == row.out_elems, row.rule


@given(jobs())
@QUICK
def test_gradients_are_the_parameters(job: Job) -> None:
    """Elements that are reduced once a step: those of the stage, plus padding; bytes are elements times their size."""
    for stage in range(job.pipeline_model_parallel_size):
        rank = job.layout.rank_of(pp=stage)
        release = versions.parse(job.megatron_core_version or "")
        expectation = expect.expected(job, rank)
        if any({"dp_cp", "edp"} & set(gap.roles) for gap in expectation.not_modelled):
            continue
        held = {"dp_cp": parameters.dense(job, rank, None, release), "edp": parameters.expert(job, rank, None, release)}
        for role, elements in held.items():
            rows = [
                row
                for row in expectation.calls
                if row.role == role
                and row.component.endswith("gradients")
                and row.op in ("all_reduce", "reduce_scatter")
            ]
            reduced = sum(row.in_elems * row.calls for row in rows)
            size = traffic.element_bytes(job.main_grad_dtype) or 0
            assert sum(row.payload_bytes * row.calls for row in rows) == reduced * size
            if not job.use_distributed_optimizer:
                assert reduced == elements.value
            elif elements.value:
                assert elements.value <= reduced <= elements.value * 1.2 + 64 * 1024
            else:
                assert reduced == 0


@given(jobs(), st.booleans())
@QUICK
def test_sums_agree_however_they_are_cut(job: Job, document: bool) -> None:
    found = sheet(job, rules="document" if document else "megatron")
    whole = total(found.counted)
    for by in ("role", "component", "phase", "axis"):
        parts = totals(found.counted, by).values()
        assert sum(part.calls for part in parts) == whole.calls
        assert sum((part.off_rank_bytes for part in parts), Fraction(0)) == whole.off_rank_bytes
        assert sum(part.payload_bytes for part in parts) == whole.payload_bytes
        assert sum(part.received_bytes for part in parts) == whole.received_bytes
        assert sum(part.avoidable_bytes for part in parts) == whole.avoidable_bytes
    assert whole.avoidable_bytes <= whole.off_rank_bytes


@given(jobs())
@QUICK
def test_all_ranks_of_a_stage_send_the_same(job: Job) -> None:
    layout = job.layout
    for rank in {0, layout.world_size // 2, layout.world_size - 1}:
        stage = layout.stage(rank)
        place = expect.expected(job, layout.rank_of(pp=stage))
        assert expect.expected(job, rank).calls == place.calls
        assert Place(job, stage, versions.KNOWN[-1]).rank == place.rank
