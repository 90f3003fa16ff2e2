"""Groups the commands of `redfence policy`, which come from entry points."""

from __future__ import annotations

import argparse

from redfence._cli import commands

HELP = "check a policy file; make bearer tokens"
GROUP = "redfence.commands.policy"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands.add_commands(parser, group=GROUP)


def run(arguments: argparse.Namespace) -> int:
    """Raise AssertionError, because argparse always runs a subcommand."""
    raise AssertionError(arguments)
