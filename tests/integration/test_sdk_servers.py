"""The SDK and its commands on real servers over real nodes, while a server dies, freezes or drains."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, Self

import pytest

import redfence
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import FormedNodes, until, until_no_locks
from harness.time.eventually import eventually
from redfence._core import probe


class StartServer(Protocol):
    """Starts `redfence serve` over formed nodes, with flags; gives the process and its address."""

    async def __call__(self, nodes: Sequence[RedisNode], *flags: str) -> tuple[CommandProcess, str]:
        """Return when it serves."""
        ...


_FAULTS = [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]


# A signal's handler runs where the event loop does, and between two of its steps.
_HANGABLE = """
import signal, sys, time
from redfence._cli.main import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
sys.exit(main())
"""


def _serve_arguments(nodes: Sequence[RedisNode]) -> list[str]:
    flags = [flag for node in nodes for flag in ("--node", node.url)]
    return ["serve", "--listen", "127.0.0.1:0", *flags]


@pytest.fixture
def start_server(commands: CommandProcesses) -> StartServer:
    """Starts servers that end with the test."""

    async def start(nodes: Sequence[RedisNode], *flags: str) -> tuple[CommandProcess, str]:
        server = commands.start_redfence(*_serve_arguments(nodes), *flags)
        return server, (await server.wait_for_line(r"serving on ([\d.:]+)", timeout_s=20))[1]

    return start


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: str(fault.name))
async def test_a_lease_and_a_waiter_survive_the_fault_of_one_of_two_servers(
    formed_nodes: FormedNodes, start_server: StartServer, fault: signal.Signals
) -> None:
    """The lease is renewed and the waiter is granted at the other server; no lock stays behind for longer than its ttl."""
    nodes = await formed_nodes(3)
    (first, first_address), (_, second_address) = await start_server(nodes), await start_server(nodes)
    async with (
        redfence.AsyncClient(first_address, second_address) as client,
        redfence.AsyncClient(second_address) as other,
    ):
        async with client.lock("held", ttl=3) as lease:
            contended = await other.acquire("contended", ttl=10)
            waiting = asyncio.create_task(client.acquire("contended", ttl=3))
            await eventually(lambda: not waiting.done() and lease.remaining() < 2.9)
            first.send_signal(fault)
            await asyncio.sleep(4)
            lease.raise_if_lost()
            assert (await other.check_token("held", lease.token)).live
            assert await contended.release()
            granted = await asyncio.wait_for(waiting, 10)
            assert granted.token > contended.token
            assert await granted.release()
        assert (await other.get_lock("held")).current is None
    with suppress(ProcessLookupError):
        first.send_signal(signal.SIGCONT)
    await until_no_locks(nodes)


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: str(fault.name))
async def test_a_threads_lease_survives_the_fault_of_one_of_two_servers(
    formed_nodes: FormedNodes, start_server: StartServer, fault: signal.Signals
) -> None:
    """The same for the client for threads."""
    nodes = await formed_nodes(3)
    (first, first_address), (_, second_address) = await start_server(nodes), await start_server(nodes)

    def hold() -> None:
        with redfence.Client(first_address, second_address) as client, client.lock("held", ttl=3) as lease:
            first.send_signal(fault)
            assert not lease.lost.wait(4)
            assert client.check_token("held", lease.token).live

    await asyncio.to_thread(hold)
    await until_no_locks(nodes)


class _Waiting:
    """A client of each kind, waiting for ever for the lock "contended" and holding nothing that would tell it of a silent server."""

    def __init__(self, *addresses: str, options: redfence.ClientOptions | None = None) -> None:
        self._async_client = redfence.AsyncClient(*addresses, options=options)
        self._client = redfence.Client(*addresses, options=options)
        self._tasks: list[asyncio.Task[int]] = []

    async def __aenter__(self) -> Self:
        self._tasks = [
            asyncio.create_task(self._take_turn()),
            asyncio.create_task(asyncio.to_thread(self._take_turn_in_thread)),
        ]
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self._async_client.close()
        await asyncio.to_thread(self._client.close)

    def lease_ids(self) -> set[str]:
        """The secrets with which they wait at a server; "" for one that does not."""
        sessions = self._async_client._session, self._client._session
        return {session.waiting_lease_id("contended") for session in sessions}

    async def tokens(self) -> list[int]:
        """Return the tokens they were granted, one after the other."""
        return sorted(await asyncio.wait_for(asyncio.gather(*self._tasks), 10))

    async def _take_turn(self) -> int:
        async with self._async_client.lock("contended", ttl=3, wait=None) as lease:
            return lease.token

    def _take_turn_in_thread(self) -> int:
        with self._client.lock("contended", ttl=3, wait=None) as lease:
            return lease.token


async def _until_both_wait(client: redfence.AsyncClient, *, timeout_s: float) -> None:
    async def both() -> bool:
        return (await client.get_lock("contended")).waiters == 2

    await until(both, timeout_s=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: str(fault.name))
async def test_who_waits_for_ever_goes_on_at_the_other_server_with_the_same_lease_id(
    formed_nodes: FormedNodes, start_server: StartServer, fault: signal.Signals
) -> None:
    """At once if the server drains or dies; if it is frozen, when it has not answered a ping: 15 s, however long the wait."""
    nodes = await formed_nodes(3)
    (first, first_address), (_, second_address) = await start_server(nodes), await start_server(nodes)
    async with (
        redfence.AsyncClient(first_address) as at_first,
        redfence.AsyncClient(second_address) as at_second,
    ):
        contended = await at_second.acquire("contended", ttl=60)
        async with _Waiting(first_address, second_address) as waiting:
            await _until_both_wait(at_first, timeout_s=5)
            lease_ids = waiting.lease_ids()
            assert len(lease_ids - {""}) == 2
            first.send_signal(fault)
            await _until_both_wait(at_second, timeout_s=20 if fault is signal.SIGSTOP else 5)
            assert waiting.lease_ids() == lease_ids
            if fault is signal.SIGTERM:
                assert await first.wait() == 0
            assert await contended.release()
            tokens = await waiting.tokens()
            assert contended.token < tokens[0] < tokens[1]
    with suppress(ProcessLookupError):
        first.send_signal(signal.SIGCONT)
    await until_no_locks(nodes)


@pytest.mark.slow
async def test_who_waits_for_ever_leaves_a_server_that_hangs_while_its_grpc_answers_pings(
    formed_nodes: FormedNodes, commands: CommandProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop stands still and its connections are well: it owes an echo, and is left for the other one without losing the lease id."""
    monkeypatch.setattr(probe, "PROBE_AFTER_MS", 500)
    # Whoever is owed no echo stays, also on a machine that stands still for a while.
    options = redfence.ClientOptions(rpc_timeout_ms=2000)
    nodes = await formed_nodes(3)
    (first, first_address), (_, second_address) = [await _start_hangable(commands, nodes) for _ in range(2)]
    async with (
        redfence.AsyncClient(first_address) as at_first,
        redfence.AsyncClient(second_address) as at_second,
    ):
        contended = await at_second.acquire("contended", ttl=60)
        async with _Waiting(first_address, second_address, options=options) as waiting:
            await _until_both_wait(at_first, timeout_s=5)
            lease_ids = waiting.lease_ids()
            assert len(lease_ids - {""}) == 2
            await _until_both_have_waited(at_first, 3)
            first.send_signal(signal.SIGUSR1)
            await _until_both_wait(at_second, timeout_s=10)
            assert waiting.lease_ids() == lease_ids
            assert await contended.release()
            tokens = await waiting.tokens()
            assert contended.token < tokens[0] < tokens[1]
    first.kill()
    await until_no_locks(nodes)


