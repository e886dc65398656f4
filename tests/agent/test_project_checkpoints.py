"""Snapshots: whatever happens to the files, undo brings back the same bytes, modes and links, and
the project's own repository is not touched."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from etude.agent.checkpoints import Checkpoints, dangerous
from etude.agent.project_tree import MAX_FILE_BYTES
from etude.errors import EtudeError

State = dict[str, tuple[str, int, bytes]]


def state(root: Path, *, with_git: bool = False) -> State:
    """Everything below a folder: kind, permission bits and content, by name."""
    found: State = {}
    waiting = [root]
    while waiting:
        for path in waiting.pop().iterdir():
            if path.name == ".git" and not with_git:
                continue
            status = path.lstat()
            mode = stat.S_IMODE(status.st_mode)
            key = str(path.relative_to(root))
            if stat.S_ISLNK(status.st_mode):
                found[key] = ("link", 0, os.fsencode(path.readlink()))
            elif stat.S_ISDIR(status.st_mode):
                found[key] = ("folder", mode, b"")
                waiting.append(path)
            elif stat.S_ISREG(status.st_mode):
                found[key] = ("file", mode, path.read_bytes())
            else:
                found[key] = ("special", mode, b"")
    return found


NAMES = st.sampled_from(
    [
        b"a",
        b"b.txt",
        b"src",
        b"deep",
        b"with space",
        b"\xff\xfe",
        b"-rf",
        b"line\nend",
        b"caf\xc3\xa9",
    ]
)
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join)
CONTENT = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"a\r\nb\r\n", b"\xef\xbb\xbfx\n", b"no end", b"", b"a\n" * 50, b"$Id$\n"]),
)
STEPS = st.one_of(
    st.tuples(st.just("write"), PATHS, CONTENT),
    st.tuples(st.just("folder"), PATHS, st.just(b"")),
    st.tuples(
        st.just("link"), PATHS, st.sampled_from([b"a", b"../x", b"/etc/passwd", b"\xff", b"src"])
    ),
    st.tuples(st.just("remove"), PATHS, st.just(b"")),
    st.tuples(st.just("mode"), PATHS, st.sampled_from([b"0", b"600", b"755", b"444", b"1777"])),
)


def do(root: Path, steps: list[tuple[str, bytes, bytes]]) -> None:
    """Change files as a careless program would; what cannot be done is left."""
    for kind, name, data in steps:
        path = root / os.fsdecode(name)
        if os.path.realpath(path.parent) != str(path.parent):
            continue  # Through a link: not ours to write.
        try:
            if kind == "remove":
                is_folder = path.is_dir() and not path.is_symlink()
                (shutil.rmtree if is_folder else os.unlink)(path)
            elif kind == "mode":
                if not path.is_symlink():
                    path.chmod(int(data, 8))
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                if kind == "folder":
                    path.mkdir()
                elif kind == "link":
                    path.symlink_to(os.fsdecode(data))
                elif not path.is_symlink():
                    path.write_bytes(data)
        except OSError:
            pass


@settings(max_examples=60, deadline=None)
@given(st.lists(STEPS, max_size=14), st.lists(STEPS, max_size=14), st.lists(STEPS, max_size=6))
def test_undo_brings_everything_back(
    first: list[tuple[str, bytes, bytes]],
    second: list[tuple[str, bytes, bytes]],
    third: list[tuple[str, bytes, bytes]],
) -> None:
    # In memory where that is possible: 540 transactions wait for the disk otherwise.
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        root = Path(folder).resolve() / "project"
        root.mkdir()
        checkpoints = Checkpoints(root, Path(folder) / "state")
        states: list[tuple[str, State]] = []
        for steps in (first, second, third):
            do(root, steps)
            states.append((checkpoints.save("x"), state(root)))
        for number in (0, 2, 1):
            kept, wanted = states[number]
            restored = checkpoints.undo(kept)
            assert state(root) == wanted
            assert restored.left == {}
            assert checkpoints.diff(kept) == ""


def git(root: Path, *arguments: str) -> bytes:
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(root),
        "GIT_OPTIONAL_LOCKS": "0",
        "GIT_CONFIG_NOSYSTEM": "1",
        **{
            f"GIT_{who}_{what}": "x@example.org"
            for who in ("AUTHOR", "COMMITTER")
            for what in ("NAME", "EMAIL")
        },
    }
    done = subprocess.run(
        ["git", *arguments], cwd=root, env=environment, capture_output=True, check=True, timeout=60
    )
    return done.stdout


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with everything that leads a snapshot by git astray."""
    root = tmp_path / "project"
    root.mkdir()
    git(root, "init", "-q")
    git(root, "config", "core.autocrlf", "true")
    git(root, "config", "filter.loud.clean", "tr a-z A-Z")
    (root / ".gitattributes").write_text(
        "*.txt text=auto eol=crlf\n*.loud filter=loud\n*.id ident\n"
    )
    (root / ".gitignore").write_text("ignored/\n*.log\n")
    (root / "crlf.txt").write_bytes(b"a\r\nb\n")
    (root / "x.loud").write_text("quiet\n")
    (root / "x.id").write_text("$Id$\n")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    (root / "staged").write_text("staged\n")
    git(root, "add", "staged")
    (root / "staged").write_text("changed after\n")
    (root / "ignored").mkdir()
    (root / "ignored" / "secret").write_text("s\n")
    (root / "untracked").write_text("u\n")
    inner = root / "nested"
    inner.mkdir()
    git(inner, "init", "-q")
    (inner / "own").write_text("o\n")
    git(inner, "add", ".")
    git(inner, "commit", "-qm", "inner")
    (root / "empty").mkdir()
    return root


