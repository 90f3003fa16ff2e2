"""SIGHUP to `redfence serve`, with one process and with several: good files, bad files, the log level."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import grpc
import pytest

from harness.load.failures import Failure, failure_of
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.servers import FormedNodes, LockServer, acquire_request
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_server.access.tokens import digest_of

pytestmark = pytest.mark.slow

BILLING = (("authorization", "Bearer secret-of-billing"),)


def policy(prefix: str) -> str:
    return f'[[rules]]\nprincipals = ["token:billing"]\nverbs = ["acquire"]\nprefix = "{prefix}"\n'


@pytest.mark.parametrize("process_count", [1, 2])
async def test_sighup_takes_good_files_and_keeps_the_rules_at_bad_ones(
    commands: CommandProcesses, formed_nodes: FormedNodes, tmp_path: Path, process_count: int
) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("policy", "tokens", "config")}
    files["policy"].write_text(policy("a/"))
    files["tokens"].write_text(
        f'[[tokens]]\nname = "billing"\nsha256 = "{digest_of("secret-of-billing").hex()}"'
    )
    files["config"].write_text('log_level = "error"')
    process = commands.start_redfence(
        "serve",
        *node_flags(await formed_nodes(3)),
        *("--listen", "127.0.0.1:0", "--processes", str(process_count), "--config", str(files["config"])),
        *("--policy-file", str(files["policy"]), "--tokens-file", str(files["tokens"])),
    )
    address = (await process.wait_for_line(r"serving on ([\d.:]+)", timeout_s=30))[1]
    assert process.stderr == ""

    async def hang_up(event: str, *, level: str) -> None:
        files["config"].write_text(level)
        before = process.stderr.count(f'"event": "{event}"')
        process.send_signal(signal.SIGHUP)
        await eventually(
            lambda: process.stderr.count(f'"event": "{event}"') == before + process_count,
            timeout_s=20,
            interval_s=0.02,
        )

    async with grpc.aio.insecure_channel(address) as channel:
        server = LockServer(channel)

        async def reason(resource: str) -> lock_pb2.ErrorReason.ValueType:
            call = server.locks.Acquire(acquire_request(resource), metadata=BILLING)
            return (await failure_of(call)).reason

        await server.locks.Acquire(acquire_request("a/1"), metadata=BILLING)
        files["policy"].write_text("rules = 1")
        await hang_up("access_not_reloaded", level='log_level = "error"')
        assert await reason("b/1") == lock_pb2.ERROR_REASON_PERMISSION_DENIED
        files["policy"].write_text(policy("b/"))
        await hang_up("access_reloaded", level='log_level = "info"')
        await server.locks.Acquire(acquire_request("b/1"), metadata=BILLING)
        assert await reason("a/2") == lock_pb2.ERROR_REASON_PERMISSION_DENIED
        await hang_up("access_reloaded", level='log_level = "info"\nheartbeat_interval_ms = 700')
        assert '"settings": ["heartbeat_interval_ms"]' in process.stderr, process.stderr
        await hang_up("access_reloaded", level='log_level = "debug"')
        assert '"settings": ["log_level"]' in process.stderr, process.stderr
        # Wrong settings keep the earlier ones; the rules are read all the same.
        await hang_up("access_reloaded", level="log_level = 7")
        assert process.stderr.count('"event": "settings_not_reloaded"') == 1
    assert await process.stop(timeout_s=20) == 0
    assert "Traceback" not in process.stderr


async def to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


@pytest.mark.parametrize("process_count", [1, 2])
async def test_sighup_takes_new_limits_and_keeps_them_all_at_a_bad_value(
    commands: CommandProcesses, formed_nodes: FormedNodes, tmp_path: Path, process_count: int
) -> None:
    """A higher limit lets the next caller wait, and a lower one refuses it; waits that have begun go on."""
    file = tmp_path / "config.toml"
    file.write_text("waiters_per_resource_max = 1")
    process, address = await commands.start_serve(
        await formed_nodes(3), "--processes", str(process_count), "--config", str(file)
    )

    async def hang_up(event: str, text: str) -> None:
        file.write_text(text)
        process.send_signal(signal.SIGHUP)
        expected = process_count if event == "settings_reloaded" else 1
        await eventually(
            lambda: process.stderr.count(f'"event": "{event}"') == expected, timeout_s=20, interval_s=0.02
        )

    async with grpc.aio.insecure_channel(address) as channel:
        server = LockServer(channel)
        await server.acquire("a")
        waits: list[asyncio.Task[lock_pb2.AcquireResponse]] = []

        async def limit_after(count: int) -> str:
            """Let so many acquires wait; return the limit that the next one is told."""
            while len(waits) < count:
                waits.append(asyncio.create_task(server.acquire("a", wait_ms=60_000)))
                await server.until_waiting("a", count=len(waits))
            return (await failure_of(server.acquire("a", wait_ms=60_000))).metadata["limit"]

        assert await limit_after(1) == "1"
        await hang_up("settings_reloaded", "waiters_per_resource_max = 3\ncommands_max = 1")
        assert await limit_after(3) == "3"
        await hang_up("settings_not_reloaded", "waiters_per_resource_max = 9\ncommands_max = 0")
        assert await limit_after(3) == "3"
        session = server.locks.Session(timeout=20)
        message = lock_pb2.SessionRequest()
        for number in (1, 2):
            message.commands.add(id=number, acquire=acquire_request(f"b/{number}"))
        await session.write(message)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(session)
        assert Failure.of_call(caught.value).reason == lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
    assert await process.stop(timeout_s=20) == 0
