"""Whether a node may vote: every finding against every expectation that matters, without a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from redfence_server import node_admission
from redfence_server.node_admission import (
    Admitted,
    Expectation,
    Findings,
    Identity,
    Reason,
    Rejected,
    judge,
    read_identity,
)
from redfence_server.redis_dial import DialError
from redfence_server.scripts import Keyspace

ME = Identity(
    cluster_id="c",
    index=1,
    node_count=3,
    max_ttl_ms=300_000,
    admission="a" * 32,
    run_id="run-1",
    durable=True,
    state="ready",
)
EXPECTED = Expectation(index=1, node_count=3, cluster_id="c", assume_durable=False)
FOUND = Findings(identity=ME, run_id="run-1", version="7.2.4", is_replica=False, durability_gap="")
GAP = "appendfsync is everysec, not always"


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
    for gap in ("", GAP):
        judgement = judge(EXPECTED, replace(FOUND, identity=formed, durability_gap=gap))
        assert judgement == Admitted(formed, restarted=False, durable=False)


@pytest.mark.parametrize("durable_before", [True, False])
@pytest.mark.parametrize("gap", ["", GAP])
@pytest.mark.parametrize("assume_durable", [True, False])
def test_a_restarted_node_needs_proof_for_both_runs_or_the_operators_word(
    *, durable_before: bool, gap: str, assume_durable: bool
) -> None:
    """Without either it stays out, and its message says what is missing."""
    who = replace(ME, durable=durable_before)
    expected = replace(EXPECTED, assume_durable=assume_durable)
    judgement = judge(expected, replace(FOUND, identity=who, run_id="run-2", durability_gap=gap))
    if assume_durable or (durable_before and not gap):
        assert judgement == Admitted(who, restarted=True, durable=not gap)
    else:
        assert isinstance(judgement, Rejected)
        assert judgement.reason is Reason.RESTARTED
        assert (gap or "the run that ended did not write") in judgement.detail


@pytest.mark.parametrize(
    ("change", "reason", "misconfigured"),
    [
        ({"is_replica": True}, Reason.REPLICA, True),
        ({"version": "6.0.20"}, Reason.TOO_OLD, True),
        ({"version": "5"}, Reason.TOO_OLD, True),
        ({"identity": None}, Reason.NOT_FORMED, False),
        ({"identity": replace(ME, cluster_id="other")}, Reason.OTHER_CLUSTER, True),
        ({"identity": replace(ME, index=2)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, node_count=5)}, Reason.WRONG_PLACE, True),
        ({"identity": replace(ME, state="forming")}, Reason.FORMING, False),
        ({"identity": replace(ME, state="quarantined")}, Reason.FORMING, False),
    ],
)
def test_every_other_finding_keeps_a_node_out(
    *, change: dict[str, Any], reason: Reason, misconfigured: bool
) -> None:
    """Also with the operator's word for its durability; a wrong configuration stops a server's start."""
    for assume_durable in (False, True):
        judgement = judge(replace(EXPECTED, assume_durable=assume_durable), replace(FOUND, **change))
        assert isinstance(judgement, Rejected)
        assert judgement.reason is reason
        assert judgement.reason.misconfigured is misconfigured


@pytest.mark.parametrize("version", ["6.2.0", "6.10", "7.0.15", "8.1.1", "10.0.0-rc1"])
def test_versions_are_compared_as_numbers(version: str) -> None:
    """6.10 is newer than 6.2, and 10 than 7."""
    assert judge(EXPECTED, replace(FOUND, version=version)) == AS_FORMED


FIELDS = {
    "cluster_id": "c",
    "index": "1",
    "nodes": "3",
    "max_ttl_ms": "300000",
    "admission": "a" * 32,
    "run_id": "run-1",
    "durable": "1",
    "state": "ready",
}


def _flat(fields: dict[str, str]) -> list[bytes]:
    return [text.encode() for pair in fields.items() for text in pair]


def test_an_identity_is_read_back_as_it_was_written() -> None:
    """No answer is no identity."""
    assert read_identity(_flat(FIELDS)) == ME
    assert read_identity([]) is None


@pytest.mark.parametrize("missing", FIELDS)
def test_an_identity_that_lacks_a_field_is_a_dial_error(missing: str) -> None:
    """Half an identity admits nobody."""
    with pytest.raises(DialError):
        read_identity(_flat({name: text for name, text in FIELDS.items() if name != missing}))


@pytest.mark.parametrize(("name", "text"), [("index", "one"), ("nodes", ""), ("admission", "short")])
def test_an_identity_with_a_malformed_field_is_a_dial_error(name: str, text: str) -> None:
    """Whoever wrote it, it was not form.lua."""
    with pytest.raises(DialError):
        read_identity(_flat({**FIELDS, name: text}))


class ScriptedNode:
    """A dialled node whose answers the test has written down."""

    def __init__(self, **settings: str) -> None:
        self.settings = {
            "appendonly": "yes",
            "appendfsync": "always",
            "no-appendfsync-on-rewrite": "no",
            "aof-load-truncated": "no",
            **{name.replace("_", "-"): value for name, value in settings.items()},
        }
        self.high = 1
        self.may_read_settings = True

    async def command(self, *parts: str | bytes | int) -> Any:
        """Answer as a node does."""
        match parts:
            case ("INFO", "server"):
                return b"# Server\r\nredis_version:7.2.4\r\nrun_id:run-1\r\n"
            case ("INFO", "replication"):
                return b"role:master\r\n"
            case ("EXISTS", _):
                return self.high
            case ("HGETALL", _):
                return _flat(FIELDS)
            case ("CONFIG", "GET", str(name)):
                if not self.may_read_settings:
                    raise DialError("NOPERM")
                return [name.encode(), self.settings[name].encode()]
        raise AssertionError(parts)


async def _examine(node: ScriptedNode) -> Findings:
    return await node_admission.examine(node, Keyspace())  # type: ignore[arg-type]  # its twin in shape


async def test_a_node_that_syncs_every_write_has_no_gap() -> None:
    """Everything it says of itself is gathered."""
    assert await _examine(ScriptedNode()) == FOUND


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("appendonly", "no"),
        ("appendfsync", "everysec"),
        ("appendfsync", "no"),
        ("no_appendfsync_on_rewrite", "yes"),
        ("aof_load_truncated", "yes"),
    ],
)
async def test_every_setting_that_can_lose_a_write_is_a_gap(name: str, value: str) -> None:
    """Each of them alone breaks the proof, and is named."""
    gap = (await _examine(ScriptedNode(**{name: value}))).durability_gap
    assert f"{name.replace('_', '-')} is {value}" in gap


async def test_settings_that_may_not_be_read_prove_nothing() -> None:
    """An access list that hides them leaves only the operator's word."""
    node = ScriptedNode()
    node.may_read_settings = False
    assert "does not let this server read" in (await _examine(node)).durability_gap


async def test_a_node_without_its_greatest_number_has_no_identity() -> None:
    """Whatever else it still has."""
    node = ScriptedNode()
    node.high = 0
    assert (await _examine(node)).identity is None
