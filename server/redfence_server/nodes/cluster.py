"""Start and close all links of one server; watch whether a quorum of nodes would grant now."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from redfence_server.clock import WallClock
from redfence_server.errors import ConfigError, NodeRejectedError, NoQuorumError
from redfence_server.locking import quorum
from redfence_server.locking.node import REVALIDATION_MS_MAX, NodeReport, NodeState
from redfence_server.membership.cluster_memory import ClusterMemory
from redfence_server.nodes.link import LinkSettings, NodeLink
from redfence_server.randomness import Randomness
from redfence_server.redis_io.dial import SYSTEM_TLS, NodeTls, NodeUrl
from redfence_server.redis_io.scripts import COUNTER_IDLE_MS_MAX

# How often a server that waits for its first quorum looks whether it has one.
_LOOK_S: Final = 0.02
# From each part of a node's memory in use on: how long new counters live at most without use, in ms.
_COUNTER_IDLE_MS: Final = ((0.0, COUNTER_IDLE_MS_MAX), (0.5, 3_600_000), (0.75, 600_000), (0.9, 60_000))
# The life grows again only once the memory in use is this much below the part. Without the margin, each
# heartbeat could change the life, and log it.
_MEMORY_MARGIN: Final = 0.05


def _counter_idle_ms(memory_share: float) -> int:
    """Return how long a counter may live without use on a node that uses this part of its memory."""
    return min(idle_ms for least, idle_ms in _COUNTER_IDLE_MS if memory_share >= least)


@dataclass(frozen=True, slots=True)
class ClusterView:
    """The knowledge of this server about its cluster; `cluster_id` is empty until a node is admitted."""

    cluster_id: str
    quorum: int
    ttl_ms_max: int
    nodes: tuple[NodeReport, ...]


def check_urls(urls: Sequence[str], tls: NodeTls = SYSTEM_TLS) -> tuple[NodeUrl, ...]:
    """Return the checked URLs of the nodes, in the order of their index.

    Raises:
        ConfigError: a URL is malformed or named twice, or the number of nodes is not 1, 3, 5 or 7.
    """
    nodes = tuple(_check_url(index, url, tls) for index, url in enumerate(urls))
    seen: dict[str, int] = {}
    for index, node in enumerate(nodes):
        if node.address in seen:
            raise ConfigError(
                f"node: {node.address} is named twice, as node {seen[node.address]} and node {index}"
            )
        seen[node.address] = index
    if len(nodes) not in quorum.NODE_COUNTS:
        raise ConfigError(
            f"node: {len(nodes)} nodes are configured; a quorum needs 1, 3, 5 or 7, because an even number "
            "tolerates no more failures than one less"
        )
    return nodes


def _check_url(index: int, url: str, tls: NodeTls) -> NodeUrl:
    try:
        return NodeUrl(url, tls=tls)
    except ValueError as error:
        raise ConfigError(f"node {index}: {error}") from None


class NodeCluster:
    """Starts and closes the links, and watches the quorum.

    Attributes:
        on_quorum_lost: called when no quorum votes, or could after the re-examinations of its nodes.
        on_granting: called with whether a quorum would grant now, after each change.
        on_change: called after each change of a node's state.
    """

    def __init__(self, *, settings: LinkSettings, clock: WallClock, randomness: Randomness) -> None:
        node_count = len(settings.joining.urls)
        self._memory = ClusterMemory(node_count)
        self._witnesses = settings.heartbeat.witnesses
        self._clock = clock
        self._is_clock_wrong = False
        self._quorum_timer: asyncio.TimerHandle | None = None
        self._started = False
        self._granting: bool | None = None
        self._packer = settings.packer
        self._counter_idle_ms = self._counter_idle_ms_max = settings.heartbeat.keys.counter_idle_ms
        self._changed_at_ms = clock.now_ms()
        self.on_quorum_lost: Callable[[], None] = lambda: None
        self.on_granting: Callable[[bool], None] = lambda _: None
        self.on_change: Callable[[], None] = lambda: None
        self.links = [
            NodeLink(
                index,
                settings=settings,
                memory=self._memory,
                clock=clock,
                randomness=randomness,
                on_state=self._on_state,
                on_heartbeat=self._on_heartbeat,
            )
            for index in range(node_count)
        ]
        self._memory.on_floor = lambda index: self.links[index].drop_if_superseded()
        self._witnesses.on_step = self._on_step
        self._witnesses.on_confirmed = lambda index: self.links[index].heartbeat.bring_forward()

    def ttl_ms_max(self) -> int:
        """Return the greatest ttl that the cluster allows.

        Raises:
            NoQuorumError: the server has had no quorum since its start, so it does not know the cluster.
        """
        if not self._started or self._memory.ttl_ms_max is None:
            away = [(index, report.state) for index, report in self._reports() if not report.grants]
            raise NoQuorumError.naming(away, also="; this server has had no quorum since its start")
        return self._memory.ttl_ms_max

    def quorum_may_return(self) -> bool:
        """Tell whether no quorum votes, but was lost so lately that it may vote again in a moment."""
        return self._quorum_timer is not None

    def has_room(self, unanswered_max: int) -> bool:
        """Tell whether a quorum of nodes has fewer unanswered commands than this."""
        missing = quorum.majority(len(self.links))
        for link in self.links:
            if link.in_time < unanswered_max:
                missing -= 1
                if not missing:
                    return True
        return False

    def view(self) -> ClusterView:
        """Return what is known, without asking a node."""
        return ClusterView(
            cluster_id=self._memory.cluster_id or "",
            quorum=quorum.majority(len(self.links)),
            ttl_ms_max=self._memory.ttl_ms_max or 0,
            nodes=tuple(link.report() for link in self.links),
        )

    async def start(self, *, timeout_ms: int) -> None:
        """Connect to all nodes; return once each was tried and a quorum votes.

        `timeout_ms` bounds the wait; 0 means no bound.

        Raises:
            NodeRejectedError: a node is misconfigured, or no quorum voted in time; the message names it.
        """
        for link in self.links:
            link.start()
        try:
            async with asyncio.timeout(timeout_ms / 1000 or None):
                await asyncio.gather(*(link.examined.wait() for link in self.links))
                self._refuse_misconfigured()
                if not self._has_quorum():
                    structlog.get_logger().warning("quorum_awaited", problem=self._problems())
                while not self._has_quorum():
                    await asyncio.sleep(_LOOK_S)
                    self._refuse_misconfigured()
        except TimeoutError as error:
            self._refuse_misconfigured()
            if not self._has_quorum():
                raise NodeRejectedError(f"no quorum of nodes is ready: {self._problems()}") from error
        self._started = True
        self._judge_granting()

    async def close(self) -> None:
        """Close all links."""
        await asyncio.gather(*(link.close() for link in self.links))
        self._stop_quorum_timer()

    def _sample_clocks(self) -> None:
        for link in self.links:
            link.heartbeat.bring_forward()

    def _on_step(self) -> None:
        """Sample every clock at once, to tell a wrong clock of this server from one of a node."""
        self._sample_clocks()
        together = self._witnesses.stepped_together(now_ms=self._clock.now_ms())
        was_wrong = self._is_clock_wrong
        self._is_clock_wrong = together >= quorum.majority(len(self.links)) > 1
        if self._is_clock_wrong and not was_wrong:
            structlog.get_logger().error(
                "server_clock_wrong",
                consequence="a quorum of node clocks moved together against this server's wrong clock; "
                "this server grants nothing until the greatest ttl is over, and tells no other server",
            )

    def _on_state(self) -> None:
        # A clock is a witness only for the time since its first sample, so sample all when one is new.
        self._sample_clocks()
        self.on_change()
        if self._has_quorum():
            self._stop_quorum_timer()
        elif not self._has_quorum(NodeState.UNREACHABLE):
            self.on_quorum_lost()
        elif self._quorum_timer is None:
            self._quorum_timer = asyncio.get_running_loop().call_later(
                REVALIDATION_MS_MAX / 1000, self._on_quorum_timeout
            )
        self._judge_granting()

    def _on_quorum_timeout(self) -> None:
        self._quorum_timer = None
        self.on_quorum_lost()
        self._judge_granting()

    def _on_heartbeat(self) -> None:
        self._judge_granting()
        self._judge_memory()

    def _judge_memory(self) -> None:
        """Let unused counters live for a shorter time while a node is short of memory; see `Keyspace`."""
        share = max(link.heartbeat.memory_share for link in self.links)
        idle_ms = min(self._counter_idle_ms_max, _counter_idle_ms(share))
        if idle_ms > self._counter_idle_ms:
            idle_ms = min(idle_ms, max(self._counter_idle_ms, _counter_idle_ms(share + _MEMORY_MARGIN)))
        if idle_ms != self._counter_idle_ms:
            structlog.get_logger().warning(
                "counter_life_changed", memory_used=f"{share:.0%}", counter_idle_s=idle_ms // 1000
            )
            self._counter_idle_ms = idle_ms
            self._packer.set_counter_idle_ms(idle_ms)

    def _judge_granting(self) -> None:
        """Report whether a quorum would grant now, if that has changed."""
        granting = sum(report.grants for _, report in self._reports()) >= quorum.majority(len(self.links))
        if not self._started or granting == self._granting:
            return
        if not granting and self.quorum_may_return():
            return  # acquires wait for the same timer
        now_ms, log = self._clock.now_ms(), structlog.get_logger()
        if not granting:
            log.error("quorum_lost", problem=self._problems())
        elif self._granting is not None:
            log.warning("quorum_recovered", lasted_s=round((now_ms - self._changed_at_ms) / 1000, 1))
        self._granting, self._changed_at_ms = granting, now_ms
        self.on_granting(granting)

    def _stop_quorum_timer(self) -> None:
        if self._quorum_timer is not None:
            self._quorum_timer.cancel()
            self._quorum_timer = None

    def _has_quorum(self, *also: NodeState) -> bool:
        """Tell whether a quorum of nodes votes, counting also the nodes in the given other states."""
        counted = sum(link.report().state in {NodeState.READY, *also} for link in self.links)
        return counted >= quorum.majority(len(self.links))

    def _refuse_misconfigured(self) -> None:
        for link in self.links:
            refused = link.admission_refused
            if refused is not None and refused.reason is not None and refused.reason.misconfigured:
                raise NodeRejectedError(f"node {link.index} ({link.report().address}): {refused.detail}")

    def _problems(self) -> str:
        return "; ".join(
            f"node {index} ({report.address}): {report.detail}"
            for index, report in self._reports()
            if not report.grants
        )

    def _reports(self) -> list[tuple[int, NodeReport]]:
        return [(link.index, link.report()) for link in self.links]
