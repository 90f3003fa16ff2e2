"""The data directory is one server's, and keeps its size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from redfence_server.embedded import directory as embedded_directory
from redfence_server.embedded.directory import DataDirectory, DataDirectoryError


@pytest.fixture(autouse=True)
def no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A held lock is not waited for."""
    monkeypatch.setattr(embedded_directory, "_LOCK_TIMEOUT_S", 0.0)


async def test_a_second_server_on_one_directory_is_refused_and_told_who_has_it(tmp_path: Path) -> None:
    first = await DataDirectory.open(tmp_path, count=3)
    with pytest.raises(DataDirectoryError, match=rf"in use by another server \(process {os.getpid()}\)"):
        await DataDirectory.open(tmp_path, count=3)
    first.close()
    (await DataDirectory.open(tmp_path, count=3)).close()


async def test_the_lock_lasts_as_long_as_any_process_that_inherited_it(tmp_path: Path) -> None:
    first = await DataDirectory.open(tmp_path, count=3)
    inherited = os.dup(first.lock_fd)
    first.close()
    with pytest.raises(DataDirectoryError, match="in use"):
        await DataDirectory.open(tmp_path, count=3)
    os.close(inherited)
    (await DataDirectory.open(tmp_path, count=3)).close()


async def test_a_directory_keeps_the_number_of_nodes_it_was_made_for(tmp_path: Path) -> None:
    (await DataDirectory.open(tmp_path, count=3)).close()
    with pytest.raises(DataDirectoryError, match="was made for 3 nodes, not 5"):
        await DataDirectory.open(tmp_path, count=5)
    # The refusal has let go of the lock.
    (await DataDirectory.open(tmp_path, count=3)).close()


async def test_a_missing_directory_is_created_for_this_user_alone_and_stays(tmp_path: Path) -> None:
    (await DataDirectory.open(tmp_path / "new" / "deep", count=1)).close()
    assert (tmp_path / "new" / "deep").stat().st_mode & 0o777 == 0o700


async def test_a_path_that_cannot_be_a_directory_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataDirectoryError, match=r"file cannot be used: .*File exists"):
        await DataDirectory.open(tmp_path / "file", count=1)
