"""SIGHUP to `redfence serve`, with one process and with several: good files, bad files, the log level."""

from __future__ import annotations

import signal
from pathlib import Path

import grpc
import pytest

from harness.load.failures import failure_of
from harness.processes.commands import CommandProcesses, node_flags
from harness.processes.servers import FormedNodes, LockServer, acquire_request
from harness.time.eventually import eventually
from redfence_proto.v1 import lock_pb2
from redfence_server.access.tokens import digest_of

pytestmark = pytest.mark.slow

BILLING = (("authorization", "Bearer secret-of-billing"),)


def policy(prefix: str) -> str:
    return f'[[rules]]\nprincipals = ["token:billing"]\nverbs = ["acquire"]\nprefix = "{prefix}"\n'


@pytest.mark.parametrize("process_count", [1, 2])
async def test_sighup_takes_good_files_and_keeps_the_rules_at_bad_ones(
    commands: CommandProcesses, formed_nodes: FormedNodes, tmp_path: Path, process_count: int
) -> None:
    files = {name: tmp_path / f"{name}.toml" for name in ("policy", "tokens", "config")}
    files["policy"].write_text(policy("a/"))
    files["tokens"].write_text(
        f'[[tokens]]\nname = "billing"\nsha256 = "{digest_of("secret-of-billing").hex()}"'
    )
    files["config"].write_text('log_level = "error"')
    process = commands.start_redfence(
        "serve",
        *node_flags(await formed_nodes(3)),
        *("--listen", "127.0.0.1:0", "--processes", str(process_count), "--config", str(files["config"])),
        *("--policy-file", str(files["policy"]), "--tokens-file", str(files["tokens"])),
    )
    address = (await process.wait_for_line(r"serving on ([\d.:]+)", timeout_s=30))[1]
    assert process.stderr == ""

    async def hang_up(event: str, *, level: str) -> None:
        files["config"].write_text(level)
        before = process.stderr.count(f'"event": "{event}"')
        process.send_signal(signal.SIGHUP)
        await eventually(
            lambda: process.stderr.count(f'"event": "{event}"') == before + process_count,
            timeout_s=20,
            interval_s=0.02,
        )

    async with grpc.aio.insecure_channel(address) as channel:
        server = LockServer(channel)

        async def reason(resource: str) -> lock_pb2.ErrorReason.ValueType:
            call = server.locks.Acquire(acquire_request(resource), metadata=BILLING)
            return (await failure_of(call)).reason

        await server.locks.Acquire(acquire_request("a/1"), metadata=BILLING)
        files["policy"].write_text("rules = 1")
        await hang_up("access_not_reloaded", level='log_level = "error"')
        assert await reason("b/1") == lock_pb2.ERROR_REASON_PERMISSION_DENIED
        files["policy"].write_text(policy("b/"))
        await hang_up("access_reloaded", level='log_level = "info"')
        await server.locks.Acquire(acquire_request("b/1"), metadata=BILLING)
        assert await reason("a/2") == lock_pb2.ERROR_REASON_PERMISSION_DENIED
        # Wrong settings keep the earlier ones; the rules are read all the same.
        await hang_up("access_reloaded", level="log_level = 7")
        assert process.stderr.count('"event": "settings_not_reloaded"') == 1
    assert await process.stop(timeout_s=20) == 0
    assert "Traceback" not in process.stderr
