"""The report of a chaos run names everything that was found, believes no record to be harmless, and stays small."""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from harness.chaos import report_scene
from harness.chaos.checker import check
from harness.chaos.records import Fault, History, Kind, Operation, Outcome
from harness.chaos.report import FAULTS_MAX, VIOLATIONS_MAX, write_report
from harness.chaos.report_scene import GRANT, MARKS_MAX, ROWS_MAX, STALE, UNKNOWN

OK = Outcome.OK
_VOID = {"meta", "br"}
_MEGABYTE = 10**6
# Words that would be a script of their own, or end the page's own, if they were not escaped.
_EVIL = "</script><script>alert('&amp;\"')</script><img src=//x onerror=alert(1)>"


class Page(HTMLParser):
    """A page as a browser takes it apart; fails where an element is not closed.

    Attributes:
        elements: every one, with its attributes.
        text: what there is to read.
        scene: what the script draws.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.scripts: list[str] = []
        self._open: list[str] = []
        self.feed(path.read_text("utf-8"))
        self.close()
        assert not self._open, self._open
        data, _program = self.scripts
        self.scene: dict[str, Any] = json.loads(data)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag == "script":
            self.scripts.append("")
        if tag not in _VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            self.scripts[-1] += data
        else:
            self.text += data

    def attributes(self, name: str) -> list[str | None]:
        """Return the values of an attribute, of all elements that have it."""
        return [attributes[name] for _, attributes in self.elements if name in attributes]


def call(kind: Kind, lease: str, at_s: float, **fields: Any) -> Operation:
    """Return a call that takes 1 ms and is OK."""
    return replace(Operation("client 1", kind, "orders", lease, at_s, at_s + 0.001, OK), **fields)


def acquire(lease: str, token: int, at_s: float, **fields: Any) -> Operation:
    """Return a grant for a ttl of 2 s."""
    grant = call(Kind.ACQUIRE, lease, at_s, token=token, until_s=at_s + 1.978, ttl_s=2.0)
    return replace(grant, **fields)


def broken() -> History:
    """Return a run with two violations, a call that is unknown, a stale write and three faults."""
    return History(
        seed=4711,
        operations=(
            acquire("a", 6, 1000.0),
            acquire("b", 5, 1001.0, client="client 2"),
            call(Kind.APPEND, "a", 1002.0, token=6, entry="x", outcome=Outcome.FAILED, stale=True),
            call(Kind.ACQUIRE, "c", 1003.0, outcome=Outcome.UNKNOWN, completed_s=None, client="client 3"),
        ),
        faults=(
            Fault("node wiped", "node 1", 1002.0, 1002.5),
            Fault("server killed", "server 0", 1003.0, 1004.0),
            Fault("clock stepped", "node 2", 1004.0, 1005.0, moves_clocks=True),
        ),
        began_s=1000.0,
        healed_s=1008.0,
        ended_s=1010.0,
        kept={},
    )


def big(leases: int) -> History:
    """Return a run of an hour with so many leases that are released, and one violation in its middle."""
    operations = []
    for turn in range(leases):
        at_s, lease, name = turn * 3600 / leases, f"{turn:032x}", f"orders/{turn % 6}"
        token = 1 if turn == leases // 2 else turn + 2
        operations.append(acquire(lease, token, at_s, client=f"client {turn % 12}", resource=name))
        operations.append(call(Kind.RELEASE, lease, at_s + 0.02, resource=name))
    return History(1, tuple(operations), (), 0.0, 3600.0, 3601.0, {})


def page_of(history: History, tmp_path: Path) -> Page:
    """Return the report of a history as it is judged."""
    path = tmp_path / "report.html"
    write_report(history, check(history), path)
    return Page(path)


def test_every_violation_and_every_fault_is_named_and_linked_to_its_place(tmp_path: Path) -> None:
    """In the text, and in the timeline with the calls that show it."""
    history = broken()
    verdict = check(history)
    page = page_of(history, tmp_path)
    assert {str(violation.invariant) for violation in verdict.violations} == {"T2", "L"}
    assert "2 violations" in page.text
    for number, violation in enumerate(verdict.violations):
        assert violation.words in page.text
        assert f"v{number}" in page.attributes("id")
        assert str(number) in page.attributes("data-violation")
        letter, at_s, row, from_s, to_s, calls = page.scene["violations"][number]
        assert letter == violation.invariant
        assert page.scene["rows"][row]["name"] == "orders"
        assert from_s <= at_s <= to_s
        assert len(calls) == len(violation.operations)
    for fault in history.faults:
        assert fault.kind in page.text
        assert fault.target in page.text
    assert page.attributes("data-from") == ["2.0", "3.0", "4.0"]
    assert [(page.scene["kinds"][each[0]], *each[1:]) for each in page.scene["faults"]] == [
        ("node wiped", 2.0, 2.5, "node 1", 0),
        ("server killed", 3.0, 4.0, "server 0", 0),
        ("clock stepped", 4.0, 5.0, "node 2", 1),
    ]


def test_grants_unknown_calls_and_refusals_are_drawn(tmp_path: Path) -> None:
    """Each from its beginning, with token and client; what overlaps lies below."""
    page = page_of(broken(), tmp_path)
    (row,) = page.scene["rows"]
    marks = [(*mark[:4], page.scene["clients"][mark[4]], mark[5]) for mark in row["marks"]]
    assert marks == [
        (GRANT, 0.001, 1.977, 6, "client 1", 0),
        (GRANT, 1.001, 1.977, 5, "client 2", 1),
        (STALE, 2.0, 0.001, 6, "client 1", 0),
        (UNKNOWN, 3.0, 2.0, 0, "client 3", 0),
    ]


def test_the_headline_tells_what_came_of_it(tmp_path: Path) -> None:
    """An invalid run is not called clean, and each reason is there."""
    history = replace(broken(), operations=broken().operations[:1])
    verdict = check(history)
    page = page_of(history, tmp_path)
    assert "An invalid run" in page.text
    assert all(reason in page.text for reason in verdict.invalid)
    path = tmp_path / "clean.html"
    write_report(history, replace(verdict, invalid=()), path)
    assert "Every promise was kept" in Page(path).text


def test_the_figures_are_there(tmp_path: Path) -> None:
    """Those of the verdict."""
    text = page_of(broken(), tmp_path).text
    for words in ("seed 4711", "stale writes refused", "longest time without a grant", "10.0 s", "acquire"):
        assert words in text


def test_what_records_say_is_text_wherever_it_stands(tmp_path: Path) -> None:
    """No name can become an element or end the script."""
    history = broken()
    evil = replace(
        history,
        operations=tuple(
            replace(each, client=_EVIL, lease=each.lease + _EVIL, resource=_EVIL, entry=_EVIL, detail=_EVIL)
            for each in history.operations
        ),
        faults=tuple(replace(each, kind=_EVIL, target=_EVIL) for each in history.faults),
        kept={_EVIL: (_EVIL,)},
        asked=(f"never {_EVIL}",),
    )
    page = page_of(evil, tmp_path)
    plain = page_of(history, tmp_path)
    assert len([tag for tag, _ in page.elements if tag == "script"]) == 2
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert {tag for tag, _ in page.elements} == {tag for tag, _ in plain.elements} | {"ul", "li"}
    assert page.text.count(_EVIL) > 10
    assert page.scene["rows"][0]["name"] == _EVIL
    assert page.scene["clients"] == [_EVIL]


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    """It loads nothing, and would not be let: it is read on a machine without a network."""
    page = page_of(broken(), tmp_path)
    assert not {"src", "srcset", "href", "action", "data"} & {
        name for tag, attributes in page.elements if tag != "a" for name in attributes
    }
    assert {value for value in page.attributes("href") if value} == {"#timeline"}
    (policy,) = [attributes["content"] for tag, attributes in page.elements if "http-equiv" in attributes]
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    assert "http:" not in page.scripts[1]
    assert "https:" not in page.scripts[1]


def test_a_run_without_anything_has_a_report(tmp_path: Path) -> None:
    """The machine may have failed before its first call."""
    page = page_of(History(1, (), (), 5.0, 5.0, 5.0, {}), tmp_path)
    assert page.scene["rows"] == []
    assert "An invalid run" in page.text


def test_a_long_run_is_drawn_in_slices_and_in_full_around_what_was_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out one by one is counted, slice by slice."""
    monkeypatch.setattr(report_scene, "MARKS_MAX", 1_000)
    scene = page_of(big(6_000), tmp_path).scene
    ((_, at_s, broken_row, _, _, _),) = scene["violations"]
    slices = [each for row in scene["rows"] for each in row["slices"]]
    assert sum(each[2] for each in slices) == 6_000
    assert sum(each[1] for each in slices) * scene["slice"] == pytest.approx(6_000 * 0.019, rel=0.1)
    marks = {number: row["marks"] for number, row in enumerate(scene["rows"]) if row["marks"]}
    assert list(marks) == [broken_row]
    assert any(mark[1] == at_s for mark in marks[broken_row])
    assert all(abs(mark[1] - at_s) < 30 for mark in marks[broken_row])


