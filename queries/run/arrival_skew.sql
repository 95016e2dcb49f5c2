-- gives: When one rank comes to the calls of one role and operation in one step, against the other ranks, clocks aligned.
-- needs: arrival, matched_call, lateness
-- column: step BIGINT | | Step of the calls. | outside every step
-- column: role VARCHAR | | Role of the groups. | not known
-- column: op VARCHAR | | Operation. | never
-- column: rank INTEGER | | Global rank. | never
-- column: calls BIGINT | calls | Calls that another rank recorded too. | never
-- column: last_calls BIGINT | calls | Those to which it came last. | never
-- column: late_ns BIGINT | ns | Sum of how much later than the first rank it came. | never
-- column: median_late_ns BIGINT | ns | Median of it, a value that occurred. | never
-- column: own_ns BIGINT | ns | Part of late_ns that arose on the rank itself since its previous call with others. | no call has
--   an earlier one
-- column: inherited_ns BIGINT | ns | Part that it brought along from the end of that earlier call. | likewise
-- column: dur_ns BIGINT | ns | Sum of the durations on this rank. | never
-- column: transfer_ns BIGINT | ns | Sum of the durations on the last rank to come. | no call has all its ranks
-- column: waiting_ns BIGINT | ns | Sum of what this rank's durations are longer. | likewise
-- column: residual_ns BIGINT | ns | What the clocks leave open in one call: a smaller median means nothing. | never
SELECT m.step, m.role, m.op, a.rank, count(*) AS calls, count(*) FILTER (a.last) AS last_calls,
       sum(a.after_first_ns)::BIGINT AS late_ns, quantile_disc(a.after_first_ns, 0.5) AS median_late_ns,
       sum(l.own_ns)::BIGINT AS own_ns, sum(l.inherited_ns)::BIGINT AS inherited_ns, sum(a.dur_ns)::BIGINT AS dur_ns,
       sum(a.transfer_ns)::BIGINT AS transfer_ns, sum(a.waiting_ns)::BIGINT AS waiting_ns, max(a.residual_ns) AS residual_ns
FROM arrival a
JOIN matched_call m ON m.match_id = a.match_id
JOIN lateness l ON l.match_id = a.match_id AND l.rank = a.rank
GROUP BY ALL
ORDER BY m.step, m.role, m.op, a.rank
