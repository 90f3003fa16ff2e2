"""The end of a recovery: which nodes get their votes back.

The rest runs against real nodes in tests/integration.
"""

from __future__ import annotations

from typing import Any

import pytest

from harness.doubles.findings import identity, look
from redfence_server.errors import NodeRejectedError
from redfence_server.membership.admin import AdminConnection, AdminSettings
from redfence_server.membership.examination import Phase
from redfence_server.operations.recovery import ClusterRecovery
from redfence_server.operations.recovery_plan import Recovery
from redfence_server.randomness import SystemRandomness
from redfence_server.redis_io.dial import NodeUrl
from redfence_server.redis_io.scripts import Keyspace

VISITING = AdminSettings(Keyspace(), 1_000)
FLOOR = 5_000
IDS = {index: f"{index}" * 32 for index in range(3)}


class TakenOut(AdminConnection):
    """A node that was taken out; `restored` once it has its vote."""

    def __init__(self, index: int, **change: Any) -> None:
        out = {"phase": Phase.QUARANTINED, "floor": FLOOR, "reserved": FLOOR, "admission": IDS[index]}
        super().__init__(look(index, identity(index, **(out | change))), None, VISITING)
        self.restored = False

    async def step(self, script: str, *arguments: str | int) -> str:
        self.restored = (script, *arguments[:1], arguments[2]) == (
            *("restore_vote", self.identity.admission),
            self.identity.reserved,
        )
        return "restored" if self.restored else "changed"


def recovery() -> ClusterRecovery:
    urls = [NodeUrl(f"redis://n{index}:6379") for index in range(3)]
    planned = Recovery("c", False, 9_000, FLOOR, nodes=(0, 1, 2), away=(), is_avoidable=False)
    begun = ClusterRecovery(planned, urls, admin=VISITING, randomness=SystemRandomness())
    begun._ids = IDS
    return begun


async def test_a_node_that_was_away_when_the_floor_was_reserved_is_left_out() -> None:
    nodes = [TakenOut(0), TakenOut(1), TakenOut(2, reserved=0, floor=0)]
    begun = recovery()
    await begun._restore(nodes)
    assert [node.restored for node in nodes] == [True, True, False]
    assert list(begun.left_out) == ["node 2 (n2:6379)"]
    assert "when the floor 5000 was reserved" in begun.left_out["node 2 (n2:6379)"]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"reserved": 0, "floor": 0}, "when the floor 5000 was reserved"),
        ({"admission": "f" * 32}, "another operator"),
        ({"admission": "f" * 32, "phase": Phase.READY}, "another operator"),
    ],
)
async def test_no_node_votes_again_if_fewer_than_a_quorum_are_left(change: dict[str, Any], told: str) -> None:
    nodes = [TakenOut(0), TakenOut(1, **change), TakenOut(2, **change)]
    with pytest.raises(NodeRejectedError, match=f"fewer than a quorum .*{told}"):
        await recovery()._restore(nodes)
    assert not any(node.restored for node in nodes)
