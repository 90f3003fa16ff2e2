"""The SDK on real servers over real nodes, while a server dies, freezes or drains."""

from __future__ import annotations

import asyncio
import signal
import sys
from contextlib import suppress
from typing import Any, Self

import pytest

import redfence
from harness.load.threaded import Threaded
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.servers import FormedNodes, until, until_no_locks
from redfence._core import probe

_FAULTS = [signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM]

# A signal's handler runs where the event loop does, and between two of its steps.
_HANGABLE = """
import signal, sys, time
from redfence._cli.main import main
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(3600))
sys.exit(main())
"""


class _Clients:
    """A client of each kind, within `async with`; both may wait for ever for the lock "contended"."""

    def __init__(self, *addresses: str, options: redfence.ClientOptions | None = None) -> None:
        blocking = redfence.Client(*addresses, options=options)
        asynchronous = redfence.AsyncClient(*addresses, options=options)
        self.both: list[Any] = [asynchronous, Threaded(blocking)]
        self._sessions = asynchronous._session, blocking._session
        self._tasks: list[asyncio.Task[int]] = []

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_error: object) -> None:
        for client in self.both:
            await client.close()

    def wait(self) -> None:
        """Begin to wait."""
        self._tasks = [asyncio.create_task(self._take_turn(client)) for client in self.both]

    def lease_ids(self) -> set[str]:
        """Return the secrets with which they wait at a server; "" for one that does not."""
        return {session.waiting_lease_id("contended") for session in self._sessions}

    async def check_that_both_are_granted(self, *, above: int) -> None:
        """Check that each gets its turn, with a greater token."""
        tokens = sorted(await asyncio.wait_for(asyncio.gather(*self._tasks), 10))
        assert above < tokens[0] < tokens[1]

    async def _take_turn(self, client: Any) -> int:
        async with client.lock("contended", ttl=3, wait=None) as lease:
            return int(lease.token)


async def _until_both_wait(
    client: redfence.AsyncClient, *, timeout_s: float = 5.0, for_s: float = 0.0
) -> None:
    """Return once both wait at the client's server, for so long already."""

    async def both() -> bool:
        queue = (await client.get_lock("contended")).queue
        return len(queue) == 2 and all(each.waited >= for_s for each in queue)

    await until(both, timeout_s=timeout_s)


@pytest.mark.slow
@pytest.mark.parametrize("fault", _FAULTS, ids=lambda fault: str(fault.name))
async def test_leases_and_waits_for_ever_survive_the_fault_of_one_of_two_servers(
    formed_nodes: FormedNodes, commands: CommandProcesses, fault: signal.Signals
) -> None:
    """The other server renews the leases of both clients, and their waits keep their lease ids there.

    The waiting clients hold nothing that would tell them of a frozen server. They leave it after 15 s.
    """
    nodes = await formed_nodes(3)
    first, first_address = await commands.start_serve(nodes)
    _, second_address = await commands.start_serve(nodes)
    async with (
        redfence.AsyncClient(first_address) as at_first,
        redfence.AsyncClient(second_address) as at_second,
        _Clients(first_address, second_address) as holding,
        _Clients(first_address, second_address) as waiting,
    ):
        contended = await at_second.acquire("contended", ttl=60)
        held = [await client.acquire(f"held/{number}", ttl=3) for number, client in enumerate(holding.both)]
        waiting.wait()
        await _until_both_wait(at_first)
        lease_ids = waiting.lease_ids()
        assert len(lease_ids - {""}) == 2
        first.send_signal(fault)
        await asyncio.sleep(4)
        await _until_both_wait(at_second, timeout_s=20 if fault is signal.SIGSTOP else 5)
        assert waiting.lease_ids() == lease_ids
        for lease in held:
            lease.raise_if_lost()
            assert (await at_second.check_token(lease.resource, lease.token)).live
            assert await lease.release()
        if fault is signal.SIGTERM:
            assert await first.wait() == 0
        assert await contended.release()
        await waiting.check_that_both_are_granted(above=contended.token)
    with suppress(ProcessLookupError):
        first.send_signal(signal.SIGCONT)
    await until_no_locks(nodes)


@pytest.mark.slow
async def test_waits_for_ever_leave_a_server_that_hangs_while_its_grpc_answers_pings(
    formed_nodes: FormedNodes, commands: CommandProcesses, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server's event loop stands still and its connections are well, so it owes an echo."""
    monkeypatch.setattr(probe, "PROBE_AFTER_MS", 500)
    # A client that is owed no echo stays, also on a machine that stands still for a while.
    options = redfence.ClientOptions(rpc_timeout=2)
    nodes = await formed_nodes(3)
    serve = ("serve", "--listen", "127.0.0.1:0", *node_flags(nodes))
    first = commands.start(sys.executable, "-c", _HANGABLE, *serve)
    first_address = (await first.wait_for_line(r"serving on ([\d.:]+)", timeout_s=20))[1]
    _, second_address = await commands.start_serve(nodes)
    async with (
        redfence.AsyncClient(first_address) as at_first,
        redfence.AsyncClient(second_address) as at_second,
        _Clients(first_address, second_address, options=options) as waiting,
    ):
        contended = await at_second.acquire("contended", ttl=60)
        waiting.wait()
        await _until_both_wait(at_first)
        lease_ids = waiting.lease_ids()
        assert len(lease_ids - {""}) == 2
        # Several echoes long: a client that leaves for want of one waits anew, or elsewhere.
        await _until_both_wait(at_first, for_s=3, timeout_s=6)
        first.send_signal(signal.SIGUSR1)
        await _until_both_wait(at_second, timeout_s=10)
        assert waiting.lease_ids() == lease_ids
        assert await contended.release()
        await waiting.check_that_both_are_granted(above=contended.token)
    first.kill()
    await until_no_locks(nodes)
