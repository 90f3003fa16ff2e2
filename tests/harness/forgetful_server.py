"""One server in the world of nodes that forget: what it is connected to, under which admission id, and how it brings nodes back.

What it decides, it decides by the product's own parts: `judge`, `ClusterMemory`, `Rejoin`. What is told here once more, because there
it is interwoven with sockets, is the order of steps in node_joining.py and what node_link.py does with an answer. Nothing is
done at once: each step sends a command and ends, and its answer begins the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import Self

from harness.forgetful_moves import ByJoining, Letter, Sender
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
from redfence_server.lock_node import (
    Command,
    Commit,
    Granted,
    LockNode,
    Plain,
    Pulsed,
    Renewed,
    Reply,
    Silence,
    Vouch,
)
from redfence_server.node_admission import Admitted, Expectation, Forgot, Quarantined, judge
from redfence_server.node_examination import Findings, Identity
from redfence_server.rejoin import Rejoin, Vouched

VERSION = "8.0"
GAP = "appendonly is no"


@dataclass(slots=True)
class Connection:
    """One connection to a process at a place; commands go over it once `admission` is there.

    Attributes:
        number: among all that the server has made to the place.
        run_id: of the process when it was made; a restart ends it.
        admission: empty while the server looks whether the node may vote.
        floor: under which the node was admitted.
        expected: what floor and how many changes were known before the look that is under way.
        found: the identity that was looked at last, and `high` beside it.
        rejoin: that the server drives for this node.
    """

    process: int
    number: int
    run_id: str
    durable: bool
    admission: str = ""
    floor: int = 0
    expected: tuple[int, int] = (0, 0)
    found: Sight | None = None
    rejoin: Rejoin | None = None

    def copy(self) -> Connection:
        """Return one with a future of its own."""
        twin = copy(self)
        if self.rejoin is not None:
            rejoin = twin.rejoin = copy(self.rejoin)
            rejoin._recalled = rejoin._recalled.copy()
            if not self.rejoin.outcome.done():
                rejoin.outcome = self.rejoin.outcome.get_loop().create_future()
        return twin


class Server:
    """One server's part of the world.

    Attributes:
        outbox: what it has sent since somebody emptied it.
    """

    def __init__(
        self,
        number: int,
        formations: tuple[Formation, ...],
        *,
        wires: Sequence[LockNode],
        rejoin: type[Rejoin] = Rejoin,
        adopts_empty: bool,
    ) -> None:
        self.number = number
        self.memory = ClusterMemory(len(formations))
        self.connections: list[Connection | None] = [None] * len(formations)
        self.outbox: list[Letter] = []
        self._formations = formations
        self._wires = wires
        self._rejoin = rejoin
        self._adopts_empty = adopts_empty
        self._admitted_floors: list[int | None] = [None] * len(formations)
        self._made = [0] * len(formations)
        self._ids = 0

    def copy(self) -> Self:
        """Return a server in the same state with a future of its own."""
        twin = copy(self)
        twin.memory = ClusterMemory(len(self.connections))
        twin.memory.cluster_id, twin.memory.ttl_ms_max = self.memory.cluster_id, self.memory.ttl_ms_max
        twin.memory.places = tuple(copy(place) for place in self.memory.places)
        twin.connections = [each and each.copy() for each in self.connections]
        twin.outbox = self.outbox.copy()
        twin._admitted_floors, twin._made = self._admitted_floors.copy(), self._made.copy()
        return twin

    def begin_anew(self) -> None:
        """Forget everything but which connections have been made and which ids drawn."""
        count = len(self.connections)
        self.memory = ClusterMemory(count)
        self.connections = [None] * count
        self._admitted_floors = [None] * count

    # --- chance, for the product's parts --------------------------------------------------------------------------

    def hex_id(self) -> str:
        """Return an id that nobody else has."""
        self._ids += 1
        return f"{self.number + 1:04x}{self._ids:028x}"

    def uniform(self, low: float, high: float) -> float:
        """Return something between the two."""
        return (low + high) / 2

    # --- connections ----------------------------------------------------------------------------------------------

    def ready(self, place: int) -> Connection | None:
        """Return the connection over which commands to a place go, if the node there is admitted."""
        connection = self.connections[place]
        return connection if connection is not None and connection.admission else None

    def dial(self, place: int, process: int, *, run_id: str, durable: bool) -> None:
        """Make a connection, and look."""
        self._made[place] += 1
        connection = Connection(process, self._made[place], run_id, durable)
        self.connections[place] = connection
        self._look(place, connection)

    def is_superseded(self, place: int) -> bool:
        """Tell whether what was learnt since the node was admitted speaks against it, as `NodeLink.review` does."""
        connection = self.ready(place)
        return connection is not None and connection.floor < self.memory.places[place].floor

    def end(self, place: int) -> None:
        """Note that the connection has ended."""
        connection = self.connections[place]
        assert connection is not None
        if connection.rejoin is not None:
            connection.rejoin.outcome.cancel()
        self.memory.places[place].run_id = ""
        self.connections[place] = None

    def post(self, place: int, command: Command, sender: Sender, *, told: bool = False) -> bool:
        """Send a command to the node at a place, as `NodeLink.send` does; return whether it was sent."""
        connection = self.ready(place)
        if connection is None:
            return False
        under = self.under(connection, command)
        known = self.memory.places[place].changes
        way = self._way(place, connection)
        self.outbox.append(Letter(sender, *way, under, known, command, told=told))
        return True

    def _way(self, place: int, connection: Connection) -> tuple[int, int, int, str, int]:
        return (self.number, place, connection.process, connection.run_id, connection.number)

    def under(self, connection: Connection, command: Command) -> str:
        """Return the admission id under which a command goes."""
        if isinstance(command, Commit | Vouch) and command.under:
            return command.under
        return connection.admission

    def heed(self, letter: Letter, reply: Reply) -> Reply:
        """Take from an answer what it tells of its node, as `NodeLink` does; return it as it counts.

        REFUSED and NOT_ADMITTED mean that the server has to look at the node again.
        """
        connection = self.connections[letter.place]
        assert connection is not None
        if isinstance(reply, Granted | Renewed | Pulsed) or (isinstance(reply, Plain) and reply in {Plain.COMMITTED, Plain.VOUCHED}):
            if letter.changes < letter.known + (not isinstance(reply, Pulsed)):
                return Silence.REFUSED
            number = reply.token if isinstance(reply, Granted) else 0
            self.memory.heard(letter.place, letter.changes, number)
        if reply is Plain.VOUCHED and isinstance(letter.command, Vouch):
            vouch = letter.command
            self.memory.vouched(vouch.place, floor=vouch.floor, changes=vouch.changes)
            connection.admission = vouch.admission
        return reply

    def is_void(self, letter: Letter) -> bool:
        """Tell whether a node that does not admit under the letter's id does not admit this server at all."""
        connection = self.connections[letter.place]
        return connection is not None and letter.under == connection.admission

    # --- joining --------------------------------------------------------------------------------------------------

    def on_joining(self, place: int, command: Command | JoiningCommand, answer: JoiningAnswer) -> bool:
        """Go on with the joining of a node; return False if the connection is of no use for now."""
        connection = self.connections[place]
        assert connection is not None
        match command:
            case Look():
                assert isinstance(answer, Sight)
                again, connection.found = connection.found is not None, answer
                return self._judge(place, connection, answer, again=again)
            case NoteRun() if answer is Step.DONE:
                self._admit(place, connection)
                return True
            case Readmit() if answer is Step.DONE:
                self._look(place, connection)
                return True
        return False

    def on_rejoin(self, place: int) -> bool:
        """Go on if the rejoin has come to an end; return False if the connection is of no use for now."""
        connection = self.connections[place]
        assert connection is not None
        if connection.rejoin is None or not connection.rejoin.outcome.done():
            return True
        # Whatever comes of it, the floor that the others may know by now was for the node that is looked at here.
        self._admitted_floors[place] = max(self._admitted_floors[place] or 0, connection.rejoin.floor)
        outcome = connection.rejoin.outcome.result()
        if not isinstance(outcome, Vouched):
            return False
        connection.rejoin = None
        quarantine = _identity(connection).admission
        life = (self.hex_id(), outcome.floor, outcome.changes, connection.run_id, outcome.known_floors)
        self._ask(place, connection, Readmit(quarantine, *life, durable=connection.durable))
        return True

    def _look(self, place: int, connection: Connection) -> None:
        known = self.memory.places[place]
        connection.expected = (known.floor, known.changes)
        self._ask(place, connection, Look())

    def _ask(self, place: int, connection: Connection, command: JoiningCommand) -> None:
        self.outbox.append(Letter(ByJoining(place), *self._way(place, connection), "", 0, command))

    def _judge(self, place: int, connection: Connection, sight: Sight, *, again: bool) -> bool:
        floor, changes = connection.expected
        admitted = self._admitted_floors[place]
        expected = Expectation(
            index=place,
            node_count=len(self.connections),
            cluster_id=self.memory.cluster_id,
            assume_durable=False,
            floor=floor,
            changes=changes,
            familiar=self._adopts_empty or (admitted is not None and admitted >= floor),
            runs=self.memory.runs_of_others(place),
        )
        found = Findings(
            identity=sight.identity,
            run_id=connection.run_id,
            version=VERSION,
            durability_gap="" if connection.durable else GAP,
            high=sight.high,
            key_count=sight.key_count,
        )
        match judge(expected, found):
            case Admitted(identity, restarted, durable):
                self.memory.admit(identity, connection.run_id)
                if restarted:
                    known = Known(identity.admission, identity.run_id)
                    self._ask(place, connection, NoteRun(known, connection.run_id, durable))
                else:
                    self._admit(place, connection)
                return True
            case Forgot():
                self._ask(place, connection, self._quarantine(place, connection, sight.identity))
                return True
            case Quarantined(identity) if not again:
                self._bring_back(place, connection, identity, sight.high or 0)
                return True
        return False

    def _admit(self, place: int, connection: Connection) -> None:
        identity = _identity(connection)
        connection.admission, connection.floor = identity.admission, identity.floor
        self._admitted_floors[place] = identity.floor

    def _quarantine(self, place: int, connection: Connection, identity: Identity | None) -> Quarantine:
        if identity is None:
            return Quarantine(Known(), self.hex_id(), self._formations[place], connection.run_id)
        formation = Formation(identity.cluster_id, identity.index, identity.node_count, identity.max_ttl_ms)
        known = Known(identity.admission, identity.run_id)
        return Quarantine(known, self.hex_id(), formation, connection.run_id)

    def _bring_back(self, place: int, connection: Connection, identity: Identity, high: int) -> None:
        known = self.memory.places[place]
        connection.rejoin = self._rejoin(
            place,
            [wire for wire in self._wires if wire.index != place],
            number=max(known.number, known.floor, identity.floor, high),
            changes=max(known.changes, identity.changes),
            randomness=self,
        )
        connection.rejoin.start()


def _identity(connection: Connection) -> Identity:
    assert connection.found is not None
    assert connection.found.identity is not None
    return connection.found.identity
