"""Faults in traffic: each is simulated on its job, and the first thing that is found names it, at its place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from traceanalyzer.diff import Diff, diff
from traceanalyzer.errors import InputError, JobError
from traceanalyzer.findings import Facts, Finding, find
from traceanalyzer.job import Job
from traceanalyzer.review import review
from traceanalyzer.run import Run
from traceanalyzer.simulate import simulate
from traceanalyzer.simulate.faults import FAULTS, Chosen, Plan, parse, run, traffic
from traceanalyzer.simulate.rows import Collected

NAMES = [fault.name for fault in traffic.FAULTS]


class First(NamedTuple):
    """The finding that comes first: code, confidence, its whole place, and what its sentence begins with."""

    code: str
    confidence: str
    place: dict[str, Any]
    words: str


_TP = {"role": "tp", "axis": "TP"}
_DP = {"role": "dp_cp", "axis": "DP", "component": "gradients"}
_KV = {"role": "cp", "axis": "CP", "component": "attention: K and V"}
_WORLD = {"role": "world", "axis": "other"}

FIRST: dict[str, First] = {
    "sequence_parallel_off": First(
        "sequence_parallel_off",
        "proven",
        {**_TP, "stage": 1, "ranks": [4, 5, 6, 7]},
        "The job has sequence parallelism on, but its tensor-parallel layers all-reduce: it was off on stage 1, and not",
    ),
    # 4 layers x 4 micro-batches x 4 transfers
    "recompute_on": First("recompute_full", "likely", _TP, "64 forward calls are repeated inside the backward pass"),
    "fp32_reduction": First(
        "fp32_reduction", "proven", _DP, "Gradients are reduced as float32 instead of bfloat16, twice the bytes"
    ),
    # Elements: 4 layers x (4 x 4096^2 attention + 3 x 4096 x 16384 mlp + 2 norms of 4096), a norm and the embedding of
    # 32768 x 4096: 1,207,996,416; padded to a multiple of 65,536 they are 1,208,025,088.
    "bucket_padding": First(
        "padding", "likely", _DP, "4,832,100,352 bytes a call instead of 4,831,985,664: the buckets are padded further"
    ),
    "double_param_gather": First(
        "double_param_gather",
        "likely",
        {**_DP, "component": "parameters"},
        "The same parameters are gathered 2 times a step",
    ),
    "overlap_ignored": First(
        "overlap_grad_reduce_off",
        "likely",
        _DP,
        "As many bytes of gradients as expected, in one call behind the backward passes instead of 13:",
    ),
    "wrong_etp": First(
        "expert_tensor_parallel",
        "proven",
        {"role": "etp", "axis": "TP", "component": "experts.gather"},
        "The run gathers and scatters tokens between expert tensor-parallel ranks, which the job does not have",
    ),
    "wrong_ep": First(
        "expert_parallel",
        "proven",
        {"role": "ep", "axis": "EP"},
        "No rank sends tokens to another one's experts: expert_model_parallel_size was 1 (as where it is not set), the job "
        "says 2, and the gradients of the data-parallel group are longer by those of all 8 experts.",
    ),
    "capacity_drop": First(
        "capacity",
        "likely",
        {"role": "ep", "axis": "EP"},
        "The ranks send fewer rows than tokens x experts per token: a capacity factor drops tokens",
    ),
    "layers_differ": First(
        "layers_differ",
        "likely",
        {**_TP, "ranks": [4, 5]},
        "Ranks 4, 5 make the calls of 3 layers a stage, the job gives 4:",
    ),
    "extra_all_reduce": First("extra_call", "likely", _WORLD, "1 all-reduce over all ranks in every step,"),
    "barrier": First("barrier", "likely", _WORLD, "1 barrier over all ranks in every step,"),
    "wrong_gradient_group": First("wrong_group", "likely", _DP, "1 call a step that belongs on dp_cp runs on dp,"),
    "tied_embedding_missing": First(
        "tied_embedding_missing",
        "likely",
        {"role": "embedding", "axis": "other", "component": "word embedding"},
        "The gradients of the word embedding, which the first and the last stage share, are not summed over them:",
    ),
    "cp_variant": First(
        "cp_comm_type", "proven", _KV, "Context parallelism runs as all_gather, the job's cp_comm_type"
    ),
    "gqa_ignored": First(
        "query_groups",
        "proven",
        _KV,
        "Keys and values are 8 times as large as the job's: those of 32 query groups instead of 4 (as many as heads:",
    ),
    # the multiple of 5,120 above 32,768
    "vocabulary_padding": First(
        "vocabulary_size", "proven", _DP, "The word embedding has 35,840 rows, the job says 32,768:"
    ),
    "pipeline_on_default_group": First(
        "pipeline_on_default_group",
        "likely",
        {"role": "pp", "axis": "PP", "component": "gradients"},
        "4 calls between the stages a step run on the default group instead of the pipeline's:",
    ),
    # of 4 layers and 4 micro-batches: 10 transfers of tp (4 forward, 6 backward); of cp a send and a recv of K and V
    # forward, again and of their gradients backward
    "groups_confused": First(
        "groups_confused", "likely", _TP, "160 calls of tp a step run on cp, and 96 of cp on tp: the two groups"
    ),
    "microbatch_count": First(
        "microbatch_count",
        "likely",
        _TP,
        "Every count is 3/4 of the expected one: the step had 3 micro-batches, the job",
    ),
    # what only a trace with kernels tells
    "overlap_without_effect": First(
        "overlap_without_effect", "proven", {"role": "dp_cp", "axis": "DP"}, "overlap_grad_reduce"
    ),
    "order_mismatch": First(
        "order_mismatch",
        "proven",
        {"role": "tp", "ranks": [2, 3]},
        "Ranks 2-3 made 4 calls of tp in another order than their peers:",
    ),
    "cuda_graph": First(
        "cuda_graph_on",
        "proven",
        _TP,
        "The layers make none of their 160 tensor-parallel calls a step, and the run holds 640 communication kernels of",
    ),
    "tp_comm_overlap_on": First(
        "tp_comm_overlap_on",
        "proven",
        _TP,
        "The layers make none of their 160 tensor-parallel calls a step, and the run holds 640 kernels of "
        "TransformerEngine's userbuffers instead: tp_comm_overlap is on in this run",
    ),
}
TRACED = ("overlap_without_effect", "order_mismatch", "cuda_graph", "tp_comm_overlap_on")
CALLS = [name for name in NAMES if name not in TRACED]

Simulated = Callable[..., Path]


@pytest.fixture
def simulated(tmp_path: Path) -> Simulated:
    """Writes the run of a fault on its own job; ``traced``: with profiles, else what the hooks saw."""

    def make(name: str, *, traced: bool) -> Path:
        fault = FAULTS[name]
        plan = Plan(fault.base(), collected=Collected(profiled=None if traced else []))
        path = tmp_path / "run.parquet"
        run(plan, [Chosen(fault)]).write(path)
        return path

    return make


def _compared(path: Path) -> Diff:
    with Run.open(path, threads=1) as opened:
        return diff(opened)


def _holds(name: str, found: list[Finding] | tuple[Finding, ...]) -> None:
    """The expected finding is the first, and no other says that the traffic is wrong, but as its effect."""
    first = found[0]
    wanted = FIRST[name]
    assert (first.code, first.confidence, dict(first.place)) == wanted[:3]
    assert first.sentence.startswith(wanted.words)
    assert [f.code for f in found if f.kind == "verdict" and f.because_of is None and f is not first] == []
    fault = FAULTS[name]
    assert (fault.finding, fault.rank) == (wanted.code, 1)


def test_every_fault_is_expected() -> None:
    assert sorted(FIRST) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_truth_names_the_place_of_the_finding(name: str) -> None:
    where = FAULTS[name].apply(Plan(FAULTS[name].base())).where
    said = {key: value for key, value in where.items() if key in ("role", "axis", "stage", "ranks")}
    assert said.items() <= FIRST[name].place.items()


@pytest.mark.parametrize("name", CALLS)
def test_what_the_calls_tell(name: str, simulated: Simulated) -> None:
    compared = _compared(simulated(name, traced=False))
    _holds(name, find(Facts({}, compared.job, compared)))


@pytest.mark.parametrize("name", TRACED)
def test_what_a_trace_tells(name: str, simulated: Simulated) -> None:
    with Run.open(simulated(name, traced=True), threads=1) as opened:
        _holds(name, review(opened).findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_what_a_review_says_first(name: str, simulated: Simulated) -> None:
    with Run.open(simulated(name, traced=True), threads=1) as opened:
        _holds(name, review(opened).findings)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_same_job_without_the_fault(name: str, tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    simulate(FAULTS[name].base(), collected=Collected(profiled=[])).write(path)
    compared = _compared(path)
    assert (compared.verdict, [f.code for f in find(Facts({}, compared.job, compared)) if f.kind == "verdict"]) == (
        "match",
        [],
    )


@pytest.mark.parametrize("name", ["wrong_etp", "wrong_ep"])
def test_a_conflict_is_named_too(name: str, simulated: Simulated) -> None:
    compared = _compared(simulated(name, traced=False))
    assert compared.job_used == "intended"
    assert FAULTS[name].kind == "conflict"
    codes = {f.code for f in find(Facts({}, compared.job, compared)) if f.kind == "conflict"}
    assert codes == {"job_conflict"}


def test_the_words_are_of_a_graph(simulated: Simulated) -> None:
    compared = _compared(simulated("cuda_graph", traced=True))
    assert compared.verdict == "cannot be judged"
    assert {u.why for u in compared.coverage.unattributed} == {"a CUDA graph replays it, and no call is recorded"}
    # 4 ranks x 160 calls of the layers
    assert sum(u.kernels for u in compared.coverage.unattributed) == 640


# -- how faults are chosen ---------------------------------------------------------------------------------------------


def test_options_take_the_type_of_their_default() -> None:
    chosen = parse("layers_differ:rank=2, layers=5")
    assert (chosen.fault.name, chosen.options) == ("layers_differ", {"rank": 2, "layers": 5})
    assert parse("capacity_drop:factor=0.25").options == {"factor": 0.25}
    assert parse("barrier").options == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("nothing", "no such fault: 'nothing'. There are: "),
        ("barrier:rank=1", "fault barrier: 'rank=1' is no option of it. There are: it has none."),
        ("layers_differ:rank", "fault layers_differ: 'rank' is no option of it. There are: rank=5, layers=3."),
        ("layers_differ:rank=x", "fault layers_differ: rank=x is no whole number. By default: rank=5, layers=3."),
    ],
)
def test_what_cannot_be_chosen(text: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(text)
    assert str(raised.value).startswith(words)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("sequence_parallel_off", {"sequence_parallel": False}, "this fault needs a job with sequence parallelism"),
        ("double_param_gather", {"use_distributed_optimizer": False}, "this fault needs a job with the distributed"),
        (
            "order_mismatch",
            {"sequence_parallel": False, "tensor_model_parallel_size": 1},
            "this fault needs a job with te",
        ),
        ("cp_variant", {"context_parallel_size": 1}, "this fault needs a job with context parallelism"),
    ],
)
def test_a_fault_that_makes_no_sense_in_a_job(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        FAULTS[name].apply(Plan(Job(**{**FAULTS[name].job, **changes})))


def test_an_option_that_a_fault_does_not_have() -> None:
    with pytest.raises(InputError, match=r"fault layers_differ: no such option: stage\. There are: rank, layers\."):
        FAULTS["layers_differ"].apply(Plan(FAULTS["layers_differ"].base()), stage=1)


def test_the_truth_lists_each_fault_with_its_place() -> None:
    job = FAULTS["recompute_on"].base()
    found = simulate(job, faults=[parse("recompute_on"), parse("extra_all_reduce:elems=3")])
    assert [f["name"] for f in found.truth()["faults"]] == ["recompute_on", "extra_all_reduce"]
    assert found.truth()["faults"][1] == {
        "name": "extra_all_reduce",
        "options": {"elems": 3, "role": "world"},
        "kind": "verdict",
        "finding": "extra_call",
        "where": {"role": "world", "op": "all_reduce"},
        "sentence": "The training loop sums a metric of its own over all ranks in every step.",
    }


def test_two_faults_are_both_found(tmp_path: Path) -> None:
    path = tmp_path / "run.parquet"
    faults = [parse("recompute_on"), parse("barrier")]
    simulate(FAULTS["recompute_on"].base(), faults=faults, collected=Collected(profiled=[])).write(path)
    compared = _compared(path)
    found = find(Facts({}, compared.job, compared))
    assert [f.code for f in found if f.kind == "verdict"] == ["recompute_full", "barrier"]
