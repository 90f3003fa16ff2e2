"""Access control over both transports: credentials, the policy, its reload, and the audit log."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc

import redfence
from harness.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer
from harness.load.failures import Failure, failure_of
from harness.processes.certificates import Authority, Certificate
from harness.processes.ports import HOST
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    locks_left,
    new_lease_id,
    urls_of,
)
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_server import composition, config
from redfence_server.access.policy import Verb
from redfence_server.access.tokens import digest_of
from redfence_server.api.messages import duration
from redfence_server.errors import ConfigError

SECRET = "0123456789abcdef-of-billing"
BILLING = (("authorization", f"Bearer {SECRET}"),)
OTHER = (("authorization", "Bearer 0123456789abcdef-of-other"),)
POLICY = """
[[rules]]
principals = ["token:billing"]
verbs = ["acquire", "inspect"]
prefix = "billing/"

[[rules]]
principals = ["anonymous"]
verbs = ["inspect"]
prefix = "public/"
"""
EVERY_VERB = f"""
[[rules]]
principals = ["token:billing"]
verbs = {[verb.value for verb in Verb]}
prefix = "billing/"
"""
# A valid value of each field that a request may need; the resources are another principal's.
VALUES = {
    "resource": "other/1",
    "prefix": "other/",
    "lease_id": new_lease_id(),
    "fencing_token": 1,
    "ttl": duration(10_000),
}
DENIED = (grpc.StatusCode.PERMISSION_DENIED, lock_pb2.ERROR_REASON_PERMISSION_DENIED)
UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, lock_pb2.ERROR_REASON_UNAUTHENTICATED)


class Site:
    """A lock server with a policy, whose files a test may change."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.tokens, self.audit = (
            folder / name for name in ("policy.toml", "tokens.toml", "audit")
        )
        self.policy.write_text(POLICY)
        self.issue(billing=SECRET, other="0123456789abcdef-of-other")
        self.server: LockServer

    def issue(self, **secrets: str) -> None:
        self.tokens.write_text(
            "".join(
                f'[[tokens]]\nname = "{name}"\nsha256 = "{digest_of(secret).hex()}"\n'
                for name, secret in secrets.items()
            )
        )

    @property
    def audit_lines(self) -> list[dict[str, Any]]:
        lines = [json.loads(line) for line in self.audit.read_text().splitlines()]
        return [line for line in lines if line["event"] != "node"]

    async def acquire(
        self, resource: str, metadata: Any = BILLING, **fields: Any
    ) -> lock_pb2.AcquireResponse:
        return await self.server.locks.Acquire(acquire_request(resource, **fields), metadata=metadata)


@pytest.fixture
async def site(tmp_path: Path, formed_nodes: FormedNodes, serve: Serve) -> Site:
    site = Site(tmp_path)
    site.server = await serve(
        await formed_nodes(3),
        policy_file=str(site.policy),
        tokens_file=str(site.tokens),
        audit_log=str(site.audit),
    )
    return site


async def to_the_end(stream: Any) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


def status(failure: Failure) -> tuple[grpc.StatusCode, lock_pb2.ErrorReason.ValueType]:
    return failure.code, failure.reason


