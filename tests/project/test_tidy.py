"""The house rules, as far as a program can check them, in code, docs, protos and scripts."""

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
    "redfence_console": REPOSITORY / "client_sdk/redfence_console",
    "redfence_pytest": REPOSITORY / "client_sdk/redfence_pytest",
    "redfence_storage": REPOSITORY / "storage_demo/redfence_storage",
    "redfence_proto": REPOSITORY / "protos/redfence_proto",
}
SERVER = ROOTS["redfence_server"]

MODULES = sorted(path for root in ROOTS.values() for path in root.rglob("*.py") if "_pb2" not in path.name)
TESTS = sorted((REPOSITORY / "tests").rglob("*.py"))
# The parts of tests and measurements: people read and change them as they do the product.
PARTS = sorted(path for folder in ("tests/harness", "bench") for path in (REPOSITORY / folder).rglob("*.py"))
LUA = sorted(SERVER.rglob("lua/*.lua"))


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@pytest.fixture(scope="module", autouse=True)
def _parsed() -> None:
    """Parse every module before the first test, which would otherwise count as slow."""
    for path in MODULES:
        _tree(path)


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


def _name(path: Path) -> str:
    return str(path.relative_to(REPOSITORY))


def _assert_none(defects: Iterator[str]) -> None:
    """Fail with every defect on a line of its own."""
    found = list(defects)
    assert not found, "\n" + "\n".join(found)


# --- layers ---------------------------------------------------------------------------------------

FORBIDDEN = {
    "redfence_proto": {"redfence", "redfence_server", "redfence_storage"},
    "redfence_server": {"redfence", "redfence_storage"},
    "redfence": {"redfence_server", "redfence_storage", "redfence_pytest"},
    "redfence_console": {"redfence_server", "redfence_storage", "redfence_proto", "redfence_pytest"},
    "redfence_pytest": {"redfence_server", "redfence_storage", "redfence_proto"},
    "redfence_storage": set(),
}
# What the storage may take from the server's package: how to serve gRPC and metrics, who may
# call, and how to log.
SHARED_WITH_STORAGE = (
    "redfence_server.access",
    "redfence_server.api.errors",
    "redfence_server.api.health",
    "redfence_server.api.serving",
    "redfence_server.clock",
    "redfence_server.errors",
    "redfence_server.log_setup",
    "redfence_server.metrics.telemetry",
)

# The rooms of each package, the lowest floor first. A module imports from its own room and from lower floors.
FLOORS: dict[str, tuple[set[str], ...]] = {
    "redfence_server": (
        {"grpc_sending"},
        {"clock", "cores", "errors", "log_setup", "process_memory", "randomness", "values"},
        {"sharing"},
        {"http2"},
        {"access", "locking", "model"},
        {"redis_io"},
        {"config", "embedded", "membership", "waiting"},
        {"diagnosis", "lock_service", "nodes", "operations"},
        {"lock_list", "node_audit"},
        {"lock_watch"},
        {"api"},
        {"metrics"},
        {"composition"},
        {"supervision"},
        {"commands"},
    ),
    "redfence": (
        {"_clock", "_errors", "_randomness"},
        {"_seconds", "_tracing"},
        {"_config", "_messages"},
        {"_core", "_defaults", "_transport"},
        {"_aio", "_fake", "_threads"},
        {"_context", "_sql"},
        {"__init__", "fence", "propagation", "testing"},
        {"_cli"},
        {"__main__"},
    ),
}


def _room(module: str, package: str) -> str:
    rest = module.removeprefix(package).removeprefix(".")
    return rest.partition(".")[0]


def _upward_imports() -> Iterator[str]:
    for package, floors in FLOORS.items():
        floor_of = {room: number for number, rooms in enumerate(floors) for room in rooms}
        for path in (path for path in MODULES if _package(path) == package):
            own = path.relative_to(ROOTS[package]).parts[0].removesuffix(".py")
            if own == "__init__" and package == "redfence_server":
                continue
            if own not in floor_of:
                yield f"{_name(path)}: give the room {own} a floor"
                continue
            for imported in _imports_of(path, package):
                room = _room(imported, package)
                if room in floor_of and room != own and floor_of[room] >= floor_of[own]:
                    yield f"{_name(path)}: {own} must not import from {room}, which is not below it"


