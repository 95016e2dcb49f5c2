"""The order in which Megatron creates its process groups: the name of each, for traces that give no descriptions.

torch names a group by a counter of the process that every ``new_group`` call advances, whether the rank is in the group
or not; the default group is "0". So the n-th call of ``initialize_model_parallel`` makes the group "n", on every rank.
Groups that the script made before shift all names by one number.

What is created differs by release; every difference is in ``creation_order``. Source: megatron/core/parallel_state.py of
the releases 0.7 to 0.19 (initialize_model_parallel, create_hierarchical_groups, create_all_gather_groups).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import NamedTuple

from traceanalyzer import axes
from traceanalyzer.errors import JobError

Release = tuple[int, int]

OLDEST: Release = (0, 7)

_SINCE_EXPERT_GRID: Release = (0, 10)  # parallel_state.py: expert_decoder_rank_generator
_SINCE_TP_CP: Release = (0, 8)  # parallel_state.py: _TENSOR_AND_CONTEXT_PARALLEL_GROUP
_SINCE_HIERARCHY: Release = (0, 13)  # create_hierarchical_groups; dp_cp before dp; the optimizer's instance group
_SINCE_LATE_GATHER: Release = (0, 18)  # create_all_gather_groups
_SINCE_REMAT: Release = (0, 19)  # get_gtp_ranks


class Created(NamedTuple):
    """One group: its name as a number, the role's description in today's spelling, its ranks, ascending.

    role: None for groups of one rank that no role of the vocabulary covers (weight rematerialisation switched off).
    """

    number: int
    description: str
    ranks: tuple[int, ...]

    @property
    def role(self) -> str | None:
        """The role in the vocabulary of axes.ROLES."""
        return axes.role_of_description(self.description)


@dataclass(frozen=True)
class Options:
    """What a job can switch that changes the order.

    gloo: a gloo twin of every data-parallel group (Megatron-LM: unless --disable-gloo-process-groups; always up to 0.11).
    all_gather: groups of their own for the gathers of parameters (--create-all-gather-group, since 0.16).
    """

    gloo: bool = True
    all_gather: bool = False


def release_of(text: str | None) -> Release | None:
    """Major and minor number of a version text ("0.16.1", "core_v0.12.0rc3"); None if it has none."""
    found = re.search(r"(\d+)\.(\d+)", text or "")
    return (int(found[1]), int(found[2])) if found else None


def creation_order(layout: axes.Layout, release: Release, options: Options | None = None) -> list[Created]:
    """Every group that ``initialize_model_parallel`` creates, in order, numbered from 1.

    Raises JobError for a release or a layout that is not modelled: before 0.7, a product grid, degrees that the release
    cannot have.
    """
    options = Options() if options is None else options
    if release < OLDEST:
        raise JobError(
            f"the creation order of megatron-core {release[0]}.{release[1]} is not known, only 0.7 and later"
        )
    if layout.grid != "megatron":
        raise JobError("the creation order of a product grid is not known")
    if release < _SINCE_EXPERT_GRID and layout.expert_tensor_size != layout.tp:
        raise JobError(
            "expert_tensor_parallel_size differs from tensor_model_parallel_size: megatron-core 0.10 and later"
        )
    numbers = count(1)
    return [Created(next(numbers), text, ranks) for text, ranks in _calls(layout, release, options)]


_Calls = Iterator[tuple[str, tuple[int, ...]]]


def _calls(layout: axes.Layout, release: Release, options: Options) -> _Calls:
    """Description and ranks of every call, in order."""
    gloo = options.gloo or release < (0, 12)
    if release >= _SINCE_REMAT:
        yield from _each(_singles(layout), "GTP_WEIGHT_REMAT_GROUP")
    if release < _SINCE_HIERARCHY:
        yield from _twins(layout.groups("dp"), "DATA_PARALLEL_GROUP", gloo)
    yield from _dense_data(layout, release, options, gloo)
    if layout.hybrid_context_parallel:
        for group in layout.groups("hybrid_cp"):
            yield f"HYBRID_DP_CP_GROUP_{len(group)}", group
    if release >= _SINCE_HIERARCHY:
        yield from _twins(layout.groups("dp"), "DATA_PARALLEL_GROUP", gloo)
    yield from _context(layout)
    yield from _each(layout.groups("mp"), "MODEL_PARALLEL_GROUP")
    if (0, 8) <= release < _SINCE_EXPERT_GRID:
        yield from _each(_folded(layout).groups("tp_ep_pp"), "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
    yield from _each(layout.groups("tp"), "TENSOR_MODEL_PARALLEL_GROUP")
    pipelines = zip(layout.groups("pp"), layout.groups("embedding"), layout.groups("position_embedding"), strict=True)
    for pipeline, embedding, position in pipelines:
        yield "PIPELINE_MODEL_PARALLEL_GROUP", pipeline
        yield "EMBEDDING_GROUP", embedding
        yield "POSITION_EMBEDDING_GROUP", position
    yield from _each(layout.groups("tp_dp_cp"), "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
    yield from _each(layout.groups("tp_dp"), "TENSOR_AND_DATA_PARALLEL_GROUP")
    if release >= _SINCE_TP_CP:
        yield from _each(layout.groups("tp_cp"), "TENSOR_AND_CONTEXT_PARALLEL_GROUP")
    if release < _SINCE_EXPERT_GRID:
        yield from _experts_inside_data(layout, release)
    else:
        yield from _experts(layout, release, gloo)
    if options.all_gather and release >= _SINCE_LATE_GATHER:
        # create_all_gather_groups has Megatron's default order written into it
        usual = replace(layout, order=axes.DEFAULT_ORDER)
        yield from _each(usual.groups("dp_cp"), "DATA_PARALLEL_GROUP_WITH_CP_AG")
        if layout.ep > 1:
            yield from _each(usual.groups("edp"), "EXPERT_DATA_PARALLEL_GROUP_AG")


def _each(groups: axes.Groups, description: str) -> _Calls:
    for group in groups:
        yield description, group


def _twins(groups: axes.Groups, description: str, gloo: bool) -> _Calls:
    for group in groups:
        yield description, group
        if gloo:
            yield f"{description}_GLOO", group


def _singles(layout: axes.Layout) -> axes.Groups:
    return tuple((rank,) for rank in layout.groups("world")[0])


def _dense_data(layout: axes.Layout, release: Release, options: Options, gloo: bool) -> _Calls:
    """dp_cp, its twins and, inside each, the slices of the distributed optimizer's instances."""
    instances = layout.num_distributed_optimizer_instances
    text = "DATA_PARALLEL_GROUP_WITH_CP"
    for group in layout.groups("dp_cp"):
        yield text, group
        if options.all_gather and (0, 16) <= release < _SINCE_LATE_GATHER:
            yield f"{text}_AG", group
        if gloo:
            yield f"{text}_GLOO", group
        if instances > 1:
            # 0.10 divides DP, not DP x CP
            size = (layout.dp if release < (0, 11) else len(group)) // instances
            slices = tuple(group[start : start + size] for start in range(0, instances * size, size))
            yield from _twins(slices, f"INTRA_PARTIAL_{text}", gloo)
            if release < _SINCE_HIERARCHY:
                yield from _each(tuple(group[lane::size] for lane in range(size)), f"INTER_PARTIAL_{text}")


