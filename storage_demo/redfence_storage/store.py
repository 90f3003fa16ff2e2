"""The rule of fenced storage, and the commands and results it speaks of. Pure: no file, no clock, no network.

Per resource the store keeps the highest token it has ever seen, apart from the values, for ever. A command with a token is carried out if
and only if `admit` lets it pass, and what `admit` returns is kept in the same transaction. Reading with a token raises the highest too:
otherwise a stale write that lands between a new holder's read and its first write would be accepted, and the new holder's update, made
from what it read, would wipe it out unseen.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from redfence_storage.errors import StaleToken

# What a resource that nobody has fenced has seen; every token is greater.
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
    """The result of a `Get`; `stored` is None where the key is missing, which does not undo a raise."""

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
    """One thing to do to one resource, with a result of a known type."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Put(Command[Accepted]):
    """Sets a key's value."""

    resource: str
    token: int
    key: str
    value: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Get(Command[Reading]):
    """Reads a key; with a token it is a fenced read, which raises and may be stale."""

    resource: str
    token: int | None
    key: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Delete(Command[Removal]):
    """Removes a key; the highest token stays."""

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
    """Lists the keys after `after_key` ("" for the first page): at most `keys_max`, and about `bytes_max` bytes."""

    resource: str
    after_key: str
    keys_max: int
    bytes_max: int
