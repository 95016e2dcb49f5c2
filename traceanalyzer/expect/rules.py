"""Rules as data, and the one engine that turns them into expected calls.

A Rule is one row of the reference's tables: who calls what, when, how often, with how many elements, and why that is
believed. All its sizes, counts and conditions are text (formula.py) over symbols (place.py). A Chapter is a table of
rules with the symbols and families it adds, and with its Gaps: traffic that it knows of and has no rule for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

from traceanalyzer import traffic
from traceanalyzer.expect import versions
from traceanalyzer.expect.formula import Formula, parse
from traceanalyzer.expect.model import Avoidable, Evidence, ExpectedCall, NotModelled, Varies
from traceanalyzer.expect.place import Place, Symbol, Symbols, is_on
from traceanalyzer.expect.quantity import call

Family = Callable[[Place], Iterable[Mapping[str, Any]]]
"""The members of a family at a place, each as the symbols it adds: one for each gradient bucket, say."""

DTYPES: dict[str, Callable[[Place], str]] = {
    "activations": lambda place: place.job.activation_dtype,
    "parameters": lambda place: place.job.params_dtype or "float32",
    "main gradients": lambda place: place.job.main_grad_dtype,
    "router": lambda place: _router_dtype(place),
    "Megatron-FSDP gradients": lambda place: sharded_gradients(place),
    "pipeline messages": lambda place: _pipeline_dtype(place),
    "counts of zeros": lambda place: "int64" if place.has("zeros counted as whole numbers") else "float32",
}
"""Element types that depend on the job; any other text in a rule is a type as torch names it."""


def sharded_gradients(place: Place) -> str:
    """Type in which Megatron-FSDP reduces gradients (mcore_fsdp_adapter.py: MixedPrecisionPolicy)."""
    job = place.job
    if not place.has("Megatron-FSDP gradient type of its own"):
        return job.main_grad_dtype
    for option in ("megatron_fsdp_grad_comm_dtype", "megatron_fsdp_main_grads_dtype"):
        stated = str(getattr(job, option) or "auto")
        if stated not in ("auto", "None"):
            return traffic.normalise_dtype(stated) or stated
    return job.params_dtype or "float32"


def _router_dtype(place: Place) -> str:
    stated = {"fp32": "float32", "fp64": "float64"}.get(place.job.moe_router_dtype or "")  # Megatron's two words
    return stated or traffic.normalise_dtype(place.job.moe_router_dtype) or place.job.activation_dtype


def _pipeline_dtype(place: Place) -> str:
    wide = is_on(place.job, "fp32_residual_connection") and place.has("fp32 pipeline messages")
    return "float32" if wide else place.job.activation_dtype


@dataclass(frozen=True)
class Avoid:
    """Bytes of a rule's calls that need not be sent.

    code: of causes.py. setting: what removes them. off_rank: how many bytes of one call leave the rank in vain, a
    formula; "" means all that leave it.
    """

    code: str
    setting: str
    off_rank: str = ""


@dataclass(frozen=True)
class Routed:
    """How the size of a call depends on where the router sends the tokens.

    sent, received: what stands for the rows of this rank's input and output, a word that splits recorded elsewhere can
    be put in for: "routed" (own rows, T*k: exact), "arrived" (rows that came over EP), "gathered" (those of the whole
    expert tensor-parallel group); None: that side does not vary. width: elements of a row, a formula.
    """

    width: str
    sent: str | None = None
    received: str | None = None


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One kind of call. Text in sent, received, calls, off_rank is a formula, in when a condition.

    sent, received: elements of this rank's input and output as a profiler shows them; received "" means the same.
    calls: per rank and step (and member of the family). dtype: a key of DTYPES or a type as torch names it. each: name of
    a family of the chapter; the rule then holds once for every member and may use its symbols. group: the role whose size
    counts, if it is not the role of the call. outside: what carries the bytes if c10d does not ("userbuffers"). off_rank:
    bytes that leave the rank in one call, where operation and group size do not say it. or_avoid: listed where avoid comes
    to no byte. routed: sizes that depend on data
    (sent and received are then what balanced routing gives). document: errata or section that says why the document's
    model does not have this call.
    """

    name: str
    role: str
    op: str
    phase: str
    component: str
    sent: str
    calls: str
    evidence: Evidence
    dtype: str = "activations"
    when: str = "True"
    received: str = ""
    each: str = ""
    group: str = ""
    avoid: Avoid | None = None
    or_avoid: Avoid | None = None
    outside: str = ""
    off_rank: str = ""
    routed: Routed | None = None
    note: str = ""
    document: str = ""
    peer: str = ""

    @property
    def formulas(self) -> tuple[Formula, ...]:
        """Every formula and condition of the rule, parsed."""
        texts = [self.when, self.sent, self.received, self.calls, self.off_rank]
        texts += [waste.off_rank for waste in (self.avoid, self.or_avoid) if waste]
        texts += [self.routed.width] if self.routed else []
        return tuple(parse(text) for text in texts if text)


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Traffic that the rules know of and cannot say: cells it can touch are never ``match``.

    what: the flag or the reason. when: condition, "" means that the flag ``what`` is set. roles, phases, ops: what it can
    touch; phases and ops empty mean all.
    """

    what: str
    roles: tuple[str, ...]
    when: str = ""
    phases: tuple[str, ...] = ()
    ops: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A table of rules.

    name: begins the rule names. title, source: for the documentation. applies: condition under which the chapter has a
    say at all. gaps: rows of Gap, and functions of a place where the reason itself depends on it.
    """

    name: str
    title: str
    source: str
    rules: tuple[Rule, ...]
    gaps: tuple[Gap, ...] = ()
    more_gaps: Callable[[Place], Iterable[NotModelled]] | None = None
    symbols: Mapping[str, Symbol] = field(default_factory=dict)
    families: Mapping[str, Family] = field(default_factory=dict)
    family_words: Mapping[str, str] = field(default_factory=dict)

    def calls(self, place: Place) -> list[ExpectedCall]:
        """Every call of the place in one step, in the order of the rules; none with a count of 0.

        Raises JobError if the job does not say a size that is needed.
        """
        symbols = Symbols(place, self.symbols)
        members: dict[str, list[Symbols]] = {}
        rows: list[ExpectedCall] = []
        for rule in self.rules:
            if not rule.each:
                rows += _apply(rule, place, symbols)
                continue
            if rule.each not in members:
                members[rule.each] = [symbols.also(member) for member in self.families[rule.each](place)]
            for symbols_of_member in members[rule.each]:
                rows += _apply(rule, place, symbols_of_member)
        return rows

    def not_modelled(self, place: Place) -> list[NotModelled]:
        """What the chapter knows of and has no rule for at this place."""
        symbols = Symbols(place, self.symbols)
        found = [
            NotModelled(gap.what, gap.roles, gap.phases, gap.ops)
            for gap in self.gaps
            if parse(gap.when or f"on({gap.what!r})").holds(symbols)
        ]
        return found + list(self.more_gaps(place) if self.more_gaps else ())


