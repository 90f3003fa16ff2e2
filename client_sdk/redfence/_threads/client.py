"""The client for threads: checks what it is asked, and lets its session do the rest."""

from __future__ import annotations

from types import TracebackType
from typing import Self

import grpc

from redfence._clock import Clock, SystemClock
from redfence._config import ClientOptions
from redfence._core.endpoints import Endpoints
from redfence._core.session import SessionCore
from redfence._messages import reports, requests
from redfence._messages.reports import ClusterReport, LockReport, TokenReport
from redfence._messages.requests import Seconds
from redfence._randomness import Randomness, SystemRandomness
from redfence._threads.lease import Lease, Lock
from redfence._threads.session import SyncSession
from redfence._transport.grpc_channel import Metadata
from redfence._transport.grpc_sync_link import GrpcSyncConnector
from redfence._transport.links import SyncConnector
from redfence_proto.v1 import lock_pb2


class Client:
    """Acquires locks over one stream to one of several servers, and keeps its leases alive.

    It may be used from many threads. It connects with the first call; leaving its `with` closes it.

    Args:
        addresses: of lock servers of one cluster, e.g. "127.0.0.1:50051". The first that answers is used; when it fails,
            the next.
        credentials: for TLS; None: plaintext.
        metadata: sent with every call.
        options: what can be tuned.
        connector: how servers are reached; `redfence.testing` gives another one.
        clock: time.
        randomness: where lease ids and jitter come from.

    Raises:
        InvalidArgumentError: an address is missing or no string.
    """

    def __init__(
        self,
        *addresses: str,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        options: ClientOptions | None = None,
        connector: SyncConnector | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        options = options or ClientOptions()
        randomness = randomness or SystemRandomness()
        endpoints = Endpoints(addresses, options=options, randomness=randomness)
        self._session = SyncSession(
            SessionCore(options=options, randomness=randomness, address_count=len(endpoints)),
            endpoints=endpoints,
            connector=connector or GrpcSyncConnector(credentials=credentials, metadata=metadata),
            options=options,
            clock=clock or SystemClock(),
        )

    def __enter__(self) -> Self:
        """Return the client; it connects with the first call."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client."""
        self.close()

    def lock(
        self,
        resource: str,
        *,
        ttl: Seconds,
        wait: Seconds | None = None,
        holder: str = "",
        max_hold: Seconds | None = None,
    ) -> Lock:
        """Return a context manager that holds the lock around its body, renews it, and releases it at the end.

        If the lease is lost, `lease.lost` is set, and leaving the `with` raises LeaseLostError. The arguments are those
        of `acquire`.
        """
        order = requests.acquire_order(resource, ttl=ttl, wait=wait, holder=holder, max_hold=max_hold)
        return Lock(order, self._session)

    def acquire(
        self,
        resource: str,
        *,
        ttl: Seconds,
        wait: Seconds | None = None,
        holder: str = "",
        max_hold: Seconds | None = None,
    ) -> Lease:
        """Return a lease that is held and kept alive until `release`; prefer `lock`.

        Args:
            resource: the name to lock: 1 to 256 bytes, no control characters, no braces.
            ttl: seconds until the lock is free again if this process dies, from 0.1 to what the cluster allows.
            wait: seconds to wait for a held lock, in the order in which callers came to the server; 0 tries once, past
                whoever waits; None waits for ever.
            holder: a label shown to whoever finds the lock held.
            max_hold: seconds after which the lease is not renewed any more, so a stuck holder loses it.

        Raises:
            LockHeldError: somebody else holds it, and `wait` is 0.
            AcquireTimeoutError: the wait ran out; it tells how far from the head of the queue.
            UnavailableError: no server could be reached, or it reached no quorum.
            OverloadedError: too many acquires wait already, at every server that could be asked.
            OutcomeUnknownError: no answer came in time; what may have been granted is being released.
            LeaseLostError: the grant arrived after its validity had ended.
            InvalidArgumentError: an argument is out of bounds.
            ClosedError: the client is closed.
        """
        order = requests.acquire_order(resource, ttl=ttl, wait=wait, holder=holder, max_hold=max_hold)
        return Lease(self._session.acquire(order), self._session)

    def get_lock(self, resource: str) -> LockReport:
        """Return who holds a resource and who waits for it. For humans: do not decide a write by it.

        Raises:
            UnavailableError: no server, or no quorum.
            InvalidArgumentError: no resource name.
        """
        requests.check_resource(resource)
        lease_id = self._session.waiting_lease_id(resource)
        request = lock_pb2.GetLockRequest(resource=resource, lease_id=lease_id)
        return reports.read_lock(self._session.call("GetLock", request))

    def check_token(self, resource: str, token: int) -> TokenReport:
        """Return whether `token` belongs to the lease that holds the resource now, for storage without a memory.

        Raises:
            UnavailableError: no server, or the answering nodes cannot decide it.
            InvalidArgumentError: no resource name, or no fencing token.
        """
        requests.check_resource(resource)
        requests.check_token(token)
        request = lock_pb2.CheckTokenRequest(resource=resource, fencing_token=token)
        return reports.read_token(self._session.call("CheckToken", request))

    def cluster_status(self) -> ClusterReport:
        """Return what the server knows of its nodes.

        Raises:
            UnavailableError: no server could be reached.
        """
        return reports.read_cluster(self._session.call("ClusterStatus", lock_pb2.ClusterStatusRequest()))

    def close(self) -> None:
        """Release what is held, and end the background work. Repeating it is harmless.

        Calls under way fail with ClosedError; leases still held count as lost.
        """
        self._session.close()
