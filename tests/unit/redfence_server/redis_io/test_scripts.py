"""How commands become bytes and answers become replies."""

from __future__ import annotations

from typing import Any

import pytest

from redfence_server.locking.node import (
    Command,
    Commit,
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
COMMANDS: tuple[Command, ...] = (
    Mint("r", "digest", "nonce", "żółć", 900),
    Mint("r", "digest", "nonce", "", 900, Release("r", "ended", 0), True, True),
    Commit("r", "digest", "nonce", 2**53 - 1),
    Undo("r", "nonce", 7.0),
    Renew("r", "digest"),
    Release("r", "digest", 0),
    Inspect("r"),
)


def _unpack(packed: bytes) -> list[str]:
    parts, rest = [], packed.partition(b"\r\n")[2]
    while rest:
        length, _, rest = rest.partition(b"\r\n")
        size = int(length[1:])
        parts.append(rest[:size].decode())
        rest = rest[size + 2 :]
    return parts


def test_a_mint_names_its_keys_and_arguments_in_the_order_of_its_script() -> None:
    packed = scripts.Packer(KEYS, channel="test").pack(COMMANDS[0], ONE)
    keys = ["p:node", "p:high", "p:lock:r", "p:counter:r"]
    given = ["digest", "nonce", "żółć", "900", "5000"]
    assert _unpack(packed)[2:] == ["4", *keys, "1" * 32, *given, "", "test", "0", "0"]
    packed = scripts.Packer(KEYS, channel="test").pack(COMMANDS[1], ONE)
    given = ["digest", "nonce", "", "900", "5000"]
    assert _unpack(packed)[2:] == ["4", *keys, "1" * 32, *given, "ended", "test", "1", "1"]


def test_a_notice_tells_the_resource_and_the_token() -> None:
    assert scripts.read_notice(b"7 p:lock:a b", keys=KEYS, node=2) == Notice(2, "a b", 7)
    for payload in (b"", b"7", b"x p:lock:a", b"7 q:lock:a", b"7 p:lock:\xff", b"ended 7 p:lock:a"):
        with pytest.raises(ValueError):
            scripts.read_notice(payload, keys=KEYS, node=2)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: type(command).__name__)
def test_a_command_is_packed_for_each_node_with_its_own_admission_id(command: Command) -> None:
    packer = scripts.Packer(KEYS, channel="test")
    for other in COMMANDS:
        packer.pack(other, TWO)
        one, two = packer.pack(command, ONE), packer.pack(command, TWO)
        assert one.replace(ONE.encode(), TWO.encode()) == two
        assert one.count(ONE.encode()) == 1
        assert _unpack(one) == _unpack(scripts.Packer(KEYS, channel="test").pack(command, ONE))


@pytest.mark.parametrize(
    ("raw", "reply"),
    [
        ([b"granted", b"n", 2**53 - 1, 0, 0, 2], Granted("n", 2**53 - 1)),
        ([b"granted", b"n", 4, 3, 0, 2], Granted("n", 4, contended=True)),
        ([b"granted", b"n", 4, 0, 1, 2], Granted("n", 4, released=True)),
        ([b"held", b"d", 4, "ż".encode(), 90], Held("d", 4, "ż", 90)),
        ([b"held", b"d", 4, b"", -2], Held("d", 4, "", 0)),
        ([b"renewed", 4, 900], Renewed(4, 900)),
        ([b"committed"], Status.COMMITTED),
        ([b"lost"], Status.LOST),
        ([b"undone"], Status.UNDONE),
        ([b"kept"], Status.KEPT),
        ([b"not_held"], Status.NOT_HELD),
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
