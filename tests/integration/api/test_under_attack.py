"""A good client beside the attackers of `make attack`, each a process with an address of its own."""

from __future__ import annotations

import base64
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest

from bench.attack_guesses import HELD
from bench.attack_wire import SOURCE
from harness.http2.raw_client import RawClient
from harness.load.session_caller import SessionCaller
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.metrics import scrape, value
from harness.processes.ports import HOST, free_port
from harness.processes.process_look import look_at_process
from harness.processes.servers import FormedNodes, LockServer, until
from redfence_proto import rich_error
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.settings import Transport

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[3]
# Each attack wants more than a peer may have of this.
COMMANDS_MAX = 6_000
CONNECTIONS_MAX = 200
# With the limit at which the server refuses each. The last one is bounded only by the transport fast.
FLOODS = (
    ("idle_streams", "commands_server_max"),
    ("renewals", "commands_server_max"),
    ("unread_sessions", "commands_server_max"),
    ("idle_connections", "connections_max"),
)
ROUNDS = 20
HELD_TTL_MS = 300_000
# An attack that the test ends itself.
_ENDLESS_S = 600
# docs/security.md says so of larger attacks.
KEPT_BYTES_MAX = 120 * 2**20
# gRPC opens one more or less for itself. Each attack takes a connection or more, most take many.
KEPT_FILES_MAX = 4


@dataclass
class GoodClient:
    """Holds one lock, and makes calls on old and new streams and connections; a refusal fails the test."""

    server: LockServer
    session: SessionCaller
    port: int
    lease: lock_pb2.Lease
    rounds: int = 0

    async def go_on(self, rounds: int = ROUNDS) -> None:
        for _ in range(rounds):
            self.rounds += 1
            renewed = await self.session.renew(HELD, self.lease.lease_id)
            assert renewed.renew.state == lock_pb2.LEASE_STATE_ACTIVE, renewed
            await self._use(self.server)
            async with self.server.on_own_connection(port=self.port) as newcomer:
                await self._use(newcomer)

    async def _use(self, server: LockServer) -> None:
        name = f"good/{self.rounds % 10}"
        granted = await server.acquire(name, wait_ms=30_000)
        assert granted.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        assert await server.release(name, granted.lease.lease_id) == lock_pb2.RELEASE_OUTCOME_RELEASED
        async with SessionCaller(server) as session:
            result = await session.acquire(name, wait_ms=30_000)
            assert result.acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED, result
            result = await session.release(name, result.acquire.lease.lease_id)
            assert result.release.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED, result


@asynccontextmanager
async def good_client(port: int) -> AsyncIterator[GoodClient]:
    """Yield one that holds its lock; at the exit it must still hold it, with the same token."""
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        server = LockServer(channel)
        async with SessionCaller(server) as session:
            lease = (await session.acquire(HELD, ttl_ms=HELD_TTL_MS)).acquire.lease
            yield GoodClient(server, session, port, lease)
            assert (await server.look(HELD)).current.fencing_token == lease.fencing_token
            assert await server.release(HELD, lease.lease_id) == lock_pb2.RELEASE_OUTCOME_RELEASED


async def answer_to_the_attacker(port: int) -> Mapping[bytes, bytes]:
    """Begin and end a Session from the attackers' address, and return the headers of the answer."""
    async with RawClient(port, source=SOURCE) as client:
        stream_id = client.begin("/redfence.v1.LockService/Session")
        client.send(stream_id, b"", end=True)
        return (await client.closed(stream_id)).headers


def check_refusal(headers: Mapping[bytes, bytes]) -> None:
    """Fail unless the server says that this peer has its part of all commands."""
    details = base64.b64decode(headers[b"grpc-status-details-bin"] + b"==")
    error = rich_error.from_trailing_metadata([("grpc-status-details-bin", details)])
    assert error is not None
    assert error.reason == lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS
    assert error.metadata["scope"] == "peer"


async def test_a_good_client_loses_nothing_and_its_attackers_are_refused(
    commands: CommandProcesses, formed_nodes: FormedNodes, transport: Transport, tmp_path: Path
) -> None:
    """Files and memory of the server come back, and the attackers' address is served again."""
    is_fast = transport is Transport.FAST
    known, metrics_port = tmp_path / "known.json", free_port()
    known.write_text("{}")
    process, address = await commands.start_serve(
        await formed_nodes(3),
        *("--commands-server-max", str(COMMANDS_MAX), "--metrics-listen", f"{HOST}:{metrics_port}"),
        *(("--connections-max", str(CONNECTIONS_MAX)) if is_fast else ()),
    )
    port = int(address.rpartition(":")[2])

    def attack(name: str, seconds: float = _ENDLESS_S) -> CommandProcess:
        words = ("-m", "bench.attackers", name, "--port", str(port), "--seconds", str(seconds))
        path = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
        return commands.start(sys.executable, *words, "--known", str(known), environment=path)

    async def refusals(limit: str) -> float:
        return value(await scrape(metrics_port), "redfence_limit_refusals_total", limit=limit)

    async with good_client(port) as good:
        await good.go_on()
        before = look_at_process(process.pid)
        for name, limit in FLOODS if is_fast else FLOODS[:-1]:
            earlier, attacker = await refusals(limit), attack(name)

            async def is_refused(limit: str = limit, earlier: float = earlier) -> bool:
                return await refusals(limit) > earlier

            await until(is_refused, timeout_s=60)
            await good.go_on()
            if name == "idle_streams":
                check_refusal(await answer_to_the_attacker(port))
            assert attacker.exit_status is None, attacker.stderr
            attacker.kill()
        guesses = attack("guessed_leases", seconds=1)
        await good.go_on()
        assert "0 of 2,000 released it, 0 renewed it" in await guesses.ended()

        async def has_recovered() -> bool:
            now = look_at_process(process.pid)
            more_bytes, more_files = now.rss_bytes - before.rss_bytes, now.fd_count - before.fd_count
            return more_bytes <= KEPT_BYTES_MAX and more_files <= KEPT_FILES_MAX

        await until(has_recovered, timeout_s=60)
        assert (await answer_to_the_attacker(port))[b"grpc-status"] == b"0"
    assert await process.stop() == 0
