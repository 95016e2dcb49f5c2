# ruff: noqa: E501 (screens are as wide as they are)
"""The diff as a screen, as Markdown and as JSON, from results written out here."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from rich.cells import cell_len
from rich.console import Console

from traceanalyzer import causes
from traceanalyzer.causes import Cause
from traceanalyzer.diff import Coverage, Diff, JobConflict, ReleaseApart, Unattributed
from traceanalyzer.expect import CHAPTERS
from traceanalyzer.expect.model import Evidence, ExpectedCall
from traceanalyzer.job import Job
from traceanalyzer.matching import Cell, Spread
from traceanalyzer.reports import diff as report
from traceanalyzer.reports import diff_terminal

DOCS = Path(__file__).resolve().parents[2] / "docs" / "diff.md"

PROJ = ExpectedCall(
    rule="test",
    role="tp",
    op="all_reduce",
    phase="forward",
    component="attention.proj",
    dtype="bfloat16",
    in_elems=64,
    out_elems=64,
    group_size=2,
    calls=2,
    evidence=Evidence("run", "somewhere"),
    formula={"in": "S * B * H = 64 elements = 128 B bf16", "calls": "2 per step"},
)

CELL = Cell(
    role="tp",
    op="all_reduce",
    phase="forward",
    stage=0,
    dtype="bfloat16",
    group_size=2,
    payload_bytes_each=67_108_864,
    components=("attention.proj", "mlp.fc2"),
    calls_expected=80,
    calls_measured=80,
    payload_bytes_expected=5_368_709_120,
    payload_bytes_measured=5_368_709_120,
    off_rank_bytes_expected=Fraction(9_395_240_960),
    off_rank_bytes_measured=Fraction(9_395_240_960),
    avoidable_bytes=0,
    avoidable=(),
    verdict="match",
    expected=(PROJ,),
    role_evidence=("layout and call_path",),
    time_ns=372_000_123,
    exposed_ns=3_100_000,
    ranks=(0, 1),
    steps=(3,),
)
LOSS = replace(
    CELL,
    dtype="float32",
    components=("loss: max", "loss: predicted logit", "loss: sum of exponentials"),
    payload_bytes_each=32_768,
    calls_expected=3,
    calls_measured=3,
    off_rank_bytes_expected=Fraction(172_032),
    off_rank_bytes_measured=Fraction(172_032),
    time_ns=None,
    exposed_ns=None,
)
REPEATED = Cause("recompute_full", "16 forward calls are repeated.", "likely")
EXTRA = replace(
    CELL,
    phase="recompute",
    op="all_gather",
    components=(),
    calls_expected=0,
    calls_measured=8,
    verdict="unexpected",
    cause=REPEATED,
    related=(1,),
    expected=(),
)
SCATTERED = replace(EXTRA, op="reduce_scatter", related=(0,), ranks=(1,))
UNKNOWN = replace(
    CELL,
    role=None,
    op="all_to_all",
    payload_bytes_each=None,
    calls_expected=None,
    off_rank_bytes_expected=None,
    off_rank_bytes_measured=None,
    verdict="unknown",
    reason="role unknown",
    components=(),
    expected=(),
    role_evidence=(),
)
GATHERS = replace(
    CELL,
    phase="backward",
    op="all_gather",
    components=("output layer input re-gather", "mlp.fc2", "mlp.fc1 input re-gather"),
    avoidable_bytes=1_509_949_440,
    avoidable=(("sp_input_regather", ""), ("recompute_repeats_collectives", "recompute_granularity selective")),
)

COVERAGE = Coverage(
    ranks_present=(0, 1),
    ranks_declared=2,
    steps=(3,),
    step_evidence=("profiler_step",),
    calls=168,
    calls_outside_steps=0,
    kernels=166,
    kernels_attributed=166,
    kernels_before_window=0,
    bytes_known=1000,
    bytes_attributed=1000,
    calls_of_unknown_bytes=0,
    kernel_time_ns=744_000_246,
    kernel_time_attributed_ns=744_000_246,
    role_evidence=(("layout and call_path", 166),),
    attributed=1.0,
    judged=1.0,
    unattributed=(),
    import_status="complete",
)

JOB = Job(
    megatron_core_version="0.16.1",
    world_size=2,
    tensor_model_parallel_size=2,
    num_layers=40,
    hidden_size=4096,
    seq_length=2048,
    micro_batch_size=4,
    bf16=True,
)

MATCH = Diff(
    source="run.parquet",
    job=JOB,
    job_used="intended",
    rules="megatron",
    version="0.16",
    versions_tried=("0.16",),
    cells=(CELL, LOSS),
    coverage=COVERAGE,
    job_conflicts=(),
    not_in_window=("backward", "optimizer"),
    verdict="match",
    min_coverage=0.99,
    tolerance=0.0,
)
DIFFERS = replace(MATCH, cells=(EXTRA, SCATTERED, UNKNOWN, CELL, LOSS, GATHERS), verdict="differs", not_in_window=())


def screen(found: Diff, width: int, **options: Any) -> str:
    """The screen at this width, without colour."""
    console = Console(width=width, no_color=True, color_system=None, force_terminal=False, highlight=False)
    with console.capture() as captured:
        console.print(diff_terminal.render(found, width=width, **options))
    return "\n".join(line.rstrip() for line in captured.get().splitlines()) + "\n"


# -- the screen ------------------------------------------------------------------------------------------------------


def test_160_columns() -> None:
    """Every column."""
    assert (
        screen(MATCH, 160)
        == """\
