"""Defines the SDK's exceptions.

RedfenceError
├── InvalidArgumentError    an argument is wrong: fix the call, do not retry
├── NotAcquiredError        another client holds the lock, or its lock delay keeps it closed
│   ├── LockHeldError       the call did not wait (wait=0)
│   └── AcquireTimeoutError the wait ended first
├── LeaseLostError          the lease ended while it was in use: stop the protected work
├── UnavailableError        no server, or no quorum; nothing was granted or acknowledged: retry later
│   └── OverloadedError     a limit of the server is reached: retry after `retry_after`
├── OutcomeUnknownError     no answer: the client releases any grant; repeat a write with the same token
├── AccessDeniedError       the credentials are refused, or do not permit this: get others, do not retry
├── StaleTokenError         storage: a later holder has accessed the resource; acquire again
├── NotFoundError           storage: the key does not exist
├── ServerError             a bug in the server
│   └── WrongServiceError   the address is that of another service
└── ClosedError             the client is closed
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

_NO_METADATA: Mapping[str, str] = MappingProxyType({})


class RedfenceError(Exception):
    """The base class of all errors that redfence raises.

    Attributes:
        error_reason: the contract's `ErrorReason` without its prefix, e.g. "QUORUM_UNAVAILABLE"; ""
            if the server sent none or one that this SDK does not know, or if the SDK made the error.
        metadata: details, as the contract documents them for that reason.
        retry_after: seconds after which a retry can succeed, or None.
    """

    def __init__(
        self,
        message: str,
        *,
        error_reason: str = "",
        metadata: Mapping[str, str] = _NO_METADATA,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.error_reason = error_reason
        self.metadata = dict(metadata)
        self.retry_after = retry_after

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle and copy the error with all its attributes, because process pools pickle errors."""
        # The default would call `__init__` with the message alone.
        return _restore, (type(self), self.args, self.__dict__)


def _restore(
    kind: type[RedfenceError], args: tuple[Any, ...], attributes: Mapping[str, Any]
) -> RedfenceError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(attributes)
    return error


class InvalidArgumentError(RedfenceError, ValueError):
    """An argument was wrong, and nothing was changed."""

    @property
    def field(self) -> str:
        """The name of the wrong argument, or of the contract's field; "" if it is unknown."""
        return self.metadata.get("field", "")


class NotAcquiredError(RedfenceError):
    """Another client holds the lock, or the lock delay of a lost lease keeps it closed.

    Attributes:
        resource: the name of the lock.
        holder: the label of the present or the lost lease; "" if it has none or the server saw no lease.
        token: the fencing token of that lease; None if the server saw no lease.
        remaining: seconds until that lease ends unless it is renewed; if `closed`, until the lock opens.
            None if the server saw no lease.
        position: the caller's place in the server's queue when its wait ended; 1 is next. 0 if it
            had no place or the place is unknown.
        closed: whether nobody holds the lock, and the lock delay of a lost lease keeps it closed.
    """

    def __init__(
        self,
        message: str,
        *,
        resource: str,
        holder: str = "",
        token: int | None = None,
        remaining: float | None = None,
        position: int = 0,
        closed: bool = False,
    ) -> None:
        super().__init__(message)
        self.resource = resource
        self.holder = holder
        self.token = token
        self.remaining = remaining
        self.position = position
        self.closed = closed


class LockHeldError(NotAcquiredError):
    """The call did not wait, and another client holds the lock, or its lock delay keeps it closed."""

    def __init__(
        self,
        *,
        resource: str,
        holder: str = "",
        token: int | None = None,
        remaining: float | None = None,
        closed: bool = False,
    ) -> None:
        super().__init__(
            f"{resource!r} is {_state(holder, closed=closed)}",
            resource=resource,
            holder=holder,
            token=token,
            remaining=remaining,
            closed=closed,
        )


class AcquireTimeoutError(NotAcquiredError, TimeoutError):
    """The wait of `wait` seconds ended before the lock was granted."""

    def __init__(
        self,
        *,
        wait: float,
        resource: str,
        holder: str = "",
        token: int | None = None,
        remaining: float | None = None,
        position: int = 0,
        closed: bool = False,
    ) -> None:
        in_line = f"; still {_ordinal(position)} in line" if position else ""
        super().__init__(
            f"{resource!r} was still {_state(holder, closed=closed)} after {wait:g} s{in_line}",
            resource=resource,
            holder=holder,
            token=token,
            remaining=remaining,
            position=position,
            closed=closed,
        )


def _state(holder: str, *, closed: bool) -> str:
    if closed:
        return "closed by the lock delay of a lost lease" + (f" of {holder!r}" if holder else "")
    return f"held by {holder!r}" if holder else "held"


def _ordinal(number: int) -> str:
    teens = number % 100 in {11, 12, 13}
    return f"{number}{'th' if teens else {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th')}"


class LossReason(enum.Enum):
    """Why a lease no longer protects its work."""

    EXPIRED = "its validity ended before a renewal was confirmed"
    NOT_HELD = "a quorum of nodes no longer holds it"
    FORCED = "an operator ended it by a forced release"
    MAX_HOLD = "it was held for max_hold, so the client stopped renewing it"
    CLIENT_CLOSED = "the client was closed"
    RELEASED = "it was released"
    FORKED = "the parent of this process holds it"


class LeaseLostError(RedfenceError):
    """The lease no longer protects the work: stop, and acquire again.

    Attributes:
        resource: the name of the lock.
        token: the fencing token of the lost lease.
        reason: why the lease ended.
    """

    def __init__(self, *, resource: str, token: int, reason: LossReason) -> None:
        super().__init__(f"the lease of {resource!r} (token {token}) is over: {reason.value}")
        self.resource = resource
        self.token = token
        self.reason = reason


class UnavailableError(RedfenceError):
    """No server was reachable, or it reached no quorum or no disk. Nothing was granted or acknowledged."""


class OverloadedError(UnavailableError):
    """A limit of the server is reached; retry after `retry_after` if it is set."""

    @property
    def scope(self) -> str:
        """The limit that is reached, or "" if the error has only one.

        For waiting acquires, "resource", "server" or "connection": too many wait there; or "peer": those of
        this client have their part of the server.
        For a watch, "peer", "server" or "prefix": this client has too many watches, all clients have too
        many, or too many locks have its prefix.
        For unanswered commands, "stream" or "peer". For bytes in the server, "peer".
        """
        return self.metadata.get("scope", "")


class OutcomeUnknownError(RedfenceError):
    """No answer came in time, or the call was cut off; the request may or may not have taken effect."""


class AccessDeniedError(RedfenceError):
    """The server refused the credentials, or its policy does not grant this to their principal.

    `error_reason` tells which: "UNAUTHENTICATED" or "PERMISSION_DENIED". A retry with the same credentials
    fails again.
    """

    @property
    def principal(self) -> str:
        """The principal as the server knows it, e.g. "token:billing"; "" if the server did not say."""
        return self.metadata.get("principal", "")


class StaleTokenError(RedfenceError):
    """The storage has seen a higher fencing token, so this holder's lease is over; nothing was changed."""

    @property
    def highest_token(self) -> int:
        """The highest token seen for the resource; 0 if the storage did not say."""
        return int(self.metadata.get("highest_token", "0"))


class NotFoundError(RedfenceError):
    """The storage has no such key; a fenced read has still raised the highest token."""


class ServerError(RedfenceError):
    """The server failed in a way that the contract does not define."""


class WrongServiceError(ServerError):
    """The address is that of another service, or of a server that is too old; it changed nothing."""


class ClosedError(RedfenceError):
    """The client is closed; create a new one."""
