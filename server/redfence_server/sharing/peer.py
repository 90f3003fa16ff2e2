"""Tell which connections share one bound: those of one machine, as far as its address shows it."""

from __future__ import annotations

import ipaddress
from typing import Final
from urllib.parse import unquote

# A machine usually has a whole network of this size to itself.
_IPV6_PREFIX_BITS: Final = 64


def peer_of(address: str) -> str:
    """Return the peer behind the address of a connection, as gRPC writes it.

    It is the host without the port; for IPv6 the network of 64 bits; and one peer for all Unix sockets.
    """
    kind, _, rest = address.partition(":")
    host = unquote(rest).rpartition(":")[0]
    if kind != "ipv6":
        return f"{kind}:{host}"
    try:
        number = int(ipaddress.IPv6Address(host.strip("[]").partition("%")[0]))
    except ValueError:
        return address
    return f"{kind}:{ipaddress.IPv6Address(number >> _IPV6_PREFIX_BITS << _IPV6_PREFIX_BITS)}"