run.parquet
job       40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16 (intended)
run       2 of 2 ranks, step 3
coverage  166 of 166 communication kernels, 168 calls, 100 % of bytes with a role, 100 % judged
roles by  layout and call_path 166
rules     megatron 0.16

                                                                                            calls        off-rank
#  role  phase    operation   what                                            type    each    exp  meas  expected  measured    time  exposed  bus bw >=  verdict
1  tp    forward  all_reduce  attention.proj, mlp.fc2                         bf16  64 MiB     80    80  8.75 GiB  8.75 GiB  372 ms   3.1 ms  25.3 GB/s  match
2  tp    forward  all_reduce  loss: max, predicted logit, sum of              f32   32 KiB      3     3   168 KiB   168 KiB       -        -          -  match
                              exponentials

-  not in the window: backward, optimizer (the recording holds no work of these phases)

match   83 calls per rank and step explained, 0 missing, 0 unexpected   exit 0
"""
    )


def test_100_columns() -> None:
    """Phase, operation and what share a column; ranks that differ are named there."""
    assert (
        screen(DIFFERS, 100)
        == """\
run.parquet
job       40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16 (intended)
run       2 of 2 ranks, step 3
coverage  166 of 166 communication kernels, 168 calls, 100 % of bytes with a role, 100 % judged
roles by  layout and call_path 166
rules     megatron 0.16

                                                         calls        off-rank
#  role  what                              type    each    exp  meas  expected  measured  verdict
1  tp    recompute all_gather              bf16  64 MiB      0     8  8.75 GiB  8.75 GiB  unexpected
2  tp    recompute reduce_scatter          bf16  64 MiB      0     8  8.75 GiB  8.75 GiB  unexpected
         rank 1
3  ?     forward all_to_all                bf16  varies      -    80         -   unknown  unknown
4  tp    forward all_reduce                bf16  64 MiB     80    80  8.75 GiB  8.75 GiB  match
         attention.proj, mlp.fc2
5  tp    forward all_reduce                f32   32 KiB      3     3   168 KiB   168 KiB  match
         loss: max, predicted logit, sum
         of exponentials
6  tp    backward all_gather               bf16  64 MiB     80    80  8.75 GiB  8.75 GiB  match
         mlp.fc2; input re-gather of
         output layer, mlp.fc1

1-2  recompute_full (likely)  16 forward calls are repeated.
3    unknown: role unknown
6    avoidable 1.41 GiB off-rank a step   sp_input_regather: no setting removes it;
     recompute_repeats_collectives: recompute_granularity selective removes it

