"""The share of the window that a schedule leaves idle."""

from __future__ import annotations

from fractions import Fraction

import pytest

from traceanalyzer.job import Job
from traceanalyzer.reports.bubble import formula_share


@pytest.mark.parametrize(
    ("job", "share", "reason"),
    [
        (None, None, "no job is known"),
        (Job(world_size=2), None, "one pipeline stage"),
        (
            Job(world_size=4, pipeline_model_parallel_size=4, micro_batch_size=1, global_batch_size=8),
            Fraction(3, 11),
            None,
        ),
        (
            Job(
                world_size=4,
                pipeline_model_parallel_size=4,
                num_layers=16,
                virtual_pipeline_model_parallel_size=2,
                micro_batch_size=1,
                global_batch_size=8,
            ),
            Fraction(3, 19),  # (PP-1) / (v M + PP-1)
            None,
        ),
    ],
)
def test_the_formula(job: Job | None, share: Fraction | None, reason: str | None) -> None:
    assert formula_share(job) == (share, reason)


def test_a_job_that_does_not_say_its_micro_batches() -> None:
    share, reason = formula_share(Job(world_size=4, pipeline_model_parallel_size=4))
    assert share is None
    assert reason is not None
    assert reason.startswith("the job does not say num_microbatches")
