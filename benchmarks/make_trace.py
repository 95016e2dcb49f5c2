"""Generates a large Kineto trace of one rank of a Megatron-style job, in the layout that torch 2.13 writes.

    python benchmarks/make_trace.py OUT.json [MEGABYTES]

Seeded: the same size gives the same bytes. Per layer and micro-batch: host operators with shapes, launches, compute
kernels, tensor-parallel all-gathers and reduce-scatters, flow arrows; per micro-batch a send and a recv in one coalesced
box. A collective leaves what torch with shapes on leaves: the dispatcher's c10d:: operator, record_param_comms inside it,
the nccl: annotation inside that, the kernel, and the annotation's range on the device (reference: trace_event_shapes, K5
and K6). One key per line, as the real writer does since 2026, because the number of lines matters to a parser.
"""

from __future__ import annotations

import io
import random
import sys
from pathlib import Path
from typing import TextIO

_BASE_NS = 1790857026000000000
_PID = 21587
_GEMM = "sm90_xmma_gemm_bf16bf16_bf16f32_f32_{}_n_tilesize128x{}x64_warpgroupsize2x1x1_bias_bf16_execute_segment_k_off"
_COMPUTE = [
    *(_GEMM.format(layout, tile) for layout in ("tn", "nt", "nn") for tile in (128, 256)),
    "void flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 128, 64, 4, false, false, cutlass::bfloat16_t>, false>",
    "void transformer_engine::normalization::rmsnorm_fwd_tuned_kernel<Kernel_traits<__nv_bfloat16, 4096u, 1u, 4u>>",
    "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>, std::array<char*, 3ul>>",
]
_HOST = [
    "aten::linear",
    "aten::t",
    "aten::transpose",
    "aten::as_strided",
    "aten::matmul",
    "aten::mm",
    "aten::mul",
    "aten::add_",
    "aten::empty",
    "aten::view",
    "aten::to",
    "aten::_to_copy",
    "MmBackward0",
]
_CALLS = [
    ("_allgather_base", "c10d::_allgather_base_", "nccl:_all_gather_base", "AllGather_RING_LL", 1, 8),
    (
        "_reduce_scatter_base",
        "c10d::_reduce_scatter_base_",
        "nccl:_reduce_scatter_base",
        "ReduceScatter_Sum_bf16_RING_LL",
        8,
        1,
    ),
]
_KERNEL = "ncclDevKernel_{}(ncclDevKernelArgsStorage<4096ul>)"
_NO_TENSORS = ", ".join(["[]"] * 9)


