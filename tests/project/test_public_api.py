"""What `import redfence` gives to users, and what it does not drag along."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.metadata import version

import redfence
import redfence_storage
from redfence import _errors


def test_public_names_are_sorted_exist_and_are_all_there_is() -> None:
    """Everything else is private, modules too, but for those that users import by name."""
    assert list(redfence.__all__) == sorted(set(redfence.__all__))
    for name in redfence.__all__:
        assert not name.startswith("_")
        assert hasattr(redfence, name)
    public = {name for name in vars(redfence) if not name.startswith("_")}
    assert public - set(redfence.__all__) <= {"annotations", "fence", "propagation", "testing"}


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


def test_every_public_name_is_shown_under_the_name_that_users_import() -> None:
    """In tracebacks, in `help()` and in pickles."""
    assert {getattr(redfence, name).__module__ for name in redfence.__all__} == {"redfence"}


def test_the_version_is_written_in_one_place() -> None:
    """The package takes it from there."""
    assert redfence.__version__ == version("redfence")


def test_the_sdk_alone_needs_none_of_the_servers_libraries() -> None:
    """`pip install redfence` is only the SDK."""
    unwanted = (
        "redfence_server",
        "redfence_storage",
        "redis",
        "hiredis",
        "structlog",
        "pydantic",
        "sqlalchemy",
        "psycopg",
        "sqlite3",
    )
    modules = ["redfence", "redfence.testing", "redfence.fence", "redfence.propagation"]
    assert not _imported_with(modules, unwanted)
    assert not _imported_with(["redfence"], ["redfence.fence", "redfence.propagation"])


# What stands on the caller's side of the storage.
_STORAGE_CLIENT = {"client", "client_messages", "pause_demo", "commands.demo"}


def test_the_storages_server_needs_no_sdk() -> None:
    """The storage guards data from lock holders. Only its client and the demo need the SDK."""
    names = [
        module.name.removeprefix("redfence_storage.")
        for module in pkgutil.walk_packages(redfence_storage.__path__, "redfence_storage.")
    ]
    server = [name for name in names if name not in _STORAGE_CLIENT and not name.startswith("pause_demo.")]
    assert {"store", "sqlite_store", "group_commit", "grpc_servicer", "commands.storage"} <= set(server)
    assert not _imported_with([f"redfence_storage.{name}" for name in server], ["redfence"])
    assert _imported_with(["redfence_storage.client"], ["redfence"])


def _imported_with(modules: Sequence[str], looked_for: Sequence[str]) -> list[str]:
    """Return which of the packages a fresh interpreter has loaded once it has imported the modules."""
    program = (
        f"import sys, {', '.join(modules)}\nprint(*(name for name in {looked_for!r} if name in sys.modules))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return ended.stdout.split()
