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

A filter of system calls (seccomp) is the last thing that is set: it refuses those that reach the kernel's rarer parts,
and those that hold memory where nobody can count it (memfd, System V memory, larger pipes).

The kernel bounds each process. Memory of all of them together is bounded by a cgroup if the caller could make one. If
not, the script looks at it: `total_bytes`. The time between two looks follows from how much is left, at the rate at
which a machine can fill memory, so what is held may exceed the limit for a moment, by what is filled in that time.

Waits: for the helper that maps the user, and for the interpreter, SIGTERM, or the next look.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
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
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE, MNT_DETACH = 2, 4, 8, 1 << 14, 1 << 19, 2
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

FILLED_BYTES_S = 8 << 30
"""More than the code can fill in a second: some 2 GiB are usual for a core."""
LOOK_S = (0.005, 0.5)
"""The shortest and the longest time between two looks."""
LOOKS = 100
"""Attempts to see all processes in one look, while some end or begin."""
SUMS = 10
"""Sums of shared memory, until one is of a moment in which no process has begun or ended."""
SOCKET_BYTES, PIPE_BYTES = 208 << 10, 64 << 10
"""The most that the kernel keeps for one without the options that the filter refuses."""
NAMELESS = ("/dev/zero", "/memfd:", "/SYSV", "/anon_hugepage")
"""Memory that processes share, as /proc/PID/maps calls it."""

libc = ctypes.CDLL(None, use_errno=True)


class NotAllowed(Exception):
    """What the kernel or the machine does not allow."""


def main(settings: dict[str, Any], source: str) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    control, report = socket.socket(fileno=settings["control"]), settings["report"]
    for inherited in (report, settings["cgroup"]):
        if inherited is not None:
            os.set_inheritable(inherited, False)
    try:
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        # If the machine runs out of memory, the kernel ends sandboxes before anything else.
        with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="utf-8") as file:
            file.write("1000")
        if settings["namespaces"] and not os.path.exists(f"/proc/self/task/{os.getpid()}/children"):
            raise NotAllowed("the kernel does not list the children of a process (CONFIG_PROC_CHILDREN)")
        program = filter_program(platform.machine(), nested=settings["nested"])
        if settings["namespaces"]:
            enter_namespaces()
        elif os.geteuid() == 0:
            become_nobody(find_own_user(), settings)
        child = os.fork()
        if child:
            if settings["namespaces"]:
                become_user(INNER)
            # After the last change of the user, because such a change would clear the signal.
            libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != settings["parent"]:
                os._exit(1)
    except (OSError, NotAllowed) as problem:
        refuse_start(control, problem)
    if child == 0:
        os.close(report)
        become_interpreter(settings, source, control, program)
    control.close()
    most = None if settings["cgroup"] is not None else settings["total_bytes"]
    outlive_interpreter(child, Watch(proc, child, settings), most, report)


def refuse_start(control: socket.socket, problem: Exception) -> None:
    with suppress(OSError):
        control.sendall(b"E" + str(problem).encode(errors="replace")[:2000])
    os._exit(1)


# Namespaces


def enter_namespaces() -> None:
    outer = find_own_user() if os.geteuid() == 0 else os.geteuid()
    outer_group = outer if os.geteuid() == 0 else os.getegid()
    read_end, write_end = os.pipe()
    helper = os.fork()
    if helper == 0:
        os.read(read_end, 1)
        os._exit(map_users(os.getppid(), outer, outer_group))
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


def map_users(pid: int, user: int, group: int) -> int:
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


