"""Formats what commands print: tables for people, JSON for programs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from redfence._messages.reports import Hold


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    """Add `-o`, which chooses between a table and JSON."""
    parser.add_argument(
        "-o",
        "--output",
        choices=("table", "json"),
        default="table",
        help="output format (default: %(default)s)",
    )


def table(heading: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a line for the heading and for each row, with aligned columns."""
    lines = [heading, *rows]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def hold(shown: Hold) -> tuple[str, str]:
    """Return two cells for a table: the token of a hold, and how long the lock stays held or closed."""
    return str(shown.token), seconds(shown.remaining) + (" closed" if shown.closed else "")


def seconds(length: float) -> str:
    """Return a length of time for a table."""
    return f"{length:.1f}s"