class _Writer:
    """Writes events one key per line and keeps the clocks and the ids."""

    def __init__(self, out: TextIO, seed: int) -> None:
        self._out = out
        self._random = random.Random(seed)
        self.now = 5116914681345.726
        self.gpu = {7: self.now, 20: self.now, 24: self.now}
        self.ids = 0
        self.correlation = 1000
        self.sequence = self.peer_sequence = 0

    def event(self, ph: str, cat: str, name: str, pid: int, tid: int, ts: float, dur: float | None, args: str) -> None:
        length = "" if dur is None else f',\n    "dur": {dur:.3f}'
        self._out.write(
            f',\n  {{\n    "ph": "{ph}", "cat": "{cat}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
            f'    "ts": {ts:.3f}{length},\n    "args": {{\n      {args}\n    }}\n  }}'
        )

    def host(self, name: str, dur: float, args: str = "", cat: str = "cpu_op") -> int:
        """A host event at the present time; gives its External id."""
        self.ids += 1
        extra = f", {args}" if args else ""
        self.event(
            "X", cat, name, _PID, _PID, self.now, dur, f'"External id": {self.ids},"Record function id": 0{extra}'
        )
        return self.ids

    def operators(self, count: int) -> None:
        for _ in range(count):
            name = self._random.choice(_HOST)
            dur = round(self._random.lognormvariate(1.5, 0.8), 3)
            size = self._random.choice((512, 1024, 4096))
            self.host(
                name,
                dur,
                f'"Concrete Inputs": ["", "", "[4096, 1, 512]"], "Input type": ["c10::BFloat16", "c10::BFloat16", "Scalar"], '
                f'"Input Strides": [[{size}, {size}, 1], [1, {size}], []], '
                f'"Input Dims": [[4096, 1, {size}], [{size}, 512], []]',
            )
            self.now += dur * 0.6

    def kernel(self, name: str, stream: int, dur: float, external: int, metadata: str = "") -> float:
        """A launch now and the kernel it launches; gives the start of the kernel."""
        self.correlation += 1
        launch = self.now
        self.event(
            "X",
            "cuda_runtime",
            "cudaLaunchKernelExC",
            _PID,
            _PID,
            launch,
            4.2,
            f'"External id": {external}, "cbid": 430, "correlation": {self.correlation}',
        )
        start = max(self.gpu[stream] + 1.0, launch + 9.5)
        self.gpu[stream] = start + dur
        tail = f",\n      {metadata}" if metadata else ""
        self.event(
            "X",
            "kernel",
            name,
            0,
            stream,
            start,
            dur,
            f'"External id": {external}, "queued": 0, "device": 0, "context": 1,\n      "stream": {stream}, '
            f'"correlation": {self.correlation}, "registers per thread": 168, "shared memory": 227328,\n      '
            f'"blocks per SM": 1.0, "warps per SM": 12.0, "grid": [132, 1, 1], "block": [384, 1, 1], '
            f'"est. achieved occupancy %": 19{tail}',
        )
        for ph, pid, tid, at, end in (("s", _PID, _PID, launch, ""), ("f", 0, stream, start, ', "bp": "e"')):
            self._out.write(
                f',\n  {{\n    "ph": "{ph}", "id": {self.correlation}, "pid": {pid}, "tid": {tid}, "ts": {at:.3f},\n'
                f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
            )
        self.now += 6.1
        return start

    def collective(self, which: int) -> None:
        """One call with every record of it, the outermost first, as torch writes them."""
        name, operator, annotation, kernel, sent, received = _CALLS[which]
        self.sequence += 1
        shard = 1048576
        metadata = (
            f'"Collective name": "{name}", "In msg nelems": {shard * sent}, "Out msg nelems": {shard * received}, '
            f'"Group size": 8, "dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", '
            f'"Process Group Name": "11", '
            f'"Process Group Description": "TENSOR_MODEL_PARALLEL_GROUP", '
            f'"Process Group Ranks": "[0, 1, 2, 3, 4, 5, 6, 7]", "Seq": {self.sequence}'
        )
        tensors = f"[{4096 * received // 8}, 1, 2048], [{4096 * sent // 8}, 1, 2048]"
        self.host(
            operator,
            58.0,
            f'"Concrete Inputs": ["", "", "", "False", "-1"], "Input type": ["c10::BFloat16", "c10::BFloat16", "", '
            f'"Scalar", "Scalar"], "Input Strides": [[2048, 2048, 1], [2048, 2048, 1], [], [], []], '
            f'"Input Dims": [{tensors}, [], [], []]',
        )
        self.now += 6.5
        external = self._record(f"[{4096 * sent // 8}, 1, 2048]", 44.0, metadata)
        self.now += 5.5
        dur = round(self._random.lognormvariate(4.5, 0.3), 3)
        own = self._annotation(annotation, f"[{4096 * sent // 8}, 1, 2048]", 30.0)
        self.now += 12.0
        start = self.kernel(_KERNEL.format(kernel), 20, dur, external, metadata)
        self.event("X", "gpu_user_annotation", annotation, 0, 20, start, dur, f'"External id": {own}')
        self.now += 30.0

    def _record(self, dims: str, dur: float, metadata: str) -> int:
        return self.host(
            "record_param_comms",
            dur,
            f'{metadata}, "Rank": 0, "Input Strides": [[2048, 2048, 1], {_NO_TENSORS}], "Concrete Inputs": ["", "", "", "0", '
            f'"", "[]", "[]", "0", "1", "8"], "Input type": ["c10::BFloat16", "", "", "Scalar", "", "ScalarList", '
            f'"ScalarList", "Scalar", "Scalar", "Scalar"], "Global rank start": 0, "Global rank stride": 1, '
            f'"Input Dims": [{dims}, {_NO_TENSORS}]',
        )

    def _annotation(self, name: str, dims: str, dur: float) -> int:
        return self.host(
            name,
            dur,
            f'"Concrete Inputs": [""], "Input type": ["c10::BFloat16"], "Input Strides": [[2048, 2048, 1]], '
            f'"Input Dims": [{dims}]',
            "user_annotation",
        )

    def exchange(self) -> None:
        """A send and a recv with the next pipeline stage in one box: their one kernel carries no metadata."""
        for name, operator, peer in (("send", "c10d::send", "Dst"), ("recv", "c10d::recv_", "Src")):
            self.peer_sequence += 1
            metadata = (
                f'"Collective name": "{name}", "In msg nelems": 8388608, "Out msg nelems": 8388608, "Group size": 2, '
                f'"dtype": "BFloat16", "In split size": "[]", "Out split size": "[]", "Process Group Name": "19", '
                f'"Process Group Description": "PIPELINE_MODEL_PARALLEL_GROUP", "Process Group Ranks": "[0, 8]", '
                f'"{peer} Rank": 8, "Seq": {self.peer_sequence}'
            )
            self.host(
                operator,
                21.0,
                '"Concrete Inputs": ["", "", "1", "0"], "Input type": ["TensorList", "", "Scalar", "Scalar"], '
                '"Input Strides": [[[2048, 2048, 1]], [], [], []], "Input Dims": [[[4096, 1, 2048]], [], [], []]',
            )
            self.now += 4.0
            self._record("[4096, 1, 2048]", 15.0, metadata)
            self.now += 18.0
        box = self._annotation("nccl:coalesced", "[4096, 1, 2048]", 26.0)
        self.now += 9.0
        dur = round(self._random.lognormvariate(5.0, 0.3), 3)
        start = self.kernel(_KERNEL.format("SendRecv"), 24, dur, box)
        self.event("X", "gpu_user_annotation", "nccl:coalesced", 0, 24, start, dur, f'"External id": {box}')
        self.now += 22.0

    def layer(self) -> None:
        for which in (0, 1, 0, 1):
            for _ in range(9):
                self.operators(8)
                external = self.ids
                name = self._random.choice(_COMPUTE)
                self.kernel(name, 7, round(self._random.lognormvariate(3.5, 0.7), 3), external)
            self.collective(which)


