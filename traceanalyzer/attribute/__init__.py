"""Roles and places: the small tables that say which group is which axis and where in the step a call was made.

The only code that decides roles, steps, phases and components. Each fact comes with its evidence; a fact without evidence
is null. ``attach`` computes the tables once and joins them into the view ``comm``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pyarrow as pa

from traceanalyzer import schema
from traceanalyzer.attribute import inference, kernels, order, places, roles, steps
from traceanalyzer.axes import rollup
from traceanalyzer.job import Job
from traceanalyzer.run import Run

__all__ = ["Attribution", "attach", "inference", "kernels", "order", "places", "roles", "steps"]

ATTRIBUTED_COLUMNS: dict[str, tuple[str, str]] = {
    "role": ("VARCHAR", "Role of the call's group, in Megatron's vocabulary (tp, dp_cp, ...). Null: unknown."),
    "role_evidence": (
        "VARCHAR",
        (
            "description (the group's own), creation_order (its name, a number, in the order in which Megatron creates "
            "groups), layout (its ranks fit one role of the job's layout), layout and call_path (they "
            "fit several, the calling function settles it), call_path (the trace does not name the group, or its ranks are "
            "not known), pattern (type, size and count fit one expected kind of call; or the group is not named, and its "
            "operation is made on groups of one role alone: messages of the pipeline, rows of experts)."
        ),
    ),
    "axis": (
        "VARCHAR",
        (
            "The role rolled up to TP, CP, EP, PP, DP or other. PP also for messages on the default group: of two stages, "
            "Megatron sends one way on it."
        ),
    ),
    "step": ("BIGINT", "Training step the call was issued in. Null: outside every step."),
    "step_evidence": (
        "VARCHAR",
        (
            "recorded (by a hook), profiler_step, mark, optimizer (optimizer steps end it: of one the whole recording), "
            "optimizer_kernel (the same by the optimizer's kernels), gap (long gaps between repeating work), window (the "
            "whole recording)."
        ),
    ),
    "step_complete": ("BOOLEAN", "Whether the step was recorded whole, as far as the file shows."),
    "phase": (
        "VARCHAR",
        "forward, backward, recompute, optimizer, other (outside autograd and modules). Null: unknown.",
    ),
    "phase_evidence": (
        "VARCHAR",
        (
            "recorded (by a hook), call_path, mark (a range ta:forward, ta:backward or ta:phase encloses the call), no_path "
            "(no function or module of the thread encloses it), order (a pipeline message's direction)."
        ),
    ),
    "microbatch": ("INTEGER", "Micro-batch. Null: unknown."),
    "microbatch_evidence": (
        "VARCHAR",
        "recorded (by a hook), mark (a range ta:microbatch encloses the call), order (inferred from the calls around it).",
    ),
    "chunk": ("INTEGER", "Virtual pipeline chunk on this rank. Null: unknown, or the pipeline is not interleaved."),
    "chunk_evidence": ("VARCHAR", "recorded (by a hook), order (the schedule's)."),
    "layer": ("INTEGER", "Layer, from 0. Null: unknown."),
    "layer_evidence": (
        "VARCHAR",
        (
            "recorded (by a hook), mark (a range ta:layer encloses the call), pattern (place in the calls that repeat layer "
            "by layer)."
        ),
    ),
    "component": ("VARCHAR", "Part of the model, where the calling function and the shape tell. Null: unknown."),
    "component_evidence": ("VARCHAR", "recorded, call_path, call_path and shape."),
}
"""Columns that ``attach`` adds to the view comm: type and meaning. The view process_group gets role and role_evidence."""


@dataclass(frozen=True)
class Attribution:
    """What attach found: steps per rank, conflicts between the declared layout and the observed groups, and the layout
    that the groups imply by themselves."""

    steps: list[steps.Step]
    conflicts: list[roles.Conflict | inference.LayoutConflict | order.ScheduleConflict]
    inferred: inference.Inference


def in_world_of(run: Run, job: Job) -> Job:
    """The job with the run's world size where it states none."""
    if job.world_size is not None or run.world_size is None:
        return job
    return replace(job, world_size=run.world_size)


