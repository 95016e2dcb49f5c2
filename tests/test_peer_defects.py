"""Defects that were found in other tools, and the test that shows each of them to be right here.

The numbers are those of the list of defects in the shared reference material: an input, and what another tool makes of it.
"""

from __future__ import annotations

import importlib
import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from traceanalyzer import expect, traffic
from traceanalyzer.importers import import_traces
from traceanalyzer.job import Job
from traceanalyzer.kernel_names import classify
from traceanalyzer.run import Run

TESTS = Path(__file__).parent

# Number of the defect -> the tests that hold it, by file.
HELD: dict[int, dict[str, list[str]]] = {
    1: {
        "test_peer_defects.py": ["test_modern_names_are_communication"],
        "test_kernel_names.py": ["test_communication_and_its_operation"],
    },
    2: {"test_peer_defects.py": ["test_groups_and_collectives_are_always_kept"]},
    3: {"queries/test_across.py": ["test_split_rows"]},
    4: {"queries/test_across.py": ["test_expert_imbalance"]},
    5: {"test_peer_defects.py": ["test_every_type_of_torch_has_a_size"], "test_traffic.py": ["test_element_types"]},
    6: {"attribute/test_across.py": ["test_a_window_that_misses_the_first_call"]},
    7: {"importers/test_nccl_inspector.py": ["test_both_kinds_of_calls"]},
    8: {"test_peer_defects.py": ["test_an_execution_trace_is_refused_and_a_profile_has_real_groups"]},
    9: {"test_peer_defects.py": ["test_messages_between_stages_with_sequence_and_context_parallelism"]},
    10: {"attribute/test_across.py": ["test_an_offset_is_recovered_and_is_no_skew"]},
}  # fmt: skip


@pytest.mark.shared
def test_every_defect_has_a_test(shared: Callable[[str], Path]) -> None:
    listed = re.findall(r"^\| (\d+) \|", shared("reference/peer_defects.md").read_text(), re.MULTILINE)
    assert [int(n) for n in listed] == list(HELD)
    for files in HELD.values():
        for file, names in files.items():
            text = (TESTS / file).read_text()
            assert all(f"def {name}(" in text for name in names), file


def trace(path: Path, rank: int) -> Path:
    """A rank of four: one all-reduce a step, its kernel with NCCL's modern name, of rank 3 shorter (it comes late)."""
    late = 600 if rank == 3 else 0
    group = {
        "Process Group Name": "0",
        "Process Group Description": "default_pg",
        "Process Group Ranks": "[0, 1, 2, 3]",
    }
    call = {
        **group, "Collective name": "allreduce", "In msg nelems": 4096, "Out msg nelems": 4096, "Group size": 4,
        "dtype": "BFloat16",
    }  # fmt: skip
    events: list[dict[str, Any]] = []
    for step in range(2):
        at = 10_000 * step
        host, device = {"ph": "X", "pid": 100 + rank, "tid": 1}, {"ph": "X", "cat": "kernel", "pid": rank, "tid": 7}
        launch = {"correlation": step + 1, "External id": step + 1}
        events += [
            {**host, "cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": at, "dur": 9000},
            {**host, "cat": "cpu_op", "name": "record_param_comms", "ts": at + 100, "dur": 50,
             "args": {**call, "External id": step + 1, "Seq": step + 1}},
            {**host, "cat": "cuda_runtime", "name": "cudaLaunchKernelExC", "ts": at + 110, "dur": 10, "args": launch},
            {**device, "name": "gemm", "ts": at + 120, "dur": 800,
             "args": {"stream": 7, "device": rank, "correlation": 90 + step}},
            {**device, "name": "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
             "ts": at + 1000 + late, "dur": 1000 - late,
             "args": {**launch, **call, "stream": 20, "device": rank}},
        ]  # fmt: skip
    path.write_text(
        json.dumps(
            {"distributedInfo": {"rank": rank, "world_size": 4}, "baseTimeNanoseconds": 0, "traceEvents": events}
        )
    )
    return path


@pytest.fixture
def four_ranks(tmp_path: Path) -> list[Path]:
    return [trace(tmp_path / f"rank{rank}.json", rank) for rank in range(4)]


