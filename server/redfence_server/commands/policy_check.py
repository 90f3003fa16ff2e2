"""`redfence policy check`: validate a policy file, and explain a decision."""

from __future__ import annotations

import argparse
from pathlib import Path

from redfence_server.access import principal
from redfence_server.access.policy import Decision, Verb
from redfence_server.access.policy_file import load_policy
from redfence_server.commands import startup
from redfence_server.errors import ConfigError

HELP = "validate a policy file, and explain what it decides"
_EXIT_DENIED = 1


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    parser.epilog = (
        "Exit status: 0 valid, or allowed; 1 denied; 2 not valid. A server reads the file again at SIGHUP."
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="the file that policy_file names")
    parser.add_argument("--principal", metavar="NAME", help="token:NAME, jwt:SUBJECT, cert:NAME or anonymous")
    parser.add_argument(
        "--verb", choices=[verb.value for verb in Verb], help="what the principal wants to do"
    )
    parser.add_argument(
        "--resource", default="", metavar="NAME", help="the resource (default: a call without a resource)"
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Print what the policy decides; return 0 if it is valid and allows, 1 if it denies, 2 if it is wrong."""
    policy = load_policy(arguments.file)
    if arguments.principal is None and arguments.verb is None:
        count = len(policy.rules)
        print(f"{arguments.file}: valid, {count} rule{'' if count == 1 else 's'}")
        return 0
    if arguments.principal is None or arguments.verb is None:
        raise ConfigError("--principal and --verb: give both to explain a decision, or neither")
    try:
        who = principal.parse(arguments.principal)
    except ValueError as error:
        raise ConfigError(f"--principal: {error}") from error
    decision = policy.grants_of(who).decide(Verb(arguments.verb), arguments.resource)
    what = f"{who} {arguments.verb} {arguments.resource!r}"
    print(f"{'allowed' if decision.allowed else 'denied'}: {what}: {_because(decision)}")
    return 0 if decision.allowed else _EXIT_DENIED


def _because(decision: Decision) -> str:
    if decision.rule is None:
        return "no rule names this principal, verb and prefix"
    rule = decision.rule
    delay = f", with a lock delay of at least {rule.lock_delay_ms} ms" if rule.lock_delay_ms else ""
    return (
        f"rule {rule.number} has the longest prefix, {rule.prefix!r}, "
        f"and its effect is {rule.effect.value}{delay}"
    )
