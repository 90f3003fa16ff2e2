"""One server in the world of nodes that forget: the product's own links and joinings, over connections on which everything is a letter.

Only the socket is not the product's, and the clocks: time does not pass for a link, and a quarantine has lasted long enough whenever a server looks
at the node again. It is there for exclusion, and the tokens need no clock.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence

import structlog

from harness.forgetful_wire import NOBODY, Connection, LabellingPacker
from redfence_server import scripts
from redfence_server.cluster_memory import ClusterMemory
from redfence_server.lock_node import Command, NodeReport, NodeState, Notice, Reply, Silence
from redfence_server.node_examination import Identity
from redfence_server.node_joining import JoiningSettings, TurnedAwayError
from redfence_server.node_link import LinkSettings, NodeLink
from redfence_server.redis_dial import DialError, NodeUrl

_URL = NodeUrl("redis://nowhere:1")
_LEAP_MS = 1e9
"""Longer than any quarantine lasts."""
_MUTE = structlog.wrap_logger(
    structlog.PrintLogger(), wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL)
)


class StandingStill:
    """A clock on which no time passes."""

    def now_ms(self) -> float:
        return 0.0

    def wall_ms(self) -> float:
        return 0.0


class Leaping:
    """A clock that has leapt whenever somebody looks."""

    def __init__(self) -> None:
        self._now_ms = 0.0

    def now_ms(self) -> float:
        self._now_ms += _LEAP_MS
        return self._now_ms


class Ids:
    """Ids that no other server draws, the same ones in every run."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._drawn = 0

    def hex_id(self) -> str:
        self._drawn += 1
        return f"{self._number + 1:04x}{self._drawn:028x}"

    def uniform(self, low: float, high: float) -> float:
        return (low + high) / 2


class Link(NodeLink):
    """A link that connects when it is told to.

    Attributes:
        connection: the present one, whether the node is admitted or not.
    """

    def __init__(self, place: int, *, memory: ClusterMemory, ids: Ids, adopts_empty: bool) -> None:
        keys = scripts.Keyspace()
        joining = JoiningSettings(keys, assume_durable=False, adopts_empty=adopts_empty)
        packer = LabellingPacker(keys, channel="")
        settings = LinkSettings(packer, "", node_timeout_ms=0, dial_timeout_ms=0, joining=joining)
        super().__init__(
            _URL, index=place, settings=settings, memory=memory, clock=StandingStill(), randomness=ids
        )
        self._log = self.joining._log = self._state._log = _MUTE
        self.joining._clock = Leaping()
        self.connection: Connection | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the node is admitted."""
        return self._connection is not None

    async def serve(self, connection: Connection) -> None:
        """Join the node and stay with it: `NodeLink._join_and_serve` and what `_run` makes of its end, but for socket and pauses."""
        self.connection = connection
        try:
            identity = await self.joining.join(connection)  # type: ignore[arg-type]  # all that it calls is there
            self._lost = asyncio.get_running_loop().create_future()
            connection.hand_over(self._note_loss)
            self._admit(identity)
            self._connection = connection  # type: ignore[assignment]  # likewise
            self.pulse()
            self._send_waiting()
            self._become(NodeState.READY, "")
            self.review()
            self._become(NodeState.UNREACHABLE, await self._lost)
        except DialError as error:
            self.joining.looked.set()
            self._become(NodeState.UNREACHABLE, str(error))
            self._deferred.fail_look(Silence.UNREACHABLE)
        except TurnedAwayError as error:
            self._become(NodeState.QUARANTINED, error.detail)
            self._deferred.fail_look(Silence.QUARANTINED)
        finally:
            self.connection = self._connection = None
            self.joining.leave()
            connection.lose("it is closed")

    def _admit(self, identity: Identity) -> None:
        super()._admit(identity)
        self._node_clock = None


class AttemptLink:
    """A link as one attempt sees it: what goes over it is known to be the attempt's."""

    def __init__(self, link: Link, attempt: int) -> None:
        self.index = link.index
        self._link = link
        self._attempt = attempt

    def send(self, command: Command, on_reply: Callable[[Reply], None] | None = None) -> bool:
        connection = self._link.connection
        if connection is None:
            return self._link.send(command, on_reply)
        connection.sender = self._attempt
        sent = self._link.send(command, on_reply)
        connection.sender = NOBODY
        return sent

    def listen(self, on_notice: Callable[[Notice], None]) -> None:
        raise NotImplementedError

    def report(self) -> NodeReport:
        raise NotImplementedError


class Server:
    """The links of one server, and what they know."""

    def __init__(
        self,
        number: int,
        node_count: int,
        *,
        memory: type[ClusterMemory] = ClusterMemory,
        adopts_empty: bool,
    ) -> None:
        self.number = number
        self._node_count = node_count
        self._memory = memory
        self._adopts_empty = adopts_empty
        self._ids = Ids(number)
        self._tasks: set[asyncio.Task[None]] = set()
        self.begin()

    def begin(self) -> None:
        """Begin, knowing nothing."""
        known = self._memory(self._node_count)
        self.links = [
            Link(place, memory=known, ids=self._ids, adopts_empty=self._adopts_empty)
            for place in range(self._node_count)
        ]
        known.on_floor = lambda place: self.links[place].review()
        for each in self.links:
            each.know([other for other in self.links if other is not each])

    def dial(self, connection: Connection) -> None:
        """Begin to join a process."""
        self._tasks.add(asyncio.create_task(self.links[connection.place].serve(connection)))

    def pulse(self) -> None:
        """Send a pulse to every node."""
        for link in self.links:
            link.pulse()

    def die(self) -> None:
        """End, in the middle of everything."""
        for link in self.links:
            if link.connection is not None:
                link.connection.forget()
        for task in self._tasks:
            task.cancel()

    def reap(self) -> None:
        """Forget the connections that have ended; what ended one as a defect would is raised."""
        for task in [each for each in self._tasks if each.done()]:
            self._tasks.remove(task)
            if not task.cancelled():
                task.result()

    async def end(self) -> None:
        """End, and wait for it."""
        self.die()
        await asyncio.gather(*self._tasks, return_exceptions=True)


def attempt_links(links: Sequence[Link], attempt: int) -> list[AttemptLink]:
    """Return the links of a server as one attempt sees them."""
    return [AttemptLink(link, attempt) for link in links]