def test_no_room_imports_from_a_room_above_it() -> None:
    """The folders show the layers."""
    _assert_none(_upward_imports())


def test_every_package_imports_only_from_the_packages_below_it() -> None:
    """Server and SDK never meet, and all depend on the contract alone."""
    _assert_none(
        f"{_name(path)} imports {package}"
        for path in MODULES
        for package in FORBIDDEN[_package(path)]
        if _imports_of(path, package)
    )


def test_source_roots_are_no_packages() -> None:
    """`import server` would work in the checkout and nowhere else."""
    roots = ("server", "client_sdk", "storage_demo", "protos", "tests")
    _assert_none(
        f"{_name(path)} imports {root}" for path in MODULES for root in roots if _imports_of(path, root)
    )


def test_the_storage_takes_only_serving_access_and_logging_from_the_server() -> None:
    """It guards data; it grants nothing."""
    allowed = {shared for each in SHARED_WITH_STORAGE for shared in (each, each.rpartition(".")[0])}
    _assert_none(
        f"{_name(path)} imports {name}"
        for path in MODULES
        if _package(path) == "redfence_storage"
        for name in _imports_of(path, "redfence_server")
        if name not in allowed and not name.startswith(tuple(f"{each}." for each in SHARED_WITH_STORAGE))
    )


# Rooms and modules that decide without I/O.
PURE = (
    "redfence_server/access/policy.py",
    "redfence_server/access/principal.py",
    "redfence_server/access/tokens.py",
    "redfence_server/access/guard.py",
    "redfence_server/locking/quorum.py",
    "redfence_server/locking/node.py",
    "redfence_server/locking/backoff.py",
    "redfence_server/membership/admission.py",
    "redfence_server/membership/cluster_judgement.py",
    "redfence_server/membership/cluster_memory.py",
    "redfence_server/membership/examination.py",
    "redfence_server/membership/node_clock.py",
    "redfence_server/nodes/replay_queue.py",
    "redfence_server/operations/floors.py",
    "redfence_server/operations/recovery_plan.py",
    "redfence_server/operations/resize_plan.py",
    "redfence_server/diagnosis/doctor.py",
    "redfence_server/diagnosis/finding.py",
    "redfence_server/waiting/hold_watch.py",
    "redfence_server/waiting/schedule.py",
    "redfence_server/redis_io/scripts.py",
    "redfence_server/api/messages.py",
    "redfence_server/http2/liveness.py",
    "redfence_server/http2/wire.py",
    "redfence_server/clock.py",
    "redfence_server/errors.py",
    "redfence_server/model.py",
    "redfence/_core/",
    "redfence/_messages/",
    "redfence_storage/store.py",
)


def test_pure_modules_know_no_event_loop() -> None:
    """What decides needs no mock to be tested."""
    found = {each: [path for path in MODULES if f"/{each}" in path.as_posix()] for each in PURE}
    _assert_none(f"there is no {each}" for each, paths in found.items() if not paths)
    _assert_none(
        f"{_name(path)} imports asyncio"
        for paths in found.values()
        for path in paths
        if _imports_of(path, "asyncio")
    )


# --- who may touch what ---------------------------------------------------------------------------

OWNERS = {
    "grpc": re.compile(
        r"/(api/\w+|http2/\w+|metrics/observing|_transport/\w+|composition|grpc_\w+|client|client_errors|_messages/server_errors|_aio/client|_threads/client"
        r"|commands/storage)\.py$"
    ),
    "jwt": re.compile(r"/access/jwt_tokens\.py$"),
    "h11": re.compile(r"/metrics/endpoint\.py$"),
    "prometheus_client": re.compile(r"/metrics/\w+\.py$"),
    "ngh2": re.compile(r"/http2/\w+\.py$"),
    "redis": re.compile(r"/redis_io/dial\.py$"),
    "hiredis": re.compile(r"/(nodes/connection|redis_io/\w+)\.py$"),
    "random": re.compile(r"/_?randomness\.py$"),
    "uuid": re.compile(r"/_?randomness\.py$"),
    "secrets": re.compile(r"/(_?randomness|pause_demo/conductor|embedded/\w+)\.py$"),
}


