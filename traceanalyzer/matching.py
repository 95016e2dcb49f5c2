"""Expected and measured calls of one rank's step meet: two passes, and the cells that come of them.

First by exact key: role, operation, phase, element type, payload. Then what is left over in the same role and phase is
paired where at least two of operation, type, elements and count agree: what differs is the finding. What stays unpaired
is missing or unexpected. Calls whose size the router decides meet by the width of their rows instead of their payload;
traffic that torch.distributed does not carry meets nobody. Pure functions of rows; nothing here sees a run.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import lru_cache
from math import log
from typing import NamedTuple

from traceanalyzer import axes, causes, traffic
from traceanalyzer.attribute import places, roles
from traceanalyzer.expect.model import ExpectedCall, NotModelled

DIFFERS = frozenset({"excess", "missing", "unexpected"})
"""Verdicts that say the run is not what was expected; the others are match and unknown."""

REPLAYED = "CUDA graph"
"""The transport whose kernels are those of torch.distributed: a recording of kernels can show its calls."""

_FARTHEST = 2
"""How many of operation, element type, elements and count may differ in a pair of the second pass."""

_MOST_SIZES = 4
"""How many sizes of calls that cannot be judged have a cell each."""


@dataclass(frozen=True, slots=True)  # a run of a thousand ranks has half a million
class Measured:
    """Calls of one kind that one rank made in one step; ``off_rank`` and times are of all of them together.

    width: elements of a row of an exchange, by its splits; in_splits: rows for each rank. toward: "next" or "previous"
    stage or rank of the ring, where the peer of a send or recv tells.
    """

    role: str | None
    role_evidence: str | None
    op: str | None
    phase: str | None
    dtype: str | None
    in_elems: int | None
    out_elems: int | None
    group_size: int | None
    payload: int | None
    component: str | None
    calls: int
    off_rank: Fraction | None
    time_ns: int | None = None
    exposed_ns: int | None = None
    width: int | None = None
    toward: str | None = None
    in_splits: tuple[int, ...] | None = None

    @property
    def bare(self) -> tuple[object, ...]:
        """Everything but the times: rows that agree in it meet the same expected calls."""
        return (
            self.role,
            self.role_evidence,
            self.op,
            self.phase,
            self.dtype,
            self.in_elems,
            self.out_elems,
            self.group_size,
            self.payload,
            self.component,
            self.calls,
            self.off_rank,
            self.width,
            self.toward,
            self.in_splits,
        )

    @property
    def look(self) -> roles.Look:
        """What a pattern can be recognised by."""
        return roles.Look(self.op, self.dtype, self.in_elems, self.out_elems, self.phase, self.group_size)


def total(fractions: Iterable[Fraction]) -> Fraction:
    """Their sum, added up by denominator: most are whole, and a Fraction's own sum looks for divisors every time."""
    parts: dict[int, int] = defaultdict(int)
    for f in fractions:
        parts[f.denominator] += f.numerator
    return sum((Fraction(n, d) for d, n in parts.items()), Fraction(0))


class Spread(NamedTuple):
    """Rows that depend on the routing, per rank and step: as balanced routing gives them, the least, the most measured."""

    balanced: int
    least: int
    most: int


