-- gives: The calls of one role, operation, type and size that one rank made in one step.
-- needs: comm, bus_factor
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: step BIGINT | | Step they were issued in. | outside every step
-- column: role VARCHAR | | Role of the groups. | not known
-- column: axis VARCHAR | | The role rolled up to TP, CP, EP, PP, DP or other. | not known
-- column: op VARCHAR | | Operation. | a name this program does not know
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: group_size INTEGER | ranks | Ranks in the group. | not recorded
-- column: payload_bytes BIGINT | bytes | Payload of one call, nccl-tests "size". | not known
-- column: calls BIGINT | calls | How many. | never
-- column: total_bytes BIGINT | bytes | Payload of all. Receives are rows of their own: never add them to what is sent. |
--   the payload is not known
-- column: timed_calls BIGINT | calls | Those of known time that were launched alone. | never
-- column: coalesced_calls BIGINT | calls | Those launched as one with others: their time cannot be told from the others'. | never
-- column: dur_ns BIGINT | ns | Sum of the times of timed_calls, waiting for peers included. | there are none
-- column: min_dur_ns BIGINT | ns | The shortest of them. | there are none
-- column: median_dur_ns BIGINT | ns | Their median, the lower one: a duration that occurred. | there are none
-- column: max_dur_ns BIGINT | ns | The longest of them. | there are none
-- column: bus_gb_per_s DOUBLE | GB/s | Bus bandwidth of nccl-tests over all timed_calls: bytes / time times 2(N-1)/N for
--   all_reduce, (N-1)/N for all_gather, reduce_scatter, all_to_all, gather and scatter, else 1. Waiting counts as time, so
--   the links did at least this. | payload, time or group size is not known
-- column: best_bus_gb_per_s DOUBLE | GB/s | The same of the shortest call, which waited least. | payload, time or group size is
--   not known
WITH together AS (
  SELECT rank, coalesce_id, count(*) AS members FROM comm WHERE coalesce_id IS NOT NULL GROUP BY ALL
),
timed AS (
  SELECT c.*, coalesce(t.members, 1) > 1 AS coalesced,
         CASE WHEN coalesce(t.members, 1) = 1 THEN c.dur_ns END AS own_ns
  FROM comm c
  LEFT JOIN together t ON t.rank IS NOT DISTINCT FROM c.rank AND t.coalesce_id = c.coalesce_id
),
summed AS (
  SELECT rank, step, role, axis, op, dtype, group_size, payload_bytes, count(*) AS calls,
         sum(payload_bytes)::BIGINT AS total_bytes, count(own_ns) AS timed_calls,
         count(*) FILTER (coalesced) AS coalesced_calls, sum(own_ns)::BIGINT AS dur_ns, min(own_ns) AS min_dur_ns,
         quantile_disc(own_ns, 0.5) AS median_dur_ns, max(own_ns) AS max_dur_ns
  FROM timed GROUP BY ALL
)
SELECT s.rank, s.step, s.role, s.axis, s.op, s.dtype, s.group_size, s.payload_bytes, s.calls, s.total_bytes, s.timed_calls,
       s.coalesced_calls, s.dur_ns, s.min_dur_ns, s.median_dur_ns, s.max_dur_ns,
       s.payload_bytes * s.timed_calls / nullif(s.dur_ns, 0) * f.factor AS bus_gb_per_s,
       s.payload_bytes / nullif(s.min_dur_ns, 0) * f.factor AS best_bus_gb_per_s
FROM summed s LEFT JOIN bus_factor f ON f.op = s.op AND f.group_size = s.group_size
ORDER BY ALL
