"""The fast transport as a client of raw HTTP/2 sees it: limits, broken calls, flow control, and ends."""

from __future__ import annotations

import asyncio
import base64
import gc
import gzip
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any

import grpc
import ngh2
import pytest

from harness.http2.raw_client import Answer, RawClient
from harness.processes.certificates import Authority, Certificate, protection
from harness.processes.ports import HOST
from redfence_proto.rich_error import from_trailing_metadata
from redfence_server.api.serving import LIMITS, new_server
from redfence_server.http2.call import Call
from redfence_server.http2.connection import Connection
from redfence_server.http2.server import Server
from redfence_server.http2.settings import ConnectionSettings, Transport
from redfence_server.http2.wire import framed
from redfence_server.sharing.budget import Budget
from redfence_server.sharing.shares import ConnectionShares

MESSAGE_BYTES_MAX = 64 * 1024
BUFFERED_BYTES = 4 * 1024 * 1024


class Echo:
    """Methods that show how calls begin and end."""

    def __init__(self) -> None:
        self.begun = 0
        self.cancelled = 0
        self.go_on = asyncio.Event()

    async def say(self, request: bytes, context: Any) -> bytes:
        return request

    async def wait(self, request: bytes, context: Any) -> bytes:
        self.begun += 1
        try:
            await self.go_on.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return request

    async def read_late(self, _: Any, context: Any) -> None:
        await self.go_on.wait()
        byte_count = 0
        while (message := await context.read()) is not grpc.aio.EOF:
            byte_count += len(message)
        await context.write(str(byte_count).encode())

    async def write_much(self, request: bytes, context: Any) -> None:
        if request.startswith(b"late "):
            await self.go_on.wait()
        for _ in range(int(request.removeprefix(b"late "))):
            self.begun += 1
            await context.write(b"x" * 1024)

    def handler(self) -> Any:
        unary, writer = grpc.unary_unary_rpc_method_handler, grpc.unary_stream_rpc_method_handler
        return grpc.method_handlers_generic_handler(
            "test.Echo",
            {
                "Say": unary(self.say, bytes, bytes),
                "Wait": unary(self.wait, bytes, bytes),
                "ReadLate": grpc.stream_stream_rpc_method_handler(self.read_late, bytes, bytes),
                "WriteMuch": writer(self.write_much, bytes, bytes),
            },
        )


class Site:
    def __init__(self, settings: ConnectionSettings = LIMITS, tls: Any = None) -> None:
        self.echo = Echo()
        self.shares = ConnectionShares(Budget(100), Budget(BUFFERED_BYTES))
        self.server = Server(settings, adapt=lambda _, handler: handler, shares=self.shares)
        self.server.add_generic_rpc_handlers([self.echo.handler()])
        address = f"{HOST}:0"
        self.port = (
            self.server.add_secure_port(address, tls) if tls else self.server.add_insecure_port(address)
        )

    @property
    def connection(self) -> Connection:
        """The only one."""
        (connection,) = self.server._connections
        return connection


@asynccontextmanager
async def serving(tls: Any = None, **liveness: Any) -> AsyncIterator[Site]:
    site = Site(replace(LIMITS, liveness=replace(LIMITS.liveness, **liveness)), tls)
    await site.server.start()
    raised: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: raised.append(context))
    try:
        yield site
    finally:
        await site.server.stop(0)
    assert not raised


@pytest.fixture
async def site() -> AsyncIterator[Site]:
    async with serving() as site:
        yield site


@pytest.fixture
async def client(site: Site) -> AsyncIterator[RawClient]:
    async with RawClient(site.port) as client:
        yield client
        # The connection must serve on after each test, unless the test has ended it.
        if not client.goaways and not client.ended:
            answer = await client.call("/test.Echo/Say", b"still here")
            assert answer.body == framed(b"still here")


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(10):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


async def until_closed(reader: asyncio.StreamReader) -> None:
    async with asyncio.timeout(10):
        with suppress(ConnectionError):  # as good as an end
            while await reader.read(1000):
                pass


