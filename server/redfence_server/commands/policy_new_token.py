"""`redfence policy new-token`: make a bearer token, and the entry for the tokens file."""

from __future__ import annotations

import argparse
import json
import sys

from redfence_server.access.principal import name_problem
from redfence_server.access.tokens import digest_of
from redfence_server.commands import startup
from redfence_server.errors import ConfigError
from redfence_server.randomness import SystemRandomness

HELP = "make a bearer token, and the entry for the tokens file"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "The token goes to standard error, for its owner. The entry, which has only its SHA-256, goes to "
        "standard output: redfence policy new-token billing >> tokens.toml"
    )
    parser.add_argument("name", metavar="NAME", help="the principal's name; the policy calls it token:NAME")


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Print a new token and its entry."""
    if problem := name_problem(arguments.name):
        raise ConfigError(f"NAME {problem}")
    randomness = SystemRandomness()
    token = f"redfence-{randomness.hex_id()}{randomness.hex_id()}"
    name = json.dumps(arguments.name, ensure_ascii=False)
    print(f'[[tokens]]\nname = {name}\nsha256 = "{digest_of(token).hex()}"', flush=True)
    sys.stderr.write(f"the token, which nothing shows again: {token}\n")
    return 0
