"""Megatron's creation order, against what its own code creates, and names read by it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.attribute import attach
from traceanalyzer.attribute.creation import Created, Observed, Options, creation_order, fits, mismatch, release_of
from traceanalyzer.attribute.roles import OrderConflict, of_groups
from traceanalyzer.axes import Layout
from traceanalyzer.errors import JobError
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.run import Run

RECORDED = json.loads(gzip.decompress((Path(__file__).parent / "creation_order/groups.json.gz").read_bytes()))


def case_name(case: dict[str, Any]) -> str:
    sizes = ",".join(f"{k}={v}" for k, v in case["layout"].items())
    return f"{case['releases'][0]}-{case['releases'][-1]}:{sizes}"


@pytest.mark.parametrize("case", RECORDED, ids=case_name)
def test_the_order_is_megatrons_own(case: dict[str, Any]) -> None:
    """Executed code of 19 releases (creation_order/README.md)."""
    sizes: dict[str, Any] = dict(case["layout"])
    options = Options(sizes.pop("gloo", True), sizes.pop("all_gather", False))
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in sizes.items()}
    layout = Layout(**fields)
    for text in case["releases"]:
        release = release_of(text)
        assert release is not None
        order = creation_order(layout, release, options)
        assert [list(c.ranks) for c in order] == [ranks for _, ranks in case["groups"]]
        if release >= (0, 11):
            assert [c.description for c in order] == [description for description, _ in case["groups"]]
        assert [c.number for c in order] == list(range(1, len(order) + 1))


def test_the_worked_example() -> None:
    """16 ranks, TP 2, CP 2, PP 2, EP 2: 117 groups, and which numbers are which (megatron-core 0.16.1, executed)."""
    order = creation_order(Layout(16, tp=2, cp=2, pp=2, ep=2), (0, 16))
    spans: dict[str | None, list[int]] = {}
    for c in order:
        spans.setdefault(c.role, []).append(c.number)
    assert len(order) == 117
    assert {role: (numbers[0], numbers[-1], len(numbers)) for role, numbers in spans.items()} == {
        "dp_cp": (1, 8, 8),
        "dp": (9, 24, 16),
        "cp": (25, 32, 8),
        "mp": (33, 36, 4),
        "tp": (37, 44, 8),
        "pp": (45, 66, 8),
        "embedding": (46, 67, 8),
        "position_embedding": (47, 68, 8),
        "tp_dp_cp": (69, 70, 2),
        "tp_dp": (71, 74, 4),
        "tp_cp": (75, 78, 4),
        "ep": (79, 86, 8),
        "etp": (87, 94, 8),
        "tp_ep": (95, 98, 4),
        "tp_ep_pp": (99, 100, 2),
        "edp": (101, 116, 16),
        "dist_opt": (117, 117, 1),
    }
    assert order[24] == Created(25, "CONTEXT_PARALLEL_GROUP", (0, 2))


def test_what_is_not_modelled_is_refused() -> None:
    with pytest.raises(JobError, match=r"0\.6 is not known"):
        creation_order(Layout(8, tp=2), (0, 6))
    with pytest.raises(JobError, match="product grid"):
        creation_order(Layout(8, tp=2, order="tp-pp-cp-ep-dp", grid="product"), (0, 16))
    with pytest.raises(JobError, match=r"0\.10 and later"):
        creation_order(Layout(8, tp=2, ep=2, etp=1), (0, 9))
    with pytest.raises(JobError, match="EP divides DP"):
        creation_order(Layout(8, tp=2, cp=4, ep=2), (0, 9))


@pytest.mark.parametrize(
    ("text", "release"), [("0.16.1", (0, 16)), ("core_v0.12.0rc3", (0, 12)), ("main", None), (None, None)]
)
def test_releases(text: str | None, release: tuple[int, int] | None) -> None:
    assert release_of(text) == release


# -- names --------------------------------------------------------------------------------------------------------------

LAYOUT = Layout(8, tp=2, pp=2)
"""0.16 without gloo: dp_cp 1-4, dp 5-8, cp 9-16, mp 17-18, tp 19-22, pp, embedding, position 23-34, ..., 65 in all."""


def seen(number: int, ranks: tuple[int, ...] | None = None, rank: int | None = 0, size: int | None = None) -> Observed:
    return Observed(rank, number, ranks, size if ranks is None else len(ranks), None)


def test_names_without_a_shift() -> None:
    found = fits([seen(19, (0, 1)), seen(23, (0, 4)), seen(1, (0, 2))], LAYOUT, (0, 16), [Options(False)])
    assert [(f.shift, f.roles, f.explained) for f in found] == [(0, {19: "tp", 23: "pp", 1: "dp_cp"}, 3)]


def test_groups_made_before_shift_the_names() -> None:
    """Three groups of the script's own come first, one of them seen; the rest agrees on a shift of 3."""
    own = seen(2, (0, 7))
    names = [own, seen(22, (0, 1)), seen(26, (0, 4)), seen(4, (0, 2))]
    found = fits(names, LAYOUT, (0, 16), [Options(False)])
    assert [(f.shift, f.roles) for f in found] == [(3, {22: "tp", 26: "pp", 4: "dp_cp"})]
    assert fits(names, LAYOUT, (0, 16), [Options(False)], shifts=False) == []
    # one group alone would agree somewhere by chance
    assert fits([seen(22, (0, 1))], LAYOUT, (0, 16), [Options(False)]) == []


