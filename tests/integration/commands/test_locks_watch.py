"""`redfence locks watch` beside two real servers, over both transports, and `redfence sessions list`."""

from __future__ import annotations

import json
import signal
from typing import Any

import pytest

import redfence
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.ports import HOST, free_port
from harness.processes.servers import FormedNodes
from redfence_server.http2.settings import Transport

pytestmark = pytest.mark.slow


async def start(commands: CommandProcesses, flags: list[str]) -> tuple[CommandProcess, str]:
    address = f"{HOST}:{free_port()}"
    process = commands.start_redfence("serve", *flags, "--listen", address)
    await process.wait_for_line("^redfence serving on", timeout_s=30)
    return process, address


@pytest.mark.parametrize("transport", list(Transport))
async def test_an_operator_sees_at_one_server_what_happens_at_another(
    formed_nodes: FormedNodes, commands: CommandProcesses, transport: Transport
) -> None:
    """A holder that stands still, a release, a forced release, the death of the server, and Ctrl-C."""
    flags = [*node_flags(await formed_nodes(3)), "--transport", transport]
    (_, there), (watched, here) = await start(commands, flags), await start(commands, flags)
    at = ("--server", here, "--server", there)
    watch = commands.start_redfence("locks", "watch", "jobs/", "--interval", "200ms", "-o", "json", *at)

    async def told(kind: str, name: str, token: int | None = None) -> dict[str, Any]:
        pattern = f'"kind": "{kind}", "resource": "{name}", "token": {token or ""}'
        line = (await watch.wait_for_line(pattern, timeout_s=15)).string
        event: dict[str, Any] = json.loads(line)
        return event

    async with redfence.AsyncAdminClient(there) as client, client.lock("jobs/0", ttl=60) as first:
        await told("held", "jobs/0", first.token)
    options = ("--ttl", "2s", "--lock-delay", "60s", "--server", there)
    holder = commands.start_redfence("lock", "jobs/1", *options, "--", "sleep", "60")
    acquired = await told("acquired", "jobs/1")
    assert 0 < acquired["remaining"] <= 2.0, "it is without the lock delay"
    assert acquired["time"][-6:] == "+00:00"
    holder.send_signal(signal.SIGSTOP)
    assert (await told("expired", "jobs/1", acquired["token"]))["remaining"] is None
    holder.send_signal(signal.SIGKILL)

    async with redfence.AsyncAdminClient(there) as client:
        lease = await client.acquire("jobs/2", ttl=30)
        await told("acquired", "jobs/2", lease.token)
        await lease.release()
        await told("released", "jobs/2", lease.token)
        stuck = await client.acquire("jobs/3", ttl=30)
        await told("acquired", "jobs/3", stuck.token)
        await client.force_release("jobs/3", stuck.token)
        await told("forced", "jobs/3", stuck.token)
        kept = await client.acquire("jobs/4", ttl=60)
        await told("acquired", "jobs/4", kept.token)

        sessions = commands.start_redfence("sessions", "list", "--server", here)
        assert [line.split()[1] for line in (await sessions.ended()).splitlines()] == [
            "KIND",
            "session",
            "watch",
            "session",
        ]
        shown = commands.start_redfence("sessions", "list", "-o", "json", "--server", here)
        assert json.loads((await shown.ended()).splitlines()[1])["kind"] == "watch"

        watched.send_signal(signal.SIGKILL)
        await told("held", "jobs/4", kept.token)
        assert "the connection broke; the watch goes on" in watch.stderr
        last = await client.acquire("jobs/5", ttl=60)
        await told("acquired", "jobs/5", last.token)
        watch.send_signal(signal.SIGINT)
        await watch.ended(status=130)
        assert len(watch.stderr.splitlines()) == 1


async def test_a_watch_without_any_server_left_ends_with_a_message(
    formed_nodes: FormedNodes, commands: CommandProcesses
) -> None:
    server, address = await start(commands, node_flags(await formed_nodes(3)))
    watch = commands.start_redfence("locks", "watch", "--interval", "200ms", "--server", address)
    holder = commands.start_redfence(
        "lock", "jobs/1", "--ttl", "5s", "--server", address, "--", "sleep", "60"
    )
    line = (await watch.wait_for_line("jobs/1")).string.split()
    assert line[1] in {"held", "acquired"}
    assert line[3] == "jobs/1"
    holder.send_signal(signal.SIGKILL)
    server.send_signal(signal.SIGKILL)
    await watch.ended(status=1)
    assert f"{address} refused the connection" in watch.stderr
