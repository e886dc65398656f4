"""Running commands inside a guest that stays. A program of its own (`python -I -S joiner.py FD`),
small and without threads, because the steps need processes that fork and change namespaces; what
it imports is copied with every fork.

It lives outside every guest, talks only to the process that started it, and reads nothing that a
guest wrote. Brought up step by step, each with less rights than the one before:

1. The joiner forks for each guest. The child waits until its limits are set and the guest stands,
   enters the guest's namespaces, with all rights over them and none outside, and forks in turn,
   since only a child enters a process namespace.
2. That one, the guest's porter, stays as long as the guest. It forks for each command, into a new
   process namespace.
3. That one is process 1 there. It mounts what the command's rights forbid and a `/proc` of its
   own, gives up every privilege for good, and only then starts the command. Its end takes with it
   whatever the command left behind. Commands see neither one another nor a porter, and cannot
   read this process, whose memory and program are the host's.

Requests are read by the last alone, so nothing of other commands is in its memory.
"""

from __future__ import annotations

import ctypes
import errno
import gc
import marshal
import os
import signal
import socket
import stat
import sys
from functools import partial

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any, NoReturn

ENTER_DESCRIPTORS = 2
"""Passed to the child that becomes the porter: the user namespace that owns the guest, and the
guest's process 1. The joiner itself is passed that child's socket."""
COMMAND_DESCRIPTORS = 5
"""Passed to a porter: standard input, output and error, the control socket, the request."""
FAILED, EXITED, LEFT = "failed", "exited", "left"
"""Words on the control socket: the sandbox failed; the command ended; it did, and left processes
that go on."""
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
_PR_SET_CHILD_SUBREAPER = 36
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
    return int(_libc.prctl(option, ctypes.c_ulong(value), zero, zero, zero))


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


def _protect(path: str, pinned: set[str]) -> None:
    """Make what is at `path`, if anything, a read-only mount."""
    _pin(path, pinned)
    found = _open_path(path)
    if found is not None:
        place = f"/proc/self/fd/{found}"
        shown = _place(found)
        _mount(place, place, None, _MS_BIND | _MS_REC)
        os.close(found)
        _make_readonly(shown, below=True)


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
    for path in request["guarded"]:
        _guard(path, pinned)
    for path in request["protected"]:
        _protect(f"{WORKSPACE}/{path}", pinned)
    for path in request["hidden"]:
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


def _say(control: socket.socket, word: str, detail: int | str) -> None:
    # The other side may be gone; then it has killed us or is about to.
    try:
        control.send(marshal.dumps((word, detail)))
    except OSError:
        os._exit(1)


def _spawn(request: dict[str, Any]) -> tuple[int, str]:
    """Start the command: (its number, ""), or (an exit code as a shell's would be, why it could
    not be run). Not by a fork, which would copy this process for nothing."""
    argv, env = request["argv"], request["env"]
    try:
        os.chdir(request["cwd"])
    except (OSError, ValueError) as error:
        return NOT_RUN, f"{request['cwd']}: {_reason(error)}"
    name: str = argv[0]
    places = [name]
    if "/" not in name:
        places = [f"{folder or '.'}/{name}" for folder in env.get("PATH", os.defpath).split(":")]
    found: Exception = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    for place in places:
        try:
            # Python ignores these two.
            defaults = (signal.SIGPIPE, signal.SIGXFSZ)
            return os.posix_spawn(place, argv, env, setsigdef=defaults), ""
        except (FileNotFoundError, NotADirectoryError):
            continue
        except (OSError, ValueError) as error:
            found = error
    code = NOT_FOUND if isinstance(found, FileNotFoundError) else NOT_RUN
    return code, f"{name}: {_reason(found)}"


def _reason(error: Exception) -> str:
    return str(error.strerror if isinstance(error, OSError) else error)


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


