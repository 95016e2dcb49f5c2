"""Tensor-parallel modules: linear layers, embedding, loss, and the parts of a layer that are made of them.

After megatron-core 0.16.1: tensor_parallel/layers.py (ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding,
LinearWithGradAccumulationAndAsyncCommunication), mappings.py, cross_entropy.py, fusions/fused_cross_entropy.py,
transformer/attention.py, mlp.py, models/common/embeddings/language_model_embedding.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from traceanalyzer.simulate import walk_kernels as kernels
from traceanalyzer.simulate.walk_context import core_attention
from traceanalyzer.simulate.walk_tape import Tape


@dataclass(frozen=True)
class _Userbuffers:
    """Which transfers of a linear layer TransformerEngine makes itself (TELinear, TELayerNormColumnParallelLinear)."""

    gather: bool = False
    """Of the input going forward, or of the output's gradient."""
    scatter: bool = False
    """Of the output going forward, or of the input's gradient."""
    regather: bool = False

    @classmethod
    def of(cls, tape: Tape, name: str) -> _Userbuffers:
        sizes, job = tape.sizes, tape.sizes.job
        part = name.rpartition(".")[2]
        if not (job.tp_comm_overlap and sizes.sp and job.transformer_impl == "transformer_engine"):
            return cls()
        if part in ("proj", "fc2"):
            return cls(job.tp_comm_overlap_ag, job.tp_comm_overlap_rs)
        if part not in ("qkv", "fc1"):
            return cls()
        off = job.tp_comm_overlap_disable_qkv if part == "qkv" else job.tp_comm_overlap_disable_fc1
        ring = job.tp_comm_overlap_rs_dgrad and not off
        return cls(
            job.tp_comm_overlap_ag and not off,
            ring or job.tp_comm_bulk_wgrad,
            job.tp_comm_bulk_dgrad and not ring,
        )


def _transfer(
    tape: Tape, op: str, ends: tuple[int, int], component: str, own: bool, *, overlap: bool = False
) -> int | None:
    """One transfer over TP: a call, or a kernel of TransformerEngine's. Gives the handle of a call that overlaps."""
    if own:
        kernels.userbuffers(tape, component, op, max(ends))
        return None
    return tape.call("tp", op, *ends, component=component, overlap=overlap)


def column(
    tape: Tape, name: str, width_in: int, width_out: int, *modules: str, bias: bool = False, outside: bool = False
) -> None:
    """A weight split by its outputs: the input is gathered (SP) and its gradient summed over TP."""
    sizes = tape.sizes
    out = width_out // sizes.tp
    own = _Userbuffers.of(tape, name)
    up = sizes.shard * width_in, sizes.tokens * width_in
    tape.uses(*modules, outside=outside)
    if sizes.sp:
        # Layers fused with a norm leave it to torch where no gradients are wanted (layernorm_linear.py).
        fused = not name.startswith("shared expert")
        _transfer(tape, "all_gather", up, name, own.gather and (tape.grad or not fused))
    kernels.gemm(tape, name, sizes.tokens, width_in, out)

    def gather(*, overlap: bool) -> int | None:
        """Only the shard of the input was kept."""
        return _transfer(tape, "all_gather", up, f"{name} input re-gather", own.regather, overlap=overlap)

    def backward() -> None:
        handle = None
        apart = tape.later is not None
        if sizes.sp:
            gathered = None if apart else gather(overlap=True)
            kernels.gemm(tape, name, sizes.tokens, out, width_in, "dgrad")
            tape.wait(gathered)
            handle = _transfer(tape, "reduce_scatter", (up[1], up[0]), name, own.scatter, overlap=True)
        else:
            kernels.gemm(tape, name, sizes.tokens, out, width_in, "dgrad")
            if sizes.tp > 1:
                handle = tape.call("tp", "all_reduce", sizes.tokens * width_in, component=name, overlap=True)

        def weights() -> None:
            if sizes.sp and apart:
                gather(overlap=False)
            kernels.gemm(tape, name, sizes.tokens, width_in, out, "wgrad")
            if bias:
                kernels.reduction(tape, name, sizes.tokens * out, "sum_functor", sizes.itemsize)

        tape.weights(weights)
        tape.wait(handle)
        tape.weights(lambda: tape.ready(*modules, outside=outside))

    tape.owes(backward)


