-- gives: Communication kernels of one name that no recorded call explains: their role and bytes are not known.
-- needs: kernel_place, communication_library
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: name VARCHAR | | Name as recorded. | not recorded
-- column: library VARCHAR | | Whose communication it is by its name: NCCL (also that of code outside of torch.distributed), RCCL,
--   MSCCL, DeepEP, symmetric memory, custom all-reduce, TensorRT-LLM/FlashInfer, userbuffers, NVSHMEM, copy engine (copies
--   between devices, counted as copies in the classes of time). | its name does not tell
-- column: op VARCHAR | | Operation, by its name. | its name does not tell
-- column: why VARCHAR | | launched_before_window: launched before the recording began; no_call: communication outside of
--   torch.distributed, or of a call the recording lacks. | never
-- column: kernels BIGINT | kernels | How many. | never
-- column: dur_ns BIGINT | ns | Sum of their durations. | no duration was recorded
SELECT k.rank, k.name, l.library, k.kernel_op AS op,
       CASE WHEN k.completeness = 'launched_before_window' THEN k.completeness ELSE 'no_call' END AS why,
       count(*) AS kernels, sum(k.dur_ns)::BIGINT AS dur_ns
FROM kernel_place k
LEFT JOIN communication_library l ON l.name = k.name
WHERE k.coalesce_id IS NULL AND (k.kernel_class = 'comm' OR (k.kernel_class = 'copy' AND l.library = 'copy engine'))
GROUP BY ALL
ORDER BY ALL
