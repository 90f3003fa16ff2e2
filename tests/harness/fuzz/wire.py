"""Bytes that a hostile or broken caller may send as one message, drawn from the contract's own descriptors.

They are written by hand, so that what no library would send can be sent as well.
"""

from __future__ import annotations

from typing import Final

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from hypothesis import strategies as st

from redfence_proto import bounds

_VARINT, _FIXED64, _LENGTH, _START_GROUP, _END_GROUP, _FIXED32 = range(6)
_UINT64_MAX: Final = 2**64 - 1
_SIZES: Final = (0, 1, 31, 32, 33, 255, 256, 257, 1024, 1025, 8 * 1024, 32 * 1024, 32 * 1024 + 1, 65_536)

_INTEGERS = st.one_of(
    st.sampled_from(
        [0, 1, 2, 99, 100, 2**31 - 1, 2**31, 2**32, 2**53 - 1, 2**53, 2**63 - 1, 2**63, _UINT64_MAX]
    ),
    st.integers(0, _UINT64_MAX),
    st.integers(-(2**63), -1).map(lambda number: number & _UINT64_MAX),
)
_TEXTS = st.one_of(
    st.text(max_size=20).map(str.encode),
    st.sampled_from(
        [
            *(b"\0", b"a\0b", b"\x1b[31m", b"{}", b"a{b}", b"../../etc", b"' OR 1=1 --", b"%s%n%x"),
            b"\r\n*1\r\n$8\r\nFLUSHALL\r\n",
            *("😀".encode(), "\u202e\ufeff\u0301".encode(), "é".encode() * 128),
            # No UTF-8: a surrogate, an overlong form, a byte that never occurs, a cut-off letter.
            *(b"\xed\xa0\x80", b"\xc0\xaf", b"\xff", b"\xf0\x9f\x98"),
        ]
    ),
    st.sampled_from(_SIZES).map(lambda size: b"n" * size),
)
# Few names, so that messages meet the leases and keys of others.
_GOOD_TEXTS: dict[str, list[bytes]] = {
    "resource": [b"fuzz/1", b"fuzz/2", "fuzz/😀".encode()],
    "lease_id": [b"0" * 32, b"f" * 32, b"0123456789abcdef" * 2],
    "holder": [b"", b"a holder"],
    "key": [b"k", b"l"],
}
_GOOD_INTEGERS: dict[str, st.SearchStrategy[int]] = {
    # Most commands get different ids.
    "id": st.integers(1, _UINT64_MAX),
    "fencing_token": st.integers(1, 20),
    "page_size": st.integers(0, 10),
    "sequence": st.integers(0, _UINT64_MAX),
    "seconds": st.integers(1, 5),
    "nanos": st.just(0),
}


class Input(bytes):
    """What to send, after `bytes`; a long one is not told in full where a test fails."""

    __slots__ = ()

    def __repr__(self) -> str:
        return super().__repr__() if len(self) <= 2_000 else f"<{len(self)} bytes: {bytes(self[:200])!r}…>"


def varint(number: int) -> bytes:
    """Return a number as the wire format writes it; at most 64 bits."""
    assert 0 <= number <= _UINT64_MAX
    digits = bytearray()
    while number > 127:
        digits.append(number & 127 | 128)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def _tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def _length_delimited(number: int, value: bytes) -> bytes:
    return _tag(number, _LENGTH) + varint(len(value)) + value


@st.composite
def _field(draw: st.DrawFn, field: FieldDescriptor) -> bytes:
    """Draw one occurrence of a field: one time in three or four hostile, else good."""
    good = draw(st.integers(0, 3)) > 0
    match field.type:
        case FieldDescriptor.TYPE_MESSAGE:
            assert field.message_type is not None
            return _length_delimited(field.number, draw(messages(field.message_type)))
        case FieldDescriptor.TYPE_STRING | FieldDescriptor.TYPE_BYTES:
            texts = _GOOD_TEXTS.get(field.name)
            value = draw(st.sampled_from(texts) if good and texts else _TEXTS)
            return _length_delimited(field.number, value)
        case _:
            integers = _GOOD_INTEGERS.get(field.name)
            return _tag(field.number, _VARINT) + varint(
                draw(_INTEGERS if integers is None or not good else integers)
            )


@st.composite
def _foreign_field(draw: st.DrawFn) -> bytes:
    """Draw a field of any number and wire type, known, unknown or invalid."""
    number = draw(st.one_of(st.integers(0, 12), st.sampled_from([15, 16, 2047, 19_000, 2**29 - 1, 2**29])))
    wire_type = draw(st.integers(0, 7))
    match wire_type:
        case 0:
            value = varint(draw(_INTEGERS))
        case 1:
            value = draw(st.binary(min_size=8, max_size=8))
        case 2:
            return _length_delimited(number, draw(st.binary(max_size=12)))
        case 3:
            value = _tag(number, _END_GROUP) * draw(st.integers(0, 1))
        case 5:
            value = draw(st.binary(min_size=4, max_size=4))
        case _:
            value = b""
    return _tag(number, wire_type) + value


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Draw a message that can mostly be parsed, of good and of hostile fields."""
    kinds = {field.containing_oneof for field in descriptor.fields if field.containing_oneof}
    chosen = {
        oneof.full_name: draw(st.sampled_from(list(oneof.fields)))
        for oneof in sorted(kinds, key=lambda each: each.full_name)
    }
    parts: list[bytes] = []
    for field in descriptor.fields:
        oneof = field.containing_oneof
        if oneof is not None and chosen[oneof.full_name] is not field:
            continue
        # A repeated one up to eight times; any other is left out, or doubled, now and then.
        counts = st.integers(0, 8) if field.is_repeated else st.sampled_from([1] * 12 + [0, 2])
        parts += [draw(_field(field)) for _ in range(draw(counts))]
    if draw(st.integers(0, 7)) == 0:
        parts.insert(draw(st.integers(0, len(parts))), draw(_foreign_field()))
    return b"".join(parts)


@st.composite
def _damaged(draw: st.DrawFn, descriptor: Descriptor) -> bytes:
    """Draw a message that was cut off, or of which a byte is another."""
    whole = draw(messages(descriptor))
    place = draw(st.integers(0, len(whole)))
    if draw(st.booleans()) or place == len(whole):
        return whole[:place]
    return whole[:place] + bytes([draw(st.integers(0, 255))]) + whole[place + 1 :]


def inputs(descriptor: Descriptor) -> st.SearchStrategy[Input]:
    """Draw bytes to send as a message: half are messages, half are damaged or no messages."""
    return st.one_of(
        messages(descriptor),
        messages(descriptor),
        _damaged(descriptor),
        st.binary(max_size=64),
        st.sampled_from(
            [
                b"",
                # A length that goes beyond the end, and one beyond memory.
                b"\x0a\x7f",
                b"\x0a\xff\xff\xff\xff\xff\xff\xff\xff\x7f",
                # Groups in groups, deeper than any parser follows.
                b"\x0b" * 4_000,
                b"\x0a" + varint(bounds.MESSAGE_BYTES_MAX - 4) + b"n" * (bounds.MESSAGE_BYTES_MAX - 4),
                b"n" * (bounds.MESSAGE_BYTES_MAX + 1),
            ]
        ),
    ).map(Input)
