"""The knowledge of one server about its cluster and each node index, from all that nodes have told it. Pure.

Everything here only grows. That is what makes it worth something: a process whose floor is below the floor known here
was superseded, and what one node knows of another one may be taken over from it at any time, however old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redfence_server.membership.examination import LIFE_DIGITS, Identity


@dataclass(slots=True)
class Place:
    """What is known of whatever process stands at one node index.

    Attributes:
        floor: the least floor that a process needs to vote there.
        life: the first `LIFE_DIGITS` of the quarantine's id for which that floor was raised; empty if not known for sure.
        token: the greatest token seen from the process with that floor.
        run_id: the run of the process that this server is admitted to; empty while it is not.
    """

    floor: int = 0
    life: str = ""
    token: int = 0
    run_id: str = ""


class ClusterMemory:
    """What all links of one server share. The first admitted node tells which cluster it is, which binds the others.

    Attributes:
        on_floor: called with a node index whose floor has risen, before any link acts on what else was learnt with it.
    """

    def __init__(self, node_count: int) -> None:
        self.on_floor: Callable[[int], None] = lambda _: None
        self.cluster_id: str | None = None
        self.ttl_ms_max: int | None = None
        self.places = tuple(Place() for _ in range(node_count))

    def learn(self, identity: Identity) -> None:
        """Take over what a node of the cluster says of its cluster and of the other node indices."""
        if self.cluster_id is None:
            self.cluster_id = identity.cluster_id
            self.ttl_ms_max = identity.max_ttl_ms
        for index, floor in identity.known_floors.items():
            if index != identity.index and index < len(self.places):
                self.raise_floor(index, floor, life=identity.known_fences.get(index, "")[:LIFE_DIGITS])

    def admit(self, identity: Identity, run_id: str) -> None:
        """Note that a node votes at its index."""
        self.learn(identity)
        self.places[identity.index].run_id = run_id
        self.raise_floor(identity.index, identity.floor)

    def raise_floor(self, index: int, floor: int, *, life: str = "") -> None:
        """Note the least floor that a process needs at an index."""
        place = self.places[index]
        if floor > place.floor:
            # Another process, or one that was recovered: it may have minted less than the one before.
            place.floor, place.life, place.token = floor, life, 0
            self.on_floor(index)
        elif floor == place.floor and life != place.life:
            place.life = ""  # two processes may have got the same floor

    def see_token(self, index: int, *, floor: int, token: int) -> None:
        """Note a token that the process with this floor has shown."""
        place = self.places[index]
        if floor == place.floor and token > place.token:
            place.token = token

    def floors(self) -> tuple[int, ...]:
        """Return the least floor for each node index."""
        return tuple(place.floor for place in self.places)

    def lives(self) -> tuple[str, ...]:
        """Return for which life the floor of each node index was raised."""
        return tuple(place.life for place in self.places)

    def runs_of_others(self, index: int) -> dict[str, int]:
        """Return the runs of the processes that this server is admitted to at other indices, with their indices."""
        return {
            place.run_id: other for other, place in enumerate(self.places) if place.run_id and other != index
        }
