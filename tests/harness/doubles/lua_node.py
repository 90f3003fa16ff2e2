"""One database of a real Redis server, with the methods of `FakeNodeState`.

It runs the product's scripts, one at a time, over a blocking socket. Every ttl is at least an hour,
so holds and counters end only when `expire` and `drop_counter` delete them.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping
from functools import cache
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis

from harness.doubles.joining_commands import (
    DistrustClock,
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Sight,
    Step,
)
from harness.doubles.node_memory import ADMITTED, ALONE
from redfence_server.locking.node import Command, NoReply, Reply
from redfence_server.membership.examination import read_identity
from redfence_server.redis_io import scripts

_ANSWER_TIMEOUT_S = 10.0
_READ_BYTES = 65_536
DONE: Mapping[str, bytes] = {
    "quarantine": b"quarantined",
    "reserve_floor": b"reserved",
    "raise_floor": b"raised",
    "restore_vote": b"restored",
    "distrust_clock": b"noted",
}
REFUSED: Mapping[Step, bytes] = {
    Step.CHANGED: b"changed",
    Step.NOT_EMPTY: b"not_empty",
    Step.GREATER: b"greater",
    Step.NOT_ADMITTED: b"not_admitted",
}
_SCRIPTS = (
    *("mint", "commit", "undo", "renew", "release", "force_release", "inspect"),
    *("form", "read_identity", *DONE),
)
_STEPS = dict.fromkeys(DONE.values(), Step.DONE) | {word: step for step, word in REFUSED.items()}


def sha(source: bytes) -> bytes:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


SOURCES: Mapping[str, bytes] = {name: scripts.load(name) for name in _SCRIPTS}
SHAS: Mapping[str, bytes] = {name: sha(source) for name, source in SOURCES.items()}


class Database:
    """A blocking connection to one database of a server."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or 0)
        self._socket = socket.create_connection(address, timeout=_ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        if parts.password:
            self.call("AUTH", parts.password)

    def call(self, *command: str | int | bytes) -> Any:
        return self.exchange(hiredis.pack_command(command), 1)[0]  # type: ignore[arg-type]  # its stub says: a tuple of one

    def exchange(self, packed: bytes, count: int) -> list[Any]:
        self._socket.sendall(packed)
        answers: list[Any] = []
        while len(answers) < count:
            answer = self._reader.gets()
            if answer is not False:
                answers.append(answer)
            else:
                received = self._socket.recv(_READ_BYTES)
                assert received, "the server has closed the connection"
                self._reader.feed(received)
        for answer in answers:
            if isinstance(answer, hiredis.ReplyError):
                raise answer
        return answers

    def close(self) -> None:
        self._socket.close()


Memory = Mapping[bytes, tuple[bytes, int]]
"""Everything that a node remembers, by key: as DUMP tells it, and the ttl, 0 for none."""


class LuaNode:
    """One node on one database; the server has to have the scripts: `load`."""

    def __init__(self, database: Database) -> None:
        self.database = database
        self._keys = scripts.Keyspace()
        self._packer = cache(lambda channel: scripts.Packer(self._keys, channel=channel))
        self.raw: list[Any] = []

    def load(self) -> Self:
        for source in SOURCES.values():
            self.database.call("SCRIPT", "LOAD", source)
        return self

    # --- what the world does to it

    def form(self, *, formation: Formation = ALONE) -> Self:
        self.wipe()
        place = (formation.cluster_id, formation.index, formation.node_count, formation.max_ttl_ms)
        for state in ("forming", "assembled", "ready"):
            formed = self._identify("form", *place, ADMITTED, "run", state, 0, 0, 0)
            assert formed == [b"formed"], formed
        return self

    def expire(self, resource: str) -> None:
        self.database.call("DEL", self._keys.lock(resource))

    def lapse(self, resource: str) -> None:
        """End the ttl of a hold, so that only its lock delay is left."""
        value = self.database.call("GET", self._keys.lock(resource))
        delay_ms = value and hold_fields(value.decode())["lock_delay_ms"]
        if delay_ms:
            self.database.call("PEXPIRE", self._keys.lock(resource), delay_ms)

    def drop_counter(self, resource: str) -> None:
        self.database.call("DEL", self._keys.counter(resource))

    def wipe(self) -> None:
        self.database.call("FLUSHDB")

    def save(self) -> Memory:
        names = self.database.call("KEYS", "*")
        call = self.database.call
        return {name: (call("DUMP", name), max(0, call("PTTL", name))) for name in sorted(names)}

    def restore(self, older: Memory) -> None:
        self.wipe()
        for name, (value, ttl_ms) in older.items():
            self.database.call("RESTORE", name, ttl_ms, value)

    # --- what the scripts do

    def apply(
        self, command: Command, now_ms: float, *, admission: str = ADMITTED, channel: str = "here"
    ) -> Reply:
        """Carry out one script, for a server that was admitted under `admission` and listens on `channel`."""
        # An empty id admits no server, but a packed command needs an id.
        packed = self._packer(channel).pack(command, admission or "-" * scripts.ADMISSION_DIGITS)
        (self.raw,) = self.database.exchange(packed, 1)
        try:
            return scripts.read_reply(self.raw, admission_id=admission)
        except scripts.NotAdmittedError:
            return NoReply.NOT_ADMITTED
        except scripts.NumbersExhaustedError:
            return NoReply.REFUSED

    def join(self, command: JoiningCommand) -> JoiningAnswer:
        match command:
            case ReadIdentity():
                return self._read_identity()
            case Quarantine(known, quarantine, place, run_id, phase, floor, durable):
                before = (known.admission, known.run_id)
                which = (place.cluster_id, place.index, place.node_count, place.max_ttl_ms)
                process = (run_id, floor, int(durable))
                answer = self._identify("quarantine", *before, quarantine, phase.value, *which, *process)
            case ReserveFloor(quarantine, floor):
                answer = self._identify("reserve_floor", quarantine, floor)
            case RaiseFloor():
                of = (command.index, command.floor, command.quarantine)
                answer = self._identify("raise_floor", command.known, command.admission, *of)
            case RestoreVote():
                ids = (command.quarantine, command.admission, command.floor, command.run_id)
                present = (int(command.durable), command.evicted)
                answer = self._identify("restore_vote", *ids, *present, *command.floors, *command.fence_ids)
            case DistrustClock(known, left_ms, most_ms):
                answer = self._identify("distrust_clock", known, left_ms, most_ms)
        return _STEPS[answer[0]]

    def _read_identity(self) -> Sight:
        _, fields, key_count, _, _, *high = self._identify("read_identity")
        texts = dict(zip(fields[::2], fields[1::2], strict=True))
        more = [int(texts.get(name, b"0")) for name in (b"distrusted_until", b"waited_floor")]
        return Sight(read_identity(fields), key_count, int(high[0]) if high else None, *more)

    def _identify(self, script: str, *arguments: str | int) -> list[Any]:
        keys = (self._keys.node, self._keys.high)
        self.raw = self.database.call("EVALSHA", SHAS[script], 2, *keys, *arguments)
        return self.raw

    # --- what it keeps

    def keys(self) -> Mapping[str, Mapping[str, str]]:
        kept: dict[str, Mapping[str, str]] = {}
        for raw in sorted(self.database.call("KEYS", "*")):
            name = raw.decode()
            if name == self._keys.node:
                continue
            value = self.database.call("GET", raw).decode()
            kept[name] = hold_fields(value) if name.startswith(self._keys.lock("")) else {"": value}
        return kept


def hold_fields(value: str) -> Mapping[str, str]:
    """Return the fields of a hold, as hold.lua describes it."""
    fields, holder, *delay = value.split("\n")
    digest, token, shared, ttl_ms, nonce, *notify = fields.split(" ")
    return {
        "digest": digest,
        "nonce": nonce,
        "shared": shared,
        "token": token,
        "holder": holder,
        "ttl_ms": ttl_ms,
        "notify": " ".join(notify),
        "lock_delay_ms": "".join(delay),
    }
