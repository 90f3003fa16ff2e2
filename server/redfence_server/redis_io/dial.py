"""Open a connection to a node with redis-py: URL, TLS, authentication, database; then take over its socket.

The commands of the algorithm bypass redis-py: they share one pipelined connection per node
(nodes/connection.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
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
        """Return the cause; a timeout of the system may have no text of its own."""
        return super().__str__() or "no answer in time"


class DialDeniedError(DialError):
    """The node rejects the user: unknown, wrong password, or without the rights that a connection needs."""


class DialRefusedError(DialError):
    """The node answered a command with an error; the connection stays usable."""


class DialLoadingError(DialError):
    """The node is loading its data and cannot answer yet; the connection has ended."""


class DialAnswerError(DialError):
    """Another kind of server answered, or another program has written redfence's keys."""


# Other options that redis-py reads from a URL would change how it sends, retries or reads commands.
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
class NodeTls:
    """Names the PEM files for the connections to nodes; each new connection reads them again.

    Attributes:
        ca: the authorities of nodes; None trusts those of the system.
        cert: the certificate that this process shows; None shows none.
        key: its private key, not encrypted.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None

    def options(self) -> dict[str, str]:
        """Return what redis-py takes for the files.

        Raises:
            DialError: a file cannot be read; the message names its setting.
        """
        names = {"ca": "ssl_ca_certs", "cert": "ssl_certfile", "key": "ssl_keyfile"}
        options = {}
        for name, option in names.items():
            path: Path | None = getattr(self, name)
            if path is not None:
                try:
                    # redis-py would report that a file is missing, but not which one.
                    path.read_bytes()
                except OSError as error:
                    raise DialError(f"node_tls_{name}: cannot read {path}: {error.strerror}") from error
                options[option] = str(path)
        return options


SYSTEM_TLS: Final = NodeTls()
"""Trusts the system's authorities, and shows no certificate."""


@dataclass(frozen=True, slots=True)
class NodeUrl:
    """A checked URL of a node; its repr and its messages never show the password.

    Attributes:
        tls: the files for `rediss://`; the same options in the URL win.

    Raises:
        ValueError: the URL is malformed.
    """

    url: str = field(repr=False)
    tls: NodeTls = field(default=SYSTEM_TLS, kw_only=True, compare=False)
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
            # Without the parser's reason, which quotes the part it could not read: perhaps half a password.
            raise ValueError(
                f"the {scheme}:// URL is malformed; percent-encode / ? # @ in the user and the password"
            ) from None
        if options.keys() - _URL_OPTIONS:
            raise ValueError(
                f"the {scheme}:// URL has an unknown option; allowed are {', '.join(sorted(_URL_OPTIONS))}"
            )
        if "path" in parsed:
            address = str(parsed["path"])
        elif host := parsed.get("host"):
            address = f"{host}:{port or 6379}"
        else:
            raise ValueError(f"the {scheme}:// URL names no host; write {scheme}://HOST:PORT")
        object.__setattr__(self, "address", address)


class DialledNode:
    """An open, authenticated connection; it takes one batch of commands at a time until its handover."""

    def __init__(self, connection: redis_asyncio.Connection) -> None:
        self._connection = connection

    async def command(self, *parts: str | bytes | int) -> Any:
        """Return the node's reply to one command.

        Cancellation: close the connection, because its next reply belongs to this command.

        Raises:
            DialRefusedError: the node answered with an error.
            DialLoadingError: the node is loading its data.
            DialError: the connection broke or timed out.
        """
        (answer,) = await self.commands(parts)
        if isinstance(answer, DialRefusedError):
            raise answer
        return answer

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the node's replies, in one round trip; an error reply is a `DialRefusedError` in the list.

        Cancellation: close the connection, because its next replies belong to these commands.

        Raises:
            DialLoadingError: the node is loading its data.
            DialError: the connection broke or timed out.
        """
        name = str(batch[0][0])
        if not self._connection.is_connected:
            # redis-py would reconnect, perhaps to another run of the node than the examined one.
            raise DialError(f"{name}: the connection has ended")
        answers: list[Any] = []
        try:
            with _cancellable():
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
        return answers

    def hand_over(self, protocol: asyncio.BufferedProtocol) -> None:
        """Give the socket to `protocol` when no reply is outstanding; this object must still close it."""
        # redis-py has no public way to lend its socket; tests/contract/test_redis_dial.py checks this one.
        writer = self._connection._writer  # noqa: SLF001
        assert writer is not None
        transport = writer.transport
        assert isinstance(transport, asyncio.Transport)
        transport.set_protocol(protocol)
        protocol.connection_made(transport)

    async def close(self) -> None:
        """Close at once, without waiting for the peer; safe to repeat."""
        await self._connection.disconnect(nowait=True)


class Dial(Protocol):
    """The signature of `dial`; the simulation implements it without a network."""

    async def __call__(self, node: NodeUrl, *, timeout_ms: int) -> DialledNode:
        """Return an open, authenticated connection; see `dial`."""
        ...


async def dial(node: NodeUrl, *, timeout_ms: int) -> DialledNode:
    """Return an open, authenticated connection; `timeout_ms` also limits each command until the handover.

    Raises:
        DialDeniedError: the node rejects the user.
        DialError: the connection could not be opened.

    Cancellation: nothing stays open.
    """
    tls = node.tls.options() if node.url.startswith("rediss://") else {}
    pool = redis_asyncio.ConnectionPool.from_url(
        node.url,
        **tls,
        protocol=2,
        # redis-py's retries would run a command twice after a lost reply.
        retry=Retry(NoBackoff(), 0),
        socket_timeout=timeout_ms / 1000,
        socket_connect_timeout=timeout_ms / 1000,
    )
    connection = pool.make_connection()  # type: ignore[no-untyped-call]
    dialled = DialledNode(connection)
    try:
        async with asyncio.timeout(2 * timeout_ms / 1000):
            with _cancellable():
                await connection.connect()
        # A label for CLIENT LIST; a refusal does no harm.
        await dialled.commands(("CLIENT", "SETNAME", "redfence"))
    except BaseException as error:
        await dialled.close()
        # Only the cause shows that the node wants a password and the URL has none.
        if isinstance(error, _DENIED) or isinstance(error.__cause__, AuthenticationError):
            raise DialDeniedError(str(error)) from error
        if isinstance(error, RedisError | OSError):
            raise DialError(str(error)) from error
        raise
    return dialled


_DENIED: Final = (AuthenticationError, AuthorizationError, NoPermissionError)


@contextmanager
def _cancellable() -> Iterator[None]:
    """Raise, at the end and in place of any error, the cancellation that redis-py swallowed.

    It sends by `asyncio.wait_for`, which before Python 3.12 drops a cancellation that comes right after the
    bytes left. A close would then wait for ever (test_a_server_can_be_stopped_at_every_step_of_connecting).
    """
    try:
        yield
    finally:
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise asyncio.CancelledError
