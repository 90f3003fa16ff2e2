"""TLS of the commands as real processes: several server processes, `dev` with its storage, the console."""

from __future__ import annotations

import pytest

import redfence
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import DEV, DEV_READY, CommandProcesses
from harness.processes.servers import FormedNodes
from redfence_server.http2.settings import Transport
from redfence_storage.client import AsyncStorageClient

pytestmark = pytest.mark.slow


def server_flags(certificate: Certificate) -> list[str]:
    files = {"cert": certificate.certificate, "key": certificate.key, "client-ca": certificate.authority}
    return [word for name, file in files.items() for word in (f"--tls-{name}", str(file))]


@pytest.mark.parametrize("transport", list(Transport))
async def test_every_process_of_a_server_speaks_tls_and_the_console_reaches_it(
    commands: CommandProcesses,
    formed_nodes: FormedNodes,
    certificate: Certificate,
    authority: Authority,
    transport: Transport,
) -> None:
    """The kernel spreads the connections, so of a dozen each process gets some."""
    flags = [*server_flags(certificate), "--transport", transport, "--processes", "2"]
    server, address = await commands.start_serve(await formed_nodes(3), *flags)
    own = authority.issue("caller.example")
    files = {"CA": own.authority, "CERT": own.certificate, "KEY": own.key}
    environment = {f"REDFENCE_TLS_{name}": str(file) for name, file in files.items()}
    given = [word for name, file in files.items() for word in (f"--tls-{name.lower()}", str(file))]

    status = ["cluster", "status", "--server", address]
    assert "ready" in await commands.start_redfence(*status, *given).ended()
    lock = commands.start_redfence("lock", "--server", address, "a", "true", environment=environment)
    await lock.ended()
    refused = await commands.start_redfence(*status).ended(status=2)
    assert "REDFENCE_TLS_CA" in refused
    unread = commands.start_redfence("lock", "--server", address, "--tls-ca", "/none", "a", "true")
    assert "tls ca: cannot read /none" in await unread.ended(status=2)
    tls = redfence.Tls(ca=own.authority, cert=own.certificate, key=own.key)
    for _ in range(12):
        async with redfence.AsyncClient(address, tls=tls) as client:
            assert (await client.cluster_status()).ready
    assert await server.stop() == 0
    # gRPC's core writes a line of its own about the handshake that failed, unless it is told not to.
    assert all(line.startswith("{") for line in server.stderr.splitlines()), server.stderr


async def test_dev_and_its_storage_speak_tls(
    commands: CommandProcesses, certificate: Certificate, authority: Authority
) -> None:
    process = commands.start_redfence(*DEV, *server_flags(certificate))
    ready = await process.wait_for_line(DEV_READY, timeout_s=30)
    own = authority.issue("caller.example")
    tls = redfence.Tls(ca=own.authority, cert=own.certificate, key=own.key)
    async with (
        redfence.AsyncClient(ready[1], tls=tls) as client,
        AsyncStorageClient(ready[2], tls=tls) as storage,
        client.lock("orders/42", ttl=10) as lease,
    ):
        assert (await storage.fence("orders/42", token=lease)).highest_token == lease.token
        async with AsyncStorageClient(ready[2]) as stranger:
            with pytest.raises(redfence.UnavailableError):
                await stranger.fence("orders/42", token=lease)
    assert await process.stop() == 0
    # The storage must not write the lines of gRPC's core, either.
    assert all(line.startswith("{") for line in process.stderr.splitlines()), process.stderr


async def test_commands_refuse_an_open_port_without_tls(commands: CommandProcesses) -> None:
    """Each says how to go on."""
    for command in (
        ("serve", "--node", "redis://127.0.0.1:1", "--listen", "0.0.0.0:0"),
        ("serve", "--processes", "2", "--node", "redis://127.0.0.1:1", "--listen", "0.0.0.0:0"),
        ("storage", "--db", "storage.db", "--listen", "0.0.0.0:0"),
        (*DEV[:2], "0.0.0.0:0", *DEV[3:]),
    ):
        said = await commands.start_redfence(*command).ended(status=2)
        assert "is open to other machines, without TLS; set tls_cert and tls_key" in said
    dev = commands.start_redfence(*DEV[:2], "0.0.0.0:0", *DEV[3:], "--insecure")
    await dev.wait_for_line("^redfence ready", timeout_s=30)
    assert await dev.stop() == 0


async def test_the_storage_refuses_files_that_do_not_fit(
    commands: CommandProcesses, certificate: Certificate
) -> None:
    for flags, reason in (
        (["--tls-cert", str(certificate.certificate)], "--tls-cert and --tls-key belong together"),
        (["--tls-client-ca", str(certificate.authority)], "--tls-client-ca needs TLS"),
        (["--tls-cert", "/none", "--tls-key", "/none"], "tls_cert: cannot read /none"),
    ):
        process = commands.start_redfence("storage", "--db", "storage.db", *flags)
        assert reason in await process.ended(status=2)
