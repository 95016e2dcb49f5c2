"""The layout a run was made with, read off its groups and traffic: for runs without a job, and against a declared one.

Every layout of Megatron's grid for the run's world size is tried against what was observed; an axis is proven where all
layouts that fit agree on it. What a group says, by strength: its description names its role and has a size; its name is a
number in Megatron's creation order, which also fixes what was not recorded; its ranks alone must be a group of some role,
and its traffic says which roles come into question.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from traceanalyzer import axes
from traceanalyzer.attribute import creation, places
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run

Sure = Literal["proven", "likely", "unknown"]

AXES = ("tp", "cp", "pp", "ep", "etp", "dp")
"""The axes that are inferred, and the fields of a Layout they stand for (dp follows from the others)."""

_CREATION_LIMIT = 64
"""World size up to which all layouts are replayed against group names; beyond it those that fit the groups' ranks are."""

_MOST_REPLAYED = 600


class Inferred(NamedTuple):
    """One thing that was inferred. value: None where unknown. reason: a sentence."""

    name: str
    value: int | str | None
    sure: Sure
    reason: str


@dataclass(frozen=True)
class LayoutConflict:
    """The declared layout and the one that the groups imply differ. declared, observed: e.g. "TP4 x CP2"."""

    declared: str
    observed: str
    sure: Sure
    role: str = "layout"

    @property
    def sentence(self) -> str:
        """The conflict in words."""
        return f"declared {self.declared}, observed groups imply {self.observed} ({self.sure})"


@dataclass(frozen=True)
class Inference:
    """What the groups and the traffic say about the layout.

    facts: world_size, the axes, order, then vpp, num_microbatches, sequence_parallel. layouts: all that fit, the likeliest
    first, at most 20. fitting: how many fit. basis: roles (by descriptions or callers), names, roles and names, ranks, or
    nothing.
    """

    facts: tuple[Inferred, ...]
    layouts: tuple[axes.Layout, ...]
    fitting: int
    basis: str

    def fact(self, name: str) -> Inferred:
        """One fact by name; KeyError for a name that does not exist."""
        return {f.name: f for f in self.facts}[name]

    @property
    def words(self) -> str | None:
        """The likeliest layout, e.g. "TP8"; None if none fits or nothing was observed."""
        return words_of(self.layouts[0]) if self.layouts and self.basis != "nothing" else None


def words_of(layout: axes.Layout) -> str:
    """The axes of more than one rank: "TP4 x CP2 x DP8"; experts apart: "TP2 x DP4 (EP4, ETP1)"; "DP1" for a single rank."""
    dense = {"TP": layout.tp, "CP": layout.cp, "PP": layout.pp, "DP": layout.dp}
    parts = [f"{name}{size}" for name, size in dense.items() if size > 1] or ["DP1"]
    experts = [f"EP{layout.ep}"] if layout.ep > 1 else []
    if layout.ep > 1 and layout.expert_tensor_size != layout.tp:
        experts.append(f"ETP{layout.expert_tensor_size}")
    return " x ".join(parts) + (f" ({', '.join(experts)})" if experts else "")


class _Group(NamedTuple):
    """One observed group: ranks or size (None: not known), the roles that come into question (None: all).

    told: how its one role is known, as in "is described as such"; None where it is not.
    """

    name: str
    ranks: tuple[int, ...] | None
    size: int | None
    roles: frozenset[str] | None
    told: str | None


def infer(run: Run) -> Inference:
    """The layout that the run's groups and traffic imply. Reads the stored rows alone, so a job does not colour it."""
    rows = run.tuples(
        "SELECT DISTINCT rank, group_id, description, group_size, ranks FROM process_group ORDER BY ALL NULLS FIRST"
    )
    world, why_world = _world(run, rows)
    groups = _groups(rows, _traffic(run), _callers(run))
    observed = creation.observed_names(rows)
    hints = _hints(run)
    if world is None or not groups:
        reason = "the world size is not known" if world is None else "no group but the default one was recorded"
        facts = [Inferred("world_size", world, "unknown" if world is None else "proven", why_world)]
        facts += [Inferred(name, None, "unknown", reason) for name in (*AXES, "order")]
        plain = world is not None and _plain_data_parallel(run)
        if plain:
            why = "all traffic is on the default group, and of the kinds that plain data parallelism makes"
            facts = [f if f.name != "dp" else Inferred("dp", world, "likely", why) for f in facts]
        return Inference((*facts, *hints), (), 0, "nothing")
    fitting, basis = _fitting(world, groups, observed)
    ordered = sorted(fitting, key=_unlikeliness)
    facts = [Inferred("world_size", world, "proven", why_world)]
    facts += [_axis(name, ordered, groups, basis) for name in (*AXES, "order")]
    return Inference((*facts, *hints), tuple(ordered[:20]), len(ordered), basis)


