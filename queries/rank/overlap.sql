-- gives: One step of one device: how much of its communication compute hides.
-- needs: device_time
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: communication_ns BIGINT | ns | Communication of any role runs, pipeline messages included: overlapped + exposed. | never
-- column: overlapped_ns BIGINT | ns | ... while compute runs. | never
-- column: exposed_ns BIGINT | ns | ... while none runs. | never
-- column: overlapped_share DOUBLE | 1 | overlapped_ns / communication_ns. | nothing communicates
SELECT rank, device, step,
       coalesce(sum(dur_ns) FILTER (roles IS NOT NULL), 0)::BIGINT AS communication_ns,
       coalesce(sum(dur_ns) FILTER (roles IS NOT NULL AND class = 'compute'), 0)::BIGINT AS overlapped_ns,
       coalesce(sum(dur_ns) FILTER (roles IS NOT NULL AND class <> 'compute'), 0)::BIGINT AS exposed_ns,
       sum(dur_ns) FILTER (roles IS NOT NULL AND class = 'compute')
         / sum(dur_ns) FILTER (roles IS NOT NULL) AS overlapped_share
FROM device_time
GROUP BY rank, device, step, start_ns
ORDER BY rank, device, start_ns
