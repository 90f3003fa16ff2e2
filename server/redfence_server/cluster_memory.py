"""What one server knows of its cluster and of each place in it, from all that nodes have told it. Pure.

Everything here only grows: the floor of a place, and with each floor the changes anew. That is what makes it worth something: a node that
shows less than is known here has forgotten (node_admission.py), and what one node knows of another one may be taken over from it at any time, however old.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from redfence_server.lock_node import Pulsed
from redfence_server.node_examination import Identity


@dataclass(slots=True)
class Place:
    """What is known of whatever node stands at one place.

    Attributes:
        floor: the least floor it must have to vote.
        changes: how many changes it has made at least, under that floor.
        number: the greatest number it was heard to have minted or learnt.
        run_id: of the process that this server is admitted to; empty while it is not.
    """

    floor: int = 0
    changes: int = 0
    number: int = 0
    run_id: str = ""


class ClusterMemory:
    """What all links of one server share. The first admitted node tells which cluster it is, which binds the others.

    Attributes:
        on_floor: told of a place whose floor has risen, before anybody acts on what else was learnt with it.
    """

    def __init__(self, node_count: int) -> None:
        self.on_floor: Callable[[int], None] = _ignore
        self.cluster_id: str | None = None
        self.ttl_ms_max: int | None = None
        self.places = tuple(Place() for _ in range(node_count))

    def learn(self, identity: Identity) -> None:
        """Take over what an admitted or quarantined node says of its cluster and of the other places."""
        if self.cluster_id is None:
            self.cluster_id = identity.cluster_id
            self.ttl_ms_max = identity.max_ttl_ms
        for index in range(len(self.places)):
            if index != identity.index:
                floor, changes = identity.known_floors.get(index, 0), identity.known_changes.get(index, 0)
                self.told(index, floor=floor, changes=changes)

    def admit(self, identity: Identity, run_id: str) -> None:
        """Note that a node votes at its place."""
        self.learn(identity)
        self.places[identity.index].run_id = run_id
        self.told(identity.index, floor=identity.floor, changes=identity.changes)

    def told(self, index: int, *, floor: int, changes: int) -> None:
        """Note the least floor that a node needs at a place, and how many changes it must show under that one."""
        place = self.places[index]
        if floor > place.floor:
            # It has come back since, and counts anew: after a recovery even from less.
            place.floor, place.changes = floor, changes
            self.on_floor(index)
        elif floor == place.floor:
            place.changes = max(place.changes, changes)

    def heard(self, index: int, *, floor: int, changes: int, number: int = 0) -> None:
        """Note what the node at a place has answered, that was admitted with this floor."""
        self.told(index, floor=floor, changes=changes)
        self.places[index].number = max(self.places[index].number, number)

    def pulsed(self, index: int, pulsed: Pulsed, *, floor: int) -> None:
        """Note what the node at a place, that was admitted with this floor, has told of itself and of the others."""
        self.heard(index, floor=floor, changes=pulsed.changes, number=pulsed.high)
        told = zip(pulsed.known_floors, pulsed.known_changes, strict=True)
        for other, (known_floor, changes) in enumerate(told):
            if other != index:
                self.told(other, floor=known_floor, changes=changes)

    def changes(self) -> tuple[int, ...]:
        """Return how many changes each node is known to have made."""
        return tuple(place.changes for place in self.places)

    def runs_of_others(self, index: int) -> dict[str, int]:
        """Return the runs of the processes that this server is admitted to at other places, with their places."""
        return {
            place.run_id: other for other, place in enumerate(self.places) if place.run_id and other != index
        }


def _ignore(_: int) -> None:
    """Nobody listens."""
