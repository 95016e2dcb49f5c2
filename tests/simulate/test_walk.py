"""The walk: the instructions of a layer by hand, what holds for every walked job, routing, buckets, changes."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from traceanalyzer import flops, kernel_names
from traceanalyzer.errors import JobError
from traceanalyzer.job import Job
from traceanalyzer.simulate import walk_data, walk_expert
from traceanalyzer.simulate.program import Begin, Call, Compute, End, Program, Wait, Walked
from traceanalyzer.simulate.schedules import Order
from traceanalyzer.simulate.walk import Changes, walk
from traceanalyzer.simulate.walk_tape import Sizes, Tape

_TINY: dict[str, Any] = {
    "megatron_core_version": "0.16.1",
    "world_size": 2,
    "tensor_model_parallel_size": 2,
    "sequence_parallel": True,
    "micro_batch_size": 2,
    "num_microbatches": 1,
    "seq_length": 32,
    "num_layers": 1,
    "hidden_size": 64,
    "ffn_hidden_size": 256,
    "num_attention_heads": 8,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "padded_vocab_size": 128,
    "bf16": True,
}
_MOE: dict[str, Any] = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_token_dispatcher_type": "alltoall",
}


def _job(**changes: Any) -> Job:
    return Job(**{**_TINY, **changes})


# Jobs that use every chapter between them.
_JOBS: dict[str, Job] = {
    "tensor": _job(),
    "pipeline": _job(world_size=8, pipeline_model_parallel_size=4, num_layers=4, num_microbatches=6),
    "interleaved": _job(
        world_size=8,
        framework="megatron-lm",
        pipeline_model_parallel_size=2,
        virtual_pipeline_model_parallel_size=2,
        num_layers=8,
        num_microbatches=4,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
    ),
    "ring": _job(world_size=8, context_parallel_size=4, nvte_batch_mha_p2p_comm=False),
    "experts": _job(
        world_size=16,
        framework="megatron-lm",
        pipeline_model_parallel_size=2,
        context_parallel_size=2,
        expert_model_parallel_size=2,
        num_layers=4,
        num_microbatches=4,
        moe_layer_freq=2,
        moe_shared_expert_intermediate_size=128,
        recompute_granularity="selective",
        recompute_modules=("core_attn", "moe"),
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        **_MOE,
    ),
}


def _calls(program: Program) -> list[Call]:
    return [one for one in program.instructions if isinstance(one, Call)]


def _words(program: Program) -> list[str]:
    """Gemms, calls and waits: "gemm qkv", "all_gather qkv >0" with its handle, "wait 0"."""
    found = []
    for one in program.instructions:
        if isinstance(one, Compute) and one.kernel_class in ("gemm", "attention"):
            found.append(f"{one.kernel_class} {one.where.component}")
        elif isinstance(one, Call) and one.role == "tp":
            found.append(f"{one.op} {one.where.component}{'' if one.handle is None else f' >{one.handle}'}")
        elif isinstance(one, Wait):
            found.append(f"wait {one.handle}")
    return found


def test_a_layer_with_sequence_parallelism() -> None:
    """As LinearWithGradAccumulationAndAsyncCommunication and its neighbours do it, read off the source by hand."""
    (program,) = walk(_job()).programs
    words = _words(program)
    assert words == [
        "reduce_scatter embedding",
        "all_gather attention.qkv",
        "gemm attention.qkv",
        "attention attention",
        "gemm attention.proj",
        "reduce_scatter attention.proj",
        "all_gather mlp.fc1",
        "gemm mlp.fc1",
        "gemm mlp.fc2",
        "reduce_scatter mlp.fc2",
        "all_gather output layer",
        "gemm output layer",
        "all_reduce loss: max",
        "all_reduce loss: predicted logit",
        "all_reduce loss: sum of exponentials",
        # backward: the gathered input is on its way during the gradient of the input, whose sum is during the weight's
        "all_gather output layer input re-gather >0",
        "gemm output layer",
        "wait 0",
        "reduce_scatter output layer >1",
        "gemm output layer",
        "wait 1",
        "all_gather mlp.fc2",
        "gemm mlp.fc2",
        "gemm mlp.fc2",
        "all_gather mlp.fc1 input re-gather >2",
        "gemm mlp.fc1",
        "wait 2",
        "reduce_scatter mlp.fc1 >3",
        "gemm mlp.fc1",
        "wait 3",
        "all_gather attention.proj",
        "gemm attention.proj",
        "gemm attention.proj",
        "attention attention",
        "all_gather attention.qkv input re-gather >4",
        "gemm attention.qkv",
        "wait 4",
        "reduce_scatter attention.qkv >5",
        "gemm attention.qkv",
        "wait 5",
        "all_gather embedding",
        "all_reduce norm gradients",
    ]


def test_sizes_of_a_layer() -> None:
    """32 tokens x 2 sequences x 64 channels = 4096 elements, half of them on each rank between regions."""
    (program,) = walk(_job()).programs
    sizes = {(one.op, one.in_elems, one.out_elems) for one in _calls(program) if one.where.component == "mlp.fc1"}
    assert sizes == {("all_gather", 2048, 4096), ("reduce_scatter", 4096, 2048)}
    # two norms of the layer and the final one, 64 float32 each
    (norms,) = [one for one in _calls(program) if one.where.component == "norm gradients"]
    assert (norms.in_elems, norms.dtype) == (192, "Float")


def test_a_checkpoint_runs_its_part_again_before_its_backward() -> None:
    (program,) = walk(_job(recompute_granularity="full", recompute_method="uniform", recompute_num_layers=1)).programs
    phases = [
        one.where.phase for one in _calls(program) if one.where.component == "attention.qkv" and one.op == "all_gather"
    ]
    assert phases == ["forward", "recompute"]
    again = [one for one in _calls(program) if one.where.phase == "recompute"]
    assert [f"{one.op} {one.where.component}" for one in again] == [
        "all_gather attention.qkv",
        "reduce_scatter attention.proj",
        "all_gather mlp.fc1",
        "reduce_scatter mlp.fc2",
    ]
    assert {one.where.layer for one in again} == {0}


def test_the_tape_pays_last_first_and_only_where_gradients_are_wanted() -> None:
    tape = Tape(Sizes.of(_job()))
    said: list[str] = []

    def module(name: str) -> None:
        said.append(f"{name} forward")
        tape.owes(lambda: said.append(f"{name} backward in {tape.phase}"))

    with tape.at("forward"), tape.recording() as owed:
        module("a")
        tape.checkpoint(lambda: module("b"))
    module("c")
    with tape.at("backward"):
        tape.pay(owed)
    assert said == [
        "a forward",
        "b forward",
        "c forward",
        "b forward",
        "b backward in backward",
        "a backward in backward",
    ]


# -- what holds for every job ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", params=_JOBS)
def walked(request: pytest.FixtureRequest) -> tuple[Job, Walked]:
    job = _JOBS[request.param]
    return job, walk(job, seed=3)


def test_every_rank_has_one_program_and_every_call_a_group(walked: tuple[Job, Walked]) -> None:
    job, result = walked
    ranks = [rank for program in result.programs for rank in program.ranks]
    assert sorted(ranks) == list(range(job.world_size or 0))
    members = defaultdict(set)
    for group in result.groups:
        members[group.role] |= set(group.ranks)
    assert {group.ranks for group in result.groups if group.role == "world"} == {tuple(range(job.world_size or 0))}
    for program in result.programs:
        assert all(set(program.ranks) <= members[one.role] for one in _calls(program))


def test_ranges_close_and_waits_follow_their_calls(walked: tuple[Job, Walked]) -> None:
    for program in walked[1].programs:
        depth, handles, waited = 0, set(), []
        for one in program.instructions:
            depth += isinstance(one, Begin) - isinstance(one, End)
            assert depth > 0 or one is program.instructions[-1]
            if isinstance(one, Call) and one.handle is not None:
                assert one.handle not in handles
                handles.add(one.handle)
            elif isinstance(one, Wait):
                assert one.handle in handles
                waited.append(one.handle)
        assert depth == 0
        assert len(waited) == len(set(waited))


def test_messages_meet(walked: tuple[Job, Walked]) -> None:
    """What a rank sends to another on a group, the other receives from it, in the same order with the same sizes."""
    sent, received = defaultdict(list), defaultdict(list)
    for program in walked[1].programs:
        for one in _calls(program):
            if one.op in ("send", "recv"):
                assert one.peer is not None
                for rank, peer in zip(program.ranks, one.peer.tolist(), strict=True):
                    what = (one.in_elems, one.dtype, one.where.phase, one.where.microbatch)
                    if one.op == "send":
                        sent[one.role, rank, peer].append(what)
                    else:
                        received[one.role, peer, rank].append(what)
    assert sent == received


def test_collectives_meet(walked: tuple[Job, Walked]) -> None:
    """All ranks of a group make the same collectives in the same order."""
    job, result = walked
    of_rank: dict[int, dict[str, list[Any]]] = {}
    for program in result.programs:
        made = defaultdict(list)
        for one in _calls(program):
            if one.op not in ("send", "recv"):
                made[one.role].append((one.op, one.dtype, one.where.component))
        of_rank |= dict.fromkeys(program.ranks, made)
    for role in {role for made in of_rank.values() for role in made}:
        for group in job.layout.groups(role):
            assert len({tuple(of_rank[rank][role]) for rank in group}) == 1, role


def test_rows_sent_are_rows_received(walked: tuple[Job, Walked]) -> None:
    job, result = walked
    for program in result.programs:
        place = {rank: index for index, rank in enumerate(program.ranks)}
        for one in _calls(program):
            if one.in_splits is None:
                continue
            assert one.out_splits is not None
            assert (one.in_splits.sum(axis=1) == one.in_elems).all()
            assert (one.out_splits.sum(axis=1) == one.out_elems).all()
            assert not (one.in_splits % one.row_elems).any()
            for group in job.layout.groups("ep"):
                if group[0] in place:
                    rows = np.array([place[rank] for rank in group])
                    assert (one.in_splits[rows] == one.out_splits[rows].T).all()


def test_kernels_are_what_their_names_say(walked: tuple[Job, Walked]) -> None:
    kernels = {
        (one.name, one.kernel_class)
        for program in walked[1].programs
        for one in program.instructions
        if isinstance(one, Compute)
    }
    assert {kernel_class for _, kernel_class in kernels} >= {"gemm", "attention", "norm", "elementwise", "optimizer"}
    assert {(name, kernel_names.classify(name).kernel_class) for name, _ in kernels} == kernels


def test_the_same_seed_gives_the_same() -> None:
    def rows(seed: int) -> list[Any]:
        programs = walk(_JOBS["experts"], seed=seed).programs
        return [one.in_splits.tolist() for program in programs for one in _calls(program) if one.in_splits is not None]

    assert rows(1) == rows(1)
    assert rows(1) != rows(2)


# -- work --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"world_size": 8, "num_layers": 4, "pipeline_model_parallel_size": 2, "num_microbatches": 4},
        {"group_query_attention": True, "num_query_groups": 4, "swiglu": True},
        {"world_size": 4, "num_layers": 2, "expert_model_parallel_size": 2, **_MOE},
    ],
)
def test_operations_are_those_of_the_model(options: dict[str, Any]) -> None:
    """Of all ranks together. A flash kernel's backward pass makes 5 products where the model needs 4: it repeats one."""
    job = _job(**options)
    total: Counter[str] = Counter()
    for program in walk(job, routing="even").programs:
        for one in program.instructions:
            if isinstance(one, Compute) and one.kernel_class in ("gemm", "grouped_gemm", "attention"):
                work = int(np.broadcast_to(one.flops, len(program.ranks)).sum())
                if one.kernel_class == "attention" and one.where.phase == "backward":
                    assert work % 5 == 0
                    work = work // 5 * 4
                total["all"] += work
    assert total["all"] == flops.of_step(job).model


