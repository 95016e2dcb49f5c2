"""Every query at ten times the rows: linear growth, and how long each takes.

    make bench
    python benchmarks/bench_queries.py [--ranks 8] [--kernels 4000] [--query NAME ...] [--json OUT]

Three runs are generated: a small one, one with ten times the events on each rank, and one with ten times the ranks. Each is
opened in a process of its own, which asks every query with nothing prepared: the time includes the tables that the query
needs (docs/queries.md), and the faster of two askings counts, for the machine may be busy. The limit that must hold decides
the exit code: ten times the rows take at most 14 times the time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from traceanalyzer import schema
from traceanalyzer.importers.spool import RunWriter
from traceanalyzer.job import Job

LIMIT = 14.0
STEPS = 4
START_NS = 1_790_857_026_000_000_000

# what, role, operation, share: of twenty kernels five communicate
_MIX: tuple[tuple[str, str | None, str | None], ...] = (
    *((("gemm", None, None),) * 7),
    *((("elementwise", None, None),) * 5),
    *((("norm", None, None), ("attention", None, None), ("copy", None, None))),
    ("comm", "tp", "all_gather"),
    ("comm", "tp", "reduce_scatter"),
    ("comm", "ep", "all_to_all"),
    ("comm", "pp", "send"),
    ("comm", "dp_cp", "all_reduce"),
)
_DESCRIPTION = {
    "tp": "TENSOR_MODEL_PARALLEL_GROUP",
    "ep": "EXPERT_MODEL_PARALLEL_GROUP",
    "pp": "PIPELINE_MODEL_PARALLEL_GROUP",
    "dp_cp": "DATA_PARALLEL_GROUP_WITH_CP",
}

_ASK = """
import json, sys, time
from traceanalyzer.queries import Library, library
from traceanalyzer.run import Run
with Run.open(sys.argv[1], threads=2) as run:
    job = Library.of(run).job
    for name in sys.argv[2].split(","):
        times = []
        for _ in range(2):
            start = time.perf_counter()
            rows = len(Library(run, job).ask(name))
            times.append(time.perf_counter() - start)
        print(json.dumps({"query": name, "rows": rows, "wall_s": min(times)}), flush=True)
