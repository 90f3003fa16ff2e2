"""Builds a history from a short text, for tests of `check`; everything else makes the run a valid one.

One statement stands for one call on resource "r", and statements are separated by semicolons:

    acquire LEASE TOKEN SPAN        a grant, valid for a ttl of 2 s counted from the call
    renew LEASE SPAN                a renewal, with the validity that such a ttl leaves
    lost LEASE SPAN                 a renewal that reports the lease lost
    release LEASE SPAN
    not_held LEASE SPAN             a release that reports that the lease does not hold
    live TOKEN SPAN                 a CheckToken that shows the token live
    not_live LEASE TOKEN SPAN       a CheckToken by the holder that shows the token not live
    get TOKEN SPAN                  a GetLock that shows this token, or with 0 no holder
    read TOKEN SPAN                 a fenced read
    append ENTRY TOKEN SPAN         a fenced append

SPAN is `10-10.1`, the instants of call and answer, or `10-` without an answer. After it come `unknown` or
`failed`, fields like `until=12.5` or `server=x`, and flags like `stale`. Further statements are:

    fault SPAN KIND                 `clock` moves clocks; `copy` lets leases overlap until 2 s after it
    kept ENTRY...                   what the storage has at the end; nothing by default
    kept_nothing                    the storage has nothing for any resource
    asked KIND, KIND...             the faults without which the run is invalid
    no_fault                        leaves out the fault that every history has
    no_last_acquire                 leaves out the Acquire of "r" after the healing
    fails SPAN KIND, KIND...        calls of these kinds fail within this span
    last_calls COUNT AT [FIELD=N]   a last grant preceded by failed Acquires; for the first N the field is set

A background client makes 150 calls in the first second and one call of each kind at 105 s. Each resource is
acquired at 100 s, when the run is healed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from harness.history.records import Fault, History, Kind, Operation, Outcome, in_order

TTL_S = 2.0
# The contract takes 1 % and 2 ms from a ttl of 2 s.
VALIDITY_S = 1.978
HEALED_S = 100.0
ENDED_S = 110.0
_AGAIN_S = 105.0
_TURNS = 31

# For each verb: its kind, its arguments, and the fields that it sets.
_VERBS: dict[str, tuple[Kind, tuple[str, ...], dict[str, Any]]] = {
    "acquire": (Kind.ACQUIRE, ("lease", "token"), {"ttl_s": TTL_S}),
    "renew": (Kind.RENEW, ("lease",), {}),
    "lost": (Kind.RENEW, ("lease",), {"outcome": Outcome.FAILED, "lost": True}),
    "release": (Kind.RELEASE, ("lease",), {}),
    "not_held": (Kind.RELEASE, ("lease",), {"outcome": Outcome.FAILED, "lost": True}),
    "live": (Kind.CHECK, ("token",), {}),
    "not_live": (Kind.CHECK, ("lease", "token"), {"outcome": Outcome.FAILED, "lost": True}),
    "get": (Kind.GET_LOCK, ("token",), {}),
    "read": (Kind.READ, ("token",), {}),
    "append": (Kind.APPEND, ("entry", "token"), {}),
}
_FIELDS: dict[str, Callable[[str], Any]] = {
    "token": int,
    "until": float,
    "ttl": float,
    "client": str,
    "server": str,
    "resource": str,
}


class HistoryBuilder:
    def __init__(self) -> None:
        self._operations = _background()
        self._faults = [Fault("server killed", "server 0", 1.0, 1.5)]
        self._entries: dict[str, tuple[str, ...]] = {
            "background": tuple(f"e{turn}" for turn in range(_TURNS))
        }
        self._required: tuple[str, ...] = ()
        self._has_last_acquire = True

    def add(self, statement: str) -> None:
        verb, *words = statement.split()
        if verb in _VERBS:
            self._operations.append(call(statement))
        else:
            getattr(self, f"_{verb}")(*words)

    def history(self) -> History:
        operations = list(self._operations)
        for number, resource in enumerate(sorted({call.resource for call in operations})):
            if resource != "r" or self._has_last_acquire:
                at = f"{HEALED_S}-{HEALED_S + 0.1}"
                operations.append(call(f"acquire last{number} {10**6} {at} resource={resource}"))
        return History(
            operations=in_order(operations),
            faults=tuple(self._faults),
            healed_s=HEALED_S,
            ended_s=ENDED_S,
            kept=self._entries,
            asked=self._required,
            node_count=3,
        )

    def _fault(self, span: str, *kind: str) -> None:
        began_s, ended_s = _instants(span)
        assert ended_s is not None
        name = " ".join(kind)
        overlaps_s = TTL_S if name == "copy" else None
        self._faults.append(Fault(name, "node 1", began_s, ended_s, name == "clock", overlaps_s))

    def _forgets(self, node: str, span: str) -> None:
        """A node forgets at the beginning of the span, and votes again at its end."""
        began_s, ended_s = _instants(span)
        assert ended_s is not None
        index = int(node)
        fault = Fault("node wiped", f"node {node}", began_s, began_s, forgets=(index,), rejoined_s=ended_s)
        self._faults.append(fault)

    def _no_fault(self) -> None:
        self._faults.clear()

    def _kept_nothing(self) -> None:
        self._entries.clear()

    def _no_last_acquire(self) -> None:
        self._has_last_acquire = False

    def _asked(self, *words: str) -> None:
        self._required = tuple(" ".join(words).split(", "))

    def _kept(self, *entries: str) -> None:
        self._entries["r"] = entries

    def _fails(self, span: str, *words: str) -> None:
        began_s, ended_s = _instants(span)
        kinds = " ".join(words).split(", ")
        self._operations = [
            replace(each, outcome=Outcome.FAILED)
            if each.kind in kinds and began_s < each.invoked_s < (ended_s or inf)
            else each
            for each in self._operations
        ]

    def _last_calls(self, count: str, at: str, field: str) -> None:
        name, _, number = field.partition("=")
        at_s = float(at)
        for turn in range(int(count) - 1):
            late = call(f"acquire late{turn} 0 {at_s}-{at_s + 1} failed")
            if turn < int(number):
                changed: dict[str, Any] = {"outcome": Outcome.UNKNOWN} if name == "unknown" else {name: True}
                late = replace(late, **changed)
            self._operations.append(late)
        self._operations.append(call(f"acquire the-last {3 * 10**6} {at_s + 2}-{at_s + 2.1}"))


def built(text: str) -> History:
    builder = HistoryBuilder()
    for statement in filter(None, map(str.strip, text.split(";"))):
        builder.add(statement)
    return builder.history()


def call(statement: str) -> Operation:
    verb, *words = statement.split()
    kind, names, fixed = _VERBS[verb]
    arguments = dict(zip(names, words, strict=False))
    span, *options = words[len(names) :]
    began_s, ended_s = _instants(span)
    token = int(arguments.get("token", 0))
    lease = arguments.get("lease") or f"{verb} of {token}"
    # All clients are of one workload: their names differ only in the number.
    client = f"client{sum(lease.encode())}"
    made = Operation(client, kind, "r", lease, began_s, ended_s, Outcome.OK, token=token)
    made = replace(made, entry=arguments.get("entry", ""), **fixed)
    made = replace(made, **_options(options))
    if kind in (Kind.ACQUIRE, Kind.RENEW) and made.outcome is Outcome.OK and not made.until_s:
        made = replace(made, until_s=began_s + VALIDITY_S)
    return made


def _options(words: Sequence[str]) -> dict[str, Any]:
    changed: dict[str, Any] = {}
    for word in words:
        name, is_field, value = word.partition("=")
        if is_field:
            changed[{"until": "until_s", "ttl": "ttl_s"}.get(name, name)] = _FIELDS[name](value)
        elif word in ("unknown", "failed"):
            changed["outcome"] = Outcome(word)
        else:
            changed[word] = True
    return changed


def _instants(span: str) -> tuple[float, float | None]:
    began, _, ended = span.partition("-")
    return float(began), float(ended) if ended else None


def _background() -> list[Operation]:
    """Return the calls of the background client: 150 in the first second, and one of each kind at 105 s."""
    calls = []
    for turn in range(_TURNS):
        is_last = turn == _TURNS - 1
        lease, token = f"background{turn}", 2 * 10**6 if is_last else turn + 1
        at_s = _AGAIN_S if is_last else turn / _TURNS
        statements = [f"acquire {lease} {token} 0-0.001", f"renew {lease} 0.002-0.003"]
        if is_last:
            statements += [f"live {token} 0.003-0.004", f"get {token} 0.003-0.004"]
        statements += [f"read {token} 0.004-0.005", f"append e{turn} {token} 0.006-0.007"]
        statements += [f"release {lease} 0.008-0.009"]
        calls += [_later(call(f"{each} resource=background"), at_s) for each in statements]
    return calls


def _later(each: Operation, by_s: float) -> Operation:
    assert each.completed_s is not None
    until_s = each.until_s + by_s if each.until_s else 0.0
    return replace(
        each, invoked_s=each.invoked_s + by_s, completed_s=each.completed_s + by_s, until_s=until_s
    )
