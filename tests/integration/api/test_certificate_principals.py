"""A client certificate as a principal: what the handshake proved decides what the caller may do."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from harness.load.failures import failure_of
from harness.processes.certificates import Authority, Certificate, replace_file
from harness.processes.servers import FormedNodes, LockServer, Serve, acquire_request
from harness.time.eventually import eventually
from redfence_server.access.tokens import digest_of

BILLING = "spiffe://example.org/billing"
SHOP = "shop.example"
SECRET = "0123456789abcdef-of-shop"
OK = grpc.StatusCode.OK
# The handshake fails.
REFUSED = grpc.StatusCode.UNAVAILABLE
RULE = '[[rules]]\nprincipals = ["cert:{}"]\nverbs = ["acquire"]\nprefix = "{}"\n'


class Site:
    """A server that takes clients of the authorities in `client_ca`."""

    def __init__(self, folder: Path, authority: Authority) -> None:
        self.client_ca, self.audit, self.policy, self.tokens = (
            folder / name for name in ("clients.pem", "audit", "policy.toml", "tokens.toml")
        )
        replace_file(self.client_ca, authority.file)
        self.policy.write_text(RULE.format(BILLING, "billing/") + RULE.format(SHOP, "shop/"))
        self.tokens.write_text(f'[[tokens]]\nname = "shop"\nsha256 = "{digest_of(SECRET).hex()}"\n')
        self.authority = authority
        self.server: LockServer

    @asynccontextmanager
    async def client(self, shown: Certificate) -> AsyncIterator[LockServer]:
        """Yield the server over a connection of its own that shows this certificate."""
        trusting = Certificate(shown.certificate, shown.key, self.authority.file)
        # Channels of one process to one target would otherwise share their connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        channel = grpc.aio.secure_channel(self.server.target, trusting.credentials(), options=options)
        async with channel:
            yield LockServer(channel)


@pytest.fixture
async def site(
    tmp_path: Path, formed_nodes: FormedNodes, serve: Serve, authority: Authority, certificate: Certificate
) -> Site:
    site = Site(tmp_path, authority)
    site.server = await serve(
        await formed_nodes(3),
        tls_cert=str(certificate.certificate),
        tls_key=str(certificate.key),
        tls_client_ca=str(site.client_ca),
        policy_file=str(site.policy),
        tokens_file=str(site.tokens),
        audit_log=str(site.audit),
    )
    return site


async def told(caller: LockServer, resource: str) -> grpc.StatusCode:
    """Return the status of an Acquire of a free lock."""
    try:
        await caller.acquire(resource, timeout_s=10)
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def test_the_names_of_certificates_decide_what_their_owners_may_do(site: Site) -> None:
    """A SPIFFE id and a host name count. A token counts before the certificate."""
    billing, shop = site.authority.issue_uri(BILLING), site.authority.issue(SHOP, BILLING.rpartition("/")[2])
    async with site.client(billing) as caller:
        assert await told(caller, "billing/1") is OK
        denied = await failure_of(caller.acquire("shop/1"))
        assert denied.metadata["principal"] == f"cert:{BILLING}"
        for token, code in (
            (SECRET, grpc.StatusCode.PERMISSION_DENIED),
            ("wrong", grpc.StatusCode.UNAUTHENTICATED),
        ):
            metadata = (("authorization", f"Bearer {token}"),)
            call = caller.locks.Acquire(acquire_request("billing/2"), metadata=metadata)
            assert (await failure_of(call)).code is code
    async with site.client(shop) as caller:
        assert await told(caller, "shop/1") is OK
        assert await told(caller, "billing/2") is grpc.StatusCode.PERMISSION_DENIED

    def audited() -> list[tuple[str, str]]:
        lines = [json.loads(line) for line in site.audit.read_text().splitlines()]
        return [(line["principal"], line["resource"]) for line in lines if line["outcome"] == "granted"]

    await eventually(lambda: len(audited()) == 2, interval_s=0.01)
    assert audited() == [(f"cert:{BILLING}", "billing/1"), (f"cert:{SHOP}", "shop/1")]


async def test_the_principal_survives_a_change_of_the_clients_authority(
    site: Site, other_authority: Authority
) -> None:
    """While the server trusts both, each lets in. A removed one lets in nobody, but ends no connection."""
    old, new = site.authority.issue_uri(BILLING), other_authority.issue_uri(BILLING)
    async with site.client(old) as open_before:
        assert await told(open_before, "billing/1") is OK
        async with site.client(new) as pretender:
            assert await told(pretender, "billing/2") is REFUSED
        both = site.client_ca.with_name("both.pem")
        both.write_bytes(site.authority.file.read_bytes() + other_authority.file.read_bytes())
        replace_file(site.client_ca, both)
        for number, each in enumerate((old, new), start=2):
            async with site.client(each) as caller:
                assert await told(caller, f"billing/{number}") is OK
        replace_file(site.client_ca, other_authority.file)
        async with site.client(new) as caller, site.client(old) as former:
            assert await told(caller, "billing/4") is OK
            assert await told(former, "billing/5") is REFUSED
        assert await told(open_before, "billing/5") is OK
