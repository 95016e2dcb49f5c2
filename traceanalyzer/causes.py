"""Why a cell differs: the table of causes. Each is a code, a sentence and a confidence, and is tested by itself.

A cause is ``proven`` where another cell or a flag confirms it, ``likely`` where the numbers alone suggest it. A cause may
join cells; each then names the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from traceanalyzer import traffic
from traceanalyzer.expect.model import ExpectedCall, RuleSet
from traceanalyzer.job import Job

Confidence = Literal["proven", "likely"]


@dataclass(frozen=True)
class Cause:
    """A code, a sentence with its numbers, and how sure it is."""

    code: str
    sentence: str
    confidence: Confidence


GROUP_OF_ONE = Cause(
    "group_of_one", "A call on a group of one rank: nothing leaves the rank, and no kernel is needed.", "proven"
)


NOT_CONSERVED = Cause(
    "rows_not_conserved",
    "The ranks of this group did not receive as many rows as they sent in the same step: the recording lacks or repeats "
    "calls, or the exchange was wrong.",
    "proven",
)


@dataclass(frozen=True)
class CellView:
    """What a cause may look at of a cell. Calls are per rank and step; payload is of one call, rows are of a step.

    transport: what carries expected traffic outside torch.distributed. varies, spread, stage: as in matching.Cell.
    """

    role: str | None
    op: str | None
    phase: str | None
    dtype: str | None
    payload: int | None
    calls_expected: int
    calls_measured: int
    verdict: str
    expected: tuple[ExpectedCall, ...] = ()
    ranks: tuple[int, ...] = (0,)
    steps: tuple[int, ...] = (0,)
    transport: str = ""
    varies: bool = False
    spread: tuple[int, int, int] | None = None
    stage: int | None = None

    @property
    def differs(self) -> bool:
        """Whether there is something to explain."""
        return self.verdict in ("excess", "missing", "unexpected")

    @property
    def surplus(self) -> int:
        """Calls beyond the expected ones; negative if some are missing."""
        return self.calls_measured - self.calls_expected

    @property
    def elements(self) -> int | None:
        """Elements that the payload counts; None if unknown."""
        size = traffic.element_bytes(self.dtype)
        return None if self.payload is None or not size else self.payload // size

    @property
    def bytes_expected(self) -> int:
        """Payload of all expected calls."""
        return sum(c.payload_bytes * c.calls for c in self.expected)

    @property
    def bytes_measured(self) -> int | None:
        """Payload of all measured calls; None if unknown or various."""
        return 0 if not self.calls_measured else None if self.payload is None else self.payload * self.calls_measured

    @property
    def paired(self) -> bool:
        """Whether something differs that was both expected and measured."""
        return self.differs and bool(self.expected) and self.calls_measured > 0


@dataclass(frozen=True)
class Facts:
    """What a cause may look at besides cells: the job, what it said of itself, the rules, and what the megatron rules
    expect of each rank where other rules are in force. kernels: transport -> how many kernels of it were recorded that no
    recorded call explains, empty without kernels."""

    job: Job
    captured: Job | None = None
    rules: RuleSet = "megatron"
    megatron: Mapping[int, Sequence[ExpectedCall]] = field(default_factory=dict)
    kernels: Mapping[str, int] = field(default_factory=dict)


Found = Iterator[tuple[Cause, tuple[int, ...]]]
Rule = Callable[[Sequence[CellView], Facts], Found]


def explain(cells: Sequence[CellView], facts: Facts) -> dict[int, tuple[Cause, tuple[int, ...]]]:
    """Cell index -> (its cause, the other cells the cause joins). The first rule of the table that fits a cell wins."""
    found: dict[int, tuple[Cause, tuple[int, ...]]] = {}
    for rule in TABLE:
        for cause, joined in rule(cells, facts):
            for i in joined:
                if i not in found:
                    found[i] = (cause, tuple(j for j in joined if j != i))
    return found


# -- the table -------------------------------------------------------------------------------------------------------


def _beyond_the_document(cells: Sequence[CellView], facts: Facts) -> Found:
    """Under the document's rules: what real Megatron does besides, looked up in the megatron rules."""
    if facts.rules != "document":
        return
    for i, cell in enumerate(cells):
        if not cell.differs or cell.surplus <= 0:
            continue
        siblings = [c for c in cells if _same_calls(c, cell)]  # cells that only the component tells apart
        known = {c.component for s in siblings for c in s.expected}
        measured = sum(s.calls_measured for s in siblings)
        real = [
            c
            for c in facts.megatron.get(cell.ranks[0], ())
            if (c.role, c.op, c.dtype, c.payload_bytes) == (cell.role, cell.op, cell.dtype, cell.payload)
            and (c.phase == cell.phase or (c.phase == "optimizer" and cell.phase == "other"))
        ]
        beyond = [c for c in real if c.component not in known]
        if not beyond:
            continue
        explained = sum(c.calls for c in real)
        proven = explained == measured
        regathers = sum(c.calls for c in beyond if c.avoidable is not None and c.avoidable.code == "sp_input_regather")
        listed = ", ".join(f"{c.calls} {c.component}" for c in beyond)
        if regathers:
            code = "sp_input_regather"
            words = (
                "The document lets the backward pass mirror the forward one; real Megatron gathers the input of every "
                f"column-parallel layer again for its weight gradient: {regathers} of the {cell.surplus} calls beyond the "
                f"document ({listed})."
            )
        elif any(c.phase == "recompute" for c in beyond):
            code = "recompute_repeats_collectives"
            words = f"Recomputation repeats forward collectives, which the document does not mention: {listed}."
        else:
            code = "not_in_document"
            words = f"The document does not mention these calls, real Megatron makes them: {listed}."
        count = f"{explained} call{'' if explained == 1 else 's'}"
        total = count if proven else f"{count} of {measured}"
        yield Cause(code, f"{words} The megatron rules explain {total}.", "proven" if proven else "likely"), (i,)


