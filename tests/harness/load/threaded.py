"""The client for threads behind the face of the client for asyncio, so that one test runs on both."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import redfence


class Threaded:
    """The client for threads, or a part of it, with awaitable methods: each runs in a thread of its own."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self.inner, name)
        if name in {"acquire", "release", "get_lock", "check_token", "cluster_status", "close", "try_run"}:
            return lambda *args, **more: self._in_thread(value, *args, **more)
        return Threaded(value) if name == "lost" else value

    async def _in_thread(self, method: Callable[..., Any], *args: Any, **more: Any) -> Any:
        result = await asyncio.to_thread(method, *args, **more)
        return Threaded(result) if isinstance(result, redfence.Lease) else result

    async def wait(self) -> bool:
        return bool(await asyncio.to_thread(self.inner.wait))

    @asynccontextmanager
    async def lock(self, *args: Any, **more: Any) -> AsyncIterator[Any]:
        lock = self.inner.lock(*args, **more)
        lease = await asyncio.to_thread(lock.__enter__)
        try:
            yield Threaded(lease)
        except BaseException as error:
            await asyncio.to_thread(lock.__exit__, type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(lock.__exit__, None, None, None)
