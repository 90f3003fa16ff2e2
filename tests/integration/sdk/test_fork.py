"""A client belongs to the process that first uses it: a forked child gets clear errors at once."""

from __future__ import annotations

import sys

import pytest

from harness.processes.commands import CommandProcesses
from harness.processes.servers import LockServer

_COMMON = """
import multiprocessing, os, socket, socketserver, sys, time
import redfence

address = sys.argv[1]

def new_client_works():
    with redfence.Client(address) as client, client.lock(f"of/{os.getpid()}", ttl=10, wait=0):
        return True

def refusal(call):
    try:
        call()
    except redfence.RedfenceError as error:
        return f"{type(error).__name__}: {error}"

def in_the_child():
    assert "belongs to process" in refusal(lambda: client.acquire("new", ttl=10))
    assert "belongs to process" in refusal(client.cluster_status)
    assert (lease.state, lease.remaining(), lease.lost.wait()) == (redfence.LeaseState.LOST, 0, True)
    assert "the parent of this process holds it" in refusal(lease.raise_if_lost)
    assert lease.release() is False
    assert "the parent of this process holds it" in refusal(lambda: lock.__exit__(None, None, None))
    assert "used it and then forked it" in refusal(new_client_works)
    client.close()
    assert not told

def forked(run):
    child = os.fork()
    if child == 0:
        run()
        os._exit(0)
    return os.waitpid(child, 0)[1]
"""

_PARENT_CONNECTED = """
with redfence.Client(address) as client:
    told = []
    lock = client.lock("held", ttl=5, on_at_risk=told.append, on_lost=told.append)
    lease = lock.__enter__()
    for _ in range(5):
        {fork_and_check}
    time.sleep(3)
    lease.raise_if_lost()
    assert lease.release()
assert not told
print("done")
"""

_WAYS = {
    "os.fork": "assert forked(in_the_child) == 0",
    "multiprocessing": """
        child = multiprocessing.get_context("fork").Process(target=in_the_child)
        child.start()
        child.join()
        assert child.exitcode == 0
""",
    "a forking server": """
        class Handler(socketserver.BaseRequestHandler):
            def handle(self):
                in_the_child()
                self.request.sendall(b"right")
        with socketserver.ForkingTCPServer(("127.0.0.1", 0), Handler) as web:
            with socket.create_connection(web.server_address) as caller:
                web.handle_request()
                assert caller.recv(9) == b"right"
""",
}

_PARENT_IDLE = """
client = redfence.Client(address)
for _ in range(5):
    assert forked(new_client_works) == 0
    assert forked(client.cluster_status) == 0
client.cluster_status()
client.close()
assert forked(lambda: "used it and then forked it" in refusal(new_client_works) or os._exit(1)) == 0
print("done")
"""


@pytest.mark.slow
@pytest.mark.parametrize("way", _WAYS)
async def test_a_forked_child_gets_clear_errors_and_the_parent_keeps_its_lease(
    server: LockServer, commands: CommandProcesses, way: str
) -> None:
    program = _COMMON + _PARENT_CONNECTED.format(fork_and_check=_WAYS[way])
    process = commands.start(sys.executable, "-c", program, server.target)
    assert await process.wait(timeout_s=30) == 0, process.stderr
    assert process.stdout == "done\n"


@pytest.mark.slow
async def test_a_client_that_is_first_used_after_the_fork_works(
    server: LockServer, commands: CommandProcesses
) -> None:
    process = commands.start(sys.executable, "-c", _COMMON + _PARENT_IDLE, server.target)
    assert await process.wait(timeout_s=30) == 0, process.stderr
    assert process.stdout == "done\n"
