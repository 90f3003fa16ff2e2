"""Listen on one address of the server: that of `listen`, or that of `admin_listen`."""

from __future__ import annotations

from typing import Any

from redfence_server.api import serving
from redfence_server.config import ServeConfig
from redfence_server.sharing.shares import ConnectionShares


class Listener:
    """A gRPC server for one address, with the files of TLS and the transport that the settings name.

    Args:
        setting: the one that names the address.
        shares, share_port, wrap: see `serving.new_server`.

    Attributes:
        server: takes the services, before `start`.
        port: on which it listens, after `start`.

    Raises:
        ConfigError: a setting or a file is wrong, or other machines would reach the address without TLS.
    """

    def __init__(
        self,
        config: ServeConfig,
        setting: str,
        *,
        shares: ConnectionShares | None = None,
        share_port: bool = False,
        wrap: serving.Wrap | None = None,
    ) -> None:
        self._setting = setting
        self._address: str = getattr(config, setting)
        self._share_port = share_port
        self._certificates = serving.protection(
            self._address,
            cert=config.tls_cert,
            key=config.tls_key,
            client_ca=config.tls_client_ca,
            insecure=config.insecure,
            setting=setting,
        )
        self.server: Any = serving.new_server(
            config.transport, shares=shares, share_port=share_port, wrap=wrap
        )
        self.port = 0

    async def start(self) -> None:
        """Accept calls.

        Raises:
            ListenError: the address is malformed or in use.
        """
        self.port = serving.bind(
            self.server,
            self._address,
            certificates=self._certificates,
            share_port=self._share_port,
            setting=self._setting,
        )
        await self.server.start()

    def reload(self) -> None:
        """Look at the files of TLS now, and log whether new ones are good; open connections go on."""
        if self._certificates is not None:
            self._certificates.reload()
