"""Whether a node may vote: judged on every new connection, before any command.

A token is worth as much as the memory of the nodes behind it. A restart breaks every connection, so whoever looks at each new
connection cannot miss one. The node's own identity tells which cluster and place it was formed for, and under which
run of its process it was admitted; the process tells its present run and whether it kept its data on disk.

The judgement is pure; `examine` gathers what it needs. A node that restarted without proof that it forgot nothing stays out
of every quorum. How it comes back (quarantine, then rejoin) is a step of its own: docs/architecture.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto

from redfence_server import scripts
from redfence_server.redis_dial import DialError, DialledNode


class Reason(Enum):
    """Why a node must not vote."""

    NOT_FORMED = auto()
    """It has no identity: never formed, or wiped."""
    FORMING = auto()
    """Its cluster was not formed to the end."""
    OTHER_CLUSTER = auto()
    """It belongs to another cluster."""
    WRONG_PLACE = auto()
    """It has another index, or its cluster another size, than configured; or it is configured twice."""
    REPLICA = auto()
    """It is a replica: it does not decide what it stores."""
    TOO_OLD = auto()
    """Its version lacks what the scripts need."""
    NOT_DURABLE = auto()
    """It was formed durable and its settings are not so any more."""
    RESTARTED = auto()
    """It restarted and cannot prove that it forgot nothing."""

    @property
    def misconfigured(self) -> bool:
        """Tell whether only an operator can mend it, so that a server had better not start."""
        return self in {Reason.OTHER_CLUSTER, Reason.WRONG_PLACE, Reason.REPLICA, Reason.TOO_OLD}


@dataclass(frozen=True, slots=True)
class Expectation:
    """What the server's configuration says of a node. `cluster_id` is None until a first node was admitted."""

    index: int
    node_count: int
    cluster_id: str | None
    assume_durable: bool


@dataclass(frozen=True, slots=True)
class Identity:
    """The node's `node` key.

    Attributes:
        run_id: the run of its process under which it was last admitted.
        durable: whether that run, from its beginning, lost nothing at a crash.
    """

    cluster_id: str
    index: int
    node_count: int
    max_ttl_ms: int
    admission: str
    run_id: str
    durable: bool
    state: str


@dataclass(frozen=True, slots=True)
class Findings:
    """What a node says of itself. `durability_gap` is empty when its settings lose nothing at a crash."""

    identity: Identity | None
    run_id: str
    version: str
    is_replica: bool
    durability_gap: str


@dataclass(frozen=True, slots=True)
class Admitted:
    """The node may vote under this identity.

    Attributes:
        restarted: whether this is a new run of its process, which note_run.lua has to note first.
        durable: whether that run loses nothing at a crash.
    """

    identity: Identity
    restarted: bool
    durable: bool


@dataclass(frozen=True, slots=True)
class Rejected:
    """The node must not vote."""

    reason: Reason
    detail: str


def judge(expected: Expectation, found: Findings) -> Admitted | Rejected:  # noqa: PLR0911  (one return per rule reads best)
    """Decide whether a node may vote."""
    if found.is_replica:
        return Rejected(Reason.REPLICA, "it is a replica; every node must be an independent primary")
    if _version_number(found.version) < scripts.REDIS_VERSION_MIN:
        return Rejected(Reason.TOO_OLD, f"it is version {found.version}; 6.2 is the least")
    identity = found.identity
    if identity is None:
        return Rejected(Reason.NOT_FORMED, "it has no cluster identity: never formed, or wiped")
    if expected.cluster_id is not None and identity.cluster_id != expected.cluster_id:
        return Rejected(
            Reason.OTHER_CLUSTER, f"it belongs to cluster {identity.cluster_id}, not to {expected.cluster_id}"
        )
    if identity.node_count != expected.node_count:
        return Rejected(
            Reason.WRONG_PLACE,
            f"it was formed as one of {identity.node_count} nodes, but {expected.node_count} are configured",
        )
    if identity.index != expected.index:
        return Rejected(
            Reason.WRONG_PLACE,
            f"it was formed as node {identity.index}, but is configured as node {expected.index}: "
            "the nodes are in another order, or one is named twice",
        )
    if identity.state != "ready":
        return Rejected(
            Reason.FORMING, f"its state is {identity.state!r}: run `redfence cluster init` to the end"
        )
    return _judge_memory(expected, found, identity)