@dataclass(frozen=True)
class Cell:
    """One row of the diff. Calls and bytes are per rank and step; times are means over the cell's ranks and steps.

    Null: unknown. ``off_rank_*`` may be fractions of a byte. ``reason`` says why a verdict is unknown. ``ranks`` and
    ``steps``: the cell holds for every one of these steps on every one of these ranks. ``varies``: sizes depend on where
    the router sends tokens; measured bytes are then means over ranks and steps, expected ones those of balanced routing,
    ``spread`` the rows, and ``conserved`` says whether the group's ranks received what they sent (None: not all of them
    were recorded). ``transport``: what carries the bytes, if torch.distributed does not.
    """

    role: str | None
    op: str | None
    phase: str | None
    stage: int | None
    dtype: str | None
    group_size: int | None
    payload_bytes_each: int | None
    components: tuple[str, ...]
    calls_expected: int | None
    calls_measured: int
    payload_bytes_expected: int | None
    payload_bytes_measured: int | None
    off_rank_bytes_expected: Fraction | None
    off_rank_bytes_measured: Fraction | None
    avoidable_bytes: int
    avoidable: tuple[tuple[str, str], ...]
    verdict: str
    reason: str | None = None
    cause: causes.Cause | None = None
    related: tuple[int, ...] = ()
    expected: tuple[ExpectedCall, ...] = field(default=(), compare=False)
    role_evidence: tuple[str, ...] = ()
    time_ns: int | None = None
    exposed_ns: int | None = None
    ranks: tuple[int, ...] = ()
    steps: tuple[int, ...] = ()
    varies: bool = False
    spread: Spread | None = None
    conserved: bool | None = None
    transport: str = ""

    @property
    def axis(self) -> str | None:
        """The role rolled up to TP, CP, EP, PP, DP or other."""
        return None if self.role is None else str(axes.rollup(self.role))

    @property
    def places(self) -> int:
        """In how many steps of how many ranks this cell was found."""
        return len(self.ranks) * len(self.steps)

    @property
    def bus_bandwidth_bytes_per_s(self) -> float | None:
        """Off-rank bytes over time (nccl-tests bus bandwidth), waiting for peers included: a lower bound.

        None without a time, and where nothing leaves the rank.
        """
        if not self.off_rank_bytes_measured or not self.time_ns:
            return None
        return float(self.off_rank_bytes_measured) * 1e9 / self.time_ns


class Figures(NamedTuple):
    """What may differ from rank to rank within a cell, of one rank's step. None: not recorded.

    Times in ns. The others are of a cell whose sizes vary only: payload and off-rank bytes, elements sent and received,
    rows that vary, and as many with balanced routing.
    """

    time_ns: int | None
    exposed_ns: int | None
    payload: int | None = None
    off_rank: Fraction | None = None
    sent: int | None = None
    received: int | None = None
    rows: int | None = None
    balanced: int | None = None


# -- roles by pattern ------------------------------------------------------------------------------------------------


def with_patterns(rows: Sequence[Measured], wanted: Sequence[ExpectedCall]) -> list[Measured]:
    """The rows of one step, with roles where type, size and count fit one expected kind of call that no other rows make.

    Rows that fit kinds of several roles, in number all of them together, are shared out among those roles.
    """
    if all(m.role is not None for m in rows):
        return list(rows)
    rows = _routed_roles(rows, wanted)
    unknown: Counter[roles.Look] = Counter()
    for m in rows:
        if m.role is None and m.op is not None:
            unknown[m.look] += m.calls
    if not unknown:
        return list(rows)
    open_kinds = _open_signatures(rows, wanted)
    settled = roles.by_pattern(unknown, open_kinds)
    left = {look: calls for look, calls in unknown.items() if look not in settled}
    taken = {s for s in open_kinds for look, role in settled.items() if s.role == role and roles.fits(look, s)}
    shared = roles.shared_pattern(left, [s for s in open_kinds if s not in taken])
    out: list[Measured] = []
    budget = {look: {s.role: 0 for s in kinds} for look, kinds in shared.items()}
    for look, kinds in shared.items():
        for s in kinds:
            budget[look][s.role] += s.calls
    for m in rows:
        if m.role is None and m.look in settled:
            out.append(replace(m, role=settled[m.look], role_evidence="pattern"))
        elif m.role is None and m.look in budget:
            out += _share_out(m, budget[m.look])
        else:
            out.append(m)
    return out


def _share_out(m: Measured, budget: dict[str, int]) -> Iterator[Measured]:
    """A row's calls on the roles that still want some; which call took which time is then not known."""
    left = m.calls
    for role, wanted in budget.items():
        calls = min(left, wanted)
        if calls:
            budget[role] -= calls
            left -= calls
            alone = calls == m.calls
            yield replace(
                m,
                role=role,
                role_evidence="shared pattern",
                calls=calls,
                off_rank=None if m.off_rank is None else m.off_rank * calls / m.calls,
                time_ns=m.time_ns if alone else None,
                exposed_ns=m.exposed_ns if alone else None,
            )


