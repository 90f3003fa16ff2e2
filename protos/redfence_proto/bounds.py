"""Checks values against the contract's bounds, for the lock server, the storage and the SDK.

Each `…_problem` function returns None for a valid value, else a sentence for the caller without the
field's name.
"""

from __future__ import annotations

import re

RESOURCE_BYTES_MAX = 256
HOLDER_BYTES_MAX = 256
REASON_BYTES_MAX = 256
TTL_MS_MIN = 100
# The quarantine of a node lasts longer than the greatest ttl, so a higher value delays the return
# of every node.
TTL_MS_MAX_DEFAULT = 300_000
# Without this bound, a mistyped unit would keep a node in quarantine for years.
TTL_MS_MAX_MOST = 30 * 86_400_000
# Lua numbers are doubles, so from 2^53 on two different tokens could compare as equal.
FENCING_TOKEN_MAX = 2**53 - 1
MESSAGE_BYTES_MAX = 64 * 1024

# They break a line, or turn the direction of what follows: a log or a table would show another name.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")
_BRACE = re.compile(r"[{}]")
_LEASE_ID = re.compile(r"[0-9a-f]{32}")


def text_problem(text: str, *, bytes_max: int) -> str | None:
    """Return why a label is invalid: it may have `bytes_max` bytes of UTF-8 and no control characters."""
    size = len(text.encode())
    if size > bytes_max:
        return f"is {size} bytes long; at most {bytes_max} are allowed"
    if found := _CONTROL.search(text):
        return f"has a control character (U+{ord(found.group()):04X}) at position {found.start()}"
    return None


def resource_problem(resource: str) -> str | None:
    """Return why a resource name is invalid: 1 to 256 bytes of UTF-8, no control characters, no braces."""
    if not resource:
        return "is empty; a resource needs a name"
    if found := _BRACE.search(resource):
        return f"has a {found.group()!r} at position {found.start()}; braces are reserved"
    return text_problem(resource, bytes_max=RESOURCE_BYTES_MAX)


def lease_id_problem(lease_id: str) -> str | None:
    """Return why a lease id is invalid; the sentence never repeats it, because it is a secret."""
    if _LEASE_ID.fullmatch(lease_id):
        return None
    return "must be exactly 32 hex digits, 0-9 and a-f"


def fencing_token_problem(token: int) -> str | None:
    """Return why a fencing token is invalid: it must be greater than 0 and less than 2^53."""
    if 0 < token <= FENCING_TOKEN_MAX:
        return None
    return f"is {token}; a fencing token is greater than 0 and less than 2^53"
