"""Pipeline parallelism: messages between stages (role "pp"), and the gradient of a word embedding that stages share.

Per rank and step, with M micro-batches and v model chunks (v = 1: no interleaving), on first, middle and last stage:

==========  ==========  ==========  ==============  ==============  ==============
call        content     neighbour   first stage     middle          last stage
==========  ==========  ==========  ==============  ==============  ==============
send        activation  next        v * M           v * M           (v-1) * M
recv        activation  previous    (v-1) * M       v * M           v * M
send        gradient    previous    (v-1) * M       v * M           v * M
recv        gradient    next        v * M           v * M           (v-1) * M
==========  ==========  ==========  ==============  ==============  ==============

The stages of an interleaved pipeline form a ring: next of the last is the first. The counts do not depend on the order
of passes, on the split of the layers (a stage without layers passes its input on) nor on how exchanges are started: one
batch_isend_irecv, or single isend and irecv with overlap_p2p_comm. They are those of schedule.MESSAGES, which also has
the order. Evaluation (forward only) has the activations only.

A message is the hidden state of one micro-batch, S/(CP*SP) * B * H elements of the parameters' type, also between
stages of different layers; since 0.17 fp32 with fp32_residual_connection. Activations count as forward, gradients as
backward.

* Two stages with single isend and irecv (role "world"): an even stage receives, an odd one sends over the default
  group, both contents, so that the two directions overlap; since 0.8, not with ucc.
* variable_seq_lengths: before each message its shape, 3 int64, always on the pipeline's group.
* Multi-token prediction on a stage before the last (since 0.16, by layout): shapes are exchanged too, and from that
  stage's last chunk on a message holds the output of every prediction depth: 1 + mtp_num_layers times as long.
* Tied embeddings: each stage that holds the word embedding adds up the whole main gradient, V/TP * H, once per step
  (role "embedding"), after the data-parallel reduction. So it does with multi-token prediction, tied or not. The
  position embedding is on the first stage only and needs nothing.

Source: megatron-core 0.16.1, pipeline_parallel/schedules.py, p2p_communication.py, distributed/finalize_model_grads.py,
compared with 0.4 to 0.19; reference section 2.4.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from traceanalyzer.expect import schedule, versions
from traceanalyzer.expect.model import Evidence
from traceanalyzer.expect.place import Place, Symbol
from traceanalyzer.expect.rules import Avoid, Chapter, Gap, Rule

_CODE = "pipeline_parallel/schedules.py, p2p_communication.py: _communicate"
_RECORDED = Evidence(
    "run", f"megatron-core 0.16.1 recorded: pp2, pp4, tp2pp2_sp, pp2_vpp2, w1024_dense_tp4pp4vpp2_m8; {_CODE}"
)
_OVERLAPPED = Evidence("run", "megatron-core 0.16.1 recorded: pp2_vpp2_overlap; p2p_communication.py: _p2p_ops")
_SHAPES = Evidence(
    "run",
    "megatron-core 0.16.1 run in processes: PP 2, variable_seq_lengths; p2p_communication.py: _communicate_shapes",
)
_DEPTHS = Evidence(
    "run",
    "megatron-core 0.16.1 run in processes: PP 4, mtp_num_layers 1, layout Ett|tt|m|L; models/gpt/gpt_model.py: "
    "_postprocess; transformer/multi_token_prediction.py: MultiTokenPredictionBlock.forward",
)
_EMBEDDING = Evidence(
    "run",
    "megatron-core 0.16.1 recorded: pp2, pp4, world16_tp2pp2cp2ep2dp2; distributed/finalize_model_grads.py: "
    "_allreduce_word_embedding_grads",
)
_MESSAGE = "S_pp/(CP*SP) * B * H"


def _rules(op: str, content: schedule.Content, toward: str, count: str) -> Iterable[Rule]:
    """The rules of one row of the table: on the pipeline's and on the default group, long messages, shapes."""
    forward = content == "activation"
    # Long messages leave the stage of the prediction layers and those behind it; they arrive behind it only.
    long = "long_next" if toward == "next" else "long_previous"
    when = "PP > 1" if forward else "PP > 1 and training"
    name = f"pipeline: {op} {content} {'to' if op == 'send' else 'from'} {toward}"
    plain = Rule(
        name=name,
        role="pp",
        op=op,
        phase="forward" if forward else "backward",
        component=f"{content}s",
        dtype="pipeline messages",
        sent=_MESSAGE,
        when=f"{when} and not mtp_alone and not on_default_group('{op}')",
        calls=count,
        evidence=_RECORDED,
        peer=toward,
        document="E2, E9, E10",
    )
    alone = f"{when} and since('prediction layers before the last stage') and mtp_alone"
    yield plain
    yield replace(
        plain,
        name=f"{name}, default group",
        role="world",
        group="pp",
        when=f"{when} and since('pipeline messages over the default group') and not mtp_alone and "
        f"on_default_group('{op}')",
        evidence=_OVERLAPPED,
        note="with two stages one direction of each goes over the default group",
        document="not in the document",
    )
    for role, where in (("pp", "not on_default_group"), ("world", "on_default_group")):
        suffix = "" if role == "pp" else ", default group"
        yield replace(
            plain,
            name=f"{name}, beside prediction depths{suffix}",
            role=role,
            group="pp",
            when=f"{alone} and {where}('{op}')",
            calls=f"{count} - M * {long}",
            evidence=_DEPTHS,
        )
        yield replace(
            plain,
            name=f"{name}, all prediction depths{suffix}",
            role=role,
            group="pp",
            sent=f"(1 + mtp_num_layers) * {_MESSAGE}",
            when=f"{alone} and {where}('{op}')",
            calls=f"M * {long}",
            evidence=_DEPTHS,
            document="not in the document",
        )
    yield replace(
        plain,
        name=f"{name}: shape",
        component=f"shapes of {content}s",
        dtype="int64",
        sent="3",
        when=f"{when} and (variable_seq_lengths or mtp_alone)",
        evidence=_SHAPES,
        document="not in the document",
    )


