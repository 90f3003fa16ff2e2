"""The server reads and writes gRPC's framing: messages in any pieces, timeouts, limits, texts in headers."""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Callable
from itertools import pairwise

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from redfence_server.http2 import wire
from redfence_server.http2.wire import CallError, MessageReader, check_request, framed, status_trailers

BYTES_MAX = 100


def reader(encoding: bytes = b"identity") -> MessageReader:
    return MessageReader(bytes_max=BYTES_MAX, encoding=encoding)


@given(st.lists(st.binary(max_size=BYTES_MAX), max_size=5), st.lists(st.integers(0, 600), max_size=5))
def test_a_body_cut_anywhere_gives_its_messages(messages: list[bytes], cuts: list[int]) -> None:
    body = b"".join(map(framed, messages))
    places = sorted({0, len(body), *(cut for cut in cuts if cut < len(body))})
    subject, found = reader(), []
    for start, end in pairwise(places):
        found += subject.feed(body[start:end])
    assert found == messages
    assert not subject.pending


@pytest.mark.parametrize("byte_count", [1, 4, 5, 14])
def test_a_reader_tells_that_a_body_ends_within_a_message(byte_count: int) -> None:
    subject = reader()
    assert subject.feed(framed(b"0123456789")[:byte_count]) == []
    assert subject.pending


def test_a_message_is_refused_by_its_announced_size() -> None:
    assert reader().feed(framed(b"x" * BYTES_MAX)) == [b"x" * BYTES_MAX]
    with pytest.raises(CallError, match="the message has 101 bytes; at most 100") as refused:
        reader().feed(framed(b"x" * (BYTES_MAX + 1))[:5])
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


def compressed(payload: bytes) -> bytes:
    return b"\1" + framed(payload)[1:]


@pytest.mark.parametrize(("encoding", "compress"), [(b"gzip", gzip.compress), (b"deflate", zlib.compress)])
def test_a_compressed_message_is_read_and_a_bomb_is_refused(
    encoding: bytes, compress: Callable[[bytes], bytes]
) -> None:
    assert reader(encoding).feed(compressed(compress(b"x" * BYTES_MAX))) == [b"x" * BYTES_MAX]
    with pytest.raises(CallError, match="after decompression") as refused:
        reader(encoding).feed(compressed(compress(b"x" * (BYTES_MAX + 1))))
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


@pytest.mark.parametrize(
    ("encoding", "body", "problem"),
    [
        (b"identity", compressed(b"x"), "compression flag 1, but grpc-encoding is 'identity'"),
        (b"gzip", b"\2" + framed(b"x")[1:], "compression flag 2"),
        (b"gzip", compressed(b"no gzip"), "cannot be decompressed"),
        (b"gzip", compressed(gzip.compress(b"abc", mtime=0)[:-9]), "it is cut"),
        (b"gzip", compressed(gzip.compress(b"abc", mtime=0) + b"x"), "has more after its end"),
    ],
)
def test_a_message_that_cannot_be_decoded_ends_its_call(encoding: bytes, body: bytes, problem: str) -> None:
    with pytest.raises(CallError, match=problem) as refused:
        reader(encoding).feed(body)
    assert refused.value.code is grpc.StatusCode.INTERNAL


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"1H", 3600), (b"2M", 120), (b"3S", 3), (b"99999999m", 99999.999), (b"5u", 5e-6), (b"0n", 0)],
)
def test_a_timeout_is_read_in_each_unit(value: bytes, seconds: float) -> None:
    timeout_s, _, _ = check_request(((b"grpc-timeout", value),), bytes_max=1000)
    assert timeout_s == pytest.approx(seconds)


@pytest.mark.parametrize("value", [b"", b"1", b"S", b"-1S", b"1.5S", b"123456789S", b"1S ", b"1s"])
def test_a_malformed_timeout_is_refused_by_name(value: bytes) -> None:
    with pytest.raises(CallError, match=r"^grpc-timeout: ") as refused:
        check_request(((b"grpc-timeout", value),), bytes_max=1000)
    assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


def test_headers_are_refused_beyond_their_size_and_for_an_unknown_encoding() -> None:
    exact = (b"k", b"v" * 67)
    assert check_request((exact,), bytes_max=100) == (None, b"identity", 100)
    with pytest.raises(CallError, match="metadata has 101 bytes; at most 100") as refused:
        check_request(((b"k", b"v" * 68),), bytes_max=100)
    assert refused.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    with pytest.raises(CallError, match="grpc-encoding: 'br'") as refused:
        check_request(((b"grpc-encoding", b"br"),), bytes_max=100)
    assert refused.value.code is grpc.StatusCode.UNIMPLEMENTED


def test_a_status_carries_any_text_and_binary_metadata() -> None:
    metadata = (("plain", "text"), ("some-bin", b"\0\xff"))
    trailers = dict(status_trailers(grpc.StatusCode.NOT_FOUND, "50% of é\n", metadata))
    assert trailers == {
        b"grpc-status": b"5",
        b"grpc-message": b"50%25 of %C3%A9%0A",
        b"plain": b"text",
        b"some-bin": b"AP8",
    }
    assert wire.status_only(grpc.StatusCode.OK, "")[0] == (b":status", b"200")
