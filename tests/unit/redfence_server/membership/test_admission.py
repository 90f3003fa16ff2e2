"""Whether a node may vote: every finding against every expectation that matters, without a node."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.doubles.findings import findings, identity
from redfence_server.membership.admission import (
    Admitted,
    Expectation,
    Forgot,
    Quarantined,
    Reason,
    Rejected,
    Restarted,
    judge,
)
from redfence_server.membership.examination import Phase

ME = identity(1)
EXPECTED = Expectation(index=1, node_count=3, cluster_id="c", assume_durable=False)
FOUND = findings(1, ME, key_count=0)
GAP = "appendfsync is everysec, not always"
HIDDEN = "the settings may not be read"
AS_FORMED = Admitted(ME)


def test_a_node_of_this_cluster_at_its_index_and_in_its_run_is_admitted() -> None:
    assert judge(EXPECTED, FOUND) == AS_FORMED
    other = replace(ME, cluster_id="other")
    assert judge(replace(EXPECTED, cluster_id=None), replace(FOUND, identity=other)) == Admitted(other)


@pytest.mark.parametrize("phase", Phase)
def test_only_a_run_that_passed_the_fence_votes_and_only_proof_spares_the_wait(phase: Phase) -> None:
    for same_run, durable, gap, word in product(
        (True, False), (True, False), ("", GAP, HIDDEN), (True, False)
    ):
        me = replace(ME, phase=phase, durable=durable)
        run_id = "run-1" if same_run else "run-2"
        found = replace(FOUND, identity=me, run_id=run_id, durability_gap=gap, settings_hidden=gap is HIDDEN)
        judgement = judge(replace(EXPECTED, assume_durable=word), found)
        case = (same_run, durable, gap, word, judgement)
        reason = judgement.reason if isinstance(judgement, Rejected) else None
        if phase in OUT_OF_SERVICE:
            assert reason is OUT_OF_SERVICE[phase], case
        elif phase is Phase.QUARANTINED:
            # A new run may be an older copy of the data, for which no fence was raised.
            assert judgement == Quarantined(me) if same_run else isinstance(judgement, Forgot), case
        elif durable and gap is HIDDEN and not word:
            # Another user may see the proof, so this server does not bind the others by a quarantine.
            assert reason is Reason.SETTINGS_HIDDEN, case
        elif durable and gap and not word and same_run:
            # After its next crash it could have forgotten this change together with the tokens.
            assert reason is Reason.NOT_DURABLE, case
        elif same_run:
            is_ready = phase is Phase.READY
            assert judgement == (Admitted(me) if is_ready else Restarted(me, noted=True)), case
        elif word or (durable and not gap):
            assert judgement == Restarted(me, noted=False), case
        else:
            assert isinstance(judgement, Forgot), case
            assert (gap or "the run that ended did not write") in judgement.detail


OUT_OF_SERVICE = {
    Phase.FORMING: Reason.FORMING,
    Phase.ASSEMBLED: Reason.FORMING,
    # It retired towards this cluster, and missed the rest.
    Phase.RETIRED: Reason.REPLACED,
}


@pytest.mark.parametrize(
    ("gap", "told"), [(GAP, [GAP]), (HIDDEN, ["+config|get", "assume_durable"])], ids=["worse", "hidden"]
)
def test_a_durable_node_whose_settings_fail_is_told_what_to_mend(gap: str, told: list[str]) -> None:
    judgement = judge(EXPECTED, replace(FOUND, durability_gap=gap, settings_hidden=gap is HIDDEN))
    assert isinstance(judgement, Rejected)
    assert not judgement.reason.misconfigured
    assert all(words in judgement.detail for words in told)


@pytest.mark.parametrize(
    ("change", "reason", "misconfigured"),
    [
        ({"is_replica": True}, Reason.REPLICA, True),
        ({"version": "6.0.20"}, Reason.TOO_OLD, True),
        ({"version": "5"}, Reason.TOO_OLD, True),
        ({"eviction": "maxmemory 1, maxmemory-policy allkeys-lru"}, Reason.EVICTS, True),
        ({"run_id": "run-of-node-2"}, Reason.SAME_PROCESS, True),
        ({"run_id": ""}, Reason.NO_RUN_ID, True),
        ({"identity": None, "max_token": None}, Reason.NOT_FORMED, False),
        ({"identity": None, "key_count": 3}, Reason.NOT_FORMED, False),
        ({"identity": replace(ME, cluster_id="other")}, Reason.OTHER_CLUSTER, True),
        ({"identity": replace(ME, cluster_id="other", predecessor="c")}, Reason.RESIZED, False),
        ({"identity": replace(ME, cluster_id="other", predecessor="b")}, Reason.OTHER_CLUSTER, True),
        ({"identity": replace(ME, index=2)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, node_count=5)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, floor=6)}, Reason.REPLACED, False),
        ({"identity": replace(ME, floor=6, phase=Phase.RESTARTED)}, Reason.REPLACED, False),
        ({"identity": replace(ME, floor=6, phase=Phase.QUARANTINED)}, Reason.REPLACED, False),
    ],
)
def test_what_only_an_operator_can_mend_keeps_a_node_out(
    *, change: dict[str, Any], reason: Reason, misconfigured: bool
) -> None:
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
        ({"identity": None, "max_token": None}, "it was wiped"),
        ({"max_token": None}, "lost `high`"),
        ({"identity": replace(ME, floor=6)}, "old snapshot"),
        ({"identity": replace(ME, floor=6, phase=Phase.QUARANTINED)}, "old snapshot"),
        ({"identity": replace(ME, floor=6, phase=Phase.RESTARTED)}, "old snapshot"),
        ({"max_token": 4}, "its greatest token is 4, and it has answered 5"),
        ({"max_token": 4, "run_id": "run-2"}, "its greatest token is 4, and it has answered 5"),
        ({"evicted": 4}, "dropped 1 keys"),
        ({"evicted": 4, "run_id": "run-2"}, "dropped 4 keys"),
        ({"promoted": True, "run_id": "run-1/history", "evicted": 0}, "was a replica"),
    ],
)
def test_a_node_that_shows_less_than_is_known_has_forgotten(change: dict[str, Any], told: str) -> None:
    me = replace(ME, floor=7, evicted=3)
    expected = replace(EXPECTED, floor=7, token=5, previously_admitted=True)
    assert judge(expected, replace(FOUND, identity=me, evicted=3)) == Admitted(me)
    for assume_durable, settings_hidden in product((False, True), repeat=2):
        findings = {"identity": me, "evicted": 3, "settings_hidden": settings_hidden, **change}
        judgement = judge(replace(expected, assume_durable=assume_durable), replace(FOUND, **findings))
        assert isinstance(judgement, Forgot)
        assert told in judgement.detail


def test_a_promoted_node_that_came_back_in_this_life_votes() -> None:
    me = replace(ME, run_id="run-1/history")
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1/history", promoted=True))
    assert judgement == Admitted(me)
    # The history is forgotten by the process itself, some time after its last replica has gone.
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1"))
    assert judgement == Admitted(me)
    judgement = judge(EXPECTED, replace(FOUND, identity=me, run_id="run-1/another", promoted=True))
    assert isinstance(judgement, Forgot)


def test_a_token_that_was_seen_under_an_older_floor_is_not_asked_for() -> None:
    me = replace(ME, floor=8)
    assert judge(replace(EXPECTED, floor=7, token=99), replace(FOUND, identity=me)) == Admitted(me)


def test_a_promoted_replica_that_shows_another_place_is_told_from_a_wrong_list() -> None:
    found = replace(FOUND, identity=replace(ME, index=2))
    for promoted, told in ((False, "in another order"), (True, "a replica of that one")):
        judgement = judge(EXPECTED, replace(found, promoted=promoted))
        assert isinstance(judgement, Rejected)
        assert judgement.reason is Reason.WRONG_PLACE
        assert told in judgement.detail


def test_an_empty_node_is_taken_in_only_where_it_is_known_to_have_been() -> None:
    empty = replace(FOUND, identity=None, max_token=None)
    for previously_admitted in (False, True):
        for cluster_id in (None, "c"):
            judgement = judge(
                replace(EXPECTED, previously_admitted=previously_admitted, cluster_id=cluster_id), empty
            )
            assert isinstance(judgement, Forgot if previously_admitted and cluster_id else Rejected)


@pytest.mark.parametrize("version", ["6.2.0", "6.10", "7.0.15", "8.1.1", "10.0.0-rc1"])
def test_versions_are_compared_as_numbers(version: str) -> None:
    assert judge(EXPECTED, replace(FOUND, version=version)) == AS_FORMED
