"""Serves the storage demo until SIGTERM or SIGINT: `redfence storage`."""

from __future__ import annotations

import argparse
import signal
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from redfence_proto import addresses, variables
from redfence_server import log_setup
from redfence_server.log_setup import LogFormat, LogLevel

if TYPE_CHECKING:
    import grpc

    from redfence_storage.sqlite_store import SqliteStore

HELP = "serve a small key-value store that refuses stale fencing tokens"

_TRUE = frozenset({"1", "true", "yes", "on"})
# As `redfence serve` has them.
_ACCESS_FILES = {
    "policy_file": "a TOML file that says which principal may use which resources; without it, every "
    "caller may use all",
    "tokens_file": "a TOML file with the names and SHA-256 of bearer tokens",
    "jwt_jwks_file": "a JSON Web Key Set; accepts JWTs as bearer tokens; needs 'redfence[jwt]'",
}
_ACCESS_TEXTS = {
    "jwt_audience": "the audience that a JWT must name",
    "jwt_issuer": "the issuer that a JWT must name",
    "audit_log": "the file for the audit log of denied calls, or - for standard error; empty for none",
}
# One commit answers every pending call. The longer time is for a disk that hangs.
_GRACE_S = 5.0
_NOTICE_S = 0.25
_EXIT_UNUSABLE = 2


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command; an option overrides the environment."""
    parser.epilog = (
        "At SIGHUP the storage reads the files of access again, opens the audit log anew, and looks whether "
        "the files of TLS have changed."
    )
    given = variables.given()
    parser.add_argument(
        "--db",
        metavar="PATH",
        type=Path,
        default=given.get("STORAGE_DB"),
        help="the SQLite file; created if it is missing [$REDFENCE_STORAGE_DB]",
    )
    parser.add_argument(
        "--listen",
        metavar="HOST:PORT",
        default=given.get("STORAGE_LISTEN", addresses.STORAGE),
        help="the address to serve on; port 0 takes any free one "
        f"[$REDFENCE_STORAGE_LISTEN; {addresses.STORAGE}]",
    )
    for name, purpose in (
        ("cert", "PEM file of the certificate, with the intermediate ones; the port then speaks only TLS"),
        ("key", "PEM file of the certificate's private key, not encrypted"),
        ("client-ca", "PEM file of authorities; a client must show a certificate of one of them"),
    ):
        variable = f"TLS_{name.upper().replace('-', '_')}"
        parser.add_argument(
            f"--tls-{name}",
            metavar="FILE",
            type=Path,
            default=given.get(variable) or None,
            help=f"{purpose} [${variables.PREFIX}{variable}]",
        )
    parser.add_argument(
        "--insecure",
        action=argparse.BooleanOptionalAction,
        default=given.get("INSECURE", "").lower() in _TRUE,
        help="serve without TLS on an address that other machines can reach [$REDFENCE_INSECURE]",
    )
    parser.add_argument(
        "--metrics-listen",
        metavar="HOST:PORT",
        default=given.get("STORAGE_METRICS_LISTEN", ""),
        help="the address to serve /metrics, /livez and /readyz on by HTTP; empty: nowhere "
        "[$REDFENCE_STORAGE_METRICS_LISTEN]",
    )
    parser.add_argument(
        "--traces-endpoint",
        metavar="URL",
        default=given.get("TRACES_ENDPOINT", ""),
        help="the URL to send OpenTelemetry spans to by OTLP/HTTP; needs pip install 'redfence[traces]'; "
        "empty: send none [$REDFENCE_TRACES_ENDPOINT]",
    )
    for name, purpose in (_ACCESS_FILES | _ACCESS_TEXTS).items():
        variable = name.upper()
        is_file = name in _ACCESS_FILES
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            metavar="FILE" if is_file else name.rpartition("_")[2].upper(),
            type=Path if is_file else str,
            default=given.get(variable) or (None if is_file else ""),
            help=f"{purpose} [${variables.PREFIX}{variable}]",
        )
    for option, values, default in (
        ("format", LogFormat, LogFormat.AUTO),
        ("level", LogLevel, LogLevel.INFO),
    ):
        variable = f"LOG_{option.upper()}"
        parser.add_argument(
            f"--log-{option}",
            type=values,
            choices=list(values),
            default=given.get(variable, default),
            help=f"log {option} [${variables.PREFIX}{variable}; {default}]",
        )


def run(args: argparse.Namespace) -> int:
    """Serve until a signal; return the exit status: 0, or 2 if the file or the address cannot be used."""
    import asyncio

    from redfence_server.errors import ConfigError
    from redfence_storage.errors import DatabaseUnusable
    from redfence_storage.sqlite_store import SqliteStore

    if problem := _problem(args):
        return _print_error(problem)
    log_setup.configure(log_format=args.log_format, level=args.log_level)
    try:
        store = SqliteStore.open(args.db)
    except DatabaseUnusable as error:
        return _print_error(str(error))
    try:
        return asyncio.run(_serve(store, args))
    except ConfigError as error:
        return _print_error(str(error))


def _problem(args: argparse.Namespace) -> str | None:
    if not args.db:
        return "no database file given; set --db PATH or REDFENCE_STORAGE_DB"
    if (args.tls_cert is None) != (args.tls_key is None):
        return "--tls-cert and --tls-key belong together; give both or neither"
    if args.tls_client_ca is not None and args.tls_cert is None:
        return "--tls-client-ca needs TLS; give --tls-cert and --tls-key as well"
    return None


async def _serve(store: SqliteStore, args: argparse.Namespace) -> int:
    import asyncio

    from redfence_proto.storage.v1 import storage_pb2_grpc
    from redfence_server.access.rules import AccessSettings
    from redfence_server.access.setup import open_guard
    from redfence_server.api import serving as grpc_serving
    from redfence_server.api.health import Health
    from redfence_server.clock import SystemClock
    from redfence_server.metrics.telemetry import Telemetry
    from redfence_storage.group_commit import GroupCommit
    from redfence_storage.grpc_servicer import SERVICE_NAME, StorageServicer

    telemetry = Telemetry(
        listen=args.metrics_listen,
        logs=args.log_level == LogLevel.DEBUG,
        clock=SystemClock(),
        traces_endpoint=args.traces_endpoint,
        service="redfence-storage",
    )
    commit = GroupCommit(store)
    guard = None
    try:
        access = AccessSettings(
            policy_file=args.policy_file,
            tokens_file=args.tokens_file,
            jwt_jwks_file=args.jwt_jwks_file,
            jwt_audience=args.jwt_audience,
            jwt_issuer=args.jwt_issuer,
        )
        guard = open_guard(access, audit_log=args.audit_log, clock=SystemClock())
        certificates = grpc_serving.protection(
            args.listen,
            cert=args.tls_cert,
            key=args.tls_key,
            client_ca=args.tls_client_ca,
            insecure=args.insecure,
        )
        server: grpc.aio.Server = grpc_serving.new_server(wrap=telemetry.wrap)
        storage_pb2_grpc.add_StorageServiceServicer_to_server(StorageServicer(commit, guard=guard), server)
        health = Health([SERVICE_NAME])
        grpc_serving.add_health_and_reflection(server, health, [SERVICE_NAME])
        port = grpc_serving.bind(server, args.listen, certificates=certificates)
        health.set_serving(serving=True)
        await server.start()

        async def drain() -> None:
            health.drain()

        def reload() -> None:
            if certificates is not None:
                certificates.reload()
            if guard is not None:
                guard.reload()

        # Comes before the ready line, because its reader may send a signal at once.
        stop = grpc_serving.stop_signal()
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, reload)
        async with telemetry.serving(ready=lambda: health.serving):
            print(
                f"redfence storage ready on {args.listen.rpartition(':')[0]}:{port} (db {args.db})",
                flush=True,
            )
            await grpc_serving.run_until_signal(
                server, on_drain=drain, notice_s=_NOTICE_S, grace_s=_GRACE_S, stop=stop
            )
    finally:
        # Comes after the last answer, so that no submitted command is lost.
        await commit.close()
        await telemetry.close()
        if guard is not None:
            guard.close()
    return 0


def _print_error(problem: str) -> int:
    print(f"redfence storage: {problem}", file=sys.stderr)
    return _EXIT_UNUSABLE
