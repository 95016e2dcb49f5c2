-- gives: One step of one rank: when it began and how long it took.
-- needs: device_step
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: step BIGINT | | Number of the step; from 0 where the recording does not number it. | never
-- column: start_ns BIGINT | ns | Begin, unix time as recorded. | never
-- column: end_ns BIGINT | ns | End; of a step that nothing ends, that of the recording. | neither is known
-- column: dur_ns BIGINT | ns | Duration. | the end is not known
-- column: end_recorded BOOLEAN | | Whether the end was recorded; if not, the duration reaches to the recording's end. | never
-- column: evidence VARCHAR | | recorded (by a hook), profiler_step, mark, optimizer, optimizer_kernel, gap,
--   window (the whole recording). | never
-- column: complete BOOLEAN | | Whether the step was recorded whole, as far as the file shows; false also where a profiler
--   saw a part of it alone, and hooks the rest. | never
SELECT CASE WHEN rank_key >= 0 THEN rank_key END AS rank, step, start_ns, end_ns, end_ns - start_ns AS dur_ns,
       end_recorded, step_evidence AS evidence, step_complete AS complete
FROM device_step
ORDER BY rank, start_ns
