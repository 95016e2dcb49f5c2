-- gives: One step of one rank: when its forward and backward passes begin and end.
-- needs: kernel_place, marked_pass, host_pass
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: step BIGINT | | Step the work was launched in. | outside every step
-- column: evidence VARCHAR | | kernels: on its devices; marks: the rank has no kernels of passes in this step, and the ranges
--   that hooks or marks put around passes stand for them, host times; operators: the rank has neither, and those that
--   autograd ran backward stand for them. | never
-- column: first_forward_ns BIGINT | ns | Start of the first compute kernel (mark, operator) of a forward pass, unix time as
--   recorded. | none
-- column: last_forward_end_ns BIGINT | ns | End of the last one. | none
-- column: first_backward_ns BIGINT | ns | Start of the first one of a backward pass, recomputation included. | none
-- column: last_backward_end_ns BIGINT | ns | End of the last one. | none
WITH parts AS (
  SELECT rank, step, 0 AS turn, 'kernels' AS evidence, CASE WHEN phase = 'forward' THEN 'forward' ELSE 'backward' END AS phase,
         start_ns, start_ns + dur_ns AS end_ns
  FROM kernel_place
  WHERE kernel_class NOT IN ('comm', 'copy', 'memset') AND phase IN ('forward', 'backward', 'recompute')
  UNION ALL
  SELECT rank, step, 1, 'marks', phase, start_ns, end_ns FROM marked_pass
  UNION ALL
  SELECT rank, step, 2, 'operators', phase, start_ns, end_ns FROM host_pass
),
bounds AS (
  SELECT rank, step, turn, evidence,
         min(start_ns) FILTER (phase = 'forward') AS first_forward_ns, max(end_ns) FILTER (phase = 'forward') AS last_forward_end_ns,
         min(start_ns) FILTER (phase = 'backward') AS first_backward_ns,
         max(end_ns) FILTER (phase = 'backward') AS last_backward_end_ns
  FROM parts GROUP BY rank, step, turn, evidence
  QUALIFY turn = min(turn) OVER (PARTITION BY rank, step)
)
SELECT rank, step, evidence, first_forward_ns, last_forward_end_ns, first_backward_ns, last_backward_end_ns
FROM bounds ORDER BY ALL
