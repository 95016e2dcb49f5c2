"""What a run holds and what can be asked of it: a pure function of an opened, attributed run.

Times are unix nanoseconds as recorded (clocks are not aligned), durations nanoseconds. None is unknown.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from statistics import median_low
from typing import Any

from traceanalyzer import axes, schema
from traceanalyzer.attribute import Attribution
from traceanalyzer.errors import JobError
from traceanalyzer.job import Conflict, Job, conflicts
from traceanalyzer.queries import Library, named
from traceanalyzer.reports import issues, text
from traceanalyzer.run import Run, versions_of

SCHEMA = "traceanalyzer.info/1"

_OPEN_END = 2**63 - 1
"""The end of a step that is the whole recording (attribute.steps)."""

_DENSE_AXES = (axes.Axis.TP, axes.Axis.CP, axes.Axis.PP, axes.Axis.DP)
_EXPERT_AXES = (axes.Axis.EP, axes.Axis.ETP, axes.Axis.EDP)
"""The expert axes are shown where they differ from the dense ones."""


@dataclass(frozen=True)
class JobFacts:
    """The job that names roles and coordinates. ``used``: file, intended, captured; None without a job.

    ``layout``: degree of each axis; ``equation``: the world size as their product. ``problem``: why there is no layout.
    ``conflicts``: fields in which the captured and the intended job differ.
    """

    used: str | None
    intended: bool
    captured: bool
    layout: dict[str, int] | None
    equation: str | None
    problem: str | None
    conflicts: list[dict[str, Any]]


@dataclass(frozen=True)
class Rank:
    """One recorded rank; ``rank`` None: a source that does not state it. ``coordinates`` None: no layout."""

    rank: int | None
    host: str | None
    pid: int | None
    device: int | None
    device_name: str | None
    coordinates: dict[str, int] | None
    window_start_ns: int | None
    window_end_ns: int | None
    import_status: str | None


@dataclass(frozen=True)
class Source:
    """What one kind of source gave: files, events read and rejected, rows by kind, versions found in it."""

    source: str
    files: int
    events_read: int | None
    events_rejected: int | None
    rows: dict[str, int]
    versions: dict[str, list[str]]


@dataclass(frozen=True)
class StepOfRank:
    """One step of one rank. ``dur_ns`` None: nothing marks its end."""

    rank: int | None
    start_ns: int
    dur_ns: int | None
    complete: bool


@dataclass(frozen=True)
class Step:
    """One step over its ranks. ``step`` None: not numbered. The median is the lower one: a duration that occurred."""

    step: int | None
    evidence: str
    min_dur_ns: int | None
    median_dur_ns: int | None
    max_dur_ns: int | None
    ranks: list[StepOfRank]


@dataclass(frozen=True)
class GroupsOfRole:
    """The groups of one role and size, as far as recorded ranks belong to them; ``calls`` on all recorded ranks.

    ``role`` None: unknown. ``size`` None: not recorded. ``groups`` None: they cannot be told apart between ranks.
    """

    role: str | None
    axis: str | None
    size: int | None
    groups: int | None
    calls: int
    evidence: list[str]


@dataclass(frozen=True)
class UnexplainedKernel:
    """Communication kernels of one name that no call explains: their bytes are unknown."""

    name: str
    kernels: int
    dur_ns: int


@dataclass(frozen=True)
class Communication:
    """Coverage. kernels = tied_kernels + launched_before_window + unexplained_kernels; times likewise are sums.

    calls = calls_with_kernel + calls_with_host_range (gloo's) + calls_without_time; of the last,
    calls_without_time_alone are on groups of one rank, where nothing moves.
    """

    kernels: int
    tied_kernels: int
    launched_before_window: int
    unexplained_kernels: int
    kernel_dur_ns: int
    tied_dur_ns: int
    unexplained: list[UnexplainedKernel]
    calls: int
    calls_with_kernel: int
    calls_with_host_range: int
    calls_without_time: int
    calls_without_time_alone: int
    calls_with_role: int
    calls_with_step: int
    calls_with_bytes: int


@dataclass(frozen=True)
class KernelPlaces:
    """Kernels of all ranks of which one fact is known by one evidence (query attribution_coverage).

    ``evidence`` None: the fact is not known. ``share``: of the time of all of this work; None: no duration is recorded.
    """

    work: str
    fact: str
    evidence: str | None
    kernels: int
    dur_ns: int | None
    share: float | None


@dataclass(frozen=True)
class Question:
    """Something to ask of a run: ``answer`` is yes, partly, no or unknown, ``reason`` says why."""

    question: str
    answer: str
    reason: str


@dataclass(frozen=True)
class Inferred:
    """What the groups and the traffic imply of the layout: ``sure`` is proven, likely or unknown, ``reason`` says why.

    ``name``: world_size, tp, cp, pp, ep, etp, dp, order, vpp, num_microbatches, sequence_parallel. ``value`` None: unknown.
    """

    name: str
    value: int | str | None
    sure: str
    reason: str


@dataclass(frozen=True)
class Info:
    """Everything ``traceanalyzer info`` shows. ``missing_ranks`` None: the world size is unknown.

    ``present_coordinates``, ``missing_coordinates``: the coordinates that these ranks take on every axis of more than one
    rank; None without a layout. ``inferred_layout``: what the groups imply without the job, e.g. "TP8"; None: nothing.
    """

    run: str
    schema_version: str
    import_status: str | None
    job: JobFacts
    world_size: int | None
    world_size_source: str | None
    present_ranks: list[int]
    missing_ranks: list[int] | None
    present_coordinates: dict[str, list[int]] | None
    missing_coordinates: dict[str, list[int]] | None
    ranks: list[Rank]
    sources: list[Source]
    window_start_ns: int | None
    window_end_ns: int | None
    steps: list[Step]
    groups: list[GroupsOfRole]
    conflicts: list[str]
    communication: Communication
    kernel_places: list[KernelPlaces]
    issues: list[issues.Issue]
    questions: list[Question]
    inferred_layout: str | None
    inferred: list[Inferred]


def document(info: Info) -> dict[str, Any]:
    """The JSON document ``traceanalyzer.info/1``."""
    return {"schema": SCHEMA, **asdict(info)}


def collect(run: Run, attribution: Attribution, job: Job | None, used: str | None) -> Info:
    """What a run holds. ``attribution`` is what attribute.attach gave for it; ``used`` says where ``job`` comes from."""
    layout, problem = _layout(job)
    ranks = _ranks(run, layout)
    present = sorted({r.rank for r in ranks if r.rank is not None})
    world_size, world_size_source, found_conflicts = _world(run, job, present)
    missing = None if world_size is None else sorted(set(range(world_size)) - set(present))
    communication = _communication(run)
    library = Library(run, job)
    window = [(r.window_start_ns, r.window_end_ns) for r in ranks]
    starts = [low for low, _ in window if low is not None]
    ends = [high for _, high in window if high is not None]
    return Info(
        run=run.source,
        schema_version=run.metadata.get(schema.META_SCHEMA, ""),
        import_status=run.import_status,
        job=JobFacts(
            used=used,
            intended=run.job_text(schema.META_JOB_INTENDED) is not None,
            captured=run.job_text(schema.META_JOB_CAPTURED) is not None,
            layout=None if layout is None else {a.lower(): layout.degree(a) for a in axes.Axis},
            equation=None if layout is None else layout.equation,
            problem=problem,
            conflicts=[c._asdict() for c in _job_conflicts(run, job, used)],
        ),
        world_size=world_size,
        world_size_source=world_size_source,
        present_ranks=present,
        missing_ranks=missing,
        present_coordinates=_taken(layout, present),
        missing_coordinates=_taken(layout, missing or []),
        ranks=ranks,
        sources=_sources(run),
        window_start_ns=min(starts, default=None),
        window_end_ns=max(ends, default=None),
        steps=_steps(attribution),
        groups=_groups(run),
        conflicts=found_conflicts + [c.sentence for c in attribution.conflicts],
        communication=communication,
        kernel_places=_kernel_places(library),
        issues=issues.fold(run.rows("SELECT * FROM issue")),
        questions=[
            _diff(communication, used),
            _exposed(run, present),
            _bubble(library, layout, present),
            _layers(run),
            _moe(run),
            _moe_cost(run),
            _skew(run),
            _slow_ranks(library),
            _slow_links(run, communication),
        ],
        inferred_layout=attribution.inferred.words,
        inferred=[Inferred(*fact) for fact in attribution.inferred.facts],
    )


def _layout(job: Job | None) -> tuple[axes.Layout | None, str | None]:
    if job is None:
        return None, None
    try:
        return job.layout, None
    except JobError as error:
        return None, str(error)


def _job_conflicts(run: Run, job: Job | None, used: str | None) -> list[Conflict]:
    """Captured against intended, where the run has both (a job file stands for the intended one)."""
    captured = run.job_text(schema.META_JOB_CAPTURED)
    intended = run.job_text(schema.META_JOB_INTENDED)
    if captured is None:
        return []
    if used == "file" and job is not None:
        return conflicts(Job.from_json(captured), job)
    return [] if intended is None else conflicts(Job.from_json(captured), Job.from_json(intended))


def _ranks(run: Run, layout: axes.Layout | None) -> list[Rank]:
    rows = run.rows(
        """SELECT rank, any_value(host) AS host, any_value(pid) AS pid, any_value(device) AS device,
                  any_value(device_name) AS device_name,
                  min(window_start_ns) AS window_start_ns, max(window_end_ns) AS window_end_ns,
                  CASE WHEN bool_or(import_status = 'partial') THEN 'partial' ELSE max(import_status) END AS import_status
           FROM rank GROUP BY rank ORDER BY rank NULLS LAST"""
    )
    return [Rank(**row, coordinates=_coordinates(layout, row["rank"])) for row in rows]


def _coordinates(layout: axes.Layout | None, rank: int | None) -> dict[str, int] | None:
    if layout is None or rank is None or not 0 <= rank < layout.world_size:
        return None
    return layout.coordinates(rank)._asdict()


def _taken(layout: axes.Layout | None, ranks: Iterable[int]) -> dict[str, list[int]] | None:
    if layout is None:
        return None
    placed = [p for p in (_coordinates(layout, r) for r in ranks) if p is not None]
    wide = [a.lower() for a in (*_DENSE_AXES, *_EXPERT_AXES) if layout.degree(a) > 1]
    if layout.ep == 1 and layout.expert_tensor_size == layout.tp:
        wide = [a for a in wide if a.upper() not in _EXPERT_AXES]
    return {axis: sorted({p[axis] for p in placed}) for axis in wide}


def _world(run: Run, job: Job | None, present: list[int]) -> tuple[int | None, str | None, list[str]]:
    """The world size, where it comes from, and the contradictions about it in words."""
    recorded = sorted(
        row["world_size"] for row in run.rows("SELECT DISTINCT world_size FROM rank WHERE world_size IS NOT NULL")
    )
    declared = None if job is None else job.world_size
    found = []
    if len(recorded) > 1:
        found.append(f"recorded world sizes differ: {', '.join(map(str, recorded))}; the largest is used")
    if recorded and declared is not None and declared != recorded[-1]:
        found.append(f"declared a world of {declared} ranks, recorded {recorded[-1]}")
    size, source = (recorded[-1], "recorded") if recorded else (declared, None if declared is None else "job")
    outside = [r for r in present if size is not None and r >= size]
    if outside:
        found.append(f"{text.ranks_text(outside)} recorded outside a world of {size}")
    twice = [
        r
        for (r,) in run.tuples("SELECT rank FROM rank WHERE rank IS NOT NULL GROUP BY rank, source HAVING count(*) > 1")
    ]
    if twice:
        found.append(f"{text.ranks_text(twice)} there more than once: their calls and times count each time")
    return size, source, found


def _sources(run: Run) -> list[Source]:
    rows: dict[str, dict[str, int]] = defaultdict(dict)
    for row in run.rows(
        "SELECT coalesce(source, 'unknown') AS source, kind, count(*) AS n FROM run GROUP BY ALL ORDER BY kind"
    ):
        rows[row["source"]][row["kind"]] = row["n"]
    read: dict[str, dict[str, Any]] = {
        row["source"]: row
        for row in run.rows(
            """SELECT coalesce(source, 'unknown') AS source, count(*) AS files, sum(events_read) AS events_read,
                      sum(rows_rejected) AS events_rejected, list(DISTINCT versions) AS versions
               FROM rank GROUP BY ALL"""
        )
    }
    return [
        Source(
            source=name,
            files=read.get(name, {}).get("files", 0),
            events_read=_whole(read.get(name, {}).get("events_read")),
            events_rejected=_whole(read.get(name, {}).get("events_rejected")),
            rows=kinds,
            versions=versions_of(read.get(name, {}).get("versions") or []),
        )
        for name, kinds in sorted(rows.items())
    ]


def _whole(value: object) -> int | None:
    return None if value is None else int(str(value))


def _steps(attribution: Attribution) -> list[Step]:
    found: dict[tuple[int | None, str], list[StepOfRank]] = defaultdict(list)
    for step in attribution.steps:
        dur_ns = None if step.end_ns == _OPEN_END else step.end_ns - step.start_ns
        found[step.number, step.evidence].append(StepOfRank(step.rank, step.start_ns, dur_ns, step.complete))
    steps = []
    for (number, evidence), ranks in found.items():
        durations = [r.dur_ns for r in ranks if r.dur_ns is not None]
        middle = median_low(durations) if durations else None
        steps.append(Step(number, evidence, min(durations, default=None), middle, max(durations, default=None), ranks))
    return sorted(steps, key=lambda s: (s.step is None, s.step or 0, s.evidence))


def _groups(run: Run) -> list[GroupsOfRole]:
    rows = run.rows(
        """WITH calls AS (
             SELECT rank, group_id, role, role_evidence, group_size, count(*) AS n FROM comm
             GROUP BY rank, group_id, role, role_evidence, group_size),
           known AS (
             SELECT p.rank, p.group_id, p.group_size, p.ranks, g.role, g.role_evidence
             FROM process_group p LEFT JOIN group_role g
               ON g.rank IS NOT DISTINCT FROM p.rank AND g.group_id = p.group_id)
           SELECT coalesce(k.rank, c.rank) AS rank, coalesce(k.group_id, c.group_id) AS group_id,
                  coalesce(k.group_size, c.group_size) AS size, k.ranks,
                  coalesce(c.role, k.role) AS role, coalesce(c.role_evidence, k.role_evidence) AS evidence,
                  coalesce(c.n, 0) AS calls
           FROM known k FULL JOIN calls c ON c.rank IS NOT DISTINCT FROM k.rank AND c.group_id = k.group_id"""
    )
    found: dict[tuple[str | None, int | None], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        found[row["role"], row["size"]].append(row)
    for role, size in [key for key in found if key[0] is not None and key[1] is None]:
        # Calls that name no group, of a role whose groups are all of one size.
        sizes = [other for of, other in found if of == role and other is not None]
        if len(sizes) == 1:
            found[role, sizes[0]] += found.pop((role, size))
    groups = [
        GroupsOfRole(
            role=role,
            axis=None if role is None else axes.rollup(role),
            size=size,
            groups=_distinct([m for m in members if size is None or m["group_id"] is not None]),
            calls=sum(m["calls"] for m in members),
            evidence=sorted({m["evidence"] for m in members if m["evidence"] is not None}),
        )
        for (role, size), members in found.items()
    ]
    order = {role: i for i, role in enumerate(axes.ROLES)}
    return sorted(groups, key=lambda g: (g.calls == 0, order.get(g.role or "", len(order)), -(g.size or 0)))


def _distinct(members: list[dict[str, Any]]) -> int | None:
    """How many groups these are over all ranks; None if they cannot be told apart.

    Groups with the same ranks are as many as one rank sees. Where ranks are unknown a name identifies a group, an address
    does not.
    """
    by_ranks: dict[tuple[int, ...], dict[int | None, set[str]]] = defaultdict(lambda: defaultdict(set))
    names: set[str] = set()
    for member in members:
        if member["ranks"] is not None:
            by_ranks[tuple(member["ranks"])][member["rank"]].add(member["group_id"])
        elif member["group_id"] is None or member["group_id"].startswith("ptr:"):
            return None
        else:
            names.add(member["group_id"])
    return len(names) + sum(max(len(ids) for ids in seen.values()) for seen in by_ranks.values())


def _communication(run: Run) -> Communication:
    (kernels,) = run.rows(
        """SELECT count(*) AS kernels, count(coalesce_id) AS tied_kernels,
                  count(*) FILTER (coalesce_id IS NULL AND completeness = 'launched_before_window')
                    AS launched_before_window,
                  coalesce(sum(dur_ns), 0)::BIGINT AS kernel_dur_ns,
                  coalesce(sum(dur_ns) FILTER (coalesce_id IS NOT NULL), 0)::BIGINT AS tied_dur_ns
           FROM kernel WHERE kernel_class = 'comm'"""
    )
    unexplained = run.rows(
        """SELECT coalesce(name, '') AS name, count(*) AS kernels, coalesce(sum(dur_ns), 0)::BIGINT AS dur_ns
           FROM kernel WHERE kernel_class = 'comm' AND coalesce_id IS NULL
             AND completeness IS DISTINCT FROM 'launched_before_window'
           GROUP BY ALL ORDER BY dur_ns DESC, name"""
    )
    (calls,) = run.rows(
        """SELECT count(*) AS calls,
                  count(*) FILTER (time_source = 'kernel') AS calls_with_kernel,
                  count(*) FILTER (time_source IS NOT NULL AND time_source <> 'kernel') AS calls_with_host_range,
                  count(*) FILTER (time_source IS NULL) AS calls_without_time,
                  count(*) FILTER (time_source IS NULL AND group_size = 1) AS calls_without_time_alone,
                  count(role) AS calls_with_role, count(step) AS calls_with_step,
                  count(payload_bytes) AS calls_with_bytes
           FROM comm"""
    )
    return Communication(
        **kernels,
        unexplained_kernels=sum(u["kernels"] for u in unexplained),
        unexplained=[UnexplainedKernel(**u) for u in unexplained],
        **calls,
    )


def _kernel_places(library: Library) -> list[KernelPlaces]:
    library.result_table("attribution_coverage", {})
    rows = library.run.rows(
        """WITH summed AS (
             SELECT work, fact, evidence, sum(kernels)::BIGINT AS kernels, sum(dur_ns)::BIGINT AS dur_ns
             FROM attribution_coverage GROUP BY ALL)
           SELECT *, dur_ns / nullif(sum(dur_ns) OVER (PARTITION BY work, fact), 0) AS share FROM summed
           ORDER BY work, fact, kernels DESC, evidence"""
    )
    return [KernelPlaces(**row) for row in rows]


# what can be asked ---------------------------------------------------------------------------------------------------------


def _diff(communication: Communication, used: str | None) -> Question:
    question = "diff against the job"
    if communication.calls == 0:
        return Question(question, "no", "no communication call is recorded")
    if used is None:
        return Question(question, "no", "no job: give --job FILE, or import with it")
    where = {
        "file": "from --job",
        "intended": "the intended one, in the run",
        "captured": "the captured one, in the run",
    }
    return Question(question, "yes", f"job: {where[used]}")


def _exposed(run: Run, present: list[int]) -> Question:
    question = "exposed communication"
    (row,) = run.rows(
        """SELECT count(DISTINCT coalesce(rank, -1)) AS ranks FROM kernel
           WHERE kernel_class NOT IN ('copy', 'memset') OR kernel_class IS NULL"""
    )
    total = max(len(present), 1)
    if row["ranks"] == 0:
        (host,) = run.rows(
            "SELECT count(DISTINCT coalesce(rank, -1)) AS ranks FROM comm WHERE time_source = 'backend_range'"
        )
        if host["ranks"] == 0:
            return Question(question, "no", "neither a kernel nor a backend's range of a call is recorded")
        reason = (
            f"no kernel; by host operators and the backend's ranges on {host['ranks']} of {text.counted(total, 'rank')}"
        )
        return Question(question, "yes" if host["ranks"] >= total else "partly", reason)
    answer = "yes" if row["ranks"] >= total else "partly"
    return Question(question, answer, f"kernels recorded on {row['ranks']} of {text.counted(total, 'rank')}")


def _bubble(library: Library, layout: axes.Layout | None, present: list[int]) -> Question:
    question = "pipeline bubble"
    run = library.run
    if layout is not None:
        stages, recorded = layout.pp, len({layout.stage(r) for r in present if r < layout.world_size})
    else:
        rows = run.rows(
            """SELECT len(p.ranks) AS stages, list_position(p.ranks, p.rank) AS stage
               FROM process_group p JOIN group_role g ON g.rank = p.rank AND g.group_id = p.group_id
               WHERE g.role = 'pp' AND p.ranks IS NOT NULL AND list_contains(p.ranks, p.rank)"""
        )
        if not rows:
            return Question(question, "unknown", "neither a job nor a named group says how many stages there are")
        stages, recorded = max(r["stages"] for r in rows), len({r["stage"] for r in rows})
    if stages == 1:
        return Question(question, "no", "one pipeline stage")
    library.prepare(named("bubble"))
    rows = run.rows(
        """SELECT list(DISTINCT b.evidence ORDER BY b.evidence) AS by, count(DISTINCT s.stage) AS stages
           FROM pass_bounds b JOIN rank_stage s ON s.rank = b.rank
           WHERE b.step IS NOT NULL AND b.first_forward_ns IS NOT NULL"""
    )
    known = rows[0]["stages"]
    said = f"{recorded} of {stages} stages recorded"
    if known == 0:
        return Question(
            question, "no", f"{said}, no pass is known: no kernel of one, no mark, no operator of autograd's"
        )
    if known < recorded:
        said += f", passes of {known} known"
    answer = "yes" if known == stages else "partly"
    return Question(question, answer, f"{said}, passes by {' and '.join(rows[0]['by'])}")


def _layers(run: Run) -> Question:
    question = "layer attribution"
    (row,) = run.rows(
        """SELECT count(*) AS calls, count(recorded_layer) AS recorded,
                  count(*) FILTER (array_to_string(call_path, chr(10)) LIKE '%ta:layer %') AS marked,
                  count(*) FILTER (array_to_string(call_path, chr(10)) LIKE '%nn.Module: %') AS modules
           FROM comm"""
    )
    if row["calls"] == 0:
        return Question(question, "no", "no communication call is recorded")
    for key, how in (("recorded", "recorded by a hook"), ("marked", "by marks"), ("modules", "by module ranges")):
        if row[key]:
            answer = "yes" if row[key] == row["calls"] else "partly"
            return Question(
                question, answer, f"{how}, around {text.count(row[key])} of {text.count(row['calls'])} calls"
            )
    return Question(question, "no", "neither marks nor module ranges around the calls")


def _moe(run: Run) -> Question:
    question = "MoE balance"
    (row,) = run.rows(
        "SELECT count(*) AS calls, count(*) FILTER (splits_known) AS known FROM comm WHERE op = 'all_to_all'"
    )
    if row["calls"] == 0:
        return Question(question, "no", "no all_to_all call is recorded")
    if row["known"] == 0:
        return Question(question, "no", f"no split sizes recorded on {text.counted(row['calls'], 'all_to_all call')}")
    answer = "yes" if row["known"] == row["calls"] else "partly"
    reason = f"split sizes known on {text.count(row['known'])} of {text.counted(row['calls'], 'all_to_all call')}"
    return Question(question, answer, reason)


def _moe_cost(run: Run) -> Question:
    question = "MoE cost"
    (row,) = run.rows(
        """SELECT count(*) AS calls, count(DISTINCT rank) FILTER (splits_known AND time_source = 'kernel') AS ranks
           FROM comm WHERE op = 'all_to_all'"""
    )
    if row["calls"] == 0:
        return Question(question, "no", "no all_to_all call is recorded")
    if row["ranks"] == 0:
        return Question(question, "no", "no all_to_all call has both split sizes and the time of a kernel")
    if row["ranks"] == 1:
        return Question(question, "no", "of one rank alone: whom it makes wait is not recorded")
    return Question(question, "yes", f"split sizes and kernels of {text.counted(row['ranks'], 'rank')}")


def _slow_ranks(library: Library) -> Question:
    question = "slow ranks"
    library.prepare(named("slow_ranks"))
    rows = library.run.rows(
        """SELECT count(*) AS ranks, count(*) FILTER (alike >= 3) AS compared FROM (
             SELECT l.rank, count(*) OVER (PARTITION BY l.like_id) AS alike FROM rank_like l
             SEMI JOIN (SELECT rank FROM kernel WHERE kernel_class NOT IN ('comm', 'copy', 'memset')) k ON k.rank = l.rank)"""
    )
    ranks, compared = rows[0]["ranks"], rows[0]["compared"]
    if ranks == 0:
        return Question(question, "no", "no kernel of a rank of known stage is recorded")
    if compared == 0:
        return Question(question, "no", "fewer than 3 recorded ranks do the same work")
    answer = "yes" if compared == ranks else "partly"
    return Question(
        question, answer, f"{compared} of {text.counted(ranks, 'rank')} with 2 others or more of the same work"
    )


def _slow_links(run: Run, communication: Communication) -> Question:
    question = "slow links"
    if communication.calls == communication.calls_without_time:
        return Question(question, "no", "no call has a time")
    hosts = run.value("SELECT count(DISTINCT host) FROM rank")
    if hosts < 3:
        seen = f"{text.counted(hosts, 'host')} recorded" if hosts else "no host is recorded"
        return Question(question, "no", f"{seen}, and links of 3 are compared")
    return Question(question, "yes", f"{hosts} hosts recorded")


def _skew(run: Run) -> Question:
    question = "skew between ranks"
    (row,) = run.rows(
        """SELECT count(*) AS groups, count(*) FILTER (seen > 1) AS several, count(*) FILTER (seen = size) AS whole
           FROM (SELECT ranks, len(ranks) AS size, count(DISTINCT rank) AS seen FROM process_group
                 WHERE ranks IS NOT NULL AND len(ranks) > 1 GROUP BY ranks)"""
    )
    if row["groups"] == 0:
        return Question(question, "unknown", "no group's ranks are known")
    if row["several"] == 0:
        return Question(question, "no", "of every group one rank at most is recorded")
    answer = "yes" if row["whole"] == row["groups"] else "partly"
    return Question(question, answer, f"{row['whole']} of {text.counted(row['groups'], 'rank set')} recorded whole")
