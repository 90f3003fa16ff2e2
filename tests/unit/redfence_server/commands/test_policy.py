"""`redfence policy`: a file is checked, a decision explained, and a token made that the server accepts."""

from __future__ import annotations

from pathlib import Path

import pytest

from redfence._cli.main import main
from redfence_server.access.tokens import digest_of, load_tokens

POLICY = """
[[rules]]
principals = ["token:billing"]
verbs = ["acquire"]
prefix = "billing/"

[[rules]]
principals = ["authenticated"]
verbs = ["acquire"]
prefix = "billing/secret/"
effect = "deny"
"""


@pytest.mark.parametrize(
    ("flags", "exit_status", "words"),
    [
        ([], 0, "valid, 2 rules"),
        (
            ["--principal", "token:billing", "--verb", "acquire", "--resource", "billing/1"],
            0,
            "allowed: rule 1",
        ),
        (
            ["--principal", "token:billing", "--verb", "acquire", "--resource", "billing/secret/1"],
            1,
            "rule 2",
        ),
        (["--principal", "anonymous", "--verb", "acquire", "--resource", "billing/1"], 1, "no rule names"),
        (["--principal", "token:billing", "--verb", "inspect"], 1, "no rule names"),
        (["--principal", "billing", "--verb", "inspect"], 2, "'billing' is no principal"),
        (["--verb", "inspect"], 2, "give both"),
    ],
)
def test_policy_check_explains_a_decision_by_the_rule_that_made_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], exit_status: int, words: str
) -> None:
    path = tmp_path / "policy.toml"
    path.write_text(POLICY)
    assert main(["policy", "check", str(path), *flags]) == exit_status
    told = "".join(capsys.readouterr())
    for word in words.split(": "):
        assert word in told


def test_a_new_token_is_the_one_of_its_entry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tokens.toml"
    assert main(["policy", "new-token", "billing"]) == 0
    told = capsys.readouterr()
    path.write_text(told.out)
    token = told.err.split()[-1]
    identity = load_tokens(path).identify(digest_of(token))
    assert identity is not None
    assert str(identity.principal) == "token:billing"
    assert token not in told.out


def test_a_wrong_tokens_file_is_refused_by_its_entry_and_without_its_values(tmp_path: Path) -> None:
    from redfence_server.errors import ConfigError

    path = tmp_path / "tokens.toml"
    digest = digest_of("x").hex()
    for text, problem in (
        (f'[[tokens]]\nname="a"\nsha256="{digest.upper()}"', "token 1: sha256: "),
        (f'[[tokens]]\nname=""\nsha256="{digest}"', "token 1: name: is empty"),
        (
            f'[[tokens]]\nname="a"\nsha256="{digest}"\n[[tokens]]\nname="b"\nsha256="{digest}"',
            "token 2: sha256: another name has the same token",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError) as caught:
            load_tokens(path)
        assert problem in str(caught.value)
        assert digest not in str(caught.value).lower()
