"""The place of every device activity: the step, phase, micro-batch, chunk, layer and component it was launched in, and the
axis whose splitting its computation serves.

A kernel has no place of its own. What launched it has: the runtime call with the same correlation id lies on a host thread,
and the ranges open on that thread at that time say the place, by the same rules as for calls (places.py). A communication
kernel has the place of its call. Evidence, the first that says something:

* ``call``: a communication kernel's call says it, with its own evidence in the view comm.
* ``recorded``: a span of our hook encloses the launch; its places are the process's, not one thread's.
* ``mark``: a range ``ta:...`` encloses the launch on its thread; for backward work, on the thread that called backward.
* ``call_path``: host ranges on the launching thread (autograd's functions, modules, Python functions, the optimizer).
* ``module``: a module's range: ``nn.Module: TransformerLayer_3`` is the fourth layer of those that this rank calls.
* ``autograd``: a backward operator has the place of the forward operator of the same sequence number.
* ``kernel_name``: its class tells the component.
* ``order``: passes and messages are those of the job's schedule, one by one (order.py).

Ranges are nested in one pass over each rank's, sorted; kernels meet them in an ASOF join.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from traceanalyzer import schema
from traceanalyzer.attribute import order, places
from traceanalyzer.attribute.roles import layout_of
from traceanalyzer.axes import Axis, Layout
from traceanalyzer.errors import JobError
from traceanalyzer.importers.calls import names_a_place
from traceanalyzer.job import Job
from traceanalyzer.run import Run

Ints = npt.NDArray[np.int64]

KERNEL_COLUMNS: dict[str, tuple[str, str]] = {
    "step": ("BIGINT", "Training step it was launched in (started in, where the launch is not known). Null: outside."),
    "step_evidence": ("VARCHAR", "As in comm."),
    "step_complete": ("BOOLEAN", "Whether the step was recorded whole, as far as the file shows."),
    "role": ("VARCHAR", "Communication: role of its calls' groups. Null: compute, or not known."),
    "axis": ("VARCHAR", "The role rolled up to TP, CP, EP, PP, DP or other, as in comm."),
    "phase": (
        "VARCHAR",
        "forward, backward, recompute, optimizer, other (outside autograd and modules). Null: not known.",
    ),
    "phase_evidence": (
        "VARCHAR",
        "call, recorded (a hook's span), mark, call_path (ranges of the launching thread), no_path (there are none).",
    ),
    "microbatch": ("INTEGER", "Micro-batch. Null: not known, or outside the passes."),
    "microbatch_evidence": (
        "VARCHAR",
        "call, recorded, mark, autograd (of the forward operator), order (of the passes).",
    ),
    "chunk": ("INTEGER", "Virtual pipeline chunk on this rank. Null: not known."),
    "chunk_evidence": ("VARCHAR", "call, recorded, autograd, order."),
    "layer": ("INTEGER", "Layer, from 0. Null: not known, or outside the layers."),
    "layer_evidence": ("VARCHAR", "call, recorded, mark, module, autograd."),
    "component": (
        "VARCHAR",
        "Part of the model: attention, mlp, experts, router, norm, embedding, loss, ... Null: not known.",
    ),
    "component_evidence": ("VARCHAR", "call, recorded, module, call_path, autograd, kernel_name."),
    "served_axis": (
        "VARCHAR",
        (
            "Compute: axis of more than one rank whose splitting made it this rank's share: EP expert work, CP attention, DP "
            "the shard of the optimizer, TP work inside a tensor-parallel function. Null: none, or not known."
        ),
    ),
    "served_axis_evidence": ("VARCHAR", "phase, component, kernel_class, call_path."),
}
"""Columns that ``of_kernels`` adds to the view kernel: type and meaning. launch_ns holds the launch of every kernel then."""

OPTIMIZER, CHECKPOINT, BACKWARD, FUNCTION, PLACE, MARK, SCRIPT = range(7)
"""Kinds of host ranges: Optimizer.*, a checkpoint's backward, autograd's backward, one of Megatron's autograd functions, any
other range that says where its work belongs, a mark of ours, a Python function of a file that names a component."""

_ATEN = re.compile(r"^(?:aten|c10d|_c10d_functional)::")
_MARKS = re.compile(
    r"^ta:(?:(?P<way>forward|backward)$|phase (?P<phase>\w+)$|(?P<what>microbatch|layer) (?P<number>\d+)$)"
)
_MODULE = re.compile(r"^nn\.Module: (?P<cls>.+)_(?P<number>\d+)$")
_LAYER = re.compile(r"^(?:\w*(?:Transformer|Decoder|Encoder)Layer|\w*DecoderBlock|(?:GPT2|Transformer)?Block)$")
"""Classes whose instances are the layers of a model, where there is one instance a layer."""
_SCRIPT = re.compile(r"^(?:.*/)?(?P<file>\w+)\.py\(\d+\): ")

_COMPONENTS: tuple[tuple[str, re.Pattern[str]], ...] = tuple(
    (word, re.compile(pattern))
    for word, pattern in (
        ("router", r"(?i)router|(?:moe|topk|top_k)_?gat(?:e|ing)"),
        ("experts", r"(?i)experts?$|grouped_?mlp|sequential_?mlp|^moe"),
        ("attention", r"(?i)attention|attn"),
        ("mlp", r"(?i)(?:^|[a-z_])(?:mlp|feed_?forward|ffn)$"),
        ("norm", r"(?i)norm$"),
        ("loss", r"(?i)cross_?entropy|loss$"),
        ("embedding", r"(?i)embeddings?$"),
    )
)
"""Component by the name of a module's class or of a Python file without its suffix; the first that fits."""

