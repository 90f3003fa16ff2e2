"""Hold the port that the workers of one supervisor share."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from redfence_server.api import serving as grpc_serving


def _addresses(host: str, port: int) -> list[tuple[int, tuple[Any, ...]]]:
    """Return the families and addresses that a worker listens on; a wildcard means both families."""
    hosts = ("0.0.0.0", "::") if host in {"0.0.0.0", "::"} and socket.has_dualstack_ipv6() else (host,)
    found = (each for name in hosts for each in socket.getaddrinfo(name, port, type=socket.SOCK_STREAM))
    return [(family, address) for family, _, _, _, address in found]


@contextmanager
def hold_port(listen: str) -> Iterator[int]:
    """Hold HOST:PORT within `with` for this user's processes that share it, and yield the port.

    The held sockets never listen, so the kernel gives them no connection. No other server can take the port,
    even while no worker serves. Port 0 takes any free one. Two supervisors that take one port in the same
    few microseconds do not notice each other.

    Raises:
        ListenError: the address is malformed or in use.
    """
    host, port = grpc_serving.parse_listen(listen)
    with ExitStack() as held:
        try:
            for family, address in _addresses(host, port):
                own = (address[0], port, *address[2:])
                grpc_serving.probe(family, own)
                # The first socket may meet connections of an earlier server that are in TIME_WAIT. Linux
                # would let a server that reuses addresses bind beside it, until a worker listens. The second
                # socket, which reuses none, forbids that (test_no_other_server_takes_a_port_that_is_held).
                for reuses_addresses in (1, 0):
                    holder = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
                    if family == socket.AF_INET6:
                        holder.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuses_addresses)
                    holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                    holder.bind(own)
                    port = holder.getsockname()[1]
                    own = (address[0], port, *address[2:])
        except OSError as error:
            raise grpc_serving.cannot_listen(listen, error.strerror) from error
        yield port
