-- gives: One pass of rows through the experts of one group: who receives most, and what that costs the others at most.
-- needs: expert_pass, matched_member, matched_call, arrival
-- column: match_id BIGINT | | Number of the matched call that brings the rows. | the dispatcher makes none that is recorded
-- column: combine_match_id BIGINT | | Number of the one that takes them back. | it is not matched
-- column: step BIGINT | | Step of the call. | outside every step
-- column: role VARCHAR | | Role of the group. | not known
-- column: phase VARCHAR | | Phase on the first rank. | not known
-- column: microbatch INTEGER | | Micro-batch on the first rank. | not known
-- column: layer INTEGER | | Layer on the first rank. | not known
-- column: evidence VARCHAR | | Where the rows come from: splits of the all-to-alls, or counts that the job had of its experts'
--   rows (those a rank computes). | never
-- column: group_size INTEGER | ranks | Ranks in the group. | not recorded
-- column: ranks BIGINT | ranks | Ranks that recorded their rows. | never
-- column: agrees BOOLEAN | | Whether on every rank as many rows were counted as the splits bring. | not both were recorded on all
--   ranks, or ranks share experts (expert tensor parallelism)
-- column: imbalance DOUBLE | 1 | Maximum over mean of the received rows; 1 is even. | not all ranks recorded their rows, or
--   none is received
-- column: hot_rank INTEGER | | The rank that receives most. | not all ranks recorded their rows, or they are even
-- column: hot_compute_ns BIGINT | ns | Its compute kernels between the two calls. | likewise, or no times were recorded
-- column: mean_compute_ns BIGINT | ns | Mean of all ranks, rounded down. | not all ranks recorded it
-- column: over_ns BIGINT | ns | What the hot rank's is beyond the mean, not below 0. | one of the two is not known
-- column: combine_waiting_ns BIGINT | ns | The longest that another rank waits in the call that takes the rows back. | it is not
--   matched over all its ranks
-- column: at_most_ns BIGINT | ns | What the imbalance cost the step, at most: the lesser of the two, where the hot rank came last
--   to that call; 0 where it did not, or the rows are even. | one of the two is not known
WITH joined AS (
  SELECT m.match_id, b.match_id AS combine_match_id, CASE WHEN p.evidence = 'splits' THEN m.match_id END AS split_id, p.*
  FROM expert_pass p
  LEFT JOIN matched_member m ON m.rank = p.rank AND m.call_id = p.dispatch_call_id
  LEFT JOIN matched_member b ON b.rank = p.rank AND b.call_id = p.combine_call_id
  WHERE p.evidence = 'counts' OR m.match_id IS NOT NULL
),
summed AS (
  SELECT j.evidence, j.split_id, j.count_id,
         CASE WHEN count(DISTINCT j.match_id) = 1 THEN any_value(j.match_id) END AS match_id,
         CASE WHEN count(DISTINCT j.combine_match_id) = 1 THEN any_value(j.combine_match_id) END AS combine_match_id,
         any_value(j.step) AS step, any_value(j.role) AS role,
         arg_min(j.phase, j.rank) AS phase, arg_min(j.microbatch, j.rank) AS microbatch, arg_min(j.layer, j.rank) AS layer,
         count(*) AS ranks, bool_and(j.whole) AS counted_whole, any_value(len(j.group_ranks))::INTEGER AS counted_size,
         CASE WHEN j.evidence = 'splits' AND count(j.counted_rows) = count(*)
              THEN bool_and(j.counted_rows = j.received_rows) END AS agrees,
         max(j.received_rows) AS most, min(j.received_rows) AS least, avg(j.received_rows) AS mean_rows,
         arg_max(j.rank, j.received_rows * 4294967296 - j.rank) AS hot_rank,
         arg_max(j.compute_ns, j.received_rows * 4294967296 - j.rank) AS hot_compute_ns,
         CASE WHEN count(j.compute_ns) = count(*) THEN (sum(j.compute_ns) // count(*))::BIGINT END AS mean_compute_ns,
         min(j.rank) AS lowest
  FROM joined j GROUP BY j.evidence, j.split_id, j.count_id
),
told AS (
  SELECT s.match_id, s.combine_match_id, s.evidence, s.phase, s.microbatch, s.layer, s.ranks, s.agrees, s.most, s.least,
         s.mean_rows, s.hot_rank, s.hot_compute_ns, s.mean_compute_ns, s.lowest,
         CASE WHEN s.evidence = 'splits' THEN m.step ELSE s.step END AS step,
         CASE WHEN s.evidence = 'splits' THEN m.role ELSE s.role END AS role,
         CASE WHEN s.evidence = 'splits' THEN m.group_size ELSE s.counted_size END AS group_size,
         CASE WHEN s.evidence = 'splits' THEN s.ranks = m.group_size ELSE s.counted_whole END AS whole
  FROM summed s LEFT JOIN matched_call m ON m.match_id = s.match_id
),
waited AS (
  SELECT match_id, max(waiting_ns) AS combine_waiting_ns, max(rank) FILTER (last) AS last_rank
  FROM arrival WHERE waiting_ns IS NOT NULL GROUP BY match_id
),
judged AS (
  SELECT t.*, w.combine_waiting_ns, w.last_rank, whole AND most > least AS uneven,
         CASE WHEN whole AND most > least AND t.hot_compute_ns IS NOT NULL AND t.mean_compute_ns IS NOT NULL
              THEN greatest(t.hot_compute_ns - t.mean_compute_ns, 0) END AS over_ns
  FROM told t LEFT JOIN waited w ON w.match_id = t.combine_match_id
)
SELECT match_id, combine_match_id, step, role, phase, microbatch, layer, evidence, group_size, ranks, agrees,
       CASE WHEN whole THEN most / nullif(mean_rows, 0) END AS imbalance, CASE WHEN uneven THEN hot_rank END AS hot_rank,
       CASE WHEN uneven THEN hot_compute_ns END AS hot_compute_ns, CASE WHEN whole THEN mean_compute_ns END AS mean_compute_ns,
       over_ns, combine_waiting_ns,
       CASE WHEN whole AND NOT uneven THEN 0 WHEN uneven AND last_rank <> hot_rank THEN 0
            WHEN over_ns IS NOT NULL AND combine_waiting_ns IS NOT NULL THEN least(over_ns, combine_waiting_ns) END AS at_most_ns
FROM judged
ORDER BY match_id, step, phase, microbatch, layer, lowest
