"""Certificates of authorities that exist for one test."""

from __future__ import annotations

import shutil
import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc
import trustme
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey

from redfence_server.api import serving as grpc_serving
from redfence_server.api.certificates import Certificates


@dataclass(frozen=True, slots=True)
class Certificate:
    """The PEM files of a certificate, its key and its authority."""

    certificate: Path
    key: Path
    authority: Path

    def replace_by(self, other: Certificate) -> None:
        """Put the files of another certificate in the place of these, as a renewal does."""
        for own, new in ((self.certificate, other.certificate), (self.key, other.key)):
            replace_file(own, new)

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what gRPC needs to trust the authority, and to show this certificate."""
        return grpc.ssl_channel_credentials(
            self.authority.read_bytes(), self.key.read_bytes(), self.certificate.read_bytes()
        )


class Authority:
    """An authority that issues certificates; clients trust its file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._ca = trustme.CA()
        self._issued = 0
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "authority.pem"
        self._ca.cert_pem.write_to_path(self.file)

    def issue(self, *names: str, common_name: str | None = None) -> Certificate:
        """Return a new certificate for these names: hosts, addresses or `mailbox@host`."""
        issued = self._ca.issue_cert(*names, common_name=common_name)
        self._issued += 1
        folder = self._folder / f"certificate-{self._issued}"
        folder.mkdir()
        certificate = Certificate(folder / "certificate.pem", folder / "key.pem", self.file)
        issued.cert_chain_pems[0].write_to_path(certificate.certificate)
        issued.private_key_pem.write_to_path(certificate.key)
        return certificate

    def issue_uri(self, uri: str) -> Certificate:
        """Return a new certificate for a URI, such as a SPIFFE id, which trustme does not make."""
        usual = self.issue("replaced.example")
        key = serialization.load_pem_private_key(self._ca.private_key_pem.bytes(), None)
        assert isinstance(key, EllipticCurvePrivateKey)
        made = x509.load_pem_x509_certificate(usual.certificate.read_bytes())
        builder = x509.CertificateBuilder(
            made.issuer,
            made.subject,
            made.public_key(),
            made.serial_number,
            made.not_valid_before_utc,
            made.not_valid_after_utc,
        )
        for extension in made.extensions:
            value = extension.value
            if isinstance(value, x509.SubjectAlternativeName):
                value = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])
            builder = builder.add_extension(value, extension.critical)
        signed = builder.sign(key, hashes.SHA256())
        usual.certificate.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
        return usual

    def credentials(self) -> grpc.ChannelCredentials:
        """Return what gRPC needs to trust this authority; the client shows no certificate."""
        return grpc.ssl_channel_credentials(self.file.read_bytes())

    def client_context(self) -> ssl.SSLContext:
        """Return what Python needs to trust this authority, and to speak gRPC."""
        context = ssl.create_default_context(cafile=self.file)
        context.set_alpn_protocols(["h2"])
        return context


def protection(
    listen: str, certificate: Certificate | None, *, client_ca: Path | None = None
) -> Certificates | None:
    """Return what the server makes of these files for its port."""
    cert, key = (certificate.certificate, certificate.key) if certificate else (None, None)
    return grpc_serving.protection(listen, cert=cert, key=key, client_ca=client_ca, insecure=False)


def replace_file(old: Path, new: Path) -> None:
    """Put a copy of `new` in the place of `old` at once."""
    beside = old.with_suffix(".new")
    shutil.copy(new, beside)
    beside.replace(old)
