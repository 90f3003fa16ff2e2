"""Writes the report of a chaos run: a JSON file for programs and, beside it, a static page for people.

The page escapes every word of the records. It has no script, loads nothing, and its policy forbids both.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from harness.chaos.cluster import Plan
from harness.chaos.run import Run, Schedule
from harness.history.records import History, Operation
from harness.history.verdict import Verdict

Report: TypeAlias = dict[str, Any]
"""The content of the JSON file. Its instants are seconds since the load began."""
PASSED, BROKEN, INVALID = "passed", "broken", "invalid"
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_STYLE = "body{font:14px sans-serif;margin:2em}td,th{padding:.2em .8em;text-align:left;vertical-align:top}"


def report_of(plan: Plan, schedule: Schedule, run: Run, verdict: Verdict) -> Report:
    """Return everything that is known of a run, apart from its full list of calls."""
    history = run.history
    return {
        "verdict": _verdict(run, verdict),
        "seed": history.seed,
        "plan": asdict(plan) | asdict(schedule),
        "lasted_s": _since_begin(history, history.ended_s),
        "healed_s": _since_begin(history, history.healed_s),
        "late_s": round(run.late_s, 6),
        "invalid": [*run.wrong, *verdict.invalid],
        "defects": list(run.defects),
        "violations": [
            {
                "invariant": violation.invariant,
                "resource": violation.resource,
                "at_s": _since_begin(history, violation.at_s),
                "words": violation.words,
                "calls": [_call(history, call) for call in violation.calls],
            }
            for violation in verdict.violations
        ],
        "faults": [
            asdict(fault)
            | {
                "began_s": _since_begin(history, fault.began_s),
                "ended_s": _since_begin(history, fault.ended_s),
            }
            for fault in history.faults
        ],
        "counts": asdict(verdict.counts) | {"calls": len(history.operations)},
    }


def write_report(report: Report, path: Path) -> Path:
    """Write the JSON file to `path` and the page beside it; return the page's path."""
    page = path.with_suffix(".html")
    path.write_text(json.dumps(report, indent=1, default=str) + "\n", "utf-8")
    page.write_text("".join(_page(report)), "utf-8", "replace")
    return page


def _verdict(run: Run, verdict: Verdict) -> str:
    if verdict.violations or run.defects:
        return BROKEN
    return INVALID if run.wrong or verdict.invalid else PASSED


def _call(history: History, call: Operation) -> Report:
    completed_s = None if call.completed_s is None else _since_begin(history, call.completed_s)
    until_s = _since_begin(history, call.until_s) if call.until_s else None
    return asdict(call) | {
        "invoked_s": _since_begin(history, call.invoked_s),
        "completed_s": completed_s,
        "until_s": until_s,
    }


def _since_begin(history: History, at_s: float) -> float:
    return round(at_s - history.began_s, 6)


def _page(report: Report) -> Iterator[str]:
    title = f"Chaos run, seed {report['seed']}: {report['verdict']}"
    yield (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{_text(title)}</h1>\n"
    )
    counts = report["counts"]
    yield from _list("Why the run proves nothing", report["invalid"])
    yield from _list("Defects", report["defects"])
    yield from _table(
        f"Violations: {sum(counts['violations'].values())} found, {len(report['violations'])} listed",
        ("invariant", "at", "resource", "what happened"),
        (
            [each[name] for name in ("invariant", "at_s", "resource", "words")]
            for each in report["violations"]
        ),
    )
    outcomes = list(next(iter(counts["operations"].values())))
    yield from _table(
        f"Calls: {counts['calls']}",
        ("call", *outcomes),
        ((kind, *ended.values()) for kind, ended in counts["operations"].items()),
    )
    figures = {name: value for name, value in counts.items() if not isinstance(value, dict)}
    yield from _table(
        "Counts", ("name", "value"), (figures | counts["violations"] | counts["faults"]).items()
    )
    yield from _table("Plan", ("name", "value"), report["plan"].items())
    yield from _table(
        f"Faults: {len(report['faults'])}",
        ("fault", "target", "began", "ended"),
        ([each[name] for name in ("kind", "target", "began_s", "ended_s")] for each in report["faults"]),
    )
    yield "</body>\n</html>\n"


def _list(title: str, lines: Sequence[str]) -> Iterator[str]:
    if lines:
        yield f"<h2>{title}</h2>\n<ul>\n"
        yield from (f"<li>{_text(line)}</li>\n" for line in lines)
        yield "</ul>\n"


def _table(title: str, head: Iterable[object], rows: Iterable[Iterable[object]]) -> Iterator[str]:
    yield f"<h2>{title}</h2>\n<table>\n<tr>{''.join(f'<th>{_text(cell)}</th>' for cell in head)}</tr>\n"
    for row in rows:
        yield f"<tr>{''.join(f'<td>{_text(cell)}</td>' for cell in row)}</tr>\n"
    yield "</table>\n"


def _text(value: object) -> str:
    return html.escape(f"{value:.6g}" if isinstance(value, float) else str(value))
