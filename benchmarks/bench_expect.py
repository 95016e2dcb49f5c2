"""How long ``traceanalyzer expect`` takes for jobs of 1,024 and 16,384 ranks, start of Python included.

    make bench
    python benchmarks/bench_expect.py [--json OUT]

Each command runs five times in a process of its own, and its CPU seconds count, of which the fewest, for the machine may be
busy. The limit that must hold decides the exit code: under a second, whether or not the job states its release of
megatron-core (without it, every release is worked out), with 4 and with 16 pipeline stages.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

LIMIT_S = 1.0
RUNS = 5

JOB = """\
tensor_model_parallel_size = 4
sequence_parallel = true
context_parallel_size = 2
expert_model_parallel_size = 8
num_experts = 64
moe_layer_freq = 4
moe_token_dispatcher_type = "alltoall"
num_layers = 80
hidden_size = 8192
ffn_hidden_size = 32768
num_attention_heads = 64
seq_length = 8192
micro_batch_size = 2
num_microbatches = 8
swiglu = true
add_bias_linear = false
normalization = "RMSNorm"
position_embedding_type = "rope"
padded_vocab_size = 32000
untie_embeddings_and_output_weights = true
bf16 = true
use_distributed_optimizer = true
"""


def main() -> int:
    """0: all under the limit. 1: one is not."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", type=Path, metavar="OUT", help="write the results here")
    out = parser.parse_args().json
    results = []
    with tempfile.TemporaryDirectory() as folder:
        for world, stages in ((1024, 4), (16384, 4), (16384, 16)):
            for release in ("0.16.1", None):
                stated = f'megatron_core_version = "{release}"\n' if release else ""
                sizes = f"world_size = {world}\npipeline_model_parallel_size = {stages}\n"
                path = Path(folder) / "job.toml"
                path.write_text(f"{sizes}{stated}{JOB}", encoding="utf-8")
                seconds = min(_seconds(path) for _ in range(RUNS))
                results.append({"world_size": world, "stages": stages, "release": release, "cpu_s": round(seconds, 3)})
                words = f"release {release}" if release else "every release"
                sys.stdout.write(f"{world:>6,} ranks, {stages:>2} stages, {words:<16} {seconds:.2f} s CPU\n")
    if out is not None:
        out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    slow = [one for one in results if float(str(one["cpu_s"])) >= LIMIT_S]
    sys.stdout.write(f"limit {LIMIT_S:.0f} s: {'exceeded' if slow else 'kept'}\n")
    return 1 if slow else 0


def _seconds(job: Path) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-P", "-m", "traceanalyzer", "expect", str(job)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


if __name__ == "__main__":
    raise SystemExit(main())
