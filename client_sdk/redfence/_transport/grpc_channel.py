"""How the SDK sets up a gRPC channel: options with their reasons, and the stubs of one server."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from redfence_proto import bounds

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""What is sent along with every call, e.g. (("authorization", "Bearer …"),)."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # A frozen or cut-off server is noticed after 15 s; without the ping timeout it took 30 s and more.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", bounds.MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", bounds.MESSAGE_BYTES_MAX),
    # Each link has a connection of its own: a link that is given up because its server is silent must not be
    # handed the same silent connection again.
    ("grpc.use_local_subchannel_pool", 1),
    # The SDK itself decides when to try again.
    ("grpc.enable_retries", 0),
)
