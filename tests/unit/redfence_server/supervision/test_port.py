"""The port of several workers: theirs alone, from the first moment."""

from __future__ import annotations

import socket

import pytest

from redfence_server.api.serving import ListenError, bind, new_server
from redfence_server.supervision.port import hold_port


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "0.0.0.0", "[::]"])
async def test_no_other_server_takes_a_port_that_is_held(host: str) -> None:
    """Neither a single server nor a supervisor does, also while no worker listens; two workers do."""
    workers = [new_server(share_port=True), new_server(share_port=True)]
    single = new_server()
    try:
        with hold_port(f"{host}:0") as port:
            address = f"{host}:{port}"
            for _ in range(2):
                with pytest.raises(ListenError, match="Address already in use"):
                    bind(single, address)
                with pytest.raises(ListenError, match="Address already in use"), hold_port(address):
                    pass
                if host in {"0.0.0.0", "[::]"}:
                    for family, wildcard in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
                        with pytest.raises(OSError, match="Address already in use"):
                            socket.create_server((wildcard, port), family=family)
                with pytest.raises(ConnectionRefusedError):
                    socket.create_connection(("127.0.0.1", port))
            for worker in workers:
                assert bind(worker, address, share_port=True) == port
                await worker.start()
            with pytest.raises(ListenError, match="Address already in use"):
                bind(single, address)
        for worker in workers:
            await worker.stop(0)
        assert bind(single, address) == port
    finally:
        for server in (*workers, single):
            await server.stop(0)


def test_connections_of_an_earlier_server_do_not_keep_the_port() -> None:
    """They stay in TIME_WAIT for a minute, which no restart should last."""
    with socket.create_server(("127.0.0.1", 0)) as earlier:
        port = earlier.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        with earlier.accept()[0] as connection:
            # It closes first, so its end is the one that waits.
            connection.shutdown(socket.SHUT_WR)
            assert client.recv(1) == b""
            client.close()
    with hold_port(f"127.0.0.1:{port}") as held:
        assert held == port


def test_an_address_that_is_none_is_named() -> None:
    for address in ("50051", "127.0.0.1:65536"):
        with pytest.raises(ListenError, match=f"'{address}' is not HOST:PORT"), hold_port(address):
            pass