"""


def _groups(rank: int, ranks: int) -> dict[str, list[int]]:
    """Groups of a rank in blocks of eight: TP and EP of 4, PP of 2 across the block, and everyone's own stage for DP."""
    block, place = rank // 8 * 8, rank % 8
    return {
        "tp": [block + place // 4 * 4 + i for i in range(4)],
        "ep": [block + place // 4 * 4 + i for i in range(4)],
        "pp": [block + place % 4, block + place % 4 + 4],
        "dp_cp": list(range(place, ranks, 8)),
    }


def _rank_rows(rank: int, ranks: int, kernels: int) -> dict[str, pa.Table]:
    """Rows of one rank by kind. Ranks come to each call at times of their own and leave it together."""
    mix = [_MIX[i % len(_MIX)] for i in range(kernels)]
    late = np.random.default_rng(rank).integers(0, 2_000, kernels)
    slot = np.arange(kernels, dtype=np.int64) * 10_000 + START_NS
    comm = np.array([what == "comm" for what, _, _ in mix])
    start = np.where(comm, slot + late, slot)
    end = np.where(comm, slot + 9_000, slot + 9_500)
    launch = start - 20_000 - late
    calls = np.flatnonzero(comm)
    coalesce = np.full(kernels, -1, np.int64)
    coalesce[calls] = np.arange(len(calls))
    roles = [mix[i][1] or "" for i in calls]
    ops = ["recv" if mix[i][2] == "send" and rank % 8 >= 4 else mix[i][2] for i in calls]
    seen: dict[str, int] = {}
    seq = [seen[role] for role in roles if seen.update({role: seen.get(role, -1) + 1}) is None]
    groups = _groups(rank, ranks)
    size = [len(groups[role]) for role in roles]
    elems = [4096 * s for s in size]
    out = [4096 if op == "reduce_scatter" else n for op, n in zip(ops, elems, strict=True)]
    inn = [4096 if op == "all_gather" else n for op, n in zip(ops, elems, strict=True)]
    splits = [[1024] * s if op == "all_to_all" else None for op, s in zip(ops, size, strict=True)]
    peer = [next(r for r in groups["pp"] if r != rank) if op in ("send", "recv") else None for op in ops]
    whole = (kernels * 10_000) // STEPS
    passes = np.arange(0, kernels, 20)
    marks = slot[passes] - 45_000

    def same(value: Any, count: int, kind: pa.DataType | None = None) -> pa.Array:
        return pa.array([value] * count, kind)

    def table(count: int, **columns: Any) -> pa.Table:
        return pa.table({"rank": same(rank, count, pa.int32()), "source": same("kineto", count), **columns})

    host = len(passes)
    return {
        "comm_record": table(
            len(calls),
            call_id=np.arange(len(calls)),
            coalesce_id=coalesce[calls],
            op=ops,
            group_id=roles,
            group_size=pa.array(size, pa.int32()),
            seq=pa.array(seq, pa.int64()),
            peer=pa.array(peer, pa.int32()),
            dtype=same("bfloat16", len(calls)),
            in_elems=pa.array(inn, pa.int64()),
            out_elems=pa.array(out, pa.int64()),
            in_splits=pa.array(splits, pa.list_(pa.int64())),
            out_splits=pa.array(splits, pa.list_(pa.int64())),
            start_ns=start[calls],
            dur_ns=(end - start)[calls],
            t_issue_ns=launch[calls],
            time_source=same("kernel", len(calls)),
            completeness=same("full", len(calls)),
        ),
        "cpu_op": table(
            kernels + host,
            name=pa.concat_arrays(
                [
                    same("cudaLaunchKernel", kernels),
                    pa.array(["nn.Module: Block", "autograd::engine::evaluate_function: M"] * (host // 2 + 1))[:host],
                ]
            ),
            category=pa.concat_arrays([same("cuda_runtime", kernels), same("cpu_op", host)]),
            start_ns=np.concatenate([launch, marks]),
            dur_ns=np.concatenate([np.full(kernels, 2_000), np.full(host, 150_000)]),
            tid=same(1, kernels + host, pa.int64()),
            correlation=pa.concat_arrays([pa.array(np.arange(kernels), pa.uint64()), same(None, host, pa.uint64())]),
        ),
        "kernel": table(
            kernels,
            device=same(0, kernels, pa.int32()),
            stream=pa.array(np.where(comm, 20, 7), pa.int64()),
            name=[f"{what}_{i % 40}" for i, (what, _, _) in enumerate(mix)],
            kernel_class=[what for what, _, _ in mix],
            start_ns=start,
            dur_ns=end - start,
            correlation=pa.array(np.arange(kernels), pa.uint64()),
            coalesce_id=pa.array(coalesce, mask=coalesce < 0),
        ),
        "process_group": table(
            len(groups),
            group_id=list(groups),
            description=[_DESCRIPTION[role] for role in groups],
            ranks=pa.array(list(groups.values()), pa.list_(pa.int32())),
        ),
        "rank": table(
            1,
            host=[f"node{rank // 8}"],
            device_name=["NVIDIA H100 80GB HBM3"],
            world_size=pa.array([ranks], pa.int32()),
            window_start_ns=[START_NS],
            window_end_ns=[int(slot[-1]) + 10_000],
            host_start_ns=[START_NS - 100_000],
        ),
        "span": table(
            STEPS,
            name=[f"ProfilerStep#{i}" for i in range(STEPS)],
            category=same("user_annotation", STEPS),
            start_ns=[START_NS + i * whole for i in range(STEPS)],
            dur_ns=[whole] * STEPS,
        ),
    }


def write_run(path: Path, ranks: int, kernels: int) -> int:
    """Writes a run of ``ranks`` ranks with ``kernels`` device activities each; gives its rows."""
    job = Job(
        world_size=ranks, tensor_model_parallel_size=4, pipeline_model_parallel_size=2, num_layers=8, hidden_size=1024,
        ffn_hidden_size=4096, num_attention_heads=16, seq_length=2048, micro_batch_size=1, num_microbatches=8,
        padded_vocab_size=32000, bf16=True,
    )  # fmt: skip
    every = [_rank_rows(rank, ranks, kernels) for rank in range(ranks)]
    with RunWriter(path, {schema.META_JOB_INTENDED: job.to_json()}) as out:
        for kind in sorted(every[0]):
            out.write(kind, [rows[kind] for rows in every])
        return sum(out.rows.values())


def ask(path: Path, names: list[str]) -> dict[str, dict[str, Any]]:
    """Time and rows of each query over one run, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(path), ",".join(names)], stdout=subprocess.PIPE, text=True, check=True
    )
    # DuckDB may show how far a long query has come among the results
    lines = (line[line.index("{") :] for line in done.stdout.splitlines() if "{" in line)
    return {found["query"]: found for found in map(json.loads, lines)}


def main() -> int:
    """0: every query within the limit. 1: one is not."""
    from traceanalyzer.queries import library

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=8, help="ranks of the small run, a multiple of 8")
    parser.add_argument("--kernels", type=int, default=4000, help="device activities of one rank of the small run")
    parser.add_argument("--query", action="append", metavar="NAME", help="only this query; may be given several times")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    options = parser.parse_args()
    names = options.query or list(library())
    sizes = {
        "small": (options.ranks, options.kernels),
        "10x events": (options.ranks, options.kernels * 10),
        "10x ranks": (options.ranks * 10, options.kernels),
    }
    found: dict[str, dict[str, dict[str, Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for size, (ranks, kernels) in sizes.items():
            path = Path(folder) / f"{size.replace(' ', '_')}.parquet"
            print(f"{size}: {ranks} ranks, {write_run(path, ranks, kernels):,} rows", flush=True)
            found[size] = ask(path, names)
            path.unlink()
    slow = []
    print(f"\n{'query':<26}{'small s':>9}{'10x events':>12}{'ratio':>7}{'10x ranks':>12}{'ratio':>7}")
    for name in names:
        small, events, ranks_s = (found[size][name]["wall_s"] for size in sizes)
        over = max(events, ranks_s) / small > LIMIT
        slow += [name] * over
        mark = f"  over {LIMIT:g}" if over else ""
        print(
            f"{name:<26}{small:>9.3f}{events:>12.3f}{events / small:>7.1f}{ranks_s:>12.3f}{ranks_s / small:>7.1f}{mark}"
        )
    print(
        f"\nlimit: 10 times the rows in at most {LIMIT:g} times the time: {'met' if not slow else ', '.join(slow) + ' over'}"
    )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1), encoding="utf-8")
    return 1 if slow else 0


if __name__ == "__main__":
    raise SystemExit(main())
