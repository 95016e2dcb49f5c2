"""The facts of reports.info as something rich prints: readable at 80 columns, in a pipe and without colour."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from traceanalyzer.reports import issues, text
from traceanalyzer.reports.info import Communication, Info, Rank

_MOST_ROWS = 20
_MOST_ISSUES = 20
_ANSWER_STYLES = {"yes": "green", "partly": "yellow", "no": "", "unknown": "yellow"}


def render(info: Info) -> RenderableType:
    """The whole screen."""
    parts: list[RenderableType] = [_head(info), _facts(info)]
    for title, body in (
        ("sources", _sources(info)),
        ("steps", _steps(info)),
        ("groups", _groups(info)),
        ("communication", _communication(info)),
        *([("places of kernels, by their time", _kernel_places(info))] if info.kernel_places else []),
        (f"issues: {issues.summary(info.issues)}", _issues(info)),
        ("what can be asked of this run", _questions(info)),
    ):
        parts.append(Text(f"\n{title}", style="bold"))
        if body is not None:
            parts.append(body)
    return Group(*parts)


def _grid(rows: Iterable[tuple[str | Text, ...]]) -> RenderableType:
    """Rows without lines; the last column wraps."""
    listed = list(rows)
    table = Table.grid(padding=(0, 2))
    for _ in range(max((len(r) for r in listed), default=1) - 1):
        table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in listed:
        table.add_row(*row)
    return table


def _table(columns: Sequence[tuple[str, str]], rows: Sequence[tuple[str, ...]]) -> RenderableType:
    """A table of (title, l or r) columns, its head dim; rows beyond the cap are counted."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    for title, side in columns:
        table.add_column(title, justify="right" if side == "r" else "left", overflow="fold")
    for row in rows[:_MOST_ROWS]:
        table.add_row(*map(Text, row))
    parts: list[RenderableType] = [Padding(table, (0, 0, 0, 1), expand=False)]
    if len(rows) > _MOST_ROWS:
        parts.append(Text(f" {len(rows) - _MOST_ROWS} more not shown; all of them: --format json"))
    return Group(*parts)


def _head(info: Info) -> RenderableType:
    status = info.import_status or "status not recorded"
    style = "" if status == "complete" else "bold yellow"
    return Text.assemble((info.run, "bold"), "   ", (f"import {status}", style), f"   schema {info.schema_version}")


def _facts(info: Info) -> RenderableType:
    rows: list[tuple[str | Text, ...]] = [("job", _job(info))]
    rows += [
        (
            "job conflict",
            Text(
                f"{c['field']}: intended {json.dumps(c['intended'])}, captured {json.dumps(c['captured'])}",
                style="yellow",
            ),
        )
        for c in info.job.conflicts
    ]
    present = info.present_ranks
    unnamed = sum(r.rank is None for r in info.ranks)
    if present:
        of = "" if info.world_size is None else f" of {info.world_size}"
        said = f"{text.ranges(present)}   {len(present)}{of} present"
        if info.world_size is None:
            said += ", world size unknown"
        rows.append(("ranks", _placed(said, info.present_coordinates)))
    if unnamed:
        rows.append(("ranks", Text(f"{text.counted(unnamed, 'source')} without a rank", style="yellow")))
    if info.missing_ranks:
        rows.append(("missing", _placed(text.ranges(info.missing_ranks), info.missing_coordinates)))
    rows += [("host" if i == 0 else "", line) for i, line in enumerate(_hosts(info))]
    if info.window_start_ns is not None and info.window_end_ns is not None:
        rows.append(
            (
                "window",
                f"{text.duration(info.window_end_ns - info.window_start_ns)} from {_instant(info.window_start_ns)}"
                + (", clocks as recorded" if len(info.ranks) > 1 else ""),
            )
        )
    rows += _inferred(info)
    rows += [("conflict", Text(sentence, style="yellow")) for sentence in info.conflicts]
    return _grid(rows)


_INFERRED_AXES = ("tp", "cp", "pp", "dp", "ep", "etp")


