"""Read and write what gRPC adds to HTTP/2: framed messages, timeouts, statuses and metadata. Pure."""

from __future__ import annotations

import re
import zlib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final, TypeAlias

import grpc

Header: TypeAlias = tuple[bytes, bytes]
Metadata: TypeAlias = Iterable[tuple[str, str | bytes]]

_HEAD_BYTES: Final = 5
_OK_HEADERS: Final[tuple[Header, ...]] = ((b":status", b"200"), (b"content-type", b"application/grpc"))
OK_TRAILERS: Final[tuple[Header, ...]] = ((b"grpc-status", b"0"),)
# HTTP/2 adds these bytes for each header.
_HEADER_BYTES: Final = 32
_TIMEOUT: Final = re.compile(rb"([0-9]{1,8})([HMSmun])")
_UNIT_S: Final[Mapping[bytes, float]] = {
    b"H": 3600.0, b"M": 60.0, b"S": 1.0, b"m": 1e-3, b"u": 1e-6, b"n": 1e-9
}  # fmt: skip
# The window bits by which zlib knows each format.
_WINDOW_BITS: Final[Mapping[bytes, int]] = {b"gzip": 31, b"deflate": 15}


class CallError(Exception):
    """The server ends a call with this status, because the caller broke the protocol or a limit."""

    def __init__(self, code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> None:
        super().__init__(details)
        self.code = code
        self.details = details
        self.metadata = metadata


class MessageReader:
    """Splits the body of a request into messages; holds at most one incomplete message.

    Args:
        bytes_max: the longest message that is accepted, also after decompression.
        encoding: the request's header `grpc-encoding`; compressed messages need it.
    """

    __slots__ = ("_buffer", "_bytes_max", "_encoding")

    def __init__(self, *, bytes_max: int, encoding: bytes) -> None:
        self._bytes_max = bytes_max
        self._encoding = encoding
        self._buffer = b""

    @property
    def pending(self) -> int:
        """How many bytes of an incomplete message there are."""
        return len(self._buffer)

    def clear(self) -> None:
        """Forget the incomplete message."""
        self._buffer = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the messages that these bytes complete.

        Raises:
            CallError: a message is too large, or cannot be decompressed.
        """
        data = self._buffer + data if self._buffer else data
        messages: list[bytes] = []
        start = 0
        while len(data) - start >= _HEAD_BYTES:
            size = int.from_bytes(data[start + 1 : start + _HEAD_BYTES])
            if size > self._bytes_max:
                raise CallError(
                    grpc.StatusCode.RESOURCE_EXHAUSTED,
                    f"the message has {size} bytes; at most {self._bytes_max} bytes are accepted",
                )
            end = start + _HEAD_BYTES + size
            if len(data) < end:
                break
            messages.append(self._decoded(data[start], data[start + _HEAD_BYTES : end]))
            start = end
        self._buffer = data[start:]
        return messages

    def _decoded(self, flag: int, payload: bytes) -> bytes:
        if flag == 0:
            return payload
        if flag != 1 or self._encoding not in _WINDOW_BITS:
            raise CallError(
                grpc.StatusCode.INTERNAL,
                f"a message has the compression flag {flag}, but grpc-encoding is {_shown(self._encoding)}; "
                "send the flag 0, or compress with gzip or deflate and name it in grpc-encoding",
            )
        inflate = zlib.decompressobj(_WINDOW_BITS[self._encoding])
        try:
            # One byte more than allowed, so that the memory for a bomb stays bounded.
            message = inflate.decompress(payload, self._bytes_max + 1)
        except zlib.error as error:
            raise CallError(grpc.StatusCode.INTERNAL, f"a message cannot be decompressed: {error}") from error
        if len(message) <= self._bytes_max and (not inflate.eof or inflate.unused_data):
            raise CallError(
                grpc.StatusCode.INTERNAL,
                "a message cannot be decompressed: it is cut, or has more after its end",
            )
        if len(message) > self._bytes_max:
            raise CallError(
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                f"the message has more than {self._bytes_max} bytes after decompression",
            )
        return message


def _shown(value: bytes) -> str:
    """Return a header's value in quotes, for a message."""
    return repr(value.decode("latin-1"))


def framed(message: bytes) -> bytes:
    """Return the message as a body carries it."""
    return b"\0" + len(message).to_bytes(4) + message


def check_request(headers: tuple[Header, ...], *, bytes_max: int) -> tuple[float | None, bytes, int]:
    """Return the caller's timeout in seconds or None, the encoding of its messages, and the headers' size.

    HTTP/2 defines that size.

    Raises:
        CallError: the headers are too large, or one of them has a value that the server cannot serve.
    """
    size = sum(map(len, chain.from_iterable(headers))) + _HEADER_BYTES * len(headers)
    if size > bytes_max:
        raise CallError(
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            f"the metadata has {size} bytes; at most {bytes_max} are accepted",
        )
    fields = dict(headers)
    timeout = fields.get(b"grpc-timeout")
    encoding = fields.get(b"grpc-encoding", b"identity")
    if encoding != b"identity" and encoding not in _WINDOW_BITS:
        raise CallError(
            grpc.StatusCode.UNIMPLEMENTED,
            f"grpc-encoding: {_shown(encoding)} is unknown; use identity, deflate or gzip",
            (("grpc-accept-encoding", "identity,deflate,gzip"),),
        )
    return None if timeout is None else _timeout_s(timeout), encoding, size


def request_metadata(headers: tuple[Header, ...]) -> tuple[tuple[str, str | bytes], ...]:
    """Return the headers that are metadata of the caller: neither HTTP/2's own nor gRPC's; `-bin` decoded."""
    return tuple(
        (name.decode("latin-1"), _binary(value) if name.endswith(b"-bin") else value.decode("latin-1"))
        for name, value in headers
        if not name.startswith((b":", b"grpc-")) and name not in {b"content-type", b"te"}
    )


def _binary(value: bytes) -> bytes:
    """Return the bytes of a `-bin` value; empty if it is not base64."""
    try:
        return b64decode(value + b"=" * (-len(value) % 4), validate=True)
    except ValueError:
        return b""


def _timeout_s(value: bytes) -> float:
    found = _TIMEOUT.fullmatch(value)
    if found is None:
        raise CallError(
            grpc.StatusCode.INVALID_ARGUMENT,
            f"grpc-timeout: {_shown(value)} is not 1 to 8 digits with a unit of H, M, S, m, u or n",
        )
    return int(found[1]) * _UNIT_S[found[2]]


def response_headers(metadata: Metadata = ()) -> tuple[Header, ...]:
    """Return the headers of an answer that has messages."""
    return (*_OK_HEADERS, *map(_encoded, metadata)) if metadata else _OK_HEADERS


def status_trailers(code: grpc.StatusCode, details: str, metadata: Metadata) -> tuple[Header, ...]:
    """Return the trailers that end a call with this status."""
    number: int = code.value[0]
    return (
        (b"grpc-status", b"%d" % number),
        (b"grpc-message", _percent_encoded(details)),
        *map(_encoded, metadata),
    )


def status_only(code: grpc.StatusCode, details: str, metadata: Metadata = ()) -> tuple[Header, ...]:
    """Return the headers of an answer that consists of this status alone."""
    return _OK_HEADERS + status_trailers(code, details, metadata)


def _encoded(pair: tuple[str, str | bytes]) -> Header:
    name, value = pair
    if name.endswith("-bin"):
        raw = value.encode() if isinstance(value, str) else value
        return name.encode(), b64encode(raw).rstrip(b"=")
    return name.encode(), value.encode() if isinstance(value, str) else value


def _percent_encoded(text: str) -> bytes:
    if text.isascii() and text.isprintable() and "%" not in text:
        return text.encode()
    # gRPC allows printable ASCII without the percent sign; everything else is encoded.
    return b"".join(
        b"%c" % byte if 0x20 <= byte <= 0x7E and byte != 0x25 else b"%%%02X" % byte for byte in text.encode()
    )
