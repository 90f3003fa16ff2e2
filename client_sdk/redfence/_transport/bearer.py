"""Adds a bearer token to every call, and keeps it off plaintext connections to other machines."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import TypeAlias

from redfence._errors import InvalidArgumentError, UnavailableError

Token: TypeAlias = str | Path
"""A bearer token, or the path of a file that has it."""

TOKEN_VARIABLE = "REDFENCE_BEARER_TOKEN"  # noqa: S105  (a name)
TOKEN_FILE_VARIABLE = "REDFENCE_BEARER_TOKEN_FILE"  # noqa: S105
PLAINTEXT_VARIABLE = "REDFENCE_PLAINTEXT_TOKEN"
_VISIBLE_ASCII = re.compile(r"[\x21-\x7e]+")


class BearerToken:
    """Gives the metadata entry of a token; a file is read again for each call, because tokens expire."""

    def __init__(self, token: Token) -> None:
        self._token = token
        try:
            self.entry()
        except UnavailableError as error:
            raise InvalidArgumentError(str(error), metadata={"field": "token"}) from error

    def entry(self) -> tuple[str, str]:
        """Return the entry for the next call.

        Raises:
            UnavailableError: the file cannot be read now, or has no token.
        """
        text = self._token
        if isinstance(text, Path):
            try:
                text = text.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError) as error:
                raise UnavailableError(f"cannot read the token file {self._token}: {error}") from error
        if not _VISIBLE_ASCII.fullmatch(text):
            where = f"the token file {self._token}" if isinstance(self._token, Path) else "the token"
            raise UnavailableError(f"{where} is empty, or has other characters than visible ASCII")
        return "authorization", f"Bearer {text}"


def bearer_token(
    token: Token | None, addresses: Sequence[str], *, encrypted: bool, plaintext_token: bool
) -> BearerToken | None:
    """Return the token to send: the given one, else that of the environment, else None.

    Raises:
        InvalidArgumentError: the token or its file is unusable, or the token would leave this machine in
            plaintext.
    """
    if token is None:
        named = os.environ.get(TOKEN_FILE_VARIABLE)
        token = os.environ.get(TOKEN_VARIABLE) or (Path(named) if named else None)
    if token is None:
        return None
    if not (encrypted or plaintext_token or os.environ.get(PLAINTEXT_VARIABLE) == "1"):
        for address in addresses:
            if not _is_local(address):
                raise InvalidArgumentError(
                    f"the token would go to {address} in plaintext; give TLS credentials, or allow it by "
                    f"plaintext_token=True or {PLAINTEXT_VARIABLE}=1",
                    metadata={"field": "token"},
                )
    return BearerToken(token)


def _is_local(address: str) -> bool:
    if address.startswith(("unix:", "unix-abstract:")):
        return True
    host = address.removeprefix("ipv4:").removeprefix("ipv6:").rpartition(":")[0].strip("[]")
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False
