"""Nodes that speak TLS themselves and want certificates: servers and commands reach them by `node_tls_*`."""

from __future__ import annotations

from pathlib import Path

import pytest

import redfence
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcesses
from harness.processes.ports import HOST, free_port
from harness.time.eventually import eventually
from redfence_server import config
from redfence_server.embedded.binary import RedisBinary
from redfence_server.errors import ConfigError
from redfence_server.redis_io.dial import DialError, NodeTls, NodeUrl, dial


@pytest.fixture
async def url(
    commands: CommandProcesses, tls_binary: RedisBinary, certificate: Certificate, tmp_path: Path
) -> str:
    """The URL of a durable node that wants a certificate of its authority."""
    port = free_port()
    conf = tmp_path / "node.conf"
    conf.write_text(
        f"port 0\ntls-port {port}\nbind {HOST}\ndir {tmp_path}\ntls-auth-clients yes\n"
        f"tls-cert-file {certificate.certificate}\ntls-key-file {certificate.key}\n"
        f"tls-ca-cert-file {certificate.authority}\n"
        'appendonly yes\nappendfsync always\naof-load-truncated no\nsave ""\nmaxmemory-policy noeviction\n'
    )
    node = commands.start(str(tls_binary.path), str(conf))
    await eventually(lambda: "Ready to accept connections" in node.stdout)
    return f"rediss://{HOST}:{port}"


async def answer(url: str, tls: NodeTls) -> object:
    node = await dial(NodeUrl(url, tls=tls), timeout_ms=2_000)
    try:
        return await node.command("PING")
    finally:
        await node.close()


async def test_each_new_connection_reads_the_files_again(
    url: str, authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    files = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem", authority.file)
    tls = NodeTls(ca=authority.file, cert=files.certificate, key=files.key)
    with pytest.raises(DialError, match=r"node_tls_cert: cannot read .*cert.pem: No such file"):
        await answer(url, tls)
    files.replace_by(other_authority.issue("server.example"))
    with pytest.raises(DialError):
        await answer(url, tls)
    files.replace_by(authority.issue("server.example"))
    assert await answer(url, tls) == b"PONG"
    with pytest.raises(DialError, match="CERTIFICATE_VERIFY_FAILED"):
        await answer(url, NodeTls(ca=other_authority.file, cert=files.certificate, key=files.key))
    with pytest.raises(DialError):
        await answer(url, NodeTls(ca=authority.file))


@pytest.mark.slow
async def test_commands_and_servers_reach_nodes_with_a_client_certificate(
    url: str, commands: CommandProcesses, authority: Authority
) -> None:
    own = authority.issue("server.example")
    flags = ["--node", url, "--node-tls-ca", str(authority.file)]
    flags += ["--node-tls-cert", str(own.certificate), "--node-tls-key", str(own.key)]
    assert "formed" in await commands.start_redfence("cluster", "init", *flags).ended()
    assert "all is well" in await commands.start_redfence("doctor", *flags).ended()
    resize = commands.start_redfence("cluster", "resize", "--to", "rediss://127.0.0.1:1", *flags)
    assert await resize.wait() == 2
    # The node above is well; without the files it would be missed first.
    assert "the new node 0 (127.0.0.1:1): " in resize.stderr
    server = commands.start_redfence("serve", "--listen", f"{HOST}:0", *flags)
    address = (await server.wait_for_line(r"^redfence serving on (\S+)", timeout_s=20))[1]
    async with redfence.AsyncClient(address) as client, client.lock("orders/42", ttl=10) as lease:
        assert lease.token


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"node_tls_ca": "a"}, "node_tls_ca: no node's URL starts with rediss://"),
        ({"node_tls_cert": "a", "node_tls_key": "a"}, "node_tls_cert: no node's URL starts with rediss://"),
        ({"nodes": "rediss://a", "node_tls_cert": "a"}, "node_tls_key: it and node_tls_cert belong together"),
        ({"nodes": "rediss://a", "node_tls_key": "a"}, "node_tls_key: it and node_tls_cert belong together"),
    ],
)
def test_files_that_no_connection_would_use_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config.load({"nodes": "redis://a", **settings})
