"""Which files and addresses a server refuses at its start, and what it says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization

from harness.processes.certificates import Authority, Certificate, protection
from redfence_server import config
from redfence_server.api import serving
from redfence_server.errors import ConfigError


def refusal(
    certificate: Certificate | None, *, listen: str = "127.0.0.1:0", client_ca: Path | None = None
) -> str:
    with pytest.raises(ConfigError) as refused:
        protection(listen, certificate, client_ca=client_ca)
    return str(refused.value)


@pytest.mark.parametrize("listen", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_an_address_of_this_machine_alone_needs_no_tls(listen: str) -> None:
    assert protection(listen, None) is None


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "[::]:1", "10.0.0.1:1", "locks.example:1", "localhost.example:1"]
)
def test_an_address_that_others_reach_needs_tls_or_the_word_insecure(
    listen: str, certificate: Certificate
) -> None:
    refused = refusal(None, listen=listen)
    for way_out in (f"listen: {listen}", "set tls_cert and tls_key", "set insecure", "listen on 127.0.0.1"):
        assert way_out in refused
    assert serving.protection(listen, cert=None, key=None, client_ca=None, insecure=True) is None
    assert protection(listen, certificate) is not None


def _encrypt(certificate: Certificate) -> None:
    key = serialization.load_pem_private_key(certificate.key.read_bytes(), None)
    certificate.key.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.BestAvailableEncryption(b"secret"),
        )
    )


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (lambda files: files.certificate.unlink(), "tls_cert: cannot read {certificate}: No such file"),
        (lambda files: files.key.unlink(), "tls_key: cannot read {key}: No such file"),
        (
            lambda files: files.certificate.write_text("x"),
            "tls_cert: {certificate} has no certificate in PEM",
        ),
        (lambda files: files.key.write_text("x"), "tls_key: {key} has no usable private key"),
        (_encrypt, "tls_key: {key} has no usable private key"),
        (
            lambda files: files.key.write_bytes(
                Authority(files.key.parent / "other").issue("a").key.read_bytes()
            ),
            "tls_key: {key} is not the key of the certificate in {certificate}",
        ),
        (
            lambda files: files.authority.write_text("x"),
            "tls_client_ca: {authority} has no certificate in PEM",
        ),
    ],
)
def test_a_file_that_cannot_be_used_is_named_with_its_setting(
    spoil: Callable[[Certificate], object], reason: str, tmp_path: Path
) -> None:
    files = Authority(tmp_path / "own").issue("localhost")
    spoil(files)
    expected = reason.format(certificate=files.certificate, key=files.key, authority=files.authority)
    assert refusal(files, client_ca=files.authority).startswith(expected)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"tls_cert": "a"}, "tls_key: it and tls_cert belong together; set both or neither"),
        ({"tls_key": "a"}, "tls_key: it and tls_cert belong together; set both or neither"),
        ({"tls_client_ca": "a"}, "tls_client_ca: it needs TLS; set tls_cert and tls_key as well"),
    ],
)
def test_settings_of_tls_that_lack_others_are_refused(settings: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config.load({"nodes": (), **settings})
