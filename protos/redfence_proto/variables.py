"""Names the environment variables `REDFENCE_…` of all programs, and finds misspelt ones.

Servers, storage and clients often share one environment. So each program knows the variables of the others.
"""

from __future__ import annotations

import os
import re
from difflib import get_close_matches

PREFIX = "REDFENCE_"

SERVER = frozenset(
    [
        "ADMIN_LISTEN",
        "ASSUME_DURABLE",
        "AUDIT_LOG",
        "BUFFERED_BYTES_MAX",
        "COMMANDS_MAX",
        "COMMANDS_SERVER_MAX",
        "CONNECTIONS_MAX",
        "COUNTER_IDLE_MS",
        "DIAL_TIMEOUT_MS",
        "DRAIN_GRACE_MS",
        "DRAIN_NOTICE_MS",
        "HEARTBEAT_INTERVAL_MS",
        "INSECURE",
        "JWT_AUDIENCE",
        "JWT_ISSUER",
        "JWT_JWKS_FILE",
        "KEY_PREFIX",
        "LISTEN",
        "LOG_FORMAT",
        "LOG_LEVEL",
        "METRICS_LISTEN",
        "NEW_RESOURCES_PER_SECOND",
        "NODES",
        "NODE_TIMEOUT_MS",
        "NODE_TLS_CA",
        "NODE_TLS_CERT",
        "NODE_TLS_KEY",
        "POLICY_FILE",
        "PROCESSES",
        "REFLECTION",
        "START_TIMEOUT_MS",
        "TLS_CERT",
        "TLS_CLIENT_CA",
        "TLS_KEY",
        "TOKENS_FILE",
        "TRACES_ENDPOINT",
        "TRANSPORT",
        "WAITERS_MAX",
        "WAITERS_PER_CONNECTION_MAX",
        "WAITERS_PER_RESOURCE_MAX",
    ]
)
"""The settings of a lock server; a test compares them with the server's."""
_STORAGE = frozenset({"STORAGE_DB", "STORAGE_LISTEN", "STORAGE_METRICS_LISTEN"})
# Clients also read TLS_CERT and TLS_KEY of the server.
_CLIENTS = frozenset({"BEARER_TOKEN", "BEARER_TOKEN_FILE", "PLAINTEXT_TOKEN", "SERVER", "STORAGE", "TLS_CA"})
_DEV = frozenset({"REDIS_SERVER"})
_SETTABLE = SERVER | _STORAGE | _CLIENTS | _DEV
_FOR_COMMANDS = frozenset({"RESOURCE", "TOKEN"})  # `redfence lock` sets them

_WORDS = frozenset(word for name in _SETTABLE for word in name.split("_"))
# A variable with one of these words is meant to protect: a program that ignored it would be open to others.
_PROTECTING = frozenset(
    [
        "AUDIENCE",
        "AUDIT",
        "BEARER",
        "CA",
        "CERT",
        "INSECURE",
        "ISSUER",
        "JWKS",
        "JWT",
        "PLAINTEXT",
        "POLICY",
        "TLS",
        "TOKEN",
        "TOKENS",
    ]
)
# LISTEN_ADDR is similar to LISTEN.
_SIMILAR = 0.7
# Kubernetes sets these for each service whose name is redfence or begins with redfence-.
_KUBERNETES = re.compile(
    r"(.+_)?(SERVICE_HOST|SERVICE_PORT(_.+)?|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)


def given() -> dict[str, str]:
    """Return the variables of the environment that begin with `REDFENCE_`: names in capitals, without it."""
    return {
        name.upper().removeprefix(PREFIX): value
        for name, value in os.environ.items()
        if name.upper().startswith(PREFIX)
    }


def without_protection() -> dict[str, str]:
    """Return the environment without the variables of TLS, of access and of the audit log."""
    protecting = {
        name
        for name in os.environ
        if name.upper().startswith(PREFIX) and _PROTECTING & set(name.upper().split("_"))
    }
    return {name: value for name, value in os.environ.items() if name not in protecting}


def misspelt() -> str | None:
    """Return what is wrong with the environment, and a suggestion; None if no variable looks misspelt.

    Other unknown variables are no error: they belong to Kubernetes, or to programs around redfence.
    """
    for name in sorted(given().keys() - _SETTABLE - _FOR_COMMANDS):
        if not _KUBERNETES.fullmatch(name) and (meant := _meant(name)):
            suggestion = " or ".join(PREFIX + each for each in meant)
            return f"environment: {PREFIX}{name} is no setting; did you mean {suggestion}?"
    return None


def _meant(unknown: str) -> list[str]:
    """Return the variables that the unknown name probably stands for, the most similar first."""
    if similar := get_close_matches(unknown, sorted(_SETTABLE), cutoff=_SIMILAR):
        return similar
    words = frozenset(unknown.split("_"))
    telling = words & _PROTECTING or (words if words <= _WORDS else frozenset())
    related = sorted(name for name in _SETTABLE if telling & set(name.split("_")))
    return get_close_matches(unknown, related, cutoff=0.0)
