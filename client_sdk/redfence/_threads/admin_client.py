"""Adds the calls of operators to the client of threads; the commands `redfence locks …` use it."""

from __future__ import annotations

from collections.abc import Iterator

from redfence._messages import requests
from redfence._messages.admin_reports import ForceReport, ListedLock, read_forced, read_listed
from redfence._threads.client import Client
from redfence_proto.v1 import lock_pb2


class AdminClient(Client):
    """Calls the admin service; each method raises what `Client.get_lock` raises."""

    def list_locks(self, prefix: str = "") -> Iterator[ListedLock]:
        """Yield the held locks whose names begin with a prefix, in no order, page by page."""
        token = ""
        while True:
            request = lock_pb2.ListLocksRequest(prefix=prefix, page_token=token)
            page: lock_pb2.ListLocksResponse = self._session.call("ListLocks", request)
            yield from read_listed(page)
            token = page.next_page_token
            if not token:
                return

    def force_release(self, resource: str, token: int, *, reason: str = "") -> ForceReport:
        """End the lease that holds a resource with this token; the server logs the reason."""
        requests.check_resource(resource)
        request = lock_pb2.ForceReleaseRequest(resource=resource, fencing_token=token, reason=reason)
        return read_forced(self._session.call("ForceRelease", request))