def _same_calls(one: CellView, other: CellView) -> bool:
    """Whether two cells hold calls of one kind in the same steps, so that only the component tells them apart."""
    return (one.role, one.op, one.phase, one.dtype, one.payload, one.ranks, one.steps) == (
        other.role,
        other.op,
        other.phase,
        other.dtype,
        other.payload,
        other.ranks,
        other.steps,
    )


def _recompute_on(cells: Sequence[CellView], facts: Facts) -> Found:
    """Forward collectives repeated in the backward pass although the job does not recompute."""
    if facts.job.recompute_granularity == "full":
        return
    joined = tuple(i for i, c in enumerate(cells) if c.phase == "recompute" and c.verdict in ("unexpected", "excess"))
    if not joined:
        return
    if all(cells[i].role in _EXPERTS for i in joined):
        yield from _recompute_moe(cells, facts, joined)
        return
    confirmed = facts.captured is not None and facts.captured.recompute_granularity == "full"
    first = cells[joined[0]]
    calls = sum(
        cells[i].surplus for i in joined if first.ranks[0] in cells[i].ranks and first.steps[0] in cells[i].steps
    )
    granularity = facts.job.recompute_granularity
    asked = f"the job says {granularity}" if granularity else "the job does not ask for it"
    captured = ", and the captured job has recompute_granularity full" if confirmed else ""
    yield (
        Cause(
            "recompute_full",
            f"{calls} forward calls are repeated inside the backward pass: recomputation is on, {asked}{captured}.",
            "proven" if confirmed else "likely",
        ),
        joined,
    )


def _recompute_moe(cells: Sequence[CellView], facts: Facts, joined: tuple[int, ...]) -> Found:
    """Exchanges of the experts, and only those, are repeated: the mixture-of-experts layer is recomputed."""

    def on(job: Job | None) -> bool:
        return job is not None and "moe" in job.recompute_modules

    if on(facts.job):
        return
    yield (
        Cause(
            "recompute_moe",
            f"{sum(cells[i].surplus for i in joined if cells[i].ranks == cells[joined[0]].ranks)} exchanges of the experts "
            "are repeated inside the backward pass, and nothing else is: moe is among the recomputed modules of this run, "
            f"not of the job{'; the captured job has it' if on(facts.captured) else ''}.",
            "proven" if on(facts.captured) else "likely",
        ),
        joined,
    )


def _recompute_off(cells: Sequence[CellView], facts: Facts) -> Found:
    """The job recomputes, the run does not."""
    if facts.job.recompute_granularity is None:
        return
    joined = tuple(i for i, c in enumerate(cells) if c.phase == "recompute" and c.verdict == "missing")
    if joined and not any(c.phase == "recompute" and c.calls_measured for c in cells):
        yield (
            Cause(
                "recompute_off",
                f"recompute_granularity is {facts.job.recompute_granularity}, but no forward call is repeated in the "
                "backward pass: the run does not recompute.",
                "proven",
            ),
            joined,
        )


def _sequence_parallel(cells: Sequence[CellView], facts: Facts) -> Found:
    """All-reduces where the job's sequence parallelism expects all-gather and reduce-scatter pairs, or the other way."""
    stages: dict[int | None, dict[int, CellView]] = {}
    for i, c in enumerate(cells):
        passes = c.phase in ("forward", "backward", "recompute") and c.dtype == facts.job.activation_dtype
        if c.role == "tp" and (passes or _of_norms(c)):
            stages.setdefault(c.stage, {})[i] = c
    found: dict[tuple[str, bool], tuple[list[int | None], list[int]]] = {}
    for stage, here in stages.items():
        one = _sequence_parallel_in(here, facts)
        if one is not None:
            state, sure, joined = one
            places, indices = found.setdefault((state, sure), ([], []))
            places.append(stage)
            indices += joined
    words = {
        "off": "The job has sequence parallelism on, but its tensor-parallel layers all-reduce: it was off",
        "on": "The job has sequence parallelism off, but its tensor-parallel layers all-gather and reduce-scatter: it was on",
    }
    for (state, sure), (places, indices) in found.items():
        where = "in this run"
        if len(places) < len(stages):
            where = f"on stage {', '.join(str(p) for p in sorted(p or 0 for p in places))}, and not on the others"
        sentence = f"{words[state]} {where}."
        yield Cause(f"sequence_parallel_{state}", sentence, "proven" if sure else "likely"), tuple(sorted(indices))


def _of_norms(cell: CellView) -> bool:
    """Whether these are the gradients of norms, which sequence parallelism leaves different on each rank."""
    return cell.differs and bool(cell.expected) and all(c.component == "norm gradients" for c in cell.expected)


def _sequence_parallel_in(here: Mapping[int, CellView], facts: Facts) -> tuple[str, bool, list[int]] | None:
    """Of one stage: off or on against the job, whether that is proven, and the cells; None: as the job has it."""
    if facts.job.sequence_parallel and any(c.verdict == "match" and c.op == "all_gather" for c in here.values()):
        return None  # it was on: single operations that differ have another reason
    layers = {i: c for i, c in here.items() if c.differs and not _of_norms(c)}
    reduces = sum(c.calls_measured for c in layers.values() if c.op == "all_reduce")
    pairs = sum(c.calls_measured for c in layers.values() if c.op in ("all_gather", "reduce_scatter"))
    wanted = {c.op for cell in layers.values() for c in cell.expected}
    joined = [i for i, c in here.items() if c.differs and c.op in ("all_reduce", "all_gather", "reduce_scatter")]
    said = facts.captured is not None and facts.captured.sequence_parallel != facts.job.sequence_parallel
    if facts.job.sequence_parallel and reduces > pairs and wanted & {"all_gather", "reduce_scatter"}:
        return "off", pairs == 0 or said, joined
    if not facts.job.sequence_parallel and pairs > reduces and "all_reduce" in wanted:
        return "on", reduces == 0 or said, joined
    return None


