"""Name how a request ended, as the contract names it, in lower case: `granted`, `lost`, `stale_token`."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from redfence_proto.v1 import lock_pb2

OK: Final = "ok"
"""The request succeeded, and its response has no other outcome."""
CANCELLED: Final = "cancelled"
"""The caller gave it up, or its deadline came."""
UNANSWERED: Final = "unanswered"
"""The stream of the command ended first."""
INTERNAL: Final = "internal"
"""The server has a defect; its log says more."""
# A newer enum's value must not make a series of its own.
_UNKNOWN: Final = "unknown"


def _names(enum: Any) -> Mapping[int, str]:
    """Return the names of an enum's values in lower case, without the prefix that all its values have."""
    prefix = enum.values_by_number[0].name.removesuffix("UNSPECIFIED")
    return MappingProxyType(
        {number: each.name.removeprefix(prefix).lower() for number, each in enum.values_by_number.items()}
    )


_REASONS: Final = _names(lock_pb2.DESCRIPTOR.enum_types_by_name["ErrorReason"])
_CANCEL: Final[tuple[str, Mapping[int, str]]] = ("found", {True: "found", False: "not_found"})


def reason_name(reason: int) -> str:
    """Return the outcome of a request that an error with this reason ended."""
    return _REASONS.get(reason, _UNKNOWN)


@cache
def _table(response_type: type) -> tuple[str, Mapping[int, str]] | None:
    """Return the field that says how a request ended, and the names of its values; None without one."""
    if response_type is lock_pb2.CancelResult:
        return _CANCEL
    fields = getattr(getattr(response_type, "DESCRIPTOR", None), "fields", ())
    named = (each for each in fields if each.name in {"outcome", "state"} and each.enum_type is not None)
    return next(((each.name, _names(each.enum_type)) for each in named), None)


def outcome_of(response: Any) -> str:
    """Return how a request ended that got this response."""
    table = _table(type(response))  # type: ignore[arg-type]  # a class is hashable
    return OK if table is None else table[1].get(getattr(response, table[0]), _UNKNOWN)


def token_of(response: Any) -> int | None:
    """Return the fencing token in a response; None without one."""
    lease = getattr(response, "lease", response)
    return getattr(lease, "fencing_token", None) or None
