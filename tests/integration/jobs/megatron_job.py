"""A real training job of megatron-core on CPU over gloo: a tiny GPT, three steps, nothing left to chance.

    torchrun --nproc-per-node N megatron_job.py CONFIGURATION FOLDER [--steps N] [--seconds X]

CONFIGURATION is a name in CONFIGURATIONS. Leaves ``rank<r>.json`` in FOLDER: losses and gradient norms of each step as
hexadecimal floats, and a digest of the parameters' bits after the last one, so that two runs can be compared bit by bit;
and of every call of a router its layer and how many of this rank's tokens it sends to each expert.
It knows nothing of traceanalyzer. README.md says what is real.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cpu
import torch
import torch.distributed as dist
from attention import GatheringAttention, pieces


@dataclass(frozen=True)
class Settings:
    """Names are Megatron's."""

    world_size: int = 2
    tensor_model_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    overlap_p2p_comm: bool = False
    context_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    num_moe_experts: int | None = None
    moe_layer_freq: int = 1
    moe_aux_loss_coeff: float = 0.0
    moe_token_dispatcher_type: str = "alltoall"
    use_distributed_optimizer: bool = False
    overlap: bool = False  # gradients reduced and parameters gathered bucket by bucket, beside the computation
    bucket_size: int | None = None
    recompute_granularity: str | None = None
    num_layers: int = 2
    num_query_groups: int | None = None
    num_microbatches: int = 2
    hidden_size: int = 64
    num_attention_heads: int = 4
    seq_length: int = 32
    micro_batch_size: int = 2
    padded_vocab_size: int = 256


_EXPERTS = {"num_moe_experts": 4, "expert_model_parallel_size": 2}
_TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
_PP2 = {"pipeline_model_parallel_size": 2, "num_microbatches": 4}
_WIDE = {"hidden_size": 512, "num_attention_heads": 8, "seq_length": 256}
_DISTRIBUTED = {"use_distributed_optimizer": True}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "tp2_sp": {**_TP2},
    "tp2_sp_wide": {**_TP2, **_WIDE},
    "tp2_sp_recompute": {**_TP2, "recompute_granularity": "full"},
    "pp2": {**_PP2},
    "pp2_interleaved": {**_PP2, "num_layers": 4, "virtual_pipeline_model_parallel_size": 2, "overlap_p2p_comm": True},
    "dp2_distopt": {**_DISTRIBUTED},
    "dp2_distopt_overlap": {**_DISTRIBUTED, "overlap": True, "bucket_size": 40_000},
    "ep2": {**_EXPERTS, "moe_aux_loss_coeff": 0.01},
    "ep2_allgather": {**_EXPERTS, "moe_token_dispatcher_type": "allgather", "recompute_granularity": "full"},
    "cp2": {"context_parallel_size": 2, "num_query_groups": 2},
    "tp2_pp2_interleaved": {
        **_TP2,
        **_PP2,
        "world_size": 4,
        "num_layers": 4,
        "virtual_pipeline_model_parallel_size": 2,
    },
    "pp2_dp2_distopt": {**_PP2, **_DISTRIBUTED, "world_size": 4},
    "tp2_ep2": {**_TP2, **_EXPERTS, "world_size": 4, "expert_tensor_parallel_size": 1},
    "tp2_pp2_cp2_ep2_distopt": {
        **_TP2,
        **_PP2,
        **_EXPERTS,
        **_DISTRIBUTED,
        "world_size": 8,
        "num_layers": 4,
        "moe_layer_freq": 2,
        "context_parallel_size": 2,
        "num_query_groups": 2,
        "expert_tensor_parallel_size": 1,
    },
}


