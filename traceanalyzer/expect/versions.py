"""Which release of megatron-core (and of Megatron-LM's training loop) changed which traffic. The only home of it.

A release is its first two numbers, (0, 16) for "0.16.1": no patch release is known to have changed traffic. Every entry
was read in the tags core_v0.4.0 ... core_v0.19.0 of NVIDIA/Megatron-LM at the place its comment names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from traceanalyzer.errors import JobError

Release = tuple[int, int]

KNOWN: tuple[Release, ...] = tuple((0, minor) for minor in range(4, 20))
"""Releases that were read. Older ones are treated like the first, newer ones like the last."""

SINCE: dict[str, Release] = {
    # tensor_parallel/layers.py: VocabParallelEmbedding(reduce_scatter_embeddings); before: all-reduce, then a slice
    "embedding reduce-scatter": (0, 8),
    # parallel_state.py: expert grid and ETP; before, an expert's tensor traffic ran on the tensor-parallel group
    "expert grid": (0, 10),
    # transformer/attention.py: num_query_groups < world_size; before, such a job does not start
    "fewer query groups than TP": (0, 16),
    # optimizer/optimizer.py: MegatronOptimizer is always chained, and chained optimizers share one norm
    "one gradient norm": (0, 12),
    # optimizer/__init__.py: intra_dist_opt_group; before, the default group
    "distributed-optimizer group": (0, 13),
    # training/training.py, train_step: logical_and_across_model_parallel_group; training_log: learning rate
    "scalars over model parallel": (0, 11),
    # pretrain_gpt.py, loss_func: the all-reduce per micro-batch left it; training.py sums once per step
    "loss once per step": (0, 13),
    # pretrain_gpt.py, loss_func: (loss sum, tokens) instead of the mean
    "loss sum and tokens": (0, 7),
    # training/arguments.py: --rerun-mode defaults to validate_results
    "rerun by default": (0, 14),
    # training/utils.py: get_batch_on_this_tp_rank
    "batch per tensor": (0, 5),
    # pretrain_gpt.py, get_batch: first and last stage without regard to the model chunk ...
    "batch for every chunk": (0, 13),
    # ... until vp_stage came back
    "batch for its chunk": (0, 15),
    # training/utils.py: two broadcasts of cu_seqlens beside the tensors, and two more at the end of the function ...
    "cu_seqlens": (0, 16),
    # ... which 0.17 dropped; core/utils.py of 0.18 sends them for packed sequences only
    "cu_seqlens once": (0, 17),
    "cu_seqlens for packed only": (0, 18),
}
"""Behaviour -> the first release that has it."""


def parse(text: str) -> Release:
    """The release that a version string names: "0.16.1", "core_v0.16.1", "0.14.0rc5" -> (0, 16), (0, 16), (0, 14).

    Raises JobError for a string without two numbers.
    """
    found = re.search(r"(\d+)\.(\d+)", text)
    if found is None:
        raise JobError(f"megatron_core_version={text!r}: a version has at least two numbers, e.g. 0.16.1")
    return int(found[1]), int(found[2])


def label(release: Release) -> str:
    """A release in words: "0.16", and for one that was not read, whose rules stand for it: "0.25 (rules of 0.19)"."""
    nearest = min(max(release, KNOWN[0]), KNOWN[-1])
    return _text(release) if release in KNOWN else f"{_text(release)} (rules of {_text(nearest)}, the nearest known)"


def since(release: Release, behaviour: str) -> bool:
    """Whether ``release`` has ``behaviour``, a key of SINCE."""
    return release >= SINCE[behaviour]


def span(releases: Iterable[Release]) -> str:
    """Words for releases out of KNOWN: "<=0.10", "0.11-0.12", "0.12", ">=0.13", "all"; a gap gives two, with a comma."""
    runs: list[list[Release]] = []
    for release in sorted(releases):
        if runs and KNOWN.index(release) == KNOWN.index(runs[-1][-1]) + 1:
            runs[-1].append(release)
        else:
            runs.append([release])
    return ", ".join(_run(run[0], run[-1]) for run in runs)


def _run(first: Release, last: Release) -> str:
    if first == KNOWN[0] and last == KNOWN[-1]:
        return "all"
    if first == KNOWN[0]:
        return f"<={_text(last)}"
    if last == KNOWN[-1]:
        return f">={_text(first)}"
    return _text(first) if first == last else f"{_text(first)}-{_text(last)}"


def from_on(behaviour: str) -> str:
    """Words for the releases that have ``behaviour``: ">=0.13"."""
    return f">={_text(SINCE[behaviour])}"


def before(behaviour: str) -> str:
    """Words for the releases that do not have ``behaviour`` yet: "<=0.12"."""
    return f"<={_text(max(release for release in KNOWN if release < SINCE[behaviour]))}"


def between(first: str, behind: str) -> str:
    """Words for the releases that have ``first`` and do not have ``behind`` yet: "0.13-0.14"."""
    return span(release for release in KNOWN if SINCE[first] <= release < SINCE[behind])


def _text(release: Release) -> str:
    return f"{release[0]}.{release[1]}"
