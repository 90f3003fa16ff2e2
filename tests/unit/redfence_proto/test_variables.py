"""Misspelt variables `REDFENCE_…`."""

from __future__ import annotations

import pytest

from redfence_proto import variables


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        *(("NODE", "NODES"), ("LISTEN_ADDR", "LISTEN"), ("LOGLEVEL", "LOG_LEVEL")),
        *(("timeout_ms", "NODE_TIMEOUT_MS"), ("STORAGE_DATABASE", "STORAGE_DB"), ("SERVERS", "SERVER")),
        *(("POLICY_FIL", "POLICY_FILE"), ("POLICY", "POLICY_FILE"), ("TOKENS", "TOKENS_FILE")),
        # Not similar, but with a word that protects, or with no word that is unknown.
        *(("CERT", "TLS_CERT"), ("TLS", "TLS_CA"), ("TLS_CERTIFICATE", "TLS_CERT")),
        *(("JWKS", "JWT_JWKS_FILE"), ("TIMEOUT", "DIAL_TIMEOUT_MS"), ("LOG", "LOG_LEVEL")),
    ],
)
def test_a_misspelt_variable_is_named_with_a_suggestion(
    variable: str, meant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"redfence_{variable}" if variable.islower() else f"REDFENCE_{variable}", "1")
    problem = variables.misspelt()
    assert problem is not None
    unknown, _, suggestion = problem.partition("; did you mean ")
    assert unknown == f"environment: REDFENCE_{variable.upper()} is no setting"
    assert f"REDFENCE_{meant}" in suggestion.removesuffix("?").split(" or ")


def test_an_environment_without_protection_keeps_everything_else(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {"REDFENCE_NODE_TIMEOUT_MS": "700", "REDFENCE_REDIS_SERVER": "/x", "CA": "others", "TLS_CERT": "o"}
    names = ("TLS_CA", "tls_key", "NODE_TLS_CERT", "BEARER_TOKEN", "POLICY_FILE", "JWT_ISSUER", "AUDIT_LOG")
    removed = {f"REDFENCE_{name}" for name in names} | {"redfence_insecure"}
    for name in removed:
        monkeypatch.setenv(name, "1")
    for name, value in kept.items():
        monkeypatch.setenv(name, value)
    environment = variables.without_protection()
    assert kept.items() <= environment.items()
    assert not removed & environment.keys()


def test_variables_of_all_programs_and_of_kubernetes_are_no_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = ("NODES", "POLICY_FILE", "tls_cert", "REDIS_SERVER")
    storage = ("STORAGE_DB", "STORAGE_LISTEN", "STORAGE_METRICS_LISTEN")
    clients = ("SERVER", "STORAGE", "TLS_CA", "BEARER_TOKEN", "BEARER_TOKEN_FILE", "PLAINTEXT_TOKEN")
    of_lock = ("RESOURCE", "TOKEN")
    ports = ("PORT", "PORT_50051_TCP", "PORT_50051_TCP_ADDR", "SERVICE_HOST", "SERVICE_PORT_GRPC")
    kubernetes = (*ports, *(f"STORAGE_{port}" for port in ports), *(f"TOKENS_{port}" for port in ports))
    others = ("REQUIRE_REDIS", "FUZZ_FACTOR", "STORM_SEED", "CLOCK_FILE", "LOCK_TIMEOUT", "VERSION")
    for name in (*servers, *storage, *clients, *of_lock, *kubernetes, *others):
        monkeypatch.setenv(f"REDFENCE_{name}", "1")
    assert variables.misspelt() is None