def write_trace(path: Path, size_bytes: int, seed: int = 7) -> Path:
    """Writes a trace of about ``size_bytes`` (never less) and gives its path."""
    with path.open("w", encoding="utf-8", buffering=1 << 20) as file:
        head = (
            '{\n  "schemaVersion": 1,\n  "deviceProperties": [{"id": 0, "name": "NVIDIA H100 80GB HBM3"}],\n'
            '  "record_shapes": 1,\n  "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 16, "pg_count": 3, '
            '"pg_config": [{"pg_name": "11", "pg_desc": "TENSOR_MODEL_PARALLEL_GROUP", "backend_config": "cuda:nccl", '
            '"pg_size": 8, "ranks": [0, 1, 2, 3, 4, 5, 6, 7]}, {"pg_name": "19", "pg_desc": "PIPELINE_MODEL_PARALLEL_GROUP", '
            '"backend_config": "cuda:nccl", "pg_size": 2, "ranks": [0, 8]}]},\n'
            f'  "displayTimeUnit": "ms",\n  "baseTimeNanoseconds": {_BASE_NS},\n  "traceEvents": [\n'
            f'  {{"ph": "M", "name": "process_name", "pid": {_PID}, "tid": 0, "ts": 0, "args": {{"name": "python"}}}}'
        )
        file.write(head)
        buffer = io.StringIO()
        writer = _Writer(buffer, seed)
        written = len(head)
        step = 0
        while written < size_bytes:
            begin = writer.now
            for _ in range(16):
                writer.layer()
            writer.exchange()
            writer.event(
                "X",
                "user_annotation",
                f"ProfilerStep#{step}",
                _PID,
                _PID,
                begin,
                writer.now - begin,
                '"External id": 0',
            )
            step += 1
            text = buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
            file.write(text)
            written += len(text)
        file.write('\n  ],\n  "traceName": "rank0.json"\n}\n')
    return path


if __name__ == "__main__":
    write_trace(Path(sys.argv[1]), int(sys.argv[2] if len(sys.argv) > 2 else "50") * 1_000_000)
