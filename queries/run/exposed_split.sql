-- gives: One role in one step of one device: what of its exposed communication is transfer and what waiting for peers.
-- needs: split_time
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: role VARCHAR | | Role of the groups, in Megatron's vocabulary; unknown: communication whose role is not known. | never
-- column: exposed_ns BIGINT | ns | No compute and no other role runs: exposed_ns of exposed_by_role. | never
-- column: transfer_ns BIGINT | ns | Part of it in which data of a matched call moves: the call's duration on the last rank to
--   come, taken from its end. | never
-- column: waiting_ns BIGINT | ns | Part of it in which matched calls only wait for a rank that comes later. | never
-- column: unsplit_ns BIGINT | ns | Part of it in calls that are not matched over all their ranks. | never
SELECT rank, device, step, roles[1] AS role, sum(dur_ns)::BIGINT AS exposed_ns,
       coalesce(sum(dur_ns) FILTER (part = 'transfer'), 0)::BIGINT AS transfer_ns,
       coalesce(sum(dur_ns) FILTER (part = 'waiting'), 0)::BIGINT AS waiting_ns,
       coalesce(sum(dur_ns) FILTER (part IS NULL), 0)::BIGINT AS unsplit_ns
FROM split_time
WHERE class <> 'compute' AND len(roles) = 1
GROUP BY rank, device, step, start_ns, role
ORDER BY rank, device, start_ns, role
