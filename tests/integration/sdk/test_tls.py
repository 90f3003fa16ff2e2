"""The clients over TLS: which files they take, from where, and what they say if TLS does not come about."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

import redfence
from harness.processes.certificates import Authority, Certificate, replace_file
from harness.processes.servers import FormedNodes, LockServer, Serve
from redfence_server.http2.settings import Transport

# The pause between two tries is short beside the time that a call waits for a connection.
_OPTIONS = redfence.ClientOptions(rpc_timeout=1.5, reconnect_backoff_max=0.1)
_CLIENTS = [redfence.Client, redfence.AsyncClient]


def tls_of(certificate: Certificate) -> redfence.Tls:
    return redfence.Tls(ca=certificate.authority, cert=certificate.certificate, key=certificate.key)


Secured = Callable[..., Awaitable[LockServer]]


@pytest.fixture
def secured(
    formed_nodes: FormedNodes, serve: Serve, certificate: Certificate, authority: Authority
) -> Secured:
    """Starts a lock server that wants a certificate of its clients."""

    async def start(**settings: Any) -> LockServer:
        return await serve(
            await formed_nodes(1),
            tls_cert=certificate.certificate,
            tls_key=certificate.key,
            tls_client_ca=authority.file,
            **settings,
        )

    return start


@pytest.fixture
async def server(secured: Secured) -> LockServer:
    """A lock server that wants a certificate of its clients."""
    return await secured()


async def test_the_files_come_from_the_arguments_or_from_the_environment(
    server: LockServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = authority.issue("caller.example")

    def lock_in_a_thread(**given: Any) -> bool:
        with redfence.Client(server.target, **given) as client:
            return client.try_run("orders/42", list, ttl=10)

    async with redfence.AsyncClient(server.target, tls=tls_of(own)) as client:
        assert (await client.cluster_status()).ready
    assert await asyncio.to_thread(lock_in_a_thread, tls=tls_of(own))
    for name, file in (("CA", own.authority), ("CERT", own.certificate), ("KEY", own.key)):
        monkeypatch.setenv(f"REDFENCE_TLS_{name}", str(file))
    async with redfence.AsyncClient(server.target) as client:
        assert (await client.cluster_status()).ready
    assert await asyncio.to_thread(lock_in_a_thread)


@pytest.mark.slow
@pytest.mark.parametrize("transport", list(Transport))
async def test_a_connection_that_fails_is_explained_with_the_fix(
    secured: Secured, transport: Transport, authority: Authority, other_authority: Authority
) -> None:
    server = await secured(transport=transport)
    stranger = other_authority.issue("caller.example")
    for tls, reason in (
        (None, "name its authority by tls or REDFENCE_TLS_CA"),
        (redfence.Tls(ca=other_authority.file), "shows a certificate that this client refuses"),
        (redfence.Tls(ca=authority.file), "wants a certificate of this client; give cert and key"),
        (
            redfence.Tls(ca=authority.file, cert=stranger.certificate, key=stranger.key),
            "refuses the certificate of this client",
        ),
    ):
        async with redfence.AsyncClient(server.target, tls=tls, options=_OPTIONS) as client:
            with pytest.raises(redfence.UnavailableError, match=reason):
                await client.cluster_status()


@pytest.mark.slow
async def test_a_client_reads_renewed_files_when_it_connects_again(
    server: LockServer, authority: Authority, other_authority: Authority, tmp_path: Path
) -> None:
    """It starts with a certificate that the server refuses, and gets in without a restart."""
    stranger = other_authority.issue("caller.example")
    files = Certificate(tmp_path / "cert.pem", tmp_path / "key.pem", authority.file)
    files.replace_by(stranger)
    async with redfence.AsyncClient(server.target, tls=tls_of(files), options=_OPTIONS) as client:
        with pytest.raises(redfence.UnavailableError):
            await client.cluster_status()
        files.key.unlink()
        with pytest.raises(redfence.UnavailableError, match="tls key: cannot read"):
            await client.cluster_status()
        files.replace_by(authority.issue("caller.example"))
        assert (await client.cluster_status()).ready


@pytest.mark.parametrize("kind", _CLIENTS)
def test_files_that_cannot_be_used_are_refused_when_the_client_is_made(
    kind: Any, certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = tmp_path / "broken.pem", Authority(tmp_path / "other").issue("a")
    broken.write_text("x")
    refusals: list[tuple[dict[str, Path], str]] = [
        ({"ca": tmp_path / "nowhere.pem"}, "tls ca: cannot read .*nowhere.pem: No such file"),
        ({"ca": broken}, "tls ca: .*broken.pem has no certificate in PEM"),
        ({"cert": certificate.certificate}, "give both cert and key"),
        ({"cert": certificate.certificate, "key": other.key}, "tls cert: .*KEY_VALUES_MISMATCH"),
        ({"cert": certificate.certificate, "key": broken}, "tls cert: "),
    ]
    for tls, reason in refusals:
        with pytest.raises(redfence.InvalidArgumentError, match=reason) as refused:
            kind("locks:50051", tls=redfence.Tls(**tls))
        assert refused.value.field.startswith("tls.")
    with pytest.raises(redfence.InvalidArgumentError, match="leave out one of them"):
        kind("locks:50051", tls=redfence.Tls(), credentials=grpc.ssl_channel_credentials())
    monkeypatch.setenv("REDFENCE_TLS_CA", str(broken))
    with pytest.raises(redfence.InvalidArgumentError, match="has no certificate in PEM"):
        kind("locks:50051")
    kind("locks:50051", credentials=grpc.ssl_channel_credentials())
    replace_file(broken, certificate.authority)
    kind("locks:50051")
