"""Every cause by itself: when it is given, how sure it is, which cells it joins, and what it does not fire on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from traceanalyzer.causes import TABLE, Cause, CellView, Facts, explain
from traceanalyzer.expect.model import Avoidable, Evidence, ExpectedCall
from traceanalyzer.job import Job

JOB = Job(world_size=2, tensor_model_parallel_size=2, sequence_parallel=True, num_microbatches=4, bf16=True)


def expected(op: str = "all_gather", calls: int = 32, **changes: Any) -> ExpectedCall:
    """Calls on a whole tensor of 4096 bf16 (8192 bytes) over a group of two."""
    sizes = {"all_gather": (2048, 4096), "reduce_scatter": (4096, 2048)}.get(op, (4096, 4096))
    fields: dict[str, Any] = {
        "rule": "test",
        "role": "tp",
        "op": op,
        "phase": "forward",
        "component": "attention.qkv",
        "dtype": "bfloat16",
        "in_elems": sizes[0],
        "out_elems": sizes[1],
        "group_size": 2,
        "calls": calls,
        "evidence": Evidence("inferred", "test"),
    }
    return ExpectedCall(**{**fields, **changes})


def cell(verdict: str, wanted: int = 32, got: int = 32, **changes: Any) -> CellView:
    """A cell of tp / forward / all_gather / bfloat16, 8192 bytes a call."""
    fields: dict[str, Any] = {
        "role": "tp",
        "op": "all_gather",
        "phase": "forward",
        "dtype": "bfloat16",
        "payload": 8192,
        "calls_expected": wanted,
        "calls_measured": got,
        "verdict": verdict,
        "expected": (expected(calls=wanted),) if wanted else (),
    }
    return CellView(**{**fields, **changes})


def found(cells: list[CellView], facts: Facts | None = None) -> dict[int, tuple[str, str, tuple[int, ...]]]:
    """Cell -> code, confidence, related cells."""
    return {
        i: (cause.code, cause.confidence, related)
        for i, (cause, related) in explain(cells, facts or Facts(JOB)).items()
    }


def sentence(cells: list[CellView], facts: Facts | None = None) -> str:
    """The sentence of the one cause that these cells have."""
    (words,) = {cause.sentence for cause, _ in explain(cells, facts or Facts(JOB)).values()}
    return words


def test_a_match_and_an_unknown_have_no_cause() -> None:
    assert found([cell("match"), cell("unknown", got=3), cell("unknown", phase="recompute", wanted=0)]) == {}


def test_an_unexplained_difference_has_none() -> None:
    assert found([cell("missing", got=31), cell("match", op="reduce_scatter")]) == {}


# -- recomputation ---------------------------------------------------------------------------------------------------

REPEATED = [
    cell("unexpected", wanted=0, phase="recompute"),
    cell("unexpected", wanted=0, phase="recompute", op="reduce_scatter", got=16),
    cell("match"),
]


def test_recompute_full_likely() -> None:
    assert found(REPEATED) == {0: ("recompute_full", "likely", (1,)), 1: ("recompute_full", "likely", (0,))}
    assert sentence(REPEATED) == (
        "48 forward calls are repeated inside the backward pass: recomputation is on, the job does not ask for it."
    )


def test_recompute_full_proven_by_the_captured_job() -> None:
    selective = Job(recompute_granularity="selective")
    full = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert found(REPEATED, Facts(selective, captured=full))[0][1] == "proven"
    assert sentence(REPEATED, Facts(selective, captured=full)) == (
        "48 forward calls are repeated inside the backward pass: recomputation is on, the job says selective, and the "
        "captured job has recompute_granularity full."
    )
    assert found(REPEATED, Facts(selective, captured=selective))[0][1] == "likely"


def test_recompute_full_counts_one_rank_and_step() -> None:
    other = cell("unexpected", wanted=0, phase="recompute", got=99, ranks=(1,))
    assert sentence([REPEATED[0], other]).startswith("32 forward calls")


@pytest.mark.parametrize("verdict", ["missing", "match", "unknown"])
def test_recompute_full_near_misses(verdict: str) -> None:
    assert "recompute_full" not in str(found([cell(verdict, phase="recompute")]))
    asked = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    assert found(REPEATED, Facts(asked)) == {}


def test_recompute_off() -> None:
    job = Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)
    cells = [cell("missing", got=0, phase="recompute"), cell("missing", got=0, phase="recompute", op="reduce_scatter")]
    assert found(cells, Facts(job)) == {0: ("recompute_off", "proven", (1,)), 1: ("recompute_off", "proven", (0,))}
    assert sentence(cells, Facts(job)) == (
        "recompute_granularity is full, but no forward call is repeated in the backward pass: the run does not recompute."
    )
    assert found(cells) == {}
    assert found([*cells, cell("match", phase="recompute", op="all_reduce", got=1)], Facts(job)) == {}
    assert found([cell("missing", got=0)], Facts(job)) == {}


# -- sequence parallelism --------------------------------------------------------------------------------------------


def test_sequence_parallel_off() -> None:
    cells = [
        cell("missing", got=0),
        cell("excess", op="all_reduce", expected=(expected("reduce_scatter"),)),
        cell("missing", wanted=1, got=0, op="all_reduce", phase="other", dtype="float32"),
    ]
    assert found(cells) == {
        0: ("sequence_parallel_off", "proven", (1,)),
        1: ("sequence_parallel_off", "proven", (0,)),
    }
    assert sentence(cells) == (
        "The job has sequence parallelism on, but its tensor-parallel layers all-reduce: it was off in this run."
    )
    some = [*cells[1:], cell("missing", got=2)]
    assert found(some)[0] == ("sequence_parallel_off", "likely", (2,))
    said = Facts(JOB, captured=Job(tensor_model_parallel_size=2, world_size=2))
    assert found(some, said)[0][1] == "proven"


def test_sequence_parallel_on() -> None:
    off = Facts(Job(world_size=2, tensor_model_parallel_size=2, num_microbatches=4, bf16=True))
    cells = [
        cell("missing", expected=(expected("all_reduce"),)),
        cell("unexpected", wanted=0, op="reduce_scatter"),
        cell("unexpected", wanted=0, phase="backward", op="all_gather"),
    ]
    assert set(found(cells, off).values()) == {
        ("sequence_parallel_on", "proven", (1, 2)),
        ("sequence_parallel_on", "proven", (0, 2)),
        ("sequence_parallel_on", "proven", (0, 1)),
    }
    assert sentence(cells, off) == (
        "The job has sequence parallelism off, but its tensor-parallel layers all-gather and reduce-scatter: it was on in "
        "this run."
    )


@pytest.mark.parametrize(
    "near",
    [
        pytest.param([cell("unexpected", wanted=0, op="all_reduce")], id="all-reduces with nothing missing"),
        pytest.param([cell("missing", got=30)], id="some gathers missing"),
        pytest.param(
            [cell("missing", got=0, role="dp"), cell("unexpected", wanted=0, op="all_reduce", role="dp")], id="dp"
        ),
        pytest.param(
            [cell("missing", got=0), cell("unexpected", wanted=0, op="all_reduce", dtype="float32")], id="another type"
        ),
        pytest.param(
            [cell("missing", got=0), cell("unexpected", wanted=0, op="all_reduce", phase="other")],
            id="outside the layers",
        ),
    ],
)
def test_sequence_parallel_near_misses(near: list[CellView]) -> None:
    assert "sequence_parallel" not in str(found(near))


# -- micro-batches ---------------------------------------------------------------------------------------------------


def test_microbatch_count() -> None:
    cells = [cell("missing", got=24), cell("missing", wanted=12, got=9, op="all_reduce"), cell("match", phase="other")]
    assert found(cells) == {0: ("microbatch_count", "likely", (1,)), 1: ("microbatch_count", "likely", (0,))}
    assert sentence(cells) == ("Every count is 3/4 of the expected one: the step had 3 micro-batches, the job says 4.")
    assert found(cells, Facts(JOB, captured=Job(num_microbatches=3)))[0][1] == "proven"
    assert found(cells, Facts(JOB, captured=Job(num_microbatches=4)))[0][1] == "likely"


def test_microbatch_count_of_one_bad_step() -> None:
    good = [cell("match", steps=(1, 3)), cell("match", steps=(1, 3), phase="backward")]
    bad = [cell("excess", got=40, steps=(2,)), cell("excess", got=40, steps=(2,), phase="backward")]
    assert found([*good, *bad]) == {2: ("microbatch_count", "likely", (3,)), 3: ("microbatch_count", "likely", (2,))}


@pytest.mark.parametrize(
    "near",
    [
        pytest.param([cell("missing", got=24)], id="one count"),
        pytest.param([cell("missing", got=24), cell("match", op="all_reduce")], id="not every count"),
        pytest.param([cell("missing", got=24), cell("missing", got=16, op="all_reduce")], id="two factors"),
        pytest.param([cell("missing", got=31), cell("missing", got=31, op="all_reduce")], id="no whole number"),
        pytest.param([cell("missing", got=0), cell("missing", got=0, op="all_reduce")], id="nothing measured"),
        pytest.param(
            [
                cell("excess", got=64),
                cell("excess", got=64, phase="backward"),
                cell("match", op="reduce_scatter", ranks=(0, 1)),
            ],
            id="right in a cell shared with another rank",
        ),
    ],
)
def test_microbatch_near_misses(near: list[CellView]) -> None:
    assert "microbatch_count" not in str(found(near))
    assert found([cell("missing", got=24), cell("missing", got=24, phase="backward")], Facts(Job())) == {}


# -- traffic outside torch.distributed -------------------------------------------------------------------------------

SCATTER = expected("reduce_scatter", 8, transport="userbuffers")
LEFT_TO_USERBUFFERS = cell("unknown", 8, 0, op="reduce_scatter", expected=(SCATTER,), transport="userbuffers")


def test_tp_comm_overlap_off() -> None:
    cells = [cell("unexpected", 0, 8, op="reduce_scatter"), LEFT_TO_USERBUFFERS, cell("match")]
    assert found(cells) == {0: ("tp_comm_overlap_off", "likely", (1,)), 1: ("tp_comm_overlap_off", "likely", (0,))}
    assert sentence(cells[:2]) == (
        "torch.distributed made calls that the job leaves to userbuffers: tp_comm_overlap is off in this run, in whole or in "
        "part."
    )
    assert found([LEFT_TO_USERBUFFERS]) == {}
    assert "overlap" not in str(
        found([cell("unexpected", 0, 8, op="reduce_scatter", phase="backward"), LEFT_TO_USERBUFFERS])
    )


@pytest.mark.parametrize(
    ("transport", "code"), [("deepep", "flex_dispatcher_off"), ("hybridep", "flex_dispatcher_off"), ("CUDA graph", "")]
)
def test_another_dispatcher(transport: str, code: str) -> None:
    """The other dispatchers exchange over the expert-parallel group alone; a graph holds the same calls."""
    outside = expected("all_to_all", 8, role="tp_ep", transport=transport)
    cells = [
        cell("unexpected", 0, 8, role="ep", op="all_to_all"),
        cell("unknown", 8, 0, role="tp_ep", op="all_to_all", expected=(outside,), transport=transport),
    ]
    assert {c for c, _, _ in found(cells).values()} == ({code} if code else set())


def test_cuda_graph_off() -> None:
    captured = expected(transport="CUDA graph")
    cells = [cell("unexpected", 0, 32), cell("unknown", 32, 0, expected=(captured,), transport="CUDA graph")]
    assert found(cells)[0] == ("cuda_graph_off", "likely", (1,))


# -- data parallel ---------------------------------------------------------------------------------------------------

DP = {"role": "dp_cp", "phase": "other", "dtype": "float32"}


def gradients(op: str = "all_reduce", calls: int = 1, **changes: Any) -> ExpectedCall:
    """Gradients of 4096 floats (16384 bytes)."""
    return expected(op, calls, **{"component": "gradients", **DP, **changes})


def parameters(calls: int = 1, **changes: Any) -> ExpectedCall:
    """Parameters of 4096 bf16 (8192 bytes)."""
    return expected(
        "all_gather", calls, **{"role": "dp_cp", "phase": "optimizer", "component": "parameters", **changes}
    )


PARAMETERS: dict[str, Any] = {"role": "dp_cp", "phase": "optimizer"}
NO_DATA_JOB = Facts(Job(world_size=2, num_microbatches=4, bf16=True))


def test_distributed_optimizer_off() -> None:
    cells = [
        cell("excess", 1, 1, **DP, op="all_reduce", payload=16384, expected=(gradients("reduce_scatter"),)),
        cell("missing", 1, 0, **PARAMETERS, expected=(parameters(),)),
    ]
    assert found(cells) == {
        0: ("distributed_optimizer_off", "proven", (1,)),
        1: ("distributed_optimizer_off", "proven", (0,)),
    }
    assert sentence(cells) == (
        "The job has the distributed optimizer on, but gradients are all-reduced and no parameter is gathered: it was off in "
        "this run."
    )
    gathered = [cells[0], cell("match", 1, 1, **PARAMETERS, expected=(parameters(),))]
    assert found(gathered) == {0: ("distributed_optimizer_off", "likely", ())}
    some = [*cells, cell("match", 1, 1, **DP, op="reduce_scatter", expected=(gradients("reduce_scatter"),))]
    assert "distributed_optimizer" not in str(found(some))


def test_distributed_optimizer_on() -> None:
    scattered = cell("missing", 1, 1, **DP, op="reduce_scatter", payload=16384, expected=(gradients(),))
    cells = [scattered, cell("unexpected", 0, 1, **PARAMETERS)]
    assert set(found(cells).values()) == {
        ("distributed_optimizer_on", "proven", (1,)),
        ("distributed_optimizer_on", "proven", (0,)),
    }
    assert found([scattered]) == {0: ("distributed_optimizer_on", "likely", ())}
    captured = Facts(JOB, captured=Job(use_distributed_optimizer=True))
    assert found([scattered], captured) == {0: ("distributed_optimizer_on", "proven", ())}


@pytest.mark.parametrize(
    ("expected_in", "made_in", "code"),
    [("backward", "other", "overlap_grad_reduce_off"), ("other", "backward", "overlap_grad_reduce_on")],
)
def test_overlapped_gradients(expected_in: str, made_in: str, code: str) -> None:
    in_buckets = {**DP, "op": "all_reduce", "payload": 16384}
    cells = [
        cell(
            "missing", 2, 0, **{**in_buckets, "phase": expected_in}, expected=(gradients(calls=2, phase=expected_in),)
        ),
        cell("unexpected", 0, 1, **{**in_buckets, "phase": made_in, "payload": 32768}),
    ]
    assert found(cells) == {0: (code, "likely", (1,)), 1: (code, "likely", (0,))}
    assert sentence(cells) == (
        f"As many bytes as expected, but in {made_in} instead of {expected_in}: overlap_grad_reduce was {code[20:]} in this "
        "run."
    )
    captured = Facts(JOB, captured=Job(overlap_grad_reduce=True))
    assert found(cells, captured)[0][1] == "proven"
    short = [cells[0], cell("unexpected", 0, 1, **{**in_buckets, "phase": made_in})]
    assert "overlap" not in str(found(short))


def test_overlapped_parameters() -> None:
    cells = [
        cell("missing", 1, 0, **{**PARAMETERS, "phase": "forward"}, expected=(parameters(phase="forward"),)),
        cell("unexpected", 0, 1, **PARAMETERS),
    ]
    assert found(cells)[1] == ("overlap_param_gather_off", "likely", (0,))


def test_bucket_size() -> None:
    """One call of 16384 bytes instead of 4 of 4096, of which one was paired."""
    small = gradients(calls=4, in_elems=1024, out_elems=1024)
    cells = [cell("missing", 4, 1, **DP, op="all_reduce", payload=16384, expected=(small,))]
    assert found(cells) == {0: ("bucket_size", "likely", ())}
    assert sentence(cells) == (
        "The same 16,384 bytes in 1 calls instead of 4 (all_reduce): buckets of another size (ddp_bucket_size, "
        "ddp_num_buckets, or overlap, without which there is one)."
    )
    assert found(cells, Facts(JOB, captured=Job(ddp_bucket_size=7)))[0][1] == "proven"
    apart = [
        cell("missing", 4, 0, **DP, op="all_reduce", payload=4096, expected=(small,)),
        cell("unexpected", 0, 2, **DP, op="all_reduce", payload=8192),
    ]
    assert found(apart)[1] == ("bucket_size", "likely", (0,))
    less = [cell("missing", 4, 1, **DP, op="all_reduce", payload=16380, expected=(small,))]
    assert "bucket_size" not in str(found(less))
    assert "bucket_size" not in str(found([cell("missing", 4, 1, op="all_reduce", payload=16384, expected=(small,))]))


def test_double_param_gather() -> None:
    twice = [cell("excess", 1, 2, **PARAMETERS, expected=(parameters(),))]
    assert found(twice) == {0: ("double_param_gather", "likely", ())}
    assert sentence(twice) == (
        "The same parameters are gathered 2 times a step; once is enough (overlap_param_gather gathers once)."
    )
    elsewhere = [
        cell("unexpected", 0, 1, **{**PARAMETERS, "phase": "forward"}),
        cell("match", 1, 1, **PARAMETERS, expected=(parameters(),)),
    ]
    assert found(elsewhere) == {0: ("double_param_gather", "likely", ())}
    for near in (
        [cell("unexpected", 0, 1, **PARAMETERS)],
        [cell("excess", 2, 3, **PARAMETERS, expected=(parameters(2),))],
        [cell("missing", 2, 1, **PARAMETERS, expected=(parameters(2),))],
        [cell("excess", 1, 2)],
    ):
        assert "double_param_gather" not in str(found(near))


def test_fp32_reduction() -> None:
    narrow = gradients(dtype="bfloat16")
    cells = [cell("excess", 1, 1, **DP, op="all_reduce", payload=16384, expected=(narrow,))]
    assert found(cells) == {0: ("fp32_reduction", "proven", ())}
    assert sentence(cells) == (
        "Gradients are reduced as float32 instead of bfloat16, twice the bytes: --grad-reduce-in-bf16 is off in this run "
        "(accumulate_allreduce_grads_in_fp32)."
    )
    wide = gradients()
    half = {**DP, "dtype": "bfloat16"}
    assert found([cell("missing", 1, 1, **half, op="all_reduce", expected=(wide,))])[0][0] == "dtype_differs"
    gathered = parameters(phase="other")
    assert found([cell("excess", 1, 1, **DP, payload=16384, expected=(gathered,))])[0][0] == "dtype_differs"


def test_padding() -> None:
    cells = [cell("excess", 1, 1, **DP, op="all_reduce", payload=16704, expected=(gradients(),))]
    assert found(cells) == {0: ("padding", "likely", ())}
    assert sentence(cells) == (
        "16,704 bytes a call instead of 16,384: the buckets are padded further (pad_buckets_for_high_nccl_busbw, another "
        "release)."
    )
    for payload in (16712, 16380):
        other = [cell("excess", 1, 1, **DP, op="all_reduce", payload=payload, expected=(gradients(),))]
        assert found(other)[0][0] == "size_differs"
    assert found([cell("excess", payload=8200)])[0][0] == "size_differs"


# -- experts ---------------------------------------------------------------------------------------------------------


def test_expert_tensor_parallel() -> None:
    made = [cell("unexpected", 0, 8, role="etp"), cell("unexpected", 0, 8, role="etp", op="reduce_scatter")]
    assert found(made) == {
        0: ("expert_tensor_parallel", "likely", (1,)),
        1: ("expert_tensor_parallel", "likely", (0,)),
    }
    assert sentence(made) == (
        "The run gathers and scatters tokens between expert tensor-parallel ranks, which the job does not have: "
        "expert_tensor_parallel_size differs (where it is not set it is the tensor-parallel size)."
    )
    lost = [cell("missing", 8, 0, role="etp")]
    assert sentence(lost).startswith(
        "No token is gathered or scattered between the job's expert tensor-parallel ranks: "
    )
    captured = Facts(JOB, captured=Job(expert_tensor_parallel_size=1))
    assert found(lost, captured) == {0: ("expert_tensor_parallel", "proven", ())}
    assert "expert_tensor_parallel" not in str(found([cell("missing", 8, 4, role="etp")]))


def test_recompute_moe() -> None:
    cells = [cell("unexpected", 0, 16, phase="recompute", role=role, op="all_to_all") for role in ("ep", "tp_ep")]
    assert found(cells)[0] == ("recompute_moe", "likely", (1,))
    assert sentence(cells) == (
        "32 exchanges of the experts are repeated inside the backward pass, and nothing else is: moe is among the recomputed "
        "modules of this run, not of the job."
    )
    assert found([*cells, cell("unexpected", 0, 4, phase="recompute")])[0][0] == "recompute_full"
    captured = Facts(JOB, captured=Job(recompute_granularity="selective", recompute_modules=("moe",)))
    assert found(cells, captured)[0][1] == "proven"
    asked = Facts(Job(recompute_granularity="selective", recompute_modules=("moe",)))
    assert found(cells, asked) == {}


@pytest.mark.parametrize(("verdict", "word"), [("missing", "send fewer"), ("excess", "exchange other")])
def test_capacity(verdict: str, word: str) -> None:
    cells = [cell(verdict, role="ep", op="all_to_all", payload=None, varies=True)]
    assert found(cells) == {0: ("capacity", "likely", ())}
    assert sentence(cells).startswith(f"The ranks {word} rows than tokens x experts per token")
    assert "capacity" not in str(found([cell(verdict, got=31, role="ep", op="all_to_all", payload=None, varies=True)]))
    assert "capacity" not in str(found([cell(verdict, role="ep", op="all_to_all")]))


def test_shared_expert_overlap() -> None:
    facts = Facts(JOB, captured=Job(moe_shared_expert_overlap=True))
    cells = [cell("missing", got=24), cell("missing", got=1, role="dp"), cell("match", op="all_reduce")]
    assert found(cells, facts) == {0: ("shared_expert_overlap", "likely", ())}
    assert sentence(cells, facts).startswith("moe_shared_expert_overlap was on in this run")
    assert "shared_expert" not in str(found(cells))


# -- context and pipeline --------------------------------------------------------------------------------------------


def test_cp_comm_type() -> None:
    sends = expected("send", 16, role="cp", component="attention: K and V")
    cells = [
        cell("missing", 16, 0, role="cp", op="send", expected=(sends,)),
        cell("unexpected", 0, 8, role="cp"),
        cell("unexpected", 0, 8, role="cp", op="reduce_scatter", phase="backward"),
    ]
    assert {code for code, _, _ in found(cells).values()} == {"cp_comm_type"}
    assert sentence(cells) == "Context parallelism runs as all_gather, the job's cp_comm_type gives p2p."
    both_ways = [*cells, cell("match", 4, 4, role="cp", op="recv", expected=(expected("recv", 4, role="cp"),))]
    assert "cp_comm_type" not in str(found(both_ways))
    assert "cp_comm_type" not in str(found(cells[:1]))


def stage(rank: int, sends: tuple[int, int], recvs: tuple[int, int]) -> list[CellView]:
    """Messages of a stage, expected and measured."""
    cells = []
    for op, (wanted, got) in (("send", sends), ("recv", recvs)):
        verdict = "match" if wanted == got else "excess" if got > wanted else "missing"
        call = expected(op, wanted, role="pp")
        cells.append(cell(verdict, wanted, got, role="pp", op=op, phase=None, ranks=(rank,), expected=(call,)))
    return cells


LOSS = cell("match", 12, 12, op="all_reduce", ranks=(3,))


def test_virtual_stages() -> None:
    """Four micro-batches: 2 v - 1 messages each way at the ends, 2 v in between; two chunks instead of one."""
    four = Facts(Job(world_size=4, pipeline_model_parallel_size=4, num_microbatches=4, num_layers=8))
    cells = [*stage(0, (4, 12), (4, 12)), *stage(1, (8, 16), (8, 16)), *stage(3, (4, 12), (4, 12)), LOSS]
    assert {code for code, _, _ in found(cells, four).values()} == {"virtual_stages"}
    assert found(cells, four)[0][1:] == ("likely", (1, 2, 3, 4, 5))
    assert sentence(cells, four) == (
        "The messages between stages are those of 2 model chunks a stage, the job has 1: "
        "virtual_pipeline_model_parallel_size differs."
    )
    captured = Job(world_size=4, pipeline_model_parallel_size=4, num_layers=8, virtual_pipeline_model_parallel_size=2)
    assert found(cells, Facts(four.job, captured=captured))[0][1] == "proven"
    one_short = [*stage(0, (4, 12), (4, 11)), *stage(1, (8, 16), (8, 16)), LOSS]
    assert "virtual_stages" not in str(found(one_short, four))
    alone = [*stage(0, (4, 12), (4, 12))]
    assert "virtual_stages" not in str(found(alone, four))
    wrong_loss = [*cells[:-1], cell("excess", 12, 24, op="all_reduce", ranks=(3,))]
    assert "virtual_stages" not in str(found(wrong_loss, four))


def test_no_virtual_stages() -> None:
    job = Job(
        world_size=2, pipeline_model_parallel_size=2, num_microbatches=4, num_layers=4,
        virtual_pipeline_model_parallel_size=2,
    )  # fmt: skip
    cells = [*stage(0, (12, 4), (12, 4)), *stage(1, (12, 4), (12, 4)), LOSS]
    assert sentence(cells, Facts(job)).startswith(
        "The messages between stages are those of 1 model chunk a stage, the job has 2"
    )


# -- one field -------------------------------------------------------------------------------------------------------


def test_dtype_differs() -> None:
    wide = [cell("excess", dtype="float32", payload=16384)]
    assert found(wide) == {0: ("dtype_differs", "proven", ())}
    assert sentence(wide) == "Sent as float32 instead of bfloat16, 2 times the bytes."
    assert sentence([cell("missing", dtype="float8_e4m3fn", payload=4096)]) == (
        "Sent as float8_e4m3fn instead of bfloat16, 0.5 times the bytes."
    )
    assert sentence([cell("excess", dtype="float16")]) == "Sent as float16 instead of bfloat16, 1 times the bytes."


@pytest.mark.parametrize(
    "near",
    [
        pytest.param(cell("excess", dtype="float32"), id="as many bytes, so not the same elements"),
        pytest.param(cell("unexpected", wanted=0, dtype="float32", payload=16384), id="nothing to compare"),
        pytest.param(cell("missing", got=0, dtype="float32", payload=16384), id="nothing measured"),
        pytest.param(cell("unknown", dtype="float32", payload=16384), id="unknown"),
        pytest.param(cell("excess", got=33), id="same type"),
        pytest.param(cell("excess", dtype=None, payload=None), id="type not recorded"),
    ],
)
def test_dtype_near_misses(near: CellView) -> None:
    assert found([near]) == {}


def test_operation_differs() -> None:
    cells = [cell("excess", role="dp_cp", op="all_reduce", expected=(expected("reduce_scatter"),))]
    assert found(cells) == {0: ("operation_differs", "likely", ())}
    assert sentence(cells) == "all_reduce instead of reduce_scatter."
    assert found([cell("unexpected", wanted=0, op="all_reduce")]) == {}
    assert found([cell("missing", got=0, op="all_reduce", expected=(expected("reduce_scatter"),))]) == {}


def test_size_differs() -> None:
    assert found([cell("excess", payload=10240)]) == {0: ("size_differs", "likely", ())}
    assert sentence([cell("excess", payload=10240)]) == (
        "10,240 bytes a call instead of 8,192 (1.25 times): padding, another shape, or a size of the job that is not what "
        "the job says."
    )
    assert found([cell("excess", got=33)]) == {}
    assert found([cell("excess", payload=None)]) == {}


def test_size_differs_from_an_empty_call() -> None:
    empty = expected("broadcast", in_elems=0, out_elems=0, dtype="int32", calls=1)
    cells = [cell("excess", 1, 1, op="broadcast", dtype="int32", payload=64, expected=(empty,))]
    assert sentence(cells).startswith("64 bytes a call instead of 0: padding")


# -- the document's rules --------------------------------------------------------------------------------------------

BACKWARD = expected(phase="backward", component="mlp.fc2")
REGATHER = expected(
    phase="backward", component="mlp.fc1 input re-gather", avoidable=Avoidable(4096, "sp_input_regather", "")
)
DOCUMENT = Facts(JOB, rules="document", megatron={0: (expected(), BACKWARD, REGATHER)})


def test_sp_input_regather() -> None:
    cells = [cell("excess", got=64, phase="backward", expected=(BACKWARD,)), cell("match")]
    assert found(cells, DOCUMENT) == {0: ("sp_input_regather", "proven", ())}
    assert sentence(cells, DOCUMENT) == (
        "The document lets the backward pass mirror the forward one; real Megatron gathers the input of every "
        "column-parallel layer again for its weight gradient: 32 of the 32 calls beyond the document "
        "(32 mlp.fc1 input re-gather). The megatron rules explain 64 calls."
    )
    short = [cell("excess", got=60, phase="backward", expected=(BACKWARD,))]
    assert found(short, DOCUMENT) == {0: ("sp_input_regather", "likely", ())}
    assert sentence(short, DOCUMENT).endswith("The megatron rules explain 64 calls of 60.")


def test_recompute_repeats_collectives() -> None:
    repeated = expected(phase="recompute", avoidable=Avoidable(4096, "recompute_repeats_collectives", "selective"))
    facts = Facts(
        Job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1),
        rules="document",
        megatron={0: (repeated,)},
    )
    cells = [cell("unexpected", wanted=0, phase="recompute")]
    assert found(cells, facts) == {0: ("recompute_repeats_collectives", "proven", ())}
    assert sentence(cells, facts) == (
        "Recomputation repeats forward collectives, which the document does not mention: 32 attention.qkv. The megatron "
        "rules explain 32 calls."
    )


def test_not_in_document() -> None:
    norm = expected("all_reduce", 1, role="mp", phase="optimizer", component="gradient norm", in_elems=1, out_elems=1)
    facts = Facts(JOB, rules="document", megatron={3: (norm,)})
    cells = [cell("unexpected", 0, 1, role="mp", op="all_reduce", phase="other", payload=2, ranks=(3, 4))]
    assert found(cells, facts) == {0: ("not_in_document", "proven", ())}
    assert sentence(cells, facts) == (
        "The document does not mention these calls, real Megatron makes them: 1 gradient norm. The megatron rules explain "
        "1 call."
    )


@pytest.mark.parametrize(
    ("near", "facts"),
    [
        pytest.param(cell("excess", got=64, phase="backward"), Facts(JOB), id="the megatron rules"),
        pytest.param(cell("missing", got=31, phase="backward"), DOCUMENT, id="missing"),
        pytest.param(cell("excess", got=64, phase="backward", payload=1), DOCUMENT, id="another size"),
        pytest.param(cell("excess", got=33, expected=(expected(),)), DOCUMENT, id="nothing beyond"),
        pytest.param(cell("excess", got=64, phase="backward", ranks=(1,)), DOCUMENT, id="another rank"),
    ],
)
def test_document_near_misses(near: CellView, facts: Facts) -> None:
    assert not {"sp_input_regather", "not_in_document"} & {code for code, _, _ in found([near], facts).values()}


# -- groups ----------------------------------------------------------------------------------------------------------


def moved(role: str, other: str, calls: int = 4, op: str = "all_gather") -> list[CellView]:
    """Calls that the first role lacks and the other makes."""
    return [
        cell("missing", calls, 0, role=role, op=op, expected=(expected(op, calls=calls, role=role),)),
        cell("unexpected", 0, calls, role=other, op=op),
    ]


def test_wrong_group() -> None:
    assert found(moved("tp", "cp")) == {0: ("wrong_group", "likely", (1,)), 1: ("wrong_group", "likely", (0,))}
    assert sentence(moved("tp", "cp")) == (
        "4 calls a step that belong on tp run on cp, alike in all else: a wrong group was given, or another release uses it."
    )
    assert sentence(moved("tp", "cp", calls=1)).startswith("1 call a step that belongs on tp runs on cp,")


@pytest.mark.parametrize(
    "change",
    [
        {"op": "all_to_all"},
        {"phase": "backward"},
        {"dtype": "float32"},
        {"payload": 4096},
        {"calls_measured": 3},
        {"ranks": (1,)},
        {"steps": (1,)},
    ],
)
def test_wrong_group_is_alike_in_all_else(change: dict[str, Any]) -> None:
    lost, made = moved("tp", "cp")
    assert "wrong_group" not in str(found([lost, replace(made, **change)]))


def test_a_wrong_group_joins_only_where_it_was_seen() -> None:
    elsewhere = cell("missing", 8, 7, role="tp", ranks=(1,), payload=4)
    assert [code for code, _, _ in found([*moved("tp", "cp"), elsewhere]).values()].count("wrong_group") == 2


def test_groups_confused() -> None:
    cells = [*moved("tp", "cp", 4), *moved("cp", "tp", 2, "all_reduce")]
    assert {code for code, _, _ in found(cells).values()} == {"groups_confused"}
    assert sentence(cells) == (
        "4 calls of tp a step run on cp, and 2 of cp on tp: the two groups are taken for each other."
    )


def test_groups_confused_where_cells_have_met_otherwise() -> None:
    """What each role lacks and makes beyond is compared over all cells: a cell may have paired two that are not alike."""
    cells = [
        cell("excess", 4, 2, role="tp", op="all_reduce", expected=(expected(calls=4),)),
        cell("excess", 2, 4, role="cp", expected=(expected("all_reduce", calls=2, role="cp"),)),
    ]
    assert {code for code, _, _ in found(cells).values()} == {"groups_confused"}


def test_pipeline_on_the_default_group() -> None:
    cells = moved("pp", "world", 8, "send")
    assert found(cells)[0] == ("pipeline_on_default_group", "likely", (1,))
    assert sentence(cells).startswith("8 calls between the stages a step run on the default group instead of the pipe")


@pytest.mark.parametrize(("op", "code"), [("barrier", "barrier"), ("all_reduce", "extra_call")])
@pytest.mark.parametrize("verdict", ["unknown", "unexpected"])
def test_calls_of_the_loop(op: str, code: str, verdict: str) -> None:
    one = cell(verdict, 0, 2, role="world", op=op, phase="other", dtype="float32", payload=4)
    assert found([one, cell("match")]) == {0: (code, "likely", ())}
    assert sentence([one]) == (
        f"2 {op.replace('_', '-')}s over all ranks in every step, which no part of the job makes: the training loop's "
        "own, or Megatron-LM's log of times, if it is written in every step (log_interval 1)."
    )


@pytest.mark.parametrize(
    "near",
    [
        cell("unknown", 1, 1, role="world", op="all_reduce", phase="other", expected=(expected("all_reduce"),)),
        cell("unknown", 0, 1, role="world", op="broadcast", phase="other"),
        cell("unknown", 0, 1, role="mp", op="all_reduce", phase="other"),
        cell("unknown", 0, 1, role="world", op="all_reduce", phase="forward"),
    ],
)
def test_no_calls_of_the_loop(near: CellView) -> None:
    assert found([near]) == {}


def test_calls_of_one_rank_are_not_of_the_loop() -> None:
    one = cell("unknown", 0, 1, role="world", op="barrier", phase="other")
    assert found([one, cell("match", ranks=(1,))]) == {}


# -- the model -------------------------------------------------------------------------------------------------------

MODEL = Job(
    world_size=4,
    tensor_model_parallel_size=2,
    sequence_parallel=True,
    num_layers=4,
    hidden_size=64,
    num_attention_heads=8,
    group_query_attention=True,
    num_query_groups=2,
    padded_vocab_size=256,
    bf16=True,
)


def of_gradients(verdict: str, wanted: int, got: int, role: str = "dp_cp", **changes: Any) -> CellView:
    """One all-reduce of float32 gradients: elements expected and made."""
    component = "expert gradients" if role == "edp" else "gradients"
    one = expected("all_reduce", 1, role=role, component=component, dtype="float32", in_elems=wanted, out_elems=wanted)
    fields: dict[str, Any] = {
        "role": role,
        "op": "all_reduce",
        "phase": "other",
        "dtype": "float32",
        "payload": 4 * (got or wanted),
        "expected": (one,),
    }
    return cell(verdict, 1, int(got > 0), **{**fields, **changes})


def layers(got: int, outside: int = 4, **changes: Any) -> CellView:
    """A cell of 32 calls of the layers, 8 a layer, and some of the output layer."""
    calls = (expected(), expected(calls=outside, component="output layer"))
    return cell("missing" if got < 32 + outside else "match", 32 + outside, got, expected=calls, **changes)


def test_layers_differ() -> None:
    cells = [
        layers(28, ranks=(2, 3)),
        cell("missing", got=24, op="reduce_scatter", expected=(expected("reduce_scatter"),), ranks=(2, 3)),
        of_gradients("missing", 4000, 3000, ranks=(2, 3)),
        layers(36, ranks=(0, 1)),
    ]
    assert found(cells, Facts(MODEL)) == {
        0: ("layers_differ", "likely", (1, 2)),
        1: ("layers_differ", "likely", (0, 2)),
        2: ("layers_differ", "likely", (0, 1)),
    }
    assert sentence(cells, Facts(MODEL)) == (
        "Ranks 2, 3 make the calls of 3 layers a stage, the job gives 4: another number of layers was built there."
    )
    assert sentence([layers(28)], Facts(MODEL)).startswith(
        "The run makes the calls of 3 layers a stage, the job gives 4:"
    )


@pytest.mark.parametrize(
    "cells",
    [
        pytest.param([layers(24, outside=0)], id="nothing beside the layers: it may be the micro-batches"),
        pytest.param([layers(27)], id="no whole layer"),
        pytest.param([layers(28), cell("missing", got=16)], id="two numbers"),
        pytest.param(
            [layers(28), cell("missing", 4, 3, expected=(expected(calls=4, component="output layer"),))],
            id="beside them too",
        ),
    ],
)
def test_no_layers_differ(cells: list[CellView]) -> None:
    assert "layers_differ" not in str(found(cells, Facts(MODEL)))


def uncalled() -> list[CellView]:
    return [layers(4), layers(4, phase="backward")]


@pytest.mark.parametrize(
    ("kernels", "code", "sure", "words"),
    [
        (
            {"userbuffers": 9},
            "tp_comm_overlap_on",
            "proven",
            "9 kernels of TransformerEngine's userbuffers instead: tp_comm_",
        ),
        (
            {"CUDA graph": 9},
            "cuda_graph_on",
            "proven",
            "9 communication kernels of CUDA graphs instead: their calls were",
        ),
        (
            {},
            "outside_torch",
            "likely",
            "tp_comm_overlap or a CUDA graph carries them, which no record of calls shows;",
        ),
    ],
)
def test_carried_outside_torch(kernels: dict[str, int], code: str, sure: str, words: str) -> None:
    facts = Facts(MODEL, kernels=kernels)
    assert found(uncalled(), facts) == {0: (code, sure, (1,)), 1: (code, sure, (0,))}
    assert "none of their 64 tensor-parallel calls a step" in sentence(uncalled(), facts)
    assert words in sentence(uncalled(), facts)


@pytest.mark.parametrize(
    ("cells", "facts"),
    [
        pytest.param([layers(5), layers(4, phase="backward")], Facts(MODEL), id="one call of a layer"),
        pytest.param([layers(4)], Facts(MODEL), id="one pass only"),
        pytest.param([*uncalled(), cell("match", op="reduce_scatter")], Facts(MODEL), id="others are made"),
        pytest.param(uncalled(), Facts(MODEL, kernels={"deepep": 9}), id="kernels of something else"),
    ],
)
def test_not_carried_outside_torch(cells: list[CellView], facts: Facts) -> None:
    assert not {"tp_comm_overlap_on", "cuda_graph_on", "outside_torch"} & {
        c for c, _, _ in found(cells, facts).values()
    }


def test_tied_embedding_missing() -> None:
    one = cell("missing", 1, 0, role="embedding", op="all_reduce", phase="other", expected=(expected("all_reduce", 1),))
    assert found([one]) == {0: ("tied_embedding_missing", "likely", ())}
    assert sentence([one]).endswith(
        "not summed over them: its copies drift apart; or they are not tied in this run "
        "(untie_embeddings_and_output_weights)."
    )
    untied = replace(JOB, untie_embeddings_and_output_weights=True)
    assert found([one], Facts(JOB, untied)) == {0: ("tied_embedding_missing", "proven", ())}
    assert found([replace(one, verdict="unknown")]) == {}


EXPERTS = Job(world_size=4, num_experts=8, expert_model_parallel_size=2, expert_tensor_parallel_size=1, bf16=True)


def no_exchange(dense: int) -> list[CellView]:
    """1000 dense elements and 500 of half of the experts were expected; so many were reduced with the dense ones."""
    exchange = expected("all_to_all", 8, role="ep", component="experts.dispatch")
    return [
        cell("missing", 8, 0, role="ep", op="all_to_all", expected=(exchange,)),
        of_gradients("missing", 500, 0, role="edp"),
        of_gradients("excess", 1000, dense),
    ]


def test_expert_parallel() -> None:
    facts = Facts(EXPERTS)
    assert found(no_exchange(2000), facts)[0] == ("expert_parallel", "proven", (1, 2))
    assert sentence(no_exchange(2000), facts).endswith(
        "the job says 2, and the gradients of the data-parallel group are longer by those of all 8 experts."
    )


def test_expert_parallel_without_the_experts_gradients() -> None:
    others = found(no_exchange(1200), Facts(EXPERTS))
    assert others[0] == ("expert_parallel", "likely", (1,))
    assert others[2][0] == "size_differs"
    captured = replace(EXPERTS, expert_model_parallel_size=1)
    assert found(no_exchange(1200), Facts(EXPERTS, captured))[0] == ("expert_parallel", "proven", (1, 2))


def test_experts_that_exchange_something_have_another_cause() -> None:
    made = cell("match", 8, 8, role="tp_ep", op="all_gather", expected=(expected(calls=8, role="tp_ep"),))
    assert "expert_parallel" not in {code for code, _, _ in found([*no_exchange(2000), made], Facts(EXPERTS)).values()}


def keys(payload: int = 32768) -> CellView:
    one = expected("send", 4, role="cp", component="attention: K and V")
    return cell("excess", 4, 4, role="cp", op="send", payload=payload, expected=(one,))


def test_query_groups() -> None:
    """8 heads instead of 2 groups: 2 x 6 x 8 x 64 / 2 elements more in each of 4 layers."""
    cells = [keys(), of_gradients("excess", 100_000, 100_000 + 4 * 3072)]
    assert found(cells, Facts(MODEL)) == {0: ("query_groups", "proven", (1,)), 1: ("query_groups", "proven", (0,))}
    assert sentence(cells, Facts(MODEL)) == (
        "Keys and values are 4 times as large as the job's: those of 8 query groups instead of 2 (as many as heads: "
        "group_query_attention is off in this run)."
    )
    assert found([keys(16384)], Facts(MODEL)) == {0: ("query_groups", "likely", ())}
    assert found([keys(), of_gradients("excess", 100_000, 101_000)], Facts(MODEL))[1][0] == "padding"
    assert found([keys(24576)], Facts(MODEL))[0][0] == "size_differs"  # 6 groups of 8 heads


def rows_of_vocabulary(rows: int) -> CellView:
    one = expected("all_reduce", 1, role="embedding", dtype="float32", in_elems=8192, out_elems=8192)
    return cell(
        "excess",
        1,
        1,
        role="embedding",
        op="all_reduce",
        phase="other",
        dtype="float32",
        payload=rows * 128,
        expected=(one,),
    )


def test_vocabulary_size() -> None:
    """256 rows of 64, half of them on each tensor-parallel rank: 128 bytes of gradient a row there."""
    cells = [rows_of_vocabulary(320), of_gradients("excess", 100_000, 102_048)]
    assert found(cells, Facts(MODEL)) == {
        0: ("vocabulary_size", "proven", (1,)),
        1: ("vocabulary_size", "proven", (0,)),
    }
    assert sentence(cells, Facts(MODEL)).startswith("The word embedding has 320 rows, the job says 256:")
    assert found([rows_of_vocabulary(320)], Facts(MODEL)) == {0: ("vocabulary_size", "likely", ())}
    assert found([replace(rows_of_vocabulary(320), payload=41000)], Facts(MODEL))[0][0] == "size_differs"


def test_gradients_in_one_call_were_not_overlapped() -> None:
    job = replace(JOB, use_distributed_optimizer=True, overlap_grad_reduce=True)

    def reduced(got: int, phase: str, **changes: Any) -> list[CellView]:
        one = expected("reduce_scatter", 4, role="dp_cp", component="gradients", dtype="float32", phase="backward")
        common: dict[str, Any] = {"role": "dp_cp", "op": "reduce_scatter", "dtype": "float32"}
        return [
            cell("missing", 4, 0, phase="backward", payload=16384, expected=(one,), **common),
            cell("unexpected", 0, got, phase=phase, payload=65536 // got, **{**common, **changes}),
        ]

    assert found(reduced(1, "other"), Facts(job)) == {
        0: ("overlap_grad_reduce_off", "likely", (1,)),
        1: ("overlap_grad_reduce_off", "likely", (0,)),
    }
    assert sentence(reduced(1, "other"), Facts(job)) == (
        "As many bytes of gradients as expected, in one call behind the backward passes instead of 4: overlap_grad_reduce "
        "was off in this run."
    )
    captured = replace(job, overlap_grad_reduce=False)
    assert found(reduced(1, "other"), Facts(job, captured))[0][1] == "proven"
    assert found(reduced(1, "backward"), Facts(job))[0][0] == "bucket_size"
    assert found(reduced(2, "other"), Facts(job))[0][0] == "overlap_grad_reduce_off"  # in another phase, in two calls
    assert "one call" not in sentence(reduced(2, "other"), Facts(job))


def test_sequence_parallelism_off_on_one_stage() -> None:
    def stage(number: int, off: bool) -> list[CellView]:
        if not off:
            return [cell("match", stage=number, ranks=(number,))]
        return [
            cell("missing", got=0, stage=number, ranks=(number,)),
            cell("excess", op="all_reduce", expected=(expected("reduce_scatter"),), stage=number, ranks=(number,)),
            cell("missing", 1, 0, op="all_reduce", phase="other", dtype="float32", stage=number, ranks=(number,),
                 expected=(expected("all_reduce", 1, component="norm gradients"),)),
        ]  # fmt: skip

    cells = [*stage(0, False), *stage(1, True)]
    assert found(cells) == {
        1: ("sequence_parallel_off", "proven", (2, 3)),
        2: ("sequence_parallel_off", "proven", (1, 3)),
        3: ("sequence_parallel_off", "proven", (1, 2)),
    }
    assert sentence(cells).endswith("all-reduce: it was off on stage 1, and not on the others.")
    assert sentence([*stage(0, True), *stage(1, True)]).endswith("all-reduce: it was off in this run.")


# -- the table -------------------------------------------------------------------------------------------------------


def test_the_first_rule_that_fits_wins() -> None:
    """Repeated forward calls under the document's rules: the lookup stands before the suspicion."""
    repeated = expected(phase="recompute", avoidable=Avoidable(4096, "recompute_repeats_collectives", ""))
    cells = [cell("unexpected", wanted=0, phase="recompute")]
    assert (
        found(cells, Facts(JOB, rules="document", megatron={0: (repeated,)}))[0][0] == "recompute_repeats_collectives"
    )
    assert found(cells, Facts(JOB, rules="document"))[0][0] == "recompute_full"


def test_every_rule_says_what_it_is_for() -> None:
    assert all(rule.__doc__ for rule in TABLE)
    assert Cause("a", "b", "likely") == Cause("a", "b", "likely")


def test_the_document_knows_the_part_in_another_cell() -> None:
    layers = expected("all_reduce", calls=32, component="attention.proj")
    embedding = expected("all_reduce", calls=4, component="embedding")
    cells = [
        cell("unexpected", wanted=0, got=4, op="all_reduce", expected=()),
        cell("match", op="all_reduce", expected=(layers,)),
    ]
    facts = Facts(JOB, rules="document", megatron={0: (embedding, layers)})
    assert sentence(cells, facts) == (
        "The document does not mention these calls, real Megatron makes them: 4 embedding. The megatron "
        "rules explain 36 calls."
    )


def test_scatters_alone_do_not_say_that_sequence_parallelism_was_off() -> None:
    cells = [
        cell("match"),
        cell("excess", op="all_reduce", expected=(expected("reduce_scatter"),)),
    ]
    assert "sequence_parallel" not in str(found(cells))