_KEPT = frozenset({"experts", "router", "attention"})
"""Components that parts inside of them do not change: the MLP of an expert is expert work."""


class Place(NamedTuple):
    """Where the work of one stretch of a host thread belongs; None: nothing says it."""

    phase: str | None = None
    phase_evidence: str | None = None
    microbatch: int | None = None
    microbatch_evidence: str | None = None
    chunk: int | None = None
    chunk_evidence: str | None = None
    layer: int | None = None
    layer_evidence: str | None = None
    component: str | None = None
    component_evidence: str | None = None
    tensor_parallel: bool = False


class Said(NamedTuple):
    """What one range says: by its name, or a hook's span by its columns. ``facts`` hold what is to be laid over."""

    kind: int
    facts: Place = Place()
    module: tuple[str, int] | None = None


NOWHERE = Place()


def component_of(name: str) -> str | None:
    """Component by a module's class or a file's name; None if it names none."""
    return next((word for word, pattern in _COMPONENTS if pattern.search(name)), None)


def said_by(name: str) -> Said | None:
    """What a host range of this name says; None: nothing by its name alone."""
    if name.startswith("Optimizer."):
        return Said(OPTIMIZER)
    if places.is_checkpoint(name):
        return Said(CHECKPOINT)
    if _ATEN.match(name):
        return None
    if places.is_backward(name):
        return Said(BACKWARD, Place(tensor_parallel=places.is_tensor_parallel(name)))
    if name in places.TENSOR_PARALLEL_FUNCTIONS:
        loss = name == "_VocabParallelCrossEntropy"
        return Said(FUNCTION, Place(component="loss" if loss else None, tensor_parallel=True))
    mark = _MARKS.match(name)
    if mark:
        phase, number = mark["way"] or mark["phase"], mark["number"]
        facts = Place(phase, "mark" if phase else None)
        if mark["what"] == "microbatch":
            facts = Place(microbatch=int(number), microbatch_evidence="mark")
        elif mark["what"] == "layer":
            facts = Place(layer=int(number), layer_evidence="mark")
        return Said(MARK, facts)
    module = _MODULE.match(name)
    if module:
        word = component_of(module["cls"])
        facts = Place(component=word, component_evidence=None if word is None else "module")
        return Said(PLACE, facts, (module["cls"], int(module["number"])))
    script = _SCRIPT.match(name)
    if script:
        word = component_of(script["file"])
        return None if word is None else Said(SCRIPT, Place(component=word, component_evidence="call_path"))
    return Said(PLACE) if names_a_place(name) and not places.is_mark(name) else None


def inside(place: Place, said: Said, forward: Place | None = None) -> Place:
    """The place inside a range that says this and lies in a range of that place.

    ``forward``: place of the forward operator of a backward one; it fills what is not known.
    """
    kind, facts = said.kind, said.facts
    phase, evidence = place.phase, place.phase_evidence
    if facts.phase is not None:
        phase, evidence = facts.phase, facts.phase_evidence
    elif kind == OPTIMIZER:
        phase, evidence = "optimizer", "call_path"
    elif kind == CHECKPOINT:
        phase, evidence = "recompute", "call_path"
    elif kind == BACKWARD:
        phase, evidence = "backward", "call_path"
    elif kind == FUNCTION and phase == "backward":
        # forward work in the backward pass: a checkpoint without a function of its own
        phase, evidence = "recompute", "call_path"
    elif kind in (FUNCTION, PLACE) and phase is None:
        phase, evidence = "forward", "call_path"
    found = place._replace(phase=phase, phase_evidence=evidence)
    if facts.microbatch is not None:
        found = found._replace(microbatch=facts.microbatch, microbatch_evidence=facts.microbatch_evidence)
    if facts.chunk is not None:
        found = found._replace(chunk=facts.chunk, chunk_evidence=facts.chunk_evidence)
    if facts.layer is not None:
        found = found._replace(layer=facts.layer, layer_evidence=facts.layer_evidence)
    if facts.component is not None and place.component not in _KEPT:
        found = found._replace(component=facts.component, component_evidence=facts.component_evidence or "call_path")
    if kind in (FUNCTION, BACKWARD):
        engine = kind == BACKWARD and not facts.tensor_parallel
        found = found._replace(tensor_parallel=facts.tensor_parallel or (engine and place.tensor_parallel))
    if forward is None:
        return found
    if found.layer is None and forward.layer is not None:
        found = found._replace(layer=forward.layer, layer_evidence="autograd")
    if found.component is None and forward.component is not None:
        found = found._replace(component=forward.component, component_evidence="autograd")
    if found.microbatch is None and forward.microbatch is not None:
        found = found._replace(microbatch=forward.microbatch, microbatch_evidence="autograd")
    if found.chunk is None and forward.chunk is not None:
        found = found._replace(chunk=forward.chunk, chunk_evidence="autograd")
    return found


