"""Degrees and order of a job's parallel axes -> coordinates and groups of ranks. The ONLY rank arithmetic.

A rank is a mixed-radix number whose digits are the axes, the first token of ``order`` fastest. Megatron builds two such
grids from one order string, and the expert one is folded over the same ranks, not multiplied in:

=======  ============================  ==========================
grid     world_size =                  digits
=======  ============================  ==========================
dense    TP x CP x PP x DP             ``tp``, ``cp``, ``pp``, ``dp``
expert   ETP x EP x PP x EDP           ``tp`` (ETP), ``ep``, ``pp``, ``dp`` (EDP)
=======  ============================  ==========================

Source: megatron-core 0.16.1, megatron/core/parallel_state.py (RankGenerator, initialize_model_parallel).
``grid="product"`` is the seed document's own layout instead: one grid of five digits, world_size = TP x CP x PP x EP x
DP.

Groups are *read from a run*; a Layout names them and says what they should be.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from traceanalyzer.errors import JobError

DEFAULT_ORDER = "tp-cp-ep-dp-pp"
"""Megatron's order; ``--use-tp-pp-dp-mapping`` changes it to PP_BEFORE_DP_ORDER (training/initialize.py)."""

PP_BEFORE_DP_ORDER = "tp-cp-ep-pp-dp"

DOCUMENT_ORDER = "tp-pp-cp-ep-dp"
"""The seed document's order, for ``grid="product"``: rank = f(dp, ep, cp, pp, tp) with tp fastest."""


class Axis(StrEnum):
    """The axes people speak of, and the expert grid's own tensor and data axes."""

    TP = "TP"
    CP = "CP"
    EP = "EP"
    PP = "PP"
    DP = "DP"
    ETP = "ETP"
    EDP = "EDP"


OTHER = "other"
"""What a role rolls up to that belongs to no single axis."""


@dataclass(frozen=True)
class Role:
    """One entry of the role vocabulary.

    descriptions: Megatron's ``group_desc`` strings for the role, all releases, gloo and all-gather twins included; a
    trailing ``*`` stands for a number. axis: what the role rolls up to, an Axis or OTHER. doc: its ranks, and what it
    carries.
    """

    descriptions: tuple[str, ...]
    axis: str
    doc: str