def test_a_rank_is_in_the_groups_it_knows() -> None:
    """Group 20 is that of ranks 2 and 3: rank 0 cannot know it."""
    assert fits([seen(19, size=2), seen(20, size=2)], LAYOUT, (0, 16), [Options(False)]) == []
    assert len(fits([seen(19, size=2), seen(20, size=2, rank=3)], LAYOUT, (0, 16), [Options(False)])) == 1


def test_what_breaks_the_order_is_told() -> None:
    names = [seen(1, (0, 2)), seen(19, (0, 1)), seen(23, (0, 6))]
    assert fits(names, LAYOUT, (0, 16), [Options(False)]) == []
    found = mismatch(names, LAYOUT, (0, 16), [Options(False)])
    assert found is not None
    assert (found.number, found.role, found.declared, found.observed, found.agreeing) == (23, "pp", (0, 4), (0, 6), 2)
    assert mismatch(names[:2], LAYOUT, (0, 16), [Options(False)]) is None


def group(rank: int, name: str, ranks: list[int], description: str | None = "undefined") -> dict[str, Any]:
    return {"rank": rank, "group_id": name, "description": description, "group_size": len(ranks), "ranks": ranks}


def test_roles_by_names(open_run: Callable[..., Run]) -> None:
    """megatron-core 0.10 describes no group. [0, 2] fits dp, dp_cp and edp, its name says which."""
    # dp 1-8 and dp_cp 9-16 with their gloo twins, cp 17-24, mp 25-26, tp 27-30, pp 31
    groups = [
        group(0, "0", list(range(8)), "default_pg"),
        group(0, "9", [0, 2]),
        group(0, "1", [0, 2]),
        group(0, "27", [0, 1]),
        group(0, "31", [0, 4]),
    ]
    job = Job(
        world_size=8,
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=2,
        num_layers=2,
        megatron_core_version="0.10.0",
    )
    run = open_run({"process_group": groups})
    table, conflicts = of_groups(run, job)
    assert {r["group_id"]: (r["role"], r["role_evidence"]) for r in table.to_pylist()} == {
        "0": ("world", "description"),
        "1": ("dp", "creation_order"),
        "9": ("dp_cp", "creation_order"),
        "27": ("tp", "creation_order"),
        "31": ("pp", "creation_order"),
    }
    assert conflicts == []
    foreign, _ = of_groups(run, Job(**{**JOB, "framework": "torch"}))
    assert "creation_order" not in foreign.column("role_evidence").to_pylist()


JOB: dict[str, Any] = {
    "world_size": 8, "tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "num_layers": 2,
}  # fmt: skip


def test_releases_that_name_a_group_differently_leave_it_open(open_run: Callable[..., Run]) -> None:
    """Without a release: group 1 is dp up to 0.12 and dp_cp later, and both have these ranks."""
    table, _ = of_groups(open_run({"process_group": [group(0, "1", [0, 2])]}), Job(**JOB))
    assert table.to_pylist()[0]["role"] is None
    assert table.to_pylist()[0]["candidates"] == ["dp_cp", "edp", "dp"]


def test_a_name_that_breaks_the_order_is_a_conflict(open_run: Callable[..., Run]) -> None:
    groups = [group(0, "1", [0, 2]), group(0, "27", [0, 1]), group(0, "31", [0, 6])]
    _, conflicts = of_groups(open_run({"process_group": groups}), Job(**JOB, megatron_core_version="0.10.0"))
    assert conflicts == [OrderConflict("31", "pp", (0, 4), (0, 6), 2)]
    assert conflicts[0].sentence == (
        "group 31 has ranks 0, 6; by Megatron's creation order of the declared layout it would be the pp group of ranks 0, 4 "
        "(2 other groups follow that order)"
    )


@pytest.mark.shared
@pytest.mark.parametrize(
    ("folder", "sizes"),
    [
        (
            "gpu_error_1st",
            {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 4, "expert_model_parallel_size": 4},
        ),
        (
            "gpu_error_2nd",
            {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "expert_model_parallel_size": 8},
        ),
    ],
)
def test_a_real_jobs_names(shared: Callable[[str], Path], tmp_path: Path, folder: str, sizes: dict[str, int]) -> None:
    """16 ranks of somebody else's job: what its descriptions say, the names say without them."""
    files = sorted(shared(f"traces/nvrx_flight_recorder/{folder}").glob("_dump_*"))
    import_traces(files, tmp_path / "run.parquet")
    job = Job(
        world_size=16,
        num_experts=16,
        sequence_parallel=True,
        expert_tensor_parallel_size=1,
        num_layers=8,
        **sizes,  # type: ignore[arg-type]
    )
    with Run.open(tmp_path / "run.parquet") as run:
        attach(run, job)
        told = dict(
            run.tuples(
                "SELECT group_id, any_value(role) FROM process_group WHERE role_evidence = 'description' GROUP BY 1"
            )
        )
        run.connection.execute(
            "CREATE TABLE bare AS SELECT * REPLACE (NULL::VARCHAR AS description) FROM run WHERE kind = 'process_group'"
        )
        run.connection.execute("CREATE OR REPLACE VIEW process_group AS SELECT * FROM bare")
        table, conflicts = of_groups(run, job)
        assert conflicts == []
        assert {r["group_id"]: r["role"] for r in table.to_pylist()} == told
        assert set(table.column("role_evidence").to_pylist()) == {"creation_order"}
        assert len(told) > 50
