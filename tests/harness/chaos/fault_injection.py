"""One fault: what it does, what it needs for itself, how long it lasts; and how it is carried out, told and always healed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from harness.chaos.client_pool import ClientPool
from harness.chaos.cluster import ChaosCluster
from harness.chaos.recorder import now_s
from harness.history.records import Fault
from harness.processes.servers import until

# A node that has forgotten comes back after a quarantine, in which a server has to be up without a break.
_REJOIN_S = 60.0
_HEAL_S = 90.0
# A server that has just been started looks at every node, but also through networks that are broken.
_SEEN_S = 60.0


STORAGE = "storage"
"""The name of the storage's process."""


async def _nothing() -> None:
    """Do nothing."""


@dataclass(frozen=True, slots=True)
class FaultInjection:
    """One fault, drawn but not yet carried out.

    Attributes:
        kind: its name in the list of faults.
        target: what it injections; for people.
        lasts_s: from its beginning to its healing.
        begin: brings it about.
        heal: takes it back; called also if `begin` failed midway.
        takes: names of what no other fault may injection meanwhile.
        forgets: the nodes that may forget by it.
        moves_clocks, overlaps_s: see `Fault`.
        tells: whether it is recorded by what is done here; else by itself, by `FaultInjector.note`.
    """

    kind: str
    target: str
    lasts_s: float
    begin: Callable[[], Awaitable[None]]
    heal: Callable[[], Awaitable[None]] = _nothing
    takes: Collection[str] = ()
    forgets: Sequence[int] = ()
    moves_clocks: bool = False
    overlaps_s: float | None = None
    tells: bool = True


@dataclass(slots=True)
class FaultInjector:
    """What faults injection, and what has become of them.

    Attributes:
        faults: those that are over, in the order of their end.
        ending: set when no fault is to last any longer.
        on_begin: told of each fault as it begins.
        unhealed: what the harness could not set right after a fault; such a run is invalid.
        broken: what redfence did not set right by itself, as it promises.
    """

    cluster: ChaosCluster
    client_pool: ClientPool
    on_begin: Callable[[FaultInjection], None]
    faults: list[Fault] = field(default_factory=list)
    ending: asyncio.Event = field(default_factory=asyncio.Event)
    unhealed: list[str] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    _locks: dict[str, asyncio.Lock] = field(default_factory=dict)
    _forgetful: set[int] = field(default_factory=set)
    _changed: asyncio.Condition = field(default_factory=asyncio.Condition)

    async def inject(self, injection: FaultInjection) -> None:
        """Return when the fault was healed, and nodes that have forgotten by it have rejoined.

        Never do more than a minority of the nodes forget before those that have forgotten earlier have rejoined: nothing is promised beyond.
        """
        async with AsyncExitStack() as stack:
            # In one order for all, so that no two wait for each other.
            for name in sorted(injection.takes):
                await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            await self._may_forget(injection.forgets)
            try:
                if not self.ending.is_set():
                    await self._play(injection)
            finally:
                for place in injection.forgets:
                    await self._until_rejoined(place)
                async with self._changed:
                    self._forgetful -= set(injection.forgets)
                    self._changed.notify_all()

    def note(self, fault: Fault) -> None:
        """Record a fault that is over."""
        self.faults.append(fault)

    async def _may_forget(self, places: Sequence[int]) -> None:
        if not places:
            return
        async with self._changed:
            await self._changed.wait_for(
                lambda: (
                    (
                        len(self._forgetful | set(places)) <= self.cluster.minority
                        and not self._forgetful & set(places)
                    )
                    or self.ending.is_set()
                )
            )
            self._forgetful |= set(places)

    async def _play(self, injection: FaultInjection) -> None:
        self.on_begin(injection)
        began_s = now_s()
        try:
            await injection.begin()
            try:
                async with asyncio.timeout(injection.lasts_s):
                    await self.ending.wait()
            except TimeoutError:
                pass
        finally:
            async with asyncio.timeout(_HEAL_S):
                await injection.heal()
            if injection.tells:
                self.note(
                    Fault(
                        injection.kind,
                        injection.target,
                        began_s,
                        now_s(),
                        moves_clocks=injection.moves_clocks,
                        overlaps_s=injection.overlaps_s,
                    )
                )

    async def _until_rejoined(self, place: int) -> None:
        try:
            await until(lambda: self._is_back(place), timeout_s=_REJOIN_S)
        except AssertionError:
            # Other faults may keep it out; it counts as forgetful no longer than this run can wait for it.
            self.broken.append(f"node {place} had not rejoined after {_REJOIN_S:g} s")

    async def _is_back(self, place: int) -> bool:
        """Tell whether a node votes by its own word, and for a server: one that was superseded does not know."""
        return await self.cluster.votes(place) and await _is_seen(self, place)

    async def end(self) -> None:
        """Let no fault last any longer."""
        self.ending.set()
        async with self._changed:
            self._changed.notify_all()


async def until_seen(injector: FaultInjector, place: int) -> None:
    """Return once some server has the node's vote: one that comes back empty, and that no server has seen, wants an operator."""
    await until(lambda: _is_seen(injector, place), timeout_s=_SEEN_S)


async def _is_seen(injector: FaultInjector, place: int) -> bool:
    counts = [await server.counts(place) for server in injector.cluster.servers]
    return any(counts)


async def until_seen_by_all(injector: FaultInjector, place: int) -> None:
    """Return once every server has the node's vote. All of them have to run."""

    async def is_seen_by_all() -> bool:
        counts = [await server.counts(place) for server in injector.cluster.servers]
        return all(counts)

    await until(is_seen_by_all, timeout_s=_SEEN_S)


def node_of(place: int) -> str:
    """Return the name of a node's process, disk and settings."""
    return f"node {place}"


def network_of(place: int) -> str:
    """Return the name of what lies between a node and all servers."""
    return f"network of node {place}"


def server_of(place: int) -> str:
    """Return the name of a server's process."""
    return f"server {place}"


def every_server(injector: FaultInjector) -> set[str]:
    """Return the names of all servers' processes."""
    return {server_of(place) for place in range(len(injector.cluster.servers))}


def client_of(place: int) -> str:
    """Return the name of a client's process."""
    return f"client {place}"
