"""How the server commands start: shared flags, the settings, and one line if a command cannot start."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Collection
from functools import wraps
from pathlib import Path

import structlog

from redfence_proto import bounds, durations
from redfence_server import config, log_setup
from redfence_server.commands import flags
from redfence_server.errors import ConfigError, StartupError

EXIT_NOT_DONE = 2

_AUTO = "auto"

EPILOG = (
    "$REDFENCE_NODES or the file may also name the nodes, which keeps passwords out of the process list. "
    "Their order sets their indices in the cluster."
)


_NODE_TLS = ("node_tls_ca", "node_tls_cert", "node_tls_key")


def explain_refusal(run: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """Let a command that raises a StartupError print it in one line and return `EXIT_NOT_DONE`."""

    @wraps(run)
    def explaining(arguments: argparse.Namespace) -> int:
        try:
            return run(arguments)
        except StartupError as error:
            sys.stderr.write(f"redfence {arguments.command_name}: {error}\n")
            return EXIT_NOT_DONE

    return explaining


def add_node_flags(parser: argparse.ArgumentParser, *, also: Collection[str] = ()) -> None:
    """Add the flags that name the nodes and how to reach them, and the settings named `also`."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="a TOML file with the settings of `serve`"
    )
    flags.add_flags(parser, names={"nodes", "key_prefix", "dial_timeout_ms", *_NODE_TLS, *also})


def settings_of(arguments: argparse.Namespace) -> config.ServeConfig:
    """Return the settings, and configure the log by them.

    Raises:
        ConfigError: a value is wrong or a setting unknown.
    """
    settings = config.load(flags.given_flags(arguments), config_file=arguments.config)
    log_setup.configure(log_format=settings.log_format, level=settings.log_level)
    return settings


def settings_now(arguments: argparse.Namespace, began_with: config.ServeConfig) -> config.ServeConfig | None:
    """Return the settings as the file and the environment have them now; None if they are wrong.

    This process takes over the log level. The log says what is wrong, and which settings have changed that
    need a restart. The level debug counts at once, but not for the events of requests.
    """
    try:
        now = config.load(flags.given_flags(arguments), config_file=arguments.config)
    except ConfigError as error:
        structlog.get_logger().error(
            "settings_not_reloaded", problem=str(error), consequence="the earlier settings stay in force"
        )
        return None
    log_setup.set_level(now.log_level)
    fixed = type(now).model_fields.keys() - config.RELOADABLE
    if now.log_level is log_setup.LogLevel.DEBUG:
        # The events `request` need wrapped handlers, which cost time. The server makes them at its start.
        fixed |= {"log_level"}
    if changed := sorted(name for name in fixed if getattr(now, name) != getattr(began_with, name)):
        consequence = "their earlier values stay in force"
        if "log_level" in changed:
            consequence += "; only log_level counts now, but requests are not logged"
        structlog.get_logger().warning("settings_need_restart", settings=changed, consequence=consequence)
    return now


def add_max_ttl_flag(parser: argparse.ArgumentParser, *, default_ms: int | None, purpose: str) -> None:
    """Add `--max-ttl`; `ttl_ms_max_of` reads it."""
    parser.add_argument(
        "--max-ttl", type=durations.milliseconds, default=default_ms, metavar="DURATION", help=purpose
    )


def add_floor_flag(parser: argparse.ArgumentParser, *, required: bool, purpose: str) -> None:
    """Add `--floor N|auto` with the attribute `floor`: the number, or None for auto; absent if not given."""
    parser.add_argument(
        "--floor",
        type=_floor,
        required=required,
        default=argparse.SUPPRESS,
        metavar=f"N|{_AUTO}",
        help=f"{purpose} no less than the highest token that any storage has seen; or {_AUTO}: above the "
        "microseconds since 1970, which tokens do not reach. Set this machine's clock first",
    )


def _floor(text: str) -> int | None:
    if text == _AUTO:
        return None
    if not text.isascii() or not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor {_AUTO}")
    return int(text)


def ttl_ms_max_of(arguments: argparse.Namespace) -> int | None:
    """Return the value of `--max-ttl`, or None.

    Raises:
        ConfigError: it is out of bounds.
    """
    ttl_ms_max: int | None = arguments.max_ttl
    if ttl_ms_max is not None and not bounds.TTL_MS_MIN <= ttl_ms_max <= bounds.TTL_MS_MAX_MOST:
        raise ConfigError(
            f"max_ttl: it must be from {bounds.TTL_MS_MIN} ms to {bounds.TTL_MS_MAX_MOST // 86_400_000} days"
        )
    return ttl_ms_max