def _judge_memory(expected: Expectation, found: Findings, identity: Identity) -> Admitted | Rejected:
    """Decide whether the node that was formed may have forgotten anything, or be about to."""
    gap = found.durability_gap
    if identity.run_id == found.run_id:
        # A process that runs has forgotten nothing. But one that was durable and is not any more must not vote from now on: at
        # its next start it could have forgotten this very change together with the tokens, and would seem durable again
        # (test_a_node_that_stopped_being_durable_does_not_vote_again).
        if identity.durable and gap and not expected.assume_durable:
            return Rejected(Reason.NOT_DURABLE, f"it was durable and is not any more: {gap}")
        return Admitted(identity, restarted=False, durable=identity.durable)
    # What counts for the past is how the run wrote that ended; how this one writes counts for the next restart.
    if expected.assume_durable or (identity.durable and not gap):
        return Admitted(identity, restarted=True, durable=not gap)
    problem = gap or "the run that ended did not write every answered command to disk"
    return Rejected(Reason.RESTARTED, f"it restarted and cannot prove that it forgot nothing: {problem}")


async def examine(node: DialledNode, keys: scripts.Keyspace) -> Findings:
    """Return what a node says of itself, all of it over one connection and so of one run.

    Raises:
        DialError: the connection broke or the node refused to tell.
    """
    info = await _info(node, "server")
    # From INFO and not from ROLE: access lists commonly allow it.
    replication = await _info(node, "replication")
    return Findings(
        identity=await _identity(node, keys),
        run_id=info.get("run_id", ""),
        version=info.get("valkey_version") or info.get("redis_version", "0"),
        is_replica=replication.get("role") != "master",
        durability_gap=await _durability_gap(node),
    )


async def _identity(node: DialledNode, keys: scripts.Keyspace) -> Identity | None:
    # Without its greatest number a node has forgotten what it is there for, whatever else it still has.
    if await node.command("EXISTS", keys.high) != 1:
        return None
    return read_identity(await node.command("HGETALL", keys.node))


def read_identity(flat: list[bytes]) -> Identity | None:
    """Return the identity in an HGETALL answer, or None if it is empty.

    Raises:
        DialError: a field is missing or malformed.
    """
    if not flat:
        return None
    texts = [each.decode(errors="replace") for each in flat]
    fields = dict(zip(texts[::2], texts[1::2], strict=True))
    try:
        return Identity(
            cluster_id=fields["cluster_id"],
            index=int(fields["index"]),
            node_count=int(fields["nodes"]),
            max_ttl_ms=int(fields["max_ttl_ms"]),
            admission=_admission(fields["admission"]),
            run_id=fields["run_id"],
            durable=fields["durable"] == "1",
            state=fields["state"],
        )
    except (KeyError, ValueError) as error:
        raise DialError(f"its identity is malformed: {error!r}") from error


def _admission(text: str) -> str:
    if len(text) != scripts.ADMISSION_DIGITS:
        raise ValueError(f"an admission id has {scripts.ADMISSION_DIGITS} digits")
    return text


_DURABLE = {
    "appendonly": "yes",
    "appendfsync": "always",
    # Would turn `always` off for as long as a snapshot or a rewrite is being made.
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "no",
}


async def _durability_gap(node: DialledNode) -> str:
    gaps = []
    for name, wanted in _DURABLE.items():
        try:
            answer = await node.command("CONFIG", "GET", name)
        except DialError:
            return "it does not let this server read its settings"
        value = answer[1].decode() if answer else "unknown"
        if value != wanted:
            gaps.append(f"{name} is {value}, not {wanted}")
    return "; ".join(gaps)


async def _info(node: DialledNode, section: str) -> Mapping[str, str]:
    raw = await node.command("INFO", section)
    if not isinstance(raw, bytes):
        # Also a connection that has ended up at itself, on a port that the node has left.
        raise DialError("it does not answer INFO as a Redis server does")
    lines = (line.partition(":") for line in raw.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def _version_number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