def _routed_roles(rows: Sequence[Measured], wanted: Sequence[ExpectedCall]) -> list[Measured]:
    """The rows, with roles where calls of unknown role have the row width and number of one expected routed exchange."""
    kinds: Counter[tuple[str, str, str, int, int, str]] = Counter()
    for c in wanted:
        if c.varies is not None:
            kinds[c.op, c.dtype, c.phase, c.varies.width, c.group_size, c.role] += c.calls
    if not kinds:
        return list(rows)
    found: Counter[tuple[str | None, str | None, str | None, int | None]] = Counter()
    for m in rows:
        if m.role is None and m.width is not None:
            found[m.op, m.dtype, m.phase, m.width] += m.calls
    settled: dict[tuple[str | None, str | None, str | None, int | None], tuple[str, int]] = {}
    for (op, dtype, phase, width, size, role), calls in kinds.items():
        if found[op, dtype, phase, width] == calls and sum(k[:4] == (op, dtype, phase, width) for k in kinds) == 1:
            settled[op, dtype, phase, width] = role, size
    out: list[Measured] = []
    for m in rows:
        found_role = settled.get((m.op, m.dtype, m.phase, m.width))
        fits = m.role is None and found_role is not None and m.group_size in (None, found_role[1])
        out.append(replace(m, role=found_role[0], role_evidence="pattern") if fits and found_role else m)
    return out


def _open_signatures(rows: Sequence[Measured], wanted: Sequence[ExpectedCall]) -> list[roles.Signature]:
    """Expected kinds of call, with the counts that rows of known role leave open."""
    counts: Counter[tuple[str, str, int, int, str, int, str]] = Counter()
    for c in wanted:
        if c.varies is not None:
            continue
        counts[c.op, c.dtype, c.in_elems, c.out_elems, c.phase, c.group_size, c.role] += c.calls
    for m in rows:
        for kind in counts:
            op, dtype, in_elems, _, phase, _, role = kind
            alike = (m.role, m.op, m.in_elems) == (role, op, in_elems) and m.dtype in (None, dtype)
            if alike and (m.phase is None or roles.same_phase(m.phase, phase, role)):
                counts[kind] -= m.calls
                break
    return [roles.Signature(*kind, calls) for kind, calls in counts.items() if calls > 0]


# -- keys and pairs --------------------------------------------------------------------------------------------------


class Key(NamedTuple):
    """What an expected and a measured call have in common if they are the same.

    Where the size depends on the routing, ``width`` (elements of a row) stands for the payload. ``transport``: what
    carries the bytes if torch.distributed does not; nothing measured has one.
    """

    role: str | None
    op: str | None
    phase: str | None
    dtype: str | None
    payload: int | None
    width: int | None = None
    transport: str = ""

    @classmethod
    def of(cls, c: ExpectedCall) -> Key:
        """The key of an expected call."""
        if c.transport:
            return cls(c.role, c.op, c.phase, c.dtype, c.payload_bytes, None, c.transport)
        if c.varies is not None:
            return cls(c.role, c.op, c.phase, c.dtype, None, c.varies.width)
        return cls(c.role, c.op, c.phase, c.dtype, _sizes(c).payload)


class _Sizes(NamedTuple):
    """Bytes of one expected call."""

    payload: int
    off_rank: Fraction


@lru_cache(maxsize=65536)  # every rank of a stage expects the same calls
def _sizes(c: ExpectedCall) -> _Sizes:
    return _Sizes(c.payload_bytes, c.off_rank_bytes)


