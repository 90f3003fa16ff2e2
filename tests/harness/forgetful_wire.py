"""Connections on which every command and every answer is a letter, which somebody else lets arrive: at any time, in any order, or never.

To `NodeJoining` a `Connection` is a dialled node, to `NodeLink` a node connection. What they say is read back from what they send, and
what the scripts answer is put as it comes over the wire.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from harness.joining_commands import (
    Claim,
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Known,
    Look,
    NoteRun,
    Quarantine,
    Readmit,
    Sight,
    Step,
)
from redfence_server import scripts
from redfence_server.lock_node import Command, Granted, Held, Plain, Pulsed, Renewed, Reply, Silence
from redfence_server.node_examination import DURABLE_SETTINGS, Identity, Phase
from redfence_server.redis_dial import DialError

NOBODY = -1
"""The sender of what no attempt has sent."""


@dataclass(eq=False, slots=True)
class Letter:
    """A command, or its answer, on one connection.

    Attributes:
        under: the admission id under which it was sent; empty for a server that is not admitted yet.
        sender: the attempt.
        on_answer: None if nobody waits for the answer any more.
        answer: None on the way there.
    """

    connection: Connection
    command: Command | JoiningCommand
    under: str
    sender: int
    on_answer: Callable[[Any], None] | None
    answer: list[Any] | None = None

    def __repr__(self) -> str:
        """Tell who sends what to whom."""
        way = self.connection
        ends = f"server {way.server}, process {way.process} (connection {way.number})"
        return f"{ends}: {self.command}" + ("" if self.answer is None else f" -> {self.answer}")


class Labelled(bytes):
    """A packed command that knows what is in it."""

    command: Command
    under: str


class LabellingPacker(scripts.Packer):
    """Packs as the product does."""

    def pack(self, command: Command, admission: str) -> bytes:
        """Return the bytes to send."""
        packed = Labelled(super().pack(command, admission))
        packed.command, packed.under = command, admission
        return packed


class Connection:
    """One connection of a server to a process.

    Attributes:
        number: among all in its world.
        run_id: of the process when it was made; a restart ends it.
        sender: whose commands it is given now.
        letters: where everything goes that is sent.
    """

    latency_ms = None

    def __init__(  # noqa: PLR0917  (in the order of the ends)
        self,
        number: int,
        server: int,
        place: int,
        process: int,
        run_id: str,
        letters: list[Letter],
        *,
        durable: bool,
    ) -> None:
        self.number = number
        self.server = server
        self.place = place
        self.process = process
        self.run_id = run_id
        self.sender = NOBODY
        self.has_ended = False
        self._on_lost: Callable[[str], None] = _ignore
        self.letters = letters
        self._durable = durable

    # --- what a server calls ----------------------------------------------------------------------------------------

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the answers; see `DialledNode`."""
        return [await self.command(*parts) for parts in batch]

    async def command(self, *parts: str | bytes | int) -> Any:
        """Return the answer; see `DialledNode`."""
        self._expect_open()
        # What stays as it is for as long as the process runs is told at once.
        if parts[0] == "INFO":
            return self._info(str(parts[1])).encode()
        if parts[0] == "CONFIG":
            name = str(parts[2])
            return [name.encode(), DURABLE_SETTINGS[name].encode() if self._durable else b"unsafe"]
        answered: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Any) -> None:
            if not answered.done():
                answered.set_result(answer)

        self.letters.append(Letter(self, _read_joining(parts), "", NOBODY, on_answer))
        answer = await answered
        if isinstance(answer, Silence):
            raise DialError(answer.name)
        return answer

    def hand_over(self, on_lost: Callable[[str], None]) -> None:
        """Tell somebody else of its end from now on; see `DialledNode`."""
        self._expect_open()
        self._on_lost = on_lost

    def _expect_open(self) -> None:
        if self.has_ended:
            raise DialError("the connection has ended")

    def _info(self, section: str) -> str:
        return {
            "server": f"redis_version:8.0\r\nrun_id:{self.run_id}",
            "replication": "role:master\r\nsecond_repl_offset:-1",
        }.get(section, "")

    def call(self, packed: bytes, on_raw: Callable[[Any], None]) -> bool:
        """Send a packed command; see `NodeConnection`."""
        assert isinstance(packed, Labelled)
        if not self.has_ended:
            self.letters.append(Letter(self, packed.command, packed.under, self.sender, on_raw))
        return not self.has_ended

    def abort(self, reason: str) -> None:
        """End the connection now; whoever waits is told later."""
        asyncio.get_running_loop().call_soon(self.lose, reason)

    # --- what happens to it -----------------------------------------------------------------------------------------

    def lose(self, reason: str) -> None:
        """End it: answers are not read any more, and requests may still arrive. May be repeated."""
        if self.has_ended:
            return
        self.has_ended = True
        own = [letter for letter in self.letters if letter.connection is self]
        unanswered = [letter.on_answer for letter in own if letter.on_answer]
        self.letters[:] = [
            each for each in self.letters if each.connection is not self or each.answer is None
        ]
        for letter in own:
            letter.on_answer = None
        for on_answer in unanswered:
            on_answer(Silence.DISCONNECTED)
        self._on_lost(reason)

    def forget(self) -> None:
        """End it as the death of the server does: nobody is told."""
        for letter in self.letters:
            if letter.connection is self:
                letter.on_answer = None
        self._on_lost = _ignore
        self.lose("")


