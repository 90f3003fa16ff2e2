"""The policy: the longest prefix decides, and without a rule everything is denied."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from redfence_server.access import principal
from redfence_server.access.policy import Effect, Policy, Rule, Verb
from redfence_server.access.policy_file import load_policy
from redfence_server.access.principal import ANONYMOUS, AUTHENTICATED, Kind, Principal
from redfence_server.errors import ConfigError

PRINCIPALS = (ANONYMOUS, Principal(Kind.TOKEN, "a"), Principal(Kind.JWT, "a"), Principal(Kind.CERT, "b"))
names = st.text(alphabet="a/é", max_size=4)
rules = st.builds(
    Rule,
    principals=st.frozensets(st.sampled_from([AUTHENTICATED, *map(str, PRINCIPALS)]), min_size=1),
    verbs=st.frozensets(st.sampled_from(Verb), min_size=1),
    prefix=names,
    effect=st.sampled_from(Effect),
    number=st.just(1),
)
policies = st.lists(rules, max_size=8).map(Policy)


def naive(policy: Policy, who: Principal, verb: Verb, resource: str) -> bool:
    """Decide as the documentation says it, rule by rule."""
    named = {str(who)} if who == ANONYMOUS else {str(who), AUTHENTICATED}
    fitting = [
        rule
        for rule in policy.rules
        if named & rule.principals and verb in rule.verbs and resource.startswith(rule.prefix)
    ]
    longest = max((len(rule.prefix) for rule in fitting), default=0)
    effects = {rule.effect for rule in fitting if len(rule.prefix) == longest}
    return effects == {Effect.ALLOW}


@given(policies, st.sampled_from(PRINCIPALS), st.sampled_from(Verb), names)
def test_the_longest_prefix_decides_and_a_denial_wins_a_tie(
    policy: Policy, who: Principal, verb: Verb, resource: str
) -> None:
    decision = policy.grants_of(who).decide(verb, resource)
    assert decision.allowed == naive(policy, who, verb, resource)
    if decision.rule is not None:
        assert resource.startswith(decision.rule.prefix)


@given(policies, st.sampled_from(PRINCIPALS), st.sampled_from(Verb), names, names)
def test_a_prefix_is_allowed_only_if_every_name_below_it_is(
    policy: Policy, who: Principal, verb: Verb, prefix: str, rest: str
) -> None:
    grants = policy.grants_of(who)
    if grants.decide_all(verb, prefix).allowed:
        assert grants.decide(verb, prefix + rest).allowed


def test_a_principal_is_its_text_and_kinds_never_mix() -> None:
    assert [principal.parse(str(each)) for each in PRINCIPALS] == list(PRINCIPALS)
    for text in ("a", "token:", "TOKEN:a", "user:a", "", "token:\n", "anonymous:x"):
        with pytest.raises(ValueError, match=r"is no principal|the name in"):
            principal.parse(text)


def test_a_policy_file_is_read_rule_by_rule(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(
        """
        [[rules]]
        principals = ["token:billing", "cert:spiffe://example/billing"]
        verbs = ["acquire", "inspect"]
        prefix = "billing/"

        [[rules]]
        principals = ["authenticated"]
        verbs = ["acquire"]
        prefix = "billing/secret/"
        effect = "deny"
        """
    )
    grants = load_policy(path).grants_of(Principal(Kind.TOKEN, "billing"))
    assert grants.decide(Verb.ACQUIRE, "billing/1").allowed
    denied = grants.decide(Verb.ACQUIRE, "billing/secret/1")
    assert not denied.allowed
    assert denied.rule is not None
    assert denied.rule.number == 2
    assert grants.decide(Verb.INSPECT, "billing/secret/1").allowed


def test_of_two_rules_with_one_prefix_the_longer_lock_delay_decides() -> None:
    who = Principal(Kind.TOKEN, "a")
    shorter, longer = (
        Rule(frozenset({"token:a"}), frozenset({Verb.ACQUIRE}), "a/", Effect.ALLOW, number, delay_ms)
        for number, delay_ms in ((1, 0), (2, 15_000))
    )
    for rules in ([shorter, longer], [longer, shorter]):
        assert Policy(rules).grants_of(who).decide(Verb.ACQUIRE, "a/1").rule == longer
    denial = Rule(frozenset({"token:a"}), frozenset({Verb.ACQUIRE}), "a/", Effect.DENY, 3)
    for rules in ([longer, denial], [denial, longer]):
        assert not Policy(rules).grants_of(who).decide(Verb.ACQUIRE, "a/1").allowed


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("rules", "is not TOML"),
        ("", "rules: Field required"),
        ('[[rules]]\nprincipals=["token:a"]\nverbs=["read"]\nprefix=""', "rule 1: verbs.0: "),
        (
            '[[rules]]\nprincipals=["a"]\nverbs=["admin"]\nprefix=""',
            "rule 1: principals: 'a' is no principal",
        ),
        ('[[rules]]\nprincipals=[]\nverbs=["admin"]\nprefix=""', "rule 1: principals: "),
        ('[[rules]]\nprincipals=["token:a"]\nverbs=["admin"]', "rule 1: prefix: Field required"),
        ('[[rules]]\nprincipals=["token:a"]\nverbs=["admin"]\nprefix="{"', "rule 1: prefix: has a '{'"),
        ('[[rules]]\nprincipals=["token:a"]\nverbs=["admin"]\nprefix=""\nefect=1', "rule 1: efect: Extra"),
        (
            '[[rules]]\nprincipals=["token:a"]\nverbs=["inspect"]\nprefix=""\nlock_delay_ms=1',
            "rule 1: lock_delay_ms needs the verb acquire and the effect allow; leave it out",
        ),
        (
            '[[rules]]\nprincipals=["token:a"]\nverbs=["acquire"]\nprefix=""\nlock_delay_ms=-1',
            "rule 1: lock_delay_ms: Input should be greater than or equal to 0",
        ),
    ],
)
def test_a_wrong_policy_file_is_refused_by_rule_and_field(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_policy(path)
    assert str(path) in str(caught.value)
    assert problem in str(caught.value)
