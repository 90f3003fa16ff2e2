"""The house rules, as far as a program can check them. Each message names the file and the rule."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
ROOTS = {
    "redfence_server": REPOSITORY / "server/redfence_server",
    "redfence": REPOSITORY / "client_sdk/redfence",
    "redfence_storage": REPOSITORY / "storage_demo/redfence_storage",
    "redfence_proto": REPOSITORY / "protos/redfence_proto",
}
SERVER = ROOTS["redfence_server"]

MODULES = sorted(path for root in ROOTS.values() for path in root.rglob("*.py") if "_pb2" not in path.name)
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
LUA = sorted(SERVER.rglob("lua/*.lua"))

every_module = pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(REPOSITORY)))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def _imports(path: Path) -> frozenset[str]:
    """Return the full names of everything a module imports, wherever it does."""
    names: set[str] = set()
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def _imports_of(path: Path, package: str) -> set[str]:
    return {name for name in _imports(path) if name == package or name.startswith(f"{package}.")}


def _package(path: Path) -> str:
    return next(name for name, root in ROOTS.items() if path.is_relative_to(root))


# --- layers ---------------------------------------------------------------------------------------------------------

FORBIDDEN = {
    "redfence_proto": {"redfence", "redfence_server", "redfence_storage"},
    "redfence_server": {"redfence", "redfence_storage"},
    "redfence": {"redfence_server", "redfence_storage"},
    "redfence_storage": set(),
}
# What the storage may take from the server's package: how to serve gRPC, and how to log.
SHARED_WITH_STORAGE = {"redfence_server.grpc_serving", "redfence_server.log_setup"}


@every_module
def test_every_package_imports_only_from_the_layers_below_it(path: Path) -> None:
    """Server and SDK never meet, and all depend on the contract alone."""
    for package in FORBIDDEN[_package(path)]:
        assert not _imports_of(path, package)


@every_module
def test_source_roots_are_no_packages(path: Path) -> None:
    """`import server` would work in the checkout and nowhere else."""
    for root in ("server", "client_sdk", "storage_demo", "protos", "tests"):
        assert not _imports_of(path, root)


@pytest.mark.parametrize(
    "path", [p for p in MODULES if _package(p) == "redfence_storage"], ids=lambda path: path.name
)
def test_the_storage_takes_only_serving_and_logging_from_the_server(path: Path) -> None:
    """It guards data; it grants nothing."""
    taken = {name for name in _imports_of(path, "redfence_server") if name != "redfence_server"}
    assert all(
        any(f"{name}.".startswith(f"{shared}.") for shared in SHARED_WITH_STORAGE) for name in taken
    ), taken


PURE = (
    "quorum.py",
    "lock_node.py",
    "cluster_memory.py",
    "cluster_judgement.py",
    "recovery_plan.py",
    "node_admission.py",
    "node_examination.py",
    "kept_commands.py",
    "model.py",
    "errors.py",
    "backoff.py",
    "hold_watch.py",
    "scripts.py",
    "messages.py",
    "clock.py",
    "node_clock.py",
    "finding.py",
    "doctor.py",
)


@pytest.mark.parametrize("name", PURE)
def test_pure_modules_know_no_event_loop(name: str) -> None:
    """What decides needs no mock to be tested."""
    assert not _imports_of(SERVER / name, "asyncio")


# --- who may touch what ---------------------------------------------------------------------------------------------

OWNERS = {
    "grpc": re.compile(
        r"/(grpc_\w+|_transport/\w+|composition|_errors|client|client_errors|_aio/client|_threads/client|commands/storage)\.py$"
    ),
    "redis": re.compile(r"/redis_\w+\.py$"),
    "hiredis": re.compile(r"/(node_connection|scripts|redis_\w+)\.py$"),
    "random": re.compile(r"/_?randomness\.py$"),
    "uuid": re.compile(r"/_?randomness\.py$"),
    "secrets": re.compile(r"/(_?randomness|pause_demo/conductor|embedded\w*|redis_process)\.py$"),
}


@every_module
@pytest.mark.parametrize("library", OWNERS)
def test_a_library_is_imported_only_where_it_belongs(path: Path, library: str) -> None:
    """Drivers stay at the edge, and chance is passed in."""
    assert OWNERS[library].search(path.as_posix()) or not _imports_of(path, library)


_CLOCKS = {
    "time",
    "time_ns",
    "monotonic",
    "monotonic_ns",
    "sleep",
    "clock_gettime",
    "clock_gettime_ns",
    "perf_counter",
}
# A script for people to watch, in a process of its own.
_MAY_LOOK_AT_THE_CLOCK = re.compile(r"/(_?clock|pause_demo/\w+)\.py$")


@every_module
def test_nobody_but_the_clock_asks_for_the_time(path: Path) -> None:
    """Time is a constructor argument, so that a test can hold it in its hand."""
    if _MAY_LOOK_AT_THE_CLOCK.search(path.as_posix()):
        return
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            asked = (node.value.id, node.attr)
            assert not (asked[0] == "time" and asked[1] in _CLOCKS), f"line {node.lineno}: {'.'.join(asked)}"
            assert asked not in {("datetime", "now"), ("datetime", "utcnow")}, f"line {node.lineno}"


# The last one is the boundary of a thread: a defect there must reach the callers.
_BOUNDARY = re.compile(r"/(grpc_servicer|grpc_streams|__main__|group_commit)\.py$")


@every_module
def test_only_the_outermost_layer_catches_everything(path: Path) -> None:
    """Anywhere else it would hide a defect."""
    if _BOUNDARY.search(path.as_posix()):
        return
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ExceptHandler):
            caught = ast.unparse(node.type) if node.type else "everything"
            assert caught not in {"Exception", "everything"}, f"line {node.lineno}"


@every_module
def test_no_cancellation_is_lost(path: Path) -> None:
    """`asyncio.wait_for` of Python 3.11 loses one that comes as what it waits for ends; `asyncio.timeout` does not."""
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.Attribute):
            assert node.attr != "wait_for" or ast.unparse(node.value) != "asyncio", f"line {node.lineno}"
        if isinstance(node, ast.ImportFrom) and node.module == "asyncio":
            assert "wait_for" not in {name.name for name in node.names}, f"line {node.lineno}"


# --- names and words --------------------------------------------------------------------------------------------------


@every_module
def test_modules_are_named_for_what_they_are(path: Path) -> None:
    """A name that fits everything tells nothing."""
    assert path.stem.strip("_") not in {"utils", "util", "helpers", "common", "manager", "base", "misc"}


@pytest.mark.parametrize("path", [*MODULES, *TESTS, *LUA], ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_nothing_is_left_for_later(path: Path) -> None:
    """What is not done is in the tracker, or in nobody's head."""
    words = "|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X"))
    assert not re.search(rf"\b({words})\b", path.read_text())


