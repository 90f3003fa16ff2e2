"""Tries to get past lease ids, tokens, the policy and certificates, and reads every answer."""

from __future__ import annotations

import asyncio
import secrets
import ssl
from collections import Counter
from collections.abc import Sequence
from typing import Final

from bench.attack_wire import (
    END_HEADERS,
    HEADERS,
    SERVICE,
    SOURCE,
    Attack,
    Wire,
    frame,
    request_block,
)
from harness.http2.raw_client import RawClient
from redfence_proto import bounds
from redfence_proto.storage.v1 import storage_pb2
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.wire import framed

HELD: Final = "good/held"
"""The lock that the good client holds during each attack."""
SUCCEEDED: Final = "IT SUCCEEDED: "
"""Begins the line of an attacker that got what it must not get."""
_GUESSES: Final = 2_000
_GUESSES_PER_MESSAGE: Final = 100
_CALLS_AT_ONCE: Final = 50
_CERTIFICATES: Final = 500
_UNAUTHENTICATED: Final = b"16"
_PERMISSION_DENIED: Final = b"7"


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


async def bad_tokens(attack: Attack) -> str:
    """Release the lock of the good client by its true lease id, with 2,000 tokens that are not valid."""
    release = framed(
        lock_pb2.ReleaseRequest(resource=HELD, lease_id=attack.known["lease_id"]).SerializeToString()
    )
    tokens = [(kind, token) for kind, some in attack.known["tokens"].items() for token in some]
    refused, statuses = Counter[str](), Counter[bytes]()
    async with RawClient(attack.port, source=SOURCE) as client:
        attack.begin()
        for first in range(0, len(tokens), _CALLS_AT_ONCE):
            for kind, token in tokens[first : first + _CALLS_AT_ONCE]:
                stream_id = client.begin(f"{SERVICE}Release", (b"authorization", f"Bearer {token}".encode()))
                client.send(stream_id, release, end=True)
                status = (await client.closed(stream_id)).headers[b"grpc-status"]
                statuses[status] += 1
                refused[kind] += status == _UNAUTHENTICATED
            await asyncio.sleep(attack.seconds * _CALLS_AT_ONCE / len(tokens))
    got = ", ".join(f"{count} {kind}" for kind, count in refused.items())
    if statuses.keys() != {_UNAUTHENTICATED}:
        raise AttackSucceededError(f"only these were refused: {got}; by status: {dict(statuses)}")
    return f"UNAUTHENTICATED for {statuses.total():,} of {len(tokens):,} tokens: {got}"


async def foreign_prefix(attack: Attack) -> str:
    """Ask on a Session for names of another prefix, with the true lease id, among allowed commands."""
    lease_id, batches = attack.known["lease_id"], []
    for number in range(0, _GUESSES, 200):
        batch = []
        for each in range(number, number + 50):
            acquire = lock_pb2.AcquireRequest(resource=f"good/{each}", lease_id=secrets.token_hex(16))
            acquire.ttl.seconds = 30
            release = lock_pb2.ReleaseRequest(resource=HELD, lease_id=lease_id)
            renew = lock_pb2.KeepAliveRequest(resource=HELD, lease_id=lease_id)
            own = lock_pb2.ReleaseRequest(resource=f"stranger/{each}", lease_id=lease_id)
            batch += [
                lock_pb2.SessionCommand(acquire=acquire),
                lock_pb2.SessionCommand(release=release),
                lock_pb2.SessionCommand(renew=renew),
                lock_pb2.SessionCommand(release=own),
            ]
        batches.append(batch)
    bearer = f"Bearer {attack.known['stranger']}".encode()
    outcomes = await answers_to(attack, batches, (b"authorization", bearer))
    foreign = _GUESSES * 3 // 4
    if outcomes != {"PERMISSION_DENIED": foreign, "NOT_HELD": _GUESSES - foreign}:
        raise AttackSucceededError(f"outcomes: {dict(outcomes)}")
    return f"PERMISSION_DENIED for {foreign:,} of {foreign:,}; its own {_GUESSES - foreign} were answered"


async def foreign_fences(attack: Attack) -> str:
    """Fence names of the good client in its storage with the greatest token, without the verb for it."""
    bearer = f"Bearer {attack.known['stranger']}".encode()
    statuses = Counter[bytes]()
    async with RawClient(attack.port, source=SOURCE) as client:
        attack.begin()
        for _ in range(0, _GUESSES, _CALLS_AT_ONCE):
            for name in (HELD, *(f"good/{number}" for number in range(1, _CALLS_AT_ONCE))):
                request = storage_pb2.FenceRequest(resource=name, fencing_token=bounds.FENCING_TOKEN_MAX)
                answer = await client.call(
                    "/redfence.storage.v1.StorageService/Fence",
                    request.SerializeToString(),
                    (b"authorization", bearer),
                )
                statuses[answer.headers[b"grpc-status"]] += 1
            await asyncio.sleep(attack.seconds * _CALLS_AT_ONCE / _GUESSES)
    if statuses != {_PERMISSION_DENIED: _GUESSES}:
        raise AttackSucceededError(f"answers by status: {dict(statuses)}")
    return f"PERMISSION_DENIED for {statuses.total():,} of {_GUESSES:,} fences with 2^53 - 1"


async def foreign_certificates(attack: Attack) -> str:
    """Connect 500 times with a certificate of an authority that the server does not trust."""
    context = ssl.create_default_context(cafile=attack.known["ca"])
    context.load_cert_chain(attack.known["certificate"], attack.known["key"])
    context.set_alpn_protocols(["h2"])
    served = refused = 0
    attack.begin()
    for _ in range(_CERTIFICATES):
        try:
            # With TLS 1.3 the client learns only after its handshake that the server refuses it.
            wire = await Wire.open(attack.port, tls=context)
            await wire.press(frame(HEADERS, END_HEADERS, 1, request_block("Session")))
            async with asyncio.timeout(5):
                await wire.until_told()
        except OSError:
            refused += 1
        else:
            served += wire.received > 0
            refused += not wire.received
            wire.writer.transport.abort()
        await asyncio.sleep(attack.seconds / _CERTIFICATES / 2)
    await attack.hold()
    if served or refused != _CERTIFICATES:
        raise AttackSucceededError(f"{served} of {_CERTIFICATES} connections were served")
    return f"{refused} of {_CERTIFICATES} connections were refused"
