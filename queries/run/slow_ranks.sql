-- gives: Computation of one rank in one step against that of its like: ranks of the same stage and tensor-parallel place.
-- needs: rank_like, query kernel_classes, query time_classes
-- column: step BIGINT | | Number of the step, recorded whole. | never
-- column: rank INTEGER | | Global rank. | never
-- column: stage INTEGER | | Its pipeline stage. | never
-- column: tp_place INTEGER | | Its place in its tensor-parallel group, where its like have the same one. | not known, or fewer
--   than 3 ranks have it: it is compared with all of its stage
-- column: like_ranks BIGINT | ranks | Ranks compared, itself among them. | never
-- column: compute_ns BIGINT | ns | Sum of the durations of its compute kernels, by its own clock alone. | never
-- column: usual_compute_ns BIGINT | ns | Median of its like, the lower one. | never
-- column: kernels BIGINT | kernels | Its compute kernels. | never
-- column: usual_kernels BIGINT | kernels | Median of its like. | never
-- column: longest_class VARCHAR | | Class of kernels that is longest beyond the median of its like. | never
-- column: longest_class_over_ns BIGINT | ns | By how much. | never
-- column: classes_over BIGINT | classes | Classes of at least 1 % of its computation that take 1.05 times the usual. | never
-- column: launch_starved_ns BIGINT | ns | Time in which the host had launched nothing. | the recording has no launch times
-- column: usual_launch_starved_ns BIGINT | ns | Median of its like. | likewise
-- column: cause VARCHAR | | work (it runs more kernels than its like), device (kernels of several classes run longer: clock,
--   temperature or power), kernel (one class does), host (its kernels do not, but its device waits longer for launches). | it
--   does not stand out
-- column: slow BOOLEAN | | Whether it stands out: at least 3 ranks, and 1.05 times the usual computation, or launches that cost
--   as much. | never
-- column: finding VARCHAR | | The same in words. | it does not stand out
WITH classes AS (
  SELECT rank, step, kernel_class, sum(kernels)::BIGINT AS kernels, coalesce(sum(dur_ns), 0)::BIGINT AS dur_ns
  FROM kernel_classes
  WHERE kernel_class NOT IN ('comm', 'copy', 'memset') AND step IS NOT NULL AND rank IS NOT NULL
  GROUP BY ALL
),
starved AS (
  SELECT rank, step, sum(launch_starved_ns)::BIGINT AS launch_starved_ns FROM time_classes
  WHERE rank IS NOT NULL GROUP BY rank, step HAVING bool_and(complete)
),
compared AS (
  SELECT c.*, l.like_id, quantile_disc(c.dur_ns, 0.5) OVER (PARTITION BY l.like_id, c.step, c.kernel_class) AS usual_ns
  FROM classes c JOIN rank_like l ON l.rank = c.rank
),
whole AS (
  SELECT c.step, c.rank, c.like_id, sum(c.dur_ns)::BIGINT AS compute_ns, sum(c.kernels)::BIGINT AS kernels,
         arg_max(c.kernel_class, c.dur_ns - c.usual_ns) AS longest_class, max(c.dur_ns - c.usual_ns) AS longest_class_over_ns,
         list(c.dur_ns) AS class_ns, list(c.usual_ns) AS usual_class_ns, any_value(s.launch_starved_ns) AS launch_starved_ns
  FROM compared c JOIN starved s ON s.rank = c.rank AND s.step = c.step
  GROUP BY c.step, c.rank, c.like_id
),
usual AS (
  SELECT *, count(*) OVER w AS like_ranks, quantile_disc(compute_ns, 0.5) OVER w AS usual_compute_ns,
         quantile_disc(kernels, 0.5) OVER w AS usual_kernels,
         quantile_disc(launch_starved_ns, 0.5) OVER w AS usual_launch_starved_ns,
         len(list_filter(list_zip(class_ns, usual_class_ns), lambda p: p[1] > 1.05 * p[2] AND p[1] >= 0.01 * compute_ns))
           AS classes_over
  FROM whole
  WINDOW w AS (PARTITION BY like_id, step)
),
judged AS (
  SELECT *,
         CASE WHEN like_ranks < 3 THEN NULL
              WHEN compute_ns > 1.05 * usual_compute_ns
                THEN CASE WHEN kernels > usual_kernels THEN 'work' WHEN classes_over > 1 THEN 'device' ELSE 'kernel' END
              WHEN launch_starved_ns - usual_launch_starved_ns > 0.05 * usual_compute_ns THEN 'host' END AS cause
  FROM usual
)
SELECT j.step, j.rank, l.stage, l.tp_place, j.like_ranks, j.compute_ns, j.usual_compute_ns, j.kernels, j.usual_kernels,
       j.longest_class, j.longest_class_over_ns, j.classes_over, j.launch_starved_ns, j.usual_launch_starved_ns, j.cause,
       j.cause IS NOT NULL AS slow,
       'rank ' || j.rank || CASE j.cause
         WHEN 'work' THEN ' runs more kernels than its like'
         WHEN 'device' THEN ' computes slower than its like in several classes of kernels: clock, temperature or power'
         WHEN 'kernel' THEN ' is slower than its like in ' || j.longest_class || ' kernels alone'
         WHEN 'host' THEN ' waits longer than its like for its host to launch work' END AS finding
FROM judged j JOIN rank_like l ON l.rank = j.rank
ORDER BY j.step, j.rank
