"""Access control of the storage: no stranger raises a token, reads or writes."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import grpc
import pytest
from google.protobuf.message_factory import GetMessageClass

import redfence
from harness.load.failures import failure_of
from harness.processes.commands import CommandProcess, CommandProcesses
from harness.processes.storage_server import connected, serving
from harness.time.eventually import eventually
from redfence_proto.storage.v1 import storage_pb2
from redfence_server.access.rules import AccessSettings
from redfence_server.access.setup import open_guard
from redfence_server.access.tokens import digest_of
from redfence_server.clock import SystemClock
from redfence_storage.client import StorageClient
from redfence_storage.client_messages import PutResult
from redfence_storage.group_commit import GroupCommit
from redfence_storage.sqlite_store import SqliteStore

SECRET = "0123456789abcdef-of-billing"
GREATEST_TOKEN = 2**53 - 1
POLICY = '[[rules]]\nprincipals = ["token:billing"]\nverbs = ["storage"]\nprefix = "billing/"\n'


class Files:
    """The operator's files of one storage."""

    def __init__(self, folder: Path) -> None:
        self.policy, self.tokens, self.database = (
            folder / name for name in ("policy", "tokens", "storage.db")
        )
        self.policy.write_text(POLICY)
        self.tokens.write_text(f'[[tokens]]\nname = "billing"\nsha256 = "{digest_of(SECRET).hex()}"\n')


@pytest.fixture
def files(tmp_path: Path) -> Files:
    return Files(tmp_path)


@pytest.fixture
async def target(files: Files) -> AsyncIterator[str]:
    settings = AccessSettings(policy_file=files.policy, tokens_file=files.tokens)
    guard = open_guard(settings, audit_log="", clock=SystemClock())
    async with serving(GroupCommit(SqliteStore.open(files.database)), guard=guard) as target:
        yield target


@pytest.mark.parametrize("kind", ["async", "sync"])
async def test_a_fence_by_a_stranger_is_refused_and_holders_go_on(kind: str, target: str) -> None:
    """Otherwise the greatest token would shut out every later holder for ever."""
    async with (
        connected(kind, target) as stranger,
        connected(kind, target, token=SECRET) as billing,
        connected(kind, target, token="wrong") as pretender,
    ):
        for caller, resource, reason in (
            (stranger, "billing/1", "UNAUTHENTICATED"),
            (pretender, "billing/1", "UNAUTHENTICATED"),
            (billing, "orders/1", "PERMISSION_DENIED"),
        ):
            with pytest.raises(redfence.AccessDeniedError) as caught:
                await caller.fence(resource, token=GREATEST_TOKEN)
            assert caught.value.error_reason == reason
        assert caught.value.principal == "token:billing"
        assert (await billing.list_keys("billing/1")).highest_token == 0
        assert await billing.put("billing/1", key="k", value=b"v", token=1) == PutResult(1)


async def test_no_method_of_the_storage_serves_a_stranger(target: str) -> None:
    """A new method needs the guard. The token of the second caller is right, and its resource is not."""
    service = storage_pb2.DESCRIPTOR.services_by_name["StorageService"]
    known = (("authorization", f"Bearer {SECRET}"),)
    async with grpc.aio.insecure_channel(target) as channel:
        for method in service.methods:
            kind = GetMessageClass(method.input_type)
            request = kind(resource="orders/1")
            for name, value in {"key": "k", "fencing_token": 1}.items():
                if name in kind.DESCRIPTOR.fields_by_name:
                    setattr(request, name, value)
            call = channel.unary_unary(
                f"/{service.full_name}/{method.name}",
                request_serializer=kind.SerializeToString,
                response_deserializer=GetMessageClass(method.output_type).FromString,
            )
            for asked in (kind(), request):
                failure = await failure_of(call(asked))
                assert failure.code is grpc.StatusCode.UNAUTHENTICATED, method.name
            failure = await failure_of(call(request, metadata=known))
            assert failure.code is grpc.StatusCode.PERMISSION_DENIED, method.name


async def test_a_token_of_a_storage_client_stays_on_this_machine_without_tls() -> None:
    with pytest.raises(redfence.InvalidArgumentError, match="in plaintext"):
        StorageClient("storage.example:1", token=SECRET)
    StorageClient("storage.example:1", token=SECRET, plaintext_token=True).close()


def logged(process: CommandProcess, event: str) -> bool:
    return f'"event": "{event}"' in process.stderr


@pytest.mark.slow
async def test_the_command_checks_a_policy_and_reads_it_again_at_sighup(
    commands: CommandProcesses, files: Files, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client takes its token from the environment; a policy that is wrong is refused at the start."""
    flags = (
        "storage",
        "--db",
        str(files.database),
        "--listen",
        "127.0.0.1:0",
        "--tokens-file",
        str(files.tokens),
    )
    said = await commands.start_redfence(*flags).ended(status=2)
    assert "redfence storage: tokens_file: it has no effect without policy_file" in said
    process = commands.start_redfence(*flags, environment={"REDFENCE_POLICY_FILE": str(files.policy)})
    target = (await process.wait_for_line(r"ready on (\S+)"))[1]
    async with connected("async", target) as stranger:
        with pytest.raises(redfence.AccessDeniedError):
            await stranger.fence("billing/1", token=GREATEST_TOKEN)
    token_file = files.tokens.with_name("secret")
    token_file.write_text(f"{SECRET}\n")
    monkeypatch.setenv("REDFENCE_BEARER_TOKEN_FILE", str(token_file))
    for policy, event in (
        ("no rules", "access_not_reloaded"),
        (POLICY.replace("billing/", "milling/"), "access_reloaded"),
    ):
        async with connected("sync", target) as billing:
            assert (await billing.fence("billing/1", token=7)).highest_token == 7
        files.policy.write_text(policy)
        process.send_signal(signal.SIGHUP)
        await eventually(partial(logged, process, event), timeout_s=20, interval_s=0.02)
    async with connected("sync", target) as billing:
        with pytest.raises(redfence.AccessDeniedError):
            await billing.fence("billing/1", token=8)
        assert (await billing.fence("milling/1", token=8)).highest_token == 8
    assert await process.stop() == 0
