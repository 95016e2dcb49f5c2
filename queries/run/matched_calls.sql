-- gives: One call over all ranks that recorded it.
-- needs: matched_call
-- column: match_id BIGINT | | Number of the matched call in this run. | never
-- column: evidence VARCHAR | | comms_id, seq (group and sequence number), order (no number was recorded: an inference). | never
-- column: op VARCHAR | | Operation; send for a send with its recv. | never
-- column: role VARCHAR | | Role of the group. | not known, or the ranks disagree
-- column: step BIGINT | | Step on the lowest rank. | outside every step
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: group_size INTEGER | ranks | Ranks that take part. | not recorded
-- column: payload_bytes BIGINT | bytes | Payload, the largest of the ranks'. | not known
-- column: member_ranks INTEGER[] | | Ranks that recorded it, ascending. | never
-- column: timed INTEGER | ranks | Ranks that recorded its time. | never
-- column: complete BOOLEAN | | Whether all ranks of the group recorded it with its time. | never
-- column: shared BOOLEAN | | Whether its time is also that of other calls that were launched as one with it. | never
-- column: hosts INTEGER | hosts | Hosts of its ranks. | a host or a rank is not recorded
SELECT match_id, evidence, op, role, step, dtype, group_size, payload_bytes, member_ranks, timed, complete, shared, hosts
FROM matched_call
ORDER BY match_id