differs   rows: 2 unexpected, 1 unknown   1.41 GiB avoidable   exit 1   --explain N shows the
formula of row N
"""
    )


def test_80_columns() -> None:
    """What a verdict needs."""
    assert (
        screen(DIFFERS, 80)
        == """\
run.parquet
job       40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16 (intended)
run       2 of 2 ranks, step 3
coverage  166 of 166 communication kernels, 168 calls, 100 % of bytes with a
          role, 100 % judged
roles by  layout and call_path 166
rules     megatron 0.16

                                                  calls      off-rank
# role what                           type   each   exp meas measured verdict
1 tp   recompute all_gather           bf16 64 MiB     0    8 8.75 GiB unexpected
2 tp   recompute reduce_scatter       bf16 64 MiB     0    8 8.75 GiB unexpected
       rank 1
3 ?    forward all_to_all             bf16 varies     -   80  unknown unknown
4 tp   forward all_reduce             bf16 64 MiB    80   80 8.75 GiB match
       attention.proj, mlp.fc2
5 tp   forward all_reduce             f32  32 KiB     3    3  168 KiB match
       loss: max, predicted logit,
       sum of exponentials
6 tp   backward all_gather            bf16 64 MiB    80   80 8.75 GiB match
       mlp.fc2; input re-gather of
       output layer, mlp.fc1

1-2  recompute_full (likely)  16 forward calls are repeated.
3    unknown: role unknown
6    avoidable 1.41 GiB off-rank a step   sp_input_regather: no setting removes
     it; recompute_repeats_collectives: recompute_granularity selective removes
     it

differs   rows: 2 unexpected, 1 unknown   1.41 GiB avoidable   exit 1
--explain N shows the formula of row N
"""
    )


def test_80_columns_exact() -> None:
    """To the last byte."""
    assert (
        screen(MATCH, 80, exact=True)
        == """\
run.parquet
job       40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16 (intended)
run       2 of 2 ranks, step 3
coverage  166 of 166 communication kernels, 168 calls, 100 % of bytes with a
          role, 100 % judged
roles by  layout and call_path 166
rules     megatron 0.16

                                              calls             off-rank
# role what                 type         each   exp meas        measured verdict
1 tp   forward all_reduce   bf16 67,108,864 B    80   80 9,395,240,960 B match
       attention.proj,
       mlp.fc2
2 tp   forward all_reduce   f32      32,768 B     3    3       172,032 B match
       loss: max, predicted
       logit, sum of
       exponentials

-  not in the window: backward, optimizer (the recording holds no work of these
   phases)

