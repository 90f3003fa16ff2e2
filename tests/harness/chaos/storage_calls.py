"""Records fenced reads and appends; no client looks at the clock before a write."""

from __future__ import annotations

from harness.chaos.recorder import Call, Recorder
from harness.history.records import Kind, Outcome
from redfence import NotFoundError, OverloadedError, RedfenceError, StaleTokenError
from redfence_storage.client import AsyncStorageClient

KEY = "entries"
_SEPARATOR = " "


class StorageCalls:
    """Calls the storage for one client."""

    def __init__(self, address: str, *, recorder: Recorder) -> None:
        # After a longer stop the storage has lost nothing, so the outcome is unknown.
        self._client = AsyncStorageClient(address, timeout=3.0)
        self._recorder = recorder
        self._entries = 0

    async def close(self) -> None:
        """End the connection."""
        await self._client.close()

    async def read(self, resource: str, lease: str, token: int) -> tuple[str, ...] | None:
        """Return the list, or None if it could not be read; the storage then refuses lower tokens."""
        with self._recorder.call(Kind.READ, resource, lease, token=token) as call:
            try:
                value = (await self._client.get(resource, key=KEY, token=token)).value
            except NotFoundError:
                value = b""
            except RedfenceError as error:
                _conclude(call, error)
                return None
            call.ok()
            return entries(value)

    async def append(self, resource: str, lease: str, token: int, before: tuple[str, ...]) -> Outcome:
        """Write the list that was read, with one entry more."""
        self._entries += 1
        entry = f"{self._recorder.client}-{self._entries}"
        with self._recorder.call(Kind.APPEND, resource, lease, token=token, entry=entry) as call:
            try:
                await self._client.put(resource, key=KEY, value=written((*before, entry)), token=token)
            except RedfenceError as error:
                _conclude(call, error)
            else:
                call.ok()
            return call.outcome


async def kept(address: str, resource: str) -> tuple[str, ...]:
    """Return the list of a resource by a read without a token."""
    async with AsyncStorageClient(address, timeout=10.0) as client:
        try:
            return entries((await client.get(resource, key=KEY, unfenced=True)).value)
        except NotFoundError:
            return ()


def entries(value: bytes) -> tuple[str, ...]:
    """Return the list that is kept as these bytes."""
    return tuple(value.decode("ascii").split())


def written(each: tuple[str, ...]) -> bytes:
    """Return the bytes that keep a list."""
    return _SEPARATOR.join(each).encode("ascii")


def _conclude(call: Call, error: RedfenceError) -> None:
    name = error.error_reason or type(error).__name__
    if isinstance(error, StaleTokenError):
        call.failed(name, stale=True)
    elif isinstance(error, OverloadedError) and error.error_reason:
        call.failed(name, admission_refused=True)
    else:
        call.unknown(name)
