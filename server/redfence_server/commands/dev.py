"""`redfence dev`: run nodes, lock server and storage demo on this machine by one command."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from redfence_proto import addresses, bounds
from redfence_server import composition, config, log_setup
from redfence_server.api import serving as grpc_serving
from redfence_server.commands import startup
from redfence_server.commands.flags import add_flags, given_flags
from redfence_server.embedded.nodes import EmbeddedNodes
from redfence_server.embedded.parent_death import die_with_parent
from redfence_server.errors import ConfigError
from redfence_server.nodes.cluster import check_urls
from redfence_server.operations import forming
from redfence_server.process_memory import relax_garbage_collector
from redfence_server.randomness import SystemRandomness

HELP = "run an embedded quorum, a lock server on it, and the storage demo"
_STORAGE_START_TIMEOUT_S = 20.0
_STORAGE_STOP_TIMEOUT_S = 10.0
# The embedded quorum sets these itself, and serves in this process.
_FIXED = frozenset({"nodes", "assume_durable", "processes", "node_tls_ca", "node_tls_cert", "node_tls_key"})
# A terminal shows one line and the problems, not every step. The nodes are here, so a quorum comes soon.
_DEFAULTS = {"log_level": log_setup.LogLevel.WARNING, "start_timeout_ms": 10_000}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    # Not --node N: that names a node of `redfence serve`.
    parser.add_argument(
        "--nodes",
        dest="node_count",
        type=int,
        default=3,
        metavar="N",
        help="1, 3, 5 or 7 (default: %(default)s)",
    )
    parser.add_argument(
        "--data-dir",
        type=Path,
        metavar="DIR",
        help="keep all data here for the next start (default: a temporary directory)",
    )
    parser.add_argument(
        "--storage-listen",
        default=addresses.STORAGE,
        metavar="HOST:PORT",
        help="the address of the storage demo (default: %(default)s)",
    )
    add_flags(parser, names=config.ServeConfig.model_fields.keys() - _FIXED, command_defaults=_DEFAULTS)
    parser.epilog = (
        "Each setting of `redfence serve` among these flags is also an environment variable: "
        "--node-timeout-ms is REDFENCE_NODE_TIMEOUT_MS. The first three flags have no variable. At SIGHUP "
        "the server and the storage read the files of access again, open the audit log anew, and look "
        "whether the files of TLS have changed. A closed terminal stops all."
    )


@startup.explain_refusal
def run(arguments: argparse.Namespace) -> int:
    """Serve until Ctrl-C or SIGTERM; return 0 then, 1 if the storage ended by itself, 2 if a start failed."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    stop = grpc_serving.stop_signal()
    main = asyncio.current_task()
    assert main is not None

    def interrupt(_: object) -> None:
        main.cancel()

    stop.add_done_callback(interrupt)
    try:
        async with AsyncExitStack() as stack:
            data_dir = arguments.data_dir or Path(stack.enter_context(_scratch()))
            settings = await stack.enter_async_context(_quorum(arguments, data_dir))
            running = await stack.enter_async_context(
                composition.LockServer(settings, accept_empty_nodes=True)
            )
            await running.until_quorum()
            storage, storage_address = await stack.enter_async_context(
                _storage(arguments, settings, data_dir)
            )
            relax_garbage_collector()
            stop.remove_done_callback(interrupt)

            def reload() -> None:
                running.reload(None)
                with contextlib.suppress(ProcessLookupError):
                    storage.send_signal(signal.SIGHUP)

            _reload_at_sighup(reload, stop=stop)
            host = settings.listen.rpartition(":")[0]
            print(
                f"redfence ready: lock server on {host}:{running.port}, storage on {storage_address}, "
                f"{arguments.node_count} nodes in {data_dir}; Ctrl-C stops all",
                flush=True,
            )
            serving = asyncio.create_task(
                running.serve_until(stop, grace_ms=settings.drain_grace_ms), name="serve"
            )
            storage_ends = asyncio.create_task(storage.wait(), name="watch-storage")
            await asyncio.wait({serving, storage_ends}, return_when=asyncio.FIRST_COMPLETED)
            storage_ends.cancel()
            if not serving.done():
                serving.cancel()
                sys.stderr.write(f"redfence dev: the storage ended with status {storage.returncode}\n")
                return 1
    except asyncio.CancelledError:
        if not stop.done():
            raise
    return 0


