"""What the profiler writes of one communication call, by version of torch: names, keys, their order and their spelling.

Sources: reference "record formats", sections 1.2 and 1.3, and "trace event shapes", both read off real files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from traceanalyzer import traffic


@dataclass(frozen=True)
class Profile:
    """What one version of the profiler writes."""

    whole_us: bool
    """Times are whole microseconds since 1970, rounded down; else three decimals since baseTimeNanoseconds."""
    times_behind: bool
    """displayTimeUnit and baseTimeNanoseconds stand behind the events."""
    metadata: Literal["none", "positional", "keys"]
    """How record_param_comms tells of a call: not at all, by the place among its arguments (with shapes), by keys."""
    newer_keys: bool
    """Rank, Src/Dst Rank, Seq, Comms Id, Is asynchronized op; graph ids on kernels; the host's name."""
    concrete: bool
    """Whether scalar arguments are written (Concrete Inputs), where shapes are."""
    correlation_ids: bool
    """The External id of a kernel is its correlation id and says nothing of the host."""
    oldest: bool
    """Arguments of torch 1.12 and 1.13: Trace name, Profiler Event Index, Module Hierarchy, Call stack."""
    processes_first: bool
    """The names of processes and threads stand before the other events."""


PROFILES: dict[str, Profile] = {
    "1.13": Profile(True, False, "none", False, False, True, True, False),
    "2.2": Profile(True, False, "positional", False, True, True, False, False),
    "2.4": Profile(False, True, "keys", False, True, False, False, False),
    "2.13": Profile(False, False, "keys", True, True, False, False, True),
}
"""Version of torch -> what its profiler writes."""

LONGEST_LIST = 30
"""Longer lists are written shortened (TENSOR_LIST_DISPLAY_LENGTH_LIMIT)."""

_DTYPES = {
    "bfloat16": "BFloat16",
    "bool": "Bool",
    "complex128": "ComplexDouble",
    "complex32": "ComplexHalf",
    "complex64": "ComplexFloat",
    "float16": "Half",
    "float32": "Float",
    "float64": "Double",
    "float8_e4m3fn": "Float8_e4m3fn",
    "float8_e4m3fnuz": "Float8_e4m3fnuz",
    "float8_e5m2": "Float8_e5m2",
    "float8_e5m2fnuz": "Float8_e5m2fnuz",
    "float8_e8m0fnu": "Float8_e8m0fnu",
    "float4_e2m1fn_x2": "Float4_e2m1fn_x2",
    "int16": "Short",
    "int32": "Int",
    "int64": "Long",
    "int8": "Char",
    "uint8": "Byte",
}
_C_TYPES = {
    "bool": "bool",
    "float32": "float",
    "float64": "double",
    "int16": "short int",
    "int32": "int",
    "int64": "long int",
    "int8": "signed char",
    "uint8": "unsigned char",
}
_COLLECTIVE_NAMES = {
    "all_reduce": "allreduce",
    "all_gather": "_allgather_base",
    "reduce_scatter": "_reduce_scatter_base",
}
ANNOTATIONS = {"all_gather": "_all_gather_base", "reduce_scatter": "_reduce_scatter_base"}
"""Operation -> name behind ``nccl:``, where it is not the operation's own."""

# Operation -> its dispatcher operator, how many arguments that has, and where among them the tensors are: out, in.
_OPERATORS: dict[str, tuple[str, int, int, int]] = {
    "all_reduce": ("c10d::allreduce_", 6, 0, 0),
    "all_gather": ("c10d::_allgather_base_", 5, 0, 1),
    "reduce_scatter": ("c10d::_reduce_scatter_base_", 6, 0, 1),
    "all_to_all": ("c10d::alltoall_base_", 7, 0, 1),
    "broadcast": ("c10d::broadcast_", 7, 0, 0),
    "reduce": ("c10d::reduce_", 6, 0, 0),
    "gather": ("c10d::gather_", 5, 0, 1),
    "scatter": ("c10d::scatter_", 6, 0, 1),
    "send": ("c10d::send", 4, 0, 0),
    "recv": ("c10d::recv_", 4, 0, 0),
    "barrier": ("c10d::barrier", 4, -1, -1),
}
_TENSOR_LISTS = frozenset({"all_reduce", "broadcast", "reduce", "send", "recv"})
_TWO_TENSORS = frozenset(
    {
        "c10d::_allgather_base_", "c10d::allgather_", "c10d::allgather_coalesced_", "c10d::alltoall_",
        "c10d::allgather_into_tensor_coalesced_", "c10d::_reduce_scatter_base_", "c10d::reduce_scatter_",
        "c10d::reduce_scatter_tensor_coalesced_", "c10d::alltoall_base_", "c10d::gather_", "c10d::scatter_",
    }
)  # fmt: skip
"""Operators whose first argument is the output and whose second is the input; of all others the first is both."""

