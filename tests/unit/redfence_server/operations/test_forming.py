"""What forming a cluster takes, decided from what its nodes say of themselves."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest

from harness.doubles.findings import TTL_MS, away, identity, look
from redfence_server.errors import ConfigError, NodeRejectedError
from redfence_server.membership.examination import Identity, Phase
from redfence_server.operations.forming import Plan, plan

UNFORMED = {Phase.FORMING, Phase.ASSEMBLED}
PHASES = [phase for phase in Phase if phase is not Phase.RETIRED]


def decide(*who: Identity | None, ttl_ms_max: int = TTL_MS, leaves_wiped: bool = False) -> Plan:
    looks = [look(index, each) for index, each in enumerate(who)]
    return plan(looks, new_cluster_id="new", ttl_ms_max=ttl_ms_max, leaves_wiped=leaves_wiped)


@pytest.mark.parametrize("phases", list(product((None, *PHASES), repeat=3)))
def test_forming_writes_to_nodes_that_were_never_formed_and_to_no_other(
    phases: tuple[Phase | None, ...],
) -> None:
    who = [None if phase is None else identity(index, phase=phase) for index, phase in enumerate(phases)]
    begun = {phase for phase in phases if phase is not None} <= {Phase.FORMING}
    if None in phases and not begun:
        # It has lost its memory; a fresh identity would let it vote as if it had not.
        with pytest.raises(NodeRejectedError, match=rf"node {phases.index(None)} .*wiped or replaced"):
            decide(*who)
        # The operator says that the node was wiped: a server quarantines it; forming skips it.
        unformed = tuple(index for index, phase in enumerate(phases) if phase in UNFORMED)
        assert decide(*who, leaves_wiped=True) == Plan("c", unformed)
        return
    unformed = tuple(index for index, phase in enumerate(phases) if phase in {None, *UNFORMED})
    for leaves_wiped in (False, True):
        planned = decide(*who, leaves_wiped=leaves_wiped)
        assert planned == Plan("c" if any(who) else "new", unformed)


@pytest.mark.parametrize("other", [None, *Phase])
def test_a_node_that_left_its_cluster_keeps_a_list_from_being_formed(other: Phase | None) -> None:
    """Forming would let it vote for a cluster whose predecessor may still grant."""
    others = [None if other is None else identity(index, phase=other) for index in (1, 2)]
    with pytest.raises(NodeRejectedError, match=r"node 0 .* if that resize broke off, repeat"):
        decide(identity(0, phase=Phase.RETIRED, predecessor="before"), *others)


def test_nodes_of_another_cluster_or_order_or_size_are_refused() -> None:
    with pytest.raises(NodeRejectedError, match=r"node 2 \(n2:6379\): it belongs to cluster other"):
        decide(identity(0), identity(1), replace(identity(2), cluster_id="other"))
    with pytest.raises(NodeRejectedError, match=r"node 1 .*: it was formed as node 2"):
        decide(identity(0), identity(2), identity(1))
    with pytest.raises(NodeRejectedError, match=r"node 1 .* one of 5 nodes, but 3 are configured"):
        decide(identity(0), replace(identity(1), node_count=5), identity(2))


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize(
    ("found", "told"),
    [
        ({"is_replica": True}, "it is a replica"),
        ({"version": "6.0.16"}, "it is version 6.0.16; 6.2 is the least"),
        ({"eviction": "maxmemory 100, maxmemory-policy allkeys-lru"}, "would drop keys .*allkeys-lru"),
        # Two databases, or two host names, of one server fail together; they are no two nodes.
        ({"run_id": "run-0"}, "it is the same process as node 0"),
    ],
)
def test_what_is_not_fit_to_be_a_node_is_refused(found: dict[str, Any], told: str, *, formed: bool) -> None:
    looks = [look(index, identity(index) if formed else None) for index in range(2)]
    looks.append(look(2, identity(2) if formed else None, **found))
    with pytest.raises(NodeRejectedError, match=rf"^node 2 \(n2:6379\): .*{told}"):
        plan(looks, new_cluster_id="new", ttl_ms_max=TTL_MS)


def test_a_node_that_holds_keys_or_cannot_be_looked_at_is_refused() -> None:
    holding = [look(0, None), look(1, None, key_count=3), look(2, None)]
    with pytest.raises(NodeRejectedError, match=r"^node 1 \(n1:6379\): .* yet holds 3 keys: .*FLUSHALL"):
        plan(holding, new_cluster_id="new", ttl_ms_max=TTL_MS)
    unreached = [look(0, None), look(1, None), away(2)]
    with pytest.raises(NodeRejectedError, match=r"^node 2 \(n2:6379\): connection refused"):
        plan(unreached, new_cluster_id="new", ttl_ms_max=TTL_MS)


def test_the_greatest_ttl_of_a_cluster_is_not_changed_by_forming_it_again() -> None:
    with pytest.raises(ConfigError, match="max_ttl"):
        decide(identity(0), identity(1), identity(2), ttl_ms_max=2 * TTL_MS)
    with pytest.raises(ConfigError, match=r"max_ttl: node 1 .* was formed with 5 ms and not with 300000 ms"):
        decide(identity(0), replace(identity(1), max_ttl_ms=5), identity(2))


def test_a_formed_node_with_a_token_below_the_floor_is_named() -> None:
    formed = [look(index, identity(index), max_token=token) for index, token in enumerate((9, 7, 9))]
    for least in (0, 7):
        assert plan(formed, new_cluster_id="new", ttl_ms_max=TTL_MS, least_token=least) == Plan("c", ())
    with pytest.raises(ConfigError, match=r"floor: node 1 .* its greatest token is 7, below 8; leave"):
        plan(formed, new_cluster_id="new", ttl_ms_max=TTL_MS, least_token=8)
