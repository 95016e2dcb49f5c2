-- gives: How unevenly one all-to-all of known splits spreads its rows over the receiving ranks.
-- needs: matched_call, matched_member, query split_rows
-- column: match_id BIGINT | | Number of the matched call in this run. | never
-- column: step BIGINT | | Step of the call. | outside every step
-- column: role VARCHAR | | Role of the group. | not known
-- column: phase VARCHAR | | Phase on the first rank. | not known
-- column: microbatch INTEGER | | Micro-batch on the first rank. | not known
-- column: layer INTEGER | | Layer on the first rank. | not recorded
-- column: turn BIGINT | | Place among the all-to-alls of the group, step and phase. | never
-- column: group_size INTEGER | ranks | Ranks in the group. | not recorded
-- column: ranks BIGINT | ranks | Ranks that recorded their rows. | never
-- column: sent_rows BIGINT | rows | Rows these ranks send. | not recorded
-- column: received_rows BIGINT | rows | Rows these ranks receive. | not recorded
-- column: conserved BOOLEAN | | Whether as many rows are received as sent. | not all ranks recorded their rows
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
)
SELECT match_id, step, role, phase, microbatch, layer, turn, group_size, ranks, sent_rows, received_rows,
       CASE WHEN whole THEN sent_rows = received_rows END AS conserved, CASE WHEN whole THEN most END AS max_received_rows,
       CASE WHEN whole THEN ranked[1] END AS max_rank, CASE WHEN whole THEN half END AS median_received_rows,
       CASE WHEN whole THEN high END AS p95_received_rows, CASE WHEN whole THEN most / nullif(mean_rows, 0) END AS imbalance
FROM summed
ORDER BY match_id
