"""Carry out a recovery (recovery_plan.py): an operator's last resort, on the nodes themselves.

Two passes. First every node that can be reached is taken out (`recovering`, under a random id): no script runs there from then on, and a
quorum needs one of them, so nothing is granted or renewed anywhere. After the greatest ttl whatever was granted before has ended.
Then each gets its vote back, with the floor, if it is still out under that very id.

Every node is told the floor of *every* place. So a server that is let in at one of them knows that a node which could not be reached, and
stands as it was, is a thing of the past: it must not count beside these, whatever it has minted.

A recovery that breaks off leaves the nodes out, and the next one begins anew. Of two at once, the later first pass voids the ids of
the earlier: that one finds it out and stops. Should they cross midway, each node has one floor or the other, and both are above all that was
granted before; the servers count only those with the greater one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from enum import Enum, auto

from redfence_server import recovery_plan
from redfence_server.clock import WallClock
from redfence_server.errors import NodeRejectedError
from redfence_server.node_examination import Phase
from redfence_server.node_joining import quarantine_ms
from redfence_server.node_visit import Look, Seat, Visit, Visiting, visits
from redfence_server.randomness import Randomness
from redfence_server.recovery_plan import Leftover, Recovery, Request
from redfence_server.redis_dial import NodeUrl


class Outcome(Enum):
    """What came of it."""

    UNCONFIRMED = auto()
    """Nothing was changed, for it was not confirmed."""
    RECOVERED = auto()
    """A quorum can vote, and every node that was taken out got its vote back."""
    NODES_LEFT_OUT = auto()
    """A quorum can vote, but some node that was taken out did not get its vote back; repeating it brings it back."""


class ClusterRecovery:
    """One recovery.

    Args:
        nodes: one for each place, by index.
        visiting: how to reach them.
        on_look: told what was found.
        on_plan: told what is to be done, before anything is.
        on_wait: told for how many ms nothing will happen.
    """

    def __init__(
        self,
        nodes: Sequence[NodeUrl],
        *,
        visiting: Visiting,
        clock: WallClock,
        randomness: Randomness,
        on_look: Callable[[Sequence[Look]], None],
        on_plan: Callable[[Sequence[Look], Recovery | Leftover], None],
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
        """Nodes may be out that were not, so it has to be carried out to the end."""
        self.floor = 0
        """Above which tokens go on: what was planned, or what was still granted between look and take-out if that is more."""
        self.left_out: Mapping[str, str] = {}
        """Which nodes were taken out and did not get their vote back, with the reason."""

    async def run(self, request: Request, *, confirmed: bool) -> Outcome:
        """Look, tell what is to be done, and do it if it is confirmed.

        Cancellation: as a crash: the nodes that were taken out stay out until it is repeated.

        Raises:
            NodeRejectedError: a node is in the way, or was changed by somebody else; `touched` says whether nodes may be out.
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
                return Outcome.UNCONFIRMED
            if isinstance(planned, Leftover):
                await self._take_out(visited, planned, Phase.QUARANTINED)
                return Outcome.RECOVERED
            self.touched = True
            ids = await self._take_out(visited, planned, Phase.RECOVERING)
        wait_ms = quarantine_ms(planned.ttl_ms_max)
        self._on_wait(wait_ms)
        await asyncio.sleep(wait_ms / 1000)
        # Over new connections: nobody keeps an idle one for minutes.
        async with visits(self._nodes, self._visiting) as visited:
            await self._give_back([visited[index] for index in planned.nodes], planned, ids)
        return Outcome.NODES_LEFT_OUT if self.left_out else Outcome.RECOVERED

    async def _take_out(
        self, visited: Sequence[Visit], planned: Recovery | Leftover, phase: Phase
    ) -> Mapping[int, str]:
        """Take the nodes' votes away, and return under which id each is out."""
        ids = {index: self._randomness.hex_id() for index in planned.nodes}
        outcomes = await asyncio.gather(
            *(
                visited[index].take_vote(
                    Seat(planned.cluster_id, index, len(self._nodes), planned.ttl_ms_max),
                    phase=phase,
                    quarantine=ids[index],
                    floor=recovery_plan.known_floor(index, [visit.look for visit in visited]),
                )
                for index in planned.nodes
            ),
            return_exceptions=True,
        )
        _raise_first(outcomes)
        return ids

    async def _give_back(self, visited: Sequence[Visit], planned: Recovery, ids: Mapping[int, str]) -> None:
        """Give the nodes their votes back, unless somebody else is at it, or they would be no quorum."""
        for visit in visited:
            _refuse_overtaken(visit.look, ids[visit.look.index])
        lost = {visit.look.name: _loss(visit.look, ids[visit.look.index]) for visit in visited}
        still_out = [visit for visit in visited if not lost[visit.look.name]]
        self.left_out = {name: reason for name, reason in lost.items() if reason}
        if len(still_out) < len(self._nodes) // 2 + 1:
            raise NodeRejectedError(
                f"fewer than a quorum of nodes is left: {'; '.join(map(': '.join, self.left_out.items()))}"
            )
        # Nothing has changed on them since they were taken out; but until then servers went on.
        self.floor = max(planned.floor, recovery_plan.greatest_number([visit.look for visit in still_out]))
        outcomes = await asyncio.gather(
            *(self._readmit(visit, planned, ids[visit.look.index]) for visit in still_out),
            return_exceptions=True,
        )
        _raise_first(outcomes)

    async def _readmit(self, visit: Visit, planned: Recovery, quarantine: str) -> None:
        found = visit.look.found
        assert found is not None, "it was looked at"
        answer = await visit.step(
            "readmit",
            *(quarantine, Phase.RECOVERING.value, self._randomness.hex_id()),
            *(
                self.floor,
                planned.changes,
                found.run_id,
                "0" if found.durability_gap else "1",
                found.evicted,
            ),
            *(self.floor for _ in self._nodes),
        )
        if answer != "readmitted":
            raise NodeRejectedError(_overtaken(visit.look))


def _loss(look: Look, quarantine: str) -> str:
    """Return why a node that was taken out cannot get its vote back; empty if it can."""
    if look.found is None:
        return look.problem
    identity = look.found.identity
    if identity is None or identity.admission != quarantine:
        return "it was lost once more meanwhile"
    return ""


def _refuse_overtaken(look: Look, quarantine: str) -> None:
    identity = look.found.identity if look.found else None
    if (
        identity is not None
        and identity.phase in {Phase.RECOVERING, Phase.READY}
        and identity.admission != quarantine
    ):
        raise NodeRejectedError(_overtaken(look))


def _overtaken(look: Look) -> str:
    return f"{look.name}: another operator recovers the cluster at the same time; leave it to one"


def _raise_first(outcomes: Sequence[BaseException | None]) -> None:
    """Raise what went wrong first, once all have ended."""
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
