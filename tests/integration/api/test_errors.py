"""Every error of the lock server: its code, reason, metadata and retry hint."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
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
    until_no_locks,
)
from redfence_proto.rich_error import from_trailing_metadata
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

# Only the storage gives these.
STORAGE_ONLY = {
    lock_pb2.ERROR_REASON_STALE_TOKEN,
    lock_pb2.ERROR_REASON_INVALID_KEY,
    lock_pb2.ERROR_REASON_INVALID_VALUE,
    lock_pb2.ERROR_REASON_KEY_NOT_FOUND,
    lock_pb2.ERROR_REASON_TOO_MANY_WRITES,
    lock_pb2.ERROR_REASON_STORAGE_FAILED,
}

# Tests of the waiting and of the admin service check all that a caller is told.
SHOWN_ELSEWHERE = {
    lock_pb2.ERROR_REASON_DRAINING,  # waiting/test_order.py
    lock_pb2.ERROR_REASON_TOO_MANY_WAITERS,  # waiting/test_limits.py
    lock_pb2.ERROR_REASON_UNAUTHENTICATED,  # api/test_access.py
    lock_pb2.ERROR_REASON_PERMISSION_DENIED,  # api/test_access.py
    lock_pb2.ERROR_REASON_INVALID_REASON,  # test_admin.py
    lock_pb2.ERROR_REASON_INVALID_PAGE,  # api/test_admin.py
    lock_pb2.ERROR_REASON_INVALID_INTERVAL,  # api/test_watch.py
    lock_pb2.ERROR_REASON_WATCH_LIMIT,  # api/test_watch.py
    lock_pb2.ERROR_REASON_TOO_MANY_BUFFERED_BYTES,  # http2/test_server.py
}

Request = AcquireRequest | ReleaseRequest | KeepAliveRequest | GetLockRequest | CheckTokenRequest


# --- requests that break a bound ------------------------------------------------------------------


def _acquire(**fields: Any) -> AcquireRequest:
    request = acquire_request(NAME)
    for name, value in fields.items():
        request.ClearField(name)  # type: ignore[arg-type]  # its stub lists the names
        if isinstance(value, Duration):
            getattr(request, name).CopyFrom(value)
        elif value is not None:
            setattr(request, name, value)
    return request


def _of_lease(lease_id: str) -> list[Request]:
    """Return each request that must have a lease id."""
    return [
        ReleaseRequest(resource=NAME, lease_id=lease_id),
        KeepAliveRequest(resource=NAME, lease_id=lease_id),
    ]


# Empty, too long by one byte, control characters, what breaks a line or turns its direction, braces.
_NAMES = ["", "a" * 257, "ä" * 128 + "a", "a\x00b", "a\x85b", "a\u2028b", "a\u202eb", "a\u2066", "a{b", "a}b"]
_TTLS_OUT_OF_BOUNDS = [
    None,
    Duration(),
    Duration(seconds=-1),
    Duration(nanos=99_000_000),
    Duration(seconds=300, nanos=1_000_000),
]
# A fraction of a millisecond, more than the standard allows, and more nanoseconds than a second has.
_TTLS_MALFORMED = [
    Duration(seconds=1, nanos=1),
    Duration(seconds=2**62),
    Duration(seconds=1, nanos=2_000_000_000),
]
_LOCK_DELAYS = [Duration(seconds=-1), Duration(seconds=300), *_TTLS_MALFORMED]
_LEASE_IDS = [LEASE_ID[:-1], LEASE_ID + "0", LEASE_ID.upper(), "g" * 32, LEASE_ID + "\n"]

REFUSED: dict[tuple[str, ErrorReason.ValueType], list[Request]] = {
    ("resource", lock_pb2.ERROR_REASON_INVALID_RESOURCE): [
        request
        for name in _NAMES
        for request in (
            acquire_request(name),
            ReleaseRequest(resource=name, lease_id=LEASE_ID),
            KeepAliveRequest(resource=name, lease_id=LEASE_ID),
            GetLockRequest(resource=name),
            CheckTokenRequest(resource=name, fencing_token=1),
        )
    ],
    ("lock_delay", lock_pb2.ERROR_REASON_INVALID_LOCK_DELAY): [
        _acquire(lock_delay=delay) for delay in _LOCK_DELAYS
    ],
    ("ttl", lock_pb2.ERROR_REASON_INVALID_TTL): [
        _acquire(ttl=ttl) for ttl in _TTLS_OUT_OF_BOUNDS + _TTLS_MALFORMED
    ],
    ("wait_timeout", lock_pb2.ERROR_REASON_INVALID_WAIT_TIMEOUT): [
        _acquire(wait_timeout=Duration(seconds=seconds)) for seconds in (-1, 2**62)
    ],
    ("lease_id", lock_pb2.ERROR_REASON_INVALID_LEASE_ID): [
        *_of_lease(""),
        *(
            request
            for lease_id in _LEASE_IDS
            for request in (
                *_of_lease(lease_id),
                _acquire(lease_id=lease_id),
                GetLockRequest(resource=NAME, lease_id=lease_id),
            )
        ),
    ],
    ("holder", lock_pb2.ERROR_REASON_INVALID_HOLDER): [
        _acquire(holder=holder) for holder in ("h" * 257, "a\nb")
    ],
    ("fencing_token", lock_pb2.ERROR_REASON_INVALID_FENCING_TOKEN): [
        CheckTokenRequest(resource=NAME, fencing_token=token) for token in (0, 2**53, 2**64 - 1)
    ],
}

Route = Callable[[LockServer, Any], Awaitable[Failure]]


async def unary(server: LockServer, request: Request) -> Failure:
    """Make a unary call."""
    methods: dict[type, Any] = {
        AcquireRequest: server.locks.Acquire,
        ReleaseRequest: server.locks.Release,
        GetLockRequest: server.locks.GetLock,
        CheckTokenRequest: server.locks.CheckToken,
    }
    return await failure_of(methods[type(request)](request))


async def in_session(server: LockServer, request: Request) -> Failure:
    """Send a command of a session, which goes on."""
    names = {AcquireRequest: "acquire", ReleaseRequest: "release", KeepAliveRequest: "renew"}
    async with SessionCaller(server) as session:
        fields: dict[str, Any] = {names[type(request)]: request}
        result = await session.send(lock_pb2.SessionCommand(**fields))
        assert result.WhichOneof("result") == "error"
        assert (await session.cancel_command(999)).cancel.found is False
    return Failure.of_message(result.error)


async def in_keep_alive(server: LockServer, request: KeepAliveRequest) -> Failure:
    """Send a renewal. The response names it, and the stream goes on."""
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


@pytest.fixture
async def small_server(formed_nodes: FormedNodes, serve: Serve) -> LockServer:
    """A server with bounds that a test can reach."""
    # A heartbeat would change what nodes remember.
    return await serve(await formed_nodes(3), waiters_max=2, commands_max=4, heartbeat_interval_ms=60_000)


@pytest.mark.parametrize(("field", "reason"), REFUSED, ids=str)
async def test_a_request_that_breaks_a_bound_is_refused_and_changes_nothing_on_any_node(
    field: str, reason: ErrorReason.ValueType, small_server: LockServer
) -> None:
    await small_server.acquire(NAME, lease_id=LEASE_ID)
    await small_server.until_carried_out()
    before = await memories(small_server.nodes)
    for request in REFUSED[field, reason]:
        for route in ROUTES[type(request)]:
            failure = await route(small_server, request)
            assert (failure.code, failure.reason) == (INVALID, reason), request
            assert failure.message.startswith(field + " ")
            assert failure.metadata["field"] == field
            assert failure.retry_after_ms is None
            if request in [_acquire(ttl=ttl) for ttl in _TTLS_OUT_OF_BOUNDS]:
                assert failure.metadata == {"field": "ttl", "min": "100ms", "max": "300000ms"}
    await small_server.until_carried_out()
    assert await memories(small_server.nodes) == before


async def test_a_message_or_metadata_over_the_limit_is_refused_by_grpc_without_a_reason(
    small_server: LockServer,
) -> None:
    """The contract says that such an error has no ErrorInfo. The server reads nothing and asks no node."""
    before = await memories(small_server.nodes)
    acquire = small_server.locks.Acquire
    large, small = _acquire(resource="r" * 64 * 1024), _acquire()
    for call in (acquire(large), acquire(small, metadata=[("x", "y" * 32 * 1024)])):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call
        assert refused.value.code() is EXHAUSTED
        assert from_trailing_metadata(refused.value.trailing_metadata()) is None
    await small_server.until_carried_out()
    assert await memories(small_server.nodes) == before


async def test_a_malformed_lease_id_is_repeated_in_no_message_and_no_log(small_server: LockServer) -> None:
    almost_secret = LEASE_ID.upper()
    with capture_logs() as logs:
        for request in (_acquire(lease_id=almost_secret), _of_lease(almost_secret)[0]):
            for route in (unary, in_session):
                failure = await route(small_server, request)
                assert almost_secret.lower() not in f"{failure!r}".lower()
    assert almost_secret.lower() not in repr(logs).lower()


# --- errors that depend on the situation ----------------------------------------------------------


@dataclass
class Stage:
    """Gives a situation its nodes and servers."""

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
        # The lease is at risk, and good until its validity ends.
        renewed = (await session.renew("held", lease_id)).renew
        assert renewed.state == lock_pb2.LEASE_STATE_AT_RISK
        assert renewed.reason == lock_pb2.LEASE_STATE_REASON_QUORUM_UNAVAILABLE
        assert not renewed.HasField("validity")
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


@gives(lock_pb2.ERROR_REASON_TOO_MANY_COMMANDS)
async def as_many_commands_as_a_stream_takes(stage: Stage) -> AsyncIterator[Failure]:
    """One more ends the stream."""
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
    assert (failure.code, failure.metadata) == (EXHAUSTED, {"limit": "4", "scope": "stream"})
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


@gives(lock_pb2.ERROR_REASON_TOO_MANY_NEW_RESOURCES)
async def a_burst_of_new_names(stage: Stage) -> AsyncIterator[Failure]:
    server = await stage.serve(await stage.formed_nodes(3), new_resources_per_second=1)
    for number in range(2):
        await server.acquire(f"{NAME}/{number}")
    failures = [await failure_of(server.acquire(f"{NAME}/new"))]
    await server.acquire(f"{NAME}/1")
    async with SessionCaller(server) as session:
        failures.append(_of(await session.acquire(f"{NAME}/newer")))
    for failure in failures:
        assert (failure.code, failure.metadata) == (EXHAUSTED, {"limit": "1"})
        yield failure


@gives(lock_pb2.ERROR_REASON_CANCELLED)
async def a_cancel_command(stage: Stage) -> AsyncIterator[Failure]:
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
    """A newer client may send one. The stream goes on."""
    server = await stage.small_server()
    async with SessionCaller(server) as session:
        failure = _of(await session.send(lock_pb2.SessionCommand()))
        assert failure.code is INVALID
        assert failure.metadata == {"field": "commands.command", "command_id": "1"}
        assert (await session.acquire(NAME)).HasField("acquire")
        yield failure


@gives(lock_pb2.ERROR_REASON_INVALID_COMMAND_ID)
async def a_command_id_that_is_zero_or_in_use(stage: Stage) -> AsyncIterator[Failure]:
    """The client could not tell the answers apart, so the stream ends."""
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
    """The log stays empty. A string must be UTF-8."""
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
    """The caller sees INTERNAL, without the words of the defect."""

    def break_down(*_: object, **__: object) -> NoReturn:
        raise RuntimeError("inner words")

    server = await stage.small_server()
    for method in ("begin_acquire", "begin_renew"):
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
async def test_an_error_has_the_reason_of_the_contract_by_every_route(
    reason: ErrorReason.ValueType, situation: Situation, stage: Stage
) -> None:
    count = 0
    async for failure in situation(stage):
        assert failure.reason == reason, failure
        count += 1
    assert count


def test_every_reason_of_the_lock_server_has_a_case_here() -> None:
    shown = {reason for _, reason in REFUSED} | set(SITUATIONS)
    others = {*STORAGE_ONLY, *SHOWN_ELSEWHERE, lock_pb2.ERROR_REASON_UNSPECIFIED}
    assert shown == set(ErrorReason.values()) - others