class Changes(NamedTuple):
    """When the place changes on each thread: thread, time, and the place from then on as an index into ``places``."""

    tid: Ints
    at_ns: Ints
    place: Ints
    places: list[Place]


def changes(
    tids: Sequence[int],
    starts: Sequence[int],
    ends: Sequence[int],
    said: Sequence[int],
    words: Sequence[Said],
    sequence: Sequence[int | None] | None = None,
) -> Changes:
    """Places along the threads of one process.

    Ranges with thread, start, end and an index into ``words``, ordered by thread and start, an outer range before the inner
    one that starts with it; a range that outlives the one it lies in ends with it. ``sequence``: autograd's number of an
    operator. Linear in the ranges, but for one sort.
    """
    n = len(starts)
    parent, depth, until = [-1] * n, [0] * n, list(ends)
    stack: list[int] = []
    for i in range(n):
        start = starts[i]
        while stack and (until[stack[-1]] <= start or tids[stack[-1]] != tids[i]):
            stack.pop()
        if stack:
            p = stack[-1]
            parent[i], depth[i] = p, depth[p] + 1
            if until[i] > until[p]:
                until[i] = until[p]
        stack.append(i)
    known: dict[Place, int] = {NOWHERE: 0}
    memo: dict[tuple[int, int, int], int] = {}
    at = [0] * n
    found: list[Place] = [NOWHERE]

    def settle(forwards: Mapping[int, int]) -> None:
        for i in range(n):
            outer = at[parent[i]] if parent[i] >= 0 else 0
            key = (outer, said[i], forwards.get(i, 0))
            place = memo.get(key)
            if place is None:
                forward = found[key[2]] if key[2] else None
                new = inside(found[outer], words[said[i]], forward)
                place = known.setdefault(new, len(found))
                if place == len(found):
                    found.append(new)
                memo[key] = place
            at[i] = place

    settle({})
    if sequence is not None:
        links = _forwards(starts, said, words, sequence, [found[p].phase for p in at], at)
        if links:
            settle(links)
    tid, begin, end = (np.asarray(v, np.int64) for v in (tids, starts, until))
    level, place, outer = (np.asarray(v, np.int64) for v in (depth, at, [at[p] if p >= 0 else 0 for p in parent]))
    # of all that changes at one time the last holds: ranges end, the outermost last, then ranges start, the innermost last
    times, threads = np.concatenate([end, begin]), np.concatenate([tid, tid])
    turn, then = np.concatenate([-1 - level, level]), np.concatenate([outer, place])
    sort = np.lexsort((turn, times, threads))
    times, threads, then = times[sort], threads[sort], then[sort]
    last = np.ones(len(sort), bool)
    last[:-1] = (times[1:] != times[:-1]) | (threads[1:] != threads[:-1])
    return Changes(threads[last], times[last], then[last], found)


def _forwards(
    starts: Sequence[int],
    said: Sequence[int],
    words: Sequence[Said],
    sequence: Sequence[int | None],
    phases: Sequence[str | None],
    at: Sequence[int],
) -> dict[int, int]:
    """Backward range -> place of its forward operator: the last one of its number, which made autograd's node.

    Operators that make none have the number of the next that does.
    """
    source: dict[int, int] = {}
    for i, number in enumerate(sequence):
        if number is not None and phases[i] == "forward":
            held = source.get(number)
            if held is None or starts[i] >= starts[held]:
                source[number] = i
    links: dict[int, int] = {}
    for i, number in enumerate(sequence):
        if number is not None and words[said[i]].kind in (BACKWARD, CHECKPOINT):
            maker = source.get(number)
            if maker is not None and starts[maker] < starts[i] and at[maker]:
                links[i] = at[maker]
    return links


