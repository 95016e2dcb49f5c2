-- gives: One step of one rank: tokens per second and device, and the share of the device's peak that the model asked for.
-- needs: device_step, step_flops, device_peak, rank
-- parameter: peak_tflops DOUBLE = NULL | Dense peak rate of a device in TFLOP/s; NULL: by its name and the job's type.
-- column: rank INTEGER | | Global rank. | the source does not say
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: dur_ns BIGINT | ns | Duration of the step. | the end is not known
-- column: tokens BIGINT | tokens | Of the whole job in one step: global batch times sequence length. | the job does not say
-- column: tokens_per_s_per_device DOUBLE | tokens/s | tokens / dur_ns / ranks of the job. | a part of it is not known
-- column: model_flops DOUBLE | FLOP | Of the whole job in one step: tokens x 3 x (2 P + 2 L A S + output layer), with P the
--   matrix weights a token meets, A heads times channels, and a causal mask halving the attention (flops.py). |
--   not known, see reason
-- column: hardware_flops DOUBLE | FLOP | The same and the forward work that recomputation repeats. | not known
-- column: device_name VARCHAR | | Name of the device. | not recorded
-- column: dtype VARCHAR | | Type in which the job multiplies matrices. | no job is known
-- column: peak_tflops DOUBLE | TFLOP/s | Dense peak rate the shares are taken of. | not known: give peak_tflops
-- column: mfu DOUBLE | 1 | model_flops / (dur_ns x ranks x peak). | a part of it is not known
-- column: hfu DOUBLE | 1 | hardware_flops / (dur_ns x ranks x peak). | a part of it is not known
-- column: reason VARCHAR | | Why model_flops is not known. | it is
WITH device AS (
  SELECT coalesce(rank, -1) AS rank_key, min(device_name) AS device_name, max(world_size) AS world_size FROM rank GROUP BY ALL
),
known AS (
  SELECT s.rank_key, s.step, s.start_ns, s.end_ns - s.start_ns AS dur_ns, d.device_name,
         coalesce(f.world_size, d.world_size) AS world_size, coalesce($peak_tflops, p.tflops) AS peak_tflops, f.tokens,
         f.model_flops, f.hardware_flops, f.dtype, f.reason, nullif(s.end_ns - s.start_ns, 0) / 1e9 AS dur_s
  FROM device_step s
  LEFT JOIN device d USING (rank_key)
  LEFT JOIN step_flops f ON true
  LEFT JOIN device_peak p ON p.device_name = d.device_name
)
SELECT CASE WHEN rank_key >= 0 THEN rank_key END AS rank, step, dur_ns, tokens,
       tokens / dur_s / world_size AS tokens_per_s_per_device, model_flops, hardware_flops, device_name, dtype, peak_tflops,
       model_flops / (dur_s * world_size * peak_tflops * 1e12) AS mfu,
       hardware_flops / (dur_s * world_size * peak_tflops * 1e12) AS hfu, reason
FROM known
ORDER BY rank, start_ns
