"""Writes what a server, its good client and an attacker need for an attack on access control."""

from __future__ import annotations

import json
import secrets
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import grpc
import jwt

from harness.jwt_issuer import AUDIENCE, CLAIMS, ISSUER, JwtIssuer
from harness.processes.certificates import Authority, Certificate
from harness.processes.ports import HOST
from redfence_server.access.tokens import digest_of

WITH_STORAGE: Final = frozenset({"foreign_fences"})
"""The attacks on a storage, which has the policy of the server."""
WITH_ACCESS: Final = frozenset({"bad_tokens", "foreign_prefix", *WITH_STORAGE})
"""The attacks on a server with a policy."""
WITH_TLS: Final = frozenset({"foreign_certificates"})
"""The attacks on a server that asks for client certificates."""
TOKENS_OF_A_KIND: Final = 500
_POLICY: Final = """
[[rules]]
principals = ["jwt:good"]
verbs = ["acquire", "inspect", "storage"]
prefix = "good/"

[[rules]]
principals = ["token:stranger"]
verbs = ["acquire"]
prefix = "stranger/"
"""


@dataclass
class Site:
    """How to start the server, and how the good client reaches it.

    Attributes:
        arguments: those of `redfence serve`, and of `redfence storage` if there is one.
        metadata: what the good client sends with each call.
        credentials: those of the good client's connections; None for plain text.
        lease_id: the secret of the lock that the good client holds; attackers with a policy know it.
        storage: the address of the storage in which the good client writes under its locks; empty for none.
    """

    arguments: tuple[str, ...] = ()
    metadata: tuple[tuple[str, str], ...] = ()
    credentials: grpc.ChannelCredentials | None = None
    lease_id: str = field(default_factory=lambda: secrets.token_hex(16))
    storage: str = ""

    def channel(self, address: str) -> grpc.aio.Channel:
        """Return a channel with a connection of its own."""
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.credentials is None:
            return grpc.aio.insecure_channel(address, options=options)
        return grpc.aio.secure_channel(address, self.credentials, options=options)


def site_of(attack: str, folder: Path) -> Site:
    """Write to the folder what the attack needs, with `known.json` for the attacker; return the rest."""
    if attack in WITH_ACCESS:
        return _with_access(folder)
    if attack in WITH_TLS:
        return _with_tls(folder)
    (folder / "known.json").write_text("{}")
    return Site()


def _with_access(folder: Path) -> Site:
    issuer, stranger = JwtIssuer(), secrets.token_hex(32)
    policy, tokens, keys = (folder / name for name in ("policy.toml", "tokens.toml", "keys.json"))
    policy.write_text(_POLICY)
    tokens.write_text(f'[[tokens]]\nname = "stranger"\nsha256 = "{digest_of(stranger).hex()}"\n')
    issuer.write_key_set(keys)
    # The server accepts JWTs, or the good client would get nothing.
    good = issuer.token(sub="good", valid_for_s=3_600)
    site = Site(
        arguments=(
            *("--policy-file", str(policy), "--tokens-file", str(tokens), "--jwt-jwks-file", str(keys)),
            *("--jwt-audience", AUDIENCE, "--jwt-issuer", ISSUER),
        ),
        metadata=(("authorization", f"Bearer {good}"),),
    )
    known = {"lease_id": site.lease_id, "stranger": stranger, "tokens": _bad_tokens(issuer)}
    (folder / "known.json").write_text(json.dumps(known))
    return site


def _bad_tokens(issuer: JwtIssuer) -> dict[str, list[str]]:
    """Return tokens for the good client's principal, each a new one, by what is wrong with them."""
    forger = JwtIssuer()

    def unsigned(jti: str) -> str:
        claims = {**CLAIMS, "sub": "good", "exp": time.time() + 3_600, "jti": jti}
        return jwt.encode(claims, "", "none", headers={"kid": "ES256"})

    kinds = {
        "forged": lambda jti: forger.token(sub="good", jti=jti),
        "expired": lambda jti: issuer.token(sub="good", jti=jti, valid_for_s=-60),
        "wrong audience": lambda jti: issuer.token(sub="good", jti=jti, aud="another"),
        "alg none": unsigned,
    }
    return {kind: [make(uuid.uuid4().hex) for _ in range(TOKENS_OF_A_KIND)] for kind, make in kinds.items()}


def _with_tls(folder: Path) -> Site:
    folders = [folder / "authority", folder / "another"]
    for each in folders:
        each.mkdir()
    authority, another = map(Authority, folders)
    server, good, stranger = authority.issue(HOST), authority.issue("good"), another.issue("good")
    known = {
        "ca": str(authority.file),
        "certificate": str(stranger.certificate),
        "key": str(stranger.key),
    }
    (folder / "known.json").write_text(json.dumps(known))
    return Site(
        arguments=(
            *("--tls-cert", str(server.certificate), "--tls-key", str(server.key)),
            *("--tls-client-ca", str(authority.file)),
        ),
        credentials=Certificate(good.certificate, good.key, authority.file).credentials(),
    )