def _context(layout: axes.Layout) -> _Calls:
    """cp and, inside each group, the levels of its hierarchy."""
    levels = range(len(layout.hierarchical_context_parallel_sizes))
    inside = {level: layout.groups(f"cp_l{level}") for level in levels}
    for group in layout.groups("cp"):
        yield "CONTEXT_PARALLEL_GROUP", group
        for level, parts in inside.items():
            ours = tuple(part for part in parts if part[0] in group)
            yield from _each(ours, f"HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L{level}")


def _experts(layout: axes.Layout, release: Release, gloo: bool) -> _Calls:
    """The expert grid's groups."""
    if release >= _SINCE_REMAT:
        yield from _each(_singles(layout), "EXPERT_GTP_WEIGHT_REMAT_GROUP")
    yield from _each(layout.groups("ep"), "EXPERT_MODEL_PARALLEL_GROUP")
    yield from _each(layout.groups("etp"), "EXPERT_TENSOR_PARALLEL_GROUP")
    yield from _each(layout.groups("tp_ep"), "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    yield from _each(layout.groups("tp_ep_pp"), "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP")
    if release >= _SINCE_REMAT:
        yield from _each(layout.groups("tp_ep_pp"), "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP")
    instances = layout.num_distributed_optimizer_instances
    for group in layout.groups("edp"):
        yield from _twins((group,), "EXPERT_DATA_PARALLEL_GROUP", gloo)
        if instances > 1 and release >= _SINCE_HIERARCHY:
            for level, role in enumerate(("intra_edp", "inter_dist_opt")):
                for part in (part for part in layout.groups(role) if part[0] in group):
                    yield f"HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L{level}", part
                    if gloo:
                        yield f"HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L{level}", part
    if release >= _SINCE_HIERARCHY:
        yield from _each(layout.groups("dist_opt"), "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP")


def _folded(layout: axes.Layout) -> axes.Layout:
    """Up to 0.9 the experts divide the data axis: one grid of five axes, TP x CP x EP x (DP / EP) x PP."""
    if layout.dp % layout.ep:
        raise JobError(f"up to megatron-core 0.9 EP divides DP, but DP = {layout.dp} and EP = {layout.ep}")
    return axes.Layout(
        layout.world_size, layout.tp, layout.cp, layout.pp, layout.ep, order=layout.order, grid="product"
    )


def _experts_inside_data(layout: axes.Layout, release: Release) -> _Calls:
    """The experts' groups up to 0.9."""
    folded = _folded(layout)
    yield from _each(folded.groups("tp_ep"), "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
    yield from _each(folded.groups("ep"), "EXPERT_MODEL_PARALLEL_GROUP")
    yield from _twins(folded.groups("dp"), "EXPERT_DATA_PARALLEL_GROUP", gloo=True)
    if release >= (0, 8) and layout.cp > 1:
        yield from _twins(folded.groups("edp"), "EXPERT_DATA_PARALLEL_GROUP", gloo=True)


# -- names that were observed against the order ------------------------------------------------------------------------


class Observed(NamedTuple):
    """One group as a rank knows it: its name as a number. rank, ranks, size, role: None where not known."""

    rank: int | None
    number: int
    ranks: tuple[int, ...] | None
    size: int | None
    role: str | None


def observed_names(
    rows: Iterable[tuple[int | None, str | None, str | None, int | None, Sequence[int] | None]],
) -> list[Observed]:
    """The groups whose names are numbers, the default group aside, from (rank, name, description, size, ranks) of each."""
    return [
        Observed(
            rank,
            int(name),
            None if ranks is None else tuple(ranks),
            size if size is not None or ranks is None else len(ranks),
            axes.role_of_description(description),
        )
        for rank, name, description, size, ranks in rows
        if name is not None and name.isdecimal() and int(name) > 0
    ]


@dataclass(frozen=True)
class Fit:
    """One way in which the observed names follow the order of a release.

    shift: groups that were made before Megatron's. roles: number -> role, for the numbers that were observed and lie in
    Megatron's range. explained: observed groups in that range, without the default group.
    """

    release: Release
    options: Options
    shift: int
    roles: dict[int, str | None]
    explained: int


class Mismatch(NamedTuple):
    """The first observed group that does not follow the order which fits the others best."""

    number: int
    role: str | None
    declared: tuple[int, ...]
    observed: tuple[int, ...] | int
    agreeing: int


_CHANGES: tuple[Release, ...] = ((0, 7), (0, 8), (0, 10), (0, 11), (0, 12), (0, 13), (0, 16), (0, 18), (0, 19))
"""Releases whose order differs from the one before, for some options."""


def fits(
    observed: Sequence[Observed],
    layout: axes.Layout,
    release: Release | None,
    options: Iterable[Options],
    *,
    shifts: bool = True,
) -> list[Fit]:
    """Every way in which all observed groups follow the order, those that explain most groups; [] if there is none.

    ``release`` None: all are tried. A shift other than 0 is taken only if no order fits without one, and only if two
    groups or more of known ranks agree on it.
    """
    orders = list(_orders(layout, release, options))
    unshifted = _best(fit for r, o, order in orders if (fit := _fit(observed, r, o, order, 0)) is not None)
    if unshifted or not shifts:
        return unshifted
    found: list[Fit] = []
    for r, o, order in orders:
        for shift in sorted(_shifts(observed, order)):
            fit = _fit(observed, r, o, order, shift)
            known = {g.number for g in observed if g.ranks is not None and len(g.ranks) > 1}
            if fit is not None and len(known & set(fit.roles)) > 1:
                found.append(fit)
    return _best(found)


def mismatch(
    observed: Sequence[Observed], layout: axes.Layout, release: Release | None, options: Iterable[Options]
) -> Mismatch | None:
    """What keeps the names from following the order: by the order that fits most groups; None if no group fits any."""
    best: Mismatch | None = None
    for _, _, order in _orders(layout, release, options):
        by_number = {c.number: c for c in order}
        inside = [g for g in observed if g.number in by_number]
        agreeing = [g for g in inside if _agrees(g, by_number[g.number])]
        if not agreeing or len(agreeing) == len(inside) or (best is not None and len(agreeing) <= best.agreeing):
            continue
        first = next(g for g in inside if not _agrees(g, by_number[g.number]))
        expected = by_number[first.number]
        seen: tuple[int, ...] | int = first.ranks if first.ranks is not None else first.size or 0
        best = Mismatch(first.number, expected.role, expected.ranks, seen, len(agreeing))
    return best


def _orders(
    layout: axes.Layout, release: Release | None, options: Iterable[Options]
) -> Iterator[tuple[Release, Options, list[Created]]]:
    """The distinct orders of the releases that come into question."""
    seen: set[tuple[Created, ...]] = set()
    for one in options:
        for candidate in reversed(_CHANGES) if release is None else (release,):
            try:
                order = creation_order(layout, candidate, one)
            except JobError:
                continue
            key = tuple(order)
            if key not in seen:
                seen.add(key)
                yield candidate, one, order


def _agrees(group: Observed, created: Created) -> bool:
    """Whether an observed group can be this one: by ranks or size, its member, and the role it names itself."""
    if group.role is not None and group.role != created.role:
        return False
    if group.ranks is not None and tuple(sorted(group.ranks)) != created.ranks:
        return False
    if group.size is not None and group.size != len(created.ranks):
        return False
    return group.rank is None or group.rank in created.ranks


def _fit(
    observed: Sequence[Observed], release: Release, options: Options, order: Sequence[Created], shift: int
) -> Fit | None:
    found: dict[int, str | None] = {}
    explained = 0
    for group in observed:
        place = group.number - shift - 1
        if not 0 <= place < len(order):
            continue
        if not _agrees(group, order[place]):
            return None
        explained += 1
        found[group.number] = order[place].role
    return Fit(release, options, shift, found, explained) if explained else None


def _shifts(observed: Sequence[Observed], order: Sequence[Created]) -> set[int]:
    """Shifts at which the observed group of known ranks that is rarest in the order would agree."""
    by_ranks: dict[tuple[int, ...], list[int]] = {}
    for created in order:
        by_ranks.setdefault(created.ranks, []).append(created.number)
    found: set[int] = set()
    for group in observed:
        if group.ranks is not None:
            found |= {
                group.number - number
                for number in by_ranks.get(tuple(sorted(group.ranks)), ())
                if group.number > number
            }
    return found


def _best(found: Iterable[Fit]) -> list[Fit]:
    """Those that explain most; of those the smallest shift first."""
    all_of_them = list(found)
    most = max((fit.explained for fit in all_of_them), default=0)
    return sorted((fit for fit in all_of_them if fit.explained == most), key=lambda fit: fit.shift)
