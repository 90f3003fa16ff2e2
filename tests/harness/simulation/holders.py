"""Callers of the simulated servers: they acquire, append to fenced storage, renew, release, pause and die."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from harness.simulation.history import FencedStorage, Grant, History
from harness.simulation.processes import Chance, Process, now_ms
from harness.simulation.servers import NotServingError, ServerHost, UnknownOutcomeError, Wire
from redfence_server.errors import RedfenceServerError
from redfence_server.lock_service import ForcedRelease, LockService, LockView
from redfence_server.locking.quorum import RenewVerdict
from redfence_server.model import AcquireCall, Lease, LeaseId

if TYPE_CHECKING:
    from redfence_server.lock_service import RenewOutcome

_TRIES_MAX = 6
# How many of the grants are kept for a while.
_KEEPS = 0.3


def _least_validity_ms(ttl_ms: int, waited_ms: float) -> float:
    """Return the validity by the contract: less 1 %, 2 ms, and 0.05 % of the wait up to half of the ttl."""
    return ttl_ms * 0.99 - 2 - min(waited_ms * 0.0005, ttl_ms * 0.5) - 1


@dataclass(frozen=True, slots=True)
class Surroundings:
    """The state and settings that all holders share."""

    servers: Sequence[ServerHost]
    history: History
    storage: FencedStorage
    chance: Chance
    resources: Sequence[str]
    ttls_ms: Sequence[int]
    call_timeout_s: float
    counts_from_answer: bool = False
    delays_ms: Sequence[int] = (0,)


class Holder:
    """One client process."""

    def __init__(self, name: str, around: Surroundings, *, latency_ms: tuple[float, float]) -> None:
        self.name = name
        self._around = around
        self.process = Process(name)
        self.wire = Wire(self.process, around.chance, latency_ms=latency_ms)
        self._count = 0
        self._resting = False

    def start(self) -> None:
        self.process.spawn(self._live())

    def rest(self) -> None:
        self._resting = True

    def kill(self) -> None:
        """End the process, as kill -9 does: what it holds is held until its ttl ends."""
        self.process.kill()
        self.wire.break_off()

    def restart(self) -> None:
        self.process = self.wire.client = Process(self.name)
        self.start()

    async def _live(self) -> None:
        chance = self._around.chance
        while not self._resting:
            await self._hold_once(chance.choice(self._around.resources))
            await asyncio.sleep(chance.expovariate(50.0))

    async def _hold_once(self, resource: str) -> None:
        chance = self._around.chance
        self._count += 1
        lease = LeaseId(f"{chance.getrandbits(128):032x}")
        ttl_ms = chance.choice(self._around.ttls_ms)
        wait_ms = chance.choice((0, 0, 50, 300, 3_000))
        delay_ms = self._delay_ms(room_ms=max(self._around.ttls_ms) - ttl_ms)
        grant = await self.acquire(resource, lease, ttl_ms=ttl_ms, wait_ms=wait_ms, delay_ms=delay_ms)
        if grant is None:
            await self._release(resource, lease)
            return
        if chance.random() < _KEEPS:
            await self._keep(grant, lease, ttl_ms)
        for number in range(chance.choice((0, 0, 1, 1, 1, 3))):
            await asyncio.sleep(chance.choice((0, 0, 0, 0.005, ttl_ms / 3_000, ttl_ms / 1_000)))
            await self._append(grant, f"{self.name}/{self._count}/{number}")
            if chance.random() < 0.5 and not await self._renew(grant, lease):
                break
        if chance.random() < 0.9:
            # It counts on the lease no more, and says so before it tells anybody.
            grant.until_ms, grant.delay_ms = min(grant.until_ms, now_ms()), 0.0
            await self._release(resource, lease)

    def _delay_ms(self, *, room_ms: int) -> int:
        """Return a lock delay that fits into the greatest ttl."""
        delays_ms = self._around.delays_ms
        # Without delays nothing is drawn, so that those worlds stay as they are.
        return min(room_ms, self._around.chance.choice(delays_ms)) if len(delays_ms) > 1 else delays_ms[0]

    async def _keep(self, grant: Grant, lease: LeaseId, ttl_ms: int) -> None:
        """Renew again and again, as one who has a lot to do."""
        for _ in range(self._around.chance.randint(1, 10)):
            await asyncio.sleep(ttl_ms / 5_000)
            if not await self._renew(grant, lease):
                return

    async def acquire(
        self, resource: str, lease: LeaseId, *, ttl_ms: int, wait_ms: int, delay_ms: int = 0
    ) -> Grant | None:
        """Acquire at one server after another while the outcome is unknown; None without a grant."""
        around = self._around
        for _ in range(_TRIES_MAX):
            server = around.chance.choice(around.servers)
            called_at_ms = now_ms()

            async def acquire(service: LockService, server: ServerHost = server) -> object:
                arrived_at_ms = server.clock.now_ms()
                call = AcquireCall(
                    *(resource, lease, ttl_ms, self.name, wait_ms, arrived_at_ms),
                    lock_delay_ms=delay_ms,
                )
                outcome = await service.acquire(call)
                if isinstance(outcome, Lease):
                    around.history.minted(resource, lease.digest, outcome.token)
                return outcome

            timeout_s = around.call_timeout_s + wait_ms / 1000
            told = await self._ask(server, acquire, timeout_s=timeout_s)
            if isinstance(told, Lease):
                until_ms = (now_ms() if around.counts_from_answer else called_at_ms) + told.validity_ms
                told_at_ms = now_ms()
                grant = Grant(
                    resource, lease.digest, told.token, called_at_ms, told_at_ms, until_ms, delay_ms
                )
                if until_ms > grant.told_at_ms + ttl_ms:
                    around.history.problem(f"D: {resource}: valid for longer than its ttl")
                if until_ms < called_at_ms + _least_validity_ms(ttl_ms, now_ms() - called_at_ms):
                    around.history.problem(f"D: {resource}: valid for less than its ttl and drift")
                if until_ms <= now_ms():
                    return None
                around.history.granted(grant)
                return grant
            if told is None:
                await asyncio.sleep(around.chance.uniform(0.01, 0.1))
                continue
            return None
        return None

    async def _append(self, grant: Grant, entry: str) -> None:
        """Read, think, write: all with the token, and without a look at the clock, as careless clients do."""
        around, resource = self._around, grant.resource
        await self._travel()
        entries = around.storage.read(resource, grant.token)
        await self._travel()
        if entries is None:
            return
        await asyncio.sleep(around.chance.choice((0, 0, 0, 0.001, 0.002, 0.005, 0.02, 0.3)))
        await self._travel()
        if around.storage.write(resource, grant.token, (*entries, entry)):
            await self._travel()
            around.storage.acknowledged.append((resource, entry))

    async def _travel(self) -> None:
        await asyncio.sleep(self._around.chance.uniform(0.0001, 0.002))

    async def _renew(self, grant: Grant, lease: LeaseId) -> bool:
        around = self._around
        sent_at_ms = now_ms()
        server = around.chance.choice(around.servers)
        told = await self._ask(
            server, lambda service: service.renew(grant.resource, lease), timeout_s=around.call_timeout_s
        )
        if told is None:
            return now_ms() < grant.until_ms
        renewed: RenewOutcome = told  # type: ignore[assignment]  # what renew returns
        if renewed.verdict is RenewVerdict.FORCED:
            around.history.told_forced(grant)
        if renewed.verdict in (RenewVerdict.LOST, RenewVerdict.FORCED):
            around.history.told_lost(grant)
            return False
        until_ms = sent_at_ms + renewed.validity_ms
        if until_ms <= now_ms():
            return False
        # This counts also after the validity that the holder knew: the answer says that it has its lease.
        around.history.renewed(grant, until_ms)
        return True

    async def _release(self, resource: str, lease: LeaseId) -> None:
        for _ in range(2):
            server = self._around.chance.choice(self._around.servers)
            told = await self._ask(
                server,
                lambda service: service.release(resource, lease),
                timeout_s=self._around.call_timeout_s,
            )
            if told is not None:
                return

    async def _ask(
        self,
        server: ServerHost,
        method: Callable[[LockService], Awaitable[object]],
        *,
        timeout_s: float,
    ) -> object | None:
        """Return the answer; None if there was none, or one that tells to try again."""
        try:
            return await self.wire.call(server, method, timeout_s=timeout_s)
        except (NotServingError, UnknownOutcomeError, RedfenceServerError):
            return None


class Operator(Holder):
    """Ends leases by force, by what it saw some time ago; `ended` counts those."""

    ended = 0

    async def _live(self) -> None:
        chance, ttl_ms = self._around.chance, max(self._around.ttls_ms)
        while not self._resting:
            await asyncio.sleep(chance.expovariate(5.0))
            resource = chance.choice(self._around.resources)
            view = await self._ask_any(partial(_look, resource))
            if not isinstance(view, LockView) or view.current is None:
                continue
            lease, token = view.current.digest, view.current.token
            await asyncio.sleep(chance.choice((0, 0, 0.001, ttl_ms / 4_000, ttl_ms / 1_000)))
            self._around.history.forcing(resource, lease, token)
            forced = await self._ask_any(partial(_force, resource, token))
            if isinstance(forced, ForcedRelease) and forced.was_held:
                self.ended += 1

    async def _ask_any(self, method: Callable[[LockService], Awaitable[object]]) -> object | None:
        server = self._around.chance.choice(self._around.servers)
        return await self._ask(server, method, timeout_s=self._around.call_timeout_s)


async def _look(resource: str, service: LockService) -> object:
    return await service.get_lock(resource)


async def _force(resource: str, token: int, service: LockService) -> object:
    return await service.force_release(resource, token, reason="")