ROLES: dict[str, Role] = {
    "tp": Role(("TENSOR_MODEL_PARALLEL_GROUP",), Axis.TP, "tensor and sequence parallel traffic"),
    "cp": Role(("CONTEXT_PARALLEL_GROUP",), Axis.CP, "attention's keys and values"),
    "pp": Role(("PIPELINE_MODEL_PARALLEL_GROUP",), Axis.PP, "activations and their gradients between stages"),
    "ep": Role(("EXPERT_MODEL_PARALLEL_GROUP",), Axis.EP, "tokens to experts and back"),
    "etp": Role(("EXPERT_TENSOR_PARALLEL_GROUP",), Axis.TP, "gather and reduce-scatter of tokens when ETP > 1"),
    "tp_ep": Role(
        ("EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP",),
        Axis.EP,
        "ETP x EP: token counts; everything of the allgather and flex dispatchers",
    ),
    "dp_cp": Role(
        (
            "DATA_PARALLEL_GROUP_WITH_CP",
            "DATA_PARALLEL_GROUP_WITH_CP_AG",
            "DATA_PARALLEL_GROUP_WITH_CP_GLOO",
            "DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT",
        ),
        Axis.DP,
        "all replicas of a dense weight: dense gradients and parameters",
    ),
    "edp": Role(
        (
            "EXPERT_DATA_PARALLEL_GROUP",
            "EXPERT_DATA_PARALLEL_GROUP_AG",
            "EXPERT_DATA_PARALLEL_GROUP_GLOO",
            "EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT",
        ),
        Axis.DP,
        "all replicas of an expert weight: expert gradients and parameters",
    ),
    "dp": Role(
        ("DATA_PARALLEL_GROUP", "DATA_PARALLEL_GROUP_GLOO", "DATA_PARALLEL_GROUP_WITH_GTP_REMAT"),
        Axis.DP,
        "metric averages; never gradients",
    ),
    "intra_dp_cp": Role(
        ("INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO"),
        Axis.DP,
        "the slice of dp_cp inside one distributed-optimizer instance: then carries what dp_cp carried",
    ),
    "intra_edp": Role(
        ("HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0", "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0"),
        Axis.DP,
        "the slice of edp inside one distributed-optimizer instance",
    ),
    "inter_dist_opt": Role(
        (
            "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1",
            "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1",
            "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
            "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO",
        ),
        Axis.DP,
        "across distributed-optimizer instances, dense and expert gradients alike (ranks as since 0.13)",
    ),
    "cp_l0": Role(("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0",), Axis.CP, "all-to-all part of a2a+p2p"),
    "cp_l1": Role(("HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1",), Axis.CP, "ring part of a2a+p2p"),
    "hybrid_cp": Role(("HYBRID_DP_CP_GROUP_*",), Axis.CP, "powers of two inside dp_cp: attention of variable CP size"),
    "embedding": Role(("EMBEDDING_GROUP",), OTHER, "stages that hold the word embedding: gradients of tied embeddings"),
    "position_embedding": Role(("POSITION_EMBEDDING_GROUP",), OTHER, "first stage only: nothing for GPT"),
    "mp": Role(("MODEL_PARALLEL_GROUP",), OTHER, "TP x PP: scalars of the step"),
    "tp_cp": Role(("TENSOR_AND_CONTEXT_PARALLEL_GROUP",), OTHER, "token counts of the router's auxiliary loss"),
    "tp_dp_cp": Role(
        ("TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP",), OTHER, "FP8 amax, global auxiliary loss, expert bias"
    ),
    "tp_dp": Role(("TENSOR_AND_DATA_PARALLEL_GROUP",), OTHER, "FP8 amax without context parallelism"),
    "tp_ep_pp": Role(
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP", "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP"),
        OTHER,
        "ETP x EP x PP: expert gradient norm",
    ),
    "dist_opt": Role(
        ("INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP",),
        OTHER,
        "all ranks of one distributed-optimizer instance: gradient norm, found_inf",
    ),
    "world": Role(("default_pg",), OTHER, "every rank: barriers, timers, rerun state"),
}
"""Every role, in the order in which roles_with_ranks prefers them: what carries most traffic first."""

_ROLE_OF_DESCRIPTION: dict[str, str] = {
    text: name for name, role in ROLES.items() for text in role.descriptions if not text.endswith("_*")
}
_ROLE_OF_NUMBERED: dict[str, str] = {
    text.removesuffix("_*"): name for name, role in ROLES.items() for text in role.descriptions if text.endswith("_*")
}

# Digits of each plain role: which grid, and the axes inside the group.
_DENSE_TOKENS: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "pp": ("pp",),
    "dp": ("dp",),
    "dp_cp": ("dp", "cp"),
    "mp": ("tp", "pp"),
    "tp_cp": ("tp", "cp"),
    "tp_dp": ("tp", "dp"),
    "tp_dp_cp": ("tp", "dp", "cp"),
}
_EXPERT_TOKENS: dict[str, tuple[str, ...]] = {
    "ep": ("ep",),
    "etp": ("tp",),
    "tp_ep": ("tp", "ep"),
    "tp_ep_pp": ("tp", "ep", "pp"),
    "edp": ("dp",),
}

Groups = tuple[tuple[int, ...], ...]


def role_of_description(description: str | None) -> str | None:
    """The role that Megatron's ``group_desc`` names, or None for any other text ("undefined" included) and for None."""
    if description is None:
        return None
    head, _, number = description.rpartition("_")
    if number.isdigit():
        return _ROLE_OF_NUMBERED.get(head)
    return _ROLE_OF_DESCRIPTION.get(description)


