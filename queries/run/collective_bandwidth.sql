-- gives: Transfer of the calls of one role, operation, type and size, waiting left out.
-- needs: arrival, matched_call, bus_factor, link_time
-- column: role VARCHAR | | Role of the groups. | not known
-- column: op VARCHAR | | Operation; send for a send with its recv. | never
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: group_size INTEGER | ranks | Ranks that take part. | never
-- column: payload_bytes BIGINT | bytes | Payload of one call, nccl-tests "size". | not known
-- column: span VARCHAR | | intra (all ranks on one host), inter. | a host is not recorded
-- column: calls BIGINT | calls | Calls of which all ranks were recorded, and whose time is theirs alone. | never
-- column: min_transfer_ns BIGINT | ns | Shortest duration on the last rank to come. | never
-- column: median_transfer_ns BIGINT | ns | Median, the lower one: a duration that occurred. | never
-- column: max_transfer_ns BIGINT | ns | Longest. | never
-- column: algorithm_gb_per_s DOUBLE | GB/s | Payload over the median transfer. | payload is not known
-- column: bus_gb_per_s DOUBLE | GB/s | The same times nccl-tests' factor of the operation. | payload is not known
-- column: link_time_ns BIGINT | ns | Time of one call at the bandwidth of --links, beside the transfer. | no --links, or it does
--   not know the operation, size and span
-- column: link_bus_gb_per_s DOUBLE | GB/s | That bandwidth. | likewise
-- column: link_note VARCHAR | | How it was found: measured, interpolated (linearly in the logarithm of the size), below the table
--   or above the table (the nearest end), any size. | likewise
WITH transferred AS (
  SELECT m.role, m.op, m.dtype, m.group_size, m.payload_bytes,
         CASE WHEN m.hosts = 1 THEN 'intra' WHEN m.hosts > 1 THEN 'inter' END AS span, a.transfer_ns
  FROM arrival a
  JOIN matched_call m ON m.match_id = a.match_id
  WHERE a.last AND a.transfer_ns IS NOT NULL AND NOT m.shared
),
summed AS (
  SELECT role, op, dtype, group_size, payload_bytes, span, count(*) AS calls, min(transfer_ns) AS min_transfer_ns,
         quantile_disc(transfer_ns, 0.5) AS median_transfer_ns, max(transfer_ns) AS max_transfer_ns
  FROM transferred GROUP BY ALL
)
SELECT s.*, s.payload_bytes / nullif(s.median_transfer_ns, 0) AS algorithm_gb_per_s,
       s.payload_bytes / nullif(s.median_transfer_ns, 0) * f.factor AS bus_gb_per_s, t.link_time_ns,
       t.link_bus_gb_per_s, t.link_note
FROM summed s
LEFT JOIN bus_factor f ON f.op = s.op AND f.group_size = s.group_size
LEFT JOIN link_time t ON t.op = s.op AND t.group_size = s.group_size AND t.payload_bytes = s.payload_bytes
  AND t.span IS NOT DISTINCT FROM s.span
ORDER BY s.role, s.op, s.dtype, s.group_size, s.payload_bytes, s.span
