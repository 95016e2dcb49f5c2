"""One of two gloo processes: makes each kind of call under a profiler with the naming hook installed.

Arguments: rank, store file, output folder. Leaves ``trace<rank>.json`` (hook installed), ``after<rank>.json`` (hook
uninstalled again) and ``facts<rank>.json``.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.profiler import ProfilerActivity, profile

from traceanalyzer.collectors import naming

dist: Any = distributed  # the stubs of torch do not know all that is called here
PG = cast(Any, torch._C)._distributed_c10d.ProcessGroup


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def cases(rank: int, tp: Any) -> dict[str, Callable[[], object]]:
    other = 1 - rank
    bf16 = torch.bfloat16

    def send_recv() -> None:
        if rank == 0:
            dist.send(torch.ones(6), dst=1, group=tp)
        else:
            dist.recv(torch.empty(6), src=0, group=tp)

    def any_source() -> None:
        if rank == 0:
            dist.send(torch.ones(2), dst=1)
        else:
            dist.recv(torch.empty(2))

    def batch() -> None:
        operations = [
            dist.P2POp(dist.isend, torch.ones(3, dtype=bf16), other, group=tp),
            dist.P2POp(dist.irecv, torch.empty(3, dtype=bf16), other, group=tp),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def uneven() -> None:
        rows_in, rows_out = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
        out = torch.empty(sum(rows_out), 5)
        dist.all_to_all_single(out, torch.ones(sum(rows_in), 5), rows_out, rows_in, group=tp)

    def merged(call: Callable[[int], object], is_async: bool) -> None:
        with dist._coalescing_manager(group=tp, async_ops=is_async) as manager:
            call(10)
            call(20)
        if is_async:
            manager.wait()

    lists = [[torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(4)]]
    return {
        "all_reduce": lambda: dist.all_reduce(torch.ones(10)),
        "all_reduce_async": lambda: dist.all_reduce(
            torch.ones(7, dtype=bf16), op=dist.ReduceOp.MAX, group=tp, async_op=True
        ).wait(),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=tp),
        "all_gather_list": lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=tp),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), group=tp),
        "reduce_scatter_list": lambda: dist.reduce_scatter(torch.empty(4), lists[0], group=tp),
        "all_to_all_even": lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), group=tp),
        "all_to_all_uneven": uneven,
        "all_to_all_list": lambda: dist.all_to_all(lists[0], lists[1], group=tp),
        "broadcast": lambda: dist.broadcast(torch.ones(5, dtype=torch.int64), src=1, group=tp),
        "reduce": lambda: dist.reduce(torch.ones(5), dst=1, group=tp),
        "gather": lambda: dist.gather(torch.ones(4), lists[0] if rank == 0 else None, dst=0, group=tp),
        "scatter": lambda: dist.scatter(torch.empty(4), lists[0] if rank == 1 else None, src=1, group=tp),
        "send_recv": send_recv,
        "any_source": any_source,
        "batch_isend_irecv": batch,
        "barrier": lambda: dist.barrier(group=tp),
        "coalesced_all_reduce": lambda: merged(lambda n: dist.all_reduce(torch.ones(n), group=tp), False),
        "coalesced_all_gather": lambda: merged(
            lambda n: dist.all_gather_into_tensor(torch.empty(2 * n), torch.ones(n), group=tp), True
        ),
        "coalesced_reduce_scatter": lambda: merged(
            lambda n: dist.reduce_scatter_tensor(torch.empty(n), torch.ones(2 * n), group=tp), True
        ),
        "direct": lambda: tp.allreduce(torch.ones(9), op=dist.ReduceOp.MIN).wait(),
        "backward": lambda: ReduceInBackward.apply(torch.ones(6, requires_grad=True)).sum().backward(),
        "functional": lambda: functional.all_reduce(torch.ones(3), "sum", tp).sum(),
    }


def main() -> None:
    rank, store, out = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tp = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    # A description that the profiler would not write as it is. (A double quote in it breaks the file by itself.)
    odd = dist.new_group([0, 1], group_desc="odd \\ \u00e9")
    alone = [dist.new_group([r], group_desc="ALONE") for r in range(2)][rank]
    before = dict(PG.__dict__)

    with naming.name_groups():
        calls = cases(rank, tp) | {
            "odd_description": lambda: dist.all_reduce(torch.ones(1), group=odd),
            "alone": lambda: dist.all_reduce(torch.ones(2), group=alone),
        }
        dist.all_reduce(torch.ones(1), group=tp)  # before the window: call 0 of the group
        with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
            for name, call in calls.items():
                with naming.mark(f"case {name}"):
                    call()
        profiler.export_chrome_trace(str(out / f"trace{rank}.json"))
        total = torch.tensor([rank + 1.0])
        dist.all_reduce(total)
        replaced = [name for name, value in PG.__dict__.items() if before.get(name) is not value]
        reason = naming.disabled_reason()

    restored = all(before[name] is value for name, value in PG.__dict__.items()) and len(before) == len(PG.__dict__)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as profiler:
        for call in cases(rank, tp).values():
            call()
    profiler.export_chrome_trace(str(out / f"after{rank}.json"))
    facts = {"replaced": sorted(replaced), "restored": restored, "reason": reason, "total": total.tolist()}
    (out / f"facts{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
