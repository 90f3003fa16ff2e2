"""Builds the storage clients' requests from plain arguments, and typed results from responses. Pure.

The client refuses names and values that are too long. The transport would refuse them too, but with
the same status as an overload that passes. The storage checks everything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, Self, TypeAlias

from redfence import InvalidArgumentError
from redfence_proto import bounds
from redfence_proto.storage.v1 import storage_pb2
from redfence_storage.bounds import key_problem, value_problem


class HasToken(Protocol):
    """An object with a fencing token, such as a lease."""

    @property
    def token(self) -> int:
        """The fencing token."""
        ...


Token: TypeAlias = int | HasToken


@dataclass(frozen=True, slots=True)
class PutResult:
    """The result of `put`: the write is on disk."""

    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.PutResponse) -> Self:
        """Return the result that a response contains."""
        return cls(highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class GetResult:
    """The result of `get`: the value, the token of its write, and the highest token of the resource."""

    value: bytes
    written_token: int
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.GetResponse) -> Self:
        """Return the result that a response contains."""
        return cls(
            value=response.value,
            written_token=response.written_token,
            highest_token=response.highest_token,
        )


@dataclass(frozen=True, slots=True)
class DeleteResult:
    """The result of `delete`: the deletion is on disk; `deleted` shows whether the key existed."""

    deleted: bool
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.DeleteResponse) -> Self:
        """Return the result that a response contains."""
        return cls(deleted=response.deleted, highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class FenceResult:
    """The result of `fence`: the highest token is on disk, and every lower token is refused."""

    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.FenceResponse) -> Self:
        """Return the result that a response contains."""
        return cls(highest_token=response.highest_token)


@dataclass(frozen=True, slots=True)
class KeyPage:
    """The result of `list_keys`: one page in byte order; `next_page_token` is empty on the last page."""

    keys: tuple[str, ...]
    next_page_token: str
    highest_token: int

    @classmethod
    def of(cls, response: storage_pb2.ListKeysResponse) -> Self:
        """Return the result that a response contains."""
        return cls(
            keys=tuple(response.keys),
            next_page_token=response.next_page_token,
            highest_token=response.highest_token,
        )


def put_request(resource: str, *, key: str, value: bytes, token: Token) -> storage_pb2.PutRequest:
    """Return the request of a fenced write.

    Raises:
        InvalidArgumentError: the resource, key or value is invalid.
    """
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    _check("value", value_problem(value))
    return storage_pb2.PutRequest(resource=resource, fencing_token=_number(token), key=key, value=value)


def get_request(resource: str, *, key: str, token: Token | None, unfenced: bool) -> storage_pb2.GetRequest:
    """Return the request of a read; the storage refuses one with neither a token nor `unfenced`, or both.

    Raises:
        InvalidArgumentError: the resource or key is invalid.
    """
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    fencing_token = None if token is None else _number(token)
    return storage_pb2.GetRequest(resource=resource, fencing_token=fencing_token, key=key, unfenced=unfenced)


def delete_request(resource: str, *, key: str, token: Token) -> storage_pb2.DeleteRequest:
    """Return the request of a fenced deletion.

    Raises:
        InvalidArgumentError: the resource or key is invalid.
    """
    _check("resource", bounds.resource_problem(resource))
    _check("key", key_problem(key))
    return storage_pb2.DeleteRequest(resource=resource, fencing_token=_number(token), key=key)


def fence_request(resource: str, *, token: Token) -> storage_pb2.FenceRequest:
    """Return the request that raises the highest token and changes no data.

    Raises:
        InvalidArgumentError: the resource is invalid.
    """
    _check("resource", bounds.resource_problem(resource))
    return storage_pb2.FenceRequest(resource=resource, fencing_token=_number(token))


def list_keys_request(resource: str, *, page_size: int, page_token: str) -> storage_pb2.ListKeysRequest:
    """Return the request of one page of keys; an empty `page_token` asks for the first one.

    Raises:
        InvalidArgumentError: the resource is invalid.
    """
    _check("resource", bounds.resource_problem(resource))
    return storage_pb2.ListKeysRequest(resource=resource, page_size=page_size, page_token=page_token)


def _number(token: Token) -> int:
    return token if isinstance(token, int) else token.token


def _check(field: str, problem: str | None) -> None:
    if problem:
        raise InvalidArgumentError(f"{field} {problem}", metadata={"field": field})