def test_a_library_is_imported_only_where_it_belongs() -> None:
    """Drivers stay at the edge, and chance is passed in."""
    _assert_none(
        f"{_name(path)} imports {library}"
        for library, owners in OWNERS.items()
        for path in MODULES
        if _imports_of(path, library) and not owners.search(path.as_posix())
    )


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


def _attributes() -> Iterator[tuple[Path, int, str, str]]:
    """Yield every `name.attribute` in the sources."""
    for path in MODULES:
        for node in ast.walk(_tree(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                yield path, node.lineno, node.value.id, node.attr


def test_only_the_clock_asks_for_the_time() -> None:
    """Time is a constructor argument, so that a test can hold it in its hand."""
    _assert_none(
        f"{_name(path)}:{line}: {module}.{name}"
        for path, line, module, name in _attributes()
        if not _MAY_LOOK_AT_THE_CLOCK.search(path.as_posix())
        and ((module == "time" and name in _CLOCKS) or (module == "datetime" and name in {"now", "utcnow"}))
    )


# The last ones: what runs in the callbacks of a connection, which must go on; an acquire and a thread, whose
# defects must reach their callers; a holder's code, which must not end ours; and the program's OpenTelemetry,
# which must fail no call.
_BOUNDARY = re.compile(
    r"/(servicer|streams|keep_alive_stream|http2/(call|connection)|grpc_servicer|__main__|group_commit|waiting/acquiring|nodes/(commands|link)"
    r"|_threads/(driver|session)|_core/callbacks|redfence/_tracing)\.py$"
)


def test_only_the_outermost_layer_catches_everything() -> None:
    """Anywhere else it would hide a defect."""
    _assert_none(
        f"{_name(path)}:{node.lineno}"
        for path in MODULES
        if not _BOUNDARY.search(path.as_posix())
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or ast.unparse(node.type) == "Exception")
    )


def test_no_cancellation_is_lost() -> None:
    """`asyncio.wait_for` of Python 3.11 may lose one; `asyncio.timeout` does not."""
    _assert_none(
        f"{_name(path)}:{line}"
        for path, line, module, name in _attributes()
        if (module, name) == ("asyncio", "wait_for")
    )
    _assert_none(_name(path) for path in MODULES if "asyncio.wait_for" in _imports(path))


# --- names and words ------------------------------------------------------------------------------


def test_modules_are_named_for_what_they_are() -> None:
    """A name that fits everything tells nothing."""
    vague = {"utils", "util", "helpers", "common", "manager", "base", "misc"}
    _assert_none(_name(path) for path in MODULES if path.stem.strip("_") in vague)


def test_nothing_is_left_for_later() -> None:
    """Unfinished work belongs in the tracker."""
    words = re.compile(rf"\b({'|'.join(('TO' + 'DO', 'FIX' + 'ME', 'XX' + 'X'))})\b")
    _assert_none(_name(path) for path in [*MODULES, *TESTS, *LUA] if words.search(path.read_text()))


_MODULE_LINES_MAX = 350
_CLASS_METHODS_MAX = 20


def test_a_module_is_one_concept_long() -> None:
    """The target is 60 to 250 lines; far beyond, it is two modules."""
    _assert_none(
        f"{_name(path)} has {lines} lines"
        for path in [*MODULES, *PARTS]
        if (lines := len(path.read_text().splitlines())) > _MODULE_LINES_MAX
    )


def test_a_class_has_one_job() -> None:
    """A class with more methods than a reader can hold in mind is two classes."""
    _assert_none(
        f"{_name(path)}: {node.name} has {len(methods)} methods"
        for path in [*MODULES, *PARTS]
        for node in ast.walk(_tree(path))
        if isinstance(node, ast.ClassDef)
        and len(
            methods := [
                each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        )
        > _CLASS_METHODS_MAX
    )


# --- Lua ------------------------------------------------------------------------------------------


def _head(path: Path) -> str:
    return "".join(line for line in path.read_text().splitlines(keepends=True) if line.startswith("--"))


def test_a_script_begins_with_its_contract() -> None:
    """Keys, arguments, every answer, and why it must be atomic."""
    parts = ("-- KEYS  ", "-- ARGV  ", "-- Returns  {", "-- Atomic because ")
    _assert_none(_name(path) for path in LUA if not _head(path).startswith(f"-- {path.stem}: "))
    _assert_none(
        f"{_name(path)}: no '{part}'" for path in LUA for part in parts if f"\n{part}" not in _head(path)
    )


def test_a_script_answers_only_what_its_contract_lists() -> None:
    """A reader of the head knows every answer."""
    for path in LUA:
        head, body = "", ""
        for line in path.read_text().splitlines():
            if line.lstrip().startswith("--"):
                head += line
            else:
                body += line
        answered = set(re.findall(r"return \{'(\w+)'", body))
        assert answered, path.name
        assert answered == set(re.findall(r"\{'(\w+)'", head)), path.name


def test_every_script_is_used() -> None:
    """A script that is never run proves nothing."""
    sources = "".join(path.read_text() for path in MODULES)
    _assert_none(_name(path) for path in LUA if f'"{path.stem}"' not in sources)


# --- tests ----------------------------------------------------------------------------------------


def test_unit_tests_mock_nothing() -> None:
    """Fakes are held to the real thing by the contract suites; a mock is held to nothing."""
    _assert_none(
        _name(path)
        for path in TESTS
        if {"unit", "model", "contract"} & set(path.relative_to(REPOSITORY).parts)
        and re.search(r"^\s*(?:from|import) unittest", path.read_text(), re.MULTILINE)
    )


# --- language -------------------------------------------------------------------------------------

PAGES = sorted(
    [
        *REPOSITORY.glob("*.md"),
        *(REPOSITORY / "docs").rglob("*.md"),
        *(REPOSITORY / "examples").glob("*.md"),
        *(REPOSITORY / "tests").glob("*.md"),
    ]
)
SOURCES = sorted(
    path
    for folder in ("bench", "client_sdk", "docs", "protos", "server", "storage_demo", "tests")
    for pattern in ("*.lua", "*.pml", "*.proto", "*.py")
    for path in (REPOSITORY / folder).rglob(pattern)
    if "_pb2" not in path.name and path != Path(__file__)
)
PROSE_COLUMNS = 100
TEST_NAME_LENGTH = 80

# A sentence begins with a line, or after the end of another one. These beginnings hide the actor.
_OPENERS = r"(?:Of|Who|Whoever|Nobody|What is)"
_DIALECT = re.compile(rf"""(?:^|[.!?:]\s+|(?:\#|//|--|\"\"\"|\*|"|')\s*){_OPENERS}\s[a-z]""", re.MULTILINE)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a page that are prose: no code, no tables, no links that cannot be broken."""
    in_code = False
    for number, line in enumerate(text.splitlines(), start=1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.startswith("|"):
            yield number, line


def test_no_sentence_begins_with_a_word_that_hides_the_actor() -> None:
    """The server, node, client, waiter or operator is named instead."""
    _assert_none(
        f"{_name(path)}:{text.count(chr(10), 0, found.end()) + 1}: {found[0].strip()!r}"
        for path in [*PAGES, *SOURCES]
        for text in [path.read_text()]
        for found in _DIALECT.finditer(text)
    )


def test_prose_wraps_at_100_columns() -> None:
    """Tables and code are exempt."""
    _assert_none(
        f"{_name(path)}:{number}: {len(line)} columns"
        for path in PAGES
        for number, line in _lines(path.read_text())
        if len(line) > PROSE_COLUMNS and not re.search(r"\S{60}", line)
    )


def test_names_of_tests_are_short_sentences() -> None:
    """They are at most 80 characters long."""
    _assert_none(
        f"{_name(path)}: {name}"
        for path in SOURCES
        for name in re.findall(r"def (test_\w+)", path.read_text())
        if len(name) > TEST_NAME_LENGTH
    )
