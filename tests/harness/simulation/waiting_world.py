"""Waiting under seeded chance: the product's `LockService` on several servers over fake nodes.

One seed is one trace, on virtual time. In a quiet world nothing is lost, silent or repeated, so a free lock
must be taken at once. In the other worlds faults come and go, and Acquires are repeated. A world finds

- a token that was granted twice, or a later one that is not greater; a grant within the validity of another;
- a call that fails without a fault, is answered after its deadline, or hangs; a waiter that is never granted;
- a lock that is free for long while a waiter waits, without a fault or a lost notice as the reason;
- in a quiet world, a hold of a caller that is gone; in the end, any remains of any caller.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass

from harness.doubles.fake_node import FakeNodeState
from harness.doubles.waiting import keeps_no_waiter
from harness.simulation.waiting_links import Chance, Link, now_ms
from harness.time.virtual_loop import LoopClock, VirtualLoop
from redfence_server.errors import NoQuorumError, ValidityExhaustedError
from redfence_server.lock_service import LockService, NotGranted
from redfence_server.locking.redlock import Redlock
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.waiting.waiter_limiter import WaiterLimits

RESOURCE = "orders/42"
CALLERS = 120
TTLS_MS = (200, 1_000, 5_000)
FOR_EVER_MS = 3_600_000
# How long a lock may be free beside a waiter: a server holds back in vain, or rivals split the nodes.
QUIET_FREE_MS_MAX, FREE_MS_MAX = 80, 250
# For how long a node may be held by somebody who is gone: the undo is on its way.
ORPHAN_MS_MAX = 20
# After the last fault, a notice that it lost is made up for by the end of the longest hold.
AFTERMATH_MS = max(TTLS_MS) + 1_000
LOOK_EVERY_S = 0.01
HANG_S = 600

Outcome = Lease | NotGranted | NoQuorumError | ValidityExhaustedError


@dataclass(frozen=True, slots=True)
class Grant:
    """What one caller was told, and from when to when it counts."""

    token: int
    digest: str
    called_at_ms: float
    told_at_ms: float
    valid_until_ms: float


class WaitingWorld:
    """Servers, nodes, callers and faults of one seed.

    Attributes:
        problems: what was found, each with its instant or its token.
        counts: the callers by what they do, and `granted`.
    """

    def __init__(self, seed: int, *, quiet: bool) -> None:
        self.seed = seed
        self.quiet = quiet
        self.problems: list[str] = []
        self.counts: Counter[str] = Counter()
        chance = self._chance = Chance(seed)
        node_count = chance.choice((1, 3, 3, 5))
        self._states = [FakeNodeState() for _ in range(node_count)]
        self._links = [
            [
                Link(index, state=state, channel=f"server-{server}", chance=chance, on_mint=self._tempt)
                for index, state in enumerate(self._states)
            ]
            for server in range(chance.choice((1, 2, 2, 3)))
        ]
        clock = LoopClock()
        self._services = [
            LockService(
                Redlock(links, clock=clock, randomness=chance),
                clock=clock,
                randomness=chance,
                ttl_ms_max=lambda: 300_000,
                limits=WaiterLimits(server=1_000, resource=1_000, connection=1_000),
            )
            for links in self._links
        ]
        self._grants: list[Grant] = []
        self._ended_at_ms: dict[str, float] = {}  # by digest: when its release was first asked for
        self._gone_at_ms: dict[str, float] = {}  # by digest: since when nobody asks for what was not granted
        self._fickle: dict[str, asyncio.Task[Outcome]] = {}  # by digest: who leaves in the middle of a try
        self._faulty = not quiet
        self._last_fault_at_ms = 0.0

    async def run(self) -> None:
        """Let everybody come, wait, hold and leave; then look at what is left."""
        watching = asyncio.create_task(self._watch())
        faults = asyncio.create_task(self._make_faults())
        arrivals_per_s = self._chance.choice((2, 20, 300))
        callers = []
        for number in range(CALLERS):
            callers.append(asyncio.create_task(self._call(LeaseId(f"{number + 1:032x}"))))
            await asyncio.sleep(self._chance.expovariate(arrivals_per_s))
        await _end(faults)
        self._faulty = False
        for links in self._links:
            self._heal(links)
        _, hung = await asyncio.wait(callers, timeout=HANG_S)
        self.problems += [f"{len(hung)} callers hang"] if hung else []
        self.problems += [repr(task.exception()) for task in callers if task.done() and task.exception()]
        await _end(watching)
        await asyncio.sleep(AFTERMATH_MS / 1000)
        self._check_grants()
        self._check_leftovers(hung)

    # --- who comes --------------------------------------------------------------------------------

    async def _call(self, lease: LeaseId) -> None:
        """Be one caller, of a kind that is chosen by chance."""
        chance = self._chance
        ttl_ms = chance.choice(TTLS_MS)
        others = ("leaves", "is fickle", "has a deadline", "waits for a while", "tries once")
        kind = "waits on" if chance.random() < 0.5 else chance.choice(others)
        if not self.quiet and chance.random() < 0.15:
            kind = "comes twice"
        self.counts[kind] += 1
        wait_ms = {"tries once": 0, "waits for a while": chance.randint(1, 900)}.get(kind, FOR_EVER_MS)
        within_ms = chance.uniform(10, 900) if kind == "has a deadline" else None
        first = self._acquire(lease, ttl_ms, wait_ms, within_ms)
        if kind == "is fickle":
            self._fickle[lease.digest] = first
        if kind == "comes twice":
            told = await self._come_again(first, lease, ttl_ms)
        else:
            await asyncio.wait([first], timeout=chance.expovariate(3.0) if kind == "leaves" else None)
            await _end(first)
            told = [] if first.cancelled() else [first.result()]
        if any(isinstance(each, Lease) for each in told):
            await self._hold(lease, ttl_ms)
            return
        self._gone_at_ms[lease.digest] = now_ms()
        if kind == "comes twice":
            # As the contract says. After all the others the server has to clean up by itself.
            await self._release(lease)
        if kind == "waits on" and not any(isinstance(each, NoQuorumError) for each in told):
            self._found(f"{lease} waited on and was told {told}")

    async def _come_again(self, first: asyncio.Task[Outcome], lease: LeaseId, ttl_ms: int) -> list[Outcome]:
        """Repeat an Acquire at any server; when one is told, the other finds the same or is called off."""
        await asyncio.sleep(self._chance.choice((0, 0.001, 0.05, 0.3)))
        tries = [first, self._acquire(lease, ttl_ms, FOR_EVER_MS, None)]
        _, rest = await asyncio.wait(tries, return_when="FIRST_COMPLETED")
        if rest and self._chance.random() < 0.5:
            await asyncio.wait(rest, timeout=1.0)
        for task in tries:
            await _end(task)
        return [task.result() for task in tries if not task.cancelled()]

    async def _hold(self, lease: LeaseId, ttl_ms: int) -> None:
        """Keep a lease alive for some time, and release it or die."""
        chance = self._chance
        until_ms = now_ms() + chance.choice((0, 0, 1, 5, 30, 0.5 * ttl_ms, 3 * ttl_ms))
        while now_ms() < until_ms:
            await asyncio.sleep(min(ttl_ms / 3, until_ms - now_ms()) / 1000)
            service = chance.choice(self._services)
            if now_ms() < until_ms and not (await service.renew(RESOURCE, lease)).validity_ms:
                break
        if chance.random() < 0.85:
            await self._release(lease)

    async def _release(self, lease: LeaseId) -> None:
        self._ended_at_ms.setdefault(lease.digest, now_ms())
        try:
            await self._chance.choice(self._services).release(RESOURCE, lease)
        except NoQuorumError:
            self.counts["release unknown"] += 1

    def _acquire(
        self, lease: LeaseId, ttl_ms: int, wait_ms: int, within_ms: float | None
    ) -> asyncio.Task[Outcome]:
        """Begin an Acquire at any server."""
        service = self._chance.choice(self._services)
        called_at_ms = now_ms()
        call = AcquireCall(RESOURCE, lease, ttl_ms, "", wait_ms, called_at_ms, answer_within_ms=within_ms)

        async def acquire() -> Outcome:
            outcome: Outcome
            try:
                outcome = await service.acquire(call)
            except (NoQuorumError, ValidityExhaustedError) as error:
                if self.quiet and within_ms is None:
                    self._found(f"failed without a fault: {error}")
                outcome = error
            if within_ms is not None and now_ms() > called_at_ms + within_ms:
                self._found("answered after the deadline")
            if isinstance(outcome, Lease):
                until_ms = called_at_ms + outcome.validity_ms
                self._grants.append(Grant(outcome.token, lease.digest, called_at_ms, now_ms(), until_ms))
                self.counts["granted"] += 1
            return outcome

        return asyncio.create_task(acquire())

    def _tempt(self, digest: str) -> None:
        """Have somebody fickle leave at some instant of the try that begins, or not."""
        if (task := self._fickle.get(digest)) is not None and self._chance.random() < 0.2:
            asyncio.get_running_loop().call_later(self._chance.choice((0, 0.0004, 0.001, 0.003)), task.cancel)

    # --- what goes wrong --------------------------------------------------------------------------

    async def _make_faults(self) -> None:
        """Again and again break or silence a connection or a whole node, or lose its notices, and heal it."""
        chance = self._chance
        while self._faulty:
            await asyncio.sleep(chance.expovariate(4.0))
            link = chance.choice(chance.choice(self._links))
            fault = chance.choice((Link.cut, Link.fall_silent, Link.lose_all_notices, None))
            struck = [link] if fault else [links[link.index] for links in self._links]
            for each in struck:
                (fault or Link.fall_silent)(each)
            await asyncio.sleep(chance.choice((0.01, 0.05, 0.3)))
            self._heal(struck)

    def _heal(self, links: list[Link]) -> None:
        self._last_fault_at_ms = now_ms()
        for link in links:
            link.heal()

    # --- what must hold ---------------------------------------------------------------------------

    def _found(self, problem: str) -> None:
        self.problems.append(f"at {now_ms():.0f} ms: {problem}")

    async def _watch(self) -> None:
        """Look again and again whether the lock is free beside somebody who waits, or held by nobody."""
        free_since_ms: float | None = None
        free_ms_max = QUIET_FREE_MS_MAX if self.quiet else FREE_MS_MAX
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.quiet:
                self._check_orphans()
            in_aftermath = self._faulty or now_ms() < self._last_fault_at_ms + AFTERMATH_MS
            if (in_aftermath and not self.quiet) or not self._is_free() or not (waiting := self._waiting()):
                free_since_ms = None
            elif free_since_ms is None:
                free_since_ms = now_ms()
            elif now_ms() - free_since_ms > free_ms_max:
                self._found(f"free for {free_ms_max} ms beside {waiting} who wait")
                free_since_ms = None

    def _is_free(self) -> bool:
        free = sum(state._hold(RESOURCE, now_ms()) is None for state in self._states)
        return free > len(self._states) // 2

    def _waiting(self) -> int:
        queues = (service._queues.find(RESOURCE) for service in self._services)
        return sum(waiter.idle for queue in queues if queue for waiter in queue.line._waiters)

    def _check_orphans(self) -> None:
        for state in self._states:
            hold = state._hold(RESOURCE, now_ms())
            if hold and self._gone_at_ms.get(hold.digest, now_ms()) < now_ms() - ORPHAN_MS_MAX:
                self._found("a node is held by one that is gone")

    def _check_grants(self) -> None:
        # No `TokenHistory`: an Acquire repeated after its lease expired gets a greater token.
        lease_of: dict[int, str] = {}
        for grant in self._grants:
            if lease_of.setdefault(grant.token, grant.digest) != grant.digest:
                self.problems.append(f"token {grant.token} twice")
            until_ms = min(grant.valid_until_ms, self._ended_at_ms.get(grant.digest, grant.valid_until_ms))
            for other in self._grants:
                if other.digest == grant.digest:
                    continue
                if grant.told_at_ms < other.called_at_ms and grant.token >= other.token:
                    self.problems.append(f"token {other.token} after {grant.token}")
                if grant.told_at_ms < other.told_at_ms < until_ms:
                    self.problems.append(f"token {other.token} granted while {grant.token} is valid")

    def _check_leftovers(self, hung: set[asyncio.Task[None]]) -> None:
        for server, service in enumerate(self._services):
            if not keeps_no_waiter(service._queues):
                self.problems.append(f"server {server} keeps something")
        if any(state._hold(RESOURCE, now_ms()) for state in self._states):
            self.problems.append("a hold is left")
        if len(asyncio.all_tasks()) > 1 + len(hung):
            self.problems.append("tasks are left")


async def _end(task: asyncio.Task[Outcome] | asyncio.Task[None]) -> None:
    """Cancel a task, unless it is done, and wait until it is."""
    task.cancel()
    await asyncio.wait([task])


def run_waiting_world(seed: int, *, quiet: bool) -> WaitingWorld:
    """Run the world of a seed on a loop of its own."""

    async def run() -> WaitingWorld:
        world = WaitingWorld(seed, quiet=quiet)
        await world.run()
        return world

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())
