-- gives: One stage of one pipeline in one step: what it did in the pipeline's window, the same for every stage.
-- needs: pipeline_time
-- column: pipeline INTEGER | | Lowest rank of the pipeline's group. | never
-- column: step BIGINT | | Number of the step; 0 where the recording does not number it. | never
-- column: stage INTEGER | | Pipeline stage, from 0. | never
-- column: rank INTEGER | | Its global rank. | never
-- column: device INTEGER | | Device ordinal in its process. | not recorded
-- column: evidence VARCHAR | | kernels: where any rank has some, those without were not profiled and are left out; marks: the
--   run has none, and the ranges that hooks or marks put around passes stand for them, host times even where a device did the
--   work; operators: the rank has neither, and its host takes the device's place, with the operators that autograd ran
--   backward as passes. | never
-- column: window_ns BIGINT | ns | From the earliest forward start to the latest backward end over the recorded stages. | never
-- column: bubble_ns BIGINT | ns | pp_ns + idle_ns: an upper limit of what the schedule causes, since gaps between the kernels of
--   one pass are in it. By marks: all between passes. By operators: messages, and before the first and after the last pass all
--   else in which no operator runs. | never
-- column: bubble_of_total DOUBLE | 1 | bubble_ns / window_ns. | the window is empty
-- column: warm_up_ns BIGINT | ns | Part of the bubble before the stage's first backward pass. | never
-- column: steady_ns BIGINT | ns | Part of it between warm-up and cool-down. | never
-- column: cool_down_ns BIGINT | ns | Part of it after the stage's last forward pass. | never
-- column: compute_ns BIGINT | ns | Compute in the window. | known by marks alone
-- column: communication_ns BIGINT | ns | Exposed communication of other roles: no bubble. | known by marks alone
-- column: pp_ns BIGINT | ns | Pipeline messages that no compute hides, mostly waiting. | known by marks alone
-- column: copy_ns BIGINT | ns | Only copies or memsets run. | known by marks alone
-- column: launch_starved_ns BIGINT | ns | Between the stage's first and last pass the host has launched nothing, by operators:
--   runs none, which is work of its own: no bubble. | known by marks alone
-- column: idle_ns BIGINT | ns | Nothing runs, but launched work waits; before the first and after the last pass also where
--   nothing is launched, since the schedule has nothing for the host. Where the recording has no launch times, all of it. |
--   known by marks alone
-- column: stages_recorded BIGINT | stages | Stages of this pipeline that were recorded in this step. | never
-- column: stages INTEGER | stages | Stages it has. | never
-- column: lower_limit BOOLEAN | | Whether a stage is not recorded: window and bubble may be larger. | never
-- column: clocks VARCHAR | | aligned (by calls that complete together, or the clock of a host that stages share); as recorded:
--   neither connects the stages' clocks, and their offsets are in the figures; one: one stage is recorded. | never
-- column: clocks_open_ns BIGINT | ns | What aligned clocks leave open at either end of the window, drift within it included. |
--   clocks are as recorded
-- column: claimed BOOLEAN | | Whether the bubble is larger than what the clocks leave open. | clocks are as recorded
WITH timed AS (
  SELECT * EXCLUDE (class), CASE WHEN by_host AND class = 'idle' THEN 'launch_starved' ELSE class END AS class,
         class = 'pp' OR (class = 'idle' AND NOT by_host) OR (class IN ('idle', 'launch_starved') AND part IN ('before', 'after'))
           AS is_bubble
  FROM (SELECT *, evidence = 'operators' AS by_host FROM pipeline_time)
),
staged AS (
  SELECT pipeline, step, count(DISTINCT stage) AS stages_recorded FROM pipeline_time GROUP BY ALL
),
summed AS (
  SELECT pipeline, step, stage, stages, rank, device, evidence, clocks, open_ns, window_end_ns - window_start_ns AS window_ns,
         coalesce(sum(dur_ns) FILTER (is_bubble), 0)::BIGINT AS bubble_ns,
         coalesce(sum(dur_ns) FILTER (is_bubble AND part IN ('before', 'warm_up')), 0)::BIGINT AS warm_up_ns,
         coalesce(sum(dur_ns) FILTER (is_bubble AND part = 'steady'), 0)::BIGINT AS steady_ns,
         coalesce(sum(dur_ns) FILTER (is_bubble AND part IN ('cool_down', 'after')), 0)::BIGINT AS cool_down_ns,
         coalesce(sum(dur_ns) FILTER (class = 'compute'), 0)::BIGINT AS compute_ns,
         coalesce(sum(dur_ns) FILTER (class = 'communication'), 0)::BIGINT AS communication_ns,
         coalesce(sum(dur_ns) FILTER (class = 'pp'), 0)::BIGINT AS pp_ns,
         coalesce(sum(dur_ns) FILTER (class = 'copy'), 0)::BIGINT AS copy_ns,
         coalesce(sum(dur_ns) FILTER (class = 'launch_starved' AND NOT is_bubble), 0)::BIGINT AS launch_starved_ns,
         coalesce(sum(dur_ns) FILTER (is_bubble AND class <> 'pp'), 0)::BIGINT AS idle_ns
  FROM timed GROUP BY ALL
),
told AS (
  SELECT * EXCLUDE (compute_ns, communication_ns, pp_ns, copy_ns, launch_starved_ns, idle_ns),
         CASE WHEN evidence <> 'marks' THEN compute_ns END AS compute_ns,
         CASE WHEN evidence <> 'marks' THEN communication_ns END AS communication_ns,
         CASE WHEN evidence <> 'marks' THEN pp_ns END AS pp_ns, CASE WHEN evidence <> 'marks' THEN copy_ns END AS copy_ns,
         CASE WHEN evidence <> 'marks' THEN launch_starved_ns END AS launch_starved_ns,
         CASE WHEN evidence <> 'marks' THEN idle_ns END AS idle_ns
  FROM summed
)
SELECT s.pipeline, s.step, s.stage, s.rank, s.device, s.evidence, s.window_ns, s.bubble_ns,
       s.bubble_ns / nullif(s.window_ns, 0) AS bubble_of_total, s.warm_up_ns, s.steady_ns, s.cool_down_ns, s.compute_ns,
       s.communication_ns, s.pp_ns, s.copy_ns, s.launch_starved_ns, s.idle_ns, t.stages_recorded, s.stages,
       t.stages_recorded < s.stages AS lower_limit, s.clocks, s.open_ns AS clocks_open_ns, s.bubble_ns > s.open_ns AS claimed
FROM told s JOIN staged t ON t.pipeline = s.pipeline AND t.step = s.step
ORDER BY s.pipeline, s.step, s.stage, s.device