match   83 calls per rank and step explained, 0 missing, 0 unexpected   exit 0
"""
    )


@pytest.mark.parametrize("width", [60, 72, 80, 90, 100, 120, 132, 160, 200])
@pytest.mark.parametrize("exact", [False, True])
def test_nothing_is_cut_at_any_width(width: int, exact: bool) -> None:
    """No line is wider than the terminal, no ellipsis, and every verdict and figure is there."""
    for found in (MATCH, DIFFERS):
        text = screen(found, width, exact=exact)
        assert max(cell_len(line) for line in text.splitlines()) <= width
        assert "\N{HORIZONTAL ELLIPSIS}" not in text
        for cell in found.cells:
            assert text.count(cell.verdict) >= sum(c.verdict == cell.verdict for c in found.cells)
        assert ("9,395,240,960 B" if exact else "8.75 GiB") in text


def test_narrow_tables_drop_columns_on_purpose() -> None:
    heads = {
        width: " ".join(screen(DIFFERS, width).split("off-rank", 1)[1].split("1  tp")[0].split("1 tp")[0].split())
        for width in (80, 100, 110, 160)
    }
    assert heads == {
        160: "# role phase operation what where type each exp meas expected measured time exposed bus bw >= verdict",
        110: "# role what type each exp meas expected measured time verdict",
        100: "# role what type each exp meas expected measured verdict",
        80: "# role what type each exp meas measured verdict",
    }


def test_columns_that_no_row_fills_are_left_out() -> None:
    untimed = replace(MATCH, cells=(LOSS,))
    text = screen(untimed, 160)
    assert "time" not in text.replace("coverage", "")
    assert "bus bw" not in text


def test_no_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """NO_COLOR leaves bold and dim, which are no colours; a pipe has neither."""

    def codes(**options: Any) -> set[str]:
        console = Console(width=100, **options)
        with console.capture() as captured:
            console.print(diff_terminal.render(DIFFERS, width=100))
        return set(re.findall(r"\x1b\[([0-9;]+)m", captured.get()))

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert {"32", "1;31"} <= codes(force_terminal=True)
    monkeypatch.setenv("NO_COLOR", "1")
    assert codes(force_terminal=True) == {"0", "1", "2"}
    monkeypatch.delenv("NO_COLOR")
    assert codes(force_terminal=False) == set()


def test_explain() -> None:
    lines = screen(DIFFERS, 100, explain=4).splitlines()
    start = lines.index("row 4: tp / forward / all_reduce")
    assert lines[start : start + 4] == [
        "row 4: tp / forward / all_reduce",
        "  attention.proj   2 calls a step",
        "    in     S * B * H = 64 elements = 128 B bf16",
        "    calls  2 per step",
    ]
    lines = screen(DIFFERS, 100, explain=1).splitlines()
    start = lines.index("row 1: tp / recompute / all_gather")
    assert lines[start + 1] == "  no rule expects these calls"


@pytest.mark.parametrize("number", [0, 7, -1])
def test_explain_a_row_that_is_not_there(number: int) -> None:
    with pytest.raises(ValueError, match=f"^rows are numbered 1 to 6, there is no row {number}$"):
        diff_terminal.render(DIFFERS, explain=number)


def test_everything_that_can_be_wrong() -> None:
    found = replace(
        DIFFERS,
        cells=(UNKNOWN, replace(UNKNOWN, op="all_gather"), CELL),
        job_conflicts=(JobConflict("a", 1, 2, "a: intended 1, captured 2 (the diff uses intended)"),),
        verdict="cannot be judged",
        version="<=0.7",
        versions_tried=("<=0.7", ">=0.8"),
        job=replace(JOB, megatron_core_version=None),
        coverage=replace(
            COVERAGE,
            ranks_declared=None,
            step_evidence=("window",),
            calls_outside_steps=4,
            calls_of_unknown_bytes=1200,
            kernels_before_window=2,
            bytes_attributed=989,
            attributed=0.98999,
            judged=None,
            role_evidence=(),
            unattributed=(Unattributed("deep_ep::dispatch", 640, 180_000_000, "no recorded call explains it"),),
            import_status="partial",
        ),
    )
    assert (
        screen(found, 160)
        == """\
run.parquet
job           40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16 (intended)
run           2 ranks, the whole recording as one step (it marks no steps)
coverage      166 of 166 communication kernels, 168 calls, 98.9 % of bytes with a role, 1,200 calls of unknown size, 2 kernels from before the window, 4 calls
              outside complete steps
roles by      nothing
rules         megatron, releases that come closest: <=0.7
import        partial: traceanalyzer info run.parquet says what is missing
job conflict  a: intended 1, captured 2 (the diff uses intended)

                                                                     calls        off-rank
#  role  phase    operation   what                     type    each    exp  meas  expected  measured    time  exposed  bus bw >=  verdict
1  ?     forward  all_to_all  -                        bf16  varies      -    80         -   unknown  372 ms   3.1 ms          -  unknown
2  ?     forward  all_gather  -                        bf16  varies      -    80         -   unknown  372 ms   3.1 ms          -  unknown
3  tp    forward  all_reduce  attention.proj, mlp.fc2  bf16  64 MiB     80    80  8.75 GiB  8.75 GiB  372 ms   3.1 ms  25.3 GB/s  match

1-2  unknown: role unknown
?    unattributed communication  deep_ep::dispatch: 640 kernels, 180 ms (no recorded call explains it)

