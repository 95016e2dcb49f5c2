# ruff: noqa: E501 (screens are as wide as they are)
"""traceanalyzer diff: the recorded run on the screen, formats, files, refusals and exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import Result

from traceanalyzer import schema
from traceanalyzer.importers import import_traces
from traceanalyzer.job import read_job

FIXTURE = Path(__file__).resolve().parents[2] / "fixtures" / "megatron_tp2_sp"

RunCli = Callable[..., Result]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The recorded run, its job inside."""
    out = tmp_path_factory.mktemp("recorded") / "run.parquet"
    job = read_job(FIXTURE / "job.toml").to_json()
    import_traces([FIXTURE / f"rank{r}.json.gz" for r in (0, 1)], out, metadata={schema.META_JOB_INTENDED: job})
    return out


@pytest.fixture
def run(recorded: Path, tmp_path: Path) -> Path:
    """The recorded run as run.parquet of the folder that commands run in."""
    (tmp_path / "run.parquet").symlink_to(recorded)
    return Path("run.parquet")


@pytest.fixture
def job_file(tmp_path: Path) -> Callable[..., Path]:
    """The fixture's job file with lines replaced."""

    def write(**changes: object) -> Path:
        lines = (FIXTURE / "job.toml").read_text(encoding="utf-8").splitlines()
        kept = [line for line in lines if line.split(" = ")[0] not in changes]
        kept += [f"{name} = {json.dumps(value)}" for name, value in changes.items()]
        path = tmp_path / "job.toml"
        path.write_text("\n".join(kept) + "\n", encoding="utf-8")
        return path

    return write


SCREEN = """\
run.parquet
job       2 layers, hidden 64, seq 32, micro-batch 2, 2 micro-batches, TP2 + SP, bf16 (intended)
run       2 of 2 ranks, step 1
coverage  118 calls, 100 % of bytes with a role, 100 % judged
roles by  description 118
rules     megatron 0.16

                                                                                                    calls        off-rank
#  role   phase      operation       what                                           type      each    exp  meas  expected  measured     time  bus bw >=  verdict
1  tp     forward    all_gather      attention.qkv, mlp.fc1, output layer           bf16     8 KiB     10    10    40 KiB    40 KiB  9.61 ms  4.26 MB/s  match
2  tp     forward    reduce_scatter  embedding, attention.proj, mlp.fc2             bf16     8 KiB     10    10    40 KiB    40 KiB  11.8 ms  3.46 MB/s  match
3  tp     forward    all_reduce      loss: max, predicted logit, sum of             f32      256 B      6     6   1.5 KiB   1.5 KiB   3.6 ms   426 kB/s  match
                                     exponentials
4  tp     backward   all_gather      mlp.fc2; attention.proj; embedding; input      bf16     8 KiB     20    20    80 KiB    80 KiB  17.5 ms  4.69 MB/s  match
                                     re-gather of output layer, mlp.fc1,
                                     attention.qkv
5  tp     backward   reduce_scatter  output layer, mlp.fc1, attention.qkv           bf16     8 KiB     10    10    40 KiB    40 KiB  11.5 ms  3.58 MB/s  match
6  tp     other      all_reduce      norm gradients                                 f32   1.25 KiB      1     1  1.25 KiB  1.25 KiB  2.21 ms   580 kB/s  match
7  dp_cp  other      all_reduce      gradients                                      f32    289 KiB      1     1       0 B       0 B  49.9 us          -  match
8  mp     optimizer  all_reduce      gradient norm                                  f32        4 B      1     1       4 B       4 B   384 us  10.4 kB/s  match

4  avoidable 40 KiB off-rank a step   sp_input_regather: no setting removes it
6  avoidable 640 B off-rank a step   fp32_reduction: --grad-reduce-in-bf16 removes it

match   59 calls per rank and step explained, 0 missing, 0 unexpected   40.6 KiB avoidable   exit 0
"""