def _inferred(info: Info) -> list[tuple[str | Text, ...]]:
    """What the groups imply, where no job says it."""
    if info.job.used is not None or info.inferred_layout is None:
        return []
    facts = {fact.name: fact for fact in info.inferred}
    named = [facts[name] for name in _INFERRED_AXES]
    rows: list[tuple[str | Text, ...]] = []
    for sure in ("proven", "likely"):
        axes = [f"{f.name.upper()} {f.value}" for f in named if f.sure == sure]
        if axes:
            rows.append(("" if rows else "implied", f"{', '.join(axes)}: {sure} by the groups"))
    rows += [
        ("", f"{name} {facts[name].value}: {facts[name].sure}, {facts[name].reason}")
        for name in ("vpp", "num_microbatches", "sequence_parallel")
        if facts[name].value is not None
    ]
    return rows


def _job(info: Info) -> str:
    where = {"file": "from --job", "intended": "intended, from the run", "captured": "captured, from the run"}
    if info.job.used is None:
        return "none: roles and coordinates are known only where the recording names them"
    layout = info.job.equation if info.job.equation is not None else f"no layout: {info.job.problem}"
    return f"{where[info.job.used]}: {layout}"


def _placed(said: str, coordinates: dict[str, list[int]] | None) -> str:
    """Ranks followed by the coordinates they take: ``0-7   tp 0-7, pp 3``."""
    places = ", ".join(f"{axis} {text.ranges(taken)}" for axis, taken in (coordinates or {}).items())
    return f"{said}   {places}" if places else said


def _hosts(info: Info) -> list[str]:
    found: dict[tuple[str | None, str | None], list[Rank]] = defaultdict(list)
    for rank in info.ranks:
        found[rank.host, rank.device_name].append(rank)
    lines = []
    for (host, device), ranks in found.items():
        named = [r.rank for r in ranks if r.rank is not None]
        who = f"{text.ranks_text(named)}: " if named and len(found) > 1 else ""
        devices = {r.device for r in ranks if r.device is not None}
        what = f"{device or 'device of unknown name'}, device {text.ranges(devices)}" if devices else "no device"
        lines.append(f"{who}{host or 'not recorded'}; {what}")
    if len(lines) > _MOST_ROWS:
        lines[_MOST_ROWS:] = [f"{len(lines) - _MOST_ROWS} more not shown; all of them: --format json"]
    return lines


def _instant(ns: int) -> str:
    seconds, rest = divmod(ns, 1_000_000_000)
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M:%S}.{rest:09d} UTC"


def _sources(info: Info) -> RenderableType:
    rows = [
        (
            s.source,
            text.count(s.files),
            text.count(s.events_read),
            text.count(s.events_rejected),
            text.count(sum(s.rows.values())),
        )
        for s in info.sources
    ]
    columns = (("source", "l"), ("files", "r"), ("events", "r"), ("rejected", "r"), ("rows", "r"))
    details: list[tuple[str, str]] = []
    for source in info.sources:
        kinds = sorted(source.rows.items(), key=lambda i: (-i[1], i[0]))
        details.append((source.source, ", ".join(f"{text.count(n)} {kind}" for kind, n in kinds)))
        if source.versions:
            versions = (f"{key} {' and '.join(values)}" for key, values in source.versions.items())
            details.append(("", ", ".join(versions)))
    return Group(_table(columns, rows), Padding(_grid(details), (0, 0, 0, 1), expand=False))


def _steps(info: Info) -> RenderableType:
    rows = [
        (
            "not numbered" if s.step is None else str(s.step),
            s.evidence,
            str(len(s.ranks)),
            str(sum(r.complete for r in s.ranks)),
            *("-" if ns is None else text.duration(ns) for ns in (s.min_dur_ns, s.median_dur_ns, s.max_dur_ns)),
        )
        for s in info.steps
    ]
    if not rows:
        return Text(" none: neither step marks nor a window")
    columns = (
        ("step", "l"),
        ("evidence", "l"),
        ("ranks", "r"),
        ("whole", "r"),
        ("min", "r"),
        ("median", "r"),
        ("max", "r"),
    )
    return _table(columns, rows)


