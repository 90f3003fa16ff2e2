"""The product's lock service over fake nodes, on virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from harness.doubles.fake_node import FakeNode
from harness.doubles.node_state import FakeNodeState
from harness.doubles.waiting import keeps_no_waiter
from harness.time.virtual_loop import LoopClock
from redfence_server.lock_service import LockService
from redfence_server.locking.node import Command, Mint
from redfence_server.locking.redlock import Redlock
from redfence_server.model import AcquireCall, Lease, LeaseId
from redfence_server.randomness import SystemRandomness
from redfence_server.waiting.acquiring import NotGranted
from redfence_server.waiting.waiter_limiter import WaiterLimits

R = "orders/42"
TTL_MS = 10_000
FOREVER_MS = 3_600_000
HOLDER = LeaseId("f" * 32)
_CLOCK = LoopClock()
_LIMITS = WaiterLimits(server=2_000, resource=1_500, connection=1_800)


def lease_id(number: int) -> LeaseId:
    return LeaseId(f"{number:032x}")


@dataclass(slots=True, eq=False)
class Server:
    """One server with links of its own to the nodes."""

    links: list[FakeNode]
    service: LockService

    def wait(
        self,
        lease: LeaseId,
        *,
        wait_ms: int = FOREVER_MS,
        ttl_ms: int = TTL_MS,
        connection: str = "",
        peer: str = "",
        resource: str = R,
        answer_within_ms: float | None = None,
    ) -> asyncio.Task[Lease | NotGranted]:
        call = AcquireCall(
            *(resource, lease, ttl_ms, f"holder {lease.secret[-2:]}", wait_ms, LoopClock().now_ms()),
            answer_within_ms=answer_within_ms,
            connection=connection,
            peer=peer,
        )
        return asyncio.ensure_future(self.service.acquire(call))

    async def acquire(self, lease: LeaseId, *, ttl_ms: int = TTL_MS) -> Lease:
        granted = await self.wait(lease, wait_ms=0, ttl_ms=ttl_ms)
        assert isinstance(granted, Lease)
        return granted

    async def release(self, lease: LeaseId) -> bool:
        return await self.service.release(R, lease)

    @property
    def sent(self) -> Sequence[Command]:
        return self.links[0].sent

    def every(self, **settings: bool) -> None:
        for link in self.links:
            for name, value in settings.items():
                setattr(link, name, value)

    def deliver(self) -> None:
        for link in self.links:
            link.settle()

    def mints(self) -> int:
        return sum(isinstance(each, Mint) for each in self.sent)

    async def waiters(self) -> int:
        return (await self.service.get_lock(R)).queue.count

    def at_rest(self) -> bool:
        return keeps_no_waiter(self.service._queues)


def lock_service(
    links: list[FakeNode], *, clock: LoopClock = _CLOCK, limits: WaiterLimits = _LIMITS
) -> LockService:
    randomness = SystemRandomness()
    return LockService(
        Redlock(links, clock=clock, randomness=randomness),
        clock=clock,
        randomness=randomness,
        ttl_ms_max=lambda: 300_000,
        limits=limits,
    )


def fake_nodes(
    states: Sequence[FakeNodeState] = (), *, clock: LoopClock = _CLOCK, channel: str = ""
) -> list[FakeNode]:
    """Return links to these three nodes, or to new ones."""
    states = states or [FakeNodeState() for _ in range(3)]
    return [
        FakeNode(index, now_ms=clock.now_ms, channel=channel, state=state)
        for index, state in enumerate(states)
    ]


def servers(count: int = 1, *, clock: LoopClock = _CLOCK, **settings: WaiterLimits) -> list[Server]:
    """Return servers with links of their own to the same nodes."""
    states = [FakeNodeState() for _ in range(3)]
    wired = [fake_nodes(states, clock=clock, channel=f"server {number}") for number in range(count)]
    return [Server(links, lock_service(links, clock=clock, **settings)) for links in wired]


async def held(count: int = 1) -> list[Server]:
    """Return servers of which the last has granted the lock to HOLDER."""
    group = servers(count)
    await group[-1].acquire(HOLDER)
    return group


async def settle() -> None:
    """Let everything happen that needs no time."""
    await asyncio.sleep(0.001)


async def call_off(*tasks: asyncio.Task[Lease | NotGranted]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    await settle()


def token_of(task: asyncio.Task[Lease | NotGranted]) -> int:
    granted = task.result()
    assert isinstance(granted, Lease)
    return granted.token
