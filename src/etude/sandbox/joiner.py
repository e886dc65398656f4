"""Running one command inside a guest that stays. A program of its own (`python -I -S joiner.py
FD`), small and without threads, because the steps need processes that fork and change namespaces.

It lives outside every guest, talks only to the process that started it, and reads nothing that a
guest wrote. For each message on its socket it forks; the child (below "the first") takes the
descriptors that came with the message and becomes, step by step, less:

1. the first enters the guest's namespaces, with all rights over them and none outside;
2. the second, now inside the guest's process namespace, makes a process and a mount namespace;
3. the third is process 1 of that namespace. It waits until its limits are set, mounts what the
   command's rights forbid and a `/proc` of its own, gives up every privilege for good, and only
   then starts the command. Its end takes with it whatever the command left behind. Commands
   cannot see one another, nor read this process, whose memory and program are the host's.

Nothing of other commands is in its memory: the request is read by the child alone.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import signal
import socket
import stat
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, cast

DESCRIPTORS = 7
"""Passed with each message: standard input, output and error, the control socket, the request, the
user namespace that owns the guest, and the guest's process 1."""
FAILED, EXITED, LEFT = "failed", "exited", "left"
"""Words on the control socket: the sandbox failed; the command ended; it did, and left processes
that go on."""
GO = b"go"
NOT_RUN, NOT_FOUND = 126, 127
WORKSPACE, REPOSITORY = "/workspace", "/repository.git"
HIDDEN_FILE, HIDDEN_FOLDER = "/etc/hidden-file", "/etc/hidden-folder"
"""What covers a hidden path: an unreadable file, an empty folder; both on read-only mounts."""

_CLONE_NEWNS, _CLONE_NEWCGROUP, _CLONE_NEWUTS = 0x00020000, 0x02000000, 0x04000000
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWPID = 0x08000000, 0x10000000, 0x20000000
_CLONE_NEWNET = 0x40000000
_GUEST = _CLONE_NEWNS | _CLONE_NEWUTS | _CLONE_NEWIPC | _CLONE_NEWPID | _CLONE_NEWNET
_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_BIND, _MS_REC, _MS_PRIVATE = 1 << 12, 1 << 14, 1 << 18
_PR_SET_DUMPABLE, _PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _PR_CAP_AMBIENT = 4, 24, 38, 47
_PR_CAP_AMBIENT_CLEAR_ALL = 4
_CAPABILITY_VERSION_3 = 0x20080522
_LAST_CAPABILITY = 63
_MOST_DESCRIPTORS = 1 << 16
_SYS_MOUNT_SETATTR = 442
_AT_RECURSIVE, _MOUNT_ATTR_RDONLY = 0x8000, 1
_libc = ctypes.CDLL(None, use_errno=True)


