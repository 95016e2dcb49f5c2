"""Data parallelism that shards more than the optimizer: Megatron-FSDP (use_megatron_fsdp) and torch FSDP2.

Megatron-FSDP, by data_parallel_sharding_strategy; M micro-batches, role "dp_cp", for experts "edp", with several optimizer
instances "intra_dp_cp":

====================  =======================================  =======================================================
strategy              gradients                                parameters
====================  =======================================  =======================================================
no_shard              all-reduce, once                         never
optim                 reduce-scatter, once                     gathered once, in optimizer.step()
optim_grads           reduce-scatter, every micro-batch        gathered once, in optimizer.step()
optim_grads_params    reduce-scatter, every micro-batch        a unit twice every micro-batch, the rest as above
====================  =======================================  =======================================================

A unit is a transformer layer (optim_grads_params only). Buckets: the parameters of a unit, its experts' apart; all others
together, cut where they reach the bucket limit, a tied embedding by itself. A bucket is laid out in rows as wide as the
least common multiple of its weights' rows and padded to a multiple of row * ranks (no_shard: not at all).

Who starts the two gathers of a unit: any module that needs parameters gathers them ahead, up to 500,000,000 elements (or
half of suggested_communication_unit_size), in the model's order. So the step's end gathers the first units of the next
step inside optimizer.step(), and the final norm, which comes behind the layers, gathers the first units again while it is
still forward. If those are not all, they are given up as soon as the backward pass gathers the others, and gathered a
third time. Since 0.18 modules outside units look ahead no more, and the second gather of a unit belongs to the backward
pass (or to the layer's recomputation).

Gradients are reduced in the type of main gradients; since 0.19 in megatron_fsdp_grad_comm_dtype, else
megatron_fsdp_main_grads_dtype, else the parameters' own type, whatever accumulate_allreduce_grads_in_fp32 says.

Several instances: the shards' gradients are summed over "inter_dist_opt" in the last micro-batch. With
outer_dp_sharding_strategy optim they are reduce-scattered there instead, and every gather before the end of the first
micro-batch's backward pass is preceded by one of the shard over "inter_dist_opt".

torch FSDP2: every transformer layer, the embedding, the output layer (but with transformer_impl local) and what is left
are gathered in each forward and, resharded after it, in each backward pass of each micro-batch, and their gradients
reduce-scattered in each; all in the parameters' type. Every parameter is cut along its first dimension into equal parts,
the last one padded.

Source: megatron-core core_v0.14.0 ... core_v0.19.0, distributed/fsdp/src/megatron_fsdp/param_and_grad_buffer.py and
megatron_fsdp.py, distributed/torch_fully_sharded_data_parallel.py; reference section 2.8.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from traceanalyzer.expect import buckets, parameters
from traceanalyzer.expect.model import Evidence, NotModelled
from traceanalyzer.expect.place import Place, Symbol, is_on
from traceanalyzer.expect.rules import Avoid, Chapter, Gap, Rule, sharded_gradients
from traceanalyzer.job import Job

_FSDP = "distributed/fsdp/src/megatron_fsdp/"
_GLOO = "megatron-core 0.16.1, gloo processes"
_RUN = "megatron-core 0.16.1 recorded"
_REDUCED = Evidence(
    "run",
    f"{_RUN}: dp2_megatron_fsdp; {_GLOO}: data_parallel_sharding_strategy optim, optim_grads, optim_grads_params; "
    f"{_FSDP}param_and_grad_buffer.py: GradReducePipeline._bucket_group_gradient_reduce",
)
_SUMMED = Evidence(
    "run",
    f"{_GLOO}: data_parallel_sharding_strategy no_shard; {_FSDP}param_and_grad_buffer.py: "
    "GradReducePipeline._bucket_group_gradient_reduce",
)
_AT_END = Evidence("source", f"{_FSDP}param_and_grad_buffer.py: ParamAndGradBuffer.reduce_scatter_gradients")
_GATHERED = Evidence(
    "run",
    f"{_RUN}: dp2_megatron_fsdp; {_GLOO}: data_parallel_sharding_strategy optim, optim_grads, optim_grads_params, "
    f"expert_model_parallel_size 2; {_FSDP}megatron_fsdp.py: MegatronFSDP, param_and_grad_buffer.py: AllGatherPipeline",
)
_INSTANCES = Evidence(
    "run",
    f"{_GLOO}: num_distributed_optimizer_instances 2, outer_dp_sharding_strategy no_shard and optim; "
    f"{_FSDP}param_and_grad_buffer.py: GradReducePipeline._bucket_group_gradient_reduce",
)
_TORCH = Evidence(
    "run",
    f"{_RUN}: dp2_torch_fsdp2; {_GLOO}: use_torch_fsdp2 on 3 ranks, torch_fsdp2_reshard_after_forward off, bf16; "
    "distributed/torch_fully_sharded_data_parallel.py: TorchFullyShardedDataParallel",
)

_PREFETCH = 500_000_000
_SMALLEST_DEFAULT_LIMIT = 40_000_000
_DEFAULT_LIMIT_PER_REPLICA = 1_000_000
_UNITS = "optim_grads_params"

# Half of what a 32-bit gradient sends need not be sent where 16 bits are enough.
_FP32 = Avoid(
    "fp32_reduction", "--grad-reduce-in-bf16", "n * (ranks - 1) / ranks * 2 if fp32_gradients else 0"
)  # fmt: skip
_DISCARDED = Avoid("double_param_gather", "suggested_communication_unit_size of twice the model, or megatron-core 0.18")
_EARLY = Avoid("reduce_scatter_per_microbatch", "data_parallel_sharding_strategy optim")


# -- rules -----------------------------------------------------------------------------------------------------------


def _reduce(name: str, role: str, phase: str, evidence: Evidence, calls: str, when: str, **more: Any) -> Rule:
    scatter = more.pop("op", "reduce_scatter") == "reduce_scatter"
    return Rule(
        name=f"sharded: {name}",
        role=role,
        op="reduce_scatter" if scatter else "all_reduce",
        phase=phase,
        component="expert gradients" if role == "edp" else "gradients",
        sent="n",
        received="n / ranks" if scatter else "",
        dtype="Megatron-FSDP gradients",
        calls=calls,
        when=f"training and megatron_fsdp and {_of(role)} and {when}",
        evidence=evidence,
        each="buckets",
        **more,
    )


def _of(role: str) -> str:
    return {
        "edp": "expert",
        "dp_cp": "not expert and instances == 1",
        "intra_dp_cp": "not expert and instances > 1",
        "inter_dist_opt": "instances > 1",
    }[role]


def _gather(role: str, phase: str, gathers: str, avoid: Avoid | None = None) -> Rule:
    return Rule(
        name=f"sharded: {'expert ' if role == 'edp' else ''}parameters, {gathers.removeprefix('gathers_')}"
        f"{' (instance)' if role == 'intra_dp_cp' else ''}",
        role=role,
        op="all_gather",
        phase=phase,
        component="expert parameters" if role == "edp" else "parameters",
        sent="n / ranks",
        received="n",
        dtype="parameters",
        calls=gathers,
        when=f"megatron_fsdp and {_of(role)}",
        evidence=_INSTANCES if role == "intra_dp_cp" else _GATHERED,
        each="buckets",
        avoid=avoid,
        document="document: ZeRO-1 and 2 all-reduce the parameters" if phase == "optimizer" else "",
    )


def _megatron(role: str) -> Iterator[Rule]:
    what = {"edp": "expert gradients", "dp_cp": "gradients", "intra_dp_cp": "gradients of an instance"}[role]
    proof = _INSTANCES if role == "intra_dp_cp" else _REDUCED
    whole = "data_parallel_sharding_strategy == 'no_shard'"
    late = "data_parallel_sharding_strategy == 'optim'"
    kept = "data_parallel_sharding_strategy == 'optim_grads'"
    units = f"data_parallel_sharding_strategy == '{_UNITS}'"
    yield _reduce(
        f"{what}, whole", role, "backward", _SUMMED, "many", f"{whole} and overlap_grad_reduce", op="all_reduce"
    )
    yield _reduce(
        f"{what}, overlapped", role, "backward", proof, "many", f"{late} and overlap_grad_reduce", avoid=_FP32
    )
    yield _reduce(
        f"{what}, at the end", role, "other", _AT_END, "many", f"{late} and not overlap_grad_reduce", avoid=_FP32
    )
    yield _reduce(f"{what}, last micro-batch", role, "backward", proof, "many", kept, avoid=_FP32)
    yield _reduce(f"{what}, earlier micro-batches", role, "backward", proof, "many * (M - 1)", kept, avoid=_EARLY)
    yield _reduce(f"{what}, every micro-batch", role, "backward", proof, "many * M", units, avoid=_FP32)
    for phase in ("optimizer", "forward", "backward", "recompute"):
        yield _gather(role, phase, f"gathers_{phase}")
    yield _gather(role, "forward", "gathers_discarded", _DISCARDED)


def _over_instances() -> Iterator[Rule]:
    """Between instances: gradients summed, or shards cut again (outer_dp_sharding_strategy) and gathered once a step."""
    whole = "outer_dp_sharding_strategy == 'no_shard'"
    for name, received, when in (("gradients of the instances", "", whole), ("shards", "n / DPCP", f"not ({whole})")):
        yield Rule(
            name=f"sharded: {name}",
            role="inter_dist_opt",
            op="reduce_scatter" if received else "all_reduce",
            phase="backward",
            component="gradients",
            sent="n / ranks",
            received=received,
            dtype="Megatron-FSDP gradients",
            calls="many",
            when=f"training and megatron_fsdp and instances > 1 and {when}",
            evidence=_INSTANCES,
            each="buckets",
        )
    for phase in ("optimizer", "forward", "backward", "recompute", "discarded"):
        yield Rule(
            name=f"sharded: shards of parameters, {phase}",
            role="inter_dist_opt",
            op="all_gather",
            phase="forward" if phase == "discarded" else phase,
            component="parameters",
            sent="n / DPCP",
            received="n / ranks",
            dtype="parameters",
            calls=f"outer_{phase}",
            when=f"megatron_fsdp and instances > 1 and not ({whole})",
            evidence=_INSTANCES,
            each="buckets",
        )


def _torch(name: str, op: str, phase: str, calls: str, when: str = "True") -> Rule:
    gather = op == "all_gather"
    return Rule(
        name=f"sharded: torch FSDP2 {name}",
        role="dp_cp",
        op=op,
        phase=phase,
        component="parameters" if gather else "gradients",
        sent="n / ranks" if gather else "n",
        received="n" if gather else "n / ranks",
        dtype="parameters",
        calls=calls,
        when=f"torch_fsdp2 and {when}",
        evidence=_TORCH,
        each="wrapped",
    )


RULES: tuple[Rule, ...] = (
    *_megatron("dp_cp"),
    *_megatron("intra_dp_cp"),
    *_megatron("edp"),
    *_over_instances(),
    _torch("parameters", "all_gather", "forward", "many * M"),
    _torch("parameters again", "all_gather", "backward", "many * M", "training and torch_fsdp2_reshard_after_forward"),
    _torch("gradients", "reduce_scatter", "backward", "many * M", "training"),
)


# -- tensors of a rank -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tensor:
    """One parameter: elements, elements of a row (all dimensions but the first), and the unit (layer) it belongs to.

    unit: None outside layers. named_expert: part of an expert, whatever the expert-parallel size. marked_expert: so, and
    replicated over "edp". tied: copy of it on another pipeline stage.
    """

    name: str
    elements: int
    row: int
    unit: int | None
    named_expert: bool
    marked_expert: bool
    tied: bool


def _rows(place: Place) -> Mapping[str, int]:
    """Elements of a row of each weight matrix, its inputs on this rank; whatever is not named is a vector."""
    job = place.job
    tp = job.tensor_model_parallel_size
    hidden = place.need("hidden_size")
    found = dict.fromkeys(_HIDDEN_ROWS, hidden)
    if job.multi_latent_attention:
        found["attention.proj"] = place.need("num_attention_heads") * job.v_head_dim // tp
        found["attention.q up"] = job.q_lora_rank or 0
        found["attention.kv up"] = job.kv_lora_rank
    else:
        found["attention.proj"] = place.need("num_attention_heads") * place.need("kv_channels") // tp
    found["mlp.fc2"] = place.need("ffn_hidden_size") // tp
    if job.num_experts is not None:
        found["experts.fc2"] = place.need("moe_ffn_hidden_size") // (job.expert_tensor_parallel_size or tp)
    if job.moe_shared_expert_intermediate_size:
        found["shared expert.fc2"] = job.moe_shared_expert_intermediate_size // tp
    return found


_HIDDEN_ROWS = (
    *("embedding", "position embedding", "output layer", "tied embedding"),
    *("attention.qkv", "attention.qkv with gate", "mlp.fc1", "router"),
    *("attention.q", "attention.q down", "attention.q down, whole", "attention.kv down", "attention.kv down, whole"),
    *("experts.fc1", "shared expert.fc1", "shared expert gate"),
)


def tensors(place: Place) -> list[Tensor]:
    """The parameters of a place in the model's order, with their layers. Raises JobError as buckets.parameter_list."""
    rows = _rows(place)
    everything = buckets.parameter_list(place.job, place.stage, 0, place.release)
    # Every layer has one such matrix, and every layer as many parameters before it as the first.
    marks = [at for at, one in enumerate(everything) if one.name == "attention.proj"]
    inside = [at for at, one in enumerate(everything) if one.name not in _OUTSIDE]
    before = marks[0] - inside[0] if marks else 0
    found: list[Tensor] = []
    unit = -1
    for at, one in enumerate(everything):
        if unit + 1 < len(marks) and at == marks[unit + 1] - before:
            unit += 1
        found.append(
            Tensor(
                one.name,
                one.elements,
                rows.get(one.name, 1),
                None if one.name in _OUTSIDE else unit,
                one.name.startswith("experts."),
                one.expert,
                one.tied,
            )
        )
    return found


