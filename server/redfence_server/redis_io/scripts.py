"""Turn commands into EVALSHA calls of the Lua scripts, and read the replies.

lua/ has one file for each operation, loaded once; the head of each file is its contract. hold.lua says how
a node keeps a hold.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from typing import Any, Final

from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Granted,
    Held,
    Inspect,
    Mint,
    Notice,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)

REDIS_VERSION_MIN: Final = (6, 2)
"""The oldest Redis with all commands of the scripts; every Valkey is newer."""
ADMISSION_DIGITS: Final = 32
COUNTER_IDLE_MS_DEFAULT = 24 * 3_600_000
COUNTER_IDLE_MS_MAX = 365 * COUNTER_IDLE_MS_DEFAULT


# Read once, so that a server without free file descriptors can still examine its nodes and finish a rejoin.
_LUA: Final = {
    file.name.removesuffix(".lua"): file.read_bytes()
    for file in resources.files(__package__).joinpath("lua").iterdir()
}
_HOLD: Final = resources.files(__package__).joinpath("hold.lua").read_bytes()


def load(name: str) -> bytes:
    """Return the source of one script, with hold.lua where the script includes it."""
    return _LUA[name].replace(b"-- include hold.lua\n", _HOLD)


@dataclass(frozen=True, slots=True)
class Keyspace:
    """Returns the names of the keys on a node.

    Attributes:
        prefix: the start of every key.
        counter_idle_ms: how long a node keeps an unused counter. It then starts again at `high`, so any value
            is safe; a short one saves memory and makes tokens jump.
    """

    prefix: str = "redfence:"
    counter_idle_ms: int = COUNTER_IDLE_MS_DEFAULT

    @property
    def node(self) -> str:
        """The key of the node's identity."""
        return f"{self.prefix}node"

    @property
    def high(self) -> str:
        """The key of the greatest token that the node ever minted or learnt."""
        return f"{self.prefix}high"

    def lock(self, resource: str) -> str:
        """Return the key of a resource's hold."""
        return f"{self.prefix}lock:{resource}"

    def counter(self, resource: str) -> str:
        """Return the key of the last token minted or learnt for a resource."""
        return f"{self.prefix}counter:{resource}"

    def forced(self, digest: str) -> str:
        """Return the key that says that an operator ended the lease with this digest."""
        return f"{self.prefix}forced:{digest}"

    def channel(self, server_id: str) -> str:
        """Return the channel of the notices for one server."""
        return f"{self.prefix}notice:{server_id}"


_NAMES: dict[type[Command], str] = {
    Mint: "mint",
    Commit: "commit",
    Undo: "undo",
    Renew: "renew",
    Release: "release",
    ForceRelease: "force_release",
    Inspect: "inspect",
}
_SOURCES = {kind: load(name) for kind, name in _NAMES.items()}
# EVALSHA names a script by its SHA-1; this is no protection.
_SHAS = {kind: hashlib.sha1(source, usedforsecurity=False).hexdigest() for kind, source in _SOURCES.items()}

# The parts of each command: EVALSHA, the SHA-1, the number of keys, the keys and the arguments.
_PART_COUNTS: Final = {Mint: 14, Commit: 12, Undo: 7, Renew: 8, Release: 7, ForceRelease: 9, Inspect: 6}


def sources() -> list[bytes]:
    """Return the scripts of the lock commands; the server loads them on a node before its first command."""
    return list(_SOURCES.values())


