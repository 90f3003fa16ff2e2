"""Sends a fencing token with a call to another service, as HTTP headers or as gRPC metadata.

    requests.post(url, headers=propagation.to_headers(redfence.current_lease()))
    stub.Pay(request, metadata=propagation.to_metadata(redfence.current_lease()))

The other service reads the token and passes it on to the storage that checks it:

    token = propagation.from_headers(request.headers)
    redfence.fence.check(connection, token, resource="orders/42")

A call carries one token. The headers are `Redfence-Resource`, percent-encoded UTF-8, and
`Redfence-Token`, a decimal number. They prove nothing about the sender: any caller can write any
number, and a number that is too high shuts out the real holder. Read them only from callers that
may write to the storage themselves.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote, unquote

from redfence._errors import InvalidArgumentError
from redfence._messages.fencing_tokens import FencingToken, HasFencingToken
from redfence_proto import bounds

__all__ = ["from_headers", "from_metadata", "to_headers", "to_metadata"]

_RESOURCE = "redfence-resource"
_TOKEN = "redfence-token"  # noqa: S105  (the name of a header)

# Printable ASCII without a space, and no "%" that does not begin an escape.
_ENCODED = re.compile(r"(?:[!-$&-~]|%[0-9A-Fa-f]{2})+", re.ASCII)
_NUMBER = re.compile(r"[0-9]{1,16}", re.ASCII)
_SHOWN_LENGTH_MAX = 64


def to_headers(token: HasFencingToken | None) -> dict[str, str]:
    """Return the HTTP headers for a lease or a `FencingToken`; none for None."""
    return {name.title(): value for name, value in to_metadata(token)}


def to_metadata(token: HasFencingToken | None) -> tuple[tuple[str, str], ...]:
    """Return the gRPC metadata for a lease or a `FencingToken`; none for None."""
    if token is None:
        return ()
    return ((_RESOURCE, quote(token.resource)), (_TOKEN, str(token.token)))


def from_headers(headers: Any) -> FencingToken | None:
    """Return the token that HTTP headers carry, or None if they carry none.

    Args:
        headers: a mapping, in any case of letters; a WSGI environment, such as Django's
            `request.META`; or pairs, also of bytes, such as `scope["headers"]` of ASGI.

    Raises:
        InvalidArgumentError: a header is missing or malformed, or occurs with two different values;
            `field` has its name.
    """
    return _read(headers.items() if hasattr(headers, "items") else headers)


def from_metadata(metadata: Any) -> FencingToken | None:
    """Return the token that gRPC metadata carries, or None if it carries none.

    Args:
        metadata: `context.invocation_metadata()`, of either kind of server; None counts as empty.

    Raises:
        InvalidArgumentError: as `from_headers`.
    """
    return _read(metadata or ())


def _read(pairs: Iterable[tuple[Any, Any]]) -> FencingToken | None:
    found: dict[str, str] = {}
    for name, value in pairs:
        # WSGI writes HTTP_REDFENCE_TOKEN.
        plain = _text(name).lower().replace("_", "-").removeprefix("http-")
        if plain not in (_RESOURCE, _TOKEN):
            continue
        if found.setdefault(plain, _text(value)) != _text(value):
            raise _invalid(
                plain, f"occurs with two values, {_shown(found[plain])} and {_shown(_text(value))}; send one"
            )
    if not found:
        return None
    return FencingToken(_resource(found), _number(found))


def _resource(found: Mapping[str, str]) -> str:
    value = _value(found, _RESOURCE)
    try:
        resource = unquote(value, errors="strict") if _ENCODED.fullmatch(value) else None
    except UnicodeDecodeError:
        resource = None
    if resource is None:
        raise _invalid(_RESOURCE, f"must be percent-encoded UTF-8, not {_shown(value)}")
    if problem := bounds.resource_problem(resource):
        raise _invalid(_RESOURCE, problem)
    return resource


def _number(found: Mapping[str, str]) -> int:
    value = _value(found, _TOKEN)
    if not _NUMBER.fullmatch(value):
        raise _invalid(_TOKEN, f"must be a decimal number below 2^53, not {_shown(value)}")
    if problem := bounds.fencing_token_problem(int(value)):
        raise _invalid(_TOKEN, problem)
    return int(value)


def _value(found: Mapping[str, str], name: str) -> str:
    if name not in found:
        (other,) = found
        raise _invalid(name, f"is missing, but {other} is there; send both")
    return found[name]


def _text(value: Any) -> str:
    return value.decode("latin-1") if isinstance(value, bytes) else str(value)


def _shown(value: str) -> str:
    return repr(value if len(value) <= _SHOWN_LENGTH_MAX else value[:_SHOWN_LENGTH_MAX] + "…")


def _invalid(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"header {name} {problem}", metadata={"field": name})
