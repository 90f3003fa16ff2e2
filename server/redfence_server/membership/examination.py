"""Examine a node: its identity, its process, its settings and its clock.

A server examines a node on every new connection and at every heartbeat. Operators' commands and the
doctor use the same examination. membership/admission.py judges it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Protocol

from redfence_server.clock import Clock
from redfence_server.redis_io import scripts
from redfence_server.redis_io.dial import DialAnswerError, DialRefusedError


class Phase(Enum):
    """The node's phase, as its identity says."""

    FORMING = "forming"
    ASSEMBLED = "assembled"
    """Every node of its cluster has an identity, and any of the others may be ready by now."""
    READY = "ready"
    RESTARTED = "restarted"
    """Its new run proved that it forgot nothing: it votes after the fence, without a wait."""
    QUARANTINED = "quarantined"
    RETIRED = "retired"
    """A resize took it out of its cluster for good, towards the cluster that its identity names."""


FENCE_ID_DIGITS: Final = 16
"""A process keeps so many digits of its quarantine's id through restarts with proof, until it votes."""


@dataclass(frozen=True, slots=True)
class Identity:
    """The content of the node's `node` key.

    Attributes:
        predecessor: the cluster that the node left when it was resized; empty if it never left one.
        admission: the admission id of servers' commands; for a node without a vote, the id of the quarantine.
        run_id: the run of its process to which a server last gave a vote, or from which it took the vote.
        durable: whether that run, from its beginning, loses nothing at a crash.
        floor: tokens up to it may have been minted here and forgotten; 0 for a node that never came back.
        voted_floor: the floor under which it got its vote last; 0 if it never came back.
        reserved: the floor that was reserved in the present quarantine; 0 for none.
        evicted: how many keys that run had evicted when the node got its vote.
        known_floors: by node index, the least floor that a process needs to vote there.
        known_fences: by node index, the id of the quarantine for which this node raised that floor. If a
            server only passed the floor on, the first `FENCE_ID_DIGITS` of the id, or nothing.
    """

    cluster_id: str
    index: int
    node_count: int
    max_ttl_ms: int
    admission: str
    run_id: str
    durable: bool
    phase: Phase
    floor: int = 0
    voted_floor: int = 0
    reserved: int = 0
    evicted: int = 0
    known_floors: Mapping[int, int] = field(default_factory=dict)
    known_fences: Mapping[int, str] = field(default_factory=dict)
    predecessor: str = ""


@dataclass(frozen=True, slots=True)
class ClockReading:
    """The node's clock showed `node_ms` between `sent_ms` and `received_ms` of this machine's steady clock.

    Attributes:
        distrusted_ms: the node's votes for new grants do not count for so long, as servers recorded on it.
    """

    sent_ms: float
    received_ms: float
    node_ms: float
    distrusted_ms: float = 0.0

    @property
    def trip_ms(self) -> float:
        """The length of the round trip. The node read its clock at any instant of it."""
        return self.received_ms - self.sent_ms


@dataclass(frozen=True, slots=True)
class Findings:
    """The result of an examination: the node's answers about itself.

    Attributes:
        max_token: the greatest token that the node ever minted or learnt; None if the node has lost it.
        run_id: of its process; empty if INFO shows none. For a process that was promoted from a replica,
            together with the id of its data's history.
        promoted: it was a replica in this run.
        durability_gap: empty when its settings lose nothing at a crash.
        settings_hidden: it does not show them to this user. That is a gap as well; another user may know
            better.
        log_incomplete: it rewrites its append-only file, or failed to. If the file was off before, a crash
            now loses every later answer.
        eviction: the settings that let the node drop keys; empty when it drops none.
        evicted: how many keys the node has evicted in this run.
        grant_refusal: the error with which it refuses the commands of a mint; empty if it would run them.
        info: all fields of INFO.
    """

    identity: Identity | None
    run_id: str
    version: str
    is_replica: bool = False
    durability_gap: str = ""
    settings_hidden: bool = False
    log_incomplete: bool = False
    max_token: int | None = 0
    key_count: int = 0
    promoted: bool = False
    eviction: str = ""
    evicted: int = 0
    grant_refusal: str = ""
    clock: ClockReading = ClockReading(0.0, 0.0, 0.0)
    info: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)

    @property
    def memory_share(self) -> float:
        """The part of `maxmemory` that the node uses, or of its machine's memory if unset; 0 if unknown."""
        most = int(self.info.get("maxmemory", "0")) or int(self.info.get("total_system_memory", "0"))
        return int(self.info.get("used_memory", "0")) / most if most else 0.0


class ExaminationRefusedError(DialRefusedError):
    """The node answers INFO, but refuses the script that reads its identity."""

    def __init__(self, refusal: str, info: Mapping[str, str]) -> None:
        super().__init__(refusal)
        self.info = info


class Examinable(Protocol):
    """A connection that carries raw commands."""

    async def commands(self, *batch: Sequence[str | bytes | int]) -> list[Any]:
        """Return the answers in order, a `DialRefusedError` for each error; see `DialledNode.commands`."""
        ...


DURABLE_SETTINGS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "always",
    # `yes` turns `always` off during a snapshot or a rewrite.
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "no",
}


