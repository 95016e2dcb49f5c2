-- gives: One role in one step of one device: how long it communicated, hidden by compute or not.
-- needs: device_time
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: role VARCHAR | | Role of the groups, in Megatron's vocabulary; unknown: communication whose role is not known. | never
-- column: busy_ns BIGINT | ns | Communication of the role runs: overlapped + exposed + shared. | never
-- column: overlapped_ns BIGINT | ns | ... while compute runs. | never
-- column: exposed_ns BIGINT | ns | ... while no compute and no other role runs. Summed over the roles and with shared_ns of
--   time_classes: all exposed communication, pp included. | never
-- column: shared_ns BIGINT | ns | ... while no compute runs, but other roles do: counted for each of them. | never
-- column: shared_with VARCHAR[] | | The other roles of shared_ns, sorted. | nothing is shared
-- column: transfer_ns BIGINT | ns | Part of exposed_ns in which data moves. | one rank cannot tell, see reason
-- column: waiting_ns BIGINT | ns | Part of exposed_ns in which a peer has not arrived. | one rank cannot tell, see reason
-- column: reason VARCHAR | | Why transfer and waiting are not told apart. | never
WITH part AS (
  SELECT rank, device, step, start_ns, class, roles, dur_ns, UNNEST(roles) AS role FROM device_time WHERE roles IS NOT NULL
),
companion AS (
  SELECT rank, device, step, start_ns, role, UNNEST(roles) AS other FROM part WHERE class <> 'compute'
),
together AS (
  SELECT rank, device, step, start_ns, role, list_sort(list(DISTINCT other)) AS shared_with
  FROM companion WHERE other <> role GROUP BY ALL
),
summed AS (
  SELECT rank, device, step, start_ns, role, sum(dur_ns)::BIGINT AS busy_ns,
         coalesce(sum(dur_ns) FILTER (class = 'compute'), 0)::BIGINT AS overlapped_ns,
         coalesce(sum(dur_ns) FILTER (class <> 'compute' AND len(roles) = 1), 0)::BIGINT AS exposed_ns,
         coalesce(sum(dur_ns) FILTER (class <> 'compute' AND len(roles) > 1), 0)::BIGINT AS shared_ns
  FROM part GROUP BY ALL
)
SELECT s.rank, s.device, s.step, s.role, s.busy_ns, s.overlapped_ns, s.exposed_ns, s.shared_ns, t.shared_with,
       NULL::BIGINT AS transfer_ns, NULL::BIGINT AS waiting_ns, 'needs the other ranks: query exposed_split' AS reason
FROM summed s
LEFT JOIN together t ON t.rank IS NOT DISTINCT FROM s.rank AND t.device IS NOT DISTINCT FROM s.device
  AND t.step = s.step AND t.start_ns = s.start_ns AND t.role = s.role
ORDER BY s.rank, s.device, s.start_ns, s.role
