"""Every way in which the lock server refuses: the code, reason, metadata and retry hint, and that nothing was changed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from structlog.testing import capture_logs

from harness.load.failures import Failure, failure_of
from harness.load.session_caller import SessionCaller, StreamEndedError
from harness.processes.servers import (
    FormedNodes,
    LockServer,
    Serve,
    acquire_request,
    memories,
    new_lease_id,
    until_no_locks,
)
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2
from redfence_proto.v1.lock_pb2 import (
    AcquireRequest,
    CheckTokenRequest,
    ErrorReason,
    GetLockRequest,
    KeepAliveRequest,
    ReleaseRequest,
)
from redfence_server.lock_service import LockService

NAME = "orders/42"
LEASE_ID = "0123456789abcdef" * 2
INVALID = grpc.StatusCode.INVALID_ARGUMENT
UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED

# Of the storage, by the words of the contract; everything else is the lock server's.
STORAGE_ONLY = {
    lock_pb2.ERROR_REASON_STALE_TOKEN,
    lock_pb2.ERROR_REASON_INVALID_KEY,
    lock_pb2.ERROR_REASON_INVALID_VALUE,
    lock_pb2.ERROR_REASON_KEY_NOT_FOUND,
    lock_pb2.ERROR_REASON_TOO_MANY_WRITES,
    lock_pb2.ERROR_REASON_STORAGE_FAILED,
    lock_pb2.ERROR_REASON_INVALID_PAGE,
}

Request = AcquireRequest | ReleaseRequest | KeepAliveRequest | GetLockRequest | CheckTokenRequest


# --- requests that break a bound ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Refusal:
    """A request that is refused for itself, and how."""

    title: str
    request: Request
    reason: ErrorReason.ValueType
    field_name: str
    metadata: dict[str, str] = field(default_factory=dict)


def _about(name: str) -> list[Request]:
    """Return each request that names a resource."""
    return [
        acquire_request(name),
        ReleaseRequest(resource=name, lease_id=LEASE_ID),
        KeepAliveRequest(resource=name, lease_id=LEASE_ID),
        GetLockRequest(resource=name),
        CheckTokenRequest(resource=name, fencing_token=1),
    ]


def _with(**fields: Any) -> AcquireRequest:
    request = acquire_request(NAME)
    for name, value in fields.items():
        request.ClearField(name)  # type: ignore[arg-type]  # its stub lists the names
        if isinstance(value, Duration):
            getattr(request, name).CopyFrom(value)
        elif value is not None:
            setattr(request, name, value)
    return request


_NAMES = {
    "empty": "",
    "257 bytes": "a" * 257,
    "257 bytes of many-byte characters": "ä" * 128 + "a",
    "a control character": "a\x00b",
    "a late control character": "a\x85b",
    "an opening brace": "a{b",
    "a closing brace": "a}b",
}
_TTLS = {
    "missing": None,
    "zero": Duration(),
    "negative": Duration(seconds=-1),
    "50 ms": Duration(nanos=50_000_000),
    "99 ms": Duration(nanos=99_000_000),
    "2 h": Duration(seconds=7_200),
    "1 ms above the greatest": Duration(seconds=300, nanos=1_000_000),
    "with a fraction of a millisecond": Duration(seconds=1, nanos=1),
    "beyond what the standard allows": Duration(seconds=2**62),
    "with nanoseconds beyond a second": Duration(seconds=1, nanos=2_000_000_000),
}
_OUT_OF_BOUNDS = {"missing", "zero", "negative", "50 ms", "99 ms", "2 h", "1 ms above the greatest"}
_LEASE_IDS = {
    "too short": LEASE_ID[:-1],
    "too long": LEASE_ID + "0",
    "upper case": LEASE_ID.upper(),
    "no hex": "g" * 32,
    "with a line break": LEASE_ID + "\n",
}

REFUSALS = [
    *(
        Refusal(f"resource {title}", request, lock_pb2.ERROR_REASON_INVALID_RESOURCE, "resource")
        for title, name in _NAMES.items()
        for request in _about(name)
    ),
    *(
        Refusal(
            f"ttl {title}",
            _with(ttl=ttl),
            lock_pb2.ERROR_REASON_INVALID_TTL,
            "ttl",
            {"min": "100ms", "max": "300000ms"},
        )
        for title, ttl in _TTLS.items()
    ),
    *(
        Refusal(
            f"wait_timeout {title}",
            _with(wait_timeout=wait),
            lock_pb2.ERROR_REASON_INVALID_WAIT_TIMEOUT,
            "wait_timeout",
        )
        for title, wait in {
            "negative": Duration(seconds=-1),
            "beyond what the standard allows": Duration(seconds=2**62),
        }.items()
    ),
    *(
        Refusal(f"lease id {title}", request, lock_pb2.ERROR_REASON_INVALID_LEASE_ID, "lease_id")
        for title, lease_id in _LEASE_IDS.items()
        for request in (
            _with(lease_id=lease_id),
            ReleaseRequest(resource=NAME, lease_id=lease_id),
            KeepAliveRequest(resource=NAME, lease_id=lease_id),
            GetLockRequest(resource=NAME, lease_id=lease_id),
        )
    ),
    *(
        Refusal("lease id missing", request, lock_pb2.ERROR_REASON_INVALID_LEASE_ID, "lease_id")
        for request in (ReleaseRequest(resource=NAME), KeepAliveRequest(resource=NAME))
    ),
    *(
        Refusal(f"holder {title}", _with(holder=holder), lock_pb2.ERROR_REASON_INVALID_HOLDER, "holder")
        for title, holder in {"257 bytes": "h" * 257, "a control character": "a\nb"}.items()
    ),
    *(
        Refusal(
            f"token {token}",
            CheckTokenRequest(resource=NAME, fencing_token=token),
            lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN,
            "fencing_token",
        )
        for token in (0, 2**53, 2**64 - 1)
    ),
]

Route = Callable[[LockServer, Any], Awaitable[Failure]]


async def unary(server: LockServer, request: Request) -> Failure:
    """Refused as a unary call."""
    methods: dict[type, Any] = {
        AcquireRequest: server.locks.Acquire,
        ReleaseRequest: server.locks.Release,
        GetLockRequest: server.locks.GetLock,
        CheckTokenRequest: server.locks.CheckToken,
    }
    return await failure_of(methods[type(request)](request))


async def in_session(server: LockServer, request: Request) -> Failure:
    """Refused as a command of a session, which goes on."""
    names = {AcquireRequest: "acquire", ReleaseRequest: "release", KeepAliveRequest: "renew"}
    async with SessionCaller(server) as session:
        fields: dict[str, Any] = {names[type(request)]: request}
        result = await session.send(lock_pb2.SessionCommand(**fields))
        assert result.WhichOneof("result") == "error"
        assert (await session.cancel_command(999)).cancel.found is False
    return Failure.of_message(result.error)


async def in_keep_alive(server: LockServer, request: KeepAliveRequest) -> Failure:
    """Refused as a renewal, by a response that names it, and the stream goes on."""
    request.sequence = 7
    call = server.locks.KeepAlive()
    await call.write(request)
    response = await call.read()
    assert isinstance(response, lock_pb2.KeepAliveResponse)
    assert (response.resource, response.sequence) == (request.resource, 7)
    assert response.state == lock_pb2.LEASE_STATE_UNSPECIFIED
    await call.write(KeepAliveRequest(resource="free", lease_id=LEASE_ID, sequence=8))
    following = await call.read()
    assert isinstance(following, lock_pb2.KeepAliveResponse)
    assert (following.sequence, following.state) == (8, lock_pb2.LEASE_STATE_LOST)
    await call.done_writing()
    assert await call.code() is grpc.StatusCode.OK
    return Failure.of_message(response.error)


ROUTES: dict[type, list[Route]] = {
    AcquireRequest: [unary, in_session],
    ReleaseRequest: [unary, in_session],
    KeepAliveRequest: [in_keep_alive, in_session],
    GetLockRequest: [unary],
    CheckTokenRequest: [unary],
}
REFUSED_BY_ROUTE = [
    pytest.param(refusal, route, id=f"{refusal.title}, {type(refusal.request).__name__} {route.__name__}")
    for refusal in REFUSALS
    for route in ROUTES[type(refusal.request)]
]


@pytest.fixture
async def small_server(formed_nodes: FormedNodes, serve: Serve) -> LockServer:
    """A server with bounds that a test can reach."""
    # A heartbeat would change what nodes remember.
    return await serve(await formed_nodes(3), waiters_max=2, commands_max=4, heartbeat_interval_ms=60_000)


@pytest.mark.parametrize(("refusal", "route"), REFUSED_BY_ROUTE)
async def test_a_request_that_breaks_a_bound_is_refused_by_name_and_changes_nothing_on_any_node(
    refusal: Refusal, route: Route, small_server: LockServer
) -> None:
    """INVALID_ARGUMENT with the field in the metadata, no retry hint, and each node's memory as before."""
    held = (await small_server.acquire(NAME, lease_id=LEASE_ID)).lease
    before = await memories(small_server.nodes)
    failure = await route(small_server, refusal.request)
    assert (failure.code, failure.reason) == (INVALID, refusal.reason)
    assert failure.message.startswith(refusal.field_name + " ")
    assert failure.metadata["field"] == refusal.field_name
    if refusal.title.removeprefix("ttl ") in _OUT_OF_BOUNDS and refusal.metadata:
        assert failure.metadata == {"field": "ttl", **refusal.metadata}
    assert failure.retry_after_ms is None
    assert await memories(small_server.nodes) == before
    assert await small_server.release(NAME, held.lease_id) == lock_pb2.RELEASE_OUTCOME_RELEASED