_MODULE_LINES_MAX = 500


@every_module
def test_a_module_is_one_concept_long(path: Path) -> None:
    """The target is 60 to 250 lines; far beyond, it is two modules."""
    assert len(path.read_text().splitlines()) <= _MODULE_LINES_MAX


@every_module
def test_a_module_says_what_it_is(path: Path) -> None:
    """A reader decides by it whether to read on."""
    assert ast.get_docstring(_tree(path)) or not path.read_text().strip()


# --- Lua ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.name)
def test_a_script_begins_with_its_contract(path: Path) -> None:
    """Keys, arguments, every answer, and why it must be atomic."""
    head = "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("--"))
    assert head.startswith(f"-- {path.stem}: ")
    for part in ("-- KEYS  ", "-- ARGV  ", "-- Returns  {", "-- Atomic because "):
        assert f"\n{part}" in head, part


@pytest.mark.parametrize("path", LUA, ids=lambda path: path.name)
def test_a_script_answers_only_what_its_contract_lists(path: Path) -> None:
    """Whoever reads the head knows every answer."""
    text = path.read_text()
    head, body = "", ""
    for line in text.splitlines():
        if line.lstrip().startswith("--"):
            head += line
        else:
            body += line
    answered = set(re.findall(r"return \{'(\w+)'", body))
    assert answered
    assert answered == set(re.findall(r"\{'(\w+)'", head))


def test_every_script_is_used() -> None:
    """A script that nobody runs proves nothing."""
    sources = "".join(path.read_text() for path in MODULES)
    for path in LUA:
        assert f'"{path.stem}"' in sources, path.name


# --- tests ----------------------------------------------------------------------------------------------------------------


def _test_functions() -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for path in TESTS:
        for node in _tree(path).body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_"):
                yield path, node


def test_every_test_states_the_truth_under_test() -> None:
    """In a docstring of its own."""
    silent = [f"{path.name}::{node.name}" for path, node in _test_functions() if not ast.get_docstring(node)]
    assert not silent


def test_unit_tests_mock_nothing() -> None:
    """Fakes are held to the real thing by the contract suites; a mock is held to nothing."""
    for path in TESTS:
        if {"unit", "model", "contract"} & set(path.relative_to(REPOSITORY).parts):
            assert not _imports_of(path, "unittest"), path
