"""expected and expectations: rule sets and releases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from traceanalyzer import expect
from traceanalyzer.errors import JobError
from traceanalyzer.expect import versions
from traceanalyzer.expect.quantity import Quantity, human_bytes
from traceanalyzer.job import Job


def _releases(job: Job, rank: int = 0) -> list[str]:
    return [variant.releases for variant in expect.expectations(job, rank)]


def test_known_release_gives_one_expectation(tiny: Callable[..., Job]) -> None:
    (variant,) = expect.expectations(tiny(), 0)
    assert variant.releases == "0.16"
    assert variant.expectation == expect.expected(tiny(), 0)
    assert variant.expectation.version == "0.16.1"


def test_releases_that_make_no_difference_are_one(tiny: Callable[..., Job]) -> None:
    """A forward pass without sequence parallelism is the same in every release."""
    job = tiny(megatron_core_version=None, sequence_parallel=False, forward_only=True)
    assert _releases(job) == ["all"]


def test_releases_that_differ_are_told_apart(tiny: Callable[..., Job]) -> None:
    assert _releases(tiny(megatron_core_version=None, forward_only=True)) == ["<=0.7", ">=0.8"]
    # 0.12 counts zero gradients although nobody asked
    assert _releases(tiny(megatron_core_version=None)) == ["<=0.7", "0.8-0.11, >=0.13", "0.12"]
    last_stage = {"framework": "megatron-lm", "world_size": 4, "pipeline_model_parallel_size": 2}
    loop = tiny(megatron_core_version=None, sequence_parallel=False, sft=False, **last_stage)
    assert _releases(loop, 2) == [
        "<=0.4",  # batches sent in another way
        "0.5-0.6",  # mean loss
        "0.7-0.10",  # loss and tokens
        "0.11",  # scalars over model parallel
        "0.12",  # zero count
        "0.13",  # loss once a step
        "0.14-0.15, >=0.17",  # rerun state
        "0.16",  # packing broadcasts
    ]


def test_variants_cover_every_known_release_once(tiny: Callable[..., Job]) -> None:
    job = tiny(megatron_core_version=None, framework="megatron-lm")
    found = expect.expectations(job, 0)
    assert [variant.releases for variant in found] == [
        "<=0.4",
        "0.5-0.6",
        "0.7",
        "0.8-0.10",
        "0.11",
        "0.12",
        "0.13",
        "0.14-0.15, >=0.18",
        "0.16",
        "0.17",
    ]
    for release in versions.KNOWN:
        text = f"{release[0]}.{release[1]}"
        same = expect.expected(job, 0, version=text).calls
        assert sum(_sizes(variant.expectation.calls) == _sizes(same) for variant in found) == 1


def _sizes(calls: Any) -> Counter[Any]:
    found: Counter[Any] = Counter()
    for row in calls:
        found[row.role, row.op, row.phase, row.component, row.in_elems] += row.calls
    return found


def test_named_release_beats_the_job(tiny: Callable[..., Job]) -> None:
    assert expect.expected(tiny(), 0, version="0.7.0").version == "0.7.0"
    embedding = [row.op for row in expect.expected(tiny(), 0, version="0.7.0").calls if row.component == "embedding"]
    assert embedding == ["all_reduce", "all_gather"]


def test_unknown_release_means_the_newest(tiny: Callable[..., Job]) -> None:
    job = tiny(megatron_core_version=None)
    assert expect.expected(job, 0).calls == expect.expected(job, 0, version="0.19").calls
    assert expect.expected(job, 0).version is None


def test_nothing_is_without_a_rule_in_a_usual_job(tiny: Callable[..., Job]) -> None:
    """All axes at once, distributed optimizer and experts: no gap."""
    job = tiny(
        world_size=32,
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        num_experts=4,
        expert_model_parallel_size=2,
        moe_token_dispatcher_type="alltoall",
        use_distributed_optimizer=True,
        transformer_engine_version="2.13",
    )
    assert expect.expected(job, 0).not_modelled == ()
    assert {row.role for row in expect.expected(job, 0).calls} == {
        *("tp", "pp", "cp", "ep", "etp", "tp_ep", "dp_cp", "edp", "dist_opt", "embedding"),
    }


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_experts": 4, "moe_layer_freq": 4, "use_distributed_optimizer": True},
        {"num_experts": 4, "moe_layer_freq": (1, 0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 0)},
        {"pipeline_model_parallel_size": 3, "virtual_pipeline_model_parallel_size": 2, "num_microbatches": 6},
        {"first_last_layers_bf16": True, "fp8": "hybrid", "fp8_recipe": "tensorwise"},
    ],
)
def test_alike_stages_are_worked_out_once(tiny: Callable[..., Job], options: dict[str, Any]) -> None:
    """Where every release is tried, a middle stage may stand for others: the same as working out each by itself."""
    sizes = {"pipeline_model_parallel_size": 6, "num_layers": 12, "num_microbatches": 8}
    stages = {**sizes, **options}["pipeline_model_parallel_size"]
    job = tiny(megatron_core_version=None, **{**sizes, "world_size": 2 * int(stages), **options})
    for stage in range(job.pipeline_model_parallel_size):
        rank = job.layout.rank_of(pp=stage)
        for variant in expect.expectations(job, rank):
            release = variant.releases.replace(",", "-").split("-")[-1].strip(" <>=")
            alone = expect.expected(job, rank, version=release)
            assert variant.expectation.calls == alone.calls
            assert {row.stage for row in variant.expectation.calls} == {stage}


def test_rule_set_must_be_known(tiny: Callable[..., Job]) -> None:
    with pytest.raises(JobError, match="megatron, document"):
        expect.expected(tiny(), 0, rules="other")  # type: ignore[arg-type]


# -- releases and quantities -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "release"),
    [("0.16.1", (0, 16)), ("0.9", (0, 9)), ("core_v0.14.0rc5", (0, 14)), ("1.2.0", (1, 2))],
)
def test_parse(text: str, release: tuple[int, int]) -> None:
    assert versions.parse(text) == release


def test_parse_refuses_other_text() -> None:
    with pytest.raises(JobError, match="megatron_core_version='main'"):
        versions.parse("main")


@pytest.mark.parametrize(
    ("releases", "words"),
    [
        (versions.KNOWN, "all"),
        (versions.KNOWN[:7], "<=0.10"),
        ([(0, 11), (0, 12)], "0.11-0.12"),
        ([(0, 12)], "0.12"),
        (versions.KNOWN[9:], ">=0.13"),
        ([(0, 14), (0, 15), (0, 17)], "0.14-0.15, 0.17"),
    ],
)
def test_span(releases: Any, words: str) -> None:
    assert versions.span(releases) == words


def test_words_of_a_behaviour() -> None:
    assert versions.from_on("loss once per step") == ">=0.13"
    assert versions.before("loss once per step") == "<=0.12"
    assert versions.between("loss sum and tokens", "loss once per step") == "0.7-0.12"


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (0, "0 B"),
        (12, "12 B"),
        (1023, "1,023 B"),
        (33554432, "32 MiB"),
        (11796480, "11.25 MiB"),
        (9395240960, "8.75 GiB"),
        (1000000, "about 976.56 KiB"),
    ],
)
def test_human_bytes(count: int, words: str) -> None:
    assert human_bytes(count) == words


def test_quantity_leaves_out_what_it_repeats() -> None:
    assert str(Quantity("S/TP", "8192/4", 2048)) == "S/TP = 8192/4 = 2,048"
    assert str(Quantity("1", "1", 1)) == "1"
