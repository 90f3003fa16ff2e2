"""The command line of `redfence lock`: where the command begins, and the habits of flock and timeout."""

from __future__ import annotations

import shlex

import pytest

from redfence._cli import main
from redfence._cli.lock import client_options
from redfence._cli.lock_arguments import command_of


@pytest.mark.parametrize(
    ("line", "command", "ttl"),
    [
        ("r echo hi", "echo hi", 10),
        ("r -- echo hi", "echo hi", 10),
        ("--ttl 5 r echo hi", "echo hi", 5),
        ("r --ttl 5 echo --ttl 7", "echo --ttl 7", 5),
        ("r --ttl 5 -- echo --ttl 7", "echo --ttl 7", 5),
        ("--ttl=5 r echo -n --wait --server -h --version -c", "echo -n --wait --server -h --version -c", 5),
        # `--` after the beginning of the command is the command's.
        ("r git log -- file -- more", "git log -- file -- more", 10),
        ("r -- git log -- file", "git log -- file", 10),
        ("r echo --", "echo --", 10),
        ("r -- -echo", "-echo", 10),
        # These begin like several options of `lock`.
        ("r ls --s --h --w", "ls --s --h --w", 10),
        ("r -c 'echo a; echo b'", "sh -c 'echo a; echo b'", 10),
        ("-c true -n r", "sh -c true", 10),
        ("r -- env -S '' 'two words'", "env -S '' 'two words'", 10),
    ],
)
def test_the_command_begins_at_the_first_word_that_is_no_option_of_lock(
    line: str, command: str, ttl: float
) -> None:
    parsed = main.parse(["lock", *shlex.split(line)])
    assert (parsed.name, command_of(parsed), parsed.ttl) == ("r", shlex.split(command), ttl)


@pytest.mark.parametrize(
    ("options", "wait"),
    [
        ("", None),
        *((option, 0.0) for option in ("-n", "--nb", "--nonblock", "-en", "-xn", "-w 0")),
        *((option, 0.007) for option in ("-w .007", "--wait 7ms", "--timeout 0.007s")),
        *((option, 90.0) for option in ("-w 90", "-w90", "--wait=1.5m", "-e -w 90s")),
    ],
)
def test_the_options_of_flock_set_the_wait(options: str, wait: float | None) -> None:
    parsed = main.parse(["lock", *options.split(), "r", "true"])
    assert (parsed.wait, command_of(parsed)) == (wait, ["true"])


def test_kill_after_and_the_exit_status_have_the_short_options_of_timeout_and_flock() -> None:
    parsed = main.parse(["lock", "r", "-k", "2", "-E", "0", "true"])
    assert (parsed.kill_after, parsed.conflict_exit_code) == (2.0, 0)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("-s r true", "argument -s: redfence has no shared locks"),
        ("-s KILL r true", "see --kill-after"),
        ("--signal=KILL r true", "argument --signal: "),
        ("-u r", "argument -u: redfence releases the lock when the command ends"),
        ("r -o true", "argument -o: redfence ends the processes that a command leaves behind"),
        ("r --no-fork true", "argument --no-fork: redfence stays beside the command"),
        ("r -E 256 true", "'256' is not an exit status; write a number from 0 to 255"),
        ("r -n -w 3 true", "argument -w/--wait/--timeout: not allowed with argument -n/--nonblock/--nb"),
        ("r --verbose true", "unrecognized arguments: --verbose"),
    ],
)
def test_an_option_that_lock_does_not_have_is_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str], line: str, told: str
) -> None:
    with pytest.raises(SystemExit) as exited:
        main.parse(["lock", *line.split()])
    assert exited.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("r", "no command given; write it after NAME"),
        ("r --", "no command given"),
        ("r ''", "the command is an empty word"),
        ("r -c true false", "-c and the command 'false' given"),
        ("r -c true -- false", "-c and the command 'false' given"),
    ],
)
def test_a_command_is_given_once(line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        command_of(main.parse(["lock", *shlex.split(line)]))


@pytest.mark.parametrize(
    ("wait", "servers", "rpc_timeout", "connect_timeout"),
    [
        *((0.0, 1, 1.5, 0.8), (1.0, 1, 1.5, 0.8), (2.5, 1, 2.5, 0.8), (0.0, 3, 4.5, 0.8)),
        *((None, 1, 5, 0.8), (9.0, 3, 5, 0.8), (0.0, 4, 6, 0.8), (None, 4, 6, 0.8)),
    ],
)
def test_a_short_wait_gives_up_unreachable_servers_soon_but_tries_each(
    wait: float | None, servers: int, rpc_timeout: float, connect_timeout: float
) -> None:
    options = client_options(wait_s=wait, server_count=servers)
    assert (options.rpc_timeout, options.connect_timeout) == (rpc_timeout, connect_timeout)
