-- gives: How evenly the experts of one role are used in one step and phase, over its layers and micro-batches.
-- needs: comm, issue, query expert_cost
-- column: step BIGINT | | Step of the calls. | outside every step
-- column: role VARCHAR | | Role of the groups. | not known
-- column: phase VARCHAR | | Phase. | not known
-- column: evidence VARCHAR | | Where the rows come from: splits of the all-to-alls, or counts that the job had of its experts'
--   rows (those a rank computes). | the rows are not known, see reason
-- column: passes BIGINT | passes | Passes of rows through the experts: groups times layers times micro-batches. | the rows are
--   not known
-- column: whole_passes BIGINT | passes | Those of which all ranks recorded their rows; the figures are over them. | likewise
-- column: imbalance_p50 DOUBLE | 1 | Median of maximum over mean of the received rows, a value that occurred. | no pass is whole
-- column: imbalance_p90 DOUBLE | 1 | 90th percentile of it. | no pass is whole
-- column: imbalance_p99 DOUBLE | 1 | 99th percentile of it. | no pass is whole
-- column: imbalance_max DOUBLE | 1 | The largest. | no pass is whole
-- column: hot_rank INTEGER | | The rank that most often receives most; of several the lowest. | no whole pass is uneven
-- column: hot_passes BIGINT | passes | How often. | no whole pass is uneven
-- column: at_most_ns BIGINT | ns | Sum of what the passes cost at most. | it is known of none
-- column: costed_passes BIGINT | passes | Passes of which it is known. | the rows are not known
-- column: contradicted_passes BIGINT | passes | Passes in which on some rank another number of rows was counted than the splits
--   bring. | of no pass both are known
-- column: reason VARCHAR | | Why the rows are not known: nothing is guessed from sizes. Of those that are: what contradicts them.
--   | they are known
WITH hot AS (
  SELECT step, role, phase, evidence, hot_rank, count(*) AS times FROM expert_cost WHERE hot_rank IS NOT NULL GROUP BY ALL
),
hottest AS (
  SELECT step, role, phase, evidence, arg_max(hot_rank, times * 4294967296 - hot_rank) AS hot_rank, max(times) AS hot_passes
  FROM hot GROUP BY ALL
),
known AS (
  SELECT step, role, phase, evidence, count(*) AS passes, count(imbalance) AS whole_passes,
         quantile_disc(imbalance, 0.5) AS imbalance_p50, quantile_disc(imbalance, 0.9) AS imbalance_p90,
         quantile_disc(imbalance, 0.99) AS imbalance_p99, max(imbalance) AS imbalance_max,
         sum(at_most_ns)::BIGINT AS at_most_ns, count(at_most_ns) AS costed_passes,
         CASE WHEN count(agrees) > 0 THEN count(*) FILTER (NOT agrees) END AS contradicted_passes
  FROM expert_cost GROUP BY ALL
),
counting AS (SELECT DISTINCT step FROM known WHERE evidence = 'counts' AND step IS NOT NULL),
mute AS (
  SELECT step, role, phase, bool_or(op = 'all_to_all') AS exchanges
  FROM comm
  WHERE rank IS NOT NULL AND phase IN ('forward', 'backward', 'recompute')
    AND (op = 'all_to_all' AND role IN ('ep', 'tp_ep') AND (in_splits IS NULL OR out_splits IS NULL)
         OR op IN ('all_gather', 'reduce_scatter') AND role IN ('ep', 'tp_ep'))
    AND regexp_matches(lower(dtype), 'float|half|double')
  GROUP BY ALL
),
unknown AS (
  SELECT h.step, h.role, h.phase,
         CASE WHEN h.exchanges THEN 'the splits of its all-to-alls are not recorded, and no expert counts'
              WHEN h.phase = 'backward' AND c.step IS NOT NULL
                THEN 'its dispatcher gathers all rows, and experts are counted in the forward pass alone'
              ELSE 'its dispatcher gathers all rows: only expert counts would tell, and none are recorded' END AS reason
  FROM mute h
  LEFT JOIN counting c ON c.step = h.step
  ANTI JOIN (SELECT step, role, phase FROM known WHERE evidence = 'counts') k
    ON h.step IS NOT DISTINCT FROM k.step AND h.role IS NOT DISTINCT FROM k.role AND h.phase IS NOT DISTINCT FROM k.phase
  UNION ALL
  SELECT DISTINCT NULL, 'ep', NULL, sentence FROM issue WHERE code IN ('expert_rows_on_device', 'expert_rows_not_waited_for')
)
SELECT k.step, k.role, k.phase, k.evidence, k.passes, k.whole_passes, k.imbalance_p50, k.imbalance_p90, k.imbalance_p99,
       k.imbalance_max, h.hot_rank, h.hot_passes, k.at_most_ns, k.costed_passes, k.contradicted_passes,
       CASE WHEN k.contradicted_passes > 0 THEN 'experts counted other rows than the splits of their all-to-alls bring'
       END AS reason
FROM known k LEFT JOIN hottest h ON h.step IS NOT DISTINCT FROM k.step AND h.role IS NOT DISTINCT FROM k.role
  AND h.phase IS NOT DISTINCT FROM k.phase AND h.evidence = k.evidence
UNION ALL
SELECT step, role, phase, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, reason FROM unknown
ORDER BY step, role, phase, evidence, reason
