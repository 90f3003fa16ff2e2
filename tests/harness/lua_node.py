"""A node that is one database of a real server, in the shape of `FakeNodeState`: whoever plays with the one can play with the other.

It runs the project's own scripts, one at a time and in a moment, over a blocking socket. Time does not pass: nothing here lives
for less than an hour, and holds and counters end when `expire` and `drop_counter` delete them.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Mapping, Sequence
from typing import Any, Self
from urllib.parse import urlsplit

import hiredis

from harness.fake_node import ADMITTED, ALONE
from harness.joining_commands import (
    Claim,
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Look,
    NoteRun,
    Quarantine,
    Readmit,
    Sight,
    Step,
)
from redfence_server import scripts
from redfence_server.lock_node import Command, Reply, Silence
from redfence_server.node_examination import read_identity

_ANSWER_TIMEOUT_S = 10.0
_READ_BYTES = 65_536
_SCRIPTS = (
    *("mint", "commit", "undo", "renew", "release", "inspect", "pulse", "vouch"),
    *("look", "note_run", "quarantine", "claim", "readmit", "form"),
)
_STEPS = {
    b"noted": Step.DONE,
    b"quarantined": Step.DONE,
    b"claimed": Step.DONE,
    b"readmitted": Step.DONE,
    b"changed": Step.CHANGED,
    b"not_empty": Step.NOT_EMPTY,
}


def _sha(source: bytes) -> bytes:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest().encode()


class ScriptSet:
    """The scripts of lua/, or with a piece of one of them replaced: a mutant.

    Attributes:
        shas: by name, what to run for it.
    """

    def __init__(self, name: str = "", old: str = "", new: str = "") -> None:
        self.sources = {each: scripts.load(each) for each in _SCRIPTS}
        genuine = {each: _sha(source) for each, source in self.sources.items()}
        if name:
            text = self.sources[name].decode()
            assert text.count(old) == 1, f"{name}.lua has {text.count(old)} times: {old}"
            self.sources[name] = text.replace(old, new).encode()
        self.shas = {each: _sha(source) for each, source in self.sources.items()}
        # As the product packs them, and what is to be run in their place.
        self._swapped = [(genuine[each], sha) for each, sha in self.shas.items() if genuine[each] != sha]

    def swap(self, packed: bytes) -> bytes:
        """Return a packed command that runs the script of this set."""
        for genuine, sha in self._swapped:
            packed = packed.replace(genuine, sha, 1)
        return packed


class Database:
    """A blocking connection to one database of a server.

    Args:
        url: with the password, as a node's.
    """

    def __init__(self, url: str, number: int = 0) -> None:
        parts = urlsplit(url)
        address = (parts.hostname or "", parts.port or 0)
        self._socket = socket.create_connection(address, timeout=_ANSWER_TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._reader = hiredis.Reader()
        if parts.password:
            self.call("AUTH", parts.password)
        self.call("SELECT", number)

    def call(self, *command: str | int | bytes) -> Any:
        """Send a command and return its answer.

        Raises:
            hiredis.ReplyError: the answer is an error.
        """
        return self.exchange(hiredis.pack_command(command), 1)[0]  # type: ignore[arg-type]  # its stub says: a tuple of one

    def exchange(self, packed: bytes, count: int) -> list[Any]:
        """Send what is packed and return so many answers.

        Raises:
            hiredis.ReplyError: an answer is an error.
        """
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
        """End the connection."""
        self._socket.close()


Memory = Mapping[bytes, bytes]
"""Everything that a node remembers, by key, as DUMP tells it."""


class LuaNode:
    """One node on one database.

    Attributes:
        changes: as the last answer that tells them did.
        raw: the last answer of a script that servers run when they are admitted.

    Args:
        script_set: the server has to have it: `load`.
    """

    def __init__(
        self,
        database: Database,
        *,
        script_set: ScriptSet | None = None,
        keys: scripts.Keyspace | None = None,
    ) -> None:
        self._database = database
        self._scripts = script_set or ScriptSet()
        self._keys = keys or scripts.Keyspace()
        self._packers: dict[str, scripts.Packer] = {}
        self.changes = 0
        self.raw: list[Any] = []

    def load(self) -> Self:
        """Give the server the scripts, once for all its databases."""
        for source in self._scripts.sources.values():
            self._database.call("SCRIPT", "LOAD", source)
        return self

    # --- what the world does to it --------------------------------------------------------------------------------

    def form(
        self,
        *,
        admission: str = ADMITTED,
        formation: Formation = ALONE,
        run_id: str = "run",
        durable: bool = False,
    ) -> Self:
        """Begin, from empty, as a node that was just formed."""
        self.wipe()
        place = (formation.cluster_id, formation.index, formation.node_count, formation.max_ttl_ms)
        for state in ("forming", "assembled", "ready"):
            formed = self._identify("form", *place, admission, run_id, state, int(durable), 0)
            assert formed == [b"formed"], formed
        return self

    def expire(self, resource: str) -> None:
        """End the hold of a resource before its time, as a clock that jumps does."""
        self._database.call("DEL", self._keys.lock(resource))

    def drop_counter(self, resource: str) -> None:
        """Drop the counter of a resource, as idleness does."""
        self._database.call("DEL", self._keys.counter(resource))

    def wipe(self) -> None:
        """Forget everything, the identity as well: nobody is admitted any more."""
        self._database.call("FLUSHDB")
        self.changes = 0

    def save(self) -> Memory:
        """Return everything that it remembers."""
        names = self._database.call("KEYS", "*")
        return {name: self._database.call("DUMP", name) for name in sorted(names)}

    def restore(self, older: Memory) -> None:
        """Remember that, and nothing else."""
        self.wipe()
        for name, value in older.items():
            self._database.call("RESTORE", name, 0, value)

    # --- what the scripts do --------------------------------------------------------------------------------------

    def apply(
        self, command: Command, now_ms: float, *, admission: str = ADMITTED, channel: str = "here"
    ) -> Reply:
        """Carry out one script, for a server that was admitted under `admission` and listens on `channel`."""
        # Nobody is admitted under no id; a packed one has to be there all the same.
        packed = self._packer(channel).pack(command, admission or "-" * scripts.ADMISSION_DIGITS)
        (self.raw,) = self._database.exchange(self._scripts.swap(packed), 1)
        try:
            reply = scripts.read_reply(self.raw, under=admission)
        except scripts.NotAdmittedError:
            return Silence.NOT_ADMITTED
        except scripts.NumbersExhaustedError:
            return Silence.REFUSED
        self.changes = scripts.read_changes(self.raw) or self.changes
        return reply

    def join(self, command: JoiningCommand) -> JoiningAnswer:
        """Carry out one script for a server that is not admitted."""
        match command:
            case Look():
                return self._look()
            case NoteRun(known, run_id, durable):
                answer = self._identify(
                    "note_run", known.admission, known.run_id, run_id, int(durable), high=False
                )
            case Quarantine(known, quarantine, place, run_id, phase, floor):
                before = (known.admission, known.run_id)
                which = (place.cluster_id, place.index, place.node_count, place.max_ttl_ms)
                answer = self._identify("quarantine", *before, quarantine, phase.value, *which, run_id, floor)
            case Claim(quarantine, floor, changes):
                answer = self._identify("claim", quarantine, floor, changes, high=False)
            case Readmit():
                of = (command.quarantine, command.phase.value)
                life = (command.admission, command.floor, command.changes, command.run_id)
                process = (int(command.durable), command.evicted)
                answer = self._identify("readmit", *of, *life, *process, *command.floors)
        return _STEPS[answer[0]]

    def _look(self) -> Sight:
        _, identity, key_count, *high = self._identify("look")
        return Sight(read_identity(identity), key_count, int(high[0]) if high else None)

    def _identify(self, script: str, *arguments: str | int, high: bool = True) -> list[Any]:
        keys = (self._keys.node, self._keys.high) if high else (self._keys.node,)
        answer: list[Any] = self._database.call(
            "EVALSHA", self._scripts.shas[script], len(keys), *keys, *arguments
        )
        return answer

    def _packer(self, channel: str) -> scripts.Packer:
        if channel not in self._packers:
            self._packers[channel] = scripts.Packer(self._keys, channel=channel)
        return self._packers[channel]

    # --- what it keeps --------------------------------------------------------------------------------------------

    def keys(self) -> Mapping[str, Mapping[str, str]]:
        """Return every key but the identity, each value as text."""
        kept: dict[str, Mapping[str, str]] = {}
        for raw in sorted(self._database.call("KEYS", "*")):
            name = raw.decode()
            if name == self._keys.node:
                continue
            if self._database.call("TYPE", raw) == b"string":
                kept[name] = {"": self._database.call("GET", raw).decode()}
            else:
                kept[name] = _pairs(self._database.call("HGETALL", raw))
        return kept


def _pairs(flat: Sequence[bytes]) -> Mapping[str, str]:
    texts = [each.decode() for each in flat]
    return dict(zip(texts[::2], texts[1::2], strict=True))
