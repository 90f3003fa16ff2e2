"""Says why no lock server could be reached at an address; gRPC itself only says that it failed."""

from __future__ import annotations

import re
import socket
import threading
from queue import Empty, SimpleQueue

from redfence._errors import InvalidArgumentError, UnavailableError

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty settings
_SETTINGS = b"\4\0"  # the type of the frame that an HTTP/2 server sends first, after its length of 3 bytes
_LOOK_TIMEOUT_S = 0.5
_NOTED_BYTES = 64
_SILENT = "does not answer; is it the right address, and does a firewall let the connection through?"
_REFUSED = "refused the connection; is a lock server running there?"
# gRPC resolves these by rules of their own, e.g. "unix:/run/redfence.sock" and "dns:///locks:50051".
_GRPC_SCHEME = re.compile(r"(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds):")


def check_address(address: str) -> None:
    """Refuse an address that is certainly wrong.

    Raises:
        InvalidArgumentError: it is a URL, a list, or has no port.
    """
    problem = _address_problem(address)
    if problem:
        raise InvalidArgumentError(f"server address {address!r} {problem}", metadata={"field": "addresses"})


def _address_problem(address: str) -> str:
    if _GRPC_SCHEME.match(address):
        return ""
    if "://" in address:
        return f"is a URL; write HOST:PORT: {address.partition('://')[2].rstrip('/')!r}"
    if "," in address or " " in address:
        return 'is a list; pass each address as one argument: Client("a:50051", "b:50051")'
    host, _, port = address.rpartition(":")
    if not host or not port.isascii() or not port.isdecimal() or not 0 < int(port) < 2**16:
        return "has no port; write HOST:PORT, e.g. '127.0.0.1:50051'"
    return ""


def unreachable(address: str, *, has_credentials: bool) -> UnavailableError:
    """Return the error of a failed connection; look at the address for `_LOOK_TIMEOUT_S` at most."""
    if _GRPC_SCHEME.match(address):
        return UnavailableError(f"{address} {_REFUSED}")
    reasons: SimpleQueue[str] = SimpleQueue()
    # In a thread, because nothing else bounds the lookup of a name; the next address must not wait for it.
    look = threading.Thread(
        target=lambda: reasons.put(_reason(address, has_credentials=has_credentials)), daemon=True
    )
    look.start()
    try:
        reason = reasons.get(timeout=_LOOK_TIMEOUT_S)
    except Empty:
        # Perhaps the lookup of the name takes long.
        reason = f"gave no answer in {_LOOK_TIMEOUT_S:g} s; check the name, the address and the firewall"
    return UnavailableError(f"{address} {reason}")


def _reason(address: str, *, has_credentials: bool) -> str:
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_TIMEOUT_S) as peer:
            peer.sendall(_HTTP2_PREFACE)
            return _kind(peer.recv(_NOTED_BYTES), has_credentials=has_credentials)
    except socket.gaierror as error:
        return f"cannot be found: {error.strerror}"
    except ConnectionRefusedError:
        return _REFUSED
    except ConnectionResetError:
        return _kind(b"", has_credentials=has_credentials)
    except TimeoutError:
        return _SILENT
    except OSError as error:
        return f"cannot be reached: {error.strerror}"


def _kind(first: bytes, *, has_credentials: bool) -> str:
    """Return what answered, by the first bytes of its answer to plain HTTP/2."""
    if first[3:5] == _SETTINGS:
        if has_credentials:
            return "speaks plaintext, not TLS; leave out the credentials, or turn on TLS at the server"
        return "closed the connection; try again"
    if first.startswith((b"-", b"+")):
        return "is a Redis or Valkey node; name a lock server, not its nodes"
    if first.startswith(b"HTTP/"):
        return "is a web server, not a lock server"
    if has_credentials:
        return "refused the TLS handshake; do the credentials fit the server's certificate and name?"
    return "closed the connection; a server with TLS needs credentials"