# tables -------------------------------------------------------------------------------------------------------------------

_NAMES = "SELECT DISTINCT name FROM cpu_op WHERE name IS NOT NULL UNION SELECT DISTINCT name FROM span WHERE name IS NOT NULL"
_RANGES = """
WITH host AS (
  SELECT rank, tid, start_ns, dur_ns, name, sequence_nr, 0 AS turn FROM cpu_op
  UNION ALL
  SELECT rank, tid, start_ns, dur_ns, name, NULL, 1 FROM span
  WHERE category IS DISTINCT FROM 'gpu_user_annotation' AND source IS DISTINCT FROM 'hook'
)
SELECT coalesce(h.rank, -1)::INTEGER AS rank_key, h.tid, h.start_ns, h.start_ns + h.dur_ns AS end_ns,
       coalesce(k.said, 0)::INTEGER AS said, h.sequence_nr
FROM host h LEFT JOIN range_said k ON k.name = h.name
-- an operator with a sequence number was recorded by autograd: forward work, unless a range around it says otherwise
WHERE (k.said IS NOT NULL OR h.sequence_nr IS NOT NULL)
  AND h.tid IS NOT NULL AND h.start_ns IS NOT NULL AND h.dur_ns > 0
-- of ranges that begin and end together a mark is the inner one: it says its number; autograd's is the outer one
ORDER BY rank_key, h.tid, h.start_ns, end_ns DESC, h.turn, NOT starts_with(h.name, 'autograd::engine::'), h.name,
         h.sequence_nr
"""
_HOOK_SPANS = """
SELECT coalesce(rank, -1)::INTEGER AS rank_key, start_ns, start_ns + dur_ns AS end_ns, recorded_phase, recorded_microbatch,
       recorded_chunk, recorded_layer, recorded_component
FROM span WHERE source = 'hook' AND start_ns IS NOT NULL AND dur_ns > 0 AND category NOT IN ('step', 'window')
ORDER BY rank_key, start_ns, end_ns DESC, recorded_layer NULLS FIRST, recorded_microbatch NULLS FIRST, name
"""


class _Tables:
    """Collects changes of every rank into one table of times and one of places."""

    def __init__(self) -> None:
        self.parts: list[pa.Table] = []
        self.places: list[Place] = []

    def add(self, rank_key: int, track: str, found: Changes) -> None:
        self.parts.append(
            pa.table(
                {
                    "rank_key": pa.array(np.full(len(found.tid), rank_key), pa.int32()),
                    "track": pa.array([track] * len(found.tid), pa.string()),
                    "tid": pa.array(found.tid, pa.int64()),
                    "at_ns": pa.array(found.at_ns, pa.int64()),
                    "place_id": pa.array(found.place + len(self.places), pa.int64()),
                }
            )
        )
        self.places += found.places

    def make(self, run: Run) -> None:
        """Tables thread_place and host_place."""
        empty = {
            "rank_key": pa.int32(),
            "track": pa.string(),
            "tid": pa.int64(),
            "at_ns": pa.int64(),
            "place_id": pa.int64(),
        }
        run.table("thread_place", pa.concat_tables(self.parts or [pa.schema(list(empty.items())).empty_table()]))
        types = {"microbatch": pa.int32(), "chunk": pa.int32(), "layer": pa.int32(), "tensor_parallel": pa.bool_()}
        columns = zip(*self.places, strict=True) if self.places else ((),) * len(Place._fields)
        run.table(
            "host_place",
            pa.table(
                {"place_id": pa.array(range(len(self.places)), pa.int64())}
                | {
                    name: pa.array(values, types.get(name, pa.string()))
                    for name, values in zip(Place._fields, columns, strict=True)
                }
            ),
        )


def _host_places(run: Run, job: Job | None) -> None:
    """Tables thread_place (tracks thread, mark and hook) and host_place."""
    names = [(name, what) for (name,) in sorted(run.tuples(_NAMES)) if (what := said_by(name)) is not None]
    run.table(
        "range_said",
        pa.table(
            {
                "name": pa.array([name for name, _ in names], pa.string()),
                "said": pa.array(range(1, len(names) + 1), pa.int32()),
            }
        ),
    )
    words = [Said(PLACE), *(what for _, what in names)]
    tables = _Tables()
    ranges = run.arrow(_RANGES)
    ranks = ranges["rank_key"].to_numpy()
    cuts = [0, *(np.flatnonzero(np.diff(ranks)) + 1).tolist(), len(ranks)]
    layers = _Layers(run, job, names)
    for low, high in pairwise(cuts):
        if low == high:
            continue
        part, rank_key = ranges.slice(low, high - low), int(ranks[low])
        tids, starts, ends, said = (part[n].to_numpy().tolist() for n in ("tid", "start_ns", "end_ns", "said"))
        here = layers.of_rank(rank_key, words, set(said))
        tables.add(rank_key, "thread", changes(tids, starts, ends, said, here, part["sequence_nr"].to_pylist()))
        marks = sorted(
            ((starts[i], -ends[i], said[i]) for i in range(high - low) if words[said[i]].kind == MARK),
        )
        if marks:
            begin, end, which = zip(*marks, strict=True)
            tables.add(rank_key, "mark", changes([0] * len(marks), begin, [-e for e in end], which, here))
    for rank_key, spans in groupby(run.tuples(_HOOK_SPANS), key=lambda r: r[0]):
        listed = list(spans)
        hooks: dict[Said, int] = {}
        numbers = [hooks.setdefault(_recorded(*span[3:]), len(hooks)) for span in listed]
        times = [s[1] for s in listed], [s[2] for s in listed]
        tables.add(rank_key, "hook", changes([0] * len(listed), *times, numbers, list(hooks)))
    tables.make(run)


