-- gives: One step of one device of one rank: when its first activity starts, and how late the rank comes to its first call.
-- needs: kernel_place, device_step, arrival, matched_call
-- column: rank INTEGER | | Global rank. | never
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: start_ns BIGINT | ns | Begin of the step, unix time as recorded. | never
-- column: first_activity_ns BIGINT | ns | Start of the first activity that was launched in it, communication and copies
--   included, unix time as recorded. | never
-- column: head_ns BIGINT | ns | first_activity_ns - start_ns: until then the host has given the device nothing to do. | never
-- column: first_op VARCHAR | | Operation of the rank's first call of the step that other ranks recorded too. | there is none
-- column: first_role VARCHAR | | Role of its group. | there is none, or not known
-- column: first_late_ns BIGINT | ns | How much later than the first rank it came to that call, clocks aligned. | there is none
WITH first AS (
  SELECT rank, device, step, min(start_ns) AS first_activity_ns
  FROM kernel_place WHERE step IS NOT NULL AND start_ns IS NOT NULL AND rank IS NOT NULL GROUP BY ALL
),
called AS (
  SELECT a.rank, m.step, arg_min(m.op, a.arrival_ns) AS first_op, arg_min(m.role, a.arrival_ns) AS first_role,
         arg_min(a.after_first_ns, a.arrival_ns) AS first_late_ns
  FROM arrival a JOIN matched_call m ON m.match_id = a.match_id WHERE m.step IS NOT NULL GROUP BY ALL
)
SELECT f.rank, f.device, f.step, s.start_ns, f.first_activity_ns, f.first_activity_ns - s.start_ns AS head_ns, c.first_op,
       c.first_role, c.first_late_ns
FROM first f
JOIN device_step s ON s.rank_key = f.rank AND s.step = f.step
LEFT JOIN called c ON c.rank = f.rank AND c.step = f.step
ORDER BY f.rank, f.device, f.step
