"""Carry out a recovery (operations/recovery_plan.py): an operator's last resort, on the nodes themselves.

A recovery takes the steps of membership/fence.py, without peers to read. It takes out every node that it can
reach, under a random id. No script of a server runs there from then on, and a quorum needs one of these
nodes, so that is the fence. Then it reserves the floor on each. After the greatest ttl every earlier grant
has ended, and each node gets its vote back, if it is still out under that very id.

Every node is given the floor of *every* index. So a server that is admitted to one of them drops an older
node that the recovery could not reach.

A recovery that breaks off leaves the nodes in quarantine, and the next one begins anew. If two run at once,
the later one voids the ids of the earlier, which finds too few of its nodes and stops. If they cross midway,
each node has one floor or the other. Both are above all earlier grants, and the servers count only nodes with
the greater one. Once a quorum votes, lock servers bring back the nodes that were left out. But a node that
was away when the floor was reserved seems superseded: it needs `redfence cluster replace`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from redfence_server.errors import NodeRejectedError
from redfence_server.locking.quorum import majority
from redfence_server.membership.admin import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    connect_all,
)
from redfence_server.membership.examination import Phase
from redfence_server.operations import recovery_plan
from redfence_server.operations.recovery_plan import Recovery
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import NodeUrl

Outcome = TypeVar("Outcome")


class ClusterRecovery:
    """Carries out a plan: `take_out`, then the wait of membership/fence.py, then `give_back`."""

    def __init__(
        self, planned: Recovery, nodes: Sequence[NodeUrl], *, admin: AdminSettings, randomness: Randomness
    ) -> None:
        self._planned = planned
        self._nodes = nodes
        self._admin = admin
        self._randomness = randomness
        self._ids = {index: randomness.hex_id() for index in planned.nodes}
        """The quarantine id of each node that is taken out."""
        self.floor = planned.floor
        """Tokens go on above it: the planned floor, or a greater token granted before the take-out."""
        self.left_out: Mapping[str, str] = {}
        """The nodes that were taken out and did not get their vote back, with the reason."""

    async def take_out(self, nodes: Sequence[AdminConnection]) -> None:
        """Take the planned nodes' votes away, and reserve the floor on them; `nodes` are all of the cluster.

        Cancellation, or an error: nodes may be out, and stay out until an operator repeats the recovery.

        Raises:
            NodeRejectedError: a server or another operator changed a node, or fewer than a quorum is left.
        """
        planned, snapshots = self._planned, [node.snapshot for node in nodes]
        await _on_all(
            nodes[index].take_vote(
                NodeAssignment(planned.cluster_id, index, len(nodes), planned.ttl_ms_max),
                phase=Phase.QUARANTINED,
                quarantine=self._ids[index],
                floor=recovery_plan.known_floor(index, snapshots),
            )
            for index in planned.nodes
        )
        await asyncio.gather(*(node.refresh() for node in nodes))
        # Their tokens grew until the take-out, and are final now.
        greatest = recovery_plan.greatest_number([node.snapshot for node in nodes])
        self.floor = max(planned.floor, greatest + 1)
        await _on_all(node.reserve_floor(self.floor) for node in self._still_out(nodes))

    async def give_back(self) -> None:
        """Give the nodes their votes back after the wait, if they are a quorum.

        Cancellation, Raises: as of `take_out`.
        """
        # On new connections: an idle one may not last for minutes.
        async with connect_all(self._nodes, self._admin) as nodes:
            await self._restore(nodes)

    async def _restore(self, nodes: Sequence[AdminConnection]) -> None:
        still_out = self._still_out(nodes, reserved=self.floor)
        restored = await _on_all(
            node.restore_vote(
                quarantine=self._ids[node.snapshot.index],
                admission=self._randomness.hex_id(),
                floor=self.floor,
                floors=[self.floor] * len(self._nodes),
            )
            for node in still_out
        )
        overtaken = [node.snapshot.name for node, done in zip(still_out, restored, strict=True) if not done]
        self.left_out = {**self.left_out, **dict.fromkeys(overtaken, _CHANGED)}

    def _still_out(self, nodes: Sequence[AdminConnection], *, reserved: int = 0) -> Sequence[AdminConnection]:
        """Return the nodes that are out under this recovery's ids, and record the others in `left_out`.

        Raises:
            NodeRejectedError: they are fewer than a quorum.
        """
        lost = {
            nodes[index]: _loss(nodes[index].snapshot, quarantine, reserved=reserved)
            for index, quarantine in self._ids.items()
        }
        self.left_out = {node.snapshot.name: reason for node, reason in lost.items() if reason}
        still_out = [node for node, reason in lost.items() if not reason]
        if len(still_out) < majority(len(self._nodes)):
            raise NodeRejectedError(
                f"fewer than a quorum of nodes is left: {'; '.join(map(': '.join, self.left_out.items()))}"
            )
        return still_out


_CHANGED = "a server or another operator changed it after it was taken out"


def _loss(snapshot: NodeSnapshot, quarantine: str, *, reserved: int) -> str:
    """Return why a node that was taken out cannot get its vote back; empty if it can."""
    if snapshot.found is None:
        return snapshot.problem
    identity = snapshot.found.identity
    if identity is None:
        return "it lost its data after it was taken out"
    if identity.admission != quarantine:
        return _CHANGED
    if identity.reserved != reserved:
        return f"it could not be reached when the floor {reserved} was reserved"
    return ""


async def _on_all(steps: Iterable[Coroutine[None, None, Outcome]]) -> Sequence[Outcome]:
    """Return the outcomes once all steps have ended, or raise the first error."""
    done: list[Outcome] = []
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done
