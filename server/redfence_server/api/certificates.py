"""Read the server's certificate, and read it again when its files change, for both transports.

Before each handshake the server looks at the files (three calls of `stat`), so a renewed certificate needs no
restart and no signal. A signal only makes it look at once. Open connections keep the certificate with which
they began.
"""

from __future__ import annotations

import ssl
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import grpc
import structlog

from redfence_server.errors import ConfigError

# A file may be replaced while it is read; the next connection looks again.
_FIRST_READ_TRIES: Final = 3
_ALPN: Final = ["h2"]


class CertificateError(ConfigError):
    """The files of a certificate cannot be used; the message names the setting, the file and the reason."""


@dataclass(frozen=True, slots=True)
class CertificateFiles:
    """Names the PEM files of a server.

    Attributes:
        certificate: the certificate, followed by the intermediate ones.
        key: its private key, not encrypted.
        client_ca: the authorities of clients; a client must then show a certificate of one of them. None
            asks clients for no certificate.
    """

    certificate: Path
    key: Path
    client_ca: Path | None = None

    def named(self) -> tuple[tuple[str, Path], ...]:
        """Return each file with the name of its setting."""
        files = (("tls_cert", self.certificate), ("tls_key", self.key))
        return files if self.client_ca is None else (*files, ("tls_client_ca", self.client_ca))


@dataclass(frozen=True, slots=True)
class _Loaded:
    """The content of the files, which was checked.

    Attributes:
        seen: what `stat` said of the files.
        context: for a connection of the fast transport.
        configuration: for a connection of grpcio.
    """

    seen: tuple[tuple[int, ...], ...]
    context: ssl.SSLContext
    configuration: grpc.ServerCertificateConfiguration


class Certificates:
    """Keeps the last good certificate of the files; any thread may use it.

    A file that cannot be used changes nothing; the log says so once and after each `reload`
    (`certificate_refused`). The log also says when a new certificate is used (`certificate_reloaded`).

    Raises:
        CertificateError: the files cannot be used now.
    """

    def __init__(self, files: CertificateFiles) -> None:
        self._files = files
        self._lock = threading.Lock()
        self._refusal = ""
        for tries_left in reversed(range(_FIRST_READ_TRIES)):
            try:
                self._loaded = _load(files)
                break
            except CertificateError:
                if not tries_left:
                    raise

    @property
    def asks_clients(self) -> bool:
        """Whether a client must show a certificate."""
        return self._files.client_ca is not None

    def refresh(self) -> bool:
        """Use the files if they have changed and are good; return whether a new certificate is used."""
        with self._lock:
            try:
                if _seen(self._files) == self._loaded.seen:
                    self._refusal = ""
                    return False
                self._loaded = _load(self._files)
            except CertificateError as error:
                # The next connection tries again: the key may follow its certificate a moment later.
                if str(error) != self._refusal:
                    self._refusal = str(error)
                    structlog.get_logger().warning("certificate_refused", reason=self._refusal)
                return False
            self._refusal = ""
        structlog.get_logger().info("certificate_reloaded", certificate=str(self._files.certificate))
        return True

    def reload(self) -> None:
        """Use the files as `refresh` does, and log a refusal again, because an operator asks for it."""
        self._refusal = ""
        self.refresh()

    def current_context(self) -> ssl.SSLContext:
        """Return the context for the next connection of the fast transport."""
        self.refresh()
        return self._loaded.context

    def for_fast(self) -> ssl.SSLContext:
        """Return a context by which each connection gets the current one."""
        return _CurrentContext(self)

    def for_grpcio(self) -> grpc.ServerCredentials:
        """Return credentials by which each connection of grpcio gets the current certificate."""
        given = self._loaded

        def fetch() -> Any:
            # gRPC asks before each handshake, in a thread of its own; None means no change. A `reload` may
            # have read the files meanwhile, so the answer depends on what gRPC got last.
            nonlocal given
            self.refresh()
            if self._loaded is given:
                return None
            given = self._loaded
            return given.configuration

        return grpc.dynamic_ssl_server_credentials(
            given.configuration, fetch, require_client_authentication=self.asks_clients
        )


class _CurrentContext(ssl.SSLContext):
    """Begins each connection with the whole of the current context.

    The current certificate could be put into one lasting context instead. But such a context goes on trusting
    authorities that were removed, and resumes sessions that they vouched for.
    """

    _certificates: Certificates

    def __new__(cls, certificates: Certificates) -> Self:
        """Return a context that holds no certificate itself."""
        context = super().__new__(cls, ssl.PROTOCOL_TLS_SERVER)
        context._certificates = certificates
        return context

    def wrap_bio(self, *args: Any, **kwargs: Any) -> ssl.SSLObject:
        """Begin a connection; asyncio calls it for each one."""
        return self._certificates.current_context().wrap_bio(*args, **kwargs)


def _load(files: CertificateFiles) -> _Loaded:
    seen = _seen(files)
    contents = {name: _read(name, path) for name, path in files.named()}
    loaded = _Loaded(
        seen,
        _context(files),
        grpc.ssl_server_certificate_configuration(
            [(contents["tls_key"], contents["tls_cert"])], root_certificates=contents.get("tls_client_ca")
        ),
    )
    if _seen(files) != seen:
        # Parts of two certificates may be mixed.
        raise CertificateError(f"tls_cert: {files.certificate} or a file beside it changed while it was read")
    return loaded


def _seen(files: CertificateFiles) -> tuple[tuple[int, ...], ...]:
    """Return what changes when a file is written, replaced, or gets other rights."""
    stats = [_stat(name, path) for name, path in files.named()]
    return tuple(
        (each.st_dev, each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in stats
    )


def _stat(name: str, path: Path) -> Any:
    try:
        return path.stat()
    except OSError as error:
        raise CertificateError(f"{name}: cannot read {path}: {error.strerror}") from error


def _read(name: str, path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise CertificateError(f"{name}: cannot read {path}: {error.strerror}") from error


def _context(files: CertificateFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(_ALPN)
    # Here only for the error, which then names the right one of the two files.
    _trust(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), "tls_cert", files.certificate)
    try:
        # Without the answer, OpenSSL would ask the terminal for the password of an encrypted key.
        context.load_cert_chain(files.certificate, files.key, password="")
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            problem = f"{files.key} is not the key of the certificate in {files.certificate}"
        else:
            reason = error.reason or "no PEM key"
            problem = f"{files.key} has no usable private key ({reason}); give it as PEM, not encrypted"
        raise CertificateError(f"tls_key: {problem}") from error
    if files.client_ca is not None:
        context.verify_mode = ssl.CERT_REQUIRED
        _trust(context, "tls_client_ca", files.client_ca)
    return context


def _trust(context: ssl.SSLContext, name: str, path: Path) -> None:
    try:
        context.load_verify_locations(path)
    except (ssl.SSLError, OSError) as error:
        raise CertificateError(f"{name}: {path} has no certificate in PEM") from error
