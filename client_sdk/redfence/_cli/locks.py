"""Groups the commands of `redfence locks`, which show held locks and end a lease by force."""

from __future__ import annotations

import argparse

from redfence._cli import commands, locks_force_release, locks_inspect, locks_list, locks_watch

HELP = "show and watch held locks; end a lease by force"
GROUP = "redfence.commands.locks"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the subcommands."""
    commands.add_commands(
        parser,
        group=GROUP,
        built_in={
            "list": locks_list,
            "watch": locks_watch,
            "inspect": locks_inspect,
            "force-release": locks_force_release,
        },
    )


def run(arguments: argparse.Namespace) -> int:
    """Raise AssertionError, because argparse always runs a subcommand."""
    raise AssertionError(arguments)
