"""One of two gloo processes: makes each kind of call with a session open.

Arguments: rank, store file, RUN_DIR, hooks (auto, methods, dispatcher). Leaves the log in RUN_DIR and
``facts<rank>.json``: for each case the numbers of its first call and of the one after its last, what was installed
before and after it, and its result.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as functional
from torch import distributed
from torch.distributed import all_reduce as early_all_reduce
from torch.distributed import init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from traceanalyzer.collectors import attach, hooks

dist: Any = distributed
PG = cast(Any, torch._C)._distributed_c10d.ProcessGroup
BF16 = torch.bfloat16


class ReduceInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total


def python_cases(rank: int, tp: Any) -> dict[str, Callable[[], Any]]:
    """Calls that Python issues."""
    other = 1 - rank
    lists = [[torch.ones(4), torch.ones(4)], [torch.ones(4), torch.ones(4)]]

    def reduced(call: Callable[..., Any]) -> list[float]:
        tensor = torch.full((10,), rank + 1.0)
        call(tensor)
        return cast(list[float], tensor.tolist())

    def isend_irecv() -> None:
        work = [dist.isend(torch.ones(6), other, group=tp), dist.irecv(torch.empty(6), other, group=tp)]
        for one in work:
            one.wait()

    def batch() -> None:
        operations = [
            dist.P2POp(dist.isend, torch.ones(3, dtype=BF16), other, group=tp),
            dist.P2POp(dist.irecv, torch.empty(3, dtype=BF16), other, group=tp),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def any_source() -> None:
        if rank == 0:
            dist.send(torch.ones(2), dst=1)
        else:
            dist.recv(torch.empty(2))

    def uneven() -> None:
        rows_in, rows_out = ([1, 2], [1, 3]) if rank == 0 else ([3, 1], [2, 1])
        out = torch.empty(sum(rows_out), 5)
        dist.all_to_all_single(out, torch.ones(sum(rows_in), 5), rows_out, rows_in, group=tp)

    def merged() -> None:
        with dist._coalescing_manager(group=tp, async_ops=True) as manager:
            dist.all_gather_into_tensor(torch.empty(20), torch.ones(10), group=tp)
            dist.all_gather_into_tensor(torch.empty(40), torch.ones(20), group=tp)
        manager.wait()

    def objects() -> list[Any]:
        found = [None, None]
        dist.all_gather_object(found, {"rank": rank})
        return found

    def inference() -> None:
        with torch.inference_mode():
            dist.all_reduce(torch.ones(3))

    def wrong() -> str:
        try:
            dist.group.WORLD.broadcast([torch.ones(3)], "no options", 1, 2, 3)
        except TypeError as error:
            return type(error).__name__
        return "no error"

    return {
        "all_reduce": lambda: reduced(dist.all_reduce),
        "all_reduce_max": lambda: dist.all_reduce(
            torch.ones(7, dtype=BF16), op=dist.ReduceOp.MAX, group=tp, async_op=True
        ).wait(),
        "all_gather": lambda: dist.all_gather([torch.empty(3), torch.empty(3)], torch.ones(3), group=tp),
        "all_gather_into_tensor": lambda: dist.all_gather_into_tensor(torch.empty(8), torch.ones(4), group=tp),
        "reduce_scatter": lambda: dist.reduce_scatter(torch.empty(4), lists[0], group=tp),
        "reduce_scatter_tensor": lambda: dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8), group=tp),
        "all_to_all": lambda: dist.all_to_all(lists[0], lists[1], group=tp),
        "all_to_all_single": lambda: dist.all_to_all_single(torch.empty(4), torch.ones(4), group=tp),
        "all_to_all_uneven": uneven,
        "broadcast": lambda: dist.broadcast(torch.ones(5, dtype=torch.int64), src=1, group=tp),
        "reduce": lambda: dist.reduce(torch.ones(5), dst=1, group=tp),
        "gather": lambda: dist.gather(torch.ones(4), lists[0] if rank == 0 else None, dst=0, group=tp),
        "scatter": lambda: dist.scatter(torch.empty(4), lists[0] if rank == 1 else None, src=1, group=tp),
        "early": lambda: reduced(early_all_reduce),
        "direct": lambda: tp.allreduce(torch.ones(9), op=dist.ReduceOp.MIN).wait(),
        "isend_irecv": isend_irecv,
        "batch_isend_irecv": batch,
        "any_source": any_source,
        "coalescing_manager": merged,
        "all_gather_object": objects,
        "barrier": lambda: dist.barrier(group=tp),
        "backward": lambda: ReduceInBackward.apply(torch.ones(6, requires_grad=True)).sum().backward(),
        "inference_mode": inference,
        "wrong_arguments": wrong,
    }


def native_cases(rank: int, tp: Any) -> dict[str, Callable[[], Any]]:
    """Calls that C++ issues, also."""
    torch.manual_seed(0)
    kept: dict[str, Any] = {}

    def layers() -> torch.nn.Module:
        return torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))

    def make_ddp() -> None:
        kept["ddp"] = DistributedDataParallel(layers(), process_group=tp)

    def step(name: str) -> list[float]:
        model = kept[name]
        model(torch.full((2, 4), rank + 1.0)).sum().backward()
        gradient = next(model.parameters()).grad
        gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient
        return cast(list[float], gradient.flatten().tolist())

    def make_fsdp() -> None:
        model = layers()
        kept["mesh"] = init_device_mesh("cpu", (2,))
        for layer in cast(Any, model):
            fully_shard(layer, mesh=kept["mesh"])
        kept["fsdp"] = fully_shard(model, mesh=kept["mesh"])

    def redistribute() -> list[float]:
        sharded = distribute_tensor(torch.arange(4.0), kept["mesh"], [Shard(0)])
        return cast(list[float], sharded.redistribute(placements=[Replicate()]).to_local().tolist())

    return {
        "functional": lambda: (functional.all_reduce(torch.full((3,), rank + 1.0), "sum", tp) + 0).tolist(),
        "functional_inference": lambda: torch.inference_mode()(
            lambda: (functional.all_gather_tensor(torch.ones(2), 0, tp) + 0).tolist()
        )(),
        "make_ddp": make_ddp,
        "ddp_step": lambda: step("ddp"),
        "make_fsdp2": make_fsdp,
        "fsdp2_step": lambda: step("fsdp"),
        "dtensor": redistribute,
    }


def main() -> None:
    rank, store, run_dir, mode = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]), sys.argv[4]
    before = dict(PG.__dict__)
    session = attach(run_dir, hooks=mode, marks=False) if mode != "none" else None
    init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    tp = dist.new_group([0, 1], group_desc="TENSOR_MODEL_PARALLEL_GROUP")
    dist.new_group([0, 1], group_desc="NEVER_USED")
    facts: dict[str, Any] = {"cases": {}}
    for name, case in (python_cases(rank, tp) | native_cases(rank, tp)).items():
        hook = hooks.current()
        first = hook.calls() if hook is not None else 0
        result = case()
        facts["cases"][name] = {
            "from": first,
            "to": hook.calls() if hook is not None else 0,
            "result": result if isinstance(result, (list, str)) else None,
            "dispatcher": hooks.report()["dispatcher"],
        }
    dist.destroy_process_group()
    init_process_group("gloo", init_method=f"file://{store}2", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if session is not None:
        session.close()
    facts["restored"] = all(PG.__dict__[name] is value for name, value in before.items())
    dist.all_reduce(torch.ones(1))
    facts["ddp_restored"] = DistributedDataParallel.__init__.__module__ == "torch.nn.parallel.distributed"
    (run_dir / f"facts{rank}.json").write_text(json.dumps(facts))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
