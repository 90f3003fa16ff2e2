"""Carry out a recovery (operations/recovery_plan.py): an operator's last resort, on the nodes themselves.

It takes the steps of membership/fence.py, without peers to read. Every node that can be reached is taken out, under a random id: no
script runs there from then on, and a quorum needs one of them, so that is the fence. The floor is reserved on each. After
the greatest ttl whatever was granted before has ended, and each node gets its vote back, if it is still out under that
very id.

Every node is told the floor of *every* index. So a server that is let in at one of them drops a node that could not be
reached and stands as it was.

A recovery that breaks off leaves the nodes in quarantine, and the next one begins anew. If two run at once, the later one
voids the ids of the earlier, which finds too few of its nodes and stops. Should they cross midway, each node has one floor or
the other; both are above all that was granted before, and the servers count only nodes with the greater one. Once a quorum
votes, lock servers bring back the nodes that were left out. One that was away when the floor was reserved looks like a node
whose index another process got: it needs `redfence cluster replace`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TypeVar

from redfence_server.clock import WallClock
from redfence_server.errors import NodeRejectedError
from redfence_server.locking.quorum import majority
from redfence_server.membership.examination import Phase
from redfence_server.membership.fence import wait_ms
from redfence_server.membership.visit import (
    AdminConnection,
    AdminSettings,
    NodeAssignment,
    NodeSnapshot,
    visits,
)
from redfence_server.operations import recovery_plan
from redfence_server.operations.recovery_plan import Recovery, Request
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import NodeUrl

Outcome = TypeVar("Outcome")


class ClusterRecovery:
    """One recovery. `on_plan` is called before anything is changed, `on_wait` with the ms for which nothing will happen."""

    def __init__(
        self,
        nodes: Sequence[NodeUrl],
        *,
        visiting: AdminSettings,
        clock: WallClock,
        randomness: Randomness,
        on_look: Callable[[Sequence[NodeSnapshot]], None],
        on_plan: Callable[[Sequence[NodeSnapshot], Recovery], None],
        on_wait: Callable[[float], None],
    ) -> None:
        self._nodes = nodes
        self._visiting = visiting
        self._clock = clock
        self._randomness = randomness
        self._on_look = on_look
        self._on_plan = on_plan
        self._on_wait = on_wait
        self.touched = False
        """It may have taken nodes out, so an operator has to carry it out to the end."""
        self.floor = 0
        """Tokens go on above it: the planned floor, or a greater token that was granted between look and take-out."""
        self.left_out: Mapping[str, str] = {}
        """The nodes that were taken out and did not get their vote back, with the reason."""

    async def run(self, request: Request, *, confirmed: bool) -> None:
        """Examine the nodes, tell the plan, and carry it out if it is confirmed: then a quorum can vote.

        Cancellation: as a crash: the nodes that were taken out stay out until the recovery is repeated.

        Raises:
            NodeRejectedError: a node is in the way, or was changed by a server or another operator; `touched` says whether
                nodes may be out.
            ConfigError: the request cannot be met; nothing was changed.
        """
        async with visits(self._nodes, self._visiting) as visited:
            looks = [each.look for each in visited]
            self._on_look(looks)
            planned = recovery_plan.plan(
                looks,
                request,
                wall_us=int(self._clock.wall_ms() * 1000),
                new_cluster_id=self._randomness.hex_id(),
            )
            self._on_plan(looks, planned)
            if not confirmed:
                return
            self.touched = True
            ids = await self._take_out(visited, planned)
            await self._reserve([visited[index] for index in planned.nodes], ids, planned)
        pause_ms = wait_ms(planned.ttl_ms_max)
        self._on_wait(pause_ms)
        await asyncio.sleep(pause_ms / 1000)
        # Over new connections: an idle one need not last for minutes.
        async with visits(self._nodes, self._visiting) as visited:
            await self._give_back([visited[index] for index in planned.nodes], ids)

    async def _take_out(self, visited: Sequence[AdminConnection], planned: Recovery) -> Mapping[int, str]:
        """Take the nodes' votes away, and return under which id each is out."""
        ids = {index: self._randomness.hex_id() for index in planned.nodes}
        await _on_all(
            visited[index].take_vote(
                NodeAssignment(planned.cluster_id, index, len(self._nodes), planned.ttl_ms_max),
                phase=Phase.QUARANTINED,
                quarantine=ids[index],
                floor=recovery_plan.known_floor(index, [visit.look for visit in visited]),
            )
            for index in planned.nodes
        )
        return ids

    async def _reserve(
        self, visited: Sequence[AdminConnection], ids: Mapping[int, str], planned: Recovery
    ) -> None:
        """Reserve the floor on every node that was taken out."""
        await asyncio.gather(*(visit.look_again() for visit in visited))
        # Nothing changes on them any more; but until they were taken out servers went on.
        greatest = recovery_plan.greatest_number([visit.look for visit in visited])
        self.floor = max(planned.floor, greatest + 1)
        await _on_all(visit.reserve_floor(self.floor) for visit in self._still_out(visited, ids))

    async def _give_back(self, visited: Sequence[AdminConnection], ids: Mapping[int, str]) -> None:
        """Give the nodes their votes back, if they are a quorum."""
        still_out = self._still_out(visited, ids, reserved=self.floor)
        restored = await _on_all(
            visit.restore_vote(
                quarantine=ids[visit.look.index],
                admission=self._randomness.hex_id(),
                floor=self.floor,
                floors=[self.floor] * len(self._nodes),
            )
            for visit in still_out
        )
        overtaken = [visit.look.name for visit, done in zip(still_out, restored, strict=True) if not done]
        self.left_out = {**self.left_out, **dict.fromkeys(overtaken, _CHANGED)}

    def _still_out(
        self, visited: Sequence[AdminConnection], ids: Mapping[int, str], *, reserved: int = 0
    ) -> Sequence[AdminConnection]:
        """Return the nodes that are out under this recovery's ids, and note the others in `left_out`.

        Raises:
            NodeRejectedError: they are fewer than a quorum.
        """
        lost = {visit: _loss(visit.look, ids[visit.look.index], reserved=reserved) for visit in visited}
        self.left_out = {visit.look.name: reason for visit, reason in lost.items() if reason}
        still_out = [visit for visit in visited if not lost[visit]]
        if len(still_out) < majority(len(self._nodes)):
            raise NodeRejectedError(
                f"fewer than a quorum of nodes is left: {'; '.join(map(': '.join, self.left_out.items()))}"
            )
        return still_out


_CHANGED = "a server or another operator changed it after it was taken out"


def _loss(look: NodeSnapshot, quarantine: str, *, reserved: int) -> str:
    """Return why a node that was taken out cannot get its vote back; empty if it can."""
    if look.found is None:
        return look.problem
    identity = look.found.identity
    if identity is None:
        return "it lost its data after it was taken out"
    if identity.admission != quarantine:
        return _CHANGED
    if identity.reserved != reserved:
        return f"it could not be reached when the floor {reserved} was reserved"
    return ""


async def _on_all(steps: Iterable[Coroutine[None, None, Outcome]]) -> Sequence[Outcome]:
    """Return the outcomes once all steps have ended, or raise what went wrong first."""
    done: list[Outcome] = []
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
        done.append(outcome)
    return done
