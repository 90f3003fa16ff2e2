"""Raw bytes into every method of both servers: callers learn their mistake, and the servers go on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import grpc
import pytest
from grpc_reflection.v1alpha import reflection_pb2
from hypothesis import example, given
from hypothesis import strategies as st

from harness.fuzz.flood import draw_inputs, flood
from harness.fuzz.methods import LIBRARY_METHODS, OWN_STREAMS, OWN_UNARY, Ending, Method, is_too_large
from harness.fuzz.settings import factor, tried
from harness.fuzz.site import FuzzSite
from harness.fuzz.wire import inputs
from harness.processes.process_look import ProcessLook, look_at_process
from harness.processes.servers import acquire_request, new_lease_id
from harness.time.eventually import eventually
from redfence_proto import bounds
from redfence_proto.v1 import lock_pb2, lock_pb2_grpc
from redfence_proto.v1.lock_pb2 import KeepAliveRequest, SessionRequest
from redfence_storage.client import StorageClient

Code = grpc.StatusCode
Streams: TypeAlias = "grpc.StreamStreamMultiCallable[Any, Any]"
# Whatever does not wait is answered at once; this is for a machine that stands still.
CALL_TIMEOUT_S = 60.0
# For acquires that wait for a lease that somebody else has.
WAIT_S = 0.1
# On a machine that stands still, a lease of 100 ms may be over before its grant is answered.
OVERDUE = {lock_pb2.ERROR_REASON_VALIDITY_EXHAUSTED, lock_pb2.ERROR_REASON_QUORUM_UNAVAILABLE}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 * factor())]


@contextmanager
def unharmed(site: FuzzSite) -> Iterator[None]:
    """Fail unless both servers go on afterwards as if nothing had been, and logged nothing to worry about."""
    yield
    with site.stub() as stub, StorageClient(site.storage_address) as storage:
        name, lease_id = f"fine/{new_lease_id()}", new_lease_id()
        granted = stub.Acquire(acquire_request(name, lease_id=lease_id), timeout=CALL_TIMEOUT_S)
        assert granted.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        token = granted.lease.fencing_token
        assert storage.put(name, key="k", value=b"v", token=token).highest_token == token
        released = stub.Release(
            lock_pb2.ReleaseRequest(resource=name, lease_id=lease_id), timeout=CALL_TIMEOUT_S
        )
        assert released.outcome == lock_pb2.RELEASE_OUTCOME_RELEASED
    assert not site.complaints()


@contextmanager
def channel_to(site: FuzzSite, method: Method) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(site.storage_address if method.of_storage else site.server_address) as channel:
        yield channel


def waits(message: Any) -> bool:
    """Tell whether an acquire of this message may wait for a lease that ends."""
    if isinstance(message, SessionRequest):
        return any(waits(command.acquire) for command in message.commands)
    return isinstance(message, lock_pb2.AcquireRequest) and message.HasField("wait_timeout")


def check_accepted(message: Any) -> None:
    """Fail unless what was carried out is within the contract's bounds."""
    name = getattr(message, "resource", "fine")
    assert bounds.resource_problem(name) is None, repr(name)
    if isinstance(message, lock_pb2.ReleaseRequest):
        assert bounds.lease_id_problem(message.lease_id) is None
    if isinstance(message, lock_pb2.AcquireRequest):
        assert not message.lease_id or bounds.lease_id_problem(message.lease_id) is None
        assert 100 <= message.ttl.ToMilliseconds() <= bounds.TTL_MS_MAX_DEFAULT
        assert bounds.text_problem(message.holder, bytes_max=bounds.HOLDER_BYTES_MAX) is None
    if hasattr(message, "fencing_token") and (
        not hasattr(message, "value") and not isinstance(message, lock_pb2.AcquireRequest)
    ):
        token = message.fencing_token
        optional = message.DESCRIPTOR.fields_by_name["fencing_token"].has_presence
        assert bounds.fencing_token_problem(token) is None or (optional and token == 0)


def check_unary(method: Method, data: bytes, ending: Ending) -> None:
    """Fail unless a caller of a unary method was told what the contract says."""
    told = (ending.code, ending.reason)
    message = method.parse(data)
    if is_too_large(data):
        assert ending.code is Code.RESOURCE_EXHAUSTED, ending
    elif message is None:
        assert told == (Code.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_MALFORMED_MESSAGE), ending
    elif ending.code is Code.OK:
        check_accepted(message)
    elif ending.code is Code.DEADLINE_EXCEEDED:
        assert waits(message), ending
    else:
        assert ending.code in {
            *(Code.INVALID_ARGUMENT, Code.FAILED_PRECONDITION, Code.NOT_FOUND, Code.UNAVAILABLE)
        }, ending
        # Whatever redfence refuses has a reason.
        assert ending.reason != lock_pb2.ERROR_REASON_UNSPECIFIED, ending
        assert ending.reason != lock_pb2.ERROR_REASON_MALFORMED_MESSAGE, ending
        assert ending.code is not Code.UNAVAILABLE or ending.reason in OVERDUE, ending