# --- calls


async def test_a_call_is_answered_with_headers_message_and_trailers(client: RawClient) -> None:
    answer = await client.call("/test.Echo/Say", b"hello")
    assert answer.headers == {
        b":status": b"200",
        b"content-type": b"application/grpc",
        b"grpc-status": b"0",
    }
    assert answer.body == framed(b"hello")
    assert answer.reset is None


@pytest.mark.parametrize(
    ("path", "headers", "status"),
    [
        ("/test.Echo/None", (), "12 /test.Echo/None is no method of this server"),
        ("/other/Say", (), "12 /other/Say is no method of this server"),
        ("/test.Echo/Say", ((b"grpc-timeout", b"1s"),), "3 grpc-timeout: '1s' is not 1 to 8 digits"),
        ("/test.Echo/Say", ((b"grpc-encoding", b"br"),), "12 grpc-encoding: 'br' is unknown"),
        ("/test.Echo/Say", ((b"x", b"y" * 17_000),), "8 the metadata has 17"),
    ],
)
async def test_a_request_with_wrong_headers_ends_with_a_status(
    client: RawClient, path: str, headers: tuple[tuple[bytes, bytes], ...], status: str
) -> None:
    answer = await client.call(path, b"hello", *headers)
    assert answer.status.startswith(status)


async def test_a_request_that_is_no_grpc_gets_the_http_status_415(client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Say", content_type=b"text/plain")
    assert (await client.closed(stream_id)).headers == {b":status": b"415"}


@pytest.mark.parametrize("method", [b"GET", b"CONNECT"])
async def test_only_post_carries_a_call_and_another_method_ends_no_other_call(
    client: RawClient, site: Site, method: bytes
) -> None:
    waiting = client.begin("/test.Echo/Wait")
    client.send(waiting, framed(b"a"), end=True)
    other = client.begin("/test.Echo/Say", method=method)
    assert (await client.closed(other)).headers == {b":status": b"405"}
    site.echo.go_on.set()
    assert (await client.closed(waiting)).status == "0 "


async def test_a_second_message_of_a_unary_call_is_refused_before_the_request_ends(client: RawClient) -> None:
    """Otherwise a peer that never ends it could fill the memory."""
    stream_id = client.begin("/test.Echo/Say")
    client.send(stream_id, framed(b"a") + framed(b"b"))
    answer = await client.closed(stream_id)
    assert answer.status.startswith("12 the request has more than one message")


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", "12 the request has no message; this method takes exactly 1"),
        (framed(b"a") + framed(b"b"), "12 the request has more than one message"),
        (framed(b"abc")[:-1], "13 the request ends within a message"),
        (b"\1" + framed(b"abc")[1:], "13 a message has the compression flag 1"),
    ],
)
async def test_a_unary_call_with_a_broken_body_ends_with_a_status(
    client: RawClient, body: bytes, status: str
) -> None:
    stream_id = client.begin("/test.Echo/Say")
    client.send(stream_id, body, end=True)
    assert (await client.closed(stream_id)).status.startswith(status)


