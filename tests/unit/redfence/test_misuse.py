"""A wrong use of a client is an error or a warning that says what to do instead."""

from __future__ import annotations

import asyncio
import functools
import os
import re
import socket
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import redfence
from redfence.testing import FakeLockServer


@pytest.mark.parametrize("kind", [redfence.Client, redfence.AsyncClient])
@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"Authorization": "x"}, "metadata key 'Authorization' has characters other than"),
        ({"authorization": b"x"}, "value of 'authorization' must be a string, not bytes"),
        ({"trace-bin": "x"}, "value of 'trace-bin' must be bytes, not str"),
        (["authorization"], "entry 'authorization' is not a pair"),
        ({"authorization": "x" * 8000}, "metadata has 8045 bytes; at most 7168 are allowed"),
    ],
)
def test_malformed_metadata_is_refused_when_the_client_is_made(
    kind: Any, metadata: Any, problem: str
) -> None:
    with pytest.raises(redfence.InvalidArgumentError, match=problem):
        kind("a:1", metadata=metadata)
    kind("a:1", metadata={"authorization": "x", "trace-bin": b"x"})
    kind("a:1", metadata=[("authorization", "x")])


@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_client_of_asyncio_belongs_to_one_event_loop() -> None:
    with FakeLockServer() as fake:
        client = fake.async_client()
        asyncio.run(client.cluster_status())
        with pytest.raises(RuntimeError, match="belongs to another event loop"):
            asyncio.run(client.cluster_status())
        asyncio.run(client.close())


@pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")
def test_a_client_of_asyncio_without_a_loop_says_what_it_needs() -> None:
    with FakeLockServer() as fake:
        client = fake.async_client()
        with pytest.raises(RuntimeError, match=r"needs a running asyncio event loop.* use redfence\.Client"):
            client.acquire("r", ttl=10).send(None)


@pytest.mark.parametrize("kind", [redfence.Client, redfence.AsyncClient])
def test_a_client_without_addresses_reads_the_environment(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("REDFENCE_SERVER", raising=False)
    with pytest.raises(redfence.InvalidArgumentError, match=r"pass at least one, .* or set REDFENCE_SERVER"):
        kind()
    monkeypatch.setenv("REDFENCE_SERVER", "a:1, http://b")
    with pytest.raises(redfence.InvalidArgumentError, match=r"http://b"):
        kind()
    monkeypatch.setenv("REDFENCE_SERVER", "a:1, b:2,")
    kind()


def test_check_token_takes_a_lease_or_a_name_with_a_token() -> None:
    with FakeLockServer() as fake, fake.client() as client, client.lock("r", ttl=60) as lease:
        assert client.check_token(lease).live
        assert client.check_token("r", lease.token).live
        with pytest.raises(
            redfence.InvalidArgumentError, match=r"^token is missing; pass it after the name 'r'"
        ):
            client.check_token("r")
        with pytest.raises(redfence.InvalidArgumentError, match=r"^token must be left out"):
            client.check_token(lease, 1)


async def test_the_holder_of_a_lock_is_the_user_the_host_and_the_process_unless_set() -> None:
    with FakeLockServer() as fake, fake.client() as client:
        async with fake.async_client() as asynchronous, asynchronous.lock("r", ttl=60):
            label = fake.holder("r")
        assert re.fullmatch(rf"[^@]+@{re.escape(socket.gethostname())}/{os.getpid()}", label or "")
        with client.lock("r", ttl=60):
            assert fake.holder("r") == label
        with client.lock("r", ttl=60, holder=""):
            assert fake.holder("r") == ""
    with pytest.raises(redfence.InvalidArgumentError, match=r"^holder "):
        redfence.Client("a:1", holder="x" * 257)


def test_a_lock_made_before_a_fork_has_the_label_of_the_process_that_enters_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with FakeLockServer() as fake:
        lock = fake.client().lock("r", ttl=60)
        monkeypatch.setattr(os, "getpid", lambda: 4711)
        with lock:
            assert (fake.holder("r") or "").endswith("/4711")


async def test_a_lock_that_another_task_uses_warns(caplog: pytest.LogCaptureFixture) -> None:
    with FakeLockServer() as fake:
        async with fake.async_client() as client:
            left = client.lock("left", ttl=60)
            await asyncio.create_task(left.__aenter__())
            await left.__aexit__(None, None, None)
            assert "lock_left_in_another_task resource='left'" in caplog.text
            lost = client.lock("lost", ttl=1)
            lease = await asyncio.create_task(lost.__aenter__())
            fake.take_away("lost")
            assert await lease.lost.wait()
            assert "body_not_cancelled resource='lost'" in caplog.text
            with pytest.raises(redfence.LeaseLostError):
                await lost.__aexit__(None, None, None)


class _AsyncCallable:
    async def __call__(self) -> None: ...


async def _task() -> None: ...


async def _stream() -> AsyncIterator[int]:
    yield 1


def _function() -> None: ...


def _generator() -> Iterator[int]:
    yield 1


@pytest.mark.parametrize("use", ["decorate", "try_run"])
@pytest.mark.parametrize(
    ("kind", "function", "problem"),
    [
        ("threads", _task, "is an async function, which Client cannot await"),
        ("threads", functools.partial(_task), "is an async function"),
        ("threads", _AsyncCallable(), "is an async function"),
        ("threads", _generator, "is a generator"),
        ("threads", _stream, "is a generator"),
        ("threads", 7, "is not callable"),
        ("asyncio", _function, "is not an async function"),
        ("asyncio", _generator, "is a generator"),
        ("asyncio", _stream, "is a generator"),
    ],
)
async def test_a_function_whose_body_would_run_outside_its_lock_is_refused(
    kind: str, function: Any, problem: str, use: str
) -> None:
    with FakeLockServer() as fake:
        async with fake.async_client() as waking:
            client: Any = waking if kind == "asyncio" else fake.client()

            async def attempt() -> None:
                if use == "decorate":
                    client.lock("r", ttl=10)(function)
                elif kind == "asyncio":
                    await client.try_run("r", function, ttl=10)
                else:
                    client.try_run("r", function, ttl=10)

            with pytest.raises(TypeError, match=problem):
                await attempt()