async def test_the_bounds_themselves_are_within_the_bounds(small_server: LockServer) -> None:
    """The longest name and label, and the shortest and the longest ttl, are granted."""

    async def acquired(name: str, ttl_ms: int) -> lock_pb2.AcquireResponse:
        for _ in range(3):
            try:
                return await small_server.acquire(name, ttl_ms=ttl_ms, holder="h" * 256)
            except grpc.aio.AioRpcError as error:
                # The shortest is over before a machine that stands still has granted it, which is no refusal of the request.
                if Failure.of_call(error).reason != lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED:
                    raise
        return await small_server.acquire(name, ttl_ms=ttl_ms, holder="h" * 256)

    for number, ttl_ms in enumerate((bounds.TTL_MS_MIN, bounds.TTL_MS_MAX_DEFAULT)):
        response = await acquired(f"{number}" * 256, ttl_ms)
        assert response.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        assert response.lease.ttl.ToMilliseconds() == ttl_ms
    assert (await small_server.check(NAME, 2**53 - 1)).state == lock_pb2.TOKEN_STATE_NOT_LIVE


@pytest.mark.parametrize("route", [unary, in_session], ids=lambda route: route.__name__)
async def test_a_malformed_lease_id_is_repeated_in_no_message_and_no_log(
    route: Route, small_server: LockServer
) -> None:
    """It may be a secret with a slip in it."""
    almost_secret = LEASE_ID.upper()
    with capture_logs() as logs:
        for request in (_with(lease_id=almost_secret), ReleaseRequest(resource=NAME, lease_id=almost_secret)):
            failure = await route(small_server, request)
            assert almost_secret.lower() not in f"{failure!r}".lower()
    assert almost_secret.lower() not in repr(logs).lower()


