"""Name the other end of a connection as gRPC names it."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Self

_SECURITY: Final = "transport_security_type"
# The kinds of names that gRPC takes from a certificate.
_NAMES: Final = frozenset({"DNS", "URI", "email", "IP Address"})


@dataclass(frozen=True, slots=True)
class Peer:
    """Describes a client.

    Attributes:
        address: such as `ipv4:127.0.0.1:40312`.
        auth_context: `transport_security_type` is `ssl` or `insecure`. If the client had to show a
            certificate, which was then verified, `x509_common_name` and `x509_subject_alternative_name` are
            the names in it. Keys and values are those of grpcio.
    """

    address: str
    auth_context: Mapping[str, Sequence[bytes]]

    @classmethod
    def of(cls, transport: asyncio.BaseTransport) -> Self:
        """Return the other end of a new connection, after its TLS handshake."""
        host, port = (transport.get_extra_info("peername") or ("unknown", 0))[:2]
        host = host.removeprefix("::ffff:")  # an IPv4 peer of a socket of both families
        address = f"ipv6:[{host}]:{port}" if ":" in host else f"ipv4:{host}:{port}"
        return cls(address, MappingProxyType(_auth_context(transport)))


def _auth_context(transport: asyncio.BaseTransport) -> dict[str, Sequence[bytes]]:
    if transport.get_extra_info("ssl_object") is None:
        return {_SECURITY: [b"insecure"]}
    found: dict[str, Sequence[bytes]] = {_SECURITY: [b"ssl"]}
    # Empty unless the client had to show a certificate, which OpenSSL has then verified.
    certificate: Any = transport.get_extra_info("peercert") or {}
    common = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]
    if common:
        found["x509_common_name"] = [common[0].encode()]
    names = [_text(kind, name) for kind, name in certificate.get("subjectAltName", ()) if kind in _NAMES]
    if names:
        found["x509_subject_alternative_name"] = names
    return found


def _text(kind: str, name: str) -> bytes:
    if kind == "IP Address" and ":" in name:
        # Python writes every group of an IPv6 address, and gRPC shortens them.
        return socket.inet_ntop(socket.AF_INET6, ipaddress.IPv6Address(name.strip()).packed).encode()
    return name.encode()
