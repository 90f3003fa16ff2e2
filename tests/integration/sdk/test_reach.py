"""An address where no lock server answers is named, with what is there instead and what to do."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

import redfence
from harness.doubles.failed_call import FailedCall
from harness.doubles.grpc_fake import GrpcFake
from harness.processes.ports import free_port
from harness.processes.servers import LockServer
from redfence._transport.reach import _kind

_OPTIONS = redfence.ClientOptions(rpc_timeout=0.7)


@pytest.mark.parametrize("kind", [redfence.Client, redfence.AsyncClient])
@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("http://locks:50051/", "is a URL; write HOST:PORT: 'locks:50051'"),
        ("a:50051,b:50051", "is a list; pass each address as one argument"),
        ("locks", "is not HOST:PORT with a port"),
        ("locks:", "is not HOST:PORT with a port"),
        ("locks:99999", "is not HOST:PORT with a port"),
    ],
)
def test_a_malformed_address_is_refused_when_the_client_is_made(kind: Any, address: str, advice: str) -> None:
    with pytest.raises(redfence.InvalidArgumentError, match=advice):
        kind(address)
    for usable in ("locks:50051", "[::1]:50051", "unix:/run/redfence.sock", "dns:///locks:50051"):
        kind(usable)


async def _reason(address: str, credentials: grpc.ChannelCredentials | None = None) -> str:
    async with redfence.AsyncClient(address, credentials=credentials, options=_OPTIONS) as client:
        with pytest.raises(redfence.UnavailableError) as failed:
            await client.cluster_status()
    return str(failed.value)


@pytest.mark.slow
async def test_what_answers_instead_of_a_lock_server_is_named(server: LockServer) -> None:
    assert "is a lock server running there?" in await _reason(f"127.0.0.1:{free_port()}")
    assert "is a Redis or Valkey node" in await _reason(f"127.0.0.1:{server.nodes[0].port}")
    assert "speaks plaintext, not TLS" in await _reason(server.target, grpc.ssl_channel_credentials())
    assert "cannot be found" in await _reason("no-such-host.invalid:50051")


@pytest.mark.parametrize(
    ("first", "has_credentials", "reason"),
    [
        (b"HTTP/1.1 400", False, "is a web server"),
        (b"\x15\x03\x03\0\2\2\x46", False, "REDFENCE_TLS_CA"),
        (b"", False, "REDFENCE_TLS_CA"),
        (b"", True, "refused the TLS handshake"),
        (b"\0\0\x12\4\0\0\0\0\0", False, "try again"),
    ],
)
def test_the_first_bytes_show_what_answered(first: bytes, has_credentials: bool, reason: str) -> None:  # noqa: FBT001
    assert reason in _kind(first, has_credentials=has_credentials)


def test_a_server_of_another_service_is_named_as_one() -> None:
    failed = FailedCall(grpc.StatusCode.UNIMPLEMENTED, details="Method not found!")
    assert "is the address that of another service" in str(redfence.from_rpc_error(failed))


async def test_a_busy_executor_of_the_program_delays_no_failover(fake: GrpcFake) -> None:
    """The client looks at an address that fails, but not with the threads of `asyncio.to_thread`."""
    done = threading.Event()
    with ThreadPoolExecutor(1) as executor:
        asyncio.get_running_loop().set_default_executor(executor)
        busy = asyncio.create_task(asyncio.to_thread(done.wait))
        await asyncio.sleep(0)
        try:
            async with redfence.AsyncClient(f"127.0.0.1:{free_port()}", fake.address) as client:
                await asyncio.wait_for(client.cluster_status(), 3)
        finally:
            done.set()
        await busy
