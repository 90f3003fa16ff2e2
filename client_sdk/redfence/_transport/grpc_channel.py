"""Defines the options of the SDK's gRPC channels, with their reasons."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from redfence_proto import bounds

Metadata: TypeAlias = Sequence[tuple[str, str | bytes]]
"""The gRPC metadata of every call, e.g. (("authorization", "Bearer …"),)."""

CHANNEL_OPTIONS: tuple[tuple[str, int], ...] = (
    # With these settings gRPC detects a frozen or cut-off server after 15 s. Without the ping
    # timeout it took over 30 s.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.http2.ping_timeout_ms", 5_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_send_message_length", bounds.MESSAGE_BYTES_MAX),
    ("grpc.max_receive_message_length", bounds.MESSAGE_BYTES_MAX),
    # Each link has its own connection. Otherwise a link that replaces a silent one would get the
    # same silent connection.
    ("grpc.use_local_subchannel_pool", 1),
    # The SDK decides itself when to retry.
    ("grpc.enable_retries", 0),
)
