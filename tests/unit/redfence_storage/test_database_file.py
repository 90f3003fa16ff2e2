"""Which files the storage opens, and how."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from redfence_storage.database_file import APPLICATION_ID, SCHEMA_VERSION, open_database
from redfence_storage.errors import DatabaseUnusable


def refusal(path: Path) -> str:
    with pytest.raises(DatabaseUnusable) as refused:
        open_database(path, busy_timeout_ms=1)
    return str(refused.value)


def test_a_new_file_is_ours_logged_ahead_and_synced_at_every_commit(tmp_path: Path) -> None:
    connection = open_database(tmp_path / "storage.db")
    found = [
        connection.execute(f"PRAGMA {name}").fetchone()[0]
        for name in ("application_id", "user_version", "journal_mode", "synchronous", "locking_mode")
    ]
    connection.close()
    assert found == [APPLICATION_ID, SCHEMA_VERSION, "wal", 2, "exclusive"]


def test_a_file_that_another_process_has_open_is_refused_until_that_process_lets_go(tmp_path: Path) -> None:
    path = tmp_path / "storage.db"
    open_database(path).close()
    program = (
        "import sys, pathlib; from redfence_storage.database_file import open_database\n"
        "held = open_database(pathlib.Path(sys.argv[1])); print('open', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "open\n"
        assert refusal(path).startswith(f"cannot use {path}: another process has it open; ")
        other.kill()
    open_database(path).close()


def test_a_newer_schema_is_refused_by_both_version_numbers(tmp_path: Path) -> None:
    path = tmp_path / "storage.db"
    open_database(path).close()
    with sqlite3.connect(path) as connection:
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION + 1}")
    connection.close()
    assert f"version {SCHEMA_VERSION + 1}; this redfence supports only version {SCHEMA_VERSION}" in refusal(
        path
    )


def test_another_programs_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "theirs.db"
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE accounts (balance INTEGER)")
    connection.close()
    before = path.read_bytes()
    assert "not a redfence storage database" in refusal(path)
    assert path.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    assert "not a redfence storage database" in refusal(path)
    assert path.read_text() == "not a database\n" * 100


def test_a_file_in_a_missing_folder_is_refused(tmp_path: Path) -> None:
    """A mistyped path must not start an empty store."""
    assert "unable to open" in refusal(tmp_path / "missing" / "storage.db")
