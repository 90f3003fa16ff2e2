"""`redfence locks` over a real server."""

from __future__ import annotations

import asyncio
import json
import re

import pytest

from harness.processes.servers import LockServer
from redfence._cli import main


async def run(*arguments: str) -> int:
    """Run a command line beside the server, which is on this loop."""
    return await asyncio.to_thread(main.main, ["locks", *arguments])


def printed(capsys: pytest.CaptureFixture[str]) -> str:
    """Return what the command printed; the server of this process logs to the same stream."""
    lines = capsys.readouterr().out.splitlines()
    return "\n".join(line for line in lines if not re.match(r"\d{4}-\d\d-\d\d ", line))


async def test_an_operator_finds_a_lock_and_ends_its_lease(
    server: LockServer, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ("--server", server.target)
    token = (await server.acquire("jobs/1", holder="stuck")).lease.fencing_token
    await server.acquire("jobs/2")
    assert await run("list", "jobs/", *at) == 0
    heading, first, second = printed(capsys).splitlines()
    assert heading.split() == ["RESOURCE", "TOKEN", "REMAINING", "WAITERS", "HOLDER"]
    assert first.split()[:2] == ["jobs/1", str(token)]
    assert (first.split()[-1], second.split()[-1]) == ("stuck", "-")
    assert await run("list", "jobs/1", "-o", "json", *at) == 0
    listed = json.loads(printed(capsys))
    assert (listed["resource"], listed["current"]["token"]) == ("jobs/1", token)
    assert await run("inspect", "jobs/1", *at) == 0
    shown = printed(capsys).splitlines()
    assert shown[0] == f"jobs/1: held: token {token}; 0 waiting at this server"
    assert [line.split()[:3] for line in shown[2:]] == [[str(n), "answered", str(token)] for n in range(3)]
    assert await run("inspect", "jobs/1", "-o", "json", *at) == 0
    assert json.loads(printed(capsys))["nodes"][0]["answer"] == "answered"
    assert await run("force-release", "jobs/1", "--token", str(token + 5), *at) == 1
    assert f"jobs/1 is held with token {token}, not {token + 5}, by stuck" in capsys.readouterr().err
    assert await run("force-release", "jobs/1", "--token", str(token), "--reason", "gone", *at) == 0
    assert printed(capsys) == f"jobs/1: the lease with token {token} has ended"
    assert await run("force-release", "jobs/1", "--token", str(token), "-o", "json", *at) == 1
    assert json.loads(printed(capsys)) == {"outcome": "not_held", "current": None}
    assert not (await server.look("jobs/1")).HasField("current")
