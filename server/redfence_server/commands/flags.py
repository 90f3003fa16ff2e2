"""Add a command-line flag for each setting of a server."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from redfence_server.config import ServeConfig


def add_flags(
    parser: argparse.ArgumentParser,
    *,
    names: Collection[str] | None = None,
    command_defaults: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Add one flag for each setting, or for those named; a flag that is not given sets no attribute.

    The help shows the command's defaults, as given to `config.load`.
    """
    for name, info in ServeConfig.model_fields.items():
        if names is not None and name not in names:
            continue
        value = command_defaults.get(name, info.default)
        unit = " ms" if name.endswith("_ms") else ""
        default = "" if info.is_required() or value in {None, ""} else f" (default: {value}{unit})"
        options: dict[str, Any] = {
            "dest": name,
            "default": argparse.SUPPRESS,
            "help": f"{info.description}{default}".replace("%", "%%"),
        }
        if name == "nodes":
            parser.add_argument("--node", action="append", metavar="URL", **options)
        elif info.annotation is bool:
            parser.add_argument(
                f"--{name.replace('_', '-')}", action=argparse.BooleanOptionalAction, **options
            )
        else:
            parser.add_argument(f"--{name.replace('_', '-')}", metavar=_metavar(name), **options)


def _metavar(name: str) -> str:
    if "tls_" in name:
        return "FILE"
    known = {"processes": "N", "new_resources_per_second": "N", "traces_endpoint": "URL", "audit_log": "FILE"}
    last = name.rpartition("_")[2]
    return "HOST:PORT" if last == "listen" else known.get(name, last.upper())


def given_flags(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the settings among parsed arguments."""
    return {name: value for name, value in vars(arguments).items() if name in ServeConfig.model_fields}