def _recorded(
    phase: str | None, microbatch: int | None, chunk: int | None, layer: int | None, component: str | None
) -> Said:
    """What a span of our hook says."""

    def by(value: object) -> str | None:
        return None if value is None else "recorded"

    return Said(
        MARK,
        Place(
            phase, by(phase), microbatch, by(microbatch), chunk, by(chunk), layer, by(layer), component, by(component)
        ),
    )


class _Layers:
    """Which instance of a module class is which layer, by rank."""

    def __init__(self, run: Run, job: Job | None, names: Sequence[tuple[str, Said]]) -> None:
        self.job, self.layout = job, layout_of(job)
        self.piped = bool(run.value("SELECT EXISTS (SELECT 1 FROM recorded_comm WHERE op IN ('send', 'recv'))"))
        self.any = any(what.module is not None and _LAYER.match(what.module[0]) for _, what in names)

    def of_rank(self, rank: int, words: list[Said], used: set[int]) -> list[Said]:
        """The words with the layers that this rank's modules are."""
        if not self.any:
            return words
        seen: dict[str, set[int]] = {}
        for i in used:
            module = words[i].module
            if module is not None and _LAYER.match(module[0]):
                seen.setdefault(module[0], set()).add(module[1])
        numbers = self._numbers(rank)
        layers: dict[tuple[str, int], int] = {}
        for cls, ids in seen.items():
            if numbers is None and not self.piped and self.job is None and len(ids) > 1 and max(ids) == len(ids) - 1:
                layers |= {(cls, i): i for i in ids}
            elif numbers is not None and len(ids) == len(numbers):
                layers |= {(cls, i): layer for i, layer in zip(sorted(ids), numbers, strict=True)}
        if len({cls for cls, _ in layers}) != 1:
            return words  # of classes that nest nobody knows which is the layer
        return [
            w if w.module not in layers or w.module is None
            else w._replace(facts=w.facts._replace(layer=layers[w.module], layer_evidence="module"))
            for w in words
        ]  # fmt: skip

    def _numbers(self, rank: int) -> tuple[int, ...] | None:
        if self.job is None or self.layout is None or not 0 <= rank < self.layout.world_size:
            return None
        try:
            return self.job.layers_on_stage(self.layout.stage(rank))
        except JobError:
            return None


_FACTS = ("phase", "microbatch", "chunk", "layer", "component")


def _of_call(fact: str) -> str:
    """A fact of the calls behind one kernel, if all of them have the same."""
    return f"CASE WHEN count({fact}) = count(*) AND min({fact}) = max({fact}) THEN min({fact}) END AS {fact}"


_RAW = [c.name for c in schema.columns_of("kernel") if c.name != "kind"]