async def test_unary_calls_need_credentials_and_the_right_for_the_resource(site: Site) -> None:
    lease = (await site.acquire("billing/1")).lease
    locks = site.server.locks
    release = lock_pb2.ReleaseRequest(resource="other/1", lease_id=new_lease_id())
    look, check = lock_pb2.GetLockRequest(resource="other/1"), lock_pb2.CheckTokenRequest(resource="other/1")
    check.fencing_token = 1
    denied = [
        await failure_of(site.acquire("other/1")),
        await failure_of(site.acquire("billing/1", metadata=OTHER)),
        await failure_of(locks.Release(release, metadata=BILLING)),
        await failure_of(locks.GetLock(look, metadata=BILLING)),
        await failure_of(locks.CheckToken(check, metadata=BILLING)),
        await failure_of(site.server.admin.ClusterStatus(lock_pb2.ClusterStatusRequest(), metadata=BILLING)),
    ]
    assert {status(each) for each in denied} == {DENIED}
    assert dict(denied[0].metadata) == {
        "principal": "token:billing",
        "verb": "acquire",
        "resource": "other/1",
    }
    assert denied[1].metadata["principal"] == "token:other"
    assert [each.metadata["verb"] for each in denied[2:]] == ["acquire", "inspect", "inspect", "inspect"]
    without = [
        await failure_of(site.acquire("billing/1", metadata=())),
        await failure_of(site.acquire("billing/1", metadata=(("authorization", "Bearer wrong"),))),
        await failure_of(site.acquire("billing/1", metadata=(("authorization", "Basic YTpi"),))),
        await failure_of(site.acquire("billing/1", metadata=(*OTHER, *BILLING))),
        await failure_of(site.acquire("billing/1", metadata=(("authorization", "Bearer " + "x" * 9_000),))),
    ]
    assert {status(each) for each in without} == {UNAUTHENTICATED}
    assert without[0].metadata["verb"] == "acquire"
    assert all(each.metadata["principal"] == "anonymous" for each in without)
    # What the policy grants without credentials.
    public = await site.server.look("public/1")
    assert not public.HasField("current")
    assert await locks_left(site.server.nodes) == [b"redfence:lock:billing/1"] * 3
    await locks.Release(
        lock_pb2.ReleaseRequest(resource="billing/1", lease_id=lease.lease_id), metadata=BILLING
    )


async def test_each_command_of_a_session_and_each_renewal_is_checked(site: Site) -> None:
    session = site.server.locks.Session(metadata=BILLING)
    message = lock_pb2.SessionRequest()
    for number, resource in enumerate(("billing/1", "other/1", "billing/2"), start=1):
        message.commands.add(id=number, acquire=acquire_request(resource))
    foreign = new_lease_id()
    message.commands.add(id=4, release=lock_pb2.ReleaseRequest(resource="other/1", lease_id=foreign))
    message.commands.add(id=5, renew=lock_pb2.KeepAliveRequest(resource="other/1", lease_id=foreign))
    await session.write(message)
    results: dict[int, lock_pb2.SessionResult] = {}
    while len(results) < 5:
        response = await session.read()
        assert isinstance(response, lock_pb2.SessionResponse)
        results |= {result.id: result for result in response.results}
    for number in (1, 3):
        assert results[number].acquire.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
    for number in (2, 4, 5):
        assert status(Failure.of_message(results[number].error)) == DENIED
        assert results[number].error.metadata["resource"] == "other/1"
    assert not any(b"other" in key for key in await locks_left(site.server.nodes))
    # The stream goes on.
    lease_id = results[1].acquire.lease.lease_id
    keep_alive = site.server.locks.KeepAlive(metadata=BILLING)
    answers = []
    for resource, secret in (("other/1", new_lease_id()), ("billing/1", lease_id)):
        await keep_alive.write(lock_pb2.KeepAliveRequest(resource=resource, lease_id=secret))
        answer = await keep_alive.read()
        assert isinstance(answer, lock_pb2.KeepAliveResponse)
        answers.append(answer)
    assert status(Failure.of_message(answers[0].error)) == DENIED
    assert answers[1].state == lock_pb2.LEASE_STATE_ACTIVE
    for stream in (session, keep_alive):
        await stream.done_writing()
        assert await stream.code() is grpc.StatusCode.OK


def filled(kind: Any) -> Any:
    """Return a request of this class that is valid, if `VALUES` knows the fields that it needs."""
    request = kind()
    for field in kind.DESCRIPTOR.fields:
        if isinstance(value := VALUES.get(field.name), Message):
            getattr(request, field.name).CopyFrom(value)
        elif value is not None:
            setattr(request, field.name, value)
    return request


def every_request() -> Iterator[tuple[MethodDescriptor, Any]]:
    """Yield each method of the contract with a valid request, and Session with each command."""
    for service in lock_pb2.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            if method.name != "Session":
                yield method, filled(GetMessageClass(method.input_type))
                continue
            for field in lock_pb2.SessionCommand.DESCRIPTOR.oneofs_by_name["command"].fields:
                # A cancel names a command of its own stream, and no resource.
                if field.name != "cancel" and field.message_type is not None:
                    command = {field.name: filled(GetMessageClass(field.message_type)), "id": 1}
                    yield method, lock_pb2.SessionRequest(commands=[lock_pb2.SessionCommand(**command)])


