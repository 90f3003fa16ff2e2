"""A command whose package is not installed names the extra to install."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from harness.processes.ports import HOST

# A module of None is one that cannot be imported.
_WITHOUT = """
import sys
sys.modules[sys.argv[1]] = None
from redfence._cli.main import main
sys.exit(main(sys.argv[2:]))
"""
_NODES = {"REDFENCE_NODES": f"redis://{HOST}:1"}


@pytest.mark.parametrize(
    ("package", "extra", "command"),
    [
        ("redfence_server", "server", "serve"),
        ("ngh2", "fast", "serve --transport fast"),
        ("opentelemetry.sdk", "traces", f"serve --traces-endpoint http://{HOST}:1/v1/traces"),
        ("opentelemetry.sdk", "traces", f"storage --db s.db --traces-endpoint http://{HOST}:1/v1/traces"),
        ("jwt", "jwt", "serve --policy-file p.toml --jwt-jwks-file k.json --jwt-audience a --jwt-issuer i"),
    ],
)
def test_a_missing_package_is_named_with_its_extra(
    tmp_path: Path, package: str, extra: str, command: str
) -> None:
    Path(tmp_path, "k.json").write_text('{"keys": []}')
    Path(tmp_path, "p.toml").write_text(
        '[[rules]]\nprincipals = ["anonymous"]\nverbs = ["acquire"]\nprefix = ""\n'
    )
    ended = subprocess.run(
        [sys.executable, "-c", _WITHOUT, package, *command.split(), "--listen", f"{HOST}:0"],
        cwd=tmp_path,
        env=_NODES,
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert ended.returncode == 2
    assert ended.stdout == ""
    (line,) = ended.stderr.splitlines()
    assert line.startswith(f"redfence {command.split(maxsplit=1)[0]}: ")
    assert package in line
    assert f"pip install 'redfence[{extra}]'" in line


def test_a_program_without_opentelemetry_locks_and_never_imports_it() -> None:
    """The spans of clients cost such a program one look-up for each call."""
    program = """
import sys
sys.modules["opentelemetry"] = None
import redfence_storage.client
from redfence.testing import FakeLockServer
with FakeLockServer() as fake, fake.client() as client, client.lock("orders/42", ttl=5):
    client.get_lock("orders/42")
assert not any(name.startswith("opentelemetry.") for name in sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