# --- refusals for the sake of circumstances -------------------------------------------------------------------------


@dataclass
class Stage:
    """What a situation is made of."""

    formed_nodes: FormedNodes
    fresh_formed_nodes: FormedNodes
    serve: Serve
    monkeypatch: pytest.MonkeyPatch

    async def small_server(self) -> LockServer:
        """Serve with bounds that a test can reach."""
        return await self.serve(await self.formed_nodes(3), waiters_max=2, commands_max=4)


@pytest.fixture
def stage(
    formed_nodes: FormedNodes,
    fresh_formed_nodes: FormedNodes,
    serve: Serve,
    monkeypatch: pytest.MonkeyPatch,
) -> Stage:
    return Stage(formed_nodes, fresh_formed_nodes, serve, monkeypatch)


Situation = Callable[[Stage], AsyncIterator[Failure]]
SITUATIONS: dict[ErrorReason.ValueType, Situation] = {}


def gives(reason: ErrorReason.ValueType) -> Callable[[Situation], Situation]:
    """Name the reason that every failure of a situation has."""

    def note(situation: Situation) -> Situation:
        SITUATIONS[reason] = situation
        return situation

    return note


def _of(result: lock_pb2.SessionResult) -> Failure:
    assert result.WhichOneof("result") == "error", result
    return Failure.of_message(result.error)