async def test_a_too_large_message_is_refused_before_it_has_come(client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Say")
    client.send(stream_id, b"\0" + (MESSAGE_BYTES_MAX + 1).to_bytes(4))
    answer = await client.closed(stream_id)
    assert answer.status.startswith("8 the message has 65537 bytes; at most 65536")
    assert answer.reset == ngh2.ErrorCode.NO_ERROR


async def test_the_largest_message_is_taken_in_pieces(client: RawClient) -> None:
    message = bytes(range(256)) * (MESSAGE_BYTES_MAX // 256)
    answer = await client.call("/test.Echo/Say", message)
    assert answer.body == framed(message)


async def test_a_compressed_request_is_understood(client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Say", (b"grpc-encoding", b"gzip"))
    client.send(stream_id, b"\1" + framed(gzip.compress(b"hello"))[1:], end=True)
    assert (await client.closed(stream_id)).body == framed(b"hello")


# --- the end of a call


async def test_a_reset_cancels_the_method(site: Site, client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Wait")
    client.send(stream_id, framed(b""), end=True)
    await until(lambda: site.echo.begun == 1)
    client.reset(stream_id)
    await until(lambda: site.echo.cancelled == 1)


async def test_a_lost_connection_cancels_its_methods(site: Site) -> None:
    async with RawClient(site.port) as client:
        for _ in range(3):
            client.send(client.begin("/test.Echo/Wait"), framed(b""), end=True)
        await until(lambda: site.echo.begun == 3)
    await until(lambda: site.echo.cancelled == 3)


async def test_a_deadline_cancels_the_method_and_is_told(site: Site, client: RawClient) -> None:
    answer = await client.call("/test.Echo/Wait", b"", (b"grpc-timeout", b"20m"))
    assert answer.status == "4 the deadline has passed"
    assert site.echo.cancelled == 1


async def test_thousands_of_resets_do_not_end_the_connection(site: Site, client: RawClient) -> None:
    for _ in range(3_000):
        stream_id = client.begin("/test.Echo/Wait")
        client.send(stream_id, framed(b""), end=True)
        client.reset(stream_id)
    assert (await client.call("/test.Echo/Say", b"on")).body == framed(b"on")
    assert site.echo.begun == site.echo.cancelled


async def test_a_connection_that_resets_many_calls_is_read_in_small_parts(
    site: Site, client: RawClient
) -> None:
    """So that the connections of others need not wait for a hundred calls."""
    await client.call("/test.Echo/Say", b"")
    (connection,) = site.server._connections
    usual = len(connection.get_buffer(-1))
    for _ in range(100):
        for _ in range(20):
            client.reset(client.begin("/test.Echo/Say"))
        await asyncio.sleep(0.01)
        # A read may have only some of them.
        if len(connection.get_buffer(-1)) < usual / 4:
            break
    assert len(connection.get_buffer(-1)) < usual / 4
    await client.call("/test.Echo/Say", b"")
    assert len(connection.get_buffer(-1)) == usual


# --- flow control


async def test_a_peer_may_send_no_more_than_a_window_that_is_not_read(site: Site, client: RawClient) -> None:
    message = framed(b"x" * 1019)
    stream_id = client.begin("/test.Echo/ReadLate")
    client.send(stream_id, message * 1024, end=True)
    for _ in range(30):  # time enough to send all of it, if the server let it
        assert (await client.call("/test.Echo/Say", b"beside")).body == framed(b"beside")
    assert client.unsent(stream_id) >= len(message) * 1024 - 3 * 65_535
    site.echo.go_on.set()
    assert (await client.closed(stream_id)).body == framed(str(1019 * 1024).encode())


async def test_bodies_of_refused_calls_use_up_no_window(site: Site, client: RawClient) -> None:
    for _ in range(80):
        stream_id = client.begin("/test.Echo/None")
        client.send(stream_id, b"x" * 60_000, end=True)
        assert (await client.closed(stream_id)).status.startswith("12 ")
    assert client.http2.remote_window_size > 60_000


async def test_a_method_waits_for_a_peer_that_takes_nothing(site: Site) -> None:
    window = {ngh2.Setting.INITIAL_WINDOW_SIZE: 0}
    async with RawClient(site.port, settings=window) as client:
        stream_id = client.begin("/test.Echo/WriteMuch")
        client.send(stream_id, framed(b"1000"), end=True)
        await client.until(lambda: bool(client.answers[stream_id].headers))
        assert 60 < site.echo.begun < 70
        client.open_windows(stream_id)
        assert len((await client.closed(stream_id)).body) == 1000 * 1029
        assert site.echo.begun == 1000


async def _begin_headers(client: RawClient) -> int:
    return client.begin("/test.Echo/Say", *((b"x-%d" % number, b"y" * 3_000) for number in range(5)))


async def _begin_half_a_message(client: RawClient) -> int:
    stream_id = client.begin("/test.Echo/Say")
    client.send(stream_id, framed(b"x" * 64_000)[:60_000])
    return stream_id


async def _begin_compressed_message(client: RawClient) -> int:
    """The call waits for the end of its request with a message 600 times as large as its bytes."""
    stream_id = client.begin("/test.Echo/Say", (b"grpc-encoding", b"gzip"))
    packed = gzip.compress(b"x" * 60_000)
    client.send(stream_id, b"\1" + len(packed).to_bytes(4) + packed)
    return stream_id


async def _begin_unread_messages(client: RawClient) -> int:
    """A message of gzip is 600 times as large as its bytes."""
    stream_id = client.begin("/test.Echo/ReadLate", (b"grpc-encoding", b"gzip"))
    packed = gzip.compress(b"x" * 60_000)
    client.send(stream_id, (b"\1" + len(packed).to_bytes(4) + packed) * 3)
    return stream_id


async def _begin_unread_answers(client: RawClient) -> int:
    stream_id = client.begin("/test.Echo/WriteMuch")
    client.send(stream_id, framed(b"200"), end=True)
    return stream_id


async def _begin_unread_answer(client: RawClient) -> int:
    stream_id = client.begin("/test.Echo/Say")
    client.send(stream_id, framed(b"x" * 30_000), end=True)
    return stream_id


def _is_refused(answer: Answer) -> bool:
    if b"grpc-status" in answer.headers:
        details = base64.b64decode(answer.headers[b"grpc-status-details-bin"] + b"==")
        error = from_trailing_metadata([("grpc-status-details-bin", details)])
        assert error is not None
        assert (error.reason_name, error.metadata) == ("TOO_MANY_BUFFERED_BYTES", {"scope": "peer"})
        assert error.retry_after_ms == 1_000
        return answer.status.startswith("8 the open calls")
    return answer.reset == ngh2.ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize(
    "begin",
    [
        _begin_headers,
        _begin_half_a_message,
        _begin_compressed_message,
        _begin_unread_messages,
        _begin_unread_answers,
        _begin_unread_answer,
    ],
)
async def test_one_peer_makes_the_server_keep_no_more_than_its_part(
    site: Site, begin: Callable[[RawClient], Awaitable[int]]
) -> None:
    """Calls beyond it are refused, an earlier call goes on, another peer is served, and all is given back."""
    buffered = site.shares.buffered_bytes
    window = {ngh2.Setting.INITIAL_WINDOW_SIZE: 0}
    async with RawClient(site.port, settings=window, source="127.0.0.2") as client:
        first = await begin(client)
        for _ in range(500):
            await begin(client)
            await asyncio.sleep(0)
            assert buffered.taken <= BUFFERED_BYTES // 2
        assert buffered.refusals
        ended = [answer for answer in client.answers.values() if answer.closed]
        assert ended
        assert all(map(_is_refused, ended))
        assert not client.answers[first].closed
        assert buffered.taken > BUFFERED_BYTES // 3
        async with RawClient(site.port) as other:
            assert (await other.call("/test.Echo/Say", b"beside")).body == framed(b"beside")
    await until(lambda: not buffered.taken)


async def test_small_answers_leave_without_waiting_for_an_ack(site: Site, client: RawClient) -> None:
    await client.call("/test.Echo/Say", b"")
    assert site.connection._transport is not None
    connected = site.connection._transport.get_extra_info("socket")
    assert connected.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


# --- full sockets


@dataclass
class Reach:
    """Holds a site, and opens clients whose windows are open, so that only the socket stops the server."""

    site: Site
    tls: Any

    @asynccontextmanager
    async def client(self) -> AsyncIterator[RawClient]:
        window = {ngh2.Setting.INITIAL_WINDOW_SIZE: 2**31 - 1}
        async with RawClient(self.site.port, settings=window, source="127.0.0.2", tls=self.tls) as client:
            client.http2.set_local_window_size(2**31 - 1)
            await client.call("/test.Echo/Say", b"hello")
            yield client

    async def fill(self, client: RawClient) -> None:
        """Let the client read no more, and fill its socket."""
        client.stop_reading()
        async with asyncio.timeout(10):
            while not any(each.out.paused for each in self.site.server._connections):
                client.send(client.begin("/test.Echo/WriteMuch"), framed(b"60"), end=True)
                await asyncio.sleep(0)


@pytest.fixture(params=["plain", "TLS"])
async def reach(
    request: pytest.FixtureRequest, certificate: Certificate, authority: Authority
) -> AsyncIterator[Reach]:
    found = protection(f"{HOST}:0", certificate) if request.param == "TLS" else None
    async with serving(found and found.for_fast()) as site:
        site.shares.buffered_bytes.size = 2 * 1024 * 1024
        yield Reach(site, found and authority.client_context())


@pytest.mark.parametrize("at_once", [1, 10])
async def test_what_full_sockets_do_not_take_is_a_part_of_it(reach: Reach, at_once: int) -> None:
    site, buffered = reach.site, reach.site.shares.buffered_bytes
    buffered.size = 1024 * 1024

    def kept() -> int:
        return sum(
            each._http2.queued_body_size()
            + sum(its.get_write_buffer_size() for its in each.out._unread._transports)
            for each in site.server._connections
            if not each.out.closed
        )

    async with AsyncExitStack() as stack:
        for _ in range(16):
            client = await stack.enter_async_context(reach.client())
            client.stop_reading()
            for _ in range(200 // at_once):
                for _ in range(at_once):
                    client.send(client.begin("/test.Echo/WriteMuch"), framed(b"60"), end=True)
                await asyncio.sleep(0)
                # It counts at the end of a turn, or after 64 KiB.
                assert kept() - 2 * 64 * 1024 <= buffered.taken <= buffered.size // 2
        assert buffered.refusals
        async with RawClient(site.port, tls=reach.tls) as other:
            assert (await other.call("/test.Echo/Say", b"beside")).body == framed(b"beside")
    await until(lambda: not buffered.taken)


async def test_a_peer_that_reads_on_gets_every_answer(reach: Reach) -> None:
    async with reach.client() as client:
        await reach.fill(client)
        stream_ids = [client.begin("/test.Echo/Say") for _ in range(20)]
        for stream_id in stream_ids:
            client.send(stream_id, framed(b"later"), end=True)
        client.read_on()
        for stream_id in client.answers:
            answer = await client.closed(stream_id)
            assert answer.body in {framed(b"hello"), framed(b"later"), framed(b"x" * 1024) * 60}
    await until(lambda: not reach.site.shares.buffered_bytes.taken)


@pytest.mark.slow
async def test_a_peer_that_only_reads_keeps_its_connection() -> None:
    """It answers no ping, because the answer to its call comes first."""
    async with serving(ping_after_s=0.3, ping_timeout_s=0.3) as site, Reach(site, None).client() as client:
        client.stop_reading()
        stream_id = client.begin("/test.Echo/WriteMuch")
        client.send(stream_id, framed(b"1000000"), end=True)
        await asyncio.sleep(0)
        loop = asyncio.get_running_loop()
        until_s = loop.time() + 1.5
        while loop.time() < until_s:
            assert await client._reader.read(50_000)
            await asyncio.sleep(0.001)


async def test_a_full_socket_loses_the_calls_that_wrote_last_and_no_other(reach: Reach) -> None:
    site = reach.site
    async with reach.client() as client:
        late = [client.begin("/test.Echo/WriteMuch") for _ in range(60)]
        for stream_id in late:
            client.send(stream_id, framed(b"late 40"), end=True)
        await until(lambda: len(site.connection.tasks) == len(late))
        await reach.fill(client)
        site.echo.go_on.set()
        await until(lambda: len(site.connection.tasks) == 0)
        assert site.shares.buffered_bytes.refusals
        client.read_on()
        await client.until(lambda: all(each.closed for each in client.answers.values()))
        answers = [client.answers[stream_id] for stream_id in late]
        whole = [each for each in answers if each.body == framed(b"x" * 1024) * 40]
        assert len(whole) > 10
        assert {each.reset for each in answers if each not in whole} == {ngh2.ErrorCode.ENHANCE_YOUR_CALM}


async def test_answers_without_a_message_count_too_while_the_socket_is_full(reach: Reach) -> None:
    site, buffered = reach.site, reach.site.shares.buffered_bytes
    async with reach.client() as client:
        for _ in range(100):
            client.send(client.begin("/test.Echo/Wait"), framed(b""), end=True)
        await until(lambda: len(site.connection.tasks) == 100)
        await reach.fill(client)
        await until(lambda: len(site.connection.tasks) == 100)
        before = buffered.taken
        site.connection.end_calls(grpc.StatusCode.UNAVAILABLE, "so that they end")
        await until(lambda: not site.connection.tasks)
        assert before - 300_000 < buffered.taken < before
    await until(lambda: not buffered.taken)


async def test_a_close_sends_what_is_queued_also_to_a_full_socket(reach: Reach) -> None:
    site = reach.site
    async with reach.client() as client:
        late = [client.begin("/test.Echo/WriteMuch") for _ in range(20)]
        for stream_id in late:
            client.send(stream_id, framed(b"late 40"), end=True)
        await until(lambda: len(site.connection.tasks) == len(late))
        client.stop_reading()
        client.send(client.begin("/test.Echo/WriteMuch"), framed(b"1000000"), end=True)
        await until(lambda: site.connection.out.paused)
        site.echo.go_on.set()
        await until(lambda: len(site.connection.tasks) == 1)
        site.connection.out.close()
        client.read_on()
        await client.until(lambda: client.ended)
        assert {client.answers[stream_id].status for stream_id in late} == {"0 "}


async def test_an_idle_connection_ends_though_its_peer_leaves_the_last_bytes_unread() -> None:
    async with serving(idle_s=0.1, ping_timeout_s=0.1) as site, Reach(site, None).client() as client:
        await Reach(site, None).fill(client)
        await until(lambda: not site.server._connections)
        assert not site.shares.buffered_bytes.taken


async def test_small_answers_that_are_not_read_end_their_own_calls_alone(site: Site) -> None:
    buffered = site.shares.buffered_bytes
    buffered.size = 400_000
    window = {ngh2.Setting.INITIAL_WINDOW_SIZE: 0}
    async with RawClient(site.port, settings=window) as client:
        waiting = client.begin("/test.Echo/Wait")
        client.send(waiting, framed(b""), end=True)
        for _ in range(300):
            client.send(client.begin("/test.Echo/Say"), framed(b"small"), end=True)
            await asyncio.sleep(0)
        await client.until(lambda: sum(each.closed for each in client.answers.values()) > 50)
        assert buffered.refusals
        assert not client.answers[waiting].closed


async def test_a_call_that_ends_takes_no_other_with_it(reach: Reach) -> None:
    """Its answer counts before its request is forgotten."""
    site, buffered = reach.site, reach.site.shares.buffered_bytes
    async with reach.client() as client:
        for _ in range(50):
            client.send(client.begin("/test.Echo/Wait"), framed(b""), end=True)
        client.stop_reading()
        client.send(client.begin("/test.Echo/WriteMuch"), framed(b"1000000"), end=True)
        await until(lambda: site.connection.out.paused)
        buffered.size = 2 * buffered.taken + 1_000
        calls = site.connection._calls
        next(iter(calls.values())).end(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline has passed")
        await until(lambda: len(calls) < 51)
        assert not site.connection.out.closed


# --- addresses


@pytest.mark.parametrize("transport", list(Transport))
@pytest.mark.parametrize(
    ("listen", "families"),
    [("127.0.0.1", "4"), ("[::1]", "6"), ("0.0.0.0", "46"), ("[::]", "46")],
)
async def test_both_transports_listen_on_the_same_addresses(
    listen: str, families: str, transport: Transport
) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 on this machine")
    server = new_server(transport)
    server.add_generic_rpc_handlers([Echo().handler()])
    port = server.add_insecure_port(f"{listen}:0")
    await server.start()
    found = ""
    for family, host in (("4", "127.0.0.1"), ("6", "::1")):
        with suppress(ConnectionRefusedError):
            _, writer = await asyncio.open_connection(host, port)
            found += family
            writer.close()
    await server.stop(0)
    assert found == families


# --- the end of a connection


async def test_a_connection_that_never_speaks_http2_is_closed() -> None:
    async with serving(handshake_s=0.05) as site:
        reader, writer = await asyncio.open_connection(HOST, site.port)
        await until_closed(reader)
        writer.close()


async def test_bytes_that_are_no_http2_end_the_connection(site: Site) -> None:
    reader, writer = await asyncio.open_connection(HOST, site.port)
    writer.write(b"GET / HTTP/1.1\r\nhost: test\r\n\r\n")
    await until_closed(reader)
    writer.close()


async def test_a_peer_that_breaks_http2_ends_its_connection_and_nothing_else(site: Site) -> None:
    ping_on_a_stream = b"\0\0\x08\x06\0\0\0\0\1" + b"\0" * 8
    async with RawClient(site.port) as client:
        client.send(client.begin("/test.Echo/Wait"), framed(b""), end=True)
        client.begin("/test.Echo/Say", content_type=b"text/plain")
        client.send_raw(ping_on_a_stream)
        await client.until(lambda: client.ended)
        assert [each.error_code for each in client.goaways] == [ngh2.ErrorCode.PROTOCOL_ERROR]
    await until(lambda: site.echo.begun == site.echo.cancelled)


async def test_an_ended_call_leaves_memory_without_the_garbage_collector(client: RawClient) -> None:
    gc.collect()
    gc.disable()
    try:
        for path in ("/test.Echo/Say", "/test.Echo/None", "/test.Echo/WriteMuch"):
            await client.call(path, b"1", (b"grpc-timeout", b"10S"))
        for path in ("/test.Echo/Wait", "/test.Echo/ReadLate"):
            await client.call(path, b"1", (b"grpc-timeout", b"10m"))
        await asyncio.sleep(0)
        assert not [each for each in gc.get_objects() if isinstance(each, Call)]
    finally:
        gc.enable()


async def test_a_peer_that_answers_no_ping_loses_its_connection_and_its_calls() -> None:
    settings = {"ping_after_s": 0.05, "ping_timeout_s": 0.05}
    async with serving(**settings) as site, RawClient(site.port) as client:
        client.send(client.begin("/test.Echo/Wait"), framed(b""), end=True)
        await until(lambda: site.echo.begun == 1)
        client.stop_reading()
        await until(lambda: site.echo.cancelled == 1)


async def test_a_connection_without_calls_is_closed_in_order() -> None:
    async with serving(idle_s=0.05) as site, RawClient(site.port) as client:
        await client.until(lambda: client.ended)
        assert [each.error_code for each in client.goaways] == [0]


async def test_a_stop_lets_calls_end_within_the_grace(site: Site, client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Wait")
    client.send(stream_id, framed(b"bye"), end=True)
    await until(lambda: site.echo.begun == 1)
    stopping = asyncio.create_task(site.server.stop(30))
    await client.until(lambda: bool(client.goaways))
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(HOST, site.port)
    site.echo.go_on.set()
    assert (await client.closed(stream_id)).body == framed(b"bye")
    await stopping
    await client.until(lambda: client.ended)


async def test_a_stop_ends_calls_that_outlast_the_grace(site: Site, client: RawClient) -> None:
    stream_id = client.begin("/test.Echo/Wait")
    client.send(stream_id, framed(b""), end=True)
    await until(lambda: site.echo.begun == 1)
    await site.server.stop(0.01)
    assert (await client.closed(stream_id)).status == "14 the server has stopped"
    assert site.echo.cancelled == 1
