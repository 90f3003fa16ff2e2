"""The storage contract's bounds, for the server, which refuses what breaks them, and the clients, which do not even send it.

Each `…_problem` function returns None for a good value and otherwise a sentence for the caller, without the field's name.
"""

from __future__ import annotations

from redfence_proto import bounds

KEY_BYTES_MAX = 1_024
VALUE_BYTES_MAX = 32 * 1024
PAGE_SIZE_DEFAULT = 100
PAGE_SIZE_MAX = 1_000
# A page of long keys is cut short, or it would not fit into a message; the rest is for names and framing.
PAGE_BYTES_MAX = bounds.MESSAGE_BYTES_MAX // 2


def key_problem(key: str) -> str | None:
    """Check a key: 1 to 1024 bytes of UTF-8, no control characters."""
    if not key:
        return "is empty; a value needs a key"
    return bounds.text_problem(key, bytes_max=KEY_BYTES_MAX)


def value_problem(value: bytes) -> str | None:
    """Check a value: 32 KiB at most."""
    if len(value) <= VALUE_BYTES_MAX:
        return None
    return f"is {len(value)} bytes long; at most {VALUE_BYTES_MAX} are allowed"
