"""The fenced store in a few dictionaries, written apart from the real one, for comparison."""

from __future__ import annotations

from typing import Any

from redfence_storage import store
from redfence_storage.errors import StaleToken


class StorageModel:
    def __init__(self) -> None:
        self.highest: dict[str, int] = {}
        self.values: dict[tuple[str, str], store.StoredValue] = {}

    def carry_out(self, command: store.Command[Any]) -> object:
        """Return the result, or ("stale", highest token) where the command must be refused."""
        assert isinstance(command, store.Put | store.Get | store.Delete | store.Fence | store.ListKeys)
        name = command.resource
        seen = self.highest.get(name, 0)
        token = getattr(command, "token", None)
        if token is not None:
            if token < seen:
                return ("stale", seen)
            seen = self.highest[name] = token
        match command:
            case store.Put():
                self.values[name, command.key] = store.StoredValue(command.value, command.token)
                return store.Accepted(seen)
            case store.Get():
                return store.Reading(self.values.get((name, command.key)), seen)
            case store.Delete():
                return store.Removal(self.values.pop((name, command.key), None) is not None, seen)
            case store.Fence():
                return store.Accepted(seen)
            case store.ListKeys():
                keys = sorted(key for owner, key in self.values if owner == name and key > command.after_key)
                page = tuple(keys[: command.keys_max])
                return store.KeyPage(page, more=len(keys) > len(page), highest_token=seen)


def comparable(outcome: object) -> object:
    return ("stale", outcome.highest_token) if isinstance(outcome, StaleToken) else outcome