def conflict(found: Inference, job: Job | None) -> LayoutConflict | None:
    """Where the declared layout is not among those that fit the observed groups; None where it is, or nothing can be said."""
    if job is None or not found.layouts or found.basis == "nothing" or job.grid != "megatron":
        return None
    try:
        declared = job.layout
    except JobError:
        return None
    sizes = _sizes(declared)
    named = [f for f in found.facts if f.name in AXES and f.value is not None and f.sure == "proven"]
    apart = [f for f in named if f.value != sizes[f.name]]
    if not apart:
        return None
    sure: Sure = "proven" if found.basis != "ranks" else "likely"
    return LayoutConflict(words_of(declared), words_of(found.layouts[0]), sure)


# -- what was observed -------------------------------------------------------------------------------------------------

_Rows = Sequence[tuple[int | None, str, str | None, int | None, list[int] | None]]


def _world(run: Run, rows: _Rows) -> tuple[int | None, str]:
    if run.world_size is not None:
        return run.world_size, "recorded"
    for _, name, description, size, ranks in rows:
        if axes.role_of_description(description) == "world" or name == "0":
            found = size if size is not None else None if ranks is None else len(ranks)
            if found is not None:
                return found, f"the default group has {found} ranks"
    return None, "neither a header nor the default group says it"