def build_root(settings: dict[str, Any]) -> None:
    """Called by the first process of the new namespaces, because only it may mount a view of its processes.

    The trees are opened as the user that started the script, and mounted as the user that owns the new root."""
    mount_at(None, "/", None, MS_REC | MS_SLAVE, None)
    known = {path for path in (*settings["trees"], *SYSTEM) if os.path.exists(path) and not os.path.islink(path)}
    outermost = [path for path in known if not any(path.startswith(f"{other.rstrip('/')}/") for other in known)]
    trees = {path: copy_tree(path, read_only=True) for path in sorted(outermost)}
    trees |= {path: copy_tree(path, read_only=False) for path in DEVICES if os.path.exists(path)}
    become_user(INNER)
    mount_at("tmpfs", NEW_ROOT, "tmpfs", MS_NOSUID | MS_NODEV, "size=1m,nr_inodes=1k,mode=755")
    os.chdir(NEW_ROOT)
    for path in SYSTEM:
        if os.path.islink(path):
            os.symlink(os.readlink(path), f"{NEW_ROOT}{path}")
    for path, tree in trees.items():
        place_tree(tree, path)
    for path in (WORK, OLD_ROOT):
        os.mkdir(f"{NEW_ROOT}{path}")
    if not os.path.exists(f"{NEW_ROOT}/tmp"):
        os.symlink(WORK, f"{NEW_ROOT}/tmp")
    most = settings["disk_bytes"]
    mount_at("tmpfs", f"{NEW_ROOT}{WORK}", "tmpfs", MS_NOSUID | MS_NODEV, f"size={most},nr_inodes=4k,mode=700")
    if settings["nested"]:  # a sandbox inside writes the mapping of its users there
        os.mkdir(f"{NEW_ROOT}/proc")
        mount_at("proc", f"{NEW_ROOT}/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
    check_result("pivot_root", libc.pivot_root(NEW_ROOT.encode(), f"{NEW_ROOT}{OLD_ROOT}".encode()))
    os.chdir("/")
    check_result("leaving the old root", libc.umount2(OLD_ROOT.encode(), MNT_DETACH))
    root = os.open("/", os.O_PATH)
    set_attributes(root, MOUNT_ATTR_RDONLY, recursive=False)
    os.close(root)
    os.chdir(WORK)


def copy_tree(path: str, *, read_only: bool) -> int:
    """A copy of a mounted tree, to be mounted elsewhere."""
    tree: int = libc.syscall(OPEN_TREE, AT_FDCWD, path.encode(), OPEN_TREE_CLONE | AT_RECURSIVE | os.O_CLOEXEC)
    check_result(f"taking {path}", tree)
    if read_only:
        set_attributes(tree, MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID, recursive=True)
    return tree


def set_attributes(tree: int, attributes: int, *, recursive: bool) -> None:
    wanted = struct.pack("QQQQ", attributes, 0, 0, 0)
    flags = AT_EMPTY_PATH | (AT_RECURSIVE if recursive else 0)
    check_result("making it read-only", libc.syscall(MOUNT_SETATTR, tree, b"", flags, wanted, len(wanted)))


def place_tree(tree: int, path: str) -> None:
    target = f"{NEW_ROOT}{path}"
    os.makedirs(os.path.dirname(target), exist_ok=True)
    if os.path.isdir(f"/proc/self/fd/{tree}"):
        os.makedirs(target, exist_ok=True)
    else:
        os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
    moved = libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, target.encode(), MOVE_MOUNT_F_EMPTY_PATH)
    check_result(f"placing {path}", moved)
    os.close(tree)


def mount_at(source: str | None, target: str, kind: str | None, flags: int, data: str | None) -> None:
    texts = [None if text is None else text.encode() for text in (source, target, kind, data)]
    failed = libc.mount(texts[0], texts[1], texts[2], ctypes.c_ulong(flags), texts[3])
    check_result(f"mounting {kind or 'what is there'} at {target}", failed)


def check_result(doing: str, result: int) -> None:
    if result < 0:
        raise NotAllowed(f"{doing}: {os.strerror(ctypes.get_errno())}")


# Both kinds


def become_user(user: int) -> None:
    with suppress(PermissionError):  # a user namespace does not allow choosing supplementary groups
        os.setgroups([])
    os.setresgid(user, user, user)
    os.setresuid(user, user, user)


def find_own_user() -> int:
    """The id of this sandbox's user and group; that of `nobody` if a container has no such id."""
    own = FIRST_USER + os.getpid()
    for map_file in ("/proc/self/uid_map", "/proc/self/gid_map"):
        with open(map_file, encoding="utf-8") as file:
            ranges = [tuple(map(int, line.split())) for line in file]
        if not any(first <= own < first + count for first, _, count in ranges):
            return NOBODY
    return own


