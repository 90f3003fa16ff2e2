"""Says why no lock server could be reached at an address; gRPC itself only says that it failed."""

from __future__ import annotations

import re
import socket
import ssl
import threading

from redfence._errors import InvalidArgumentError, UnavailableError
from redfence._transport.tls import Protection, Tls, ssl_context

_HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"  # with empty settings
_SETTINGS = b"\4\0"  # the type of the frame that an HTTP/2 server sends first, after its length of 3 bytes
_TLS_ALERT = b"\x15\x03"  # how a server with TLS answers plain text
_PEER_TIMEOUT_S = 0.5
_NOTED_BYTES = 64
_SILENT = "does not answer; check the name, the address and the firewall"
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
        return "is not HOST:PORT with a port from 1 to 65535; write e.g. '127.0.0.1:50051'"
    return ""


class Reach:
    """Finds out why addresses cannot be reached, beside the attempts to connect, and delays none of them.

    Args:
        protection: of the client's connections.
    """

    def __init__(self, protection: Protection) -> None:
        self._protection = protection
        self._reasons: dict[str, str] = {}
        # One look at a time for each address, because nothing bounds the lookup of a name.
        self._looking: set[str] = set()

    def error(self, address: str) -> UnavailableError:
        """Return the error of a failed attempt, with what the look after an earlier attempt found."""
        if _GRPC_SCHEME.match(address):
            return UnavailableError(f"{address} {_REFUSED}")
        if address not in self._looking:
            self._looking.add(address)
            look = threading.Thread(target=self._look, args=(address,), name="redfence-look", daemon=True)
            try:
                look.start()
            except RuntimeError:  # no thread can be started; the connection is tried again all the same
                self._looking.discard(address)
        return UnavailableError(f"{address} {self._reasons.get(address, _SILENT)}")

    def _look(self, address: str) -> None:
        try:
            self._reasons[address] = _reason(address, self._protection)
        finally:
            self._looking.discard(address)


def _reason(address: str, protection: Protection) -> str:
    try:
        first = _first_bytes(address)
        if isinstance(protection, Tls) and (not first or first.startswith(_TLS_ALERT)):
            return _handshake_problem(address, protection)
        return _kind(first, has_credentials=protection is not None)
    except socket.gaierror as error:
        return f"cannot be found: {error.strerror}"
    except ConnectionRefusedError:
        return _REFUSED
    except TimeoutError:
        return _SILENT
    except OSError as error:
        return f"cannot be reached: {error.strerror}"


def _first_bytes(address: str) -> bytes:
    """Return how the peer begins its answer to plain HTTP/2; nothing if it closes the connection."""
    try:
        with _connected(address) as peer:
            peer.sendall(_HTTP2_PREFACE)
            return peer.recv(_NOTED_BYTES)
    except (ConnectionResetError, BrokenPipeError):
        return b""


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), timeout=_PEER_TIMEOUT_S)


def _handshake_problem(address: str, tls: Tls) -> str:
    """Return at which step a connection over TLS fails."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        with _connected(address) as peer, ssl_context(tls).wrap_socket(peer, server_hostname=host) as secure:
            secure.sendall(_HTTP2_PREFACE)
            if secure.recv(_NOTED_BYTES):
                return "closed the connection; try again"
    except InvalidArgumentError as error:
        return f"was not tried: {error}"
    except ssl.SSLCertVerificationError as error:
        return (
            f"shows a certificate that this client refuses ({error.verify_message}); "
            f"does the ca fit, and does the certificate name {host}?"
        )
    except ssl.SSLError as error:
        if "ALERT" not in str(error.reason):
            return f"does not finish the TLS handshake ({error.reason or error})"
    except (ConnectionResetError, BrokenPipeError):
        pass
    # A server of grpcio closes the connection without a word; others send an alert.
    if tls.cert is None:
        return "wants a certificate of this client; give cert and key of TLS (REDFENCE_TLS_CERT, …_KEY)"
    return "refuses the certificate of this client; its tls_client_ca must trust the issuer"


def _kind(first: bytes, *, has_credentials: bool) -> str:
    """Return what answered, by the first bytes of its answer to plain HTTP/2."""
    if first[3:5] == _SETTINGS:
        if has_credentials:
            return (
                "speaks plaintext, not TLS; leave out tls (REDFENCE_TLS_CA, …), or turn on TLS at the server"
            )
        return "closed the connection; try again"
    if first.startswith((b"-", b"+")):
        return "is a Redis or Valkey node; name a lock server, not its nodes"
    if first.startswith(b"HTTP/"):
        return "is a web server, not a lock server"
    if has_credentials:
        return "refused the TLS handshake; do the credentials fit the server's certificate and name?"
    return "closed the connection; if it speaks TLS, name its authority by tls or REDFENCE_TLS_CA"