def test_modern_names_are_communication(four_ranks: list[Path], tmp_path: Path) -> None:
    """Defect 1: HTA finds no communication kernel by these names and fails with ValueError."""
    assert classify("ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)") == (
        "comm",
        "all_reduce",
    )
    import_traces(four_ranks, tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.tuples("SELECT DISTINCT kernel_op FROM kernel WHERE kernel_class = 'comm'") == [("all_reduce",)]
        assert len(run.query("arrival_skew").rows()) == 4 * 2
        waited = run.tuples("SELECT rank, max(waiting_ns) FROM arrival GROUP BY rank ORDER BY rank")
    assert waited == [(0, 600_000), (1, 600_000), (2, 600_000), (3, 0)]


@pytest.mark.filterwarnings("ignore")
def test_hta_fails_on_modern_names(four_ranks: list[Path]) -> None:
    """The defect itself, so that its end is noticed."""
    analyses = pytest.importorskip("hta.trace_analysis", reason="HolisticTraceAnalysis is not installed")
    importlib.import_module("hta.configs.config").logger.setLevel(logging.CRITICAL)
    parsed = importlib.import_module("hta.common.trace").Trace(
        trace_files={r: str(f) for r, f in enumerate(four_ranks)}
    )
    parsed.load_traces(True, use_multiprocessing=False)
    assert not [c for c in parsed.get_trace(0).columns if "process_group" in c or "collective" in c]  # defect 2
    analysis = analyses.TraceAnalysis.__new__(analyses.TraceAnalysis)
    analysis.t = parsed
    with pytest.raises(ValueError, match="empty"):
        analysis.get_potential_stragglers()


def test_groups_and_collectives_are_always_kept(four_ranks: list[Path], tmp_path: Path) -> None:
    """Defect 2: a parse without options gives HTA no column of groups or collectives."""
    import_traces(four_ranks[:1], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        assert run.tuples("SELECT op, group_id, group_size, seq, dtype, in_elems FROM comm ORDER BY call_id") == [
            ("all_reduce", "0", 4, 1, "bfloat16", 4096),
            ("all_reduce", "0", 4, 2, "bfloat16", 4096),
        ]
        assert run.tuples("SELECT group_id, description, ranks FROM process_group") == [
            ("0", "default_pg", [0, 1, 2, 3])
        ]


def test_every_type_of_torch_has_a_size() -> None:
    """Defect 5: Float8_e4m3fn gives TraceLens no bandwidth. Every type of the installed torch, by torch's own size."""
    torch = pytest.importorskip("torch")
    types = {str(t): t.itemsize for t in vars(torch).values() if isinstance(t, torch.dtype)}
    assert {"torch.float8_e4m3fn", "torch.float8_e8m0fnu", "torch.float4_e2m1fn_x2"} <= set(types)
    # Integers of fewer than 8 bits exist in name only: no tensor of theirs can be sent.
    sub_byte = {t for t in types if re.fullmatch(r"torch\.u?int[1-7]|torch\.bits\w+|torch\.quint\dx\d", t)}
    assert {t: traffic.element_bytes(t) for t in set(types) - sub_byte} == {t: types[t] for t in set(types) - sub_byte}
    assert traffic.payload_bytes("all_to_all", 1000, 1000, "Float8_e4m3fn", 2) == 1000


@pytest.mark.shared
def test_an_execution_trace_is_refused_and_a_profile_has_real_groups(
    shared: Callable[[str], Path], tmp_path: Path
) -> None:
    """Defect 8: AICB takes every operation of an execution trace for data-parallel. Execution traces are not imported here,
    which is said; the profile of the same run names the groups of its calls."""
    folder = shared("traces/megatron_tp8_a100")
    refused = import_traces([folder / "megatron_et_0.json.gz"], tmp_path / "et.parquet")
    assert (refused.status, refused.out) == ("refused", None)
    assert "no traceEvents" in str(refused.files[0].reason)
    import_traces([folder / "megatron_kineto_0.json.gz"], tmp_path / "run.parquet")
    with Run.open(tmp_path / "run.parquet") as run:
        groups = run.tuples(
            """SELECT c.group_size, g.ranks, count(*) FROM comm c JOIN process_group g USING (rank, group_id)
               GROUP BY ALL ORDER BY ALL"""
        )
    assert groups == [(1, [0], 1), (8, list(range(8)), 84)]


@pytest.mark.parametrize(
    ("tp", "cp", "sequence_parallel", "elements"),
    [
        (1, 1, False, 4096 * 2 * 1024),
        (4, 1, False, 4096 * 2 * 1024),
        (4, 1, True, 1024 * 2 * 1024),
        (4, 2, True, 512 * 2 * 1024),
    ],
)
def test_messages_between_stages_with_sequence_and_context_parallelism(
    tp: int, cp: int, sequence_parallel: bool, elements: int
) -> None:
    """Defect 9: AICB's messages are 2 h s b bytes whatever is split. Megatron sends (s / cp / tp) x b x h with sequence
    parallelism, (s / cp) x b x h without: sequence 4096, micro-batch 2, hidden 1024."""
    job = Job(
        world_size=2 * tp * cp,
        tensor_model_parallel_size=tp,
        context_parallel_size=cp,
        pipeline_model_parallel_size=2,
        sequence_parallel=sequence_parallel,
        num_layers=4,
        hidden_size=1024,
        ffn_hidden_size=4096,
        num_attention_heads=16,
        seq_length=4096,
        padded_vocab_size=32000,
        micro_batch_size=2,
        global_batch_size=8,
        bf16=True,
    )
    sends = [c for c in expect.expected(job, 0).calls if c.op == "send" and c.role in ("pp", "world")]
    assert {(c.component, c.dtype, c.in_elems) for c in sends} == {("activations", "bfloat16", elements)}
    assert sum(c.calls for c in sends) == 4
