"""Serves StorageService over gRPC: translates between the contract and the store, and decides nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from redfence_proto.storage.v1 import storage_pb2, storage_pb2_grpc
from redfence_server.access.guard import Guard
from redfence_server.access.policy import Verb
from redfence_storage.errors import KeyNotFound
from redfence_storage.group_commit import GroupCommit
from redfence_storage.grpc_errors import AbortOnError
from redfence_storage.grpc_requests import (
    delete_command,
    fence_command,
    get_command,
    list_keys_command,
    page_token_after,
    put_command,
)
from redfence_storage.store import Command

RequestT = TypeVar("RequestT")
ResultT = TypeVar("ResultT")

SERVICE_NAME = storage_pb2.DESCRIPTOR.services_by_name["StorageService"].full_name


class StorageServicer(storage_pb2_grpc.StorageServiceServicer):
    """Answers each call when its changes are on disk.

    Args:
        guard: identifies callers and checks their right to the resource; None without a policy.

    Cancellation: a cancelled caller gives up only the answer; the storage still runs the command.
    """

    def __init__(self, store: GroupCommit, *, guard: Guard | None = None) -> None:
        self._store = store
        self._guard = guard

    async def Put(
        self, request: storage_pb2.PutRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> storage_pb2.PutResponse:
        """Set a key's value."""
        async with AbortOnError(context):
            accepted = await self._run(request, put_command, context)
        return storage_pb2.PutResponse(highest_token=accepted.highest_token)

    async def Get(
        self, request: storage_pb2.GetRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> storage_pb2.GetResponse:
        """Return a key's value."""
        async with AbortOnError(context):
            reading = await self._run(request, get_command, context)
            if reading.stored is None:
                raise KeyNotFound(request.resource, key=request.key)
        return storage_pb2.GetResponse(
            value=reading.stored.value,
            written_token=reading.stored.written_token,
            highest_token=reading.highest_token,
        )

    async def Delete(
        self, request: storage_pb2.DeleteRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> storage_pb2.DeleteResponse:
        """Delete a key."""
        async with AbortOnError(context):
            removal = await self._run(request, delete_command, context)
        return storage_pb2.DeleteResponse(deleted=removal.deleted, highest_token=removal.highest_token)

    async def Fence(
        self, request: storage_pb2.FenceRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> storage_pb2.FenceResponse:
        """Raise the highest token of a resource."""
        async with AbortOnError(context):
            accepted = await self._run(request, fence_command, context)
        return storage_pb2.FenceResponse(highest_token=accepted.highest_token)

    async def ListKeys(
        self, request: storage_pb2.ListKeysRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> storage_pb2.ListKeysResponse:
        """Return one page of keys."""
        async with AbortOnError(context):
            page = await self._run(request, list_keys_command, context)
        return storage_pb2.ListKeysResponse(
            keys=page.keys,
            next_page_token=page_token_after(page.keys[-1]) if page.more else "",
            highest_token=page.highest_token,
        )

    async def _run(
        self,
        request: RequestT,
        read: Callable[[RequestT], Command[ResultT]],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> ResultT:
        """Run the command of a request, if its caller may use the resource."""
        caller = None if self._guard is None else self._guard.admit(context)
        command = read(request)
        if caller is not None:
            caller.check(Verb.STORAGE, command.resource)
        return await self._store.carry_out(command)
