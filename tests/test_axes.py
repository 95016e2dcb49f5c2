"""Ranks, coordinates and groups: against Megatron's own generator, and against tables written out by hand."""

from __future__ import annotations

import csv
import gzip
import json
import random
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.axes import (
    DEFAULT_ORDER,
    DOCUMENT_ORDER,
    OTHER,
    PP_BEFORE_DP_ORDER,
    ROLES,
    Axis,
    Coordinates,
    Layout,
    role_of_description,
    rollup,
)
from traceanalyzer.errors import JobError

SHARED = Path(__file__).resolve().parents[1].parent / "shared"

SIXTEEN = Layout(world_size=16, tp=2, cp=2, pp=2, ep=2)
FOLDED = Layout(world_size=1024, tp=4, cp=2, pp=4, ep=8)
FOLDED_ETP1 = Layout(world_size=1024, tp=4, cp=2, pp=4, ep=8, etp=1)
DOCUMENT = Layout(world_size=1024, tp=4, cp=2, pp=4, ep=8, order=DOCUMENT_ORDER, grid="product")


def ranks(text: str) -> tuple[tuple[int, ...], ...]:
    """``"0 1 · 2-4"`` -> ((0, 1), (2, 3, 4)), the notation of the reference tables."""

    def numbers(part: str) -> Iterator[int]:
        for word in part.split():
            first, _, last = word.partition("-")
            yield from range(int(first), int(last or first) + 1)

    return tuple(tuple(numbers(part)) for part in text.split("·"))


# -- a world of 16, every group --------------------------------------------------------------------------------------

SIXTEEN_GROUPS = {
    "tp": "0 1 · 2 3 · 4 5 · 6 7 · 8 9 · 10 11 · 12 13 · 14 15",
    "etp": "0 1 · 2 3 · 4 5 · 6 7 · 8 9 · 10 11 · 12 13 · 14 15",
    "cp": "0 2 · 1 3 · 4 6 · 5 7 · 8 10 · 9 11 · 12 14 · 13 15",
    "ep": "0 2 · 1 3 · 4 6 · 5 7 · 8 10 · 9 11 · 12 14 · 13 15",
    "dp": "0 4 · 1 5 · 2 6 · 3 7 · 8 12 · 9 13 · 10 14 · 11 15",
    "edp": "0 4 · 1 5 · 2 6 · 3 7 · 8 12 · 9 13 · 10 14 · 11 15",
    "dp_cp": "0 2 4 6 · 1 3 5 7 · 8 10 12 14 · 9 11 13 15",
    "pp": "0 8 · 1 9 · 2 10 · 3 11 · 4 12 · 5 13 · 6 14 · 7 15",
    "embedding": "0 8 · 1 9 · 2 10 · 3 11 · 4 12 · 5 13 · 6 14 · 7 15",
    "position_embedding": "0 · 1 · 2 · 3 · 4 · 5 · 6 · 7",
    "mp": "0 1 8 9 · 2 3 10 11 · 4 5 12 13 · 6 7 14 15",
    "tp_cp": "0-3 · 4-7 · 8-11 · 12-15",
    "tp_dp": "0 1 4 5 · 2 3 6 7 · 8 9 12 13 · 10 11 14 15",
    "tp_dp_cp": "0-7 · 8-15",
    "tp_ep": "0-3 · 4-7 · 8-11 · 12-15",
    "tp_ep_pp": "0 1 2 3 8 9 10 11 · 4 5 6 7 12 13 14 15",
    "dist_opt": "0-15",
    "world": "0-15",
}


@pytest.mark.parametrize("role", ROLES)
def test_every_group_of_a_world_of_16(role: str) -> None:
    expected = ranks(SIXTEEN_GROUPS[role]) if role in SIXTEEN_GROUPS else ()
    assert SIXTEEN.groups(role) == expected