_LOCATED = f"""
CREATE OR REPLACE TABLE kernel_located AS
WITH recorded AS (SELECT {", ".join(_RAW)} FROM run WHERE kind = 'kernel'),
launch AS (
  SELECT rank, correlation, min(start_ns) AS launched_ns, arg_min(tid, start_ns) AS tid
  FROM cpu_op WHERE correlation IS NOT NULL AND start_ns IS NOT NULL GROUP BY ALL
),
work AS (
  SELECT rank, coalesce_id, {", ".join(_of_call(fact) for fact in ("role", "axis", *_FACTS))}
  FROM comm WHERE coalesce_id IS NOT NULL GROUP BY rank, coalesce_id
),
hosts AS (SELECT DISTINCT rank_key FROM thread_place WHERE track = 'thread'),
launched AS (
  SELECT k.* EXCLUDE (launch_ns), coalesce(k.launch_ns, l.launched_ns) AS launch_ns, coalesce(k.rank, -1) AS rank_key, l.tid,
         coalesce(k.launch_ns, l.launched_ns, k.start_ns) AS placed_ns, 0 AS any_tid, w.role AS call_role,
         w.axis AS call_axis,
         {", ".join(f"w.{fact} AS call_{fact}" for fact in _FACTS)}, l.tid IS NOT NULL AND h.rank_key IS NOT NULL AS hosted
  FROM recorded k
  LEFT JOIN launch l ON l.rank IS NOT DISTINCT FROM k.rank AND l.correlation = k.correlation
  LEFT JOIN work w ON w.rank IS NOT DISTINCT FROM k.rank AND w.coalesce_id = k.coalesce_id
  LEFT JOIN hosts h ON h.rank_key = coalesce(k.rank, -1)
)
SELECT k.*, %s,
       CASE WHEN k.placed_ns < s.step_end_ns THEN s.step END AS step,
       CASE WHEN k.placed_ns < s.step_end_ns THEN s.step_evidence END AS step_evidence,
       CASE WHEN k.placed_ns < s.step_end_ns THEN s.step_complete END AS step_complete
FROM launched k
ASOF LEFT JOIN step_range s ON s.rank_key = k.rank_key AND k.placed_ns >= s.step_start_ns
"""

_TRACKS = {"thread": "tid", "mark": "any_tid", "hook": "any_tid"}
"""Track of thread_place -> the kernel's column that says which thread's places it meets there."""


def _located(tracks: Iterable[str]) -> str:
    """_LOCATED with the places that there are: joins of 1 M kernels with nothing take a second each."""
    found = set(tracks)
    ids = ", ".join(
        f"{track}.place_id AS {track}_id" if track in found else f"NULL::BIGINT AS {track}_id" for track in _TRACKS
    )
    joins = "".join(
        f"ASOF LEFT JOIN (FROM thread_place WHERE track = '{track}') {track} "
        f"ON {track}.rank_key = k.rank_key AND {track}.tid = k.{tid} AND k.launch_ns >= {track}.at_ns\n"
        for track, tid in _TRACKS.items()
        if track in found
    )
    return _LOCATED % ids + joins


_TOLD = """
CREATE OR REPLACE TABLE kernel_told AS
WITH named AS (
  SELECT k.*, t.phase AS thread_phase, t.phase_evidence AS thread_phase_evidence, t.tensor_parallel,
         t.microbatch AS thread_microbatch, t.microbatch_evidence AS thread_microbatch_evidence,
         t.chunk AS thread_chunk, t.layer AS thread_layer, t.layer_evidence AS thread_layer_evidence,
         t.component AS thread_component, t.component_evidence AS thread_component_evidence,
         -- the thread that called backward waits for the one that works: its marks hold for both
         CASE WHEN t.phase IN ('backward', 'recompute') THEN m.microbatch END AS mark_microbatch,
         h.phase AS hook_phase, h.microbatch AS hook_microbatch, h.chunk AS hook_chunk, h.layer AS hook_layer,
         h.component AS hook_component
  FROM kernel_located k
  LEFT JOIN host_place t ON t.place_id = k.thread_id
  LEFT JOIN host_place m ON m.place_id = k.mark_id
  LEFT JOIN host_place h ON h.place_id = k.hook_id
)
SELECT n.* EXCLUDE (thread_phase, thread_phase_evidence, thread_microbatch, thread_microbatch_evidence, thread_chunk,
                    thread_layer, thread_layer_evidence, thread_component, thread_component_evidence, mark_microbatch,
                    hook_phase, hook_microbatch, hook_chunk, hook_layer, hook_component, call_role, call_axis, call_phase,
                    call_microbatch, call_chunk, call_layer, call_component, thread_id, mark_id, hook_id, any_tid, hosted,
                    tid),
  call_role AS role, call_axis AS axis,
  coalesce(call_phase, hook_phase, thread_phase, CASE WHEN hosted THEN 'other' END) AS phase,
  CASE WHEN call_phase IS NOT NULL THEN 'call' WHEN hook_phase IS NOT NULL THEN 'recorded'
       WHEN thread_phase IS NOT NULL THEN thread_phase_evidence WHEN hosted THEN 'no_path' END AS phase_evidence,
  coalesce(call_microbatch, hook_microbatch, mark_microbatch, thread_microbatch) AS microbatch,
  CASE WHEN call_microbatch IS NOT NULL THEN 'call' WHEN hook_microbatch IS NOT NULL THEN 'recorded'
       WHEN mark_microbatch IS NOT NULL THEN 'mark' WHEN thread_microbatch IS NOT NULL THEN thread_microbatch_evidence END
    AS microbatch_evidence,
  coalesce(call_chunk, hook_chunk, thread_chunk) AS chunk,
  CASE WHEN call_chunk IS NOT NULL THEN 'call' WHEN hook_chunk IS NOT NULL THEN 'recorded'
       WHEN thread_chunk IS NOT NULL THEN 'autograd' END AS chunk_evidence,
  coalesce(call_layer, hook_layer, thread_layer) AS layer,
  CASE WHEN call_layer IS NOT NULL THEN 'call' WHEN hook_layer IS NOT NULL THEN 'recorded'
       WHEN thread_layer IS NOT NULL THEN thread_layer_evidence END AS layer_evidence,
  coalesce(call_component, hook_component, thread_component,
           CASE WHEN kernel_class = 'attention' THEN 'attention' WHEN kernel_class = 'grouped_gemm' THEN 'experts' END)
    AS component,
  CASE WHEN call_component IS NOT NULL THEN 'call' WHEN hook_component IS NOT NULL THEN 'recorded'
       WHEN thread_component IS NOT NULL THEN thread_component_evidence
       WHEN kernel_class IN ('attention', 'grouped_gemm') THEN 'kernel_name' END AS component_evidence,
  row_number() OVER () AS kernel_id
FROM named n
"""

