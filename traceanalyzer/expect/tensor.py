"""The tensor-parallel chapter: what one rank sends on its tensor-parallel group (role "tp") in one step.

Where a call is made, [s, B, H] being the gathered hidden states (s = S/CP) and [s', B, H] the shard (s' = S/(CP*TP)):

==================  ===================================  ========================================================
place               without sequence parallelism         with sequence parallelism
==================  ===================================  ========================================================
column-parallel     backward: all-reduce [s, B, H]       forward: all-gather; backward: all-gather of the input
(qkv, fc1, output)                                       again, for the weight gradient, then reduce-scatter
row-parallel        forward: all-reduce [s, B, H]        forward: reduce-scatter; backward: all-gather
(proj, fc2)
word embedding      forward: all-reduce [B, s, H]        as row-parallel; with learned absolute positions (and before
                                                         0.8) forward all-reduce and slice, backward all-gather
loss                3 all-reduces [s, B] float32, also   the same
                    on a group of one rank
once a step         query and key norm gradients         gradients of everything that is replicated
==================  ===================================  ========================================================

An MoE layer has no calls of this group around its experts, only around a shared expert. Middle stages have layers only;
the embedding belongs to the first chunk of the first stage, output layer and loss to the last chunk of the last.

Phases: recompute is the forward work that a checkpoint repeats inside the backward pass; the gradient all-reduce of
the replicated parameters runs after the last backward and outside autograd, in finalize_model_grads: "other".

Source: reference of Megatron's traffic, sections 2.1, 2.2, 2.10 and 2.11; each row carries its own evidence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import ceil
from typing import Literal

from traceanalyzer.expect import parameters, shapes, versions
from traceanalyzer.expect.model import Evidence, ExpectedCall, NotModelled
from traceanalyzer.expect.quantity import Quantity, call
from traceanalyzer.job import Job

ROLE = "tp"

_FORWARD, _BACKWARD, _RECOMPUTE, _OTHER = "forward", "backward", "recompute", "other"

_RUN = "megatron-core 0.16.1 recorded: "
_FAKE = "megatron-core 0.16.1 run on a fake process group: "
_LINEAR = "tensor_parallel/layers.py: LinearWithGradAccumulationAndAsyncCommunication"
_WITH_SP = Evidence("run", f"{_RUN}tp2_sp, w1024_dense_tp4pp4_m8; {_LINEAR}, RowParallelLinear")
_WITHOUT_SP = Evidence("run", f"{_RUN}tp2, tp2pp2_nosp; {_LINEAR}, tensor_parallel/mappings.py: _reduce")
_REGATHER = Evidence("run", f"{_RUN}tp2_sp, w1024_dense_tp4pp4_m8; {_LINEAR}.backward")
_RECOMPUTED = Evidence(
    "run",
    f"{_RUN}tp2_recompute_full, tp2_sp_recompute_full, tp2_sp_recompute_selective_mlp; "
    "tensor_parallel/random.py: CheckpointFunction.backward",
)
_SHARED = Evidence("run", f"{_FAKE}shared experts; transformer/moe/shared_experts.py: SharedExpertMLP")
_EMBEDDING = Evidence("run", f"{_RUN}tp2_sp, tp2; tensor_parallel/layers.py: VocabParallelEmbedding.forward")
_OLD_EMBEDDING = Evidence("source", "Megatron-LM core_v0.7.0 tensor_parallel/layers.py: VocabParallelEmbedding.forward")
_POSITIONS = Evidence(
    "run",
    f"{_FAKE}learned_absolute; models/common/embeddings/language_model_embedding.py: "
    "LanguageModelEmbedding (reduce_scatter_embeddings, scatter_to_sequence_parallel_region)",
)
_FEW_GROUPS = Evidence(
    "run",
    f"{_FAKE}TP4 with 2 query groups; transformer/attention.py: SelfAttention.get_query_key_value_tensors",
)
_LOSS = Evidence("run", f"{_RUN}tp2_sp, dp2; tensor_parallel/cross_entropy.py: _VocabParallelCrossEntropy.forward")
_FUSED_LOSS = Evidence(
    "run", f"{_RUN}r2_tp2_sp_fused_ce; fusions/fused_cross_entropy.py: _VocabParallelCrossEntropy.forward"
)
_TE_LOSS = Evidence("source", "TransformerEngine 2.13 pytorch/triton/cross_entropy.py: cross_entropy_forward")
_NORMS = Evidence(
    "run",
    f"{_RUN}tp2_sp, tp2ep2_sp_alltoall; distributed/finalize_model_grads.py: "
    "_allreduce_non_tensor_model_parallel_grads",
)
_SAVED = Evidence(
    "run",
    f"{_FAKE}distribute_saved_activations; tensor_parallel/random.py: CheckpointFunction.backward, "
    "tensor_parallel/utils.py: gather_split_1d_tensor",
)


def calls(job: Job, rank: int, release: versions.Release) -> list[ExpectedCall]:
    """Every call of one rank on its tensor-parallel group in one step, in the order of the phases.

    Raises JobError if the job does not say a size that is needed.
    """
    part = _Part(job, rank)
    rows = [*_forward(part, release)]
    if not job.forward_only:
        rows += [*_recompute(part, release), *_backward(part, release), *_gradients(part)]
    return [row for row in rows if row.calls]


# -- what a rank holds -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Part:
    """The piece of the job that one rank runs."""

    job: Job
    rank: int

    @cached_property
    def stage(self) -> int:
        return self.job.layout.stage(self.rank)

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Layers of each model chunk."""
        count = self.job.virtual_pipeline_model_parallel_size or 1
        return tuple(self.job.layers_on_stage(self.stage, chunk) for chunk in range(count))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(layer for chunk in self.chunks for layer in chunk)

    @property
    def first(self) -> bool:
        """Whether the word embedding is here."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether final norm, output layer and loss are here."""
        return self.stage == self.job.pipeline_model_parallel_size - 1

    @property
    def ranks(self) -> int:
        return self.job.tensor_model_parallel_size

    @property
    def parallel(self) -> bool:
        return self.ranks > 1

    @property
    def sequence_parallel(self) -> bool:
        return self.parallel and self.job.sequence_parallel

    @property
    def dtype(self) -> str:
        return self.job.activation_dtype

    @cached_property
    def micro_batches(self) -> int:
        return self.job.require("num_microbatches")[0]

    def per_layer(self, layers: int, kind: str = "layers") -> Quantity:
        """One call in each of ``layers`` layers and micro-batches."""
        count = self.micro_batches
        return Quantity(f"{kind} * M", f"{layers} {kind} * {count} micro-batches", layers * count)

    def per_micro_batch(self, present: bool) -> Quantity:
        """One call in each micro-batch, if its place is on this rank."""
        count = self.micro_batches if present else 0
        return Quantity("M", f"{count} micro-batches", count)

    def split(self, layers: tuple[int, ...]) -> tuple[int, int]:
        """How many of these layers have a dense MLP and how many have experts."""
        experts = sum(self.job.is_moe_layer(layer) for layer in layers)
        return len(layers) - experts, experts