_NO_TIMEOUT = frozenset({"c10d::allgather_coalesced_", "c10d::allgather_into_tensor_coalesced_"})
"""Operators whose last argument is the flag of asynchronous calls; of others a timeout stands behind it."""


@dataclass(frozen=True)
class Group:
    """A process group as a rank knows it. ``ranks`` None: not known."""

    group_id: str
    description: str | None
    size: int | None
    ranks: Sequence[int] | None
    address: int
    """Number that stands for its address, which is all that torch up to 2.2 wrote."""

    def stride(self) -> int | None:
        """Distance of neighbours in the list of ranks, if it is the same all along and positive; None for one rank."""
        if self.ranks is None or len(self.ranks) < 2:
            return None
        step = self.ranks[1] - self.ranks[0]
        even = step > 0 and all(b - a == step for a, b in zip(self.ranks, self.ranks[1:], strict=False))
        return step if even else None

    def ranks_text(self) -> str:
        """Process Group Ranks: derived from start and stride, so "[]" for an irregular group and for one rank."""
        if self.ranks is None or self.stride() is None:
            return "[]"
        if len(self.ranks) <= LONGEST_LIST:
            return str(list(self.ranks))
        shown = ", ".join(map(str, self.ranks[: LONGEST_LIST - 1]))
        return f"[{shown}, ..., {self.ranks[-1]}]"


def pair(key: str, value: object) -> str:
    """One argument, with the comma before it; nothing for None."""
    return "" if value is None else f', "{key}": {json.dumps(value)}'


def collective_name(call: Mapping[str, Any]) -> str:
    """The name in record_param_comms: as recorded if it was one, else that of the operation."""
    raw = str(call["op_raw"] or call["op"] or "")
    if raw and ":" not in raw and raw != call["op"]:
        return raw
    if call["op"] == "all_to_all":
        return "all_to_allv" if call["in_splits"] else "all_to_all"
    return _COLLECTIVE_NAMES.get(call["op"] or "", raw)


def dtype_name(dtype: str | None) -> str | None:
    """Element type as c10 names it."""
    return None if dtype is None else _DTYPES.get(dtype, dtype)


def c_type(dtype: str | None) -> str:
    """Element type as ``Input type`` has it, "" if it is not known."""
    return "" if dtype is None else _C_TYPES.get(dtype, f"c10::{dtype_name(dtype)}")


def _splits(values: Sequence[int] | None, known: bool | None) -> str | None:
    """A split list as written; None where the truth is not known."""
    if known is False:
        return None
    if not values:
        return "[]"
    shown = ", ".join(map(str, values[:LONGEST_LIST]))
    return f"[{shown}, ...]" if len(values) > LONGEST_LIST else f"[{shown}]"