def test_coordinates_of_a_world_of_16() -> None:
    assert SIXTEEN.coordinates(11) == Coordinates(tp=1, cp=1, dp=0, pp=1, ep=1, etp=1, edp=0)
    assert SIXTEEN.coordinates(6) == Coordinates(tp=0, cp=1, dp=1, pp=0, ep=1, etp=0, edp=1)
    assert [SIXTEEN.stage(rank) for rank in (0, 7, 8, 15)] == [0, 0, 1, 1]
    assert SIXTEEN.rank_of(tp=1, cp=1, dp=0, pp=1) == 11
    assert SIXTEEN.expert_rank_of(etp=0, ep=1, edp=1, pp=0) == 6


def test_untied_embeddings_leave_the_first_stage_alone() -> None:
    untied = Layout(world_size=8, pp=4, embedding_ranks="untied")
    assert untied.groups("embedding") == ((0,), (1,))
    assert untied.group_of("embedding", 7) is None
    mtp = Layout(world_size=8, pp=4, embedding_ranks=(0, 2, 3))
    assert mtp.groups("embedding") == ((0, 4, 6), (1, 5, 7))
    assert Layout(world_size=2).groups("embedding") == ((0,), (1,))


# -- the document's 1024 ranks ---------------------------------------------------------------------------------------


def test_the_documents_own_order() -> None:
    # rank = f(dp, ep, cp, pp, tp), tp fastest, all five multiplied. The document's own example for PP, 0 64 128 192,
    # contradicts its formula: those are four members of one EP group.
    assert DOCUMENT.group_of("tp", 0) == (0, 1, 2, 3)
    assert DOCUMENT.group_of("pp", 0) == (0, 4, 8, 12)
    assert DOCUMENT.group_of("cp", 0) == (0, 16)
    assert DOCUMENT.group_of("ep", 0) == (0, 32, 64, 96, 128, 160, 192, 224)
    assert DOCUMENT.group_of("dp", 0) == (0, 256, 512, 768)
    assert [DOCUMENT.coordinates(rank).ep for rank in (0, 64, 128, 192)] == [0, 2, 4, 6]
    assert {DOCUMENT.coordinates(rank).pp for rank in (0, 64, 128, 192)} == {0}
    assert DOCUMENT.equation == "1024 = TP 4 x CP 2 x PP 4 x EP 8 x DP 4"
    assert DOCUMENT.rank_of(tp=3, cp=1, dp=2, pp=1, ep=5) == 3 + 4 + 16 + 5 * 32 + 2 * 256


def test_replicas_are_the_same_in_both_readings_of_the_document() -> None:
    # A dense weight is replicated 64 times in both, an expert 8 times where experts are sharded by TP.
    assert (DOCUMENT.group_size("dp_cp"), FOLDED.group_size("dp_cp")) == (64, 64)
    assert (DOCUMENT.group_size("edp"), FOLDED.group_size("edp")) == (8, 8)
    etp1 = Layout(world_size=1024, tp=4, cp=2, pp=4, ep=8, etp=1, order=DOCUMENT_ORDER, grid="product")
    assert (etp1.group_size("edp"), FOLDED_ETP1.group_size("edp")) == (32, 32)
    assert etp1.expert_equation == "1024 = ETP 1 x EP 8 x PP 4 x EDP 32"
    assert etp1.group_size("etp") == 1
    assert etp1.coordinates(3) == Coordinates(tp=3, cp=0, dp=0, pp=0, ep=0, etp=0, edp=3)


FOLDED_GROUPS = {
    "tp": (range(4), range(4)),
    "cp": ((0, 4), (0, 4)),
    "dp": (range(0, 256, 8), range(0, 256, 8)),
    "dp_cp": (range(0, 256, 4), range(0, 256, 4)),
    "pp": ((0, 256, 512, 768), (0, 256, 512, 768)),
    "embedding": ((0, 768), (0, 768)),
    "ep": (range(0, 32, 4), range(8)),
    "etp": (range(4), (0,)),
    "tp_ep": (range(32), range(8)),
    "edp": (range(0, 256, 32), range(0, 256, 8)),
}


@pytest.mark.parametrize("role", FOLDED_GROUPS)
def test_megatron_folds_the_documents_sizes(role: str) -> None:
    etp4, etp1 = FOLDED_GROUPS[role]
    assert FOLDED.group_of(role, 0) == tuple(etp4)
    assert FOLDED_ETP1.group_of(role, 0) == tuple(etp1)
    assert FOLDED.group_size(role) == len(etp4)
    assert FOLDED_ETP1.group_size(role) == len(etp1)


