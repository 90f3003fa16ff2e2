"""`redfence completion`: real shells in a terminal complete commands, options, files and what runs locked."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from redfence._cli import main

# A function stands for `redfence`, and prints the line that the shell has completed.
_SH = "redfence() { echo \"<$*>\"; }; PS1='$ '"
# For each shell: how it starts without the user's files, and what it runs before the keys.
_SHELLS = {
    "bash": (["--norc", "--noprofile", "-i"], f"{_SH}; source _redfence"),
    "zsh": (["-f", "-i"], f"fpath=($PWD $fpath); autoload -U compinit; compinit -u -D; {_SH}"),
    "fish": (["--no-config", "-i"], "function redfence; echo '<'\"$argv\"'>'; end; source _redfence"),
}
_TYPED = (
    ("clu\tst\t", "cluster status"),
    ("doctor -o j\t", "doctor -o json"),
    ("serve --conf\tsome-f\t", "serve --config some-file"),
    ("lock --kill\t1 r deploy-the\tsome-f\t", "lock --kill-after 1 r deploy-the-thing some-file"),
    ("lock -n --ttl 9 r -- deploy-the\tsome-f\t", "lock -n --ttl 9 r -- deploy-the-thing some-file"),
)


@contextmanager
def _terminal(command: list[str], folder: Path) -> Iterator[int]:
    """Run a program in a terminal, and yield the file descriptor of its keyboard and screen."""
    master, slave = pty.openpty()
    environment = {
        "HOME": str(folder),
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "TERM": "xterm",
        "LC_ALL": "C.UTF-8",
    }
    # Only the new process itself can become the leader of the terminal's session.
    log_in = lambda: os.login_tty(slave)
    process = subprocess.Popen(command, preexec_fn=log_in, cwd=folder, env=environment)  # noqa: PLW1509
    os.close(slave)
    try:
        yield master
    finally:
        process.kill()
        process.wait()
        os.close(master)


def _read_until(screen: int, text: str) -> None:
    seen, ends_at_s = b"", time.monotonic() + 10
    while text.encode() not in seen:
        ready, _, _ = select.select([screen], [], [], max(ends_at_s - time.monotonic(), 0))
        assert ready, f"no {text!r} in 10 s, but {seen.decode()!r}"
        seen += os.read(screen, 4096)


@pytest.mark.slow
@pytest.mark.parametrize("shell", _SHELLS)
def test_a_shell_completes_the_commands_of_redfence(shell: str, tmp_path: Path) -> None:
    """At the TAB key: commands, options, choices, files, and the command under the lock."""
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed; run: apt-get install {shell}")
    redfence = Path(sys.executable).with_name("redfence")
    script = subprocess.run([redfence, "completion", shell], capture_output=True, text=True, check=True)
    assert not script.stderr
    (tmp_path / "_redfence").write_text(script.stdout)
    (tmp_path / "some-file").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/deploy-the-thing").touch(mode=0o755)

    arguments, prepare = _SHELLS[shell]
    with _terminal([shell, *arguments], tmp_path) as terminal:
        os.write(terminal, f"{prepare}\recho re''ady\r".encode())
        _read_until(terminal, "ready\r\n")
        for keys, completed in _TYPED:
            os.write(terminal, f"redfence {keys}\r".encode())
            _read_until(terminal, f"<{completed}>")


def test_without_the_extra_the_message_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main.main(["completion", "bash"]) == 2
    assert "run: pip install 'redfence[completion]'" in capsys.readouterr().err