def row(tape: Tape, name: str, width_in: int, width_out: int, *modules: str, bias: bool = False) -> None:
    """A weight split by its inputs: the output is summed over TP, and under SP split again."""
    sizes = tape.sizes
    part = width_in // sizes.tp
    tape.uses(*modules)
    kernels.gemm(tape, name, sizes.tokens, part, width_out)
    whole, shard = sizes.tokens * width_out, sizes.shard * width_out
    own = _Userbuffers.of(tape, name)
    if sizes.sp:
        _transfer(tape, "reduce_scatter", (whole, shard), name, own.scatter)
    elif sizes.tp > 1:
        tape.call("tp", "all_reduce", whole, component=name)

    def backward() -> None:
        if sizes.sp:
            _transfer(tape, "all_gather", (shard, whole), name, own.gather)
        kernels.gemm(tape, name, sizes.tokens, width_out, part, "dgrad")

        def weights() -> None:
            kernels.gemm(tape, name, sizes.tokens, part, width_out, "wgrad")
            if bias:
                kernels.reduction(tape, name, whole, "sum_functor", sizes.itemsize)
            tape.ready(*modules)

        tape.weights(weights)

    tape.owes(backward)


def norm(tape: Tape, module: str, *, outside: bool = False, own: bool = True) -> None:
    """A norm over the hidden size. own: its parameters are its own, not those of the linear layer behind it (TE)."""
    sizes = tape.sizes
    if own:
        tape.uses(module, outside=outside)
    kernels.norm(tape, None, sizes.shard, sizes.hidden)

    def backward() -> None:
        kernels.norm(tape, None, sizes.shard, sizes.hidden, backward=True)
        tape.ready(module, outside=outside)

    tape.owes(backward)


def add(tape: Tape, component: str | None) -> None:
    """Bias, dropout and residual connection."""
    elems = tape.sizes.shard * tape.sizes.hidden
    kernels.elementwise(tape, component, elems, "bias_dropout_add")
    tape.owes(lambda: kernels.elementwise(tape, component, elems, "dropout_backward", 2))


def embed(tape: Tape) -> None:
    """Word and position embedding, and the split of the sequence."""
    sizes, job = tape.sizes, tape.sizes.job
    hidden = sizes.tokens * sizes.hidden
    positions = job.position_embedding_type == "learned_absolute"
    scattered = sizes.sp and not positions  # reduce_scatter_embeddings
    shard = sizes.shard * sizes.hidden
    tape.uses("word embedding", outside=True)
    kernels.embedding(tape, "embedding", sizes.tokens, sizes.hidden)
    if scattered:
        tape.call("tp", "reduce_scatter", hidden, shard, component="embedding")
    elif sizes.tp > 1:
        tape.call("tp", "all_reduce", hidden, component="embedding")
    if positions:
        tape.uses("position embedding", outside=True)
        kernels.embedding(tape, "embedding", sizes.tokens, sizes.hidden)
        kernels.elementwise(tape, "embedding", hidden, "add")

    def backward() -> None:
        if sizes.sp:
            tape.call("tp", "all_gather", shard, hidden, component="embedding")
        if positions:
            kernels.embedding(tape, "embedding", sizes.tokens, sizes.hidden, backward=True)
            tape.ready("position embedding", outside=True)
        kernels.embedding(tape, "embedding", sizes.tokens, sizes.hidden, backward=True)
        tape.ready("word embedding", outside=True)

    tape.owes(backward)


