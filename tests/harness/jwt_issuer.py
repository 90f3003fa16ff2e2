"""An issuer of JSON Web Tokens, honest or not: what tests sign tokens with."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from jwt.algorithms import ECAlgorithm, OKPAlgorithm, RSAAlgorithm

AUDIENCE = "redfence"
ISSUER = "https://issuer.example"
CLAIMS: dict[str, Any] = {"sub": "billing", "aud": AUDIENCE, "iss": ISSUER}


class JwtIssuer:
    """One key of its own for each algorithm; the key's id is the algorithm's name."""

    def __init__(self) -> None:
        self.keys: dict[str, Any] = {
            "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
            "ES256": ec.generate_private_key(ec.SECP256R1()),
            "EdDSA": ed25519.Ed25519PrivateKey.generate(),
        }

    def write_key_set(self, path: Path, *algorithms: str) -> None:
        """Write the public keys, as an operator would."""
        kinds: dict[str, Any] = {"RS256": RSAAlgorithm, "ES256": ECAlgorithm, "EdDSA": OKPAlgorithm}
        keys = [
            {**json.loads(kinds[name].to_jwk(self.keys[name].public_key())), "kid": name, "alg": name}
            for name in algorithms or self.keys
        ]
        path.write_text(json.dumps({"keys": keys}))

    def token(self, algorithm: str = "ES256", *, valid_for_s: float = 60.0, **claims: Any) -> str:
        """Return a signed token; a claim of None is left out."""
        content = {**CLAIMS, "exp": time.time() + valid_for_s, **claims}
        present = {name: value for name, value in content.items() if value is not None}
        return jwt.encode(present, self.keys[algorithm], algorithm, headers={"kid": algorithm})
