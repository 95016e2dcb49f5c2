"""Bandwidths from nccl-tests' output and from tables, and the time a call takes at them."""

from __future__ import annotations

from pathlib import Path

import pytest

from traceanalyzer.errors import InputError
from traceanalyzer.links import Links, read

# two runs of two releases in one file: the first under mpirun with tagged lines and on two hosts, the second without the line
# that names the test; rows as printed, one of them cut
OUTPUT = """\
$ mpirun -np 16 -N 8 --tag-output ./build/all_reduce_perf_mpi -b 32M -e 128M -f 2 -g 1
[1,0]<stdout>:# nccl-tests version 2.18.0 nccl-headers=22907 nccl-library=22907
[1,0]<stdout>:# Collective test starting: all_reduce_perf_mpi
[1,0]<stdout>:# nThread 1 nGpus 1 minBytes 33554432 maxBytes 134217728 step: 2(factor) warmup iters: 1 iters: 20 agg iters: 1
[1,0]<stdout>:#
[1,0]<stdout>:# Using devices
[1,0]<stdout>:#  Rank  0 Group  0 Pid   1887 on   worker-1 device  0 [0000:8d:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#  Rank  8 Group  0 Pid   1885 on   worker-0 device  0 [0000:8d:00] NVIDIA H100 80GB HBM3
[1,0]<stdout>:#
[1,0]<stdout>:#                                                              out-of-place                       in-place
[1,0]<stdout>:#       size         count     type redop    root   time   algbw   busbw #wrong   time   algbw   busbw #wrong
[1,0]<stdout>:#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
[1,0]<stdout>: 33554432       8388608   float   sum    -1  629.1   53.34  100.00      0    630.0   53.26   99.86      0
[1,0]<stdout>:   134217728      33554432   float   sum    -1  1258.3  106.67  200.00      0   1260.0  106.52  199.73    N/A
[1,0]<stdout>:   268435456      67108864     float     sum      -1   1258.3  106
[1,0]<stdout>:# Out of bounds values : 0 OK
[1,0]<stdout>:# Avg bus bandwidth    : 150
[1,0]<stdout>:# Collective test concluded: all_reduce_perf_mpi
$ all_gather_perf -g 8 -b 4294967296 -e 4294967296 -n 100
# Using devices
#   Rank  0 Pid  37300 on node07 device  0 [0x07] A100-SXM4-40GB
#                                             out-of-place                       in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
  4294967296     134217728   float    29122  147.48  129.05  1e+00    29169  147.24  128.84  1e+00
 Out of bounds values : 2 FAILED
"""


@pytest.fixture
def measured(tmp_path: Path) -> Links:
    path = tmp_path / "links.txt"
    path.write_text(OUTPUT, encoding="utf-8")
    return read(path)


def test_both_runs_are_read(measured: Links) -> None:
    """One row is cut, on line 15. The second run names its test in the command alone, and has one host."""
    assert measured.points == {
        ("all_reduce", "inter"): ((33554432, 100.0), (134217728, 200.0)),
        ("all_gather", "intra"): ((4294967296, 129.05),),
    }
    assert measured.unreadable == (15,)


@pytest.mark.parametrize(
    ("payload", "time_ns", "speed", "note"),
    [
        # 2 x 3/4 of the payload on 4 ranks, at so many bytes a ns
        (33554432, 503316, 100.0, "measured"),
        (67108864, 671089, 150.0, "interpolated"),  # half way in the logarithm
        (1000, 15, 100.0, "below the table"),
        (268435456, 2013266, 200.0, "above the table"),
    ],
)
def test_time_at_a_size(measured: Links, payload: int, time_ns: int, speed: float, note: str) -> None:
    found = measured.time("all_reduce", "inter", 4, payload)
    assert found is not None
    assert (found.time_ns, found.note) == (time_ns, note)
    assert found.bus_gb_per_s == pytest.approx(speed)


@pytest.mark.parametrize(
    ("op", "span"), [("all_reduce", "intra"), ("all_reduce", None), ("reduce_scatter", "inter"), ("barrier", "inter")]
)
def test_what_was_not_measured_is_not_guessed(measured: Links, op: str, span: str | None) -> None:
    assert measured.time(op, span, 4, 1 << 20) is None


TOML = """\
[[link]]
span = "intra"
gb_per_s = 300
[[link]]
span = "inter"
op = "sendrecv"
gb_per_s = 25
[[link]]
span = "inter"
op = "all_to_all"
payload_bytes = 1048576
gb_per_s = 10
[[link]]
span = "between"
gb_per_s = 10
"""
CSV = "span,op,payload_bytes,gb_per_s\nintra,,,300\ninter,sendrecv,,25\ninter,all_to_all,1048576,10\ninter,,,fast\n"


@pytest.mark.parametrize(("name", "text", "bad"), [("a.toml", TOML, (4,)), ("a.csv", CSV, (5,))])
def test_tables(tmp_path: Path, name: str, text: str, bad: tuple[int, ...]) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    links = read(tmp_path / name)
    assert links.unreadable == bad
    found = [
        links.time("recv", "inter", 2, 1000),
        links.time("all_gather", "intra", 4, 4000),  # 3/4 of it leaves
        links.time("all_to_all", "inter", 4, 1 << 20),
        links.time("all_gather", "inter", 4, 4000),
    ]
    assert [f and (f.time_ns, f.note) for f in found] == [
        (40, "any size"),
        (10, "any size"),
        (78643, "measured"),
        None,
    ]


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("a.txt", "nothing here\n", "no bandwidth in it"),
        ("a.toml", "[[link", "no TOML"),
        ("a.toml", "link = 3", r"link must be a list of tables"),
        # a row, and nowhere the name of the test
        ("a.txt", OUTPUT.splitlines()[13].split(":", 1)[1], r"no bandwidth in it \(1 lines"),
    ],
)
def test_what_cannot_be_read(tmp_path: Path, name: str, text: str, sentence: str) -> None:
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=sentence):
        read(tmp_path / name)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read"):
        read(tmp_path / "none.txt")
