"""Groups the commands of `redfence cluster`; `status` is built in, the others come from entry points."""

from __future__ import annotations

import argparse

from redfence._cli import cluster_status, commands

HELP = "show the nodes; form, repair and recover a cluster"
GROUP = "redfence.commands.cluster"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands.add_commands(parser, group=GROUP, built_in={"status": cluster_status})


def run(arguments: argparse.Namespace) -> int:
    """Raise AssertionError, because argparse always runs a subcommand."""
    raise AssertionError(arguments)