def test_the_users_repository_is_not_touched(repository: Path, tmp_path: Path) -> None:
    checkpoints = Checkpoints(repository, tmp_path / "state")
    before, status = state(repository, with_git=True), git(repository, "status", "--porcelain")
    kept = checkpoints.save("before")
    assert state(repository, with_git=True) == before
    (repository / "crlf.txt").write_bytes(b"other\n")
    (repository / "untracked").unlink()
    shutil.rmtree(repository / "ignored")
    shutil.rmtree(repository / "empty")
    (repository / "nested" / "own").write_text("changed\n")
    (repository / "new").write_text("new\n")
    (repository / "x.loud").chmod(0o755)
    assert git(repository, "status", "--porcelain") != status
    checkpoints.undo(kept)
    assert state(repository, with_git=True) == before
    assert git(repository, "status", "--porcelain") == status


def test_a_reset_of_a_dirty_tree_can_be_undone(repository: Path, tmp_path: Path) -> None:
    """Case 17: what git threw away comes back; its index and HEAD stay as git left them."""
    checkpoints = Checkpoints(repository, tmp_path / "state")
    (repository / "crlf.txt").write_bytes(b"work of a day\n")
    before = state(repository)
    assert dangerous("git reset --hard")
    kept = checkpoints.save("git reset --hard")
    git(repository, "reset", "--hard")
    git(repository, "clean", "-ffdxq")
    head = git(repository, "rev-parse", "HEAD")
    assert not (repository / "nested").exists()
    checkpoints.undo(kept)
    after = state(repository)
    assert after == before
    assert git(repository, "rev-parse", "HEAD") == head


def test_diff_is_what_git_apply_takes(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    for name, data in {
        "kept": "k\n",
        "changed": "".join(f"{n}\n" for n in range(40)),
        "end": "no newline",
        "gone": "g\n",
        "with space": "w\n",
        "tabs\there": "t\n",
        "mode": "m\n",
        "becomes a link": "x\n",
        "form\x0cfeed": "one\x0cline\u2028still\n",
    }.items():
        (root / name).write_text(data)
    (root / "link").symlink_to("kept")
    shutil.copytree(root, tmp_path / "other", symlinks=True)
    checkpoints = Checkpoints(root, tmp_path / "state")
    old = checkpoints.save("old")
    (root / "changed").write_text("".join(f"{n}\n" for n in range(1, 41)))
    (root / "end").write_text("still none")
    (root / "gone").unlink()
    (root / "with space").write_text("W\n")
    (root / "tabs\there").write_text("T\n")
    (root / "mode").chmod(0o755)
    (root / "becomes a link").unlink()
    (root / "becomes a link").symlink_to("kept")
    (root / "form\x0cfeed").write_text("one\x0cline\u2028changed\n")
    (root / "link").unlink()
    (root / "link").symlink_to("mode")
    (root / "new").write_text("")
    (root / "n\u00e4me").write_text("x\n")
    text = checkpoints.diff(old, checkpoints.save("new"))
    assert text == checkpoints.diff(old)
    other = tmp_path / "other"
    (tmp_path / "patch").write_bytes(text.encode("utf-8", "surrogateescape"))
    git(other, "apply", str(tmp_path / "patch"))
    assert state(other) == state(root)


def test_what_is_not_kept_is_said_and_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "node_modules").mkdir(parents=True)
    (root / "node_modules" / "m").write_text("m")
    with (root / "huge").open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    os.mkfifo(root / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "sock"))
        checkpoints = Checkpoints(root, tmp_path / "state")
        kept = checkpoints.save("x")
    (listed,) = checkpoints.list()
    assert set(listed.skipped) == {"huge", "fifo", "sock"}
    (root / "node_modules" / "m").write_text("changed")
    (root / "node_modules" / "n").write_text("new")
    before = state(root)
    assert checkpoints.undo(kept).left == {}
    assert state(root) == before


