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
"""How long to wait for the session to notice that its link is broken."""


class AdminClient(Client):
    """A client for operators, which can also see and end the leases of others.

    The commands `redfence locks` and `redfence sessions` use it. Its arguments are those of `Client`. If
    the server has a policy, the caller needs the verb `inspect` for the prefix, and `admin` for a forced
    release; `list_sessions` needs `inspect` for the empty prefix. If the server has `admin_listen`, give the
    client that address.

    Each method raises what `Client.get_lock` raises. `get_lock` shows one lock, node by node.
    """

    def list_locks(self, prefix: str = "") -> Iterator[ListedLock]:
        """Yield the held locks whose names begin with a prefix, in no order, page by page.

        The list may lack a lock that begins or ends meanwhile, and may have a lock twice.
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

        The server compares pictures of the cluster. It may never see a lease that begins and ends between
        two pictures, so never decide a write by an event. A slow reader gets fewer pictures, which have all
        differences. After a broken connection the watch goes on at another server; the first picture there
        has `is_first`.
        Closing the generator ends the watch.

        Args:
            prefix: the start of the names; empty for all.
            interval: the seconds from one picture to the next, 0.1 to 60. The watch yields each picture,
                also one without changes. Choose half of the shortest ttl or less; see `LockEventKind`.

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
        """Yield the messages of a watch, and None before the messages of each new watch, also of the first.

        When a watch breaks, the client opens another one on a new link. It raises the error once more watches
        failed in a row than there are addresses.
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
