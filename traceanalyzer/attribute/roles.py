"""Which role each process group plays, by the first evidence that settles it.

In order: the group's description; its name, which is a number, in Megatron's creation order (creation.py); its ranks
against the job's layout, if one role fits; the functions that call on it, among the roles that fit; type, size and count
of its traffic. Rank sets are not unique keys: TP and ETP, PP and EMBEDDING, CP and EP can coincide.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa

from traceanalyzer import axes
from traceanalyzer.attribute import creation
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.run import Run


class GroupConflict(NamedTuple):
    """A role whose observed groups contradict the declared layout: their size or, where that agrees, their ranks.

    declared, observed: a size (0: the layout makes no such group), or the ranks of one group.
    """

    role: str
    declared: int | tuple[int, ...]
    observed: int | tuple[int, ...]

    @property
    def sentence(self) -> str:
        """The conflict in words."""
        if self.declared == 0:
            return f"declared no {self.role} groups, observed groups of {self.observed} ranks"
        if isinstance(self.declared, int):
            ranks = "1 rank" if self.declared == 1 else f"{self.declared} ranks"
            return f"declared {self.role} groups of {ranks}, observed groups of {self.observed}"
        return f"declared a {self.role} group of ranks {_listed(self.declared)}, observed {_listed(self.observed)}"


class OrderConflict(NamedTuple):
    """A group whose name does not follow Megatron's creation order, while ``agreeing`` other groups do.

    name: the group's. declared: the ranks that the layout's group of this name has. observed: its ranks, or their number.
    """

    name: str
    role: str
    declared: tuple[int, ...]
    observed: int | tuple[int, ...]
    agreeing: int

    @property
    def sentence(self) -> str:
        """The conflict in words."""
        seen = f"{self.observed} ranks" if isinstance(self.observed, int) else f"ranks {_listed(self.observed)}"
        return (
            f"group {self.name} has {seen}; by Megatron's creation order of the declared layout it would be the {self.role} "
            f"group of ranks {_listed(self.declared)} ({self.agreeing} other groups follow that order)"
        )


Conflict = GroupConflict | OrderConflict


def _listed(ranks: int | tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks)) if isinstance(ranks, tuple) else str(ranks)


class Look(NamedTuple):
    """What a call looks like in a recording; None: not recorded."""

    op: str | None
    dtype: str | None
    in_elems: int | None
    out_elems: int | None
    phase: str | None
    group_size: int | None


class Signature(NamedTuple):
    """What an expected kind of call looks like, its role, and how many calls of it a step has."""

    op: str
    dtype: str
    in_elems: int
    out_elems: int
    phase: str
    group_size: int
    role: str
    calls: int


def known_roles() -> tuple[str, ...]:
    """The role vocabulary."""
    return tuple(axes.ROLES)


def layout_of(job: Job | None) -> axes.Layout | None:
    """The job's layout, None without a job or where the job does not determine one."""
    if job is None:
        return None
    try:
        return job.layout
    except JobError:
        return None


def of_groups(run: Run, job: Job | None) -> tuple[pa.Table, list[Conflict]]:
    """Role of every group of a run (table group_role) and where observed groups contradict the layout.

    ``candidates`` of a group are the roles its ranks fit; null where they cannot be compared, because layout or ranks are
    unknown. Also creates the table role_size: what each role's group size is by the layout, without one by the descriptions.
    """
    layout = layout_of(job)
    known = {} if layout is None else _sizes(layout)
    rows = run.tuples(
        "SELECT rank, group_id, description, group_size, ranks FROM process_group ORDER BY rank, group_id"
    )
    sizes = known if layout is not None else _described_sizes(rows)
    run.table(
        "role_size",
        pa.table({"role": pa.array(list(sizes), pa.string()), "path_size": pa.array(list(sizes.values()), pa.int32())}),
    )
    ordered, broken = _by_creation(rows, layout, job)
    fits: dict[tuple[int, ...], tuple[str, ...]] = {}
    decided: list[tuple[int | None, str, str | None, str | None, tuple[str, ...] | None]] = []
    conflicts: dict[GroupConflict, None] = {}
    for rank, group_id, description, size, ranks in rows:
        role = axes.role_of_description(description)
        evidence = None if role is None else "description"
        candidates = None
        if role is not None and role not in _SIZE_VARIES and layout is not None:
            found = _conflict(layout, known, role, size, ranks)
            if found is not None:
                conflicts[found] = None
        if role is None and group_id in ordered:
            role, evidence = ordered[group_id], "creation_order"
        if role is None and layout is not None and ranks is not None:
            key = tuple(ranks)
            candidates = fits[key] if key in fits else fits.setdefault(key, layout.roles_with_ranks(key))
            if len(candidates) == 1:
                role, evidence = candidates[0], "layout"
        decided.append((rank, group_id, role, evidence, candidates))
    types = (pa.int32(), pa.string(), pa.string(), pa.string(), pa.list_(pa.string()))
    names = ("rank", "group_id", "role", "role_evidence", "candidates")
    table = pa.table(
        {name: pa.array([d[i] for d in decided], types[i]) for i, name in enumerate(names)},
    )
    return table, [*_one_of_each_kind(conflicts), *broken]


