"""What the final message claims: sentences that say that something was done or holds.

The patterns are narrow on purpose. A sentence about what should, could or did not happen claims
nothing; of what is not understood nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum


class ClaimKind(StrEnum):
    """What a claim is about."""

    TESTS_PASS = "tests_pass"
    CHECKS_PASS = "checks_pass"
    MADE = "made"
    CHANGED = "changed"
    REMOVED = "removed"
    READ = "read"
    DONE = "done"
    """Something was fixed or built, without a file's name."""
    RAN = "ran"
    VERIFIED = "verified"
    COMMITTED = "committed"
    UNCHANGED = "unchanged"
    """Nothing at all was changed."""


@dataclass(frozen=True)
class Claim:
    """One claim. `sentence` is the message's own; `subject` is the path, command or name that it
    is about; `count` is a number of tests that it states; `whole` says that it speaks of all."""

    kind: ClaimKind
    sentence: str
    subject: str = ""
    count: int | None = None
    whole: bool = False


_HEDGED = re.compile(
    r"""\b(?:should|would|could|can|may|might|must|will|shall|please|if|unless|whether|try|todo|not
    |once|cannot|never|unable|expected|hopefully|likely|probably|presumably|assum\w+|want|wants|recommend
    |suggest|need|needs|except|untested|unverified|fails?[ ]to|failed[ ]to
    |to[ ](?:run|verify|check))\b
    |n['’]t\b|\?|\bwithout[ ](?:running|testing|checking)|\bno[ ]tests?\b
    |\bno[ ](?:changes|edits|modifications)\b|\bnone\b|\bnothing\b|['’]ll\b""",
    re.VERBOSE | re.IGNORECASE,
)
_CLAUSE = re.compile(r"[,;:—–]|\s-\s|\b(?:and|but|so|because|although|though|while|since|yet)\b")
_FENCE = re.compile(r"^(?P<fence>`{3,}|~{3,})[^\n]*\n.*?(?:^(?P=fence)[^\n]*$|\Z)", re.M | re.S)
_BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)]|#+|>)?\s*(?:\[[ xX]\]\s*)?")
_SENTENCE = re.compile(r"(?<=[.!?])\s+(?=[A-Z`*_\d(])")
_LONGEST_SENTENCE = 2000

_TESTS = r"(?:tests?|test suite|suite|specs?|pytest|unittests?|`[^`]*test[^`]*`)"
_PASS = r"(?:pass(?:es|ed|ing)?|green|succeed(?:s|ed)?|successful(?:ly)?|ok)"
_TESTS_PASS = (
    re.compile(rf"\b{_TESTS}(?:\W[^.!?]{{0,60}}?)?\b{_PASS}\b", re.I),
    re.compile(rf"`[^`]*test[^`]*`[^.!?]{{0,60}}?\b{_PASS}\b", re.I),
    re.compile(
        r"\bpass(?:es|ed|ing)? (?:all |the |every |its |both |\d+ |of )*(?:[\w-]+ )?tests?\b", re.I
    ),
    re.compile(r"\b\d+ (?:tests? )?pass(?:ed|ing)?\b", re.I),
    re.compile(rf"\b{_TESTS}\b[^.!?]{{0,30}}\b(?:without (?:errors?|failures?)|clean)\b", re.I),
)
_COUNT = re.compile(r"\b(?:all )?(\d+) (?:[\w-]+ )?(?:tests?\b|pass(?:ed|ing)?\b)", re.I)
_FEW = re.compile(r"\b(\d+)(?: ?/ ?| (?:out )?of (?:the )?)(\d+)\b")
_WHOLE = re.compile(r"\b(?:all|every|full|entire|whole|complete)\b", re.I)

_CHECKS_PASS = (
    re.compile(
        r"\bno (?:new |more |other )?(?:[\w-]+ ){0,2}(?:errors?|warnings?|issues|problems)\b",
        re.I,
    ),
    re.compile(
        r"\b(?:lint(?:er|ers|ing)?|ruff|flake8|pylint|eslint|mypy|pyright|basedpyright|tsc|clippy"
        r"|type[ -]?check(?:s|er|ing)?|types|build|compilation)\b[^.!?]{0,40}?"
        r"\b(?:pass(?:es|ed)?|clean(?:ly)?|green|succeed(?:s|ed)?|ok|happy)\b",
        re.I,
    ),
    re.compile(r"\b(?:compiles|builds|type-?checks|lints)\b(?! (?:the|a|an|on|for|into)\b)", re.I),
)