class RMSNorm(torch.nn.Module):
    """RMS norm whose weight carries core's ``sequence_parallel`` mark (core's own torch norm refuses it)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, self.weight.shape, self.weight, self.eps)


def configure(s: Settings) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    more: dict[str, Any] = {}
    if s.num_moe_experts:
        more |= {
            "num_moe_experts": s.num_moe_experts,
            "moe_layer_freq": s.moe_layer_freq,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": s.moe_token_dispatcher_type,
            "moe_ffn_hidden_size": 128,
            "moe_aux_loss_coeff": s.moe_aux_loss_coeff,
            "moe_router_load_balancing_type": "aux_loss" if s.moe_aux_loss_coeff else "none",
        }
    if s.recompute_granularity == "full":
        more |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if s.context_parallel_size > 1:
        more |= {"cp_comm_type": "all_gather", "transformer_impl": "transformer_engine"}
    else:
        more |= {"transformer_impl": "local"}
    return TransformerConfig(
        num_layers=s.num_layers,
        hidden_size=s.hidden_size,
        ffn_hidden_size=4 * s.hidden_size,
        num_attention_heads=s.num_attention_heads,
        num_query_groups=s.num_query_groups,
        tensor_model_parallel_size=s.tensor_model_parallel_size,
        sequence_parallel=s.sequence_parallel,
        pipeline_model_parallel_size=s.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=s.virtual_pipeline_model_parallel_size,
        overlap_p2p_comm=s.overlap_p2p_comm,
        batch_p2p_comm=not s.overlap_p2p_comm,
        context_parallel_size=s.context_parallel_size,
        expert_model_parallel_size=s.expert_model_parallel_size,
        expert_tensor_parallel_size=s.expert_tensor_parallel_size,
        bf16=True,
        params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # fused kernels need CUDA; none of them communicates
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        **more,
    )


def build(s: Settings) -> tuple[list[Any], Any, Any]:
    """(model chunks in Megatron's data-parallel wrapper, optimizer, configuration)."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    cpu.after_import()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=s.tensor_model_parallel_size,
        pipeline_model_parallel_size=s.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=s.virtual_pipeline_model_parallel_size,
        context_parallel_size=s.context_parallel_size,
        expert_model_parallel_size=s.expert_model_parallel_size,
        expert_tensor_parallel_size=s.expert_tensor_parallel_size,
        create_gloo_process_groups=False,
    )
    model_parallel_cuda_manual_seed(1234)
    config = configure(s)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=s.use_distributed_optimizer,
        overlap_grad_reduce=s.overlap,
        overlap_param_gather=s.overlap,
        bucket_size=s.bucket_size,
    )
    chunks = []
    for number in range(s.virtual_pipeline_model_parallel_size or 1):
        stage = number if s.virtual_pipeline_model_parallel_size else None
        spec: Any = get_gpt_decoder_block_spec(
            config, use_transformer_engine=False, normalization="RMSNorm", vp_stage=stage
        )
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            if s.context_parallel_size > 1:
                layer.submodules.self_attention.submodules.core_attention = GatheringAttention
        model = GPTModel(
            config=config,
            transformer_layer_spec=spec,
            vocab_size=s.padded_vocab_size,
            max_sequence_length=s.seq_length,
            pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
            post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
            parallel_output=True,
            share_embeddings_and_output_weights=True,
            position_embedding_type="rope",
            vp_stage=stage,
        ).to(torch.bfloat16)
        chunks.append(DistributedDataParallel(config, ddp_config, model, disable_bucketing=number > 0))
    for chunk in chunks:
        chunk.broadcast_params()
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=1e-3,
            bf16=True,
            params_dtype=torch.bfloat16,
            clip_grad=1.0,
            use_distributed_optimizer=s.use_distributed_optimizer,
            overlap_param_gather=s.overlap,
        ),
        chunks,
        use_gloo_process_groups=False,
    )
    # As Megatron's training loop does.
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    if s.overlap:
        several = len(chunks) > 1
        config.no_sync_func = [c.no_sync for c in chunks] if several else chunks[0].no_sync
        if several:
            config.grad_sync_func = [c.start_grad_sync for c in chunks]
            config.param_sync_func = [c.start_param_sync for c in chunks]
    return chunks, optimizer, config


