"""What `import redfence` gives to users, and what it does not drag along."""

from __future__ import annotations

import subprocess
import sys

import redfence
from redfence import _errors


def test_public_names_are_sorted_exist_and_are_all_there_is() -> None:
    """Everything else is private, modules too, but for the fake that users test with."""
    assert list(redfence.__all__) == sorted(set(redfence.__all__))
    for name in redfence.__all__:
        assert not name.startswith("_")
        assert hasattr(redfence, name)
    public = {name for name in vars(redfence) if not name.startswith("_")}
    assert public - set(redfence.__all__) <= {"testing", "annotations"}


def test_every_error_that_the_sdk_raises_is_public() -> None:
    """A caller can name what it catches."""
    errors = {
        name
        for name, value in vars(_errors).items()
        if isinstance(value, type) and issubclass(value, redfence.RedfenceError) and not name.startswith("_")
    }
    assert errors <= set(redfence.__all__)


def test_every_public_name_is_documented() -> None:
    """`help()` tells what each guarantees."""
    assert not [name for name in redfence.__all__ if not getattr(redfence, name).__doc__]


def test_the_sdk_alone_needs_none_of_the_servers_libraries() -> None:
    """`pip install redfence` is only the SDK."""
    unwanted = (
        "redfence_server",
        "redfence_storage",
        "redis",
        "hiredis",
        "structlog",
        "pydantic",
    )
    program = (
        "import sys, redfence, redfence.testing\n"
        f"found = [name for name in {unwanted!r} if name in sys.modules]\n"
        "sys.exit(', '.join(found) or None)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
