-- gives: Transfer of one group against the other groups of its role that make the same calls: same operation, size and span.
-- needs: arrival, matched_call
-- column: role VARCHAR | | Role of the group. | not known
-- column: op VARCHAR | | Operation. | never
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: payload_bytes BIGINT | bytes | Payload of one call. | not known
-- column: span VARCHAR | | intra (all ranks on one host), inter. | a host is not recorded
-- column: member_ranks INTEGER[] | | Ranks of the group, all recorded. | never
-- column: sender_rank INTEGER | | Rank that sends, where it is a message: each direction is judged for itself. | no message
-- column: calls BIGINT | calls | Its calls whose time is theirs alone. | never
-- column: median_transfer_ns BIGINT | ns | Median duration on the last rank to come. | never
-- column: groups BIGINT | groups | Groups that are compared. | never
-- column: usual_transfer_ns BIGINT | ns | Median of the groups' medians. | never
-- column: residual_ns BIGINT | ns | What the clocks leave open: a smaller difference means nothing. | never
-- column: slow BOOLEAN | | Whether it stands out: at least 3 groups and 3 calls, 1.2 times the usual, and beyond the residual. | never
WITH transferred AS (
  SELECT m.role, m.op, m.dtype, m.payload_bytes, m.member_ranks, m.sender_rank, m.group_size,
         CASE WHEN m.hosts = 1 THEN 'intra' WHEN m.hosts > 1 THEN 'inter' END AS span, a.transfer_ns, a.residual_ns
  FROM arrival a
  JOIN matched_call m ON m.match_id = a.match_id
  WHERE a.last AND a.transfer_ns IS NOT NULL AND NOT m.shared
),
by_group AS (
  SELECT role, op, dtype, payload_bytes, span, group_size, member_ranks, sender_rank, count(*) AS calls,
         quantile_disc(transfer_ns, 0.5) AS median_transfer_ns, max(residual_ns) AS residual_ns
  FROM transferred GROUP BY ALL
),
usual AS (
  SELECT role, op, dtype, payload_bytes, span, group_size, count(*) AS groups,
         quantile_disc(median_transfer_ns, 0.5) AS usual_transfer_ns
  FROM by_group GROUP BY ALL
)
SELECT g.role, g.op, g.dtype, g.payload_bytes, g.span, g.member_ranks, g.sender_rank, g.calls, g.median_transfer_ns, u.groups,
       u.usual_transfer_ns, g.residual_ns,
       u.groups >= 3 AND g.calls >= 3 AND g.median_transfer_ns > 1.2 * u.usual_transfer_ns
         AND g.median_transfer_ns - u.usual_transfer_ns > g.residual_ns AS slow
FROM by_group g
JOIN usual u ON u.role IS NOT DISTINCT FROM g.role AND u.op = g.op AND u.dtype IS NOT DISTINCT FROM g.dtype
  AND u.payload_bytes IS NOT DISTINCT FROM g.payload_bytes AND u.span IS NOT DISTINCT FROM g.span
  AND u.group_size = g.group_size
ORDER BY g.role, g.op, g.dtype, g.payload_bytes, g.span, g.member_ranks, g.sender_rank
