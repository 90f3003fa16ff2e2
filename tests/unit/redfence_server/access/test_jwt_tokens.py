"""JSON Web Tokens: which are accepted, and a table of the forged ones."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Callable
from pathlib import Path

import jwt
import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from harness.jwt_issuer import AUDIENCE, CLAIMS, ISSUER, JwtIssuer
from redfence_server.access.jwt_tokens import JwtReader, load_jwt_reader
from redfence_server.access.rules import AccessSettings, Rules, load_rules
from redfence_server.errors import ConfigError, UnauthenticatedError

ISSUER_OF_OURS, STRANGER = JwtIssuer(), JwtIssuer()


@pytest.fixture
def reader(tmp_path: Path) -> JwtReader:
    path = tmp_path / "jwks.json"
    ISSUER_OF_OURS.write_key_set(path)
    return load_jwt_reader(path, audience=AUDIENCE, issuer=ISSUER)


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA"])
def test_a_signed_token_proves_its_subject_until_it_expires(reader: JwtReader, algorithm: str) -> None:
    expires_at_s = int(time.time()) + 60
    identity = reader.identify(ISSUER_OF_OURS.token(algorithm, exp=expires_at_s))
    assert str(identity.principal) == "jwt:billing"
    assert identity.expires_at_ms == expires_at_s * 1000


def encoded(content: object) -> str:
    return base64.urlsafe_b64encode(json.dumps(content).encode()).rstrip(b"=").decode()


def unsigned(header: dict[str, object]) -> str:
    return f"{encoded(header)}.{encoded({**CLAIMS, 'exp': time.time() + 60})}."


def with_public_key_as_secret() -> str:
    """Confuse RS256 and HS256: a stranger who knows the public key could sign."""
    import hashlib
    import hmac

    public = ISSUER_OF_OURS.keys["RS256"].public_key()
    secret = public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    signed = unsigned({"alg": "HS256", "typ": "JWT", "kid": "RS256"}).rstrip(".")
    signature = hmac.digest(secret, signed.encode(), hashlib.sha256)
    return f"{signed}.{base64.urlsafe_b64encode(signature).rstrip(b'=').decode()}"


def changed() -> str:
    header, _, signature = ISSUER_OF_OURS.token().split(".")
    return f"{header}.{encoded({**CLAIMS, 'sub': 'admin', 'exp': time.time() + 60})}.{signature}"


FORGED: dict[str, tuple[Callable[[], str], str]] = {
    "expired": (lambda: ISSUER_OF_OURS.token(valid_for_s=-10), "has expired"),
    "not valid yet": (lambda: ISSUER_OF_OURS.token(nbf=time.time() + 30), "not valid yet"),
    "another audience": (lambda: ISSUER_OF_OURS.token(aud="other"), "for another audience"),
    "another issuer": (lambda: ISSUER_OF_OURS.token(iss="https://evil.example"), "of another issuer"),
    "no exp": (lambda: ISSUER_OF_OURS.token(exp=None), "no claim 'exp'"),
    "no aud": (lambda: ISSUER_OF_OURS.token(aud=None), "no claim 'aud'"),
    "no iss": (lambda: ISSUER_OF_OURS.token(iss=None), "no claim 'iss'"),
    "no sub": (lambda: ISSUER_OF_OURS.token(sub=None), "no claim 'sub'"),
    "empty sub": (lambda: ISSUER_OF_OURS.token(sub=""), "'sub' of the bearer token is empty"),
    "huge sub": (lambda: ISSUER_OF_OURS.token(sub="x" * 300), "'sub' of the bearer token is 300"),
    "infinite exp": (lambda: ISSUER_OF_OURS.token(exp=float("inf")), "does not accept"),
    "alg none": (lambda: unsigned({"alg": "none", "kid": "ES256"}), "does not accept"),
    "alg None": (lambda: unsigned({"alg": "NoNe", "kid": "ES256"}), "does not accept"),
    "no alg": (lambda: unsigned({"kid": "ES256"}), "does not accept"),
    "key of another": (STRANGER.token, "does not accept"),
    "unknown key": (lambda: unsigned({"alg": "ES256", "kid": "other"}), "names no key"),
    "kid of no text": (lambda: unsigned({"alg": "ES256", "kid": {"a": 1}}), "does not accept"),
    "no kid": (lambda: unsigned({"alg": "ES256"}), "names no key"),
    "HS256 with the public key": (with_public_key_as_secret, "does not accept"),
    "changed claims": (changed, "does not accept"),
    "garbage": (lambda: "garbage", "does not accept"),
    "three dots": (lambda: "...", "does not accept"),
    "not ASCII": (lambda: "é.é.é", "does not accept"),
    "deep": (lambda: f"{base64.urlsafe_b64encode(b'[' * 3_000).decode()}.e30.e30", "does not accept"),
    "16 KB": (lambda: "x" * 16_384, "8192 are allowed"),
}


@pytest.mark.parametrize("kind", FORGED)
def test_a_forged_token_is_refused_with_a_reason_and_without_its_text(reader: JwtReader, kind: str) -> None:
    make, problem = FORGED[kind]
    token = make()
    with pytest.raises(UnauthenticatedError) as caught:
        Rules(jwt=reader).by_token(token)
    assert problem in str(caught.value)
    assert token not in str(caught.value)


def test_the_key_set_takes_public_keys_of_three_algorithms_only(tmp_path: Path) -> None:
    path = tmp_path / "jwks.json"
    private = json.loads(jwt.algorithms.ECAlgorithm.to_jwk(STRANGER.keys["ES256"]))
    for content, problem in (
        ("{", "is no JSON Web Key Set"),
        ("[]", "is no JSON Web Key Set"),
        ('{"keys": []}', "no public key for RS256, ES256, EdDSA"),
        ('{"keys": [{"kty": "oct", "k": "c2VjcmV0"}]}', "no public key for RS256, ES256, EdDSA"),
        (json.dumps({"keys": [private]}), "a key is private"),
    ):
        path.write_text(content)
        with pytest.raises(ConfigError, match="jwt_jwks_file") as caught:
            load_jwt_reader(path, audience=AUDIENCE, issuer=ISSUER)
        assert problem in str(caught.value)


def test_a_key_set_needs_an_audience_an_issuer_and_a_policy(tmp_path: Path) -> None:
    jwks, policy = tmp_path / "jwks.json", tmp_path / "policy.toml"
    ISSUER_OF_OURS.write_key_set(jwks)
    policy.write_text("rules = []")
    for settings, problem in (
        (AccessSettings(jwt_jwks_file=jwks), "jwt_jwks_file: it has no effect without policy_file"),
        (AccessSettings(policy, None, jwks, "", ISSUER), "jwt_audience: missing"),
        (AccessSettings(policy, None, jwks, AUDIENCE, ""), "jwt_issuer: missing"),
    ):
        with pytest.raises(ConfigError, match=problem):
            load_rules(settings)
