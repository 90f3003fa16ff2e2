"""Tries to end a lock that the good client holds, and reads every answer."""

from __future__ import annotations

import asyncio
import secrets
from collections import Counter
from collections.abc import Sequence
from typing import Final

from bench.attack_wire import SERVICE, SOURCE, Attack
from harness.http2.raw_client import RawClient
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.wire import framed

HELD: Final = "good/held"
"""The lock that the good client holds during each attack."""
SUCCEEDED: Final = "IT SUCCEEDED: "
"""Begins the line of an attacker that got what it must not get."""
_GUESSES: Final = 2_000
_GUESSES_PER_MESSAGE: Final = 100


class AttackSucceededError(Exception):
    """The attacker got what it must not get; the message counts its answers."""


def read_results(body: bytes) -> list[lock_pb2.SessionResult]:
    """Return the results in the body of a Session's answer; a message that is not whole yet has none."""
    results: list[lock_pb2.SessionResult] = []
    first = 0
    while len(body) >= first + 5:
        end = first + 5 + int.from_bytes(body[first + 1 : first + 5])
        if len(body) < end:
            break
        results += lock_pb2.SessionResponse.FromString(body[first + 5 : end]).results
        first = end
    return results


def outcome_of(result: lock_pb2.SessionResult) -> str:
    """Return the name of a result's outcome, without its prefix."""
    match result.WhichOneof("result"):
        case "release":
            name = lock_pb2.ReleaseOutcome.Name(result.release.outcome)
            return name.removeprefix("RELEASE_OUTCOME_")
        case "renew" if not result.renew.HasField("error"):
            return lock_pb2.LeaseState.Name(result.renew.state).removeprefix("LEASE_STATE_")
        case "renew":
            reason = result.renew.error.reason
        case "error":
            reason = result.error.reason
        case other:
            return str(other).upper()
    return lock_pb2.ErrorReason.Name(reason).removeprefix("ERROR_REASON_")


async def answers_to(
    attack: Attack, batches: Sequence[list[lock_pb2.SessionCommand]], *headers: tuple[bytes, bytes]
) -> Counter[str]:
    """Spread the batches over the time of the attack, on one Session; return the outcomes of all answers."""
    sent = 0
    async with RawClient(attack.port, source=SOURCE) as client:
        stream_id = client.begin(f"{SERVICE}Session", *headers)
        answer = client.answers[stream_id]
        attack.begin()
        for batch in batches:
            for number, command in enumerate(batch, sent + 1):
                command.id = number
            sent += len(batch)
            client.send(stream_id, framed(lock_pb2.SessionRequest(commands=batch).SerializeToString()))
            await asyncio.sleep(attack.seconds / len(batches))
        await client.until(lambda: client.ended or answer.closed or len(read_results(answer.body)) >= sent)
        results = read_results(answer.body)
    outcomes = Counter(map(outcome_of, results))
    if {each.id for each in results} != set(range(1, sent + 1)):
        raise AttackSucceededError(f"{len(results)} of {sent} commands were answered: {dict(outcomes)}")
    return outcomes


async def guessed_leases(attack: Attack) -> str:
    """Release and renew the lock of the good client with 2,000 guessed lease ids."""
    batches = []
    for _ in range(0, _GUESSES, _GUESSES_PER_MESSAGE):
        batch = []
        for _ in range(_GUESSES_PER_MESSAGE):
            guess = secrets.token_hex(16)
            batch.append(
                lock_pb2.SessionCommand(release=lock_pb2.ReleaseRequest(resource=HELD, lease_id=guess))
            )
            batch.append(
                lock_pb2.SessionCommand(renew=lock_pb2.KeepAliveRequest(resource=HELD, lease_id=guess))
            )
        batches.append(batch)
    outcomes = await answers_to(attack, batches)
    got = f"{outcomes['RELEASED']} of {_GUESSES:,} released it, {outcomes['ACTIVE']} renewed it"
    if outcomes["RELEASED"] or outcomes["ACTIVE"]:
        raise AttackSucceededError(got)
    return f"{got}; answers: {', '.join(f'{count:,} {name}' for name, count in outcomes.most_common())}"
