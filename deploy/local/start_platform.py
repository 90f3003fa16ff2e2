"""Start redfence as an operator runs it, without containers, and stop all of it on Ctrl-C.

It starts three nodes with the settings of `deploy/compose`, two servers and a storage with mutual TLS and a
policy, and Prometheus with the shipped alert rules. All data is temporary, and all addresses are loopback.
"""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import trustme

from redfence_server.embedded.binary import find_redis_binary
from redfence_server.embedded.nodes import free_port
from redfence_server.embedded.parent_death import die_with_parent
from redfence_server.randomness import SystemRandomness

DEPLOY = Path(__file__).resolve().parents[1]
REDFENCE = str(Path(sys.executable).with_name("redfence"))
HOST = "127.0.0.1"
SERVICES = ("server-0", "server-1", "storage")
# The slowest is Prometheus on a busy machine.
_START_TIMEOUT_S = 60.0
# Longer than drain_grace_ms.
_STOP_TIMEOUT_S = 15.0


@dataclass(frozen=True)
class Platform:
    """Holds the running processes, and the files that a client needs to call them.

    Attributes:
        folder: has every file: settings, certificates, data, and the output of each process.
        servers: the addresses of both lock servers.
        storage: the address of the storage.
        prometheus: its URL, or empty if this machine has no Prometheus.
        node_pids: the process ids of the nodes, by index.
        client: the environment variables of a client with the certificate of app.example.
    """

    folder: Path
    servers: list[str]
    storage: str
    prometheus: str
    node_pids: list[int]
    client: Mapping[str, str]