# -- engine ----------------------------------------------------------------------------------------------------------


def _apply(rule: Rule, place: Place, symbols: Symbols) -> Iterator[ExpectedCall]:
    """The call that a rule stands for at a place, if its condition holds and its count is not 0."""
    if not parse(rule.when).holds(symbols):
        return
    count = parse(rule.calls).quantity(symbols)
    if count.value == 0:
        return
    sent = parse(rule.sent).quantity(symbols)
    received = parse(rule.received).quantity(symbols) if rule.received else None
    of_job = DTYPES.get(rule.dtype)
    row = call(
        rule.name,
        role=rule.role,
        op=rule.op,
        phase=rule.phase,
        component=rule.component,
        dtype=of_job(place) if of_job else rule.dtype,
        sent=sent,
        received=received,
        group_size=place.job.layout.group_size(rule.group or rule.role),
        calls=count,
        evidence=rule.evidence,
        stage=place.stage,
        versions=_versions(rule, symbols),
        note=rule.note,
        off_rank=_exact(rule.off_rank, symbols),
        transport=rule.outside,
        peer=rule.peer,
        document=rule.document,
    )
    if rule.routed is not None:
        width = parse(rule.routed.width).whole(symbols)
        row = replace(row, varies=Varies(width, rule.routed.sent, rule.routed.received))
    wasteful = _with_waste(row, rule.avoid, symbols)
    yield wasteful if wasteful.avoidable else _with_waste(row, rule.or_avoid, symbols)


def _exact(text: str, symbols: Symbols) -> Fraction | None:
    return Fraction(parse(text).value(symbols)) if text else None


def _with_waste(row: ExpectedCall, avoid: Avoid | None, symbols: Symbols) -> ExpectedCall:
    if avoid is None:
        return row
    wasted = _exact(avoid.off_rank, symbols) if avoid.off_rank else row.off_rank_bytes
    if not wasted:
        return row
    return replace(row, avoidable=Avoidable(int(wasted), avoid.code, avoid.setting))


def _versions(rule: Rule, symbols: Symbols) -> str:
    """Words for the releases for which the rule's condition holds; "" where no release matters to it."""
    if "since(" not in rule.when:
        return ""
    condition = parse(rule.when)
    holds = [
        release
        for release in versions.KNOWN
        if condition.holds(symbols.also({"since": lambda behaviour, of=release: versions.since(of, behaviour)}))
    ]
    return "" if len(holds) == len(versions.KNOWN) else versions.span(holds)