def _groups(info: Info) -> RenderableType:
    """Groups with calls as a table, those without in one paragraph."""
    if not info.groups:
        return Text(" none recorded")
    rows = [
        (
            g.role or "unknown",
            g.axis or "-",
            text.count(g.size),
            text.count(g.groups),
            text.count(g.calls),
            ", ".join(g.evidence) or "none",
        )
        for g in info.groups
        if g.calls
    ]
    columns = (("role", "l"), ("axis", "l"), ("size", "r"), ("groups", "r"), ("calls", "r"), ("role by", "l"))
    parts = [_table(columns, rows)] if rows else []
    quiet = [f"{g.role or 'unnamed'} {text.count(g.groups)}x{text.count(g.size)}" for g in info.groups if not g.calls]
    if quiet:
        parts.append(Padding(_grid([("no calls", ", ".join(quiet) + " (groups x size)")]), (0, 0, 0, 1), expand=False))
    return Group(*parts)


def _communication(info: Info) -> RenderableType:
    c = info.communication
    rows: list[tuple[str | Text, ...]] = []
    share = text.share(c.tied_dur_ns, c.kernel_dur_ns)
    if c.kernels:
        rows.append(
            (
                "kernels",
                f"{text.count(c.tied_kernels)} of {text.count(c.kernels)} tied to calls, {share} of their time",
            )
        )
    else:
        rows.append(("kernels", "no communication kernel recorded"))
    if c.launched_before_window:
        rows.append(("", f"{text.count(c.launched_before_window)} launched before the recording began"))
    if c.unexplained_kernels:
        rows.append(("", Text(f"{text.count(c.unexplained_kernels)} that no call explains, bytes unknown:", "yellow")))
        most = 10
        rows += [
            ("", f"{text.count(u.kernels):>7}  {text.duration(u.dur_ns):>10}  {_short(u.name)}")
            for u in c.unexplained[:most]
        ]
        if len(c.unexplained) > most:
            rest = text.counted(len(c.unexplained) - most, "more name")
            rows.append(("", f"{rest} not shown; all of them: --format json"))
    timed = [
        f"{text.count(n)} {what}"
        for n, what in (
            (c.calls_with_kernel, "timed by kernels"),
            (c.calls_with_host_range, "timed by host ranges"),
            (c.calls_without_time, f"without time{_alone(c)}"),
        )
        if n
    ]
    rows.append(("calls", f"{text.count(c.calls)}{': ' if timed else ''}{', '.join(timed)}"))
    if c.calls:
        known = (("role", c.calls_with_role), ("step", c.calls_with_step), ("bytes", c.calls_with_bytes))
        rows.append(("known", ", ".join(f"{what} of {text.share(n, c.calls)}" for what, n in known)))
    return Padding(_grid(rows), (0, 0, 0, 1), expand=False)


_FACTS = ("step", "role", "phase", "microbatch", "layer", "component", "served_axis")
_WORKS = ("compute", "communication", "copy")


def _kernel_places(info: Info) -> RenderableType:
    """Share of the kernels' time of which a fact is known, and by which evidence, the strongest share first."""
    rows = []
    for fact in _FACTS:
        shares, by = [], dict[str, int]()
        for work in _WORKS:
            of = [p for p in info.kernel_places if (p.work, p.fact) == (work, fact)]
            known = sum(p.dur_ns or 0 for p in of if p.evidence is not None)
            shares.append(text.share(known, sum(p.dur_ns or 0 for p in of)) if of else "-")
            for p in of:
                if p.evidence is not None:
                    by[p.evidence] = by.get(p.evidence, 0) + (p.dur_ns or 0)
        evidence = ", ".join(sorted(by, key=lambda e: (-by[e], e)))
        rows.append((fact.replace("_", " "), *shares, evidence or "none"))
    return _table((("fact", "l"), *((work, "r") for work in _WORKS), ("by", "l")), rows)


def _alone(communication: Communication) -> str:
    """Of the calls without time, those that need none."""
    alone, total = communication.calls_without_time_alone, communication.calls_without_time
    if alone == 0:
        return ""
    return f" ({'all' if alone == total else text.count(alone)} in groups of one rank)"


def _short(name: str, most: int = 45) -> str:
    return name if len(name) <= most else f"{name[: most - 3]}..."


def _issues(info: Info) -> RenderableType | None:
    return issues.render(info.issues, most=_MOST_ISSUES, run=info.run) if info.issues else None


def _questions(info: Info) -> RenderableType:
    return Padding(
        _grid((q.question, Text(q.answer, style=_ANSWER_STYLES.get(q.answer, "")), q.reason) for q in info.questions),
        (0, 0, 0, 1),
        expand=False,
    )
