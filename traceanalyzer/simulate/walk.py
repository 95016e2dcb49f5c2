"""A job as programs: one training step, walked through the model in the way the framework goes through it.

``walk`` builds the model chunks of each pipeline stage, follows the schedule pass by pass, calls module by module (each a
function in a walk_ module, one for each chapter) and lets a tape remember the backward work. Which calls a rank makes is
nowhere written down as a rule, only what each module does; see docs/decisions/0009-simulated-traffic-is-walked.md.

The step is a steady one: gradients that overlap travel during the backward pass, and parameters that overlap are gathered
in the forward pass of the same step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from traceanalyzer.axes import ROLES, Layout
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.simulate import walk_control as control
from traceanalyzer.simulate import walk_data as data
from traceanalyzer.simulate import walk_pipeline as pipeline
from traceanalyzer.simulate import walk_tensor as tensor
from traceanalyzer.simulate.program import Group, Instruction, Ints, Program, Walked
from traceanalyzer.simulate.schedules import Await, Exchange, Launch, Order, Pass, order_of
from traceanalyzer.simulate.walk_expert import Router, Routing, Splits, moe
from traceanalyzer.simulate.walk_tape import Owed, Sizes, Tape


@dataclass(frozen=True)
class Changes:
    """How a run departs from its job, for faults.

    stages, ranks: fields of the job that are other on a stage, or on single ranks (a rank's own come on top of its
    stage's); ranks that depart get a program of their own. They may change what the ranks do, not the grid: degrees,
    order and world size stay the job's. order: another schedule than Megatron's, for all stages. after: called one after
    another with the result, each gives the next one.
    """

    stages: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    ranks: Mapping[int, Mapping[str, object]] = field(default_factory=dict)
    order: Order | None = None
    after: Sequence[Callable[[Walked], Walked]] = ()


def walk(
    job: Job,
    *,
    changes: Changes | None = None,
    seed: int = 0,
    routing: Routing = "random",
    step: int = 0,
) -> Walked:
    """The programs of one steady training step of every rank.

    seed: of the routing of tokens; the same gives the same. routing: where tokens go, see walk_expert.Routing. step: its
    number, in the name of its range. A job that does not say its release is walked as 0.16. Raises JobError for a size
    that is needed and unknown, and for options that are not walked (all of them in one sentence).
    """
    changes = changes or Changes()
    layout = job.layout
    _check(Sizes.of(job))
    programs: list[Program] = []
    stages = _ranks_of_stages(layout)
    for stage, ranks in enumerate(stages):
        for members, own in _variants(job, changes, stage, ranks):
            walker = _Walker(own, stage, ranks, members, changes, seed, routing, step)
            programs.append(Program(members, walker.run()))
    walked = Walked(programs, groups(layout))
    for change in changes.after:
        walked = change(walked)
    return walked


def _check(sizes: Sizes) -> None:
    found = control.unsupported(sizes)
    if found:
        raise JobError(f"the simulator does not walk {', '.join(found)}: switch it off or change it in the job")


def _ranks_of_stages(layout: Layout) -> list[tuple[int, ...]]:
    found: list[list[int]] = [[] for _ in range(layout.pp)]
    for group in layout.groups("pp"):
        for stage, rank in enumerate(group):
            found[stage].append(rank)
    return [tuple(sorted(ranks)) for ranks in found]


def _variants(job: Job, changes: Changes, stage: int, ranks: tuple[int, ...]) -> list[tuple[tuple[int, ...], Job]]:
    """Ranks of a stage that have the same job, and that job."""
    common = dict(changes.stages.get(stage, {}))
    apart: dict[tuple[tuple[str, object], ...], list[int]] = {}
    for rank in ranks:
        apart.setdefault(tuple(sorted(changes.ranks.get(rank, {}).items(), key=lambda one: one[0])), []).append(rank)
    found: list[tuple[tuple[int, ...], Job]] = []
    for own, members in apart.items():
        fields = {**common, **dict(own)}
        found.append((tuple(members), dataclasses.replace(job, **fields) if fields else job))  # type: ignore[arg-type]
    return found


def groups(layout: Layout) -> list[Group]:
    """Every group that Megatron makes for a layout, as it describes them."""
    found: list[Group] = []
    for role, entry in ROLES.items():
        description = entry.descriptions[0]
        for members in layout.groups(role):
            text = description.replace("*", str(len(members)))
            found.append(Group(role, members, text))
    return found


class _Walker:
    """Writes the program of some ranks of one stage."""

    def __init__(
        self,
        job: Job,
        stage: int,
        of_stage: tuple[int, ...],
        members: tuple[int, ...],
        changes: Changes,
        seed: int,
        routing: Routing,
        step: int,
    ) -> None:
        self.job, self.stage, self.step, self.members = job, stage, step, members
        self.sizes = Sizes.of(job)
        _check(self.sizes)
        self.tape = Tape(self.sizes, ring=self.ring)
        self.order = changes.order or pipeline.order(self.sizes)
        self.chunks = [data.Wrapped(self.sizes, stage, chunk) for chunk in range(self.order.chunks)]
        self.owed: dict[tuple[int, int], Owed] = {}
        self.owed_weights: dict[tuple[int, int], Owed] = {}
        self.messenger = pipeline.Messenger(self.tape, stage, self.rank_at, apart=self.order.kind == "zb-h1")
        self._peers: dict[tuple[str, int], Ints] = {}
        if job.num_experts is not None:
            router = Router(job, self.sizes, stage, of_stage, routing, seed)
            places = {rank: index for index, rank in enumerate(of_stage)}
            whole = members == of_stage
            chosen = slice(None) if whole else np.array([places[rank] for rank in members], np.intp)
            mine: dict[tuple[int, int], Splits] = {}

            def rows(layer: int, microbatch: int) -> Splits:
                key = layer, microbatch
                if key not in mine:
                    mine[key] = router.rows(layer, microbatch).of(chosen)
                return mine[key]

            self.tape.router = rows

    # -- peers

    def ring(self, role: str, step: int) -> Ints:
        key = role, step
        if key not in self._peers:
            found = []
            for rank in self.members:
                group = self.job.layout.group_of(role, rank) or (rank,)
                found.append(group[(group.index(rank) + step) % len(group)])
            self._peers[key] = np.array(found, np.int64)
        return self._peers[key]

    def rank_at(self, stage: int) -> Ints:
        return self.ring("pp", stage - self.stage)

    # -- the step

    def run(self) -> list[Instruction]:
        tape = self.tape
        with tape.range(f"step {self.step}"):
            self.passes()
            if not self.job.forward_only:
                with tape.at("other"):
                    data.finalize(
                        tape, self.chunks, self.stage, self.rank_at(self.job.pipeline_model_parallel_size - 1)
                    )
                    control.rerun_state(tape)
                with tape.at("optimizer"), tape.range("phase optimizer"):
                    control.optimizer_step(tape, self.chunks)
                with tape.at("other"):
                    control.after_step(tape, self.stage)
            elif self.stage == self.job.pipeline_model_parallel_size - 1:
                with tape.at("other"):
                    control.loss_average(tape)
        return tape.instructions

    def passes(self) -> None:
        job, tape = self.job, self.tape
        # grad_sync_func and param_sync_func: the schedule starts the exchange, not the hooks of the parameters. Nothing in
        # megatron-core sets the first (ModelParallelConfig: None): --align-grad-reduce of Megatron-LM's training.py does.
        aligned = job.align_grad_reduce and (job.framework == "megatron-lm" or "align_grad_reduce" in job.given)
        aligned = aligned or self.order.kind in ("gpipe", "zb-h1")
        aligned = aligned and job.overlap_grad_reduce and not job.forward_only
        gathered = job.use_distributed_optimizer and job.overlap_param_gather and job.align_param_gather
        by_schedule = aligned and self.order.kind != "none"
        for event in order_of(self.order, self.stage):
            if isinstance(event, Exchange):
                self.messenger.exchange(event)
            elif isinstance(event, Await):
                self.messenger.wait(event)
            elif isinstance(event, Launch):
                chunk = self.chunks[event.chunk]
                with tape.at("other"):
                    if event.what == "gradients" and by_schedule and self._starts(event.chunk):
                        chunk.start(tape)
                    elif event.what == "parameters" and gathered and not job.forward_only:
                        chunk.gather(tape)
            elif event.kind == "F":
                self.forward(event)
            elif event.kind == "B":
                self.backward(event, by_schedule)
            else:
                self.weights(event)

    def _starts(self, chunk: int) -> bool:
        """Whether a launch by the schedule still has something to start: stage 0 of 1F1B leaves it to the hooks."""
        return not self.chunks[chunk].live

    def forward(self, event: Pass) -> None:
        tape, job = self.tape, self.job
        chunk = self.chunks[event.chunk]
        tape.replica = chunk
        chunk.hooked = job.use_distributed_optimizer and job.overlap_param_gather and not job.forward_only
        with tape.range(f"microbatch {event.microbatch}"), tape.range("forward"):
            place = {"microbatch": event.microbatch, "chunk": event.chunk}
            with tape.at("forward", **place):
                if job.forward_only:
                    self.model(event.chunk)
                else:
                    with tape.recording() as owed:
                        self.model(event.chunk)
                    self.owed[event.microbatch, event.chunk] = owed
        chunk.hooked = False

    def backward(self, event: Pass, by_schedule: bool) -> None:
        tape, job = self.tape, self.job
        chunk = self.chunks[event.chunk]
        tape.replica = chunk
        by_hooks = not by_schedule or (self.order.kind == "1f1b" and self.stage == 0)
        if event.last and job.overlap_grad_reduce and by_hooks:
            chunk.arm()
        with tape.range(f"microbatch {event.microbatch}"), tape.range("backward"):
            place = {"microbatch": event.microbatch, "chunk": event.chunk}
            with tape.at("backward", **place):
                if self.order.kind == "zb-h1":
                    tape.later = self.owed_weights[event.microbatch, event.chunk] = []
                tape.pay(self.owed.pop((event.microbatch, event.chunk)))
                tape.later = None

    def weights(self, event: Pass) -> None:
        """The gradients of the weights, where they are a pass of their own."""
        tape = self.tape
        with tape.range(f"microbatch {event.microbatch}"), tape.range("backward"):
            place = {"microbatch": event.microbatch, "chunk": event.chunk}
            with tape.at("backward", **place):
                tape.pay(self.owed_weights.pop((event.microbatch, event.chunk)))

    # -- the model

    def model(self, chunk: int) -> None:
        """One model chunk going forward."""
        job, tape = self.job, self.tape
        first = self.stage == 0 and chunk == 0
        last = self.stage == job.pipeline_model_parallel_size - 1 and chunk == self.order.chunks - 1
        control.batch(tape, first=first, last=last)
        if first:
            tensor.embed(tape)
        self.layers(job.layers_on_stage(self.stage, chunk))
        if last:
            tensor.head(tape)

    def layers(self, layers: tuple[int, ...]) -> None:
        """TransformerBlock: layer by layer, or checkpoints of some layers each."""
        job, tape = self.job, self.tape
        if job.recompute_granularity != "full":
            for layer in layers:
                self.layer(layer)
            return
        (number,) = job.require("recompute_num_layers")
        step = number if job.recompute_method == "uniform" else 1
        for index in range(0, len(layers), step):
            part = layers[index : index + step]
            if job.recompute_method == "block" and index >= number:
                for layer in part:
                    self.layer(layer)
                continue

            def run(part: tuple[int, ...] = part) -> None:
                for layer in part:
                    self.layer(layer)

            tape.checkpoint(run, first=self.gather_saved if job.distribute_saved_activations else None)

    def gather_saved(self) -> None:
        """The checkpoint's input, of which each TP rank kept a part."""
        elems = self.sizes.shard * self.sizes.hidden
        self.tape.call("tp", "all_gather", elems // self.sizes.tp, elems, component="saved activations")

    def layer(self, layer: int) -> None:
        tape = self.tape
        with tape.layer_range(layer):
            tensor.attention(tape)
            if self.job.is_moe_layer(layer):
                moe(tape)
            else:
                tensor.mlp(tape)
