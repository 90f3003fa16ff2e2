"""Build the image of the Containerfile, run it as Kubernetes would, and fail if the image breaks a promise.

It needs root, buildah and mmdebstrap, but no container engine and no registry of images. Only a registry has
the base image, so a stand-in of Debian packages takes its place.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

DEPLOY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DEPLOY / "local"))
import redfence  # noqa: E402
from redfence_server.embedded.nodes import free_port  # noqa: E402
from start_platform import HOST, Processes, start_nodes  # noqa: E402  (a script, in no package)

BASE = "localhost/redfence-base"
IMAGE = "localhost/redfence"
# The release of Debian that has the Python of the Containerfile.
DEBIAN = "trixie"
# pip in the build must use the authorities and the index of this machine's pip.
_OF_THIS_MACHINE = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pip.conf")
# Programs and packages that serve an attacker and not the server.
_UNWANTED = {"pip", "setuptools", "wheel", "hatchling", "editables"}
_UNWANTED_PROGRAMS = ("cc", "gcc", "make", "ld")
_LOOK = """
import importlib.metadata, json, os, shutil, stat, sys
writable = []
for folder, folders, files in os.walk("/"):
    folders[:] = [name for name in folders if os.path.join(folder, name) not in ("/proc", "/dev", "/sys")]
    for path in (os.path.join(folder, name) for name in ("", *files)):
        found = os.lstat(path)
        # Everyone may put a file into a folder with the sticky bit, such as /tmp.
        open_to_all = found.st_mode & 0o1002 == 0o2 and not stat.S_ISLNK(found.st_mode)
        if found.st_uid == os.getuid() or open_to_all:
            writable.append(path)
