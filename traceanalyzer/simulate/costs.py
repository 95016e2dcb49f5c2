"""What things cost in a simulation: rates, latencies, jitter, clocks, and what is slower than it should be.

The defaults are of a node of 8 H100: rates that such a job reaches, not its peaks. A file says what differs::

    ranks_per_node = 4
    jitter = 0.02

    [flops_per_s.gemm]
    bfloat16 = 4.0e14

    [links.inter]
    alpha_ns = 20000
    bytes_per_s = 2.5e10

    [roles.pp.inter]            # this role only
    bytes_per_s = 1.0e10

    [host_ns]
    data = 2000000

    [slow_gpu]                  # rank = factor on the time of its kernels
    3 = 1.5

    [[slow_link]]
    from = 0
    to = 8
    factor = 4.0

    [clocks.node-0001]          # or a rank: [clocks.17]
    offset_ns = 1500
    drift_ppb = 200
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from traceanalyzer.errors import InputError


@dataclass(frozen=True, slots=True)
class Link:
    """Latency of one call or message, ns, and off-rank bytes per second of one rank in one direction."""

    alpha_ns: int
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SlowLink:
    """Messages from one rank to another, and collectives of groups that hold both, take ``factor`` times as long to
    transfer; the latency stays."""

    source: int
    target: int
    factor: float


@dataclass(frozen=True, slots=True)
class Clock:
    """How a clock goes wrong: true time t is shown as t + offset_ns + drift_ppb * (t - start) / 1e9, and step_ns more
    from step_at_ns (true time since the start of the run) on."""

    offset_ns: int = 0
    drift_ppb: int = 0
    step_ns: int = 0
    step_at_ns: int = 0


INTRA, INTER = "intra", "inter"

_ANY = "any"

_FLOPS: dict[str, dict[str, float]] = {
    "gemm": {_ANY: 6.0e14, "float8_e4m3fn": 1.0e15, "float32": 2.5e14},
    "grouped_gemm": {_ANY: 5.0e14, "float8_e4m3fn": 8.0e14, "float32": 2.0e14},
    "attention": {_ANY: 4.5e14},
    _ANY: {_ANY: 3.0e13},
}


@dataclass(frozen=True)
class Costs:
    """All figures of a simulation. ``read`` makes one of a file; ``with_changes`` one of another.

    flops_per_s: kernel class -> element type -> rate, "any" for the rest in both. kernel_ns: the least a kernel takes.
    launch_ns: host time of a kernel's launch, after which it may start. call_ns: host time of a call into c10d.
    host_ns: what Host instructions cost by name, 0 where not named. jitter: relative standard deviation of the time of
    compute kernels, seeded for each rank. slow_gpu, slow_host: rank -> factor on the time of kernels, of host work.
    slow_host_cost: (rank, name of a host cost) -> factor on that one.
    """

    ranks_per_node: int = 8
    flops_per_s: Mapping[str, Mapping[str, float]] = field(default_factory=lambda: _FLOPS)
    memory_bytes_per_s: float = 2.6e12
    kernel_ns: int = 2_000
    links: Mapping[str, Link] = field(
        default_factory=lambda: {INTRA: Link(12_000, 3.6e11), INTER: Link(25_000, 4.5e10)}
    )
    roles: Mapping[str, Mapping[str, Link]] = field(default_factory=dict)
    launch_ns: int = 5_000
    call_ns: int = 20_000
    host_ns: Mapping[str, int] = field(default_factory=lambda: {"data": 500_000, "python": 50_000})
    jitter: float = 0.0
    slow_gpu: Mapping[int, float] = field(default_factory=dict)
    slow_host: Mapping[int, float] = field(default_factory=dict)
    slow_host_cost: Mapping[tuple[int, str], float] = field(default_factory=dict)
    slow_link: tuple[SlowLink, ...] = ()
    clocks: Mapping[str, Clock] = field(default_factory=dict)
    device_name: str = "NVIDIA H100 80GB HBM3"
    backend: str = "nccl"

    def rate(self, kernel_class: str, dtype: str) -> float:
        """FLOP per second of a kernel class in an element type."""
        by_dtype = self.flops_per_s.get(kernel_class) or self.flops_per_s.get(_ANY) or _FLOPS[_ANY]
        found = by_dtype.get(dtype, by_dtype.get(_ANY))
        return _FLOPS[_ANY][_ANY] if found is None else found

    def link(self, role: str, span: str) -> Link:
        """The link of a role's calls: ``span`` intra (all ranks on one node) or inter."""
        own = self.roles.get(role, {})
        return own[span] if span in own else self.links[span]

    def host_of(self, rank: int) -> str:
        """Name of the host of a rank."""
        return f"node-{rank // self.ranks_per_node:04d}"

    def clock_of(self, rank: int) -> Clock:
        """The clock of a rank: its own if named, else its host's."""
        return self.clocks.get(str(rank)) or self.clocks.get(self.host_of(rank)) or Clock()

    def with_changes(self, **changes: Any) -> Costs:
        """The same with other figures."""
        return replace(self, **changes)

    @classmethod
    def read(cls, path: str | Path) -> Costs:
        """The defaults with what a TOML file says. Raises InputError for a name or a value that cannot be used."""
        try:
            content = tomllib.loads(Path(path).read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise InputError(f"{path}: not TOML ({error}).") from None
        return cls().updated(content, str(path))

    def updated(self, content: Mapping[str, Any], where: str = "costs") -> Costs:
        """The same with what a mapping says, in the form of the file. Raises InputError as ``read`` does."""
        known = {f.name for f in fields(self)} - {"slow_host_cost"}
        strange = sorted(set(content) - known)
        if strange:
            raise InputError(f"{where}: no such cost: {', '.join(strange)}. There are: {', '.join(sorted(known))}.")
        changes: dict[str, Any] = {}
        for name, value in content.items():
            try:
                changes[name] = self._field(name, value)
            except (TypeError, ValueError, KeyError, AttributeError) as error:
                raise InputError(f"{where}: {name} = {value!r} cannot be used ({error}).") from None
        return replace(self, **changes)

    def _field(self, name: str, value: Any) -> Any:
        if name == "flops_per_s":
            rates = {kernel: dict(of) for kernel, of in self.flops_per_s.items()}
            for kernel, of in value.items():
                rates.setdefault(kernel, {}).update({t: _positive(rate) for t, rate in of.items()})
            return rates
        if name == "links":
            return {span: _link(value.get(span, {}), self.links[span]) for span in (INTRA, INTER)}
        if name == "roles":
            found: dict[str, dict[str, Link]] = {role: dict(of) for role, of in self.roles.items()}
            for role, of in value.items():
                for span, link in of.items():
                    found.setdefault(role, {})[span] = _link(link, self.links[span])
            return found
        if name == "host_ns":
            return {**self.host_ns, **{k: _whole(v) for k, v in value.items()}}
        if name in ("slow_gpu", "slow_host"):
            return {int(rank): _positive(factor) for rank, factor in value.items()}
        if name == "slow_link":
            return tuple(SlowLink(int(v["from"]), int(v["to"]), _positive(v["factor"])) for v in value)
        if name == "clocks":
            return {key: Clock(**{k: int(v) for k, v in of.items()}) for key, of in value.items()}
        if name == "jitter":
            if not 0 <= float(value) < 1:
                raise ValueError("it must be from 0 to below 1")
            return float(value)
        if name == "memory_bytes_per_s":
            return _positive(value)
        if name in ("device_name", "backend"):
            return str(value)
        if name == "ranks_per_node" and _whole(value) == 0:
            raise ValueError("a node has at least one rank")
        return _whole(value)


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value or value < 0:
        raise ValueError("it must be a whole number, not negative")
    return int(value)


def _positive(value: Any) -> float:
    if isinstance(value, bool) or not float(value) > 0:
        raise ValueError("it must be above 0")
    return float(value)


def _link(value: Mapping[str, Any], default: Link) -> Link:
    strange = sorted(set(value) - {"alpha_ns", "bytes_per_s"})
    if strange:
        raise ValueError(f"a link has alpha_ns and bytes_per_s, not {', '.join(strange)}")
    return Link(
        _whole(value.get("alpha_ns", default.alpha_ns)), _positive(value.get("bytes_per_s", default.bytes_per_s))
    )
