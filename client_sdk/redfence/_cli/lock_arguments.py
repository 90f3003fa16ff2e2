"""Defines the arguments of `redfence lock`, with the short options of flock(1) and timeout(1)."""

from __future__ import annotations

import argparse
from typing import Any

from redfence._cli import servers
from redfence_proto import durations

_USAGE = """redfence lock [options] NAME [--] CMD [ARGUMENT …]
       redfence lock [options] NAME -c 'SHELL TEXT'"""
_EPILOG = """\
Options may stand before and after NAME. The command begins at the first word after NAME that is not an option
of redfence lock; all words after it belong to the command. Write -- before a command that begins with a dash.

If no server answers, redfence gives up after DURATION of --wait, or after 5s if that is shorter. But it takes
1.5s for each server, also with --nonblock.

The command gets the lock's name in REDFENCE_RESOURCE and the fencing token in REDFENCE_TOKEN. It runs in
its own process group, and inherits open files and ignored signals. When the command ends, redfence ends the
rest of the group, then releases the lock. On Linux it also ends every other process that the command started,
even in the background or by setsid. If redfence cannot renew the lease, it sends all of them SIGTERM and then
SIGKILL, so that they have ended before the lease ends. If redfence itself is killed by SIGKILL, only the
command is killed with it (on Linux); processes that the command started go on.

exit status: the status of the command (128 + n for signal n); 2 wrong usage; 69 no server or no quorum was
reachable in time; 75 the lock was not acquired (see -E); 77 the server denies it; 122 the lease was lost;
126 the command cannot be executed; 127 the command was not found."""

# The options of flock and timeout that redfence does not have: what redfence does, and the fix.
_REFUSED = {
    ("-s", "--shared", "--signal"): "redfence has no shared locks, and stops a command by SIGTERM, "
    "then SIGKILL; leave the option out (see --kill-after)",
    ("-u", "--unlock"): "redfence releases the lock when the command ends; leave the option out",
    ("-o", "--close"): "redfence ends the processes that a command leaves behind, so none of them keeps "
    "the lock; leave the option out",
    ("-F", "--no-fork"): "redfence stays beside the command to renew the lease; leave the option out",
}
_STATUS_MAX = 255


class _RefusedOption(argparse.Action):
    """Ends the program with the fix for an option that redfence does not have."""

    def __init__(self, option_strings: list[str], dest: str, *, because: str) -> None:
        # With an optional value, so that `--signal=KILL` gets the same answer.
        super().__init__(option_strings, dest, nargs="?", help=argparse.SUPPRESS)
        self._because = because

    def __call__(self, parser: argparse.ArgumentParser, _: Any, __: Any, option: str | None = None) -> None:
        """Print the fix, and exit with status 2."""
        parser.error(f"argument {option}: {self._because}")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.usage = _USAGE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    # An argument of the command can look like the beginning of two options of `lock`.
    parser.allow_abbrev = False
    parser.add_argument("name", metavar="NAME", help="the name of the lock")
    # argparse ends its own options where such an argument begins, as it does for a subcommand.
    command = parser.add_argument(
        "command", nargs=argparse.PARSER, metavar="CMD", help="the command to run, and its arguments"
    )
    command.required = False  # -c, or the words after `--`, can replace it
    parser.add_argument(
        "-c",
        "--command",
        dest="shell_text",
        metavar="TEXT",
        help="run a shell text by `sh -c` instead of CMD",
    )
    parser.add_argument(
        "--ttl",
        type=durations.seconds,
        default=10.0,
        metavar="DURATION",
        help="how long the lock stays held if this machine dies, e.g. 10s, 500ms, 2m (default: 10s)",
    )
    _add_waiting(parser)
    parser.add_argument(
        "-k",
        "--kill-after",
        type=durations.seconds,
        metavar="DURATION",
        help="when the lease cannot be renewed, the time between SIGTERM and SIGKILL "
        "(default: a quarter of the ttl, at most 10s)",
    )
    parser.add_argument(
        "--lock-delay",
        type=durations.seconds,
        default=0.0,
        metavar="DURATION",
        help="how long the lock stays closed to every client if the lease is lost, e.g. because this machine "
        "stands still, so that the command has time to stop; a release opens the lock at once; ttl and delay "
        "together are at most the cluster's greatest ttl (default: 0s)",
    )
    parser.add_argument(
        "--holder", metavar="LABEL", help="a label that other clients see (default: user@host/pid)"
    )
    servers.add_server_arguments(parser)
    parser.add_argument(
        "-x", "-e", "--exclusive", action="store_true", help="changes nothing: every lock is exclusive"
    )
    for options, because in _REFUSED.items():
        parser.add_argument(*options, action=_RefusedOption, because=because)
    parser.set_defaults(takes_rest=True)


def _add_waiting(parser: argparse.ArgumentParser) -> None:
    waiting = parser.add_mutually_exclusive_group()
    waiting.add_argument(
        "-w",
        "--wait",
        "--timeout",
        type=durations.seconds,
        metavar="DURATION",
        help="how long to wait for the lock, e.g. 2.5, 10s, 2m (default: for ever)",
    )
    waiting.add_argument(
        "-n",
        "--nonblock",
        "--nb",
        action="store_const",
        const=0.0,
        dest="wait",
        help="do not wait: fail if the lock is held or closed (as --wait 0)",
    )
    parser.add_argument(
        "-E",
        "--conflict-exit-code",
        type=_status,
        metavar="STATUS",
        help="the exit status if the lock is held or closed, or not free in time (default: 75)",
    )


def command_of(arguments: argparse.Namespace) -> list[str]:
    """Return the command to run, with its arguments.

    Raises:
        ValueError: there is no command, or one beside -c.
    """
    words: list[str] = arguments.command or []
    if not words:
        words = arguments.rest
    elif arguments.dashes:
        words = [*words, "--", *arguments.rest]
    if arguments.shell_text is None:
        if not words:
            raise ValueError("no command given; write it after NAME, e.g. redfence lock NAME make deploy")
        if not words[0]:
            raise ValueError("the command is an empty word; is a variable of the shell unset?")
        return words
    if words:
        raise ValueError(
            f"-c and the command {words[0]!r} given; use one of them, and quote the shell text as one word: "
            "redfence lock NAME -c 'make && make deploy'"
        )
    return ["sh", "-c", arguments.shell_text]


def _status(text: str) -> int:
    if not text.isascii() or not text.isdecimal() or int(text) > _STATUS_MAX:
        raise argparse.ArgumentTypeError(f"{text!r} is not an exit status; write a number from 0 to 255")
    return int(text)
