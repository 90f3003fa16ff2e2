"""How commands become bytes and answers become replies."""

from __future__ import annotations

import hashlib
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redfence_server.locking.node import (
    Command,
    Commit,
    ForceRelease,
    Granted,
    Held,
    Inspect,
    Mint,
    Notice,
    Release,
    Renew,
    Renewed,
    Reply,
    Status,
    Undo,
)
from redfence_server.redis_io import scripts

KEYS = scripts.Keyspace(prefix="p:", counter_idle_ms=5_000)
ONE, TWO = "1" * 32, "2" * 32
_texts = st.text(st.characters(exclude_categories=["Cc", "Cs"]), max_size=40)
_hex = st.sampled_from(["", "0a" * 16, "1b" * 32])
_flags = st.booleans()
_numbers = st.integers(1, 2**53 - 1)
_ended = st.none() | st.builds(Release, st.just("r"), _hex, st.just(0.0))
_commands: st.SearchStrategy[Command] = st.one_of(
    st.builds(Mint, _texts, _hex, _hex, _texts, _numbers, _ended, _flags, _flags, st.just(0) | _numbers),
    st.builds(Commit, _texts, _hex, _hex, _numbers),
    st.builds(Undo, _texts, _hex, st.just(0.0)),
    st.builds(Renew, _texts, _hex),
    st.builds(Release, _texts, _hex, st.just(0.0)),
    st.builds(ForceRelease, _texts, _hex, st.just(0.0), _numbers),
    st.builds(Inspect, _texts),
)


def _parts(  # noqa: PLR0911  (one return per script)
    command: Command, channel: str, admission_id: str
) -> tuple[str | int, ...]:
    """Return the parts of a call, as the head of each script lists them."""
    name = "force_release" if isinstance(command, ForceRelease) else type(command).__name__.lower()
    sha = hashlib.sha1(scripts.load(name), usedforsecurity=False).hexdigest()
    lock, counter = f"p:lock:{command.resource}", f"p:counter:{command.resource}"
    alone = ("EVALSHA", sha, 2, "p:node", lock, admission_id)
    numbered = ("EVALSHA", sha, 4, "p:node", "p:high", lock, counter, admission_id)
    match command:
        case Mint(_, digest, nonce, holder, ttl_ms, release_first, blocking, own, delay_ms):
            ended = release_first.digest if release_first else ""
            notices = f"{blocking:d} {own:d} {channel} {ended}"
            delay = (delay_ms,) if delay_ms else ()
            return (*numbered, digest, nonce, holder, ttl_ms, 5_000, notices, *delay)
        case Commit(_, digest, nonce, token, _):
            return (*numbered, digest, nonce, token, 5_000)
        case Undo(_, nonce):
            return (*alone, nonce)
        case ForceRelease(_, digest, _, token):
            return ("EVALSHA", sha, 3, "p:node", lock, f"p:forced:{digest}", admission_id, digest, token)
        case Renew(_, digest):
            return ("EVALSHA", sha, 3, "p:node", lock, f"p:forced:{digest}", admission_id, digest)
        case Release(_, digest):
            return (*alone, digest)
    return alone


@given(st.lists(_commands, min_size=1, max_size=4), _texts)
def test_a_command_has_the_bytes_that_hiredis_packs(commands: list[Command], channel: str) -> None:
    """Each command goes to two nodes under different admission ids."""
    packer = scripts.Packer(KEYS, channel=channel)
    for command in commands:
        for admission_id in (ONE, TWO):
            parts: Any = _parts(command, channel, admission_id)
            assert packer.pack(command, admission_id) == hiredis.pack_command(parts), command


def test_a_notice_tells_the_resource_and_the_token() -> None:
    assert scripts.read_notice(b"7 p:lock:a b", keys=KEYS, node=2) == Notice(2, "a b", 7)
    for payload in (b"", b"7", b"x p:lock:a", b"7 q:lock:a", b"7 p:lock:\xff", b"ended 7 p:lock:a"):
        with pytest.raises(ValueError):
            scripts.read_notice(payload, keys=KEYS, node=2)


@pytest.mark.parametrize(
    ("raw", "reply"),
    [
        ([b"granted", b"n", 2**53 - 1, 0, 0, 2], Granted("n", 2**53 - 1)),
        ([b"granted", b"n", 4, 3, 0, 2], Granted("n", 4, contended=True)),
        ([b"granted", b"n", 4, 0, 1, 2], Granted("n", 4, released=True)),
        ([b"held", b"d", 4, "ż".encode(), 90], Held("d", 4, "ż", 90)),
        ([b"held", b"d", 4, b"", -2], Held("d", 4, "", 0)),
        ([b"held", b"d", 4, b"", 90, 60], Held("d", 4, "", 90, 60)),
        ([b"renewed", 4, 900], Renewed(4, 900)),
        ([b"committed"], Status.COMMITTED),
        ([b"lost"], Status.LOST),
        ([b"undone"], Status.UNDONE),
        ([b"kept"], Status.KEPT),
        ([b"not_held"], Status.NOT_HELD),
        ([b"forced"], Status.FORCED),
        ([b"released"], Status.RELEASED),
        ([b"free"], Status.FREE),
    ],
)
def test_every_answer_of_a_script_is_a_reply(raw: list[Any], reply: Reply) -> None:
    assert scripts.read_reply(raw) == reply


def test_answers_that_count_for_nothing_are_errors() -> None:
    with pytest.raises(scripts.NotAdmittedError):
        scripts.read_reply([b"not_admitted"])
    with pytest.raises(scripts.NumbersExhaustedError):
        scripts.read_reply([b"exhausted"])


@pytest.mark.parametrize(
    "raw",
    [
        *([b"what"], [], None, 7, {b"state": b"held"}, [b"held", b"d"], [b"granted", b"n"]),
        *([b"granted", b"n", 4, 0, 0], [b"granted", 7, 4, 0, 0, 2], [b"granted", b"n", 4, 0, 0, 1, 2]),
    ],
)
def test_an_answer_that_no_script_gives_is_an_error(raw: Any) -> None:
    """Lua ends a list at its first nil, so a damaged key gives a short list."""
    with pytest.raises(ValueError, match="no script answers"):
        scripts.read_reply(raw)
