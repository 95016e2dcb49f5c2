-- gives: One call of one rank with its place, sizes and time.
-- needs: comm
-- parameter: role VARCHAR = NULL | Only calls of this role; NULL: of all.
-- parameter: op VARCHAR = NULL | Only calls of this operation; NULL: of all.
-- parameter: step BIGINT = NULL | Only calls of this step; NULL: of all.
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: call_id BIGINT | | Number of the call on its rank. | never
-- column: step BIGINT | | Step it was issued in. | outside every step
-- column: phase VARCHAR | | forward, backward, recompute, optimizer, other. | not known
-- column: microbatch INTEGER | | Micro-batch. | not known
-- column: role VARCHAR | | Role of its group. | not known
-- column: op VARCHAR | | Operation. | a name this program does not know
-- column: dtype VARCHAR | | Element type. | not recorded
-- column: group_id VARCHAR | | Identity of its group on its rank. | not recorded
-- column: group_size INTEGER | ranks | Ranks in the group. | not recorded
-- column: seq BIGINT | | Sequence number in the group, as recorded. | not recorded
-- column: peer INTEGER | | Other side of a send or recv. | no send or recv, or not recorded
-- column: in_elems BIGINT | elements | Elements this rank hands in. | not recorded
-- column: out_elems BIGINT | elements | Elements this rank gets out. | not recorded
-- column: in_splits BIGINT[] | rows | Rows sent to each rank of the group. | an even split, or not known
-- column: out_splits BIGINT[] | rows | Rows received from each rank. | an even split, or not known
-- column: payload_bytes BIGINT | bytes | Payload, nccl-tests "size". | not known
-- column: start_ns BIGINT | ns | Start of its work, unix time as recorded. | no work is tied to it
-- column: dur_ns BIGINT | ns | From the first start to the last end of its work, waiting included. | no work is tied to it
-- column: time_source VARCHAR | | What the times rest on: kernel, backend_range, cuda_event, watchdog. | no time
-- column: coalesce_id BIGINT | | Calls launched as one share it. | not known
SELECT rank, call_id, step, phase, microbatch, role, op, dtype, group_id, group_size, seq, peer, in_elems, out_elems,
       in_splits, out_splits, payload_bytes, start_ns, dur_ns, time_source, coalesce_id
FROM comm
WHERE ($role IS NULL OR role = $role) AND ($op IS NULL OR op = $op) AND ($step IS NULL OR step = $step)
ORDER BY rank, call_id
