"""Build the guard of a server from its settings."""

from __future__ import annotations

from functools import partial

from redfence_server.access.audit import AuditLog
from redfence_server.access.guard import Guard
from redfence_server.access.rules import AccessSettings, load_rules
from redfence_server.clock import WallClock


def open_guard(settings: AccessSettings, *, audit_log: str, clock: WallClock) -> Guard | None:
    """Return what identifies callers; None without a policy and an audit log.

    Raises:
        ConfigError: a file is wrong.
    """
    load = partial(load_rules, settings)
    # Before the audit log, whose thread would outlive the error.
    load()
    audit = AuditLog(audit_log, clock=clock) if audit_log else None
    return Guard(load, clock=clock, audit=audit) if settings.policy_file or audit else None
