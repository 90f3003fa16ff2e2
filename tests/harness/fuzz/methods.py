"""Every method of the two servers: its path and the type of its message."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import grpc
from google.protobuf.descriptor import Descriptor, MethodDescriptor
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from redfence_proto import bounds
from redfence_proto.rich_error import RichError, from_trailing_metadata
from redfence_proto.storage.v1 import storage_pb2
from redfence_proto.v1 import lock_pb2


@dataclass(frozen=True, slots=True)
class Method:
    path: str
    request: Descriptor
    response_streaming: bool
    of_storage: bool = False

    def parse(self, data: bytes) -> Message | None:
        """Return the message, or None if the bytes are none."""
        try:
            return GetMessageClass(self.request).FromString(data)
        except DecodeError:
            return None


def _method(descriptor: MethodDescriptor, *, of_storage: bool = False) -> Method:
    path = f"/{descriptor.containing_service.full_name}/{descriptor.name}"
    return Method(path, descriptor.input_type, bool(descriptor.server_streaming), of_storage=of_storage)


def _of(module: Any, *, of_storage: bool = False) -> list[Method]:
    services = module.DESCRIPTOR.services_by_name.values()
    return [_method(each, of_storage=of_storage) for service in services for each in service.methods]


OWN_METHODS = (*_of(lock_pb2), *_of(storage_pb2, of_storage=True))
"""Those of redfence's contract."""
OWN_UNARY = tuple(each for each in OWN_METHODS if not each.response_streaming)
OWN_STREAMS = {each.path.rpartition("/")[2]: each for each in OWN_METHODS if each.response_streaming}
LIBRARY_METHODS = (*_of(health_pb2), *_of(reflection_pb2))
"""Those of the standard services, which keep the ways of their own libraries."""


@dataclass(frozen=True, slots=True)
class Ending:
    code: grpc.StatusCode
    details: str
    rich: RichError | None

    @classmethod
    def of(cls, call: Any) -> Ending:
        code = call.code()
        return cls(code, call.details() or "", from_trailing_metadata(call.trailing_metadata() or ()))

    @property
    def reason(self) -> lock_pb2.ErrorReason.ValueType:
        return lock_pb2.ERROR_REASON_UNSPECIFIED if self.rich is None else self.rich.reason


def is_too_large(data: bytes) -> bool:
    return len(data) > bounds.MESSAGE_BYTES_MAX