def test_equations() -> None:
    assert FOLDED.equation == "1024 = TP 4 x CP 2 x PP 4 x DP 32"
    assert FOLDED.expert_equation == "1024 = ETP 4 x EP 8 x PP 4 x EDP 8"
    assert FOLDED_ETP1.expert_equation == "1024 = ETP 1 x EP 8 x PP 4 x EDP 32"
    assert [FOLDED.degree(axis) for axis in Axis] == [4, 2, 8, 4, 32, 4, 8]
    assert (FOLDED.group_size("tp_ep_pp"), FOLDED_ETP1.group_size("tp_ep_pp")) == (128, 32)


# -- options that add groups -----------------------------------------------------------------------------------------


def test_distributed_optimizer_instances() -> None:
    layout = Layout(world_size=16, tp=2, cp=2, ep=2, num_distributed_optimizer_instances=2)
    assert layout.groups("dp_cp") == ranks("0 2 4 6 8 10 12 14 · 1 3 5 7 9 11 13 15")
    assert layout.groups("intra_dp_cp") == ranks("0 2 4 6 · 8 10 12 14 · 1 3 5 7 · 9 11 13 15")
    assert layout.groups("edp") == ranks("0 4 8 12 · 1 5 9 13 · 2 6 10 14 · 3 7 11 15")
    assert layout.groups("intra_edp") == ranks("0 4 · 8 12 · 1 5 · 9 13 · 2 6 · 10 14 · 3 7 · 11 15")
    assert layout.groups("inter_dist_opt") == ranks("0 8 · 4 12 · 1 9 · 5 13 · 2 10 · 6 14 · 3 11 · 7 15")
    assert layout.groups("dist_opt") == ranks("0-7 · 8-15")
    assert layout.group_size("inter_dist_opt") == 2


def test_hierarchical_and_hybrid_context_parallel() -> None:
    layout = Layout(world_size=8, cp=4, hierarchical_context_parallel_sizes=(2, 2), hybrid_context_parallel=True)
    assert layout.groups("cp_l0") == ranks("0 1 · 2 3 · 4 5 · 6 7")
    assert layout.groups("cp_l1") == ranks("0 2 · 1 3 · 4 6 · 5 7")
    assert layout.groups("hybrid_cp") == ranks("0 1 · 2 3 · 4 5 · 6 7 · 0-3 · 4-7")
    assert "hybrid_cp" in layout.roles_with_ranks([4, 5, 6, 7])
    assert Layout(world_size=8, cp=4, hierarchical_context_parallel_sizes=(4,)).groups("cp_l1") == ()
    assert Layout(world_size=8, cp=4).groups("cp_l0") == ()
    assert Layout(world_size=8, cp=4).group_size("cp_l0") == 0


# -- roles -----------------------------------------------------------------------------------------------------------

DESCRIPTIONS = {
    "default_pg": "world",
    "DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_GLOO": "dp_cp",
    "DATA_PARALLEL_GROUP_WITH_CP_AG": "dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO": "intra_dp_cp",
    "INTER_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "inter_dist_opt",
    "HYBRID_DP_CP_GROUP_2": "hybrid_cp",
    "HYBRID_DP_CP_GROUP_16": "hybrid_cp",
    "DATA_PARALLEL_GROUP": "dp",
    "DATA_PARALLEL_GROUP_GLOO": "dp",
    "CONTEXT_PARALLEL_GROUP": "cp",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L0": "cp_l0",
    "HIERARCHICAL_CONTEXT_PARALLEL_GROUP_L1": "cp_l1",
    "MODEL_PARALLEL_GROUP": "mp",
    "TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "EMBEDDING_GROUP": "embedding",
    "POSITION_EMBEDDING_GROUP": "position_embedding",
    "TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "TENSOR_AND_DATA_PARALLEL_GROUP": "tp_dp",
    "TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "EXPERT_TENSOR_PARALLEL_GROUP": "etp",
    "EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "EXPERT_DATA_PARALLEL_GROUP": "edp",
    "EXPERT_DATA_PARALLEL_GROUP_GLOO": "edp",
    "EXPERT_DATA_PARALLEL_GROUP_AG": "edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L0": "intra_edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L0": "intra_edp",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_L1": "inter_dist_opt",
    "HIERARCHICAL_EXPERT_DATA_PARALLEL_GROUP_GLOO_L1": "inter_dist_opt",
    "INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "dist_opt",
}