def _by_creation(
    rows: Sequence[tuple[int | None, str, str | None, int | None, list[int] | None]],
    layout: axes.Layout | None,
    job: Job | None,
) -> tuple[dict[str, str], list[OrderConflict]]:
    """Roles by Megatron's creation order, of group names on which every order that fits agrees, and what breaks it."""
    observed = creation.observed_names(rows)
    if layout is None or job is None or layout.grid != "megatron" or not job.framework.startswith("megatron"):
        return {}, []
    if all(group.role is not None for group in observed):
        return {}, []
    release = creation.release_of(job.megatron_core_version)
    told = creation.Options(job.enable_gloo_process_groups, job.create_all_gather_group)
    others = [creation.Options(not told.gloo, told.all_gather)]
    found = creation.fits(observed, layout, release, [told]) or creation.fits(observed, layout, release, others)
    if not found:
        broken = creation.mismatch(observed, layout, release, [told, *others])
        if broken is None or broken.role is None:
            return {}, []
        return {}, [OrderConflict(str(broken.number), broken.role, broken.declared, broken.observed, broken.agreeing)]
    roles = {"0": "world"}
    for number in sorted(set().union(*(fit.roles for fit in found))):
        named = {fit.roles.get(number) for fit in found}
        role = named.pop() if len(named) == 1 else None
        if role is not None:
            roles[str(number)] = role
    return roles, []


def _sizes(layout: axes.Layout) -> dict[str, int]:
    """Group size of every role that has one by the layout."""
    return {role: layout.group_size(role) for role in axes.ROLES if role != "hybrid_cp"}


def _described_sizes(rows: Iterable[tuple[Any, ...]]) -> dict[str, int]:
    """Group sizes of the roles that descriptions name, where all groups of the role are as large."""
    found: dict[str, set[int | None]] = {}
    for _, _, description, size, ranks in rows:
        role = axes.role_of_description(description)
        if role is not None:
            found.setdefault(role, set()).add(size if ranks is None else len(ranks))
    return {role: one for role, (one, *more) in found.items() if one is not None and not more}


