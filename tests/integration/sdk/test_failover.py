"""Addresses at which no server answers. `test_servers.py` lets real servers die."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

import redfence
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.ports import free_port

MakeClient = Callable[..., Any]


async def test_an_unreachable_first_address_costs_no_error(fake: GrpcFake) -> None:
    async with redfence.AsyncClient(f"127.0.0.1:{free_port()}", fake.address) as client:
        async with asyncio.timeout(2):
            assert (await client.cluster_status()).ready
            assert await (await client.acquire("r", ttl=10)).release()


@pytest.mark.slow
@pytest.mark.parametrize("listens", [False, True], ids=["nothing listens", "something else listens"])
async def test_with_no_server_at_all_calls_fail_in_time_and_not_before(
    make_client: MakeClient, *, listens: bool
) -> None:
    """A call never hangs: UnavailableError after the rpc timeout names what was tried."""

    async def hang_up(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.close()

    # Time enough to try on a machine that stands still for a while.
    options = redfence.ClientOptions(rpc_timeout=1, connect_timeout=0.5)
    async with await asyncio.start_server(hang_up, "127.0.0.1", 0) as listener:
        port = listener.sockets[0].getsockname()[1] if listens else free_port()
        client = make_client(f"127.0.0.1:{port}", options=options)
        calls = client.acquire("r", ttl=10), client.acquire("r", ttl=10, wait=0), client.cluster_status()
        for call in calls:
            with pytest.raises(redfence.UnavailableError) as failed:
                await asyncio.wait_for(call, 3)
            if not listens:
                assert "refused the connection" in str(failed.value)
                assert isinstance(failed.value.__cause__, redfence.UnavailableError)
