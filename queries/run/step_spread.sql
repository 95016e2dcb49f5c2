-- gives: One step over its ranks: how far their durations lie apart.
-- needs: query step_time
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: ranks BIGINT | ranks | Ranks that recorded it with its end. | never
-- column: min_dur_ns BIGINT | ns | Shortest duration. | no end is known
-- column: median_dur_ns BIGINT | ns | Median, the lower one: a duration that occurred. | no end is known
-- column: max_dur_ns BIGINT | ns | Longest. | no end is known
-- column: longest_rank INTEGER | | Rank of the longest; of several the lowest. | it has none, or no end is known
-- column: start_spread_ns BIGINT | ns | From the earliest begin to the latest, by clocks as recorded: not aligned. | never
WITH ordered AS (
  SELECT *, row_number() OVER (PARTITION BY step ORDER BY dur_ns DESC NULLS LAST, rank) AS place FROM step_time
)
SELECT step, count(dur_ns) AS ranks, min(dur_ns) AS min_dur_ns, quantile_disc(dur_ns, 0.5) AS median_dur_ns,
       max(dur_ns) AS max_dur_ns, min(rank) FILTER (place = 1 AND dur_ns IS NOT NULL) AS longest_rank,
       max(start_ns) - min(start_ns) AS start_spread_ns
FROM ordered
GROUP BY step
ORDER BY step