def method_name(method: Method) -> str:
    return method.path.rpartition(".")[2]


@pytest.mark.parametrize("method", OWN_UNARY, ids=method_name)
def test_a_unary_call_is_answered_or_its_mistake_is_told(site: FuzzSite, method: Method) -> None:
    seen: set[Code] = set()
    with unharmed(site), channel_to(site, method) as channel:
        call_raw: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(method.path)

        @tried(110)
        @given(inputs(method.request))
        def check(data: bytes) -> None:
            # A message that is too large is refused without a wait.
            waiting = waits(method.parse(data)) and not is_too_large(data)
            try:
                _, call = call_raw.with_call(bytes(data), timeout=WAIT_S if waiting else CALL_TIMEOUT_S)
            except grpc.RpcError as error:
                ending = Ending.of(error)
            else:
                ending = Ending.of(call)
            seen.add(ending.code)
            check_unary(method, data, ending)

        check()
    # A read of what is not there is NOT_FOUND, and few keys are.
    assert seen & {Code.OK, Code.NOT_FOUND}
    assert Code.INVALID_ARGUMENT in seen


# --- streams


@contextmanager
def stream_to(site: FuzzSite, method: Method) -> Iterator[Streams]:
    with channel_to(site, method) as channel:
        yield channel.stream_stream(method.path)


def sent(call_raw: Streams, messages: Sequence[bytes], *, timeout_s: float) -> Any:
    return call_raw(map(bytes, messages), timeout=timeout_s)


def ended(call: Any) -> tuple[list[bytes], Ending]:
    answers: list[bytes] = []
    with suppress(grpc.RpcError):  # told by the ending
        answers.extend(call)
    return answers, Ending.of(call)


def broken_at(method: Method, messages: Sequence[bytes]) -> int | None:
    """Return the first message that cannot be parsed or is too large, or None if there is none."""
    return next(
        (place for place, data in enumerate(messages) if is_too_large(data) or method.parse(data) is None),
        None,
    )


SESSION, KEEP_ALIVE = OWN_STREAMS["Session"], OWN_STREAMS["KeepAlive"]
REFLECTION = LIBRARY_METHODS[-1]


def batches(method: Method) -> st.SearchStrategy[list[bytes]]:
    return st.lists(inputs(method.request), max_size=6)


def test_a_session_answers_each_command_once_or_tells_why_it_ends(site: FuzzSite) -> None:
    seen: set[Code] = set()
    with unharmed(site), stream_to(site, SESSION) as call_raw:

        @tried(80)
        @example([bytes(bounds.MESSAGE_BYTES_MAX + 1)])
        @given(batches(SESSION))
        def check(data: list[bytes]) -> None:
            place = broken_at(SESSION, data)
            whole = [SessionRequest.FromString(each) for each in data[:place]]
            ids = [command.id for request in whole for command in request.commands]
            # The server ends a stream with a message that is too large, so no deadline may come first.
            waiting = any(map(waits, whole)) and not any(map(is_too_large, data))
            answers, ending = ended(sent(call_raw, data, timeout_s=WAIT_S if waiting else CALL_TIMEOUT_S))
            seen.add(ending.code)
            results = [
                result for each in answers for result in lock_pb2.SessionResponse.FromString(each).results
            ]
            for result in results:
                assert result.WhichOneof("result") is not None, result
                assert result.error.code not in {Code.INTERNAL.value[0], Code.UNKNOWN.value[0]}, result
            answered = sorted(result.id for result in results)
            doubled = len(set(ids)) < len(ids)
            if ending.code is Code.OK:
                assert answered == sorted(ids)
                assert place is None
            elif ending.code is Code.INVALID_ARGUMENT:
                assert ending.reason in {
                    *(lock_pb2.ERROR_REASON_MALFORMED_MESSAGE, lock_pb2.ERROR_REASON_INVALID_COMMAND_ID)
                }
                assert place is not None or 0 in ids or doubled, ending
            elif ending.code is Code.DEADLINE_EXCEEDED:
                assert waiting
            else:
                assert (ending.code, place is not None) == (Code.RESOURCE_EXHAUSTED, True), ending
                assert any(map(is_too_large, data))
            assert doubled or len(set(answered)) == len(answered), "a command was answered twice"

        check()
    assert {Code.OK, Code.INVALID_ARGUMENT, Code.RESOURCE_EXHAUSTED} <= seen


