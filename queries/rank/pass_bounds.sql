-- gives: One step of one rank: when its forward and backward passes begin and end on its devices.
-- needs: kernel_place
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: step BIGINT | | Step the work was launched in. | outside every step
-- column: first_forward_ns BIGINT | ns | Start of the first compute kernel of a forward pass, unix time as recorded. | none
-- column: last_forward_end_ns BIGINT | ns | End of the last one. | none
-- column: first_backward_ns BIGINT | ns | Start of the first compute kernel of a backward pass, recomputation included. | none
-- column: last_backward_end_ns BIGINT | ns | End of the last one. | none
SELECT rank, step,
       min(start_ns) FILTER (phase = 'forward') AS first_forward_ns,
       max(start_ns + dur_ns) FILTER (phase = 'forward') AS last_forward_end_ns,
       min(start_ns) FILTER (phase IN ('backward', 'recompute')) AS first_backward_ns,
       max(start_ns + dur_ns) FILTER (phase IN ('backward', 'recompute')) AS last_backward_end_ns
FROM kernel_place
WHERE kernel_class NOT IN ('comm', 'copy', 'memset') AND phase IN ('forward', 'backward', 'recompute')
GROUP BY ALL
ORDER BY ALL
