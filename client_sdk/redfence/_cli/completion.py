"""Prints a script by which a shell completes `redfence` commands: `redfence completion`.

The script is static. The shell completes without starting Python.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from redfence._cli import commands

HELP = "print a completion script for bash, zsh or fish"

_EPILOG = """\
Write the script to a file that your shell reads, and start a new shell:

  bash: redfence completion bash > ~/.local/share/bash-completion/completions/redfence
  zsh:  redfence completion zsh > DIR/_redfence    (DIR is a directory of $fpath)
  fish: redfence completion fish > ~/.config/fish/completions/redfence.fish

bash reads that directory if the package bash-completion is installed; otherwise source the file in ~/.bashrc.
Write the script again after you upgrade redfence or install another extra."""

# How each shell completes the command of `redfence lock` and its arguments. zsh and fish complete whatever
# they know of the command; bash completes files after its name.
_COMMAND = {
    "bash": "_redfence_command",
    "zsh": "_redfence_command",
    # Skip `redfence lock NAME`, and the values of options. Without the empty word, fish would take those
    # options for its own.
    "fish": "(__fish_complete_subcommand --fcs-skip=3 '' $_shtab_redfence_opts_with_value)",
    "preamble": {
        # shtab's variables tell where the command begins, and whether `--` stands before it.
        "bash": """\
_redfence_command() {
  if (( COMP_CWORD <= current_action_args_start_index + pos_only )); then
    compgen -c -- "$1"
  else
    compgen -f -- "$1"
  fi
}
""",
        # The words are NAME, perhaps `--`, and the command.
        "zsh": """\
_redfence_command() {
  local before=1
  [[ $words[2] == -- ]] && (( CURRENT > 2 )) && before=2
  shift $before words
  (( CURRENT -= before ))
  _normal
}
""",
    },
}
# A word that only the user knows. By default zsh shows its help, and inserts no option before it.
_UNKNOWN = {"zsh": "{true}"}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = _EPILOG
    parser.add_argument("shell", choices=("bash", "zsh", "fish"))


def run(arguments: argparse.Namespace) -> int:
    """Print the script for all commands that are installed; return 0."""
    import shtab  # not at the top, because the package is an extra

    parser = commands.make_parser()
    for each in parser.load_all():
        for action in each._actions:  # noqa: SLF001  (argparse shows them nowhere else)
            if action.type is Path:
                vars(action)["complete"] = shtab.FILE
            elif action.nargs == argparse.PARSER and not action.choices:
                # shtab knows such words under this name only.
                action.nargs = argparse.REMAINDER
                vars(action)["complete"] = _COMMAND
            elif not action.option_strings and not action.choices:
                vars(action)["complete"] = _UNKNOWN
    print(shtab.complete(parser, shell=arguments.shell))
    return 0
