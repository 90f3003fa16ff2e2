"""Groups the commands of `redfence sessions`, which show the open streams of a server."""

from __future__ import annotations

import argparse

from redfence._cli import commands, sessions_list

HELP = "show the open streams of a server"
GROUP = "redfence.commands.sessions"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands.add_commands(parser, group=GROUP, built_in={"list": sessions_list})


def run(arguments: argparse.Namespace) -> int:
    """Raise AssertionError, because argparse always runs a subcommand."""
    raise AssertionError(arguments)
