"""Defines the client for threads: checks the arguments and passes each call to its session."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from types import TracebackType
from typing import Self, TypeVarTuple

import grpc

from redfence._clock import Clock, SystemClock
from redfence._config import ClientOptions, in_milliseconds
from redfence._core.callbacks import Callback, Callbacks
from redfence._core.endpoints import Endpoints
from redfence._core.functions import check_function
from redfence._core.session import SessionCore
from redfence._defaults import required_server_addresses
from redfence._errors import LockHeldError
from redfence._messages import reports, requests
from redfence._messages.fencing_tokens import HasFencingToken, token_to_check
from redfence._messages.reports import ClusterReport, LockReport, TokenReport
from redfence._messages.requests import AcquireOrder
from redfence._randomness import Randomness, SystemRandomness
from redfence._seconds import Seconds
from redfence._threads.lease import Lease, Lock
from redfence._threads.session import SyncSession
from redfence._transport.bearer import Token, bearer_token
from redfence._transport.grpc_channel import Metadata
from redfence._transport.grpc_sync_link import GrpcSyncConnector
from redfence._transport.links import SyncConnector
from redfence._transport.reach import check_address
from redfence._transport.tls import Tls, check_protection
from redfence_proto.v1 import lock_pb2

Ts = TypeVarTuple("Ts")


class Client:
    """Acquires locks over one stream to one of several servers, and renews the leases in the background.

    It may be used from many threads and in signal handlers. It connects at the first call; leaving its
    `with` closes it. It belongs to the process that first uses it: in a child that was forked later, each
    call raises ClosedError, and the parent keeps its leases.

    Args:
        addresses: the addresses of lock servers of one cluster, e.g. "127.0.0.1:50051". The client uses
            the first server that answers, and moves to the next one when that fails. A silent server costs
            the `connect_timeout` out of a call's `rpc_timeout`. Without an address the client
            reads REDFENCE_SERVER: addresses, separated by commas.
        holder: a label that other clients see when they find a lock of this client held; None
            uses "user@host/pid".
        tls: the files by which the client speaks TLS. None uses those that REDFENCE_TLS_CA,
            REDFENCE_TLS_CERT and REDFENCE_TLS_KEY name; without any of them it speaks plain text.
        credentials: gRPC's credentials in place of `tls`.
        metadata: gRPC metadata that the client sends with every call.
        token: a bearer token for every call, or the Path of a file that has it, which the client reads
            again for each call. None reads REDFENCE_BEARER_TOKEN, or the file that
            REDFENCE_BEARER_TOKEN_FILE names.
        plaintext_token: whether the token may go to other machines without TLS.
        options: timeouts and pauses.
        connector: opens the connections; `redfence.testing` replaces it.
        clock: the client's clock.
        randomness: makes lease ids and jitter.

    Raises:
        InvalidArgumentError: no address is known, an address is not HOST:PORT or a name that gRPC knows,
            the holder's label is invalid, a file of `tls` cannot be used, `credentials` is given too, or
            the token cannot be used.
    """

    def __init__(
        self,
        *addresses: str,
        holder: str | None = None,
        tls: Tls | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        metadata: Metadata = (),
        token: Token | None = None,
        plaintext_token: bool = False,
        options: ClientOptions | None = None,
        connector: SyncConnector | None = None,
        clock: Clock | None = None,
        randomness: Randomness | None = None,
    ) -> None:
        addresses = addresses or required_server_addresses()
        timeouts = in_milliseconds(options or ClientOptions())
        randomness = randomness or SystemRandomness()
        endpoints = Endpoints(addresses, timeouts=timeouts, randomness=randomness)
        if connector is None:
            for address in addresses:
                check_address(address)
            protection = check_protection(tls, credentials)
            bearer = bearer_token(
                token, addresses, encrypted=protection is not None, plaintext_token=plaintext_token
            )
            connector = GrpcSyncConnector(protection=protection, metadata=metadata, token=bearer)
        if holder is not None:
            requests.check_holder(holder)
        self._holder = holder
        self._session = SyncSession(
            SessionCore(timeouts=timeouts, randomness=randomness, address_count=len(endpoints)),
            endpoints=endpoints,
            connector=connector,
            timeouts=timeouts,
            clock=clock or SystemClock(),
        )

    def __enter__(self) -> Self:
        """Return the client, which connects at the first call."""
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Close the client; see `close`."""
        self.close()

    def lock(
        self,
        resource: str,
        *,
        ttl: Seconds,
        wait: Seconds | None = None,
        holder: str | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0,
        on_at_risk: Callback[Lease] = None,
        on_lost: Callback[Lease] = None,
    ) -> Lock:
        """Return a context manager that holds the lock for its body: acquires, renews and releases it.

        If the lease is lost, `lease.lost` is set, and leaving the `with` raises LeaseLostError. The
        arguments are those of `acquire`.
        """
        order = self._order(
            resource, ttl=ttl, wait=wait, holder=holder, max_hold=max_hold, lock_delay=lock_delay
        )
        return Lock(order, self._session, Callbacks(on_at_risk, on_lost))

    def acquire(
        self,
        resource: str,
        *,
        ttl: Seconds,
        wait: Seconds | None = None,
        holder: str | None = None,
        max_hold: Seconds | None = None,
        lock_delay: Seconds = 0,
        on_at_risk: Callback[Lease] = None,
        on_lost: Callback[Lease] = None,
    ) -> Lease:
        """Acquire a lock; return a lease that the client renews until `release`. Prefer `lock`.

        Keep the lease: the client releases a lease that is garbage-collected.

        Args:
            resource: the name to lock: 1 to 256 bytes, no control characters, no braces.
            ttl: seconds until the lease ends if this process dies; at least 0.1, at most the cluster's
                greatest ttl.
            wait: seconds to wait for a held lock. The server grants waiters in the order of their
                arrival. 0 tries once and does not queue; None waits for ever.
            holder: a label that other clients see when they find the lock held; None uses the client's.
            max_hold: seconds after which the client stops renewing, so that a stuck holder loses the lease.
            lock_delay: seconds for which the lock stays closed to every client if the lease is lost; a
                release opens it at once. Ttl and delay together are at most the cluster's greatest ttl. It
                does not replace tokens; see docs/sdk.md.
            on_at_risk: is called with the lease each time it becomes AT_RISK: a renewal failed or got no
                answer in time, or a third of the ttl is left. Finish or stop the work.
            on_lost: is called with the lease when it is LOST; `raise_if_lost` tells the reason. It may come
                without a warning, e.g. if the process was paused. A release calls neither.

        Raises:
            LockHeldError: `wait` is 0, and another client holds the lock, or its lock delay keeps it closed.
            AcquireTimeoutError: the wait ended first; `position` is the caller's place in the queue.
            UnavailableError: no server was reachable, or no server reached a quorum.
            OverloadedError: too many acquires wait already at every reachable server.
            OutcomeUnknownError: no answer came in time; the client releases any grant in the background.
            LeaseLostError: the grant arrived after its validity had ended.
            InvalidArgumentError: an argument is out of bounds, or a callback is not a plain function.
            AccessDeniedError: the server refused the credentials.
            ServerError: the server has a bug, or does not support the request.
            ClosedError: the client is closed.

        Callbacks: a thread of their own runs the callbacks of this client one after another, so a slow one
        delays the others but no renewal. If the state changes while a callback waits, only the latest change
        is reported. The client logs what they raise (`callback_failed`). In a forked child no callback
        runs; there the lease is LOST at once.
        """
        order = self._order(
            resource, ttl=ttl, wait=wait, holder=holder, max_hold=max_hold, lock_delay=lock_delay
        )
        callbacks = Callbacks(on_at_risk, on_lost)
        return self._session.acquire(order, partial(Lease, session=self._session, callbacks=callbacks))

    def try_run(
        self,
        resource: str,
        function: Callable[[*Ts], object],
        *args: *Ts,
        ttl: Seconds,
        holder: str | None = None,
        max_hold: Seconds | None = None,
    ) -> bool:
        """Call a function if the lock is free now; return whether it ran. For cron jobs on many hosts.

            client.try_run("nightly-report", write_report, ttl=60)

        It returns False if another client holds the lock. All other errors pass: those of `acquire`, those
        of the function (LockHeldError too), and LeaseLostError at its end. It discards the function's result;
        the return value only says whether the function ran. `current_lease()` is the lease. A host that comes
        after the end of a run finds the lock free, and runs the function again.

        Raises:
            TypeError: the function is async, a generator, or not callable.
            RedfenceError: as `acquire`, except LockHeldError.
        """
        check_function(function, is_async=False)
        with ExitStack() as stack:
            try:
                stack.enter_context(self.lock(resource, ttl=ttl, wait=0, holder=holder, max_hold=max_hold))
            except LockHeldError:
                return False
            function(*args)
        return True

    def get_lock(self, resource: str) -> LockReport:
        """Return the holder of a resource and its queue. For humans: never decide a write by it.

        Raises:
            UnavailableError: no server was reachable, or it reached no quorum.
            OutcomeUnknownError: no answer came within the rpc timeout; call again.
            InvalidArgumentError: the resource name is invalid.
            AccessDeniedError, ServerError: as `acquire`.
            ClosedError: the client is closed.
        """
        requests.check_resource(resource)
        lease_id = self._session.waiting_lease_id(resource)
        request = lock_pb2.GetLockRequest(resource=resource, lease_id=lease_id)
        return reports.read_lock(self._session.call("GetLock", request))

    def check_token(self, lease: HasFencingToken | str, token: int | None = None) -> TokenReport:
        """Return whether a fencing token belongs to the present lease. For storage that cannot keep a token.

        Args:
            lease: a lease, or any object with a `resource` and a `token`; or the name of a resource.
            token: the token, if `lease` is a name.

        Raises:
            UnavailableError: no server was reachable, or the nodes that answered cannot decide.
            OutcomeUnknownError: no answer came within the rpc timeout; call again.
            InvalidArgumentError: the resource name or the fencing token is invalid.
            AccessDeniedError, ServerError: as `acquire`.
            ClosedError: the client is closed.
        """
        checked = token_to_check(lease, token)
        request = lock_pb2.CheckTokenRequest(resource=checked.resource, fencing_token=checked.token)
        return reports.read_token(self._session.call("CheckToken", request))

    def cluster_status(self) -> ClusterReport:
        """Return the state of every node, as the connected server sees it.

        Raises:
            UnavailableError: no server was reachable.
            OutcomeUnknownError: no answer came within the rpc timeout; call again.
            AccessDeniedError, ServerError: as `acquire`.
            ClosedError: the client is closed.
        """
        return reports.read_cluster(self._session.call("ClusterStatus", lock_pb2.ClusterStatusRequest()))

    def close(self) -> None:
        """Release every held lease and stop the background work. Repeating it is harmless.

        Pending calls fail with ClosedError. Leases that are still held count as lost.
        """
        self._session.close()

    def _order(
        self,
        resource: str,
        *,
        ttl: Seconds,
        wait: Seconds | None,
        holder: str | None,
        max_hold: Seconds | None,
        lock_delay: Seconds,
    ) -> AcquireOrder:
        holder = self._holder if holder is None else holder
        return requests.acquire_order(
            resource, ttl=ttl, wait=wait, holder=holder, max_hold=max_hold, lock_delay=lock_delay
        )