@dataclass(frozen=True)
class _Site:
    """A linear layer that communicates: column-parallel ones at their input, row-parallel ones at their output."""

    component: str
    kind: Literal["column", "row"]
    count: Quantity
    evidence: Evidence
    regathers: bool = True


def _layer_sites(part: _Part, layers: tuple[int, ...]) -> list[_Site]:
    """The sites of these layers, in forward order."""
    dense, experts = part.split(layers)
    if part.job.moe_shared_expert_intermediate_size is None:
        experts = 0
    proven = _WITH_SP if part.sequence_parallel else _WITHOUT_SP
    shared = part.per_layer(experts, "layers with a shared expert")
    keeps_input = part.job.moe_shared_expert_overlap
    return [
        _Site("attention.qkv", "column", part.per_layer(len(layers)), proven),
        _Site("attention.proj", "row", part.per_layer(len(layers)), proven),
        _Site("mlp.fc1", "column", part.per_layer(dense, "dense layers"), proven),
        _Site("mlp.fc2", "row", part.per_layer(dense, "dense layers"), proven),
        _Site("shared expert.fc1", "column", shared, _SHARED, regathers=not keeps_input),
        _Site("shared expert.fc2", "row", shared, _SHARED),
    ]


def _output_site(part: _Part) -> _Site:
    proven = _WITH_SP if part.sequence_parallel else _WITHOUT_SP
    return _Site("output layer", "column", part.per_micro_batch(part.last), proven)


# -- one row ---------------------------------------------------------------------------------------------------------


