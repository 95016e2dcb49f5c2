-- gives: The clock of one rank against the reference rank of all those it is connected to by calls that complete together.
-- needs: clock
-- column: rank INTEGER | | Global rank. | never
-- column: host VARCHAR | | Its host. | not recorded
-- column: reference_rank INTEGER | | The rank whose clock is taken as right: the lowest that is connected. Clocks of different
--   references cannot be compared. | never
-- column: base_ns BIGINT | ns | Unix time at which offset_ns holds. | never
-- column: offset_ns BIGINT | ns | How far the clock is ahead of the reference at base_ns. | never
-- column: drift_ppb DOUBLE | 1e-9 | How much faster it runs. | too few calls: taken as 0
-- column: calls BIGINT | calls | Calls the figures rest on; 0: the clock is as recorded. | never
-- column: residual_median_ns BIGINT | ns | Median distance of its ends from their calls' means, by aligned clocks. | no calls
-- column: residual_p95_ns BIGINT | ns | 95th percentile of it. | no calls
-- column: residual_max_ns BIGINT | ns | The largest. | no calls
SELECT rank, host, reference_rank, base_ns, offset_ns, drift_ppb, calls, residual_median_ns, residual_p95_ns, residual_max_ns
FROM clock
ORDER BY rank
