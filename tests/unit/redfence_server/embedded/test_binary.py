"""Which program becomes a node."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

import pytest

from redfence_server.embedded.binary import (
    ENVIRONMENT_VARIABLE,
    RedisBinary,
    RedisBinaryError,
    find_redis_binary,
    inspect,
    wheel_binary_path,
)

VALKEY = "Valkey server v=9.1.2 sha=00000000:1 malloc=libc bits=64 build=1536df31c0395150"
REDIS_6_0 = "Redis server v=6.0.16 sha=00000000:0 malloc=jemalloc-5.2.1 bits=64 build=6d95e1af3a2c082a"
REDIS_6_2 = "Redis server v=6.2.0 sha=00000000:0 malloc=jemalloc-5.1.0 bits=64 build=2b14e0b1f2a2c2b2"
REDIS_7 = "Redis server v=7.0.15 sha=00000000:0 malloc=jemalloc-5.3.0 bits=64 build=ae4d7c971a948f0"


def program(path: Path, says: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)
    return path


def test_the_program_named_by_the_environment_goes_first(tmp_path: Path) -> None:
    named = program(tmp_path / "mine", REDIS_6_2)
    program(tmp_path / "bin" / "valkey-server", VALKEY)
    found = find_redis_binary(environment={ENVIRONMENT_VARIABLE: str(named), "PATH": str(tmp_path / "bin")})
    assert found == RedisBinary(named, "redis")


def test_valkey_on_the_path_goes_before_redis_on_the_path_and_before_the_wheel(tmp_path: Path) -> None:
    redis = program(tmp_path / "redis-server", REDIS_7)
    assert find_redis_binary(environment={"PATH": str(tmp_path)}).path == redis
    valkey = program(tmp_path / "valkey-server", VALKEY)
    assert find_redis_binary(environment={"PATH": str(tmp_path)}).path == valkey


def test_the_wheel_is_the_last_resort(tmp_path: Path) -> None:
    found = find_redis_binary(environment={"PATH": str(tmp_path)})
    assert (found.path, found.engine) == (wheel_binary_path(), "valkey")


def test_an_old_redis_on_the_path_is_passed_over(tmp_path: Path) -> None:
    program(tmp_path / "redis-server", REDIS_6_0)
    assert find_redis_binary(environment={"PATH": str(tmp_path)}).path == wheel_binary_path()


def test_without_any_program_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> None:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", missing)
    program(tmp_path / "redis-server", REDIS_6_0)
    with pytest.raises(RedisBinaryError) as caught:
        find_redis_binary(environment={"PATH": str(tmp_path)})
    message = str(caught.value)
    assert "pip install 'redfence[embedded]'" in message
    assert ENVIRONMENT_VARIABLE in message
    assert "is Redis 6.0.16; redfence needs Redis 6.2 or newer" in message


@pytest.mark.parametrize(
    ("says", "complaint"),
    [
        (REDIS_6_0, "is Redis 6.0.16; redfence needs Redis 6.2 or newer, or Valkey"),
        ("KeyDB server v=6.3.4 sha=0:0 malloc=libc bits=64 build=0", "is not a Redis or Valkey server"),
        ("", "is not a Redis or Valkey server"),
    ],
)
def test_a_named_program_that_will_not_do_is_refused_and_never_passed_over(
    tmp_path: Path, says: str, complaint: str
) -> None:
    named = program(tmp_path / "mine", says)
    with pytest.raises(RedisBinaryError, match=f"^{ENVIRONMENT_VARIABLE}") as caught:
        find_redis_binary(environment={ENVIRONMENT_VARIABLE: str(named)})
    assert complaint in str(caught.value)


def test_a_named_program_must_exist_and_be_executable(tmp_path: Path) -> None:
    program(tmp_path / "plain", VALKEY).chmod(0o644)
    for name, reason in (("nowhere", "No such file"), ("plain", "Permission denied")):
        told = rf"^{ENVIRONMENT_VARIABLE}: .*{name} cannot be run: .*{reason}"
        with pytest.raises(RedisBinaryError, match=told):
            find_redis_binary(environment={ENVIRONMENT_VARIABLE: str(tmp_path / name)})


def test_what_cannot_be_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"\x7fELF-not")
    garbage.chmod(0o755)
    with pytest.raises(RedisBinaryError, match="cannot be run"):
        inspect(garbage)
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\necho 'error while loading shared libraries' >&2\nexit 127\n")
    broken.chmod(0o755)
    with pytest.raises(RedisBinaryError, match="it said 'error while loading shared libraries'"):
        inspect(broken)


def test_the_engine_is_told_by_the_program_and_not_by_its_name(tmp_path: Path) -> None:
    assert inspect(program(tmp_path / "redis-server", VALKEY)).engine == "valkey"
