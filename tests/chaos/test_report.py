"""The report of a chaos run holds everything that was found, and its page treats no record as harmless."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from harness.chaos.cluster import Plan
from harness.chaos.report import report_of, write_report
from harness.chaos.run import Run, Schedule
from harness.history.checker import check
from harness.history.records import Fault, History, Kind, Operation, Outcome

_EVIL = "</table><script>alert('&amp;\"')</script><img src=//x onerror=alert(1)>"
_COURSE = Schedule(seed=4711, lasts_s=10.0, faults=("node wiped",))


class Page(HTMLParser):
    """A page as a browser parses it.

    Attributes:
        elements: the name and the attributes of every element.
        text: what a reader sees.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(path.read_text("utf-8"))
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def grant(lease: str, token: int, at_s: float, client: str) -> Operation:
    return Operation(
        client, Kind.ACQUIRE, "orders", lease, at_s, at_s + 0.001, Outcome.OK, token, at_s + 1.978, 2.0
    )


def broken() -> History:
    """Return a run with two violations, an unknown call and a fault."""
    unknown = replace(
        grant("c", 0, 1003.0, "client 3"), outcome=Outcome.UNKNOWN, completed_s=None, until_s=0.0
    )
    return History(
        seed=4711,
        operations=(grant("a", 6, 1000.0, "client 1"), grant("b", 5, 1001.0, "client 2"), unknown),
        faults=(Fault("node wiped", "node 1", 1002.0, 1002.5),),
        began_s=1000.0,
        healed_s=1008.0,
        ended_s=1010.0,
        kept={},
    )


def written(history: History, folder: Path, *defects: str) -> tuple[dict[str, Any], Page]:
    """Return the report of a run, as it is read again from its file, and its page."""
    run = Run(history, wrong=("a fault did not end",), defects=defects, late_s=0.0, logged=())
    path = folder / "report.json"
    page = write_report(report_of(Plan(), _COURSE, run, check(history)), path)
    return json.loads(path.read_text("utf-8")), Page(page)


def test_the_report_holds_plan_seed_faults_counts_verdict_and_violations(tmp_path: Path) -> None:
    """Instants count from the beginning of the load."""
    report, page = written(broken(), tmp_path)
    assert (report["verdict"], report["seed"], report["plan"]["node_count"]) == ("broken", 4711, 3)
    assert report["lasted_s"] == 10.0
    (fault,) = report["faults"]
    assert (fault["kind"], fault["target"], fault["began_s"], fault["ended_s"]) == (
        "node wiped",
        "node 1",
        2.0,
        2.5,
    )
    assert report["counts"]["operations"]["acquire"] == {"ok": 2, "failed": 0, "unknown": 1}
    assert report["counts"]["violations"]["T2"] == 1
    assert {violation["invariant"] for violation in report["violations"]} == {"T2", "L"}
    for violation in report["violations"]:
        assert [call["token"] for call in violation["calls"]] == [6, 5]
        assert [call["invoked_s"] for call in violation["calls"]] == [0.0, 1.0]
        assert violation["words"] in page.text
    for words in ("seed 4711: broken", "node wiped", "a fault did not end", *report["invalid"]):
        assert words in page.text


def test_the_verdict_tells_a_broken_run_from_one_that_proves_nothing(tmp_path: Path) -> None:
    """A defect breaks a run even if no call shows it."""
    quiet = replace(broken(), operations=())
    assert written(quiet, tmp_path)[0]["verdict"] == "invalid"
    report, page = written(quiet, tmp_path, "server 0 ended with -9")
    assert report["verdict"] == "broken"
    assert "server 0 ended with -9" in page.text
    clean = Run(quiet, wrong=(), defects=(), late_s=0.0, logged=())
    passed = report_of(Plan(), _COURSE, clean, replace(check(quiet), invalid=()))
    assert passed["verdict"] == "passed"


def test_the_page_shows_records_as_text_and_loads_nothing(tmp_path: Path) -> None:
    """A name from the records never becomes an element."""
    history = broken()
    evil = replace(
        history,
        operations=tuple(replace(each, client=_EVIL, resource=_EVIL) for each in history.operations),
        faults=tuple(replace(each, kind=_EVIL, target=_EVIL) for each in history.faults),
    )
    plain, page = written(history, tmp_path, "a defect")[1], written(evil, tmp_path, _EVIL)[1]
    assert [tag for tag, _ in page.elements] == [tag for tag, _ in plain.elements]
    assert page.text.count(_EVIL) > 5
    names = {name for _, attributes in page.elements for name in attributes}
    assert not {"src", "srcset", "href", "action", "data", "onerror"} & names
    (policy,) = [attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
