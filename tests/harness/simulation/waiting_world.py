"""Waiting under seeded chance: whole servers over simulated nodes, and many callers of one lock.

One seed is one trace, on virtual time. In a quiet world nothing is lost, silent or repeated, so a free lock
must be taken at once. But there one node may lose holds, or be the only one that sends notices. In the other
worlds faults come and go, and Acquires are repeated. A world finds

- a token that was granted twice, or a later one that is not greater; a grant within the validity of another;
- a call that fails without a fault, is answered after its deadline, or hangs; a waiter that is never granted;
- a lock that is free for long while a waiter waits, without a fault or a lost notice as the reason;
- in a quiet world, more tries for a lock than there are reasons to try;
- in a quiet world, a hold of a caller that is gone; in the end, any remains of any caller.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from functools import partial

from harness.doubles.node_memory import Hold
from harness.doubles.node_state import FakeNodeState
from harness.doubles.waiting import keeps_no_waiter
from harness.simulation.history import Grant, History
from harness.simulation.living import live
from harness.simulation.network import Network, NodeHost
from harness.simulation.processes import Chance, Process, now_ms
from harness.simulation.redis import SimulatedRedis
from harness.simulation.servers import ServerHost
from harness.simulation.waiting_faults import WaitingFaults
from redfence_server.errors import NoQuorumError, ValidityExhaustedError
from redfence_server.lock_service import LockService
from redfence_server.locking.node import Mint, Reply
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.waiting.acquiring import NotGranted

RESOURCE = "orders/42"
CALLERS = 120
TTLS_MS = (200, 1_000, 5_000)
FOR_EVER_MS = 3_600_000
# How long a lock may be free beside a waiter: a server holds back in vain, or rivals split the nodes.
QUIET_FREE_MS_MAX, FREE_MS_MAX = 80, 250
# How much longer if a single node sends notices: its notice calls for a try within this time.
RECHECK_MS = 100
# How many tries a hold may see beside those of callers that come or leave, and of servers when its ttl ends.
TRIES_MAX = 30
# For how long a node may be held by somebody who is gone: the undo is on its way.
ORPHAN_MS_MAX = 20
# After the last fault, a notice that it lost is made up for by the end of the longest hold.
AFTERMATH_MS = max(TTLS_MS) + 1_000
LOOK_EVERY_S = 0.01
NODE_TIMEOUT_MS = 100
HANG_S = 600

Outcome = Lease | NotGranted | NoQuorumError | ValidityExhaustedError


class _Node(FakeNodeState):
    """A node that tells of each mint, and of each hold that a release or an undo ends."""

    def __init__(self, on_mint: Callable[[Mint], None], on_end: Callable[[Hold], None]) -> None:
        super().__init__()
        self._on_mint = on_mint
        self._on_end = on_end

    def _mint(self, mint: Mint, hold: Hold | None, now_ms: float, channel: str) -> Reply:
        self._on_mint(mint)
        return super()._mint(mint, hold, now_ms, channel)

    def _end(self, resource: str, hold: Hold) -> None:
        self._on_end(hold)
        super()._end(resource, hold)


class WaitingWorld:
    """Servers, nodes, callers and faults of one seed."""

    def __init__(self, seed: int, *, quiet: bool) -> None:
        self.seed = seed
        self.quiet = quiet
        self.history = History()
        self.counts: Counter[str] = Counter()
        chance = self._chance = Chance(seed)
        network = Network(chance, latency_ms=(0.2, 2.0))
        node_count = chance.choice((1, 3, 3, 5))
        self._hosts = [self._new_host(index, node_count) for index in range(node_count)]
        self._servers = [
            ServerHost(f"server-{number}", self._hosts, network, chance, node_timeout_ms=NODE_TIMEOUT_MS)
            for number in range(chance.choice((1, 2, 2, 3)))
        ]
        self._gone_at_ms: dict[str, float] = {}  # by digest: since when nobody asks for what was not granted
        self._fickle: dict[str, asyncio.Task[Outcome]] = {}  # by digest: who leaves in the middle of a try
        self._faults = WaitingFaults(chance, network, self._hosts, self._servers)
        self._tries: set[str] = set()  # their nonces, since the last grant
        self._reasons_to_try = 0.0
        self._granted_at_ms, self._ttl_ms = 0.0, TTLS_MS[0]
        self._told_at_ms: dict[Process, float] = {}  # by server: when it got notice of a granted lease's end
        odd = chance.choice(("", "forgets", "speaks")) if quiet and node_count > 1 else ""
        self._forgets = self._hosts[0] if odd == "forgets" else None
        self._speaks = self._hosts[0] if odd == "speaks" else None
        if self._speaks is not None:
            for host in self._hosts[1:]:
                host.redis.loses_notices = True
            for server in self._servers:
                # Most often the others have decided a try before it answers.
                network.route(server, self._speaks).latency_ms = (1.0, 4.0)

    def _new_host(self, index: int, node_count: int) -> NodeHost:
        name = f"node-{index}"
        redis = SimulatedRedis(clock_ms=now_ms, appendfsync="always", name=name)
        redis.state = _Node(self._on_mint, partial(self._on_end, index))
        return NodeHost(redis, name).form(index, node_count, 300_000)

    async def run(self) -> None:
        """Let everybody come, wait, hold and leave; then look at what is left."""
        for server in self._servers:
            await server.until_serving()
        watching = asyncio.create_task(self._watch())
        striking = [] if self.quiet else [asyncio.create_task(self._faults.strike())]
        arrivals_per_s = self._chance.choice((2, 20, 300))
        callers = []
        for number in range(CALLERS):
            callers.append(asyncio.create_task(self._call(LeaseId(f"{number + 1:032x}"))))
            await asyncio.sleep(self._chance.expovariate(arrivals_per_s))
        for task in striking:
            await _end(task)
        self._faults.end()
        _, hung = await asyncio.wait(callers, timeout=HANG_S)
        if hung:
            self.history.problem(f"P: {len(hung)} callers hang")
        for error in (task.exception() for task in callers if task.done()):
            if error:
                self.history.problem(repr(error))
        await _end(watching)
        await asyncio.sleep(AFTERMATH_MS / 1000)
        await self._check_leftovers(hung)

    # --- who comes --------------------------------------------------------------------------------

    async def _call(self, lease: LeaseId) -> None:
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
            while kind == "waits on" and isinstance(told[0], NoQuorumError):
                await asyncio.sleep(0.1)
                told = [await self._acquire(lease, ttl_ms, wait_ms, None)]
        if any(isinstance(each, Lease) for each in told):
            await self._hold(lease, ttl_ms)
            return
        self._gone_at_ms[lease.digest] = now_ms()
        if kind == "comes twice":
            # As the contract says. After all the others the server has to clean up by itself.
            await self._release(lease)
        if kind == "waits on":
            self.history.problem(f"{lease} waited on and was told {told}")

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
            service = self._service(chance.choice(self._servers))
            if now_ms() < until_ms and not (await service.renew(RESOURCE, lease)).validity_ms:
                break
        if chance.random() < 0.85:
            await self._release(lease)

    async def _release(self, lease: LeaseId) -> None:
        for grant in self.history.grants.get(RESOURCE, ()):
            if grant.lease == lease.digest:
                grant.until_ms = min(grant.until_ms, now_ms())
        try:
            await self._service(self._chance.choice(self._servers)).release(RESOURCE, lease)
        except NoQuorumError:
            self.counts["release unknown"] += 1

    def _acquire(
        self, lease: LeaseId, ttl_ms: int, wait_ms: int, within_ms: float | None
    ) -> asyncio.Task[Outcome]:
        server = self._chance.choice(self._servers)
        called_at_ms = now_ms()
        arrived_at_ms = server.clock.now_ms()
        call = AcquireCall(RESOURCE, lease, ttl_ms, "", wait_ms, arrived_at_ms, answer_within_ms=within_ms)

        async def acquire() -> Outcome:
            outcome: Outcome
            self._reasons_to_try += 1
            try:
                outcome = await self._service(server).acquire(call)
            except (NoQuorumError, ValidityExhaustedError) as error:
                if self.quiet and within_ms is None:
                    self.history.problem(f"failed without a fault: {error}")
                outcome = error
            finally:
                self._reasons_to_try += 1
            if within_ms is not None and now_ms() > called_at_ms + within_ms + 1:  # the clocks differ
                self.history.problem("answered after the deadline")
            if isinstance(outcome, Lease):
                until_ms = called_at_ms + outcome.validity_ms
                self.history.minted(RESOURCE, lease.digest, outcome.token)
                grant = Grant(RESOURCE, lease.digest, outcome.token, called_at_ms, now_ms(), until_ms)
                self.history.granted(grant)
                self.counts["granted"] += 1
                self._on_grant(lease.digest, ttl_ms)
            return outcome

        return asyncio.create_task(acquire())

    def _on_grant(self, digest: str, ttl_ms: int) -> None:
        """Count tries anew, and have the forgetful node forget what all others remember, or not."""
        self._tries.clear()
        self._granted_at_ms, self._ttl_ms, self._reasons_to_try = now_ms(), ttl_ms, 0.0
        everywhere = all(hold and hold.digest == digest for hold in self._holds())
        if self._forgets is not None and everywhere and self._chance.random() < 0.5:
            self.counts["forgotten"] += 1
            del self._forgets.redis.state.holds[RESOURCE]

    def _on_end(self, index: int, hold: Hold) -> None:
        """Note which servers get notice of the end of a granted lease."""
        host = self._hosts[index]
        if any(each.lease == hold.digest for each in self.history.grants.get(RESOURCE, ())):
            for each in host.connections:
                if each._client.channel.decode() in hold.notify and not host.redis.loses_notices:
                    self._told_at_ms[each._server] = now_ms()

    def _on_mint(self, mint: Mint) -> None:
        """Count the try. Have somebody fickle leave at some instant of it, or not."""
        self._tries.add(mint.nonce)
        ends = len(self._servers) * (now_ms() - self._granted_at_ms) / self._ttl_ms
        if self.quiet and len(self._tries) > TRIES_MAX + self._reasons_to_try + ends:
            self.history.problem(f"{len(self._tries)} tries for {self._reasons_to_try:.0f} reasons")
        if (task := self._fickle.get(mint.digest)) is not None and self._chance.random() < 0.2:
            asyncio.get_running_loop().call_later(self._chance.choice((0, 0.0004, 0.001, 0.003)), task.cancel)

    # --- what must hold ---------------------------------------------------------------------------

    def _service(self, server: ServerHost) -> LockService:
        assert server.service is not None
        return server.service

    def _holds(self) -> list[Hold | None]:
        return [host.redis.state._hold(RESOURCE, now_ms()) for host in self._hosts]

    async def _watch(self) -> None:
        """Check again and again that the lock is not free beside a waiter, nor held without a holder."""
        free_since_ms: float | None = None
        free_ms_max = QUIET_FREE_MS_MAX if self.quiet else FREE_MS_MAX
        if self._speaks is not None:
            free_ms_max += RECHECK_MS
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            if self.quiet:
                self._check_orphans()
            in_aftermath = self._faults.go_on or now_ms() < self._faults.last_at_ms + AFTERMATH_MS
            if (in_aftermath and not self.quiet) or not self._is_free() or not (waiting := self._waiting()):
                free_since_ms = None
            elif free_since_ms is None:
                free_since_ms = now_ms()
            elif now_ms() - max(free_since_ms, self._granted_at_ms) > free_ms_max:
                self.history.problem(f"free for {free_ms_max} ms although {waiting} callers wait")
                free_since_ms = None

    def _is_free(self) -> bool:
        return self._holds().count(None) > len(self._hosts) // 2

    def _waiting(self) -> int:
        """Count waiters, but not those of a server that got no notice while a single node sends them."""
        told = [
            server
            for server in self._servers
            if self._speaks is None or self._told_at_ms.get(server.process, 0.0) > self._granted_at_ms
        ]
        queues = (self._service(server)._queues.find(RESOURCE) for server in told)
        return sum(waiter.idle for queue in queues if queue for waiter in queue.line._waiters)

    def _check_orphans(self) -> None:
        for hold in self._holds():
            if hold and self._gone_at_ms.get(hold.digest, now_ms()) < now_ms() - ORPHAN_MS_MAX:
                self.history.problem("a node is held by one that is gone")

    async def _check_leftovers(self, hung: set[asyncio.Task[None]]) -> None:
        if any(self._holds()):
            self.history.problem("C: a hold is left")
        for server in self._servers:
            if not keeps_no_waiter(self._service(server)._queues):
                self.history.problem(f"C: {server.name} keeps something")
            await server.end()
        if len(asyncio.all_tasks()) > 1 + len(hung):
            self.history.problem("C: tasks are left")


async def _end(task: asyncio.Task[Outcome] | asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait([task])


def run_waiting_world(seed: int, *, quiet: bool) -> WaitingWorld:
    return live(lambda: WaitingWorld(seed, quiet=quiet), hang_s=4 * HANG_S)
