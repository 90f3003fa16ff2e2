"""Read the files that an operator writes for access; an error names the setting, the file and the place."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from redfence_server.errors import ConfigError


def read_text(path: Path, *, setting: str) -> str:
    """Return the text of a file.

    Raises:
        ConfigError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{setting}: cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not UTF-8: {error}") from error


def read_toml(path: Path, *, setting: str) -> dict[str, Any]:
    """Return the content of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is not TOML.
    """
    try:
        return tomllib.loads(read_text(path, setting=setting))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{setting}: {path} is not TOML: {error}") from error


def problems(error: ValidationError, *, entry: str) -> str:
    """Return every problem of a file with a list of entries, e.g. "rule 2: verbs: …"; never a value."""
    return "; ".join(
        f"{_place(each['loc'], entry)}: {each['msg'].removeprefix('Value error, ')}"
        for each in error.errors()
    )


def _place(location: tuple[str | int, ...], entry: str) -> str:
    match location:
        case (_, int(index), *fields):
            names = ".".join(str(field) for field in fields)
            return f"{entry} {index + 1}" + (f": {names}" if names else "")
        case _:
            return ".".join(map(str, location))
