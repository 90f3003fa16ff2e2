"""Remember what the nodes told one server about their cluster and each node index. Pure.

Everything here only grows. So a process whose floor is below the floor known here was superseded. A server
may also take over what one node knows of another at any time, however old it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redfence_server.membership.examination import FENCE_ID_DIGITS, Identity


@dataclass(slots=True)
class NodeMemory:
    """A server's knowledge of the process at one node index.

    Attributes:
        floor: the least floor that a process needs to vote there.
        fence_id: the first `FENCE_ID_DIGITS` of the id of the quarantine with that floor; empty if not
            known for sure.
        token: the greatest token seen from the process with that floor.
        run_id: the run of the process that this server is admitted to; empty while it is not.
    """

    floor: int = 0
    fence_id: str = ""
    token: int = 0
    run_id: str = ""


class ClusterMemory:
    """All links of one server share it; the first admitted node sets the cluster for the others.

    Attributes:
        on_floor: called with a node index whose floor has risen, before any link acts on what it learnt.
    """

    def __init__(self, node_count: int) -> None:
        self.on_floor: Callable[[int], None] = lambda _: None
        self.cluster_id: str | None = None
        self.ttl_ms_max: int | None = None
        self.nodes = tuple(NodeMemory() for _ in range(node_count))

    def learn(self, identity: Identity) -> None:
        """Take over what a node says of its cluster and of the other node indices."""
        if self.cluster_id is None:
            self.cluster_id = identity.cluster_id
            self.ttl_ms_max = identity.max_ttl_ms
        for index, floor in identity.known_floors.items():
            if index != identity.index and index < len(self.nodes):
                self.raise_floor(
                    index, floor, fence_id=identity.known_fences.get(index, "")[:FENCE_ID_DIGITS]
                )

    def admit(self, identity: Identity, run_id: str) -> None:
        """Record that a node votes at its index."""
        self.learn(identity)
        self.nodes[identity.index].run_id = run_id
        self.raise_floor(identity.index, identity.floor)

    def raise_floor(self, index: int, floor: int, *, fence_id: str = "") -> None:
        """Record the least floor that a process needs at an index."""
        node = self.nodes[index]
        if floor > node.floor:
            # Another process, or one that was recovered: it may have minted less than the one before.
            node.floor, node.fence_id, node.token = floor, fence_id, 0
            self.on_floor(index)
        elif floor == node.floor and fence_id != node.fence_id:
            node.fence_id = ""  # two processes may have got the same floor

    def see_token(self, index: int, *, floor: int, token: int) -> None:
        """Record a token that the process with this floor has shown."""
        node = self.nodes[index]
        if floor == node.floor and token > node.token:
            node.token = token

    def floors(self) -> tuple[int, ...]:
        """Return the least floor for each node index."""
        return tuple(node.floor for node in self.nodes)

    def fence_ids(self) -> tuple[str, ...]:
        """Return, for each node index, the `fence_id` of its floor."""
        return tuple(node.fence_id for node in self.nodes)

    def runs_of_others(self, index: int) -> dict[str, int]:
        """Return the run ids of the admitted processes at other indices, with their indices."""
        return {node.run_id: other for other, node in enumerate(self.nodes) if node.run_id and other != index}