# -- routing -----------------------------------------------------------------------------------------------------------


def _draw(**changes: Any) -> walk_expert.Draw:
    plain = walk_expert.Draw(0, 0, 0, (0, 1, 2), 3, 4, 2, np.random.default_rng(5))
    return replace(plain, **changes)


def test_even_routing() -> None:
    """3 tokens to 2 of 4 experts are 6 rows: 1 each and 1 more for two experts, which move on from rank to rank."""
    assert walk_expert.even(_draw()).tolist() == [[2, 2, 1, 1], [1, 2, 2, 1], [1, 1, 2, 2]]
    assert walk_expert.even(_draw(tokens=4)).tolist() == [[2, 2, 2, 2]] * 3


def test_scattered_routing_sends_all_tokens_and_none_twice_to_an_expert() -> None:
    few = walk_expert.scattered(_draw(tokens=2, ranks=tuple(range(200))))
    assert few.shape == (200, 4)
    assert (few.sum(axis=1) == 4).all()
    assert few.max() == 2
    assert few.min() >= 0
    many = walk_expert.scattered(_draw(tokens=4000))
    assert (many.sum(axis=1) == 8000).all()
    assert len(np.unique(many)) > 4
    assert abs(many - 2000).max() < 1000


def test_routing_by_a_function_and_capacity() -> None:
    """All tokens to the first two experts: at most ceil(32 tokens * 2 / 8 experts * 1.5) = 12 rows of each stay."""
    job = _job(
        world_size=2, num_layers=1, expert_model_parallel_size=2, expert_tensor_parallel_size=1,
        moe_expert_capacity_factor=1.5, **_MOE,
    )  # fmt: skip

    def crowd(draw: walk_expert.Draw) -> np.ndarray[Any, np.dtype[np.int64]]:
        found = np.zeros((len(draw.ranks), draw.experts), np.int64)
        found[:, :2] = draw.tokens
        return found

    (program,) = walk(job, routing=crowd).programs
    dispatch = next(one for one in _calls(program) if one.where.component == "experts.dispatch")
    assert dispatch.in_splits is not None
    assert dispatch.in_splits.tolist() == [[24 * 64, 0], [24 * 64, 0]]
    assert np.asarray(dispatch.out_elems).tolist() == [48 * 64, 0]
    with pytest.raises(JobError, match=r"routing gave \(1, 8\)"):
        walk(job, routing=lambda draw: np.zeros((1, draw.experts), np.int64))