async def failure_from(
    server: LockServer, method: MethodDescriptor, request: Any, metadata: Any
) -> tuple[grpc.StatusCode, lock_pb2.ErrorReason.ValueType]:
    """Return how a call or its command failed; without a request, a stream is only opened."""
    kinds = [("unary", "stream")[streams] for streams in (method.client_streaming, method.server_streaming)]
    call = getattr(server.channel, "_".join(kinds))(
        f"/{method.containing_service.full_name}/{method.name}",
        request_serializer=GetMessageClass(method.input_type).SerializeToString,
        response_deserializer=GetMessageClass(method.output_type).FromString,
    )
    options: Any = {"metadata": metadata, "timeout": 5}
    try:
        if method.client_streaming:
            stream = call(**options)
            # gRPC's client may fail to write to a stream that the server has just ended.
            if request is not None:
                await stream.write(request)
            answer = await stream.read()
        elif method.server_streaming:
            answer = await call(request, **options).read()
        else:
            answer = await call(request, **options)
    except grpc.aio.AioRpcError as error:
        return status(Failure.of_call(error))
    item = answer.results[0] if isinstance(answer, lock_pb2.SessionResponse) else answer
    assert "error" in item.DESCRIPTOR.fields_by_name, f"{method.full_name} answered {answer!r}"
    return status(Failure.of_message(item.error))


async def test_no_method_and_no_command_serves_a_stranger(site: Site) -> None:
    """A new method needs the guard: a stranger gets a denial from each, and no word about its request."""
    site.policy.write_text(EVERY_VERB)
    site.server.reload()
    for method, request in every_request():
        for asked in (None,) if method.client_streaming else (request, type(request)()):
            told = await failure_from(site.server, method, asked, ())
            assert told == UNAUTHENTICATED, method.full_name
        # The first may do nothing at all, and the second everything, but to other resources.
        for metadata in (OTHER, BILLING):
            told = await failure_from(site.server, method, request, metadata)
            assert told == DENIED, method.full_name
    assert not await locks_left(site.server.nodes)


async def test_a_stream_without_credentials_fails_command_by_command_or_at_once(site: Site) -> None:
    """The policy grants something without credentials, so the stream is open; then it grants nothing."""
    session = site.server.locks.Session()
    command = lock_pb2.SessionCommand(id=1, acquire=acquire_request("billing/1"))
    await session.write(lock_pb2.SessionRequest(commands=[command]))
    response = await session.read()
    assert isinstance(response, lock_pb2.SessionResponse)
    assert status(Failure.of_message(response.results[0].error)) == UNAUTHENTICATED
    site.policy.write_text(POLICY.replace('"anonymous"', '"token:other"'))
    site.server.reload()
    for stream in (session, site.server.locks.Session(), site.server.locks.KeepAlive()):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stream.read()
        assert status(Failure.of_call(caught.value)) == UNAUTHENTICATED


async def test_a_rule_sets_the_least_lock_delay_of_its_prefix(site: Site) -> None:
    """For unary calls and for commands of a Session; the caller may ask for a longer one."""
    site.policy.write_text(POLICY.replace('"billing/"', '"billing/"\nlock_delay_ms = 15_000'))
    site.server.reload()
    shown: list[int] = []
    for name, fields in (("1", {}), ("2", {"lock_delay_ms": 20_000})):
        await site.acquire(f"billing/{name}", **fields)
        look = lock_pb2.GetLockRequest(resource=f"billing/{name}")
        current = (await site.server.locks.GetLock(look, metadata=BILLING)).current
        shown.append(current.lock_delay.seconds)
    client = redfence.AsyncClient(site.server.target, token=SECRET)
    async with client, client.lock("billing/3", ttl=10):
        held = (await client.get_lock("billing/3")).current
        assert held is not None
        shown.append(int(held.lock_delay))
    assert shown == [15, 20, 15]
    failure = await failure_of(site.acquire("billing/4", ttl_ms=290_000))
    assert failure.reason == lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY
    assert dict(failure.metadata) == {"field": "lock_delay", "max": "10000ms"}