# Compute kernels of passes, and pipeline messages (without a kernel_id), in order of launch, of steps without marks.
_EVENTS = """
WITH open_step AS (
  SELECT rank, step FROM kernel_told
  WHERE rank IS NOT NULL AND step_complete AND step IS NOT NULL
  GROUP BY ALL HAVING count(microbatch) FILTER (microbatch_evidence NOT IN ('call', 'order')) = 0
)
SELECT k.rank, k.step, k.placed_ns AS at_ns, k.kernel_id, CASE WHEN k.phase = 'forward' THEN 0 ELSE 1 END::BIGINT AS what
FROM kernel_told k JOIN open_step o ON o.rank = k.rank AND o.step = k.step
WHERE k.kernel_class NOT IN ('comm', 'copy', 'memset') AND k.phase IN ('forward', 'backward', 'recompute')
  AND k.launch_ns IS NOT NULL
UNION ALL
SELECT c.rank, c.step, coalesce(c.t_issue_ns, c.start_ns), 0, CASE WHEN c.op = 'send' THEN 2 ELSE 3 END
FROM comm c JOIN open_step o ON o.rank = c.rank AND o.step = c.step
WHERE c.op IN ('send', 'recv') AND (c.role IS NULL OR c.axis = 'PP')
ORDER BY rank, step, at_ns, kernel_id
"""

_PLACED = f"""
CREATE OR REPLACE TABLE kernel_place AS
WITH placed AS (
  SELECT k.* REPLACE (
           coalesce(k.microbatch, p.microbatch) AS microbatch,
           CASE WHEN k.microbatch IS NOT NULL THEN k.microbatch_evidence WHEN p.microbatch IS NOT NULL THEN 'order' END
             AS microbatch_evidence,
           coalesce(k.chunk, p.chunk) AS chunk,
           CASE WHEN k.chunk IS NOT NULL THEN k.chunk_evidence WHEN p.chunk IS NOT NULL THEN 'order' END AS chunk_evidence)
  FROM kernel_told k
  LEFT JOIN kernel_pass p ON p.kernel_id = k.kernel_id
),
served AS (
  SELECT p.*, CASE
      WHEN kernel_class IN ('comm', 'copy', 'memset') THEN NULL
      WHEN phase = 'optimizer' AND u.optimizer THEN 'DP: phase'
      WHEN component LIKE 'expert%' AND u.ep THEN 'EP: component'
      WHEN kernel_class IN ('grouped_gemm', 'moe') AND u.ep THEN 'EP: kernel_class'
      WHEN kernel_class = 'attention' AND u.cp THEN 'CP: kernel_class'
      WHEN tensor_parallel AND u.tp THEN 'TP: call_path' END AS serves
  FROM placed p JOIN used_axis u ON u.rank_key = p.rank_key
)
SELECT {", ".join(f"s.{name}" for name in _RAW)},
       {", ".join(f"s.{name}" for name in KERNEL_COLUMNS if name not in ("served_axis", "served_axis_evidence"))},
       split_part(serves, ': ', 1) AS served_axis, split_part(serves, ': ', 2) AS served_axis_evidence
FROM served s
"""


def of_kernels(run: Run, job: Job | None = None) -> None:
    """Makes the table kernel_place: every row of the view kernel with the columns KERNEL_COLUMNS; the view shows them then.

    Needs an attached run. step: by the launch, or the start where the launch is not known.
    """
    _host_places(run, job)
    run.connection.execute(_located(t for (t,) in run.tuples("SELECT DISTINCT track FROM thread_place")))
    run.connection.execute(_TOLD)
    # each of these is as large as what was recorded of the kernels: one at a time
    _drop(run, "kernel_located", "thread_place", "host_place", "range_said")
    run.table("kernel_pass", _passes(run, job))
    run.table("used_axis", _used(run, job))
    run.connection.execute(_PLACED)
    _drop(run, "kernel_told", "kernel_pass")
    run.connection.execute("CREATE OR REPLACE VIEW kernel AS FROM kernel_place")


