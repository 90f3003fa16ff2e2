"""Adds the calls of operators to the client of threads."""

from __future__ import annotations

import threading
from collections.abc import Generator, Iterator
from contextlib import closing
from typing import Final

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
from redfence._threads.client import Client
from redfence_proto.v1 import lock_pb2

_SETTLE_S: Final = 0.01
"""Until the session has noticed that its link is broken."""


class AdminClient(Client):
    """A client that can also see and end the leases of others. For operators; the console uses it.

    Its arguments are those of `Client`. A server with a policy wants the verb `inspect` for the prefix,
    and `admin` for a forced release. If the server has `admin_listen`, name that address.

    Each method raises what `Client.get_lock` raises. `get_lock` shows one lock, node by node.
    """

    def list_locks(self, prefix: str = "") -> Iterator[ListedLock]:
        """Yield the held locks whose names begin with a prefix, in no order, page by page.

        A lock that begins or ends meanwhile may be missing. One may be listed twice.
        """
        requests.check_prefix(prefix)
        token = ""
        while True:
            request = lock_pb2.ListLocksRequest(prefix=prefix, page_token=token)
            page: lock_pb2.ListLocksResponse = self._session.call("ListLocks", request)
            yield from read_listed(page)
            token = page.next_page_token
            if not token:
                return

    def watch_locks(self, prefix: str = "", *, interval: Seconds = 1.0) -> Generator[LockChanges, None, None]:
        """Yield how the locks with a prefix change in the whole cluster, until the caller stops.

        The server compares pictures of the cluster. A lease that begins and ends between two pictures may
        never be seen; so never decide a write by an event. A slow reader gets fewer pictures, which have all
        differences. After a broken connection the watch goes on at another server, with `is_first`.
        Closing the generator ends the watch.

        Args:
            prefix: the start of the names; empty for all.
            interval: the seconds from one picture to the next, 0.1 to 60. Each picture is yielded, also one
                without changes. It should be at most half of the shortest ttl; see `LockEventKind.EXPIRED`.

        Raises:
            OverloadedError: too many watches are open at the server, or too many locks have the prefix.
            UnavailableError: no server was reachable within the rpc timeout.
        """
        reader = PictureReader()
        with closing(self._messages(requests.watch_request(prefix, interval))) as messages:
            for message in messages:
                if (changes := reader.read(message)) is not None:
                    yield changes

    def force_release(self, resource: str, token: int, *, reason: str = "") -> ForceReport:
        """End the lease that holds a resource with this token; the server logs the reason.

        The next token is greater. The holder may go on until its next renewal, so only a storage that checks
        the token stops it at once.
        """
        requests.check_resource(resource)
        requests.check_token(token)
        request = lock_pb2.ForceReleaseRequest(resource=resource, fencing_token=token, reason=reason)
        return read_forced(self._session.call("ForceRelease", request))

    def list_sessions(self) -> Iterator[OpenSession]:
        """Yield the open streams of the server process that answers, the oldest first, page by page."""
        token = ""
        while True:
            request = lock_pb2.ListSessionsRequest(page_token=token)
            page: lock_pb2.ListSessionsResponse = self._session.call("ListSessions", request)
            yield from read_sessions(page)
            token = page.next_page_token
            if not token:
                return

    def _messages(
        self, request: lock_pb2.WatchLocksRequest
    ) -> Generator[lock_pb2.WatchLocksResponse | None, None, None]:
        """Yield the messages of a watch; None before those of each new watch, also of the first one.

        When the watch breaks, it goes on at a new link, but gives up once every address failed in a row.
        """
        broken: object = None
        fruitless = 0
        while True:
            link = self._session.usable_link()
            if link is None or link is broken:
                threading.Event().wait(_SETTLE_S)
                continue
            yield None
            try:
                with closing(link.watch(request)) as messages:
                    for message in messages:
                        fruitless = 0
                        yield message
            except UnavailableError as error:
                fruitless += 1
                if fruitless > self._session.address_count or not can_resume(error):
                    raise
            broken = link
            link.abort()
