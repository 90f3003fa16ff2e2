"""TLS of the server's port: who gets in, what the server learns of a client, and how certificates change."""

from __future__ import annotations

import asyncio
import gc
import ssl
import tracemalloc
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from structlog.testing import capture_logs

from harness.processes.certificates import Authority, Certificate, protection, replace_file
from harness.processes.ports import HOST
from harness.processes.servers import FormedNodes, LockServer, serving
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_server.api import serving as grpc_serving
from redfence_server.api.health import Health
from redfence_server.http2.settings import Transport
from redfence_server.sharing.shares import ConnectionShares

_TIMEOUT_S = 10.0
# Channels of one process to one target would otherwise share their connection.
_OPTIONS = [("grpc.use_local_subchannel_pool", 1)]
_HTTP2_HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0"


class HealthWithWitness(Health):
    """The health service, which notes what it was told of its callers."""

    def __init__(self) -> None:
        super().__init__([])
        self.seen: Mapping[str, Sequence[bytes]] = {}

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802  (gRPC's name)
        self.seen = context.auth_context()
        return await super().Check(request, context)


class Site:
    """A server with only a health service."""

    def __init__(self, port: int, health: HealthWithWitness) -> None:
        self.port = port
        self.health = health

    async def check(self, credentials: grpc.ChannelCredentials | None) -> grpc.StatusCode:
        """Call over a connection of its own, and return the status."""
        target = f"{HOST}:{self.port}"
        channel = (
            grpc.aio.insecure_channel(target, options=_OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(target, credentials, options=_OPTIONS)
        )
        async with channel:
            try:
                request = health_pb2.HealthCheckRequest()
                await health_pb2_grpc.HealthStub(channel).Check(request, timeout=_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    async def certificate(self, context: ssl.SSLContext) -> bytes:
        """Return the certificate that the server shows on a new connection."""
        _, writer = await asyncio.open_connection(HOST, self.port, ssl=context)
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        writer.transport.abort()
        return shown


@asynccontextmanager
async def site(
    transport: Transport,
    certificate: Certificate | None,
    *,
    client_ca: Path | None = None,
    shares: ConnectionShares | None = None,
) -> AsyncIterator[Site]:
    server = grpc_serving.new_server(transport, shares=shares)
    health = HealthWithWitness()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    health.set_serving(serving=True)
    port = grpc_serving.bind(
        server,
        f"{HOST}:0",
        certificates=protection(f"{HOST}:0", certificate, client_ca=client_ca),
    )
    await server.start()
    try:
        yield Site(port, health)
    finally:
        await server.stop(0)


async def test_only_a_client_that_trusts_the_authority_gets_through(
    transport: Transport, certificate: Certificate, authority: Authority, other_authority: Authority
) -> None:
    async with site(transport, certificate) as server:
        assert await server.check(authority.credentials()) is grpc.StatusCode.OK
        assert await server.check(other_authority.credentials()) is grpc.StatusCode.UNAVAILABLE
        assert await server.check(None) is grpc.StatusCode.UNAVAILABLE


async def test_a_client_ca_lets_in_only_clients_with_its_certificate(
    transport: Transport, certificate: Certificate, authority: Authority, other_authority: Authority
) -> None:
    stranger = other_authority.issue("billing.example")
    pretender = Certificate(stranger.certificate, stranger.key, authority.file)
    async with site(transport, certificate, client_ca=authority.file) as server:
        assert await server.check(authority.issue("billing.example").credentials()) is grpc.StatusCode.OK
        assert await server.check(authority.credentials()) is grpc.StatusCode.UNAVAILABLE
        assert await server.check(pretender.credentials()) is grpc.StatusCode.UNAVAILABLE


async def test_both_transports_tell_servicers_the_same_of_a_client(
    transport: Transport, certificate: Certificate, authority: Authority
) -> None:
    names = ("billing.example", "10.1.2.3", "2001:db8::1", "bob@example.com", "*.jobs.example")
    client = authority.issue(*names, common_name="billing ü").credentials()
    keys = ("transport_security_type", "x509_common_name", "x509_subject_alternative_name")

    def told(server: Site) -> dict[str, list[bytes]]:
        return {key: list(server.health.seen[key]) for key in keys if key in server.health.seen}

    async with site(transport, certificate, client_ca=authority.file) as server:
        await server.check(client)
        assert told(server) == {
            "transport_security_type": [b"ssl"],
            "x509_common_name": ["billing ü".encode()],
            "x509_subject_alternative_name": [name.encode() for name in names],
        }
    # What nobody has verified is not told.
    async with site(transport, certificate) as server:
        await server.check(client)
        assert told(server) == {"transport_security_type": [b"ssl"]}
    async with site(transport, None) as server:
        await server.check(None)
        assert told(server) == {"transport_security_type": [b"insecure"]}


@pytest.mark.parametrize("protocols", [[], ["http/1.1"]])
async def test_a_connection_that_does_not_agree_on_http2_is_closed(
    transport: Transport, certificate: Certificate, authority: Authority, protocols: list[str]
) -> None:
    context = ssl.create_default_context(cafile=authority.file)
    if protocols:
        context.set_alpn_protocols(protocols)
    async with site(transport, certificate) as server:
        try:
            reader, writer = await asyncio.open_connection(HOST, server.port, ssl=context)
            writer.write(_HTTP2_HELLO)
            async with asyncio.timeout(_TIMEOUT_S):
                assert not await reader.read()
        except (ssl.SSLError, ConnectionError):
            return
        writer.transport.abort()


async def test_tls_before_version_1_2_is_refused(
    transport: Transport, certificate: Certificate, authority: Authority
) -> None:
    context = authority.client_context()
    context.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.minimum_version = ssl.TLSVersion.TLSv1
    with pytest.warns(DeprecationWarning, match="TLSv1"):
        context.maximum_version = ssl.TLSVersion.TLSv1_1
    async with site(transport, certificate) as server:
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await server.certificate(context)


async def test_a_renewed_certificate_is_used_at_the_next_connection(
    transport: Transport, certificate: Certificate, authority: Authority
) -> None:
    """A file that cannot be used keeps the last one, and the log says so once."""
    context = authority.client_context()
    first = der(certificate)
    renewed = authority.issue(HOST)
    async with site(transport, certificate) as server:
        with capture_logs() as logs:
            assert await server.certificate(context) == first
            replace_file(certificate.certificate, renewed.certificate)
            for _ in range(3):
                assert await server.certificate(context) == first
            assert [each["event"] for each in logs] == ["certificate_refused"]
            assert f"{certificate.key} is not the key of the certificate" in logs[0]["reason"]
            certificate.key.unlink()
            assert await server.certificate(context) == first
            assert "tls_key: cannot read" in logs[1]["reason"]
            replace_file(certificate.key, renewed.key)
            assert await server.certificate(context) == der(renewed)
            assert await server.certificate(context) == der(renewed)
            assert [each["event"] for each in logs[2:]] == ["certificate_reloaded"]


async def test_a_reload_says_at_once_whether_new_files_are_good(
    transport: Transport, certificate: Certificate, authority: Authority, formed_nodes: FormedNodes
) -> None:
    """No connection comes meanwhile; the next one gets the certificate that the reload has read."""
    first, renewed = der(certificate), authority.issue(HOST)
    nodes = await formed_nodes(3)
    files: dict[str, Any] = {"tls_cert": certificate.certificate, "tls_key": certificate.key}

    def certificate_events() -> list[str]:
        return [event for each in logs if (event := each["event"]).startswith("certificate_")]

    async with serving(nodes, transport=transport, **files) as server:
        site, context = Site(server.port, HealthWithWitness()), authority.client_context()
        with capture_logs() as logs:
            server.reload()
            assert not certificate_events()
            certificate.certificate.write_text("no certificate")
            # An operator who asks again is told again.
            for count in (1, 2):
                server.reload()
                assert certificate_events() == ["certificate_refused"] * count
            assert f"tls_cert: {certificate.certificate} has no certificate in PEM" in logs[-1]["reason"]
            assert await site.certificate(context) == first
            certificate.replace_by(renewed)
            server.reload()
            assert certificate_events()[2:] == ["certificate_reloaded"]
            assert await site.certificate(context) == der(renewed)
            assert len(certificate_events()) == 3


async def test_an_authority_that_was_removed_lets_no_client_in_again(
    transport: Transport,
    certificate: Certificate,
    authority: Authority,
    other_authority: Authority,
    tmp_path: Path,
) -> None:
    """Neither by its certificate nor by a session that it began before."""
    client_ca = tmp_path / "clients.pem"
    replace_file(client_ca, authority.file)
    former, new = authority.issue("former.example"), other_authority.issue("new.example")
    context = authority.client_context()
    context.load_cert_chain(former.certificate, former.key)
    # Its sessions are there before the first answer.
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    trusting_new = Certificate(new.certificate, new.key, authority.file)
    async with site(transport, certificate, client_ca=client_ca) as server:
        begun = await session(context, server.port)
        assert await server.check(former.credentials()) is grpc.StatusCode.OK
        replace_file(client_ca, other_authority.file)
        assert await server.check(former.credentials()) is grpc.StatusCode.UNAVAILABLE
        assert await server.check(trusting_new.credentials()) is grpc.StatusCode.OK
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await session(context, server.port, resumed=begun)


async def session(
    context: ssl.SSLContext, port: int, *, resumed: ssl.SSLSession | None = None
) -> ssl.SSLSession:
    """Connect, and return the session, by which a later connection skips the certificates."""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=HOST, session=resumed)
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        while True:
            try:
                tls.do_handshake()
                break
            except ssl.SSLWantReadError:
                writer.write(outgoing.read())
                received = await reader.read(65_536)
                if not received:
                    raise ConnectionResetError from None
                incoming.write(received)
        assert tls.session is not None
        return tls.session
    finally:
        writer.transport.abort()


def der(certificate: Certificate) -> bytes:
    return ssl.PEM_cert_to_DER_cert(certificate.certificate.read_text())


@pytest.mark.slow
async def test_a_handshake_that_hangs_is_closed(
    transport: Transport, certificate: Certificate, authority: Authority
) -> None:
    """It delays no other client, and has its place among the connections, which only `fast` counts."""
    shares = ConnectionShares.of(100)
    async with site(transport, certificate, shares=shares) as server:
        silent = await asyncio.open_connection(HOST, server.port)
        # The head of a record whose body never comes.
        half = await asyncio.open_connection(HOST, server.port)
        half[1].write(b"\x16\x03\x01\x02\x00\x01")
        assert await server.check(authority.credentials()) is grpc.StatusCode.OK
        hanging = 2 if transport is Transport.FAST else 0
        await eventually(lambda: shares.places.taken == hanging)
        assert not silent[0].at_eof()
        assert not half[0].at_eof()
        async with asyncio.timeout(3 * grpc_serving.LIMITS.liveness.handshake_s):
            for reader, _ in (silent, half):
                with suppress(ConnectionResetError):
                    await reader.read()  # until the server ends the connection
        await eventually(lambda: not shares.places.taken)
        for _, writer in (silent, half):
            writer.close()


@pytest.mark.slow
async def test_callers_see_no_error_while_the_certificate_is_renewed(
    transport: Transport, certificate: Certificate, authority: Authority, formed_nodes: FormedNodes
) -> None:
    """Open connections go on, and new ones are made meanwhile."""
    client = authority.issue("caller.example").credentials()
    settings: dict[str, Any] = {
        "transport": transport,
        "tls_cert": certificate.certificate,
        "tls_key": certificate.key,
        "tls_client_ca": authority.file,
    }
    nodes = await formed_nodes(3)
    shown: set[bytes] = set()
    renewed = [authority.issue(HOST) for _ in range(5)]
    stops = False
    done: Counter[str] = Counter()

    async def go_on_calling(number: int) -> None:
        async with grpc.aio.secure_channel(server.target, client, options=_OPTIONS) as channel:
            own = LockServer(channel)
            while not stops:
                granted = await own.acquire(f"orders/{number}")
                assert granted.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
                await own.release(f"orders/{number}", granted.lease.lease_id)
                done["calls"] += 2

    async def connect_again_and_again(number: int) -> None:
        while not stops:
            async with grpc.aio.secure_channel(server.target, client, options=_OPTIONS) as channel:
                await LockServer(channel).look(f"orders/{number}")
            done["connections"] += 1

    async with serving(nodes, **settings) as server, asyncio.TaskGroup() as tasks:
        for number in range(4):
            tasks.create_task(go_on_calling(number))
            tasks.create_task(connect_again_and_again(number))
        context = authority.client_context()
        caller = authority.issue("looker.example")
        context.load_cert_chain(caller.certificate, caller.key)
        for each in renewed:
            certificate.replace_by(each)
            shown.add(await Site(server.port, HealthWithWitness()).certificate(context))
            done.clear()
            await eventually(lambda: done["calls"] > 100 and done["connections"] > 10, timeout_s=30)
        stops = True
    assert shown == {der(each) for each in renewed}


async def test_a_connection_with_tls_takes_little_memory(
    certificate: Certificate, authority: Authority, transport: Transport
) -> None:
    """By default asyncio would allocate 256 KiB for each."""
    if transport is Transport.GRPCIO:
        pytest.skip("its memory is not Python's")
    with ExitStack() as ends:
        tracemalloc.start()
        ends.callback(tracemalloc.stop)
        async with site(transport, certificate) as server:
            context = authority.client_context()
            await server.certificate(context)
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            writers = [(await asyncio.open_connection(HOST, server.port, ssl=context))[1] for _ in range(10)]
            # The clients are in this process too, and each of them has asyncio's buffer.
            assert (tracemalloc.get_traced_memory()[0] - before) / len(writers) < (256 + 64) * 1024
            for writer in writers:
                writer.transport.abort()
