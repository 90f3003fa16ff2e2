"""Recognise static bearer tokens. The file has only their SHA-256, so that a copy of it lets nobody in.

A token must be unguessable (`redfence policy new-token` makes one of 256 bits), because a plain hash does not
slow down guesses.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from redfence_server.access.operator_file import problems, read_toml
from redfence_server.access.principal import Identity, Kind, Principal, name_problem
from redfence_server.errors import ConfigError


class _Token(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    name: str
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if problem := name_problem(name):
            raise ValueError(problem)
        return name


class _File(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)

    tokens: tuple[_Token, ...]


class StaticTokens:
    """The tokens that an operator has issued. One name may have several, so that a token can be replaced."""

    def __init__(self, identities: Mapping[bytes, Identity]) -> None:
        self._identities = tuple(identities.items())

    def identify(self, digest: bytes) -> Identity | None:
        """Return the identity of the token with this SHA-256, or None; takes as long for each token."""
        found = None
        for known, identity in self._identities:
            if hmac.compare_digest(known, digest):
                found = identity
        return found


def digest_of(token: str) -> bytes:
    """Return the SHA-256 of a token."""
    return hashlib.sha256(token.encode()).digest()


def load_tokens(path: Path) -> StaticTokens:
    """Return the tokens of the file.

    Raises:
        ConfigError: the file cannot be read, or is wrong; the message names each wrong token and field.
    """
    content = read_toml(path, setting="tokens_file")
    try:
        tokens = _File.model_validate(content).tokens
    except ValidationError as error:
        raise ConfigError(f"tokens_file: {path}: {problems(error, entry='token')}") from error
    identities: dict[bytes, Identity] = {}
    for number, token in enumerate(tokens, start=1):
        digest = bytes.fromhex(token.sha256)
        identity = Identity(Principal(Kind.TOKEN, token.name))
        if identities.setdefault(digest, identity) != identity:
            raise ConfigError(f"tokens_file: {path}: token {number}: sha256: another name has the same token")
    return StaticTokens(identities)