class Words:
    """The arguments of one call's records under one version of the profiler. ``group`` None: the group is not known."""

    def __init__(self, profile: Profile, call: Mapping[str, Any], group: Group | None, *, own_rank: int | None) -> None:
        self.profile = profile
        self.call = call
        self.group = group
        self.size = call["group_size"] if call["group_size"] is not None else (group.size if group else None)
        self.name = collective_name(call)
        self.dtype = dtype_name(call["dtype"]) or ("Byte" if call["op"] == "barrier" else None)
        self.in_splits = _splits(call["in_splits"], call["splits_known"])
        self.out_splits = _splits(call["out_splits"], call["splits_known"])
        self.p2p = call["op"] in ("send", "recv")
        self._own_rank = own_rank

    def _peer(self) -> str:
        if not self.profile.newer_keys or not self.p2p:
            return ""
        return pair("Dst Rank" if self.call["op"] == "send" else "Src Rank", self.call["peer"])

    def _rank(self) -> int | None:
        """Group rank of the peer or root where there is one, else of this rank."""
        other = self.call["peer"] if self.p2p else self.call["root"]
        ranks = self.group.ranks if self.group is not None else None
        if other is not None and ranks is not None and other in ranks:
            return list(ranks).index(int(other))
        if self.p2p:
            return None
        if self.call["group_rank"] is not None:
            return int(self.call["group_rank"])
        if ranks is None or self._own_rank is None or self._own_rank not in ranks:
            return None
        return list(ranks).index(self._own_rank)

    def record(self) -> str:
        """Keys of record_param_comms."""
        call, group, newer = self.call, self.group, self.profile.newer_keys
        start = group.ranks[0] if group is not None and group.ranks else None
        stride = group.stride() if group is not None else None
        asynchronous = None if call["is_async"] is None else int(call["is_async"])
        return "".join(
            (
                pair("Process Group Name", group.group_id if group is not None else None),
                self._peer(),
                pair("Comms Id", call["comms_id"]) if newer else "",
                pair("In split size", self.in_splits),
                pair("Out split size", self.out_splits),
                pair("Out msg nelems", call["out_elems"]),
                pair("Process Group Ranks", group.ranks_text() if group is not None else None),
                pair("Group size", self.size),
                pair("Global rank stride", stride),
                pair("Seq", call["seq"]) if newer else "",
                pair("Is asynchronized op", asynchronous) if newer else "",
                pair("Collective name", self.name),
                pair("Process Group Description", group.description if group is not None else None),
                pair("dtype", self.dtype),
                pair("Rank", self._rank()) if newer else "",
                pair("In msg nelems", call["in_elems"]),
                pair("Global rank start", start),
            )
        )

    def kernel(self) -> str:
        """Keys of the call's kernel: none at all unless the first five are known."""
        call, group = self.call, self.group
        needed = (self.name or None, call["in_elems"], call["out_elems"], self.size, self.dtype)
        if any(value is None for value in needed):
            return ""
        return "".join(
            (
                pair("Collective name", self.name),
                pair("In msg nelems", call["in_elems"]),
                pair("Out msg nelems", call["out_elems"]),
                pair("Group size", self.size),
                pair("dtype", self.dtype),
                pair("In split size", self.in_splits),
                pair("Out split size", self.out_splits),
                pair("Process Group Name", group.group_id if group is not None else None),
                pair("Process Group Description", group.description if group is not None else None),
                pair("Process Group Ranks", group.ranks_text() if group is not None else None),
                self._peer(),
                pair("Seq", call["seq"]) if self.profile.newer_keys else "",
                pair("Comms Id", call["comms_id"]) if self.profile.newer_keys else "",
            )
        )

    def positional(self) -> str:
        """Arguments of record_param_comms by their place, as torch up to 2.2 wrote them."""
        call, group = self.call, self.group
        seq = call["seq"]
        values = [
            "",
            "" if seq is None else str(seq),
            "" if group is None else str(group.address),
            str(call["group_rank"] or 0),
            "",
            self.in_splits or "[...]",
            self.out_splits or "[...]",
            "" if self.size is None else str(self.size),
        ]
        kinds = ["TensorList", "Scalar", "Scalar", "Scalar", "", "ScalarList", "ScalarList", "Scalar"]
        return pair("Concrete Inputs", values) + pair("Input type", kinds)

    def annotation(self, operator: str | None, dims: str | None) -> tuple[str, str | None]:
        """(arguments of the range ``nccl:op`` or ``gloo:op``, its Input Dims as JSON text: those of the input tensors).

        ``operator`` and ``dims``: name and Input Dims of the record that holds the shapes, None where there is none.
        """
        if self.call["op"] == "barrier":  # has no tensors
            return "", None
        shapes: object = None
        read = json.loads(dims) if dims is not None else None
        if isinstance(read, list) and operator is not None:
            place = 1 if operator in _TWO_TENSORS else 0
            tensor = read[place] if place < len(read) else []
            if tensor:
                shapes = tensor if isinstance(tensor[0], list) else [tensor]
        elif isinstance(read, list):
            shapes = read
        if shapes is None and self.call["in_elems"] is not None:
            shapes = [[self.call["in_elems"]]]
        if shapes is None:
            return "", None
        concrete = pair("Concrete Inputs", [""]) if self.profile.concrete else ""
        return concrete + pair("Input type", [c_type(self.call["dtype"])]), json.dumps(shapes)

    def operator(self, name: str, dims: str) -> str:
        """Arguments of a dispatcher operator ``c10d::op_``, whose Input Dims are ``dims``."""
        shapes = json.loads(dims)
        if not isinstance(shapes, list):
            return ""
        call, n = self.call, len(shapes)
        values, kinds = [""] * n, [""] * n
        for i, shape in enumerate(shapes):
            if isinstance(shape, list) and shape:
                kinds[i] = "TensorList" if isinstance(shape[0], list) else c_type(call["dtype"])
        if name == "c10d::alltoall_base_" and n > 4:
            values[3], values[4] = self.out_splits or "[...]", self.in_splits or "[...]"
            kinds[3] = kinds[4] = "ScalarList"
        timeout = n >= 3 and name not in _NO_TIMEOUT
        if timeout:
            values[-1], kinds[-1] = "-1", "Scalar"
        if n >= 4 + timeout and call["is_async"] is not None and name.endswith("_"):
            flag = -2 if timeout else -1
            values[flag], kinds[flag] = str(bool(call["is_async"])), "Scalar"
        concrete = pair("Concrete Inputs", values) if self.profile.concrete else ""
        return concrete + pair("Input type", kinds)

    def ours(self, block: int | None) -> str:
        """Arguments of the range ``ta:op`` that a collector opens around the call (collectors.naming lists them)."""
        call, group = self.call, self.group
        ranks = group.ranks if group is not None else None
        asynchronous = None if call["is_async"] is None else bool(call["is_async"])
        values: dict[str, Any] = {
            "pg": call["group_id"],
            "desc": group.description if group is not None else None,
            "ranks": None if ranks is None else str(list(ranks)),
            "size": self.size,
            "rank": call["group_rank"],
            "seq": call["seq"],
            "dtype": call["dtype"],
            "in_elems": call["in_elems"],
            "out_elems": call["out_elems"],
            "reduce_op": call["reduce_op"],
            "root": call["root"],
            "peer": call["peer"],
            "coalesce": block,
            "is_async": asynchronous,
            "in_splits": str(call["in_splits"]) if call["in_splits"] else None,
            "out_splits": str(call["out_splits"]) if call["out_splits"] else None,
            "call": call["hook_call"],
        }
        return "".join(pair(key, value) for key, value in values.items())


