"""Literal facts about what a collective moves: figures worked out by hand, spellings as they were recorded."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from traceanalyzer import traffic

MIB = 2**20

MOVED: list[tuple[str, int | None, int | None, int, int, int]] = [
    # The residual stream [2, 8192, 8192] over TP 4: a quarter in, the whole out, and back.
    ("all_gather", 33554432, 134217728, 4, 256, 192),
    ("reduce_scatter", 134217728, 33554432, 4, 256, 192),
    ("all_reduce", 134217728, 134217728, 4, 256, 384),
    # Dispatch of 8192 rows of 8192 over EP 8, evenly.
    ("all_to_all", 67108864, 67108864, 8, 128, 112),
    # One pipeline message [2, 2048, 8192]. A receive has no input.
    ("send", 33554432, None, 4, 64, 64),
    ("recv", None, 33554432, 4, 64, 64),
    ("broadcast", 33554432, 33554432, 4, 64, 64),
    ("reduce", 33554432, 33554432, 4, 64, 64),
    # At the root of a gather: four quarters come together. Elsewhere no output is recorded.
    ("gather", 8388608, 33554432, 4, 64, 48),
    ("gather", 8388608, 0, 4, 64, 48),
    ("scatter", 33554432, 8388608, 4, 64, 48),
    ("scatter", 0, 8388608, 4, 64, 48),
    ("barrier", 1, 1, 4, 0, 0),
]
"""Operation, elements in and out, group size -> payload and off-rank bytes in MiB; all in bf16."""


@pytest.mark.parametrize(("op", "in_elems", "out_elems", "group_size", "payload_mib", "off_rank_mib"), MOVED)
def test_payload_and_off_rank_of_each_operation(
    op: str, in_elems: int | None, out_elems: int | None, group_size: int, payload_mib: int, off_rank_mib: int
) -> None:
    payload = traffic.payload_bytes(op, in_elems, out_elems, "BFloat16", group_size)
    assert payload == payload_mib * MIB
    assert traffic.off_rank_bytes(op, payload, group_size) == off_rank_mib * MIB
    assert traffic.received_bytes(op, payload, group_size) == off_rank_mib * MIB


def test_every_operation_has_its_facts_here() -> None:
    assert {case[0] for case in MOVED} == set(traffic.OPS)


@pytest.mark.parametrize(
    ("op", "payload", "group_size", "expected"),
    [
        ("all_gather", 10, 3, Fraction(20, 3)),
        ("reduce_scatter", 2, 7, Fraction(12, 7)),
        ("all_reduce", 2, 3, Fraction(8, 3)),
        ("all_to_all", 1, 8, Fraction(7, 8)),
    ],
)
def test_off_rank_bytes_are_exact_fractions(op: str, payload: int, group_size: int, expected: Fraction) -> None:
    assert traffic.off_rank_bytes(op, payload, group_size) == expected


@pytest.mark.parametrize("op", traffic.OPS)
def test_a_group_of_one_moves_nothing(op: str) -> None:
    assert traffic.off_rank_bytes(op, 4096, 1) == 0


def test_a_missing_side_is_worked_out_from_the_group_size() -> None:
    assert traffic.payload_bytes("all_gather", 8, None, "Float", 4) == 128
    assert traffic.payload_bytes("reduce_scatter", None, 8, "Float", 4) == 128
    assert traffic.payload_bytes("all_gather", 8, None, "Float", None) is None
    assert traffic.payload_bytes("reduce_scatter", None, 8, "Float", None) is None


def test_what_is_not_known_stays_unknown() -> None:
    assert traffic.payload_bytes(None, 8, 8, "Float", 4) is None
    assert traffic.payload_bytes("all_reduce", None, None, "Float", 4) is None
    assert traffic.payload_bytes("all_reduce", 8, 8, None, 4) is None
    assert traffic.off_rank_bytes(None, 32, 4) is None
    assert traffic.off_rank_bytes("all_reduce", None, 4) is None
    assert traffic.off_rank_bytes("all_reduce", 32, None) is None


def test_an_impossible_group_and_an_unknown_operation_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one rank, not 0"):
        traffic.off_rank_factor("all_reduce", 0)
    with pytest.raises(ValueError, match="unknown operation 'allreduce'; known: all_gather"):
        traffic.off_rank_factor("allreduce", 2)


# Element types


ELEMENT_TYPES: list[tuple[str, str, int]] = [
    # record_param_comms and flight recorder
    ("Float", "float32", 4),
    ("Half", "float16", 2),
    ("BFloat16", "bfloat16", 2),
    ("Double", "float64", 8),
    ("Long", "int64", 8),
    ("Int", "int32", 4),
    ("Short", "int16", 2),
    ("Byte", "uint8", 1),
    ("Char", "int8", 1),
    ("Bool", "bool", 1),
    ("ComplexFloat", "complex64", 8),
    # annotations
    ("float", "float32", 4),
    ("double", "float64", 8),
    ("c10::Half", "float16", 2),
    ("c10::BFloat16", "bfloat16", 2),
    ("long int", "int64", 8),
    ("int", "int32", 4),
    ("unsigned char", "uint8", 1),
    ("signed char", "int8", 1),
    ("c10::complex<float>", "complex64", 8),
    # torch, as a hook prints it
    ("torch.bfloat16", "bfloat16", 2),
    ("torch.float32", "float32", 4),
    # short spellings of job files
    ("bf16", "bfloat16", 2),
    ("fp16", "float16", 2),
    ("fp32", "float32", 4),
    # fp8 is one byte, whatever the split of its bits
    ("Float8_e4m3fn", "float8_e4m3fn", 1),
    ("Float8_e5m2", "float8_e5m2", 1),
    ("Float8_e4m3fnuz", "float8_e4m3fnuz", 1),
    ("Float8_e5m2fnuz", "float8_e5m2fnuz", 1),
    ("Float8_e8m0fnu", "float8_e8m0fnu", 1),
    ("c10::Float8_e4m3fn", "float8_e4m3fn", 1),
    ("torch.float8_e5m2", "float8_e5m2", 1),
    # torch counts a byte that packs two fp4 values as one element
    ("Float4_e2m1fn_x2", "float4_e2m1fn_x2", 1),
]
"""Spelling -> canonical name and bytes of one element."""


@pytest.mark.parametrize(("raw", "canonical", "size_bytes"), ELEMENT_TYPES)
def test_element_types(raw: str, canonical: str, size_bytes: int) -> None:
    assert traffic.normalise_dtype(raw) == canonical
    assert traffic.element_bytes(raw) == size_bytes
    assert traffic.element_bytes(canonical) == size_bytes


def test_an_unknown_element_type_has_no_size() -> None:
    assert traffic.normalise_dtype("Float6_e3m2") == "float6_e3m2"
    assert traffic.element_bytes("Float6_e3m2") is None
    assert traffic.tensor_bytes(512, "Float6_e3m2") is None
    assert traffic.payload_bytes("all_reduce", 512, 512, "Float6_e3m2", 4) is None


def test_no_element_type_has_no_size() -> None:
    assert traffic.normalise_dtype(None) is None
    assert traffic.normalise_dtype(" ") is None
    assert traffic.element_bytes(None) is None
    assert traffic.element_bytes("") is None


def test_no_elements_are_zero_bytes_and_unknown_elements_are_unknown() -> None:
    assert traffic.tensor_bytes(0, "Half") == 0
    assert traffic.tensor_bytes(None, "Half") is None


# Names


SPELLINGS: list[tuple[str, str]] = [
    # NCCL's functions, as its plugins write them
    ("AllReduce", "all_reduce"),
    ("ReduceScatter", "reduce_scatter"),
    ("AllGather", "all_gather"),
    # record_param_comms
    ("allreduce", "all_reduce"),
    ("allreduce_coalesced", "all_reduce"),
    ("broadcast", "broadcast"),
    ("reduce", "reduce"),
    ("all_gather", "all_gather"),
    ("_allgather_base", "all_gather"),
    ("allgather_into_tensor_coalesced", "all_gather"),
    ("reduce_scatter", "reduce_scatter"),
    ("_reduce_scatter_base", "reduce_scatter"),
    ("reduce_scatter_tensor_coalesced", "reduce_scatter"),
    ("all_to_all", "all_to_all"),
    ("all_to_allv", "all_to_all"),
    ("send", "send"),
    ("recv", "recv"),
    ("gather", "gather"),
    ("scatter", "scatter"),
    ("barrier", "barrier"),
    # annotations and flight recorder
    ("nccl:all_reduce", "all_reduce"),
    ("nccl:_all_gather_base", "all_gather"),
    ("nccl:all_gather", "all_gather"),
    ("nccl:all_gather_into_tensor_coalesced", "all_gather"),
    ("nccl:_reduce_scatter_base", "reduce_scatter"),
    ("nccl:all_to_all", "all_to_all"),
    ("nccl:broadcast", "broadcast"),
    ("nccl:send 0->1", "send"),
    ("nccl:recv 1<-0", "recv"),
    ("nccl:recv 0<-8", "recv"),
    ("gloo:all_reduce", "all_reduce"),
    ("gloo:send", "send"),
    # calls of one kind that were launched as one: nccl:<OPTYPE>_coalesced
    ("nccl:ALLREDUCE_coalesced", "all_reduce"),
    ("nccl:ALLGATHER_coalesced", "all_gather"),
    ("nccl:_ALLGATHER_BASE_coalesced", "all_gather"),
    ("nccl:REDUCE_SCATTER_coalesced", "reduce_scatter"),
    ("nccl:_REDUCE_SCATTER_BASE_coalesced", "reduce_scatter"),
    # dispatcher operators
    ("c10d::allreduce_", "all_reduce"),
    ("c10d::allreduce_coalesced_", "all_reduce"),
    ("c10d::allgather_", "all_gather"),
    ("c10d::_allgather_base_", "all_gather"),
    ("c10d::allgather_into_tensor_coalesced_", "all_gather"),
    ("c10d::allgather_coalesced_", "all_gather"),
    ("c10d::reduce_scatter_", "reduce_scatter"),
    ("c10d::_reduce_scatter_base_", "reduce_scatter"),
    ("c10d::reduce_scatter_tensor_coalesced_", "reduce_scatter"),
    ("c10d::alltoall_", "all_to_all"),
    ("c10d::alltoall_base_", "all_to_all"),
    ("c10d::broadcast_", "broadcast"),
    ("c10d::reduce_", "reduce"),
    ("c10d::gather_", "gather"),
    ("c10d::scatter_", "scatter"),
    ("c10d::send", "send"),
    ("c10d::recv_", "recv"),
    ("c10d::recv_any_source_", "recv"),
    ("c10d::barrier", "barrier"),
    # torch.distributed functions, old and new names
    ("all_gather_into_tensor", "all_gather"),
    ("reduce_scatter_tensor", "reduce_scatter"),
    ("all_gather_single", "all_gather"),
    ("reduce_scatter_single", "reduce_scatter"),
    ("all_to_all_single", "all_to_all"),
    ("isend", "send"),
    ("irecv", "recv"),
    # our own hook
    ("ta:all_reduce", "all_reduce"),
]
"""Name as recorded -> operation."""


@pytest.mark.parametrize(("raw", "op"), SPELLINGS)
def test_every_recorded_spelling_has_its_operation(raw: str, op: str) -> None:
    assert traffic.normalise_op(raw) == op


def test_every_operation_is_its_own_spelling() -> None:
    assert [traffic.normalise_op(op) for op in traffic.OPS] == list(traffic.OPS)


@pytest.mark.parametrize("raw", ["wait", "init", "nccl:coalesced", "", "allreduce_of_tomorrow", None])
def test_what_moves_nothing_or_is_not_known_is_no_operation(raw: str | None) -> None:
    assert traffic.normalise_op(raw) is None


def test_wait_and_init_are_known_as_no_traffic() -> None:
    assert {"wait", "init"} == traffic.NOT_TRAFFIC


# All-to-all: splits count rows, sizes count elements, the own chunk stays


def test_uneven_all_to_all_leaves_out_the_own_chunk() -> None:
    payload = traffic.payload_bytes("all_to_all", 400, 256, "BFloat16", 4)
    assert payload == 800
    sent = traffic.off_rank_bytes(
        "all_to_all",
        payload,
        4,
        dtype="BFloat16",
        in_elems=400,
        out_elems=256,
        in_splits=[11, 12, 13, 14],
        out_splits=[11, 5, 7, 9],
        group_rank=0,
    )
    received = traffic.received_bytes(
        "all_to_all",
        payload,
        4,
        dtype="BFloat16",
        in_elems=400,
        out_elems=256,
        in_splits=[11, 12, 13, 14],
        out_splits=[11, 5, 7, 9],
        group_rank=0,
    )
    assert sent == 624
    assert received == 336
    assert payload - sent == 176


@pytest.mark.parametrize("splits", [None, [], [128, 128, 128, 128]])
def test_even_all_to_all_in_fp8(splits: list[int] | None) -> None:
    payload = traffic.payload_bytes("all_to_all", 512, 512, "Float8_e4m3fn", 4)
    assert payload == 512
    known = {"dtype": "Float8_e4m3fn", "in_elems": 512, "out_elems": 512, "group_rank": 0}
    assert traffic.off_rank_bytes("all_to_all", payload, 4, in_splits=splits, out_splits=splits, **known) == 384
    assert traffic.received_bytes("all_to_all", payload, 4, in_splits=splits, out_splits=splits, **known) == 384


def test_a_rank_without_rows_takes_the_row_width_from_the_other_side() -> None:
    payload = traffic.payload_bytes("all_to_all", 0, 320, "BFloat16", 4)
    assert payload == 0
    known = {
        "dtype": "BFloat16",
        "in_elems": 0,
        "out_elems": 320,
        "in_splits": [0, 0, 0, 0],
        "out_splits": [0, 40, 0, 0],
        "group_rank": 0,
    }
    assert traffic.row_elems(0, [0, 0, 0, 0], 320, [0, 40, 0, 0]) == 8
    assert traffic.off_rank_bytes("all_to_all", payload, 4, **known) == 0
    assert traffic.received_bytes("all_to_all", payload, 4, **known) == 640


def test_rows_without_a_place_in_the_group_are_unknown() -> None:
    known = {"dtype": "Half", "in_elems": 300, "in_splits": [100, 200]}
    assert traffic.off_rank_bytes("all_to_all", 600, 2, **known) is None
    assert traffic.off_rank_bytes("all_to_all", 600, 2, group_rank=2, **known) is None
    assert traffic.off_rank_bytes("all_to_all", 600, 2, group_rank=1, **known) == 200


def test_rows_of_an_unknown_type_are_unknown() -> None:
    known = {"dtype": "Float6_e3m2", "in_elems": 300, "in_splits": [100, 200], "group_rank": 0}
    assert traffic.off_rank_bytes("all_to_all", None, 2, **known) is None
    assert traffic.off_rank_bytes("all_to_all", 300, 2, **known) is None


def test_rows_that_do_not_divide_the_elements_have_no_width() -> None:
    assert traffic.row_elems(10, [1, 2], None, None) is None
    assert traffic.row_elems(0, [0, 0], 0, [0, 0]) is None
    assert traffic.row_elems(None, None, None, None) is None


@st.composite
def routed_rows(draw: st.DrawFn) -> list[list[int]]:
    """A square table: rows that rank i of a group sends to rank j."""
    size = draw(st.integers(2, 5))
    return [draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)) for _ in range(size)]


@settings(deadline=None)
@given(rows=routed_rows(), width=st.integers(1, 16))
def test_over_a_whole_group_what_is_sent_is_received(rows: list[list[int]], width: int) -> None:
    size = len(rows)
    sent: list[Fraction] = []
    received: list[Fraction] = []
    for rank in range(size):
        in_splits, out_splits = rows[rank], [row[rank] for row in rows]
        known = {
            "dtype": "Half",
            "in_elems": sum(in_splits) * width,
            "out_elems": sum(out_splits) * width,
            "in_splits": in_splits,
            "out_splits": out_splits,
            "group_rank": rank,
        }
        payload = traffic.payload_bytes("all_to_all", known["in_elems"], known["out_elems"], "Half", size)
        leaves = traffic.off_rank_bytes("all_to_all", payload, size, **known)
        enters = traffic.received_bytes("all_to_all", payload, size, **known)
        assert payload is not None
        assert leaves is not None
        assert enters is not None
        assert leaves + in_splits[rank] * width * 2 == payload
        sent.append(leaves)
        received.append(enters)
    assert sum(sent) == sum(received)