async def _stream_failure(session: SessionCaller) -> Failure:
    error = await session.ended()
    assert error is not None, "the stream ended with OK"
    return Failure.of_call(error)


async def _to_the_end(call: grpc.aio.StreamStreamCall[Any, Any]) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass


@gives(lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE)
async def two_of_three_nodes_down(stage: Stage) -> AsyncIterator[Failure]:
    """Every call that needs a quorum names the silent nodes."""
    server = await stage.serve(await stage.fresh_formed_nodes(3))
    lease_id = (await server.acquire("held")).lease.lease_id
    await server.until_states(*[lock_pb2.NODE_STATE_READY] * 3)
    for node in server.nodes[1:]:
        node.kill()
    async with SessionCaller(server) as session:
        failures = [
            await failure_of(server.acquire(NAME)),
            await failure_of(server.look("held")),
            _of(await session.acquire(NAME)),
        ]
        unnamed = [
            await failure_of(server.release("held", lease_id)),
            await failure_of(server.check("held", 1)),
            _of(await session.release("held", lease_id)),
        ]
        # A renewal is not an error: the lease is at risk, and still good until its validity ends.
        renewed = (await session.renew("held", lease_id)).renew
        assert renewed.state == lock_pb2.LEASE_STATE_AT_RISK
    for failure in failures:
        named = dict(each.split("=") for each in failure.metadata["nodes"].split(","))
        assert set(named) == {"1", "2"}
        assert set(named.values()) <= {"unreachable", "disconnected"}
        assert "node 1" in failure.message
    for failure in (*failures, *unnamed):
        assert (failure.code, failure.retry_after_ms) == (UNAVAILABLE, 200)
        yield failure


@gives(lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED)
async def nodes_slower_than_the_ttl(stage: Stage) -> AsyncIterator[Failure]:
    """A grant that arrives when nothing of the ttl is left is undone."""
    server = await stage.serve(await stage.formed_nodes(3), proxied=True, node_timeout_ms=5_000)
    await server.until_states(*[lock_pb2.NODE_STATE_READY] * 3)
    for proxy in server.proxies:
        proxy.delay(replies_ms=150)
    async with SessionCaller(server) as session:
        for failure in (
            await failure_of(server.acquire(NAME, ttl_ms=100)),
            _of(await session.acquire(NAME, ttl_ms=100)),
        ):
            assert (failure.code, failure.retry_after_ms) == (UNAVAILABLE, 100)
            assert float(failure.metadata["elapsed_ms"]) >= 100
            assert "ttl" in failure.message
            yield failure
    await until_no_locks(server.nodes)


@gives(lock_pb2.ERROR_REASON_DRAINING)
async def the_server_drains(stage: Stage) -> AsyncIterator[Failure]:
    """Waiters of both kinds are sent to another server, and what comes after the notice as well."""
    server = await stage.small_server()
    await server.acquire(NAME)
    async with SessionCaller(server) as session:
        calling = asyncio.create_task(failure_of(server.acquire(NAME, wait_ms=30_000)))
        commanded = session.acquire(NAME, wait_ms=30_000)
        await server.until_waiting(NAME, count=2)
        drained = server.drain()
        for failure in (await calling, _of(await commanded)):
            assert (failure.code, failure.retry_after_ms) == (UNAVAILABLE, 50)
            assert failure.metadata == {}
            yield failure
        await drained