async def test_a_reload_replaces_the_rules_whole_or_not_at_all(site: Site) -> None:
    await site.acquire("billing/1")
    session = site.server.locks.Session(metadata=BILLING)
    await session.wait_for_connection()
    site.policy.write_text(POLICY.replace("billing/", "orders/"))
    site.tokens.write_text("no tokens")
    site.server.reload()
    await site.acquire("billing/2")
    # The token is revoked, and with it the stream that it opened.
    site.issue(other="0123456789abcdef-of-other")
    site.server.reload()
    assert status(await failure_of(site.acquire("billing/3"))) == UNAUTHENTICATED
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await session.read()
    assert status(Failure.of_call(caught.value)) == UNAUTHENTICATED
    site.issue(billing=SECRET)
    site.server.reload()
    await site.acquire("orders/1")
    assert status(await failure_of(site.acquire("billing/3"))) == DENIED


async def test_a_watch_ends_when_the_policy_does_not_grant_it_any_more(site: Site) -> None:
    """The token is still valid, so the next picture finds it out; the watcher sees no lock after that."""
    request = lock_pb2.WatchLocksRequest(prefix="billing/", interval=duration(100))
    watch: Any = site.server.admin.WatchLocks(request, metadata=BILLING)
    assert not (await watch.read()).events
    site.policy.write_text(POLICY.replace("billing/", "orders/"))
    site.server.reload()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await to_the_end(watch)
    assert status(Failure.of_call(caught.value)) == DENIED


async def test_the_audit_log_says_which_operator_ended_which_lease_and_why(site: Site) -> None:
    site.policy.write_text(EVERY_VERB)
    site.server.reload()
    lease = (await site.acquire("billing/1")).lease
    request = lock_pb2.ForceReleaseRequest(resource="billing/1", reason="the holder hangs")
    request.fencing_token = lease.fencing_token
    for _ in range(2):
        await site.server.admin.ForceRelease(request, metadata=BILLING)
    await failure_of(site.server.admin.ForceRelease(request, metadata=OTHER))
    await eventually(lambda: len(site.audit_lines) == 4)
    _, ended, again, denied = site.audit_lines
    for line, outcome, digest in (
        (ended, "released", digest_of(lease.lease_id).hex()[:8]),
        (again, "not_held", ""),
    ):
        assert (line["event"], line["outcome"], line["lease"]) == ("force_release", outcome, digest)
        assert (line["principal"], line["resource"]) == ("token:billing", "billing/1")
        assert (line["token"], line["reason"]) == (lease.fencing_token, "the holder hangs")
    assert (denied["event"], denied["outcome"]) == ("admin", "permission_denied")
    assert denied["principal"] == "token:other"


async def test_the_audit_log_has_grants_releases_and_denials_and_no_secret(site: Site) -> None:
    lease = (await site.acquire("billing/1")).lease
    await failure_of(site.acquire("other/1"))
    await failure_of(site.acquire("other/1", metadata=(("authorization", "Bearer wrong-one"),)))
    release = lock_pb2.ReleaseRequest(resource="billing/1", lease_id=lease.lease_id)
    await site.server.locks.Release(release, metadata=BILLING)
    await eventually(lambda: len(site.audit_lines) == 4)
    grant, denial, stranger, end = site.audit_lines
    assert (grant["event"], grant["outcome"]) == ("acquire", "granted")
    assert (grant["principal"], grant["resource"]) == ("token:billing", "billing/1")
    assert grant["token"] == lease.fencing_token
    assert grant["lease"] == end["lease"] == digest_of(lease.lease_id).hex()[:8]
    assert grant["peer"].startswith("ipv4:127.0.0.1:")
    assert (denial["event"], denial["outcome"], denial["resource"]) == (
        "acquire",
        "permission_denied",
        "other/1",
    )
    assert (stranger["event"], stranger["outcome"]) == ("authenticate", "unauthenticated")
    assert (end["event"], end["outcome"]) == ("release", "released")
    text = site.audit.read_text()
    nodes = [line for line in map(json.loads, text.splitlines()) if line["event"] == "node"]
    assert {line["node_index"] for line in nodes if line["outcome"] == "ready"} == {0, 1, 2}
    assert not any(secret in text for secret in (SECRET, "wrong-one", lease.lease_id))
    # A rotation renames the file, and the server opens a new one.
    site.audit.rename(site.audit.with_name("audit.1"))
    site.server.reload()
    await site.acquire("billing/2")
    await eventually(lambda: site.audit.exists() and len(site.audit_lines) == 1)