def _checked(result: int, what: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def _prctl(option: int, value: int) -> int:
    zero = ctypes.c_ulong(0)
    return cast("int", _libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


def _mount(source: str | None, target: str, kind: str | None, flags: int) -> None:
    _checked(
        _libc.mount(
            None if source is None else os.fsencode(source),
            os.fsencode(target),
            None if kind is None else kind.encode(),
            ctypes.c_ulong(flags),
            None,
        ),
        f"cannot mount {target}",
    )


class _MountAttributes(ctypes.Structure):
    _fields_ = [
        ("attr_set", ctypes.c_uint64),
        ("attr_clr", ctypes.c_uint64),
        ("propagation", ctypes.c_uint64),
        ("userns_fd", ctypes.c_uint64),
    ]


def _make_readonly(place: str, *, below: bool) -> None:
    """The mount at `place`, with `below` also every mount below it."""
    attributes = _MountAttributes(_MOUNT_ATTR_RDONLY, 0, 0, 0)
    result = _libc.syscall(
        ctypes.c_long(_SYS_MOUNT_SETATTR),
        ctypes.c_int(-100),
        ctypes.c_char_p(os.fsencode(place)),
        ctypes.c_uint(_AT_RECURSIVE if below else 0),
        ctypes.byref(attributes),
        ctypes.c_size_t(ctypes.sizeof(attributes)),
    )
    _checked(result, f"cannot make {place} read-only")


def _open_path(path: str) -> int | None:
    """What `path` leads to, if that is below the workspace. Whoever made its links, they are the
    guest's own: they lead nowhere else than the guest could go."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError as error:
        # The last: links in a circle, which no command can follow either.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            return None
        raise
    if _place(descriptor).startswith((f"{WORKSPACE}/", f"{REPOSITORY}/")):
        return descriptor
    os.close(descriptor)
    return None


def _place(descriptor: int) -> str:
    return os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115


def _pin(path: str, pinned: set[str]) -> None:
    """Make mounts of the folders that lead to `path`: a mount cannot be renamed or removed, so
    nothing can take what is protected below to a place where the next command finds it bare."""
    parts = path.split("/")
    for count in range(3, len(parts)):
        above = "/".join(parts[:count])
        folder = None if above in pinned else _open_path(above)
        if folder is not None:
            pinned.add(above)
            place = f"/proc/self/fd/{folder}"
            _mount(place, place, None, _MS_BIND | _MS_REC)
            os.close(folder)


def _guard(path: str, pinned: set[str]) -> None:
    """Make what must be at `path` a read-only mount."""
    _pin(path, pinned)
    found = _open_path(path)
    if found is None or _place(found) != path:
        raise FileNotFoundError(errno.ENOENT, f"{path} changed while it was being protected")
    place = f"/proc/self/fd/{found}"
    _mount(place, place, None, _MS_BIND | _MS_REC)
    os.close(found)
    _make_readonly(path, below=True)


def _hide(path: str, pinned: set[str]) -> None:
    """Cover what is at `path`, if anything."""
    _pin(path, pinned)
    found = _open_path(path)
    if found is not None:
        cover = HIDDEN_FOLDER if stat.S_ISDIR(os.fstat(found).st_mode) else HIDDEN_FILE
        _mount(cover, f"/proc/self/fd/{found}", None, _MS_BIND)
        os.close(found)


def _mount_view(request: dict[str, Any]) -> None:
    _mount(None, "/", None, _MS_PRIVATE | _MS_REC)
    # Read-only: `/proc/sys` would otherwise obey a guest that the host's root started.
    _mount("proc", "/proc", "proc", _MS_RDONLY | _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)
    if request["readonly"]:
        for top in (WORKSPACE, REPOSITORY):
            if os.path.isdir(top):  # noqa: PTH112
                _make_readonly(top, below=True)
    pinned = set[str]()
    for path in cast("list[str]", request["guarded"]):
        _guard(path, pinned)
    for path in cast("list[str]", request["hidden"]):
        _hide(f"{WORKSPACE}/{path}", pinned)


def _drop_privileges() -> None:
    for capability in range(_LAST_CAPABILITY + 1):
        if _prctl(_PR_CAPBSET_DROP, capability) != 0:
            if ctypes.get_errno() == errno.EINVAL:  # Past the last one that the kernel knows.
                break
            _checked(-1, "cannot drop a capability")
    _checked(_prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL), "cannot drop ambient rights")
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _checked(_libc.capset(header, (ctypes.c_uint32 * 6)()), "cannot drop capabilities")
    _checked(_prctl(_PR_SET_NO_NEW_PRIVS, 1), "cannot forbid new privileges")
    # The guest has our user id. It must not read or trace this process, whose program, seen
    # through /proc/1/exe, is a writable file of the host.
    _checked(_prctl(_PR_SET_DUMPABLE, 0), "cannot hide from the guest")


def _say(control: socket.socket, word: str, detail: object) -> None:
    # The other side may be gone; then it has killed us or is about to.
    try:
        control.send(json.dumps([word, detail]).encode())
    except OSError:
        os._exit(1)


def _command(request: dict[str, Any]) -> NoReturn:
    """Become the command. Its exit code tells when that is impossible, as a shell's would."""
    argv, cwd = cast("list[str]", request["argv"]), cast("str", request["cwd"])
    for number in (signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)  # Python ignores these two.
    try:
        os.chdir(cwd)
    except (OSError, ValueError) as error:
        _give_up(cwd, error, NOT_RUN)
    try:
        os.execvpe(argv[0], argv, cast("dict[str, str]", request["env"]))
    except FileNotFoundError as error:
        _give_up(argv[0], error, NOT_FOUND)
    except (OSError, ValueError) as error:
        _give_up(argv[0], error, NOT_RUN)


def _give_up(name: str, error: Exception, code: int) -> NoReturn:
    reason = error.strerror if isinstance(error, OSError) else error
    os.write(2, f"{name}: {reason}\n".encode(errors="replace"))
    os._exit(code)


def _status(status: int) -> int:
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _remaining() -> bool:
    """Whether processes are left, after collecting the dead ones."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        return False
    return True


def _third(streams: Sequence[int], control: socket.socket, request: int, guest: int) -> None:
    os.setsid()
    socket.send_fds(control, [b"pid"], [os.pidfd_open(os.getpid())])
    if control.recv(16) != GO:
        os._exit(1)
    wanted = cast("dict[str, Any]", json.loads(os.pread(request, os.fstat(request).st_size, 0)))
    _checked(_libc.unshare(_CLONE_NEWCGROUP), "cannot hide the control group")
    _mount_view(wanted)
    _checked(_libc.setns(guest, _CLONE_NEWUSER), "cannot enter the user namespace")
    _drop_privileges()
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, _MOST_DESCRIPTORS)
    try:
        child = os.fork()
    except BlockingIOError as error:  # Other commands of this workspace use up its processes.
        os.write(2, f"{wanted['argv'][0]}: {error.strerror}\n".encode(errors="replace"))
        _say(control, EXITED, NOT_RUN)
        return
    if child == 0:
        control.close()
        _command(wanted)
    for number in range(3):
        os.close(number)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    if wanted["keep"] and _remaining():
        _say(control, LEFT, _status(status))
        while _remaining():
            os.waitpid(-1, 0)
    else:
        _say(control, EXITED, _status(status))


def _first(descriptors: Sequence[int]) -> NoReturn:
    control = socket.socket(fileno=descriptors[3])
    owner, guest = descriptors[5:]
    try:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        _checked(_libc.setns(owner, _CLONE_NEWUSER), "cannot take the guest's rights")
        _checked(_libc.setns(guest, _GUEST), "cannot enter the guest")
        second = os.fork()
        if second != 0:
            # Its child then belongs to the guest's own process 1, which collects it.
            os.waitpid(second, 0)
            os._exit(0)
        _checked(_libc.unshare(_CLONE_NEWPID | _CLONE_NEWNS), "cannot make namespaces")
        if os.fork() != 0:
            os._exit(0)
        _third(descriptors[:3], control, descriptors[4], guest)
        os._exit(0)
    except OSError as error:
        _say(control, FAILED, error.strerror)
    except BaseException as error:  # noqa: BLE001  a forked child has nobody above it to be told
        _say(control, FAILED, repr(error))
    os._exit(1)


def main() -> None:
    """Serve until the other end of the socket is closed."""
    requests = socket.socket(fileno=int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # The first ones are collected by the kernel.
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 16, DESCRIPTORS)
        if not message:
            return
        try:
            first = os.fork()
        except OSError:
            first = -1  # The closed control socket tells.
        if first == 0:
            requests.close()
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            _first(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


if __name__ == "__main__":
    main()
