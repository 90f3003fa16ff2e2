"""Look at a node: what it says of itself, its process and its settings. node_admission.py judges it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from redfence_server import scripts
from redfence_server.redis_dial import DialAnswerError, DialledNode, DialRefusedError


class Phase(Enum):
    """Where in its life a node is, as its identity says."""

    FORMING = "forming"
    ASSEMBLED = "assembled"
    """Every node of its cluster has got its identity, and any of the others may be ready by now."""
    READY = "ready"
    QUARANTINED = "quarantined"
    RECOVERING = "recovering"
    RETIRED = "retired"


@dataclass(frozen=True, slots=True)
class Identity:
    """The node's `node` key.

    Attributes:
        admission: the id under which servers are admitted; while it is in quarantine, the id of the quarantine.
        run_id: the run of its process under which it was last admitted.
        durable: whether that run, from its beginning, lost nothing at a crash.
        floor: up to which numbers may have been minted here and forgotten; 0 for a node that never came back.
        changes: how many changes it has made.
        evicted: how many keys that run had evicted when it was admitted.
        known_floors: what it knows of other places, by index: the least floor a node must have to vote there.
        known_changes: and how many changes the node there has made at least.
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
    changes: int = 0
    evicted: int = 0
    known_floors: Mapping[int, int] = field(default_factory=dict)
    known_changes: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Findings:
    """What a node says of itself.

    Attributes:
        high: the greatest number it ever minted or learnt; None if it has none, and so has forgotten what it is there for.
        key_count: how many keys its database holds.
        run_id: of its process; of a process that was promoted from a replica, together with the id of its data's history.
        promoted: it was a replica in this run.
        durability_gap: empty when its settings lose nothing at a crash.
        settings_hidden: this user may not read them, which is a gap as well; another user may know better.
        eviction: by which settings it would drop keys; empty when it would not.
        evicted: how many keys it has evicted in this run.
    """

    identity: Identity | None
    run_id: str
    version: str
    is_replica: bool = False
    durability_gap: str = ""
    settings_hidden: bool = False
    high: int | None = 0
    key_count: int = 0
    promoted: bool = False
    eviction: str = ""
    evicted: int = 0


DURABLE_SETTINGS: Final[Mapping[str, str]] = {
    "appendonly": "yes",
    "appendfsync": "always",
    # Would turn `always` off for as long as a snapshot or a rewrite is being made.
    "no-appendfsync-on-rewrite": "no",
    "aof-load-truncated": "no",
}


async def examine(node: DialledNode, keys: scripts.Keyspace) -> Findings:
    """Return what a node says of itself, all of it over one connection and so of one run, in one round trip.

    Raises:
        DialError: the connection broke or the node refused to tell.
    """
    look = ("EVAL", scripts.load("look"), 2, keys.node, keys.high)
    # Role and policy from INFO, which access lists commonly allow. One setting at a time: before Redis 7, CONFIG GET takes one name.
    answers = await node.commands(
        *(("INFO", section) for section in _SECTIONS),
        look,
        *(("CONFIG", "GET", name) for name in DURABLE_SETTINGS),
    )
    server, replication, memory, stats = (_read_info(answer) for answer in answers[: len(_SECTIONS)])
    _, identity, key_count, *high = _not_refused(answers[len(_SECTIONS)])
    settings = _read_settings(answers[len(_SECTIONS) + 1 :])
    promoted = int(replication.get("second_repl_offset", "-1")) >= 0
    history = f"/{replication.get('master_replid', '')}" if promoted else ""
    return Findings(
        high=read_number(high[0]) if high else None,
        identity=read_identity(identity),
        key_count=key_count,
        run_id=server.get("run_id", "") + history,
        version=server.get("valkey_version") or server.get("redis_version", "0"),
        is_replica=replication.get("role") != "master",
        promoted=promoted,
        durability_gap=_durability_gap(settings),
        settings_hidden=settings is None,
        eviction=_eviction(memory),
        evicted=int(stats.get("evicted_keys", "0")),
    )


_SECTIONS: Final = ("server", "replication", "memory", "stats")


def _not_refused(answer: Any) -> Any:
    if isinstance(answer, DialRefusedError):
        raise answer
    return answer


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
            changes=int(fields.get("changes", "0")),
            evicted=int(fields.get("evicted", "0")),
            known_floors=_by_place(fields, "floor:"),
            known_changes=_by_place(fields, "changes:"),
        )
    except (KeyError, ValueError) as error:
        raise DialAnswerError(f"its identity is malformed: {error!r}") from error


def read_number(raw: bytes) -> int:
    """Return a key's number.

    Raises:
        DialAnswerError: it holds something else.
    """
    try:
        return int(raw)
    except ValueError as error:
        raise DialAnswerError("a key of ours holds what is no number") from error


def _by_place(fields: Mapping[str, str], start: str) -> dict[int, int]:
    return {
        int(name.removeprefix(start)): int(value) for name, value in fields.items() if name.startswith(start)
    }


def _admission(text: str) -> str:
    if len(text) != scripts.ADMISSION_DIGITS:
        raise ValueError(f"an admission id has {scripts.ADMISSION_DIGITS} digits")
    return text


def _read_settings(answers: Sequence[Any]) -> Mapping[str, str] | None:
    """Return those of DURABLE_SETTINGS as they are; None if they may not be read."""
    if any(isinstance(answer, DialRefusedError) for answer in answers):
        return None
    told = zip(DURABLE_SETTINGS, answers, strict=True)
    return {name: answer[1].decode() if answer else "unknown" for name, answer in told}


def _durability_gap(settings: Mapping[str, str] | None) -> str:
    if settings is None:
        return "it does not let this server read its settings"
    return "; ".join(
        f"{name} is {settings[name]}, not {wanted}"
        for name, wanted in DURABLE_SETTINGS.items()
        if settings[name] != wanted
    )


def _eviction(memory: Mapping[str, str]) -> str:
    limit, policy = memory.get("maxmemory", "0"), memory.get("maxmemory_policy", "noeviction")
    return "" if limit == "0" or policy == "noeviction" else f"maxmemory {limit}, maxmemory-policy {policy}"


async def read_info(node: DialledNode, section: str) -> Mapping[str, str]:
    """Return one section of INFO.

    Raises:
        DialError: the connection broke or the node refused.
        DialAnswerError: the node does not answer it as a Redis server does.
    """
    return _read_info(await node.command("INFO", section))


def _read_info(answer: Any) -> Mapping[str, str]:
    raw = _not_refused(answer)
    if not isinstance(raw, bytes):
        # Also a connection that has ended up at itself, on a port that the node has left.
        raise DialAnswerError("it does not answer INFO as a Redis server does")
    lines = (line.partition(":") for line in raw.decode(errors="replace").splitlines())
    return {name: value.strip() for name, colon, value in lines if colon}


def version_number(version: str) -> tuple[int, ...]:
    """Return a version's first two numbers."""
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())
