"""Read and check the settings: a flag wins over the environment (`REDFENCE_…`), which wins over a TOML file.

Every setting has one name everywhere: `node_timeout_ms` is `--node-timeout-ms`, `REDFENCE_NODE_TIMEOUT_MS`,
and `node_timeout_ms` in the file. Values are checked once, here, and never change.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator
from pydantic_core import ErrorDetails

from redfence_proto import addresses, variables
from redfence_server.access.rules import AccessSettings
from redfence_server.cores import usable_cores
from redfence_server.errors import ConfigError
from redfence_server.http2.settings import Transport
from redfence_server.log_setup import LogFormat, LogLevel
from redfence_server.redis_io.dial import NodeTls
from redfence_server.redis_io.scripts import COUNTER_IDLE_MS_DEFAULT, COUNTER_IDLE_MS_MAX, Keyspace
from redfence_server.sharing.shares import BUFFERED_BYTES_MAX_DEFAULT

PROCESSES_MAX = 64
"""Each process has its own connections to every node."""
RELOADABLE = frozenset(
    {
        "buffered_bytes_max",
        "commands_max",
        "commands_server_max",
        "connections_max",
        "log_level",
        "new_resources_per_second",
        "waiters_max",
        "waiters_per_connection_max",
        "waiters_per_resource_max",
    }
)
"""The settings that a server takes over at SIGHUP."""

_BETWEEN_URLS = re.compile(r",\s*(?=rediss?://)")


class ServeConfig(BaseModel):
    """Settings of a lock server."""

    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True, validate_default=True)

    nodes: tuple[str, ...] = Field(
        description="URLs of the nodes, redis://[[USER]:PASSWORD@]HOST:PORT[/DB] or rediss://…, in the order "
        "in which the cluster was formed (flag: repeat --node; environment: separate by commas)"
    )
    listen: str = Field(addresses.LOCK_SERVER, description="HOST:PORT to serve on; port 0 takes any free one")
    admin_listen: str = Field(
        "",
        description="HOST:PORT to serve the admin service and reflection on, instead of on listen; empty: "
        "listen serves them",
    )
    tls_cert: Path | None = Field(
        None,
        description="PEM file of this server's certificate, with the intermediate ones; the port then speaks "
        "only TLS; a renewed file counts from the next connection on; without it, the port speaks plain text",
    )
    tls_key: Path | None = Field(None, description="PEM file of the certificate's private key, not encrypted")
    tls_client_ca: Path | None = Field(
        None, description="PEM file of authorities; a client must show a certificate of one of them"
    )
    insecure: bool = Field(
        default=False,
        description="serve without TLS on an address that other machines can reach",
    )
    metrics_listen: str = Field(
        "",
        description="HOST:PORT to serve /metrics, /livez and /readyz on by HTTP; empty: nowhere; "
        "the first of several processes takes this port, and each other one the port after it",
    )
    traces_endpoint: str = Field(
        "",
        description="URL to send OpenTelemetry spans to by OTLP/HTTP, e.g. http://127.0.0.1:4318/v1/traces; "
        "needs pip install 'redfence[traces]'; empty: send none",
    )
    processes: int = Field(
        1,
        ge=1,
        le=PROCESSES_MAX,
        description=f"how many processes share the port, 1 to {PROCESSES_MAX}, or auto: one for each core "
        "that this process may use; each counts waiters_max and waiters_per_resource_max for itself",
    )
    transport: Transport = Field(
        Transport.GRPCIO,
        description="what serves HTTP/2: grpcio, or fast, which needs pip install 'redfence[fast]'",
    )
    key_prefix: str = Field(
        "redfence:", description="prefix of every key on the nodes", pattern=r"^[^{}\s]*$"
    )
    node_tls_ca: Path | None = Field(
        None, description="PEM file of the authorities of the nodes with rediss:// (default: the system's)"
    )
    node_tls_cert: Path | None = Field(
        None, description="PEM file of the certificate that this process shows to the nodes with rediss://"
    )
    node_tls_key: Path | None = Field(
        None, description="PEM file of the private key of node_tls_cert, not encrypted"
    )
    node_timeout_ms: int = Field(
        500, ge=10, le=60_000, description="how long a node may take to answer a command"
    )
    dial_timeout_ms: int = Field(
        2_000, ge=10, le=60_000, description="how long each step of connecting to a node may take"
    )
    start_timeout_ms: int = Field(
        0,
        ge=0,
        le=600_000,
        description="how long to wait at the start for a quorum of nodes before giving up; 0 never gives up",
    )
    heartbeat_interval_ms: int = Field(
        500, ge=100, le=60_000, description="how often to examine each node: its identity, settings and clock"
    )
    counter_idle_ms: int = Field(
        COUNTER_IDLE_MS_DEFAULT,
        ge=1_000,
        le=COUNTER_IDLE_MS_MAX,
        description="how long a node keeps the counter of an unused resource; less while a node is short of "
        "memory",
    )
    waiters_max: int = Field(
        20_000,
        ge=1,
        le=1_000_000,
        description="how many acquires may wait at a server process; one peer gets at most "
        "half, rounded up (docs/security.md says what a peer is)",
    )
    waiters_per_resource_max: int = Field(
        2_000, ge=1, le=1_000_000, description="how many acquires may wait for one resource"
    )
    waiters_per_connection_max: int = Field(
        5_000, ge=1, le=1_000_000, description="how many acquires may wait on one connection"
    )
    commands_max: int = Field(
        10_000, ge=1, le=1_000_000, description="how many commands of one stream may be unanswered"
    )
    commands_server_max: int = Field(
        200_000,
        ge=1_000,
        le=10_000_000,
        description="how many commands of all streams of a server process may be unanswered; one peer gets "
        "at most half (docs/security.md says what a peer is)",
    )
    connections_max: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="how many connections may be open, only with the transport fast; one peer gets at most "
        "half; 0: the limit of open files less 128",
    )
    buffered_bytes_max: int = Field(
        BUFFERED_BYTES_MAX_DEFAULT,
        ge=4 * 1024 * 1024,
        le=2**40,
        description="how many bytes of open calls and unread answers the server may keep, only with "
        "the transport fast; one peer gets at most half",
    )
    new_resources_per_second: int = Field(
        1_000,
        ge=0,
        le=1_000_000,
        description="how many new resource names one peer may acquire per second, and twice as many at once; "
        "0: any number",
    )
    policy_file: Path | None = Field(
        None,
        description="a TOML file that says which principal may do what; without it, every caller may do "
        "everything",
    )
    tokens_file: Path | None = Field(
        None, description="a TOML file with the names and SHA-256 of bearer tokens"
    )
    jwt_jwks_file: Path | None = Field(
        None, description="a JSON Web Key Set; accepts JWTs as bearer tokens; needs 'redfence[jwt]'"
    )
    jwt_audience: str = Field("", description="the audience that a JWT must name")
    jwt_issuer: str = Field("", description="the issuer that a JWT must name")
    reflection: bool = Field(
        default=True, description="serve gRPC reflection, which describes the contract to anyone who asks"
    )
    audit_log: str = Field(
        "", description="the file for the audit log, or - for standard error; empty for none"
    )
    drain_grace_ms: int = Field(
        10_000, ge=0, le=600_000, description="how long unfinished calls may take after SIGTERM"
    )
    drain_notice_ms: int = Field(
        250,
        ge=0,
        le=600_000,
        description="for how much of drain_grace_ms a stopping server goes on taking connections: it answers "
        "calls with DRAINING and health checks with NOT_SERVING, so that a load balancer can see it",
    )
    assume_durable: bool = Field(
        default=False,
        description="declare that a restarted node has forgotten nothing, if the node cannot prove it",
    )
    log_format: LogFormat = Field(LogFormat.AUTO, description="json, console, or auto: console on a terminal")
    log_level: LogLevel = Field(LogLevel.INFO, description="debug, info, warning or error")

    @field_validator("policy_file", "tokens_file", "jwt_jwks_file", mode="before")
    @classmethod
    def _unset_if_empty(cls, value: Any) -> Any:
        return value or None

    @field_validator("nodes", mode="before")
    @classmethod
    def _split_nodes(cls, value: Any) -> Any:
        # A password may have a comma, so a comma separates only before the scheme of the next URL.
        return tuple(filter(None, _BETWEEN_URLS.split(value))) if isinstance(value, str) else value

    @field_validator("processes", mode="before")
    @classmethod
    def _count_cores(cls, value: Any) -> Any:
        if value == "auto":
            return min(usable_cores(), PROCESSES_MAX)
        if isinstance(value, str) and not value.isdecimal():
            raise ValueError(f"{value!r} is not a number from 1 to {PROCESSES_MAX} or auto")
        return value

    @field_validator("tls_key")
    @classmethod
    def _fits_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        return _both(value, info, of="tls_cert")

    @field_validator("tls_client_ca")
    @classmethod
    def _needs_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        if value is not None and info.data.get("tls_cert") is None:
            raise ValueError("it needs TLS; set tls_cert and tls_key as well")
        return value

    @field_validator("node_tls_ca", "node_tls_cert")
    @classmethod
    def _needs_rediss(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        urls = info.data.get("nodes", ())
        if value is not None and urls and not any(url.startswith("rediss://") for url in urls):
            raise ValueError("no node's URL starts with rediss://, so no connection to a node uses TLS")
        return value

    @field_validator("node_tls_key")
    @classmethod
    def _fits_node_certificate(cls, value: Path | None, info: ValidationInfo) -> Path | None:
        return _both(value, info, of="node_tls_cert")

    @property
    def node_tls(self) -> NodeTls:
        """The files for the connections to nodes."""
        return NodeTls(self.node_tls_ca, self.node_tls_cert, self.node_tls_key)

    @property
    def keyspace(self) -> Keyspace:
        """The names of the keys on the nodes."""
        return Keyspace(prefix=self.key_prefix, counter_idle_ms=self.counter_idle_ms)

    @property
    def access(self) -> AccessSettings:
        """Where to read who may do what."""
        return AccessSettings(
            policy_file=self.policy_file,
            tokens_file=self.tokens_file,
            jwt_jwks_file=self.jwt_jwks_file,
            jwt_audience=self.jwt_audience,
            jwt_issuer=self.jwt_issuer,
        )


def _both(value: Path | None, info: ValidationInfo, *, of: str) -> Path | None:
    """Return the file of a key if the file `of` its certificate is set as well, or neither."""
    if (value is None) != (info.data.get(of) is None):
        raise ValueError(f"it and {of} belong together; set both or neither")
    return value


def load(
    flags: Mapping[str, Any],
    *,
    config_file: Path | None = None,
    command_defaults: Mapping[str, Any] = MappingProxyType({}),
) -> ServeConfig:
    """Return the checked settings; a flag, the environment or the file wins over the command's defaults.

    Raises:
        ConfigError: a value is wrong or a setting unknown; the message names it.
    """
    from_file = {} if config_file is None else _read_file(config_file)
    return _checked({**command_defaults, **from_file, **_from_environment(), **flags})


def nodes_in(config_file: Path) -> tuple[str, ...]:
    """Return the nodes that a settings file names, whatever the environment says.

    Raises:
        ConfigError: the file cannot be read or names none, or a value in it is wrong.
    """
    return _checked(_read_file(config_file)).nodes


def _checked(values: Mapping[str, Any]) -> ServeConfig:
    try:
        return ServeConfig(**values)
    except ValidationError as error:
        problems = (f"{'.'.join(map(str, each['loc']))}: {_describe(each)}" for each in error.errors())
        raise ConfigError("; ".join(problems)) from error


def _describe(problem: ErrorDetails) -> str:
    if problem["type"] == "missing" and problem["loc"] == ("nodes",):
        return f"missing; name them by --node, {variables.PREFIX}NODES, or nodes in the file for --config"
    return problem["msg"].removeprefix("Value error, ")


def _from_environment() -> dict[str, str]:
    """Return the settings in the environment; the console has refused misspelt ones."""
    settings = {name.upper(): name for name in ServeConfig.model_fields}
    return {settings[name]: value for name, value in variables.given().items() if name in settings}


def _read_file(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"config: cannot read {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"config: {path} is not TOML: {error}") from error