@gives(lock_pb2.ERROR_REASON_TOO_MANY_WAITERS)
async def as_many_waiters_as_the_server_takes(stage: Stage) -> AsyncIterator[Failure]:
    """One more is refused with the limit; whoever waits already goes on."""
    server = await stage.small_server()
    held = (await server.acquire(NAME)).lease
    async with SessionCaller(server) as session:
        waiting = [session.acquire(NAME, wait_ms=30_000) for _ in range(2)]
        await server.until_waiting(NAME, count=2)
        for failure in (
            await failure_of(server.acquire(NAME, wait_ms=30_000)),
            _of(await session.acquire(NAME, wait_ms=30_000)),
        ):
            assert (failure.code, failure.retry_after_ms) == (EXHAUSTED, 1_000)
            assert failure.metadata == {"limit": "2", "scope": "server"}
            yield failure
        # To try once is no waiting, and a free resource needs none.
        assert (await server.acquire(NAME)).outcome == lock_pb2.ACQUIRE_OUTCOME_HELD
        assert (await server.acquire("free", wait_ms=1_000)).outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        await server.release(NAME, held.lease_id)
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED, timeout=5)
        assert [answer.result().acquire.outcome for answer in done] == [lock_pb2.ACQUIRE_OUTCOME_GRANTED]


@gives(lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS)
async def as_many_commands_as_a_stream_takes(stage: Stage) -> AsyncIterator[Failure]:
    """One more ends the stream, and what waited on it is undone."""
    server = await stage.small_server()
    for node in server.nodes:
        node.pause()
    session = SessionCaller(server)
    commands = [session.release(NAME, LEASE_ID) for _ in range(5)]
    failure = await _stream_failure(session)
    for node in server.nodes:
        node.resume()
    for command in commands:
        assert isinstance(command.exception(), StreamEndedError) or command.result().HasField("error")
    assert (failure.code, failure.metadata) == (EXHAUSTED, {"limit": "4"})
    yield failure
    keep_alive = server.locks.KeepAlive()
    for node in server.nodes:
        node.pause()
    for sequence in range(5):
        await keep_alive.write(KeepAliveRequest(resource=NAME, lease_id=LEASE_ID, sequence=sequence))
    failure = await failure_of(_to_the_end(keep_alive))
    for node in server.nodes:
        node.resume()
    yield failure


@gives(lock_pb2.ERROR_REASON_CANCELLED)
async def a_cancel_command(stage: Stage) -> AsyncIterator[Failure]:
    """The acquire is answered CANCELLED."""
    server = await stage.small_server()
    await server.acquire(NAME)
    async with SessionCaller(server) as session:
        waiting = session.acquire(NAME, wait_ms=30_000)
        waiting_id = session.last_id
        await server.until_waiting(NAME)
        assert (await session.cancel_command(waiting_id)).cancel.found is True
        failure = _of(await waiting)
        assert (failure.code, failure.retry_after_ms) == (grpc.StatusCode.CANCELLED, None)
        yield failure


@gives(lock_pb2.ERROR_REASON_UNKNOWN_COMMAND)
async def a_command_of_no_kind(stage: Stage) -> AsyncIterator[Failure]:
    """As one of a newer client would look; the stream goes on."""
    server = await stage.small_server()
    async with SessionCaller(server) as session:
        failure = _of(await session.send(lock_pb2.SessionCommand()))
        assert failure.code is INVALID
        assert failure.metadata == {"field": "commands.command", "command_id": "1"}
        assert (await session.acquire(NAME)).HasField("acquire")
        yield failure


@gives(lock_pb2.ERROR_REASON_INVALID_COMMAND_ID)
async def a_command_id_that_is_zero_or_in_use(stage: Stage) -> AsyncIterator[Failure]:
    """Nobody could tell the answers apart, so the stream ends."""
    server = await stage.small_server()
    await server.acquire(NAME)
    for command_id in (0, 1):
        session = SessionCaller(server)
        session.acquire(NAME, wait_ms=30_000)
        await server.until_waiting(NAME)
        session.send(lock_pb2.SessionCommand(release=ReleaseRequest()), command_id=command_id)
        failure = await _stream_failure(session)
        assert failure.code is INVALID
        assert failure.metadata == {"field": "commands.id", "command_id": str(command_id)}
        await server.until_waiting(NAME, count=0)
        yield failure


