"""Checks values against the bounds of the storage contract, for the server and the clients.

Each `…_problem` function returns None for a valid value, else a sentence for the caller without the
field's name.
"""

from __future__ import annotations

from redfence_proto import bounds

KEY_BYTES_MAX = 1_024
VALUE_BYTES_MAX = 32 * 1024
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
# A page of long keys is cut here so that it fits into a message. The other half is for names and framing.
PAGE_BYTES_MAX = bounds.MESSAGE_BYTES_MAX // 2


def key_problem(key: str) -> str | None:
    """Return why a key is invalid: it needs 1 to 1024 bytes of UTF-8 and no control characters."""
    if not key:
        return "is empty; a value needs a key"
    return bounds.text_problem(key, bytes_max=KEY_BYTES_MAX)


def value_problem(value: bytes) -> str | None:
    """Return why a value is invalid: it may have at most 32 KiB."""
    if len(value) <= VALUE_BYTES_MAX:
        return None
    return f"is {len(value)} bytes long; at most {VALUE_BYTES_MAX} are allowed"