def become_nobody(user: int, settings: dict[str, Any]) -> None:
    """Become `user`. Python is often in root's home, which other users may not read: then the right to read everything
    is kept."""
    python = settings["python"]
    os.chown(settings["work"], user, user)
    os.seteuid(user)
    readable = os.access(python, os.X_OK, effective_ids=True)
    os.seteuid(0)
    libc.prctl(PR_SET_KEEPCAPS, 0 if readable else 1, 0, 0, 0)
    become_user(user)
    if not readable:
        bit = 1 << CAP_DAC_READ_SEARCH
        wanted = struct.pack("6I", bit, bit, bit, 0, 0, 0)
        kept = libc.capset(struct.pack("Ii", CAPABILITIES_VERSION, 0), wanted)
        kept |= libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_DAC_READ_SEARCH, 0, 0)
        if kept < 0:
            raise NotAllowed(f"the user without rights that runs the code if root starts flowrl cannot read {python}")


def become_interpreter(settings: dict[str, Any], source: str, control: socket.socket, program: bytes) -> None:
    try:
        if settings["cgroup"] is not None:
            os.write(settings["cgroup"], b"0")  # this process
            os.close(settings["cgroup"])
        if settings["namespaces"]:
            build_root(settings)
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        if not settings["namespaces"]:
            try:
                os.chdir(settings["work"])
            except PermissionError:
                where = os.path.dirname(settings["work"])
                wrong = f"{where} is closed to the user without rights that runs the code if root starts flowrl"
                raise NotAllowed(f"{wrong}; set TMPDIR to a directory that all may pass through") from None
        for name, most in settings["limits"].items():
            resource.setrlimit(getattr(resource, name), (most, most))
        control.set_inheritable(True)
        set_filter(program)
        command = (settings["python"], "-P", "-s", "-B", "-c", source, str(control.fileno()), settings["interpreter"])
        os.execve(settings["python"], command, settings["environment"])
    except NotAllowed as problem:
        refuse_start(control, problem)
    except OSError as problem:
        refuse_start(
            control, OSError(f"starting {settings['python']}: {problem.strerror} {problem.filename or ''}".strip())
        )