def wait(profile: Profile, *, shapes: bool) -> str:
    """Arguments of the record_param_comms of a wait: it moves nothing."""
    if profile.metadata == "keys":
        return "".join(
            (
                pair("Collective name", "wait"),
                pair("dtype", "Byte"),
                pair("Out split size", "[]"),
                pair("In msg nelems", 0),
                pair("Group size", 1),
                pair("Process Group Ranks", "[]"),
                pair("Out msg nelems", 0),
                pair("In split size", "[]"),
            )
        )
    if profile.metadata == "positional" and shapes:
        return pair("Concrete Inputs", ["0", "0", "0", "", "[]", "[]", "1"]) + pair(
            "Input type", ["Scalar", "Scalar", "Scalar", "", "ScalarList", "ScalarList", "Scalar"]
        )
    return ""


def operator_of(call: Mapping[str, Any], profile: Profile) -> tuple[str, str] | None:
    """(name of the dispatcher operator of a call, its Input Dims as JSON text, tensors as one dimension).

    None: it has none. Torch 1.13 dispatched no calls on single tensors (c10d/Ops.cpp of mid-2022).
    """
    op = call["op"]
    if op not in _OPERATORS:
        return None
    name, count, out_place, in_place = _OPERATORS[op]
    if profile.oldest and name.endswith("_base_"):
        return None
    dims: list[Any] = [[] for _ in range(count)]
    for place, elems in ((out_place, call["out_elems"]), (in_place, call["in_elems"])):
        if place >= 0 and elems is not None:
            dims[place] = [[elems]] if op in _TENSOR_LISTS else [elems]
    return name, json.dumps(dims)


def is_call(name: str) -> bool:
    """Whether a range of this name (``nccl:op``, ``gloo:op``, ``ta:op``) stands for a call."""
    return traffic.normalise_op(name) is not None
