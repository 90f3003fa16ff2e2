"""The samples of deploy/ are valid settings; with other addresses and paths they run nodes and a server."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

import redfence
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcesses
from harness.processes.ports import HOST, free_port
from redfence_server import config
from redfence_server.access.policy_file import load_policy
from redfence_server.embedded.binary import RedisBinary
from redfence_server.http2.settings import Transport

DEPLOY = Path(__file__).resolve().parents[3] / "deploy"
SYSTEMD = DEPLOY / "systemd"
KUBERNETES = DEPLOY / "kubernetes"


def container(file: Path) -> dict[str, Any]:
    """Return what the file says of the servers' container."""
    (deployment,) = (each for each in yaml.safe_load_all(file.read_text()) if each["kind"] == "Deployment")
    found: dict[str, Any]
    (found,) = deployment["spec"]["template"]["spec"]["containers"]
    return found


def kubernetes(*files: Path) -> tuple[dict[str, str], set[str]]:
    """Return the variables of the servers, and the folders that are mounted."""
    containers = [container(file) for file in files]
    variables = {v["name"]: v["value"] for each in containers for v in each["env"] if "value" in v}
    return variables, {mount["mountPath"] for each in containers for mount in each["volumeMounts"]}


def compose(*files: Path) -> tuple[dict[str, str], set[str]]:
    """Return the same of a server of Docker Compose; a mounted file counts as a folder."""
    servers = [yaml.safe_load(file.read_text())["services"]["server-0"] for file in files]
    variables = {name: value for each in servers for name, value in each["environment"].items()}
    return variables, {volume.split(":")[-2] for each in servers for volume in each.get("volumes", ())}


COMPOSE = (DEPLOY / "compose/compose.yaml", DEPLOY / "compose/mutual-tls.yaml")
SERVERS = (KUBERNETES / "base/servers.yaml", KUBERNETES / "mutual-tls/servers.yaml")


@pytest.mark.parametrize(
    ("variables", "mounted", "mutual"),
    [
        (*compose(*COMPOSE[:1]), False),
        (*compose(*COMPOSE), True),
        (*kubernetes(*SERVERS[:1]), False),
        (*kubernetes(*SERVERS), True),
    ],
    ids=["compose", "compose with mutual TLS", "kubernetes", "kubernetes with mutual TLS"],
)
def test_the_variables_of_containers_are_valid_settings(
    variables: dict[str, str], mounted: set[str], *, mutual: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    settings = config.load({})
    assert settings.transport is Transport.FAST, "docs/security.md recommends it"
    assert (settings.tls_client_ca is not None, settings.policy_file is not None) == (mutual, mutual)
    if mutual:
        assert not settings.insecure
        assert settings.audit_log
    for value in variables.values():
        if value.startswith("/"):
            assert {value, str(Path(value).parent)} & mounted, f"nothing is mounted at {value}"


def test_kubernetes_has_the_files_that_it_names_and_the_policy_of_systemd() -> None:
    overlay = KUBERNETES / "mutual-tls"
    for folder in (KUBERNETES / "base", overlay):
        named = yaml.safe_load((folder / "kustomization.yaml").read_text())
        patches = [patch["path"] for patch in named.get("patches", ())]
        maps = [file for each in named.get("configMapGenerator", ()) for file in each["files"]]
        for file in (*named["resources"], *patches, *maps):
            assert (folder / file).exists()
        unnamed = {file.name for file in folder.iterdir()} - {*named["resources"], *patches, *maps}
        assert unnamed == {"kustomization.yaml"}
    # kustomize reads no file above its folder.
    assert (overlay / "policy.toml").read_text() == (SYSTEMD / "policy.toml").read_text()


def test_the_settings_and_the_policy_are_valid_as_they_are() -> None:
    settings = config.load({}, config_file=SYSTEMD / "redfence.toml")
    assert settings.tls_client_ca is not None
    assert settings.policy_file == Path("/etc/redfence/policy.toml")
    assert settings.transport is Transport.FAST, "docs/security.md recommends it"
    assert load_policy(SYSTEMD / "policy.toml").rules


def test_the_settings_that_are_comments_are_valid_too(tmp_path: Path) -> None:
    """An operator removes the sign before them."""
    text = (SYSTEMD / "redfence.toml").read_text().replace("redis://", "rediss://")
    uncommented, count = re.subn(r"^# (\w+ = )", r"\1", text, flags=re.MULTILINE)
    assert count > 2
    (tmp_path / "redfence.toml").write_text(uncommented)
    assert config.load({}, config_file=tmp_path / "redfence.toml").processes


async def start_nodes(commands: CommandProcesses, binary: RedisBinary, folder: Path) -> Mapping[str, str]:
    """Start three nodes as the unit does; return their addresses by the names in the sample."""
    addresses = {}
    for index in range(3):
        data, port = folder / f"node-{index}", free_port()
        data.mkdir()
        how = ("--port", str(port), "--dir", str(data), "--daemonize", "no", "--bind", HOST)
        node = commands.start(str(binary.path), str(SYSTEMD / "node.conf"), *how)
        await node.wait_for_line("Ready to accept connections")
        addresses[f"node-{index}.example:6379"] = f"{HOST}:{port}"
    return addresses


@pytest.mark.slow
async def test_nodes_are_durable_and_callers_may_do_what_the_policy_says(
    commands: CommandProcesses,
    redis_binary: RedisBinary,
    certificate: Certificate,
    authority: Authority,
    tmp_path: Path,
) -> None:
    text = (SYSTEMD / "redfence.toml").read_text()
    changes = {
        **await start_nodes(commands, redis_binary, tmp_path),
        "/etc/redfence/tls/tls.crt": str(certificate.certificate),
        "/etc/redfence/tls/tls.key": str(certificate.key),
        "/etc/redfence/tls/clients.crt": str(authority.file),
        "/etc/redfence/policy.toml": str(SYSTEMD / "policy.toml"),
        "/var/log/redfence": str(tmp_path),
        "0.0.0.0:50051": f"{HOST}:0",
        "127.0.0.1:9464": f"{HOST}:0",
    }
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "redfence.toml").write_text(text)
    given = ("--config", str(tmp_path / "redfence.toml"))
    await commands.start_redfence("cluster", "init", *given).ended()
    server = commands.start_redfence("serve", *given)
    address = (await server.wait_for_line(r"serving on (\S+)", timeout_s=30))[1]

    def client(name: str) -> redfence.AsyncClient:
        own = authority.issue(name)
        tls = redfence.Tls(ca=own.authority, cert=own.certificate, key=own.key)
        return redfence.AsyncClient(address, tls=tls)

    async with client("billing.example") as billing, client("operator.example") as operator:
        async with billing.lock("billing/1", ttl=5) as lease:
            assert lease.token
        with pytest.raises(redfence.AccessDeniedError):
            await billing.acquire("payroll/1", ttl=5)
        status = await operator.cluster_status()
        assert {node.durability for node in status.nodes} == {redfence.Durability.PROVEN}
        with pytest.raises(redfence.AccessDeniedError):
            await operator.acquire("billing/1", ttl=5)
    assert await server.stop() == 0
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert {"cluster_init", "node", "acquire", "release"} <= set(events)
