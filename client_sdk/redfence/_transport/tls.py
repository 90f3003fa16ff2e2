"""Defines by which files a client speaks TLS, and reads them."""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import grpc

from redfence._errors import InvalidArgumentError

File: TypeAlias = str | os.PathLike[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Names the PEM files by which a client speaks TLS.

    A client reads them at every new connection, so a renewed file needs no new client. A storage client
    reads them once.

    Attributes:
        ca: the authorities of servers; None trusts those that gRPC knows.
        cert: the client's certificate, followed by the intermediate ones; None shows none.
        key: its private key, not encrypted.

    Raises:
        InvalidArgumentError: only one of `cert` and `key` is given.
    """

    ca: File | None = None
    cert: File | None = None
    key: File | None = None

    def __post_init__(self) -> None:
        """Check that a certificate has a key."""
        if (self.cert is None) != (self.key is None):
            raise InvalidArgumentError(
                "the certificate of a client needs its key; give both cert and key of TLS, or neither",
                metadata={"field": "tls.key" if self.key is None else "tls.cert"},
            )

    @staticmethod
    def from_environment() -> Tls | None:
        """Return the files that REDFENCE_TLS_CA, REDFENCE_TLS_CERT and REDFENCE_TLS_KEY name.

        An empty variable counts as unset. Return None if all are unset.

        Raises:
            InvalidArgumentError: only one of the last two is set.
        """
        return tls_of()

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files, and return what gRPC needs for a channel.

        Raises:
            InvalidArgumentError: a file cannot be used; the message names it.
        """
        # gRPC itself says only that a connection failed.
        ssl_context(self)
        return grpc.ssl_channel_credentials(
            _read("ca", self.ca), _read("key", self.key), _read("cert", self.cert)
        )


Protection: TypeAlias = Tls | grpc.ChannelCredentials | None
"""How a client protects its connections; None is plain text."""


def tls_of(*, ca: File | None = None, cert: File | None = None, key: File | None = None) -> Tls | None:
    """Return the files, each from the environment if it is None; see `Tls.from_environment`.

    Raises:
        InvalidArgumentError: there is only one of `cert` and `key`.
    """
    ca, cert, key = (
        file or os.environ.get(f"REDFENCE_TLS_{name}") or None
        for name, file in (("CA", ca), ("CERT", cert), ("KEY", key))
    )
    return None if ca is cert is key is None else Tls(ca=ca, cert=cert, key=key)


def check_protection(tls: Tls | None, credentials: grpc.ChannelCredentials | None = None) -> Protection:
    """Return what the program gave, or else what the environment names; its files can be used now.

    Raises:
        InvalidArgumentError: the program gave both, or a file cannot be used.
    """
    if credentials is None:
        tls = tls or tls_of()
        if tls is not None:
            tls.credentials()
        return tls
    if tls is not None:
        raise InvalidArgumentError(
            "tls and credentials are both given; leave out one of them", metadata={"field": "tls"}
        )
    return credentials


def ssl_context(tls: Tls) -> ssl.SSLContext:
    """Read the files, and return what Python needs for a connection.

    Raises:
        InvalidArgumentError: a file cannot be used; the message names it.
    """
    for name in ("ca", "cert", "key"):
        _read(name, getattr(tls, name))
    try:
        context = ssl.create_default_context(cafile=tls.ca)
    except ssl.SSLError as error:
        raise _unusable("ca", f"{tls.ca} has no certificate in PEM") from error
    context.set_alpn_protocols(["h2"])
    if tls.cert is not None:
        try:
            # Without the answer, OpenSSL would ask the terminal for the password of an encrypted key.
            context.load_cert_chain(tls.cert, tls.key, password="")
        except ssl.SSLError as error:
            raise _unusable(
                "cert",
                f"{tls.cert} and {tls.key} are not a certificate in PEM and its key, not encrypted "
                f"({error.reason or 'no PEM'})",
            ) from error
    return context


def _read(name: str, file: File | None) -> bytes | None:
    if file is None:
        return None
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise _unusable(name, f"cannot read {os.fspath(file)}: {error.strerror}") from error


def _unusable(name: str, problem: str) -> InvalidArgumentError:
    return InvalidArgumentError(f"tls {name}: {problem}", metadata={"field": f"tls.{name}"})