def _groups(
    rows: _Rows, traffic: Mapping[str, frozenset[str] | None], callers: Mapping[tuple[int | None, str], str]
) -> list[_Group]:
    """The distinct groups of more than one rank, the default group aside; of many a sample."""
    found: dict[tuple[object, ...], _Group] = {}
    for rank, name, description, size, ranks in rows:
        role = axes.role_of_description(description)
        told = None if role is None else "is described as such"
        if role is None and (rank, name) in callers:
            role, told = callers[rank, name], "is called by functions of this axis alone"
        observed = size if size is not None or ranks is None else len(ranks)
        if role == "world" or name == "0" or observed is None or observed < (1 if role is not None else 2):
            continue
        members = None if ranks is None else tuple(sorted(ranks))
        roles = frozenset({role}) if role is not None else traffic.get(name)
        key = (role, observed, members if members is not None else None if role is not None else name)
        found.setdefault(key, _Group(name, members, observed, roles, told))
    by_kind: dict[tuple[frozenset[str] | None, int | None], list[_Group]] = defaultdict(list)
    for group in found.values():
        by_kind[group.roles, group.size].append(group)
    return [g for kind in by_kind.values() for g in kind[:: max(1, len(kind) // _SAMPLE)]]


_SAMPLE = 16
"""Groups looked at of one role and size: in a large world each repeats what the others say."""


def _callers(run: Run) -> dict[tuple[int | None, str], str]:
    """(rank, group) -> role, where only functions of one role call on it, and some of them can be of no other role."""
    dense: dict[tuple[int | None, str], set[str | None]] = defaultdict(set)
    strict: dict[tuple[int | None, str], set[str | None]] = defaultdict(set)
    for rank, name, path, dims in run.tuples(
        """SELECT DISTINCT rank, group_id, call_path, in_dims FROM recorded_comm
           WHERE group_id IS NOT NULL AND call_path IS NOT NULL"""
    ):
        dense[rank, name].add(places.place_of(path, dims, None).role)
        strict[rank, name].add(places.place_of(path, dims, _WITH_EXPERTS).role)
    return {
        key: role
        for key, roles in dense.items()
        if len(roles) == 1 and (role := next(iter(roles))) is not None and role in strict[key]
    }


_WITH_EXPERTS = Job(num_experts=2)
"""A job in which functions that dispatchers share with tensor parallelism settle nothing."""


def _plain_data_parallel(run: Run) -> bool:
    ops = {op for (op,) in run.tuples("SELECT DISTINCT op FROM recorded_comm WHERE op IS NOT NULL")}
    return bool(ops & {"all_reduce", "reduce_scatter"}) and ops <= {
        "all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier",
    }  # fmt: skip


def _traffic(run: Run) -> dict[str, frozenset[str] | None]:
    """Roles that come into question for each group by what runs on it; None: any."""
    rows = run.tuples(
        """SELECT group_id, op, max(in_splits IS NOT NULL), count(*) FROM recorded_comm
           WHERE group_id IS NOT NULL AND op IS NOT NULL GROUP BY group_id, op"""
    )
    ops: dict[str, set[str]] = defaultdict(set)
    for group_id, op, _, _ in rows:
        ops[group_id].add(op)
    found: dict[str, frozenset[str] | None] = {}
    for group_id, seen in ops.items():
        if "all_to_all" in seen:
            found[group_id] = frozenset({"ep", "tp_ep", "cp", "cp_l0"})
        elif seen & {"send", "recv"}:
            found[group_id] = frozenset({"pp", "cp", "cp_l1"})
        else:
            found[group_id] = None
    return found


# -- layouts -------------------------------------------------------------------------------------------------------------


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _candidates(world: int, groups: Sequence[_Group]) -> Iterator[axes.Layout]:
    """All layouts of the world; degrees that a description states are fixed, and untouched axes stay as they are."""
    fixed: dict[str, set[int]] = defaultdict(set)
    for group in groups:
        if group.told is not None and group.roles is not None and group.size is not None:
            fixed[next(iter(group.roles))].add(group.size)

    def allowed(role: str, sizes: Iterable[int]) -> list[int]:
        return [s for s in sizes if not fixed[role] or fixed[role] == {s}]

    experts = any(g.roles is None or g.roles & _EXPERT_ROLES for g in groups)
    wide = world <= _CREATION_LIMIT or bool(fixed["etp"])
    for order in (axes.DEFAULT_ORDER, axes.PP_BEFORE_DP_ORDER):
        for tp in allowed("tp", _divisors(world)):
            for cp in allowed("cp", _divisors(world // tp)):
                for pp in allowed("pp", _divisors(world // (tp * cp))):
                    dp = world // (tp * cp * pp)
                    if allowed("dp", [dp]) == [] or allowed("dp_cp", [dp * cp]) == []:
                        continue
                    if order != axes.DEFAULT_ORDER and (pp == 1 or dp == 1):
                        continue  # the same ranks
                    for ep, etp in _expert_degrees(world // pp, tp, experts, wide):
                        if allowed("ep", [ep]) == [] or allowed("etp", [etp]) == []:
                            continue
                        try:
                            yield axes.Layout(world, tp=tp, cp=cp, pp=pp, ep=ep, etp=etp, order=order)
                        except JobError:
                            continue


_EXPERT_ROLES = frozenset({"ep", "tp_ep", "etp", "edp", "tp_ep_pp", "intra_edp", "inter_dist_opt"})


def _expert_degrees(ranks: int, tp: int, experts: bool, wide: bool) -> Iterator[tuple[int, int]]:
    """EP and ETP of a stage of so many ranks."""
    if not experts:
        yield 1, tp
        return
    for ep in _divisors(ranks):
        for etp in _divisors(ranks // ep) if wide else [e for e in {1, tp} if (ranks // ep) % e == 0]:
            if ep > 1 or etp == tp:
                yield ep, etp


_ANY = tuple(
    role
    for role in axes.ROLES
    if role not in ("world", "hybrid_cp", "cp_l0", "cp_l1", "intra_dp_cp", "intra_edp", "inter_dist_opt")
)


def _explains(layout: axes.Layout, group: _Group) -> bool:
    """Whether the layout has such a group, of one of the roles that come into question."""
    roles = [r for r in _ANY if group.roles is None or r in group.roles]
    if not roles:
        return True  # a role that more than the degrees decide
    for role in roles:
        if group.ranks is not None:
            if not 0 <= group.ranks[0] <= group.ranks[-1] < layout.world_size:
                return False
            if role in ("embedding", "position_embedding"):
                # which stages hold embeddings is the model's affair: some of one pipeline
                pipeline = layout.group_of("pp", group.ranks[0])
                if pipeline is not None and pipeline[0] == group.ranks[0] and set(group.ranks) <= set(pipeline):
                    return True
            elif layout.group_of(role, group.ranks[0]) == group.ranks:
                return True
        elif role in ("embedding", "position_embedding") or layout.group_size(role) == group.size:
            return True
    return False


def _fitting(
    world: int, groups: Sequence[_Group], observed: Sequence[creation.Observed]
) -> tuple[list[axes.Layout], str]:
    """The layouts that explain all groups of known role and most of the others; and what that rests on."""
    stated = [g for g in groups if g.told is not None]
    unnamed = [g for g in groups if g.told is None]
    best: list[axes.Layout] = []
    most = 0
    for layout in _candidates(world, groups):
        if not all(_explains(layout, g) for g in stated):
            continue
        explained = sum(_explains(layout, g) for g in unnamed)
        if explained > most:
            best, most = [], explained
        if explained == most:
            best.append(layout)
    if not stated and most == 0:
        return [], "ranks"
    replayed = _replayed(best, observed)
    if replayed:
        return replayed, "roles and names" if stated else "names"
    return best, "roles" if stated else "ranks"


def _replayed(layouts: Sequence[axes.Layout], observed: Sequence[creation.Observed]) -> list[axes.Layout]:
    """Those whose creation order gives the observed names, without a shift; [] where names say nothing."""
    known = [g for g in observed if g.ranks is not None and len(g.ranks) > 1]
    if len({g.number for g in known}) < 2 or len(layouts) > _MOST_REPLAYED or not layouts:
        return []
    if layouts[0].world_size > 1024:
        return []
    found: list[tuple[int, axes.Layout]] = []
    options = [creation.Options(gloo) for gloo in (True, False)]
    for layout in layouts:
        fits = creation.fits(observed, layout, None, options, shifts=False)
        if fits:
            found.append((fits[0].explained, layout))
    most = max((explained for explained, _ in found), default=0)
    return [layout for explained, layout in found if explained == most] if most == len(observed) else []


def _sizes(layout: axes.Layout) -> dict[str, int | str]:
    return {
        "tp": layout.tp,
        "cp": layout.cp,
        "pp": layout.pp,
        "ep": layout.ep,
        "etp": layout.expert_tensor_size,
        "dp": layout.dp,
        "order": layout.order,
    }


def _unlikeliness(layout: axes.Layout) -> tuple[int, ...]:
    """Sort key: few axes first, then TP before CP before PP, experts without a tensor degree of their own."""
    return (
        sum(size > 1 for size in (layout.tp, layout.cp, layout.pp, layout.dp)) + 2 * (layout.ep > 1),
        int(layout.ep > 1 and layout.expert_tensor_size not in (1, layout.tp)),
        int(layout.order != axes.DEFAULT_ORDER),
        layout.cp,
        layout.ep,
        -layout.tp,
        layout.pp,
    )


def _axis(name: str, layouts: Sequence[axes.Layout], groups: Sequence[_Group], basis: str) -> Inferred:
    """One axis: proven where all fitting layouts agree, likely where the likeliest is one of several."""
    if not layouts:
        return Inferred(name, None, "unknown", "no layout of Megatron's grid has the observed groups")
    if name in ("ep", "etp") and not any(g.roles is None or g.roles & _EXPERT_ROLES for g in groups):
        value = _sizes(layouts[0])[name]
        return Inferred(name, value, "likely", "no group of experts was recorded")
    values = Counter(_sizes(layout)[name] for layout in layouts)
    value = _sizes(layouts[0])[name]
    if name == "order" and not any(layout.pp > 1 and layout.dp > 1 for layout in layouts):
        return Inferred(name, value, "likely", "no rank depends on it: PP or DP is 1")
    own = next((g for g in groups if g.told is not None and g.roles == frozenset({name})), None)
    if len(values) == 1:
        if own is not None:
            return Inferred(
                name,
                value,
                "proven",
                f"group {own.name} {own.told} and has {own.size} rank{'' if own.size == 1 else 's'}",
            )
        how = {"ranks": "the groups' ranks", "names": "the groups' names and ranks"}.get(
            basis, "the groups' roles and sizes"
        )
        count = "the only layout that has" if len(layouts) == 1 else f"all {len(layouts)} layouts that have"
        return Inferred(name, value, "proven", f"{count} {how} agree" + ("s" if len(layouts) == 1 else ""))
    several = ", ".join(str(v) for v in sorted(values, key=str))
    reason = f"{len(layouts)} layouts fit, with {name} {several}; the one with the fewest axes is shown"
    if name in ("ep", "etp") and basis == "ranks":
        return Inferred(name, None, "unknown", f"{len(layouts)} layouts fit, with {name} {several}")
    return Inferred(name, value, "likely", reason)


# -- hints from traffic ----------------------------------------------------------------------------------------------------


def _hints(run: Run) -> list[Inferred]:
    return [*_pipeline_hints(run), _sequence_parallel(run)]


def _pipeline_hints(run: Run) -> list[Inferred]:
    """vpp and micro-batches from the messages on pipeline groups: per step a first stage sends (2v - 1)M, a middle 2vM.

    Without interleaving v is 1. Needs complete steps and pipeline groups that are described, or the only ones with
    messages. M: micro-batches.
    """
    names = ("vpp", "num_microbatches")
    groups = {
        (rank, name): tuple(ranks)
        for rank, name, description, ranks in run.tuples(
            "SELECT rank, group_id, description, ranks FROM process_group WHERE ranks IS NOT NULL AND len(ranks) > 1"
        )
        if axes.role_of_description(description) == "pp"
    }
    if not groups:
        return [Inferred(n, None, "unknown", "no group is described as the pipeline's") for n in names]
    sent: dict[tuple[int, int], dict[object, int]] = defaultdict(dict)
    peers: dict[tuple[int, int], set[int]] = defaultdict(set)
    for rank, group_id, peer, step, calls in run.tuples(
        """SELECT c.rank, c.group_id, c.peer, coalesce(c.recorded_step, s.step), count(*) FROM recorded_comm c
           ASOF LEFT JOIN step_range s ON s.rank_key = coalesce(c.rank, -1)
                AND coalesce(c.t_issue_ns, c.start_ns) >= s.step_start_ns
           WHERE c.op = 'send' AND c.rank IS NOT NULL AND coalesce(s.step_complete, false)
             AND s.step_evidence <> 'window' GROUP BY ALL"""
    ):
        ranks = groups.get((rank, group_id))
        if ranks is None or rank not in ranks:
            continue
        key = (ranks.index(rank), len(ranks))
        sent[key][(rank, step)] = sent[key].get((rank, step), 0) + calls
        if peer in ranks:
            peers[key].add(ranks.index(peer))
    counts = {key: set(by_step.values()) for key, by_step in sent.items()}
    if not counts or any(len(c) != 1 for c in counts.values()):
        why = "no complete step with pipeline messages" if not counts else "stages do not send alike in every step"
        return [Inferred(n, None, "unknown", why) for n in names]
    edge = next((c for (stage, size), c in sorted(counts.items()) if stage in (0, size - 1)), None)
    middle = next((c for (stage, size), c in sorted(counts.items()) if 0 < stage < size - 1), None)
    wraps = any({0, size - 1} <= {stage, peer} and size > 2 for (stage, size), seen in peers.items() for peer in seen)
    if edge is not None and middle is not None:
        first, inner = edge.copy().pop(), middle.copy().pop()
        batches = inner - first
        if batches > 0 and inner % (2 * batches) == 0:
            vpp = inner // (2 * batches)
            reason = f"a middle stage sends {inner} messages a step, an end of the pipeline {first}"
            return [Inferred(names[0], vpp, "proven", reason), Inferred(names[1], batches, "proven", reason)]
    if edge is not None and not wraps and any(size > 2 for _, size in counts):
        first = edge.copy().pop()
        reason = f"an end of the pipeline sends {first} messages a step, none of them to the other end"
        return [Inferred(names[0], 1, "proven", reason), Inferred(names[1], first, "proven", reason)]
    if middle is not None and edge is None:
        inner = middle.copy().pop()
        reason = f"a middle stage sends {inner} messages a step, which is 2 x vpp x micro-batches; no end was recorded"
        return [Inferred(n, None, "unknown", reason) for n in names]
    first = (edge or {0}).copy().pop()
    reason = f"an end of the pipeline sends {first} messages a step, which is (2 x vpp - 1) x micro-batches"
    return [Inferred(n, None, "unknown", reason) for n in names]


def _sequence_parallel(run: Run) -> Inferred:
    """Sequence parallelism from the tensor-parallel groups' operations: only it reduce-scatters there."""
    names = [
        name
        for name, description in run.tuples("SELECT DISTINCT group_id, description FROM process_group")
        if axes.role_of_description(description) == "tp"
    ]
    if not names:
        return Inferred("sequence_parallel", None, "unknown", "no group is described as the tensor-parallel one")
    seen = dict(
        run.tuples("SELECT op, count(*) FROM recorded_comm WHERE list_contains(?, group_id) GROUP BY op", [names])
    )
    scatters, reduces = seen.get("reduce_scatter", 0), seen.get("all_reduce", 0)
    if scatters:
        return Inferred("sequence_parallel", 1, "proven", f"{scatters} reduce-scatters on the tensor-parallel group")
    if reduces:
        return Inferred("sequence_parallel", 0, "likely", f"{reduces} all-reduces and no reduce-scatter on it")
    return Inferred(
        "sequence_parallel", None, "unknown", "no all-reduce or reduce-scatter on the tensor-parallel group"
    )