_OUTSIDE = frozenset({"embedding", "position embedding", "final norm", "output layer", "tied embedding"})


# -- Megatron-FSDP: buckets ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bucket:
    """One bucket: elements with padding, its unit, whether its ranks are the experts', and what is in it."""

    elements: int
    unit: int | None
    expert: bool
    members: tuple[Tensor, ...]


def megatron_buckets(place: Place) -> list[Bucket]:
    """The buckets of a place in Megatron-FSDP's order: by the first parameter of each unit and kind."""
    job = place.job
    has_units = job.data_parallel_sharding_strategy == _UNITS
    pads = job.data_parallel_sharding_strategy != "no_shard"
    groups: dict[tuple[int | None, bool], list[Tensor]] = {}
    for one in tensors(place):
        expert = one.named_expert if place.has("experts by name") else one.marked_expert
        groups.setdefault((one.unit if has_units else None, expert), []).append(one)
    found: list[Bucket] = []
    for (unit, expert), members in groups.items():
        for part in _cut(members, None if unit is not None else _limit(place), alone=pads):
            elements = _laid_out(part, _cut_over(place, expert) if pads else None)
            found.append(Bucket(elements, unit, expert, tuple(part)))
    return found


def _ranks(place: Place, expert: bool) -> int:
    role = "edp" if expert else "dp_cp" if place.job.num_distributed_optimizer_instances == 1 else "intra_dp_cp"
    return place.job.layout.group_size(role)


