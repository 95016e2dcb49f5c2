-- gives: One step of one device of one rank that a profiler saw, every nanosecond in exactly one class; they sum to dur_ns.
-- needs: device_time
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: device INTEGER | | Device ordinal in its process. | not recorded, or none (basis host)
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: dur_ns BIGINT | ns | Duration of the step, the sum of the classes. | never
-- column: compute_ns BIGINT | ns | A kernel runs that is neither communication nor a copy or memset. | never
-- column: communication_ns BIGINT | ns | Exposed communication: no compute runs, but communication of another role than pp,
--   or of an unknown one. | never
-- column: pp_ns BIGINT | ns | No compute runs, but pipeline messages: their transfer, or the wait for the other stage. | never
-- column: copy_ns BIGINT | ns | Only copies or memsets run. | never
-- column: launch_starved_ns BIGINT | ns | Nothing runs and the host has launched nothing. | the recording has no launch times,
--   or basis is host
-- column: idle_ns BIGINT | ns | Nothing runs, but launched work waits; where launch_starved_ns is null, all of it. | never
-- column: overlapped_ns BIGINT | ns | Part of compute_ns in which communication runs too. | never
-- column: shared_ns BIGINT | ns | Part of communication_ns in which several roles communicate. | never
-- column: basis VARCHAR | | device: activities of the device; host: operators on the host's threads together and calls by their
--   backend's own ranges, for a rank without device work. | never
-- column: complete BOOLEAN | | Whether the step was recorded whole, as far as the file shows; false also where a profiler
--   saw a part of it alone, and hooks the rest. | never
SELECT rank, device, step, sum(dur_ns)::BIGINT AS dur_ns,
       coalesce(sum(dur_ns) FILTER (class = 'compute'), 0)::BIGINT AS compute_ns,
       coalesce(sum(dur_ns) FILTER (class = 'communication'), 0)::BIGINT AS communication_ns,
       coalesce(sum(dur_ns) FILTER (class = 'pp'), 0)::BIGINT AS pp_ns,
       coalesce(sum(dur_ns) FILTER (class = 'copy'), 0)::BIGINT AS copy_ns,
       CASE WHEN bool_and(launches_known) THEN coalesce(sum(dur_ns) FILTER (class = 'launch_starved'), 0)::BIGINT END
         AS launch_starved_ns,
       coalesce(sum(dur_ns) FILTER (class = 'idle'), 0)::BIGINT AS idle_ns,
       coalesce(sum(dur_ns) FILTER (class = 'compute' AND roles IS NOT NULL), 0)::BIGINT AS overlapped_ns,
       coalesce(sum(dur_ns) FILTER (class = 'communication' AND len(roles) > 1), 0)::BIGINT AS shared_ns,
       any_value(basis) AS basis, bool_and(step_complete) AS complete
FROM device_time
GROUP BY rank, device, step, start_ns
ORDER BY rank, device, start_ns