cannot be judged   rows: 2 unknown   98.99 % attributed, unknown judged, less than the 99 % of --min-coverage   exit 3   --explain N shows the formula of row N
"""
    )


def test_many_rows_without_a_verdict() -> None:
    """Only the 12 largest are shown; the numbers of the rows stay those of the JSON document."""
    many = tuple(
        replace(UNKNOWN, payload_bytes_each=n, payload_bytes_measured=n, calls_measured=2, ranks=(0,))
        for n in range(20)
    )
    text = screen(replace(MATCH, cells=(*many, CELL)), 160)
    assert "1-8   8 rows without a verdict left out, 16 calls in all: --format json" in text
    assert [line.split()[0] for line in text.splitlines() if line.endswith("  unknown")] == [
        str(n) for n in range(9, 21)
    ]
    assert re.search(r"^21 +tp .*match$", text, re.MULTILINE)


def test_several_stages_and_steps() -> None:
    first = replace(CELL, stage=0, ranks=(0,), steps=(3, 4))
    last = replace(CELL, stage=1, ranks=(1,), steps=(4,))
    found = replace(MATCH, cells=(first, last), coverage=replace(COVERAGE, steps=(3, 4)))
    assert [report.where(c, found) for c in found.cells] == ["stage 0, rank 0", "stage 1, rank 1, step 4"]
    assert "run       2 of 2 ranks, steps 3-4" in screen(found, 160)
    assert "explained" in screen(found, 160)
    assert "0 to 80 calls" not in screen(found, 160)


def test_a_diff_without_cells() -> None:
    assert screen(replace(MATCH, cells=(), not_in_window=()), 80).endswith(
        "match   0 calls per rank and step explained, 0 missing, 0 unexpected   exit 0\n"
    )


# -- names that want to be more than names ---------------------------------------------------------------------------

EVIL = "[red]a|b<script>alert(1)</script>\n*c* `d` \x1b[31m [x](http://y) &amp; ~e~"
NAMED = replace(
    MATCH,
    source=EVIL,
    cells=(replace(CELL, components=(EVIL,), dtype="[bold]"),),
    coverage=replace(
        COVERAGE,
        unattributed=(
            Unattributed(EVIL, 1, 5, "no recorded call explains it"),
            Unattributed("k" * 10_000, 1, 5, "no recorded call explains it"),
        ),
    ),
    job_conflicts=(JobConflict("x", EVIL, None, EVIL),),
)


def test_names_on_the_screen_are_plain_text() -> None:
    text = screen(NAMED, 160)
    assert "[red]a|b<script>alert(1)</script> *c* `d` ?[31m [x](http://y) &amp; ~e~" in text
    assert "\x1b" not in text
    assert "k" * 57 + " ... " + "k" * 57 in text
    assert "k" * 58 not in text


def test_names_in_markdown_are_plain_text() -> None:
    text = report.markdown(NAMED)
    shown = r"\[red\]a\|b&lt;script&gt;alert(1)&lt;/script&gt; \*c\* \`d\` ?\[31m \[x\](http://y) &amp;amp; \~e\~"
    assert text.count(shown) == 3
    assert "<script" not in text
    assert "\x1b" not in text
    assert max(map(len, text.splitlines())) < 1000
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {16}


ROUTED = replace(
    CELL,
    role="ep",
    op="all_to_all",
    components=("experts.dispatch", "experts.combine"),
    payload_bytes_each=None,
    calls_expected=32,
    calls_measured=32,
    off_rank_bytes_expected=Fraction(262_144),
    off_rank_bytes_measured=Fraction(261_000),
    varies=True,
    spread=Spread(4096, 4012, 4180),
    conserved=True,
)


def test_what_depends_on_the_routing() -> None:
    text = screen(replace(MATCH, cells=(ROUTED,)), 160)
    assert "bf16     ~     32    32   256 KiB  ~255 KiB" in text
    assert (
        "1  ~ 4,012 to 4,180 rows a rank and step depend on the routing, 4,096 if balanced (0.98 to 1.02 times); all rows "
        "sent were received\n"
    ) in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"conserved": False}, "(0.98 to 1.02 times); rows sent and received differ"),
        (
            {"conserved": None},
            "; not all ranks of the group were recorded, so that rows sent are rows received is not checked",
        ),
        ({"spread": Spread(16, 16, 16)}, "16 rows a rank and step depend on the routing, 16 if balanced (1.00 times)"),
        ({"spread": None}, "all rows sent were received"),
    ],
)
def test_routing_words(changes: dict[str, Any], words: str) -> None:
    assert words in report.routing_words(replace(ROUTED, **changes))


def test_nothing_is_said_of_routing_where_nothing_was_measured() -> None:
    assert report.routing_words(replace(ROUTED, calls_measured=0)) == report.routing_words(CELL) == ""


def test_a_first_step_is_said() -> None:
    found = replace(MATCH, first_step=3)
    words = "step 3 judged as a first step, in which overlapped traffic runs at other places"
    assert f"-  {words}\n" in screen(found, 160)
    assert f"\n{words}.\n" in report.markdown(found)
    assert "first step" not in screen(MATCH, 160) + report.markdown(MATCH)


def test_releases_apart() -> None:
    lost = replace(CELL, components=("embedding",), calls_expected=1, calls_measured=0, verdict="missing")
    unknown = replace(UNKNOWN, reason="not modelled: experts")
    found = replace(
        MATCH,
        versions_tried=("<=0.7", ">=0.8"),
        version=">=0.8",
        versions_apart=(ReleaseApart("<=0.7", (lost, unknown, lost, lost, lost)),),
    )
    one = "tp forward all_reduce embedding 1 expected, 0 measured (missing)"
    other = "? forward all_to_all - - expected, 80 measured (unknown: not modelled: experts)"
    assert report.apart_words(found.versions_apart[0]) == f"<=0.7: {one}; {other}; {one}; and 2 other rows"
    assert f"does not fit  <=0.7: {one}" in screen(found, 400)
    assert "- does not fit &lt;=0.7: tp forward" in report.markdown(found)
    (apart,) = report.document(found)["versions_apart"]
    assert (apart["releases"], [c["verdict"] for c in apart["cells"]][:2]) == ("<=0.7", ["missing", "unknown"])


def test_routed_cells_in_json() -> None:
    (cell,) = report.document(replace(MATCH, cells=(replace(ROUTED, transport="deepep"),)))["cells"]
    assert (cell["varies"], cell["rows_that_vary"], cell["conserved"], cell["transport"]) == (
        True,
        {"balanced": 4096, "least": 4012, "most": 4180},
        True,
        "deepep",
    )


def test_every_avoidable_code_is_documented() -> None:
    text = DOCS.read_text(encoding="utf-8")
    rules = [rule for chapter in CHAPTERS for rule in chapter.rules]
    codes = {avoid.code for rule in rules for avoid in (rule.avoid, rule.or_avoid) if avoid is not None}
    section = text.split("## Avoidable bytes\n", 1)[1].split("\n## ", 1)[0]
    assert codes == set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE))


def test_every_cause_is_documented() -> None:
    """Codes as they stand in the table of causes: quoted words of the source that a Cause is made with."""
    text = DOCS.read_text(encoding="utf-8")
    source = Path(causes.__file__).read_text(encoding="utf-8")
    codes = set(re.findall(r'Cause\(\s*"(\w+)"', source)) | {"tp_comm_overlap_off", "flex_dispatcher_off"}
    assert len(codes) > 20
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []


# -- markdown --------------------------------------------------------------------------------------------------------


def test_markdown() -> None:
    assert (
        report.markdown(replace(DIFFERS, cells=(EXTRA, UNKNOWN, LOSS, GATHERS), not_in_window=("backward",)))
        == """\
