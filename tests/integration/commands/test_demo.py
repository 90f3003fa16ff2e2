"""`redfence demo gc-pause`: two real processes, one really stopped past its lease."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcesses
from harness.processes.ports import HOST, free_port
from redfence._cli import main
from redfence_proto import addresses
from redfence_server.access.tokens import digest_of

pytestmark = pytest.mark.slow


def told(pattern: str, story: str) -> re.Match[str]:
    """Return the part of the story that the pattern finds; fail without one."""
    found = re.search(pattern, story)
    assert found, story
    return found


async def test_with_fencing_the_stale_write_of_a_paused_holder_is_refused(commands: CommandProcesses) -> None:
    """The story ends with B's balance in the storage, and exit status 0."""
    _, ready = await commands.start_dev()
    demo = commands.start_redfence("demo", "gc-pause", "--server", ready[1], "--storage", ready[2])
    await demo.ended()
    token_a = int(told(r"A  got the lock .* with token (\d+)", demo.stdout)[1])
    token_b = int(told(r"B  .* got the lock with token (\d+)", demo.stdout)[1])
    assert token_b > token_a
    refused = told(r"refused A's write: token (\d+) is stale, it has seen (\d+)", demo.stdout)
    assert (int(refused[1]), int(refused[2])) == (token_a, token_b)
    # 100 + B's 5: A's 110 is nowhere.
    assert "The account holds 105" in demo.stdout
    paused_s = float(told(r"wakes up after ([0-9.]+) s", demo.stdout)[1])
    assert paused_s > 1.5, "it was stopped past its lease"


async def test_without_fencing_the_late_write_corrupts_the_file(commands: CommandProcesses) -> None:
    """The negative control: the same story over a file loses B's deposit, and exits 1."""
    _, ready = await commands.start_dev()
    servers = ("--server", ready[1], "--storage", ready[2])
    demo = commands.start_redfence("demo", "gc-pause", "--no-fencing", *servers)
    await demo.ended(status=1)
    told(r"now says 110\b", demo.stdout)
    assert "CORRUPTED" in demo.stdout


async def test_the_demo_says_when_it_cannot_be_played(commands: CommandProcesses) -> None:
    nowhere = "127.0.0.1:1"
    demo = commands.start_redfence("demo", "gc-pause", "--server", nowhere, "--storage", nowhere)
    await demo.ended(status=2, timeout_s=60)
    assert demo.stderr.startswith(f"redfence demo: no storage runs on {nowhere}: start `redfence storage`")
    assert not demo.stdout
    demo = commands.start_redfence("demo", "gc-pause", "--no-fencing", "--server", nowhere)
    await demo.ended(status=2, timeout_s=60)
    assert demo.stderr.startswith("redfence demo: A:")


@pytest.mark.parametrize("by", ["flags", "variables"])
async def test_the_demo_shows_its_credentials_to_the_server_and_to_the_storage(
    commands: CommandProcesses, certificate: Certificate, authority: Authority, tmp_path: Path, by: str
) -> None:
    """Both want a client's certificate and a token. The first of the servers is away."""
    policy, tokens, secret = (tmp_path / name for name in ("policy.toml", "tokens.toml", "secret"))
    policy.write_text(
        '[[rules]]\nprincipals = ["token:demo"]\nverbs = ["acquire", "storage"]\nprefix = "demo/"\n'
    )
    tokens.write_text(f'[[tokens]]\nname = "demo"\nsha256 = "{digest_of("secret-of-the-demo").hex()}"')
    secret.write_text("secret-of-the-demo")
    _, ready = await commands.start_dev(
        *("--tls-cert", str(certificate.certificate), "--tls-key", str(certificate.key)),
        *("--tls-client-ca", str(authority.file)),
        *("--policy-file", str(policy), "--tokens-file", str(tokens)),
    )
    away, own = f"{HOST}:{free_port()}", authority.issue("demo.example")
    files = {"tls-ca": own.authority, "tls-cert": own.certificate, "tls-key": own.key}
    given = {name: str(file) for name, file in (files | {"bearer-token-file": secret}).items()}
    if by == "flags":
        servers = ("--server", away, "--server", ready[1], "--storage", ready[2])
        flags = (word for name, file in given.items() for word in (f"--{name}", file))
        await commands.start_redfence("demo", "gc-pause", *servers, *flags).ended()
    else:
        variables = given | {"server": f"{away},{ready[1]}", "storage": ready[2]}
        environment = {f"REDFENCE_{name.upper().replace('-', '_')}": each for name, each in variables.items()}
        await commands.start_redfence("demo", "gc-pause", environment=environment).ended()


@pytest.mark.parametrize("running", [None, "STORAGE"])
def test_own_servers_of_the_demo_need_no_credentials_whatever_the_environment_says(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str], running: str | None
) -> None:
    """It starts both, even if one runs. An operator's shell names files for others; here none exists."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    for name in ("TLS_CA", "TLS_CERT", "TLS_KEY", "BEARER_TOKEN_FILE", "POLICY_FILE", "TOKENS_FILE"):
        monkeypatch.setenv(f"REDFENCE_{name}", "/missing")
    with socket.create_server((HOST, 0)) as one:
        for name in ("LOCK_SERVER", "STORAGE"):
            port = one.getsockname()[1] if name == running else free_port()
            monkeypatch.setattr(addresses, name, f"{HOST}:{port}")
        assert main.main(["demo", "gc-pause"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        f"(No lock server runs on {addresses.LOCK_SERVER}, or no storage on {addresses.STORAGE}: "
        "starting both for this story, with a quorum.)"
    )