async def _until_both_have_waited(client: redfence.AsyncClient, seconds: float) -> None:
    """Several echoes long: whoever leaves for want of one waits anew, or elsewhere."""

    async def both() -> bool:
        queue = (await client.get_lock("contended")).queue
        return len(queue) == 2 and all(each.waited >= seconds for each in queue)

    await until(both, timeout_s=2 * seconds)


async def _start_hangable(
    commands: CommandProcesses, nodes: Sequence[RedisNode]
) -> tuple[CommandProcess, str]:
    """Start `redfence serve`; SIGUSR1 makes its event loop hang, while the threads of gRPC run on."""
    server = commands.start(sys.executable, "-c", _HANGABLE, *_serve_arguments(nodes))
    return server, (await server.wait_for_line(r"serving on ([\d.:]+)", timeout_s=20))[1]


@pytest.mark.slow
async def test_without_a_quorum_calls_fail_at_once_and_work_again_after_it_is_back(
    fresh_formed_nodes: FormedNodes, start_server: StartServer
) -> None:
    """Two of three nodes frozen: UnavailableError with the reason, long before the rpc timeout; then everything as before."""
    nodes = await fresh_formed_nodes(3)
    _, address = await start_server(nodes, "--node-timeout-ms", "500")
    async with redfence.AsyncClient(address) as client:
        assert await (await client.acquire("r", ttl=10)).release()
        for node in nodes[:2]:
            node.pause()
        async with asyncio.timeout(3):
            with pytest.raises(redfence.UnavailableError) as refused:
                await client.acquire("r", ttl=10)
        assert refused.value.error_reason == "QUORUM_UNAVAILABLE"
        for node in nodes[:2]:
            node.resume()

        async def again() -> bool:
            try:
                return await (await client.acquire("r", ttl=10, wait=5)).release()
            except redfence.UnavailableError:
                return False

        async with asyncio.timeout(10):
            while not await again():  # noqa: ASYNC110  (another process sets no event)
                await asyncio.sleep(0.05)


@pytest.mark.slow
async def test_commands_under_one_lock_run_one_after_the_other_with_growing_tokens(
    formed_nodes: FormedNodes, start_server: StartServer, commands: CommandProcesses, tmp_path: Path
) -> None:
    """Six `redfence lock` at once: each leaves its token before and after, undisturbed by the others."""
    _, address = await start_server(await formed_nodes(3))
    log = tmp_path / "log"
    script = f"echo $REDFENCE_TOKEN >> {log}; sleep 0.05; echo $REDFENCE_TOKEN >> {log}"
    runs = [
        commands.start_redfence("lock", "nightly", "--server", address, "--", "sh", "-c", script)
        for _ in range(6)
    ]
    assert [await run.wait(timeout_s=30) for run in runs] == [0] * 6
    tokens = [int(line) for line in log.read_text().split()]
    assert tokens[::2] == tokens[1::2]
    assert tokens[::2] == sorted(set(tokens))
