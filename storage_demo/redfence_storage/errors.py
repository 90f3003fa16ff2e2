"""What can go wrong in the storage, in its own terms; `grpc_errors` says what a caller is told.

StorageError
├── InvalidRequest            a field breaks its bounds; nothing was changed
│   ├── InvalidResource
│   ├── InvalidFencingToken
│   ├── InvalidKey
│   ├── InvalidValue
│   └── InvalidPage
│       └── InvalidPageToken
├── StaleToken                a higher token was seen before
├── KeyNotFound
├── TooManyWrites             the queue is full
├── StorageFailed             the database did not take the batch; nothing of it was acknowledged
├── StoreClosed               the store is stopping or was stopped
└── DatabaseUnusable          the file cannot be served; only while opening
"""

# ruff: noqa: N818  (what callers catch, in `redfence`, is named …Error; these are the storage's own words)

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar


class StorageError(Exception):
    """Every expected failure of the storage.

    Attributes:
        metadata: the facts behind the message, keyed as `ErrorReason` documents them.
        retry_after_ms: when set, trying again no sooner than this can help.
    """

    retry_after_ms: ClassVar[int | None] = None

    def __init__(self, message: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.metadata = dict(metadata or {})


class InvalidRequest(StorageError):
    """A field of a request breaks its bounds."""

    field: ClassVar[str]

    def __init__(self, problem: str, *, metadata: Mapping[str, str] | None = None) -> None:
        super().__init__(f"{self.field} {problem}", metadata={"field": self.field, **(metadata or {})})


class InvalidResource(InvalidRequest):
    """The resource name breaks its bounds."""

    field = "resource"


class InvalidFencingToken(InvalidRequest):
    """The fencing token is zero or 2^53 or more."""

    field = "fencing_token"


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
    """The page token was not made by this service."""

    field = "page_token"


class StaleToken(StorageError):
    """The token is lower than the highest this storage has seen for the resource."""

    def __init__(self, resource: str, *, token: int, highest_token: int) -> None:
        super().__init__(
            f"fencing token {token} is stale: {highest_token} was seen before",
            metadata={
                "resource": resource,
                "fencing_token": str(token),
                "highest_token": str(highest_token),
            },
        )
        self.highest_token = highest_token


class KeyNotFound(StorageError):
    """There is no such key."""

    def __init__(self, resource: str, *, key: str) -> None:
        # The names are in the metadata. Repeated in the message, which travels percent-encoded and again in the
        # details, the longest would come near the 8 KiB that a client takes as metadata.
        super().__init__("the resource has no such key", metadata={"resource": resource, "key": key})


class TooManyWrites(StorageError):
    """As many commands as the queue may hold are unanswered."""

    retry_after_ms = 100

    def __init__(self, limit: int) -> None:
        super().__init__(f"{limit} commands are queued already", metadata={"limit": str(limit)})


class StorageFailed(StorageError):
    """The database did not take the batch; nothing of it was acknowledged."""

    retry_after_ms = 1_000


class StoreClosed(StorageError):
    """The store takes no more commands."""

    # By then another process may serve the file.
    retry_after_ms = 1_000

    def __init__(self) -> None:
        super().__init__("the storage is stopping")


class DatabaseUnusable(StorageError):
    """The database file cannot be served; the message says which and why."""

    def __init__(self, path: Path, *, problem: str) -> None:
        super().__init__(f"cannot use {path}: {problem}")
