"""Whether a node may vote: every finding against every expectation that matters, without a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from redfence_server.node_admission import Admitted, Expectation, Forgot, Quarantined, Reason, Rejected, judge
from redfence_server.node_examination import Findings, Identity, Phase

ME = Identity(
    cluster_id="c",
    index=1,
    node_count=3,
    max_ttl_ms=300_000,
    admission="a" * 32,
    run_id="run-1",
    durable=True,
    phase=Phase.READY,
)
EXPECTED = Expectation(index=1, node_count=3, cluster_id="c", assume_durable=False)
FOUND = Findings(identity=ME, run_id="run-1", version="7.2.4", high=5)
GAP = "appendfsync is everysec, not always"
HIDDEN = "the settings may not be read"


AS_FORMED = Admitted(ME, restarted=False, durable=True)


def test_a_node_of_this_cluster_in_its_place_and_run_is_admitted() -> None:
    """Nothing has changed since it was formed."""
    assert judge(EXPECTED, FOUND) == AS_FORMED


def test_the_first_node_may_be_of_any_cluster() -> None:
    """It tells the server which cluster it is in."""
    other = replace(ME, cluster_id="other")
    judgement = judge(replace(EXPECTED, cluster_id=None), replace(FOUND, identity=other))
    assert judgement == Admitted(other, restarted=False, durable=True)


def test_a_node_that_stopped_being_durable_does_not_vote_again() -> None:
    """After its next crash it could have forgotten that, with its tokens, and would seem durable."""
    found = replace(FOUND, durability_gap=GAP)
    judgement = judge(EXPECTED, found)
    assert isinstance(judgement, Rejected)
    assert judgement.reason is Reason.NOT_DURABLE
    assert not judgement.reason.misconfigured
    assert GAP in judgement.detail
    word = replace(EXPECTED, assume_durable=True)
    assert judge(word, found) == AS_FORMED


def test_a_node_formed_without_durable_settings_votes_for_its_first_run_whatever_they_become() -> None:
    """It has forgotten nothing yet; better settings later do not bring back what was not written before."""
    formed = replace(ME, durable=False)
    for gap in ("", GAP, HIDDEN):
        found = replace(FOUND, identity=formed, durability_gap=gap, settings_hidden=gap is HIDDEN)
        judgement = judge(EXPECTED, found)
        assert judgement == Admitted(formed, restarted=False, durable=False)


@pytest.mark.parametrize("durable_before", [True, False])
@pytest.mark.parametrize("gap", ["", GAP, HIDDEN])
@pytest.mark.parametrize("assume_durable", [True, False])
def test_a_restarted_node_needs_proof_for_both_runs_or_the_operators_word(
    *, durable_before: bool, gap: str, assume_durable: bool
) -> None:
    """Without either it stays out, and its message says what is missing.

    If it is only the right to see the proof, it has not forgotten: that would be for everybody.
    """
    who = replace(ME, durable=durable_before)
    expected = replace(EXPECTED, assume_durable=assume_durable)
    found = replace(FOUND, identity=who, run_id="run-2", durability_gap=gap, settings_hidden=gap is HIDDEN)
    judgement = judge(expected, found)
    if assume_durable or (durable_before and not gap):
        assert judgement == Admitted(who, restarted=True, durable=not gap)
    elif durable_before and gap is HIDDEN:
        assert isinstance(judgement, Rejected)
        assert judgement.reason is Reason.SETTINGS_HIDDEN
    else:
        assert isinstance(judgement, Forgot)
        assert (gap or "the run that ended did not write") in judgement.detail


@pytest.mark.parametrize("run_id", ["run-1", "run-2"])
def test_a_durable_node_whose_settings_are_hidden_gives_no_vote_and_the_message_says_what_to_grant(
    run_id: str,
) -> None:
    """They may have become worse in this run, or for it. Who starts a server beside such a node may mend it later."""
    found = replace(FOUND, run_id=run_id, durability_gap=HIDDEN, settings_hidden=True)
    judgement = judge(EXPECTED, found)
    assert isinstance(judgement, Rejected)
    assert judgement.reason is Reason.SETTINGS_HIDDEN
    assert not judgement.reason.misconfigured
    assert "+config|get" in judgement.detail
    assert "assume_durable" in judgement.detail
    word = replace(EXPECTED, assume_durable=True)
    assert isinstance(judge(word, found), Admitted)


@pytest.mark.parametrize(
    ("change", "reason", "misconfigured"),
    [
        ({"is_replica": True}, Reason.REPLICA, True),
        ({"version": "6.0.20"}, Reason.TOO_OLD, True),
        ({"version": "5"}, Reason.TOO_OLD, True),
        ({"eviction": "maxmemory 1, maxmemory-policy allkeys-lru"}, Reason.EVICTS, True),
        ({"run_id": "run-of-node-2"}, Reason.SAME_PROCESS, True),
        ({"identity": None, "high": None}, Reason.NOT_FORMED, False),
        ({"identity": None, "key_count": 3}, Reason.NOT_FORMED, False),
        ({"identity": replace(ME, cluster_id="other")}, Reason.OTHER_CLUSTER, True),
        ({"identity": replace(ME, index=2)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, node_count=5)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, phase=Phase.FORMING)}, Reason.FORMING, False),
        ({"identity": replace(ME, phase=Phase.ASSEMBLED)}, Reason.FORMING, False),
        ({"identity": replace(ME, phase=Phase.RECOVERING)}, Reason.RECOVERING, False),
        ({"identity": replace(ME, phase=Phase.RETIRED)}, Reason.REPLACED, False),
        ({"identity": replace(ME, floor=6)}, Reason.REPLACED, False),
    ],
)
def test_what_only_an_operator_can_mend_keeps_a_node_out(
    *, change: dict[str, Any], reason: Reason, misconfigured: bool
) -> None:
    """Also with the operator's word for its durability; a wrong configuration stops a server's start."""
    expected = replace(EXPECTED, floor=7, runs={"run-of-node-2": 2})
    found = replace(FOUND, identity=replace(ME, floor=7))
    for assume_durable in (False, True):
        judgement = judge(replace(expected, assume_durable=assume_durable), replace(found, **change))
        assert isinstance(judgement, Rejected)
        assert judgement.reason is reason
        assert judgement.reason.misconfigured is misconfigured


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"identity": None, "high": None}, "it was wiped"),
        ({"high": None}, "lost `high`"),
        ({"identity": replace(ME, floor=6)}, "old snapshot"),
        ({"identity": replace(ME, floor=7, changes=99)}, "99 changes of at least 100"),
        ({"evicted": 4}, "dropped 1 keys"),
        ({"evicted": 4, "run_id": "run-2"}, "dropped 4 keys"),
        ({"promoted": True, "run_id": "run-1/history", "evicted": 0}, "was a replica"),
    ],
)
def test_a_node_that_shows_less_than_is_known_has_forgotten(change: dict[str, Any], told: str) -> None:
    """Whatever its settings say, or hide, and whatever the operator said before: this is evidence."""
    me = replace(ME, floor=7, changes=100, evicted=3)
    expected = replace(EXPECTED, floor=7, changes=100, familiar=True)
    assert judge(expected, replace(FOUND, identity=me, evicted=3)) == Admitted(
        me, restarted=False, durable=True
    )
    for assume_durable, settings_hidden in product((False, True), repeat=2):
        findings = {"identity": me, "evicted": 3, "settings_hidden": settings_hidden, **change}
        judgement = judge(replace(expected, assume_durable=assume_durable), replace(FOUND, **findings))
        assert isinstance(judgement, Forgot)
        assert told in judgement.detail


def test_a_promoted_node_that_came_back_in_this_life_votes() -> None:
    """It was readmitted under its present run and history."""
    me = replace(ME, run_id="run-1/history")
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1/history", promoted=True))
    assert judgement == Admitted(me, restarted=False, durable=True)
    # The history is forgotten by the process itself, some time after its last replica has gone.
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1"))
    assert judgement == Admitted(me, restarted=False, durable=True)
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1/another", promoted=True))
    assert isinstance(judgement, Forgot)


def test_a_quarantine_is_recognised_whatever_run_the_node_is_in() -> None:
    """It was given by somebody, and ends by a rejoin alone."""
    me = replace(ME, phase=Phase.QUARANTINED, floor=9)
    expected = replace(EXPECTED, floor=9, changes=9)
    for run_id in ("run-1", "run-2"):
        for high in (None, 5):
            assert judge(expected, replace(FOUND, identity=me, run_id=run_id, high=high)) == Quarantined(me)


def test_a_promoted_replica_that_shows_another_place_is_told_from_a_wrong_list() -> None:
    """To name the nodes in another order would not help."""
    found = replace(FOUND, identity=replace(ME, index=2))
    for promoted, told in ((False, "in another order"), (True, "a replica of that one")):
        judgement = judge(EXPECTED, replace(found, promoted=promoted))
        assert isinstance(judgement, Rejected)
        assert judgement.reason is Reason.WRONG_PLACE
        assert told in judgement.detail


def test_a_quarantine_of_before_the_last_return_is_over() -> None:
    """Who voted here last shows older data, and has to stay out anew; anybody else was replaced, and must not take the place back."""
    found = replace(FOUND, identity=replace(ME, phase=Phase.QUARANTINED, floor=8))
    assert isinstance(judge(replace(EXPECTED, floor=9, familiar=True), found), Forgot)
    judgement = judge(replace(EXPECTED, floor=9), found)
    assert isinstance(judgement, Rejected)
    assert judgement.reason is Reason.REPLACED


def test_an_empty_node_is_taken_in_only_where_it_is_known_to_have_been() -> None:
    """Otherwise a wrong URL would take the place of a node that is well."""
    empty = replace(FOUND, identity=None, high=None)
    for familiar in (False, True):
        for cluster_id in (None, "c"):
            judgement = judge(replace(EXPECTED, familiar=familiar, cluster_id=cluster_id), empty)
            assert isinstance(judgement, Forgot if familiar and cluster_id else Rejected)


@pytest.mark.parametrize("version", ["6.2.0", "6.10", "7.0.15", "8.1.1", "10.0.0-rc1"])
def test_versions_are_compared_as_numbers(version: str) -> None:
    """6.10 is newer than 6.2, and 10 than 7."""
    assert judge(EXPECTED, replace(FOUND, version=version)) == AS_FORMED