def _cut_over(place: Place, expert: bool) -> int:
    """Ranks that a bucket is padded for: with shards cut again between instances, all of them."""
    return _ranks(place, expert) if place.job.outer_dp_sharding_strategy == "no_shard" else _all_ranks(place)


def _all_ranks(place: Place) -> int:
    return place.job.layout.group_size("dp_cp")


def _limit(place: Place) -> int | None:
    """Elements that close a bucket outside units; None: no limit. Megatron-LM gives one where nobody else does."""
    job = place.job
    if job.overlap_param_gather_with_optimizer_step or (job.framework == "megatron-lm" and not job.overlap_grad_reduce):
        return None
    if job.ddp_bucket_size is not None or job.framework != "megatron-lm":
        return job.ddp_bucket_size
    return max(_SMALLEST_DEFAULT_LIMIT, _DEFAULT_LIMIT_PER_REPLICA * job.layout.group_size("dp_cp"))


def _cut(members: Sequence[Tensor], limit: int | None, *, alone: bool) -> Iterator[list[Tensor]]:
    """Parts of a list of parameters: each ends when it reaches the limit; alone: a tied embedding is a part of its own."""
    part: list[Tensor] = []
    for one in members:
        if alone and one.tied:
            if part:
                yield part
            yield [one]
            part = []
            continue
        part.append(one)
        if limit and sum(member.elements for member in part) >= limit:
            yield part
            part = []
    if part:
        yield part


