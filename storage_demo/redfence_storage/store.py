"""Defines the rule of fenced storage, its commands and its results. Pure: no file, no clock, no network.

For each resource the store keeps the highest token that it has ever seen. It keeps the token apart
from the values, for ever. A command with a token runs only if `admit` accepts the token. The same
transaction stores the result of `admit`.

A read with a token also raises the highest token. Without this rule, a stale write could come
between a new holder's read and its first write. The store would accept it, and the new holder would
overwrite it unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from redfence_storage.errors import StaleToken

# The highest token of a resource that has seen none. Every token is greater.
NO_TOKEN = 0


def admit(token: int, *, resource: str, highest_token: int) -> int:
    """Return the highest token after a command with `token`; it is never lower than before.

    Raises:
        StaleToken: a higher token was seen; nothing may be changed.
    """
    if token < highest_token:
        raise StaleToken(resource, token=token, highest_token=highest_token)
    return token


@dataclass(frozen=True, slots=True)
class Accepted:
    """The result of a `Put` or a `Fence`."""

    highest_token: int


@dataclass(frozen=True, slots=True)
class StoredValue:
    """A value and the token it was written under."""

    value: bytes
    written_token: int


@dataclass(frozen=True, slots=True)
class Reading:
    """The result of a `Get`; `stored` is None if the key is missing, and a token has still taken effect."""

    stored: StoredValue | None
    highest_token: int


@dataclass(frozen=True, slots=True)
class Removal:
    """The result of a `Delete`."""

    deleted: bool
    highest_token: int


@dataclass(frozen=True, slots=True)
class KeyPage:
    """The result of a `ListKeys`: keys in byte order, and whether more follow the last of them."""

    keys: tuple[str, ...]
    more: bool
    highest_token: int


ResultT = TypeVar("ResultT")


class Command(Generic[ResultT]):
    """The base class of commands on one resource, with the type of their result."""

    __slots__ = ()
    resource: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Put(Command[Accepted]):
    """Sets a key's value."""

    resource: str
    token: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Get(Command[Reading]):
    """Reads a key; with a token it is a fenced read, which raises the highest token or is stale."""

    resource: str
    token: int | None
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Command[Removal]):
    """Deletes a key; the highest token stays."""

    resource: str
    token: int
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fence(Command[Accepted]):
    """Raises the highest token and changes no data."""

    resource: str
    token: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ListKeys(Command[KeyPage]):
    """Lists the keys after `after_key` ("" for all): at most `keys_max`, with about `bytes_max` bytes."""

    resource: str
    after_key: str
    keys_max: int
    bytes_max: int
