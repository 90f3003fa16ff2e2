"""A token crosses a process boundary as headers: every spelling is read, and the storage checks it there."""

from __future__ import annotations

import sqlite3
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, closing, contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import redfence
from harness.processes.ports import HOST, free_port
from redfence import FencingToken, InvalidArgumentError, fence, propagation
from redfence.testing import FakeLockServer
from redfence_proto import bounds

_TOKEN = FencingToken("orders/42 é", 34)
_CALL = "/shop.Payments/Pay"

_letters = st.characters(exclude_categories=("Cc", "Cs"), exclude_characters="{}")
_resources = st.text(_letters, min_size=1, max_size=60)
_tokens = st.integers(1, bounds.FENCING_TOKEN_MAX)


@settings(max_examples=50)
@given(_resources, _tokens)
def test_what_is_sent_is_read_whatever_carries_it(resource: str, number: int) -> None:
    token = FencingToken(resource, number)
    headers = propagation.to_headers(token)
    assert all(value.isascii() and value.isprintable() for value in headers.values())
    message = Message()
    for name, value in headers.items():
        message[name] = value
    pairs = propagation.to_metadata(token)
    carried: list[Any] = [
        headers,
        message,
        {name.upper(): value for name, value in headers.items()},
        {f"HTTP_{name.upper().replace('-', '_')}": value for name, value in headers.items()},
        [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    ]
    assert [propagation.from_headers(each) for each in carried] == [token] * len(carried)
    assert propagation.from_metadata((("user-agent", "grpc"), *pairs)) == token


def test_without_a_lease_nothing_is_sent_or_read() -> None:
    assert propagation.to_headers(redfence.current_lease()) == {}
    assert propagation.to_metadata(None) == ()
    assert propagation.from_headers({"Accept": "*/*", "wsgi.input": object()}) is None
    assert propagation.from_metadata(None) is propagation.from_metadata(()) is None


@pytest.mark.parametrize(
    ("resource", "token", "field", "problem"),
    [
        ("a", None, "redfence-token", "header redfence-token is missing, but redfence-resource is there"),
        (None, "1", "redfence-resource", "header redfence-resource is missing, but redfence-token is there"),
        ("a", "", "redfence-token", "must be a decimal number below 2^53, not ''"),
        ("a", "-1", "redfence-token", "not '-1'"),
        ("a", "1, 2", "redfence-token", "not '1, 2'"),
        ("a", "٣", "redfence-token", "not '٣'"),
        ("a", "9" * 99, "redfence-token", f"not '{'9' * 64}…'"),
        ("a", "0", "redfence-token", "header redfence-token is 0; a fencing token is greater than 0"),
        ("a", str(2**53), "redfence-token", "header redfence-token is 9007199254740992; a fencing token"),
        ("", "1", "redfence-resource", "must be percent-encoded UTF-8, not ''"),
        ("é", "1", "redfence-resource", "must be percent-encoded UTF-8, not 'é'"),
        ("a b", "1", "redfence-resource", "not 'a b'"),
        ("%4", "1", "redfence-resource", "not '%4'"),
        ("%ff", "1", "redfence-resource", "not '%ff'"),
        ("%00", "1", "redfence-resource", "header redfence-resource has a control character"),
        ("a" * 257, "1", "redfence-resource", "header redfence-resource is 257 bytes long"),
    ],
)
def test_a_header_that_is_missing_or_malformed_is_named(
    resource: str | None, token: str | None, field: str, problem: str
) -> None:
    sent = {"redfence-resource": resource, "redfence-token": token}
    with pytest.raises(InvalidArgumentError) as raised:
        propagation.from_headers({name: value for name, value in sent.items() if value is not None})
    assert raised.value.field == field
    assert problem in str(raised.value)


def test_two_different_tokens_are_refused() -> None:
    pairs = propagation.to_metadata(_TOKEN)
    assert propagation.from_metadata(pairs + pairs) == _TOKEN
    with pytest.raises(
        InvalidArgumentError, match="redfence-token occurs with two values, '34' and '35'; send one"
    ):
        propagation.from_metadata((*pairs, ("redfence-token", "35")))


class Payments:
    """A service that has no lock: it writes under the token of its callers."""

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._transaction() as connection:
            connection.execute(fence.create_table_sql())
            connection.execute("CREATE TABLE paid (token bigint)")

    def pay(self, token: FencingToken | None) -> str:
        """Return what happened."""
        try:
            with self._transaction() as connection:
                fence.check(connection, token, resource=_TOKEN.resource)
                connection.execute("INSERT INTO paid VALUES (?)", (token and token.token,))
        except (redfence.StaleTokenError, InvalidArgumentError) as error:
            return str(error)
        return "paid"

    def paid(self) -> list[int]:
        """Return the tokens under which it was paid."""
        with self._transaction() as connection:
            return [token for (token,) in connection.execute("SELECT token FROM paid ORDER BY rowid")]

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        with closing(sqlite3.connect(self._path)) as connection, connection:
            yield connection


Pay = Callable[[Any], str]


@contextmanager
def _over_http(payments: Payments) -> Iterator[Pay]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            answer = payments.pay(propagation.from_headers(self.headers)).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer((HOST, 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        url = f"http://{HOST}:{server.server_port}/"

        def pay(lease: Any) -> str:
            headers = propagation.to_headers(lease)
            request = urllib.request.Request(url, data=b"", headers=headers)
            with urllib.request.urlopen(request) as response:
                return str(response.read().decode())

        try:
            yield pay
        finally:
            server.shutdown()
            thread.join()


def _handler(answer: Callable[[bytes, Any], Any]) -> grpc.GenericRpcHandler:
    _, service, method = _CALL.split("/")
    handlers: dict[str, Any] = {method: grpc.unary_unary_rpc_method_handler(answer)}
    return grpc.method_handlers_generic_handler(service, handlers)


@contextmanager
def _over_grpc(payments: Payments) -> Iterator[Pay]:
    def answer(_: bytes, context: Any) -> bytes:
        return payments.pay(propagation.from_metadata(context.invocation_metadata())).encode()

    server = grpc.server(ThreadPoolExecutor(1))
    server.add_generic_rpc_handlers((_handler(answer),))
    port = free_port()
    server.add_insecure_port(f"{HOST}:{port}")
    server.start()
    try:
        with grpc.insecure_channel(f"{HOST}:{port}") as channel:
            call: Any = channel.unary_unary(_CALL)
            yield lambda lease: call(b"", metadata=propagation.to_metadata(lease), timeout=10).decode()
    finally:
        server.stop(None).wait()


@pytest.mark.parametrize("hop", [_over_http, _over_grpc])
def test_the_next_service_writes_under_the_callers_token_until_a_later_holder_came(
    tmp_path: Path, hop: Any
) -> None:
    payments = Payments(tmp_path / "payments.db")
    with FakeLockServer() as fake, hop(payments) as pay:
        client, name = fake.client(), _TOKEN.resource
        old = client.acquire(name, ttl=60)
        assert pay(old) == "paid"
        fake.expire(name)
        with client.lock(name, ttl=60):
            assert pay(old) == "paid"  # the later holder has not accessed the data yet
            assert pay(redfence.current_lease()) == "paid"
            assert pay(old) == (
                f"fencing token {old.token} of {name!r} is stale: redfence_fences has seen {old.token + 1}; "
                "roll back, and acquire the lock again"
            )
        assert pay(redfence.current_lease()).startswith("token is None; hold the lock, or pass the token")
        with client.lock("another", ttl=60) as another:
            assert pay(another) == f"token belongs to 'another'; pass the token of {name!r}"
        old.release()
    assert payments.paid() == [old.token, old.token, old.token + 1]


@asynccontextmanager
async def _aio_server(seen: list[FencingToken | None]) -> Any:
    async def answer(_: bytes, context: Any) -> bytes:
        seen.append(propagation.from_metadata(context.invocation_metadata()))
        return b""

    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handler(answer),))
    port = free_port()
    server.add_insecure_port(f"{HOST}:{port}")
    await server.start()
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        yield channel.unary_unary(_CALL)
    await server.stop(None)


async def test_asynchronous_grpc_carries_the_token_too() -> None:
    seen: list[FencingToken | None] = []
    async with _aio_server(seen) as call:
        await call(b"", metadata=propagation.to_metadata(_TOKEN))
        await call(b"")
    assert seen == [_TOKEN, None]
