"""Turn the metadata of each call into a caller, and hold the rules that apply now."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, NoReturn, Protocol

import structlog

from redfence_server.access.audit import AuditLog
from redfence_server.access.policy import Grants, Verb
from redfence_server.access.principal import ANONYMOUS, Identity
from redfence_server.access.rules import Rules, by_certificate
from redfence_server.clock import WallClock
from redfence_server.errors import ConfigError, PermissionDeniedError, UnauthenticatedError

_SCHEME: Final = "bearer"
_FIX: Final = "send a client certificate, or the metadata 'authorization: Bearer TOKEN'"


class CallContext(Protocol):
    """What the guard needs to know of a call; gRPC's context has it."""

    def peer(self) -> str:
        """Return the address of the caller."""

    def invocation_metadata(self) -> Any:
        """Return the metadata as pairs."""

    def auth_context(self) -> Mapping[str, Any]:
        """Return what TLS has proved about the caller."""


class Guard:
    """Identifies callers by the present rules.

    Args:
        load: reads the operator's files.
        audit: where to write what callers did, or None.

    Attributes:
        rules: the rules that apply now.
        watched: the callers whose credentials are checked again at each reload.

    Raises:
        ConfigError: the files are wrong.
    """

    def __init__(self, load: Callable[[], Rules], *, clock: WallClock, audit: AuditLog | None = None) -> None:
        self._load = load
        self.rules = load()
        self.watched: set[Caller] = set()
        self.clock = clock
        self.audit = audit

    def admit(self, context: CallContext) -> Caller:
        """Return the caller of a call.

        Raises:
            UnauthenticatedError: its credentials are not valid, or it has none and the policy grants nothing
                without.
        """
        caller = Caller(self, context)
        caller.recheck()
        return caller

    def close(self) -> None:
        """Close the audit log."""
        if self.audit is not None:
            self.audit.close()

    def reload(self) -> None:
        """Read the files again, and open the audit log anew, because a rotation may have renamed it.

        If a file is wrong, everything that was read before stays in force, and an error is logged.
        """
        log = structlog.get_logger()
        if self.audit is not None:
            self.audit.reopen()
        try:
            self.rules = self._load()
        except ConfigError as error:
            consequence = "the earlier rules stay in force"
            log.error("access_not_reloaded", problem=str(error), consequence=consequence)  # noqa: TRY400
            return
        log.info("access_reloaded")
        for caller in list(self.watched):
            caller.end_if_invalid()


class Caller:
    """One caller, for the time of one call.

    Attributes:
        peer: its address.
        on_invalid: called when its credentials are found to be not valid any more.
    """

    __slots__ = ("_context", "_grants", "_guard", "_identity", "_rules", "on_invalid", "peer")

    def __init__(self, guard: Guard, context: CallContext) -> None:
        self._guard = guard
        self._context = context
        self._rules: Rules | None = None
        self._identity = Identity(ANONYMOUS)
        self._grants: Grants | None = None
        self.peer = context.peer()
        self.on_invalid: Callable[[UnauthenticatedError], None] = ignore

    @property
    def principal(self) -> str:
        """The text of its principal."""
        return str(self._identity.principal)

    @property
    def is_anonymous(self) -> bool:
        """Whether the caller proved no name."""
        return self._identity.principal == ANONYMOUS

    @property
    def valid_for_ms(self) -> float:
        """How long its credentials are still valid; infinite if they never expire."""
        return self._identity.expires_at_ms - self._guard.clock.wall_ms()

    def recheck(self) -> None:
        """Return if its credentials are valid, by the present rules and at the present time.

        Raises:
            UnauthenticatedError: they are not, or it has none and the policy grants nothing without.
        """
        try:
            if self._rules is not self._guard.rules:
                self._identify(self._guard.rules)
            self._check_time()
        except UnauthenticatedError as error:
            self.record("authenticate", "unauthenticated", problem=str(error))
            raise

    def end_if_invalid(self) -> None:
        """Call `on_invalid` if its credentials are not valid any more."""
        try:
            self.recheck()
        except UnauthenticatedError as error:
            self.on_invalid(error)

    def check(self, verb: Verb, resource: str) -> int:
        """Return the least lock delay, in ms, if the caller may do this to the resource.

        The resource's name is empty for a call without one.

        Raises:
            UnauthenticatedError: its credentials are not valid any more, or it has none and needs some.
            PermissionDeniedError: the policy does not grant it.
        """
        self._recheck_if_due()
        if self._grants is None:
            return 0
        decision = self._grants.decide(verb, resource)
        if not decision.allowed or decision.rule is None:
            self._deny(verb, resource)
        return decision.rule.lock_delay_ms

    def check_all(self, verb: Verb, prefix: str) -> None:
        """Return if the caller may do this to every resource with the prefix; raise as `check`."""
        self._recheck_if_due()
        if self._grants is not None and not self._grants.decide_all(verb, prefix).allowed:
            self._deny(verb, prefix)

    def record(self, event: str, outcome: str, **more: Any) -> None:
        """Write a line about this caller to the audit log, if there is one; see `AuditLog.record`."""
        if self._guard.audit is not None:
            self._guard.audit.record(event, outcome, principal=self.principal, peer=self.peer, **more)

    def _identify(self, rules: Rules) -> None:
        # Without a policy a token means nothing, and a proxy may have sent it for itself.
        bearer = _bearer(self._context.invocation_metadata()) if rules.policy is not None else None
        certificate = self._context.auth_context()
        identity = by_certificate(certificate) if bearer is None else rules.by_token(bearer)
        grants = rules.grants_of(identity.principal)
        if identity.principal == ANONYMOUS and grants is not None and grants.are_empty:
            raise UnauthenticatedError(f"the server needs credentials; {_FIX}")
        # Last, so that the next check asks a caller again whose credentials are not valid.
        self._rules, self._identity, self._grants = rules, identity, grants

    def _check_time(self) -> None:
        if self.valid_for_ms <= 0:
            raise UnauthenticatedError("the bearer token has expired; get a new one")

    def _recheck_if_due(self) -> None:
        if self._rules is self._guard.rules and self._identity.expires_at_ms == math.inf:
            return
        try:
            self.recheck()
        except UnauthenticatedError as error:
            self.on_invalid(error)
            raise

    def _deny(self, verb: Verb, resource: str) -> NoReturn:
        what = f"the verb {verb.value} " + (f"on {resource!r}" if resource else "without a resource")
        details = {"principal": self.principal, "verb": verb.value, "resource": resource}
        error: UnauthenticatedError | PermissionDeniedError
        if self._identity.principal == ANONYMOUS:
            outcome = "unauthenticated"
            error = UnauthenticatedError(f"{what} needs credentials; {_FIX}", details)
        else:
            outcome = "permission_denied"
            error = PermissionDeniedError(f"the policy does not grant {self.principal} {what}", details)
        self.record(verb.value, outcome, resource=resource)
        raise error


def ignore(_: object) -> None:
    """Do nothing."""


def _bearer(metadata: Iterable[tuple[str, str | bytes]]) -> str | None:
    values = [value for key, value in metadata if key == "authorization"]
    if not values:
        return None
    scheme, _, token = str(values[0]).partition(" ")
    if len(values) > 1 or scheme.lower() != _SCHEME:
        raise UnauthenticatedError("the metadata needs one value 'authorization: Bearer TOKEN', and no other")
    return token.strip()
