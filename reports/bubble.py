"""The measured bubble of every stage beside the one its schedule causes: where a run and the analytical model meet."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from traceanalyzer.errors import JobError
from traceanalyzer.expect import schedule, versions
from traceanalyzer.job import Job
from traceanalyzer.job_rules import release
from traceanalyzer.run import Run


@dataclass(frozen=True)
class StageBubble:
    """One stage of one pipeline in one step.

    bubble_ns, window_ns: measured (query bubble), of the pipeline's window. of_total: their ratio, exact; None of an empty
    window. formula: the share by the schedule's closed formula with equal stages; None: see reason. lower_limit: not every
    stage was recorded, so that window and bubble may be larger.
    """

    pipeline: int
    step: int
    stage: int
    rank: int
    device: int | None
    window_ns: int
    bubble_ns: int
    warm_up_ns: int
    steady_ns: int
    cool_down_ns: int
    of_total: Fraction | None
    formula: Fraction | None
    reason: str | None
    lower_limit: bool
    evidence: str
    clocks: str
    clocks_open_ns: int | None
    claimed: bool | None


def formula_share(job: Job | None) -> tuple[Fraction | None, str | None]:
    """Share of the window that the job's schedule leaves idle, and where there is none the reason.

    A backward pass counts twice a forward pass; the share of megatron-core's schedules does not depend on it. Of a job that
    does not say its release, the newest one's schedule is taken.
    """
    if job is None:
        return None, "no job is known"
    try:
        found = schedule.of_job(job, release(job.megatron_core_version) or versions.KNOWN[-1])
        return (None, "one pipeline stage") if found is None else (schedule.bubble(found, 1, 2).of_total, None)
    except JobError as error:
        return None, str(error)


def stage_bubbles(run: Run, job: Job | None) -> list[StageBubble]:
    """Every stage of every recorded step, as the query bubble orders them. ``job``: the one the run was attributed with."""
    share, reason = formula_share(job)
    return [
        StageBubble(
            **{
                name: row[name]
                for name in (
                    "pipeline", "step", "stage", "rank", "device", "window_ns", "bubble_ns", "warm_up_ns", "steady_ns",
                    "cool_down_ns", "lower_limit", "evidence", "clocks", "clocks_open_ns", "claimed",
                )
            },
            of_total=Fraction(row["bubble_ns"], row["window_ns"]) if row["window_ns"] else None,
            formula=share,
            reason=reason,
        )
        for row in run.query("bubble").rows()
    ]  # fmt: skip
