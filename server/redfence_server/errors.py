"""The server's errors in its own terms; api/errors.py maps each class to a status and a reason.

Losing to another holder is no error: it is an outcome.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Self

from redfence_proto.v1 import lock_pb2


class RedfenceServerError(Exception):
    """Base of every error that this package raises on purpose and lets a caller or an operator see."""


class StartupError(RedfenceServerError):
    """The server or the command cannot start; the message is for the operator."""


class ConfigError(StartupError):
    """A setting is wrong; the message names it."""


class NodeRejectedError(StartupError):
    """A configured node must not vote, for example a replica or a node of another cluster; the message names it."""


@dataclass(eq=False)
class InvalidFieldError(RedfenceServerError):
    """A caller's field is malformed or out of bounds.

    Attributes:
        field_name: as the proto spells it; empty where no field can be named.
        problem: a sentence without the field's name; never repeats a secret.
        reason: the contract's reason.
        metadata: more for machines, e.g. the bounds.
    """

    field_name: str
    problem: str
    reason: lock_pb2.ErrorReason.ValueType
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        """Name the field first."""
        return f"{self.field_name} {self.problem}".lstrip()


@dataclass(eq=False)
class NoQuorumError(RedfenceServerError):
    """Fewer than a quorum of nodes answered.

    Attributes:
        detail: for humans.
        silent: which nodes did not answer and why, e.g. "1=timed_out,2=unreachable"; empty if not known.
    """

    detail: str
    silent: str = ""

    @classmethod
    def naming(cls, silent: Iterable[tuple[int, Enum]], *, also: str = "") -> Self:
        """Return the error that names the silent nodes, each by index and why, and says what follows from it."""
        named = [(node, why.name.lower()) for node, why in silent]
        words = ", ".join(f"node {node} {why.replace('_', ' ')}" for node, why in named)
        return cls(words + also, ",".join(f"{node}={why}" for node, why in named))

    def __str__(self) -> str:
        """Tell what is known."""
        return f"no quorum of nodes answered: {self.detail}"


@dataclass(eq=False)
class ValidityExhaustedError(RedfenceServerError):
    """A quorum granted so late that nothing of the ttl was left; the grant was undone."""

    elapsed_ms: float
    ttl_ms: int

    def __str__(self) -> str:
        """Tell what to change."""
        return f"the nodes took {self.elapsed_ms:.0f} ms to grant a ttl of {self.ttl_ms} ms; ask for a longer ttl"


class DrainingError(RedfenceServerError):
    """This server is stopping; another one can take the call."""

    def __str__(self) -> str:
        """Tell where to go."""
        return "this server is stopping; go on at another one, with the same lease id"


@dataclass(eq=False)
class OverloadedError(RedfenceServerError):
    """A bound on waiting acquires or on unanswered commands is reached."""

    limit: int


@dataclass(eq=False)
class TooManyWaitersError(OverloadedError):
    """So many acquires wait that no more are taken; the scope of the bound is "resource", "server" or "connection"."""

    scope: str

    def __str__(self) -> str:
        """Name the bound."""
        where = {
            "resource": "for this resource",
            "server": "at this server",
            "connection": "on this connection",
        }
        return f"{self.limit} acquires are waiting {where[self.scope]}; no more are taken"


class TooManyCommandsError(OverloadedError):
    """So many commands of one stream are unanswered that it takes no more."""

    def __str__(self) -> str:
        """Name the bound."""
        return f"{self.limit} commands are unanswered on this stream; it takes no more"
