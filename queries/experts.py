"""Expert passes: what brings rows to the experts of a layer, what takes them back, and the work between the two."""

from __future__ import annotations

from traceanalyzer.run import Run

_PASSES = """
CREATE OR REPLACE TABLE expert_pass AS
WITH exchange AS (
  SELECT rank, group_id, call_id, step, phase, microbatch, layer, role, in_splits, out_splits, start_ns, end_ns
  FROM comm
  -- counts of rows go as integers, and are not rows
  WHERE op = 'all_to_all' AND rank IS NOT NULL AND in_splits IS NOT NULL AND out_splits IS NOT NULL
    AND regexp_matches(lower(dtype), 'float|half|double')
),
next AS (
  SELECT *, lead(call_id) OVER w AS combine_call_id, lead(start_ns) OVER w AS combine_start_ns,
         coalesce(lead(in_splits) OVER w = out_splits AND lead(out_splits) OVER w = in_splits, false) AS goes_back,
         row_number() OVER w AS place
  FROM exchange
  WINDOW w AS (PARTITION BY rank, group_id, step, phase ORDER BY call_id)
),
-- what takes rows back is not what brings the next ones: of a row of calls that each undo the one before, every second opens
paired AS (
  SELECT *, (place - max(CASE WHEN NOT goes_back THEN place ELSE 0 END)
                    OVER (PARTITION BY rank, group_id, step, phase ORDER BY place)) % 2 = 1 AS opens
  FROM next
),
split AS (
  SELECT rank, step, phase, microbatch, layer, role, call_id AS dispatch_call_id, combine_call_id,
         list_sum(in_splits)::BIGINT AS sent_rows, list_sum(out_splits)::BIGINT AS received_rows, end_ns AS begin_ns,
         combine_start_ns AS end_ns, row_number() OVER (w ORDER BY call_id) AS nth, count(*) OVER w AS alike
  FROM paired WHERE goes_back AND opens
  WINDOW w AS (PARTITION BY rank, step, phase, microbatch, layer)
),
counted AS (
  SELECT rank, recorded_step AS step, recorded_phase AS phase, recorded_microbatch AS microbatch, recorded_layer AS layer,
         list_sum(local_expert_rows)::BIGINT AS rows, ranks, expert_tensor_ranks,
         row_number() OVER (PARTITION BY rank, recorded_step, recorded_phase ORDER BY start_ns) - 1 AS turn,
         row_number() OVER (w ORDER BY start_ns) AS nth, count(*) OVER w AS alike
  FROM expert_rows WHERE rank IS NOT NULL AND local_expert_rows IS NOT NULL
  WINDOW w AS (PARTITION BY rank, recorded_step, recorded_phase, recorded_microbatch, recorded_layer)
),
-- a dispatcher that gathers: its last gather before the experts, and the reduce-scatter behind them
gathered AS (
  SELECT rank, step, phase, microbatch, layer, role, op, call_id AS combine_call_id, start_ns AS end_ns,
         lag(op) OVER w AS op_before, lag(call_id) OVER w AS dispatch_call_id, lag(end_ns) OVER w AS begin_ns
  FROM comm
  WHERE op IN ('all_gather', 'reduce_scatter') AND role IN ('ep', 'tp_ep') AND phase IN ('forward', 'recompute')
    AND regexp_matches(recorded_component, '(^| )experts[.](gather|scatter)$')
    AND regexp_matches(lower(dtype), 'float|half|double')
  WINDOW w AS (PARTITION BY rank, group_id, step, phase, microbatch, layer ORDER BY call_id)
),
framed AS (
  SELECT *, row_number() OVER (w ORDER BY combine_call_id) AS nth, count(*) OVER w AS alike
  FROM gathered WHERE op = 'reduce_scatter' AND op_before = 'all_gather'
  WINDOW w AS (PARTITION BY rank, step, phase, microbatch, layer)
),
-- rows that splits and experts count alike, if every rank of tensor parallelism computes what it alone received
beside AS (
  SELECT s.* EXCLUDE (nth, alike), 'splits' AS evidence, CASE WHEN c.expert_tensor_ranks = 1 THEN c.rows END AS counted_rows,
         NULL::INTEGER[] AS group_ranks, NULL::BIGINT AS turn, NULL::BIGINT AS nth
  FROM split s
  LEFT JOIN counted c ON c.rank = s.rank AND c.step IS NOT DISTINCT FROM s.step AND c.phase IS NOT DISTINCT FROM s.phase
    AND c.microbatch IS NOT DISTINCT FROM s.microbatch AND c.layer IS NOT DISTINCT FROM s.layer AND c.nth = s.nth
    AND c.alike = s.alike
),
alone AS (
  SELECT * FROM counted c
  ANTI JOIN split s ON c.rank = s.rank AND c.step IS NOT DISTINCT FROM s.step AND c.phase IS NOT DISTINCT FROM s.phase
    AND c.microbatch IS NOT DISTINCT FROM s.microbatch AND c.layer IS NOT DISTINCT FROM s.layer
),
passes AS (
  SELECT * FROM beside
  UNION ALL BY NAME
  SELECT c.rank, c.step, c.phase, c.microbatch, c.layer, coalesce(g.role, 'ep') AS role, g.dispatch_call_id,
         g.combine_call_id, NULL::BIGINT AS sent_rows, c.rows AS received_rows, g.begin_ns, g.end_ns, 'counts' AS evidence,
         c.rows AS counted_rows, c.ranks AS group_ranks, c.turn, c.nth
  FROM alone c
  LEFT JOIN framed g ON g.rank = c.rank AND g.step IS NOT DISTINCT FROM c.step AND g.phase IS NOT DISTINCT FROM c.phase
    AND g.microbatch IS NOT DISTINCT FROM c.microbatch AND g.layer IS NOT DISTINCT FROM c.layer AND g.nth = c.nth
    AND g.alike = c.alike
),
work AS (
  SELECT p.rank, p.dispatch_call_id, sum(k.dur_ns)::BIGINT AS compute_ns, count(*) AS kernels
  FROM (SELECT rank, start_ns, dur_ns FROM kernel_place
        WHERE kernel_class NOT IN ('comm', 'copy', 'memset') AND start_ns IS NOT NULL AND dur_ns IS NOT NULL) k
  ASOF JOIN (SELECT rank, dispatch_call_id, begin_ns, end_ns FROM passes WHERE begin_ns IS NOT NULL) p
    ON p.rank = k.rank AND k.start_ns >= p.begin_ns
  WHERE k.start_ns < p.end_ns
  GROUP BY ALL
),
numbered AS (
  SELECT *, CASE WHEN evidence = 'counts' THEN
              dense_rank() OVER (ORDER BY evidence, step, phase, microbatch, layer, nth, group_ranks,
                                          CASE WHEN group_ranks IS NULL THEN rank END) END AS count_id
  FROM passes
)
SELECT p.* EXCLUDE (nth),
       CASE WHEN p.evidence = 'counts' THEN
         coalesce(count(*) OVER (PARTITION BY p.evidence, p.count_id) = len(p.group_ranks), false) END AS whole,
       CASE WHEN p.begin_ns IS NOT NULL AND p.end_ns IS NOT NULL AND d.rank IS NOT NULL THEN coalesce(w.compute_ns, 0) END
         AS compute_ns,
       CASE WHEN p.begin_ns IS NOT NULL AND p.end_ns IS NOT NULL AND d.rank IS NOT NULL THEN coalesce(w.kernels, 0) END
         AS kernels
FROM numbered p
LEFT JOIN work w ON w.rank = p.rank AND w.dispatch_call_id = p.dispatch_call_id
LEFT JOIN (SELECT DISTINCT rank FROM kernel_place) d ON d.rank = p.rank  -- without a device nothing is known of its work
"""


def make(run: Run) -> None:
    """Makes the table expert_pass: one pass of rows through the experts as one rank saw it. Needs kernel_place.

    evidence splits: two all-to-alls of floating-point rows that follow each other on a group, step and phase, where the
    second's splits are the first's turned round. evidence counts: a call of the experts whose rows were counted, where no
    such pair is at that place; received_rows are those that the rank's experts compute, sent_rows null, role that of the
    gather before the experts if there is one, else ep. counted_rows: the count also beside splits, where both must be equal
    (no expert tensor parallelism). count_id: number of a counted pass over its ranks, which are at the same place of the same
    group; whole: whether all of group_ranks recorded it; turn: place among the rank's calls of experts in step and phase.
    begin_ns, end_ns: end of the call that brings rows, start of the one that takes them back, as recorded; compute_ns,
    kernels: compute kernels that start between them (a shared expert's too); null without such calls and without times.
    """
    run.connection.execute(_PASSES)
