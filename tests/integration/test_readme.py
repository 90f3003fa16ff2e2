"""What the README shows is what happens."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from harness.processes.commands import CommandProcesses

README = Path(__file__).parents[2] / "README.md"


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.slow
async def test_the_python_example_and_the_shell_commands_do_what_the_readme_says(
    commands: CommandProcesses, tmp_path: Path
) -> None:
    """Word for word, but for the ports, which others may use on this machine."""
    dev = commands.start_redfence("dev", "--listen", "127.0.0.1:0", "--storage-listen", "127.0.0.1:0")
    ready = await dev.wait_for_line(r"lock server on (\S+), storage on (\S+),", timeout_s=30)
    ours = {"REDFENCE_SERVER": ready.group(1), "REDFENCE_STORAGE": ready.group(2)}

    (example,) = blocks("python")
    script = tmp_path / "example.py"
    script.write_text(
        example.replace("127.0.0.1:50051", ready.group(1)).replace("127.0.0.1:50052", ready.group(2))
    )
    run = commands.start(sys.executable, str(script))
    assert await run.wait(timeout_s=30) == 0, run.stderr

    lines = [line.partition("#")[0].split() for block in blocks("sh") for line in block.splitlines()]
    shown = [
        words[1:] for words in lines if words[:1] == ["redfence"] and words[1] in {"lock", "demo", "cluster"}
    ]
    shown = [words for words in shown if words[:2] != ["cluster", "init"]]
    assert [words[0] for words in shown] == ["lock", "demo", "demo", "cluster"]
    for words in shown:
        run = commands.start_redfence(*words, environment=ours)
        assert await run.wait(timeout_s=30) == (1 if "--no-fencing" in words else 0), run.stderr
        if words[0] == "lock":
            assert re.search(r"^REDFENCE_TOKEN=[1-9]", run.stdout, re.MULTILINE)
