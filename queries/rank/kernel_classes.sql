-- gives: The activities of one class and phase that one rank launched in one step on one device.
-- needs: kernel_place
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: step BIGINT | | Step they were launched in (started in, where the launch is not known). | outside every step
-- column: kernel_class VARCHAR | | comm, gemm, grouped_gemm, attention, norm, elementwise, optimizer, embedding, moe, reduction,
--   copy, memset, other. | never
-- column: phase VARCHAR | | forward, backward, recompute, optimizer, other (outside autograd and modules): of the call, else of
--   the host thread that launched them. | the launch is not known
-- column: kernels BIGINT | kernels | How many. | never
-- column: dur_ns BIGINT | ns | Sum of their durations; overlapping ones count in full. | no duration was recorded
SELECT rank, device, step, kernel_class, phase, count(*) AS kernels, sum(dur_ns)::BIGINT AS dur_ns
FROM kernel_place
GROUP BY ALL
ORDER BY rank, device, step, kernel_class, phase
