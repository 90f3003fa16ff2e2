"""Values that exist are valid, and secrets stay secret."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest

from redfence_proto.v1 import lock_pb2
from redfence_server import model
from redfence_server.errors import InvalidFieldError
from redfence_server.model import LeaseId


@pytest.mark.parametrize("resource", ["x", "orders/42", "ż" * 128, "a" * 256, " ", "🔒"])
def test_a_good_resource_is_returned_as_it_is(resource: str) -> None:
    assert model.check_resource(resource) == resource


@pytest.mark.parametrize("resource", ["", "a" * 257, "ż" * 129, "a\nb", "\x7f", "\x85", "{x}", "}"])
def test_a_bad_resource_is_refused_by_name(resource: str) -> None:
    with pytest.raises(InvalidFieldError, match=r"^resource ") as told:
        model.check_resource(resource)
    assert told.value.reason == lock_pb2.ERROR_REASON_INVALID_RESOURCE


@pytest.mark.parametrize("ttl_ms", [100, 60_000])
def test_a_ttl_within_bounds_is_never_changed(ttl_ms: int) -> None:
    assert model.check_ttl_ms(ttl_ms, ttl_ms_max=60_000) == ttl_ms


@pytest.mark.parametrize("ttl_ms", [None, -1, 0, 99, 60_001])
def test_a_ttl_out_of_bounds_is_refused_and_the_bounds_are_told(ttl_ms: int | None) -> None:
    with pytest.raises(InvalidFieldError, match=r"^ttl ") as told:
        model.check_ttl_ms(ttl_ms, ttl_ms_max=60_000)
    assert told.value.metadata == {"min": "100ms", "max": "60000ms"}


@pytest.mark.parametrize("token", [1, 2**53 - 1])
def test_a_token_that_a_double_can_hold_is_good(token: int) -> None:
    assert model.check_token(token) == token


@pytest.mark.parametrize(
    ("check", "value"),
    [
        (model.check_token, 0),
        (model.check_token, 2**53),
        (model.check_holder, "a" * 257),
        (model.check_holder, "a\tb"),
        (LeaseId, ""),
        (LeaseId, "a" * 31),
        (LeaseId, "a" * 33),
        (LeaseId, "A" * 32),
        (LeaseId, "g" * 32),
        (LeaseId, "a" * 32 + "\n"),
    ],
)
def test_every_other_bound_is_kept(check: Callable[[object], object], value: object) -> None:
    with pytest.raises(InvalidFieldError):
        check(value)


def test_a_lease_id_shows_its_secret_to_nobody() -> None:
    secret = "0123456789abcdef" * 2
    lease_id = LeaseId(secret)
    assert secret not in repr(lease_id)
    assert lease_id.digest == hashlib.sha256(secret.encode()).hexdigest()
    with pytest.raises(InvalidFieldError) as told:
        LeaseId(secret.upper())
    assert secret.upper() not in str(told.value)
