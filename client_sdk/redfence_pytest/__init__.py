"""Gives pytest the fixtures of `redfence.testing`: a lock server in memory, and clients connected to it.

    def test_billing(redfence_fake, redfence_client):
        with redfence_client.lock("orders/42", ttl=10):
            assert redfence_fake.holder("orders/42") is not None

    async def test_billing_of_asyncio(redfence_async_client):     # with any plugin for async tests
        async with redfence_async_client() as client, client.lock("orders/42", ttl=10):
            ...

To let time pass by `redfence_fake.clock.advance(seconds)` only, override a fixture:

    @pytest.fixture
    def redfence_clock():
        return redfence.testing.ManualClock()

pytest loads this module in every project where redfence is installed. So it is outside the package
`redfence`, and imports it, and gRPC, only when a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from redfence import AsyncClient, Client
    from redfence._clock import Clock
    from redfence.testing import FakeLockServer


@pytest.fixture
def redfence_clock() -> Clock | None:
    """Return the clock of the fake server and its clients; None is the system's. Override it."""
    return None


@pytest.fixture
def redfence_fake(redfence_clock: Clock | None) -> Iterator[FakeLockServer]:
    """Return a new lock server in memory, a `redfence.testing.FakeLockServer`; it ends with the test."""
    from redfence.testing import FakeLockServer  # noqa: PLC0415  (pytest must start without it)

    with FakeLockServer(redfence_clock) as fake:
        yield fake


@pytest.fixture
def redfence_client(redfence_fake: FakeLockServer) -> Client:
    """Return a `redfence.Client` that is connected to the fake server, and closed with it."""
    return redfence_fake.client()


@pytest.fixture
def redfence_async_client(redfence_fake: FakeLockServer) -> Callable[..., AsyncClient]:
    """Return a function that makes a `redfence.AsyncClient` of the fake server; use it in `async with`.

    A client of asyncio ends in its own loop, so the test closes it.
    """
    return redfence_fake.async_client