def _process_1(descriptors: Sequence[int], control: socket.socket, guest: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    _introduce(control)
    request = marshal.loads(os.pread(descriptors[4], os.fstat(descriptors[4]).st_size, 0))
    _checked(_libc.unshare(_CLONE_NEWNS | _CLONE_NEWCGROUP), "cannot make namespaces")
    _mount_view(request)
    _checked(_libc.setns(guest, _CLONE_NEWUSER), "cannot enter the user namespace")
    _drop_privileges()
    for number in range(3):
        os.dup2(descriptors[number], number)
    control.set_inheritable(False)  # The command's own descriptors are the three.
    os.closerange(3, control.fileno())
    os.closerange(control.fileno() + 1, _MOST_DESCRIPTORS)
    child, failure = _spawn(request)
    if failure:
        os.write(2, f"{failure}\n".encode(errors="replace"))
        _say(control, EXITED, child)
        return
    for number in range(3):
        os.close(number)
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    if request["keep"] and _remaining():
        _say(control, LEFT, _status(status))
        while _remaining():
            os.waitpid(-1, 0)
    else:
        _say(control, EXITED, _status(status))


def _start(descriptors: Sequence[int], requests: socket.socket, guest: int) -> None:
    """Fork process 1 of a command."""
    control = socket.socket(fileno=descriptors[3])
    try:
        # Back to the guest's own process namespace, from which the next one is made.
        _checked(_libc.setns(guest, _CLONE_NEWPID), "cannot stay in the guest")
        _checked(_libc.unshare(_CLONE_NEWPID), "cannot make a process namespace")
        if os.fork() == 0:
            requests.close()
            _ending(control, partial(_process_1, descriptors, control, guest))
    except OSError as error:
        _say(control, FAILED, str(error.strerror))
    control.detach()


def _ending(control: socket.socket, work: Callable[[], None]) -> NoReturn:
    """Do the work of a forked child, which has nobody above it to be told, and end."""
    try:
        work()
        os._exit(0)
    except OSError as error:
        _say(control, FAILED, str(error.strerror))
    except BaseException as error:  # noqa: BLE001  see above
        _say(control, FAILED, repr(error))
    os._exit(1)


def _porter(requests: socket.socket, guest: int) -> None:
    os.setsid()
    _introduce(requests)
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, 16, COMMAND_DESCRIPTORS)
        if not message:
            return
        _start(descriptors, requests, guest)
        for descriptor in descriptors:
            os.close(descriptor)


def _enter(requests: socket.socket) -> None:
    _introduce(requests)
    message, descriptors, _, _ = socket.recv_fds(requests, 16, ENTER_DESCRIPTORS)
    if not message:
        return
    owner, guest = descriptors
    _checked(_libc.setns(owner, _CLONE_NEWUSER), "cannot take the guest's rights")
    _checked(_libc.setns(guest, _GUEST), "cannot enter the guest")
    os.close(owner)
    if os.fork() == 0:
        _ending(requests, partial(_porter, requests, guest))


def _introduce(control: socket.socket) -> None:
    """Say which process we are, by descriptor: numbers differ between namespaces."""
    descriptor = os.pidfd_open(os.getpid())
    socket.send_fds(control, [b"pid"], [descriptor])
    os.close(descriptor)


def main() -> None:
    """Serve until the other end of the socket is closed."""
    gc.disable()  # It would write to pages that the children share.
    guests = socket.socket(fileno=int(sys.argv[1]))
    # All that end below us are collected by the kernel.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _checked(_prctl(_PR_SET_CHILD_SUBREAPER, 1), "cannot adopt orphans")
    while True:
        message, descriptors, _, _ = socket.recv_fds(guests, 16, 1)
        if not message:
            return
        requests = socket.socket(fileno=descriptors[0])
        try:
            child = os.fork()
        except OSError as error:
            _say(requests, FAILED, str(error.strerror))
            child = -1
        if child == 0:
            guests.close()
            _ending(requests, partial(_enter, requests))
        requests.close()


if __name__ == "__main__":
    main()
