"""Finds the subcommands of `redfence` by entry points, and imports a command's module only to run it.

Such a module has `HELP: str`, `configure(parser) -> None` and `run(arguments) -> int`, which returns the exit
status. `HELP` is a literal, so that `redfence --help` can read it without importing the module.

The words after the first `--` on the command line are in `arguments.rest`; `arguments.dashes` tells whether
there was one. A command that accepts such words calls `parser.set_defaults(takes_rest=True)`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from types import MappingProxyType, ModuleType
from typing import Any, Protocol, cast

GROUP = "redfence.commands"
EXIT_USAGE = 2

# The extra that has the packages of each command. The wheel has all modules, and `pip install
# redfence` alone runs the commands that are missing here.
EXTRA_BY_MODULE: Mapping[str, str] = MappingProxyType(
    {
        "redfence._cli.completion": "completion",
        "redfence_server.commands.cluster_init": "server",
        "redfence_server.commands.cluster_recover": "server",
        "redfence_server.commands.cluster_replace": "server",
        "redfence_server.commands.cluster_resize": "server",
        "redfence_server.commands.dev": "embedded",
        "redfence_server.commands.doctor": "server",
        "redfence_server.commands.policy_check": "server",
        "redfence_server.commands.policy_new_token": "server",
        "redfence_server.commands.serve": "server",
        "redfence_storage.commands.demo": "embedded",  # starts a server unless one is running
        "redfence_storage.commands.storage": "storage",
    }
)
# Has every package, for a module without a row in the table.
_EXTRA_DEFAULT = "embedded"


class Command(Protocol):
    """The interface of a command's module."""

    HELP: str

    def configure(self, parser: argparse.ArgumentParser, /) -> None:
        """Add the command's arguments."""
        ...

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Run the command, and return the exit status."""
        ...


class MissingCommand:
    """Replaces a command whose module cannot be imported; running it prints which extra to install."""

    HELP = "not installed"

    def __init__(self, error: ImportError) -> None:
        self._error = error

    def configure(self, parser: argparse.ArgumentParser, /) -> None:
        """Accept any arguments, because the real ones are unknown."""
        parser.set_defaults(takes_anything=True, takes_rest=True)

    def run(self, arguments: argparse.Namespace, /) -> int:
        """Print which extra to install."""
        print(missing(arguments.command_name, arguments.extra, self._error), file=sys.stderr)
        return EXIT_USAGE


def missing(name: str, extra: str, error: ImportError) -> str:
    """Return the message for a command that cannot import a package."""
    return f"redfence {name}: cannot import {error.name}; run: pip install 'redfence[{extra}]' ({error})"


class CommandParser(argparse.ArgumentParser):
    """Imports its command and adds the command's arguments only when it parses a command line."""

    source: EntryPoint | ModuleType | None = None
    _commands: Mapping[str, CommandParser] = MappingProxyType({})

    # argparse declares overloads that a subclass cannot repeat.
    def parse_known_args(self, *args: Any, **kwargs: Any) -> Any:
        """Import the command, add its arguments, then parse."""
        self._load()
        return super().parse_known_args(*args, **kwargs)

    def add_subparsers(self, **kwargs: Any) -> Any:
        """Add commands below this one."""
        subparsers = super().add_subparsers(**kwargs)
        self._commands = subparsers.choices
        return subparsers

    def load_all(self) -> Iterator[CommandParser]:
        """Yield this parser, then the parser of each command below it, with all arguments."""
        self._load()
        yield self
        for below in self._commands.values():
            yield from below.load_all()

    def _load(self) -> None:
        if self.source is not None:
            source, self.source = self.source, None
            command = _load(source)
            self.set_defaults(run=command.run)
            command.configure(self)


def make_parser(arguments: Sequence[str] = ()) -> CommandParser:
    """Return the parser of `redfence`, for a command line that begins with these words."""
    parser = CommandParser(prog="redfence", description="Distributed locks with fencing tokens.")
    parser.add_argument("--version", action="version", version=f"redfence {version('redfence')}")
    add_commands(parser, group=GROUP, arguments=arguments)
    return parser


def add_commands(
    parser: argparse.ArgumentParser,
    *,
    group: str,
    arguments: Sequence[str] = (),
    built_in: Mapping[str, ModuleType] | None = None,
) -> None:
    """Add the commands of an entry-point group to a parser, without importing the commands.

    Args:
        parser: the parser of the program, or of the command above.
        group: the name of the entry-point group.
        arguments: the command line. If it begins with a command, only that one is added, for a quick start.
        built_in: commands that have no entry point.
    """
    found: dict[str, EntryPoint | ModuleType] = {entry.name: entry for entry in entry_points(group=group)}
    found.update(built_in or {})
    if arguments and arguments[0] in found:
        found = {arguments[0]: found[arguments[0]]}
    subparsers = parser.add_subparsers(
        title="commands", metavar="COMMAND", required=True, parser_class=CommandParser
    )
    for name, source in sorted(found.items()):
        text = _help(source)
        below = subparsers.add_parser(name, help=text + _needs(source), description=text)
        below.source = source
        below.set_defaults(
            command_name=below.prog.partition(" ")[2],
            extra=_extra(source) or _EXTRA_DEFAULT,
            takes_anything=False,
            takes_rest=False,
        )


def _load(source: EntryPoint | ModuleType) -> Command:
    try:
        return cast("Command", source.load() if isinstance(source, EntryPoint) else source)
    except ImportError as error:
        return MissingCommand(error)


def _extra(source: EntryPoint | ModuleType) -> str | None:
    return EXTRA_BY_MODULE.get(source.module) if isinstance(source, EntryPoint) else None


def _needs(source: EntryPoint | ModuleType) -> str:
    extra = _extra(source)
    return f" (needs redfence[{extra}])" if extra else ""


def _help(source: EntryPoint | ModuleType) -> str:
    """Return the text of `HELP`; read it from the module's source if the module is not imported."""
    if isinstance(source, EntryPoint) and source.module in sys.modules:
        source = sys.modules[source.module]
    if isinstance(source, ModuleType):
        return str(vars(source)["HELP"])
    try:
        spec = find_spec(source.module)
    except ImportError:
        spec = None
    code = cast("Any", spec.loader).get_source(source.module) if spec and spec.loader else ""
    for statement in ast.parse(code or "").body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="HELP")], value=ast.Constant(value=str(text))):
                return text
    return MissingCommand.HELP