def test_every_description_has_its_role() -> None:
    assert {text: role_of_description(text) for text in DESCRIPTIONS} == DESCRIPTIONS
    assert set(DESCRIPTIONS.values()) == set(ROLES)


@pytest.mark.parametrize("text", [None, "", "undefined", "0", "HYBRID_DP_CP_GROUP_*", "HYBRID_DP_CP_GROUP_", "TP_2"])
def test_other_descriptions_have_no_role(text: str | None) -> None:
    assert role_of_description(text) is None


def test_roles_roll_up_to_the_axes_people_speak_of() -> None:
    axes: dict[str, list[str]] = {}
    for role in ROLES:
        axes.setdefault(rollup(role), []).append(role)
    assert axes == {
        "TP": ["tp", "etp"],
        "CP": ["cp", "cp_l0", "cp_l1", "hybrid_cp"],
        "PP": ["pp"],
        "EP": ["ep", "tp_ep"],
        "DP": ["dp_cp", "edp", "dp", "intra_dp_cp", "intra_edp", "inter_dist_opt"],
        "other": [
            "embedding",
            "position_embedding",
            "mp",
            "tp_cp",
            "tp_dp_cp",
            "tp_dp",
            "tp_ep_pp",
            "dist_opt",
            "world",
        ],
    }
    assert rollup(None) == rollup("no such role") == OTHER


def test_rank_sets_are_not_unique() -> None:
    assert SIXTEEN.roles_with_ranks([2, 0]) == ("cp", "ep")
    assert SIXTEEN.roles_with_ranks([0, 1]) == ("tp", "etp")
    assert SIXTEEN.roles_with_ranks([0, 8]) == ("pp", "embedding")
    assert SIXTEEN.roles_with_ranks(range(16)) == ("dist_opt", "world")
    assert FOLDED.roles_with_ranks([0, 768]) == ("embedding",)
    assert FOLDED_ETP1.roles_with_ranks([5]) == ("etp", "position_embedding")
    assert SIXTEEN.roles_with_ranks([0, 3]) == SIXTEEN.roles_with_ranks([]) == SIXTEEN.roles_with_ranks([0, 16]) == ()


# -- refusals --------------------------------------------------------------------------------------------------------

