"""Isolates a process and turns it into the interpreter of a sandbox. This script imports nothing of flowrl.

The script is started as root or as any user, with the settings as JSON in its first argument and the interpreter's
source in its second. It stays alive as the interpreter's parent: SIGTERM ends both, and its exit status is the
interpreter's, or 128 plus the number of the signal that ended the interpreter. If a signal ends the script itself, the
interpreter ends too.

With namespaces, the interpreter is the first process of a pid namespace, so that all others in it end with it; it has
no network; its root is a file system of its own with Python and the system's libraries, all read-only, and an empty
working directory in memory; its user exists nowhere else. A script that is started as root becomes another user in both
kinds of sandbox, because the kernel does not count root's processes. That user belongs to this sandbox only, so that no
other sandbox's code may send signals to it.

Waits: for the helper that maps the user, and for the interpreter or SIGTERM.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import socket
import struct
import sys
from contextlib import suppress
from typing import Any

CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    1 << 30,
)
MS_NOSUID, MS_NODEV, MS_REC, MS_SLAVE, MNT_DETACH = 2, 4, 1 << 14, 1 << 19, 2
AT_FDCWD, AT_EMPTY_PATH, AT_RECURSIVE, OPEN_TREE_CLONE, MOVE_MOUNT_F_EMPTY_PATH = -100, 0x1000, 0x8000, 1, 4
OPEN_TREE, MOVE_MOUNT, MOUNT_SETATTR = 428, 429, 442
"""Numbers of system calls, which are the same on all architectures."""
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID = 1, 2
PR_SET_PDEATHSIG, PR_SET_KEEPCAPS, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE = 1, 8, 38, 47, 2
CAP_DAC_READ_SEARCH, CAPABILITIES_VERSION = 2, 0x20080522

INNER, NOBODY = 1000, 65534
FIRST_USER = 1 << 30
"""Far above the ids of users with names; the pid of the sandbox is added."""
NEW_ROOT = "/tmp"
"""Where the new root is built, in the process's own view of the file system."""
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
WORK, OLD_ROOT = "/sandbox", "/sandbox-old-root"
"""Names that no folder of Python has."""
SIGNALS = (signal.SIGTERM, signal.SIGCHLD)

libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """What the kernel or the machine does not allow."""


def main(settings: dict[str, Any], source: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    control = socket.socket(fileno=settings["control"])
    try:
        if settings["namespaces"]:
            _enter_namespaces()
            _build_root(settings)
        elif os.geteuid() == 0:
            _become_nobody(_own_user(), settings)
        _die_with(settings["parent"])
        child = os.fork()
    except (OSError, NotAllowed) as problem:
        _refuse(control, problem)
    if child == 0:
        _become_interpreter(settings, source, control)
    control.close()
    _outlive(child)


def _refuse(control: socket.socket, problem: Exception) -> None:
    with suppress(OSError):
        control.sendall(b"E" + str(problem).encode(errors="replace")[:2000])
    os._exit(1)


# Namespaces


def _enter_namespaces() -> None:
    outer = _own_user() if os.geteuid() == 0 else os.geteuid()
    outer_group = outer if os.geteuid() == 0 else os.getegid()
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(read_end, 1)
        os._exit(_map_users(os.getppid(), outer, outer_group))
    everything = CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC
    failed = libc.unshare(everything)
    error = ctypes.get_errno()
    os.write(write_end, b"x")
    os.close(read_end)
    os.close(write_end)
    status = os.waitstatus_to_exitcode(os.waitpid(helper, 0)[1])
    if failed:
        raise NotAllowed(f"unshare: {os.strerror(error)}")
    if status:
        raise NotAllowed(f"mapping the user: {os.strerror(status)}")


def _map_users(pid: int, user: int, group: int) -> int:
    """Write the mapping from outside the namespace, where root may give its child another user than its own. Returns 0,
    or an errno."""
    try:
        for name, text in (
            ("setgroups", "deny"),
            ("uid_map", f"{INNER} {user} 1"),
            ("gid_map", f"{INNER} {group} 1"),
        ):
            with open(f"/proc/{pid}/{name}", "w", encoding="utf-8") as file:
                file.write(text)
    except OSError as problem:
        return problem.errno or 1
    return 0


def _build_root(settings: dict[str, Any]) -> None:
    """The trees are opened as the user that started the script, and mounted as the user that owns the new root."""
    _mount(None, "/", None, MS_REC | MS_SLAVE, None)
    trees = {path: _read_only_tree(path) for path in _outermost(settings["trees"])}
    devices = {path: _tree(path) for path in DEVICES if os.path.exists(path)}
    _become(INNER)
    _mount("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.chdir(NEW_ROOT)
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), f"{NEW_ROOT}{path}")
    for path, tree in {**trees, **devices}.items():
        _place(tree, path)
    for path in (WORK, OLD_ROOT):
        os.mkdir(f"{NEW_ROOT}{path}")
    if not os.path.exists(f"{NEW_ROOT}/tmp"):
        os.symlink(WORK, f"{NEW_ROOT}/tmp")
    most = settings["disk_bytes"]
    _mount("tmpfs", f"{NEW_ROOT}{WORK}", "tmpfs", MS_NOSUID | MS_NODEV, f"size={most},nr_inodes=4k,mode=700")
    _checked("pivot_root", libc.pivot_root(NEW_ROOT.encode(), f"{NEW_ROOT}{OLD_ROOT}".encode()))
    os.chdir("/")
    _checked("leaving the old root", libc.umount2(OLD_ROOT.encode(), MNT_DETACH))
    root = os.open("/", os.O_PATH)
    _set_attributes(root, MOUNT_ATTR_RDONLY, recursive=False)
    os.close(root)
    os.chdir(WORK)


