"""The adversary's world (adversary.py), with nodes that forget and servers that bring them back, each step by itself and in any order.

A *process* stands for a node as it runs: it dies and starts again with an older state of its own, it is wiped while it runs, or an
operator puts another one in its place and it lives on, known to whoever has not heard of it. A *server* is the product's own links
(forgetful_server.py), each connected to one process at its place. So everything that a rejoin does is under way for as long as the world
likes, two servers do it at once, and nodes are lost again in the middle of it.

Time does not pass, as in the other world. T1 and T2 are what must hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from harness.adversary import RESOURCE, TTL_MS, Player, Rules, check_grant, is_granted
from harness.adversary_moves import Begin, GiveUp, HandOver
from harness.forgetful_moves import (
    Arrive,
    Break,
    Crash,
    Dial,
    DropCounter,
    Expire,
    Lose,
    Move,
    Replace,
    Restart,
    Save,
    Tell,
    TimeOut,
    Wipe,
)
from harness.forgetful_server import Server, StandingStill, attempt_links
from harness.forgetful_wire import Connection, Letter, answer_of
from harness.joining_commands import (
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
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Command, Granted, Mint, Release, Reply, Silence
from redfence_server.rejoin import NUMBERS_JUMP, Rejoin

_TURNS = 3
"""Of the loop after each move, until what follows from it at once is done; what needs more is done after the next."""


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
    numbers_jump: int = NUMBERS_JUMP
    cluster_memory: type[ClusterMemory] = ClusterMemory


@dataclass(frozen=True, slots=True)
class Limits:
    """How often the world may do what is not a delivery. None: without limit.

    Attributes:
        saves: of each process; how it was formed is kept in any case.
    """

    saves: int = 3
    restarts: int | None = None
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


class ForgetfulWorld:
    """Processes, servers, attempts, and what is under way between them. It has to be ended.

    Attributes:
        rejoined: how often a node has come back.

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
        make_memory: MakeMemory | None = None,
    ) -> None:
        self.rules = rules or ForgetfulRules()
        self.limits = Limits()
        self.node_count = node_count
        self.rejoined = 0
        self.under_way: list[Letter] = []
        self.players = [Player(lease) for lease in leases]
        self.ended: set[str] = set()  # leases that were released
        self._homes = homes
        self._make_memory = make_memory or self._make_fake
        self._connected = 0
        self.processes = [self._form(place, place, durable=place in durable) for place in range(node_count)]
        self.servers = [
            Server(number, node_count, memory=self.rules.cluster_memory, adopts_empty=adopts_empty)
            for number in range(server_count)
        ]

    async def end(self) -> None:
        """Leave nothing running."""
        for server in self.servers:
            await server.end()

    def _form(self, number: int, place: int, *, durable: bool) -> Process:
        name = f"process-{number}"
        born = Born(f"{number:032x}", self._formation(place), f"{name}.0", durable)
        memory = self._make_memory(number, born)
        return Process(place, memory, name, durable, saved=[memory.save()])

    def _formation(self, place: int) -> Formation:
        return Formation("cluster", place, self.node_count, TTL_MS)

    def _make_fake(self, _: int, born: Born) -> Memory:
        return self.rules.node(
            admission=born.admission, formation=born.formation, run_id=born.run_id, durable=born.durable
        )

    # --- what may happen ------------------------------------------------------------------------------------------

    def events(self) -> Iterator[Move]:
        """Yield everything that may happen next, but for deliveries."""
        yield from self._moves_of_attempts()
        for letter in self.under_way:
            if letter.on_answer is None:
                yield Lose(letter)
            elif letter.under:
                yield TimeOut(letter)
        for server in self.servers:
            yield from self._moves_of_server(server)
        for index, process in enumerate(self.processes):
            yield from self._moves_of_process(index, process)
        if self.limits.replacements != 0:
            yield from (Replace(place) for place in range(self.node_count))

    def _moves_of_attempts(self) -> Iterator[Move]:
        granted = sorted({each.lease for each in self.players if each.token} - self.ended)
        for index, player in enumerate(self.players):
            if player.is_open:
                yield GiveUp(index)
            elif player.attempt is None and player.lease not in self.ended:
                # A lease id is never used again after its release: the contract asks for it.
                yield Begin(index)
                yield from (HandOver(each, index) for each in granted if each != player.lease)

    def _moves_of_server(self, server: Server) -> Iterator[Move]:
        for place, link in enumerate(server.links):
            if link.connection is not None:
                yield Break(server.number, place)
                continue
            for index, process in enumerate(self.processes):
                if process.place == place:
                    yield Dial(server.number, place, index)
        yield Tell(server.number)
        if self.limits.restarts != 0:
            yield Restart(server.number)

    def _moves_of_process(self, index: int, process: Process) -> Iterator[Move]:
        limits = self.limits
        if process.may_hold:
            yield Expire(index)
        if process.may_count:
            yield DropCounter(index)
        if len(process.saved) <= limits.saves:
            yield Save(index)
        if limits.crashes != 0:
            yield Crash(index, -1)
            if not process.durable:
                yield from (Crash(index, saved) for saved in range(len(process.saved)))
        if limits.wipes != 0 and not process.durable:
            yield Wipe(index)

    # --- what can be seen of it -----------------------------------------------------------------------------------

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
        return sum(link.is_ready for link in self.servers[self._homes[attempt]].links)

    def is_broken(self, server: int, place: int) -> bool:
        """Tell whether the process at the other end of a server's connection has died."""
        connection = self.servers[server].links[place].connection
        return connection is not None and connection.run_id != self.processes[connection.process].run_id

    def places_away(self) -> set[int]:
        """Return the places at which nobody votes that a server is admitted to."""
        links = (link for server in self.servers for link in server.links if link.is_ready)
        here = {
            link.index
            for link in links
            if link.connection is not None and not self.processes[link.connection.process].is_away
        }
        return set(range(self.node_count)) - here

    # --- what happens ---------------------------------------------------------------------------------------------

    async def make(self, move: Move) -> None:
        """Let it happen, and what follows from it at once.

        Raises:
            Violation: it breaks an invariant.
        """
        match move:
            case Begin(index):
                self._begin(index)
            case HandOver(lease, index):
                self.ended.add(lease)
                self._begin(index, ends=Release(RESOURCE, lease, TTL_MS))
            case GiveUp(index):
                attempt = self.players[index].attempt
                assert attempt is not None
                attempt.give_up()
            case Arrive(letter):
                self.under_way.remove(letter)
                if letter.answer is None:
                    self._carry_out(letter)
                elif letter.on_answer is not None:
                    letter.on_answer(letter.answer)
            case TimeOut(letter):
                on_answer, letter.on_answer = letter.on_answer, None
                assert on_answer is not None
                on_answer(Silence.TIMED_OUT)
            case Lose(letter):
                self.under_way.remove(letter)
            case Dial(server, place, index):
                self._dial(server, place, index)
            case Break(server, place):
                connection = self.servers[server].links[place].connection
                assert connection is not None
                connection.lose("it broke")
            case Tell(server):
                self.servers[server].pulse()
            case Restart(server):
                self._spend("restarts")
                self._restart(server)
            case _:
                self._happen_to_process(move)
        await self._settle()

    def _happen_to_process(self, move: Expire | DropCounter | Save | Crash | Wipe | Replace) -> None:
        match move:
            case Expire(index):
                self.processes[index].memory.expire(RESOURCE)
                self.processes[index].may_hold = False
            case DropCounter(index):
                self.processes[index].memory.drop_counter(RESOURCE)
                self.processes[index].may_count = False
            case Save(index):
                self.processes[index].saved.append(self.processes[index].memory.save())
            case Crash(index, saved):
                self._spend("crashes")
                process = self.processes[index]
                if saved >= 0:
                    process.memory.restore(process.saved[saved])
                    process.may_hold = process.may_count = saved > 0
                process.run += 1
                process.is_away = True
            case Wipe(index):
                self._spend("wipes")
                process = self.processes[index]
                process.memory.wipe()
                process.may_hold = process.may_count = False
                process.is_away = True
            case Replace(place):
                self._spend("replacements")
                self._replace(place)

    def _spend(self, kind: str) -> None:
        left = getattr(self.limits, kind)
        if left is not None:
            self.limits = replace(self.limits, **{kind: left - 1})

    def _begin(self, index: int, *, ends: Release | None = None) -> None:
        player = self.players[index]
        player.floor = max((rival.token for rival in self.players if rival.lease != player.lease), default=0)
        mint = Mint(RESOURCE, player.lease, f"nonce-{index}", "", TTL_MS, ends=ends)
        links = attempt_links(self.servers[self._homes[index]].links, index)
        player.attempt = self.rules.attempt(links, mint, clock=StandingStill())
        player.attempt._tally = self.rules.tally(self.node_count, nonce=mint.nonce)
        player.attempt.start()

    def _dial(self, server: int, place: int, index: int) -> None:
        self._connected += 1
        process = self.processes[index]
        ends = (self._connected, server, place, index)
        connection = Connection(*ends, process.run_id, self.under_way, durable=process.durable)
        self.servers[server].dial(connection)

    def _restart(self, number: int) -> None:
        for player, home in zip(self.players, self._homes, strict=True):
            if home == number and player.is_open:
                assert player.attempt is not None
                player.attempt.outcome.cancel()
        self.servers[number].die()
        self.servers[number].begin()

    def _known_floor(self, place: int) -> int:
        """Return the greatest floor that any node knows of for a place."""
        sights = [each.memory.join(Look()) for each in self.processes]
        identities = [sight.identity for sight in sights if isinstance(sight, Sight)]
        return max(each.known_floors.get(place, 0) for each in identities if each is not None)

    def _replace(self, place: int) -> None:
        """Put an empty node there, as `redfence cluster replace` does."""
        process = self._form(len(self.processes), place, durable=False)
        process.memory.wipe()
        quarantine = f"{0xFFFF:04x}{len(self.processes):028x}"
        named = Quarantine(
            *(Known(), quarantine, self._formation(place), process.run_id), floor=self._known_floor(place)
        )
        assert process.memory.join(named) is Step.DONE
        process.saved = [process.memory.save()]
        process.is_away = True
        self.processes.append(process)

    def _carry_out(self, letter: Letter) -> None:
        process = self.processes[letter.connection.process]
        if letter.connection.run_id != process.run_id:
            # Nobody is there any more; it is as lost as everything else on this connection.
            if letter.on_answer is not None:
                self.under_way.append(letter)
                letter.connection.lose("the process has died")
                self.under_way.remove(letter)
            return
        answer: Reply | JoiningAnswer
        command = letter.command
        if isinstance(command, JoiningCommand):
            answer = process.memory.join(command)
            if isinstance(command, Readmit | NoteRun) and answer is Step.DONE:
                process.is_away = False
            self.rejoined += isinstance(command, Readmit) and answer is Step.DONE
        else:
            answer = process.memory.apply(command, 0.0, admission=letter.under)
            if isinstance(answer, Granted):
                process.may_hold = process.may_count = True
        if letter.on_answer is not None:
            self.under_way.append(replace(letter, answer=answer_of(answer, process.memory.changes)))

    async def _settle(self) -> None:
        for _ in range(_TURNS):
            await asyncio.sleep(0)
        for server in self.servers:
            server.reap()
        for index, player in enumerate(self.players):
            if player.attempt is not None and not player.token and is_granted(player.attempt):
                check_grant(self.players, index)