RULES: tuple[Rule, ...] = (
    *(
        rule
        for (op, content, toward), count in schedule.MESSAGES.items()
        for rule in _rules(op, content, toward, count)
    ),
    Rule(
        name="pipeline: shared word embedding",
        role="embedding",
        op="all_reduce",
        phase="other",
        component="word embedding",
        dtype="main gradients",
        sent="V/TP * H",
        when="training and embedding_shared",
        calls="1",
        evidence=_EMBEDDING,
        avoid=Avoid("fp32_reduction", "--grad-reduce-in-bf16", "wide * V/TP * H * 2*(holders-1)/holders * 2"),
        document="E34",
    ),
)


# -- symbols ---------------------------------------------------------------------------------------------------------


def _length(place: Place) -> int:
    # schedules.py: get_tensor_shapes; the interleaved schedule takes seq_length
    decoder = place.job.decoder_seq_length
    if decoder is not None and place.chunk_count == 1 and place.has("decoder length of pipeline messages"):
        return decoder
    return place.need("seq_length")


def _on_default_group(place: Place, op: str) -> bool:
    if not place.has("pipeline messages over the default group"):
        return False
    if place.job.pipeline_model_parallel_comm_backend == "ucc" and place.has("ucc pipeline backend"):
        return False
    return schedule.on_default_group(stages=place.pp, stage=place.stage, op=op, batched=bool(place.job.batch_p2p_comm))


def _mtp_stage(place: Place) -> int | None:
    """The stage of the multi-token prediction layers, if it is one before the last."""
    if not place.job.mtp_num_layers or not place.has("prediction layers before the last stage"):
        return None
    return next((stage for stage in range(place.pp - 1) if place.job.mtp_layers_on_stage(stage)), None)