# -- buckets -----------------------------------------------------------------------------------------------------------


def test_buckets_from_the_last_parameter_on() -> None:
    """Starts on multiples of 64, ends on multiples of lcm(2, 128) = 128, at least 100 elements each; 70 is tied."""
    sizes = Sizes.of(_job(world_size=4, use_distributed_optimizer=True))
    members = [walk_data.Parameter((None, str(index)), elems) for index, elems in enumerate([50, 70, 30, 90, 60])]
    members[1] = replace(members[1], tied=True)
    # from the back: 60, then 64..154 passes 100 -> 256; 30 alone before the tied one -> 384; 70 -> 512; 50 -> 640
    found = walk_data.buckets(sizes, members, 2, 100)
    assert [one.elems for one in found] == [256, 128, 128, 128]
    assert [[member.elems for member in one.members] for one in found] == [[60, 90], [30], [70], [50]]
    plain = walk_data.buckets(Sizes.of(_job(world_size=4)), members, 2, None)
    assert [one.elems for one in plain] == [300]


def test_overlapped_reductions_start_inside_the_last_backward_and_are_waited_for_at_the_end() -> None:
    job = _job(
        world_size=4,
        num_layers=4,
        num_microbatches=2,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        ddp_bucket_size=30_000,
    )
    program = walk(job).programs[0]
    reductions = [one for one in _calls(program) if one.where.component == "gradients"]
    assert len(reductions) > 2
    assert {(one.where.phase, one.where.microbatch, one.where.layer) for one in reductions} == {("backward", 1, None)}
    handles = [one.handle for one in reductions]
    after = program.instructions.index(reductions[-1])
    waits = [one.handle for one in program.instructions[after:] if isinstance(one, Wait)]
    assert waits[-len(handles) :] == handles


