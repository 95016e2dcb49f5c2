-- gives: Transfer between the same nodes, of messages in one direction, against that between other nodes of the same kind.
-- needs: arrival, matched_call, link
-- column: role VARCHAR | | Role of the groups. | not known
-- column: op VARCHAR | | Operation; send for a send with its recv. | never
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: group_size INTEGER | ranks | Ranks that take part. | never
-- column: payload_bytes BIGINT | bytes | Payload of one call. | not known
-- column: span VARCHAR | | intra (all ranks on one host), inter. | never
-- column: hosts VARCHAR[] | | The nodes: of a message sender and receiver, else in order of name. | never
-- column: calls BIGINT | calls | Calls of which all ranks were recorded, and whose time is theirs alone. | never
-- column: median_transfer_ns BIGINT | ns | Median duration on the last rank to come. | never
-- column: links BIGINT | links | Nodes or sets of nodes that are compared: same role, operation, type, sizes and span. | never
-- column: usual_transfer_ns BIGINT | ns | Median of their medians, the lower one. | never
-- column: residual_ns BIGINT | ns | What the clocks leave open: a smaller difference means nothing. | never
-- column: slow BOOLEAN | | Whether it stands out: at least 3 links and 3 calls, 1.2 times the usual, and beyond the residual. | never
-- column: finding VARCHAR | | The same in words. | it does not stand out
WITH transferred AS (
  SELECT m.role, m.op, m.dtype, m.group_size, m.payload_bytes, CASE WHEN m.hosts = 1 THEN 'intra' ELSE 'inter' END AS span,
         l.hosts, a.transfer_ns, a.residual_ns
  FROM arrival a
  JOIN matched_call m ON m.match_id = a.match_id
  JOIN link l ON l.member_ranks = m.member_ranks AND l.sender_rank IS NOT DISTINCT FROM m.sender_rank
  WHERE a.last AND a.transfer_ns IS NOT NULL AND NOT m.shared
),
by_link AS (
  SELECT role, op, dtype, group_size, payload_bytes, span, hosts, count(*) AS calls,
         quantile_disc(transfer_ns, 0.5) AS median_transfer_ns, max(residual_ns) AS residual_ns
  FROM transferred GROUP BY ALL
),
compared AS (
  SELECT *, count(*) OVER w AS links, quantile_disc(median_transfer_ns, 0.5) OVER w AS usual_transfer_ns
  FROM by_link
  WINDOW w AS (PARTITION BY role, op, dtype, group_size, payload_bytes, span)
),
judged AS (
  SELECT *, links >= 3 AND calls >= 3 AND median_transfer_ns > 1.2 * usual_transfer_ns
         AND median_transfer_ns - usual_transfer_ns > residual_ns AS slow
  FROM compared
)
SELECT role, op, dtype, group_size, payload_bytes, span, hosts, calls, median_transfer_ns, links, usual_transfer_ns, residual_ns,
       slow,
       CASE WHEN slow THEN CASE WHEN span = 'intra' THEN 'inside ' || hosts[1]
                                WHEN op = 'send' THEN 'from ' || hosts[1] || ' to ' || hosts[2]
                                ELSE 'between ' || array_to_string(hosts, ', ') END
         || ' data moves slower than between its like' END AS finding
FROM judged
ORDER BY role, op, dtype, group_size, payload_bytes, span, hosts
