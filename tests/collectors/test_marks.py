"""Marks: the place of every call of real megatron-core jobs and of plain torch, and that nothing changes by them."""

import json
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer.collectors import marks
from traceanalyzer.collectors.state import state

sys.path.insert(0, str(Path(__file__).parent))
from marked_jobs import Marked, folder_of, needs_megatron, run

AG, RS, AR, A2A = "all_gather_single", "reduce_scatter_single", "allreduce", "all_to_all_single"


@pytest.fixture
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folder_of(tmp_path_factory)


def job(base: Path, configuration: str, *, marks: bool = True) -> Marked:
    needs_megatron()
    return run(base, "megatron_job", configuration, marks=marks)


def test_import_loads_nothing_but_the_standard_library() -> None:
    code = (
        "import sys, traceanalyzer.collectors.marks, traceanalyzer.collectors.jobinfo, traceanalyzer.collectors.memory;"
        "print(sorted({'torch', 'numpy', 'duckdb', 'pyarrow', 'pandas', 'click'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


# megatron-core --------------------------------------------------------------------------------------------------------


def layer_forward(phase: str, microbatch: int, layer: int) -> list[tuple[Any, ...]]:
    return [
        (AG, phase, microbatch, 0, layer, "attention.qkv"),
        (RS, phase, microbatch, 0, layer, "attention.proj"),
        (AG, phase, microbatch, 0, layer, "mlp.fc1"),
        (RS, phase, microbatch, 0, layer, "mlp.fc2"),
    ]


def layer_backward(microbatch: int, layer: int) -> list[tuple[Any, ...]]:
    return [
        (AG, "backward", microbatch, 0, layer, "mlp.fc2"),
        (AG, "backward", microbatch, 0, layer, "mlp.fc1"),
        (RS, "backward", microbatch, 0, layer, "mlp.fc1"),
        (AG, "backward", microbatch, 0, layer, "attention.proj"),
        (AG, "backward", microbatch, 0, layer, "attention.qkv"),
        (RS, "backward", microbatch, 0, layer, "attention.qkv"),
    ]


def tensor_parallel(microbatch: int, *, recompute: bool) -> list[tuple[Any, ...]]:
    """A micro-batch of two layers with sequence parallelism, TP2."""
    loss = (AR, "forward", microbatch, 0, None, "loss")
    return [
        (RS, "forward", microbatch, 0, None, "embedding"),
        *layer_forward("forward", microbatch, 0),
        *layer_forward("forward", microbatch, 1),
        (AG, "forward", microbatch, 0, None, "output layer"),
        *(loss, loss, loss),
        (AG, "backward", microbatch, 0, None, "output layer"),
        (RS, "backward", microbatch, 0, None, "output layer"),
        *(layer_forward("recompute", microbatch, 1) if recompute else []),
        *layer_backward(microbatch, 1),
        *(layer_forward("recompute", microbatch, 0) if recompute else []),
        *layer_backward(microbatch, 0),
        (AG, "backward", microbatch, 0, None, "embedding"),
    ]


@pytest.mark.megatron
@pytest.mark.parametrize(("configuration", "recompute"), [("tp2_sp", False), ("tp2_sp_recompute", True)])
@pytest.mark.parametrize("rank", [0, 1])
def test_tensor_parallel_calls_have_phase_layer_and_component(
    base: Path, configuration: str, recompute: bool, rank: int
) -> None:
    calls = job(base, configuration).calls(rank, 1)
    assert calls == [
        *tensor_parallel(0, recompute=recompute),
        *tensor_parallel(1, recompute=recompute),
        ("allreduce_coalesced", "other", None, None, None, "gradients"),
        (AR, "other", None, None, None, "norm gradients"),
        (AR, "optimizer", None, None, None, "gradient norm"),
    ]


def message(method: str, microbatch: int, chunk: int = 0) -> tuple[Any, ...]:
    """ "+" sends activations on, "-" receives them, ">" receives gradients, "<" sends them back."""
    forward = method in "+-"
    call = "send" if method in "+<" else "recv"
    return (
        call,
        "forward" if forward else "backward",
        microbatch,
        chunk,
        None,
        "activations" if forward else "gradients",
    )


@pytest.mark.megatron
def test_messages_of_1f1b_have_the_micro_batch_they_carry(base: Path) -> None:
    found = job(base, "pp2")
    tail = [
        ("allreduce_coalesced", "other", None, None, None, "gradients"),
        (AR, "other", None, None, None, "word embedding"),
        (AR, "optimizer", None, None, None, "gradient norm"),
    ]
    first = [message(m, b) for m, b in ["+0", "+1", ">0", "+2", ">1", "+3", ">2", ">3"] for b in [int(b)]]
    last = [message(m, b) for m, b in ["-0", "<0", "-1", "<1", "-2", "<2", "-3", "<3"] for b in [int(b)]]
    assert found.calls(0, 1) == [*first, *tail]
    without_loss = [call for call in found.calls(1, 1) if call[-1] != "loss"]
    # Each batch of two is issued together: the message back, then the one that arrives.
    assert without_loss == [*last, *tail]


@pytest.mark.megatron
@pytest.mark.slow
def test_messages_of_the_interleaved_schedule_have_micro_batch_and_chunk(base: Path) -> None:
    found = job(base, "pp2_interleaved")
    first = "+00 +10 -01 +01 -11 +11 >01 +20 <01 >11 +30 -21 <11 >00 +21 -31 >10 +31 >21 <21 >31 <31 >20 >30"
    last = "-00 -10 +00 -01 +10 -11 <01 -20 >00 <11 -30 +20 >10 <00 -21 +30 <10 -31 <21 >20 <31 >30 <20 <30"
    for rank, expected in ((0, first), (1, last)):
        calls = [call for call in found.calls(rank, 1) if call[0] in ("send", "recv")]
        assert calls == [message(m, int(b), int(c)) for m, b, c in expected.split()]


@pytest.mark.megatron
def test_layers_are_numbered_over_the_whole_model(base: Path) -> None:
    found = job(base, "pp2_interleaved")
    layers = {
        rank: {(place["chunk"], place["layer"]) for place in found.places(rank).values() if place["layer"] is not None}
        for rank in (0, 1)
    }
    assert layers == {0: {(0, 0), (1, 2)}, 1: {(0, 1), (1, 3)}}


@pytest.mark.megatron
def test_overlapped_gradients_and_parameters_have_the_phase_they_hide_in(base: Path) -> None:
    calls = [call for call in job(base, "dp2_distopt_overlap").calls(0, 1) if call[-1] != "loss"]
    assert calls == [
        *[("all_gather_single_coalesced", "forward", 0, 0, None, "parameters")] * 3,
        *[("reduce_scatter_single_coalesced", "backward", 1, 0, None, "gradients")] * 3,
        (AR, "optimizer", None, None, None, "gradient norm"),
    ]


@pytest.mark.megatron
def test_expert_parallel_calls_have_their_part_of_the_dispatcher(base: Path) -> None:
    calls = [call for call in job(base, "ep2").calls(1, 1) if call[-1] != "loss"]

    def forward(microbatch: int, layer: int) -> list[tuple[Any, ...]]:
        words = ("experts.counts", "experts.dispatch", "experts.dispatch", "experts.combine")
        return [(AG if i == 0 else A2A, "forward", microbatch, 0, layer, word) for i, word in enumerate(words)]

    def backward(microbatch: int, layer: int) -> list[tuple[Any, ...]]:
        words = ("experts.combine", "experts.dispatch", "experts.dispatch")
        return [(A2A, "backward", microbatch, 0, layer, word) for word in words]

    assert calls == [
        *(call for b in (0, 1) for call in [*forward(b, 0), *forward(b, 1), *backward(b, 1), *backward(b, 0)]),
        ("allreduce_coalesced", "other", None, None, None, "gradients"),
        ("allreduce_coalesced", "other", None, None, None, "expert gradients"),
        *[(AR, "optimizer", None, None, None, "gradient norm")] * 2,
    ]


def expert_rows(found: Marked, rank: int) -> list[tuple[Any, ...]]:
    """(step, phase, micro-batch, layer, first expert, counts) of each call of the experts."""
    places, records = found.places(rank), found.records(rank)
    said = {r[1]: r[2] for r in records if r[0] == "experts"}
    return [
        (r[3], *(places[r[4]][key] for key in ("phase", "microbatch", "layer")), said[r[1]]["first"], r[5])
        for r in records
        if r[0] == "rows"
    ]


def routed(found: Marked, step: int, call: int, layer: int) -> list[int]:
    """Rows of each of the four experts in one call of a layer's router, summed over both ranks, as the job itself says."""
    each = []
    for rank in range(2):
        said = json.loads((found.folder / f"rank{rank}.json").read_text())["routed"]
        of_layer = [counts for number, counts in said if number == layer]
        each.append(of_layer[step * len(of_layer) // 2 + call])
    return [sum(counts) for counts in zip(*each, strict=True)]


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("configuration", "dispatcher", "phases"),
    [
        ("ep2", "MoEAlltoAllTokenDispatcher", ["forward"]),
        pytest.param("ep2_allgather", "MoEAllGatherTokenDispatcher", ["forward", "recompute"], marks=pytest.mark.slow),
    ],
)
def test_rows_of_each_local_expert_are_those_that_the_routers_send(
    base: Path, configuration: str, dispatcher: str, phases: list[str]
) -> None:
    found = job(base, configuration)
    for rank in range(2):
        rows = expert_rows(found, rank)
        first = 2 * rank
        of_place = {row[:4]: row[4:] for row in rows}
        assert of_place == {
            (step, phase, microbatch, layer): (
                first,
                routed(found, step, len(phases) * microbatch + call, layer)[first : first + 2],
            )
            for step in (0, 1)
            for call, phase in enumerate(phases)
            for microbatch in (0, 1)
            for layer in (0, 1)
        }
        assert len(rows) == len(of_place)
        assert [r[2] for r in found.records(rank) if r[0] == "experts"] == [
            {"dispatcher": dispatcher, "first": first, "local": 2, "ranks": [0, 1], "tensor_ranks": 1}
        ] * 2
        assert found.facts(rank)["errors"] == 0
        assert [r for r in found.records(rank) if r[0] == "issue"] == []


@pytest.mark.megatron
@pytest.mark.slow
def test_context_parallel_calls_inside_a_foreign_function_have_the_place_of_their_module(base: Path) -> None:
    calls = [call for call in job(base, "cp2").calls(0, 1, "CONTEXT_PARALLEL") if call[2] == 0]
    assert calls == [
        *[(AG, "forward", 0, 0, layer, "attention") for layer in (0, 0, 1, 1)],
        *[(op, "backward", 0, 0, layer, "attention") for layer in (1, 0) for op in (AG, AG, RS, RS)],
    ]


@pytest.mark.megatron
@pytest.mark.parametrize("configuration", ["tp2_sp_recompute", pytest.param("ep2", marks=pytest.mark.slow)])
def test_losses_norms_and_parameters_are_equal_to_the_bit(base: Path, configuration: str) -> None:
    marked, plain = job(base, configuration), job(base, configuration, marks=False)
    for rank in range(2):
        with_marks, without = (json.loads((m.folder / f"rank{rank}.json").read_text()) for m in (marked, plain))
        for key in ("losses", "grad_norms", "parameters"):
            assert with_marks[key] == without[key]
            assert with_marks[key]


@pytest.mark.megatron
def test_steps_begin_with_the_schedule_and_end_with_the_optimizer(base: Path) -> None:
    found = job(base, "tp2_sp")
    assert found.facts(0) == {
        "hooked": found.facts(0)["hooked"],
        "errors": 0,
        "steps": [["begins", 0], ["ends", 0], ["begins", 1], ["ends", 1]],
    }
    spans = [(r[1], r[2]) for r in found.records(0) if r[0] == "span" and r[6] == 1]
    one = [
        *[("layer", "layer 0"), ("layer", "layer 1"), ("forward", "forward")],
        "microbatch",
        *[("layer", "layer 1"), ("layer", "layer 0"), ("backward", "backward")],
        "microbatch",
    ]
    expected = [("microbatch", f"microbatch {b}") if x == "microbatch" else x for b in (0, 1) for x in one]
    # A layer's backward span ends when the next layer's begins, the last one's with the pass.
    names = [span for span in spans if span[0] not in ("optimizer", "step")]
    assert sorted(map(str, names)) == sorted(map(str, expected))
    assert spans[-2:] == [("optimizer", "phase optimizer"), ("step", "step 1")]


# Without megatron-core ------------------------------------------------------------------------------------------------


class Session:
    def __init__(self, *, on: bool = True, marking: bool = False) -> None:
        self.on, self.marking = on, marking
        self.told: list[str] = []

    def step_begins(self, step: int) -> None:
        self.told.append(f"+{step}")
        state.on, state.marking = self.on, self.marking
        marks.sync()

    def step_ends(self, step: int) -> None:
        self.told.append(f"-{step}")
        state.on = state.marking = False


class Places:
    """A log that keeps what it is given."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.issues: list[str] = []

    def put(self, record: Any) -> None:
        self.records.append(record)

    def issue(self, _severity: str, code: str, _sentence: str) -> None:
        self.issues.append(code)

    def here(self) -> tuple[Any, ...]:
        """(step, phase, micro-batch, layer) now."""
        place = {r[1]: r[2] for r in self.records if r[0] == "place"}.get(state.place, {})
        return (state.step, place.get("phase"), place.get("microbatch"), place.get("layer"))


@pytest.fixture
def log() -> Iterator[Places]:
    found = Places()
    state.log = found
    yield found
    marks.uninstall()
    state.log, state.step, state.errors = None, None, 0
    state.on = state.marking = False


def toy(visits: list[tuple[Any, ...]], log: Places, *, checkpointed: bool = False) -> Any:
    """A model of two blocks that says where it is whenever it computes."""
    torch = pytest.importorskip("torch", reason="needs torch")
    from torch.utils.checkpoint import checkpoint

    class Visit(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            visits.append(log.here())
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            visits.append(log.here())
            return gradients[0]

    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.linear(Visit.apply(x))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(2, 2)
            self.blocks = torch.nn.ModuleList([Block(), Block()])

        def forward(self, x: Any) -> Any:
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if checkpointed else block(x)
            return x

    torch.manual_seed(0)
    return Model()


def routed_model(dispatcher: str, experts: str, *, fused: bool = False) -> Any:
    """Modules as Megatron names them: a layer whose MoE layer hands on the counts that it is given."""
    torch = pytest.importorskip("torch", reason="needs torch")
    local = type(experts, (torch.nn.Module,), {"forward": lambda self, rows, counts: rows, "_with_fused_impl": fused})

    class MoELayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.router, self.experts = torch.nn.Identity(), local()
            self.local_expert_indices = [6, 7]
            self.token_dispatcher = type(dispatcher, (), {"tp_size": 2})()

        def forward(self, rows: Any, counts: Any) -> Any:
            return self.experts(rows, counts)

    class BaseTransformerLayer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer_number = 4
            self.mlp = MoELayer()

        def forward(self, rows: Any, counts: Any) -> Any:
            return self.mlp(rows, counts)

    return torch.nn.ModuleList([BaseTransformerLayer()])


@pytest.fixture
def counting(log: Places) -> Any:
    """Calls such a model with rows on a device and these counts; gives what was said of it."""
    torch = pytest.importorskip("torch", reason="needs torch")

    def call(counts: Any, dispatcher: str, experts: str, *, device: str = "meta", fused: bool = False) -> Any:
        marks.install(Session())
        model = routed_model(dispatcher, experts, fused=fused)
        installed: Any = marks._marks
        installed.learn(marks._find(model))
        state.on, state.step = True, 5
        marks.sync()
        before = len(log.records)
        for _ in range(2):
            model[0](torch.empty(9, 1, device=device), counts)
        state.step = None
        said = [r for r in log.records[before:] if r[0] in ("experts", "rows")]
        return [r[:2] + r[3:] if r[0] == "rows" else r for r in said], log.issues, state.errors

    return call


ALLTOALL, FLEX = "MoEAlltoAllTokenDispatcher", "MoEFlexTokenDispatcher"


@pytest.mark.parametrize(
    ("dispatcher", "experts", "fused", "device"),
    [
        (ALLTOALL, "TEGroupedMLP", True, "meta"),  # the dispatcher has waited
        (FLEX, "TEGroupedMLP", False, "meta"),  # the experts read the counts themselves
        (FLEX, "OtherMLP", False, "cpu"),  # nothing is on a device
    ],
)
def test_counts_on_the_host_are_taken(
    counting: Any, log: Places, dispatcher: str, experts: str, fused: bool, device: str
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    said, issues, errors = counting(torch.tensor([4, 5]), dispatcher, experts, device=device, fused=fused)
    facts = {"dispatcher": dispatcher, "first": 6, "local": 2, "ranks": None, "tensor_ranks": 2}
    assert said == [["experts", 1, facts], *[["rows", 1, 5, said[1][3], [4, 5]]] * 2]
    places = {r[1]: r[2] for r in log.records if r[0] == "place"}
    assert (places[said[1][3]]["layer"], places[said[1][3]]["component"]) == (3, "experts")
    assert (issues, errors) == ([], 0)


def test_counts_that_are_a_list_are_taken(counting: Any) -> None:
    said, issues, errors = counting([4, 5], FLEX, "OtherMLP")
    assert [r[4] for r in said[1:]] == [[4, 5], [4, 5]]
    assert (issues, errors) == ([], 0)


def test_counts_on_a_device_are_not_touched(counting: Any) -> None:
    """A tensor without data, which raises at any attempt to read it."""
    torch = pytest.importorskip("torch", reason="needs torch")
    counts = torch.empty(2, dtype=torch.int64, device="meta")
    assert counting(counts, ALLTOALL, "TEGroupedMLP") == ([], ["expert_rows_on_device"] * 2, 0)


@pytest.mark.parametrize(("dispatcher", "experts", "fused"), [(FLEX, "OtherMLP", False), (FLEX, "TEGroupedMLP", True)])
def test_counts_whose_copy_nobody_waited_for_are_not_read(
    counting: Any, dispatcher: str, experts: str, fused: bool
) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    found = counting(torch.tensor([4, 5]), dispatcher, experts, fused=fused)
    assert found == ([], ["expert_rows_not_waited_for"] * 2, 0)


def test_errors_over_counts_are_counted_and_the_job_goes_on(counting: Any) -> None:
    said, _, errors = counting(object(), ALLTOALL, "TEGroupedMLP")
    assert (said, errors) == ([], 2)


def test_plain_torch_steps_layers_and_phases(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    session, visits = Session(), list[tuple[Any, ...]]()
    marks.install(session)
    model = toy(visits, log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        for _ in range(2):  # gradients of two micro-batches
            model(torch.ones(1, 2)).sum().backward()
        with torch.no_grad():
            model.eval()(torch.ones(1, 2))  # an evaluation is no micro-batch
        model.train()
        visits.append(log.here())
        optimizer.step()
        optimizer.zero_grad()
    other = "other"
    assert visits == [
        (step, phase, microbatch, layer)
        for step in (0, 1)
        for phase, microbatch, layer in [
            *[("forward", 0, 0), ("forward", 0, 1), ("backward", 0, 1), ("backward", 0, 0)],
            *[("forward", 1, 0), ("forward", 1, 1), ("backward", 1, 1), ("backward", 1, 0)],
            *[("forward", None, 0), ("forward", None, 1), (other, None, None)],
        ]
    ]
    assert session.told == ["+0", "-0", "+1", "-1"]


def test_forward_work_that_a_checkpoint_repeats_is_recompute(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    visits: list[tuple[Any, ...]] = []
    marks.install(Session())
    model = toy(visits, log, checkpointed=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        visits.clear()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert [visit[1:] for visit in visits] == [
        *[("forward", 0, 0), ("forward", 0, 1)],
        *[("recompute", 0, 1), ("backward", 0, 1), ("recompute", 0, 0), ("backward", 0, 0)],
    ]


def test_two_optimizers_that_take_turns_make_one_step(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    session = Session()
    marks.install(session)
    one, two = toy([], log), toy([], log)
    first, second = torch.optim.SGD(one.parameters(), lr=0.1), torch.optim.SGD(two.parameters(), lr=0.1)
    for _ in range(3):
        one(torch.ones(1, 2)).sum().backward()
        first.step()
        two(torch.ones(1, 2)).sum().backward()
        second.step()
    # Nobody can know in the first round that a second optimizer follows: two steps. Then one for each round.
    assert session.told == ["+0", "-0", "+1", "-1", "+2", "-2", "+3", "-3"]


def test_a_dormant_collector_keeps_no_place_and_counts_steps(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    session, visits = Session(on=False), list[tuple[Any, ...]]()
    marks.install(session)
    model = toy(visits, log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
    assert session.told == ["+0", "-0", "+1", "-1"]
    assert {visit[1:] for visit in visits} == {(None, None, None)}
    assert log.records == []
    assert not any("__call__" in vars(type(module)) for module in model.blocks)
    session.on = True  # armed: from the next step on
    for on in (True, False):
        model(torch.ones(1, 2)).sum().backward()
        assert all("__call__" in vars(type(module)) for module in model.blocks)
        session.on = on
        optimizer.step()
    model(torch.ones(1, 2)).sum().backward()
    assert not any("__call__" in vars(type(module)) for module in model.blocks)
    assert [visit for visit in visits if visit[0] is not None and visit[1] is not None] == [
        (step, phase, 0, layer)
        for step in (2, 3)
        for phase, layer in [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0)]
    ]


def test_ranges_are_opened_while_marking_only(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    names: dict[bool, list[str]] = {}
    for marking in (True, False):
        marks.install(Session(marking=marking))
        model = toy([], log)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        profiled: Any = None
        for _ in range(2):
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                profiled = profile
                model(torch.ones(1, 2)).sum().backward()
                optimizer.step()
        found = sorted((e.time_range.start, e.name) for e in profiled.events() if e.name.startswith("ta:"))
        names[marking] = [name for _, name in found]
        marks.uninstall()
        state.step = None
    assert names == {
        True: [
            "ta:step 1",
            "ta:microbatch 0",
            "ta:forward",
            "ta:layer 0",
            "ta:layer 1",
            "ta:backward",
            "ta:phase optimizer",
        ],
        False: [],
    }


def test_uninstall_leaves_torch_as_it_was(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")
    before = {
        "autograd": dict(vars(torch.autograd)),
        "module": dict(vars(torch.nn.Module)),
        "linear": dict(vars(torch.nn.Linear)),
    }
    hooks = (
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        len(sys.modules["torch.nn.modules.module"]._global_forward_pre_hooks),
    )
    words = marks.install(Session())
    model = toy([], log)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    assert words.startswith("marks: ")
    assert torch.autograd.backward is not before["autograd"]["backward"]
    assert all("__call__" in vars(type(m)) for m in (model, model.blocks[0]))
    marks.uninstall()
    assert {
        "autograd": dict(vars(torch.autograd)),
        "module": dict(vars(torch.nn.Module)),
        "linear": dict(vars(torch.nn.Linear)),
    } == before
    assert not any("__call__" in vars(type(m)) for m in (model, model.blocks[0]))
    after = (
        len(sys.modules["torch.optim.optimizer"]._global_optimizer_pre_hooks),
        len(sys.modules["torch.nn.modules.module"]._global_forward_pre_hooks),
    )
    assert after == hooks
    assert state.errors == 0


def test_an_error_of_ours_stays_ours(log: Places) -> None:
    torch = pytest.importorskip("torch", reason="needs torch")

    def losses() -> list[float]:
        model = toy([], Places())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        found = []
        for _ in range(3):
            loss = model(torch.ones(1, 2)).sum()
            loss.backward()
            optimizer.step()
            found.append(float(loss))
        return found

    expected = losses()

    class Broken(Places):
        def put(self, record: Any) -> None:
            raise RuntimeError("no room")

    state.log = Broken()
    marks.install(Session())
    assert losses() == expected
    assert state.errors > 0


def test_models_are_copied_and_saved_without_us(log: Places, tmp_path: Path) -> None:
    import copy
    import pickle

    torch = pytest.importorskip("torch", reason="needs torch")
    marks.install(Session())
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    copy.deepcopy(model)
    assert b"traceanalyzer" not in pickle.dumps(model)


# Megatron-LM's loop ---------------------------------------------------------------------------------------------------


def test_megatron_lm_steps_have_the_absolute_iteration(log: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-ins for the loop's functions, which need a GPU, under their names."""
    told: list[Any] = []
    arguments = types.SimpleNamespace(curr_iteration=0)
    loop = types.ModuleType("megatron.training.training")
    variables = types.ModuleType("megatron.training.global_vars")
    variables.__dict__["get_args"] = lambda: arguments

    def train_step(forward_step_func: Any, data_iterator: Any) -> None:
        told.append(("train_step", state.step))

    def evaluate() -> None:
        told.append(("evaluate", state.step))

    def train() -> None:
        for iteration in (500, 501):
            arguments.curr_iteration = iteration
            loop.__dict__["train_step"](None, None)
            told.append(("logging", state.step))
        loop.__dict__["evaluate"]()
        arguments.curr_iteration = 502
        loop.__dict__["train_step"](None, None)

    for function in (train_step, evaluate, train):
        loop.__dict__[function.__name__] = function
    monkeypatch.setitem(sys.modules, "megatron.training.training", loop)
    monkeypatch.setitem(sys.modules, "megatron.training.global_vars", variables)
    session = Session()
    marks.install(session)
    loop.__dict__["train"]()
    assert told == [
        *[("train_step", 500), ("logging", 500), ("train_step", 501), ("logging", 501)],
        *[("evaluate", None), ("train_step", 502)],
    ]
    assert session.told == ["+500", "-500", "+501", "-501", "+502", "-502"]
    assert marks.seen.loop
    marks.uninstall()
    assert loop.__dict__["train"] is train
