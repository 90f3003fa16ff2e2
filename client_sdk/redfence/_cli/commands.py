"""How subcommands are found: each is a module behind an entry point, loaded when it is asked for.

Such a module has `HELP: str`, `configure(parser) -> None` and `run(arguments) -> int`, whose result is the exit status. What
stood behind `--` on the command line is in `arguments.rest`; a command that wants it says
`parser.set_defaults(takes_rest=True)`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Protocol, cast

GROUP = "redfence.commands"
EXIT_USAGE = 2
_NEEDS = "needs pip install 'redfence[embedded]'"


class Command(Protocol):
    """What a command's module offers."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Do it, and return the exit status."""
        ...


class MissingCommand:
    """Stands in for a command whose package is not installed: it is listed, and running it says what to install."""

    def __init__(self, error: ImportError) -> None:
        self.HELP = f"({_NEEDS})"
        self._error = error

    def configure(self, parser: argparse.ArgumentParser, /) -> None:
        """Accept anything: the real arguments are unknown."""
        parser.set_defaults(takes_anything=True, takes_rest=True)

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Say what is missing."""
        print(missing(arguments.command_name, self._error), file=sys.stderr)
        return EXIT_USAGE


def missing(name: str, error: ImportError) -> str:
    """Return the sentence for a command that lacks a package."""
    return f"redfence {name}: {_NEEDS} ({error})"


def add_commands(
    parser: argparse.ArgumentParser,
    *,
    group: str,
    arguments: Sequence[str],
    built_in: Mapping[str, ModuleType] | None = None,
) -> None:
    """Add every command of an entry-point group to a parser; only the one asked for is loaded, for a quick start.

    Args:
        parser: of the program or the command above.
        group: the entry points' group.
        arguments: the command line from here on; if its first word is a command, the others are left out.
        built_in: commands that are there without an entry point.
    """
    found: dict[str, EntryPoint | ModuleType] = {entry.name: entry for entry in entry_points(group=group)}
    found.update(built_in or {})
    if arguments and arguments[0] in found:
        found = {arguments[0]: found[arguments[0]]}
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name, source in sorted(found.items()):
        command = _load(source) if isinstance(source, EntryPoint) else cast("Command", source)
        below = subparsers.add_parser(name, help=command.HELP, description=command.HELP)
        path = below.prog.partition(" ")[2]
        below.set_defaults(command_name=path, run=command.run, takes_anything=False, takes_rest=False)
        command.configure(below)


def _load(entry: EntryPoint) -> Command:
    try:
        return cast("Command", entry.load())
    except ImportError as error:
        return MissingCommand(error)