def rollup(role: str | None) -> str:
    """What a role is added to in every summary: TP, CP, EP, PP, DP, or "other" (also for an unknown role and None)."""
    return ROLES[role].axis if role in ROLES else OTHER


def within_stage(role: str) -> bool:
    """Whether the ranks of each group of this role are of one pipeline stage, and so do the same work."""
    if role in _DENSE_TOKENS:
        return "pp" not in _DENSE_TOKENS[role]
    return rollup(role) in (Axis.TP, Axis.CP, Axis.EP, Axis.DP)


class Coordinates(NamedTuple):
    """Where a rank sits, 0-based: tp, cp, dp on the dense grid, ep, etp, edp on the expert grid, pp on both."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int
    etp: int
    edp: int


class _Grid:
    """Mixed-radix numbering: ``sizes`` maps axis to size, first axis fastest."""

    def __init__(self, sizes: dict[str, int]) -> None:
        self.sizes = sizes
        self.strides: dict[str, int] = {}
        stride = 1
        for token, size in sizes.items():
            self.strides[token] = stride
            stride *= size

    def digit(self, rank: int, token: str) -> int:
        return rank // self.strides[token] % self.sizes[token]

    def offsets(self, tokens: Iterable[str]) -> list[int]:
        """Ranks that differ from rank 0 on these axes only, ascending."""
        wanted = set(tokens)
        ranks = [0]
        for token, size in self.sizes.items():
            if token in wanted:
                stride = self.strides[token]
                ranks = [base + step * stride for step in range(size) for base in ranks]
        return ranks

    def groups(self, tokens: Iterable[str]) -> Groups:
        wanted = set(tokens)
        inside = self.offsets(wanted)
        return tuple(
            tuple(base + step for step in inside) for base in self.offsets(t for t in self.sizes if t not in wanted)
        )


def _equation(product: int, factors: dict[str, int]) -> str:
    return f"{product} = " + " x ".join(f"{name} {size}" for name, size in factors.items())


def _ratio(dividend: int, divisor: int) -> str:
    return f"{dividend} / {divisor} = {dividend / divisor:.6g}"


@dataclass(frozen=True)
class Layout:
    """Degrees and order of a job's axes; gives coordinates and groups.

    world_size: ranks. tp, cp, ep, pp: degrees. etp: expert tensor degree, None means tp, as in Megatron. order: axis
    names joined by "-", first fastest; an axis of size 1 may be left out. vpp: model chunks per rank, None without
    interleaving; no rank depends on it. num_distributed_optimizer_instances: slices of dp_cp and edp.
    embedding_ranks: which stages form the embedding group: "tied" first and last, "untied" the first
    (Megatron's get_embedding_ranks), or the stages themselves, e.g. (0, 2, 3) with a stage for multi-token prediction.
    hierarchical_context_parallel_sizes: the two factors of cp for a2a+p2p. hybrid_context_parallel: groups of powers of
    two in dp_cp.

    grid: "megatron", or "product" for one grid of five axes. In that one dp_cp are all replicas of a dense weight
    (DP x EP x CP, since expert-parallel ranks hold different tokens), edp all replicas of an expert (DP x CP, x TP if
    etp is 1), dp only the DP axis.

    Raises JobError, with the whole equation and its numbers, for sizes that do not fit.
    """

    world_size: int
    tp: int = 1
    cp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    vpp: int | None = None
    num_distributed_optimizer_instances: int = 1
    embedding_ranks: Literal["tied", "untied"] | tuple[int, ...] = "tied"
    hierarchical_context_parallel_sizes: tuple[int, ...] = ()
    hybrid_context_parallel: bool = False
    grid: Literal["megatron", "product"] = "megatron"

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        object.__setattr__(self, "order", self.order.lower())
        for name in ("world_size", "tp", "cp", "pp", "ep", "etp", "num_distributed_optimizer_instances"):
            if getattr(self, name) < 1:
                raise JobError(f"{name}={getattr(self, name)}: a size is at least 1")
        self._check_order()
        if self.grid == "product":
            self._check_product()
        else:
            self._check_megatron()
        self._check_extras()

    def _check_order(self) -> None:
        tokens = self.order.split("-")
        for token in tokens:
            if token not in ("tp", "cp", "ep", "dp", "pp") or tokens.count(token) > 1:
                raise JobError(f"order={self.order!r}: tp, cp, ep, dp and pp, each at most once, joined by '-'")

    def _check_megatron(self) -> None:
        model = self.tp * self.cp * self.pp
        if self.world_size % model:
            raise JobError(
                f"world_size {self.world_size} is no multiple of TP {self.tp} x CP {self.cp} x PP {self.pp} = {model} "
                f"({_ratio(self.world_size, model)}): DP would not be whole"
            )
        expert = self.expert_tensor_size * self.ep * self.pp
        if self.world_size % expert:
            raise JobError(
                f"world_size {self.world_size} is no multiple of ETP {self.expert_tensor_size} x EP {self.ep} x "
                f"PP {self.pp} = {expert} ({_ratio(self.world_size, expert)}): EDP would not be whole; "
                f"ETP is expert_tensor_parallel_size and defaults to TP"
            )
        for token, size in {"tp": max(self.tp, self.expert_tensor_size), "cp": self.cp, "ep": self.ep}.items():
            self._check_named(token, size)
        self._check_named("dp", max(self.dp, self.edp))
        self._check_named("pp", self.pp)
        if self.pp > 1 and not self.order.endswith("pp") and self.dp != self.edp:
            raise JobError(
                f"order={self.order!r} does not end with pp, then EDP must equal DP, but world_size "
                f"{self.equation} and {self.expert_equation}"
            )
        dense, expert_stride = self._dense.strides["pp"], self._expert.strides["pp"]
        if self.pp > 1 and dense != expert_stride:
            raise JobError(
                f"order={self.order!r}: pipeline groups have stride {dense} among dense and {expert_stride} among "
                f"expert axes; world_size {self.equation} and {self.expert_equation}"
            )
        for name, size in (("DP x CP", self.dp * self.cp), ("EDP", self.edp)):
            if size % self.num_distributed_optimizer_instances:
                raise JobError(
                    f"num_distributed_optimizer_instances={self.num_distributed_optimizer_instances} does not divide "
                    f"{name} = {size} ({_ratio(size, self.num_distributed_optimizer_instances)})"
                )

    def _check_product(self) -> None:
        factors = {"TP": self.tp, "CP": self.cp, "PP": self.pp, "EP": self.ep}
        model = prod(factors.values())
        if self.world_size % model:
            raise JobError(
                f"world_size {self.world_size} is no multiple of TP {self.tp} x CP {self.cp} x PP {self.pp} x "
                f"EP {self.ep} = {model} ({_ratio(self.world_size, model)}): DP would not be whole"
            )
        for token, size in {"tp": self.tp, "cp": self.cp, "ep": self.ep, "pp": self.pp, "dp": self.dp}.items():
            self._check_named(token, size)
        if self.expert_tensor_size not in (1, self.tp):
            raise JobError(f"etp={self.etp}: in a product grid it is 1 or TP = {self.tp}")
        if self.num_distributed_optimizer_instances > 1:
            raise JobError("num_distributed_optimizer_instances > 1 is not defined for a product grid")

    def _check_named(self, token: str, size: int) -> None:
        if size > 1 and token not in self.order.split("-"):
            raise JobError(f"order={self.order!r} does not place {token}, whose size is {size}")

    def _check_extras(self) -> None:
        if self.vpp is not None and (self.vpp < 1 or (self.vpp > 1 and self.pp == 1)):
            raise JobError(f"vpp={self.vpp} with PP {self.pp}: interleaving needs at least 1 chunk and PP > 1")
        sizes = self.hierarchical_context_parallel_sizes
        if sizes and prod(sizes) != self.cp:
            raise JobError(
                f"hierarchical_context_parallel_sizes {' x '.join(map(str, sizes))} = {prod(sizes)} is not CP {self.cp}"
            )
        if self.hybrid_context_parallel and self.group_size("dp_cp") % 2:
            raise JobError(f"hybrid_context_parallel needs an even DP x CP, not {self.group_size('dp_cp')}")
        if not isinstance(self.embedding_ranks, str):
            if not self.embedding_ranks or not all(0 <= stage < self.pp for stage in self.embedding_ranks):
                raise JobError(f"embedding_ranks={self.embedding_ranks}: stages between 0 and {self.pp - 1}")
        elif self.embedding_ranks not in ("tied", "untied"):
            raise JobError(f"embedding_ranks={self.embedding_ranks!r}: 'tied', 'untied' or a tuple of stages")

    # -- sizes -------------------------------------------------------------------------------------------------------

    @property
    def expert_tensor_size(self) -> int:
        """ETP, resolved: TP where it was not given."""
        return self.tp if self.etp is None else self.etp

    @property
    def dp(self) -> int:
        """Data-parallel size; in Megatron's grid the expert axis is inside it (and inside CP), not beside it."""
        model = self.tp * self.cp * self.pp
        return self.world_size // (model * self.ep if self.grid == "product" else model)

    @property
    def edp(self) -> int:
        """Replicas of an expert weight."""
        if self.grid == "product":
            return self.dp * self.cp * (self.tp // self.expert_tensor_size)
        return self.world_size // (self.expert_tensor_size * self.ep * self.pp)

    @property
    def equation(self) -> str:
        """The world size as a product of the dense axes, e.g. "1024 = TP 4 x CP 2 x PP 4 x DP 32"."""
        factors = {"TP": self.tp, "CP": self.cp, "PP": self.pp}
        if self.grid == "product":
            factors["EP"] = self.ep
        return _equation(self.world_size, {**factors, "DP": self.dp})

    @property
    def expert_equation(self) -> str:
        """The world size as a product of the expert axes, e.g. "1024 = ETP 4 x EP 8 x PP 4 x EDP 8"."""
        factors = {"ETP": self.expert_tensor_size, "EP": self.ep, "PP": self.pp, "EDP": self.edp}
        return _equation(self.world_size, factors)

    def degree(self, axis: Axis) -> int:
        """Size of one axis."""
        if axis is Axis.ETP:
            return self.expert_tensor_size
        return int(getattr(self, axis.lower()))

    # -- ranks -------------------------------------------------------------------------------------------------------

    @cached_property
    def _tokens(self) -> tuple[str, ...]:
        given = self.order.split("-")
        return (*given, *(token for token in ("tp", "pp", "dp", "ep", "cp") if token not in given))

    @cached_property
    def _dense(self) -> _Grid:
        ep = self.ep if self.grid == "product" else 1
        sizes = {"tp": self.tp, "cp": self.cp, "ep": ep, "dp": self.dp, "pp": self.pp}
        return _Grid({token: sizes[token] for token in self._tokens})

    @cached_property
    def _expert(self) -> _Grid:
        if self.grid == "product":
            return self._dense
        sizes = {"tp": self.expert_tensor_size, "cp": 1, "ep": self.ep, "dp": self.edp, "pp": self.pp}
        return _Grid({token: sizes[token] for token in self._tokens})

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise JobError(f"rank {rank} is outside the world of {self.world_size}")

    def coordinates(self, rank: int) -> Coordinates:
        """Where ``rank`` sits. Raises JobError for a rank outside the world."""
        self._check_rank(rank)
        dense, expert = self._dense, self._expert
        if self.grid == "product":
            etp = dense.digit(rank, "tp") if self.expert_tensor_size > 1 else 0
            edp = self._members("edp")[rank].index(rank)
        else:
            etp, edp = expert.digit(rank, "tp"), expert.digit(rank, "dp")
        return Coordinates(
            tp=dense.digit(rank, "tp"),
            cp=dense.digit(rank, "cp"),
            dp=dense.digit(rank, "dp"),
            pp=dense.digit(rank, "pp"),
            ep=expert.digit(rank, "ep"),
            etp=etp,
            edp=edp,
        )

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0, ep: int | None = None) -> int:
        """The rank with these dense coordinates; ``ep`` is one of them in a product grid only (default 0).

        Raises JobError for a coordinate outside its axis.
        """
        if ep is not None and self.grid != "product":
            raise JobError("ep is no dense coordinate in Megatron's layout; use expert_rank_of")
        return self._rank(self._dense, {"tp": tp, "cp": cp, "dp": dp, "pp": pp, "ep": ep or 0})

    def expert_rank_of(self, *, etp: int = 0, ep: int = 0, edp: int = 0, pp: int = 0) -> int:
        """The rank with these coordinates in Megatron's expert grid. Raises JobError for one outside its axis."""
        if self.grid == "product":
            raise JobError("a product grid has no expert grid; use rank_of")
        return self._rank(self._expert, {"tp": etp, "ep": ep, "dp": edp, "pp": pp})

    @staticmethod
    def _rank(grid: _Grid, digits: dict[str, int]) -> int:
        for token, digit in digits.items():
            if not 0 <= digit < grid.sizes[token]:
                raise JobError(f"coordinate {token}={digit} is outside its axis of {grid.sizes[token]}")
        return sum(digit * grid.strides[token] for token, digit in digits.items())

    def stage(self, rank: int) -> int:
        """Pipeline stage of ``rank``, 0-based."""
        self._check_rank(rank)
        return self._dense.digit(rank, "pp")

    # -- groups ------------------------------------------------------------------------------------------------------

    @cached_property
    def _groups(self) -> dict[str, Groups]:
        return {}

    @cached_property
    def _member_index(self) -> dict[str, dict[int, tuple[int, ...]]]:
        return {}

    def groups(self, role: str) -> Groups:
        """Every group of ``role``, in the order Megatron creates them, each ascending (torch sorts the ranks it gets).

        Empty where the layout makes no such groups: cp_l0 and cp_l1 without hierarchical sizes, hybrid_cp without the
        flag, intra_dp_cp, intra_edp and inter_dist_opt with one optimizer instance. An unknown role is a JobError.
        """
        if role not in ROLES:
            raise JobError(f"unknown role {role!r}; known: {', '.join(ROLES)}")
        if role not in self._groups:
            self._groups[role] = self._build(role)
        return self._groups[role]

    def group_of(self, role: str, rank: int) -> tuple[int, ...] | None:
        """The group of ``role`` that holds ``rank``; None if none does (a middle stage has no embedding group).

        Raises JobError for hybrid_cp, where a rank is in a group of every size.
        """
        self._check_rank(rank)
        if role == "hybrid_cp":
            raise JobError("a rank is in several hybrid_cp groups, one of each size; use groups('hybrid_cp')")
        if role in self._plain_tokens and role not in self._groups:
            grid, tokens = self._plain_tokens[role]
            base = rank - sum(grid.digit(rank, token) * grid.strides[token] for token in set(tokens))
            return tuple(base + step for step in grid.offsets(tokens))
        return self._members(role).get(rank)

    def group_size(self, role: str) -> int:
        """Ranks in a group of ``role``; 0 where the layout makes none. Raises JobError for hybrid_cp: several sizes."""
        if role == "hybrid_cp":
            raise JobError("hybrid_cp groups have several sizes; use groups('hybrid_cp')")
        if role in self._plain_tokens:
            grid, tokens = self._plain_tokens[role]
            return prod(grid.sizes[token] for token in tokens)
        groups = self.groups(role)
        return len(groups[0]) if groups else 0

    def roles_with_ranks(self, ranks: Iterable[int]) -> tuple[str, ...]:
        """Every role that has a group of exactly these ranks, in the order of ROLES.

        Often more than one: rank sets are not unique keys. Empty if no role fits.
        """
        wanted = tuple(sorted(ranks))
        if not wanted or not 0 <= wanted[0] <= wanted[-1] < self.world_size:
            return ()
        return tuple(
            role
            for role in ROLES
            if (wanted in self.groups(role) if role == "hybrid_cp" else self._members(role).get(wanted[0]) == wanted)
        )

    def _members(self, role: str) -> dict[int, tuple[int, ...]]:
        if role not in self._member_index:
            self._member_index[role] = {rank: group for group in self.groups(role) for rank in group}
        return self._member_index[role]

    @cached_property
    def _plain_tokens(self) -> dict[str, tuple[_Grid, tuple[str, ...]]]:
        """Roles that are whole axes of one grid."""
        if self.grid == "product":
            etp = ("tp",) if self.expert_tensor_size > 1 else ()
            rest = () if etp else ("tp",)
            tokens = _DENSE_TOKENS | {
                "dp_cp": ("dp", "ep", "cp"),
                "tp_dp_cp": ("tp", "dp", "ep", "cp"),
                "ep": ("ep",),
                "etp": etp,
                "tp_ep": (*etp, "ep"),
                "tp_ep_pp": (*etp, "ep", "pp"),
                "edp": ("dp", "cp", *rest),
            }
            return {role: (self._dense, axes) for role, axes in tokens.items()}
        return {role: (self._dense, axes) for role, axes in _DENSE_TOKENS.items()} | {
            role: (self._expert, axes) for role, axes in _EXPERT_TOKENS.items()
        }

    def _build(self, role: str) -> Groups:
        if role in self._plain_tokens:
            grid, tokens = self._plain_tokens[role]
            return grid.groups(tokens)
        if role == "world":
            return (tuple(range(self.world_size)),)
        if role == "embedding":
            return tuple(tuple(group[stage] for stage in self._embedding_stages) for group in self.groups("pp"))
        if role == "position_embedding":
            return tuple((group[0],) for group in self.groups("pp"))
        if role == "dist_opt":
            return self._dist_opt()
        if role == "hybrid_cp":
            return self._hybrid() if self.hybrid_context_parallel else ()
        if role in ("cp_l0", "cp_l1"):
            sizes = self.hierarchical_context_parallel_sizes
            return _hierarchical(self.groups("cp"), sizes, int(role[-1])) if sizes else ()
        instances = self.num_distributed_optimizer_instances
        if instances == 1:
            return ()
        if role == "intra_dp_cp":
            return _hierarchical(self.groups("dp_cp"), (self.group_size("dp_cp") // instances, instances), 0)
        return _hierarchical(self.groups("edp"), (self.edp // instances, instances), int(role == "inter_dist_opt"))

    @property
    def _embedding_stages(self) -> tuple[int, ...]:
        if self.embedding_ranks == "tied":
            return (0,) if self.pp == 1 else (0, self.pp - 1)
        return (0,) if isinstance(self.embedding_ranks, str) else self.embedding_ranks

    def _dist_opt(self) -> Groups:
        parts = self.groups("tp_ep_pp")
        size = len(parts) // self.num_distributed_optimizer_instances
        return tuple(
            tuple(sorted(rank for part in parts[start : start + size] for rank in part))
            for start in range(0, len(parts), size)
        )

    def _hybrid(self) -> Groups:
        # As create_hybrid_dp_cp_groups: 2, 4, ... below the largest power of two that fits.
        found: list[tuple[int, ...]] = []
        for group in self.groups("dp_cp"):
            for exponent in range(1, len(group).bit_length() - 1):
                size = 2**exponent
                found.extend(group[start : start + size] for start in range(0, len(group), size))
        return tuple(found)


def _hierarchical(groups: Groups, sizes: tuple[int, ...], level: int) -> Groups:
    """One level of a hierarchy inside each group: ``sizes`` from the innermost out (create_hierarchical_groups)."""
    if level >= len(sizes):
        return ()
    inner, size = prod(sizes[:level]), sizes[level]
    return tuple(
        group[start + lane : start + lane + inner * size : inner]
        for group in groups
        for start in range(0, len(group), inner * size)
        for lane in range(inner)
    )
