"""The tools of the harness change a node's disk as they say."""

from __future__ import annotations

import pytest

from harness.processes.fixture_types import FreshNodes
from harness.processes.node_data import (
    Transaction,
    log_file,
    lose_last,
    repair_log,
    transactions,
)
from redfence_server.embedded.binary import RedisBinary
from redfence_server.embedded.process import NodeStartError

_SCRIPT = "redis.call('SET', KEYS[1], ARGV[1]); return redis.call('INCR', 'times')"


def sets(each: Transaction) -> bool:
    """Tell whether the script was run here."""
    return any(command[:2] == (b"SET", b"key") for command in each.commands)


async def test_a_log_is_cut_before_whole_scripts_and_the_node_starts_without_them(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """The cut leaves every command whole, so `aof-load-truncated no` does not matter."""
    [node] = await fresh_nodes(1, binary=engine)
    for number in range(5):
        await node.call("EVAL", _SCRIPT, 1, "key", number)
        await node.call("SET", "other", number)
    node.kill()
    logged = transactions(log_file(node).read_bytes())
    assert logged[-1].ends_at == log_file(node).stat().st_size
    lost = lose_last(node, 2, sets)
    assert [sets(each) for each in lost] == [True, False, True, False]
    await node.start()
    assert await node.call("MGET", "key", "times", "other") == [b"2", b"3", b"2"]


def test_a_transaction_without_its_end_is_not_complete() -> None:
    """The same holds for a command that is cut off at any byte."""
    whole = b"*1\r\n$5\r\nMULTI\r\n*2\r\n$4\r\nINCR\r\n$1\r\nx\r\n*1\r\n$4\r\nEXEC\r\n"
    single = b"*2\r\n$4\r\nINCR\r\n$1\r\ny\r\n"
    assert [each.commands[0] for each in transactions(single + whole)] == [(b"INCR", b"y"), (b"MULTI",)]
    for size in range(len(whole)):
        assert len(transactions(single + whole[:size])) == 1, size


async def test_a_repaired_log_loses_the_transaction_that_was_cut(
    fresh_nodes: FreshNodes, engine: RedisBinary
) -> None:
    """The node does not start before the repair."""
    [node] = await fresh_nodes(1, binary=engine)
    for number in range(3):
        await node.call("EVAL", _SCRIPT, 1, "key", number)
    node.kill()
    node.cut_aof(3)
    with pytest.raises(NodeStartError):
        await node.start()
    repair_log(node)
    await node.start()
    assert await node.call("MGET", "key", "times") == [b"1", b"2"]