def alone(run: Run, job: Job | None) -> pa.Table:
    """Table lone_role: rank, op, role: operations that a rank makes on groups of one role alone, whatever names its groups.

    Where attention is not spread over ranks, only the pipeline sends messages, and only the experts exchange rows. By the
    layout, without one by the rank's own groups. Needs the tables group_role and role_size.
    """
    layout = layout_of(job)
    sizes: dict[int, dict[str, int]] = {}
    if layout is not None:
        axis = {"pp": layout.pp, "cp": layout.cp, "ep": layout.ep, "tp": layout.tp}
        sizes = {r: axis for (r,) in run.tuples("SELECT DISTINCT rank FROM rank WHERE rank < ?", [layout.world_size])}
    else:
        for rank, role, size in run.tuples(
            """SELECT p.rank, g.role, max(len(p.ranks)) FROM process_group p
               JOIN group_role g ON g.rank = p.rank AND g.group_id = p.group_id
               WHERE p.ranks IS NOT NULL AND g.role IN ('pp', 'cp', 'ep', 'tp') GROUP BY ALL"""
        ):
            sizes.setdefault(rank, {})[role] = size
    # the dispatcher alltoall_seq of older releases exchanges rows on tensor-parallel groups too
    dispatcher = None if job is None else job.moe_token_dispatcher_type
    found: list[tuple[int, str, str]] = []
    for rank, its in sorted(sizes.items()):
        if its.get("cp") != 1:
            continue
        # of two stages, the second sends single messages over the default group
        both = its.get("pp") == 2 and job is not None and not job.batch_p2p_comm
        if its.get("pp", 1) > 1 and not both:
            found += [(rank, "send", "pp"), (rank, "recv", "pp")]
        if its.get("ep", 1) > 1 and (its.get("tp") == 1 or dispatcher == "alltoall"):
            found.append((rank, "all_to_all", "ep"))
    types = (pa.int32(), pa.string(), pa.string())
    return pa.table({n: pa.array([f[i] for f in found], types[i]) for i, n in enumerate(("rank", "op", "lone_role"))})


def _conflict(
    layout: axes.Layout, sizes: Mapping[str, int], role: str, size: int | None, ranks: list[int] | None
) -> GroupConflict | None:
    """Where a group that names its role contradicts the layout, by size or by ranks."""
    observed = size if size is not None or ranks is None else len(ranks)
    if observed is not None and sizes[role] != observed:
        return GroupConflict(role, sizes[role], observed)
    if not ranks or not 0 <= min(ranks) <= max(ranks) < layout.world_size:
        return None
    declared = layout.group_of(role, min(ranks))
    return None if declared is None or declared == tuple(sorted(ranks)) else GroupConflict(role, declared, tuple(ranks))


def _one_of_each_kind(conflicts: Iterable[GroupConflict]) -> list[GroupConflict]:
    """Sizes once each, and of groups with other ranks one example a role; in the order of the roles."""
    found: dict[tuple[str, object], GroupConflict] = {}
    for c in conflicts:
        found.setdefault((c.role, c.observed if isinstance(c.observed, int) else "ranks"), c)
    order = list(axes.ROLES)
    return sorted(found.values(), key=lambda c: order.index(c.role))


_SIZE_VARIES = frozenset({"embedding", "position_embedding", "hybrid_cp", "cp_l0", "cp_l1"})
"""Roles whose group size is not one number of the layout."""


def by_pattern(unknown: Mapping[Look, int], expected: Sequence[Signature]) -> dict[Look, str]:
    """Roles of calls of unknown role whose kind fits exactly one expected kind of call, in size and in count.

    ``unknown``: look -> calls of one rank and step. What was not recorded fits anything (same_phase for the phase).
    Several kinds of one role that look alike count as one if only their sum fits. Left out are looks that fit nothing or
    two roles, and those of which several fit the same expected kind: at most one of them can be it.
    """
    fitting = {look: _as_many(look, calls, expected) for look, calls in unknown.items()}
    claims = Counter(s for kinds in fitting.values() for s in kinds)
    found: dict[Look, str] = {}
    for look, kinds in fitting.items():
        named = {s.role for s in kinds}
        if len(named) == 1 and all(claims[s] == 1 for s in kinds):
            found[look] = named.pop()
    return found


def shared_pattern(unknown: Mapping[Look, int], expected: Sequence[Signature]) -> dict[Look, tuple[Signature, ...]]:
    """Looks of which as many calls were made as all expected kinds of several roles that look so ask for together.

    Which call is on which group cannot be told, and need not be: they are alike in everything else. Left out are looks
    that compete for a kind.
    """
    fitting = {look: tuple(s for s in expected if fits(look, s)) for look in unknown}
    claims = Counter(s for kinds in fitting.values() for s in kinds)
    return {
        look: kinds
        for look, kinds in fitting.items()
        if len({s.role for s in kinds}) > 1
        and sum(s.calls for s in kinds) == unknown[look]
        and all(claims[s] == 1 for s in kinds)
    }


