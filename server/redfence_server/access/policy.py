"""Decide whether a principal may do something to a resource. Pure.

Only the rules that name the principal and the verb count. Among those, the rule with the longest prefix of
the resource's name decides. If two rules have that prefix, a denial decides before a rule that allows, and
the longer lock delay before a shorter one. Without such a rule, the policy denies.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Final

from redfence_server.access.principal import ANONYMOUS, AUTHENTICATED, Principal
from redfence_server.values import value


class Verb(StrEnum):
    """What a principal may do to the resources that begin with a prefix."""

    ACQUIRE = "acquire"
    INSPECT = "inspect"
    ADMIN = "admin"
    STORAGE = "storage"


class Effect(StrEnum):
    """What a rule does with the calls that it applies to."""

    ALLOW = "allow"
    DENY = "deny"


@value
class Rule:
    """One rule of a policy.

    Attributes:
        principals: texts of principals, or `authenticated`.
        prefix: how the names of the resources begin; empty for all, and for calls without a resource.
        number: the rule's place in the policy, from 1.
        lock_delay_ms: the least lock delay of the leases that the rule allows to acquire.
    """

    principals: frozenset[str]
    verbs: frozenset[Verb]
    prefix: str
    effect: Effect
    number: int
    lock_delay_ms: int = 0


@value
class Decision:
    """An answer, and the rule that gave it; None if no rule applied."""

    allowed: bool
    rule: Rule | None


_NO_RULE: Final = Decision(allowed=False, rule=None)


class _Prefixes:
    """The decisions for one principal and one verb, by prefix."""

    __slots__ = ("_by_prefix", "_lengths")

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._by_prefix: dict[str, Decision] = {}
        for rule in rules:
            known = self._by_prefix.get(rule.prefix)
            if known is None or _outweighs(rule, known):
                self._by_prefix[rule.prefix] = Decision(rule.effect is Effect.ALLOW, rule)
        # A name has at most 256 bytes, so that this many look-ups are the most.
        self._lengths = sorted({len(prefix) for prefix in self._by_prefix}, reverse=True)

    def decide(self, resource: str) -> Decision:
        size = len(resource)
        for length in self._lengths:
            if length <= size and (found := self._by_prefix.get(resource[:length])) is not None:
                return found
        return _NO_RULE

    def decide_all(self, prefix: str) -> Decision:
        """Decide for every resource that begins with the prefix: a longer denial below it decides."""
        for each, decision in self._by_prefix.items():
            if not decision.allowed and each.startswith(prefix):
                return decision
        return self.decide(prefix)


def _outweighs(rule: Rule, known: Decision) -> bool:
    """Tell whether a rule is stricter than an earlier one with the same prefix, and so decides."""
    least_ms = known.rule.lock_delay_ms if known.rule else 0
    return known.allowed and (rule.effect is Effect.DENY or rule.lock_delay_ms > least_ms)


class Grants:
    """What a policy lets one principal do."""

    __slots__ = ("_by_verb",)

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._by_verb = {
            verb: _Prefixes([rule for rule in rules if verb in rule.verbs])
            for verb in Verb
            if any(verb in rule.verbs for rule in rules)
        }

    @property
    def are_empty(self) -> bool:
        """Whether no rule names the principal, so that every call of it is denied."""
        return not self._by_verb

    def decide(self, verb: Verb, resource: str) -> Decision:
        """Decide about one resource; its name is empty for a call without a resource."""
        prefixes = self._by_verb.get(verb)
        return _NO_RULE if prefixes is None else prefixes.decide(resource)

    def decide_all(self, verb: Verb, prefix: str) -> Decision:
        """Decide about every resource that begins with the prefix: allowed only if each one is."""
        prefixes = self._by_verb.get(verb)
        return _NO_RULE if prefixes is None else prefixes.decide_all(prefix)


class Policy:
    """The rules of an operator; without a rule, everything is denied."""

    __slots__ = ("rules",)

    def __init__(self, rules: Sequence[Rule]) -> None:
        self.rules = tuple(rules)

    def grants_of(self, principal: Principal) -> Grants:
        """Return what the policy lets the principal do."""
        names = {str(principal)} | ({AUTHENTICATED} if principal != ANONYMOUS else set())
        return Grants([rule for rule in self.rules if names & rule.principals])
