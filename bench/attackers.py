"""Attacks one server from an address of its own: `python -m bench.attackers NAME --port N --seconds S`.

Each attack uses as few bytes as it can. It prints `begun` once it presses, and at its end what it got.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from bench.attack_floods import (
    continuations,
    empty_data,
    large_metadata,
    pings,
    rapid_reset,
    settings,
)
from bench.attack_guesses import (
    SUCCEEDED,
    AttackSucceededError,
    bad_tokens,
    foreign_certificates,
    foreign_fences,
    foreign_prefix,
    guessed_leases,
)
from bench.attack_wire import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    SERVICE,
    Attack,
    CountingClient,
    Wire,
    frame,
    request_block,
    text,
)
from redfence_proto.v1 import lock_pb2
from redfence_server.http2.wire import framed


def _summary(counts: Counter[str]) -> str:
    return ", ".join(f"{count:,} {what}" for what, count in counts.most_common()) or "nothing"


async def only_a_busy_process(attack: Attack) -> str:
    """Use a core and send nothing, as the control of all attacks: each attacker takes CPU from the server."""
    attack.begin()
    while attack.goes_on:
        sum(range(10_000))
    return "nothing"


# --- connections


async def _connections(attack: Attack, count: int, *, greets: bool) -> str:
    wires: list[Wire] = []
    refused = 0

    async def open_some() -> None:
        nonlocal refused
        while len(wires) + refused < count:
            try:
                async with asyncio.timeout(5):
                    wires.append(await Wire.open(attack.port, greets=greets))
            except (OSError, TimeoutError):
                refused += 1

    opening = asyncio.gather(*(open_some() for _ in range(50)))
    attack.begin()
    await asyncio.wait([opening], timeout=3 * attack.seconds)
    await attack.hold()
    kept = sum(not each.ended for each in wires)
    opening.cancel()
    return f"{kept:,} of {count:,} connections stayed open"


async def idle_connections(attack: Attack) -> str:
    """Open 5,000 connections without a call."""
    return await _connections(attack, 5_000, greets=True)


async def connections_to_the_limit(attack: Attack) -> str:
    """Open 13,000 connections; the server may open 12,000 files."""
    return await _connections(attack, 13_000, greets=True)


async def silent_tcp(attack: Attack) -> str:
    """Open 3,000 connections that send nothing."""
    return await _connections(attack, 3_000, greets=False)


# --- sessions


def _bad_commands(first: int, count: int) -> bytes:
    commands = [lock_pb2.SessionCommand(id=number) for number in range(first, first + count)]
    return framed(lock_pb2.SessionRequest(commands=commands).SerializeToString())


def _session(stream_id: int, body: bytes) -> bytes:
    return frame(HEADERS, END_HEADERS, stream_id, request_block("Session")) + b"".join(
        frame(DATA, 0, stream_id, body[first : first + 16_384]) for first in range(0, len(body), 16_384)
    )


async def unread_sessions(attack: Attack) -> str:
    """Send 9,900 bad commands on each of 150 Sessions, again and again, and read no answer."""
    body = _bad_commands(1, 9_900)
    attack.begin()
    sent = 0
    wires: list[Wire] = []
    for _ in range(150):
        wires.append(wire := await Wire.open(attack.port))
        sent += await wire.press(_session(1, body))
    await attack.hold()
    kept = sum(not each.ended for each in wires)
    return f"{sent} Sessions begun, {kept} connections stayed open"


async def unread_sessions_again(attack: Attack) -> str:
    """Send 9,900 bad commands on Session after Session, each on a new connection, and read no answer."""
    body = _bad_commands(1, 9_900)
    attack.begin()
    wires: list[Wire] = []
    while attack.goes_on:
        wires.append(wire := await Wire.open(attack.port))
        await wire.press(_session(1, body))
    return f"{len(wires)} Sessions"


def _commands(kind: str, count: int, *, first: int, session: int) -> list[bytes]:
    """Return the messages with so many commands."""
    messages = []
    request = lock_pb2.SessionRequest()
    for number in range(first, first + count):
        command = request.commands.add(id=number)
        lease_id = f"{session:04x}{number:028x}"
        if kind == "renew":
            command.renew.resource, command.renew.lease_id = f"a/{session}/{number % 4_000}", lease_id
        else:
            command.acquire.resource = f"{session:08}{number:08}".ljust(240, "x")
            command.acquire.lease_id = lease_id
            command.acquire.ttl.FromMilliseconds(100)
        if len(request.commands) == 180:
            messages.append(framed(request.SerializeToString()))
            request = lock_pb2.SessionRequest()
    messages.append(framed(request.SerializeToString()))
    return messages


async def _busy_sessions(attack: Attack, kind: str, *, sessions: int, window: int) -> str:
    done, endings = 0, Counter[str]()
    begun_at = time.monotonic()

    async def run(session: int) -> None:
        nonlocal done
        client = CountingClient(attack.port)
        async with client:
            first, stream_id = 1, 0
            while attack.goes_on and not client.ended:
                if not stream_id or client.endings:
                    endings.update(client.endings)
                    client.endings.clear()
                    stream_id = client.begin(f"{SERVICE}Session")
                    client.results[stream_id] = 0
                for message in _commands(kind, window, first=first, session=session):
                    client.send(stream_id, message)
                first += window
                # An answer to a command has at least 10 bytes; half of them are enough to go on.
                target = client.results[stream_id] + window * 5
                while (  # noqa: ASYNC110
                    attack.goes_on
                    and not client.ended
                    and not client.endings
                    and client.results[stream_id] < target
                ):
                    await asyncio.sleep(0.005)
                done += window
                if client.endings:
                    await asyncio.sleep(0.05)

    attack.begin()
    await asyncio.gather(*(run(number) for number in range(sessions)))
    rate = done / (time.monotonic() - begun_at)
    return f"about {rate:,.0f} commands/s; streams ended: {_summary(endings)}"


async def renewals(attack: Attack) -> str:
    """Send 4,000 renewals on each of 8 Sessions, and 4,000 more when half are answered."""
    return await _busy_sessions(attack, "renew", sessions=8, window=4_000)


async def unique_names(attack: Attack) -> str:
    """Acquire names of 240 bytes, each a new one, on 4 Sessions."""
    return await _busy_sessions(attack, "acquire", sessions=4, window=500)


async def idle_streams(attack: Attack) -> str:
    """Open 4,000 Sessions and 4,000 watches of the health, and send nothing more."""
    attack.begin()
    watch = request_block("Session").replace(
        text(f"{SERVICE}Session".encode()), text(b"/grpc.health.v1.Health/Watch")
    )
    wires = []
    for kind in ("session", "watch"):
        for _ in range(8):
            wires.append(wire := await Wire.open(attack.port))
            for number in range(500):
                stream_id = 2 * number + 1
                frames = (
                    frame(HEADERS, END_HEADERS, stream_id, request_block("Session"))
                    if kind == "session"
                    else frame(HEADERS, END_HEADERS, stream_id, watch)
                    + frame(DATA, END_STREAM, stream_id, framed(b""))
                )
                wire.writer.write(frames)
            await wire.press(b"")
    await attack.hold()
    return f"{sum(not each.ended for each in wires)} of {len(wires)} connections stayed open"


ATTACKS: Final[dict[str, Callable[[Attack], Awaitable[str]]]] = {
    each.__name__: each
    for each in (
        only_a_busy_process,
        idle_connections,
        connections_to_the_limit,
        silent_tcp,
        unread_sessions,
        unread_sessions_again,
        renewals,
        unique_names,
        idle_streams,
        rapid_reset,
        pings,
        settings,
        continuations,
        empty_data,
        large_metadata,
        guessed_leases,
        bad_tokens,
        foreign_prefix,
        foreign_fences,
        foreign_certificates,
    )
}


async def _main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=ATTACKS)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--known", type=Path, required=True, help="a JSON file with what the attacker knows")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        known = json.loads(options.known.read_text())
        got = await ATTACKS[options.name](Attack(options.port, options.seconds, known))
    except AttackSucceededError as error:
        print(f"{SUCCEEDED}{error}", flush=True)
        sys.exit(1)
    print(got, flush=True)


if __name__ == "__main__":
    asyncio.run(_main())