class Packer:
    """Packs a command once for all nodes; only the admission id differs between them.

    It writes the bytes itself, from parts that it prepares once: a client library's packer takes twice as
    long. tests/unit compares the bytes with those of hiredis.

    Args:
        keys: the names of the keys on the nodes.
        channel: the channel of this server's notices.
    """

    def __init__(self, keys: Keyspace, *, channel: str) -> None:
        self._lock, self._counter = keys.lock(""), keys.counter("")
        self._lock_size, self._counter_size = len(self._lock.encode()), len(self._counter.encode())
        self._forced, self._forced_size = keys.forced(""), len(keys.forced("").encode())
        self._idle, self._channel = _bulk(str(keys.counter_idle_ms)), channel
        self._notices_size = len(f"0 0 {channel} ".encode())
        hold_alone = f"$1\r\n2\r\n{_bulk(keys.node)}"
        with_numbers = f"$1\r\n4\r\n{_bulk(keys.node)}{_bulk(keys.high)}"
        with_forced = f"$1\r\n3\r\n{_bulk(keys.node)}"
        keys_of = dict.fromkeys((Mint, Commit), with_numbers) | dict.fromkeys(
            (Renew, ForceRelease), with_forced
        )
        self._starts = {
            kind: f"*{count}\r\n{_bulk('EVALSHA')}{_bulk(_SHAS[kind])}{keys_of.get(kind, hold_alone)}$"
            for kind, count in _PART_COUNTS.items()
        }
        self._delayed_mint = self._starts[Mint].replace(
            f"*{_PART_COUNTS[Mint]}\r\n", f"*{_PART_COUNTS[Mint] + 1}\r\n"
        )
        self._command: Command | None = None
        self._head = self._tail = ""

    def set_counter_idle_ms(self, counter_idle_ms: int) -> None:
        """Let the counters of later mints and commits live so long without use; any value is safe."""
        self._idle = _bulk(str(counter_idle_ms))
        # A command that was packed before is packed anew.
        self._command = None

    def pack(self, command: Command, admission_id: str) -> bytes:
        """Return the bytes to send for `command` to a node that admitted the server under `admission_id`."""
        if command is not self._command:
            assert len(admission_id) == ADMISSION_DIGITS, "the head says how long the id is"
            self._head, self._tail = self._head_of(command), self._arguments(command)
            self._command = command
        return f"{self._head}{admission_id}{self._tail}".encode()

    def _head_of(self, command: Command) -> str:
        """Return what goes before the admission id: the call and the keys."""
        kind, resource = type(command), command.resource
        size = len(resource.encode())
        is_delayed = kind is Mint and command.lock_delay_ms  # type: ignore[union-attr]  # it is a Mint
        start = self._delayed_mint if is_delayed else self._starts[kind]
        lock = f"{start}{self._lock_size + size}\r\n{self._lock}{resource}\r\n"
        if kind is Mint or kind is Commit:
            return (
                f"{lock}${self._counter_size + size}\r\n{self._counter}{resource}\r\n${ADMISSION_DIGITS}\r\n"
            )
        if isinstance(command, Renew | ForceRelease):
            digest = command.digest
            lock = f"{lock}${self._forced_size + len(digest)}\r\n{self._forced}{digest}\r\n"
        return f"{lock}${ADMISSION_DIGITS}\r\n"

    def _arguments(self, command: Command) -> str:
        """Return what goes behind the admission id; digests and nonces are hex digits."""
        if isinstance(command, Mint):
            digest, nonce, holder, ttl = command.digest, command.nonce, command.holder, str(command.ttl_ms)
            ended = command.release_first.digest if command.release_first else ""
            flags = f"{command.watch_blocking_hold:d} {command.watch_own_hold:d}"
            notices = f"{flags} {self._channel} {ended}"
            delay = _bulk(str(command.lock_delay_ms)) if command.lock_delay_ms else ""
            return (
                f"\r\n${len(digest)}\r\n{digest}\r\n${len(nonce)}\r\n{nonce}\r\n"
                f"${len(holder.encode())}\r\n{holder}\r\n${len(ttl)}\r\n{ttl}\r\n{self._idle}"
                f"${self._notices_size + len(ended)}\r\n{notices}\r\n{delay}"
            )
        if isinstance(command, ForceRelease):
            return f"\r\n{_bulk(command.digest)}{_bulk(str(command.token))}"
        if isinstance(command, Release | Renew):
            return f"\r\n${len(command.digest)}\r\n{command.digest}\r\n"
        if isinstance(command, Undo):
            return f"\r\n${len(command.nonce)}\r\n{command.nonce}\r\n"
        if isinstance(command, Commit):
            numbers = f"{_bulk(str(command.token))}{self._idle}"
            return f"\r\n{_bulk(command.digest)}{_bulk(command.nonce)}{numbers}"
        return "\r\n"


def _bulk(part: str) -> str:
    """Return one part of a command as the protocol frames it, still as text."""
    return f"${len(part.encode())}\r\n{part}\r\n"


class NotAdmittedError(Exception):
    """The node has another admission id, or lost its greatest token; this server must examine it again."""


class NumbersExhaustedError(Exception):
    """The node has no token below 2^53 left to mint for this resource."""


def read_notice(payload: bytes, *, keys: Keyspace, node: int) -> Notice:
    """Return the notice that a script published.

    Raises:
        ValueError: no script publishes this.
    """
    token, key = payload.decode().split(" ", 1)
    start = keys.lock("")
    if not key.startswith(start):
        raise ValueError(f"no script publishes {payload!r}")
    return Notice(node, key.removeprefix(start), int(token))


# A script answers with the name of the status.
_STATUSES = {status.name.lower().encode(): status for status in Status}


def read_clock_ms(raw: list[Any]) -> float:
    """Return the node's clock from a `granted` that `read_reply` has accepted."""
    clock_us: int = raw[5]
    return clock_us / 1000


def read_reply(raw: list[Any], *, admission_id: str = "") -> Reply:
    """Return the reply of a script that was sent under an admission id.

    Raises:
        NotAdmittedError: the admission id was wrong, and the script changed nothing.
        NumbersExhaustedError: no token is left to mint.
        ValueError: no script gives this reply.
    """
    try:
        word = raw[0]
        if word == b"granted":
            if len(raw) != 6:
                raise ValueError(f"no script answers {raw!r}")
            return Granted(raw[1].decode(), raw[2], raw[3] > 0, raw[4] == 1, admission_id=admission_id)
        if word in _STATUSES:
            return _STATUSES[word]
        if word == b"held":
            # PTTL is negative for a hold that expires in this millisecond.
            return Held(raw[1].decode(), raw[2], raw[3].decode(errors="replace"), max(0, raw[4]), *raw[5:6])
        if word == b"renewed":
            return Renewed(raw[1], raw[2])
        if word == b"not_admitted":
            raise NotAdmittedError
        if word == b"exhausted":
            raise NumbersExhaustedError
    except (AttributeError, LookupError, TypeError) as error:  # Lua ends a list at its first nil
        raise ValueError(f"no script answers {raw!r}") from error
    raise ValueError(f"no script answers {raw!r}")
