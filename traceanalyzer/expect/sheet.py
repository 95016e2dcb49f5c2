"""What ``traceanalyzer expect`` shows: the expectation of a rank, of a stage, or of every stage, for one job.

A job of any size is answered by its places: one expectation for each pipeline stage, which stands for all its ranks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from traceanalyzer import expect
from traceanalyzer.errors import JobError
from traceanalyzer.expect import versions
from traceanalyzer.expect.model import Expectation, ExpectedCall, NotModelled, RuleSet
from traceanalyzer.job import Job

Kind = Literal["rank", "stage"]


@dataclass(frozen=True)
class Part:
    """One rank or one stage. ``ranks``: how many ranks of the job it stands for."""

    kind: Kind
    number: int
    ranks: int
    expectation: Expectation

    @property
    def name(self) -> str:
        """ "rank 3" or "stage 0"."""
        return f"{self.kind} {self.number}"


@dataclass(frozen=True)
class Row:
    """One kind of call and the parts that make it, each as often."""

    call: ExpectedCall
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Apart:
    """Releases that send something else than those shown: the rows only they have, and those they lack."""

    releases: str
    only_there: tuple[ExpectedCall, ...]
    missing_there: tuple[ExpectedCall, ...]


@dataclass(frozen=True)
class Sheet:
    """The answer: the parts, in order; the releases it holds for; and, where the job does not say its release, what
    tells the other releases apart."""

    job: Job
    rules: RuleSet
    parts: tuple[Part, ...]
    releases: str
    apart: tuple[Apart, ...] = ()

    @property
    def rows(self) -> list[Row]:
        """Every kind of call once, with the parts that make it, in the order of the parts."""
        found: dict[tuple[object, ...], tuple[ExpectedCall, list[Part]]] = {}
        for part in self.parts:
            seen: Counter[tuple[object, ...]] = Counter()
            for call in part.expectation.calls:
                # a part that makes a row twice has it twice: buckets of one size, say
                key = (*call.same, seen[call.same])
                seen[call.same] += 1
                found.setdefault(key, (call, []))[1].append(part)
        return [Row(call, tuple(parts)) for call, parts in found.values()]

    @property
    def not_modelled(self) -> list[NotModelled]:
        """What the rules know of and cannot say, each once."""
        return list(dict.fromkeys(gap for part in self.parts for gap in part.expectation.not_modelled))

    @property
    def counted(self) -> Iterator[tuple[ExpectedCall, int]]:
        """Every call of every part and how many ranks make it: sums over the ranks that the sheet stands for."""
        return ((call, part.ranks) for part in self.parts for call in part.expectation.calls)


def sheet(
    job: Job,
    *,
    rank: int | None = None,
    stage: int | None = None,
    rules: RuleSet = "megatron",
    first_step: bool = False,
) -> Sheet:
    """The sheet of one rank, of one stage, or (neither given) of every stage of the job.

    Raises JobError for a rank or stage that does not exist, both at once, or a size that the job does not say.
    """
    if rank is not None and stage is not None:
        raise JobError("give a rank or a stage, not both")
    stages = job.pipeline_model_parallel_size
    if stage is not None and not 0 <= stage < stages:
        raise JobError(f"stage {stage}: the job has stages 0 to {stages - 1}")
    if rank is not None:
        wanted: list[tuple[Kind, int, int, int]] = [("rank", rank, rank, 1)]
    else:
        ranks = job.layout.world_size // stages
        numbers = range(stages) if stage is None else (stage,)
        wanted = [("stage", number, job.layout.rank_of(pp=number), ranks) for number in numbers]
    variants = [expect.expectations(job, of, rules, first_step=first_step) for _, _, of, _ in wanted]
    parts = tuple(
        Part(kind, number, ranks, found[-1].expectation)
        for (kind, number, _, ranks), found in zip(wanted, variants, strict=True)
    )
    shown = variants[0][-1].releases if all(v[-1].releases == variants[0][-1].releases for v in variants) else ""
    if not shown:
        shown = f">={versions.label(versions.KNOWN[-1])}"
    return Sheet(job, rules, parts, shown, tuple(_apart(variants)))


def _apart(variants: Iterable[list[expect.Variant]]) -> Iterator[Apart]:
    """What tells the releases that are not shown from the shown one, over all parts."""
    found: dict[str, tuple[dict[tuple[object, ...], ExpectedCall], dict[tuple[object, ...], ExpectedCall]]] = {}
    for of_part in variants:
        shown = {call.same: call for call in of_part[-1].expectation.calls}
        for variant in of_part[:-1]:
            there = {call.same: call for call in variant.expectation.calls}
            only, missing = found.setdefault(variant.releases, ({}, {}))
            only.update((key, call) for key, call in there.items() if key not in shown)
            missing.update((key, call) for key, call in shown.items() if key not in there)
    for releases, (only, missing) in found.items():
        yield Apart(releases, tuple(only.values()), tuple(missing.values()))
