"""The trusted processes of a guest.

The *notary* comes first and forks the *warden*, which imports pytest while the tree is still
pristine, then says so. The notary reads the one job, keeps the host's token to itself and hands
the rest on. The warden writes the candidate's files, forks a child for the tests, and reports what
the child's recorder sent through a pipe together with what it saw itself: how the child ended, and
in what time. The notary kills all that is still alive and signs the report with the token.

No code of the repository is ever imported in these two, nothing that is printed is ever parsed,
and neither can be traced or opened through `/proc` by what runs below them. What does run below
can reach standard output all the same, by way of process 1; but it was forked from a process that
never knew the token, so it can sign nothing.

Lines on standard output are JSON; a long answer is cut into pieces that an empty line ends.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, cast

from .calls import run_calls
from .configuration import plugin_names, read_config
from .recorder import run_tests
from .wire import ROOT, harden, send, write_all

READY = b"ready\n"
TAIL_BYTES = 4_000
MAX_REPORT_BYTES = 64 << 20


def fork(
    body: Callable[[Callable[..., None]], None], secret: int, channel: int, log: int
) -> tuple[int, int]:
    """Fork a child that runs `body(emit)` and exits with `secret`; its id and its pipe."""
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    status = 1

    def emit(record: dict[str, Any]) -> None:
        write_all(write_end, json.dumps(record).encode("ascii") + b"\n")

    try:
        os.close(read_end)
        os.close(channel)
        os.dup2(log, 1)
        os.dup2(log, 2)
        harden(1)
        body(emit)
        status = secret
    except BaseException:  # noqa: BLE001 - the child's last act is to say why it failed
        import traceback

        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def watch(pid: int, pipe: int, deadline: float) -> tuple[bytes, int | None]:
    """Read the pipe until the child is dead or the deadline has passed; bytes and exit status.

    The child's death ends the wait even when a grandchild still holds the pipe. The status is
    None when the child was killed here.
    """
    chunks: list[bytes] = []
    size = 0
    process = os.pidfd_open(pid)
    os.set_blocking(pipe, False)
    waiting = [pipe, process]
    dead = False
    while not dead and size < MAX_REPORT_BYTES:
        left = deadline - time.monotonic()
        if left <= 0:
            break
        ready = select.select(waiting, [], [], left)[0]
        dead = process in ready
        data = drain(pipe)
        if not data and pipe in ready and not dead:
            waiting.remove(pipe)
        chunks.append(data)
        size += len(data)
    if not dead:
        os.kill(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    chunks.append(drain(pipe))
    os.close(process)
    os.close(pipe)
    return b"".join(chunks), status if dead else None


def drain(pipe: int) -> bytes:
    """What can be read now."""
    chunks: list[bytes] = []
    while sum(map(len, chunks)) < 1 << 20:
        try:
            data = os.read(pipe, 1 << 16)
        except BlockingIOError:
            break
        if not data:
            break
        chunks.append(data)
    return b"".join(chunks)


def records(data: bytes) -> Iterator[dict[str, Any]]:
    """The lines of a pipe. Raises ValueError for anything the recorder would not have written."""
    for line in data.splitlines():
        record = json.loads(line)
        if not isinstance(record, dict):
            raise ValueError("not a record")
        yield cast("dict[str, Any]", record)


class Session:
    """The tests' child as the parent sees it: what its recorder sent and how it ended."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.phases: dict[str, dict[str, str]] = {}
        self.canaries: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self.calls: list[dict[str, Any]] = []
        self.collected: list[str] = []
        self.tampered = ""
        self.ended = False

    def read(self, data: bytes) -> None:
        """Take all records of the pipe; anything the recorder would not write is noted."""
        try:
            for record in records(data):
                if self.ended:
                    self.tampered = "a record after the end of the session"
                self.add(record)
        except (ValueError, KeyError, TypeError):
            self.tampered = "a broken record"

    def add(self, record: dict[str, Any]) -> None:
        """Take one record."""
        if "when" in record:
            phase = self.phases.setdefault(str(record["id"]), {})
            if str(record["when"]) in phase:
                self.tampered = "two records of one test"
            phase[str(record["when"])] = str(record["outcome"])
        elif "canary" in record:
            self.canaries[str(record["canary"])] = str(record["id"])
        elif "collected" in record:
            self.collected = [str(test) for test in record["collected"]]
        elif "collection_error" in record:
            self.errors[str(record["collection_error"])] = str(record["text"])
        elif "call" in record:
            self.calls.append(record)
        elif record.get("end") == self.job["nonce"]:
            self.ended = True
        else:
            self.tampered = "an unknown record"

    def answer(self, status: int | None) -> dict[str, Any]:
        """The measurement, given the exit status (None: killed at the deadline)."""
        outcomes = {test: outcome(phases) for test, phases in self.phases.items()}
        planted = {key: outcomes.pop(test, "missing") for key, test in self.canaries.items()}
        wanted = self.job["tests"] if self.job["tests"] is not None else self.collected
        asked = {test: outcomes.get(test, "missing") for test in wanted}
        for test in self.canaries.values():
            asked.pop(test, None)
        whole = set(asked.values()) == {"passed"}
        if planted.get("bad") == "passed" or (whole and "missing" in planted.values()):
            self.tampered = "a test that must fail did not"
        exited = status is not None and os.WIFEXITED(status)
        return {
            "outcomes": asked,
            "finished": exited and self.ended and os.WEXITSTATUS(status or 0) == self.job["secret"],
            "timed_out": status is None,
            "tampered": self.tampered,
            "collection_errors": self.errors,
            "calls": self.calls,
        }


