"""Runs the console script `redfence`: finds the subcommand and prints expected errors as one line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence

from redfence._cli import commands
from redfence._errors import RedfenceError
from redfence_proto import variables

EXIT_FAILED = 1
# The status that a shell reports after Ctrl-C.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # the status that a shell reports after SIGPIPE
_STDERR = 2
# The packages of this project. If one of their modules is missing, that is a bug and not a missing extra.
_OWN_PACKAGES = ("redfence", "redfence_proto", "redfence_server", "redfence_storage")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; print expected errors without a traceback.

    Raises:
        SystemExit: argparse ended the program, for a usage error, `--help` or `--version`.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _open_standard_streams()
    # Without a handler, Python prints the warnings of a logger; commands print errors themselves.
    logging.getLogger("redfence").addHandler(logging.NullHandler())
    try:
        parsed = parse(arguments)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    # For every command, also for one that reads no variable: a script then finds the mistake at once.
    if problem := variables.misspelt():
        print(f"redfence {parsed.command_name}: {problem}", file=sys.stderr)
        return commands.EXIT_USAGE
    return _run(parsed)


def _run(parsed: argparse.Namespace) -> int:
    try:
        status: int = parsed.run(parsed)
        if sys.stdout is not None:  # the caller may have closed it
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader, e.g. `head`, has closed the pipe. At its exit the interpreter would flush
        # again and print an error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except RedfenceError as error:
        print(f"redfence {parsed.command_name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OWN_PACKAGES:
            raise
        print(commands.missing(parsed.command_name, parsed.extra, error), file=sys.stderr)
        return commands.EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the parsed command line; `run` is the command.

    Raises:
        SystemExit: argparse ended the program, for a usage error, `--help` or `--version`.
    """
    # argparse cannot pass the words after `--` to a subcommand unchanged.
    own, rest = _split(list(arguments))
    parser = commands.make_parser(own)
    parsed: argparse.Namespace
    parsed, unknown = parser.parse_known_args(own)
    if unknown and not parsed.takes_anything:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest and not parsed.takes_rest:
        parser.error(f"redfence {parsed.command_name} takes no words after --: {' '.join(rest)}")
    parsed.rest, parsed.dashes = rest, "--" in arguments
    return parsed


def _open_standard_streams() -> None:
    """Open the null device where the caller closed a standard stream; another file would get its number."""
    highest = -1
    while highest < _STDERR:
        highest = os.open(os.devnull, os.O_RDWR)
        if highest <= _STDERR:
            os.set_inheritable(highest, True)
    os.close(highest)


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    dashes = arguments.index("--")
    return arguments[:dashes], arguments[dashes + 1 :]


if __name__ == "__main__":
    sys.exit(main())
