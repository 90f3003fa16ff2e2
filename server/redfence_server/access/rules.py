"""Hold everything that the operator's files say about access, as one value that a reload replaces whole."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

from redfence_server.access.policy import Grants, Policy
from redfence_server.access.policy_file import load_policy
from redfence_server.access.principal import ANONYMOUS, Identity, Kind, Principal, name_problem
from redfence_server.access.tokens import StaticTokens, digest_of, load_tokens
from redfence_server.errors import ConfigError, UnauthenticatedError

BEARER_BYTES_MAX: Final = 8 * 1024
# How many identities and principals are remembered, so that a call does not check a signature again.
_REMEMBERED_MAX: Final = 4_096
_SUBJECT_ALTERNATIVE_NAMES: Final = "x509_subject_alternative_name"


class TokenReader(Protocol):
    """Recognises tokens that carry their own proof."""

    def identify(self, token: str) -> Identity:
        """Return the identity that the token proves.

        Raises:
            UnauthenticatedError: it proves none.
        """


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Where the operator's files are; without a policy, everything is allowed."""

    policy_file: Path | None = None
    tokens_file: Path | None = None
    jwt_jwks_file: Path | None = None
    jwt_audience: str = ""
    jwt_issuer: str = ""


class Rules:
    """Tells who a caller is, and what it may do, until the next reload; without a policy, everything.

    Attributes:
        policy: None if there is none.
    """

    def __init__(
        self,
        policy: Policy | None = None,
        tokens: StaticTokens | None = None,
        jwt: TokenReader | None = None,
    ) -> None:
        self.policy = policy
        self._tokens = tokens
        self._jwt = jwt
        # By the SHA-256 of the token, because a secret should not stay in memory. Only valid tokens are kept,
        # so that a stranger cannot fill it.
        self._identities: dict[bytes, Identity] = {}
        self._grants: dict[Principal, Grants] = {}

    def grants_of(self, principal: Principal) -> Grants | None:
        """Return what the policy lets the principal do; None without a policy."""
        if self.policy is None:
            return None
        grants = self._grants.get(principal)
        if grants is None:
            grants = self.policy.grants_of(principal)
            _make_room(self._grants)
            self._grants[principal] = grants
        return grants

    def by_token(self, bearer: str) -> Identity:
        """Return the identity that a bearer token proves, or once proved: compare its expiry with the time.

        Raises:
            UnauthenticatedError: the token is not valid.
        """
        if not bearer or len(bearer) > BEARER_BYTES_MAX:
            raise UnauthenticatedError(
                f"the bearer token has {len(bearer)} characters; 1 to {BEARER_BYTES_MAX} are allowed"
            )
        digest = digest_of(bearer)
        identity = self._identities.get(digest)
        if identity is None:
            identity = self._prove(bearer, digest)
            _make_room(self._identities)
            self._identities[digest] = identity
        return identity

    def _prove(self, bearer: str, digest: bytes) -> Identity:
        if self._tokens is not None and (known := self._tokens.identify(digest)) is not None:
            return known
        if self._jwt is not None:
            return self._jwt.identify(bearer)
        raise UnauthenticatedError("this server does not know the bearer token")


def _make_room(remembered: MutableMapping[Any, Any]) -> None:
    if len(remembered) >= _REMEMBERED_MAX:
        remembered.clear()


def by_certificate(certificate: Mapping[str, object]) -> Identity:
    """Return the identity of a verified client certificate, given as gRPC's auth context; else anonymous.

    Raises:
        UnauthenticatedError: its name is no principal's name.
    """
    names = certificate.get(_SUBJECT_ALTERNATIVE_NAMES)
    if not isinstance(names, list | tuple) or not names:
        return Identity(ANONYMOUS)
    name = bytes(names[0]).decode(errors="replace")
    if problem := name_problem(name):
        raise UnauthenticatedError(f"the first subject alternative name of the client certificate {problem}")
    return Identity(Principal(Kind.CERT, name))


def load_rules(settings: AccessSettings) -> Rules:
    """Return what the operator's files say.

    Raises:
        ConfigError: a file cannot be read or is wrong, or a setting is missing; the message names it.
    """
    if settings.policy_file is None:
        for name in ("tokens_file", "jwt_jwks_file"):
            if getattr(settings, name) is not None:
                raise ConfigError(
                    f"{name}: it has no effect without policy_file, which says what its principals may do"
                )
        return Rules()
    return Rules(
        load_policy(settings.policy_file),
        None if settings.tokens_file is None else load_tokens(settings.tokens_file),
        None if settings.jwt_jwks_file is None else _load_jwt(settings, settings.jwt_jwks_file),
    )


def _load_jwt(settings: AccessSettings, jwks_file: Path) -> TokenReader:
    for name in ("jwt_audience", "jwt_issuer"):
        if not getattr(settings, name):
            raise ConfigError(
                f"{name}: missing; with jwt_jwks_file, set it, so that tokens made for others are refused"
            )
    try:
        # Only this setting needs the package PyJWT.
        from redfence_server.access.jwt_tokens import load_jwt_reader  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"jwt_jwks_file: it needs the package {error.name}, which is not installed; "
            "install it with: pip install 'redfence[jwt]'"
        ) from error
    return load_jwt_reader(jwks_file, audience=settings.jwt_audience, issuer=settings.jwt_issuer)