def outcome(phases: dict[str, str]) -> str:
    """One word for a test from those of its phases."""
    values = set(phases.values())
    if "failed" in values:
        return "failed" if phases.get("call") == "failed" else "error"
    if "skipped" in values:
        return "skipped"
    whole = {"setup", "call", "teardown"} == set(phases)
    return "passed" if whole and values == {"passed"} else "missing"


def write_files(changes: dict[str, str | None]) -> None:
    """Put the candidate's files over the pristine tree."""
    for name, text in changes.items():
        path = Path(ROOT, name)
        if not os.path.realpath(path).startswith(ROOT + "/"):
            raise ValueError("a changed path leads out of the workspace: " + name)
        if text is None:
            with contextlib.suppress(FileNotFoundError):
                path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as file:
            file.write(text)


def run_job(job: dict[str, Any], warm: dict[str, Any], channel: int) -> dict[str, Any]:
    """Write the files, run the tests, then the calls if every test passed."""
    write_files(job["changes"])
    log = os.open("/tmp/log", os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    started = time.monotonic()
    deadline = started + job["timeout"]
    answer: dict[str, Any] = {"outcomes": {}, "finished": True, "tampered": ""}
    if job["tests"] is None or job["tests"]:
        pid, pipe = fork(lambda emit: run_tests(job, warm, emit), job["secret"], channel, log)
        data, status = watch(pid, pipe, deadline)
        session = Session(job)
        session.read(data)
        answer = session.answer(status)
    good = answer["finished"] and not answer["tampered"]
    good = good and set(answer["outcomes"].values()) <= {"passed"}
    answer["results"] = run_all_calls(job, channel, log, deadline) if good else {}
    answer["seconds"] = time.monotonic() - started
    answer["cpu_seconds"] = sum(os.times()[:4])
    size = os.lseek(log, 0, os.SEEK_END)
    tail = os.pread(log, TAIL_BYTES, max(0, size - TAIL_BYTES))
    answer["tail"] = tail.decode("utf-8", "replace")
    return answer


def run_all_calls(job: dict[str, Any], channel: int, log: int, deadline: float) -> dict[int, Any]:
    """Results of the calls by number; a call that kills its process is left out, the rest not."""
    results: dict[int, Any] = {}
    first = 0
    for _ in range(5):
        if first >= len(job["calls"]):
            break
        body = functools.partial(run_calls, job, first)
        pid, pipe = fork(body, job["secret"], channel, log)
        data, _status = watch(pid, pipe, deadline)
        for record in whole_records(data):
            if "begun" in record:
                first = int(record["begun"]) + 1
            elif "result" in record:
                results[int(record["result"])] = record["text"]
    return results


def whole_records(data: bytes) -> Iterable[dict[str, Any]]:
    """The records of a child that may have died in the middle of one."""
    try:
        yield from records(data)
    except ValueError:
        return


def read_line(fd: int) -> bytes:
    """One line of a pipe, or what there is of it at the end."""
    chunks: list[bytes] = []
    while not chunks or not chunks[-1].endswith(b"\n"):
        data = os.read(fd, 1 << 20)
        if not data:
            break
        chunks.append(data)
    return b"".join(chunks)


def notary(jobs: int, answers: int, channel: int) -> None:
    """Announce the warden, take the job, sign the warden's answer."""
    if read_line(answers) != READY:
        return
    send(channel, {"ready": True})
    job = json.loads(read_line(0) or b"null")
    if job is None:
        return
    token = job.pop("token")
    send(channel, {"accepted": True})
    write_all(jobs, json.dumps(job).encode("ascii") + b"\n")
    answer = read_line(answers)
    # Nothing that the candidate left behind may write between the lines of the answer.
    with contextlib.suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    write_all(channel, b"\n\n")
    try:
        send(channel, {"token": token, "answer": json.loads(answer)})
    except ValueError:
        send(channel, {"token": token, "lost": "the tests' parent process was killed"})
    signal.pause()


def warden(jobs: int, answers: int) -> None:
    """Warm up, say so, wait for the job, run it, answer."""
    importlib.import_module("pytest")
    for name in ("_pytest.doctest", "_pytest.junitxml", "_pytest.unittest", "_pytest.python_api"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    config, flags = read_config()
    warm = {"config": config, "flags": flags, "plugins": plugin_names()}
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(ROOT)
    sys.path.append(ROOT)
    sys.argv[:] = ["pytest"]
    gc.collect()
    gc.freeze()
    write_all(answers, READY)
    line = read_line(jobs)
    os.close(jobs)
    if line:
        answer = run_job(json.loads(line), warm, answers)
        write_all(answers, json.dumps(answer).encode("ascii") + b"\n")


def main() -> None:
    """Become two processes with a pipe each way."""
    channel = os.dup(1)
    os.dup2(2, 1)
    harden(0)
    job_reader, job_writer = os.pipe()
    answer_reader, answer_writer = os.pipe()
    if os.fork():
        os.close(job_reader)
        os.close(answer_writer)
        notary(job_writer, answer_reader, channel)
        return
    os.close(job_writer)
    os.close(answer_reader)
    os.close(channel)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    warden(job_reader, answer_writer)
