"""Defines the options and the metadata of the SDK's gRPC channels."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeAlias

import grpc

from redfence._errors import (
    InvalidArgumentError,
    OutcomeUnknownError,
    RedfenceError,
    UnavailableError,
)
from redfence._messages.server_errors import from_rpc_error
from redfence._transport.bearer import BearerToken
from redfence._transport.tls import Protection, Tls
from redfence_proto import bounds

Metadata: TypeAlias = Mapping[str, str | bytes] | Sequence[tuple[str, str | bytes]]
"""The gRPC metadata of every call, e.g. {"authorization": "Bearer …"}."""

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

# Servers and proxies refuse more than 8 KiB at random, and all more than 16 KiB. HTTP/2 counts 32 bytes
# beside each pair, and gRPC sends a few hundred bytes of its own.
_METADATA_BYTES_MAX = 7 * 1024
_PAIR_BYTES = 32
_METADATA_KEY = re.compile(r"[0-9a-z_.-]+")


class CallMetadata:
    """Gives the metadata of each call.

    Raises:
        InvalidArgumentError: both the metadata and the token set `authorization`.
    """

    def __init__(self, fixed: tuple[tuple[str, str | bytes], ...], token: BearerToken | None) -> None:
        if token is not None and any(key == "authorization" for key, _ in fixed):
            raise InvalidArgumentError(
                "both the metadata and the token set 'authorization'; give one of them",
                metadata={"field": "token"},
            )
        self._fixed = fixed
        self._token = token

    def now(self, traceparent: str = "") -> tuple[tuple[str, str | bytes], ...]:
        """Return the metadata of a call that begins now, in the span `traceparent` if there is one.

        Raises:
            UnavailableError: the file of the token cannot be read now.
        """
        fixed = (*self._fixed, ("traceparent", traceparent)) if traceparent else self._fixed
        return fixed if self._token is None else (*fixed, self._token.entry())


def check_metadata(metadata: Metadata) -> tuple[tuple[str, str | bytes], ...]:
    """Return the metadata as gRPC takes it.

    Raises:
        InvalidArgumentError: an entry is no pair, its key is malformed, its value has the wrong type, or
            all entries are too large together.
    """
    entries = tuple(metadata.items() if isinstance(metadata, Mapping) else metadata)
    for entry in entries:
        if not isinstance(entry, tuple) or len(entry) != 2:
            raise InvalidArgumentError(f"metadata entry {entry!r} is not a pair of a key and a value")
        key, value = entry
        if not isinstance(key, str) or not _METADATA_KEY.fullmatch(key):
            raise InvalidArgumentError(f"metadata key {key!r} has characters other than 0-9, a-z, _, . and -")
        is_binary = key.endswith("-bin")
        if not isinstance(value, bytes if is_binary else str):
            raise InvalidArgumentError(
                f"metadata value of {key!r} must be {'bytes' if is_binary else 'a string'}, "
                f"not {type(value).__name__}; only keys that end with -bin take bytes"
            )
    size = sum(len(key) + len(value) + _PAIR_BYTES for key, value in entries)
    if size > _METADATA_BYTES_MAX:
        raise InvalidArgumentError(
            f"metadata has {size} bytes; at most {_METADATA_BYTES_MAX} are allowed, send less of it"
        )
    return entries


def channel_credentials(address: str, protection: Protection) -> grpc.ChannelCredentials | None:
    """Return what a new channel needs; read the files of TLS for each, because they may be renewed.

    Raises:
        UnavailableError: a file cannot be used now.
    """
    if not isinstance(protection, Tls):
        return protection
    try:
        return protection.credentials()
    except InvalidArgumentError as error:
        raise UnavailableError(f"{address} was not tried: {error}") from error


def call_error(error: grpc.RpcError, method: str, *, timeout_ms: int) -> RedfenceError:
    """Return the exception for a unary call of the SDK that failed."""
    failure = from_rpc_error(error)
    if isinstance(failure, OutcomeUnknownError) and not failure.error_reason:
        # gRPC's own text says "Stream removed", or names its internals.
        return OutcomeUnknownError(f"no answer to {method} within {timeout_ms / 1000:g} s; call again")
    return failure


def watch_error(error: grpc.RpcError) -> RedfenceError:
    """Return the exception for a watch that ended; UnavailableError if another watch can take its place."""
    failure = from_rpc_error(error)
    if isinstance(failure, OutcomeUnknownError) and not failure.error_reason:
        # A watch changes nothing, so it has no unknown outcome: the connection is gone.
        return UnavailableError("the connection was closed during the watch")
    return failure
