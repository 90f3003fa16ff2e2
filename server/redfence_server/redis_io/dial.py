"""Open a connection to a node: redis-py does the URL, TLS, authentication and database, and then hands the socket over.

The commands of the algorithm do not go through redis-py: they share one pipelined connection per node (nodes/connection.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol
from urllib.parse import parse_qs, urlsplit

import redis.asyncio as redis_asyncio
from redis.asyncio.connection import parse_url
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import (
    AuthenticationError,
    AuthorizationError,
    BusyLoadingError,
    NoPermissionError,
    RedisError,
    ResponseError,
)


class DialError(Exception):
    """No usable connection: the node is unreachable, refuses it, or does not answer as a node does."""

    def __str__(self) -> str:
        """Say something also for a time-out of the system, which may have no text."""
        return super().__str__() or "no answer in time"


class DialDeniedError(DialError):
    """The node does not let this user in: unknown, wrong password, or without the rights that every connection needs."""


class DialRefusedError(DialError):
    """The node answered a command with an error; the connection goes on."""


class DialLoadingError(DialError):
    """The node is loading its data, and answers no command that needs it. The connection has ended."""


class DialAnswerError(DialError):
    """Another kind of server answered, or another program has written redfence's keys."""


# All other options that redis-py reads from a URL would change how commands are sent, retried or read.
_URL_OPTIONS: Final = frozenset(
    {
        "db",
        "ssl_ca_certs",
        "ssl_ca_path",
        "ssl_cert_reqs",
        "ssl_certfile",
        "ssl_check_hostname",
        "ssl_keyfile",
    }
)


@dataclass(frozen=True, slots=True)
class NodeUrl:
    """Where a node is, checked when it is made; the password stays out of its repr and of every message.

    Raises:
        ValueError: the URL is malformed.
    """

    url: str = field(repr=False)
    address: str = field(init=False)

    def __post_init__(self) -> None:
        scheme = self.url.partition("://")[0]
        if scheme not in {"redis", "rediss", "unix"}:
            raise ValueError("a URL starts with redis://, rediss:// or unix://")
        try:
            parts = urlsplit(self.url)
            options = parse_qs(parts.query, keep_blank_values=True)
            port = parts.port
            parsed = parse_url(self.url)
        except ValueError:
            # Not the parser's reason: it quotes what it could not read, and that may be half a password.
            raise ValueError(
                f"the {scheme}:// URL is malformed; percent-encode / ? # @ in the user and the password"
            ) from None
        if options.keys() - _URL_OPTIONS:
            raise ValueError(
                f"the {scheme}:// URL has an option that is none of {', '.join(sorted(_URL_OPTIONS))}"
            )
        if "path" in parsed:
            address = str(parsed["path"])
        elif host := parsed.get("host"):
            address = f"{host}:{port or 6379}"
        else:
            raise ValueError(f"the {scheme}:// URL names no host; write {scheme}://HOST:PORT")
        object.__setattr__(self, "address", address)


class DialledNode:
    """An open, authenticated connection, for commands one at a time until it is handed over."""

    def __init__(self, connection: redis_asyncio.Connection) -> None:
        self._connection = connection

    async def command(self, *parts: str | bytes | int) -> Any:
        """Return the node's answer.

        Cancellation: the connection is off by one afterwards; close it.

        Raises:
            DialRefusedError: the node answered with an error.
            DialLoadingError: it is loading its data.
            DialError: the connection broke or timed out.
        """
        (answer,) = await self.commands(parts)
        if isinstance(answer, DialRefusedError):
            raise answer
        return answer

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the node's answers, in one round trip; a `DialRefusedError` stands for one that is an error.

        Cancellation: the connection is off by some answers afterwards; close it.

        Raises:
            DialLoadingError: the node is loading its data.
            DialError: the connection broke or timed out.
        """
        name = str(batch[0][0])
        if not self._connection.is_connected:
            # redis-py would connect anew, perhaps to another run of the node than the one that was examined.
            raise DialError(f"{name}: the connection has ended")
        answers: list[Any] = []
        try:
            await self._connection.send_packed_command(self._connection.pack_commands(batch))
            for parts in batch:
                name = str(parts[0])
                try:
                    answers.append(await self._connection.read_response())
                except ResponseError as error:
                    answers.append(DialRefusedError(f"{name}: {error}"))
        except BusyLoadingError as error:
            raise DialLoadingError(f"{name}: {error}") from error
        except (RedisError, OSError) as error:
            raise DialError(f"{name}: {error}") from error
        _raise_swallowed_cancellation()
        return answers

    def hand_over(self, protocol: asyncio.BufferedProtocol) -> None:
        """Give the socket to `protocol`. No answer may be outstanding. The connection must still be closed through this object."""
        # redis-py has no public way to lend its socket; tests/contract/test_redis_dial.py watches this one.
        writer = self._connection._writer  # noqa: SLF001
        assert writer is not None
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    async def close(self) -> None:
        """Close at once, without waiting for the peer. May be repeated."""
        await self._connection.disconnect(nowait=True)


class Dial(Protocol):
    """`dial`, or what stands for it where there is no network."""

    async def __call__(self, node: NodeUrl, *, timeout_ms: int) -> DialledNode:
        """Return an open, authenticated connection; see `dial`."""
        ...


async def dial(node: NodeUrl, *, timeout_ms: int) -> DialledNode:
    """Return an open, authenticated connection. The timeout bounds connecting, and each command until the hand-over.

    Raises:
        DialDeniedError: the node does not let this user in.
        DialError: it could not be opened.

    Cancellation: nothing stays open.
    """
    pool = redis_asyncio.ConnectionPool.from_url(
        node.url,
        protocol=2,
        # redis-py's own retries would run a command twice after a lost reply.
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_ms / 1000,
        socket_connect_timeout=timeout_ms / 1000,
    )
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    dialled = DialledNode(connection)
    try:
        async with asyncio.timeout(2 * timeout_ms / 1000):
            await connection.connect()
            _raise_swallowed_cancellation()
        # A label for CLIENT LIST. A refusal is an answer like any other.
        await dialled.commands(("CLIENT", "SETNAME", "redfence"))
    except BaseException as error:
        await dialled.close()
        # The cause tells that the node wants a password, and the URL has none.
        if isinstance(error, _DENIED) or isinstance(error.__cause__, AuthenticationError):
            raise DialDeniedError(str(error)) from error
        if isinstance(error, RedisError | OSError):
            raise DialError(str(error)) from error
        raise
    return dialled


_DENIED: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


def _raise_swallowed_cancellation() -> None:
    """Raise the cancellation that redis-py swallowed.

    It sends by `asyncio.wait_for`, which before Python 3.12 forgets a cancellation that comes when the bytes are just out.
    A task that waits for the cancelled one would never return (test_a_server_can_be_stopped_at_every_step_of_connecting).
    """
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
