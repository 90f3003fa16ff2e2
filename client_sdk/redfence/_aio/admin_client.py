"""Adds the calls of operators to the client of asyncio."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Final

from redfence._aio.client import AsyncClient
from redfence._errors import UnavailableError
from redfence._messages import requests
from redfence._messages.admin_reports import (
    ForceReport,
    ListedLock,
    OpenSession,
    read_forced,
    read_listed,
    read_sessions,
)
from redfence._messages.watch_reports import LockChanges, PictureReader, can_resume
from redfence._seconds import Seconds
from redfence_proto.v1 import lock_pb2

_SETTLE_S: Final = 0.01
"""How long to wait for the session to notice that its link is broken."""


class AsyncAdminClient(AsyncClient):
    """A client for operators, which can also see and end the leases of others.

    The commands `redfence locks` and `redfence sessions` use it. Its arguments are those of `AsyncClient`. If
    the server has a policy, the caller needs the verb `inspect` for the prefix, and `admin` for a forced
    release; `list_sessions` needs `inspect` for the empty prefix. If the server has `admin_listen`, give the
    client that address.

    Each method raises what `AsyncClient.get_lock` raises. `get_lock` shows one lock, node by node.
    """

    async def list_locks(self, prefix: str = "") -> AsyncIterator[ListedLock]:
        """Yield the held locks whose names begin with a prefix, in no order, page by page.

        The list may lack a lock that begins or ends meanwhile, and may have a lock twice.
        """
        requests.check_prefix(prefix)
        token = ""
        while True:
            request = lock_pb2.ListLocksRequest(prefix=prefix, page_token=token)
            page: lock_pb2.ListLocksResponse = await self._session.call("ListLocks", request)
            for lock in read_listed(page):
                yield lock
            token = page.next_page_token
            if not token:
                return

    async def watch_locks(
        self, prefix: str = "", *, interval: Seconds = 1.0
    ) -> AsyncGenerator[LockChanges, None]:
        """Yield how the locks with a prefix change in the whole cluster, until the caller stops.

        The server compares pictures of the cluster. It may never see a lease that begins and ends between
        two pictures, so never decide a write by an event. A slow reader gets fewer pictures, which have all
        differences. After a broken connection the watch goes on at another server; the first picture there
        has `is_first`.
        Closing the generator ends the watch, e.g. by `contextlib.aclosing`.

        Args:
            prefix: the start of the names; empty for all.
            interval: the seconds from one picture to the next, 0.1 to 60. The watch yields each picture,
                also one without changes. Choose half of the shortest ttl or less; see `LockEventKind`.

        Raises:
            OverloadedError: too many watches are open at the server, or too many locks have the prefix.
            UnavailableError: no server was reachable within the rpc timeout.
        """
        reader = PictureReader()
        watch = self._messages(requests.watch_request(prefix, interval))
        async with aclosing(watch) as messages:
            async for message in messages:
                if (changes := reader.read(message)) is not None:
                    yield changes

    async def force_release(self, resource: str, token: int, *, reason: str = "") -> ForceReport:
        """End the lease that holds a resource with this token; the server logs the reason.

        The next token is greater. The holder may go on until its next renewal, so only a storage that checks
        the token stops it at once.
        """
        requests.check_resource(resource)
        requests.check_token(token)
        request = lock_pb2.ForceReleaseRequest(resource=resource, fencing_token=token, reason=reason)
        return read_forced(await self._session.call("ForceRelease", request))

    async def list_sessions(self) -> AsyncIterator[OpenSession]:
        """Yield the open streams of the server process that answers, the oldest first, page by page."""
        token = ""
        while True:
            request = lock_pb2.ListSessionsRequest(page_token=token)
            page: lock_pb2.ListSessionsResponse = await self._session.call("ListSessions", request)
            for session in read_sessions(page):
                yield session
            token = page.next_page_token
            if not token:
                return

    async def _messages(
        self, request: lock_pb2.WatchLocksRequest
    ) -> AsyncGenerator[lock_pb2.WatchLocksResponse | None, None]:
        """Yield the messages of a watch, and None before the messages of each new watch, also of the first.

        When a watch breaks, the client opens another one on a new link. It raises the error once more watches
        failed in a row than there are addresses.
        """
        broken: object = None
        fruitless = 0
        while True:
            link = await self._session.usable_link()
            if link is None or link is broken:
                await asyncio.sleep(_SETTLE_S)
                continue
            yield None
            try:
                async with aclosing(link.watch(request)) as messages:
                    async for message in messages:
                        fruitless = 0
                        yield message
            except UnavailableError as error:
                fruitless += 1
                if fruitless > self._session.address_count or not can_resume(error):
                    raise
            broken = link
            link.abort()
