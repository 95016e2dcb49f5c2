"""Jobs and helpers shared by the tests of the analytical model."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.expect.model import ExpectedCall, RuleSet
from traceanalyzer.job import Job

_ROOT = Path(__file__).resolve().parents[2]

# The reference's tiny model (section 2.10), one layer more or less and other options as a test says.
_TINY: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "micro_batch_size": 2,
    "num_microbatches": 1,
    "seq_length": 32,
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "padded_vocab_size": 128,
    "bf16": True,
}

# The seed document's model: TP alone, as its chapter 1 has it.
_DOCUMENT: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "world_size": 4,
    "tensor_model_parallel_size": 4,
    "sequence_parallel": True,
    "micro_batch_size": 2,
    "num_microbatches": 1,
    "seq_length": 8192,
    "num_layers": 80,
    "hidden_size": 8192,
    "ffn_hidden_size": 32768,
    "num_attention_heads": 64,
    "swiglu": True,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "padded_vocab_size": 32000,
    "untie_embeddings_and_output_weights": True,
    "bf16": True,
}

Key = tuple[str, str, int, int, str]


@pytest.fixture
def tiny() -> Callable[..., Job]:
    """A Job of the reference's tiny model with the given fields changed."""
    return lambda **changes: Job(**{**_TINY, **changes})


@pytest.fixture
def document_job() -> Callable[..., Job]:
    """A Job of the seed document's model with the given fields changed."""
    return lambda **changes: Job(**{**_DOCUMENT, **changes})


@pytest.fixture
def rows() -> Callable[..., list[ExpectedCall]]:
    """Expected calls of one role (default "tp"), optionally of one phase and component."""

    def select(
        job: Job,
        rank: int = 0,
        role: str = "tp",
        phase: str | None = None,
        component: str | None = None,
        rules: RuleSet = "megatron",
    ) -> list[ExpectedCall]:
        return [
            row
            for row in expect.expected(job, rank, rules=rules).calls
            if row.role == role and phase in (None, row.phase) and component in (None, row.component)
        ]

    return select


@pytest.fixture
def counts(rows: Callable[..., list[ExpectedCall]]) -> Callable[..., Counter[Key]]:
    """Calls per step by (operation, type, input elements, output elements, phase); arguments as in rows."""

    def count(job: Job, rank: int = 0, role: str = "tp") -> Counter[Key]:
        found: Counter[Key] = Counter()
        for row in rows(job, rank, role):
            found[row.op, row.dtype, row.in_elems, row.out_elems, row.phase] += row.calls
        return found

    return count


@pytest.fixture
def off_rank(rows: Callable[..., list[ExpectedCall]]) -> Callable[..., int]:
    """Off-rank bytes per step over the rows that rows() selects; a test fails if they are not whole."""

    def total(job: Job, rank: int = 0, **selection: Any) -> int:
        found = sum(row.off_rank_bytes * row.calls for row in rows(job, rank, **selection))
        assert found == int(found)
        return int(found)

    return total


# -- the shared reference material -----------------------------------------------------------------------------------


def _shared() -> Path | None:
    return next((path for path in (_ROOT / "shared", _ROOT.parent / "shared") if path.is_dir()), None)


def _parameters(items: Iterable[tuple[str, Any]]) -> list[Any]:
    found = [pytest.param(item, id=name, marks=pytest.mark.shared) for name, item in items]
    skip = pytest.mark.skip(reason="the shared reference material is not beside this checkout")
    return found or [pytest.param(None, id="none", marks=[pytest.mark.shared, skip])]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """``recording``: every recorded configuration. ``claim``: every claim of the seed document; ``claims``: all at once."""
    folder = _shared()
    if "recording" in metafunc.fixturenames:
        files = sorted((folder / "megatron_recorded").glob("*.csv.gz")) if folder else []
        recordings = [Recording(path) for path in files]
        metafunc.parametrize("recording", _parameters((recording.name, recording) for recording in recordings))
    if {"claim", "claims"} & set(metafunc.fixturenames):
        rows: list[dict[str, str]] = []
        if folder:
            with (folder / "seed" / "claims.csv").open(newline="", encoding="utf-8") as text:
                rows = list(csv.DictReader(text))
        if "claim" in metafunc.fixturenames:
            metafunc.parametrize("claim", _parameters((row["id"], row) for row in rows))
        if "claims" in metafunc.fixturenames:
            metafunc.parametrize("claims", _parameters([("all", rows)] if rows else []))