def test_a_folder_swapped_for_a_link_leads_nowhere(tmp_path: Path) -> None:
    """A command may put a link where a folder was: nothing outside is read, written or removed."""
    root, outside = tmp_path / "project", tmp_path / "outside"
    (root / "src").mkdir(parents=True)
    (root / "src" / "a").write_text("mine\n")
    outside.mkdir()
    (outside / "a").write_text("theirs\n")
    (outside / "key").write_text("secret\n")
    theirs = state(outside)
    checkpoints = Checkpoints(root, tmp_path / "state")
    kept = checkpoints.save("x")
    shutil.rmtree(root / "src")
    (root / "src").symlink_to(outside)
    assert "secret" not in checkpoints.diff(kept)
    checkpoints.undo(kept)
    assert state(outside) == theirs
    assert (root / "src" / "a").read_text() == "mine\n"


def test_links_that_flip_while_it_works(tmp_path: Path) -> None:
    """The same with a program that swaps folder and link all the time."""
    root, outside = tmp_path / "project", tmp_path / "outside"
    (root / "real").mkdir(parents=True)
    (root / "real" / "a").write_text("mine\n")
    outside.mkdir()
    (outside / "a").write_text("theirs\n")
    theirs = state(outside)
    (root / "bad").symlink_to(outside)
    checkpoints = Checkpoints(root, tmp_path / "state")
    kept = checkpoints.save("x")
    ended = threading.Event()

    def flip() -> None:
        while not ended.is_set():
            for old, new in (("real", "away"), ("bad", "real"), ("real", "bad"), ("away", "real")):
                try:
                    (root / old).rename(root / new)
                except OSError:
                    continue

    thread = threading.Thread(target=flip)
    thread.start()
    try:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            checkpoints.save("y")
            checkpoints.undo(kept)
            assert state(outside) == theirs
    finally:
        ended.set()
        thread.join(10)
    assert all("theirs" not in checkpoints.diff(kept, c.id) for c in checkpoints.list())


def test_unwritable_folders_come_back(tmp_path: Path) -> None:
    root = tmp_path / "project"
    (root / "locked" / "inner").mkdir(parents=True)
    (root / "locked" / "inner" / "a").write_text("a\n")
    (root / "locked" / "inner").chmod(0o555)
    (root / "locked").chmod(0o500)
    checkpoints = Checkpoints(root, tmp_path / "state")
    kept, before = checkpoints.save("x"), state(root)
    (root / "locked").chmod(0o700)
    (root / "locked" / "inner").chmod(0o700)
    (root / "locked" / "inner" / "a").write_text("b\n")
    (root / "locked" / "inner").chmod(0)
    (root / "locked").chmod(0)
    checkpoints.undo(kept)
    assert state(root) == before


def test_a_same_size_change_within_the_clocks_tick_is_seen(tmp_path: Path) -> None:
    """The stamp of a file that was only just written is not trusted."""
    root = tmp_path / "project"
    root.mkdir()
    checkpoints = Checkpoints(root, tmp_path / "state")
    for number in range(30):
        path = root / "a"
        path.write_text(f"{number % 10}")
        times = (1_000_000_000, 1_000_000_000)
        os.utime(path, ns=times)
        first = checkpoints.save("x")
        with path.open("r+") as file:
            file.write("x")
        os.utime(path, ns=times)
        checkpoints.save("y")
        checkpoints.undo(first)
        assert path.read_text() == f"{number % 10}"


