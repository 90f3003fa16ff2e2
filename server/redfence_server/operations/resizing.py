"""Carry out a resize: end a cluster on a quorum of its nodes, and begin its successor on another list.

1. *Retire* the old nodes that vote, one after another, at least a quorum. A retired node has left its
   cluster for ever; its identity names the successor. Then examine them again. If a quorum still shows the
   quarantine ids of this command, these nodes were all retired at one moment. From then on no server grants
   or renews in the old cluster, and none of its nodes gets a vote back: each of these steps needs a quorum.
2. *Read* the greatest token of these nodes. Every token that the old cluster granted is on one of them.
3. *Recover* the successor on the new nodes, above that token (operations/recovery.py): reserve the floor,
   wait for the greatest ttl, so that every earlier lease has ended, and give the votes.

No node takes an index of the successor before step 1 is complete. So a node with such an index proves that
the old cluster has ended, and any command that finds one may go on with step 3. A node that has only retired
proves nothing.

If a command breaks off, repeating it finishes. If two operators have the same list, the later one voids the
ids of the earlier, which stops. With other lists the successors differ. A retired node keeps its successor,
and two quorums share a node, so only one successor can ever begin. All operators retire the nodes in the same
order, so one of them usually stops at the first node and has changed nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from redfence_server.errors import NodeRejectedError
from redfence_server.locking.quorum import majority
from redfence_server.membership.admin import AdminConnection, AdminSettings, NodeAssignment
from redfence_server.membership.examination import Phase
from redfence_server.membership.fence import TOKENS_JUMP
from redfence_server.operations import recovery_plan
from redfence_server.operations.recovery import ClusterRecovery
from redfence_server.operations.recovery_plan import Recovery
from redfence_server.operations.resize_plan import Resize
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import NodeUrl


class ClusterResize:
    """Carries out a plan: `take_out`, then the wait of membership/fence.py, then `give_back`."""

    def __init__(
        self, planned: Resize, new: Sequence[NodeUrl], *, admin: AdminSettings, randomness: Randomness
    ) -> None:
        self._planned = planned
        self._new = new
        self._admin = admin
        self._randomness = randomness
        self._recovery: ClusterRecovery | None = None

    @property
    def floor(self) -> int:
        """Tokens go on above it; known after `take_out`."""
        return 0 if self._recovery is None else self._recovery.floor

    @property
    def left_out(self) -> Mapping[str, str]:
        """The new nodes that did not get a vote, with the reason."""
        return {} if self._recovery is None else self._recovery.left_out

    async def take_out(self, old: Sequence[AdminConnection], new: Sequence[AdminConnection]) -> None:
        """Retire the old cluster, and prepare the new nodes.

        Cancellation, or an error: nodes may have left, and stay out until an operator repeats the resize.

        Raises:
            NodeRejectedError: a server or another operator changed a node, or too few nodes are left.
        """
        planned, known = self._planned, _greatest(old)
        if planned.to_retire:
            await self._retire(old)
            # Their tokens grew until they retired, and are final now.
            known = max(known, _greatest(old))
        await asyncio.gather(*(node.refresh() for node in new))
        known = max(known, _greatest(new))
        reached = tuple(node.snapshot.index for node in new if node.snapshot.found is not None)
        self._recovery = ClusterRecovery(
            Recovery(
                cluster_id=planned.successor_id,
                is_new=False,
                ttl_ms_max=planned.ttl_ms_max,
                floor=known + TOKENS_JUMP,
                nodes=reached,
                away=planned.away,
                is_avoidable=False,
            ),
            self._new,
            admin=self._admin,
            randomness=self._randomness,
        )
        await self._recovery.take_out(new)

    async def give_back(self) -> None:
        """Give the new nodes their votes after the wait, if they are a quorum.

        Cancellation, Raises: as of `take_out`.
        """
        assert self._recovery is not None, "the nodes were taken out before"
        await self._recovery.give_back()

    async def _retire(self, old: Sequence[AdminConnection]) -> None:
        planned = self._planned
        ids = {index: self._randomness.hex_id() for index in planned.to_retire}
        for index, quarantine in ids.items():
            assigned = NodeAssignment(planned.successor_id, index, len(old), planned.ttl_ms_max)
            await old[index].take_vote(assigned, phase=Phase.RETIRED, quarantine=quarantine)
        await asyncio.gather(*(node.refresh() for node in old))
        retired = [index for index, quarantine in ids.items() if _is_out(old[index], quarantine)]
        if len(retired) < majority(len(old)):
            raise NodeRejectedError(
                f"only {len(retired)} of {len(old)} old nodes stayed retired, and a quorum is needed: "
                "another operator changed them, or they were lost; run the command again"
            )


def _greatest(nodes: Sequence[AdminConnection]) -> int:
    return recovery_plan.greatest_number([node.snapshot for node in nodes])


def _is_out(node: AdminConnection, quarantine: str) -> bool:
    found = node.snapshot.found
    return found is not None and found.identity is not None and found.identity.admission == quarantine
