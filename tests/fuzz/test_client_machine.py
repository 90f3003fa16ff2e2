"""Random walks of both clients over a real server, storage and three real nodes, beside a small model."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import redfence
from harness.fuzz.settings import factor, tried
from harness.fuzz.site import NODE_COUNT, FuzzSite
from harness.processes.servers import acquire_request, new_lease_id
from redfence_proto.bounds import FENCING_TOKEN_MAX
from redfence_proto.v1 import lock_pb2
from redfence_server.redis_io.scripts import Keyspace
from redfence_storage.client import StorageClient

QUORUM = NODE_COUNT // 2 + 1
KEYS = Keyspace()
# No lease of a walk ends by itself, nor is it renewed by itself: time does nothing here.
TTL_S = 120.0
# Whatever is waited for comes at once; this is for a machine that stands still.
CALL_TIMEOUT_S = 60.0
RESOURCES = st.sampled_from(["one", "two"])
STORAGE_KEYS = st.sampled_from(["k", "l"])
PLACES = st.integers(0, NODE_COUNT - 1)

LeaseOf = redfence.Lease | redfence.AsyncLease


class CallLoop:
    """Runs the calls of both clients, within `with`: an event loop in a thread of its own."""

    def __enter__(self) -> Self:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CALL_TIMEOUT_S)
        assert not self._thread.is_alive()
        self._loop.close()

    def begin(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Future[Any]:
        """Call a method of either client, the blocking one in a thread; return its result-to-be."""

        async def call() -> Any:
            if inspect.iscoroutinefunction(method):
                return await method(*arguments, **options)
            return await asyncio.to_thread(method, *arguments, **options)

        return asyncio.run_coroutine_threadsafe(call(), self._loop)

    def call(self, method: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return self.begin(method, *arguments, **options).result(CALL_TIMEOUT_S)


@dataclass(frozen=True, slots=True)
class World:
    """What the walks of this module share."""

    site: FuzzSite
    clients: tuple[redfence.AsyncClient, redfence.Client]
    loop: CallLoop
    storage: StorageClient
    numbers: Iterator[int] = field(default_factory=itertools.count)
    seen: Counter[str] = field(default_factory=Counter)


@contextmanager
def world_at(site: FuzzSite) -> Iterator[World]:
    with CallLoop() as loop:
        waking = redfence.AsyncClient(site.server_address)
        with redfence.Client(site.server_address) as blocking, StorageClient(site.storage_address) as storage:
            yield World(site, (waking, blocking), loop, storage)
            loop.call(waking.close)


@dataclass(eq=False, slots=True)
class Held:
    """A lease that was granted in this walk, held or not any more."""

    lease: LeaseOf
    holder: str
    released: bool = False

    @property
    def secret(self) -> str:
        return self.lease._core.lease_id


@dataclass(slots=True)
class Resource:
    """What the model knows of one resource.

    Attributes:
        on_nodes: which lease each node holds.
        leases: all there ever were.
        highest: what the storage has seen.
        values: what the storage keeps.
    """

    name: str
    on_nodes: list[Held | None] = field(default_factory=lambda: [None] * NODE_COUNT)
    leases: list[Held] = field(default_factory=list)
    highest: int = 0
    values: dict[str, tuple[bytes, int]] = field(default_factory=dict)

    def nodes_of(self, lease: Held | None) -> list[int]:
        """Return which nodes hold the lease; with None, which are free."""
        return [place for place, held in enumerate(self.on_nodes) if held is lease]

    @property
    def holder(self) -> Held | None:
        """The lease that a quorum of nodes holds."""
        return next((each for each in self.on_nodes if each and len(self.nodes_of(each)) >= QUORUM), None)

    def grant(self, lease: Held) -> None:
        """The free nodes hold it from now on; there is a quorum of them."""
        free = self.nodes_of(None)
        assert len(free) >= QUORUM, f"{lease.holder} was granted, and {self.on_nodes} were held"
        assert 0 < lease.lease.token <= FENCING_TOKEN_MAX
        assert all(lease.lease.token > other.lease.token for other in self.leases), "a token did not rise"
        for place in free:
            self.on_nodes[place] = lease
        self.leases.append(lease)

    def end(self, lease: Held) -> None:
        self.on_nodes = [None if held is lease else held for held in self.on_nodes]


class Walk(RuleBasedStateMachine):
    """One walk; each has resources of its own."""

    world: World

    def __init__(self) -> None:
        super().__init__()
        number = next(self.world.numbers)
        self.resources = {name: Resource(f"walk/{number}/{name}") for name in ("one", "two")}
        self.holders = itertools.count()

    def _seen(self, what: str) -> None:
        self.world.seen[what] += 1

    def _lease_of(self, data: st.DataObject, resource: Resource) -> Held:
        holder = [resource.holder] if resource.holder else []
        lost = [held for held in resource.leases if not held.released and held not in holder]
        return data.draw(st.sampled_from([*holder, *lost, *holder, *resource.leases]), label="lease")

    def _token(self, data: st.DataObject, resource: Resource) -> int:
        tokens = [held.lease.token for held in resource.leases]
        return data.draw(
            st.sampled_from([*tokens, 1, FENCING_TOKEN_MAX]) if tokens else st.just(1), label="token"
        )

    # --- the lock

    @rule(name=RESOURCES, which=st.integers(0, 1), wait=st.sampled_from([0, 0.02]))
    def acquire(self, name: str, which: int, wait: float) -> None:
        resource, client = self.resources[name], self.world.clients[which]
        if len(resource.nodes_of(None)) >= QUORUM:
            self._grant(resource, client, wait)
            return
        acquire = partial(self.world.loop.call, client.acquire, resource.name, ttl=TTL_S, wait=wait)
        refusal = redfence.AcquireTimeoutError if wait else redfence.LockHeldError
        with pytest.raises(refusal) as caught:
            acquire()
        if caught.value.token is not None and resource.holder:
            # A quorum of answers may have as much of what is left of another lease.
            assert caught.value.holder in {held.holder for held in resource.on_nodes if held}
        self._seen(refusal.__name__)

    def _grant(self, resource: Resource, client: redfence.AsyncClient | redfence.Client, wait: float) -> Held:
        holder = f"holder {next(self.holders)}"
        lease = self.world.loop.call(client.acquire, resource.name, ttl=TTL_S, wait=wait, holder=holder)
        held = Held(lease, holder)
        resource.grant(held)
        lease.raise_if_lost()
        self._seen("granted")
        return held

    def _holder_or_granted(
        self, resource: Resource, client: redfence.AsyncClient | redfence.Client
    ) -> Held | None:
        """Return the holder; acquire a free lock first, as few walks get so far otherwise."""
        is_free = len(resource.nodes_of(None)) == NODE_COUNT
        return self._grant(resource, client, wait=0) if is_free else resource.holder

    @rule(name=RESOURCES, data=st.data())
    @precondition(lambda self: any(each.leases for each in self.resources.values()))
    def release(self, name: str, data: st.DataObject) -> None:
        resource = self.resources[name]
        if not resource.leases:
            return
        held = self._lease_of(data, resource)
        was_held = not held.released and held is resource.holder
        released = self.world.loop.call(held.lease.release)
        # A quorum of answers may have a node that is left of a lost lease, or not.
        assert released is was_held or (released and not held.released and resource.nodes_of(held))
        with pytest.raises(redfence.LeaseLostError):
            held.lease.raise_if_lost()
        resource.end(held)
        self._seen("released" if was_held else "released again" if held.released else "released too late")
        held.released = True

    @rule(name=RESOURCES)
    def release_by_a_stranger(self, name: str) -> None:
        """A lease id that was never granted ends nothing."""
        with self.world.site.stub() as stub:
            request = lock_pb2.ReleaseRequest(resource=self.resources[name].name, lease_id=new_lease_id())
            assert stub.Release(request, timeout=CALL_TIMEOUT_S).outcome == lock_pb2.RELEASE_OUTCOME_NOT_HELD

    @rule(name=RESOURCES)
    def acquire_again_with_the_same_lease_id(self, name: str) -> None:
        """A retry is answered the same token."""
        resource = self.resources[name]
        held = resource.holder
        if held is None or len(resource.nodes_of(held)) < NODE_COUNT:
            return
        request = acquire_request(
            resource.name, ttl_ms=int(TTL_S * 1000), lease_id=held.secret, holder=held.holder
        )
        with self.world.site.stub() as stub:
            response = stub.Acquire(request, timeout=CALL_TIMEOUT_S)
        assert response.outcome == lock_pb2.ACQUIRE_OUTCOME_GRANTED
        assert response.lease.fencing_token == held.lease.token
        self._seen("retried")

    @rule(name=RESOURCES, data=st.data())
    def renew(self, name: str, data: st.DataObject) -> None:
        """A renewal is ACTIVE exactly if a quorum holds the lease; another lease id renews nothing."""
        resource = self.resources[name]
        holder = self._holder_or_granted(resource, self.world.clients[0])
        held = data.draw(st.sampled_from([holder, None, holder, *resource.leases]), label="lease")
        renewal = lock_pb2.KeepAliveRequest(
            resource=resource.name, lease_id=held.secret if held else new_lease_id(), sequence=7
        )
        with self.world.site.stub() as stub:
            (answer,) = stub.KeepAlive(iter([renewal]), timeout=CALL_TIMEOUT_S)
        lives = held is not None and held is resource.holder
        assert answer.state == (lock_pb2.LEASE_STATE_ACTIVE if lives else lock_pb2.LEASE_STATE_LOST), answer
        assert answer.sequence == 7
        if lives and held is not None:
            assert answer.fencing_token in {0, held.lease.token}
        self._seen("renewed" if lives else "renewed too late")

    @rule(name=RESOURCES, data=st.data())
    def check_token(self, name: str, data: st.DataObject) -> None:
        """LIVE if and only if it is the token of the lease that holds."""
        resource = self.resources[name]
        client = self.world.clients[data.draw(st.integers(0, 1), label="client")]
        token = self._token(data, resource)
        present = resource.holder
        try:
            report = self.world.loop.call(client.check_token, resource.name, token)
        except redfence.UnavailableError:
            # The nodes that are left of the lease need not stand at one number.
            assert 0 < len(resource.nodes_of(present)) < NODE_COUNT
            return
        if present is None or len(resource.nodes_of(present)) == NODE_COUNT or token != present.lease.token:
            assert report.live is (present is not None and token == present.lease.token)
        self._seen("live" if report.live else "not live")

    @rule(name=RESOURCES, which=st.integers(0, 1), count=st.integers(1, 2))
    def wait_for_a_release(self, name: str, which: int, count: int) -> None:
        """A release grants the first waiter."""
        resource, client = self.resources[name], self.world.clients[which]
        held = self._holder_or_granted(resource, client)
        if held is None or held.released or len(resource.nodes_of(held)) < NODE_COUNT:
            return
        waiting: list[tuple[str, Future[LeaseOf]]] = []
        for number in range(1, count + 1):
            holder = f"holder {next(self.holders)}"
            answer = self.world.loop.begin(
                client.acquire, resource.name, ttl=TTL_S, wait=CALL_TIMEOUT_S, holder=holder
            )
            waiting.append((holder, answer))
            self._until_waiting(resource, number)
        for holder, answer in waiting:
            assert not answer.done(), "granted while another lease was held"
            assert self.world.loop.call(held.lease.release)
            held.released = True
            resource.end(held)
            held = Held(answer.result(CALL_TIMEOUT_S), holder)
            resource.grant(held)
        self._seen("handed over")

    def _until_waiting(self, resource: Resource, count: int) -> None:
        for _ in range(10_000):
            if self.world.clients[1].get_lock(resource.name).waiters == count:
                return
        raise AssertionError(f"{count} acquires never waited for {resource.name}")

    @rule(name=RESOURCES, place=PLACES, all_of_them=st.booleans())
    @precondition(lambda self: any(each.leases for each in self.resources.values()))
    def expire(self, name: str, place: int, all_of_them: bool) -> None:  # noqa: FBT001  (drawn)
        """A hold ends on one node, or on all, as a clock that jumps ends it."""
        resource = self.resources[name]
        for each in range(NODE_COUNT) if all_of_them else [place]:
            self.world.site.databases[each].call("DEL", KEYS.lock(resource.name))
            resource.on_nodes[each] = None
        self._seen("expired")

    @rule(name=RESOURCES, place=PLACES)
    def forget_an_idle_counter(self, name: str, place: int) -> None:
        """The node begins again at its greatest number."""
        self.world.site.databases[place].call("DEL", KEYS.counter(self.resources[name].name))

    # --- the storage

    def _call_storage(self, resource: Resource, token: int, method: Callable[..., Any], **given: Any) -> Any:
        """Call the storage with a token; return None if it is refused, exactly for a higher one seen."""
        admitted = token >= resource.highest
        resource.highest = max(token, resource.highest)
        self._seen("storage took it" if admitted else "storage refused it")
        if admitted:
            return method(resource.name, token=token, **given)
        with pytest.raises(redfence.StaleTokenError) as caught:
            method(resource.name, token=token, **given)
        assert caught.value.highest_token == resource.highest
        return None

    @rule(name=RESOURCES, key=STORAGE_KEYS, value=st.binary(max_size=4), data=st.data())
    def put(self, name: str, key: str, value: bytes, data: st.DataObject) -> None:
        resource = self.resources[name]
        token = self._token(data, resource)
        done = self._call_storage(resource, token, self.world.storage.put, key=key, value=value)
        if done is not None:
            assert done.highest_token == token
            resource.values[key] = (value, token)

    @rule(name=RESOURCES, key=STORAGE_KEYS, data=st.data())
    def delete(self, name: str, key: str, data: st.DataObject) -> None:
        resource = self.resources[name]
        token = self._token(data, resource)
        done = self._call_storage(resource, token, self.world.storage.delete, key=key)
        if done is not None:
            assert (done.deleted, done.highest_token) == (key in resource.values, token)
            resource.values.pop(key, None)

    @rule(name=RESOURCES, key=STORAGE_KEYS, fenced=st.booleans(), data=st.data())
    def get(self, name: str, key: str, fenced: bool, data: st.DataObject) -> None:  # noqa: FBT001  (drawn)
        """A get returns the last value; the storage judges its token as that of a put."""
        resource, get = self.resources[name], self.world.storage.get
        # A get without a token is a plain read.
        token = self._token(data, resource) if fenced else None
        try:
            found = (
                get(resource.name, key=key, unfenced=True)
                if token is None
                else self._call_storage(resource, token, get, key=key)
            )
        except redfence.NotFoundError:
            assert key not in resource.values
            return
        if found is not None:
            told = (found.value, found.written_token, found.highest_token)
            assert told == (*resource.values[key], resource.highest)

    @rule(name=RESOURCES, data=st.data())
    def fence(self, name: str, data: st.DataObject) -> None:
        resource = self.resources[name]
        token = self._token(data, resource)
        done = self._call_storage(resource, token, self.world.storage.fence)
        assert done is None or done.highest_token == token

    # --- after each step

    @invariant()
    def nodes_hold_what_the_model_says(self) -> None:
        """By each node's own word, and by the quorum's; a lease that holds knows that it does."""
        for resource in self.resources.values():
            report = self.world.loop.call(self.world.clients[0].get_lock, resource.name)
            assert report.waiters == 0
            for node, held in zip(report.nodes, resource.on_nodes, strict=True):
                assert node.answer is redfence.NodeAnswer.ANSWERED
                assert (node.hold.holder if node.hold else None) == (held.holder if held else None), report
            present = resource.holder
            assert (report.current.holder if report.current else None) == (
                present.holder if present else None
            )
            if present is not None and report.current is not None:
                assert len(resource.nodes_of(present)) < NODE_COUNT or (
                    report.current.token == present.lease.token
                )

    @invariant()
    def the_storage_keeps_what_the_model_says(self) -> None:
        """Every key, and the highest token."""
        for resource in self.resources.values():
            page = self.world.storage.list_keys(resource.name)
            assert (list(page.keys), page.highest_token) == (sorted(resource.values), resource.highest)

    def teardown(self) -> None:
        """Give everything back, so that nothing is renewed for ever; no lock is left on any node."""
        for resource in self.resources.values():
            for held in resource.leases:
                self.world.loop.call(held.lease.release)
                resource.end(held)
            # A quorum answers a release. All nodes answer this call, behind the release on each connection.
            self.world.clients[1].get_lock(resource.name)
            for database in self.world.site.databases:
                assert database.call("EXISTS", KEYS.lock(resource.name)) == 0


@pytest.mark.slow
@pytest.mark.timeout(120 * factor())
def test_both_clients_and_the_storage_do_what_the_model_says(site: FuzzSite) -> None:
    with world_at(site) as world:
        walk = type("WalkHere", (Walk,), {"world": world})
        run_state_machine_as_test(walk, settings=tried(60, steps=30))
        wanted = {
            *("granted", "LockHeldError", "AcquireTimeoutError", "released", "released again"),
            *("renewed", "renewed too late", "not live"),
            *("handed over", "expired", "storage took it", "storage refused it"),
        }
        assert wanted <= set(world.seen), f"never seen: {wanted - set(world.seen)}"
    assert not site.complaints()