def attach(run: Run, job: Job | None) -> Attribution:
    """Computes roles and places for a run and joins them into its view ``comm``; ``job`` None: without a layout."""
    kernels.as_recorded(run)
    groups, broken = roles.of_groups(run, job)
    run.table("group_role", groups)
    found = steps.of_ranks(run)
    run.table("step_range", steps.as_table(found))
    run.table("path_place", places.of_paths(run, job))
    rolled = {role: rollup(role) for role in roles.known_roles()}
    run.table("role_axis", pa.table({"role": list(rolled), "axis": list(rolled.values())}))
    conflicts: list[roles.Conflict | inference.LayoutConflict | order.ScheduleConflict]
    run.table("lone_role", roles.alone(run, job))
    conflicts = [*broken, *(() if roles.layout_of(job) is None else roles.of_callers(run))]
    roles.settle(run, {})
    run.table("order_place", order.no_places())
    run.connection.execute("CREATE OR REPLACE VIEW comm AS " + _COMM)
    run.connection.execute("CREATE OR REPLACE VIEW process_group AS " + _PROCESS_GROUP)
    ordered, unfit = order.of_calls(run, job)
    run.table("order_place", ordered)
    conflicts += unfit
    inferred = inference.infer(run)
    implied = inference.conflict(inferred, job)
    return Attribution(found, [*([] if implied is None else [implied]), *conflicts], inferred)


_PROCESS_GROUP = f"""
SELECT p.*, g.role, g.role_evidence
FROM (SELECT {", ".join(c.name for c in schema.columns_of("process_group") if c.name != "kind")}
      FROM run WHERE kind = 'process_group') p
LEFT JOIN group_role g ON g.rank IS NOT DISTINCT FROM p.rank AND g.group_id = p.group_id
"""