def outlive_interpreter(child: int, watch: Watch, most: int | None, report: int) -> None:
    """Wait for the interpreter, and exit with its status. A pid namespace is empty once its first process is reaped.

    If the sandbox holds more than `most` bytes, end it, and report how much that was.
    """
    wait_s = LOOK_S[0]
    while True:
        found = signal.sigtimedwait(SIGNALS, wait_s) if most is not None else signal.sigwaitinfo(SIGNALS)
        if found is None:
            assert most is not None
            held = watch.total_bytes(most)
            if held <= most:
                wait_s = min(max((most - held) / FILLED_BYTES_S, LOOK_S[0]), LOOK_S[1])
                continue
            os.write(report, f"{held}".encode())
        if found is None or found.si_signo == signal.SIGTERM:
            os.kill(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
        else:
            ended = os.waitpid(child, os.WNOHANG)
        if ended[0] == child:
            status = os.waitstatus_to_exitcode(ended[1])
            os._exit(status if status >= 0 else 128 - status)


# What a sandbox holds


class Watch:
    """The memory of the sandbox whose first process is `first`, read from the directory `proc` of all processes.

    With namespaces, there are further processes, descendants of the first, and the working directory is a file system
    in memory. If a sandbox inside of it is allowed, the code may have made further such file systems.
    """

    def __init__(self, proc: int, first: int, settings: dict[str, Any]) -> None:
        self._proc, self._first = proc, first
        self._several: bool = settings["namespaces"]
        self._nested: bool = settings["nested"]
        self._num_files: int = settings["limits"]["RLIMIT_NOFILE"]
        self._threads: list[int] = []

    def total_bytes(self, most: int) -> int:
        """What is held, or a bound above it if that is not more than `most`: cheaper figures come first.

        Processes that end while they are read are read again, with those that they have started meanwhile. Where that
        has no end, or something cannot be read, the sum counts as endless. Shares of memory that a fork has left to
        several processes add up to too much while some of them end, so that sum counts only if no process has begun or
        ended meanwhile; if there is no such moment, the smallest of several sums counts.
        """
        files, sums = 0, list[int]()
        if self._several:  # the working directory's file system holds open files without a name, too
            with suppress(FileNotFoundError):  # not mounted yet
                found = os.statvfs(WORK)
                files = (found.f_blocks - found.f_bfree) * found.f_frsize
        for _ in range(LOOKS):
            try:
                for look in ("reserved", "mapped", "shared fairly"):
                    pids = self._list_pids()
                    held = files + sum(self._mounted_bytes(pids).values()) + self._held_bytes(pids, look)
                    if held <= most:
                        return held
                sums.append(held)
                if len(sums) == SUMS:
                    return min(sums)
                if self._list_pids() == pids and all(self._read_status(pid, "VmSize") for pid in pids):
                    return min(sums)
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                if not self._is_alive():
                    return 0
        return min(sums, default=sys.maxsize)

    def _held_bytes(self, pids: list[int], look: str) -> int:
        """What the processes hold themselves, and in sockets, pipes and shared memory.

        reserved: all that they have reserved, and all that their descriptors may hold. mapped: their own memory, what
        they may share with its full size. shared fairly: the same, with memory that a fork has left to several
        processes counted once.
        """
        if look == "reserved":
            descriptors = len(self._threads) * self._num_files
            return sum(self._read_status(pid, "VmSize", "VmPTE") for pid in pids) + descriptors * SOCKET_BYTES
        own = 0
        for pid in pids:
            if look == "mapped":
                own += self._read_status(pid, "RssAnon", "VmSwap", "VmPTE")
            else:
                own += sum_fields(self._read_living(pid, "smaps_rollup"), "Pss_Anon", "SwapPss")
                own += self._read_status(pid, "VmPTE")
        return own + self._nameless_bytes(pids) + self._buffer_bytes()

    def _list_pids(self) -> list[int]:
        """A living thread of each process that has memory of its own; `self._threads` are all of them."""
        found, self._threads = [], []
        processes, borrowed = [self._first], set()
        for pid in processes:
            living = 0
            for task in self._list_folder(f"{pid}/task"):
                state = self._read_state(f"{pid}/task/{task}")
                if state in "ZX":  # a first thread may have ended before the others
                    continue
                living = living or int(task)
                self._threads.append(int(task))
                if self._several:
                    children = [int(child) for child in self._read_file(f"{pid}/task/{task}/children").split()]
                    processes += children
                    if state == "D":  # in `vfork`, perhaps
                        borrowed.add(self._find_borrower(pid, children))
            if living and pid not in borrowed:
                found.append(living)
        return found

    def _find_borrower(self, pid: int, children: list[int]) -> int | None:
        """The child that still has its parent's memory, which must not count twice: one at most, for `vfork` waits."""
        size = self._read_status(pid, "VmSize")
        return next((child for child in reversed(children) if self._read_status(child, "VmSize") == size), None)

    def _read_state(self, task: str) -> str:
        return self._read_file(f"{task}/stat").rpartition(")")[2].split()[0]

    def _is_alive(self) -> bool:
        try:
            tasks = [f"{self._first}/task/{one}" for one in self._list_folder(f"{self._first}/task")]
            return any(self._read_state(task) not in "ZX" for task in tasks)
        except OSError:
            return False

    def _mounted_bytes(self, pids: list[int]) -> dict[str, int]:
        """Device -> bytes of the file systems in memory that the code has mounted in namespaces of its own."""
        held: dict[str, int] = {}
        mine = os.readlink("self/ns/mnt", dir_fd=self._proc) if self._nested else ""
        for pid in pids if self._nested else ():
            if os.readlink(f"{pid}/ns/mnt", dir_fd=self._proc) == mine:
                continue
            for line in self._read_file(f"{pid}/mountinfo").splitlines():
                fields, kind = line.split(), line.partition(" - ")[2].split()[0]
                if kind in ("tmpfs", "ramfs") and fields[2] not in held:
                    # mountinfo writes the blanks of a path as octal numbers
                    path = fields[4].encode().decode("unicode_escape").encode("latin-1").decode(errors="replace")
                    at = os.open(f"{pid}/root{path}", os.O_PATH, dir_fd=self._proc)
                    found = os.fstatvfs(at)
                    os.close(at)
                    held[fields[2]] = (found.f_blocks - found.f_bfree) * found.f_frsize
        return held

    def _nameless_bytes(self, pids: list[int]) -> int:
        """Shared memory without a file: its pages stay although no process may have them mapped at the moment."""
        largest: dict[str, int] = {}
        for pid in pids:
            for line in self._read_living(pid, "maps").splitlines():
                fields = line.split(maxsplit=5)
                if len(fields) == 6 and fields[1].endswith("s") and fields[5].startswith(NAMELESS):
                    first, last = (int(text, 16) for text in fields[0].split("-"))
                    size = int(fields[2], 16) + last - first
                    largest[fields[4]] = max(size, largest.get(fields[4], 0))
        return sum(largest.values())

    def _buffer_bytes(self) -> int:
        """What sockets and pipes may hold; a thread may have descriptors of its own."""
        links = set()
        for pid in self._threads:
            for number in self._read_living(pid, "fd", self._list_folder):
                with suppress(FileNotFoundError):  # closed meanwhile; the process itself is read in other ways
                    links.add(os.readlink(f"{pid}/fd/{number}", dir_fd=self._proc))
        sockets, pipes = (sum(link.startswith(kind) for link in links) for kind in ("socket:", "pipe:"))
        return sockets * SOCKET_BYTES + pipes * PIPE_BYTES

    def _read_status(self, pid: int, *names: str) -> int:
        return sum_fields(self._read_file(f"{pid}/status"), *names)

    def _read_living(self, pid: int, name: str, read: Any = None) -> Any:
        """A file or folder of a process; empty if the process is ending, has no memory any more, and may not be
        read."""
        try:
            return (read or self._read_file)(f"{pid}/{name}")
        except (ProcessLookupError, PermissionError):
            if self._read_status(pid, "VmSize"):
                raise
            return ""

    def _list_folder(self, path: str) -> list[str]:
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._proc)
        try:
            return os.listdir(folder)
        finally:
            os.close(folder)

    def _read_file(self, path: str) -> str:
        with open(os.open(path, os.O_RDONLY, dir_fd=self._proc), encoding="utf-8", errors="replace") as file:
            return file.read()