def _drop(run: Run, *tables: str) -> None:
    for table in tables:
        run.connection.execute(f"DROP TABLE {table}")


def as_recorded(run: Run) -> None:
    """Makes the view kernel show what was recorded and no more, as before of_kernels."""
    run.connection.execute(f"CREATE OR REPLACE VIEW kernel AS SELECT {', '.join(_RAW)} FROM run WHERE kind = 'kernel'")


def _passes(run: Run, job: Job | None) -> pa.Table:
    """Table kernel_pass: micro-batch and chunk of the kernels of passes that follow the job's schedule exactly."""
    ids: list[Ints] = []
    batches: list[Ints] = []
    chunks: list[Ints] = []
    if job is not None and order.schedules(job):
        events = run.arrow(_EVENTS)
        rank, step, number, what = (events[n].to_numpy() for n in ("rank", "step", "kernel_id", "what"))
        cuts = np.flatnonzero((np.diff(rank) != 0) | (np.diff(step) != 0)) + 1
        for low, high in pairwise([0, *cuts.tolist(), len(rank)] if len(rank) else [0]):
            here, ways = number[low:high], what[low:high]
            sends, recvs, work = np.cumsum(ways == 2), np.cumsum(ways == 3), ways < 2
            looks = np.stack([ways[work], sends[work], recvs[work]])
            new = np.ones(looks.shape[1], bool)
            new[1:] = (np.diff(looks) != 0).any(axis=0)
            seen = [order.Pass("FB"[way], s, r) for way, s, r in looks[:, new].T.tolist()]
            fitting = order.passes_of(job, int(rank[low]), seen)
            if fitting is not None:
                which = np.array(fitting, np.int64).reshape(-1, 2)[np.cumsum(new) - 1]
                ids.append(here[work])
                batches.append(which[:, 0])
                chunks.append(which[:, 1])

    def whole(parts: list[Ints]) -> Ints:
        return np.concatenate([np.empty(0, np.int64), *parts])

    interleaved = job is not None and (job.virtual_pipeline_model_parallel_size or 1) > 1
    chunk = whole(chunks)
    return pa.table(
        {
            "kernel_id": pa.array(whole(ids), pa.int64()),
            "microbatch": pa.array(whole(batches), pa.int32()),
            "chunk": pa.array(chunk, pa.int32(), mask=np.full(len(chunk), not interleaved)),
        }
    )


def _used(run: Run, job: Job | None) -> pa.Table:
    """Table used_axis: on which axes a rank's work is split, and whether its optimizer's is. Null: not known.

    By the job's layout; without one by the groups of more than one rank that the rank has.
    """
    layout: Layout | None = layout_of(job)
    ranks = [r for (r,) in run.tuples("SELECT DISTINCT coalesce(rank, -1) FROM run WHERE kind = 'kernel'")]
    rows: list[tuple[int, bool | None, bool | None, bool | None, bool | None]] = []
    if layout is not None and job is not None:
        tp, cp, ep, dp = (layout.degree(axis) > 1 for axis in (Axis.TP, Axis.CP, Axis.EP, Axis.DP))
        sharded = job.use_distributed_optimizer or job.use_megatron_fsdp or job.use_torch_fsdp2
        rows = [(rank, tp, cp, ep, sharded and (dp or cp)) for rank in ranks]
    else:
        axes: dict[int, set[str]] = {}
        for rank, axis in run.tuples(
            """SELECT coalesce(g.rank, -1), a.axis FROM process_group g JOIN role_axis a ON a.role = g.role
               WHERE coalesce(g.group_size, len(g.ranks)) > 1 GROUP BY ALL"""
        ):
            axes.setdefault(rank, set()).add(axis)
        shards = {
            rank
            for (rank,) in run.tuples(
                """SELECT DISTINCT coalesce(rank, -1) FROM comm
                   WHERE axis = 'DP' AND op IN ('all_gather', 'reduce_scatter') AND coalesce(group_size, 2) > 1"""
            )
        }
        for rank in ranks:
            here = axes.get(rank, set())
            rows.append(
                (rank, "TP" in here or None, "CP" in here or None, "EP" in here or None, rank in shards or None)
            )
    names = ("tp", "cp", "ep", "optimizer")
    return pa.table(
        {"rank_key": pa.array([r[0] for r in rows], pa.int32())}
        | {name: pa.array([r[i] for r in rows], pa.bool_()) for i, name in enumerate(names, 1)}
    )