def _reload_at_sighup(reload: Callable[[], None], *, stop: asyncio.Future[signal.Signals]) -> None:
    """Call `reload` at each SIGHUP, but stop if the signal comes because the terminal was closed.

    Otherwise the nodes and the ports would stay after the terminal closes. `nohup` asks for that: it starts
    the process with the signal ignored.
    """
    ends_with_terminal = _has_terminal() and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN

    def on_sighup() -> None:
        if not ends_with_terminal or _has_terminal():
            reload()
        elif not stop.done():
            stop.set_result(signal.SIGHUP)

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, on_sighup)


def _has_terminal() -> bool:
    """Return whether this process belongs to an open terminal."""
    try:
        os.close(os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY))
    except OSError:
        return False
    return True


def _scratch() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="redfence-dev-", ignore_cleanup_errors=True)


@asynccontextmanager
async def _quorum(arguments: argparse.Namespace, data_dir: Path) -> AsyncIterator[config.ServeConfig]:
    """Run the nodes, formed into a cluster, and yield the settings of a server over them."""
    flags = given_flags(arguments)
    # Report wrong settings before any process starts.
    checked = config.load({**flags, "nodes": ()}, command_defaults=_DEFAULTS)
    log_setup.configure(log_format=checked.log_format, level=checked.log_level)
    async with EmbeddedNodes(count=arguments.node_count, data_dir=data_dir) as nodes:
        settings = checked.model_copy(update={"nodes": nodes.urls})
        await forming.form(
            check_urls(nodes.urls),
            keys=settings.keyspace,
            ttl_ms_max=bounds.TTL_MS_MAX_DEFAULT,
            randomness=SystemRandomness(),
            # The server adopts an empty node, because it runs the nodes itself.
            leaves_wiped=True,
        )
        yield settings


@asynccontextmanager
async def _storage(
    arguments: argparse.Namespace, settings: config.ServeConfig, data_dir: Path
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """Run the storage demo as a process, and yield it with its address once it is ready."""
    command = [sys.executable, "-m", "redfence", "storage", "--listen", arguments.storage_listen]
    command += ["--db", str(data_dir / "storage.db")]
    command += ["--log-format", settings.log_format, "--log-level", settings.log_level]
    for name in ("cert", "key", "client_ca"):
        if (file := getattr(settings, f"tls_{name}")) is not None:
            command += [f"--tls-{name.replace('_', '-')}", str(file)]
    for name in (
        "policy_file",
        "tokens_file",
        "jwt_jwks_file",
        "jwt_audience",
        "jwt_issuer",
        "audit_log",
        "traces_endpoint",
    ):
        if value := getattr(settings, name):
            command += [f"--{name.replace('_', '-')}", str(value)]
    command += ["--insecure"] if settings.insecure else ["--no-insecure"]
    # In a session of its own, without the terminal's Ctrl-C: this process ends it after its callers.
    process = await asyncio.create_subprocess_exec(
        *die_with_parent(command),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(_STORAGE_START_TIMEOUT_S):
            line = (await process.stdout.readline()).decode()
        if " ready on " not in line:
            raise ConfigError(
                f"--storage-listen: the storage demo could not start on {arguments.storage_listen}"
            )
        yield process, line.partition(" ready on ")[2].partition(" ")[0]
    except TimeoutError as error:
        raise ConfigError("the storage demo did not start in time") from error
    finally:
        await _end(process)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.terminate()
    try:
        async with asyncio.timeout(_STORAGE_STOP_TIMEOUT_S):
            await process.wait()
    except TimeoutError:
        process.kill()
        await process.wait()
