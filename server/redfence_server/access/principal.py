"""Name the caller of a call: how it was recognised, and the name that its credentials prove."""

from __future__ import annotations

import math
from enum import StrEnum
from typing import Final

from redfence_proto import bounds
from redfence_server.values import value

NAME_BYTES_MAX: Final = 256


class Kind(StrEnum):
    """What proved the name. Names of different kinds never mean the same principal."""

    ANONYMOUS = "anonymous"
    TOKEN = "token"  # noqa: S105  (a kind, no secret)
    JWT = "jwt"
    CERT = "cert"


@value
class Principal:
    """One principal; its text is `KIND:NAME`, or `anonymous`."""

    kind: Kind
    name: str = ""

    def __str__(self) -> str:
        """Return the text that policies, errors and the audit log use."""
        return f"{self.kind.value}:{self.name}" if self.name else self.kind.value


ANONYMOUS: Final = Principal(Kind.ANONYMOUS)
AUTHENTICATED: Final = "authenticated"
"""In a policy: every principal that is not anonymous."""


@value
class Identity:
    """A principal, and when its credentials expire, in milliseconds since 1970; infinite if they never do."""

    principal: Principal
    expires_at_ms: float = math.inf


def name_problem(name: str) -> str | None:
    """Return why a name is no principal's name: it has 1 to 256 bytes of UTF-8 and no control characters."""
    if not name:
        return "is empty; a principal needs a name"
    return bounds.text_problem(name, bytes_max=NAME_BYTES_MAX)


def parse(text: str) -> Principal:
    """Return the principal with this text.

    Raises:
        ValueError: it is not `KIND:NAME` or `anonymous`.
    """
    kind, separator, name = text.partition(":")
    if text == Kind.ANONYMOUS:
        return ANONYMOUS
    if not separator or kind not in {Kind.TOKEN, Kind.JWT, Kind.CERT}:
        raise ValueError(f"{text!r} is no principal; write token:NAME, jwt:SUBJECT, cert:NAME or anonymous")
    if problem := name_problem(name):
        raise ValueError(f"the name in {text!r} {problem}")
    return Principal(Kind(kind), name)
