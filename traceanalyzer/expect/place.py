"""A place of the job (one pipeline stage under one release) and the symbols that formulas may use about it.

All ranks of a stage send the same, so a place stands for all of them; only where the position inside the
context-parallel group matters (``cp``) does it stand for fewer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from traceanalyzer.errors import JobError
from traceanalyzer.expect import versions
from traceanalyzer.expect.formula import FUNCTIONS
from traceanalyzer.job import Job

_OFF = (None, False, 0, "", "None", "False", "none", ())
_OFF_IS: dict[str, Any] = {"softmax_type": "vanilla", "gtp_weight_remat_size": 1}


def is_on(job: Job, name: str) -> bool:
    """Whether an option is set to more than its default; looked up in Job.extra if Job has no field of that name."""
    value = getattr(job, name) if hasattr(job, name) else job.extra.get(name)
    if name == "tensor_parallel_num_weight_shards":
        return value not in (*_OFF, job.tensor_model_parallel_size)
    return value not in _OFF and value != _OFF_IS.get(name, object())


@dataclass(frozen=True)
class Place:
    """One stage of a job under one release of megatron-core.

    stage: pipeline stage, 0-based. release: see versions.py. cp: position in the context-parallel group, for the few
    rules that depend on it. first_step: the first step after start or after an evaluation, in which overlapped gradient
    and parameter traffic runs at other places than in all later ones.
    """

    job: Job
    stage: int
    release: versions.Release
    cp: int = 0
    first_step: bool = False

    @cached_property
    def symbols(self) -> Symbols:
        """The symbols of this place."""
        return Symbols(self)

    @property
    def rank(self) -> int:
        """The lowest rank of the place."""
        return self.job.layout.rank_of(pp=self.stage, cp=self.cp)

    @property
    def pp(self) -> int:
        """Pipeline stages."""
        return self.job.pipeline_model_parallel_size

    @property
    def chunk_count(self) -> int:
        """Model chunks of one rank: v, 1 without interleaving."""
        return self.job.virtual_pipeline_model_parallel_size or 1

    @property
    def is_first(self) -> bool:
        """Whether the word embedding is here."""
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        """Whether final norm, output layer and loss are here."""
        return self.stage == self.pp - 1

    @cached_property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """Decoder layers (0-based) of each model chunk."""
        return tuple(self.job.layers_on_stage(self.stage, chunk) for chunk in range(self.chunk_count))

    @property
    def layers(self) -> tuple[int, ...]:
        """Decoder layers (0-based) of the stage."""
        return tuple(layer for chunk in self.chunks for layer in chunk)

    def moe(self, layers: tuple[int, ...]) -> tuple[int, ...]:
        """Those of these layers that have experts."""
        return tuple(layer for layer in layers if self.job.is_moe_layer(layer))

    def has(self, behaviour: str) -> bool:
        """Whether the release has a behaviour (a key of versions.SINCE)."""
        return versions.since(self.release, behaviour)

    def need(self, name: str) -> int:
        """A whole number of the job. Raises JobError if the job does not say it."""
        return self.job.require(name)[0]


@dataclass(frozen=True)
class Symbol:
    """What a symbol means, in words with its unit, and how a place gives it."""

    meaning: str
    of: Callable[[Place], Any]


class Symbols(Mapping[str, Any]):
    """Symbols of a place by name, each worked out when it is first asked for.

    A name that is no symbol is looked up among the job's fields, for conditions: ``sequence_parallel``. Raises JobError
    for a size that the job does not say, and for a name that is neither.
    """

    def __init__(
        self, place: Place, chapter: Mapping[str, Symbol] | None = None, member: Mapping[str, Any] | None = None
    ) -> None:
        self._place = place
        self._chapter = chapter or {}
        self._values: dict[str, Any] = {**FUNCTIONS, **(member or {})}
        self._values.setdefault("since", place.has)
        self._values.setdefault("on", lambda name: is_on(place.job, name))

    def __getitem__(self, name: str) -> Any:
        values = self._values
        if name in values:
            return values[name]
        symbol = self._chapter.get(name) or COMMON.get(name)
        if symbol is not None:
            value = symbol.of(self._place)
        elif hasattr(self._place.job, name):
            value = getattr(self._place.job, name)
        else:
            raise JobError(f"{name} is neither a symbol nor a field of the job")
        values[name] = value
        return value

    def __iter__(self) -> Any:
        return iter({**COMMON, **self._chapter, **self._values})

    def __len__(self) -> int:
        return len({**COMMON, **self._chapter, **self._values})

    def also(self, member: Mapping[str, Any]) -> Symbols:
        """These symbols and those of one member of a family; what was worked out before is kept."""
        return Symbols(self._place, self._chapter, {**self._values, **member})


def _size(name: str, meaning: str) -> Symbol:
    return Symbol(meaning, lambda place: place.need(name))


def _group(role: str, meaning: str) -> Symbol:
    return Symbol(meaning, lambda place: place.job.layout.group_size(role))


def mtp_layers(job: Job, stage: int, chunk: int | None = None) -> int:
    """Layers of multi-token prediction on a stage, or on one of its model chunks.

    multi_token_prediction.py, get_mtp_num_layers_to_build: behind the last decoder layer of the last stage and chunk, or
    where a pipeline layout says "m".
    """
    if not job.mtp_num_layers:
        return 0
    pp, chunks = job.pipeline_model_parallel_size, job.virtual_pipeline_model_parallel_size or 1
    wanted = range(chunks) if chunk is None else (chunk,)
    parts = job.layout_stages
    if parts is not None:
        return sum(parts[one * pp + stage].count("m") for one in wanted)
    return job.mtp_num_layers if stage == pp - 1 and chunks - 1 in wanted else 0


COMMON: dict[str, Symbol] = {
    "S": _size("seq_length", "sequence length, tokens"),
    "B": _size("micro_batch_size", "sequences of a micro-batch"),
    "M": _size("num_microbatches", "micro-batches of a step"),
    "H": _size("hidden_size", "hidden size"),
    "F": _size("ffn_hidden_size", "width of the dense MLP"),
    "V": _size("padded_vocab_size", "padded vocabulary"),
    "Nh": _size("num_attention_heads", "query heads"),
    "Ng": _size("num_query_groups", "key and value heads (query groups)"),
    "d": _size("kv_channels", "channels of a head"),
    "E": _size("num_experts", "experts of a layer"),
    "k": _size("moe_router_topk", "experts that a token goes to"),
    "Fe": _size("moe_ffn_hidden_size", "width of an expert"),
    "Fs": _size("moe_shared_expert_intermediate_size", "width of the shared expert"),
    "TP": Symbol("tensor-parallel ranks", lambda place: place.job.tensor_model_parallel_size),
    "SP": Symbol(
        "parts of the sequence between tensor-parallel regions: TP with sequence parallelism, else 1",
        lambda place: place.job.tensor_model_parallel_size if place.job.sequence_parallel else 1,
    ),
    "CP": Symbol("context-parallel ranks", lambda place: place.job.context_parallel_size),
    "PP": Symbol("pipeline stages", lambda place: place.pp),
    "EP": Symbol("expert-parallel ranks", lambda place: place.job.expert_model_parallel_size),
    "ETP": Symbol("expert tensor-parallel ranks", lambda place: place.job.layout.expert_tensor_size),
    "DP": Symbol("data-parallel ranks, without CP", lambda place: place.job.data_parallel_size),
    "DPCP": _group("dp_cp", "replicas of a dense weight: DP * CP"),
    "EDP": _group("edp", "replicas of an expert weight"),
    "instances": Symbol(
        "instances of the distributed optimizer", lambda place: place.job.num_distributed_optimizer_instances
    ),
    "v": Symbol("model chunks of a rank (virtual stages), 1 without interleaving", lambda place: place.chunk_count),
    "stage": Symbol("pipeline stage, 0-based", lambda place: place.stage),
    "first": Symbol("1 on the first stage, else 0", lambda place: int(place.is_first)),
    "last": Symbol("1 on the last stage, else 0", lambda place: int(place.is_last)),
    "layers": Symbol("decoder layers of the stage", lambda place: len(place.layers)),
    "dense_layers": Symbol(
        "decoder layers with a dense MLP", lambda place: len(place.layers) - len(place.moe(place.layers))
    ),
    "moe_layers": Symbol("decoder layers with experts", lambda place: len(place.moe(place.layers))),
    "mtp_layers": Symbol(
        "layers of multi-token prediction on the stage", lambda place: mtp_layers(place.job, place.stage)
    ),
    "wide": Symbol(
        "1 if gradients of bfloat16 parameters are reduced in float32, else 0",
        lambda place: int(place.job.bf16 and place.job.main_grad_dtype == "float32"),
    ),
    "first_step": Symbol("whether it is the first step after start or evaluation", lambda place: place.first_step),
    "training": Symbol("whether there is a backward pass", lambda place: not place.job.forward_only),
}
"""Symbols that every chapter may use; a chapter adds its own."""
