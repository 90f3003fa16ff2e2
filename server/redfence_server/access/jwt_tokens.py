"""Recognise JSON Web Tokens by the public keys of a JWKS file.

The key decides the algorithm, never the token: so neither `alg: none`, nor a public key as the secret of an
HMAC, nor another algorithm is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import jwt

from redfence_server.access.operator_file import read_text
from redfence_server.access.principal import Identity, Kind, Principal, name_problem
from redfence_server.errors import ConfigError, UnauthenticatedError

ALGORITHMS: Final = ("RS256", "ES256", "EdDSA")
# How much the clock of an issuer may be ahead, for `nbf` and `iat`. For `exp` the guard counts no such time.
_LEEWAY_S: Final = 5.0


class JwtReader:
    """Accepts tokens that a key of the set signed, for one audience, by one issuer, within their time."""

    def __init__(self, keys: Sequence[jwt.PyJWK], *, audience: str, issuer: str) -> None:
        self._keys = tuple(keys)
        self._audience = audience
        self._issuer = issuer

    def identify(self, token: str) -> Identity:
        """Return the token's subject, and when the token expires.

        The signature is checked before the claims, so an error about a claim tells a stranger nothing.

        Raises:
            UnauthenticatedError: the token is not valid; the message says why, and has nothing of the token.
        """
        try:
            key = self._key_for(jwt.get_unverified_header(token))
            claims: dict[str, Any] = jwt.decode(
                token,
                key,
                algorithms=[key.algorithm_name],
                audience=self._audience,
                issuer=self._issuer,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "aud", "iss", "sub"]},
            )
        except jwt.ExpiredSignatureError as error:
            raise UnauthenticatedError("the bearer token has expired; get a new one") from error
        except jwt.ImmatureSignatureError as error:
            raise UnauthenticatedError("the bearer token is not valid yet; compare the clocks") from error
        except jwt.InvalidAudienceError as error:
            raise UnauthenticatedError("the bearer token is for another audience") from error
        except jwt.InvalidIssuerError as error:
            raise UnauthenticatedError("the bearer token is of another issuer") from error
        except jwt.MissingRequiredClaimError as error:
            raise UnauthenticatedError(f"the bearer token has no claim {error.claim!r}") from error
        except (jwt.PyJWTError, ValueError, RecursionError) as error:
            raise UnauthenticatedError("this server does not accept the bearer token") from error
        return _identity(claims)

    def _key_for(self, header: Mapping[str, Any]) -> jwt.PyJWK:
        wanted = header.get("kid")
        found = [key for key in self._keys if wanted is None or key.key_id == wanted]
        if len(found) != 1:
            raise UnauthenticatedError("the bearer token names no key of this server's key set")
        return found[0]


def _identity(claims: Mapping[str, Any]) -> Identity:
    subject: str = claims["sub"]
    if problem := name_problem(subject):
        raise UnauthenticatedError(f"the claim 'sub' of the bearer token {problem}")
    return Identity(Principal(Kind.JWT, subject), float(claims["exp"]) * 1000)


def load_jwt_reader(path: Path, *, audience: str, issuer: str) -> JwtReader:
    """Return the reader for the keys of a JWKS file; it ignores keys that are not for its algorithms.

    Raises:
        ConfigError: the file cannot be read, is no key set, or has no key for `ALGORITHMS`.
    """
    try:
        content = json.loads(read_text(path, setting="jwt_jwks_file"))
        keys = list(_signing_keys(content["keys"]))
    except (ValueError, KeyError, TypeError, AttributeError, jwt.PyJWTError) as error:
        raise ConfigError(f"jwt_jwks_file: {path} is no JSON Web Key Set: {error!r}") from error
    if not keys:
        raise ConfigError(f"jwt_jwks_file: {path} has no public key for {', '.join(ALGORITHMS)}")
    named = [key.key_id for key in keys]
    if len(keys) > 1 and (None in named or len(set(named)) < len(named)):
        raise ConfigError(f"jwt_jwks_file: {path} has several keys, so that each needs a 'kid' of its own")
    return JwtReader(keys, audience=audience, issuer=issuer)


def _signing_keys(keys: Sequence[dict[str, Any]]) -> Iterator[jwt.PyJWK]:
    for each in keys:
        if each.get("use", "sig") != "sig" or each.get("kty") == "oct":
            continue
        if "d" in each:
            raise ValueError("a key is private; the file needs public keys only")
        if each.get("alg", ALGORITHMS[0]) not in ALGORITHMS:
            continue
        key = jwt.PyJWK(each)
        if key.algorithm_name in ALGORITHMS:
            yield key
