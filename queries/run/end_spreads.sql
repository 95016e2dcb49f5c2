-- gives: How far apart the ends of calls of one role and operation lie that complete together, before and after alignment.
-- needs: end_spread, matched_call
-- column: role VARCHAR | | Role of the groups. | not known
-- column: op VARCHAR | | Operation. | never
-- column: calls BIGINT | calls | How many. | never
-- column: recorded_median_ns BIGINT | ns | First end to last, clocks as recorded: the median, a value that occurred. | never
-- column: recorded_max_ns BIGINT | ns | The largest. | never
-- column: aligned_median_ns BIGINT | ns | The same by aligned clocks: what they leave open. | never
-- column: aligned_p95_ns BIGINT | ns | Its 95th percentile: smaller differences between ranks are not claimed. | never
-- column: aligned_max_ns BIGINT | ns | The largest. | never
SELECT m.role, m.op, count(*) AS calls, quantile_disc(e.recorded_ns, 0.5) AS recorded_median_ns,
       max(e.recorded_ns) AS recorded_max_ns, quantile_disc(e.aligned_ns, 0.5) AS aligned_median_ns,
       quantile_disc(e.aligned_ns, 0.95) AS aligned_p95_ns, max(e.aligned_ns) AS aligned_max_ns
FROM end_spread e
JOIN matched_call m ON m.match_id = e.match_id
GROUP BY ALL
ORDER BY ALL
