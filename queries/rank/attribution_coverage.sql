-- gives: How many of one rank's kernels, and how much of their time, have one fact of their place by one evidence.
-- needs: kernel_place
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: work VARCHAR | | compute, communication, copy (copies and memsets). | never
-- column: fact VARCHAR | | step, role (communication alone), phase, microbatch, layer, component, served_axis (compute alone). |
--   never
-- column: evidence VARCHAR | | What the fact rests on; for role: call. | the fact is not known, or there is none
-- column: kernels BIGINT | kernels | How many. Over the evidences of one fact: all of this work. | never
-- column: dur_ns BIGINT | ns | Sum of their durations; overlapping ones count in full. | no duration was recorded
-- column: share DOUBLE | 1 | dur_ns over that of all of this work on the rank. | no duration was recorded
WITH told AS (
  SELECT rank, dur_ns,
         CASE WHEN kernel_class = 'comm' THEN 'communication' WHEN kernel_class IN ('copy', 'memset') THEN 'copy'
              ELSE 'compute' END AS work,
         unnest([
           {'fact': 'step', 'evidence': step_evidence}, {'fact': 'phase', 'evidence': phase_evidence},
           {'fact': 'microbatch', 'evidence': microbatch_evidence}, {'fact': 'layer', 'evidence': layer_evidence},
           {'fact': 'component', 'evidence': component_evidence},
           {'fact': 'role', 'evidence': CASE WHEN role IS NOT NULL THEN 'call' END},
           {'fact': 'served_axis', 'evidence': served_axis_evidence}
         ]) AS one
  FROM kernel_place
),
counted AS (
  SELECT rank, work, one.fact AS fact, one.evidence AS evidence, count(*) AS kernels, sum(dur_ns)::BIGINT AS dur_ns
  FROM told
  WHERE NOT (one.fact = 'role' AND work <> 'communication') AND NOT (one.fact = 'served_axis' AND work <> 'compute')
  GROUP BY ALL
)
SELECT rank, work, fact, evidence, kernels, dur_ns,
       dur_ns / nullif(sum(dur_ns) OVER (PARTITION BY rank, work, fact), 0) AS share
FROM counted
ORDER BY rank, work, fact, evidence