@pytest.mark.slow
@pytest.mark.parametrize("leases", [MARKS_MAX, MARKS_MAX + 1], ids=["one by one", "in slices"])
def test_the_page_of_a_long_run_stays_below_10_megabytes(leases: int, tmp_path: Path) -> None:
    """On either side of the bound."""
    page = page_of(big(leases), tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 10 * _MEGABYTE
    drawn = sum(len(row["marks"]) for row in page.scene["rows"])
    assert (drawn == MARKS_MAX) == (leases == MARKS_MAX)


@pytest.mark.slow
def test_very_many_resources_violations_and_faults_are_told_in_part_and_counted(tmp_path: Path) -> None:
    """The worst run has a readable page as well."""
    count = 4 * VIOLATIONS_MAX
    operations = [acquire("a", 10**9, 0.0)]
    operations += [
        acquire(f"b{turn}", turn + 1, 1 + turn / 10, until_s=1 + turn / 10) for turn in range(count)
    ]
    operations += [
        replace(acquire(f"c{turn}", 1, turn / 10), resource=f"r{turn}" + "x" * 200) for turn in range(count)
    ]
    operations.append(replace(acquire("z", 0, 8e4), resource="used once, and broken"))
    history = History(
        seed=1,
        operations=tuple(sorted(operations, key=lambda each: each.invoked_s)),
        faults=tuple(Fault("node paused", f"node {turn}", turn, turn + 1) for turn in range(FAULTS_MAX + 5)),
        began_s=0.0,
        healed_s=9e5,
        ended_s=1e6,
        kept={},
    )
    page = page_of(history, tmp_path)
    assert (tmp_path / "report.html").stat().st_size < 10 * _MEGABYTE
    assert len(page.attributes("data-violation")) == VIOLATIONS_MAX
    assert "and 5 more." in page.text
    assert len(page.scene["rows"]) == ROWS_MAX
    assert "used once, and broken" in [row["name"] for row in page.scene["rows"]]
    assert f"{count + 2 - ROWS_MAX:,} more resources are not drawn" in page.text