@pytest.mark.slow
async def test_a_stream_ends_within_a_second_after_its_token_expires(
    site: Site, tmp_path: Path, serve: Serve
) -> None:
    """A wait ends with it, and the lease lives on for a new token."""
    issuer, jwks = JwtIssuer(), tmp_path / "jwks.json"
    issuer.write_key_set(jwks)
    site.policy.write_text(POLICY.replace("token:billing", "jwt:billing"))
    server = await serve(
        [node.url for node in site.server.nodes],
        policy_file=str(site.policy),
        jwt_jwks_file=str(jwks),
        jwt_audience=AUDIENCE,
        jwt_issuer=ISSUER,
    )
    expires_at_s = time.time() + 1.5
    metadata = (("authorization", f"Bearer {issuer.token(exp=expires_at_s)}"),)
    session, keep_alive = server.locks.Session(metadata=metadata), server.locks.KeepAlive(metadata=metadata)
    request = acquire_request("billing/1", wait_ms=30_000)
    held = await server.locks.Acquire(request, metadata=metadata)
    await session.write(lock_pb2.SessionRequest(commands=[lock_pb2.SessionCommand(id=1, acquire=request)]))
    for stream in (session, keep_alive):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await to_the_end(stream)
        assert status(Failure.of_call(caught.value)) == UNAUTHENTICATED
        assert "expired" in Failure.of_call(caught.value).message
        assert 0 <= time.time() - expires_at_s < 1
    assert status(await failure_of(server.locks.Acquire(request, metadata=metadata))) == UNAUTHENTICATED
    fresh = (("authorization", f"Bearer {issuer.token('RS256')}"),)
    release = lock_pb2.ReleaseRequest(resource="billing/1", lease_id=held.lease.lease_id)
    response = await server.locks.Release(release, metadata=fresh)
    assert response.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED


REFLECTION = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
READY = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


async def test_the_admin_service_and_reflection_can_have_an_address_of_their_own(
    serve: Serve, formed_nodes: FormedNodes, certificate: Certificate, authority: Authority
) -> None:
    """Both addresses have health and TLS; the SDK reaches the admin service there."""
    nodes = await formed_nodes(3)
    server = await serve(
        nodes,
        admin_listen=f"{HOST}:0",
        tls_cert=str(certificate.certificate),
        tls_key=str(certificate.key),
    )
    for port, code in ((server.port, grpc.StatusCode.UNIMPLEMENTED), (server.admin_port, grpc.StatusCode.OK)):
        target = f"{HOST}:{port}"
        async with grpc.aio.secure_channel(target, authority.credentials()) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            assert await health.Check(health_pb2.HealthCheckRequest()) == READY
            status_of = lock_pb2_grpc.AdminServiceStub(channel).ClusterStatus
            reflection: Any = channel.unary_unary(REFLECTION)
            for call in (status_of(lock_pb2.ClusterStatusRequest()), reflection(b"")):
                assert await call.code() is code
        async with redfence.AsyncClient(target, tls=redfence.Tls(ca=authority.file)) as client:
            async with client.lock(f"on/{port}", ttl=5) as lease:
                assert lease.token
            if code is grpc.StatusCode.OK:
                assert (await client.cluster_status()).ready


async def test_an_admin_address_follows_the_rules_of_listen_and_its_errors_name_it(
    serve: Serve, formed_nodes: FormedNodes
) -> None:
    nodes = await formed_nodes(3)
    server = await serve(nodes)
    for address, problem in (
        ("0.0.0.0:0", "admin_listen: 0.0.0.0:0 is open to other machines, without TLS"),
        ("nowhere", "admin_listen: 'nowhere' is not HOST:PORT"),
        (server.target, f"admin_listen: cannot listen on {server.target}"),
    ):
        with pytest.raises(ConfigError) as caught:
            await serve(nodes, admin_listen=address)
        assert str(caught.value).startswith(problem)
    settings = config.load({"nodes": urls_of(nodes), "admin_listen": f"{HOST}:0"})
    with pytest.raises(ConfigError, match="admin_listen: it needs one process"):
        composition.LockServer(settings, share_port=True)


async def test_reflection_can_be_switched_off(serve: Serve, formed_nodes: FormedNodes) -> None:
    server = await serve(await formed_nodes(3), reflection=False)
    method: Any = server.channel.unary_unary(REFLECTION)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await method(b"")
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert (await server.acquire("r")).lease.fencing_token