**differs**: 40 layers, hidden 4096, seq 2048, micro-batch 4, TP2, bf16; 2 of 2 ranks, step 3; rules megatron 0.16

Coverage: 166 of 166 communication kernels, 168 calls, 100 % of bytes with a role, 100 % judged; roles by layout and call_path 166.

| # | role | phase | operation | what | type | each | calls expected | calls measured | off-rank expected | off-rank measured | time | exposed | verdict | cause |
|--:|---|---|---|---|---|--:|--:|--:|--:|--:|--:|--:|---|---|
| 1 | tp | recompute | all_gather | - | bf16 | 64 MiB | 0 | 8 | 8.75 GiB | 8.75 GiB | 372 ms | 3.1 ms | unexpected | recompute_full (likely): 16 forward calls are repeated. |
| 2 | ? | forward | all_to_all | - | bf16 | varies | - | 80 | - | unknown | 372 ms | 3.1 ms | unknown (role unknown) |  |
| 3 | tp | forward | all_reduce | loss: max, predicted logit, sum of exponentials | f32 | 32 KiB | 3 | 3 | 168 KiB | 168 KiB | - | - | match |  |
| 4 | tp | backward | all_gather | mlp.fc2; input re-gather of output layer, mlp.fc1 | bf16 | 64 MiB | 80 | 80 | 8.75 GiB | 8.75 GiB | 372 ms | 3.1 ms | match | avoidable 1.41 GiB off-rank a step   sp_input_regather: no setting removes it; recompute_repeats_collectives: recompute_granularity selective removes it |