REFUSED = [
    (
        {"world_size": 1024, "tp": 4, "cp": 2, "pp": 3},
        "world_size 1024 is no multiple of TP 4 x CP 2 x PP 3 = 24 (1024 / 24 = 42.6667): DP would not be whole",
    ),
    (
        {"world_size": 8, "tp": 4, "ep": 4},
        (
            "world_size 8 is no multiple of ETP 4 x EP 4 x PP 1 = 16 (8 / 16 = 0.5): EDP would not be whole; "
            "ETP is expert_tensor_parallel_size and defaults to TP"
        ),
    ),
    (
        {"world_size": 1024, "tp": 4, "cp": 2, "pp": 4, "ep": 8, "order": PP_BEFORE_DP_ORDER},
        (
            "order='tp-cp-ep-pp-dp' does not end with pp, then EDP must equal DP, but world_size "
            "1024 = TP 4 x CP 2 x PP 4 x DP 32 and 1024 = ETP 4 x EP 8 x PP 4 x EDP 8"
        ),
    ),
    (
        {"world_size": 512, "tp": 4, "cp": 2, "pp": 4, "ep": 8, "order": DOCUMENT_ORDER, "grid": "product", "etp": 2},
        "etp=2: in a product grid it is 1 or TP = 4",
    ),
    (
        {"world_size": 1000, "tp": 4, "cp": 2, "pp": 4, "ep": 8, "grid": "product"},
        (
            "world_size 1000 is no multiple of TP 4 x CP 2 x PP 4 x EP 8 = 256 (1000 / 256 = 3.90625): "
            "DP would not be whole"
        ),
    ),
    (
        {"world_size": 8, "tp": 2, "cp": 2, "etp": 1, "ep": 4, "pp": 2, "order": "cp-ep-pp-tp-dp"},
        (
            "order='cp-ep-pp-tp-dp': pipeline groups have stride 2 among dense and 4 among expert axes; world_size "
            "8 = TP 2 x CP 2 x PP 2 x DP 1 and 8 = ETP 1 x EP 4 x PP 2 x EDP 1"
        ),
    ),
    ({"world_size": 4, "tp": 2, "order": "dp-pp"}, "order='dp-pp' does not place tp, whose size is 2"),
    ({"world_size": 4, "order": "tp-tp"}, "order='tp-tp': tp, cp, ep, dp and pp, each at most once, joined by '-'"),
    ({"world_size": 4, "order": "tp,dp"}, "order='tp,dp': tp, cp, ep, dp and pp, each at most once, joined by '-'"),
    ({"world_size": 0}, "world_size=0: a size is at least 1"),
    ({"world_size": 4, "etp": 0}, "etp=0: a size is at least 1"),
    ({"world_size": 4, "vpp": 2}, "vpp=2 with PP 1: interleaving needs at least 1 chunk and PP > 1"),
    (
        {"world_size": 8, "cp": 8, "hierarchical_context_parallel_sizes": (2, 2)},
        "hierarchical_context_parallel_sizes 2 x 2 = 4 is not CP 8",
    ),
    ({"world_size": 3, "hybrid_context_parallel": True}, "hybrid_context_parallel needs an even DP x CP, not 3"),
    (
        {"world_size": 16, "tp": 2, "ep": 2, "num_distributed_optimizer_instances": 8},
        "num_distributed_optimizer_instances=8 does not divide EDP = 4 (4 / 8 = 0.5)",
    ),
    ({"world_size": 2, "pp": 2, "embedding_ranks": (0, 2)}, "embedding_ranks=(0, 2): stages between 0 and 1"),
    (
        {"world_size": 2, "embedding_ranks": "shared"},
        "embedding_ranks='shared': 'tied', 'untied' or a tuple of stages",
    ),
    (
        {"world_size": 4, "grid": "product", "num_distributed_optimizer_instances": 2},
        "num_distributed_optimizer_instances > 1 is not defined for a product grid",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as error:
        Layout(**arguments)
    assert str(error.value) == message


def test_questions_without_an_answer() -> None:
    def text(ask: Any, *arguments: Any, **names: Any) -> str:
        with pytest.raises(JobError) as error:
            ask(*arguments, **names)
        return str(error.value)

    assert text(SIXTEEN.coordinates, 16) == "rank 16 is outside the world of 16"
    assert text(SIXTEEN.stage, -1) == "rank -1 is outside the world of 16"
    assert text(SIXTEEN.group_of, "tp", 16) == "rank 16 is outside the world of 16"
    assert text(SIXTEEN.rank_of, tp=2) == "coordinate tp=2 is outside its axis of 2"
    assert text(SIXTEEN.rank_of, ep=1) == "ep is no dense coordinate in Megatron's layout; use expert_rank_of"
    assert text(DOCUMENT.expert_rank_of, ep=1) == "a product grid has no expert grid; use rank_of"
    assert text(SIXTEEN.groups, "tensor") == f"unknown role 'tensor'; known: {', '.join(ROLES)}"
    assert text(SIXTEEN.group_size, "hybrid_cp") == "hybrid_cp groups have several sizes; use groups('hybrid_cp')"
    assert text(SIXTEEN.group_of, "hybrid_cp", 0) == (
        "a rank is in several hybrid_cp groups, one of each size; use groups('hybrid_cp')"
    )


# -- laws, on random layouts -----------------------------------------------------------------------------------------

ORDERS = [
    DEFAULT_ORDER,
    PP_BEFORE_DP_ORDER,
    DOCUMENT_ORDER,
    "tp-dp-pp-cp-ep",
    "dp-tp-cp-ep-pp",
    "pp-tp-cp-ep-dp",
    "ep-cp-tp-dp-pp",
    "tp-cp-dp-ep-pp",
    "TP-EP-DP-PP-CP",
    "tp-dp",
    "tp-pp-dp",
    "tp-cp-pp-dp",
]


def random_layouts(number: int, seed: int, grid: str = "megatron") -> list[Layout]:
    generator = random.Random(seed)
    found: list[Layout] = []
    while len(found) < number:
        sizes: dict[str, Any] = {name: generator.choice([1, 1, 2, 2, 3, 4]) for name in ("tp", "cp", "pp", "ep")}
        etp = generator.choice([None, None, 1, 2, sizes["tp"]])
        rest = generator.choice([1, 2, 3, 4, 6, 8])
        world = sizes["tp"] * sizes["cp"] * sizes["pp"] * rest * (sizes["ep"] if grid == "product" else 1)
        try:
            found.append(
                Layout(
                    world_size=world,
                    etp=etp,
                    order=generator.choice(ORDERS),
                    grid=grid,  # type: ignore[arg-type]
                    num_distributed_optimizer_instances=generator.choice([1, 1, 2]),
                    **sizes,
                )
            )
        except JobError:
            continue
    return found


@pytest.mark.parametrize("grid", ["megatron", "product"])
def test_groups_partition_the_world_and_agree_with_coordinates(grid: str) -> None:
    axis_of = {"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp", "ep": "ep", "etp": "etp", "edp": "edp"}
    for layout in random_layouts(60, 7, grid):
        everyone = [layout.coordinates(rank) for rank in range(layout.world_size)]
        for role in ROLES:
            groups = layout.groups(role)
            members = [rank for group in groups for rank in group]
            assert all(list(group) == sorted(group) for group in groups)
            assert len(set(members)) == len(members)
            if groups and role not in ("embedding", "position_embedding"):
                assert sorted(members) == list(range(layout.world_size)), (layout, role)
            if role in axis_of:
                for group in groups:
                    assert [getattr(everyone[rank], axis_of[role]) for rank in group] == list(range(len(group)))
            for group in groups:
                assert layout.group_of(role, group[-1]) == group
                assert role in layout.roles_with_ranks(group)
                assert layout.group_size(role) == len(group)
        for rank, where in enumerate(everyone):
            dense = {"tp": where.tp, "cp": where.cp, "dp": where.dp, "pp": where.pp}
            if grid == "product":
                assert layout.rank_of(**dense, ep=where.ep) == rank
            else:
                assert layout.rank_of(**dense) == rank
                assert layout.expert_rank_of(etp=where.etp, ep=where.ep, edp=where.edp, pp=where.pp) == rank


def test_a_world_of_16384_is_quick() -> None:
    layout = Layout(world_size=16384, tp=8, cp=4, pp=16, ep=64, etp=1)
    started = time.perf_counter()
    for role in ROLES:
        layout.groups(role)
        layout.group_size(role) if role != "hybrid_cp" else None
    assert layout.roles_with_ranks(layout.groups("edp")[5]) == ("edp",)
    assert time.perf_counter() - started < 5
    assert layout.groups("tp") is layout.groups("tp")


# -- Megatron itself -------------------------------------------------------------------------------------------------

TOKENS_OF_ROLES = {
    "decoder": {
        "tp": "tp",
        "cp": "cp",
        "pp": "pp",
        "dp": "dp",
        "dp_cp": "dp-cp",
        "mp": "tp-pp",
        "tp_cp": "tp-cp",
        "tp_dp": "tp-dp",
        "tp_dp_cp": "tp-dp-cp",
    },
    "expert": {"ep": "ep", "etp": "tp", "tp_ep": "tp-ep", "tp_ep_pp": "tp-ep-pp", "edp": "dp"},
}


@pytest.mark.megatron
def test_groups_equal_megatrons_generator() -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    layouts = random_layouts(250, 20260823)
    assert {layout.order for layout in layouts} == {order.lower() for order in ORDERS}
    for layout in layouts:
        generators = {
            "decoder": state.RankGenerator(
                tp=layout.tp, ep=1, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order
            ),
            "expert": state.RankGenerator(
                tp=layout.expert_tensor_size, ep=layout.ep, dp=layout.edp, pp=layout.pp, cp=1, order=layout.order
            ),
        }
        assert generators["decoder"].get_ranks("pp") == generators["expert"].get_ranks("pp")
        for grid, roles in TOKENS_OF_ROLES.items():
            for role, tokens in roles.items():
                expected = tuple(tuple(group) for group in generators[grid].get_ranks(tokens))
                assert layout.groups(role) == expected, (layout, role)


@pytest.mark.megatron
def test_product_groups_equal_megatrons_generator() -> None:
    # RankGenerator refuses EP and CP in one grid, so the axis that is absent lends its name to the other.
    state = pytest.importorskip("megatron.core.parallel_state")
    for layout in random_layouts(60, 5, "product"):
        if layout.cp > 1 and layout.ep > 1:
            continue
        generator = state.RankGenerator(
            tp=layout.tp, ep=layout.ep, dp=layout.dp, pp=layout.pp, cp=layout.cp, order=layout.order
        )
        for role in ("tp", "cp", "pp", "dp", "ep"):
            assert layout.groups(role) == tuple(tuple(group) for group in generator.get_ranks(role)), (layout, role)


def megatron_groups(state: Any, monkeypatch: pytest.MonkeyPatch, layout: Layout) -> list[tuple[str, tuple[int, ...]]]:
    """What initialize_model_parallel creates for this layout: (description, ranks as torch keeps them)."""
    made: list[tuple[str, tuple[int, ...]]] = []

    def create_group(ranks: list[int], *, group_desc: str, **_: Any) -> object:
        made.append((group_desc, tuple(sorted(ranks))))
        return object()

    def embedding_ranks(pp_ranks: list[int]) -> list[int]:
        return pp_ranks[:1] if layout.embedding_ranks == "untied" else sorted({pp_ranks[0], pp_ranks[-1]})

    monkeypatch.setattr(state, "create_group", create_group)
    monkeypatch.setattr(state.torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(state.torch.distributed, "get_world_size", lambda: layout.world_size)
    monkeypatch.setattr(state.torch.distributed, "get_rank", lambda: 0)
    monkeypatch.setattr(state, "_set_global_memory_buffer", lambda: None)
    for name in [name for name in vars(state) if re.fullmatch(r"_[A-Z_]+", name)]:
        monkeypatch.setattr(state, name, {} if name == "_HYBRID_DP_CP_GROUPS" else None)
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.etp,
        num_distributed_optimizer_instances=layout.num_distributed_optimizer_instances,
        hierarchical_context_parallel_sizes=list(layout.hierarchical_context_parallel_sizes) or None,
        hybrid_context_parallel=layout.hybrid_context_parallel,
        create_all_gather_group=True,
        order=layout.order,
        get_embedding_ranks=embedding_ranks,
    )
    return made


@pytest.mark.megatron
@pytest.mark.parametrize(
    "layout",
    [
        SIXTEEN,
        FOLDED,
        FOLDED_ETP1,
        Layout(world_size=32, tp=2, cp=4, pp=2, embedding_ranks="untied", hierarchical_context_parallel_sizes=(2, 2)),
        Layout(world_size=48, tp=2, cp=2, ep=2, num_distributed_optimizer_instances=3, hybrid_context_parallel=True),
        Layout(world_size=64, tp=2, pp=2, ep=4, num_distributed_optimizer_instances=4),
    ],
)
def test_groups_equal_what_megatron_creates(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    pytest.importorskip("einops")
    made: dict[str, dict[tuple[int, ...], None]] = {}
    for description, group in megatron_groups(state, monkeypatch, layout):
        role = role_of_description(description)
        assert role is not None, description
        made.setdefault(role, {})[group] = None
    ours = {role: dict.fromkeys(layout.groups(role)) for role in ROLES if role != "world" and layout.groups(role)}
    assert {role: set(groups) for role, groups in made.items()} == {role: set(groups) for role, groups in ours.items()}
    in_order = set(ROLES) - {"world", "hybrid_cp", "inter_dist_opt", "intra_edp", "cp_l0", "cp_l1"}
    for role in in_order & made.keys():
        assert list(made[role]) == list(layout.groups(role)), role


@pytest.mark.megatron
def test_what_megatron_refuses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    state = pytest.importorskip("megatron.core.parallel_state")
    generator = random.Random(11)
    outcomes: set[bool] = set()
    for _ in range(300):
        sizes = {name: generator.choice([1, 2, 3, 4]) for name in ("tp", "cp", "pp", "ep")}
        fields: dict[str, Any] = {**sizes, "etp": generator.choice([1, 2, 4]), "order": generator.choice(ORDERS)}
        fields["world_size"] = generator.choice([8, 16, 24, 32, 48, 64])
        try:
            Layout(**fields)
            refused = False
        except JobError:
            refused = True
        asked = _unchecked(**fields)
        try:
            megatron_groups(state, monkeypatch, asked)
            megatron_refused = False
        except (RuntimeError, AssertionError):
            megatron_refused = True
        assert refused == megatron_refused, fields
        outcomes.add(refused)
    assert outcomes == {True, False}


def _unchecked(**fields: Any) -> Layout:
    """A Layout that skipped its checks, to hand its fields to Megatron."""
    layout = object.__new__(Layout)
    defaults = {name: one.default for name, one in Layout.__dataclass_fields__.items()}
    layout.__dict__.update({**defaults, **fields})
    return layout


# -- groups of recorded runs -----------------------------------------------------------------------------------------


@pytest.mark.shared
def test_groups_of_recorded_runs() -> None:
    folder = SHARED / "megatron_recorded"
    if not folder.is_dir():
        pytest.skip(f"no recorded Megatron runs beside the checkout ({folder.name})")
    seen: set[str] = set()
    for table in sorted(folder.glob("*.csv.gz")):
        arguments = json.loads((folder / table.name.replace(".csv.gz", ".json")).read_text())["args"]
        with gzip.open(table, "rt", newline="") as lines:
            for row in csv.DictReader(lines):
                role = role_of_description(row["group_desc"])
                if role is None:
                    continue
                layout = Layout(
                    world_size=int(row["world"]),
                    tp=arguments["tp"],
                    cp=arguments["cp"],
                    pp=arguments["pp"],
                    ep=arguments["ep"],
                    etp=arguments["etp"] or None,
                    order=arguments["order"],
                    embedding_ranks="untied" if arguments["untie"] else "tied",
                )
                where_rank = int(row["rank"])
                where = layout.coordinates(where_rank)
                assert [where.tp, where.cp, where.dp, where.ep, where.pp] == [
                    int(row[name]) for name in ("tp_rank", "cp_rank", "dp_rank", "ep_rank", "pp_stage")
                ]
                group = layout.group_of(role, where_rank)
                assert group is not None
                assert len(group) == int(row["group_size"]), (table.name, row)
                recorded = row["group_ranks"]
                if re.fullmatch(r"[\d ]+", recorded):
                    assert group == tuple(map(int, recorded.split())), (table.name, row)
                elif spread := re.fullmatch(r"(\d+)\.\.(\d+) step (\d+)", recorded):
                    first, last, step = map(int, spread.groups())
                    assert group == tuple(range(first, last + 1, step)), (table.name, row)
                seen.add(role)
    assert seen >= {"tp", "pp", "dp_cp", "edp", "ep", "etp", "tp_ep", "cp", "dist_opt", "embedding", "mp"}


@pytest.mark.parametrize(
    ("description", "role"),
    [
        ("EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP_WITH_EGTP", "tp_ep_pp"),
        ("DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "dp"),
        ("DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", "dp_cp"),
        ("EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", "edp"),
        ("GTP_WEIGHT_REMAT_GROUP", None),
    ],
)
def test_descriptions_of_0_19(description: str, role: str | None) -> None:
    assert role_of_description(description) == role
