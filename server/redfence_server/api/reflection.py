"""Serve gRPC reflection in both versions that tools ask for: v1, and v1alpha for older tools.

grpcio-reflection serves v1alpha only, and finds no methods. Both versions have the same messages on the wire.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import grpc
from google.protobuf import text_format
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import Default, DescriptorPool
from grpc_reflection.v1alpha import reflection, reflection_pb2
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest, ServerReflectionResponse

_V1ALPHA: str = reflection.SERVICE_NAME
_V1 = _V1ALPHA.replace("v1alpha", "v1")


class _Pool:
    """The default pool, but it also finds methods and the reflection service v1."""

    def __init__(self) -> None:
        v1alpha = FileDescriptorProto()
        reflection_pb2.DESCRIPTOR.CopyToProto(v1alpha)
        v1alpha.ClearField("options")  # they name packages of v1alpha and deprecate it
        v1 = text_format.Parse(str(v1alpha).replace("v1alpha", "v1"), FileDescriptorProto())
        # Not in the default pool, because another package may add its own copy there.
        self._v1 = DescriptorPool()
        self._v1.Add(v1)

    def __getattr__(self, name: str) -> Any:
        return getattr(Default(), name)

    def FindFileByName(self, name: str) -> FileDescriptor:  # noqa: N802  (the pool's name)
        """Return the file, or raise KeyError."""
        with suppress(KeyError):
            return Default().FindFileByName(name)
        return self._v1.FindFileByName(name)

    def FindFileContainingSymbol(self, name: str) -> FileDescriptor:  # noqa: N802  (the pool's name)
        """Return the file that declares the symbol, which may be a method, or raise KeyError."""
        for pool in (Default(), self._v1):
            with suppress(KeyError):
                return pool.FindFileContainingSymbol(name)
            with suppress(KeyError):
                return pool.FindMethodByName(name).containing_service.file
        raise KeyError(name)


def add_reflection(server: Any, service_names: Sequence[str]) -> None:
    """Add reflection v1 and v1alpha, which describe these services and themselves."""
    servicer = reflection.aio.ReflectionServicer((*service_names, _V1, _V1ALPHA), pool=_Pool())
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=ServerReflectionRequest.FromString,
        response_serializer=ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        [
            grpc.method_handlers_generic_handler(version, {"ServerReflectionInfo": method})
            for version in (_V1, _V1ALPHA)
        ]
    )
