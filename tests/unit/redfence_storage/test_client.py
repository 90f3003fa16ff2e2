"""The two clients side by side."""

from __future__ import annotations

import inspect

from redfence_storage.client import AsyncStorageClient, StorageClient


def test_both_clients_have_the_same_methods_with_the_same_signatures() -> None:
    signatures = [
        {
            name: inspect.signature(method)
            for name, method in vars(client).items()
            if inspect.isfunction(method) and not name.startswith("_")
        }
        for client in (AsyncStorageClient, StorageClient)
    ]
    assert list(signatures[0].items()) == list(signatures[1].items())
    assert list(signatures[0]) == ["close", "put", "get", "delete", "fence", "list_keys"]
