"""Injects faults: a fault is data and two functions, and each fault that began is recorded and ended."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from random import Random
from typing import TypeAlias, TypeVar

from harness.chaos.client_pool import ClientPool
from harness.chaos.cluster import TTL_MS_MAX, ChaosCluster
from harness.chaos.recorder import now_s
from harness.history.records import Fault
from harness.processes.servers import until

ThingT = TypeVar("ThingT")
Step: TypeAlias = Callable[[], Awaitable[None] | None]

TTL_S = TTL_MS_MAX / 1000
# The names of what no two faults may affect at the same time. A node's lock covers its disk and settings.
STORAGE = "storage"
lock_of_node: Callable[[int], str] = "node {}".format
lock_of_network: Callable[[int], str] = "network of node {}".format
lock_of_server: Callable[[int], str] = "server {}".format
lock_of_client: Callable[[int], str] = "client {}".format
# A forgetful node rejoins after a quarantine. One server must run during the whole quarantine.
_REJOIN_S = 60.0
_END_S = 90.0
# A server that has just started examines every node, perhaps through a broken network.
_SEEN_S = 60.0


async def run_step(step: Step) -> None:
    """Call a function, and await what it returns if it is asynchronous."""
    if (awaitable := step()) is not None:
        await awaitable


def for_each(
    action: Callable[[ThingT], Awaitable[None] | None], things: Iterable[ThingT]
) -> Callable[[], Awaitable[None]]:
    """Return a step that does one action to several things, one after another."""

    async def step() -> None:
        for thing in things:
            if (awaitable := action(thing)) is not None:
                await awaitable

    return step


def no_step() -> None:
    """Do nothing: a fault that ends by itself needs no end."""


@dataclass(frozen=True, slots=True)
class FaultInjection:
    """One fault, drawn but not yet injected.

    Attributes:
        target: names the processes for people.
        lasts_s: the time between begin and end.
        begin: brings the fault about.
        end: takes it back, also if `begin` failed midway.
        locks: names that no other fault may hold at the same time.
        forgets: the nodes that may forget by it.
        moves_clocks, overlaps_s: see `Fault`.
        records_itself: whether its own functions record it, by `FaultInjector.record`.
        kind: its name in the list of faults.
    """

    target: str
    lasts_s: float
    begin: Step
    end: Step = no_step
    locks: Collection[str] = ()
    forgets: Sequence[int] = ()
    moves_clocks: bool = False
    overlaps_s: float | None = None
    records_itself: bool = False
    kind: str = ""


@dataclass(slots=True)
class FaultInjector:
    """Injects faults into one cluster and its clients.

    Attributes:
        faults: those that have ended, in the order of their ends.
        ending: set when every fault must end.
        on_begin: called with each fault as it begins.
        unhealed: what the harness could not repair after a fault; such a run is invalid.
        broken: what redfence did not repair by itself, although it promises to.
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
        """Return when the fault has ended and the nodes that forgot by it have rejoined.

        At most a minority of nodes forgets at a time. redfence promises nothing beyond that.
        """
        async with AsyncExitStack() as stack:
            # One order for all faults, so that no two faults wait for each other.
            for name in sorted(injection.locks):
                await stack.enter_async_context(self._locks.setdefault(name, asyncio.Lock()))
            await self._wait_until_may_forget(set(injection.forgets))
            try:
                if not self.ending.is_set():
                    await self._begin_and_end(injection)
            finally:
                for node_index in injection.forgets:
                    await self._wait_until_rejoined(node_index)
                self._note_rejoined(set(injection.forgets))
                async with self._changed:
                    self._forgetful -= set(injection.forgets)
                    self._changed.notify_all()

    def _note_rejoined(self, nodes: set[int]) -> None:
        """Complete the records of the faults by which these nodes forgot."""
        for number, fault in enumerate(self.faults):
            if fault.rejoined_s is None and nodes & set(fault.forgets):
                self.faults[number] = replace(fault, rejoined_s=now_s())

    def record(self, fault: Fault) -> None:
        """Record a fault that has ended."""
        self.faults.append(fault)

    async def end(self) -> None:
        """Let every fault end now."""
        self.ending.set()
        async with self._changed:
            self._changed.notify_all()

    async def _wait_until_may_forget(self, nodes: set[int]) -> None:
        def may_forget() -> bool:
            is_minority = len(self._forgetful | nodes) <= self.cluster.minority
            return (is_minority and not self._forgetful & nodes) or self.ending.is_set()

        if nodes:
            async with self._changed:
                await self._changed.wait_for(may_forget)
                self._forgetful |= nodes

    async def _begin_and_end(self, injection: FaultInjection) -> None:
        self.on_begin(injection)
        began_s = now_s()
        try:
            await run_step(injection.begin)
            try:
                async with asyncio.timeout(injection.lasts_s):
                    await self.ending.wait()
            except TimeoutError:
                pass
        finally:
            async with asyncio.timeout(_END_S):
                await run_step(injection.end)
            if not injection.records_itself:
                fault = Fault(
                    injection.kind,
                    injection.target,
                    began_s,
                    now_s(),
                    moves_clocks=injection.moves_clocks,
                    overlaps_s=injection.overlaps_s,
                    forgets=tuple(injection.forgets),
                )
                self.record(fault)

    async def _wait_until_rejoined(self, node_index: int) -> None:
        async def has_rejoined() -> bool:
            # A superseded process does not know that it has lost its vote, so a server must confirm it.
            return await self.cluster.votes(node_index) and await _is_seen(self, node_index)

        try:
            await until(has_rejoined, timeout_s=_REJOIN_S)
        except AssertionError:
            # Other faults may keep it out. The run waits no longer, and the node counts as rejoined.
            self.broken.append(f"node {node_index} had not rejoined after {_REJOIN_S:g} s")


async def wait_until_seen(injector: FaultInjector, *nodes: int) -> None:
    """Return once some server has each node's vote.

    Without a server that knows it, a node that comes back empty needs an operator.
    """
    for node_index in nodes:
        await until(partial(_is_seen, injector, node_index), timeout_s=_SEEN_S)


async def wait_until_seen_by_all(injector: FaultInjector, *nodes: int) -> None:
    """Return once every server has each node's vote; all servers must run."""

    async def is_seen_by_all() -> bool:
        return all([await server.counts(each) for server in injector.cluster.servers for each in nodes])

    await until(is_seen_by_all, timeout_s=_SEEN_S)


async def _is_seen(injector: FaultInjector, node_index: int) -> bool:
    return any([await server.counts(node_index) for server in injector.cluster.servers])


def locks_of_servers(injector: FaultInjector) -> set[str]:
    """Return the locks of all servers' processes."""
    return {lock_of_server(index) for index in range(len(injector.cluster.servers))}


def locks_of_everything(injector: FaultInjector) -> set[str]:
    """Return the locks of all nodes, networks, servers and the storage."""
    nodes = range(len(injector.cluster.nodes))
    return {*map(lock_of_node, nodes), *map(lock_of_network, nodes), *locks_of_servers(injector), STORAGE}


def some_node(injector: FaultInjector, random: Random) -> int:
    """Draw the index of a node."""
    return random.randrange(len(injector.cluster.nodes))


def some_server(injector: FaultInjector, random: Random) -> int:
    """Draw the index of a server."""
    return random.randrange(len(injector.cluster.servers))


def names(indices: Iterable[int], name_of: Callable[[int], str] = lock_of_node) -> str:
    """Return the names of several processes for people."""
    return ", ".join(map(name_of, indices))
