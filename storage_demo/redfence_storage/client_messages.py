"""What the storage clients send and return: requests from plain arguments, typed results from responses. Pure; both clients use it.

What is too long is refused here. The transport would refuse it as well, by its size, and that looks like an overload
which goes by. Everything else is left to the storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from redfence import InvalidArgumentError
from redfence_proto import bounds
from redfence_proto.storage.v1 import storage_pb2
from redfence_storage.bounds import key_problem, value_problem


class HasToken(Protocol):
    """A lease, as far as the storage cares."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


Token: TypeAlias = int | HasToken


@dataclass(frozen=True, slots=True)
class PutResult:
    """The write is on disk."""

    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.PutResponse) -> Self:
        """Return the response as a plain value."""
        return cls(highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class GetResult:
    """A key's value, the token it was written under, and the highest token seen for the resource."""

    value: bytes
    written_token: int
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.GetResponse) -> Self:
        """Return the response as a plain value."""
        return cls(
            value=response.value,
            written_token=response.written_token,
            highest_token=response.highest_token,
        )


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The removal is on disk; `deleted` tells whether the key was there."""

    deleted: bool
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.DeleteResponse) -> Self:
        """Return the response as a plain value."""
        return cls(deleted=response.deleted, highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class FenceResult:
    """The raise is on disk: every lower token is shut out."""

    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.FenceResponse) -> Self:
        """Return the response as a plain value."""
        return cls(highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class KeyPage:
    """One page of keys in byte order; `next_page_token` is empty on the last."""

    keys: tuple[str, ...]
    next_page_token: str
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.ListKeysResponse) -> Self:
        """Return the response as a plain value."""
        return cls(
            keys=tuple(response.keys),
            next_page_token=response.next_page_token,
            highest_token=response.highest_token,
        )


def put_request(resource: str, *, key: str, value: bytes, token: Token) -> storage_pb2.PutRequest:
    """Return the request of a fenced write."""
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    _check("value", value_problem(value))
    return storage_pb2.PutRequest(resource=resource, fencing_token=_number(token), key=key, value=value)


def get_request(resource: str, *, key: str, token: Token | None) -> storage_pb2.GetRequest:
    """Return the request of a fenced read, or of a plain one where there is no token."""
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    fencing_token = None if token is None else _number(token)
    return storage_pb2.GetRequest(resource=resource, fencing_token=fencing_token, key=key)


def delete_request(resource: str, *, key: str, token: Token) -> storage_pb2.DeleteRequest:
    """Return the request of a fenced removal."""
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    return storage_pb2.DeleteRequest(resource=resource, fencing_token=_number(token), key=key)


def fence_request(resource: str, *, token: Token) -> storage_pb2.FenceRequest:
    """Return the request of a raise without data."""
    _check("resource", bounds.resource_problem(resource))
    return storage_pb2.FenceRequest(resource=resource, fencing_token=_number(token))


def list_keys_request(resource: str, *, page_size: int, page_token: str) -> storage_pb2.ListKeysRequest:
    """Return the request of one page."""
    _check("resource", bounds.resource_problem(resource))
    return storage_pb2.ListKeysRequest(resource=resource, page_size=page_size, page_token=page_token)


def _number(token: Token) -> int:
    return token if isinstance(token, int) else token.token


def _check(field: str, problem: str | None) -> None:
    if problem:
        raise InvalidArgumentError(f"{field} {problem}", metadata={"field": field})
