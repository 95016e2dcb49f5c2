-- gives: Who one group's ranks waited for in one step: the rank that owns the lateness, in groups whose ranks do the same work.
-- needs: arrival, matched_call, lateness
-- column: step BIGINT | | Step of the calls. | outside every step
-- column: role VARCHAR | | Role of the group, one whose ranks are of one stage. | never
-- column: member_ranks INTEGER[] | | Ranks of the group, all recorded. | never
-- column: owner_rank INTEGER | | The rank whose own lateness made the last rank late, in this call or an earlier one. |
--   cause outside the recorded ranks, or before the recording
-- column: calls BIGINT | calls | Calls of the group that waited for it longer than the clocks leave open. | never
-- column: caused_waiting_ns BIGINT | ns | Sum over them of the time the group's other ranks waited. | never
-- column: share_of_waiting DOUBLE | 1 | Part of all such waiting of the group in this step. | never
-- column: slow BOOLEAN | | Whether it stands out: at least 3 calls, and 1.5 times an equal share of the waiting. | never
-- column: finding VARCHAR | | The same in words. | it does not stand out
WITH waited AS (
  SELECT match_id, sum(waiting_ns)::BIGINT AS waiting_ns, max(after_first_ns) AS skew_ns, max(residual_ns) AS residual_ns
  FROM arrival WHERE waiting_ns IS NOT NULL GROUP BY match_id
),
owned AS (
  SELECT m.step, m.role, m.member_ranks, m.group_size, l.owner_rank, w.waiting_ns
  FROM waited w
  JOIN matched_call m ON m.match_id = w.match_id
  JOIN arrival a ON a.match_id = w.match_id AND a.last
  JOIN lateness l ON l.match_id = a.match_id AND l.rank = a.rank
  WHERE w.skew_ns > w.residual_ns AND m.complete
    AND m.role IN ('tp', 'cp', 'ep', 'etp', 'tp_ep', 'dp', 'dp_cp', 'edp', 'intra_dp_cp', 'intra_edp', 'inter_dist_opt',
                   'tp_cp', 'tp_dp', 'tp_dp_cp', 'cp_l0', 'cp_l1', 'hybrid_cp')
),
summed AS (
  SELECT step, role, member_ranks, group_size, owner_rank, count(*) AS calls,
         sum(waiting_ns)::BIGINT AS caused_waiting_ns
  FROM owned GROUP BY ALL
),
shared AS (
  SELECT *, caused_waiting_ns / nullif(sum(caused_waiting_ns) OVER (PARTITION BY step, role, member_ranks), 0)::DOUBLE
           AS share_of_waiting
  FROM summed
),
judged AS (
  SELECT *, coalesce(calls >= 3 AND share_of_waiting * group_size > 1.5, false) AS slow FROM shared
)
SELECT step, role, member_ranks, owner_rank, calls, caused_waiting_ns, coalesce(share_of_waiting, 0.0) AS share_of_waiting, slow,
       CASE WHEN slow AND owner_rank IS NULL THEN 'cause outside the recorded ranks'
            WHEN slow THEN 'rank ' || owner_rank || ' comes late by itself' END AS finding
FROM judged
ORDER BY step, role, member_ranks, caused_waiting_ns DESC, owner_rank
