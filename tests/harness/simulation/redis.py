"""A node's process in memory: RESP in, RESP out, the scripts as `FakeNodeState` carries them out.

tests/contract/test_simulated_redis.py holds it to real nodes: the product's own links are connected to both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import hiredis

from harness.doubles.joining_commands import (
    DistrustClock,
    Formation,
    Known,
    Quarantine,
    RaiseFloor,
    ReadIdentity,
    ReserveFloor,
    RestoreVote,
    Sight,
    Step,
)
from harness.doubles.lua_node import DONE, REFUSED, SHAS, SOURCES, sha
from harness.doubles.node_state import FakeNodeState
from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Granted,
    Held,
    Inspect,
    Mint,
    NoReply,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.membership.examination import DURABLE_SETTINGS, Phase
from redfence_server.redis_io import scripts

_SOURCES: Final[Mapping[str, str]] = {source.decode(): name for name, source in SOURCES.items()}
_NAMES: Final[Mapping[str, str]] = {sha.decode(): name for name, sha in SHAS.items()}
_KEYS: Final = scripts.Keyspace()
_LOCK: Final = _KEYS.lock("")
_WORDS: Final = {
    Status.COMMITTED: b"committed",
    Status.LOST: b"lost",
    Status.UNDONE: b"undone",
    Status.KEPT: b"kept",
    Status.NOT_HELD: b"not_held",
    Status.FORCED: b"forced",
    Status.RELEASED: b"released",
    Status.FREE: b"free",
}


@dataclass(frozen=True, slots=True)
class Push:
    """A message that nobody asked for."""

    parts: Sequence[bytes | int]


@dataclass(frozen=True, slots=True)
class Verbatim:
    """A text for people, which RESP3 tells apart."""

    text: str


def encode(value: object, *, resp3: bool = True) -> bytes:  # noqa: PLR0911  (one return per type)
    # The most frequent types come first: no other part of the simulator runs as often.
    if isinstance(value, str):
        value = value.encode()
    if isinstance(value, bytes):
        return b"$%d\r\n%b\r\n" % (len(value), value)
    if isinstance(value, int):
        return b":%d\r\n" % value
    if isinstance(value, list):
        return b"*%d\r\n%b" % (len(value), b"".join([encode(part) for part in value]))
    match value:
        case dict() if resp3:
            return b"%%%d\r\n" % len(value) + b"".join(map(encode, _flattened(value)))
        case dict():
            return encode(_flattened(value), resp3=False)
        case Verbatim(text) if resp3:
            return b"=%d\r\ntxt:%s\r\n" % (len(text.encode()) + 4, text.encode())
        case Verbatim(text):
            return encode(text)
        case Push(parts):
            return b">%d\r\n" % len(parts) + b"".join(map(encode, parts))
    raise AssertionError(value)


def _flattened(pairs: Mapping[Any, Any]) -> Sequence[Any]:
    return [part for pair in pairs.items() for part in pair]


class Client:
    """One connection, as the node sees it.

    Attributes:
        floors: by node index, the greatest floor that this server raised, or under which it was admitted.
        floor: what the last visit saw.

    Args:
        send: takes what the node sends.
    """

    def __init__(
        self, node: SimulatedRedis, send: Callable[[bytes], None], floors: dict[int, int] | None = None
    ) -> None:
        self._node = node
        self.floors = {} if floors is None else floors
        self.floor = 0
        self._reader = hiredis.Reader()
        self.send = send
        self.channel = b""
        self.resp3 = False

    def note_floor(self, index: int, floor: int) -> None:
        """Note that the server gave an index this floor, or was admitted there under it."""
        self.floors[index] = max(floor, self.floors.get(index, 0))

    def feed(self, received: bytes) -> None:
        self._reader.feed(received)
        while (command := self._reader.gets()) is not False:
            answer = self._node.carry_out([part.decode() for part in command], self)
            self.send(encode(answer, resp3=self.resp3))
            if self._node.state.published:
                self._node.publish()


class SimulatedRedis:
    """One run after another of a node's process, over one disk.

    Attributes:
        loses_notices: no notice arrives.

    Args:
        appendfsync: as Redis has it; "never" stands for no append-only file at all.
    """

    def __init__(self, *, clock_ms: Callable[[], float], appendfsync: str, name: str) -> None:
        self._clock_ms = clock_ms
        self._name = name
        self._runs = 0
        self.appendfsync = appendfsync
        self.state = FakeNodeState()
        self.clients: list[Client] = []
        self.loses_notices = False
        self.run_id = self._new_run_id()

    def _new_run_id(self) -> str:
        self._runs += 1
        return sha(f"{self._name} {self._runs}".encode()).decode()

    def connect(self, send: Callable[[bytes], None], floors: dict[int, int] | None = None) -> Client:
        client = Client(self, send, floors)
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

    # --- commands ---------------------------------------------------------------------------------

    def carry_out(self, command: Sequence[str], client: Client) -> object:  # noqa: PLR0911  (one return per command)
        # The most frequent commands come first.
        match command:
            case ["EVALSHA", sha, count, *rest]:
                return self._script(_NAMES[sha], rest[: int(count)], rest[int(count) :])
            case ["CONFIG", "GET", name]:
                return {name: self._setting(name)}
            case ["EVAL", source, count, *rest]:
                name, client.floor = _SOURCES[source], self.state.floor
                answer = self._script(name, rest[: int(count)], rest[int(count) :])
                if answer == [DONE["raise_floor"]]:
                    index, floor = rest[int(count) + 2 : int(count) + 4]
                    client.note_floor(int(index), int(floor))
                return answer
            case ["INFO"]:
                return Verbatim("".join(f"{name}:{value}\r\n" for name, value in self._info().items()))
            case ["HELLO", "3"]:
                client.resp3 = True
                return {b"proto": 3}
            case ["SUBSCRIBE", channel]:
                client.channel = channel.encode()
                return Push((b"subscribe", client.channel, 1))
            case ["SCRIPT", "LOAD", source]:
                client.note_floor(
                    self.state.formation.index, client.floor
                )  # only an admitted server loads scripts
                return SHAS[_SOURCES[source]]
        raise AssertionError(command)

    def _info(self) -> Mapping[str, str | int]:
        return {
            "redis_version": "7.4.0",
            "run_id": self.run_id,
            "evicted_keys": 0,
            "role": "master",
            "master_replid": "0" * 40,
            "second_repl_offset": -1,
            "maxmemory": 0,
            "maxmemory_policy": "noeviction",
        }

    def _setting(self, name: str) -> str:
        match name:
            case "appendonly":
                return "no" if self.appendfsync == "never" else "yes"
            case "appendfsync":
                return "everysec" if self.appendfsync == "never" else self.appendfsync
        return DURABLE_SETTINGS[name]

    def publish(self) -> None:
        published, self.state.published = self.state.published, []
        for channel, resource, token in published:
            payload = f"{token} {_LOCK}{resource}".encode()
            for client in self.clients:
                if client.channel == channel.encode() and not self.loses_notices:
                    client.send(encode(Push((b"message", client.channel, payload))))

    # --- scripts ----------------------------------------------------------------------------------

    def _script(self, name: str, keys: Sequence[str], arguments: Sequence[str]) -> object:
        if name == "read_identity":
            return self._read_identity()
        if name in DONE:
            return self._join(name, arguments)
        resource = next((key.removeprefix(_LOCK) for key in keys if key.startswith(_LOCK)), "")
        command, channel = self._read(name, resource, arguments[1:])
        now_ms, admission = self._clock_ms(), arguments[0]
        return self._answer(self.state.apply(command, now_ms, admission=admission, channel=channel))

    def _read(  # noqa: PLR0911  (one return per script)
        self, name: str, resource: str, arguments: Sequence[str]
    ) -> tuple[Command, str]:
        match name, arguments:
            case "mint", [digest, nonce, holder, ttl, idle, notices, *delay]:
                notify, behind, channel, ends = notices.split(" ")
                self.state.counter_idle_ms = float(idle)
                ended = Release(resource, ends, 0.0) if ends else None
                mint = Mint(resource, digest, nonce, holder, int(ttl), ended, notify == "1", behind == "1")
                return replace(mint, lock_delay_ms=int(delay[0])) if delay else mint, channel
            case "commit", [digest, nonce, token, idle]:
                self.state.counter_idle_ms = float(idle)
                return Commit(resource, digest, nonce, int(token)), ""
            case "undo", [nonce]:
                return Undo(resource, nonce, 0.0), ""
            case "renew", [digest]:
                return Renew(resource, digest), ""
            case "release", [digest]:
                return Release(resource, digest, 0.0), ""
            case "force_release", [digest, token]:
                return ForceRelease(resource, digest, 0.0, int(token)), ""
            case "inspect", []:
                return Inspect(resource), ""
        raise AssertionError((name, arguments))

    def _answer(self, reply: Reply) -> object:
        match reply:
            case Granted():
                flags = (int(reply.contended), int(reply.released))
                return [b"granted", reply.nonce, reply.token, *flags, self._clock_us()]
            case Held(digest, token, holder, left_ms, delay_ms):
                return [b"held", digest, token, holder, left_ms, *filter(None, [delay_ms])]
            case Renewed():
                return [b"renewed", reply.token, reply.ttl_ms]
            case Status():
                return [_WORDS[reply]]
            case NoReply.NOT_ADMITTED:
                return [b"not_admitted"]
        return [b"exhausted"]

    def _clock_us(self) -> int:
        return int(self._clock_ms() * 1000)

    def _read_identity(self) -> object:
        sight = self.state.join(ReadIdentity())
        assert isinstance(sight, Sight)
        high = [] if sight.high is None else [str(sight.high)]
        return [b"found", _flat(sight), sight.key_count, self._clock_us(), b"", *high]

    def _join(self, name: str, arguments: Sequence[str]) -> object:
        match name, arguments:
            case "quarantine", [admission, run, quarantine, phase, *place, run_now, floor, durable]:
                cluster, index, nodes, ttl = place
                formation = Formation(cluster, int(index), int(nodes), int(ttl))
                present = (run_now, Phase(phase), int(floor), durable == "1")
                step = self.state.join(Quarantine(Known(admission, run), quarantine, formation, *present))
            case "reserve_floor", [quarantine, floor]:
                step = self.state.join(ReserveFloor(quarantine, int(floor)))
            case "raise_floor", [known, admission, index, floor, quarantine]:
                step = self.state.join(RaiseFloor(known, admission, int(index), int(floor), quarantine))
            case "restore_vote", [quarantine, admission, floor, run, durable, evicted, *floors]:
                process = (durable == "1", int(evicted))
                count = len(floors) // 2
                told = (tuple(map(int, floors[:count])), tuple(floors[count:]))
                step = self.state.join(RestoreVote(quarantine, admission, int(floor), run, *told, *process))
            case "distrust_clock", [known, left, most]:
                step = self.state.join(DistrustClock(known, int(left), int(most)), self._clock_ms())
            case _:
                raise AssertionError((name, arguments))
        assert isinstance(step, Step)
        if step is Step.GREATER:
            return [REFUSED[step], self.state.high]
        return [DONE[name] if step is Step.DONE else REFUSED[step]]


def _flat(sight: Sight) -> Sequence[Any]:
    identity = sight.identity
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
        "evicted": identity.evicted,
    }
    optional: dict[str, str | int] = {
        "predecessor": identity.predecessor,
        "floor": identity.floor,
        "voted_floor": identity.voted_floor,
        "reserved": identity.reserved,
        "distrusted_until": sight.distrusted_until_ms,
        "waited_floor": sight.waited_floor,
        **{f"floor:{index}": floor for index, floor in identity.known_floors.items()},
        **{f"fence:{index}": fence for index, fence in identity.known_fences.items()},
    }
    fields |= {name: value for name, value in optional.items() if value}
    return [str(part) for pair in fields.items() for part in pair]