def _ignore(_: str) -> None:
    """Nobody is told."""


# --- what is sent before a node is admitted -------------------------------------------------------------------------

_JOINING = {scripts.load(name): name for name in ("look", "note_run", "quarantine", "claim", "readmit")}


def _read_joining(parts: tuple[str | bytes | int, ...]) -> JoiningCommand:
    word, source, key_count, *rest = parts
    assert word == "EVAL"
    assert isinstance(source, bytes)
    assert isinstance(key_count, int)
    arguments = [str(each) for each in rest[key_count:]]
    match _JOINING[source], arguments:
        case "look", []:
            return Look()
        case "note_run", [admission, run_before, run_id, durable]:
            return NoteRun(Known(admission, run_before), run_id, durable == "1")
        case "quarantine", [admission, run_before, quarantine, phase, cluster, *numbers, run_id, floor]:
            index, node_count, max_ttl_ms = map(int, numbers)
            formation = Formation(cluster, index, node_count, max_ttl_ms)
            before = Known(admission, run_before)
            return Quarantine(before, quarantine, formation, run_id, Phase(phase), int(floor))
        case "claim", [quarantine, floor, changes]:
            return Claim(quarantine, int(floor), int(changes))
        case "readmit", [quarantine, phase, admission, floor, changes, run_id, durable, evicted, *floors]:
            return Readmit(
                *(quarantine, admission, int(floor), int(changes), run_id),
                tuple(map(int, floors)),
                durable=durable == "1",
                evicted=int(evicted),
                phase=Phase(phase),
            )
    raise AssertionError(f"no step of a joining: {arguments}")


# --- what is answered -----------------------------------------------------------------------------------------------


def answer_of(  # noqa: PLR0911  (one return per answer)
    reply: Reply | JoiningAnswer, changes: int
) -> list[Any]:
    """Return an answer as scripts give it; `changes` of the node after it."""
    match reply:
        case Granted(nonce, token, contended, released):
            return [b"granted", nonce.encode(), token, int(contended), int(released), changes, 0]
        case Held(digest, token, holder, remaining_ms):
            return [b"held", digest.encode(), token, holder.encode(), remaining_ms]
        case Renewed(token, ttl_ms):
            return [b"renewed", token, ttl_ms, changes]
        case Pulsed(_, _, high, known_changes, known_floors):
            return [b"pulse", 0, changes, high, list(known_changes), list(known_floors), 0]
        case Plain.TOO_LOW:
            return [b"greater"]
        case Silence.REFUSED:
            return [b"exhausted"]
        case Plain.COMMITTED | Plain.VOUCHED:
            return [reply.name.lower().encode(), changes]
        case Plain() | Silence() | Step():
            return [reply.name.lower().encode()]
        case Sight(identity, key_count, high):
            own = [] if high is None else [str(high).encode()]
            return [b"found", _fields(identity), key_count, *own]


def _fields(identity: Identity | None) -> list[bytes]:
    if identity is None:
        return []
    fields = {
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
    return [str(text).encode() for pair in fields.items() for text in pair]
