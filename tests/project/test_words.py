"""The rules of language that a program can check, in docs, code, protos and scripts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
PAGES = sorted(
    [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md"), *(REPOSITORY / "tests").glob("*.md")]
)
SOURCES = sorted(
    path
    for folder in ("bench", "client_sdk", "docs", "protos", "server", "storage_demo", "tests")
    for pattern in ("*.lua", "*.pml", "*.proto", "*.py")
    for path in (REPOSITORY / folder).rglob(pattern)
    if "_pb2" not in path.name and path != Path(__file__)
)
PROSE_COLUMNS = 100
TEST_NAME_LENGTH = 80

# A sentence begins with a line, or after the end of another one. These beginnings hide the actor.
_OPENERS = r"(?:Of|Who|Whoever|Nobody|What is)"
_DIALECT = re.compile(rf"""(?:^|[.!?:]\s+|(?:\#|//|--|\"\"\"|\*|"|')\s*){_OPENERS}\s[a-z]""", re.MULTILINE)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are prose: no code, no tables, no links that cannot be broken."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("|"):
            yield number, line


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def _assert_none(defects: Iterator[str]) -> None:
    found = list(defects)
    assert not found, "\n" + "\n".join(found)


def test_no_sentence_begins_with_a_word_that_hides_the_actor() -> None:
    """The server, node, client, waiter or operator is named instead."""
    _assert_none(
        f"{_name(path)}:{text.count(chr(10), 0, found.end()) + 1}: {found[0].strip()!r}"
        for path in [*PAGES, *SOURCES]
        for text in [path.read_text()]
        for found in _DIALECT.finditer(text)
    )


def test_prose_wraps_at_100_columns() -> None:
    """Tables and code are exempt."""
    _assert_none(
        f"{_name(path)}:{number}: {len(line)} columns"
        for path in PAGES
        for number, line in _lines(path.read_text())
        if len(line) > PROSE_COLUMNS and not re.search(r"\S{60}", line)
    )


def test_names_of_tests_are_short_sentences() -> None:
    """They are at most 80 characters long."""
    _assert_none(
        f"{_name(path)}: {name}"
        for path in SOURCES
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if len(name) > TEST_NAME_LENGTH
    )
