"""What a job should communicate: the analytical model, one module per chapter.

``expected`` gives everything one rank should send in one step; ``expectations`` the same for every release that cannot
be ruled out, where the job does not say which it ran. Chapters: tensor (and batch, shapes), data (and parameters),
control; document holds the seed document's rules. Nothing here sees a trace.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from traceanalyzer.errors import JobError
from traceanalyzer.expect import batch, control, data, document, tensor, versions
from traceanalyzer.expect.model import RULE_SETS, Expectation, NotModelled, RuleSet
from traceanalyzer.expect.place import Place
from traceanalyzer.job import Job

__all__ = ["Variant", "expectations", "expected"]


CHAPTERS = (batch.CHAPTER,)


@dataclass(frozen=True)
class Variant:
    """One expectation and the releases it stands for: "<=0.10", "0.11-0.12", "all", or the job's own "0.16"."""

    releases: str
    expectation: Expectation


def expected(job: Job, rank: int, *, rules: RuleSet = "megatron", version: str | None = None) -> Expectation:
    """Everything that global ``rank`` should send in one step, and what the rule set cannot say.

    version: release of megatron-core, e.g. "0.16.1"; None takes the job's own or, if unknown, the newest known one
    (use expectations to try all). Raises JobError for a rank outside the world, an unknown rule set, or a job that does
    not say a size that is needed.
    """
    text = version or job.megatron_core_version
    release = versions.parse(text) if text else versions.KNOWN[-1]
    return replace(_of_stage(job, job.layout.stage(rank), rules, release, text), rank=rank)


def expectations(job: Job, rank: int, rules: RuleSet = "megatron") -> list[Variant]:
    """The distinct expectations of the releases that come into question, oldest first.

    One if the job says its release or the rules do not depend on it; else one for each set of releases that make this
    rank send the same. Errors as in expected.
    """
    if job.megatron_core_version is not None:
        release = versions.parse(job.megatron_core_version)
        return [Variant(versions.label(release), expected(job, rank, rules=rules))]
    return [
        Variant(words, replace(found, rank=rank, version=words))
        for words, found in _variants_of_stage(job, job.layout.stage(rank), rules)
    ]


@lru_cache(maxsize=256)
def _variants_of_stage(job: Job, stage: int, rules: RuleSet) -> tuple[tuple[str, Expectation], ...]:
    """Words for releases, and what they make every rank of a stage send."""
    groups: list[tuple[Expectation, list[versions.Release]]] = []
    for release in versions.KNOWN:
        found = _of_stage(job, stage, rules, release, None)
        members = next((members for known, members in groups if _same(known, found)), None)
        if members is None:
            groups.append((found, [release]))
        else:
            members.append(release)
    return tuple((versions.span(members), found) for found, members in groups)


def _with_defaults(job: Job, release: versions.Release) -> Job:
    """The job with the options whose default depends on the release."""
    if job.rerun_mode is not None or job.framework != "megatron-lm":
        return job
    return replace(job, rerun_mode="validate_results" if versions.since(release, "rerun by default") else "disabled")


# All ranks of a stage send the same: no chapter looks at anything of a rank but its stage. A run of a thousand ranks asks
# for a few stages only.
@lru_cache(maxsize=1024)
def _of_stage(job: Job, stage: int, rules: RuleSet, release: versions.Release, version: str | None) -> Expectation:
    if rules not in RULE_SETS:
        raise JobError(f"rules={rules!r}: must be one of {', '.join(RULE_SETS)}")
    job = _with_defaults(job, release)
    rank = job.layout.rank_of(pp=stage)
    missing = tuple(_chapters_without_rules(job, rules))
    if rules == "document":
        return Expectation(rules, rank, tuple(document.calls(job, rank)), missing, version)
    place = Place(job, stage, release)
    calls = [row for chapter in CHAPTERS for row in chapter.calls(place)]
    calls += [row for chapter in (tensor, data, control) for row in chapter.calls(job, rank, release)]
    unknown = [
        *(gap for chapter in CHAPTERS for gap in chapter.not_modelled(place)),
        *tensor.not_modelled(job, rank, release),
        *data.not_modelled(job, rank, release),
        *control.not_modelled(job, release),
    ]
    return Expectation(rules, rank, tuple(calls), (*unknown, *missing), version)


def _same(one: Expectation, other: Expectation) -> bool:
    """Whether two releases make the rank send the same; where a rule is said to apply does not count."""
    return [replace(row, versions="", formula={}) for row in one.calls] == [
        replace(row, versions="", formula={}) for row in other.calls
    ] and one.not_modelled == other.not_modelled


def _chapters_without_rules(job: Job, rules: RuleSet) -> Iterator[NotModelled]:
    """The chapters that are not written yet, as far as this job has their traffic."""
    if rules == "document" and not job.forward_only:
        roles = ("dp", "dp_cp", "edp", "intra_dp_cp", "intra_edp", "inter_dist_opt")
        yield NotModelled("data parallel chapter", roles)
    if job.pipeline_model_parallel_size > 1:
        yield NotModelled("pipeline chapter", ("pp",))
        yield NotModelled("pipeline chapter", ("world",), (), ("send", "recv"))
        if not job.untie_embeddings_and_output_weights and not job.forward_only:
            yield NotModelled("pipeline chapter: tied embedding", ("embedding",))
    if job.context_parallel_size > 1:
        yield NotModelled("context parallel chapter", ("cp", "cp_l0", "cp_l1", "hybrid_cp"))
    if job.num_experts is not None:
        yield NotModelled("expert parallel chapter", ("ep", "etp", "tp_ep", "tp_cp", "tp_dp_cp"))
