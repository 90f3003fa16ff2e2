"""A node's process in memory: RESP in, RESP out, the scripts as `FakeNodeState` carries them out.

tests/contract/test_simulated_redis.py holds it to real nodes: the product's own links are connected to both.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import hiredis

from harness.fake_node import FakeNodeState
from harness.joining_commands import Claim, Formation, Known, Look, NoteRun, Quarantine, Readmit, Sight, Step
from redfence_server import scripts
from redfence_server.lock_node import (
    Command,
    Commit,
    Granted,
    Held,
    Inspect,
    Mint,
    Plain,
    Pulse,
    Pulsed,
    Release,
    Renew,
    Renewed,
    Reply,
    Silence,
    Undo,
    Vouch,
)
from redfence_server.node_examination import DURABLE_SETTINGS, Identity, Phase

_SCRIPTS: Final = (
    *("mint", "commit", "undo", "renew", "release", "inspect", "pulse", "vouch"),
    *("look", "note_run", "quarantine", "claim", "readmit"),
)


def _sha(source: bytes) -> str:
    return hashlib.sha1(source, usedforsecurity=False).hexdigest()


_NAMES: Final[Mapping[str, str]] = {_sha(scripts.load(name)): name for name in _SCRIPTS}
_KEYS: Final = scripts.Keyspace()
_LOCK: Final = _KEYS.lock("")
_WORDS: Final = {
    Plain.COMMITTED: b"committed",
    Plain.LOST: b"lost",
    Plain.UNDONE: b"undone",
    Plain.KEPT: b"kept",
    Plain.NOT_HELD: b"not_held",
    Plain.RELEASED: b"released",
    Plain.FREE: b"free",
    Plain.VOUCHED: b"vouched",
    Plain.TOO_LOW: b"greater",
}
_DONE: Final = {
    "note_run": b"noted",
    "quarantine": b"quarantined",
    "claim": b"claimed",
    "readmit": b"readmitted",
}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An answer that is an error."""

    text: str


@dataclass(frozen=True, slots=True)
class Push:
    """A message that nobody asked for."""

    parts: Sequence[bytes | int]


def encode(value: object) -> bytes:  # noqa: PLR0911  (one return per type)
    """Return an answer as RESP."""
    match value:
        case ErrorReply(text):
            return b"-%s\r\n" % text.encode()
        case Push(parts):
            return b">%d\r\n" % len(parts) + b"".join(map(encode, parts))
        case None:
            return b"_\r\n"
        case int():
            return b":%d\r\n" % value
        case str():
            return encode(value.encode())
        case bytes():
            return b"$%d\r\n%s\r\n" % (len(value), value)
        case list() | tuple():
            return b"*%d\r\n" % len(value) + b"".join(map(encode, value))
    raise AssertionError(value)


class Client:
    """One connection, as the node sees it.

    Args:
        send: takes what the node sends.
    """

    def __init__(self, node: SimulatedRedis, send: Callable[[bytes], None]) -> None:
        self._node = node
        self._reader = hiredis.Reader()
        self.send = send
        self.channel = b""

    def feed(self, received: bytes) -> None:
        """Carry out every command that is complete."""
        self._reader.feed(received)
        while (command := self._reader.gets()) is not False:
            self.send(encode(self._node.carry_out([part.decode() for part in command], self)))
            self._node.publish()