def _laid_out(members: Sequence[Tensor], ranks: int | None) -> int:
    """Elements of a bucket of these parameters, padded for ``ranks`` (None: not at all).

    Widest rows first, a parameter starts where a row of the bucket starts, and what is smaller than a row fills the gaps
    that the others leave; two parameters that both end within a row may share one.
    """
    ordered = sorted(members, key=lambda one: -one.row)
    width = ordered[0].row
    for one in ordered:
        fits = one.row == width or (width % one.row == 0 and one.elements % width == 0) or one.elements < width
        width = width if fits else math.lcm(width, one.row)
    whole = [one.elements for one in ordered if one.elements >= width]
    pieces = [one.elements for one in ordered if one.elements < width]
    used = 0
    while whole:
        size = whole.pop(0)
        over = size % width
        used += -(-size // width) * width
        if not over:
            continue
        space = width - over
        for at, other in enumerate(whole):
            if other % width and over + other % width <= width:
                space -= other % width
                used += other // width * width
                del whole[at]
                break
        for piece in list(pieces):
            if piece <= space:
                space -= piece
                pieces.remove(piece)
    used += sum(pieces)
    return used if ranks is None else -(-used // (ranks * width)) * ranks * width


# -- Megatron-FSDP: when parameters are gathered ---------------------------------------------------------------------

Phase = Literal["optimizer", "forward", "backward", "recompute", "discarded"]


class _Gathers:
    """Which buckets are whole on a rank, and how often each was gathered in which phase.

    counts: by bucket and phase; "discarded": gathered in the forward pass and given up before anything used it.
    of_first: the same up to the end of the first micro-batch.
    """

    def __init__(self, found: Sequence[Bucket], ahead: int) -> None:
        self._buckets = found
        self._ahead = ahead
        self._whole: set[int] = set()
        self._loose: set[int] = set()
        self._unused: dict[int, Phase] = {}
        self.counts: Counter[tuple[int, Phase]] = Counter()
        self.of_first: Counter[tuple[int, Phase]] = Counter()

    def gather(self, wanted: Iterable[int], phase: Phase, *, ahead: Literal[1, -1, 0]) -> None:
        """Make these buckets whole, and those behind (1) or before them (-1) up to the limit; 0: only these."""
        needed = set(wanted)
        if not needed:
            return
        asked = frozenset(needed)
        self._loose -= asked
        at = self._next(needed, ahead)
        taken = 0
        while ahead and at is not None and taken < self._ahead:
            needed.add(at)
            taken += self._buckets[at].elements
            at = self._next(needed, ahead)
        for one in sorted(needed - self._whole):
            self._give_up(one)
            self._whole.add(one)
            self._unused[one] = phase
            self.counts[one, phase] += 1
        for one in asked:
            self._unused.pop(one, None)

    def _give_up(self, kept: int) -> None:
        """What may be sharded again is, as soon as anything is gathered (AllGatherPipeline.recycle_unused_buckets)."""
        for one in (self._loose - {kept}) & self._whole:
            phase = self._unused.pop(one, None)
            if phase == "forward":
                self.counts[one, phase] -= 1
                self.counts[one, "discarded"] += 1
            self._whole.discard(one)
        self._loose.clear()

    def _next(self, needed: set[int], step: int) -> int | None:
        at = min(needed) if step > 0 else max(needed)
        while at in needed:
            at += step or 1
        return at if 0 <= at < len(self._buckets) else None

    def release(self, given: Iterable[int]) -> None:
        """Shard these again at once."""
        self._whole -= set(given)

    def loosen(self, given: Iterable[int]) -> None:
        """Shard these again when the next bucket is gathered."""
        self._loose |= set(given)


def _gathers(place: Place, found: Sequence[Bucket]) -> _Gathers:
    """Gathers of each bucket in a step, by phase; those of the first micro-batch apart."""
    job = place.job
    if job.data_parallel_sharding_strategy == "no_shard" or not found:
        return _Gathers((), 0)
    by_unit: dict[int, list[int]] = {}
    outside: dict[str, int] = {}
    for at, bucket in enumerate(found):
        if bucket.unit is not None:
            by_unit.setdefault(bucket.unit, []).append(at)
        for member in bucket.members:
            outside.setdefault(member.name, at)
    run = _Gathers(found, _ahead(place, found))
    first = [at for at, bucket in enumerate(found) if tensors_first(place) in {one.name for one in bucket.members}][:1]

    def start() -> None:
        if job.overlap_param_gather or job.data_parallel_sharding_strategy == _UNITS:
            run.gather(first, "optimizer", ahead=1)
        else:
            run.gather(range(len(found)), "optimizer", ahead=0)

    def micro_batch(*, first: bool) -> None:
        # Up to 0.17 every module looks ahead; later ones outside units do so until the first backward pass only: it marks
        # every module, and the marks of units alone are taken off again.
        ahead: Literal[1, 0] = 1 if first or not place.has("only units look ahead") else 0
        for name in ("embedding", "position embedding"):
            run.gather([outside[name]] if name in outside else [], "forward", ahead=ahead)
        for unit in sorted(by_unit):
            run.gather(by_unit[unit], "forward", ahead=1)
            run.release(by_unit[unit])
        if not by_unit:
            run.gather(range(len(found)), "forward", ahead=0)
        for name in ("final norm", "output layer", "tied embedding"):
            run.gather([outside[name]] if name in outside else [], "forward", ahead=ahead)
        if job.forward_only:
            return
        run.loosen(at for members in by_unit.values() for at in members)
        for again, units in reversed(_checkpoints(place, sorted(by_unit))):
            for unit in units if again else ():
                run.gather(by_unit[unit], "recompute", ahead=0)
                run.loosen(by_unit[unit])
            for unit in reversed(units):
                run.gather(by_unit[unit], "backward", ahead=-1)
                run.release(by_unit[unit])

    steps = place.need("num_microbatches")
    if not (place.first_step or job.forward_only):
        start()
    micro_batch(first=place.first_step or job.forward_only)
    run.of_first = Counter(run.counts)
    if steps > 1:
        micro_batch(first=job.forward_only)
        for key, number in (run.counts - run.of_first).items():
            run.counts[key] += number * (steps - 2)
    if place.first_step and not job.forward_only:
        run.release(range(len(found)))
        before = Counter(run.counts)
        start()
        run.of_first += run.counts - before
    return run


def tensors_first(place: Place) -> str:
    """Name of the model's first parameter on the stage."""
    return tensors(place)[0].name


def _checkpoints(place: Place, units: Sequence[int]) -> list[tuple[bool, Sequence[int]]]:
    """Units that run backward together, first to last, and whether they run forward again before."""
    job = place.job
    alone: list[tuple[bool, Sequence[int]]] = [(False, (unit,)) for unit in units]
    if job.recompute_granularity != "full":
        return alone
    number = place.need("recompute_num_layers")
    if job.recompute_method == "uniform":
        return [(True, units[start : start + number]) for start in range(0, len(units), number)]
    return [(True, (unit,)) for unit in units[:number]] + alone[number:]


def _ahead(place: Place, found: Sequence[Bucket]) -> int:
    """Elements that one gather may fetch ahead."""
    stated = place.job.suggested_communication_unit_size
    if stated:
        return stated // 2
    per_unit: Counter[int] = Counter()
    for bucket in found:
        if bucket.unit is not None:
            per_unit[bucket.unit] += sum(one.elements for one in bucket.members)
    return max(_PREFETCH, sum(per_unit.values()) // len(per_unit) if per_unit else 0)


# -- families --------------------------------------------------------------------------------------------------------

_PHASES: tuple[Phase, ...] = ("optimizer", "forward", "backward", "recompute", "discarded")


def _family(place: Place) -> Iterator[Mapping[str, Any]]:
    """Equal buckets of Megatron-FSDP together: many of n elements over ranks, and their gathers by phase."""
    if not place.job.use_megatron_fsdp or _why_not(place):
        return
    found = megatron_buckets(place)
    run = _gathers(place, found)
    equal: dict[tuple[int, bool], list[int]] = {}
    for at, bucket in enumerate(found):
        equal.setdefault((bucket.elements, bucket.expert), []).append(at)
    for (elements, expert), members in equal.items():
        yield {
            "n": elements,
            "expert": expert,
            "ranks": _ranks(place, expert),
            "many": len(members),
            **{f"gathers_{phase}": sum(run.counts[at, phase] for at in members) for phase in _PHASES},
            **{f"outer_{phase}": sum(run.of_first[at, phase] for at in members) for phase in _PHASES},
        }


def _wrapped(place: Place) -> Iterator[Mapping[str, Any]]:
    """Equal modules of torch FSDP2 together: many of n elements, padding of every parameter included."""
    job = place.job
    if not job.use_torch_fsdp2 or _why_not(place):
        return
    ranks = job.layout.group_size("dp_cp")
    sizes: Counter[str] = Counter()
    for one in tensors(place):
        if one.unit is not None:
            module = f"layer {one.unit}"
        elif one.name in ("embedding", "position embedding"):
            module = "embedding"
        elif one.name == "output layer" and job.transformer_impl != "local":
            module = "output layer"
        else:
            module = "rest"
        sizes[module] += -(-(one.elements // one.row) // ranks) * one.row * ranks
    for elements, many in Counter(sizes.values()).items():
        yield {"n": elements, "ranks": ranks, "many": many}


# -- what the rules do not know --------------------------------------------------------------------------------------


def _why_not(place: Place) -> str:
    """Why this chapter has no rules for a job's sharded data parallelism; "" if it has."""
    job = place.job
    for name in _OPTIONS:
        if is_on(job, name):
            return name
    if job.use_torch_fsdp2:
        if not job.untie_embeddings_and_output_weights:
            return "use_torch_fsdp2 with tied embeddings"
        if job.pipeline_model_parallel_size > 1 or job.expert_model_parallel_size > 1:
            return "use_torch_fsdp2 with pipeline or expert parallelism"
        return _unknown_parameters(place)
    if not job.use_megatron_fsdp:
        return ""
    if not place.has("Megatron-FSDP in rows"):
        return "use_megatron_fsdp before 0.14"
    if job.pipeline_model_parallel_size > 1:
        return "use_megatron_fsdp with pipeline parallelism"
    if job.num_distributed_optimizer_instances > 1 and not _fits_instances(job):
        return "use_megatron_fsdp over instances: with experts, or not all of gradients and parameters sharded"
    if job.data_parallel_sharding_strategy == "no_shard" and not job.overlap_grad_reduce:
        return "no_shard without overlap_grad_reduce"
    own_tensor_ranks = job.num_experts is not None and job.layout.expert_tensor_size != job.tensor_model_parallel_size
    if own_tensor_ranks and not place.has("experts by name") and job.expert_model_parallel_size == 1:
        return "use_megatron_fsdp before 0.16 with experts of their own tensor parallelism"
    return _unknown_parameters(place)


def _unknown_parameters(place: Place) -> str:
    return next(iter(parameters.undescribed(place.job, place.rank, place.release)), "")


def _fits_instances(job: Job) -> bool:
    """Whether instances are of the kind that was run: fully sharded, without experts."""
    return job.num_experts is None and job.data_parallel_sharding_strategy == _UNITS


_OPTIONS = (
    "fp8_param_gather",
    "fp4_param_gather",
    "fsdp_double_buffer",
    "nccl_ub",
    "mtp_num_layers",
    "moe_latent_size",
    "moe_use_legacy_grouped_gemm",
)
"""Options whose parameters or buffers this chapter does not know."""


def _gaps(place: Place) -> Iterable[NotModelled]:
    job = place.job
    if not (job.use_megatron_fsdp or job.use_torch_fsdp2):
        return
    reason = _why_not(place)
    if reason:
        yield NotModelled(reason, _ROLES)


_ROLES = ("dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt")


CHAPTER = Chapter(
    name="sharded",
    title="Sharded data parallel: Megatron-FSDP and torch FSDP2",
    source="reference section 2.8",
    rules=RULES,
    symbols={
        "megatron_fsdp": Symbol("whether Megatron-FSDP runs", lambda place: place.job.use_megatron_fsdp),
        "torch_fsdp2": Symbol("whether torch FSDP2 runs", lambda place: place.job.use_torch_fsdp2),
        "fp32_gradients": Symbol(
            "whether gradients of 16-bit parameters are reduced in 32 bits",
            lambda place: sharded_gradients(place) == "float32" and place.job.params_dtype != "float32",
        ),
    },
    families={"buckets": _family, "wrapped": _wrapped},
    family_words={
        "buckets": "buckets of n elements: many equal ones, ranks they are cut over, gathers of them by phase",
        "wrapped": "modules that FSDP2 wraps: many equal ones of n elements with padding, ranks they are cut over",
    },
    gaps=(
        Gap(what="use_custom_fsdp", when="on('use_custom_fsdp') and not use_megatron_fsdp", roles=_ROLES),
        # finalize_model_grads.py: _unshard_if_dtensor, _reshard_if_dtensor around the sum over tensor-parallel ranks
        Gap(
            what="use_torch_fsdp2: gradients of norms",
            when="training and use_torch_fsdp2 and TP > 1 and (sequence_parallel or qk_layernorm)",
            roles=("dp_cp",),
            phases=("other",),
            ops=("all_gather", "scatter"),
        ),
    ),
    more_gaps=_gaps,
)
