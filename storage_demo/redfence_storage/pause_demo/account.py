"""Keeps the demo's balance, either in the storage that checks tokens or in a file that does not."""

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
        """Return the balance, using this fencing token."""
        ...

    def write(self, balance: int, token: int) -> None:
        """Set the balance, using this fencing token."""
        ...


class FencedAccount:
    """Keeps the balance in the storage demo, which refuses a token lower than the highest it has seen."""

    def __init__(self, storage: StorageClient, resource: str) -> None:
        self._storage = storage
        self._resource = resource

    def read(self, token: int) -> int:
        """Return the balance; the storage refuses lower tokens from now on."""
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
    """Keeps the balance in a file, which accepts every write."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def read(self, token: int) -> int:
        """Return the balance; a file cannot check the token."""
        del token
        return int(self._path.read_text()) if self._path.exists() else OPENING_BALANCE

    def write(self, balance: int, token: int) -> None:
        """Set the balance; a file cannot check the token."""
        del token
        self._path.write_text(f"{balance}\n")