def test_a_keep_alive_answers_each_renewal_once_or_tells_why_it_ends(site: FuzzSite) -> None:
    seen: set[Code] = set()
    with unharmed(site), stream_to(site, KEEP_ALIVE) as call_raw:

        @tried(80)
        @given(batches(KEEP_ALIVE))
        def check(data: list[bytes]) -> None:
            place = broken_at(KEEP_ALIVE, data)
            answers, ending = ended(sent(call_raw, data, timeout_s=CALL_TIMEOUT_S))
            seen.add(ending.code)
            responses = [lock_pb2.KeepAliveResponse.FromString(each) for each in answers]
            for response in responses:
                assert response.HasField("error") is (response.state == lock_pb2.LEASE_STATE_UNSPECIFIED)
                assert response.error.code in {Code.OK.value[0], Code.INVALID_ARGUMENT.value[0]}, response
            if place is None:
                assert ending.code is Code.OK, ending
                asked = [KeepAliveRequest.FromString(each).sequence for each in data]
                assert sorted(response.sequence for response in responses) == sorted(asked)
            elif is_too_large(data[place]):
                assert ending.code is Code.RESOURCE_EXHAUSTED, ending
            else:
                told = (ending.code, ending.reason)
                # The server may refuse a message that is too large before it reads the messages ahead of it.
                assert told == (Code.INVALID_ARGUMENT, lock_pb2.ERROR_REASON_MALFORMED_MESSAGE) or (
                    ending.code is Code.RESOURCE_EXHAUSTED and any(map(is_too_large, data))
                ), ending

        check()
    assert {Code.OK, Code.INVALID_ARGUMENT} <= seen


@pytest.mark.parametrize("method", [SESSION, KEEP_ALIVE], ids=method_name)
def test_a_stream_that_is_cancelled_at_any_point_does_no_harm(site: FuzzSite, method: Method) -> None:
    with unharmed(site), stream_to(site, method) as call_raw:

        @tried(40)
        @given(batches(method), st.integers(0, 3))
        def check(data: list[bytes], read_count: int) -> None:
            call = sent(call_raw, data, timeout_s=CALL_TIMEOUT_S)
            with suppress(grpc.RpcError):  # it was ended for what it was sent
                for _ in zip(range(read_count), call, strict=False):
                    pass
            call.cancel()
            assert call.code() not in {Code.INTERNAL, Code.UNKNOWN}

        check()


@pytest.mark.parametrize("method", LIBRARY_METHODS, ids=method_name)
def test_health_and_reflection_do_no_harm_to_what_is_served(site: FuzzSite, method: Method) -> None:
    with unharmed(site), stream_to(site, method) as call_raw:

        @tried(30)
        @given(inputs(method.request))
        def check(data: bytes) -> None:
            call = sent(call_raw, [data], timeout_s=CALL_TIMEOUT_S)
            with suppress(grpc.RpcError, StopIteration):  # it may be refused
                next(call)
            call.cancel()
            assert call.code() is not Code.INTERNAL

        check()


def test_a_caller_that_leaves_before_it_has_its_answer_does_no_harm(site: FuzzSite) -> None:
    """The library of reflection fails to send the rest of the answer, and logs that."""
    # The server may send a few bytes of an answer, and the rest once the caller reads.
    options = (("grpc.http2.lookahead_bytes", 16), ("grpc.http2.bdp_probe", 0))
    request = reflection_pb2.ServerReflectionRequest(list_services="all").SerializeToString()
    with unharmed(site):
        for _ in range(10):
            with grpc.insecure_channel(site.server_address, options=options) as channel:
                call: Any = channel.stream_stream(REFLECTION.path)(iter([request]), timeout=CALL_TIMEOUT_S)
                call.initial_metadata()  # it comes with the first bytes of the answer
                call.cancel()


# --- what it costs

FLOOD_INPUTS = 2_000
RSS_GROWTH_MAX_BYTES = 8 * 2**20


def looks(site: FuzzSite) -> tuple[ProcessLook, ...]:
    return tuple(look_at_process(process.pid) for process in (site.server, site.storage))


def fd_counts(site: FuzzSite) -> list[int]:
    return [look.fd_count for look in looks(site)]


async def test_thousands_of_inputs_leave_no_memory_and_no_file_behind(site: FuzzSite) -> None:
    """The server warms up before the first measurement."""
    drawn = draw_inputs(500)
    with unharmed(site):
        # Another connection is there in either look, so that the same is compared.
        async with grpc.aio.insecure_channel(site.server_address) as channel:
            stub = lock_pb2_grpc.LockServiceStub(channel)
            await flood(site, drawn, count=FLOOD_INPUTS)
            await stub.GetLock(lock_pb2.GetLockRequest(resource="fine"), timeout=CALL_TIMEOUT_S)
            before, fds_before = looks(site), fd_counts(site)
            await flood(site, drawn, count=FLOOD_INPUTS * factor())
            await eventually(
                lambda: all(map(int.__le__, fd_counts(site), fds_before)),
                timeout_s=CALL_TIMEOUT_S,
                interval_s=0.05,
            )
            after = looks(site)
    for was, is_now in zip(before, after, strict=True):
        assert is_now.rss_bytes - was.rss_bytes < RSS_GROWTH_MAX_BYTES, (was, is_now)
