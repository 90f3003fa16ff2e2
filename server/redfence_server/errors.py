"""Define the server's errors; api/errors.py maps each class to a status and a reason.

A held lock is not an error but an outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from redfence_proto.v1 import lock_pb2


class RedfenceServerError(Exception):
    """Base of every error that this package raises for a caller or an operator to see."""


class StartupError(RedfenceServerError):
    """The server or the command cannot start; the message is for the operator."""


class ConfigError(StartupError):
    """A setting is wrong; the message names it."""


class NodeRejectedError(StartupError):
    """A configured node must not vote, for example because it is a replica; the message names the node."""


@dataclass(eq=False)
class InvalidFieldError(RedfenceServerError):
    """A caller's field is malformed or out of bounds.

    Attributes:
        field_name: as the proto spells it; empty if no field can be named.
        problem: a sentence without the field's name; never shows a secret.
        reason: the contract's reason.
        metadata: values for machines, for example the bounds.
    """

    field_name: str
    problem: str
    reason: lock_pb2.ErrorReason.ValueType
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Return the field's name and the problem."""
        return f"{self.field_name} {self.problem}".lstrip()


@dataclass(eq=False)
class NoQuorumError(RedfenceServerError):
    """Fewer than a quorum of nodes answered.

    Attributes:
        detail: the cause, for humans.
        silent: the nodes without an answer and why, as "1=timed_out,2=unreachable"; empty if not known.
    """

    detail: str
    silent: str = ""

    @classmethod
    def naming(cls, silent: Iterable[tuple[int, Enum]], *, also: str = "") -> Self:
        """Return the error that names the silent nodes with their reasons; `also` says what follows."""
        named = [(node, why.name.lower()) for node, why in silent]
        words = ", ".join(f"node {node} {why.replace('_', ' ')}" for node, why in named)
        return cls(words + also, ",".join(f"{node}={why}" for node, why in named))

    def __str__(self) -> str:
        """Return the message with the cause."""
        return f"no quorum of nodes answered: {self.detail}"


@dataclass(eq=False)
class ValidityExhaustedError(RedfenceServerError):
    """A quorum granted so late that no validity was left; the grant was undone."""

    elapsed_ms: float
    ttl_ms: int

    def __str__(self) -> str:
        """Return how long the nodes took, and the fix."""
        took_s, ttl_s = self.elapsed_ms / 1000, self.ttl_ms / 1000
        return f"the nodes took {took_s:.3f} s to grant a ttl of {ttl_s:.10g} s; use a longer ttl"


class DrainingError(RedfenceServerError):
    """This server is stopping; another server can take the call."""

    def __str__(self) -> str:
        """Return the message with the fix."""
        return "this server is stopping; use another server, with the same lease id"


class AcquireCancelledError(RedfenceServerError):
    """The caller cancelled the acquire, or its stream ended."""

    def __str__(self) -> str:
        """Return the message."""
        return "cancelled by the caller, or with its stream; nothing was granted"


@dataclass(eq=False)
class OverloadedError(RedfenceServerError):
    """A limit of waiting acquires, unanswered commands or new names is reached."""

    limit: int


@dataclass(eq=False)
class TooManyWaitersError(OverloadedError):
    """The limit of waiting acquires is reached; its scope is "resource", "server", "connection" or "peer"."""

    scope: str

    def __str__(self) -> str:
        """Return the message with the limit."""
        if self.scope == "peer":
            return (
                f"this client may now have {self.limit} acquires waiting at this server, half of the places "
                "that other clients leave; wait for fewer locks at a time, or raise waiters_max"
            )
        where = {
            "resource": "for this resource",
            "server": "at this server",
            "connection": "on this connection",
        }
        return f"{self.limit} acquires are waiting {where[self.scope]}, which is the limit"


@dataclass(eq=False)
class TooManyCommandsError(OverloadedError):
    """The limit of unanswered commands is reached; its scope is "stream" or "peer"."""

    scope: str = "stream"

    def __str__(self) -> str:
        """Return the message with the limit and the fix."""
        if self.scope == "stream":
            return (
                f"{self.limit} commands are unanswered on this stream, which is the limit; read results "
                "before sending more, or raise commands_max of the server"
            )
        return (
            "the streams of this client have too many unanswered commands together, or are too many; keep to "
            f"{self.limit} unanswered commands on this stream, open fewer streams, or raise "
            "commands_server_max of the server"
        )


class TooManyNewResourcesError(OverloadedError):
    """A client has used too many new resource names in a short time; `limit` is the number per second."""

    def __str__(self) -> str:
        """Return the message with the limit and the fix."""
        return (
            f"this client acquires more than {self.limit} new resource names a second; retry later, use "
            "names again, or raise new_resources_per_second of the server"
        )


@dataclass(eq=False)
class WatchLimitError(RedfenceServerError):
    """A limit of watches is reached; its scope is "peer", "server" or "prefix"."""

    limit: int
    scope: str

    def __str__(self) -> str:
        """Return the message with the limit and the fix."""
        if self.scope == "server":
            return (
                f"{self.limit} watches are open at this server process, which is the limit; end one of them"
            )
        if self.scope == "peer":
            return (
                f"this client has {self.limit} open watches at this server process, and the other places are "
                "for other clients; end one of them"
            )
        return f"more than {self.limit} locks have this prefix, which is the limit; watch a longer prefix"


@dataclass(eq=False)
class AccessError(RedfenceServerError):
    """The caller may not do this.

    Attributes:
        problem: a sentence for the caller; never shows a secret.
        details: the principal, the verb and the resource, as far as they are known.
    """

    problem: str
    details: Mapping[str, str] = field(default_factory=lambda: {"principal": "anonymous"})

    def __str__(self) -> str:
        """Return the problem."""
        return self.problem


class UnauthenticatedError(AccessError):
    """The caller has no credentials, or credentials that are not valid."""


class PermissionDeniedError(AccessError):
    """The policy does not grant this to the caller's principal."""
