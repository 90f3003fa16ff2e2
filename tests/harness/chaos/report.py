"""A run and its verdict as one page that needs nothing else: the figures, each violation, each fault, and a timeline of all of them.

What comes from the records is escaped wherever it stands, and the page may load nothing, by its own policy.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from harness.chaos.checker_verdict import Verdict, Words
from harness.chaos.records import Fault, History, Outcome
from harness.chaos.report_scene import Scene, calls_drawn, scene, span_s
from harness.chaos.report_script import SCRIPT, STYLE

# Of so many the page tells; all are counted.
VIOLATIONS_MAX = 1_000
FAULTS_MAX = 10_000
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
# The timeline tells instants to a hundredth of a millisecond.
_DIGITS = 5


def write_report(history: History, verdict: Verdict, path: Path) -> None:
    """Write the page; its size is bounded, whatever the run held."""
    path.write_text("".join(_page(history, verdict)), "utf-8", "replace")


def _page(history: History, verdict: Verdict) -> Iterator[str]:
    drawn = scene(history, verdict)
    title = f"chaos run {history.seed}: {_headline(verdict)[1]}"
    yield (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
    )
    yield from _head(history, verdict)
    yield from _violations(history, verdict)
    yield from _timeline(drawn)
    yield from _tables(verdict)
    yield from _faults(history)
    yield f'<script type="application/json" id="scene">{_data(history, verdict, drawn)}</script>\n'
    yield f"<script>{SCRIPT}</script>\n</body>\n</html>\n"


def _headline(verdict: Verdict) -> tuple[str, str]:
    """Return the class and the words of the headline."""
    found = sum(verdict.counts.violations.values())
    if found:
        return "bad", f"{found} violation{'s' if found > 1 else ''}"
    if verdict.invalid:
        return "warn", "an invalid run, which proves nothing"
    return "good", "every promise was kept"


def _head(history: History, verdict: Verdict) -> Iterator[str]:
    sort, words = _headline(verdict)
    counts = verdict.counts
    yield f'<h1 class="{sort}">{_text(words[0].upper() + words[1:])}</h1>\n<p class="dim">Chaos run, seed {history.seed}</p>\n'
    if verdict.invalid:
        yield "<h2>Why the run proves nothing</h2>\n<ul>\n"
        yield from (f"<li>{_text(reason)}</li>\n" for reason in verdict.invalid)
        yield "</ul>\n"
    figures = {
        "of load and faults": f"{history.ended_s - history.began_s:,.1f} s",
        "calls": f"{len(history.operations):,}",
        "faults": f"{len(history.faults):,}",
        "stale writes refused": f"{counts.stale_writes_refused:,}",
        "stale reads refused": f"{counts.stale_reads_refused:,}",
        "calls OK per second before the first fault": f"{counts.throughput_per_s:,.1f}",
        "longest time without a grant": f"{counts.longest_gap_s:,.3f} s",
    }
    yield '<div class="figures">\n'
    yield from (f'<div class="figure"><b>{value}</b>{name}</div>\n' for name, value in figures.items())
    yield "</div>\n"


def _violations(history: History, verdict: Verdict) -> Iterator[str]:
    told = verdict.violations[:VIOLATIONS_MAX]
    if not told:
        return
    found = sum(verdict.counts.violations.values())
    yield '<h2>Violations</h2>\n<ol class="violations">\n'
    for number, violation in enumerate(told):
        at = _text(Words(history.began_s).instant(violation.at_s))
        yield (
            f'<li id="v{number}"><span class="letter">{_text(violation.invariant)}</span>'
            f'<a href="#timeline" data-violation="{number}">{at}, {_text(violation.resource)}</a>: '
            f"{_text(violation.words)}</li>\n"
        )
    yield "</ol>\n"
    if found > len(told):
        yield f"<p>and {found - len(told):,} more, which are counted but not told.</p>\n"


def _timeline(drawn: Scene) -> Iterator[str]:
    yield (
        '<h2>Timeline</h2>\n<div class="bar"><button id="in">+</button><button id="out">−</button>'  # noqa: RUF001
        '<button id="left">←</button><button id="right">→</button><button id="all">all</button>'
        '<span id="span"></span></div>\n'
        '<div id="timeline"><canvas id="canvas" tabindex="0" aria-label="timeline of the run"></canvas>'
        '<div id="tip"></div></div>\n'
        '<p class="dim">Drag to move; double click, + and −, or the wheel with Ctrl or Shift to zoom. '  # noqa: RUF001
        "Above, a row for each kind of fault; below, one for each resource: a bar is a lease for as long as its holder counted on it, "
        "coloured by client; a bar below another one overlaps it; hatched are Acquires whose outcome is unknown; triangles are "
        "commands that the storage refused as stale; red is what broke a promise. Point at anything to read it.</p>\n"
    )
    if drawn.slice_s:
        yield (
            f'<p class="dim">There is too much to draw every lease: a slice of {drawn.slice_s:.3g} s shows how much of it the lock was held; '
            "around violations every lease is drawn.</p>\n"
        )
    if drawn.rows_left_out:
        yield f'<p class="dim">{drawn.rows_left_out:,} more resources are not drawn.</p>\n'


def _tables(verdict: Verdict) -> Iterator[str]:
    counts = verdict.counts
    yield '<h2>Figures</h2>\n<div class="tables">\n'
    outcomes = list(Outcome)
    yield _table(
        ["call", *outcomes],
        ([kind, *(of_kind[each] for each in outcomes)] for kind, of_kind in counts.operations.items()),
    )
    yield _table(["fault", "times"], sorted(counts.faults.items()))
    yield _table(["promise", "violations"], counts.violations.items())
    yield "</div>\n"


def _faults(history: History) -> Iterator[str]:
    told = history.faults[:FAULTS_MAX]
    yield '<h2>Faults</h2>\n<div class="wide"><table>\n<tr><th>kind</th><th>target</th><th>began</th><th>lasted</th><th></th></tr>\n'
    for fault in told:
        began_s, ended_s = _since(fault, history)
        yield (
            f"<tr><td>{_text(fault.kind)}</td><td>{_text(fault.target)}</td>"
            f'<td><a href="#timeline" data-from="{began_s}" data-to="{ended_s}">'
            f"{_text(Words(history.began_s).instant(fault.began_s))}</a></td>"
            f'<td class="number">{fault.ended_s - fault.began_s:.3f} s</td><td>{_excused(fault)}</td></tr>\n'
        )
    yield "</table></div>\n"
    if len(history.faults) > len(told):
        yield f"<p>and {len(history.faults) - len(told):,} more.</p>\n"


def _excused(fault: Fault) -> str:
    if fault.overlaps_s is not None:
        return f"leases may overlap until {fault.overlaps_s:g} s after it"
    return "moves clocks" if fault.moves_clocks else ""


def _table(head: Iterable[str], rows: Iterable[Iterable[object]]) -> str:
    lines = ["".join(f"<th>{_text(cell)}</th>" for cell in head)]
    for name, *numbers in rows:
        cells = "".join(f'<td class="number">{number:,}</td>' for number in numbers)
        lines.append(f"<td>{_text(name)}</td>{cells}")
    return "<table>\n" + "".join(f"<tr>{line}</tr>\n" for line in lines) + "</table>\n"


def _data(history: History, verdict: Verdict, drawn: Scene) -> str:
    """Return what the script draws, as JSON that cannot end its own element."""
    clients: dict[str, int] = {}
    kinds = {kind: number for number, kind in enumerate(sorted({fault.kind for fault in history.faults}))}
    places = {row.name: number for number, row in enumerate(drawn.rows)}
    words = Words(history.began_s)
    rows = [
        {
            "name": row.name,
            "marks": [
                [
                    mark.sort,
                    round(mark.began_s, _DIGITS),
                    round(mark.ended_s - mark.began_s, _DIGITS),
                    mark.token,
                    clients.setdefault(mark.client, len(clients)),
                    mark.lane,
                ]
                for mark in row.marks
            ],
            "slices": [
                [number, round(held_s / drawn.slice_s, 3), *begun]
                for number, (held_s, *begun) in row.slices.items()
            ],
        }
        for row in drawn.rows
    ]
    violations = []
    for violation in verdict.violations[:VIOLATIONS_MAX]:
        drawn_calls = calls_drawn(violation)
        spans_s = [span_s(call, history) for call in drawn_calls]
        calls = [
            [words.call(call), round(began_s, 6), round(ended_s - began_s, 6)]
            for call, (began_s, ended_s) in zip(drawn_calls, spans_s, strict=True)
        ]
        at_s = violation.at_s - history.began_s
        first_s = min([at_s, *(began_s for began_s, _ in spans_s)])
        last_s = max([at_s, *(ended_s for _, ended_s in spans_s)])
        place = places.get(violation.resource, -1)
        violations.append(
            [violation.invariant, round(at_s, 6), place, round(first_s, 6), round(last_s, 6), calls]
        )
    data = {
        "lasted": round(drawn.lasted_s, _DIGITS),
        "slice": drawn.slice_s,
        "kinds": list(kinds),
        "faults": [
            [kinds[fault.kind], *_since(fault, history), fault.target, int(fault.moves_clocks)]
            for fault in history.faults[:FAULTS_MAX]
        ],
        "rows": rows,
        "clients": list(clients),
        "violations": violations,
    }
    text = json.dumps(data, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _since(fault: Fault, history: History) -> tuple[float, float]:
    """Return the beginning and the end of a fault, in seconds since the run's beginning."""
    return round(fault.began_s - history.began_s, _DIGITS), round(fault.ended_s - history.began_s, _DIGITS)


def _text(value: object) -> str:
    return html.escape(str(value))