def _hidden(
    part: _Part,
    op: str,
    phase: str,
    component: str,
    count: Quantity,
    evidence: Evidence,
    *,
    rule: str,
    avoid: tuple[str, str] | None = None,
    words: str = "",
    note: str = "",
) -> ExpectedCall:
    """A call on the hidden states: all-gather from the shard, reduce-scatter to it, or all-reduce of the whole."""
    whole, shard = shapes.hidden_states(part.job), shapes.hidden_shard(part.job)
    return call(
        f"tensor: {rule}",
        role=ROLE,
        op=op,
        phase=phase,
        component=component,
        dtype=part.dtype,
        sent=shard if op == "all_gather" else whole,
        received={"all_gather": whole, "reduce_scatter": shard}.get(op),
        group_size=part.ranks,
        calls=count,
        evidence=evidence,
        stage=part.stage,
        avoid=avoid,
        versions=words,
        note=note,
    )


def _forward_of(
    part: _Part, site: _Site, phase: str = _FORWARD, avoid: tuple[str, str] | None = None
) -> Iterator[ExpectedCall]:
    """What a site does in a forward pass; also when a checkpoint repeats it."""
    evidence = site.evidence if avoid is None else _RECOMPUTED
    column = site.kind == "column"
    if column and not part.sequence_parallel:
        return
    op = "all_reduce" if not part.sequence_parallel else "all_gather" if column else "reduce_scatter"
    rule = "column-parallel input" if column else "row-parallel output"
    yield _hidden(part, op, phase, site.component, site.count, evidence, rule=rule, avoid=avoid)


def _backward_of(part: _Part, site: _Site) -> Iterator[ExpectedCall]:
    """What a site does in the backward pass: the re-gather first, then the reduce-scatter of the input's gradient."""
    column = site.kind == "column"
    if not column and not part.sequence_parallel:
        return
    if column and part.sequence_parallel and site.regathers:
        yield _hidden(
            part,
            "all_gather",
            _BACKWARD,
            f"{site.component} input re-gather",
            site.count,
            _REGATHER,
            rule="input re-gather",
            avoid=("sp_input_regather", ""),
            note="only the shard of the input is saved, and the weight gradient needs all of it",
        )
    op = "all_reduce" if not part.sequence_parallel else "reduce_scatter" if column else "all_gather"
    rule = f"gradient of {'column-parallel input' if column else 'row-parallel output'}"
    yield _hidden(part, op, _BACKWARD, site.component, site.count, site.evidence, rule=rule)


# -- phases ----------------------------------------------------------------------------------------------------------


def _forward(part: _Part, release: versions.Release) -> Iterator[ExpectedCall]:
    if part.parallel:
        yield _embedding_forward(part, release)
        for site in _layer_sites(part, part.layers):
            yield from _forward_of(part, site)
            if site.component == "attention.qkv":
                yield from _few_groups(part, release, part.layers, _FORWARD)
        yield from _forward_of(part, _output_site(part))
    yield from _loss(part)


def _backward(part: _Part, release: versions.Release) -> Iterator[ExpectedCall]:
    if not part.parallel:
        return
    yield from _backward_of(part, _output_site(part))
    for site in reversed(_layer_sites(part, part.layers)):
        if site.component == "attention.qkv":
            yield from _few_groups(part, release, part.layers, _BACKWARD)
        yield from _backward_of(part, site)
    if part.sequence_parallel:
        count = part.per_micro_batch(part.first)
        rule = "gradient of word embedding"
        yield _hidden(part, "all_gather", _BACKWARD, "embedding", count, _EMBEDDING, rule=rule)


def _embedding_forward(part: _Part, release: versions.Release) -> ExpectedCall:
    behaviour = "embedding reduce-scatter"
    op, evidence, words, note = "all_reduce", _EMBEDDING, "", ""
    if part.sequence_parallel and not versions.since(release, behaviour):
        evidence, words = _OLD_EMBEDDING, versions.before(behaviour)
        note = "every rank sums all of it and keeps its slice of the sequence"
    elif part.sequence_parallel and part.job.position_embedding_type == "learned_absolute":
        evidence = _POSITIONS
        note = "learned absolute positions are added to the whole sequence; each rank then keeps its slice"
    elif part.sequence_parallel:
        op, words = "reduce_scatter", versions.from_on(behaviour)
    count = part.per_micro_batch(part.first)
    return _hidden(part, op, _FORWARD, "embedding", count, evidence, rule="word embedding", words=words, note=note)


