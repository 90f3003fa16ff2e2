"""Generates the Python code of the contract, or checks that the committed code is up to date.

The wire names stay `redfence.v1…`. The Python package is `redfence_proto`, because of protoc's
`-Ialias=path`.
"""

from __future__ import annotations

import argparse
import filecmp
import subprocess
import sys
import tempfile
from pathlib import Path

PROTOS = Path(__file__).resolve().parent
# Maps a Python package below the output folder to the folder of its .proto file. A package has one
# file, because two files could not import each other under an alias.
PACKAGES = {"v1": "redfence/v1", "storage/v1": "redfence/storage/v1"}


def generate(out: Path) -> None:
    """Write the generated modules below `out`."""
    with tempfile.TemporaryDirectory() as scratch:
        includes = [f"-Iredfence_proto/{package}={PROTOS / source}" for package, source in PACKAGES.items()]
        files = [
            f"redfence_proto/{package}/{proto.name}"
            for package, source in PACKAGES.items()
            for proto in sorted((PROTOS / source).glob("*.proto"))
        ]
        outputs = [f"--{kind}_out={scratch}" for kind in ("python", "grpc_python", "mypy", "mypy_grpc")]
        subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *includes, *outputs, *files], check=True)
        for made in sorted(Path(scratch, "redfence_proto").rglob("*.py*")):
            target = out / made.relative_to(Path(scratch, "redfence_proto"))
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(made.read_bytes())


def stale(checked_in: Path) -> list[str]:
    """Return the committed files that differ from the generated ones, are missing, or are extra."""
    with tempfile.TemporaryDirectory() as scratch:
        generate(Path(scratch))
        fresh = {path.relative_to(scratch) for path in Path(scratch).rglob("*_pb2*")}
        kept = {path.relative_to(checked_in) for path in checked_in.rglob("*_pb2*.py*")}
        kept = {path for path in kept if "__pycache__" not in path.parts}
        differing = {
            path
            for path in fresh & kept
            if not filecmp.cmp(Path(scratch, path), checked_in / path, shallow=False)
        }
        return sorted(str(path) for path in (fresh ^ kept) | differing)


def main() -> int:
    """Generate or check the code; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if anything would change")
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    if not options.check:
        generate(options.out)
        return 0
    differences = stale(options.out)
    for name in differences:
        sys.stderr.write(f"{options.out / name} is not up to date: run `make proto` and commit the result\n")
    return 1 if differences else 0


if __name__ == "__main__":
    sys.exit(main())