print(json.dumps({
    "user": [os.getuid(), os.getgid(), *os.getgroups()],
    "packages": sorted(d.name for d in importlib.metadata.distributions()),
    "programs": [name for name in sys.argv[1:] if shutil.which(name)],
    "writable": writable,
}))
"""


@dataclass(frozen=True)
class Builder:
    """Runs buildah with a storage of its own, which ends with its folder."""

    folder: Path

    def __call__(self, *command: str) -> str:
        """Return what the command prints; its first word is the subcommand."""
        own = ["--root", str(self.folder / "root"), "--runroot", str(self.folder / "run")]
        call = ["buildah", *own, "--storage-driver", "vfs", *command]
        done = subprocess.run(call, check=False, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        if done.returncode != 0:
            sys.exit(f"image-check: buildah {command[0]} ended with status {done.returncode}\n{done.stdout}")
        return done.stdout.strip()


@dataclass(frozen=True)
class Image:
    """Runs programs of an unpacked image the way `deploy/kubernetes` does.

    The program is process 1, has the user of the image and no capability, and sees a read-only file system.
    """

    root: Path
    environment: Mapping[str, str]
    user: str
    entrypoint: list[str]
    command: list[str]

    def argv(self, *command: str) -> list[str]:
        """Return how this machine starts the command in the image."""
        inside = (
            'mount --bind "$0" "$0" && mount -t proc proc "$0/proc" && mount -o remount,ro,bind "$0" && '
            f'exec chroot --userspec={self.user} --groups= "$0" "$@"'
        )
        program = shutil.which("unshare") or "unshare"
        alone = [program, "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", inside, str(self.root)]
        return [*alone, *command]

    def output(self, *command: str, **environment: str) -> str:
        """Return what the command prints once it has ended with status 0."""
        done = subprocess.run(
            self.argv(*command),
            check=False,
            text=True,
            stdout=subprocess.PIPE,
            env={**self.environment, **environment},
        )
        _require(done.returncode == 0, f"{command[0]} ended with status {done.returncode}")
        return done.stdout


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001
    if not holds:
        sys.exit(f"image-check: {otherwise}")


def _make_base(buildah: Builder) -> None:
    archive = buildah.folder / "base.tar"
    packages = "python3,python3-venv,ca-certificates"
    named = '--customize-hook=ln -s python3 "$1/usr/bin/python"'
    how = ["--quiet", "--variant=minbase", f"--include={packages}", named]
    subprocess.run(["mmdebstrap", *how, DEBIAN, str(archive)], check=True)
    container = buildah("from", "scratch")
    buildah("add", "--quiet", container, str(archive), "/")
    buildah("commit", "--quiet", "--rm", container, BASE)


def _build(buildah: Builder) -> Image:
    volumes = [f"--volume={path}:{path}:ro" for path in _OF_THIS_MACHINE if Path(path).exists()]
    how = ["--isolation", "chroot", "--pull-never", *volumes, "--build-arg", f"BASE={BASE}", "--tag", IMAGE]
    buildah("build", *how, "--file", str(DEPLOY / "container/Containerfile"), str(DEPLOY.parent))
    container = buildah("from", "--pull-never", IMAGE)
    settings = json.loads(buildah("inspect", "--type", "image", IMAGE))["OCIv1"]["config"]
    return Image(
        root=Path(buildah("mount", container)),
        environment=dict(each.split("=", 1) for each in settings["Env"]),
        user=settings.get("User", "0:0"),
        entrypoint=settings["Entrypoint"],
        command=settings["Cmd"],
    )


def _check_content(image: Image) -> None:
    version = image.output(*image.entrypoint, "--version")
    _require(version == f"redfence {redfence.__version__}\n", f"the image has the version {version!r}")
    seen = json.loads(image.output("python", "-c", _LOOK, *_UNWANTED_PROGRAMS))
    _require(0 not in seen["user"], f"it runs as root: user and groups are {seen['user']}")
    unwanted = sorted(_UNWANTED & set(seen["packages"]))
    _require(not unwanted, f"the server needs no {unwanted}, and the image has these packages")
    _require(
        not seen["programs"], f"the server needs no {seen['programs']}, and the image has these programs"
    )
    _require(not seen["writable"], f"the user of the image owns or may change {seen['writable'][:10]}")


def _check_serving(image: Image, processes: Processes, nodes: str, transport: str) -> None:
    """Start the image as it is, with settings by the environment; take a lock through it, and stop it."""
    listen, metrics = f"{HOST}:{free_port()}", f"{HOST}:{free_port()}"
    settings = {
        "REDFENCE_NODES": nodes,
        "REDFENCE_LISTEN": listen,
        "REDFENCE_METRICS_LISTEN": metrics,
        "REDFENCE_TRANSPORT": transport,
    }
    argv = image.argv(*image.entrypoint, *image.command)
    server = processes.start(transport, *argv, **image.environment, **settings)
    for probe in ("readyz", "livez"):
        processes.until_ready(transport, server, f"http://{metrics}/{probe}")
    lock = (*image.entrypoint, "lock", "--server", listen, "image-check", "--")
    token = image.output(*lock, "sh", "-c", "echo $REDFENCE_TOKEN")
    _require(token.strip().isdigit(), f"a lock through {transport} has the token {token!r}")
    # unshare itself ignores the signal. Its child is process 1 of the image.
    children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text().split()
    os.kill(int(children[0]), signal.SIGTERM)
    status = server.wait(15)
    _require(status == 0, f"the server over {transport} ended with status {status} after SIGTERM")


def main() -> None:
    """Check the image; print its size beside the stand-in's."""
    missing = [each for each in ("buildah", "mmdebstrap", "unshare") if shutil.which(each) is None]
    _require(not missing, f"this machine has no {missing}; install them, e.g. by apt-get")
    _require(os.geteuid() == 0, "run it as root, because it changes the root folder of processes")
    with tempfile.TemporaryDirectory(prefix="redfence-image-") as name, ExitStack() as stack:
        folder = Path(name)
        buildah = Builder(folder)
        _make_base(buildah)
        image = _build(buildah)
        _check_content(image)
        processes = Processes(folder, stack)
        _, nodes = start_nodes(processes, folder)
        for transport in ("grpcio", "fast"):
            _check_serving(image, processes, nodes, transport)
        sizes = {
            each["names"][0]: each["size"]
            for each in json.loads(buildah("images", "--json"))
            if each["names"]
        }
        print(f"image-check: the image is right; sizes: {sizes}")


if __name__ == "__main__":
    main()
