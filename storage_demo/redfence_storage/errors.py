"""Defines the errors of the storage; `grpc_errors` translates them for callers.

StorageError
├── InvalidRequest            a field is out of bounds; nothing was changed
│   ├── InvalidResource
│   ├── InvalidFencingToken
│   ├── InvalidKey
│   ├── InvalidValue
│   └── InvalidPage
│       └── InvalidPageToken
├── StaleToken                a higher token was seen
├── KeyNotFound
├── TooManyWrites             the queue is full
├── StorageFailed             the database did not commit the batch; nothing in it was acknowledged
├── StoreClosed               the store is stopping or has stopped
└── DatabaseUnusable          the file cannot be opened
"""

# ruff: noqa: N818  (only the storage sees these names; callers catch the …Error classes of `redfence`)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar


class StorageError(Exception):
    """The base class of all expected failures of the storage.

    Attributes:
        metadata: the details of the error, with the keys that `ErrorReason` documents.
        retry_after_ms: the time after which a retry can succeed, or None.
    """

    retry_after_ms: ClassVar[int | None] = None

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.metadata = dict(metadata or {})


class InvalidRequest(StorageError):
    """A field of a request is out of bounds."""

    field: ClassVar[str]

    def __init__(self, problem: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{self.field} {problem}", metadata={"field": self.field, **(metadata or {})})


class InvalidResource(InvalidRequest):
    """The resource name is out of bounds."""

    field = "resource"


class InvalidFencingToken(InvalidRequest):
    """The fencing token is missing, zero, or 2^53 or more."""

    field = "fencing_token"


class UnfencedWithToken(InvalidFencingToken):
    """A read has a fencing token and says that it is unfenced."""

    field = "unfenced"


class InvalidKey(InvalidRequest):
    """The key is empty, too long or has a control character."""

    field = "key"


class InvalidValue(InvalidRequest):
    """The value is too long."""

    field = "value"


class InvalidPage(InvalidRequest):
    """The page size is out of bounds."""

    field = "page_size"


class InvalidPageToken(InvalidPage):
    """The page token is not one that this service returned."""

    field = "page_token"


class StaleToken(StorageError):
    """The token is lower than the highest this storage has seen for the resource."""

    def __init__(self, resource: str, *, token: int, highest_token: int) -> None:
        super().__init__(
            f"fencing token {token} is stale: the storage has seen {highest_token}; acquire the lock again",
            metadata={
                "resource": resource,
                "fencing_token": str(token),
                "highest_token": str(highest_token),
            },
        )
        self.highest_token = highest_token


class KeyNotFound(StorageError):
    """The key does not exist."""

    def __init__(self, resource: str, *, key: str) -> None:
        # The metadata has the names, so the message does not repeat them. gRPC sends the message twice, once
        # percent-encoded. With the longest names it would approach a client's limit of 8 KiB.
        super().__init__("the resource has no such key", metadata={"resource": resource, "key": key})


class TooManyWrites(StorageError):
    """The queue of unanswered commands is full."""

    retry_after_ms = 100

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} commands are queued already; retry later", metadata={"limit": str(limit)})


class StorageFailed(StorageError):
    """The database did not commit the batch; nothing in it was acknowledged."""

    retry_after_ms = 1_000


class StoreClosed(StorageError):
    """The store is stopping and accepts no more commands."""

    # After this time another process may serve the file.
    retry_after_ms = 1_000

    def __init__(self) -> None:
        super().__init__("the storage is stopping; retry later")


class DatabaseUnusable(StorageError):
    """The database file cannot be opened; the message has its path and the reason."""

    def __init__(self, path: Path, *, problem: str) -> None:
        super().__init__(f"cannot use {path}: {problem}")
