"""Bounds of requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from redfence_proto.storage.v1 import storage_pb2
from redfence_storage import errors
from redfence_storage.grpc_requests import (
    delete_command,
    fence_command,
    get_command,
    list_keys_command,
    page_token_after,
    put_command,
)
from redfence_storage.store import Delete, Fence, Get, ListKeys, Put

COMMAND_OF: dict[Any, Callable[[Any], object]] = {
    storage_pb2.PutRequest: put_command,
    storage_pb2.GetRequest: get_command,
    storage_pb2.DeleteRequest: delete_command,
    storage_pb2.FenceRequest: fence_command,
    storage_pb2.ListKeysRequest: list_keys_command,
}
BAD_FIELDS: list[tuple[str, Any, type[errors.InvalidRequest]]] = [
    ("resource", "", errors.InvalidResource),
    ("resource", "a{b", errors.InvalidResource),
    ("resource", "a\nb", errors.InvalidResource),
    ("resource", "ä" * 129, errors.InvalidResource),
    ("fencing_token", 0, errors.InvalidFencingToken),
    ("fencing_token", 2**53, errors.InvalidFencingToken),
    ("key", "", errors.InvalidKey),
    ("key", "a\x00b", errors.InvalidKey),
    ("key", "ä" * 513, errors.InvalidKey),
    ("value", b"x" * (32 * 1024 + 1), errors.InvalidValue),
    ("page_size", 1_001, errors.InvalidPage),
    ("page_token", "no base64", errors.InvalidPageToken),
    ("page_token", "ä", errors.InvalidPageToken),
    ("page_token", "_w==", errors.InvalidPageToken),
    ("page_token", page_token_after("a\x00b"), errors.InvalidPageToken),
]
GOOD = {"resource": "orders/42", "fencing_token": 7, "key": "state", "value": b"paid"}


@pytest.mark.parametrize("kind", list(COMMAND_OF), ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(("field", "value", "refusal"), BAD_FIELDS)
def test_a_bad_field_of_any_request_is_named(
    kind: Any, field: str, value: object, refusal: type[errors.InvalidRequest]
) -> None:
    fields = {name: good for name, good in GOOD.items() if name in kind.DESCRIPTOR.fields_by_name}
    if field not in kind.DESCRIPTOR.fields_by_name:
        assert COMMAND_OF[kind](kind(**fields))
        return
    with pytest.raises(refusal) as refused:
        COMMAND_OF[kind](kind(**{**fields, field: value}))
    assert str(refused.value).startswith(f"{field} ")
    most = {"max": "32768"} if field == "value" else {}
    assert refused.value.metadata == {"field": field, **most}


def test_requests_at_their_bounds_become_commands() -> None:
    name, key, value, token = "n" * 256, "k" * 1_024, b"x" * 32 * 1024, 2**53 - 1
    sent: dict[str, Any] = {"resource": name, "fencing_token": token}
    read: dict[str, Any] = {"resource": name, "token": token}
    assert put_command(storage_pb2.PutRequest(**sent, key=key, value=value)) == Put(
        **read, key=key, value=value
    )
    assert delete_command(storage_pb2.DeleteRequest(**sent, key=key)) == Delete(**read, key=key)
    assert fence_command(storage_pb2.FenceRequest(**sent)) == Fence(**read)
    page = storage_pb2.ListKeysRequest(resource=name, page_size=1_000, page_token=page_token_after(key))
    listing = ListKeys(resource=name, after_key=key, keys_max=1_000, bytes_max=32 * 1024)
    assert list_keys_command(page) == listing


def test_a_read_is_unfenced_only_where_the_request_says_so() -> None:
    unfenced = storage_pb2.GetRequest(resource="r", key="k", unfenced=True)
    assert get_command(unfenced) == Get(resource="r", token=None, key="k")


def test_a_page_size_of_zero_means_a_hundred() -> None:
    assert list_keys_command(storage_pb2.ListKeysRequest(resource="r")).keys_max == 100