def test_pruning_keeps_what_is_needed(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    checkpoints = Checkpoints(root, tmp_path / "state", keep=4)
    ids: list[str] = []
    for number in range(12):
        (root / "a").write_bytes(os.urandom(100_000))
        (root / "same").write_text("same")
        ids.append(checkpoints.save(str(number)))
    kept = [c.id for c in checkpoints.list()]
    assert kept == ids[::-1][: len(kept)] and 4 <= len(kept) <= 5
    size = sum(path.stat().st_size for path in (tmp_path / "state").glob("*.db"))
    assert size < 10 * 100_000
    for checkpoint in kept:
        checkpoints.undo(checkpoint)
        assert (root / "same").read_text() == "same"
    with pytest.raises(EtudeError, match="no checkpoint"):
        checkpoints.undo(ids[0])
    assert checkpoints.prune(1) == len(kept) - 1
    assert len({*ids, checkpoints.save("more")}) == 13  # A number is never used again.


def test_a_store_inside_the_project_does_not_keep_itself(tmp_path: Path) -> None:
    root = tmp_path / "project"
    root.mkdir()
    (root / "a").write_text("a")
    checkpoints = Checkpoints(root, root / "state" / "checkpoints")
    kept = checkpoints.save("x")
    (root / "a").write_text("b")
    checkpoints.undo(kept)
    assert (root / "a").read_text() == "a"
    assert checkpoints.list()[0].id == kept


def test_a_killed_save_leaves_the_earlier_ones(tmp_path: Path) -> None:
    """kill -9 in the middle of saving, at many moments: what was kept before stays usable."""
    root = tmp_path / "project"
    root.mkdir()
    for number in range(300):
        (root / f"f{number}").write_text(f"{number}\n" * 50)
    checkpoints = Checkpoints(root, tmp_path / "state")
    kept, before = checkpoints.save("x"), state(root)
    program = (
        "import sys; from pathlib import Path; from etude.agent.checkpoints import Checkpoints\n"
        "c = Checkpoints(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "n = 0\n"
        "print('ready', flush=True)\n"
        "while True:\n"
        "    n += 1\n"
        "    [(Path(sys.argv[1]) / f'f{k}').write_text(f'{n} {k}') for k in range(300)]\n"
        "    c.save('again')\n"
    )
    for wait in (0.02, 0.05, 0.11):
        child = subprocess.Popen(
            [sys.executable, "-c", program, str(root), str(tmp_path / "state")],
            stdout=subprocess.PIPE,
        )
        assert child.stdout is not None
        assert child.stdout.readline() == b"ready\n"
        time.sleep(wait)
        child.kill()
        child.wait(10)
        child.stdout.close()
        checkpoints.undo(kept)
        assert state(root) == before


def test_saves_side_by_side(tmp_path: Path) -> None:
    """Two sessions of one project: no save is lost."""
    root = tmp_path / "project"
    root.mkdir()
    (root / "a").write_text("a")
    threads = [
        threading.Thread(
            target=lambda: [Checkpoints(root, tmp_path / "s").save("x") for _ in range(8)]
        )
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(Checkpoints(root, tmp_path / "s").list()) == 32


def test_five_thousand_files(tmp_path: Path) -> None:
    """The second save looks only at what changed; generous limits, since the machine is shared."""
    root = tmp_path / "project"
    for folder in range(100):
        (root / f"d{folder}").mkdir(parents=True)
        for number in range(50):
            (root / f"d{folder}" / f"f{number}.py").write_text(f"x = {folder * number}\n" * 60)
    time.sleep(0.1)
    checkpoints = Checkpoints(root, tmp_path / "state")
    times: list[float] = []
    for _ in range(3):
        began = time.perf_counter()
        kept = checkpoints.save("x")
        times.append(time.perf_counter() - began)
    (root / "d7" / "f7.py").write_text("changed\n")
    began = time.perf_counter()
    checkpoints.undo(kept)
    print(f"saves {times}, undo {time.perf_counter() - began}")
    assert min(times[1:]) < 3
    assert (root / "d7" / "f7.py").read_text() != "changed\n"


@pytest.mark.parametrize(
    "command",
    [
        "git reset --hard",
        "git checkout -- .",
        "git checkout .",
        "git restore .",
        "git clean -fd",
        "git stash",
        "rm -r x",
        "rm x",
        "mv a b",
        "cp a b",
        "truncate -s 0 x",
        "> x",
        "echo a > x",
        "ls; rm x",
        "find . -delete",
        "sed -i s/a/b/ x",
        "dd if=/dev/zero of=x",
        "python x.py",
        "sort -o x x",
        "uniq a -- -b",
        "x=$(rm y)",
        "make",
        "((",
        "",
    ],
)
def test_dangerous(command: str) -> None:
    assert dangerous(command)


@pytest.mark.parametrize("command", ["git status", "ls -la | head -5", "git diff HEAD~1 -- src"])
def test_not_dangerous(command: str) -> None:
    assert not dangerous(command)
