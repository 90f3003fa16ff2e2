"""Keeps the memory of a fake node as plain data: no script, clock, I/O or chance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Self

from harness.doubles.joining_commands import Formation
from redfence_server.membership.examination import Phase
from redfence_server.redis_io.scripts import Keyspace

ADMITTED = "ad" * 16
"""The admission id of a node that no fault has disturbed."""
ALONE = Formation("cluster", index=0, node_count=1, max_ttl_ms=300_000)
Published = tuple[str, str, int]
"""A notice of the scripts: channel, resource and token."""


@dataclass(frozen=True, slots=True)
class Hold:
    """Holds the `lock` key of one resource; it is gone once the clock has passed `expires_at_ms`.

    Attributes:
        expires_at_ms: when the ttl and the lock delay are over.
    """

    digest: str
    nonce: str
    shared: bool
    token: int
    holder: str
    ttl_ms: int
    expires_at_ms: float
    notify: tuple[str, ...] = ()
    lock_delay_ms: int = 0

    def is_closed(self, now_ms: float) -> bool:
        """Tell whether the lease was lost, and its delay runs."""
        return 0 < self.lock_delay_ms >= int(self.expires_at_ms - now_ms)


@dataclass(frozen=True, slots=True)
class Counter:
    """Holds the `counter` key of one resource, and when it is dropped as idle."""

    value: int
    expires_at_ms: float


@dataclass(kw_only=True, eq=False)
class NodeMemory:
    """The memory of one node. Keys end by the time of each call, or by `expire` and `drop_counter`.

    Without arguments it is a node that was just formed.

    Attributes:
        admission: empty if there is no identity.
        forced: by the digest of a lease that an operator ended, the operator's token, and when the mark ends.
        published: notices that are not on their way yet; the deliverer empties the list.
        subscribers: the servers' ends of the connections over this memory; each is told of every notice.
    """

    admission: str = ADMITTED
    counter_idle_ms: float = float("inf")
    formation: Formation = ALONE
    phase: Phase = Phase.READY
    run_id: str = "run"
    durable: bool = False
    evicted: int = 0
    high: int | None = 0
    floor: int = 0
    voted_floor: int = 0
    reserved: int = 0
    waited_floor: int = 0
    distrusted_until_ms: int = 0
    predecessor: str = ""
    known_floors: dict[int, int] = field(default_factory=dict)
    known_fences: dict[int, str] = field(default_factory=dict)
    holds: dict[str, Hold] = field(default_factory=dict)
    counters: dict[str, Counter] = field(default_factory=dict)
    forced: dict[str, tuple[int, float]] = field(default_factory=dict)
    published: list[Published] = field(default_factory=list)
    subscribers: list[Callable[[Published], None]] = field(default_factory=list)

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

    def lapse(self, resource: str, now_ms: float = 0.0) -> None:
        """End the ttl of a hold, so that only its lock delay is left."""
        if (hold := self.holds.get(resource)) and hold.lock_delay_ms:
            self.holds[resource] = replace(hold, expires_at_ms=now_ms + hold.lock_delay_ms)

    def drop_counter(self, resource: str) -> None:
        self.counters.pop(resource, None)

    def wipe(self) -> None:
        """Forget everything, the identity as well: the node admits no server any more."""
        self.admission = self.run_id = self.predecessor = ""
        self.high = None
        self.floor = self.voted_floor = self.reserved = self.waited_floor = 0
        self.evicted = self.distrusted_until_ms = 0
        for memory in (self.holds, self.counters, self.forced, self.known_floors, self.known_fences):
            memory.clear()

    def restore(self, older: Self) -> None:
        """Remember what another node, or this one in an older state, does, and nothing else."""
        self.admission, self.formation, self.phase = older.admission, older.formation, older.phase
        self.run_id, self.durable, self.evicted = older.run_id, older.durable, older.evicted
        self.distrusted_until_ms = older.distrusted_until_ms
        self.high, self.floor, self.voted_floor = older.high, older.floor, older.voted_floor
        self.reserved, self.waited_floor = older.reserved, older.waited_floor
        self.predecessor = older.predecessor
        self.known_floors, self.known_fences = older.known_floors.copy(), older.known_fences.copy()
        self.holds = older.holds.copy()
        self.counters = older.counters.copy()
        self.forced = older.forced.copy()

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
                "lock_delay_ms": str(hold.lock_delay_ms or ""),
            }
        for resource, counter in self.counters.items():
            kept[names.counter(resource)] = {"": str(counter.value)}
        for digest, (token, _) in self.forced.items():
            kept[names.forced(digest)] = {"": str(token)}
        if self.high is not None:
            kept[names.high] = {"": str(self.high)}
        return kept
