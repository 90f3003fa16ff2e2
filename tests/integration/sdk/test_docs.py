"""Each Python example of docs/sdk.md runs as it stands."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from harness.doubles.grpc_fake import GrpcFake

_TEXT = (Path(__file__).parents[3] / "docs/sdk.md").read_text()
_EXAMPLES = re.findall(r"^```python\n(.*?)^```$", _TEXT, re.MULTILINE | re.DOTALL)
_PRINTED = ["I hold orders/42", "UPDATE", "page 2", "", "token", "report", "before the next renewal"]


@pytest.mark.parametrize(("example", "printed"), list(zip(_EXAMPLES, _PRINTED, strict=True)), ids=_PRINTED)
async def test_an_example_of_the_docs_runs(
    example: str,
    printed: str,
    fake: GrpcFake,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("REDFENCE_SERVER", fake.address)
    await asyncio.to_thread(exec, compile(example, "docs/sdk.md", "exec"), {})
    assert printed in capsys.readouterr().out
