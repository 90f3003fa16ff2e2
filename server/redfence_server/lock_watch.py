"""Tell how the locks with a prefix change, from the differences between two pictures of the cluster.

A picture is a whole list of `lock_list.py`, and a quorum's view of each lock that was held before and is not
on the list. No command on the hot path takes part. A server without watches does nothing here.

A closed lock is in no picture, because no lease holds it. So its lease has ended once the lock is closed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence, Sized
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import Final, Protocol

from redfence_server.clock import Clock
from redfence_server.errors import WatchLimitError
from redfence_server.lock_list import LockList
from redfence_server.lock_service import LockView
from redfence_server.locking import quorum
from redfence_server.locking.node import Held, NoReply
from redfence_server.locking.quorum import TokenVerdict
from redfence_server.redis_io.scripts import Keyspace
from redfence_server.sharing.budget import Budget

WATCHES_MAX: Final = 16
"""The places for open watches of one server process. They take turns, so more of them get rarer pictures."""
LOCKS_MAX: Final = 2_000
"""The most locks of one watch: each costs a command to every node in each picture, and 0.5 KB of memory."""
# A look at a lock takes a server about 0.3 ms of CPU time. It looks at about `_LOOKS_AT_ONCE` locks, then
# rests `_REST_RATIO` times as long as that took.
_LOOKS_AT_ONCE: Final = 20
_REST_RATIO: Final = 9
# The nodes do not end the holds of one lease in the same millisecond.
_SPREAD_MS: Final = 50


class MarkedNode(Protocol):
    """One node, for reading the marks that forced releases leave."""

    async def read(self, keys: Sequence[str]) -> Sequence[bytes | None] | NoReply:
        """Return the values of string keys; None for each that does not exist."""
        ...


class LockChange(Enum):
    """What happened to a lock, as the contract defines it."""

    HELD = auto()
    ACQUIRED = auto()
    RELEASED = auto()
    EXPIRED = auto()
    LOST = auto()
    FORCED = auto()


@dataclass(frozen=True, slots=True)
class LockEvent:
    """A change of a lock; `lease` is the one that got it or that has ended, as last seen."""

    change: LockChange
    resource: str
    lease: Held


@dataclass(frozen=True, slots=True)
class Seen:
    """A lease in a picture.

    Attributes:
        at_ms: when the server looked.
        is_in_doubt: whether the lease can have no quorum, but a node still has its hold, because the release
            may be on its way.
    """

    lease: Held
    at_ms: float
    is_in_doubt: bool = False


Picture = Mapping[str, Seen]
"""The leases that a quorum shows, by resource."""


class LockWatches:
    """The watches of one server process; bounds their number and their work.

    Args:
        look: returns a quorum's view of one resource.
    """

    def __init__(
        self,
        locks: LockList,
        nodes: Sequence[MarkedNode],
        *,
        keys: Keyspace,
        look: Callable[[str], Awaitable[LockView]],
        clock: Clock,
    ) -> None:
        self._locks = locks
        self._nodes = nodes
        self._keys = keys
        self._look = look
        self._clock = clock
        self._places = Budget(WATCHES_MAX)
        self._lock = asyncio.Lock()
        self._rests_until_ms = 0.0

    @contextmanager
    def opened(self, prefix: str, peer: str) -> Iterator[LockWatch]:
        """Watch the locks with a prefix for a peer until the end of the `with`.

        Raises:
            WatchLimitError: the peer has its part of the places, or too many watches are open.
        """
        if not self._places.take(peer):
            its = self._places.taken_by(peer)
            raise WatchLimitError(its, "peer") if its else WatchLimitError(self._places.taken, "server")
        try:
            yield LockWatch(prefix, self)
        finally:
            self._places.give_back(peer)

    async def next_picture(self, prefix: str, before: Picture | None) -> tuple[Picture, Sequence[LockEvent]]:
        """Take a picture; return it, and the changes since the one `before`.

        Raises:
            NoQuorumError: too few nodes answered; there is no picture.
            WatchLimitError: too many locks have the prefix.
        """
        now = await self._listed(prefix)
        if before is None:
            return now, [LockEvent(LockChange.HELD, name, seen.lease) for name, seen in now.items()]
        ended: dict[str, LockChange] = {}
        async for name, view, at_ms in self._looked_at([name for name in before if name not in now]):
            judged = _judge(view, before[name], at_ms)
            if isinstance(judged, Seen):
                now[name] = judged
            else:
                ended[name] = judged
        _check_size(now)
        for name in before.keys() & now.keys():
            if before[name].lease.digest != now[name].lease.digest:
                ended[name] = _end(before[name], now[name].at_ms)
        for name in await self._forced({name: before[name].lease.digest for name in ended}):
            ended[name] = LockChange.FORCED
        return now, differences(before, now, ended)

    @asynccontextmanager
    async def _turn(self) -> AsyncIterator[float]:
        """Wait for a turn, yield when it begins, and let the server rest after the `with`."""
        async with self._lock:
            await asyncio.sleep(max(0.0, self._rests_until_ms - self._clock.now_ms()) / 1000)
            began_ms = self._clock.now_ms()
            try:
                yield began_ms
            finally:
                now_ms = self._clock.now_ms()
                self._rests_until_ms = now_ms + _REST_RATIO * (now_ms - began_ms)

    async def _listed(self, prefix: str) -> dict[str, Seen]:
        """Return the leases of a whole list, without closed locks.

        Raises:
            WatchLimitError: too many locks have the prefix. A closed one costs as much as a held one.
        """
        found: dict[str, Seen] = {}
        token = ""
        while True:
            async with self._turn() as at_ms:
                page = await self._locks.page(prefix, size=_LOOKS_AT_ONCE, token=token)
            found |= {lock.resource: Seen(lock.current, at_ms) for lock in page.locks}
            _check_size(found)
            token = page.next_token
            if not token:
                return {name: seen for name, seen in found.items() if not seen.lease.closed}

    async def _looked_at(self, names: Sequence[str]) -> AsyncIterator[tuple[str, LockView, float]]:
        """Yield a quorum's view of each resource, and when the server looked."""
        for some in _batches(names):
            async with self._turn() as at_ms:
                views = await asyncio.gather(*map(self._look, some))
            for name, view in zip(some, views, strict=True):
                yield name, view, at_ms

    async def _forced(self, digests: Mapping[str, str]) -> set[str]:
        """Return the resources whose lease an operator ended, as far as a node that answers knows it."""
        forced: set[str] = set()
        for some in _batches(list(digests)):
            keys = [self._keys.forced(digests[name]) for name in some]
            async with self._turn():
                answers = await asyncio.gather(*(node.read(keys) for node in self._nodes))
            for marks in answers:
                if not isinstance(marks, NoReply):
                    forced |= {name for name, mark in zip(some, marks, strict=True) if mark is not None}
        return forced