rows: 1 unexpected, 1 unknown   1.41 GiB avoidable   exit 1

Not in the window: backward.
"""
    )


def test_markdown_exact() -> None:
    assert "| 67,108,864 B | 80 | 80 | 9,395,240,960 B | 9,395,240,960 B |" in report.markdown(MATCH, exact=True)


# -- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "text", "exact"),
    [
        (None, "unknown", "unknown"),
        (0, "0 B", "0 B"),
        (1023, "1023 B", "1,023 B"),
        (1024, "1 KiB", "1,024 B"),
        (Fraction(1, 3), "0.3 B", "0.333 B"),
        (Fraction(2049, 2), "1 KiB", "1,024.500 B"),
        (9_395_240_960, "8.75 GiB", "9,395,240,960 B"),
        (1023 * 1024, "0.999 MiB", "1,047,552 B"),
        (2**40, "1 TiB", "1,099,511,627,776 B"),
        (2**60, "1.02e+03 PiB", "1,152,921,504,606,846,976 B"),
    ],
)
def test_human_bytes(size: int | Fraction | None, text: str, exact: str) -> None:
    assert report.human_bytes(size) == text
    assert report.human_bytes(size, exact=True) == exact


@pytest.mark.parametrize(
    ("ns", "text"),
    [(None, "-"), (0, "0 ns"), (999, "999 ns"), (1000, "1 us"), (372_000_123, "372 ms"), (90 * 10**9, "90 s")],
)
def test_human_time(ns: int | None, text: str) -> None:
    assert report.human_time(ns) == text


@pytest.mark.parametrize(
    ("rate", "text"),
    [(None, "-"), (500.0, "0.5 kB/s"), (4.26e6, "4.26 MB/s"), (999.6e6, "1 GB/s"), (25.26e9, "25.3 GB/s")],
)
def test_human_rate(rate: float | None, text: str) -> None:
    assert report.human_rate(rate) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(None, "unknown"), (1.0, "100 %"), (0.999999, "99.99 %"), (0.99, "99 %"), (0.98999, "98.99 %"), (0.0, "0 %")],
)
def test_share(value: float | None, text: str) -> None:
    assert report.share(value) == text


@pytest.mark.parametrize(
    ("job", "text"),
    [
        (Job(), "one rank, f32"),
        (
            Job(
                world_size=16,
                tensor_model_parallel_size=2,
                sequence_parallel=True,
                pipeline_model_parallel_size=2,
                num_layers=4,
                num_experts=8,
                expert_model_parallel_size=2,
                num_microbatches=8,
                fp16=True,
                forward_only=True,
            ),
            "4 layers, 8 micro-batches, 8 experts, TP2 x PP2 x EP2 x DP4 + SP, f16, forward only",
        ),
    ],
)
def test_job_words(job: Job, text: str) -> None:
    assert report.job_words(job) == text


# -- json ------------------------------------------------------------------------------------------------------------


def documented(section: str) -> set[str]:
    """The keys of one table of docs/diff.md."""
    text = DOCS.read_text(encoding="utf-8").split(section + "\n", 1)[1].split("\n#", 1)[0]
    return set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))


def test_the_document_has_the_documented_keys() -> None:
    found = report.document(DIFFERS)
    assert set(found) == documented("## `--format json`: `traceanalyzer.diff/1`")
    assert set(found["coverage"]) == documented("### `coverage`")
    assert all(set(cell) == documented("### `cells`") for cell in found["cells"])
    assert json.loads(json.dumps(found)) == found


def test_the_documents_values() -> None:
    conflict = JobConflict("num_layers", 40, 41, "num_layers: intended 40, captured 41 (the diff uses intended)")
    lost = Unattributed("k", 2, 9, "no recorded call explains it")
    found = report.document(
        replace(
            MATCH,
            cells=(replace(EXTRA, off_rank_bytes_measured=Fraction(3, 2)), GATHERS),
            coverage=replace(COVERAGE, unattributed=(lost,)),
            job_conflicts=(conflict,),
            verdict="differs",
        )
    )
    cells = found.pop("cells")
    job = found.pop("job")
    assert (job["num_layers"], job["used"], job["tensor_model_parallel_size"]) == (40, "intended", 2)
    assert found == {
        "schema": "traceanalyzer.diff/1",
        "source": "run.parquet",
        "rules": "megatron",
        "version": "0.16",
        "versions_tried": ["0.16"],
        "versions_apart": [],
        "first_step": None,
        "coverage": {
            "ranks_present": [0, 1],
            "ranks_declared": 2,
            "steps": [3],
            "step_evidence": ["profiler_step"],
            "calls": 168,
            "calls_outside_steps": 0,
            "calls_of_unknown_bytes": 0,
            "kernels": 166,
            "kernels_attributed": 166,
            "kernels_before_window": 0,
            "kernel_time_ns": 744_000_246,
            "kernel_time_attributed_ns": 744_000_246,
            "bytes_known": 1000,
            "bytes_attributed": 1000,
            "role_evidence": {"layout and call_path": 166},
            "attributed": 1.0,
            "judged": 1.0,
            "unattributed": [{"name": "k", "kernels": 2, "time_ns": 9, "why": "no recorded call explains it"}],
            "import_status": "complete",
        },
        "job_conflicts": [
            {
                "field": "num_layers",
                "intended": 40,
                "captured": 41,
                "sentence": "num_layers: intended 40, captured 41 (the diff uses intended)",
            }
        ],
        "not_in_window": ["backward", "optimizer"],
        "min_coverage": 0.99,
        "tolerance": 0.0,
        "verdict": "differs",
    }
    assert cells[0] == {
        "role": "tp",
        "axis": "TP",
        "op": "all_gather",
        "phase": "recompute",
        "stage": 0,
        "dtype": "bfloat16",
        "group_size": 2,
        "payload_bytes_each": 67_108_864,
        "components": [],
        "calls_expected": 0,
        "calls_measured": 8,
        "payload_bytes_expected": 5_368_709_120,
        "payload_bytes_measured": 5_368_709_120,
        "off_rank_bytes_expected": 9_395_240_960,
        "off_rank_bytes_measured": 1.5,
        "varies": False,
        "rows_that_vary": None,
        "conserved": None,
        "transport": None,
        "avoidable_bytes": 0,
        "avoidable": [],
        "time_ns": 372_000_123,
        "exposed_ns": 3_100_000,
        "bus_bandwidth_bytes_per_s": 1.5e9 / 372_000_123,
        "verdict": "unexpected",
        "reason": None,
        "cause": {"code": "recompute_full", "sentence": "16 forward calls are repeated.", "confidence": "likely"},
        "related_cells": [1],
        "role_evidence": ["layout and call_path"],
        "ranks": [0, 1],
        "steps": [3],
    }
    assert cells[1]["avoidable"] == [
        {"code": "sp_input_regather", "setting": ""},
        {"code": "recompute_repeats_collectives", "setting": "recompute_granularity selective"},
    ]