_EXPERTS = frozenset({"ep", "etp", "tp_ep"})
_DATA = frozenset({"dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt"})
_STAGES = frozenset({"pp", "world"})


def _captured(facts: Facts, name: str) -> bool:
    """Whether the captured job has another value of an option than the one that is compared."""
    return facts.captured is not None and getattr(facts.captured, name) != getattr(facts.job, name)


def _outside_off(cells: Sequence[CellView], _: Facts) -> Found:
    """Calls that torch.distributed made where the job lets something else carry the bytes."""
    words = {
        "userbuffers": ("tp_comm_overlap_off", "tp_comm_overlap is off in this run"),
        "deepep": ("flex_dispatcher_off", "the flex dispatcher is not used in this run"),
        "hybridep": ("flex_dispatcher_off", "the flex dispatcher is not used in this run"),
        "CUDA graph": ("cuda_graph_off", "they are not captured in a graph in this run"),
    }
    for transport, (code, said) in words.items():
        outside = [i for i, c in enumerate(cells) if c.transport == transport]
        kinds = {(c.role, c.op, c.phase) for i in outside for c in cells[i].expected}
        if code == "flex_dispatcher_off":  # the other dispatchers use other operations, and the group of EP alone
            kinds |= {(role, op, phase) for _, _, phase in kinds for role in _EXPERTS for op in _EXCHANGES}
        made = [
            i for i, c in enumerate(cells) if c.verdict in ("unexpected", "excess") and (c.role, c.op, c.phase) in kinds
        ]
        if made:
            yield (
                Cause(
                    code,
                    f"torch.distributed made calls that the job leaves to {transport}: {said}, in whole or in part.",
                    "likely",
                ),
                (*made, *outside),
            )


_EXCHANGES = ("all_to_all", "all_gather", "reduce_scatter")


def _context_variant(cells: Sequence[CellView], _: Facts) -> Found:
    """Context parallelism by other operations than the job's variant uses."""
    variants = {"send": "p2p", "recv": "p2p", "all_gather": "all_gather", "reduce_scatter": "all_gather"}
    variants["all_to_all"] = "a2a"
    here = {i: c for i, c in enumerate(cells) if c.role == "cp" and c.verdict != "unknown"}
    wanted = {variants.get(call.op) for c in here.values() for call in c.expected}
    made = {variants.get(c.op or "") for c in here.values() if c.calls_measured}
    if not wanted or not made or None in made or not wanted.isdisjoint(made):
        return
    run, job = ("+".join(sorted(v for v in kinds if v)) for kinds in (made, wanted))
    yield (
        Cause("cp_comm_type", f"Context parallelism runs as {run}, the job's cp_comm_type gives {job}.", "proven"),
        tuple(i for i, c in here.items() if c.differs),
    )


def _distributed_optimizer(cells: Sequence[CellView], facts: Facts) -> Found:
    """Gradients all-reduced where the job shards its optimizer, or the other way."""
    for role in sorted(_DATA - {"inter_dist_opt"}):
        here = {i: c for i, c in enumerate(cells) if c.role == role and c.verdict != "unknown"}
        joined = tuple(i for i, c in here.items() if c.differs and c.op in ("all_reduce", *_EXCHANGES))
        wanted = {call.op for c in here.values() for call in c.expected if "gradients" in call.component}
        made = {c.op for c in here.values() if c.calls_measured}
        if not joined:
            continue
        said = _captured(facts, "use_distributed_optimizer")
        if "reduce_scatter" in wanted and "all_reduce" in made and "reduce_scatter" not in made:
            gathers = "all_gather" in made
            yield (
                Cause(
                    "distributed_optimizer_off",
                    "The job has the distributed optimizer on, but gradients are all-reduced"
                    f"{'' if gathers else ' and no parameter is gathered'}: it was off in this run.",
                    "likely" if gathers and not said else "proven",
                ),
                joined,
            )
        elif wanted == {"all_reduce"} and "reduce_scatter" in made:
            yield (
                Cause(
                    "distributed_optimizer_on",
                    "The job has the distributed optimizer off, but gradients are reduce-scattered"
                    f"{' and parameters gathered' if 'all_gather' in made else ''}: it was on in this run.",
                    "proven" if "all_gather" in made or said else "likely",
                ),
                joined,
            )


def _alike_in_bytes(cells: Sequence[CellView], joined: Sequence[int]) -> bool:
    """Whether as many bytes were sent as expected, over these cells of the same ranks and steps."""
    measured = [cells[i].bytes_measured for i in joined]
    return None not in measured and sum(b or 0 for b in measured) == sum(cells[i].bytes_expected for i in joined) > 0


