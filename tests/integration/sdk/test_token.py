"""The bearer token of a client: where it comes from, where it may go, and what happens when it expires."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

import redfence
from harness.jwt_issuer import AUDIENCE, ISSUER, JwtIssuer
from harness.processes.commands import CommandProcesses
from harness.processes.servers import FormedNodes, LockServer, Serve

POLICY = '[[rules]]\nprincipals = ["jwt:billing"]\nverbs = ["acquire", "inspect"]\nprefix = "billing/"\n'


class Site:
    def __init__(self, folder: Path) -> None:
        self.issuer = JwtIssuer()
        self.policy, self.jwks, self.token = (folder / name for name in ("policy.toml", "jwks", "token"))
        self.policy.write_text(POLICY)
        self.issuer.write_key_set(self.jwks)
        self.server: LockServer
        self.address = ""

    def issue(self, *, valid_for_s: float) -> None:
        new = self.token.with_suffix(".new")
        new.write_text(self.issuer.token(valid_for_s=valid_for_s) + "\n")
        new.rename(self.token)


@pytest.fixture
async def site(tmp_path: Path, formed_nodes: FormedNodes, serve: Serve) -> Site:
    site = Site(tmp_path)
    site.server = await serve(
        await formed_nodes(3),
        policy_file=str(site.policy),
        jwt_jwks_file=str(site.jwks),
        jwt_audience=AUDIENCE,
        jwt_issuer=ISSUER,
    )
    site.address = site.server.target
    return site


async def test_a_client_is_what_its_token_says_and_a_denial_is_not_retried(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    site.issue(valid_for_s=60)
    async with redfence.AsyncClient(site.address, token=site.token) as client:
        async with client.lock("billing/1", ttl=5) as lease:
            assert lease.token
        with pytest.raises(redfence.AccessDeniedError) as caught:
            await client.acquire("other/1", ttl=5, wait=30)
        assert (caught.value.error_reason, caught.value.principal) == ("PERMISSION_DENIED", "jwt:billing")
    monkeypatch.setenv("REDFENCE_BEARER_TOKEN_FILE", str(site.token))
    async with redfence.AsyncClient(site.address) as client, client.lock("billing/1", ttl=5) as lease:
        assert lease.token
    monkeypatch.setenv("REDFENCE_BEARER_TOKEN", "wrong")
    async with redfence.AsyncClient(site.address) as client:
        with pytest.raises(redfence.AccessDeniedError) as caught:
            await client.acquire("billing/1", ttl=5, wait=30)
        assert caught.value.error_reason == "UNAUTHENTICATED"
        assert "wrong" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("client_class", [redfence.AsyncClient, redfence.Client])
async def test_a_lease_and_a_waiter_outlive_the_tokens_of_a_file_that_is_renewed(
    site: Site, client_class: type[redfence.AsyncClient | redfence.Client]
) -> None:
    """Each token lives 1.5 s, and the client is on its own for as long as no call asks for a new one."""

    async def renew_tokens() -> None:
        while True:
            site.issue(valid_for_s=1.5)
            await asyncio.sleep(0.5)

    site.issue(valid_for_s=1.5)
    renewing = asyncio.create_task(renew_tokens())
    ends_at_s = time.monotonic() + 5
    if client_class is redfence.AsyncClient:
        async with redfence.AsyncClient(site.address, token=site.token) as client:
            held = await client.acquire("billing/1", ttl=2)
            waiting = asyncio.create_task(client.acquire("billing/1", ttl=2, wait=20))
            while time.monotonic() < ends_at_s:
                assert held.state is not redfence.LeaseState.LOST
                await asyncio.sleep(0.1)
            await held.release()
            following = await waiting
            assert following.token > held.token
            await following.release()
    else:
        await asyncio.to_thread(_hold_by_threads, site, ends_at_s)
    renewing.cancel()


def _hold_by_threads(site: Site, ends_at_s: float) -> None:
    with redfence.Client(site.address, token=site.token) as client, client.lock("billing/2", ttl=2) as lease:
        while time.monotonic() < ends_at_s:
            assert lease.state is not redfence.LeaseState.LOST
            time.sleep(0.1)
            assert client.check_token("billing/2", lease.token).live


@pytest.mark.slow
@pytest.mark.parametrize(
    "command",
    [
        ("cluster", "status"),
        ("locks", "list"),
        ("locks", "inspect", "billing/1"),
        ("locks", "force-release", "billing/1", "--token", "1"),
        ("lock", "billing/1", "true"),
    ],
    ids=" ".join,
)
async def test_each_command_sends_the_token_of_its_file_rather_than_the_environments(
    site: Site, commands: CommandProcesses, command: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    site.policy.write_text(
        '[[rules]]\nprincipals = ["jwt:billing"]\nverbs = ["acquire", "admin", "inspect"]\nprefix = ""\n'
    )
    site.server.reload()
    site.issue(valid_for_s=60)
    monkeypatch.setenv("REDFENCE_BEARER_TOKEN", "wrong")
    monkeypatch.setenv("REDFENCE_SERVER", site.address)
    denied = commands.start_redfence(*command)
    name, *rest = command
    flag = ("--bearer-token-file", str(site.token))
    # The flags of `lock` come before the command that it runs.
    words = (name, *flag, *rest) if name == "lock" else (*command, *flag)
    allowed = commands.start_redfence(*words)
    # 77 is EX_NOPERM of sysexits.h; the other commands have one status for every error of a call.
    assert (await denied.wait() == 77) == (name == "lock")
    assert "bearer token" in denied.stderr
    assert await allowed.wait() == (1 if "force-release" in command else 0), allowed.stderr
    assert "bearer token" not in allowed.stderr


def test_a_token_leaves_this_machine_only_encrypted_or_with_permission(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for local in ("127.0.0.1:1", "127.8.0.1:1", "localhost:1", "[::1]:1", "unix:/run/redfence.sock"):
        redfence.Client(local, token="secret").close()
    for remote in ("locks:1", "10.0.0.1:1", "localhost.example:1", "dns:///locks:1", "127.0.0.1.example:1"):
        with pytest.raises(redfence.InvalidArgumentError, match="in plaintext"):
            redfence.Client("127.0.0.1:1", remote, token="secret")
        redfence.Client(remote, token="secret", plaintext_token=True).close()
    monkeypatch.setenv("REDFENCE_PLAINTEXT_TOKEN", "1")
    redfence.Client("locks:1", token="secret").close()
    for wrong in ("", "two words", "line\n", tmp_path / "absent"):
        with pytest.raises(redfence.InvalidArgumentError, match="token"):
            redfence.Client("127.0.0.1:1", token=wrong)
    with pytest.raises(redfence.InvalidArgumentError, match="give one of them"):
        redfence.Client("127.0.0.1:1", token="a", metadata={"authorization": "Bearer b"})