class Processes:
    """Starts processes whose output goes to files, and stops them, the last one first."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder = folder
        self._stack = stack

    def start(self, name: str, *command: str, **environment: str) -> subprocess.Popen[bytes]:
        """Start a process; its program is an absolute path."""
        with (self._folder / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                die_with_parent(list(command)),
                cwd=self._folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # Ctrl-C must reach only this program, which stops the servers before the nodes.
                start_new_session=True,
            )
        self._stack.callback(_stop, process)
        return process

    def until_ready(self, name: str, process: subprocess.Popen[bytes], url: str) -> None:
        """Return once the URL answers 200; exit with the process' output if that does not come about."""
        deadline = time.monotonic() + _START_TIMEOUT_S
        while True:
            try:
                with urllib.request.urlopen(url, timeout=1) as answer:
                    if answer.status == 200:
                        return
            except OSError:  # it does not listen yet, or answers 503
                time.sleep(0.05)
            if process.poll() is not None or time.monotonic() > deadline:
                sys.exit(f"{name} did not start:\n{(self._folder / f'{name}.log').read_text()}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGCONT)
    process.terminate()
    try:
        process.wait(_STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _certificate(folder: Path, authority: trustme.CA, name: str) -> tuple[str, str]:
    """Write a certificate and its key, and return both paths."""
    issued = authority.issue_cert(name)
    certificate, key = folder / f"{name}.crt", folder / f"{name}.key"
    issued.cert_chain_pems[0].write_to_path(certificate)
    key.touch(mode=0o600)
    issued.private_key_pem.write_to_path(key)
    return str(certificate), str(key)


def start_nodes(processes: Processes, folder: Path) -> tuple[list[int], str]:
    """Start three nodes and form them; return their process ids and the value of REDFENCE_NODES."""
    program, pids, urls = str(find_redis_binary().path), [], []
    for index in range(3):
        data, port, password = folder / f"node-{index}", free_port(), SystemRandomness().hex_id()
        data.mkdir()
        conf = folder / f"node-{index}.conf"
        conf.touch(mode=0o600)
        own = f"bind {HOST}\nport {port}\ndir {data}\nrequirepass {password}\n"
        conf.write_text((DEPLOY / "compose/valkey.conf").read_text() + own)
        pids.append(processes.start(f"node-{index}", program, str(conf)).pid)
        urls.append(f"redis://:{password}@{HOST}:{port}")
    nodes = ",".join(urls)
    init = (REDFENCE, "cluster", "init", "--max-ttl", "1m")
    for tries_left in reversed(range(50)):
        formed = subprocess.run(
            init, env={**os.environ, "REDFENCE_NODES": nodes}, check=False, capture_output=True, text=True
        )
        if formed.returncode == 0:
            break
        if not tries_left:
            sys.exit(formed.stderr)
        time.sleep(0.1)  # a node does not listen yet
    return pids, nodes


def prometheus_settings(targets: Mapping[str, str]) -> str:
    """Return the shipped settings of Prometheus, with the alert rules, for targets by their names."""
    shipped = (DEPLOY / "compose/prometheus.yml").read_text()
    entry = '- targets: ["server-0:9464", "server-1:9464"]'
    assert entry in shipped, "deploy/compose/prometheus.yml has changed"
    # The label `instance` is a name, because a free port says nothing.
    entries = "\n      ".join(
        f'- targets: ["{address}"]\n        labels: {{instance: "{name}"}}'
        for name, address in targets.items()
    )
    return shipped.replace(entry, entries).replace("alerts.yml", str(DEPLOY / "prometheus/alerts.yml"))


def _start_prometheus(processes: Processes, folder: Path, targets: Mapping[str, str]) -> str:
    """Let Prometheus scrape the targets; return its URL, or nothing if this machine has no Prometheus."""
    program = shutil.which("prometheus")
    if program is None:
        return ""
    config = folder / "prometheus.yml"
    config.write_text(prometheus_settings(targets))
    address = f"{HOST}:{free_port()}"
    process = processes.start(
        "prometheus",
        program,
        f"--config.file={config}",
        f"--storage.tsdb.path={folder / 'prometheus'}",
        f"--web.listen-address={address}",
    )
    processes.until_ready("prometheus", process, f"http://{address}/-/ready")
    return f"http://{address}"


@contextmanager
def running(folder: Path) -> Iterator[Platform]:
    """Yield the platform once all of it serves; stop it afterwards."""
    with ExitStack() as stack:
        processes = Processes(folder, stack)
        authority = trustme.CA()
        ca = folder / "ca.crt"
        authority.cert_pem.write_to_path(ca)
        cert, key = _certificate(folder, authority, HOST)
        node_pids, nodes = start_nodes(processes, folder)
        addresses = {name: f"{HOST}:{free_port()}" for name in SERVICES}
        metrics = {name: f"{HOST}:{free_port()}" for name in SERVICES}
        started = {}
        for name in SERVICES:
            serve = ["serve", "--transport", "fast"]
            command = ["storage", "--db", "storage.db"] if name == "storage" else serve
            command += ["--listen", addresses[name], "--metrics-listen", metrics[name]]
            command += ["--tls-cert", cert, "--tls-key", key, "--tls-client-ca", str(ca)]
            command += ["--policy-file", str(DEPLOY / "local/policy.toml")]
            started[name] = processes.start(name, REDFENCE, *command, REDFENCE_NODES=nodes)
        for name, process in started.items():
            processes.until_ready(name, process, f"http://{metrics[name]}/readyz")
        prometheus = _start_prometheus(processes, folder, metrics)
        servers = [addresses[name] for name in SERVICES if name != "storage"]
        own_cert, own_key = _certificate(folder, authority, "app.example")
        client = {
            "REDFENCE_SERVER": ",".join(servers),
            "REDFENCE_TLS_CA": str(ca),
            "REDFENCE_TLS_CERT": own_cert,
            "REDFENCE_TLS_KEY": own_key,
        }
        yield Platform(folder, servers, addresses["storage"], prometheus, node_pids, client)


def main() -> None:
    """Start the platform, print how to call it, and stop it on Ctrl-C or SIGTERM."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="redfence-platform-") as name:
        try:
            with running(Path(name)) as platform:
                print(_advice(platform), flush=True)
                signal.pause()
        except KeyboardInterrupt:
            print("redfence platform stopped")


def _advice(platform: Platform) -> str:
    exports = "\n".join(f"  export {key}={shlex.quote(value)}" for key, value in platform.client.items())
    program = shlex.quote(REDFENCE)
    prometheus = platform.prometheus or "not started: this machine has no program prometheus"
    return f"""\
lock servers  {" ".join(platform.servers)}
storage       {platform.storage}
Prometheus    {prometheus}
output        {platform.folder}

Set these in another terminal, to be the client app.example:
{exports}

An allowed call, and a denied one, which ends with status 77:
  {program} lock orders/42 -- echo allowed
  {program} lock closed/1 -- echo allowed

redfence platform ready; Ctrl-C stops all"""


if __name__ == "__main__":
    main()
