"""Locks resources across machines; every lease has a fencing token.

    async with redfence.AsyncClient("127.0.0.1:50051") as client:
        async with client.lock("orders/42", ttl=10) as lease:
            await storage.put("orders/42", key="total", value=b"17", token=lease)

`storage` keeps the data, and refuses a token that is lower than the highest it has seen. Here it is
an `AsyncStorageClient` of `redfence_storage.client`. Without this check, a holder that was paused
past its lease can still overwrite newer data.

`Client` has the same methods for threads. `redfence.testing` has an in-memory server for tests.
"""

import redfence._transport.fork as _fork  # noqa: F401  (before any other import of gRPC)
from redfence._aio.admin_client import AsyncAdminClient
from redfence._aio.client import AsyncClient
from redfence._aio.lease import AsyncLease, AsyncLock
from redfence._aio.watch import AsyncLossEvent
from redfence._config import ClientOptions
from redfence._context import current_lease
from redfence._core.lease import LeaseState
from redfence._errors import (
    AccessDeniedError,
    AcquireTimeoutError,
    ClosedError,
    InvalidArgumentError,
    LeaseLostError,
    LockHeldError,
    LossReason,
    NotAcquiredError,
    NotFoundError,
    OutcomeUnknownError,
    OverloadedError,
    RedfenceError,
    ServerError,
    StaleTokenError,
    UnavailableError,
    WrongServiceError,
)
from redfence._messages.admin_reports import (
    ForceOutcome,
    ForceReport,
    ListedLock,
    OpenSession,
    SessionKind,
)
from redfence._messages.fencing_tokens import FencingToken
from redfence._messages.reports import (
    ClusterReport,
    Durability,
    Hold,
    LockReport,
    NodeAnswer,
    NodeHold,
    NodeReport,
    NodeState,
    QueuedAcquire,
    TokenReport,
)
from redfence._messages.server_errors import from_rpc_error
from redfence._messages.watch_reports import LockChanges, LockEvent, LockEventKind
from redfence._threads.admin_client import AdminClient
from redfence._threads.client import Client
from redfence._threads.lease import Lease, Lock
from redfence._threads.watch import LossEvent
from redfence._transport.tls import Tls

__version__ = "0.2.0"

__all__ = [
    "AccessDeniedError",
    "AcquireTimeoutError",
    "AdminClient",
    "AsyncAdminClient",
    "AsyncClient",
    "AsyncLease",
    "AsyncLock",
    "AsyncLossEvent",
    "Client",
    "ClientOptions",
    "ClosedError",
    "ClusterReport",
    "Durability",
    "FencingToken",
    "ForceOutcome",
    "ForceReport",
    "Hold",
    "InvalidArgumentError",
    "Lease",
    "LeaseLostError",
    "LeaseState",
    "ListedLock",
    "Lock",
    "LockChanges",
    "LockEvent",
    "LockEventKind",
    "LockHeldError",
    "LockReport",
    "LossEvent",
    "LossReason",
    "NodeAnswer",
    "NodeHold",
    "NodeReport",
    "NodeState",
    "NotAcquiredError",
    "NotFoundError",
    "OpenSession",
    "OutcomeUnknownError",
    "OverloadedError",
    "QueuedAcquire",
    "RedfenceError",
    "ServerError",
    "SessionKind",
    "StaleTokenError",
    "Tls",
    "TokenReport",
    "UnavailableError",
    "WrongServiceError",
    "current_lease",
    "from_rpc_error",
]

# Tracebacks and pickles show the public name of a class, not its private module.
for _name in __all__:
    globals()[_name].__module__ = __name__