@dataclass(frozen=True)
class Recording:
    """Calls of real megatron-core 0.16.1, one configuration: its job and the rows of its last recorded step."""

    path: Path

    @property
    def name(self) -> str:
        return self.path.name.removesuffix(".csv.gz")

    @cached_property
    def rows(self) -> list[dict[str, str]]:
        with gzip.open(self.path, "rt", newline="") as text:
            found = list(csv.DictReader(text))
        step = "step1:" if any(row["phase"].startswith("step1:") for row in found) else "step0:"
        return [row for row in found if row["phase"].startswith(step)]

    @cached_property
    def ranks(self) -> list[int]:
        return sorted({int(row["rank"]) for row in self.rows})

    @cached_property
    def job(self) -> Job:
        args = json.loads(self.path.with_name(f"{self.name}.json").read_text(encoding="utf-8"))["args"]
        options: dict[str, Any] = {}
        if args["experts"]:
            every = args["moe_freq"]
            options |= {
                "num_experts": args["experts"],
                "moe_router_topk": args["topk"],
                "moe_token_dispatcher_type": args["dispatcher"],
                "moe_aux_loss_coeff": args["aux"],
                "moe_router_load_balancing_type": "aux_loss" if args["aux"] else "none",
                "moe_layer_freq": tuple(int(layer % every == every - 1) for layer in range(args["layers"])),
            }
            if args["drop_pad"]:
                options |= {"moe_expert_capacity_factor": 1.0, "moe_pad_expert_input_to_capacity": True}
        if args["cp_attn"].startswith("te_"):
            options["cp_comm_type"] = (args["cp_attn"].removeprefix("te_"),)
        if args.get("fsdp") == "megatron":
            options["data_parallel_sharding_strategy"] = "optim_grads_params"
        if args["recompute"] == "full":
            options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        elif args["recompute"]:
            options["recompute_granularity"] = args["recompute"]
            if args["recompute_modules"]:
                options["recompute_modules"] = tuple(args["recompute_modules"].split(","))
        return Job(
            megatron_core_version="0.16.1",
            world_size=int(self.rows[0]["world"]),
            tensor_model_parallel_size=args["tp"],
            sequence_parallel=args["sp"],
            pipeline_model_parallel_size=args["pp"],
            virtual_pipeline_model_parallel_size=args["vpp"] or None,
            context_parallel_size=args["cp"],
            expert_model_parallel_size=args["ep"],
            expert_tensor_parallel_size=args["etp"] or None,
            order=args["order"],
            micro_batch_size=args["mbs"],
            num_microbatches=args["microbatches"],
            seq_length=args["seq"],
            num_layers=args["layers"],
            hidden_size=args["hidden"],
            ffn_hidden_size=args["ffn"] or 4 * args["hidden"],
            num_attention_heads=args["heads"],
            group_query_attention=bool(args["gqa"]),
            num_query_groups=args["gqa"] or None,
            swiglu=bool(args["swiglu"]),
            add_bias_linear=False,
            normalization="RMSNorm" if args["rms"] else "LayerNorm",
            position_embedding_type="rope" if args["rope"] else "learned_absolute",
            padded_vocab_size=args["vocab"],
            untie_embeddings_and_output_weights=args["untie"],
            transformer_impl="transformer_engine" if args["cp"] > 1 else "local",
            bf16=not args["fp32"],
            grad_reduce_in_bf16=not args["grad_fp32"],
            use_distributed_optimizer=bool(args["dist_opt"]),
            overlap_grad_reduce=args["overlap_grad"],
            overlap_param_gather=args["overlap_param"],
            overlap_p2p_comm=args["overlap_p2p"],
            ddp_bucket_size=args["bucket"] or None,
            cross_entropy_loss_fusion=args["fused_ce"],
            calculate_per_token_loss=args["per_token_loss"],
            use_megatron_fsdp=args.get("fsdp") == "megatron",
            use_torch_fsdp2=args.get("fsdp") == "torch",
            **options,
        )
