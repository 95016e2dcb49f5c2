"""``traceanalyzer query``: the list, one query in each format, and errors that help."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from traceanalyzer.queries import library

Cli = Callable[..., Result]
WriteRun = Callable[..., Path]


@pytest.fixture
def run(write_run: WriteRun) -> Path:
    """Three kernels of two names on one rank, without launches."""
    kernel = {"rank": 0, "source": "kineto", "device": 0, "start_ns": 0}
    return write_run(
        "run.parquet",
        {
            "kernel": [
                {**kernel, "name": "gemm", "kernel_class": "gemm", "dur_ns": 30},
                {**kernel, "name": "gemm", "kernel_class": "gemm", "dur_ns": 45},
                {**kernel, "name": "norm", "kernel_class": "norm", "dur_ns": 25},
            ],
            "rank": [{"rank": 0, "source": "kineto", "window_start_ns": 0, "window_end_ns": 45}],
        },
    )


def test_the_list(run_cli: Cli) -> None:
    done = run_cli("query", "--list")
    assert done.exit_code == 0
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[: len(library())]] == list(library())
    assert lines[-1].startswith("One of them: traceanalyzer query RUN NAME.")
    assert run_cli("query").stdout == done.stdout


def test_what_one_query_says_of_itself(run_cli: Cli) -> None:
    done = run_cli("query", "--list", "top_kernels")
    lines = done.stdout.splitlines()
    assert lines[:4] == [
        "top_kernels: One of the kernels on which a rank spends most time, by name.",
        "  --param top=20  BIGINT. Names per rank.",
        "  rank  INTEGER. Global rank. Null: the source does not say.",
        "  place  BIGINT. 1 for the name with most time on its rank; ties by name.",
    ]
    assert "  dur_ns  BIGINT, ns. Sum of their durations. Null: no duration was recorded." in lines


def test_a_table(run_cli: Cli, run: Path) -> None:
    done = run_cli("query", "run.parquet", "top_kernels")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout == (
        "rank  place  name  kernel_class  kernels  dur_ns  longest_ns  share\n"
        "----  -----  ----  ------------  -------  ------  ----------  -----\n"
        "   0      1  gemm  gemm                2      75          45   0.75\n"
        "   0      2  norm  norm                1      25          25   0.25\n"
        "2 rows\n"
    )


def test_parameters_and_csv(run_cli: Cli, run: Path) -> None:
    done = run_cli("query", "run.parquet", "top_kernels", "--param", "top=1", "--format", "csv")
    assert done.stdout == "rank,place,name,kernel_class,kernels,dur_ns,longest_ns,share\n0,1,gemm,gemm,2,75,45,0.75\n"


def test_json_in_a_file(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    done = run_cli("query", "run.parquet", "step_time", "--format", "json", "-o", "out.json", "--limit", "1")
    assert (done.exit_code, done.stdout) == (0, "")
    document = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert document["schema"] == "traceanalyzer.sql/1"
    assert document["columns"][:2] == [{"name": "rank", "type": "INTEGER"}, {"name": "step", "type": "BIGINT"}]
    assert document["rows"][0]["dur_ns"] == 45


def test_the_job_of_a_file(run_cli: Cli, run: Path, tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(
        "world_size = 1\nnum_layers = 1\nhidden_size = 8\nnum_attention_heads = 2\nseq_length = 4\nmicro_batch_size = 1\n"
        "padded_vocab_size = 16\nbf16 = true\n",
        encoding="utf-8",
    )
    done = run_cli(
        "query", "run.parquet", "throughput", "--job", "job.toml", "--param", "peak_tflops=0.5", "--format", "json"
    )
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["tokens"], row["peak_tflops"], row["reason"]) == (4, 0.5, None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["run.parquet"], "which query? traceanalyzer query --list names them."),
        (["run.parquet", "nonsense"], "no query 'nonsense'. There are: attribution_coverage, calls, "),
        (["run.parquet", "top_kernels", "--param", "top"], "--param top: must be NAME=VALUE."),
        (["run.parquet", "top_kernels", "--param", "top=x"], "query top_kernels: top=x: must be a BIGINT, or NULL."),
        (["run.parquet", "step_time", "--param", "top=1"], "query step_time: no parameter top. It has none."),
        (["run.parquet", "step_time", "-o", "run.parquet"], "this file is read by the same command"),
        (["absent.parquet", "step_time"], "absent.parquet: no such file"),
        (["--list", "nonsense"], "no query 'nonsense'"),
    ],
)
def test_what_cannot_be_asked(run_cli: Cli, run: Path, arguments: list[str], sentence: str) -> None:
    done = run_cli("query", *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_links_give_the_time_at_measured_bandwidths(run_cli: Cli, write_run: WriteRun, tmp_path: Path) -> None:
    """4000 bytes on 2 ranks of one host, 40 ns measured: 25 at 160 GB/s. One line of the file cannot be read."""
    size = {"dtype": "float32", "in_elems": 1000, "out_elems": 1000, "group_id": "1", "group_size": 2, "seq": 1}
    call = {"source": "kineto", "op": "all_reduce", "call_id": 0, "coalesce_id": 0, "time_source": "kernel", **size}
    time = {"start_ns": 100, "dur_ns": 40, "t_issue_ns": 90}
    write_run(
        "two.parquet",
        {
            "comm_record": [{"rank": r, **call, **time} for r in (0, 1)],
            "process_group": [{"rank": r, "source": "kineto", "group_id": "1", "ranks": [0, 1]} for r in (0, 1)],
            "rank": [{"rank": r, "source": "kineto", "host": "a"} for r in (0, 1)],
        },
    )
    (tmp_path / "links.csv").write_text("span,op,payload_bytes,gb_per_s\nintra,,,160\nintra,,,much\n")
    done = run_cli("query", "two.parquet", "collective_bandwidth", "--links", "links.csv", "--format", "json")
    assert (done.exit_code, done.stderr) == (0, "note: links.csv: 1 line could not be read (3)\n")
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["median_transfer_ns"], row["link_time_ns"], row["link_note"]) == (40, 25, "any size")
