"""One simulation as rows and as the traces that a profiler would have written, imported: queries do not differ."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.queries import Library, library
from traceanalyzer.run import Run
from traceanalyzer.simulate import Collected, simulate
from traceanalyzer.simulate.costs import Clock, Costs
from traceanalyzer.simulate.kineto import write_kineto

GPT: dict[str, Any] = {
    "world_size": 4, "num_layers": 2, "hidden_size": 1024, "ffn_hidden_size": 2816, "num_attention_heads": 8, "swiglu": True,
    "seq_length": 1024, "max_position_embeddings": 1024, "position_embedding_type": "rope", "padded_vocab_size": 2048,
    "micro_batch_size": 1, "global_batch_size": 4, "bf16": True, "megatron_core_version": "0.16.1",
}  # fmt: skip
JOBS: dict[str, dict[str, Any]] = {
    # batches of messages, recomputation, data broadcast
    "tp2 pp2": {
        "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "recompute_granularity": "full",
        "recompute_method": "uniform", "recompute_num_layers": 1, "framework": "megatron-lm",
    },
    # experts, overlapped exchanges launched as one
    "ep4": {
        "num_experts": 8, "moe_router_topk": 2, "moe_token_dispatcher_type": "alltoall", "moe_grouped_gemm": True,
        "moe_ffn_hidden_size": 1024, "expert_model_parallel_size": 4, "use_distributed_optimizer": True,
        "overlap_grad_reduce": True, "overlap_param_gather": True,
    },
}  # fmt: skip

HARMLESS = {("calls", "coalesce_id")}
"""Query and column that may differ: calls launched as one share a number, which each form counts in its own way."""


@pytest.mark.parametrize("name", JOBS)
def test_rows_and_imported_traces_answer_alike(name: str, tmp_path: Path) -> None:
    job = Job(**{**GPT, **JOBS[name]})
    costs = Costs(jitter=0.02, ranks_per_node=2, clocks={"node-0001": Clock(offset_ns=2_000_000)})
    rows = tmp_path / "rows.parquet"
    simulate(job, steps=2, costs=costs, collected=Collected(hooks=False), seed=5).write(rows)
    imported = tmp_path / "imported.parquet"
    import_traces(write_kineto(rows, tmp_path / "traces", compress=False), imported)
    different: dict[str, Any] = {}
    answered = 0
    with Run.open(rows) as first, Run.open(imported) as second:
        ask = [Library.of(run, job) for run in (first, second)]
        for query in sorted(library()):
            here, there = (list(one.ask(query)) for one in ask)
            answered += bool(here)
            if len(here) != len(there):
                different[query] = (len(here), len(there))
                continue
            for a, b in zip(here, there, strict=True):
                unlike = {k: (a[k], b[k]) for k in a if a[k] != b[k] and (query, k) not in HARMLESS}
                if unlike:
                    different[query] = unlike
    assert different == {}
    assert answered >= 22
