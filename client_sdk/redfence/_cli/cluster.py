"""`redfence cluster`: what operators do with the nodes; `status` is here, others come from entry points."""

from __future__ import annotations

import argparse

from redfence._cli import cluster_status, commands

HELP = "look at the nodes; form, mend and recover a cluster"
GROUP = "redfence.commands.cluster"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the commands below this one."""
    commands.add_commands(parser, group=GROUP, arguments=(), built_in={"status": cluster_status})


def run(arguments: argparse.Namespace) -> int:
    """Never happens: one of the commands below runs."""
    raise AssertionError(arguments)
