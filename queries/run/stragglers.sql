-- gives: Who one group's ranks waited for in one step: the rank that owns the lateness, in groups whose ranks do the same work.
-- needs: arrival, matched_call, lateness, stage_role, query step_time
-- column: step BIGINT | | Step of the calls. | outside every step
-- column: role VARCHAR | | Role of the group, one whose ranks are of one stage. | never
-- column: member_ranks INTEGER[] | | Ranks of the group, all recorded. | never
-- column: owner_rank INTEGER | | The rank whose own lateness made the last rank late, in this call or an earlier one. |
--   cause outside the recorded ranks, or before the recording
-- column: calls BIGINT | calls | Calls of the group that waited for it longer than the clocks leave open. | never
-- column: caused_waiting_ns BIGINT | ns | Sum over them of the time the group's other ranks waited. | never
-- column: share_of_waiting DOUBLE | 1 | Part of all such waiting of the group in this step. | never
-- column: share_of_step DOUBLE | 1 | caused_waiting_ns for each of the ranks that wait, of the step's median duration. | the
--   step's duration is not known
-- column: slow BOOLEAN | | Whether it stands out: at least 3 calls, 1.5 times an equal share of the waiting, and 1 % of the step
--   where its duration is known. | never
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
  JOIN stage_role r ON r.role = m.role
  WHERE w.skew_ns > w.residual_ns AND m.complete
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
lasted AS (
  SELECT step, quantile_disc(dur_ns, 0.5) AS step_ns FROM step_time WHERE dur_ns > 0 GROUP BY step
),
judged AS (
  SELECT s.*, s.caused_waiting_ns / (s.group_size - 1) / t.step_ns AS share_of_step
  FROM shared s LEFT JOIN lasted t ON t.step = s.step
),
told AS (
  SELECT *, coalesce(calls >= 3 AND share_of_waiting * group_size > 1.5 AND coalesce(share_of_step, 1.0) >= 0.01, false) AS slow
  FROM judged
)
SELECT step, role, member_ranks, owner_rank, calls, caused_waiting_ns, coalesce(share_of_waiting, 0.0) AS share_of_waiting,
       share_of_step, slow,
       CASE WHEN slow AND owner_rank IS NULL THEN 'cause outside the recorded ranks'
            WHEN slow THEN 'rank ' || owner_rank || ' comes late by itself' END AS finding
FROM told
ORDER BY step, role, member_ranks, caused_waiting_ns DESC, owner_rank