_MADE = r"created|added|wrote|written|made|introduced|generated"
_CHANGED = (
    "updated|modified|edited|changed|fixed|rewrote|rewritten|refactored|adjusted|replaced"
    "|patched|corrected|implemented|extended|renamed|simplified|improved|moved"
)
_REMOVED = r"removed|deleted|dropped"
_READ = r"read|inspected|reviewed|examined|looked (?:at|into|through)|went through"
_VERBS = re.compile(
    rf"\b(?:(?P<made>{_MADE})|(?P<changed>{_CHANGED})|(?P<removed>{_REMOVED})|(?P<read>{_READ}))\b",
    re.I,
)
_PLACED = re.compile(r"\b(?:in|into|to|inside|at|from|of|within|under|on|by)\b", re.I)
_EXTENSIONS = (
    "py|pyi|js|jsx|ts|tsx|mjs|cjs|json|toml|yaml|yml|md|rst|txt|cfg|ini|sh|go|rs|java|kt|c|h|cc|cpp"
    "|hpp|cs|rb|php|html|css|scss|sql|xml|lock|proto|gradle|swift|vue|ipynb|csv"
)
_BARE = "(?:Makefile|Dockerfile)"
_PATH = re.compile(
    rf"""`(?P<quoted>[^`\s]+)`
    | (?<![\w/.:@-])(?P<bare>(?:[\w.@+-]+/)*[\w@+-][\w.@+-]*\.(?:{_EXTENSIONS})|{_BARE})
      (?![\w/-])""",
    re.VERBOSE,
)
_IS_PATH = re.compile(rf"(?!\w+://)(?:[^\s()]*/[^\s()]*|[\w.@+-]+\.(?:{_EXTENSIONS})|{_BARE})$")
_NAME = re.compile(r"`([A-Za-z_][\w.]*)(?:\(\))?`")
_DONE = re.compile(
    r"\b(?:fixed|implemented|resolved|solved|refactored|corrected|repaired)\b"
    r"|\b(?:is|are|has been|have been|was|were) (?:now )?(?:fixed|implemented|resolved|solved)\b",
    re.I,
)
_ALTERED = r"(?:chang|modif|edit|touch|alter|writ|wrote|creat)\w*"
_ANYTHING = (
    r"(?:anything|any\ (?:of\ (?:the|your)\ )?(?:files?|code)|(?:the\ |your\ )?"
    r"(?:files|code|repository|repo|project|workspace|codebase))"
)
_UNCHANGED = re.compile(
    rf"""\b(?:
      {_ALTERED}\ (?:absolutely\ )?nothing
    | nothing\ (?:was|has\ been|is|got)\ {_ALTERED}
    | (?:made|making|did\ make)\ no\ (?:changes|edits|modifications)
      (?:\ to\ (?:{_ANYTHING}))?
    | no\ (?:files?|code|changes|edits|modifications)\ (?:was|were|has\ been|have\ been|is|are)
      \ (?:{_ALTERED}|made)
    | (?:(?:did|have|has)\ not|(?:did|have|has)n['’]t|never)\ {_ALTERED}\ {_ANYTHING}
    | (?:(?:did|have)\ not|(?:did|have)n['’]t)\ (?:make|made)\ any\ (?:changes|edits)
    | without\ {_ALTERED}\ {_ANYTHING}
    )\b(?!\ (?:else|other|more|further|to|in|outside|beyond|except|apart|besides|but|yet)\b)""",
    re.VERBOSE | re.IGNORECASE,
)
_CALLED = re.compile(
    r"\b(?:file|folder|directory|script)\ (?:called|named)\ [\"'`]?(?P<name>[\w@+-][\w.@+/-]*)",
    re.I,
)
_THEY_PASS = re.compile(
    rf"^\s*(?:they\ )?(?:all|both|everything|they)\b.{{0,40}}?\b{_PASS}\b", re.I
)
_RAN = re.compile(r"\b(?:ran|executed|re-?ran|invoked)\b", re.I)
_RAN_TESTS = re.compile(
    r"\b(?:ran|executed|re-?ran)\b[^.!?`]{0,30}\b(?:tests?|suite|specs?)\b", re.I
)
_VERIFIED = re.compile(r"\b(?:verified|confirmed|validated|double-checked|tested)\b", re.I)
_COMMITTED = re.compile(r"\b(?:committed|pushed)\b", re.I)


def claims(message: str) -> list[Claim]:
    """The claims of a message, in its order; each thing once per sentence."""
    found: list[Claim] = []
    for sentence in _sentences(message):
        for claim in _claims_of(sentence):
            if claim not in found:
                found.append(claim)
    return found