class Data:
    """Batches that every rank draws for itself, the same ones in the same data-parallel rank."""

    def __init__(self, s: Settings) -> None:
        from megatron.core import parallel_state

        self.settings = s
        self.random = torch.Generator().manual_seed(7 + parallel_state.get_data_parallel_rank())
        ranks = parallel_state.get_context_parallel_world_size()
        self.own = torch.arange(s.seq_length)
        if ranks > 1:
            self.own = pieces(parallel_state.get_context_parallel_rank(), ranks, s.seq_length)
        self.mask = torch.triu(torch.ones(s.seq_length, s.seq_length, dtype=torch.bool), 1)[None, None]

    def __iter__(self) -> Data:
        return self

    def __next__(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        s = self.settings
        tokens = torch.randint(0, s.padded_vocab_size, (s.micro_batch_size, s.seq_length + 1), generator=self.random)
        return tokens[:, self.own], self.own.expand(s.micro_batch_size, -1), self.mask, tokens[:, self.own + 1]


def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    loss = output.float().mean()
    return loss, {"loss": loss.detach().clone()}  # the schedule divides ``loss`` in place


def forward_step(data: Data, chunk: Any) -> tuple[torch.Tensor, Any]:
    tokens, positions, mask, labels = next(data)
    return chunk(tokens, positions, mask, labels=labels), loss_function


def digest(chunks: list[Any]) -> str:
    found = hashlib.sha256()
    for chunk in chunks:
        for name, parameter in sorted(chunk.named_parameters()):
            found.update(name.encode())
            found.update(parameter.detach().view(torch.int16).numpy().tobytes())
    return found.hexdigest()


def count_routed(chunks: list[Any]) -> list[list[Any]]:
    """A list that fills with [layer from 0, tokens of this rank to each expert] as routers are called."""
    from megatron.core.transformer.moe.router import TopKRouter

    found: list[list[Any]] = []

    def called(router: Any, _: Any, output: Any) -> None:
        found.append([router.layer_number - 1, output[1].sum(dim=0).tolist()])

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, TopKRouter):
                module.register_forward_hook(called)
    return found


class Training:
    """A model, its optimizer and its data. ``step`` makes a step: what its micro-batches gave, and the gradients' norm."""

    def __init__(self, s: Settings) -> None:
        self.settings = s
        self.chunks, self.optimizer, self.config = build(s)
        self.data = [Data(s) for _ in self.chunks]

    def step(self) -> tuple[list[Any], Any]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        s, chunks, data = self.settings, self.chunks, self.data
        for chunk in chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        outputs = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(d) for d in data] if len(chunks) > 1 else iter(data[0]),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=s.num_microbatches,
            seq_length=s.seq_length,
            micro_batch_size=s.micro_batch_size,
            forward_only=False,
        )
        _, norm, _ = self.optimizer.step()
        return outputs, norm


def train(s: Settings, steps: int, seconds: float) -> dict[str, Any]:
    """``steps`` steps; ``seconds`` of sleep after each, for those who want to meet the job while it runs."""
    training = Training(s)
    routed = count_routed(training.chunks) if s.num_moe_experts else []
    losses: list[str | None] = []
    norms: list[str] = []
    times: list[float] = []
    for _ in range(steps):
        begin = time.perf_counter()
        outputs, norm = training.step()
        losses.append((sum(float(x["loss"]) for x in outputs) / len(outputs)).hex() if outputs else None)
        norms.append(float(norm).hex())
        times.append(time.perf_counter() - begin)
        if seconds:
            time.sleep(seconds)
    found = {"losses": losses, "grad_norms": norms, "parameters": digest(training.chunks), "step_seconds": times}
    return found | {"routed": routed}


def prepare() -> None:
    """What comes before torch.distributed and megatron-core."""
    torch.set_num_threads(1)
    torch.manual_seed(99)
    logging.disable(logging.WARNING)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    cpu.before_import()


def leave(found: dict[str, Any], folder: Path) -> None:
    """Writes what a rank found, and ends its job."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"rank{dist.get_rank()}.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("configuration", choices=CONFIGURATIONS)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--microbatches", type=int, default=None)
    options = parser.parse_args()
    settings = Settings(**CONFIGURATIONS[options.configuration])
    if options.microbatches:
        settings = replace(settings, num_microbatches=options.microbatches)
    prepare()
    dist.init_process_group("gloo")
    if dist.get_world_size() != settings.world_size:
        raise SystemExit(f"{options.configuration} is a job of {settings.world_size} processes")
    leave(train(settings, options.steps, options.seconds), options.folder)


if __name__ == "__main__":
    main()