def test_the_recorded_run(run_cli: RunCli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe, without COLUMNS: 160 columns. Times are those of the recording."""
    monkeypatch.delenv("COLUMNS")
    found = run_cli("diff", run)
    assert found.stdout == SCREEN
    assert (found.stderr, found.exit_code) == ("", 0)


def test_columns_says_how_wide(run_cli: RunCli, run: Path) -> None:
    """run_cli sets 80."""
    found = run_cli("diff", run)
    assert max(map(len, found.stdout.splitlines())) <= 80
    assert "1 tp    forward all_gather             bf16    8 KiB    10   10   40 KiB match" in found.stdout


def test_exact(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "--exact")
    assert "1 tp    forward all_gather            bf16   8,192 B    10   10 40,960 B match" in found.stdout
    assert "KiB" not in found.stdout.split("avoidable")[0]


def test_explain(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "--explain", "8")
    assert (
        found.stdout.split("\nrow 8", 1)[1]
        == """\
: mp / optimizer / all_reduce
  gradient norm   1 call a step
    in        1 elements = 4 B f32
    off-rank  2(N-1)/N * in = 2*1/2 * in = 4 B
    calls     1 per step
    source    run: megatron-core 0.16.1 recorded: dp2, dp2_distopt,
              ep2_alltoall, w1024_*; optimizer/clip_grads.py: get_grad_norm_fp32

match   59 calls per rank and step explained, 0 missing, 0 unexpected   40.6 KiB
avoidable   exit 0
"""
    )


def test_explain_a_row_that_is_not_there(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "--explain", "9")
    assert found.exit_code == 2
    assert found.stdout == ""
    assert found.stderr.splitlines()[-1] == (
        "Error: Invalid value for --explain: rows are numbered 1 to 8, there is no row 9."
    )


@pytest.mark.parametrize("form", ["json", "markdown"])
def test_explain_goes_with_the_table(run_cli: RunCli, run: Path, form: str) -> None:
    found = run_cli("diff", run, "--explain", "1", "--format", form)
    assert (found.exit_code, found.stderr.splitlines()[-1]) == (2, "Error: --explain goes with --format table.")


def test_json(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "--format", "json")
    document = json.loads(found.stdout)
    assert (document["schema"], document["verdict"], document["source"]) == (
        "traceanalyzer.diff/1",
        "match",
        "run.parquet",
    )
    assert [
        (c["role"], c["phase"], c["op"], c["calls_measured"], c["off_rank_bytes_measured"]) for c in document["cells"]
    ] == [
        ("tp", "forward", "all_gather", 10, 40960),
        ("tp", "forward", "reduce_scatter", 10, 40960),
        ("tp", "forward", "all_reduce", 6, 1536),
        ("tp", "backward", "all_gather", 20, 81920),
        ("tp", "backward", "reduce_scatter", 10, 40960),
        ("tp", "other", "all_reduce", 1, 1280),
        ("dp_cp", "other", "all_reduce", 1, 0),
        ("mp", "optimizer", "all_reduce", 1, 4),
    ]


def test_markdown_into_a_file(run_cli: RunCli, run: Path, tmp_path: Path) -> None:
    found = run_cli("diff", run, "--format", "markdown", "-o", "diff.md")
    assert (found.stdout, found.exit_code) == ("", 0)
    text = (tmp_path / "diff.md").read_text(encoding="utf-8")
    assert text.startswith(
        "**match**: 2 layers, hidden 64, seq 32, micro-batch 2, 2 micro-batches, TP2 + SP, bf16; 2 of 2 ranks"
    )
    assert text.count("\n|") == 10


def test_the_table_into_a_file(run_cli: RunCli, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same text as in a pipe, whatever the terminal."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run_cli("diff", run, "-o", "diff.txt").stdout == ""
    assert (tmp_path / "diff.txt").read_text(encoding="utf-8") == SCREEN


def test_a_file_that_cannot_be_written(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "-o", "nowhere/diff.txt")
    assert (found.exit_code, found.stderr) == (2, "Error: nowhere/diff.txt: No such file or directory.\n")


# -- exit codes ------------------------------------------------------------------------------------------------------


def test_something_differs(run_cli: RunCli, run: Path, job_file: Callable[..., Path]) -> None:
    found = run_cli("diff", run, "--job", job_file(num_layers=3))
    assert found.exit_code == 1
    assert found.stdout.splitlines()[-2].startswith("differs   rows: 5 missing")


def test_a_tolerance_lets_it_pass(run_cli: RunCli, run: Path, job_file: Callable[..., Path]) -> None:
    assert run_cli("diff", run, "--job", job_file(global_batch_size=8), "--tolerance", "0.4").exit_code == 1
    assert run_cli("diff", run, "--job", job_file(global_batch_size=8), "--tolerance", "0.5").exit_code == 0


def test_what_cannot_be_judged(run_cli: RunCli, run: Path, job_file: Callable[..., Path]) -> None:
    job = job_file(decoder_seq_length=8)
    found = run_cli("diff", run, "--job", job)
    assert found.exit_code == 3
    assert "unknown: not modelled: decoder_seq_length" in found.stdout
    assert run_cli("diff", run, "--job", job, "--min-coverage", "0").exit_code == 0


def test_the_documents_rules(run_cli: RunCli, run: Path) -> None:
    found = run_cli("diff", run, "--rules", "document")
    assert found.exit_code == 1
    assert "sp_input_regather (proven)" in found.stdout


def test_refusals(run_cli: RunCli, run: Path, tmp_path: Path, job_file: Callable[..., Path]) -> None:
    (tmp_path / "text.parquet").write_text("no Parquet", encoding="utf-8")
    (tmp_path / "short.toml").write_text("tensor_model_parallel_size = 2\n", encoding="utf-8")
    for arguments, words in {
        ("nothing.parquet",): "nothing.parquet: no such file, folder or glob.",
        ("text.parquet",): "text.parquet: cannot be read as Parquet",
        (run, "--job", "nothing.toml"): "Invalid value for '--job': File 'nothing.toml' does not exist.",
        (run, "--job", "short.toml"): "the job does not say",
        (run, "--job", job_file(world_size=1, tensor_model_parallel_size=1, sequence_parallel=False)): (
            "world_size=1: the run holds rank 1."
        ),
        (run, "--min-coverage", "2"): "Invalid value for '--min-coverage'",
        (run, "--tolerance", "-1"): "Invalid value for '--tolerance'",
        (run, "--rules", "other"): "Invalid value for '--rules'",
    }.items():
        found = run_cli("diff", *arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert words in found.stderr
        assert "Traceback" not in found.stderr


def test_a_run_without_a_job(run_cli: RunCli, tmp_path: Path) -> None:
    import_traces([FIXTURE / "rank0.json.gz"], tmp_path / "bare.parquet")
    found = run_cli("diff", "bare.parquet")
    assert (found.exit_code, found.stderr) == (
        2,
        "Error: bare.parquet: no job is known for this run, so nothing can be expected of it. Give --job FILE (TOML, YAML, a Megatron log or command line).\n",
    )


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-o", "run.parquet"], "-o run.parquet: this file is read by the same command. Give another name."),
        (["--tolerance", "nan"], "Invalid value for --tolerance: must be a finite number."),
        (["--tolerance", "inf"], "Invalid value for --tolerance: must be a finite number."),
    ],
)
def test_options_that_are_refused(run_cli: RunCli, run: Path, arguments: list[str], words: str) -> None:
    done = run_cli("diff", str(run), *arguments)
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (2, f"Error: {words}")


def test_a_release_that_nobody_read_is_named(run_cli: RunCli, run: Path, job_file: Callable[..., Path]) -> None:
    done = run_cli("diff", str(run), "--job", str(job_file(megatron_core_version="0.25")))
    assert "megatron 0.25 (rules of 0.19, the nearest known)" in " ".join(done.stdout.split())


def test_links_add_the_time_at_measured_bandwidths(run_cli: RunCli, run: Path, tmp_path: Path) -> None:
    """A cell of n calls of b bytes on two ranks of one host: an all-gather moves half of each over 1 GB/s, 1 byte a ns."""
    (tmp_path / "links.toml").write_text('[[link]]\nop = "all_gather"\ngb_per_s = 1\n')
    cells = json.loads(run_cli("diff", str(run), "--links", "links.toml", "--format", "json").stdout)["cells"]
    gathers = [c for c in cells if c["op"] == "all_gather"]
    assert len(gathers) > 1
    for cell in gathers:
        assert cell["link_time_ns"] == cell["calls_measured"] * cell["payload_bytes_each"] // 2
    assert {c["link_time_ns"] for c in cells if c["op"] != "all_gather"} == {None}
    run_cli("diff", str(run), "--links", "links.toml", "-o", "table.txt")
    assert "at links'" in (tmp_path / "table.txt").read_text(encoding="utf-8")
    markdown = run_cli("diff", str(run), "--links", "links.toml", "--format", "markdown").stdout
    assert "| at the links' bandwidth |" in markdown
    assert "link_time_ns" not in run_cli("diff", str(run), "--format", "json").stdout
