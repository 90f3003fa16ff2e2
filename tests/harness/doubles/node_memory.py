"""What a node in memory keeps, as plain data: no script, clock, I/O or chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Self

from harness.doubles.joining_commands import Formation
from redfence_server.membership.examination import Phase
from redfence_server.redis_io.scripts import Keyspace

ADMITTED = "ad" * 16
"""The admission id of a node that nobody has disturbed."""
ALONE = Formation("cluster", index=0, node_count=1, max_ttl_ms=300_000)
Published = tuple[str, str, int]
"""A notice of the scripts: channel, resource and token."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What the `lock` key of one resource says; it is gone once the clock has passed `expires_at_ms`."""

    digest: str
    nonce: str
    shared: bool
    token: int
    holder: str
    ttl_ms: int
    expires_at_ms: float
    notify: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Counter:
    """What the `counter` key of one resource says, and when it is dropped as idle."""

    value: int
    expires_at_ms: float


class NodeMemory:
    """The memory of one node. Keys end by the time of each call, or by `expire` and `drop_counter`.

    Attributes:
        admission: empty if there is no identity.
        published: notices that are not on their way yet; the deliverer empties the list.
        subscribers: the servers' ends of the connections over this memory; each is told of every notice.
    """

    def __init__(
        self,
        *,
        admission: str = ADMITTED,
        counter_idle_ms: float = float("inf"),
        formation: Formation = ALONE,
        run_id: str = "run",
        durable: bool = False,
    ) -> None:
        """Begin as a node that was just formed."""
        self.admission = admission
        self.counter_idle_ms = counter_idle_ms
        self.formation = formation
        self.phase = Phase.READY
        self.run_id = run_id
        self.durable = durable
        self.evicted = 0
        self.high: int | None = 0
        self.floor = self.voted_floor = self.reserved = self.waited_floor = 0
        self.distrusted_until_ms = 0
        self.known_floors: dict[int, int] = {}
        self.known_fences: dict[int, str] = {}
        self.holds: dict[str, Hold] = {}
        self.counters: dict[str, Counter] = {}
        self.published: list[Published] = []
        self.subscribers: list[Callable[[Published], None]] = []

    def save(self) -> Self:
        """Return a node with the same memory and a life of its own."""
        # Searches make millions of them, so nothing is set twice.
        twin = object.__new__(type(self))
        twin.counter_idle_ms = self.counter_idle_ms
        twin.published, twin.subscribers = [], []
        twin.restore(self)
        return twin

    def expire(self, resource: str) -> None:
        self.holds.pop(resource, None)

    def drop_counter(self, resource: str) -> None:
        self.counters.pop(resource, None)

    def wipe(self) -> None:
        """Forget everything, the identity as well: nobody is admitted any more."""
        self.admission = self.run_id = ""
        self.high = None
        self.floor = self.voted_floor = self.reserved = self.waited_floor = 0
        self.evicted = self.distrusted_until_ms = 0
        for memory in (self.holds, self.counters, self.known_floors, self.known_fences):
            memory.clear()

    def restore(self, older: Self) -> None:
        """Remember what another node, or this one in an older state, does, and nothing else."""
        self.admission, self.formation, self.phase = older.admission, older.formation, older.phase
        self.run_id, self.durable, self.evicted = older.run_id, older.durable, older.evicted
        self.distrusted_until_ms = older.distrusted_until_ms
        self.high, self.floor, self.voted_floor = older.high, older.floor, older.voted_floor
        self.reserved, self.waited_floor = older.reserved, older.waited_floor
        self.known_floors, self.known_fences = older.known_floors.copy(), older.known_fences.copy()
        self.holds = older.holds.copy()
        self.counters = older.counters.copy()

    def keys(self) -> dict[str, dict[str, str]]:
        """Return every key but the identity, each value as text, as a node would have them."""
        names = Keyspace()
        kept: dict[str, dict[str, str]] = {}
        for resource, hold in self.holds.items():
            kept[names.lock(resource)] = {
                "digest": hold.digest,
                "nonce": hold.nonce,
                "shared": str(int(hold.shared)),
                "token": str(hold.token),
                "holder": hold.holder,
                "ttl_ms": str(hold.ttl_ms),
                "notify": " ".join(hold.notify),
            }
        for resource, counter in self.counters.items():
            kept[names.counter(resource)] = {"": str(counter.value)}
        if self.high is not None:
            kept[names.high] = {"": str(self.high)}
        return kept
