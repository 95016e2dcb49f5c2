-- gives: Communication kernels of one name that no recorded call explains: their role and bytes are not known.
-- needs: kernel_place
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: name VARCHAR | | Name as recorded. | not recorded
-- column: why VARCHAR | | launched_before_window: launched before the recording began; no_call: communication outside of
--   torch.distributed, or of a call the recording lacks. | never
-- column: kernels BIGINT | kernels | How many. | never
-- column: dur_ns BIGINT | ns | Sum of their durations. | no duration was recorded
SELECT rank, name, CASE WHEN completeness = 'launched_before_window' THEN completeness ELSE 'no_call' END AS why,
       count(*) AS kernels, sum(dur_ns)::BIGINT AS dur_ns
FROM kernel_place
WHERE kernel_class = 'comm' AND coalesce_id IS NULL
GROUP BY ALL
ORDER BY ALL
