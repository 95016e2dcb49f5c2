"""What a job should communicate: the analytical model, one module per chapter.

``expected`` gives everything one rank should send in one step; ``expectations`` the same for every release that cannot
be ruled out, where the job does not say which it ran; ``sheet`` what a whole job should. Rules are data (rules.py), written
with symbols (place.py) in formulas (formula.py). Chapters of calls: batch, tensor, data (and buckets), sharded, control,
pipeline, context, expert; document holds the seed document's rules. Beside them: schedule, memory, parameters. Nothing
here sees a trace.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from traceanalyzer.errors import JobError
from traceanalyzer.expect import (
    batch,
    context,
    control,
    data,
    document,
    expert,
    graphs,
    pipeline,
    sharded,
    tensor,
    versions,
)
from traceanalyzer.expect.model import RULE_SETS, Expectation, RuleSet
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

__all__ = ["Variant", "expectations", "expected"]


CHAPTERS = (
    batch.CHAPTER,
    tensor.CHAPTER,
    data.CHAPTER,
    control.CHAPTER,
    pipeline.CHAPTER,
    context.CHAPTER,
    sharded.CHAPTER,
    expert.CHAPTER,
)


@dataclass(frozen=True)
class Variant:
    """One expectation and the releases it stands for: "<=0.10", "0.11-0.12", "all", or the job's own "0.16"."""

    releases: str
    expectation: Expectation


def expected(
    job: Job, rank: int, *, rules: RuleSet = "megatron", version: str | None = None, first_step: bool = False
) -> Expectation:
    """Everything that global ``rank`` should send in one step, and what the rule set cannot say.

    version: release of megatron-core, e.g. "0.16.1"; None takes the job's own or, if unknown, the newest known one
    (use expectations to try all). first_step: the first step after start or evaluation, where overlapped traffic runs at
    other places. Raises JobError for a rank outside the world, an unknown rule set, or a job that does not say a size
    that is needed.
    """
    text = version or job.megatron_core_version
    release = versions.parse(text) if text else versions.KNOWN[-1]
    stage, cp = _place_of(job, rank)
    return replace(_of_place(job, stage, cp, rules, release, text, first_step), rank=rank)


def expectations(job: Job, rank: int, rules: RuleSet = "megatron", *, first_step: bool = False) -> list[Variant]:
    """The distinct expectations of the releases that come into question, oldest first.

    One if the job says its release or the rules do not depend on it; else one for each set of releases that make this
    rank send the same. Errors as in expected.
    """
    if job.megatron_core_version is not None:
        release = versions.parse(job.megatron_core_version)
        return [Variant(versions.label(release), expected(job, rank, rules=rules, first_step=first_step))]
    stage, cp = _place_of(job, rank)
    return [
        Variant(words, replace(found, rank=rank, version=words))
        for words, found in _variants_of_place(job, stage, cp, rules, first_step)
    ]


def _place_of(job: Job, rank: int) -> tuple[int, int]:
    """Stage of a rank, and its position in the context-parallel group where a rule looks at it."""
    where = job.layout.coordinates(rank)
    return where.pp, where.cp if job.mtp_num_layers else 0


@lru_cache(maxsize=256)
def _variants_of_place(
    job: Job, stage: int, cp: int, rules: RuleSet, first_step: bool
) -> tuple[tuple[str, Expectation], ...]:
    """Words for releases, and what they make every rank of a place send."""
    alike = _stage_like(job, stage)
    if alike != stage:
        return tuple(
            (words, replace(found, calls=tuple(row.on_stage(stage) for row in found.calls)))
            for words, found in _variants_of_place(job, alike, cp, rules, first_step)
        )
    groups: dict[tuple[object, ...], tuple[Expectation, list[versions.Release]]] = {}
    for release in versions.KNOWN:
        found = _of_place(job, stage, cp, rules, release, None, first_step)
        key = (tuple(row.same for row in found.calls), found.not_modelled)
        groups.setdefault(key, (found, []))[1].append(release)
    return tuple((versions.span(members), found) for found, members in groups.values())


def _stage_like(job: Job, stage: int) -> int:
    """The lowest stage that sends the same in every release: of middle stages with the same kinds of layers, the first.

    The stage itself where its number or the numbers of its layers may matter.
    """
    last = job.pipeline_model_parallel_size - 1
    by_number = (
        job.pipeline_model_parallel_layout is not None
        or len(job.cp_comm_type) > 1
        or job.first_last_layers_bf16
        or job.mtp_num_layers
    )
    if not 1 < stage < last or by_number:
        return stage
    kinds = [_kinds_of_layers(job, one) for one in range(1, stage + 1)]
    return 1 + kinds.index(kinds[-1])


@lru_cache(maxsize=1024)
def _kinds_of_layers(job: Job, stage: int) -> tuple[tuple[bool, ...], ...]:
    """For each model chunk of a stage, whether its layers have experts."""
    chunks = job.virtual_pipeline_model_parallel_size or 1
    return tuple(
        tuple(job.is_moe_layer(layer) for layer in job.layers_on_stage(stage, chunk)) for chunk in range(chunks)
    )


def _with_defaults(job: Job, release: versions.Release) -> Job:
    """The job with the options whose default depends on the release."""
    if job.rerun_mode is not None or job.framework != "megatron-lm":
        return job
    return replace(job, rerun_mode="validate_results" if versions.since(release, "rerun by default") else "disabled")


# All ranks of a place send the same: a run of a thousand ranks asks for a few places only.
@lru_cache(maxsize=1024)
def _of_place(
    job: Job,
    stage: int,
    cp: int,
    rules: RuleSet,
    release: versions.Release,
    version: str | None,
    first_step: bool,
) -> Expectation:
    if rules not in RULE_SETS:
        raise JobError(f"rules={rules!r}: must be one of {', '.join(RULE_SETS)}")
    job = _with_defaults(job, release)
    place = Place(job, stage, release, cp, first_step)
    rank = place.rank
    chapters = document.CHAPTERS if rules == "document" else CHAPTERS
    calls = [row for chapter in chapters for row in chapter.calls(place)]
    if rules == "megatron":
        calls = graphs.mark(place, calls)
    unknown = dict.fromkeys(gap for chapter in chapters for gap in chapter.not_modelled(place))
    return Expectation(rules, rank, tuple(calls), tuple(unknown), version)