async def examine(node: Examinable, keys: scripts.Keyspace, clock: Clock) -> Findings:
    """Return a node's findings: one round trip over one connection, so all are of one run.

    Raises:
        ExaminationRefusedError: the node refused the script, for example for lack of a right.
        DialError: the connection broke, or the node is loading or refused INFO.
        DialAnswerError: no node answers like this.
    """
    identity_script = ("EVAL", scripts.load("read_identity"), 2, keys.node, keys.high)
    sent_ms = clock.now_ms()
    # All of INFO costs a node less than the four sections that servers need, one by one (12 us against
    # 16 us). Before Redis 7, INFO takes one section, and CONFIG GET one name.
    answers = await node.commands(
        ("INFO",), identity_script, *(("CONFIG", "GET", name) for name in DURABLE_SETTINGS)
    )
    try:
        return _read_findings(answers, sent_ms=sent_ms, received_ms=clock.now_ms())
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise DialAnswerError(f"it answers an examination as no node does: {error}") from error


def _read_findings(answers: Sequence[Any], *, sent_ms: float, received_ms: float) -> Findings:
    info = _read_info(answers[0])
    if info.get("cluster_enabled") == "1":
        # Such a node refuses the script with a text that does not tell why.
        raise ExaminationRefusedError("it runs in cluster mode; set cluster-enabled no and restart it", info)
    if isinstance(answers[1], DialRefusedError):
        raise ExaminationRefusedError(str(answers[1]), info)
    _, fields, key_count, clock_us, refusal, *high = answers[1]
    node_ms = clock_us / 1000
    settings, hidden_because = _read_settings(answers[2:])
    promoted = int(info.get("second_repl_offset", "-1")) >= 0
    history = f"/{info.get('master_replid', '')}" if promoted else ""
    run_id = info.get("run_id", "")
    return Findings(
        max_token=read_number(high[0]) if high else None,
        identity=read_identity(fields),
        key_count=key_count,
        run_id=run_id and run_id + history,
        version=info.get("valkey_version") or info.get("redis_version", "0"),
        is_replica=info.get("role") != "master",
        promoted=promoted,
        durability_gap=_durability_gap(settings, hidden_because),
        settings_hidden=settings is None,
        log_incomplete="1" in (info.get("aof_rewrite_in_progress"), info.get("aof_rewrite_scheduled"))
        or info.get("aof_last_bgrewrite_status", "ok") != "ok",
        eviction=_eviction(info),
        evicted=int(info.get("evicted_keys", "0")),
        grant_refusal=refusal.decode(errors="replace").removeprefix("-"),
        clock=ClockReading(sent_ms, received_ms, node_ms, _distrusted_ms(fields, node_ms)),
        info=info,
    )


def read_identity(flat: list[bytes]) -> Identity | None:
    """Return the identity in an HGETALL answer, or None if it is empty.

    Raises:
        DialAnswerError: a field is missing or malformed.
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
            phase=Phase(fields["state"]),
            floor=int(fields.get("floor", "0")),
            voted_floor=int(fields.get("voted_floor", "0")),
            reserved=int(fields.get("reserved", "0")),
            evicted=int(fields.get("evicted", "0")),
            known_floors={
                int(name.removeprefix("floor:")): int(value)
                for name, value in fields.items()
                if name.startswith("floor:")
            },
            known_fences={
                int(name.removeprefix("fence:")): value
                for name, value in fields.items()
                if name.startswith("fence:")
            },
            predecessor=fields.get("predecessor", ""),
        )
    except (KeyError, ValueError) as error:
        raise DialAnswerError(f"its identity is malformed: {error!r}") from error


def read_number(raw: bytes) -> int:
    """Return the number in a key's value.

    Raises:
        DialAnswerError: the value is not a number.
    """
    try:
        return int(raw)
    except ValueError as error:
        raise DialAnswerError(f"a key of redfence holds {raw!r}, not a number") from error


def _distrusted_ms(flat: list[bytes], node_ms: float) -> float:
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    until = fields.get(b"distrusted_until")
    return 0.0 if until is None else max(0.0, read_number(until) - node_ms)


def _admission(text: str) -> str:
    if len(text) != scripts.ADMISSION_DIGITS:
        raise ValueError(f"an admission id has {scripts.ADMISSION_DIGITS} digits")
    return text


def _read_settings(answers: Sequence[Any]) -> tuple[Mapping[str, str] | None, str]:
    """Return the node's values of DURABLE_SETTINGS, or None and why the node refuses to show them."""
    for answer in answers:
        if isinstance(answer, DialRefusedError):
            return None, str(answer).partition(",")[0]
    values = {
        name: (_setting_value(answer) or b"unknown").decode(errors="replace")
        for name, answer in zip(DURABLE_SETTINGS, answers, strict=True)
    }
    return values, ""


def _setting_value(answer: Any) -> bytes | None:
    """Return the value in an answer to CONFIG GET with one name, a map in RESP3; None if there is none."""
    pairs = list(answer.values()) if isinstance(answer, dict) else answer[1::2]
    return pairs[0] if pairs else None


def _durability_gap(settings: Mapping[str, str] | None, refusal: str) -> str:
    if settings is None:
        return f"it does not show its settings ({refusal})"
    return "; ".join(
        f"{name} is {settings[name]}, not {wanted}"
        for name, wanted in DURABLE_SETTINGS.items()
        if settings[name] != wanted
    )


def _eviction(info: Mapping[str, str]) -> str:
    limit, policy = info.get("maxmemory", "0"), info.get("maxmemory_policy", "noeviction")
    return "" if limit == "0" or policy == "noeviction" else f"maxmemory {limit}, maxmemory-policy {policy}"


def _read_info(answer: Any) -> Mapping[str, str]:
    if isinstance(answer, DialRefusedError):
        raise answer
    if not isinstance(answer, bytes):
        # TCP may even have connected this socket to itself, on a port that the node has left.
        raise DialAnswerError("it does not answer INFO as a Redis server does")
    lines = (line.partition(":") for line in answer.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def version_number(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
