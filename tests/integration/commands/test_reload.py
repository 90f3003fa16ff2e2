"""SIGHUP to `redfence serve`, with one process and with several: good files, bad files, the log level.

SIGHUP to `redfence storage` and to `redfence dev`: their files of TLS and of access.
"""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import sys
from pathlib import Path
from typing import Any, Self

import grpc
import pytest

import redfence
from harness.load.failures import Failure, failure_of
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import DEV, DEV_READY, CommandProcess, CommandProcesses, node_flags
from harness.processes.ports import HOST
from harness.processes.process_look import is_alive
from harness.processes.servers import FormedNodes, LockServer, acquire_request
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_server.access.tokens import digest_of
from redfence_storage.client import AsyncStorageClient

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


async def hang_up(process: CommandProcess, event: str, *, more: int) -> None:
    """Send SIGHUP, and return once the log has so many more of these events."""
    expected = process.stderr.count(f'"event": "{event}"') + more
    process.send_signal(signal.SIGHUP)
    await eventually(
        lambda: process.stderr.count(f'"event": "{event}"') == expected, timeout_s=20, interval_s=0.02
    )


def tls_flags(certificate: Certificate) -> tuple[str, ...]:
    return ("--tls-cert", str(certificate.certificate), "--tls-key", str(certificate.key))


async def test_sighup_lets_the_storage_look_at_its_certificate(
    commands: CommandProcesses, certificate: Certificate, authority: Authority
) -> None:
    """No connection comes meanwhile. Without TLS and a policy there is nothing to look at, and it goes on."""
    options = ("storage", "--db", "storage.db", "--listen", f"{HOST}:0")
    plain = commands.start_redfence(*options)
    await plain.wait_for_line("ready on", timeout_s=30)
    plain.send_signal(signal.SIGHUP)
    process = commands.start_redfence(*options, *tls_flags(certificate))
    target = (await process.wait_for_line(r"ready on (\S+)", timeout_s=30))[1]
    certificate.certificate.write_text("no certificate")
    for _ in range(2):
        await hang_up(process, "certificate_refused", more=1)
    assert f"tls_cert: {certificate.certificate} has no certificate in PEM" in process.stderr
    certificate.replace_by(authority.issue(HOST))
    await hang_up(process, "certificate_reloaded", more=1)
    async with AsyncStorageClient(target, tls=redfence.Tls(ca=authority.file)) as storage:
        await storage.fence("orders/42", token=1)
    assert await process.stop(timeout_s=20) == 0
    assert await plain.stop(timeout_s=20) == 0


async def test_sighup_lets_dev_and_its_storage_read_their_files_again(
    commands: CommandProcesses, certificate: Certificate, authority: Authority, tmp_path: Path
) -> None:
    """Both log each event. New rules count at both, and bad files at neither."""
    rules, tokens = tmp_path / "policy.toml", tmp_path / "tokens.toml"
    both = policy("a/").replace('"acquire"', '"acquire", "storage"')
    rules.write_text(both)
    tokens.write_text(f'[[tokens]]\nname = "billing"\nsha256 = "{digest_of("secret-of-billing").hex()}"')
    dev = commands.start_redfence(
        *(*DEV, *tls_flags(certificate), "--log-level", "info"),
        *("--policy-file", str(rules), "--tokens-file", str(tokens)),
    )
    ready = await dev.wait_for_line(DEV_READY, timeout_s=30)
    reached: dict[str, Any] = {"tls": redfence.Tls(ca=authority.file), "token": "secret-of-billing"}

    async def works_on(resource: str) -> None:
        async with (
            redfence.AsyncClient(ready[1], **reached) as client,
            AsyncStorageClient(ready[2], **reached) as storage,
            client.lock(resource, ttl=10, wait=0) as lease,
        ):
            await storage.fence(resource, token=lease)

    await works_on("a/1")
    rules.write_text("rules = 1")
    certificate.certificate.write_text("no certificate")
    await hang_up(dev, "certificate_refused", more=2)
    await eventually(lambda: dev.stderr.count('"event": "access_not_reloaded"') == 2, timeout_s=20)
    await works_on("a/2")
    rules.write_text(both.replace("a/", "b/"))
    certificate.replace_by(authority.issue(HOST))
    await hang_up(dev, "access_reloaded", more=2)
    assert dev.stderr.count('"event": "certificate_reloaded"') == 2
    await works_on("b/1")
    with pytest.raises(redfence.AccessDeniedError):
        await works_on("a/3")
    assert await dev.stop(timeout_s=20) == 0


# The child of this process runs in a terminal of its own, which closes when this process ends.
TERMINAL = (sys.executable, "-c", "import pty, sys; pty.spawn(['sh', '-c', sys.argv[1]])")


class DevInTerminal:
    """A `redfence dev` that a shell has started in a terminal; its standard output is a file."""

    def __init__(self, commands: CommandProcesses, output: Path, *words: str) -> None:
        command = shlex.join([*words, str(Path(sys.executable).with_name("redfence")), *DEV])
        # The second command keeps the shell from becoming dev.
        self._terminal = commands.start(*TERMINAL, f"{command} > {shlex.quote(str(output))}; true")
        self._output = output

    async def __aenter__(self) -> Self:
        await eventually(
            lambda: self._output.exists() and "stops all\n" in self._output.read_text(), timeout_s=30
        )
        ready = re.search(DEV_READY, self._output.read_text(), re.MULTILINE)
        assert ready is not None
        self._folder = Path(ready[4])
        self.pid = child_of(child_of(self._terminal.pid))
        return self

    async def __aexit__(self, *_: object) -> None:
        if is_alive(self.pid):
            os.kill(self.pid, signal.SIGKILL)

    def close_terminal(self) -> None:
        self._terminal.kill()

    async def gone(self) -> None:
        """Return once the process and its temporary folder are gone."""
        await eventually(
            lambda: not self._folder.exists() and not is_alive(self.pid), timeout_s=20, interval_s=0.05
        )


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text())


async def test_a_closed_terminal_ends_dev_and_leaves_no_file(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """SIGHUP comes then too. A dev that only reloaded would keep its ports, and no terminal would show it.

    With `info` it logs its end to the closed terminal.
    """
    words = ("env", "REDFENCE_LOG_LEVEL=info")
    async with DevInTerminal(commands, tmp_path / "output", *words) as dev:
        dev.close_terminal()
        await dev.gone()


async def test_after_nohup_a_closed_terminal_does_not_end_dev(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """It reloads then. A reload opens the audit log anew, so its file comes back."""
    audit = tmp_path / "audit.jsonl"
    words = ("env", f"REDFENCE_AUDIT_LOG={audit}", "nohup")
    async with DevInTerminal(commands, tmp_path / "output", *words) as dev:
        audit.unlink()
        dev.close_terminal()
        await eventually(audit.exists, timeout_s=20, interval_s=0.05)
        os.kill(dev.pid, signal.SIGTERM)
        await dev.gone()