def test_overlapped_gathers_are_one_ahead_of_their_modules() -> None:
    """The first bucket that a pass needs is waited for at once, each later one while the one before it is used."""
    job = _job(
        world_size=4,
        num_layers=4,
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        ddp_bucket_size=30_000,
    )
    program = walk(job).programs[0]
    forward = program.instructions[: program.instructions.index(Begin("ta:backward"))]
    words = []
    for one in forward:
        if isinstance(one, Wait):
            words.append(f"wait {one.handle}")
        elif isinstance(one, Call) and one.where.component == "parameters":
            words.append(f"gather {one.handle}")
        elif isinstance(one, Compute) and words[-1:] != ["kernels"]:
            words.append("kernels")
    gathers = sum(word.startswith("gather") for word in words)
    assert gathers > 2
    wanted = ["gather 0", "wait 0"]
    for number in range(1, gathers):
        wanted += [f"gather {number}", "kernels", f"wait {number}"]
    assert words == [*wanted, "kernels"]


# -- changes -----------------------------------------------------------------------------------------------------------


def test_a_stage_may_depart_from_the_job() -> None:
    job = _JOBS["pipeline"]
    fields = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    plain, changed = walk(job).programs, walk(job, changes=Changes(stages={2: fields})).programs
    assert [one.ranks for one in changed] == [one.ranks for one in plain]
    assert [any(call.where.phase == "recompute" for call in _calls(one)) for one in changed] == [
        False,
        False,
        True,
        False,
    ]


