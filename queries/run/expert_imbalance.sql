-- gives: How unevenly the rows of one all-to-all of known splits, or of one call of experts whose rows were counted where no
--   such all-to-all brings them, are spread over the ranks.
-- needs: matched_call, matched_member, expert_pass, query split_rows
-- column: match_id BIGINT | | Number of the matched call in this run; by counts: of the gather before the experts. | the
--   dispatcher makes none that is recorded
-- column: step BIGINT | | Step of the call. | outside every step
-- column: role VARCHAR | | Role of the group. | not known
-- column: phase VARCHAR | | Phase on the first rank. | not known
-- column: microbatch INTEGER | | Micro-batch on the first rank. | not known
-- column: layer INTEGER | | Layer on the first rank. | not recorded
-- column: turn BIGINT | | Place among the all-to-alls of the group, step and phase; by counts: among the calls of experts. | never
-- column: evidence VARCHAR | | Where the rows come from: splits of an all-to-all, or counts that the job had of its experts' rows
--   (those a rank computes). | never
-- column: group_size INTEGER | ranks | Ranks in the group. | not recorded
-- column: ranks BIGINT | ranks | Ranks that recorded their rows. | never
-- column: sent_rows BIGINT | rows | Rows these ranks send. | not recorded, as by counts
-- column: received_rows BIGINT | rows | Rows these ranks receive. | not recorded
-- column: conserved BOOLEAN | | Whether as many rows are received as sent. | not all ranks recorded their rows, or
--   the rows are counts
-- column: max_received_rows BIGINT | rows | Rows of the rank that receives most. | not all ranks recorded their rows
-- column: max_rank INTEGER | | That rank; of several the lowest. | not all ranks recorded their rows
-- column: median_received_rows BIGINT | rows | Median, the lower one. | not all ranks recorded their rows
-- column: p95_received_rows BIGINT | rows | 95th percentile, a value that occurred. | not all ranks recorded their rows
-- column: imbalance DOUBLE | 1 | Maximum over mean of the received rows; 1 is even. | not all ranks recorded their rows, or
--   none is received
WITH by_rank AS (
  SELECT rank, call_id, any_value(phase) AS phase, any_value(microbatch) AS microbatch, any_value(layer) AS layer,
         any_value(turn) AS turn, sum(sent_rows)::BIGINT AS sent_rows, sum(received_rows)::BIGINT AS received_rows
  FROM split_rows GROUP BY ALL
),
joined AS (
  SELECT m.match_id, m.step, m.role, m.group_size, b.*
  FROM matched_call m
  JOIN matched_member p ON p.match_id = m.match_id
  JOIN by_rank b ON b.rank = p.rank AND b.call_id = p.call_id
),
summed AS (
  SELECT match_id, any_value(step) AS step, any_value(role) AS role, arg_min(phase, rank) AS phase,
         arg_min(microbatch, rank) AS microbatch, arg_min(layer, rank) AS layer, arg_min(turn, rank) AS turn,
         any_value(group_size) AS group_size, count(*) AS ranks, sum(sent_rows)::BIGINT AS sent_rows,
         sum(received_rows)::BIGINT AS received_rows, max(received_rows) AS most,
         min(rank) AS lowest, avg(received_rows) AS mean_rows, quantile_disc(received_rows, 0.5) AS half,
         quantile_disc(received_rows, 0.95) AS high, count(received_rows) = any_value(group_size) AS whole,
         list(rank ORDER BY received_rows DESC NULLS LAST, rank) AS ranked
  FROM joined GROUP BY match_id
),
counted AS (
  SELECT CASE WHEN count(DISTINCT m.match_id) = 1 THEN any_value(m.match_id) END AS match_id, any_value(p.step) AS step,
         any_value(p.role) AS role, any_value(p.phase) AS phase, any_value(p.microbatch) AS microbatch,
         any_value(p.layer) AS layer, arg_min(p.turn, p.rank) AS turn, any_value(len(p.group_ranks))::INTEGER AS group_size,
         count(*) AS ranks, NULL::BIGINT AS sent_rows, sum(p.received_rows)::BIGINT AS received_rows,
         max(p.received_rows) AS most, min(p.rank) AS lowest, avg(p.received_rows) AS mean_rows,
         quantile_disc(p.received_rows, 0.5) AS half, quantile_disc(p.received_rows, 0.95) AS high, bool_and(p.whole) AS whole,
         list(p.rank ORDER BY p.received_rows DESC, p.rank) AS ranked
  FROM expert_pass p LEFT JOIN matched_member m ON m.rank = p.rank AND m.call_id = p.dispatch_call_id
  WHERE p.evidence = 'counts' GROUP BY p.count_id
)
SELECT match_id, step, role, phase, microbatch, layer, turn, evidence, group_size, ranks, sent_rows, received_rows,
       CASE WHEN whole AND evidence = 'splits' THEN sent_rows = received_rows END AS conserved,
       CASE WHEN whole THEN most END AS max_received_rows, CASE WHEN whole THEN ranked[1] END AS max_rank,
       CASE WHEN whole THEN half END AS median_received_rows, CASE WHEN whole THEN high END AS p95_received_rows,
       CASE WHEN whole THEN most / nullif(mean_rows, 0) END AS imbalance
FROM (SELECT *, 'splits' AS evidence FROM summed UNION ALL BY NAME SELECT *, 'counts' AS evidence FROM counted)
ORDER BY match_id, step, phase, microbatch, layer, lowest
