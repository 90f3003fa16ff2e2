"""Checks requests against the contract's bounds and converts them into commands."""

from __future__ import annotations

import base64
import binascii

from redfence_proto import bounds
from redfence_proto.storage.v1 import storage_pb2
from redfence_storage.bounds import (
    PAGE_BYTES_MAX,
    PAGE_SIZE_DEFAULT,
    PAGE_SIZE_MAX,
    VALUE_BYTES_MAX,
    key_problem,
    value_problem,
)
from redfence_storage.errors import (
    InvalidFencingToken,
    InvalidKey,
    InvalidPage,
    InvalidPageToken,
    InvalidResource,
    InvalidValue,
    UnfencedWithToken,
)
from redfence_storage.store import Delete, Fence, Get, ListKeys, Put


def put_command(request: storage_pb2.PutRequest) -> Put:
    """Return the command of a request, or raise the `InvalidRequest` of its first invalid field."""
    if problem := value_problem(request.value):
        raise InvalidValue(problem, metadata={"max": str(VALUE_BYTES_MAX)})
    return Put(
        resource=_resource(request.resource),
        token=_token(request.fencing_token),
        key=_key(request.key),
        value=request.value,
    )


def get_command(request: storage_pb2.GetRequest) -> Get:
    """Return the command of a request, or raise the `InvalidRequest` of its first invalid field."""
    return Get(
        resource=_resource(request.resource),
        token=None if _is_unfenced(request) else _token(request.fencing_token),
        key=_key(request.key),
    )


def delete_command(request: storage_pb2.DeleteRequest) -> Delete:
    """Return the command of a request, or raise the `InvalidRequest` of its first invalid field."""
    return Delete(
        resource=_resource(request.resource), token=_token(request.fencing_token), key=_key(request.key)
    )


def fence_command(request: storage_pb2.FenceRequest) -> Fence:
    """Return the command of a request, or raise the `InvalidRequest` of its first invalid field."""
    return Fence(resource=_resource(request.resource), token=_token(request.fencing_token))


def list_keys_command(request: storage_pb2.ListKeysRequest) -> ListKeys:
    """Return the command of a request, or raise the `InvalidRequest` of its first invalid field."""
    if request.page_size > PAGE_SIZE_MAX:
        raise InvalidPage(f"is {request.page_size}; at most {PAGE_SIZE_MAX} are allowed")
    return ListKeys(
        resource=_resource(request.resource),
        after_key=_key_of_page_token(request.page_token) if request.page_token else "",
        keys_max=request.page_size or PAGE_SIZE_DEFAULT,
        bytes_max=PAGE_BYTES_MAX,
    )


def page_token_after(key: str) -> str:
    """Return the opaque page token of the page that begins after `key`."""
    return base64.urlsafe_b64encode(key.encode()).decode()


def _key_of_page_token(page_token: str) -> str:
    try:
        key = base64.b64decode(page_token.encode(), altchars=b"-_", validate=True).decode()
    except (binascii.Error, UnicodeDecodeError) as error:
        raise InvalidPageToken("is malformed; send next_page_token unchanged") from error
    if key_problem(key):
        raise InvalidPageToken("is malformed; send next_page_token unchanged")
    return key


def _resource(resource: str) -> str:
    if problem := bounds.resource_problem(resource):
        raise InvalidResource(problem)
    return resource


def _is_unfenced(request: storage_pb2.GetRequest) -> bool:
    """Return whether a read is unfenced; the caller must say so, because a missing token may be a bug."""
    fenced = request.HasField("fencing_token")
    if fenced and request.unfenced:
        raise UnfencedWithToken("is true, but fencing_token is set; send only one of them")
    if not fenced and not request.unfenced:
        raise InvalidFencingToken("is missing; send the lease's token, or set unfenced to read without one")
    return request.unfenced


def _token(token: int) -> int:
    if problem := bounds.fencing_token_problem(token):
        raise InvalidFencingToken(problem)
    return token


def _key(key: str) -> str:
    if problem := key_problem(key):
        raise InvalidKey(problem)
    return key