def _few_groups(
    part: _Part, release: versions.Release, layers: tuple[int, ...], phase: str, avoid: tuple[str, str] | None = None
) -> Iterator[ExpectedCall]:
    """With fewer query groups than ranks the mixed QKV is gathered, and its gradient reduce-scattered."""
    if not _has_few_groups(part.job) or not versions.since(release, "fewer query groups than TP"):
        return
    width = shapes.qkv_width(part.job)
    whole = shapes.loss_tokens(part.job).times(width.symbols, width.numbers, width.value)
    shard = _share(part, whole)
    gathers = phase != _BACKWARD
    yield call(
        "tensor: query groups fewer than ranks",
        role=ROLE,
        op="all_gather" if gathers else "reduce_scatter",
        phase=phase,
        component="attention.qkv groups",
        dtype=part.dtype,
        sent=shard if gathers else whole,
        received=whole if gathers else shard,
        group_size=part.ranks,
        calls=part.per_layer(len(layers)),
        evidence=_FEW_GROUPS if avoid is None else _RECOMPUTED,
        stage=part.stage,
        avoid=avoid,
        versions=versions.from_on("fewer query groups than TP"),
    )


def _share(part: _Part, whole: Quantity) -> Quantity:
    return Quantity(f"{whole.symbols} / TP", f"{whole.numbers} / {part.ranks}", whole.value // part.ranks)


def _has_few_groups(job: Job) -> bool:
    return job.num_query_groups is not None and job.num_query_groups < job.tensor_model_parallel_size


# -- recompute -------------------------------------------------------------------------------------------------------


def _recompute(part: _Part, release: versions.Release) -> Iterator[ExpectedCall]:
    job = part.job
    if job.recompute_granularity == "full":
        yield from _recompute_full(part, release)
    elif job.recompute_granularity == "selective" and part.parallel:
        sites = {site.component: site for site in _layer_sites(part, part.layers)}
        repeats = [("mlp", ("mlp.fc1", "mlp.fc2")), ("moe", ("shared expert.fc1", "shared expert.fc2"))]
        if not job.moe_shared_expert_overlap:
            repeats.append(("shared_experts", ("shared expert.fc1", "shared expert.fc2")))
        # core_attn, layernorm, moe_act and mla_up_proj hold no call of this group. A shared expert inside a recomputed
        # MoE layer repeats once for each of the two.
        for module, components in repeats:
            if module in recompute_modules(job):
                avoid = ("recompute_repeats_collectives", f"{module} out of recompute_modules")
                for component in components:
                    yield from _forward_of(part, sites[component], _RECOMPUTE, avoid)


def recompute_modules(job: Job) -> tuple[str, ...]:
    """Modules that selective recomputation repeats; the older option moe_layer_recompute stands for "moe"."""
    older = ("moe",) if job.extra.get("moe_layer_recompute") is True else ()
    return tuple(dict.fromkeys((*job.recompute_modules, *older)))


def _recompute_full(part: _Part, release: versions.Release) -> Iterator[ExpectedCall]:
    layers = recomputed_layers(part.job, part.chunks)
    avoid = ("recompute_repeats_collectives", "recompute_granularity selective")
    if part.parallel:
        for site in _layer_sites(part, layers):
            yield from _forward_of(part, site, _RECOMPUTE, avoid)
            if site.component == "attention.qkv":
                yield from _few_groups(part, release, layers, _RECOMPUTE, avoid)
    if part.job.distribute_saved_activations and not part.job.sequence_parallel:
        yield _saved_activations(part)


def recomputed_layers(job: Job, chunks: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Layers that full recomputation repeats: all of them, or with "block" the first recompute_num_layers of a chunk."""
    if job.recompute_granularity != "full":
        return ()
    if job.recompute_method == "uniform":
        return tuple(layer for chunk in chunks for layer in chunk)
    (number,) = job.require("recompute_num_layers")
    return tuple(layer for chunk in chunks for layer in chunk[:number])


def _saved_activations(part: _Part) -> ExpectedCall:
    """The input of every checkpoint, cut over the ranks as it was saved, comes together again in the backward pass."""
    job = part.job
    (number,) = job.require("recompute_num_layers")
    if job.recompute_method == "uniform":
        checkpoints = sum(ceil(len(chunk) / number) for chunk in part.chunks)
    else:
        checkpoints = len(recomputed_layers(job, part.chunks))
    whole = shapes.hidden_states(job)
    return call(
        "tensor: saved activations",
        role=ROLE,
        op="all_gather",
        phase=_BACKWARD,
        component="saved activations",
        dtype=part.dtype,
        sent=_share(part, whole),
        received=whole,
        group_size=part.ranks,
        calls=part.per_layer(checkpoints, "checkpoints"),
        evidence=_SAVED,
        stage=part.stage,
        avoid=("saved_activations_gather", "distribute_saved_activations off"),
    )


# -- loss ------------------------------------------------------------------------------------------------------------


def _loss(part: _Part) -> Iterator[ExpectedCall]:
    """The vocabulary-parallel cross entropy; float32 whatever the model's type, and on a group of one rank too."""
    job = part.job
    tokens = shapes.loss_tokens(job)
    if job.cross_entropy_loss_fusion and job.cross_entropy_fusion_impl == "te":
        if part.parallel:
            three = _multiple(3, tokens)
            gathered = three.times("TP", f"{part.ranks}", part.ranks)
            yield _loss_call(part, "all_gather", "loss: maximum, logit and sum", _TE_LOSS, three, gathered)
    elif job.cross_entropy_loss_fusion:
        both = "loss: predicted logit and sum of exponentials"
        yield _loss_call(part, "all_reduce", "loss: max", _FUSED_LOSS, tokens)
        yield _loss_call(part, "all_reduce", both, _FUSED_LOSS, _multiple(2, tokens))
    else:
        for component in ("loss: max", "loss: predicted logit", "loss: sum of exponentials"):
            yield _loss_call(part, "all_reduce", component, _LOSS, tokens)


def _multiple(factor: int, elements: Quantity) -> Quantity:
    return Quantity(f"{factor} * {elements.symbols}", f"{factor} * {elements.numbers}", factor * elements.value)


def _loss_call(
    part: _Part, op: str, component: str, evidence: Evidence, sent: Quantity, received: Quantity | None = None
) -> ExpectedCall:
    return call(
        "tensor: loss",
        role=ROLE,
        op=op,
        phase=_FORWARD,
        component=component,
        dtype="float32",
        sent=sent,
        received=received,
        group_size=part.ranks,
        calls=part.per_micro_batch(part.last),
        evidence=evidence,
        stage=part.stage,
    )


# -- gradients of replicated parameters ------------------------------------------------------------------------------


def _gradients(part: _Part) -> Iterator[ExpectedCall]:
    elements = replicated_parameters(part.job, part.rank)
    if part.parallel and elements.value:
        yield call(
            "tensor: gradients of replicated parameters",
            role=ROLE,
            op="all_reduce",
            phase=_OTHER,
            component="norm gradients",
            dtype=part.job.main_grad_dtype,
            sent=elements,
            group_size=part.ranks,
            calls=Quantity("1", "1", 1),
            evidence=_NORMS,
            stage=part.stage,
            note="one coalesced call after the last backward: every rank saw its own part of the sequence",
        )


def replicated_parameters(job: Job, rank: int) -> Quantity:
    """Elements whose gradients are summed over the tensor-parallel group once a step, on this rank's stage.

    With sequence parallelism: both norms of a layer and the final norm (times 2 for LayerNorm, which has a bias), the
    biases of row-parallel linears, router weights (E * H a layer), shared-expert gates (H), and query and key norms
    (d each). Without it only the last. 0 for TP 1. Biases of experts are left out: see not_modelled.
    """
    part = _Part(job, rank)
    hidden, channels = job.require("hidden_size", "kv_channels")
    layers = len(part.layers)
    dense, experts = part.split(part.layers)
    of_norm = 1 if job.normalization == "RMSNorm" else 2
    terms: list[Quantity] = []

    def add(symbols: str, numbers: str, value: int) -> None:
        if value:
            terms.append(Quantity(symbols, numbers, value))

    weights = "" if of_norm == 1 else "2 * "
    if part.sequence_parallel:
        norms = 2 * layers + part.last
        final, final_number = ("+1", "+1") if part.last else ("", "")
        add(
            f"{weights}(2*layers{final}) * H",
            f"{weights}(2*{layers}{final_number}) * {hidden}",
            of_norm * norms * hidden,
        )
        if job.add_bias_linear:
            add(
                "(layers + dense layers) * H",
                f"({layers} + {dense}) * {hidden}",
                (layers + dense) * hidden,
            )
        if experts:
            (number,) = job.require("num_experts")
            add("MoE layers * E * H", f"{experts} * {number} * {hidden}", experts * number * hidden)
            if job.moe_shared_expert_intermediate_size is not None and job.moe_shared_expert_gate:
                add("MoE layers * H", f"{experts} * {hidden}", experts * hidden)
    if part.parallel and job.qk_layernorm:
        add(f"{weights}2 * layers * d", f"{weights}2 * {layers} * {channels}", of_norm * 2 * layers * channels)
    return Quantity(
        " + ".join(term.symbols for term in terms) or "0",
        " + ".join(term.numbers for term in terms) or "0",
        sum(term.value for term in terms),
    )


# -- what the rules do not know --------------------------------------------------------------------------------------


def not_modelled(job: Job, rank: int, release: versions.Release) -> list[NotModelled]:
    """Flags that are set, change this group's traffic and have no rule yet; the flag's name is ``what``."""
    found = [NotModelled(name, (ROLE,)) for name in _VARIABLE if parameters.is_on(job, name)]
    if parameters.is_on(job, "fp8"):
        found.append(NotModelled("fp8", ("tp_dp_cp", "tp_dp", "tp_cp"), (), ("all_reduce",)))
    if job.decoder_seq_length not in (None, job.seq_length):
        found.append(NotModelled("decoder_seq_length", (ROLE,)))
    if job.tensor_model_parallel_size == 1:
        return found
    found += [NotModelled(name, (ROLE,), phases, ops) for name, phases, ops in _FLAGS if parameters.is_on(job, name)]
    gradients = ((ROLE,), (_OTHER,), ("all_reduce",))
    found += [
        NotModelled(name, *gradients)
        for name in ("use_megatron_fsdp", "use_torch_fsdp2")
        if parameters.is_on(job, name)
    ]
    part = _Part(job, rank)
    experts = part.split(part.layers)[1]
    if experts and job.add_bias_linear and part.sequence_parallel:
        found.append(NotModelled("add_bias_linear of experts", *gradients))
    if job.num_experts is not None and not versions.since(release, "expert grid"):
        found.append(NotModelled(f"experts in megatron-core {versions.before('expert grid')}", (ROLE,)))
    if _has_few_groups(job) and not versions.since(release, "fewer query groups than TP"):
        before = versions.before("fewer query groups than TP")
        found.append(NotModelled(f"num_query_groups < tensor_model_parallel_size in megatron-core {before}", (ROLE,)))
    return found


_PASSES = (_FORWARD, _BACKWARD, _RECOMPUTE)
_SHARDS = ("all_gather", "reduce_scatter")

# Sizes or counts differ between micro-batches or steps: touches the loss too.
_VARIABLE: tuple[str, ...] = (
    "variable_seq_lengths",
    "sft",
    "hybrid_context_parallel",
    "dataloader_inter_document_masking",
    "rampup_batch_size",
    "mtp_num_layers",
    "use_legacy_models",
    "hybrid_layer_pattern",
    "hybrid_override_pattern",
    "heterogeneous_layers_config_path",
)

# Name, phases, operations. Names that Job has no field for are looked up in Job.extra.
_FLAGS: tuple[tuple[str, tuple[str, ...], tuple[str, ...]], ...] = (
    ("tp_comm_overlap", _PASSES, _SHARDS),
    ("fp8", _PASSES, ("all_gather",)),
    ("fp4", _PASSES, ("all_gather",)),
    ("multi_latent_attention", (), ()),
    ("moe_latent_size", (), ()),
    ("defer_embedding_wgrad_compute", (_BACKWARD, _OTHER), ("all_gather",)),
    ("delay_wgrad_compute", (_BACKWARD, _OTHER), ("all_gather",)),
    ("overlap_moe_expert_parallel_comm", (_BACKWARD, _OTHER), ()),
    ("fp32_residual_connection", _PASSES, ()),
    ("attention_output_gate", _PASSES, ()),
    ("experimental_attention_variant", (), ()),
    ("gtp_weight_remat_size", (), ()),
    ("tensor_parallel_num_weight_shards", (), ()),
    ("use_kitchen", _PASSES, ("all_gather",)),
)
