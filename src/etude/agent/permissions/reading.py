"""Commands that only read, whatever their arguments, and those arguments that make them do more.

They need no question in any mode. A command that is not listed is not thereby dangerous, it is
asked about. Options are refused by prefix, since GNU programs and git take abbreviations.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from etude.agent.permissions.bash import Simple, Word, analyse

_NAMES = """
basename cat cmp comm cut df diff dirname du echo egrep expand fgrep fold grep head id jq join ls
md5sum nl nproc od paste printenv pwd readlink realpath rev seq sha1sum sha256sum sleep stat strings
tac tail tr true false type uname wc which whoami
"""
_ANY_ARGUMENTS = frozenset(_NAMES.split())
_DIRECTORY = frozenset({"cd", "pushd", "popd"})
_VERSIONED = frozenset({"gcc", "git", "node", "python", "python3"})


def _options_but(short: str, *long: str) -> Callable[[Sequence[str]], bool]:
    """Arguments without these short options, single or in a cluster, and these long ones."""

    def allowed(arguments: Sequence[str]) -> bool:
        for argument in arguments:
            if argument.startswith("--"):
                name = argument.split("=", 1)[0]
                if len(name) > 2 and any(option.startswith(name) for option in long):
                    return False
            elif argument.startswith("-") and any(letter in short for letter in argument[1:]):
                return False
        return True

    return allowed


def _find(arguments: Sequence[str]) -> bool:
    return not any(
        argument.startswith(("-exec", "-ok", "-delete", "-fprint", "-fls"))
        for argument in arguments
    )


def _sed(arguments: Sequence[str]) -> bool:
    """Only printing lines by number: other scripts can write files and run commands."""
    return (
        len(arguments) >= 2
        and arguments[0] == "-n"
        and re.fullmatch(r"\d+(?:,(?:\d+|\$))?p", arguments[1]) is not None
        and not any(argument.startswith("-") for argument in arguments[2:])
    )


def _uniq(arguments: Sequence[str]) -> bool:
    """A second file name would be written. For the words as they stand: of a pattern the shell may
    make two."""
    if "--" in arguments:
        return False
    return sum(not argument.startswith("-") or argument == "-" for argument in arguments) <= 1


def _date(arguments: Sequence[str]) -> bool:
    return all(argument.startswith("+") or argument == "-u" for argument in arguments)


def _command(arguments: Sequence[str]) -> bool:
    return len(arguments) == 2 and arguments[0] in ("-v", "-V") and arguments[1][:1] != "-"


_CHECKED: dict[str, Callable[[Sequence[str]], bool]] = {
    "command": _command,
    "date": _date,
    "file": _options_but("C", "--compile"),
    "find": _find,
    "rg": _options_but("z", "--pre", "--hostname-bin", "--search-zip"),
    "sed": _sed,
    "sort": _options_but("oT", "--output", "--compress-program", "--temporary-directory"),
    "tree": _options_but("oR", "--output"),
    "uniq": _uniq,
}
_LITERAL = frozenset({"date", "git", "uniq", *_DIRECTORY})
"""Where one word more, or another one, does something else. The others read every operand."""

_SHOWING = _options_but(
    "",
    "--output",
    "--ext-diff",
    "--show-signature",
    "--textconv",
    # Other repositories have their own configuration, and programs in it.
    "--recurse-submodules",
    "--submodule",
    # Merging runs the programs that attributes name.
    "--remerge-diff",
    "--diff-merges",
)


def _only(*known: str) -> Callable[[Sequence[str]], bool]:
    return lambda arguments: all(argument in known for argument in arguments)


def _listing_tags(arguments: Sequence[str]) -> bool:
    return not arguments or (arguments[0] in ("-l", "--list") and len(arguments) <= 2)


_GIT: dict[str, Callable[[Sequence[str]], bool]] = {
    "blame": _SHOWING,
    "branch": _only("-a", "--all", "-r", "--remotes", "-v", "-vv", "--show-current", "--list"),
    "cat-file": lambda arguments: len(arguments) == 2 and arguments[0] in ("-p", "-t", "-s", "-e"),
    "describe": _SHOWING,
    "diff": _SHOWING,
    "grep": _options_but("O", "--open-files-in-pager", "--textconv", "--recurse-submodules"),
    "log": _SHOWING,
    "ls-files": _SHOWING,
    "ls-tree": _SHOWING,
    "remote": _only("-v", "--verbose"),
    "rev-list": _SHOWING,
    "rev-parse": _SHOWING,
    "shortlog": _SHOWING,
    "show": _SHOWING,
    "stash": lambda arguments: list(arguments[:1]) == ["list"] and _SHOWING(arguments[1:]),
    "status": _SHOWING,
    "tag": _listing_tags,
}


def _git(arguments: Sequence[str]) -> bool:
    """Options before the subcommand (`-c`, `-C`, `--git-dir`) can make git run anything."""
    rest = list(arguments)
    if rest[:1] == ["--no-pager"]:
        rest = rest[1:]
    return bool(rest) and rest[0] in _GIT and _GIT[rest[0]](rest[1:])


def _becomes_option(word: Word) -> bool:
    """Whether the shell may turn a word into one that begins with a dash."""
    return not word.literal and word.start[:1] in ("", "-")


def only_reads(command: Simple) -> bool:
    """Whether a simple command changes nothing and starts no other program. Changing the folder
    counts as reading: see `moves`."""
    name = command.words[0].text
    if name in _ANY_ARGUMENTS:
        return True
    unsure = any(_becomes_option(word) for word in command.words[1:])
    if unsure or (name in _LITERAL and not command.literal):
        return False
    arguments = [word.text for word in command.words[1:]]
    if name in _DIRECTORY:
        return not any("=" in argument for argument in arguments)
    if name == "git":
        return _git(arguments) or arguments == ["--version"]
    if name in _VERSIONED:
        return arguments == ["--version"]
    return name in _CHECKED and _CHECKED[name](arguments)


def moves(command: Simple) -> bool:
    """Whether a command changes the folder in which later ones run: there the same words may mean
    another script, and git another repository."""
    return command.words[0].text in _DIRECTORY


def in_another_folder(commands: Sequence[Simple]) -> bool:
    """Whether commands that may run elsewhere than in the project's root all still only read."""
    return all(only_reads(command) and command.words[0].text != "git" for command in commands)


def reads_only(text: str) -> bool:
    """Whether a whole command line is made of nothing but commands that only read."""
    script = analyse(text)
    if script.objection is not None or not all(only_reads(c) for c in script.commands):
        return False
    return not any(moves(c) for c in script.commands) or in_another_folder(script.commands)