def _outermost(paths: list[str]) -> list[str]:
    """Those of `paths` and SYSTEM that exist, are no links, and lie in none of the others."""
    found = sorted({path for path in (*paths, *SYSTEM) if os.path.exists(path) and not os.path.islink(path)})
    return [path for path in found if not any(path.startswith(f"{other.rstrip('/')}/") for other in found)]


def _tree(path: str) -> int:
    """A copy of a mounted tree, to be mounted elsewhere."""
    flags = OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC
    tree: int = libc.syscall(OPEN_TREE, AT_FDCWD, path.encode(), flags)
    _checked(f"taking {path}", tree)
    return tree


def _read_only_tree(path: str) -> int:
    tree = _tree(path)
    _set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, recursive=True)
    return tree


def _set_attributes(tree: int, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    _checked("making it read-only", libc.syscall(MOUNT_SETATTR, tree, b"", flags, wanted, len(wanted)))


def _place(tree: int, path: str) -> None:
    target = f"{NEW_ROOT}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    moved = libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    _checked(f"placing {path}", moved)
    os.close(tree)


def _mount(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    failed = libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    _checked(f"mounting {kind or 'what is there'} at {target}", failed)


def _checked(doing: str, result: int) -> None:
    if result < 0:
        raise NotAllowed(f"{doing}: {os.strerror(ctypes.get_errno())}")


# Both kinds


def _become(user: int) -> None:
    with suppress(PermissionError):  # a user namespace does not allow choosing supplementary groups
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def _die_with(parent: int) -> None:
    """Called after the last change of the user, because such a change would clear the signal."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _own_user() -> int:
    """The id of this sandbox's user and group; that of `nobody` if a container has no such id."""
    own = FIRST_USER + os.getpid()
    for map_file in ("/proc/self/uid_map", "/proc/self/gid_map"):
        with open(map_file, encoding="utf-8") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= own < first + count for first, _, count in ranges):
            return NOBODY
    return own


def _become_nobody(user: int, settings: dict[str, Any]) -> None:
    """Become `user`. Python is often in root's home, which other users may not read: then the right to read everything
    is kept."""
    python = settings["python"]
    os.chown(settings["work"], user, user)
    os.seteuid(user)
    readable = os.access(python, os.X_OK, effective_ids=True)
    os.seteuid(0)
    libc.prctl(PR_SET_KEEPCAPS, 0 if readable else 1, 0, 0, 0)
    _become(user)
    if not readable:
        bit = 1 << CAP_DAC_READ_SEARCH
        wanted = struct.pack("6I", bit, bit, bit, 0, 0, 0)
        kept = libc.capset(struct.pack("Ii", CAPABILITIES_VERSION, 0), wanted)
        kept |= libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
        if kept < 0:
            raise NotAllowed(f"the user without rights that runs the code if root starts flowrl cannot read {python}")


def _become_interpreter(settings: dict[str, Any], source: str, control: socket.socket) -> None:
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if not settings["namespaces"]:
            _enter(settings["work"])
        for name, most in settings["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        control.set_inheritable(True)
        command = (settings["python"], "-P", "-s", "-B", "-c", source, str(control.fileno()), settings["interpreter"])
        os.execve(settings["python"], command, settings["environment"])
    except NotAllowed as problem:
        _refuse(control, problem)
    except OSError as problem:
        _refuse(control, OSError(f"starting {settings['python']}: {problem.strerror}"))


def _enter(work: str) -> None:
    try:
        os.chdir(work)
    except PermissionError:
        where = os.path.dirname(work)
        wrong = f"{where} is closed to the user without rights that runs the code if root starts flowrl"
        raise NotAllowed(f"{wrong}; set TMPDIR to a directory that all may pass through") from None


def _outlive(child: int) -> None:
    """Wait for the interpreter, and exit with its status. A pid namespace is empty once its first process is reaped."""
    while True:
        number = signal.sigwait(SIGNALS)
        if number == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        else:
            ended = os.waitpid(child, os.WNOHANG)
        if ended[0] == child:
            status = os.waitstatus_to_exitcode(ended[1])
            os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