def _data_cells(cells: Sequence[CellView]) -> Iterator[tuple[str, str, list[int]]]:
    """Data-parallel cells that differ, by role and operation, in the same ranks and steps."""
    found: dict[tuple[str, str, tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, c in enumerate(cells):
        if c.role in _DATA and c.op in ("all_reduce", *_EXCHANGES) and c.verdict != "unknown":
            found.setdefault((c.role or "", c.op or "", c.ranks, c.steps), []).append(i)
    for (role, op, *_), here in found.items():
        if any(cells[i].differs for i in here):
            yield role, op, here


def _overlap(cells: Sequence[CellView], facts: Facts) -> Found:
    """As many bytes of gradients or parameters in another phase: overlapped although the job does not, or not at all."""
    options = {"all_gather": ("overlap_param_gather", "forward"), "reduce_scatter": ("overlap_grad_reduce", "backward")}
    options["all_reduce"] = options["reduce_scatter"]
    for _, op, here in _data_cells(cells):
        if op not in options:
            continue
        option, early = options[op]
        missing = {c.phase for i in here for c in cells[i].expected if cells[i].calls_measured == 0}
        made = {cells[i].phase for i in here if cells[i].calls_measured and cells[i].differs}
        joined = tuple(i for i in here if cells[i].differs)
        if not _alike_in_bytes(cells, here) or not missing or not made or (early in missing) == (early in made):
            continue
        state = "off" if early in missing else "on"
        yield (
            Cause(
                f"{option}_{state}",
                f"As many bytes as expected, but in {' and '.join(sorted(str(p) for p in made))} instead of "
                f"{' and '.join(sorted(str(p) for p in missing))}: {option} was {state} in this run.",
                "proven" if _captured(facts, option) else "likely",
            ),
            joined,
        )


def _not_overlapped(cells: Sequence[CellView], facts: Facts) -> Found:
    """All gradients in one call behind the backward passes, where overlap has them in several during the last one.

    Also in a first step, where overlapped gradients are late too, but in as many calls as there are buckets.
    """
    if not facts.job.overlap_grad_reduce or facts.job.forward_only:
        return
    found: dict[bool, list[int]] = {}
    calls: list[tuple[int, int]] = []
    for _, op, here in _data_cells(cells):
        wanted, made = (sum(cells[i].calls_expected for i in here), sum(cells[i].calls_measured for i in here))
        phases = {cells[i].phase for i in here if cells[i].calls_measured}
        alone = made == 1 and wanted > 1 and "backward" not in phases and _alike_in_bytes(cells, here)
        if alone and (op != "all_gather" or not facts.job.overlap_param_gather):
            found.setdefault(op == "all_gather", []).extend(i for i in here if cells[i].differs)
            if op != "all_gather":
                calls.append((made, wanted))
    if not calls:
        return
    yield (
        Cause(
            "overlap_grad_reduce_off",
            f"As many bytes of gradients as expected, in one call behind the backward passes instead of {calls[0][1]}: "
            "overlap_grad_reduce was off in this run.",
            "proven" if _captured(facts, "overlap_grad_reduce") else "likely",
        ),
        (*found[False], *found.get(True, ())),
    )


def _buckets(cells: Sequence[CellView], facts: Facts) -> Found:
    """As many bytes in another number of calls: gradients or parameters cut into other buckets."""
    for _, op, here in _data_cells(cells):
        wanted, made = (sum(cells[i].calls_expected for i in here), sum(cells[i].calls_measured for i in here))
        if not (_alike_in_bytes(cells, here) and wanted and made and wanted != made):
            continue
        total = sum(cells[i].bytes_expected for i in here)
        yield (
            Cause(
                "bucket_size",
                f"The same {total:,} bytes in {made} calls instead of {wanted} ({op}): buckets of another size "
                "(ddp_bucket_size, ddp_num_buckets, or overlap, without which there is one).",
                "proven" if _captured(facts, "ddp_bucket_size") else "likely",
            ),
            tuple(i for i in here if cells[i].differs),
        )


def _gathered_twice(cells: Sequence[CellView], _: Facts) -> Found:
    """Parameters gathered a whole number of times as often as expected."""
    for i, c in enumerate(cells):
        if c.role not in _DATA or c.op != "all_gather" or c.verdict not in ("unexpected", "excess"):
            continue
        twin = [
            j
            for j, other in enumerate(cells)
            if j != i
            and (other.role, other.op, other.dtype, other.payload) == (c.role, c.op, c.dtype, c.payload)
            and other.ranks == c.ranks
            and other.verdict == "match"
            and other.calls_measured
        ]
        wanted = c.calls_expected or sum(cells[j].calls_measured for j in twin)
        made = c.calls_measured + (0 if c.calls_expected else sum(cells[j].calls_measured for j in twin))
        if wanted and made > wanted and made % wanted == 0:
            yield (
                Cause(
                    "double_param_gather",
                    f"The same parameters are gathered {made // wanted} times a step; once is enough "
                    "(overlap_param_gather gathers once).",
                    "likely",
                ),
                (i,),
            )


_OF_EXPERTS = frozenset({"ep", "etp", "tp_ep", "edp", "intra_edp", "tp_ep_pp"})
"""Roles whose groups follow from the degrees of the experts."""


def _expert_tensor_parallel(cells: Sequence[CellView], facts: Facts) -> Found:
    """Gathers and scatters between expert tensor-parallel ranks that the job does not have, or that are missing."""
    here = {i: c for i, c in enumerate(cells) if c.role == "etp" and c.verdict != "unknown"}
    joined = tuple(i for i, c in here.items() if c.differs)
    if not joined:
        return
    said = _captured(facts, "expert_tensor_parallel_size")
    if all(not c.expected for c in here.values()):
        words = "The run gathers and scatters tokens between expert tensor-parallel ranks, which the job does not have"
    elif not any(c.calls_measured for c in here.values()):
        words = "No token is gathered or scattered between the job's expert tensor-parallel ranks"
    else:
        return
    yield (
        Cause(
            "expert_tensor_parallel",
            f"{words}: expert_tensor_parallel_size differs (where it is not set it is the tensor-parallel size).",
            "proven" if said else "likely",
        ),
        # the other groups of the experts follow from it
        (*joined, *(i for i, c in enumerate(cells) if c.role in _OF_EXPERTS - {"etp"} and c.differs)),
    )


def _expert_parallel(cells: Sequence[CellView], facts: Facts) -> Found:
    """No exchange of tokens between ranks, and the gradients of all experts among the dense ones."""
    degree = facts.job.expert_model_parallel_size
    exchanges = [c for c in cells if c.role in _EXPERTS and not c.transport and c.verdict != "unknown"]
    if degree == 1 or not any(c.expected for c in exchanges) or any(c.calls_measured for c in exchanges):
        return
    joined = [i for i, c in enumerate(cells) if c.role in _OF_EXPERTS and c.differs]
    gradients = [i for i, c in enumerate(cells) if c.role in ("dp_cp", "intra_dp_cp") and c.differs]
    own = {(c.ranks, c.steps): _gradient_bytes(cells, c, ("edp", "intra_edp"))[0] * degree for c in cells}
    whole = bool(gradients) and all(
        _near(_gradient_bytes(cells, c)[1], _gradient_bytes(cells, c)[0] + own[c.ranks, c.steps])
        for c in (cells[i] for i in gradients)
    )
    said = facts.captured is not None and facts.captured.expert_model_parallel_size == 1
    beside = (
        f"and the gradients of the data-parallel group are longer by those of all {facts.job.num_experts} experts"
        if whole
        else "or the layers have no experts in this run"
    )
    yield (
        Cause(
            "expert_parallel",
            "No rank sends tokens to another one's experts: expert_model_parallel_size was 1 (as where it is not set), the "
            f"job says {degree}, {beside}.",
            "proven" if whole or said else "likely",
        ),
        (*joined, *(gradients if whole or said else ())),
    )


def _gradient_bytes(
    cells: Sequence[CellView], place: CellView, roles: Sequence[str] = ("dp_cp", "intra_dp_cp")
) -> tuple[int, int | None]:
    """Bytes of gradients that were expected and made on the ranks and steps of a cell; None: not known."""
    wanted, made = 0, 0
    known = True
    for c in cells:
        reduces = c.op in ("all_reduce", "reduce_scatter", "all_to_all")
        if c.role not in roles or not reduces or not set(place.ranks) <= set(c.ranks) or c.steps != place.steps:
            continue
        of_gradients = sum(e.payload_bytes * e.calls for e in c.expected if "gradients" in e.component)
        if not of_gradients and c.expected:
            continue
        wanted += of_gradients
        known = known and c.bytes_measured is not None
        made += c.bytes_measured or 0
    return wanted, made if known else None


def _near(size: int | None, wanted: int) -> bool:
    """Whether a size of buckets is what was reckoned: padding makes it up to a percent longer or shorter."""
    return size is not None and abs(size - wanted) * 100 <= wanted


# -- layers ------------------------------------------------------------------------------------------------------------

_PARTS_OF_LAYERS = ("attention", "mlp", "router", "experts", "shared expert", "saved activations")


def _split_by_layers(cell: CellView) -> tuple[int, int]:
    """Expected calls of a cell that layers make, and those that something else makes."""
    inside = sum(c.calls for c in cell.expected if c.component.startswith(_PARTS_OF_LAYERS))
    return inside, sum(c.calls for c in cell.expected) - inside


def _in_passes(cell: CellView) -> bool:
    return cell.phase in ("forward", "backward", "recompute") and cell.verdict != "unknown" and bool(cell.expected)


def _layers(cells: Sequence[CellView], facts: Facts) -> Found:
    """Calls of the layers scaled by one number of layers, all other calls of the passes as expected."""
    if facts.job.num_layers is None:
        return
    places = dict.fromkeys((c.ranks, c.steps) for c in cells if _in_passes(c) and c.differs)
    found: dict[tuple[int, int], tuple[list[int], list[int]]] = {}
    for ranks, steps in places:
        stage = facts.job.layout.stage(ranks[0])
        layers = len(facts.job.layers_on_stage(stage))
        numbers: set[Fraction] = set()
        anchored = False
        here = [c for c in cells if _in_passes(c) and set(ranks) <= set(c.ranks) and set(steps) <= set(c.steps)]
        for c in here:
            inside, outside = _split_by_layers(c)
            if inside:
                numbers.add(Fraction((c.calls_measured - outside) * layers, inside))
            elif c.calls_measured != outside:
                break  # something else differs too
            anchored = anchored or outside > 0
        else:
            share = numbers.pop() if len(numbers) == 1 else Fraction(0)
            if not anchored or share.denominator != 1 or not 0 < share != layers:
                continue
            joined, members = found.setdefault((int(share), layers), ([], []))
            members += ranks
            joined += [
                i
                for i, c in enumerate(cells)
                if c.differs and set(c.ranks) <= set(ranks) and (_in_passes(c) or _of_norms(c) or c.role in _DATA)
            ]
    present = {r for c in cells for r in c.ranks}
    for (number, layers), (joined, members) in found.items():
        some = set(members) != {
            r for r in present if facts.job.layout.stage(r) in {facts.job.layout.stage(m) for m in members}
        }
        who = f"Ranks {', '.join(map(str, sorted(set(members))[:16]))} make" if some else "The run makes"
        yield (
            Cause(
                "layers_differ",
                f"{who} the calls of {number} layer{'' if number == 1 else 's'} a stage, the job gives {layers}: another "
                "number of layers was built there.",
                "likely",
            ),
            tuple(dict.fromkeys(joined)),
        )


def _carried_outside(cells: Sequence[CellView], facts: Facts) -> Found:
    """No collective of the layers' tensor parallelism, and all others of it: something else than torch carries them."""
    here = {i: c for i, c in enumerate(cells) if c.role == "tp" and _in_passes(c) and not c.transport}
    gone = {i: c for i, c in here.items() if _split_by_layers(c)[0] and c.differs}
    if not {"forward", "backward"} <= {c.phase for c in gone.values()}:
        return
    if any(c.calls_measured > _split_by_layers(c)[1] for c in gone.values()):
        return
    if any(_split_by_layers(c)[0] and not c.differs for c in here.values()):
        return
    calls = sum(_split_by_layers(c)[0] for c in gone.values() if c.ranks == next(iter(gone.values())).ranks)
    words = {
        "userbuffers": (
            "tp_comm_overlap_on",
            "kernels of TransformerEngine's userbuffers",
            "tp_comm_overlap is on in this run",
        ),
        "CUDA graph": (
            "cuda_graph_on",
            "communication kernels of CUDA graphs",
            "their calls were captured (cuda_graph_impl)",
        ),
    }
    for transport, (code, kernels, why) in words.items():
        if facts.kernels.get(transport):
            yield (
                Cause(
                    code,
                    f"The layers make none of their {calls} tensor-parallel calls a step, and the run holds "
                    f"{facts.kernels[transport]:,} {kernels} instead: {why}, the job does not say so.",
                    "proven",
                ),
                tuple(gone),
            )
            return
    if not facts.kernels and facts.job.transformer_impl == "transformer_engine":
        yield (
            Cause(
                "outside_torch",
                f"The layers make none of their {calls} tensor-parallel calls a step: tp_comm_overlap or a CUDA graph "
                "carries them, which no record of calls shows; a trace with kernels tells which.",
                "likely",
            ),
            tuple(gone),
        )


# -- groups ------------------------------------------------------------------------------------------------------------


_Kind = tuple[str | None, str | None, str | None, int | None]
"""Operation, phase, element type and payload of a call."""


def _moved(cells: Sequence[CellView], rank: int, step: int) -> dict[tuple[str, str], int]:
    """(role, another role) -> calls of one rank's step that all the first lacks and the other has beyond the expected."""
    lost: dict[str, Counter[_Kind]] = {}
    gained: dict[str, Counter[_Kind]] = {}
    for c in cells:
        if c.role is None or c.varies or c.transport or rank not in c.ranks or step not in c.steps:
            continue
        if not c.differs:
            continue
        for e in c.expected:
            lost.setdefault(c.role, Counter())[e.op, c.phase, e.dtype, e.payload_bytes] += e.calls
        gained.setdefault(c.role, Counter())[c.op, c.phase, c.dtype, c.payload] += c.calls_measured
    for role in lost.keys() & gained.keys():
        both = lost[role] & gained[role]
        lost[role], gained[role] = lost[role] - both, gained[role] - both
    return {
        (one, other): lacking.total()
        for one, lacking in lost.items()
        for other, beyond in gained.items()
        if one != other and lacking.total() and lacking <= beyond
    }


def _wrong_group(cells: Sequence[CellView], _: Facts) -> Found:
    """What one role lacks is made on another, alike in all else."""
    places = dict.fromkeys(
        (c.ranks[0], c.steps[0]) for c in cells if c.differs and c.expected and c.surplus < 0 and not c.varies
    )
    found: dict[tuple[str, str], tuple[int, int | None, list[tuple[int, int]]]] = {}
    for rank, step in places:
        moves = _moved(cells, rank, step)
        for (source, target), calls in moves.items():
            if (target, source) not in found:
                found.setdefault((source, target), (calls, moves.get((target, source)), []))[2].append((rank, step))
    for (source, target), (calls, back, where) in found.items():
        number = f"{calls} call{'' if calls == 1 else 's'}"
        if (source, target) == ("pp", "world"):
            code = "pipeline_on_default_group"
            words = (
                f"{number} between the stages a step run on the default group instead of the pipeline's: single messages of "
                "the second of two stages do, so batch_p2p_comm is off in this run, or the release is another one."
            )
        elif back is not None:
            code = "groups_confused"
            words = (
                f"{number} of {source} a step run on {target}, and {back} of {target} on {source}: the two groups are taken "
                "for each other."
            )
        else:
            code = "wrong_group"
            words = (
                f"{number} a step that belong{'s' if calls == 1 else ''} on {source} run{'s' if calls == 1 else ''} on "
                f"{target}, alike in all else: a wrong group was given, or another release uses it."
            )
        yield (
            Cause(code, words, "likely"),
            tuple(
                i
                for i, c in enumerate(cells)
                if c.differs
                and c.role in (source, target)
                and not c.varies
                and any(rank in c.ranks and step in c.steps for rank, step in where)
            ),
        )


def _calls_of_the_loop(cells: Sequence[CellView], _: Facts) -> Found:
    """Calls over all ranks that nothing expects: barriers and reductions that the training loop makes by itself."""
    present = {r for c in cells for r in c.ranks}
    for i, c in enumerate(cells):
        if c.role != "world" or c.expected or not c.calls_measured or c.phase != "other" or set(c.ranks) != present:
            continue
        if c.verdict not in ("unknown", "unexpected") or c.op not in ("barrier", "all_reduce", "all_gather"):
            continue
        number = f"{c.calls_measured} {c.op.replace('_', '-')}{'' if c.calls_measured == 1 else 's'}"
        yield (
            Cause(
                "barrier" if c.op == "barrier" else "extra_call",
                f"{number} over all ranks in every step, which no part of the job makes: the training loop's own, or "
                "Megatron-LM's log of times, if it is written in every step (log_interval 1).",
                "likely",
            ),
            (i,),
        )


def _tied_embedding(cells: Sequence[CellView], facts: Facts) -> Found:
    """The gradients of an embedding that stages share are not summed."""
    joined = tuple(
        i for i, c in enumerate(cells) if c.role == "embedding" and c.verdict == "missing" and not c.calls_measured
    )
    if not joined:
        return
    untied = facts.captured is not None and facts.captured.untie_embeddings_and_output_weights
    other = (
        "the captured job has untie_embeddings_and_output_weights."
        if untied
        else "its copies drift apart; or they are not tied in this run (untie_embeddings_and_output_weights)."
    )
    yield (
        Cause(
            "tied_embedding_missing",
            "The gradients of the word embedding, which the first and the last stage share, are not summed over them: "
            f"{other}",
            "proven" if untied else "likely",
        ),
        joined,
    )


# -- sizes of the model ------------------------------------------------------------------------------------------------


def _with_gradients(
    cells: Sequence[CellView], joined: Sequence[int], elems: Mapping[int, int]
) -> tuple[tuple[int, ...], bool]:
    """The cells, and the data-parallel ones of ranks whose gradients are longer by what was reckoned; whether all are.

    elems: rank -> gradient elements beyond the expected ones.
    """
    more: list[int] = []
    fitting = True
    for i, c in enumerate(cells):
        if c.role not in ("dp_cp", "intra_dp_cp") or not c.differs:
            continue
        size = next((traffic.element_bytes(e.dtype) for e in c.expected if "gradients" in e.component), None)
        wanted, made = _gradient_bytes(cells, c)
        if size is None and more:
            more.append(i)  # parameters are as long as their gradients
            continue
        beyond = elems.get(c.ranks[0], 0) * (size or 0)
        if made is not None and beyond and abs(made - wanted - beyond) * 100 <= abs(beyond):
            more.append(i)
        else:
            fitting = False
    return (*joined, *more), bool(more) and fitting


def _query_groups(cells: Sequence[CellView], facts: Facts) -> Found:
    """Keys and values of context parallelism, all larger or smaller by one factor."""
    job = facts.job
    heads, groups = job.num_attention_heads, job.num_query_groups
    if heads is None or groups is None:
        return
    here = {
        i: c
        for i, c in enumerate(cells)
        if c.role in ("cp", "cp_l1")
        and c.paired
        and c.payload is not None
        and all(e.component.startswith("attention: ") and set(e.component) & {"K", "V"} for e in c.expected)
    }
    numbers = {
        Fraction(c.payload or 0, e.payload_bytes) * groups for c in here.values() for e in c.expected if e.payload_bytes
    }
    number = numbers.pop() if len(numbers) == 1 else Fraction(0)
    if number.denominator != 1 or number in (0, groups) or heads % int(number):
        return
    wide = (
        2 * (int(number) - groups) * (job.kv_channels or 0) * (job.hidden_size or 0) // job.tensor_model_parallel_size
    )
    elems = {r: wide * len(job.layers_on_stage(job.layout.stage(r))) for c in here.values() for r in c.ranks}
    joined, confirmed = _with_gradients(cells, tuple(here), elems)
    ignored = number == heads
    yield (
        Cause(
            "query_groups",
            f"Keys and values are {float(number / groups):g} times as large as the job's: those of {int(number)} query "
            f"groups instead of {groups}"
            + (" (as many as heads: group_query_attention is off in this run)" if ignored else "")
            + ".",
            "proven" if confirmed or _captured(facts, "num_query_groups") else "likely",
        ),
        joined,
    )


def _vocabulary(cells: Sequence[CellView], facts: Facts) -> Found:
    """The gradients of a shared word embedding have another number of rows."""
    job = facts.job
    hidden, padded, tp = job.hidden_size, job.padded_vocab_size, job.tensor_model_parallel_size
    here = {i: c for i, c in enumerate(cells) if c.role == "embedding" and c.paired and c.elements is not None}
    if not here or not hidden or not padded:
        return
    numbers = {Fraction((c.elements or 0) * tp, hidden) for c in here.values()}
    number = numbers.pop() if len(numbers) == 1 else Fraction(1, 2)
    if number.denominator != 1 or number in (0, padded):
        return
    elems = {r: (int(number) - padded) // tp * hidden for c in here.values() for r in c.ranks}
    joined, confirmed = _with_gradients(cells, tuple(here), elems)
    yield (
        Cause(
            "vocabulary_size",
            f"The word embedding has {int(number):,} rows, the job says {padded:,}: the vocabulary is another one, or is "
            "padded to another multiple (make_vocab_size_divisible_by).",
            "proven" if confirmed or _captured(facts, "padded_vocab_size") else "likely",
        ),
        joined,
    )


def _virtual_stages(cells: Sequence[CellView], facts: Facts) -> Found:
    """Messages between stages as another number of model chunks gives them, while the rest of the step is as expected."""
    job = facts.job
    if not job.num_microbatches or job.pipeline_model_parallel_size == 1:
        return
    chunks = job.virtual_pipeline_model_parallel_size or 1
    here = {
        i: c for i, c in enumerate(cells) if c.role in _STAGES and c.op in ("send", "recv") and c.verdict != "unknown"
    }
    wanted: Counter[tuple[str | None, int]] = Counter()
    made: Counter[tuple[str | None, int]] = Counter()
    for c in here.values():
        for rank in c.ranks:
            wanted[c.op, rank] += c.calls_expected
            made[c.op, rank] += c.calls_measured
    # activations and gradients, each as often as there are chunks, or once less at an end: the pipeline chapter's table
    kinds = 1 if job.forward_only else 2
    numbers = {
        Fraction(made[place] - wanted[place], kinds * job.num_microbatches) + chunks for place in (*wanted, *made)
    }
    whole = numbers.pop() if len(numbers) == 1 else Fraction(0)
    number = int(whole) if whole.denominator == 1 and whole > 0 else None
    joined = tuple(i for i, c in here.items() if c.differs)
    others = [c for c in cells if c.phase in ("forward", "backward") and c.expected and c.role not in _STAGES]
    said = facts.captured is not None and (facts.captured.virtual_pipeline_model_parallel_size or 1) == number
    if number in (None, chunks) or not joined or any(c.differs for c in others) or not (others or said):
        return
    yield (
        Cause(
            "virtual_stages",
            f"The messages between stages are those of {number} model chunk{'' if number == 1 else 's'} a stage, the job "
            f"has {chunks}: virtual_pipeline_model_parallel_size differs.",
            "proven" if said else "likely",
        ),
        joined,
    )


def _shared_experts(cells: Sequence[CellView], facts: Facts) -> Found:
    """Calls of the shared experts made otherwise, where the captured job overlaps them and the job does not, or so."""
    if not _captured(facts, "moe_shared_expert_overlap"):
        return
    joined = tuple(i for i, c in enumerate(cells) if c.role == "tp" and c.differs and c.phase != "other")
    if joined:
        state = "off" if facts.job.moe_shared_expert_overlap else "on"
        yield (
            Cause(
                "shared_expert_overlap",
                f"moe_shared_expert_overlap was {state} in this run, which changes the gathers and scatters of the shared "
                "experts.",
                "likely",
            ),
            joined,
        )


def _capacity(cells: Sequence[CellView], _: Facts) -> Found:
    """As many exchanges of tokens as expected, but with other own rows than tokens times experts per token."""
    for i, c in enumerate(cells):
        if c.varies and c.differs and c.calls_expected == c.calls_measured:
            fewer = c.verdict == "missing"
            yield (
                Cause(
                    "capacity",
                    f"The ranks {'send fewer' if fewer else 'exchange other'} rows than tokens x experts per token: a "
                    f"capacity factor {'drops' if fewer else 'drops or pads'} tokens, or moe_router_topk differs.",
                    "likely",
                ),
                (i,),
            )


def _scaled_counts(cells: Sequence[CellView], facts: Facts) -> Found:
    """Every count of a step off by one and the same factor: it had another number of micro-batches than the job says."""
    micro_batches = facts.job.num_microbatches
    if micro_batches is None:
        return
    places: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for i, c in enumerate(cells):
        if c.phase in ("forward", "backward", "recompute") and c.verdict != "unknown" and c.expected:
            places.setdefault((c.ranks, c.steps), []).append(i)
    for (ranks, steps), joined in places.items():
        # a count that is right in the same steps, in a cell it shares with other ranks, speaks against it
        if any(
            i not in joined and set(ranks) <= set(cells[i].ranks) and set(steps) <= set(cells[i].steps)
            for others in places.values()
            for i in others
        ):
            continue
        counts = [(cells[i].calls_measured * micro_batches, cells[i].calls_expected) for i in joined]
        seen = {measured // wanted if measured % wanted == 0 else None for measured, wanted in counts}
        number = seen.pop() if len(seen) == 1 else None
        if len(joined) < 2 or number in (None, 0, micro_batches):
            continue
        said = facts.captured is not None and facts.captured.num_microbatches == number
        yield (
            Cause(
                "microbatch_count",
                f"Every count is {number}/{micro_batches} of the expected one: the step had {number} micro-batches, the "
                f"job says {micro_batches}.",
                "proven" if said else "likely",
            ),
            tuple(joined),
        )


def _wide_reduction(cells: Sequence[CellView], _: Facts) -> Found:
    """Gradients reduced in 32 bits where the job reduces them in 16."""
    for i, cell in enumerate(cells):
        if not (cell.paired and cell.role in _DATA and cell.dtype == "float32"):
            continue
        same = [
            c
            for c in cell.expected
            if c.op == cell.op
            and "gradients" in c.component
            and _elements(c) == cell.elements
            and c.dtype != cell.dtype
        ]
        if same:
            yield (
                Cause(
                    "fp32_reduction",
                    f"Gradients are reduced as float32 instead of {same[0].dtype}, twice the bytes: --grad-reduce-in-bf16 is "
                    "off in this run (accumulate_allreduce_grads_in_fp32).",
                    "proven",
                ),
                (i,),
            )


def _dtype_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """The same operation on as many elements of another type."""
    for i, cell in enumerate(cells):
        if not cell.paired or cell.dtype is None or cell.dtype in {c.dtype for c in cell.expected}:
            continue
        same = [c for c in cell.expected if c.op == cell.op and _elements(c) == cell.elements]
        if not same:
            continue
        size, wanted = traffic.element_bytes(cell.dtype), traffic.element_bytes(same[0].dtype)
        times = f", {size / wanted:g} times the bytes" if size and wanted else ""
        yield Cause("dtype_differs", f"Sent as {cell.dtype} instead of {same[0].dtype}{times}.", "proven"), (i,)


def _operation_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """Another operation in the same place."""
    for i, cell in enumerate(cells):
        wanted = sorted({c.op for c in cell.expected})
        if cell.paired and cell.op not in wanted:
            yield Cause("operation_differs", f"{cell.op} instead of {', '.join(wanted)}.", "likely"), (i,)


_PADDING = Fraction(51, 50)


def _padded(cells: Sequence[CellView], _: Facts) -> Found:
    """Buckets of gradients or parameters that are a little longer than expected."""
    for i, cell in enumerate(cells):
        wanted = max((c.payload_bytes for c in cell.expected if (c.op, c.dtype) == (cell.op, cell.dtype)), default=0)
        longer = cell.payload is not None and wanted and wanted < cell.payload <= wanted * _PADDING
        if cell.paired and cell.role in _DATA and longer:
            yield (
                Cause(
                    "padding",
                    f"{cell.payload:,} bytes a call instead of {wanted:,}: the buckets are padded further "
                    "(pad_buckets_for_high_nccl_busbw, another release).",
                    "likely",
                ),
                (i,),
            )


def _size_differs(cells: Sequence[CellView], _: Facts) -> Found:
    """The same operation and type with another size."""
    for i, cell in enumerate(cells):
        same = {c.payload_bytes for c in cell.expected if (c.op, c.dtype) == (cell.op, cell.dtype)}
        if not cell.paired or cell.payload is None or not same or cell.payload in same:
            continue
        wanted = max(same)
        times = f" ({cell.payload / wanted:.4g} times)" if wanted else ""
        yield (
            Cause(
                "size_differs",
                f"{cell.payload:,} bytes a call instead of {wanted:,}{times}: padding, another shape, or a size of the job "
                "that is not what the job says.",
                "likely",
            ),
            (i,),
        )


def _elements(call: ExpectedCall) -> int | None:
    size = traffic.element_bytes(call.dtype)
    return call.payload_bytes // size if size else None


TABLE: tuple[Rule, ...] = (
    _beyond_the_document,
    _outside_off,
    _calls_of_the_loop,
    _wrong_group,
    _sequence_parallel,
    _recompute_on,
    _recompute_off,
    _context_variant,
    _distributed_optimizer,
    _not_overlapped,
    _overlap,
    _buckets,
    _gathered_twice,
    _expert_tensor_parallel,
    _expert_parallel,
    _virtual_stages,
    _shared_experts,
    _scaled_counts,
    _layers,
    _carried_outside,
    _tied_embedding,
    _query_groups,
    _vocabulary,
    _capacity,
    _wide_reduction,
    _dtype_differs,
    _operation_differs,
    _padded,
    _size_differs,
)
"""Rules in order: what explains several cells stands before what explains one."""
