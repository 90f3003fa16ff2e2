"""The data that the demo protects: one balance, in the storage that checks tokens, or in a file that does not."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from redfence import NotFoundError
from redfence_storage.client import StorageClient

OPENING_BALANCE = 100
_KEY = "balance"


class Account(Protocol):
    """A balance that is read, changed and written back: three steps, so two writers lose one change."""

    def read(self, token: int) -> int:
        """Return the balance, read under the lease with this token."""
        ...

    def write(self, balance: int, token: int) -> None:
        """Set the balance under the lease with this token."""
        ...


class FencedAccount:
    """The balance in the storage demo, which refuses a token lower than the highest it has seen."""

    def __init__(self, storage: StorageClient, resource: str) -> None:
        self._storage = storage
        self._resource = resource

    def read(self, token: int) -> int:
        """Return the balance; from now on lower tokens are shut out."""
        try:
            return int(self._storage.get(self._resource, key=_KEY, token=token).value)
        except NotFoundError:
            return OPENING_BALANCE

    def write(self, balance: int, token: int) -> None:
        """Set the balance.

        Raises:
            StaleTokenError: a higher token was seen; nothing was changed.
        """
        self._storage.put(self._resource, key=_KEY, value=str(balance).encode(), token=token)


class PlainAccount:
    """The balance in a file, which takes whatever is written to it."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, token: int) -> int:
        """Return the balance; the token means nothing to a file."""
        del token
        return int(self._path.read_text()) if self._path.exists() else OPENING_BALANCE

    def write(self, balance: int, token: int) -> None:
        """Set the balance; the token means nothing to a file."""
        del token
        self._path.write_text(f"{balance}\n")
