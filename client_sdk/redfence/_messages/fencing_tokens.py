"""Defines a fencing token together with its resource, and checks both. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from redfence._errors import InvalidArgumentError
from redfence._messages import requests


class HasFencingToken(Protocol):
    """An object with a resource and its fencing token, such as a lease or a `FencingToken`."""

    @property
    def resource(self) -> str:
        """The locked name."""
        ...

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


@dataclass(frozen=True, slots=True)
class FencingToken:
    """The fencing token of one resource: the part of a lease that another process may have.

    Raises:
        InvalidArgumentError: the resource or the token breaks the contract's bounds.
    """

    resource: str
    token: int

    def __post_init__(self) -> None:
        requests.check_resource(self.resource)
        requests.check_token(self.token)


def expected_token(token: HasFencingToken | int | None, resource: str | None) -> FencingToken:
    """Return the token, which must belong to `resource` if that is given.

    Raises:
        InvalidArgumentError: there is no token, it belongs to another resource, or it is a number
            without a resource.
    """
    if token is None:
        raise _invalid("token", "is None; hold the lock, or pass the token that the caller sent")
    if isinstance(token, int):
        if resource is None:
            raise _invalid("resource", f"is missing; a number like {token} needs its resource")
        return FencingToken(resource, token)
    if not hasattr(token, "resource") or not hasattr(token, "token"):
        raise _invalid("token", f"must be a lease, a FencingToken or an int, not {type(token).__name__}")
    if resource is not None and token.resource != resource:
        raise _invalid("token", f"belongs to {token.resource!r}; pass the token of {resource!r}")
    return FencingToken(token.resource, token.token)


def token_to_check(lease: HasFencingToken | str, token: int | None) -> FencingToken:
    """Return the token of a lease, or `token` for a resource's name.

    Raises:
        InvalidArgumentError: the name or the token is invalid, or a lease comes with a token.
    """
    if isinstance(lease, str):
        if token is None:
            raise _invalid("token", f"is missing; pass it after the name {lease!r}, or pass a lease")
        return FencingToken(lease, token)
    if token is not None:
        raise _invalid("token", "must be left out, because the lease has its own")
    return expected_token(lease, None)


def _invalid(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"{name} {problem}", metadata={"field": name})