@gives(lock_pb2.ERROR_REASON_MALFORMED_MESSAGE)
async def bytes_that_are_no_message(stage: Stage) -> AsyncIterator[Failure]:
    """Neither UNKNOWN nor a defect in the log, whoever sends garbage; a string must be UTF-8."""
    server = await stage.small_server()
    with capture_logs() as logs:
        for garbage in (b"\xff" * 10, b"\x0a\x02\xff\xfe"):
            for method in ("Acquire", "Release", "GetLock", "CheckToken"):
                call: Any = server.channel.unary_unary(f"/redfence.v1.LockService/{method}")
                yield await failure_of(call(garbage))
            for method in ("Session", "KeepAlive"):
                stream: Any = server.channel.stream_stream(f"/redfence.v1.LockService/{method}")()
                await stream.write(garbage)
                yield await failure_of(_to_the_end(stream))
    assert logs == []


@gives(lock_pb2.ERROR_REASON_INTERNAL)
async def a_defect(stage: Stage) -> AsyncIterator[Failure]:
    """Whatever is wrong in the server reaches a caller as INTERNAL, without its inner words."""

    async def break_down(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("inner words")

    server = await stage.small_server()
    for method in ("acquire", "renew"):
        stage.monkeypatch.setattr(LockService, method, break_down)
    keep_alive = server.locks.KeepAlive()
    async with SessionCaller(server) as session:
        with capture_logs() as logs:
            await keep_alive.write(KeepAliveRequest(resource=NAME, lease_id=LEASE_ID))
            failures = [
                await failure_of(server.acquire(NAME)),
                _of(await session.acquire(NAME)),
                _of(await session.renew(NAME, LEASE_ID)),
            ]
            renewed = await keep_alive.read()
            assert isinstance(renewed, lock_pb2.KeepAliveResponse)
            failures.append(Failure.of_message(renewed.error))
            await keep_alive.done_writing()
            assert await keep_alive.code() is grpc.StatusCode.OK
    assert [entry["event"] for entry in logs] == ["internal_error"] * 4
    for failure in failures:
        assert (failure.code, failure.retry_after_ms) == (grpc.StatusCode.INTERNAL, None)
        assert "inner words" not in failure.message
        yield failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "situation"),
    [pytest.param(reason, situation, id=situation.__name__) for reason, situation in SITUATIONS.items()],
)
async def test_a_refusal_for_the_sake_of_circumstances_has_the_reason_of_the_contract_wherever_it_comes(
    reason: ErrorReason.ValueType, situation: Situation, stage: Stage
) -> None:
    """By every route the same reason, code, metadata and retry hint; the situations assert the rest."""
    count = 0
    async for failure in situation(stage):
        assert failure.reason == reason, failure
        count += 1
    assert count


def test_every_reason_of_the_contract_that_is_not_the_storages_has_a_case_here() -> None:
    """A reason added to the contract fails this test until it is shown."""
    shown = {refusal.reason for refusal in REFUSALS} | set(SITUATIONS)
    assert shown == set(ErrorReason.values()) - STORAGE_ONLY - {lock_pb2.ERROR_REASON_UNSPECIFIED}


# --- refusals by the transport ------------------------------------------------------------------------------------------


async def test_a_message_of_a_mebibyte_is_refused_by_the_transport_and_the_server_goes_on(
    small_server: LockServer,
) -> None:
    """RESOURCE_EXHAUSTED without details, as any gRPC server says it; nothing changes on any node."""
    before = await memories(small_server.nodes)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await small_server.acquire("a" * 2**20)
    assert caught.value.code() is EXHAUSTED
    session = SessionCaller(small_server)
    session.acquire("a" * 2**20)
    error = await session.ended()
    assert error is not None
    assert error.code() is EXHAUSTED
    keep_alive = small_server.locks.KeepAlive()
    await keep_alive.write(KeepAliveRequest(resource="a" * 2**20))
    assert await keep_alive.code() is EXHAUSTED
    assert await memories(small_server.nodes) == before
    assert (await small_server.acquire(NAME, lease_id=new_lease_id())).HasField("lease")
