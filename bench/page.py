"""Rewrites the figures and the chart of docs/performance.md from the last comparison."""

from __future__ import annotations

import argparse
import importlib.util
import re
import sys
from pathlib import Path

from bench import chart, cluster, report
from bench.comparison import Comparison

_DOCS = Path(__file__).resolve().parents[1] / "docs"
_PAGE, _CHART = _DOCS / "performance.md", _DOCS / "performance.png"
_FIGURES = re.compile(r"(?<=<!-- figures: begin -->\n).*?(?=<!-- figures: end -->)", re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `python -m bench page`."""
    parser.add_argument(
        "--json", type=Path, default=cluster.FOLDER / "comparison.json", help="what `compare` saved"
    )


def run(options: argparse.Namespace) -> int:
    """Rewrite the page; return the exit status: 2 if there is no comparison."""
    try:
        comparison = Comparison.load(options.json)
    except FileNotFoundError:
        print(f"{options.json} does not exist; run `make bench` first", file=sys.stderr)
        return 2
    _PAGE.write_text(with_figures(_PAGE.read_text(), comparison))
    if importlib.util.find_spec("matplotlib") is None:
        print("No chart was drawn: matplotlib is missing. `make performance` installs it.", file=sys.stderr)
    else:
        chart.draw(comparison, _CHART)
    return 0


def with_figures(page: str, comparison: Comparison) -> str:
    """Return the page with the figures of this comparison between its two marks.

    Raises:
        ValueError: the page does not have the marks.
    """
    head = (
        f"Measured on {comparison.at[:10]} with {comparison.machine['cores']} cores and Python "
        f"{comparison.machine['python']}. Each figure\nis a median of {comparison.rounds} interleaved rounds "
        f"of {comparison.seconds:g} s; of kept leases, there is one round."
    )
    image = f"![The rates, and the CPU time of a pair]({_CHART.name})"
    text, count = _FIGURES.subn(lambda _: f"\n{head}\n\n{image}\n\n{report.markdown(comparison)}\n\n", page)
    if count != 1:
        raise ValueError(f"the page has {count} pairs of `figures` marks; it needs one")
    return text
