"""The micro-batch's way to the ranks: Megatron-LM broadcasts it over the tensor-parallel group (role "tp").

Only Megatron-LM's training loop does it (get_batch_on_this_tp_rank), not bare megatron-core: on every micro-batch, on
first and last stage only, with the full sequence length (before context parallelism cuts it), on a group of one rank
too. Elements of each:

=====================  ==========  ==================  ==========================
tensor                 type        elements            stages
=====================  ==========  ==================  ==========================
tokens, position_ids   int64       B * S               first
labels                 int64       B * S               last
loss_mask              float32     B * S               last
attention_mask         bool        B * 1 * S * S       first and last
cu_seqlens             int64 and   1 and 0             0.16: first twice, last
                       int32                           once; 0.17: first once
=====================  ==========  ==================  ==========================

With one stage every tensor once (cu_seqlens as on the first stage), and so, since 0.16, on a stage with multi-token
prediction, which embeds tokens again; before, the last stage has tokens and position_ids too. The calls are part of each
micro-batch's forward step: phase "forward". Broadcasting the mask can be avoided, the kernels that know "causal" do not
need it. Packed samples (sft) are padded to S; how many begin in one, and with that the length of cu_seqlens, is data.

Source: Megatron-LM core_v0.5.0 ... core_v0.19.0, megatron/training/utils.py (core/utils.py since 0.18) and
pretrain_gpt.py: get_batch; reference section 2.3.
"""

from __future__ import annotations

from collections.abc import Iterable

from traceanalyzer.expect import versions
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol, mtp_layers
from traceanalyzer.expect.rules import Avoid, Chapter, Gap, Rule

_WHERE = Evidence(
    "run",
    "megatron-core 0.16.1: get_batch_on_this_tp_rank executed alone; Megatron-LM training/utils.py: "
    "get_batch_on_this_tp_rank, pretrain_gpt.py: get_batch",
)
_MASK = Avoid("attention_mask_broadcast", "--no-create-attention-mask-in-dataloader")


def _broadcast(
    name: str, dtype: str, elements: str, when: str, calls: str = "fetches * M", avoid: Avoid | None = None
) -> Rule:
    return Rule(
        name=f"batch: {name}",
        role="tp",
        op="broadcast",
        phase="forward",
        component=f"data: {name}",
        dtype=dtype,
        sent=elements,
        when=f"framework == 'megatron-lm' and since('batch per tensor') and {when}",
        calls=calls,
        evidence=_WHERE,
        avoid=avoid,
        document="not in the document",
    )


RULES: tuple[Rule, ...] = (
    _broadcast("tokens", "int64", "B * S", "embeds"),
    _broadcast("labels", "int64", "B * S", "compares"),
    _broadcast("loss mask", "float32", "B * S", "compares"),
    _broadcast("attention mask", "bool", "B * S * S", "fed and create_attention_mask_in_dataloader", avoid=_MASK),
    _broadcast("position ids", "int64", "B * S", "embeds"),
    _broadcast("packing length", "int64", "1", "fed and not sft", "packings * fetches * M"),
    _broadcast("packing offsets", "int32", "0", "fed and not sft", "packings * fetches * M"),
)


def _predicts(place: Place) -> bool:
    """Whether the stage is fed as a whole because multi-token prediction is there."""
    return mtp_layers(place.job, place.stage) > 0 and place.has("batch for prediction")


def _embeds(place: Place) -> bool:
    last_too = place.is_last and bool(place.job.mtp_num_layers) and not place.has("batch for prediction")
    return place.is_first or last_too or _predicts(place)


def _compares(place: Place) -> bool:
    return place.is_last or _predicts(place)


def _fetches(place: Place) -> int:
    """How many model chunks of a first or last stage fetch a micro-batch."""
    every = place.has("batch for every chunk") and not place.has("batch for its chunk")
    return place.chunk_count if every else 1


def _packings(place: Place) -> int:
    """Broadcasts of the packing length (and of the offsets) in one fetch of an unpacked batch."""
    if not place.has("cu_seqlens") or place.has("cu_seqlens for packed only"):
        return 0
    in_branch = int(place.is_first or _predicts(place))
    at_end = 0 if place.has("cu_seqlens once") else 1
    return in_branch + at_end


def _old_release(place: Place) -> Iterable[NotModelled]:
    fed = _embeds(place) or _compares(place)
    if place.job.framework == "megatron-lm" and fed and not place.has("batch per tensor"):
        before = versions.before("batch per tensor")
        yield NotModelled(f"data broadcast in Megatron-LM {before}", ("tp",), (), ("broadcast",))


CHAPTER = Chapter(
    name="batch",
    title="Micro-batch input",
    source="reference section 2.3",
    rules=RULES,
    symbols={
        "fetches": Symbol("model chunks that fetch a micro-batch", _fetches),
        "embeds": Symbol("whether the stage takes tokens and positions", _embeds),
        "compares": Symbol("whether the stage takes labels and loss mask", _compares),
        "fed": Symbol("whether the stage takes any of the batch", lambda place: _embeds(place) or _compares(place)),
        "packings": Symbol("broadcasts of the packing length in one fetch", _packings),
    },
    gaps=(
        Gap(
            what="data broadcast: framework unknown",
            when="framework not in ('megatron-lm', 'megatron-core') and fed",
            roles=("tp",),
            ops=("broadcast",),
        ),
        Gap(
            what="data broadcast: packed samples",
            when="framework == 'megatron-lm' and sft and since('cu_seqlens')",
            roles=("tp",),
            ops=("broadcast",),
        ),
    ),
    more_gaps=_old_release,
)
