"""What one collective moves: operation names, element sizes and the counting conventions. The only home of all three.

Two figures are defined for every call (see docs/decisions/0003-off-rank-counting.md); F is the full tensor in bytes, N
the group size:

==================  ===========================  ==============================================
operation           payload (nccl-tests "size")  off-rank, one direction, ring-equivalent
==================  ===========================  ==============================================
all_gather          F (the output)               (N-1)/N F
reduce_scatter      F (the input)                (N-1)/N F
all_reduce          F                            2(N-1)/N F
all_to_all          own input, all rows          rows for other ranks, exact from the splits
send, recv          the message                  the message
broadcast, reduce   F                            F
gather, scatter     F                            (N-1)/N F (what crosses at the root)
barrier             0                            0
==================  ===========================  ==============================================

Off-rank bytes are what a ring would send from each rank. Trees, NVLS and SHARP move other wire bytes: never call the
figure measured wire traffic. Factors: nccl-tests doc/PERFORMANCE.md; the table is section 4 of the design.
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction

OPS: tuple[str, ...] = (
    "all_gather",
    "reduce_scatter",
    "all_reduce",
    "all_to_all",
    "send",
    "recv",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    "barrier",
)
"""Normalised operation names."""

NOT_TRAFFIC: frozenset[str] = frozenset({"wait", "init"})
"""Names that ``record_param_comms`` also uses for things that move nothing (reference: Kineto, section 1.2)."""

# Every spelling met so far: record_param_comms (ProcessGroupNCCL), nccl:/gloo: annotations, c10d dispatcher operators,
# torch.distributed function names, NCCL's own. All are matched in lower case, with leading and trailing underscores removed.
_RAW_OPS: dict[str, str] = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "all_reduce": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce_sparse": "all_reduce",
    "allgather": "all_gather",
    "all_gather": "all_gather",
    "all_gather_base": "all_gather",
    "allgather_base": "all_gather",
    "allgather_coalesced": "all_gather",
    "all_gather_into_tensor": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "all_gather_single": "all_gather",
    "all_gather_single_coalesced": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "reducescatter": "reduce_scatter",
    "reduce_scatter_base": "reduce_scatter",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter",
    "reduce_scatter_single_coalesced": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "all_to_allv": "all_to_all",
    "alltoall_base": "all_to_all",
    "all_to_all_single": "all_to_all",
    "send": "send",
    "isend": "send",
    "recv": "recv",
    "irecv": "recv",
    "recv_any_source": "recv",
    "recvanysource": "recv",
    "broadcast": "broadcast",
    "broadcast_oop": "broadcast",
    "reduce": "reduce",
    "reduce_oop": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
}

# Bits per element. Fp4 packs two values in a byte; torch's Float4_e2m1fn_x2 counts the byte as one element.
_BITS: dict[str, int] = {
    "bool": 8,
    "byte": 8,
    "uint8": 8,
    "char": 8,
    "int8": 8,
    "short": 16,
    "int16": 16,
    "uint16": 16,
    "int": 32,
    "int32": 32,
    "uint32": 32,
    "long": 64,
    "int64": 64,
    "uint64": 64,
    "half": 16,
    "float16": 16,
    "bfloat16": 16,
    "float": 32,
    "float32": 32,
    "double": 64,
    "float64": 64,
    "complexhalf": 32,
    "complex32": 32,
    "complexfloat": 64,
    "complex64": 64,
    "complexdouble": 128,
    "complex128": 128,
    "float8_e4m3fn": 8,
    "float8_e5m2": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2fnuz": 8,
    "float8_e8m0fnu": 8,
    "float4_e2m1fn_x2": 8,
    "qint8": 8,
    "quint8": 8,
    "qint32": 32,
}

# One canonical torch spelling per type, so that "Half", "c10::Half", "f16" and "float16" meet in one cell.
_CANONICAL: dict[str, str] = {
    "byte": "uint8",
    "char": "int8",
    "short": "int16",
    "int": "int32",
    "long": "int64",
    "long int": "int64",
    "long long": "int64",
    "unsigned char": "uint8",
    "signed char": "int8",
    "half": "float16",
    "f16": "float16",
    "fp16": "float16",
    "bf16": "bfloat16",
    "float": "float32",
    "f32": "float32",
    "fp32": "float32",
    "double": "float64",
    "f64": "float64",
    "complexfloat": "complex64",
    "complexdouble": "complex128",
    "complexhalf": "complex32",
    "c10::complex<float>": "complex64",
    "c10::complex<double>": "complex128",
}

DTYPES: tuple[str, ...] = tuple(sorted(set(_CANONICAL.values()) | (set(_BITS) - set(_CANONICAL))))
"""Canonical names of the element types whose size is known."""

SHORT_DTYPE: dict[str, str] = {
    "float16": "f16",
    "bfloat16": "bf16",
    "float32": "f32",
    "float64": "f64",
    "uint8": "u8",
    "int8": "i8",
    "int32": "i32",
    "int64": "i64",
    "float8_e4m3fn": "f8e4m3",
    "float8_e5m2": "f8e5m2",
}
"""Short spellings for tables."""


def normalise_op(raw: str | None) -> str | None:
    """The operation that a recorded name stands for, or None for an unknown one.

    ``raw`` may carry a prefix (``nccl:``, ``gloo:``, ``c10d::``, ``ta:``) and a peer (``nccl:send 0->3``).
    ``wait`` and ``init`` give None: they are no operations (see NOT_TRAFFIC).
    """
    if raw is None:
        return None
    name = raw.split(" ", 1)[0].rsplit(":", 1)[-1].lower().strip("_")
    return _RAW_OPS.get(name) or _RAW_OPS.get(name.removesuffix("_coalesced"))


def normalise_dtype(raw: str | None) -> str | None:
    """The canonical torch name of an element type (``float16``, ``bfloat16``, ...).

    None stays None and an unknown name comes back in lower case: its size is then unknown, see element_bytes.
    """
    if raw is None or not raw.strip():
        return None
    name = raw.strip()
    name = name.removeprefix("torch.").removeprefix("c10::").lower() if "<" not in name else name.lower()
    return _CANONICAL.get(name, name)


def element_bytes(dtype: str | None) -> int | None:
    """Bytes of one element, for canonical and profiler spellings. None for None and for a type not in the table."""
    if dtype is None:
        return None
    bits = _BITS.get(normalise_dtype(dtype) or "")
    return None if bits is None else bits // 8


def tensor_bytes(elems: int | None, dtype: str | None) -> int | None:
    """Bytes of ``elems`` elements; None if either is unknown."""
    size = element_bytes(dtype)
    return None if size is None or elems is None else elems * size


def full_elems(op: str | None, in_elems: int | None, out_elems: int | None, group_size: int | None) -> int | None:
    """Elements of the tensor that the payload counts, from this rank's input and output elements.

    all_gather: the output, or the input times the group size; reduce_scatter: the input, or the output times the group
    size; gather and scatter alike; every other operation: the input, else the output. None if it cannot be known.
    """
    if op in ("all_gather", "gather"):
        if out_elems is not None and (op == "all_gather" or out_elems):
            return out_elems
        return None if in_elems is None or group_size is None else in_elems * group_size
    if op in ("reduce_scatter", "scatter"):
        if in_elems is not None and (op == "reduce_scatter" or in_elems):
            return in_elems
        return None if out_elems is None or group_size is None else out_elems * group_size
    if op == "barrier":
        return 0
    if op == "recv":
        return out_elems if out_elems is not None else in_elems
    return in_elems if in_elems is not None else out_elems


def payload_bytes(
    op: str | None, in_elems: int | None, out_elems: int | None, dtype: str | None, group_size: int | None
) -> int | None:
    """Payload of one call in bytes (nccl-tests "size"); None if operation, elements or type are unknown."""
    if op is None:
        return None
    if op == "barrier":
        return 0
    return tensor_bytes(full_elems(op, in_elems, out_elems, group_size), dtype)


def off_rank_factor(op: str, group_size: int) -> Fraction:
    """Off-rank bytes as a multiple of the payload, exact.

    all_to_all gives the factor of an even exchange; use off_rank_bytes with splits for an uneven one.
    ``group_size`` must be at least 1; a group of one moves nothing, whatever the operation.
    """
    if group_size < 1:
        raise ValueError(f"a group has at least one rank, not {group_size}")
    if group_size == 1:
        return Fraction(0)
    if op in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"):
        return Fraction(group_size - 1, group_size)
    if op == "all_reduce":
        return Fraction(2 * (group_size - 1), group_size)
    if op in ("send", "recv", "broadcast", "reduce"):
        return Fraction(1)
    if op == "barrier":
        return Fraction(0)
    raise ValueError(f"unknown operation {op!r}; known: {', '.join(OPS)}")


def row_elems(
    in_elems: int | None,
    in_splits: Sequence[int] | None,
    out_elems: int | None,
    out_splits: Sequence[int] | None,
) -> int | None:
    """Elements in one row of an all_to_all: splits count rows, sizes count elements.

    Taken from the side that has rows; None where neither has (then nothing moved) or where rows do not divide elements.
    """
    for elems, splits in ((in_elems, in_splits), (out_elems, out_splits)):
        if elems is not None and splits:
            rows = sum(splits)
            if rows > 0:
                return elems // rows if elems % rows == 0 else None
    return None


def off_rank_bytes(
    op: str | None,
    payload: int | None,
    group_size: int | None,
    *,
    dtype: str | None = None,
    in_elems: int | None = None,
    out_elems: int | None = None,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    group_rank: int | None = None,
) -> Fraction | None:
    """Bytes that leave this rank in one call, ring-equivalent, one direction; None if unknown.

    A Fraction because (N-1)/N of a small buffer need not be whole. For an uneven all_to_all the rows for other ranks
    are counted from ``in_splits``; without ``group_rank`` its own chunk is not known, so the answer is None.
    """
    if op is None or payload is None or group_size is None:
        return None
    if op == "all_to_all" and in_splits:
        row = _row_bytes(dtype, in_elems, in_splits, out_elems, out_splits)
        return _bytes_of_others(in_splits, row, group_size, group_rank)
    return Fraction(payload) * off_rank_factor(op, group_size)


def received_bytes(
    op: str | None,
    payload: int | None,
    group_size: int | None,
    *,
    dtype: str | None = None,
    in_elems: int | None = None,
    out_elems: int | None = None,
    in_splits: Sequence[int] | None = None,
    out_splits: Sequence[int] | None = None,
    group_rank: int | None = None,
) -> Fraction | None:
    """Bytes that enter this rank in one call; equals off_rank_bytes but for an uneven all_to_all. None if unknown."""
    if op == "all_to_all" and out_splits and payload is not None and group_size is not None:
        row = _row_bytes(dtype, in_elems, in_splits, out_elems, out_splits)
        return _bytes_of_others(out_splits, row, group_size, group_rank)
    return off_rank_bytes(op, payload, group_size)


def _row_bytes(
    dtype: str | None,
    in_elems: int | None,
    in_splits: Sequence[int] | None,
    out_elems: int | None,
    out_splits: Sequence[int] | None,
) -> int | None:
    """Bytes of one row of an all_to_all; None if its width or the size of its type is unknown."""
    return tensor_bytes(row_elems(in_elems, in_splits, out_elems, out_splits), dtype)


def _bytes_of_others(
    splits: Sequence[int], row_bytes: int | None, group_size: int, group_rank: int | None
) -> Fraction | None:
    """Bytes of the rows of all ranks but this one; its own chunk is known by its place, or where all are equal."""
    if sum(splits) == 0:
        return Fraction(0)
    if group_rank is not None and 0 <= group_rank < len(splits):
        own = splits[group_rank]
    elif len(splits) == group_size and len(set(splits)) == 1:
        own = splits[0]
    else:
        return None
    return None if row_bytes is None else Fraction((sum(splits) - own) * row_bytes)
