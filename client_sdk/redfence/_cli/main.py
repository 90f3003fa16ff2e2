"""The console script `redfence`: finds the subcommand, runs it, and turns expected errors into one line."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from importlib.metadata import version

from redfence._cli import commands
from redfence._errors import RedfenceError

EXIT_FAILED = 1
# As a shell reports a program that Ctrl-C ended.
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141  # as a shell tells a death by SIGPIPE
# Packages of this project: one of theirs that is missing is a defect, not an extra that was not installed.
_OWN_PACKAGES = ("redfence", "redfence_proto", "redfence_server", "redfence_storage")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status; a traceback is a defect."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    _silence_libraries()
    # argparse cannot give a subcommand what stands behind `--` untouched.
    own, rest = _split(arguments)
    parser = argparse.ArgumentParser(prog="redfence", description="Distributed locks with fencing tokens.")
    parser.add_argument("--version", action="version", version=f"redfence {version('redfence')}")
    commands.add_commands(parser, group=commands.GROUP, arguments=own)
    parsed, unknown = parser.parse_known_args(own)
    if unknown and not parsed.takes_anything:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if rest and not parsed.takes_rest:
        parser.error(f"redfence {parsed.command_name} takes nothing behind --")
    parsed.rest = rest
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except BrokenPipeError:
        # Whoever read it has seen enough, as `head` has. The interpreter would flush once more, and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except RedfenceError as error:
        print(f"redfence {parsed.command_name}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] in _OWN_PACKAGES:
            raise
        print(commands.missing(parsed.command_name, error), file=sys.stderr)
        return commands.EXIT_USAGE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    return status


def _silence_libraries() -> None:
    """Leave the terminal to the commands: what a library has to say reaches them as results and errors."""
    # Without a handler, Python prints warnings of loggers that nobody set up.
    logging.getLogger("redfence").addHandler(logging.NullHandler())
    if "GRPC_VERBOSITY" not in os.environ:
        # For the gRPC library in this process only: `os.environ` is what other programs inherit.
        os.putenv("GRPC_VERBOSITY", "ERROR")


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    if "--" not in arguments:
        return arguments, []
    dashes = arguments.index("--")
    return arguments[:dashes], arguments[dashes + 1 :]


if __name__ == "__main__":
    sys.exit(main())
