"""A platform as an operator runs it: mutual TLS, a policy, Prometheus, renewed certificates, more nodes."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import subprocess
import sys
import urllib.parse
from collections import defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import redfence
import start_platform
from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcess, CommandProcesses, node_flags
from harness.processes.fixture_types import FlushedNodes
from harness.processes.metrics import get
from harness.processes.ports import HOST, free_port
from harness.processes.redis_nodes import RedisNode
from harness.processes.servers import form, until
from harness.time.eventually import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

REPOSITORY = Path(__file__).resolve().parents[3]
EXAMPLE = REPOSITORY / "examples/go"
TTL_MS = 4_000
POLICY = """
[[rules]]
principals = ["cert:load.example", "cert:go.example"]
verbs = ["acquire", "inspect", "storage"]
prefix = ""
[[rules]]
principals = ["cert:load.example"]
verbs = ["acquire"]
prefix = "closed/"
effect = "deny"
"""


@dataclass
class Platform:
    """Two servers over three nodes, each at an address that it keeps."""

    commands: CommandProcesses
    nodes: list[RedisNode]
    spare_nodes: list[RedisNode]
    flags: list[str]
    ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(2)])
    metrics_ports: list[int] = field(default_factory=lambda: [free_port() for _ in range(2)])
    servers: list[CommandProcess] = field(default_factory=list)

    @property
    def addresses(self) -> list[str]:
        return [f"{HOST}:{port}" for port in self.ports]

    async def start(self) -> None:
        """Start both servers and return when they serve."""
        self.servers = [
            self.commands.start_redfence(
                *("serve", "--listen", f"{HOST}:{port}", *node_flags(self.nodes), *self.flags),
                *("--metrics-listen", f"{HOST}:{metrics_port}"),
            )
            for port, metrics_port in zip(self.ports, self.metrics_ports, strict=True)
        ]
        for server in self.servers:
            await server.wait_for_line("redfence serving", timeout_s=30)

    async def stop(self) -> None:
        """Drain both servers."""
        assert [await server.stop(timeout_s=20) for server in self.servers] == [0, 0]


@dataclass
class Load:
    """Callers of the SDK that hold locks in turn, for as long as the context lasts.

    Attributes:
        tokens: of each resource, in the order of the grants.
        errors: what callers saw.
    """

    tokens: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    errors: list[redfence.RedfenceError] = field(default_factory=list)
    _stopping: bool = False

    @property
    def grants(self) -> int:
        return sum(map(len, self.tokens.values()))

    async def until_granted(self, count: int) -> None:
        """Return when so many more locks have been granted."""
        goal = self.grants + count
        await eventually(lambda: self.grants >= goal, timeout_s=30)

    @asynccontextmanager
    async def running(self, platform: Platform, tls: redfence.Tls) -> AsyncIterator[None]:
        async with asyncio.TaskGroup() as group:
            for number in range(6):
                group.create_task(self._work(platform.addresses, tls, f"load/{number % 2}"))
            try:
                yield
            finally:
                self._stopping = True

    async def _work(self, addresses: list[str], tls: redfence.Tls, resource: str) -> None:
        while not self._stopping:
            try:
                # A client of its own has a connection of its own, with the files of this moment.
                async with redfence.AsyncClient(*addresses, tls=tls) as client:
                    for _ in range(5):
                        async with client.lock(resource, ttl=TTL_MS / 1000, wait=30) as lease:
                            self.tokens[resource].append(lease.token)
            except redfence.RedfenceError as error:
                self.errors.append(error)
                await asyncio.sleep(0.05)

    def check(self) -> None:
        """Fail unless the tokens of each resource rise."""
        for tokens in self.tokens.values():
            assert tokens == sorted(set(tokens))


@pytest.fixture
async def platform(
    commands: CommandProcesses, flushed_nodes: FlushedNodes, certificate: Certificate, tmp_path: Path
) -> AsyncIterator[Platform]:
    nodes = await flushed_nodes(5)
    await form(nodes[:3], ttl_ms_max=TTL_MS)
    (tmp_path / "policy.toml").write_text(POLICY)
    flags = ["--policy-file", str(tmp_path / "policy.toml"), "--tls-cert", str(certificate.certificate)]
    flags += ["--tls-key", str(certificate.key), "--tls-client-ca", str(certificate.authority)]
    running = Platform(commands, nodes[:3], nodes[3:], flags)
    await running.start()
    yield running
    await running.stop()


@pytest.fixture
def go_example(go: Path) -> Path:
    """The program of `examples/go`."""
    program = EXAMPLE / "build/redfence-example"
    for command in ((Path(sys.executable).with_name("buf"), "generate"), (go, "build", "-o", program)):
        built = subprocess.run(command, cwd=EXAMPLE, check=False, capture_output=True, text=True)
        assert built.returncode == 0, built.stderr
    return program


DENIED = 'sum(max_over_time(redfence_requests_total{outcome="permission_denied"}[5m]))'
GRANTED = 'sum(max_over_time(redfence_requests_total{method="Session.acquire",outcome="granted"}[5m]))'


async def ask(port: int, query: str) -> Mapping[str, float]:
    """Return what Prometheus answers, by the address that it scrapes."""
    _, text = await get(port, f"/api/v1/query?query={urllib.parse.quote(query)}")
    found: list[dict[str, Any]] = json.loads(text)["data"]["result"]
    return {each["metric"].get("instance", ""): float(each["value"][1]) for each in found}


async def until_shown(port: int, query: str, least: float) -> None:
    """Return once the sum that the query asks for is so great."""

    async def shown() -> bool:
        return (await ask(port, query)).get("", 0) >= least

    await until(shown, timeout_s=30)


async def start_prometheus(program: Path, folder: Path, platform: Platform) -> int:
    """Let Prometheus scrape both servers and judge the alert rules; return its port."""
    port, targets = free_port(), [f"{HOST}:{each}" for each in platform.metrics_ports]
    settings = start_platform.prometheus_settings({target: target for target in targets})
    config = folder / "prometheus.yml"
    config.write_text(settings.replace("interval: 5s", "interval: 1s"))
    database, address = f"--storage.tsdb.path={folder}", f"--web.listen-address={HOST}:{port}"
    platform.commands.start(str(program), f"--config.file={config}", database, address)

    async def scraped() -> bool:
        try:
            return set(await ask(port, "up == 1")) == set(targets)
        except (OSError, json.JSONDecodeError):  # it does not answer queries yet
            return False

    await until(scraped, timeout_s=30)
    return port


async def test_certificates_and_nodes_change_under_load_and_prometheus_sees_it(
    platform: Platform, authority: Authority, certificate: Certificate, prometheus: Path, tmp_path: Path
) -> None:
    (tmp_path / "prometheus").mkdir()
    port = await start_prometheus(prometheus, tmp_path / "prometheus", platform)
    own = authority.issue("load.example")
    tls = redfence.Tls(ca=own.authority, cert=own.certificate, key=own.key)
    load = Load()
    async with redfence.AsyncClient(*platform.addresses, tls=tls) as client:
        with pytest.raises(redfence.RedfenceError, match=r"load\.example"):
            await client.acquire("closed/1", ttl=1)
    await until_shown(port, DENIED, 1)  # the server that counts it ends below
    async with load.running(platform, tls):
        await load.until_granted(100)
        for _ in range(5):
            certificate.replace_by(authority.issue(HOST))
            await load.until_granted(50)
            own.replace_by(authority.issue("load.example"))
            await load.until_granted(50)
        assert not load.errors
        await until_shown(port, GRANTED, 100)

        old, platform.nodes = platform.nodes, [*platform.nodes, *platform.spare_nodes]
        to = [flag for node in platform.nodes for flag in ("--to", node.url)]
        resize = platform.commands.start_redfence("cluster", "resize", *node_flags(old), *to, "--yes")
        await resize.ended()
        await platform.stop()
        await platform.start()
        await load.until_granted(100)
    load.check()
    assert {type(error) for error in load.errors} <= {redfence.UnavailableError, redfence.LeaseLostError}

    async def five_nodes() -> bool:
        return set((await ask(port, "redfence_quorum_size")).values()) == {3.0}

    await until(five_nodes)
    assert set((await ask(port, "min_over_time(redfence_quorum_size[5m])")).values()) == {2.0}
    assert (await ask(port, DENIED))[""] == 1
    assert not await ask(port, 'ALERTS{alertstate="firing"}')


async def test_a_go_program_is_allowed_or_denied_by_its_certificate(
    platform: Platform, authority: Authority, go_example: Path
) -> None:
    storage = platform.commands.start_redfence(
        "storage", "--db", "storage.db", "--listen", f"{HOST}:0", *platform.flags
    )
    servers = {
        "REDFENCE_SERVER": platform.addresses[0],
        "REDFENCE_STORAGE": (await storage.wait_for_line(r"ready on (\S+)"))[1],
    }

    def run(name: str) -> CommandProcess:
        own = authority.issue(name)
        files = {"CA": own.authority, "CERT": own.certificate, "KEY": own.key}
        environment = {f"REDFENCE_TLS_{key}": str(file) for key, file in files.items()}
        return platform.commands.start(str(go_example), environment={**servers, **environment})

    allowed, denied = run("go.example"), run("stranger.example")
    assert "PermissionDenied" in await denied.ended(status=1)
    await allowed.ended()
    assert await storage.stop() == 0


async def test_make_platform_starts_all_and_ctrl_c_stops_all(
    commands: CommandProcesses, prometheus: Path
) -> None:
    """Its text has the variables of a client, an allowed call and a denied one; all three are used here."""
    environment = {"PATH": f"{prometheus.parent}:/bin"}
    running = commands.start(sys.executable, start_platform.__file__, environment=environment)
    await running.wait_for_line("^redfence platform ready", timeout_s=60)
    client = dict(re.findall(r"^  export (\w+)=(.+)$", running.stdout, re.MULTILINE))
    assert set(client) == {"REDFENCE_SERVER", "REDFENCE_TLS_CA", "REDFENCE_TLS_CERT", "REDFENCE_TLS_KEY"}
    calls = [line.split() for line in re.findall(r"^  (\S+ lock .+)$", running.stdout, re.MULTILINE)]
    allowed, denied = (commands.start(*call, environment=client) for call in calls)
    assert await allowed.ended() == "allowed\n"
    assert "cert:app.example" in await denied.ended(status=77)
    port = int(re.findall(r"^Prometheus +http://\S+:(\d+)$", running.stdout, re.MULTILINE)[0])

    async def scraped() -> bool:
        return set(await ask(port, "up == 1")) == {"server-0", "server-1", "storage"}

    await until(scraped, timeout_s=30)
    assert await running.stop(number=signal.SIGINT, timeout_s=30) == 0
    assert running.stdout.endswith("redfence platform stopped\n")
    assert not Path(client["REDFENCE_TLS_CA"]).parent.exists()
    for address in client["REDFENCE_SERVER"].split(","):
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection(HOST, int(address.rpartition(":")[2]))