_COMM = """
WITH placed AS (
  SELECT c.*, coalesce(c.t_issue_ns, c.start_ns) AS at_ns,
         g.role AS group_role, g.role_evidence AS group_evidence, g.candidates,
         p.path_role, p.path_phase, p.path_component, p.path_microbatch, p.path_layer, p.path_phase_evidence,
         p.path_component_evidence, s.path_size, l.lone_role,
         CASE WHEN c.op = 'all_gather' AND c.in_elems > 0 AND c.out_elems % c.in_elems = 0
                THEN c.out_elems // c.in_elems
              WHEN c.op = 'reduce_scatter' AND c.out_elems > 0 AND c.in_elems % c.out_elems = 0
                THEN c.in_elems // c.out_elems END AS implied_size
  FROM recorded_comm c
  LEFT JOIN group_role g ON g.rank IS NOT DISTINCT FROM c.rank AND g.group_id = c.group_id
  LEFT JOIN path_place p ON p.call_path IS NOT DISTINCT FROM c.call_path
       AND p.in_dims IS NOT DISTINCT FROM c.in_dims
  LEFT JOIN role_size s ON s.role = p.path_role
  LEFT JOIN lone_role l ON c.group_id IS NULL AND l.rank = c.rank AND l.op = c.op
),
decided AS (
  SELECT *,
    CASE WHEN group_role IS NOT NULL THEN group_evidence
         WHEN list_contains(candidates, path_role) THEN 'layout and call_path'
         WHEN candidates IS NULL AND path_role IS NOT NULL
              AND coalesce(coalesce(group_size, implied_size) = path_size, true) THEN 'call_path'
         WHEN path_role IS NULL AND lone_role IS NOT NULL THEN 'pattern'
    END AS decided_evidence
  FROM placed
),
located AS (
  SELECT d.*,
         CASE WHEN decided_evidence IS NULL THEN NULL ELSE coalesce(group_role, path_role, lone_role) END AS decided_role,
         CASE WHEN d.at_ns < s.step_end_ns THEN s.step END AS found_step,
         CASE WHEN d.at_ns < s.step_end_ns THEN s.step_evidence END AS found_evidence,
         -- a call that a hook recorded says its step itself: other threads may issue it a little outside of the range
         CASE WHEN d.recorded_step IS NOT NULL THEN r.complete
              WHEN d.at_ns < s.step_end_ns THEN s.step_complete END AS step_complete,
         -- a thread's ranges place a call only where they were recorded, and a message between stages only if they
         -- enclose it: the pipeline's schedule sends activations and gradients alike from outside of every range
         d.completeness IS DISTINCT FROM 'kernel_only' AND (d.call_path IS NOT NULL OR contains(d.source, 'kineto'))
           AND NOT (d.op IN ('send', 'recv') AND d.path_phase_evidence = 'no_path') AS has_phase,
         CASE WHEN NOT (d.op IS NOT NULL AND d.op IN ('send', 'recv') AND d.recorded_phase = 'other') THEN d.recorded_phase
         END AS told_phase,
         o.order_phase, o.order_microbatch, o.order_layer, o.order_chunk
  FROM decided d
  LEFT JOIN order_place o ON o.rank = d.rank AND o.call_id = d.call_id
  ASOF LEFT JOIN step_range s ON s.rank_key = coalesce(d.rank, -1) AND d.at_ns >= s.step_start_ns
  LEFT JOIN (SELECT rank_key, step, bool_and(step_complete) AS complete FROM step_range
             WHERE step_evidence = 'recorded' GROUP BY ALL) r
    ON r.rank_key = coalesce(d.rank, -1) AND r.step = d.recorded_step
),
told AS (
  SELECT * EXCLUDE (at_ns, group_role, group_evidence, candidates, path_role, path_phase, path_component, path_microbatch,
                    path_layer, path_phase_evidence, path_component_evidence, path_size, lone_role, implied_size, found_step,
                    found_evidence, has_phase, told_phase, order_phase, order_microbatch, order_layer, order_chunk),
         coalesce(recorded_step, found_step) AS step,
         CASE WHEN recorded_step IS NOT NULL THEN 'recorded' ELSE found_evidence END AS step_evidence,
         coalesce(told_phase, CASE WHEN has_phase THEN path_phase END, order_phase) AS phase,
         CASE WHEN told_phase IS NOT NULL THEN 'recorded' WHEN has_phase THEN path_phase_evidence
              WHEN order_phase IS NOT NULL THEN 'order' END AS phase_evidence,
         coalesce(recorded_microbatch, path_microbatch, order_microbatch) AS microbatch,
         CASE WHEN recorded_microbatch IS NOT NULL THEN 'recorded' WHEN path_microbatch IS NOT NULL THEN 'mark'
              WHEN order_microbatch IS NOT NULL THEN 'order' END AS microbatch_evidence,
         coalesce(recorded_chunk, order_chunk) AS chunk,
         CASE WHEN recorded_chunk IS NOT NULL THEN 'recorded' WHEN order_chunk IS NOT NULL THEN 'order' END
           AS chunk_evidence,
         coalesce(recorded_layer, path_layer, order_layer) AS layer,
         CASE WHEN recorded_layer IS NOT NULL THEN 'recorded' WHEN path_layer IS NOT NULL THEN 'mark'
              WHEN order_layer IS NOT NULL THEN 'pattern' END
           AS layer_evidence,
         coalesce(recorded_component, path_component) AS component,
         CASE WHEN recorded_component IS NOT NULL THEN 'recorded' ELSE path_component_evidence END AS component_evidence
  FROM located
)
SELECT t.* EXCLUDE (decided_role, decided_evidence),
       coalesce(decided_role, pattern_role) AS role,
       CASE WHEN decided_role IS NULL AND pattern_role IS NOT NULL THEN 'pattern' ELSE decided_evidence END
         AS role_evidence,
       CASE WHEN t.op IN ('send', 'recv') AND coalesce(decided_role, pattern_role) = 'world' THEN 'PP' ELSE a.axis END AS axis
FROM told t
LEFT JOIN pattern_role x
  ON t.decided_role IS NULL AND x.rank = t.rank AND x.step = t.step AND x.op = t.op
  AND x.dtype IS NOT DISTINCT FROM t.dtype AND x.in_elems IS NOT DISTINCT FROM t.in_elems
  AND x.out_elems IS NOT DISTINCT FROM t.out_elems AND x.phase IS NOT DISTINCT FROM t.phase
  AND x.group_size IS NOT DISTINCT FROM t.group_size
LEFT JOIN role_axis a ON a.role = coalesce(decided_role, pattern_role)
"""
