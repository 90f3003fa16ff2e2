"""What the README shows is what happens."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import redfence
from harness.processes.commands import CommandProcesses
from redfence_storage.client import AsyncStorageClient
from redfence_storage.client_messages import GetResult

README = Path(__file__).parents[3] / "README.md"


def blocks(language: str) -> list[str]:
    """Return the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
async def test_the_python_example_and_the_shell_commands_do_what_the_readme_says(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """They run word for word, but for the ports, which others may use on this machine."""
    _, ready = await commands.start_dev()
    locks, storage = ready[1], ready[2]

    (example,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(example.replace("127.0.0.1:50051", locks).replace("127.0.0.1:50052", storage))
    await commands.start(sys.executable, str(script)).ended()
    async with redfence.AsyncClient(locks) as client, AsyncStorageClient(storage) as stored:
        async with client.lock("orders/42", ttl=10, wait=0) as lease:
            token = lease.token
        assert await stored.get("orders/42", key="state", unfenced=True) == GetResult(
            b"paid", token - 1, token - 1
        )

    lines = [line.partition("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    shown = [
        words[1:] for words in lines if words[:1] == ["redfence"] and words[1] in {"lock", "demo", "cluster"}
    ]
    shown = [words for words in shown if words[:2] != ["cluster", "init"]]
    assert [words[0] for words in shown] == ["lock", "demo", "demo", "cluster"]
    ours = {"REDFENCE_SERVER": locks, "REDFENCE_STORAGE": storage}
    for words in shown:
        run = commands.start_redfence(*words, environment=ours)
        await run.ended(status=1 if "--no-fencing" in words else 0)
        if words[0] == "lock":
            assert re.search(r"^REDFENCE_TOKEN=[1-9]", run.stdout, re.MULTILINE)
