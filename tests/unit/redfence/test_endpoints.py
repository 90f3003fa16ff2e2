"""Rotation and pauses."""

from __future__ import annotations

import pytest
from unit.redfence.core_world import FixedChance

from redfence import ClientOptions, InvalidArgumentError
from redfence._config import in_milliseconds
from redfence._core.backoff import backoff_ms
from redfence._core.endpoints import Endpoints


def _endpoints(*addresses: str) -> Endpoints:
    options = ClientOptions(reconnect_backoff_min=0.1, reconnect_backoff_max=0.4)
    return Endpoints(addresses, timeouts=in_milliseconds(options), randomness=FixedChance())


def test_another_address_is_tried_at_once_and_a_whole_round_of_failures_pauses() -> None:
    endpoints = _endpoints("a", "b")
    seen = [(endpoints.current(), endpoints.advance()) for _ in range(8)]
    pauses = [0.0, 50.0, 50.0, 100.0, 100.0, 200.0, 200.0, 200.0]
    assert seen == list(zip("abababab", pauses, strict=True))


def test_an_answer_starts_the_pauses_anew() -> None:
    endpoints = _endpoints("a")
    assert [endpoints.advance() for _ in range(3)] == [50.0, 100.0, 200.0]
    endpoints.mark_healthy()
    assert endpoints.advance() == 50.0


@pytest.mark.parametrize("addresses", [("",), ("  ",), (50051,)])
def test_a_client_without_a_usable_address_is_refused(addresses: tuple[str, ...]) -> None:
    with pytest.raises(InvalidArgumentError, match="address"):
        _endpoints(*addresses)


@pytest.mark.parametrize("failures", [0, 1, 2, 5, 50, 10_000])
@pytest.mark.parametrize("fraction", [0.0, 0.5, 0.999])
def test_a_pause_lies_between_half_of_its_greatest_value_and_the_bound(
    failures: int, fraction: float
) -> None:
    greatest = min(400, 50 * 2 ** max(0, failures - 1))
    pause = backoff_ms(failures, base_ms=50, cap_ms=400, fraction=fraction)
    assert greatest / 2 <= pause <= greatest