@dataclass
class _Pair:
    """Expected and measured calls that belong together; ``by_key``: by their key, else by the second pass."""

    key: Key
    expected: list[ExpectedCall] = field(default_factory=list)
    measured: list[Measured] = field(default_factory=list)
    by_key: bool = True

    @property
    def left(self) -> int:
        """Expected calls that nothing measured belongs to yet."""
        return sum(c.calls for c in self.expected) - sum(m.calls for m in self.measured)

    @property
    def calls_expected(self) -> int:
        return sum(c.calls for c in self.expected)

    @property
    def calls_measured(self) -> int:
        return sum(m.calls for m in self.measured)

    @property
    def payload_expected(self) -> int:
        return sum(_sizes(c).payload * c.calls for c in self.expected)

    @property
    def payload_measured(self) -> int | None:
        sizes = [m.payload * m.calls for m in self.measured if m.payload is not None]
        return sum(sizes) if len(sizes) == len(self.measured) else None

    @property
    def off_rank_expected(self) -> Fraction:
        return total(_sizes(c).off_rank * c.calls for c in self.expected)

    @property
    def off_rank_measured(self) -> Fraction | None:
        known = [m.off_rank for m in self.measured if m.off_rank is not None]
        return total(known) if len(known) == len(self.measured) else None

    @property
    def varies(self) -> bool:
        """Whether the sizes of the calls depend on the routing."""
        return self.key.width is not None

    @property
    def payload_each(self) -> int | None:
        """Payload of one call; None where it varies or is unknown."""
        if self.key.payload is not None:
            return self.key.payload
        if self.varies:
            return None
        found = {m.payload for m in self.measured}
        return found.pop() if len(found) == 1 else None

    @property
    def elements(self) -> set[int]:
        """Elements that the payload counts, on either side."""
        pairs = [(_sizes(c).payload, c.dtype) for c in self.expected]
        pairs += [(m.payload, m.dtype) for m in self.measured if m.payload is not None and m.dtype is not None]
        sizes = ((payload, traffic.element_bytes(dtype)) for payload, dtype in pairs)
        return {payload // size for payload, size in sizes if size}


class StepMatch:
    """The two passes over one rank's step: ``cells`` gives what they find.

    wanted: what the rank should send in the step's window; rows: what it sent, roles settled; gaps: what the rules have
    no rule for; tolerance: relative, on calls and bytes. Calls of different roles never meet, so a step may be matched
    role by role: ``nameless`` are then the rows of unknown role, which could be any role's missing ones.
    """

    def __init__(
        self,
        wanted: Iterable[ExpectedCall],
        rows: Sequence[Measured],
        gaps: Sequence[NotModelled],
        layout: axes.Layout,
        tolerance: float = 0.0,
        nameless: Sequence[Measured] = (),
    ) -> None:
        self._gaps = gaps
        self._layout = layout
        self._tolerance = Fraction(tolerance).limit_denominator(10**9)
        self._nameless = [m for m in (*nameless, *rows) if m.role is None and m.group_size != 1]
        self._pairs: dict[Key, _Pair] = {}
        self._routed: list[Key] | None = None
        self._of_width: dict[tuple[object, ...], Key | None] = {}
        for call in wanted:
            self._pair(Key.of(call)).expected.append(call)
        self._payloads = {key.payload for key in self._pairs}
        # rows that say all first: a row without a phase joins the expected calls of several phases into one pair, and one
        # outside of every phase ("other") takes what those of the phase itself leave open
        for row in sorted(rows, key=lambda m: (m.phase is None, m.dtype is None, m.phase == "other")):
            self._pair(self._key_of(row)).measured.append(row)
        self._join_sizes()

    def _pair(self, key: Key) -> _Pair:
        return self._pairs.setdefault(key, _Pair(key))

    def _expects(self, key: Key) -> bool:
        return key in self._pairs and bool(self._pairs[key].expected)

    def _key_of(self, row: Measured) -> Key:
        """The key of the expected calls a measured row belongs to, else its own."""
        own = Key(row.role, row.op, row.phase, row.dtype, row.payload)
        if row.payload in self._payloads:
            if self._expects(own):
                return own
            phases = [phase for phase in ("optimizer", "forward") if roles.same_phase(row.phase, phase, row.role)]
            there = [key for phase in phases if self._expects(key := own._replace(phase=phase))]
            if there:
                return next((key for key in there if self._pairs[key].left > 0), there[0])
        routed = self._routed_key(row)
        if routed is not None:
            return routed
        if row.phase is None or row.dtype is None:
            fitting = [
                key
                for key, pair in self._pairs.items()
                if (key.role, key.op) == (row.role, row.op)
                and row.phase in (None, key.phase)
                and row.dtype in (None, key.dtype)
                and key.transport in ("", REPLAYED)
                and any(c.in_elems == row.in_elems and row.toward in (None, c.peer) for c in pair.expected)
            ]
            if len({(key.dtype, key.payload) for key in fitting}) == 1:
                return self._join(fitting)
        # the sizes of an uneven exchange depend on data: one cell for all of them
        return own._replace(payload=None) if row.op == "all_to_all" else own

    def _routed_key(self, row: Measured) -> Key | None:
        """The key of expected calls of varying size that a row belongs to: by the width of its rows.

        Where the recording does not tell the width, the expected size that is nearest decides.
        """
        if self._routed is None:
            self._routed = [key for key, pair in self._pairs.items() if key.width is not None and pair.expected]
            self._of_width = {}
        if not self._routed:
            return None
        look = row.role, row.op, row.phase, row.dtype, row.width
        if row.width is not None and look in self._of_width:
            return self._of_width[look]
        alike = [
            key
            for key in self._routed
            if (key.role, key.op) == (row.role, row.op)
            and row.phase in (None, key.phase)
            and row.dtype in (None, key.dtype)
        ]
        if row.width is not None:
            exact = [key for key in alike if key.width == row.width]
            return self._of_width.setdefault(look, exact[0] if len(exact) == 1 else None)
        if not row.in_elems or not row.out_elems:
            return None
        sizes = {
            abs(log((row.in_elems + row.out_elems) / (c.in_elems + c.out_elems))): key
            for key in alike
            for c in self._pairs[key].expected
            if key.width and row.in_elems % key.width == row.out_elems % key.width == 0
        }
        return sizes[min(sizes)] if sizes else None

    def _join(self, keys: list[Key]) -> Key:
        """One pair for what the recording cannot tell apart: calls whose phase it does not know."""
        if len(keys) == 1:
            return keys[0]
        joined = keys[0]._replace(phase=None, transport="")
        pair = _Pair(joined)
        for key in keys:
            part = self._pairs.pop(key)
            pair.expected += part.expected
            pair.measured += part.measured
        self._pairs[joined] = pair
        self._routed = None
        return joined

    def _join_sizes(self) -> None:
        """One pair for calls that cannot be judged and have more sizes than anyone reads."""
        alike: dict[Key, list[Key]] = defaultdict(list)
        for key, pair in self._pairs.items():
            if not pair.expected and (key.role is None or any(_touches(gap, pair) for gap in self._gaps)):
                alike[key._replace(payload=None)].append(key)
        for joined, keys in alike.items():
            if len(keys) > _MOST_SIZES:
                rows = [row for key in keys for row in self._pairs.pop(key).measured]
                self._pairs[joined] = _Pair(joined, measured=rows)

    def cells(self, stage: int | None) -> list[tuple[Cell, Figures, tuple[Measured, ...]]]:
        """The cells of this step, each with its figures and its rows; ``stage`` is the rank's."""
        parts = [part for pair in self._pairs.values() for part in _by_component(pair)]
        whole = [p for p in parts if (p.expected and p.measured) or p.key.transport]
        pairs = whole + _second_pass([p for p in parts if not (p.expected and p.measured) and not p.key.transport])
        return [(self._cell(pair, stage), _figures(pair), tuple(pair.measured)) for pair in pairs]

    def _cell(self, pair: _Pair, stage: int | None) -> Cell:
        # gloo's records do not name the group: where the role is settled, its size is the expected one
        size_of_role = pair.expected[0].group_size if pair.expected else self._size_of(pair.key.role)
        pair = replace(pair, measured=[_sized(m, size_of_role) for m in pair.measured])
        size = next((m.group_size for m in pair.measured if m.group_size is not None), size_of_role)
        verdict, reason = self._verdict(pair)
        cause = None
        nothing_moves = size == 1 and pair.off_rank_expected == 0 and pair.off_rank_measured in (0, None)
        if nothing_moves and verdict != "match":
            verdict, reason, cause = "match", None, causes.GROUP_OF_ONE
        # what is another figure on every rank is no part of the cell: _figures has it
        varies = pair.varies and pair.by_key
        nothing_said = not pair.expected and (verdict != "unexpected" or pair.key.role is None)
        return Cell(
            role=pair.key.role,
            op=pair.key.op,
            phase=pair.key.phase,
            stage=stage,
            dtype=pair.key.dtype,
            group_size=size,
            payload_bytes_each=pair.payload_each,
            components=_components(pair),
            calls_expected=None if nothing_said else pair.calls_expected,
            calls_measured=pair.calls_measured,
            payload_bytes_expected=None if nothing_said else pair.payload_expected,
            payload_bytes_measured=None if varies else pair.payload_measured,
            off_rank_bytes_expected=None if nothing_said else pair.off_rank_expected,
            off_rank_bytes_measured=None if varies else pair.off_rank_measured,
            avoidable_bytes=_avoidable(pair),
            avoidable=tuple(
                dict.fromkeys((c.avoidable.code, c.avoidable.setting) for c in pair.expected if c.avoidable)
            ),
            verdict=verdict,
            reason=reason,
            cause=cause,
            expected=tuple(pair.expected),
            role_evidence=tuple(sorted({m.role_evidence for m in pair.measured if m.role_evidence})),
            varies=varies,
            transport="" if pair.measured else pair.key.transport,
        )

    def _size_of(self, role: str | None) -> int | None:
        return self._layout.group_size(role) or None if role in axes.ROLES and role != "hybrid_cp" else None

    # -- verdict -----------------------------------------------------------------------------------------------------

    def _verdict(self, pair: _Pair) -> tuple[str, str | None]:
        """Verdict, and for "unknown" the reason."""
        if pair.key.role is None:
            return "unknown", "role unknown"
        if pair.key.transport and not pair.measured:
            return "unknown", f"not carried by torch.distributed: {pair.key.transport}"
        for gap in self._gaps:
            if _touches(gap, pair):
                return "unknown", f"not modelled: {gap.what}"
        if pair.key.op is None:
            return "unknown", "operation unknown"
        if pair.payload_measured is None:
            without_type = any(m.dtype is None for m in pair.measured)
            return "unknown", "element type not recorded" if without_type else "size not recorded"
        if not pair.expected:
            return "unexpected", None
        if self._agrees(pair):
            return "match", None
        if pair.by_key and pair.calls_measured < pair.calls_expected and self._looks_alike(pair):
            return "unknown", "calls that look like the missing ones have no known role"
        return ("excess" if _is_more(pair) else "missing"), None

    def _agrees(self, pair: _Pair) -> bool:
        """Whether the same calls were made, as often and as large, within the tolerance."""
        if any((c.op, c.dtype) != (pair.key.op, pair.key.dtype) for c in pair.expected):
            return False
        if pair.varies:
            return self._close(pair.calls_measured, pair.calls_expected) and _fixed_sides_fit(pair)
        off_rank = pair.off_rank_measured
        return (
            self._close(pair.calls_measured, pair.calls_expected)
            and self._close(pair.payload_measured or 0, pair.payload_expected)
            and (off_rank is None or self._close(off_rank, pair.off_rank_expected))
        )

    def _close(self, measured: int | Fraction, wanted: int | Fraction) -> bool:
        return measured == wanted or abs(Fraction(measured) - Fraction(wanted)) <= self._tolerance * wanted

    def _looks_alike(self, pair: _Pair) -> bool:
        """Whether calls of unknown role could be the missing ones."""
        return any(
            m.op == c.op
            and (m.in_elems == c.in_elems if c.varies is None else m.width in (None, c.varies.width))
            and m.dtype in (None, c.dtype)
            and m.group_size in (None, c.group_size)
            and (m.phase is None or roles.same_phase(m.phase, c.phase, c.role))
            for m in self._nameless
            for c in pair.expected
        )


def _touches(gap: NotModelled, pair: _Pair) -> bool:
    """Whether traffic without a rule can be part of this cell. What is unknown of a cell can be anything."""
    phases = {pair.key.phase, *(c.phase for c in pair.expected)}
    ops = {pair.key.op, *(c.op for c in pair.expected)}
    return (
        pair.key.role in gap.roles
        and (not gap.phases or None in phases or any(roles.same_phase(p, g) for p in phases for g in gap.phases))
        and (not gap.ops or None in ops or not ops.isdisjoint(gap.ops))
    )


@dataclass
class _Kind:
    """Expected calls of varying size that still want calls; None for a side that varies."""

    sent: int | None
    received: int | None
    calls: int

    @classmethod
    def of(cls, c: ExpectedCall) -> _Kind:
        sent = None if c.varies and c.varies.sent else c.in_elems
        return cls(sent, None if c.varies and c.varies.received else c.out_elems, c.calls)

    def short(self, m: Measured) -> int:
        """By how many elements a call has less than this kind wants on a side that is exact; 0 if it fits."""
        sides = [(self.sent, m.in_elems), (self.received, m.out_elems)]
        return max(
            (wanted - made for wanted, made in sides if wanted is not None and made is not None), key=abs, default=0
        )


def _fixed_sides_fit(pair: _Pair) -> bool:
    """Whether every call has the rows of a side that is exact, of one expected call each: inputs T*k, say."""
    kinds = [_Kind.of(c) for c in pair.expected]
    rows = [([kind for kind in kinds if not kind.short(m)], m.calls) for m in pair.measured]
    # rows that fit one kind only take theirs first
    for fitting, number in sorted(rows, key=lambda row: len(row[0])):
        left = number
        for kind in fitting:
            taken = min(left, kind.calls)
            kind.calls -= taken
            left -= taken
        if left:
            return False
    return True


def _has_more_rows(pair: _Pair) -> bool:
    """Whether calls of varying size exceed what is exact of them, each beside the kind that is nearest."""
    kinds = [_Kind.of(c) for c in pair.expected]
    return sum(min((kind.short(m) for kind in kinds), key=abs) * m.calls for m in pair.measured) <= 0


def _is_more(pair: _Pair) -> bool:
    """Whether more was sent than expected: by calls where they are of one kind, else by bytes."""
    if pair.by_key and pair.calls_measured != pair.calls_expected:
        return pair.calls_measured > pair.calls_expected
    if pair.varies and pair.by_key:
        return _has_more_rows(pair)
    off_rank = pair.off_rank_measured
    if off_rank is not None:
        return off_rank >= pair.off_rank_expected
    return (pair.payload_measured or 0) >= pair.payload_expected


# -- parts -----------------------------------------------------------------------------------------------------------


def _by_component(pair: _Pair) -> list[_Pair]:
    """A pair split by component, where all calls say theirs or the counts agree part by part."""
    if not (pair.expected and pair.measured):
        return [pair]
    parts: dict[str | None, _Pair] = defaultdict(lambda: _Pair(pair.key))
    for call in pair.expected:
        parts[places.class_of_component(call.component)].expected.append(call)
    for row in pair.measured:
        parts[_class_of(row.component)].measured.append(row)
    agree = all(p.calls_expected == p.calls_measured for p in parts.values())
    return list(parts.values()) if None not in parts or agree else [pair]


def _class_of(component: str | None) -> str | None:
    """A measured component as coarse as call paths tell it; a hook records finer words, "mlp.fc2"."""
    return component if component in places.CLASSES else places.class_of_component(component or "")


def _second_pass(rest: Sequence[_Pair]) -> list[_Pair]:
    """Pairs leftovers of one role and phase, the nearest first; what finds no partner stays as it is."""
    wanted = [p for p in rest if p.expected]
    got = [p for p in rest if p.measured]
    near = sorted(
        (distance, i, j)
        for i, w in enumerate(wanted)
        for j, g in enumerate(got)
        if w.key.role == g.key.role is not None
        and (g.key.phase is None or w.key.phase is None or roles.same_phase(g.key.phase, w.key.phase, w.key.role))
        and (distance := _distance(w, g)) <= _FARTHEST
    )
    taken: set[int] = set()
    partner: dict[int, int] = {}
    for _, i, j in near:
        if i not in partner and j not in taken:
            partner[i] = j
            taken.add(j)
    found = [_Pair(got[j].key, wanted[i].expected, got[j].measured, by_key=False) for i, j in partner.items()]
    found += [w for i, w in enumerate(wanted) if i not in partner]
    return found + [g for j, g in enumerate(got) if j not in taken]


def _distance(wanted: _Pair, got: _Pair) -> int:
    """How many of operation, element type, elements and count differ."""
    return (
        (wanted.key.op != got.key.op)
        + (wanted.key.dtype != got.key.dtype)
        + wanted.elements.isdisjoint(got.elements)
        + (wanted.calls_expected != got.calls_measured)
    )


def _sized(m: Measured, size: int | None) -> Measured:
    """A measured row whose group size was not recorded, with the size of the role it was given."""
    if m.group_size is not None or size is None or m.off_rank is not None:
        return m
    if m.width is not None:
        return replace(m, group_size=size)  # which of its rows stay is not known
    off = traffic.off_rank_bytes(m.op, m.payload, size)
    return replace(m, group_size=size, off_rank=None if off is None else off * m.calls)


def _components(pair: _Pair) -> tuple[str, ...]:
    expected = [c.component for c in pair.expected]
    return tuple(dict.fromkeys(expected or [m.component for m in pair.measured if m.component is not None]))


def _avoidable(pair: _Pair) -> int:
    """Avoidable bytes of the calls that were really made, at least: calls that are missing count as avoided ones."""
    missing = (
        pair.calls_expected - min(pair.calls_expected, pair.calls_measured) if pair.by_key else pair.calls_expected
    )
    waste = sorted(
        ((c.avoidable.bytes_per_call, c.calls) for c in pair.expected if c.avoidable is not None), reverse=True
    )
    found = 0
    for each, calls in waste:
        found += each * max(0, calls - missing)
        missing = max(0, missing - calls)
    return found


def _figures(pair: _Pair) -> Figures:
    found = Figures(*times_of(pair.measured))
    if not (pair.varies and pair.by_key and pair.key.width):
        return found
    sent = _sum(None if m.in_elems is None else m.in_elems * m.calls for m in pair.measured)
    received = _sum(None if m.out_elems is None else m.out_elems * m.calls for m in pair.measured)
    fixed = sum(
        (0 if c.varies and c.varies.sent else c.in_elems) * c.calls
        + (0 if c.varies and c.varies.received else c.out_elems) * c.calls
        for c in pair.expected
    )
    both = sum((c.in_elems + c.out_elems) * c.calls for c in pair.expected)
    width = pair.key.width
    return found._replace(
        payload=pair.payload_measured,
        off_rank=pair.off_rank_measured,
        sent=sent,
        received=received,
        rows=None if sent is None or received is None else (sent + received - fixed) // width,
        balanced=(both - fixed) // width,
    )


def times_of(rows: Sequence[Measured]) -> tuple[int | None, int | None]:
    """Time and exposed time of rows in ns; None where one row's is not known, and without rows."""
    if not rows:
        return None, None
    return _sum(m.time_ns for m in rows), _sum(m.exposed_ns for m in rows)


def _sum(values: Iterable[int | None]) -> int | None:
    """The sum; None if one is not known."""
    known = list(values)
    return None if None in known else sum(v for v in known if v is not None)