def attention(tape: Tape) -> None:
    """Self-attention: fused projection, attention itself, output projection."""
    sizes, job = tape.sizes, tape.sizes.job
    fused = job.transformer_impl == "transformer_engine"
    norm(tape, "input norm", own=not fused)
    modules = ("input norm", "qkv") if fused else ("qkv",)
    column(tape, "attention.qkv", sizes.hidden, sizes.qkv_width, *modules, bias=job.add_qkv_bias)
    (groups,) = job.require("num_query_groups")
    if (
        groups < sizes.tp
    ):  # a rank has no whole group: all queries, keys and values are gathered, and its own picked out
        part = sizes.tokens * sizes.qkv_width // sizes.tp
        tape.call("tp", "all_gather", part, part * sizes.tp, component="attention.qkv groups")
        tape.owes(lambda: tape.call("tp", "reduce_scatter", part * sizes.tp, part, component="attention.qkv groups"))
    local = sizes.tokens * (sizes.heads + 2 * sizes.groups) * sizes.head_width
    if job.qk_layernorm:
        tape.uses("q norm", "k norm")
        kernels.norm(tape, None, sizes.tokens * (sizes.heads + sizes.groups), sizes.head_width)

        def backward() -> None:
            kernels.norm(tape, None, sizes.tokens * (sizes.heads + sizes.groups), sizes.head_width, backward=True)
            tape.ready("k norm", "q norm")

        tape.owes(backward)
    if job.position_embedding_type in ("rope", "yarn", "mrope"):
        kernels.elementwise(tape, "attention", local, "fused_rope", 2)
        tape.owes(lambda: kernels.elementwise(tape, "attention", local, "fused_rope", 2))
    if job.recompute_granularity == "selective" and "core_attn" in job.recompute_modules:
        tape.checkpoint(lambda: core_attention(tape))
    else:
        core_attention(tape)
    row(tape, "attention.proj", sizes.query_width, sizes.hidden, "proj", bias=job.add_bias_linear)
    add(tape, None)


def feed_forward(tape: Tape, name: str, width: int, *, fc1: tuple[str, ...], fc2: str) -> None:
    """Two linear layers with the activation between them."""
    sizes, job = tape.sizes, tape.sizes.job
    factor = 2 if job.swiglu else 1
    column(tape, f"{name}.fc1", sizes.hidden, factor * width, *fc1, bias=job.add_bias_linear)
    elems = sizes.tokens * width // sizes.tp
    word = "swiglu" if job.swiglu else "gelu"
    kernels.elementwise(tape, name, elems, word, factor + 1)
    tape.owes(lambda: kernels.elementwise(tape, name, elems, word, 2 * factor + 1))
    row(tape, f"{name}.fc2", width, sizes.hidden, fc2, bias=job.add_bias_linear)


def mlp(tape: Tape) -> None:
    """The dense half of a layer."""
    job = tape.sizes.job
    fused = job.transformer_impl == "transformer_engine"
    (width,) = job.require("ffn_hidden_size")
    norm(tape, "mlp norm", own=not fused)
    modules = ("mlp norm", "fc1") if fused else ("fc1",)

    def run() -> None:
        feed_forward(tape, "mlp", width, fc1=modules, fc2="fc2")

    if job.recompute_granularity == "selective" and "mlp" in job.recompute_modules:
        tape.checkpoint(run)
    else:
        run()
    add(tape, None)


def head(tape: Tape) -> None:
    """Final norm, logits and cross entropy."""
    sizes, job = tape.sizes, tape.sizes.job
    norm(tape, "final norm", outside=True)
    shared = not job.untie_embeddings_and_output_weights and job.pipeline_model_parallel_size == 1
    # A weight that is also the embedding's is ready when the embedding's share of its gradient is.
    modules = () if shared else ("output layer",)
    column(tape, "output layer", sizes.hidden, sizes.vocab * sizes.tp, *modules, outside=True)
    tokens, logits = sizes.tokens, sizes.tokens * sizes.vocab
    if job.cross_entropy_loss_fusion and job.cross_entropy_fusion_impl == "te":
        kernels.softmax(tape, "loss", logits)
        if sizes.tp > 1:
            tape.call(
                "tp",
                "all_gather",
                3 * tokens,
                3 * tokens * sizes.tp,
                dtype="float32",
                component="loss: maximum, logit and sum",
            )
    else:
        kernels.reduction(tape, "loss", logits, "MaxOps<float>")
        tape.call("tp", "all_reduce", tokens, dtype="float32", component="loss: max", reduce_op="max")
        kernels.softmax(tape, "loss", logits)
        if job.cross_entropy_loss_fusion:
            tape.call(
                "tp",
                "all_reduce",
                2 * tokens,
                dtype="float32",
                component="loss: predicted logit and sum of exponentials",
            )
        else:
            tape.call("tp", "all_reduce", tokens, dtype="float32", component="loss: predicted logit")
            tape.call("tp", "all_reduce", tokens, dtype="float32", component="loss: sum of exponentials")
    kernels.reduction(tape, "loss", tokens, "sum_functor")
    tape.owes(lambda: kernels.softmax(tape, "loss", logits, backward=True))