def _as_many(look: Look, calls: int, expected: Sequence[Signature]) -> set[Signature]:
    """The expected kinds that look so and come to as many calls, one by one or all of a role together."""
    by_role: dict[str, list[Signature]] = {}
    for s in expected:
        if fits(look, s):
            by_role.setdefault(s.role, []).append(s)
    found: set[Signature] = set()
    for kinds in by_role.values():
        single = [s for s in kinds if s.calls == calls]
        nearest = min((_PHASE_DISTANCE.get(s.phase, 0) for s in single), default=0) if look.phase == "other" else 0
        if single:
            found.update(s for s in single if look.phase != "other" or _PHASE_DISTANCE.get(s.phase, 0) == nearest)
        elif sum(s.calls for s in kinds) == calls:
            found.update(kinds)
    return found


_PHASE_DISTANCE = {"other": 0, "optimizer": 1, "forward": 2}
"""How far an expected phase is from "other": of two that fit, the nearer one is meant."""


def fits(look: Look, signature: Signature) -> bool:
    """Whether a call that looks so can be one of this kind; what was not recorded fits anything."""
    return (
        look.op == signature.op
        and look.dtype in (None, signature.dtype)
        and look.in_elems == signature.in_elems
        and look.out_elems in (None, signature.out_elems)
        and look.group_size in (None, signature.group_size)
        and (look.phase is None or same_phase(look.phase, signature.phase, signature.role))
    )


def settle(run: Run, settled: Mapping[tuple[int, int, Look], str]) -> None:
    """Gives calls the roles that patterns settled, by (rank, step, look): the view comm shows them from then on."""
    rows = [(rank, step, *look, role) for (rank, step, look), role in settled.items()]
    run.table(
        "pattern_role",
        pa.table(
            {
                name: pa.array([row[i] for row in rows], kind)
                for i, (name, kind) in enumerate(
                    {
                        "rank": pa.int32(),
                        "step": pa.int64(),
                        "op": pa.string(),
                        "dtype": pa.string(),
                        "in_elems": pa.int64(),
                        "out_elems": pa.int64(),
                        "phase": pa.string(),
                        "group_size": pa.int32(),
                        "pattern_role": pa.string(),
                    }.items()
                )
            }
        ),
    )


_OUTSIDE_FUNCTIONS = frozenset({"dp_cp", "edp", "intra_dp_cp", "intra_edp"})
"""Roles whose forward calls are made by module hooks, outside of every autograd function: parameter gathers."""


def same_phase(measured: str | None, expected: str, role: str | None = None) -> bool:
    """Whether a measured phase can be the expected one.

    What lies outside autograd and modules ("other") may be optimizer or other and, on a data-parallel role, a gather of
    parameters in the forward pass.
    """
    if measured == expected:
        return True
    return measured == "other" and (expected == "optimizer" or (expected == "forward" and role in _OUTSIDE_FUNCTIONS))


_CALLERS = """
WITH seen AS (
  SELECT p.path_role AS role, s.path_size AS declared,
         coalesce(c.group_size,
           CASE WHEN c.op = 'all_gather' AND c.in_elems > 0 AND c.out_elems % c.in_elems = 0 THEN c.out_elems // c.in_elems
                WHEN c.op = 'reduce_scatter' AND c.out_elems > 0 AND c.in_elems % c.out_elems = 0
                  THEN c.in_elems // c.out_elems END) AS observed
  FROM recorded_comm c
  JOIN path_place p ON p.call_path IS NOT DISTINCT FROM c.call_path AND p.in_dims IS NOT DISTINCT FROM c.in_dims
  JOIN role_size s ON s.role = p.path_role
  LEFT JOIN group_role g ON g.rank IS NOT DISTINCT FROM c.rank AND g.group_id = c.group_id
  WHERE g.role IS NULL AND c.completeness IS DISTINCT FROM 'kernel_only')
SELECT DISTINCT role, declared, observed FROM seen WHERE observed <> declared ORDER BY ALL
"""


def of_callers(run: Run) -> list[GroupConflict]:
    """Where functions that communicate over one role do so on groups of another size than the layout's.

    Needs the tables group_role, path_place and role_size. Groups that a description names are compared in of_groups.
    """
    return [GroupConflict(*row) for row in run.tuples(_CALLERS)]
