-- gives: The clock of one rank against the reference rank of all those it is connected to.
-- needs: clock
-- column: rank INTEGER | | Global rank. | never
-- column: host VARCHAR | | Its host. | not recorded
-- column: reference_rank INTEGER | | The rank whose clock is taken as right: the lowest that is connected, by calls that complete
--   together or by a shared host. Clocks of different references cannot be compared. | never
-- column: base_ns BIGINT | ns | Unix time at which offset_ns holds. | never
-- column: since_ns BIGINT | ns | From when on the figures hold, by this clock: it was set then. | from the beginning
-- column: offset_ns BIGINT | ns | How far the clock is ahead of the reference at base_ns. | never
-- column: drift_ppb DOUBLE | 1e-9 | How much faster it runs. | too few calls: taken as 0
-- column: calls BIGINT | calls | Calls the figures rest on; 0: the clock is its host's, or as recorded. | never
-- column: residual_median_ns BIGINT | ns | Median distance of its ends from their calls' means, by aligned clocks. | no calls
-- column: residual_p95_ns BIGINT | ns | 95th percentile of it. | no calls
-- column: residual_max_ns BIGINT | ns | The largest. | no calls
-- column: open_ns BIGINT | ns | What the clocks leave open between this rank and others: the largest, over the sets of ranks it
--   makes calls with, of the 95th percentile of how far apart these end by aligned clocks; not less than 50 us where a
--   host's clock alone connects it to others. | evidence is recorded
-- column: evidence VARCHAR | | calls (that complete together), host (no call, but other ranks of its host show the same clock),
--   recorded (neither: offset_ns is 0 for want of a figure). | never
SELECT rank, host, reference_rank, base_ns, since_ns, offset_ns, drift_ppb, calls, residual_median_ns, residual_p95_ns,
       residual_max_ns, open_ns, evidence
FROM clock
ORDER BY rank, since_ns NULLS FIRST