def sum_fields(text: str, *names: str) -> int:
    """The sum of these fields, in bytes; those that are missing are 0."""
    lines = (line.partition(":") for line in text.splitlines())
    return sum(int(value.split()[0]) << 10 for name, _, value in lines if name in names)


# The filter of system calls

ARCHITECTURES = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}
"""Machine -> the kernel's number of the architecture, and the column of NUMBERS and DENIED."""
X32 = 0x40000000
"""Set in system calls of x86-64's second interface, which has other numbers."""
DENIED = {
    # memory that no process has mapped, or that counts to nobody
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "msgget": (68, 186),
    "semget": (64, 190),
    "mq_open": (240, 180),
    "vmsplice": (278, 75),
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # rarer parts of the kernel
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "lookup_dcookie": (212, 18),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "acct": (163, 89),
    "syslog": (103, 116),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "nfsservctl": (180, 42),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "vhangup": (153, 58),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    # further ways to mount
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
}
"""System calls that are refused, with their numbers on x86-64 and aarch64."""
NESTING = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
}
"""Those that a sandbox inside of the sandbox needs."""
CLONE, CLONE3, PRCTL, FCNTL = (56, 220), (435, 435), (157, 167), (72, 25)
MMAP, SOCKET, SETSOCKOPT = (9, 222), (41, 198), (54, 208)
NEW_NAMESPACES = 0x7E020080
"""All flags of `clone` that make a namespace."""
MAP_HUGETLB, F_SETPIPE_SZ = 0x40000, 1031
PR_SET_DUMPABLE, PR_SET_MM = 4, 35
FAMILIES = (1, 2, 10, 16)
"""Unix, the two of IP, and netlink, with which libraries list interfaces; others reach rarer parts of the kernel."""
SO_SNDBUF, SO_RCVBUF = 7, 8
EPERM, ENOSYS, EAFNOSUPPORT = 1, 38, 97
LOAD, JUMP_IF_EQUAL, JUMP_IF_ABOVE, JUMP_IF_BITS, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE = 0x7FFF0000, 0x00050000
NUMBER_AT, ARCHITECTURE_AT, ARGUMENT_AT = 0, 4, (16, 24, 32, 40)
"""Offsets in the kernel's description of a call; of an argument, the lower half."""
PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 22, 2


