"""Every script with hostile arguments, on a real node and on damaged values.

Two kinds of hostility, which the product meets only if another program writes to its nodes:

- arguments that nobody sends: an error is fine, but no number is lowered or spoilt;
- damaged values: an error is fine, but no remaining number falls, and every granted token is greater.

tests/contract/test_simulated_redis.py sends what the product can send, however extreme.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.doubles.joining_commands import (
    Formation,
    Known,
    Quarantine,
    RaiseFloor,
    ReserveFloor,
    RestoreVote,
)
from harness.doubles.lua_node import SHAS, Database, LuaNode, Memory
from harness.doubles.node_memory import ADMITTED
from harness.fuzz.settings import factor, tried
from harness.processes.redis_nodes import NodeSet
from redfence_proto.bounds import FENCING_TOKEN_MAX, TTL_MS_MAX_MOST
from redfence_server.embedded.binary import RedisBinary
from redfence_server.locking.node import Commit, Mint
from redfence_server.redis_io import scripts

KEYS = scripts.Keyspace()
# Long beside the tests: nothing expires by itself.
TTL_MS = 3_600_000
PLACE = Formation("cluster", index=0, node_count=3, max_ttl_ms=TTL_MS_MAX_MOST)
LEASES = ["a" * 64, "b" * 64]
NONCES = ["1" * 32, "2" * 32, "3" * 32]
NEW = "0a" * 16
QUARANTINES = ["0d" * 16, "0e" * 16]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120 * factor())]


@pytest.fixture(scope="module")
def database(tmp_path_factory: pytest.TempPathFactory, redis_binary: RedisBinary) -> Iterator[Database]:
    """A connection to a node that nobody else uses, with every script loaded."""
    nodes = NodeSet(tmp_path_factory.mktemp("nodes"))
    try:
        (node,) = asyncio.run(nodes.start(1, binary=redis_binary, appendfsync="no"))
        database = Database(node.url)
        LuaNode(database).load()
        yield database
        database.close()
    finally:
        nodes.close()


# --- what a node must not lose


@dataclass(frozen=True, slots=True)
class Numbers:
    """Every number that a node has minted, learnt or promised, by where it is kept.

    Attributes:
        kept: those that last: `high`, counters and floors.
        holds: the token of each hold, by resource, digest and nonce.
    """

    kept: Mapping[str, bytes]
    holds: Mapping[tuple[bytes, ...], bytes]


# Everything on the node: the name, type and value or fields of each key.
_READ = """
local all = {}
for _, key in ipairs(redis.call('KEYS', '*')) do
  local kind = redis.call('TYPE', key).ok
  local value = {}
  if kind == 'string' then
    value = {redis.call('GET', key)}
  elseif kind == 'hash' then
    value = redis.call('HGETALL', key)
  end
  all[#all + 1] = {key, kind, value}
end
return all
"""


def numbers(database: Database) -> Numbers:
    """Read them; what is of another type is not there, and what is of another name is a failure."""
    kept: dict[str, bytes] = {}
    holds: dict[tuple[bytes, ...], bytes] = {}
    for key, kind, value in database.call("EVAL", _READ, 0):
        name = key.decode()
        assert name in {KEYS.node, KEYS.high} or name.startswith(
            (KEYS.lock(""), KEYS.counter(""), KEYS.forced(""))
        ), name
        if name.startswith(KEYS.forced("")):
            continue
        if kind == b"string" and not name.startswith(KEYS.lock("")):
            kept[name] = value[0]
            continue
        fields = (
            _hold_fields(value[0]) if kind == b"string" else dict(zip(value[::2], value[1::2], strict=True))
        )
        if name == KEYS.node:
            # A restored vote replaces `voted_floor`, whatever somebody has made of it.
            floors = (each for each in fields if b"floor" in each and each != b"voted_floor")
            kept |= {each.decode(): fields[each] for each in floors}
        elif {b"digest", b"nonce", b"token"} <= set(fields):
            holds[key, fields[b"digest"], fields[b"nonce"]] = fields[b"token"]
    return Numbers(kept, holds)


def _hold_fields(value: bytes) -> Mapping[bytes, bytes]:
    """Return the fields of a hold, none if it is no hold."""
    names = (b"digest", b"token", b"shared", b"ttl_ms", b"nonce")
    fields = value.partition(b"\n")[0].split(b" ")
    return dict(zip(names, fields, strict=False)) if len(fields) >= len(names) else {}


def number_of(value: bytes) -> float | None:
    """Return the number as Lua reads it, or None if it is none: less than nothing and nothing is less."""
    # Lua reads as far as C does.
    text = value.partition(b"\0")[0].strip().lower()
    try:
        number = float(int(text, 16)) if b"0x" in text else float(text)
    except ValueError:
        return None
    return None if number != number else number  # noqa: PLR0124  (what is not a number is not itself)


def check_nothing_lowered(before: Numbers, after: Numbers) -> None:
    """Fail if a number is less than it was, or gone, or spoilt."""
    for name, was in before.kept.items():
        if (least := number_of(was)) is not None:
            now = number_of(after.kept.get(name, b""))
            assert now is not None, f"{name} was {was!r} and is {after.kept.get(name)!r}"
            assert now >= least, f"{name} fell from {least} to {now}"
    for hold, was in before.holds.items():
        if (least := number_of(was)) is not None and hold in after.holds:
            now = number_of(after.holds[hold])
            assert now is not None, f"the token of {hold} was {was!r} and is {after.holds[hold]!r}"
            assert now >= least, f"the token of {hold} fell from {least} to {now}"


def check_grant(before: Numbers, after: Numbers, resource: str, answer: Sequence[Any]) -> None:
    """Fail if a new hold got a number that is not above what was minted and promised before.

    Args:
        before: on the node.
        after: the same, after the mint.
        resource: of the mint.
        answer: that of the script, which is `granted`.
    """
    nonce, token = answer[1], answer[2]
    assert isinstance(token, int)
    if nonce is None:
        return  # a retry, which found a hold whose nonce somebody has taken away
    lock = KEYS.lock(resource).encode()
    # A handover to the same nonce makes a hold of another lease.
    found = [before.holds[hold] for hold in after.holds.keys() & before.holds if hold[::2] == (lock, nonce)]
    if found:
        # A retry, which is told the number of the hold that it found, whatever somebody has made of it.
        kept = number_of(found[0])
        if kept is None or not 0 < kept <= FENCING_TOKEN_MAX or token == kept:
            return
        # Another one only if the hold was from before the node came back, or a wait ended it.
        floors = [number_of(before.kept.get(name, b"0")) or 0 for name in ("floor", "waited_floor")]
        assert kept <= max(floors)
    assert 0 < token <= FENCING_TOKEN_MAX
    counter = before.kept.get(KEYS.counter(resource), before.kept.get(KEYS.high, b""))
    for what, bound in (("the counter", counter), ("the floor", before.kept.get("floor", b"0"))):
        if (least := number_of(bound)) is not None:
            assert token > least, f"{token} was granted, and {what} was {least}"
    assert number_of(after.kept[KEYS.counter(resource)]) == token
    assert number_of(after.kept[KEYS.high]) is not None


# --- arguments that nobody sends

_X = "x"
_HOLD = (KEYS.node, KEYS.high, KEYS.lock(_X), KEYS.counter(_X))
_NUMBERED, _LOCKED = (KEYS.node, KEYS.high), (KEYS.node, KEYS.lock(_X))
_FORCED = (*_LOCKED, KEYS.forced(LEASES[0]))
_PLACED = ("cluster", "0", "3", str(TTL_MS))
# The keys and the arguments of each script.
SIGNATURES: Mapping[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "mint": (_HOLD, (ADMITTED, LEASES[1], NONCES[1], "h", str(TTL_MS), "86400000", "1 1 here ")),
    "commit": (_HOLD, (ADMITTED, LEASES[0], NONCES[0], "30", "86400000")),
    "undo": (_LOCKED, (ADMITTED, NONCES[0])),
    "renew": (_FORCED, (ADMITTED, LEASES[0])),
    "force_release": (_FORCED, (ADMITTED, LEASES[0], "20")),
    "release": (_LOCKED, (ADMITTED, LEASES[0])),
    "inspect": (_LOCKED, (ADMITTED,)),
    "read_identity": (_NUMBERED, ()),
    "raise_floor": (_NUMBERED, (ADMITTED, NEW, "1", "1000", QUARANTINES[0])),
    "distrust_clock": (_NUMBERED, (ADMITTED, "4000", "5000")),
    "quarantine": (
        _NUMBERED,
        (ADMITTED, "run", QUARANTINES[0], "quarantined", *_PLACED, "run-2", "1000", "1"),
    ),
    "reserve_floor": (_NUMBERED, (QUARANTINES[0], "3000")),
    "restore_vote": (
        _NUMBERED,
        (QUARANTINES[0], NEW, "2000", "run-2", "1", "0", "2000", "70", "0", "", "", ""),
    ),
    "form": (_NUMBERED, (*_PLACED, ADMITTED, "run", "ready", "0", "0", "0")),
}
# Which of them run in a quarantine.
_IN_QUARANTINE = {"reserve_floor", "restore_vote"}
# No number at all, by any reading.
NOT_A_NUMBER = ["nan", "-nan", "NAN"]
HOSTILE = [
    *("", "0", "-1", "-0", "1.5", "1e3", "0x7f", " 7", "7 ", "+7", "abc", "\0", "7\0", "é😀", "n" * 5_000),
    *("inf", "-inf", "1e300", "9007199254740991", "9007199254740992", "9007199254740993"),
    *("9223372036854775807", "18446744073709551616", "-9223372036854775808"),
]
# A floor that is `nan` has a test of its own.
_SHORT_TEXTS = st.text(max_size=3).filter(lambda text: "nan" not in text.lower())


def _prepared(database: Database, *, quarantined: bool) -> Memory:
    """Return the memory of a node that came back once and has a hold; it may be in quarantine again."""
    node = LuaNode(database).form(formation=PLACE)
    node.join(Quarantine(Known(ADMITTED, "run"), QUARANTINES[1], PLACE, "run", floor=2))
    node.join(ReserveFloor(QUARANTINES[1], 5))
    node.join(RestoreVote(QUARANTINES[1], ADMITTED, 5, "run", (5, 0, 0)))
    for token in (9, 20):
        node.apply(Mint(_X, LEASES[0], NONCES[0], "h", TTL_MS), 0.0)
        node.apply(Commit(_X, LEASES[0], NONCES[0], token), 0.0)
    node.join(RaiseFloor(ADMITTED, ADMITTED, 2, 60, QUARANTINES[1]))
    if quarantined:
        node.join(Quarantine(Known(ADMITTED, "run"), QUARANTINES[0], PLACE, "run-2", floor=50))
        node.join(ReserveFloor(QUARANTINES[0], 2_000))
    return node.save()


def _ask(database: Database, name: str, keys: Sequence[str], arguments: Sequence[str]) -> list[Any] | None:
    """Return what a script answers, or None for an error."""
    try:
        answer: list[Any] = database.call("EVALSHA", SHAS[name], len(keys), *keys, *arguments)
    except hiredis.ReplyError:
        return None
    assert isinstance(answer, list)
    return answer


@st.composite
def _wrong_arguments(draw: st.DrawFn, name: str, hostile: Sequence[str]) -> tuple[list[str], list[str]]:
    """Draw keys and arguments of which one at least is wrong."""
    keys, arguments = (list(each) for each in SIGNATURES[name])
    for place in range(len(arguments)):
        if draw(st.integers(0, 3)) == 0:
            arguments[place] = draw(st.sampled_from(hostile) | _SHORT_TEXTS)
    shape = draw(st.integers(0, 11))
    if shape == 0:
        arguments = arguments[: draw(st.integers(0, len(arguments)))]
    elif shape == 1:
        arguments += draw(st.lists(st.sampled_from(hostile), max_size=4))
    elif shape == 2:
        keys = keys[: draw(st.integers(0, len(keys)))]
    return keys, arguments


# The position of the floor among the arguments. In Lua no comparison with nan is true.
_FLOOR_AT = {"raise_floor": 3, "reserve_floor": 1, "restore_vote": 2}


@pytest.mark.parametrize("name", SIGNATURES)
def test_wrong_arguments_lower_and_spoil_no_number(database: Database, name: str) -> None:
    """A script answers with an error, or the numbers stay as great as before."""
    prepared = _prepared(database, quarantined=name in _IN_QUARANTINE)
    hostile = HOSTILE if name in _FLOOR_AT else HOSTILE + NOT_A_NUMBER * 5

    @tried(60)
    @given(_wrong_arguments(name, hostile))
    def check(wrong: tuple[list[str], list[str]]) -> None:
        LuaNode(database).restore(prepared)
        before = numbers(database)
        answer = _ask(database, name, *wrong)
        after = numbers(database)
        check_nothing_lowered(before, after)
        if answer is not None and answer[0] == b"granted":
            check_grant(before, after, _X, answer)

    check()


@pytest.mark.parametrize("name", _FLOOR_AT)
def test_a_floor_that_is_not_a_number_is_refused(database: Database, name: str) -> None:
    """It would destroy the node's `high` or floor, which no quarantine restores."""
    LuaNode(database).restore(_prepared(database, quarantined=name in _IN_QUARANTINE))
    keys, legit = SIGNATURES[name]
    before = numbers(database)
    _ask(database, name, keys, [*legit[: _FLOOR_AT[name]], "nan", *legit[_FLOOR_AT[name] + 1 :]])
    check_nothing_lowered(before, numbers(database))


# --- values that somebody else has written

_FIELDS = {
    KEYS.node: [
        *("floor", "voted_floor", "waited_floor", "floor:1", "reserved"),
        *("distrusted_until", "max_ttl_ms", "run_id", "state"),
    ],
}
# The hold of the prepared node, and the same as an earlier server wrote it.
_HELD = (LEASES[0], "20", "0", str(TTL_MS), NONCES[0])
_HASH = ("digest", "token", "shared", "ttl_ms", "nonce")
_STRINGS = [KEYS.high, KEYS.counter(_X)]


@st.composite
def _spoilings(draw: st.DrawFn) -> tuple[str, ...]:
    """Draw a command that spoils one value: another one, none, or one of another type."""
    key = draw(st.sampled_from([*_FIELDS, *_STRINGS, KEYS.lock(_X)]))
    value = draw(st.sampled_from(HOSTILE))
    if key == KEYS.lock(_X):
        fields = list(_HELD)
        fields[draw(st.integers(0, len(fields) - 1))] = value
        return "SET", key, f"{' '.join(fields)}{draw(st.sampled_from(['', ' here']))}\nh"
    match draw(st.integers(0, 7)):
        case 0 if key != KEYS.node:
            return "DEL", key
        case 1 if key in _FIELDS:
            return "HDEL", key, draw(st.sampled_from(_FIELDS[key]))
    return (
        ("HSET", key, draw(st.sampled_from(_FIELDS[key])), value) if key in _FIELDS else ("SET", key, value)
    )


_WRONG_TYPES = (
    [("SET", KEYS.lock(_X), "text")],
    [("DEL", KEYS.lock(_X)), ("HSET", KEYS.lock(_X), *chain(*zip(_HASH, _HELD, strict=True)))],
    [("DEL", KEYS.lock(_X)), ("HSET", KEYS.lock(_X), "nonce", NONCES[0])],
    [("DEL", KEYS.counter(_X)), ("HSET", KEYS.counter(_X), "a", "b")],
    [("DEL", KEYS.high), ("RPUSH", KEYS.high, "1")],
)
_NO_NUMBERS = ([("SET", KEYS.high, "nan")], [("SET", KEYS.counter(_X), "nan")])
# A holder, another lease and a handover, beside the calls in SIGNATURES.
_ROUNDS = (
    *((name, arguments) for name, (_, arguments) in SIGNATURES.items()),
    ("mint", (ADMITTED, LEASES[0], NONCES[2], "h", "7200000", "86400000", "0 1 here ")),
    ("mint", (ADMITTED, LEASES[1], NONCES[1], "h", str(TTL_MS), "86400000", f"0 0 here {LEASES[0]}")),
    ("commit", (ADMITTED, LEASES[1], NONCES[1], "40", "86400000")),
    ("release", (ADMITTED, LEASES[1])),
)


def test_on_spoilt_values_nothing_that_is_left_is_lowered(database: Database) -> None:
    """Fields are missing, of another type, no numbers, or beyond the last number."""
    healthy, quarantined = (_prepared(database, quarantined=each) for each in (False, True))
    seen: Counter[bytes] = Counter()

    @tried(300)
    @given(
        st.sampled_from([healthy, healthy, quarantined]),
        st.one_of(
            st.lists(_spoilings(), min_size=1, max_size=3), st.sampled_from((*_WRONG_TYPES, *_NO_NUMBERS))
        ),
        st.lists(st.sampled_from(_ROUNDS), min_size=1, max_size=6),
    )
    def check(
        memory: Memory, spoilings: list[tuple[str, ...]], rounds: list[tuple[str, tuple[str, ...]]]
    ) -> None:
        LuaNode(database).restore(memory)
        for command in spoilings:
            database.call(*command)
        for name, arguments in rounds:
            before = numbers(database)
            answer = _ask(database, name, SIGNATURES[name][0], arguments)
            after = numbers(database)
            seen[b"error" if answer is None else answer[0]] += 1
            check_nothing_lowered(before, after)
            if answer is not None and answer[0] == b"granted":
                check_grant(before, after, _X, answer)

    check()
    wanted = {b"error", b"granted", b"committed", b"held", b"lost", b"renewed", b"raised", b"restored"}
    assert wanted <= set(seen), seen
