"""The adversary's world (adversary.py), with nodes that forget and servers that bring them back, each step by itself and in any order.

A *process* stands for a node as it runs: it dies and starts again with an older state of its own, it is wiped while it runs, or an
operator puts another one in its place and it lives on, known to whoever has not heard of it. A *server* is connected to one process per
place, under the admission id that it found there; it looks anew when it is refused (forgetful_server.py). So everything that a rejoin does
is under way for as long as the world likes, two servers do it at once, and nodes are lost again in the middle of it.

Time does not pass, as in the other world, so a quarantine may end at once: it is there for exclusion. T1 and T2 are what must hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

from harness.adversary import (
    RESOURCE,
    TTL_MS,
    Player,
    Rules,
    StandingStill,
    Wire,
    check_grant,
    is_granted,
)
from harness.adversary_moves import Begin, GiveUp, HandOver
from harness.forgetful_moves import (
    Arrive,
    Break,
    ByAttempt,
    ByJoining,
    ByPulse,
    ByRejoin,
    Crash,
    Dial,
    DropCounter,
    Expire,
    Letter,
    Lose,
    Move,
    Replace,
    Restart,
    Save,
    Sender,
    Tell,
    TimeOut,
    Wipe,
)
from harness.forgetful_server import Server
from harness.joining_commands import (
    Formation,
    JoiningAnswer,
    JoiningCommand,
    Known,
    NoteRun,
    Quarantine,
    Readmit,
    Sight,
    Step,
)
from redfence_server.lock_node import (
    Command,
    Commit,
    Granted,
    Mint,
    Plain,
    Pulse,
    Pulsed,
    Release,
    Renewed,
    Reply,
    Silence,
    Undo,
)
from redfence_server.rejoin import Rejoin


class Memory(Protocol):
    """What a process runs: a fake node, or a real one."""

    changes: int

    def apply(self, command: Command, now_ms: float, *, admission: str) -> Reply: ...
    def join(self, command: JoiningCommand) -> JoiningAnswer: ...
    def expire(self, resource: str) -> None: ...
    def drop_counter(self, resource: str) -> None: ...
    def wipe(self) -> None: ...
    def save(self) -> Any: ...
    def restore(self, older: Any) -> None: ...


@dataclass(frozen=True, slots=True)
class Born:
    """As what a node is formed."""

    admission: str
    formation: Formation
    run_id: str
    durable: bool


MakeMemory = Callable[[int, Born], Memory]
"""Makes what the n-th process runs: a node that was just formed."""


@dataclass(frozen=True, slots=True)
class ForgetfulRules(Rules):
    """The algorithm under test: the project's own, or a mutant of one of its parts (forgetful_mutants.py)."""

    rejoin: type[Rejoin] = Rejoin
    server: type[Server] = Server


@dataclass(frozen=True, slots=True)
class Limits:
    """How often the world may do what is not a delivery. None: without limit.

    Attributes:
        losses: time-outs, and letters that never arrive.
        saves: of each process; how it was formed is kept in any case.
    """

    losses: int | None = None
    expiries: int | None = None
    dropped_counters: int | None = None
    give_ups: int | None = None
    hand_overs: int | None = None
    breaks: int | None = None
    tells: int | None = None
    restarts: int | None = None
    saves: int = 3
    crashes: int | None = None
    wipes: int | None = None
    replacements: int | None = None


@dataclass(slots=True)
class Process:
    """A node as it runs.

    Attributes:
        durable: it is formed and set up so that it loses nothing, and does not.
        run: how often it was started.
        may_hold: there may be a hold.
        may_count: and a counter.
        is_away: it has not got its vote, or not got it back.
        saved: what it remembered when it was formed, and each time that it was saved.
    """

    place: int
    memory: Memory
    name: str
    durable: bool = False
    run: int = 0
    may_hold: bool = False
    may_count: bool = False
    is_away: bool = False
    saved: list[Any] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        """The run of its present process."""
        return f"{self.name}.{self.run}"


def formation(place: int, node_count: int) -> Formation:
    """Return what each node of the world is formed as."""
    return Formation("cluster", place, node_count, TTL_MS)