def filter_program(machine: str, *, nested: bool) -> bytes:
    """The program for the kernel (classic BPF), which looks at each system call. Raises NotAllowed."""
    if machine not in ARCHITECTURES:
        raise NotAllowed(f"there is no filter of system calls for {machine}, only for {', '.join(ARCHITECTURES)}")
    architecture, column = ARCHITECTURES[machine]
    steps = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        (JUMP_IF_EQUAL, 1, 0, architecture),
        (RETURN, 0, 0, REFUSE | EPERM),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if machine == "x86_64":
        steps += [(JUMP_IF_ABOVE, 0, 1, X32), (RETURN, 0, 0, REFUSE | EPERM)]
    for numbers in (*DENIED.values(), *(() if nested else NESTING.values())):
        if (number := numbers[column]) is not None:
            steps += [(JUMP_IF_EQUAL, 0, 1, number), (RETURN, 0, 0, REFUSE | EPERM)]
    # glibc takes `clone` instead, whose flags a filter can see
    steps += [(JUMP_IF_EQUAL, 0, 1, CLONE3[column]), (RETURN, 0, 0, REFUSE | ENOSYS)]
    if not nested:
        steps += refuse_where(CLONE[column], 0, JUMP_IF_BITS, (NEW_NAMESPACES,))
    # without these, what the code holds can be seen, and it ends with this script
    steps += refuse_where(PRCTL[column], 0, JUMP_IF_EQUAL, (PR_SET_DUMPABLE, PR_SET_MM, PR_SET_PDEATHSIG))
    steps += refuse_where(FCNTL[column], 1, JUMP_IF_EQUAL, (F_SETPIPE_SZ,))
    steps += refuse_where(MMAP[column], 3, JUMP_IF_BITS, (MAP_HUGETLB,))
    steps += refuse_where(SETSOCKOPT[column], 2, JUMP_IF_EQUAL, (SO_SNDBUF, SO_RCVBUF))
    known = [(JUMP_IF_EQUAL, len(FAMILIES) - place, 0, family) for place, family in enumerate(FAMILIES)]
    steps += [
        (JUMP_IF_EQUAL, 0, len(known) + 3, SOCKET[column]),
        (LOAD, 0, 0, ARGUMENT_AT[0]),
        *known,
        (RETURN, 0, 0, REFUSE | EAFNOSUPPORT),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    return b"".join(struct.pack("HBBI", *step) for step in (*steps, (RETURN, 0, 0, ALLOW)))


def refuse_where(number: int, argument: int, test: int, values: tuple[int, ...]) -> list[tuple[int, int, int, int]]:
    """Refuse the system call of this number if one of its arguments equals one of the values, or has one of its bits.
    The call's number is loaded before and after."""
    tests = [(test, len(values) - 1 - place, 0, value) for place, value in enumerate(values)]
    return [
        (JUMP_IF_EQUAL, 0, len(tests) + 3, number),
        (LOAD, 0, 0, ARGUMENT_AT[argument]),
        *tests[:-1],
        (test, 0, 1, values[-1]),
        (RETURN, 0, 0, REFUSE | EPERM),
        (LOAD, 0, 0, NUMBER_AT),
    ]


def set_filter(program: bytes) -> None:
    """From now on, for this process and all that it starts; no process can take it off again."""

    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("steps", ctypes.c_char_p))

    found = Program(len(program) // 8, program)
    set_ = libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(found), 0, 0)
    check_result("setting the filter of system calls (seccomp)", set_)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2])