def test_ranks_that_depart_have_a_program_of_their_own() -> None:
    job = _JOBS["experts"]
    changed = walk(job, changes=Changes(ranks={3: {"log_num_zeros_in_grad": True}}), routing="even").programs
    assert [one.ranks for one in changed] == [(0, 1, 2, 4, 5, 6, 7), (3,), tuple(range(8, 16))]
    apart = changed[1]
    assert [one.where.component for one in _calls(apart) if "zero" in (one.where.component or "")] == [
        "zero count",
        "zeros for the log",
    ]
    dispatch = next(one for one in _calls(apart) if one.where.component == "experts.dispatch")
    assert dispatch.in_splits is not None
    assert dispatch.in_splits.shape == (1, 2)


def test_a_change_behind_the_walk() -> None:
    def without_groups(found: Walked) -> Walked:
        return Walked(found.programs, [])

    assert walk(_job(), changes=Changes(after=[without_groups])).groups == []


def test_another_schedule() -> None:
    """The weights' gradients of zb-h1 come after the gradients that other stages wait for, and cost the same in all."""
    job = _job(world_size=8, pipeline_model_parallel_size=4, num_layers=4, num_microbatches=6)

    def work(program: Program) -> int:
        return sum(int(one.flops) for one in program.instructions if isinstance(one, Compute))

    plain = walk(job).programs
    split = walk(job, changes=Changes(order=Order(kind="zb-h1", stages=4, microbatches=6))).programs
    assert [work(one) for one in split] == [work(one) for one in plain]
    last = split[3].instructions
    wgrads = [
        index
        for index, one in enumerate(last)
        if isinstance(one, Compute) and "_nt_n_" in one.name and one.where.microbatch == 0
    ]
    fourth = next(index for index, one in enumerate(last) if isinstance(one, Compute) and one.where.microbatch == 3)
    assert min(wgrads) > fourth  # three micro-batches put off on the last of four stages


# -- limits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"use_torch_fsdp2": True, "world_size": 2, "tensor_model_parallel_size": 1}, "use_torch_fsdp2"),
        ({"mtp_num_layers": 1}, "mtp_num_layers"),
        ({"megatron_core_version": "0.12.3"}, "megatron_core_version"),
        ({"fp8": "hybrid"}, "fp8"),
    ],
)
def test_what_is_not_walked_is_said(options: dict[str, Any], words: str) -> None:
    with pytest.raises(JobError, match=words):
        walk(_job(**options))


def test_a_size_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(JobError, match="padded_vocab_size"):
        walk(_job(padded_vocab_size=None))
    with pytest.raises(JobError, match="max_position_embeddings"):
        walk(_job(position_embedding_type="learned_absolute"))


def test_a_thousand_ranks_walk_in_seconds(large: Callable[[], Job]) -> None:
    begun = time.process_time()
    result = walk(large())
    assert time.process_time() - begun < 5
    assert [len(program.ranks) for program in result.programs] == [256] * 4
    dispatch = next(one for one in _calls(result.programs[3]) if one.where.component == "experts.dispatch")
    # 8192 tokens / CP 2 / TP 4 x 2 sequences x top-2 = 4096 rows of 8192 elements from each rank
    assert np.asarray(dispatch.in_elems).tolist() == [4096 * 8192] * 256


@pytest.fixture
def large() -> Callable[[], Job]:
    """The seed document's model on its 1,024 ranks."""
    return lambda: _job(
        world_size=1024,
        framework="megatron-lm",
        tensor_model_parallel_size=4,
        pipeline_model_parallel_size=4,
        context_parallel_size=2,
        expert_model_parallel_size=8,
        num_microbatches=8,
        seq_length=8192,
        num_layers=80,
        hidden_size=8192,
        ffn_hidden_size=32768,
        num_attention_heads=64,
        padded_vocab_size=32000,
        use_distributed_optimizer=True,
        **{**_MOE, "num_experts": 64, "moe_ffn_hidden_size": 32768, "moe_layer_freq": 4},
    )