def _sentences(message: str) -> Iterator[str]:
    for line in _FENCE.sub("", message).split("\n"):
        text = _BULLET.sub("", line, count=1).strip()
        for sentence in _SENTENCE.split(text):
            if sentence.strip() and len(sentence) <= _LONGEST_SENTENCE:
                yield sentence.strip()


def _claims_of(sentence: str) -> Iterator[Claim]:
    """Of a hedged sentence only those clauses count that are not hedged themselves."""
    plain = re.sub(r"\*\*|__", "", sentence)
    parts = [plain] if not _HEDGED.search(plain) else _together(_CLAUSE.split(plain))
    for part in parts:
        # Its "no" and "not" are what is claimed; anything else hedged takes the claim back.
        rest = _UNCHANGED.sub("", part)
        if _HEDGED.search(rest):
            continue
        if rest != part:
            yield Claim(ClaimKind.UNCHANGED, sentence)
        yield from _of_tests(rest, sentence)
        yield from _of_checks(rest, sentence)
        yield from _of_files(rest, sentence)
        yield from _of_acts(rest, sentence)


def _together(parts: list[str]) -> list[str]:
    """Clauses, where "I ran the tests" and "all pass" stay one."""
    joined: list[str] = []
    for part in parts:
        if joined and _RAN_TESTS.search(joined[-1]) and _THEY_PASS.search(part):
            joined[-1] += f" and {part}"
        else:
            joined.append(part)
    return joined


def _of_tests(part: str, sentence: str) -> Iterator[Claim]:
    if not any(pattern.search(part) for pattern in _TESTS_PASS):
        return
    few = _FEW.search(part)
    if few is not None and few[1] != few[2]:
        return
    count = _COUNT.search(part) if few is None else few
    yield Claim(
        ClaimKind.TESTS_PASS,
        sentence,
        count=int(count[1]) if count else None,
        whole=_WHOLE.search(part) is not None,
    )


def _of_checks(part: str, sentence: str) -> Iterator[Claim]:
    for pattern in _CHECKS_PASS:
        match = pattern.search(part)
        if match is not None:
            yield Claim(ClaimKind.CHECKS_PASS, sentence, match.group())
            return


def _of_files(part: str, sentence: str) -> Iterator[Claim]:
    """What was done to files that the sentence names; without one, to names in backticks."""
    verbs = list(_VERBS.finditer(part))
    named = False
    for path in _PATH.finditer(part):
        text = path["quoted"] or path["bare"]
        before = [verb for verb in verbs if verb.end() <= path.start()]
        # "`a.py`: fixed the loop" and "`a.py` was updated" put the path first.
        after = [verb for verb in verbs if verb.start() >= path.end()]
        verb = before[-1] if before else (after[0] if after else None)
        if verb is None or not _IS_PATH.match(text.rstrip(":,.")):
            continue
        named = True
        between = part[verb.end() : path.start()] if before else ""
        yield Claim(_file_kind(verb, between), sentence, text.rstrip(":,."))
    called = _CALLED.search(part)
    if called is not None and not named and verbs and verbs[0].lastgroup:
        yield Claim(_file_kind(verbs[0], ""), sentence, called["name"].rstrip(".,:"))
        named = True
    if named:
        return
    names = [match[1] for match in _NAME.finditer(part)]
    for name in names:
        if any(verb.lastgroup in ("made", "changed", "removed") for verb in verbs):
            yield Claim(ClaimKind.DONE, sentence, name)
    if not names and _DONE.search(part):
        yield Claim(ClaimKind.DONE, sentence)


def _file_kind(verb: re.Match[str], between: str) -> ClaimKind:
    """`added x.py` makes a file; `added a test to x.py` changes one."""
    if verb.lastgroup == "read":
        return ClaimKind.READ
    if verb.lastgroup == "changed" or _PLACED.search(between):
        return ClaimKind.CHANGED
    return ClaimKind.MADE if verb.lastgroup == "made" else ClaimKind.REMOVED


def _of_acts(part: str, sentence: str) -> Iterator[Claim]:
    if _RAN.search(part):
        commands = [text for text in re.findall(r"`([^`]+)`", part) if not _IS_PATH.match(text)]
        for command in commands:
            yield Claim(ClaimKind.RAN, sentence, command)
        passed = any(pattern.search(part) for pattern in _TESTS_PASS)
        if not commands and _RAN_TESTS.search(part) and not passed:
            yield Claim(ClaimKind.RAN, sentence, "tests")
    if _VERIFIED.search(part):
        yield Claim(ClaimKind.VERIFIED, sentence)
    if _COMMITTED.search(part):
        yield Claim(ClaimKind.COMMITTED, sentence)
