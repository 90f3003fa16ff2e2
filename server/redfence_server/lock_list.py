"""List the held locks in pages: names from the nodes' key tables, and a quorum's view of each name.

A node's SCAN returns every key that exists from the first to the last page. So one node would do if it had
every hold. But a quorum may hold a lease without that node. Therefore a list reads f + 1 nodes, one after
another: any f + 1 nodes share a node with every quorum. A lease that holds from the first to the last page
never gets a hold on a further node, except by a retry of its Acquire. So a later node skips a lease that an
earlier one has.

A restart of a node changes the order of its keys. The list then reads that node from its beginning.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import re
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2
from redfence_server.errors import InvalidFieldError, NoQuorumError
from redfence_server.lock_service import LockView
from redfence_server.locking import quorum
from redfence_server.locking.node import Held, NodeReport, NoReply, ScannedKeys
from redfence_server.redis_io.scripts import Keyspace

PAGE_SIZE_MAX: Final = 50
"""An entry is below 600 bytes, and a message at most 64 KiB; a page may have twice its size."""
# Keys that one SCAN looks at: at first, and at most. A thousand take a node less than a millisecond.
_COUNT_MIN: Final = 32
_COUNT_MAX: Final = 1_000
# Keys that one call looks at; a page ends there, even if it is empty.
_KEYS_PER_PAGE_MAX: Final = 10_000
# So many pages are read at once. A page takes a node some milliseconds, in which it grants nothing.
_PAGES_AT_ONCE: Final = 4
_GLOB: Final = re.compile(r"([\\*?\[\]])")
_RUN_DIGITS: Final = 8
_TOKEN: Final = re.compile(rb"([0-6]*),([0-6]),([0-9a-f]{0,8}),(\d{1,20})")


class ScannableNode(Protocol):
    """One node, for reading its key table; `index` is its node index."""

    index: int

    async def scan(self, pattern: str, *, cursor: int, count: int) -> ScannedKeys | NoReply:
        """Return keys that match a glob pattern, and look at about `count` keys."""
        ...

    def report(self) -> NodeReport:
        """Return what this server knows about the node, without asking it."""
        ...


@dataclass(frozen=True, slots=True)
class ListedLock:
    """A resource that a lease holds on a quorum."""

    resource: str
    current: Held
    waiters: int


@dataclass(frozen=True, slots=True)
class Page:
    """Some of the held locks; `next_token` is empty after the last page."""

    locks: Sequence[ListedLock]
    next_token: str


@dataclass(frozen=True, slots=True)
class _Position:
    """Where a list goes on: the nodes read to their end; the present node, its run and its cursor."""

    done: tuple[int, ...] = ()
    node: int = 0
    run: str = ""
    cursor: int = 0

    def token(self) -> str:
        done = "".join(map(str, self.done))
        text = f"{done},{self.node},{self.run},{self.cursor}"
        return base64.urlsafe_b64encode(text.encode()).decode()

    @classmethod
    def of(cls, token: str, *, node_count: int) -> _Position:
        try:
            found = _TOKEN.fullmatch(base64.urlsafe_b64decode(token.encode()))
        except (binascii.Error, ValueError):
            found = None
        if found is None:
            raise _invalid_page("page_token", "is not one that a server has answered; begin without it")
        done, node, run, cursor = (each.decode() for each in found.groups())
        if max(map(int, f"{done}{node}")) >= node_count:
            raise _invalid_page("page_token", "is one of another cluster; begin without it")
        return cls(tuple(map(int, done)), int(node), run, int(cursor))


def _invalid_page(field: str, problem: str) -> InvalidFieldError:
    return InvalidFieldError(field, problem, lock_pb2.ERROR_REASON_INVALID_PAGE)


def check_prefix(prefix: str) -> str:
    """Return the start of resource names if it is valid; empty stands for all resources.

    Raises:
        InvalidFieldError: no resource name begins so.
    """
    if prefix and (problem := bounds.resource_problem(prefix)):
        raise InvalidFieldError("prefix", problem, lock_pb2.ERROR_REASON_INVALID_RESOURCE)
    return prefix


def check_page_size(size: int) -> int:
    """Return the size of a page; 0 stands for the greatest.

    Raises:
        InvalidFieldError: the size is greater than `PAGE_SIZE_MAX`.
    """
    if size > PAGE_SIZE_MAX:
        raise _invalid_page("page_size", f"is {size}; at most {PAGE_SIZE_MAX} are allowed")
    return size or PAGE_SIZE_MAX


class LockList:
    """Reads pages; it keeps nothing between two pages.

    Args:
        look: returns a quorum's view of one resource.
    """

    def __init__(
        self,
        nodes: Sequence[ScannableNode],
        *,
        keys: Keyspace,
        look: Callable[[str], Awaitable[LockView]],
    ) -> None:
        self._nodes = nodes
        self._keys = keys
        self._look = look
        self._turns = asyncio.Semaphore(_PAGES_AT_ONCE)
        self._needed = len(nodes) - quorum.majority(len(nodes)) + 1

    async def page(self, prefix: str, *, size: int, token: str) -> Page:
        """Return the next locks whose names begin with a prefix; wait while too many pages are read.

        Raises:
            InvalidFieldError: the token is not one of this method.
            NoQuorumError: too few nodes answered.
        """
        at = _Position.of(token, node_count=len(self._nodes)) if token else _Position()
        async with self._turns:
            return await self._read_page(prefix, size, at)

    async def _read_page(self, prefix: str, size: int, at: _Position) -> Page:
        silent: dict[int, NoReply] = {}
        found: dict[str, tuple[int, ...]] = {}
        count, looked_at = _COUNT_MIN, 0
        while len(at.done) < self._needed and len(found) < size and looked_at < _KEYS_PER_PAGE_MAX:
            at = self._at_readable_node(at, silent)
            scanned = await self._nodes[at.node].scan(self._pattern(prefix), cursor=at.cursor, count=count)
            looked_at += count
            if isinstance(scanned, NoReply):
                silent[at.node] = scanned
                continue
            if len(found) + len(scanned.keys) > 2 * PAGE_SIZE_MAX and count > _COUNT_MIN:
                count = _COUNT_MIN  # too many for this page: the same cursor again, with fewer keys
                continue
            found = dict.fromkeys(self._names(scanned.keys), at.done) | found
            count = count if scanned.keys else min(2 * count, _COUNT_MAX)
            at = replace(at, cursor=scanned.next_cursor)
            if at.cursor == 0:
                at = _Position((*at.done, at.node))
        locks = await asyncio.gather(*(self._listed(name, done) for name, done in found.items()))
        is_last = len(at.done) >= self._needed
        return Page([lock for lock in locks if lock is not None], "" if is_last else at.token())

    def _at_readable_node(self, at: _Position, silent: dict[int, NoReply]) -> _Position:
        """Return the position at a node that may answer: the present one, else the next one's beginning."""
        left = [node.index for node in self._nodes if node.index not in at.done and node.index not in silent]
        if len(left) + len(at.done) < self._needed:
            raise NoQuorumError.naming(silent.items(), also="; a list of locks needs f + 1 nodes")
        index = at.node if at.node in left else left[0]
        run = self._nodes[index].report().run_id[:_RUN_DIGITS]
        same = (index, run) == (at.node, at.run)
        return at if same else replace(at, node=index, run=run, cursor=0)

    def _pattern(self, prefix: str) -> str:
        return _GLOB.sub(r"\\\1", self._keys.lock(prefix)) + "*"

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        """Return the resources of lock keys; a key of another program is not one."""
        start = self._keys.lock("").encode()
        names = (key.removeprefix(start).decode(errors="replace") for key in keys)
        return [name for name in names if bounds.resource_problem(name) is None]

    async def _listed(self, resource: str, done: Sequence[int]) -> ListedLock | None:
        """Return the lock, unless no quorum holds it, or it is on a node that was read before."""
        view = await self._look(resource)
        if view.current is None:
            return None
        for index in done:
            hold = view.nodes[index]
            if isinstance(hold, Held) and hold.digest == view.current.digest:
                return None
        return ListedLock(resource, view.current, view.queue.count)