class LockWatch:
    """One watch; it keeps the last picture."""

    def __init__(self, prefix: str, watches: LockWatches) -> None:
        self._prefix = prefix
        self._watches = watches
        self._picture: Picture | None = None

    async def changes(self) -> Sequence[LockEvent]:
        """Take a picture; return its changes since the last one, the end of a lease before the next lease.

        The first picture is one of changes to HELD. After an error or a cancellation the last picture stays.

        Raises:
            NoQuorumError: too few nodes answered; there is no picture.
            WatchLimitError: too many locks have the prefix.
        """
        self._picture, events = await self._watches.next_picture(self._prefix, self._picture)
        return events


def differences(before: Picture, now: Picture, ended: Mapping[str, LockChange]) -> Sequence[LockEvent]:
    """Return the events between two pictures, with how each lease has ended; pure."""
    events = [LockEvent(change, name, before[name].lease) for name, change in ended.items()]
    events += [
        LockEvent(LockChange.ACQUIRED, name, seen.lease)
        for name, seen in now.items()
        if name not in before or before[name].lease.token != seen.lease.token
    ]
    return events


def _judge(view: LockView, before: Seen, at_ms: float) -> Seen | LockChange:
    """Return the lease that holds a resource now, or how the lease has ended; pure.

    The lease of `before` was not on the list. It stays in the picture while too few nodes can tell.
    """
    if view.current is not None and not view.current.closed:
        return Seen(view.current, at_ms)
    judged = quorum.judge_token(view.nodes, before.lease.token)
    if judged is None or judged.verdict is not TokenVerdict.NOT_LIVE:
        return before
    end = _end(before, at_ms)
    holds = [hold for hold in view.nodes if isinstance(hold, Held) and hold.digest == before.lease.digest]
    if not holds or end is LockChange.EXPIRED:
        return end
    if view.current is not None and all(hold.closed for hold in holds):
        return LockChange.EXPIRED  # a release would have opened the lock
    return LockChange.LOST if before.is_in_doubt else replace(before, is_in_doubt=True)


def _end(before: Seen, at_ms: float) -> LockChange:
    """Return how a lease ended that does not hold at this instant any more, unless it was forced; pure."""
    left_ms = before.lease.remaining_ms - before.lease.lock_delay_ms
    ends_at_ms = before.at_ms + left_ms - _SPREAD_MS
    return LockChange.EXPIRED if at_ms >= ends_at_ms else LockChange.RELEASED


def _batches(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _LOOKS_AT_ONCE):
        yield names[start : start + _LOOKS_AT_ONCE]


def _check_size(picture: Sized) -> None:
    if len(picture) > LOCKS_MAX:
        raise WatchLimitError(LOCKS_MAX, "prefix")