class ForgetfulWorld:
    """Processes, servers, attempts, and what is under way between them.

    Args:
        leases: of each attempt.
        homes: the server of each attempt.
        durable: the places whose nodes lose nothing.
        adopts_empty: as in `JoiningSettings`.
        make_memory: instead of fake nodes by the rules.
    """

    def __init__(
        self,
        leases: tuple[str, ...],
        homes: tuple[int, ...],
        *,
        node_count: int = 3,
        server_count: int = 2,
        durable: frozenset[int] = frozenset(),
        adopts_empty: bool = True,
        rules: ForgetfulRules | None = None,
        limits: Limits | None = None,
        make_memory: MakeMemory | None = None,
    ) -> None:
        self.rules = rules or ForgetfulRules()
        self.limits = limits or Limits()
        self.node_count = node_count
        self._make_memory = make_memory
        self._homes = homes
        self.players = [Player(lease) for lease in leases]
        self.processes: list[Process] = []
        for place in range(node_count):
            self._form(place, durable=place in durable)
        self._wires = [Wire(place, []) for place in range(node_count)]
        formations = tuple(formation(place, node_count) for place in range(node_count))
        self.servers = [
            self.rules.server(
                number,
                formations,
                wires=self._wires,
                rejoin=self.rules.rejoin,
                adopts_empty=adopts_empty,
            )
            for number in range(server_count)
        ]
        self.under_way: list[Letter] = []
        self.ended: frozenset[str] = frozenset()  # leases that were released
        # What this world alone has, since it was copied last; None if it never was, so everything.
        self._own: set[object] | None = None

    def _fake(self, _: int, *, admission: str, formation: Formation, run_id: str, durable: bool) -> Memory:
        return self.rules.node(admission=admission, formation=formation, run_id=run_id, durable=durable)

    def _form(self, place: int, *, durable: bool) -> Process:
        number = len(self.processes)
        name = f"process-{number}"
        identity = Born(f"{number:032x}", formation(place, self.node_count), f"{name}.0", durable=durable)
        memory: Memory
        if self._make_memory:
            memory = self._make_memory(number, identity)
        else:
            memory = self.rules.node(
                admission=identity.admission,
                formation=identity.formation,
                run_id=identity.run_id,
                durable=identity.durable,
            )
        process = Process(place, memory, name, durable, saved=[memory.save()])
        self.processes.append(process)
        return process

    # --- for a search ---------------------------------------------------------------------------------------------

    def copy(self) -> Self:
        """Return a world in the same state with a future of its own. Its nodes have to be fakes."""
        twin = copy(self)
        twin.processes, twin.servers = self.processes.copy(), self.servers.copy()
        twin.players, twin.under_way = self.players.copy(), self.under_way.copy()
        self._own, twin._own = set(), set()
        return twin

    def _has_to_copy(self, kind: str, index: int) -> bool:
        if self._own is None or (kind, index) in self._own:
            return False
        self._own.add((kind, index))
        return True

    def _process(self, index: int) -> Process:
        """Return a process to be changed."""
        if self._has_to_copy("process", index):
            process = self.processes[index] = copy(self.processes[index])
            process.memory = process.memory.save()
            process.saved = process.saved.copy()
        return self.processes[index]

    def _server(self, index: int) -> Server:
        """Return a server to be changed."""
        if self._has_to_copy("server", index):
            self.servers[index] = self.servers[index].copy()
        return self.servers[index]

    def _player(self, index: int) -> Player:
        """Return an attempt to be changed."""
        if self._has_to_copy("player", index):
            self.players[index] = self.players[index].copy()
        return self.players[index]

    # --- what may happen ------------------------------------------------------------------------------------------

    def moves(self) -> Iterator[Move]:
        """Yield everything that may happen next."""
        yield from (Arrive(letter) for letter in self.under_way)
        yield from self.events()

    def events(self) -> Iterator[Move]:
        """Yield everything that may happen next, but for deliveries."""
        limits = self.limits
        yield from self._moves_of_attempts()
        if limits.losses != 0:
            for letter in self.under_way:
                if letter.told:
                    yield Lose(letter)
                elif not isinstance(letter.sender, ByJoining):
                    yield TimeOut(letter)
        for server in self.servers:
            yield from self._moves_of(server)
        for index, process in enumerate(self.processes):
            yield from self._moves_of_process(index, process)
        if limits.replacements != 0:
            yield from (Replace(place) for place in range(self.node_count))

    def _moves_of_process(self, index: int, process: Process) -> Iterator[Move]:
        limits = self.limits
        if limits.expiries != 0 and process.may_hold:
            yield Expire(index)
        if limits.dropped_counters != 0 and process.may_count:
            yield DropCounter(index)
        if len(process.saved) <= limits.saves:
            yield Save(index)
        if limits.crashes != 0:
            yield Crash(index, -1)
            if not process.durable:
                yield from (Crash(index, saved) for saved in range(len(process.saved)))
        if limits.wipes != 0 and not process.durable:
            yield Wipe(index)

    def connect(self) -> None:
        """Let every server be admitted everywhere: the beginning of a walk or a search."""
        for server in self.servers:
            for place in range(self.node_count):
                self.make(Dial(server.number, place, place))
                while self.under_way:
                    self.make(Arrive(self.under_way[0]))

    def is_over(self) -> bool:
        """Tell whether no attempt is under way, and none may begin any more."""
        return not any(
            player.is_open or (player.attempt is None and player.lease not in self.ended)
            for player in self.players
        )

    def home(self, attempt: int) -> int:
        """Return the server of an attempt."""
        return self._homes[attempt]

    def ready_count(self, attempt: int) -> int:
        """Return to how many nodes the server of an attempt is admitted now."""
        server = self.servers[self._homes[attempt]]
        return sum(server.ready(place) is not None for place in range(self.node_count))

    def is_broken(self, server: int, place: int) -> bool:
        """Tell whether the process at the other end of a server's connection has died."""
        connection = self.servers[server].connections[place]
        return connection is not None and connection.run_id != self.processes[connection.process].run_id

    def places_away(self) -> set[int]:
        """Return the places at which nobody votes that a server is admitted to."""
        here = {
            place
            for server in self.servers
            for place in range(self.node_count)
            if (connection := server.ready(place)) and not self.processes[connection.process].is_away
        }
        return set(range(self.node_count)) - here

    def _moves_of_attempts(self) -> Iterator[Move]:
        granted = sorted({each.lease for each in self.players if each.token} - self.ended)
        for index, player in enumerate(self.players):
            if player.attempt is None:
                # A lease id is never used again after its release: the contract asks for it.
                if player.lease not in self.ended:
                    yield Begin(index)
                    if self.limits.hand_overs != 0:
                        yield from (HandOver(each, index) for each in granted if each != player.lease)
            elif self.limits.give_ups != 0 and player.is_open:
                yield GiveUp(index)

    def _moves_of(self, server: Server) -> Iterator[Move]:
        limits = self.limits
        for place, connection in enumerate(server.connections):
            if connection is None:
                for index, process in enumerate(self.processes):
                    if process.place == place:
                        yield Dial(server.number, place, index)
            elif limits.breaks != 0 or self.is_broken(server.number, place):
                yield Break(server.number, place)
        if limits.tells != 0:
            yield Tell(server.number)
        if limits.restarts != 0:
            yield Restart(server.number)

    def make(self, move: Move) -> None:
        """Let it happen.

        Raises:
            Violation: it breaks an invariant.
        """
        match move:
            case Begin(index):
                self._begin(index)
            case HandOver(lease, index):
                self._spend("hand_overs")
                self.ended |= {lease}
                self._begin(index, ends=Release(RESOURCE, lease, 0))
            case GiveUp(index):
                self._spend("give_ups")
                attempt = self._player(index).attempt
                assert attempt is not None
                attempt.give_up()
                self._post(self._homes[index], ByAttempt(index))
            case Arrive(letter):
                self.under_way.remove(letter)
                if letter.reply is None:
                    self._apply(letter)
                else:
                    self._read(letter, letter.reply)
            case TimeOut(letter):
                self._spend("losses")
                self.under_way.remove(letter)
                if letter.reply is None:
                    self.under_way.append(replace(letter, told=True))
                self._tell(letter, Silence.TIMED_OUT)
            case Lose(letter):
                self._spend("losses")
                self.under_way.remove(letter)
            case Dial(server, place, index):
                process = self.processes[index]
                self._server(server).dial(place, index, run_id=process.run_id, durable=process.durable)
                self._collect(server)
            case Break(server, place):
                self._break(self._server(server), place)
            case Tell(server):
                self._spend("tells")
                self._pulse(self._server(server))
            case Restart(server):
                self._spend("restarts")
                self._restart(self._server(server))
            case _:
                self._make_of_process(move)

    def _make_of_process(self, move: Expire | DropCounter | Save | Crash | Wipe | Replace) -> None:
        match move:
            case Expire(index):
                self._spend("expiries")
                process = self._process(index)
                process.memory.expire(RESOURCE)
                process.may_hold = False
            case DropCounter(index):
                self._spend("dropped_counters")
                process = self._process(index)
                process.memory.drop_counter(RESOURCE)
                process.may_count = False
            case Save(index):
                process = self._process(index)
                process.saved.append(process.memory.save())
            case Crash(index, saved):
                self._spend("crashes")
                process = self._process(index)
                if saved >= 0:
                    process.memory.restore(process.saved[saved])
                    process.may_hold = process.may_count = saved > 0
                process.run += 1
                process.is_away = True
                self.under_way = [
                    each
                    for each in self.under_way
                    if each.process != index or each.reply is not None or not each.told
                ]
            case Wipe(index):
                self._spend("wipes")
                process = self._process(index)
                process.memory.wipe()
                process.may_hold = process.may_count = False
                process.is_away = True
            case Replace(place):
                self._spend("replacements")
                process = self._form(place, durable=False)
                process.memory.wipe()
                quarantine = f"{0xFFFF:04x}{len(self.processes):028x}"
                quarantined = process.memory.join(
                    Quarantine(Known(), quarantine, formation(place, self.node_count), process.run_id)
                )
                assert quarantined is Step.DONE
                process.saved = [process.memory.save()]
                process.is_away = True

    def _spend(self, kind: str) -> None:
        left = getattr(self.limits, kind)
        if left is not None:
            self.limits = replace(self.limits, **{kind: left - 1})

    # --- servers --------------------------------------------------------------------------------------------------

    def _begin(self, index: int, *, ends: Release | None = None) -> None:
        player = self._player(index)
        rivals = (each for each in self.players if each.lease != player.lease)
        player.floor = max((rival.token for rival in rivals), default=0)
        mint = Mint(RESOURCE, player.lease, f"nonce-{index}", "", TTL_MS, ends=ends)
        player.attempt = self.rules.attempt(self._wires, mint, clock=StandingStill())
        player.attempt._tally = self.rules.tally(self.node_count, nonce=mint.nonce)
        player.attempt.start()
        self._post(self._homes[index], ByAttempt(index))

    def _pulse(self, server: Server) -> None:
        for place in range(self.node_count):
            server.post(place, Pulse(server.memory.changes()), ByPulse(place))
        self._collect(server.number)

    def _restart(self, server: Server) -> None:
        for index, home in enumerate(self._homes):
            if home == server.number and self.players[index].is_open:
                attempt = self._player(index).attempt
                assert attempt is not None
                attempt.outcome.cancel()
        for place, connection in enumerate(server.connections):
            if connection is not None:
                server.end(place)
        server.begin_anew()
        self.under_way = [
            replace(letter, told=True) if letter.server == server.number else letter
            for letter in self.under_way
            if letter.server != server.number or letter.reply is None
        ]

    def _break(self, server: Server, place: int) -> None:
        if not self.is_broken(server.number, place):
            self._spend("breaks")
        self._drop(server, place)

    def _drop(self, server: Server, place: int) -> None:
        """End a connection: replies on it are not read any more, and requests may still arrive."""
        connection = server.connections[place]
        assert connection is not None
        way = (server.number, place, connection.number)
        lost = [each for each in self.under_way if (each.server, each.place, each.connection) == way]
        self.under_way = [each for each in self.under_way if each not in lost]
        self.under_way += [
            replace(each, told=True)
            for each in lost
            if each.reply is None and each.run_id == self.processes[each.process].run_id
        ]
        server.end(place)
        for letter in lost:
            if not letter.told:
                self._tell(letter, Silence.DISCONNECTED)

    def _review(self, server: Server) -> None:
        for place in range(self.node_count):
            if server.is_superseded(place):
                self._drop(server, place)

    # --- letters --------------------------------------------------------------------------------------------------

    def _post(self, number: int, sender: Sender) -> None:
        """Put what an attempt or a rejoin has just sent on its way, and tell it of what cannot be sent."""
        server = self._server(number)
        unsent: list[tuple[int, Command]] = []
        for wire in self._wires:
            for place, command in wire.outbox:
                told = isinstance(command, Undo | Release)
                if not server.post(place, command, sender, told=told) and not told:
                    unsent.append((place, command))
            wire.outbox.clear()
        self._collect(number)
        for place, command in unsent:
            self._hand(number, sender, place, command, Silence.UNREACHABLE)
        if isinstance(sender, ByAttempt):
            self._sort_out(sender.attempt)

    def _collect(self, server: int) -> None:
        outbox = self.servers[server].outbox
        self.under_way += outbox
        outbox.clear()

    def _sort_out(self, attempt: int) -> None:
        """Forget the replies that cannot change anything any more."""
        if not self.players[attempt].is_open:
            self.under_way = [
                replace(letter, told=True)
                if letter.sender == ByAttempt(attempt) and not self._is_awaited(letter)
                else letter
                for letter in self.under_way
                if letter.sender != ByAttempt(attempt) or letter.reply is None or self._is_awaited(letter)
            ]

    def _is_awaited(self, letter: Letter) -> bool:
        if letter.told:
            return False
        match letter.sender:
            case ByAttempt(attempt):
                player = self.players[attempt]
                return player.is_open or (player.token > 0 and isinstance(letter.command, Mint))
        return True

    def _apply(self, letter: Letter) -> None:
        process = self._process(letter.process)
        if letter.run_id != process.run_id:
            # Nobody is there any more.
            if not letter.told:
                self.under_way.append(letter)
                self._drop(self._server(letter.server), letter.place)
            return
        memory = process.memory
        reply: Reply | JoiningAnswer
        if isinstance(letter.command, JoiningCommand):
            reply = memory.join(letter.command)
            if isinstance(letter.command, Readmit | NoteRun) and reply is Step.DONE:
                process.is_away = False
        else:
            reply = memory.apply(letter.command, 0.0, admission=letter.under)
            if isinstance(reply, Granted):
                process.may_hold = process.may_count = True
        if self._is_awaited(letter):
            tells = isinstance(reply, Granted | Renewed | Pulsed) or (isinstance(reply, Plain) and reply in {Plain.COMMITTED, Plain.VOUCHED})
            self.under_way.append(replace(letter, reply=reply, changes=memory.changes if tells else 0))

    def _read(self, letter: Letter, reply: Reply | JoiningAnswer) -> None:
        """Let a server read an answer, on a connection that it still has."""
        server = self._server(letter.server)
        if not isinstance(reply, Sight | Step):
            reply = server.heed(letter, reply)
            if isinstance(letter.sender, ByPulse) and isinstance(reply, Pulsed):
                server.memory.pulsed(letter.place, reply)
            self._review(server)
            looks_again = reply is Silence.REFUSED or (
                reply is Silence.NOT_ADMITTED and server.is_void(letter)
            )
            if looks_again and server.connections[letter.place] is not None:
                self._drop(server, letter.place)
        self._tell(letter, reply)

    def _tell(self, letter: Letter, reply: Reply | JoiningAnswer) -> None:
        self._hand(letter.server, letter.sender, letter.place, letter.command, reply)

    def _hand(
        self,
        number: int,
        sender: Sender,
        place: int,
        command: Command | JoiningCommand,
        reply: Reply | JoiningAnswer,
    ) -> None:
        """Tell the sender of a command what came of it, and let it go on."""
        match sender:
            case ByAttempt(index):
                assert not isinstance(reply, Sight | Step)
                self._tell_attempt(index, place, command, reply)
            case ByRejoin(of, connection):
                assert not isinstance(reply, Sight | Step)
                self._tell_rejoin(number, of, connection, place, command, reply)
            case ByJoining() if isinstance(reply, Sight | Step):
                server = self._server(number)
                goes_on = server.on_joining(place, command, reply)
                self._review(server)
                self._go_on(server, place, goes_on=goes_on)

    def _tell_attempt(self, index: int, place: int, command: object, reply: Reply) -> None:
        player = self._player(index)
        attempt = player.attempt
        assert attempt is not None
        was_open = player.is_open
        if isinstance(command, Commit):
            attempt._on_commit(place, command.token, reply)
        else:
            attempt._on_mint(place, reply)
        if was_open and is_granted(attempt):
            check_grant(self.players, index)
        self._post(self._homes[index], ByAttempt(index))

    def _tell_rejoin(  # noqa: PLR0917  (in the order of the parts)
        self, number: int, of: int, connection: int, place: int, command: object, reply: Reply
    ) -> None:
        server = self._server(number)
        present = server.connections[of]
        if present is None or present.number != connection or present.rejoin is None:
            return
        if isinstance(command, Pulse):
            present.rejoin.on_recall(place, reply)
        else:
            present.rejoin.on_vouch(reply)
        self._post(number, ByRejoin(of, connection))
        self._go_on(server, of, goes_on=True)

    def _go_on(self, server: Server, place: int, *, goes_on: bool) -> None:
        """Put on its way what a server has sent to bring a node back, or end the connection if it is of no use for now."""
        connection = server.connections[place]
        if connection is None:
            return
        if goes_on and connection.rejoin is not None:
            self._post(server.number, ByRejoin(place, connection.number))
            if server.connections[place] is not connection:
                return
            goes_on = server.on_rejoin(place)
        self._collect(server.number)
        if not goes_on:
            self._drop(server, place)