def _embedding_shared(place: Place) -> bool:
    job = place.job
    held_twice = not job.untie_embeddings_and_output_weights or (
        bool(job.mtp_num_layers) and place.has("embedding shared with prediction layers")
    )
    # A group of one stage makes no call (finalize_model_grads.py asks for its size).
    return (
        held_twice
        and place.pp > 1
        and job.layout.group_size("embedding") > 1
        and job.layout.group_of("embedding", place.rank) is not None
    )


SYMBOLS = {
    "holders": Symbol("stages that hold the word embedding", lambda place: place.job.layout.group_size("embedding")),
    "S_pp": Symbol("sequence length of a pipeline message, tokens", _length),
    "on_default_group": Symbol(
        "whether messages of an operation go over the default group",
        lambda place: lambda op: _on_default_group(place, op),
    ),
    "mtp_alone": Symbol(
        "whether multi-token prediction is on a stage before the last", lambda place: _mtp_stage(place) is not None
    ),
    "long_next": Symbol(
        "1 if what the last chunk exchanges with the next stage holds every prediction depth, else 0",
        lambda place: int((stage := _mtp_stage(place)) is not None and stage <= place.stage and not place.is_last),
    ),
    "long_previous": Symbol(
        "1 if what the last chunk exchanges with the previous stage holds every prediction depth, else 0",
        lambda place: int((stage := _mtp_stage(place)) is not None and stage < place.stage),
    ),
    "embedding_shared": Symbol("whether this stage shares its word embedding with another one", _embedding_shared),
}


_P2P = ("send", "recv")

CHAPTER = Chapter(
    name="pipeline",
    title="Pipeline parallelism",
    source="reference section 2.4",
    rules=RULES,
    symbols=SYMBOLS,
    gaps=(
        Gap(
            what="pipeline_model_parallel_comm_backend=ucc: messages are no NCCL calls",
            when="PP > 1 and pipeline_model_parallel_comm_backend == 'ucc'",
            roles=("pp",),
            ops=_P2P,
        ),
        Gap(
            what="variable_seq_lengths: sizes of messages depend on the data",
            when="PP > 1 and variable_seq_lengths",
            roles=("pp", "world"),
            ops=_P2P,
        ),
        Gap(
            what=f"fp32_residual_connection with pipeline stages in {versions.before('fp32 pipeline messages')}",
            when="PP > 1 and on('fp32_residual_connection') and not since('fp32 pipeline messages')",
            roles=("pp", "world"),
            ops=_P2P,
        ),
        Gap(
            what="use_ring_exchange_p2p",
            when="PP > 1 and on('use_ring_exchange_p2p')",
            roles=("pp", "world"),
        ),
        Gap(
            what="export_kd_teacher_load: messages of a distillation also hold the teacher's",
            when="PP > 1 and on('export_kd_teacher_load')",
            roles=("pp", "world"),
            ops=_P2P,
        ),
        Gap(
            what="enable_mhc_connections: hyper-connections have several residual streams",
            when="PP > 1 and on('enable_mhc_connections')",
            roles=("pp", "world"),
            ops=_P2P,
        ),
        Gap(
            what="encoder with its own stages",
            when="on('encoder_pipeline_model_parallel_size') or on('pipeline_model_parallel_split_rank')",
            roles=("pp", "world", "embedding", "position_embedding"),
        ),
        Gap(
            what="has_cond_embedder: gradients of a conditioning embedder",
            when="PP > 1 and training and on('has_cond_embedder')",
            roles=("pp",),
            phases=("other",),
            ops=("all_reduce",),
        ),
        Gap(
            what="shared word embedding under fully sharded data parallelism",
            when="training and embedding_shared and (use_megatron_fsdp or use_torch_fsdp2)",
            roles=("embedding",),
        ),
    ),
)