class SimulatedRedis:
    """One run after another of a node's process, over one disk.

    Attributes:
        state: what it remembers.
        run_id: of the present run.
        clients: who is connected.

    Args:
        clock_ms: the node's own clock.
        appendfsync: as Redis has it; "never" stands for no append-only file at all.
    """

    def __init__(self, *, clock_ms: Callable[[], float], appendfsync: str, name: str) -> None:
        self._clock_ms = clock_ms
        self._name = name
        self._runs = 0
        self.appendfsync = appendfsync
        self.state = FakeNodeState()
        self.clients: list[Client] = []
        self.run_id = self._new_run_id()

    def _new_run_id(self) -> str:
        self._runs += 1
        return _sha(f"{self._name} {self._runs}".encode())

    def connect(self, send: Callable[[bytes], None]) -> Client:
        """Take a new connection."""
        client = Client(self, send)
        self.clients.append(client)
        return client

    def restart(self, remembered: FakeNodeState | None) -> None:
        """Begin a new run, with what was remembered; None: with nothing."""
        if remembered is None:
            self.state.wipe()
        elif remembered is not self.state:
            self.state.restore(remembered)
        self.clients.clear()
        self.run_id = self._new_run_id()

    # --- commands -------------------------------------------------------------------------------------------------

    def carry_out(self, command: Sequence[str], client: Client) -> object:  # noqa: PLR0911  (one return per command)
        """Return the answer to one command."""
        match command:
            case ["HELLO", "3"]:
                return []
            case ["SUBSCRIBE", channel]:
                client.channel = channel.encode()
                return Push((b"subscribe", client.channel, 1))
            case ["SCRIPT", "LOAD", source]:
                return _sha(source.encode())
            case ["INFO", section]:
                return "".join(f"{name}:{value}\r\n" for name, value in self._info(section).items())
            case ["CONFIG", "GET", name]:
                return [name, self._setting(name)]
            case ["EVAL", source, count, *rest]:
                return self._script(
                    _NAMES[_sha(source.encode())], rest[: int(count)], rest[int(count) :], client
                )
            case ["EVALSHA", sha, count, *rest]:
                return self._script(_NAMES[sha], rest[: int(count)], rest[int(count) :], client)
        raise AssertionError(command)

    def _info(self, section: str) -> Mapping[str, str | int]:
        match section:
            case "server":
                return {"redis_version": "7.4.0", "run_id": self.run_id}
            case "replication":
                return {"role": "master", "master_replid": "0" * 40, "second_repl_offset": -1}
            case "memory":
                return {"maxmemory": 0, "maxmemory_policy": "noeviction"}
        return {"evicted_keys": 0}

    def _setting(self, name: str) -> str:
        match name:
            case "appendonly":
                return "no" if self.appendfsync == "never" else "yes"
            case "appendfsync":
                return "everysec" if self.appendfsync == "never" else self.appendfsync
        return DURABLE_SETTINGS[name]

    def publish(self) -> None:
        """Send what the scripts have published to whoever listens."""
        published, self.state.published = self.state.published, []
        for channel, resource, token, news in published:
            payload = f"{news.name.lower()} {token} {_LOCK}{resource}".encode()
            for client in self.clients:
                if client.channel == channel.encode():
                    client.send(encode(Push((b"message", client.channel, payload))))

    # --- scripts --------------------------------------------------------------------------------------------------

    def _script(self, name: str, keys: Sequence[str], arguments: Sequence[str], client: Client) -> object:
        if name in _DONE or name == "look":
            return self._join(name, arguments)
        resource = next((key.removeprefix(_LOCK) for key in keys if key.startswith(_LOCK)), "")
        command, channel = self._read(name, resource, arguments[1:])
        reply = self.state.apply(command, self._clock_ms(), admission=arguments[0], channel=channel)
        return self._answer(reply)

    def _read(self, name: str, resource: str, arguments: Sequence[str]) -> tuple[Command, str]:  # noqa: PLR0911  (one return per script)
        match name, arguments:
            case "mint", [digest, nonce, holder, ttl, idle, ends, channel, notify, behind]:
                self.state.counter_idle_ms = float(idle)
                ended = Release(resource, ends, 0.0) if ends else None
                told = (notify == "1", behind == "1")
                return Mint(resource, digest, nonce, holder, int(ttl), ended, *told), channel
            case "commit", [digest, nonce, token, idle]:
                self.state.counter_idle_ms = float(idle)
                return Commit(resource, digest, nonce, int(token)), ""
            case "undo", [nonce]:
                return Undo(resource, nonce, 0.0), ""
            case "renew", [digest]:
                return Renew(resource, digest), ""
            case "release", [digest, channel]:
                return Release(resource, digest, 0.0, yields=channel != ""), channel
            case "inspect", []:
                return Inspect(resource), ""
            case "pulse", [distrusted_ms, *changes]:
                return Pulse(tuple(map(int, changes)), int(distrusted_ms)), ""
            case "vouch", [admission, place, floor, changes]:
                return Vouch(admission, int(place), int(floor), int(changes)), ""
        raise AssertionError((name, arguments))

    def _answer(self, reply: Reply) -> object:  # noqa: PLR0911  (one return per reply)
        state = self.state
        match reply:
            case Granted():
                clock_us = int(self._clock_ms() * 1000)
                flags = (int(reply.contended), int(reply.released))
                return [b"granted", reply.nonce, reply.token, *flags, state.changes, clock_us]
            case Held():
                return [b"held", reply.digest, reply.token, reply.holder, reply.remaining_ms]
            case Renewed():
                return [b"renewed", reply.token, reply.ttl_ms, state.changes]
            case Pulsed():
                numbers = (int(reply.clock_ms * 1000), reply.changes, reply.high)
                known = (list(reply.known_changes), list(reply.known_floors))
                return [b"pulse", *numbers, *known, reply.distrusted_ms]
            case Plain.COMMITTED | Plain.VOUCHED:
                return [_WORDS[reply], state.changes]
            case Plain.TOO_LOW:
                return [_WORDS[reply], state.high]
            case Plain():
                return [_WORDS[reply]]
            case Silence.NOT_ADMITTED:
                return [b"not_admitted"]
        return [b"exhausted"]

    def _join(self, name: str, arguments: Sequence[str]) -> object:
        match name, arguments:
            case "look", []:
                sight = self.state.join(Look())
                assert isinstance(sight, Sight)
                high = [] if sight.high is None else [str(sight.high)]
                return [b"found", _flat(sight.identity), sight.key_count, *high]
            case "note_run", [admission, run, run_now, durable]:
                step = self.state.join(NoteRun(Known(admission, run), run_now, durable=durable == "1"))
            case "quarantine", [
                admission,
                run,
                quarantine,
                phase,
                cluster,
                index,
                nodes,
                ttl,
                run_now,
                floor,
            ]:
                place = Formation(cluster, int(index), int(nodes), int(ttl))
                step = self.state.join(
                    Quarantine(Known(admission, run), quarantine, place, run_now, Phase(phase), int(floor))
                )
            case "claim", [quarantine, floor, changes]:
                step = self.state.join(Claim(quarantine, int(floor), int(changes)))
            case "readmit", [quarantine, phase, admission, floor, changes, run, durable, evicted, *floors]:
                numbers = (int(floor), int(changes), run, tuple(map(int, floors)))
                process = (durable == "1", int(evicted))
                step = self.state.join(Readmit(quarantine, admission, *numbers, *process, Phase(phase)))
            case _:
                raise AssertionError((name, arguments))
        words = {Step.DONE: _DONE[name], Step.CHANGED: b"changed", Step.NOT_EMPTY: b"not_empty"}
        assert isinstance(step, Step)
        return [words[step]]


def _flat(identity: Identity | None) -> Sequence[Any]:
    if identity is None:
        return []
    fields: dict[str, str | int] = {
        "cluster_id": identity.cluster_id,
        "index": identity.index,
        "nodes": identity.node_count,
        "max_ttl_ms": identity.max_ttl_ms,
        "admission": identity.admission,
        "run_id": identity.run_id,
        "durable": int(identity.durable),
        "state": identity.phase.value,
        "floor": identity.floor,
        "changes": identity.changes,
        "evicted": identity.evicted,
        **{f"floor:{place}": floor for place, floor in identity.known_floors.items()},
        **{f"changes:{place}": changes for place, changes in identity.known_changes.items()},
    }
    return [str(part) for pair in fields.items() for part in pair]
