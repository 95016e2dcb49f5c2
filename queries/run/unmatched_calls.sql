-- gives: Calls of one rank, role and operation to which no other rank's call was matched, for one reason.
-- needs: unmatched_call, comm
-- column: rank INTEGER | | Global rank. | never
-- column: role VARCHAR | | Role of the group. | not known
-- column: op VARCHAR | | Operation. | a name this program does not know
-- column: reason VARCHAR | | Why there is no counterpart. | never
-- column: calls BIGINT | calls | How many. | never
-- column: first_call_id BIGINT | | The first of them on its rank. | never
SELECT u.rank, c.role, c.op, u.reason, count(*) AS calls, min(u.call_id) AS first_call_id
FROM unmatched_call u
JOIN comm c ON c.rank = u.rank AND c.call_id = u.call_id
GROUP BY ALL
ORDER BY ALL
