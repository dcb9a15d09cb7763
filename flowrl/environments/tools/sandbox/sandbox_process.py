"""A sandbox, seen from outside: starts an isolated interpreter, gives it code, and ends it.

`sandbox_start` describes the isolation. Everything that comes from inside is treated as text only.

Waits: for the interpreter's start and its answers, until they arrive, the interpreter ends, or the caller cancels,
after which `end` has to be called; and in `end` for the interpreter's end, which SIGTERM to its parent causes.

Where the machine lets this process make a control group (cgroup v2), the sandbox has one: the kernel counts all its
memory, that of its files and buffers included, and ends all of its processes when it exceeds the limit. A group can be
made beside or above this process's own group, in a directory that this user may write to and whose
`cgroup.subtree_control` has the controllers: as root outside of containers, or in a scope of systemd with delegation
(`systemd-run --user --scope -p Delegate=yes`).
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.errors import FlowrlError

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
CONTROLLERS = {"memory", "pids"}
NAME = "flowrl-sandbox-{pid}-{number}"
MADE_BY = re.compile(r"flowrl-sandbox-(\d+)-\d+")


class SandboxCgroup:
    """One group, from its creation to `remove`."""

    _made = 0

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.entrance = os.open(directory / "cgroup.procs", os.O_WRONLY | os.O_CREAT, 0o600)
        """A process that writes 0 to this descriptor joins the group, also if it is another user by then."""

    @classmethod
    def create_group(cls, *, memory_bytes: int, num_processes: int) -> SandboxCgroup | None:
        """A group with these limits; None where none can be made."""
        for above in group_directories():
            cls._made += 1
            directory = above / NAME.format(pid=os.getpid(), number=cls._made)
            try:
                for other in above.iterdir():
                    # The groups of processes that were killed; the kernel refuses to remove one that has processes.
                    found = MADE_BY.fullmatch(other.name)
                    if found and not Path(f"/proc/{found[1]}").exists():
                        remove_directory(other)
                directory.mkdir()
            except OSError:
                continue
            try:
                for name, value in (
                    ("memory.max", memory_bytes),
                    ("pids.max", num_processes),
                    ("memory.oom.group", 1),
                ):
                    (directory / name).write_text(str(value), encoding="utf-8")
                with suppress(OSError):  # a kernel without swap has no such file
                    (directory / "memory.swap.max").write_text("0", encoding="utf-8")
                return cls(directory)
            except OSError:
                remove_directory(directory)
        return None

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has ended processes of the group because of its limit."""
        try:
            lines = (self.directory / "memory.events").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines if line.strip())

    def remove_group(self) -> None:
        """Remove the group, whose processes have ended."""
        os.close(self.entrance)
        remove_directory(self.directory)


def group_directories() -> Iterator[Path]:
    """Directories in which a group may have limits, the nearest to this process first."""
    try:
        lines = OWN.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("0::/"):
            own = ROOT / line.removeprefix("0::/")
            for directory in (own, *own.parents):
                with suppress(OSError):
                    if set((directory / "cgroup.subtree_control").read_text(encoding="utf-8").split()) >= CONTROLLERS:
                        yield directory
                if directory == ROOT:
                    return


def remove_directory(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()


READ_BYTES = 1 << 16
READS = 64
"""Number of reads at the end of a call; together they take more than a pipe holds."""


class BoundedOutput:
    """Reads a pipe, and keeps `most_bytes` of what has arrived since the last `taken`."""

    def __init__(self, source: int, *, most_bytes: int) -> None:
        self._source, self._most = source, most_bytes // 2
        os.set_blocking(source, False)
        self._head = self._tail = b""
        self._length = 0

    def read_output(self) -> bool:
        """Read what has arrived; False if there is nothing more for now, or the pipe has ended."""
        try:
            found = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return False
        room = self._most - len(self._head)
        self._head += found[:room]
        self._tail = (self._tail + found[room:])[-self._most :]
        self._length += len(found)
        return bool(found)

    def take_text(self) -> str:
        """What has arrived since the last call, including what is in the pipe now."""
        for _ in range(READS):
            if not self.read_output():
                break
        left_out = self._length - len(self._head) - len(self._tail)
        mark = f"\n[{left_out} bytes left out]\n" if left_out else ""
        parts = (self._head, mark.encode(), self._tail) if mark else (self._head + self._tail,)
        self._head, self._tail, self._length = b"", b"", 0
        return "".join(part.decode(errors="replace") for part in parts)

    def close_output(self) -> None:
        """Close the pipe's end."""
        with suppress(OSError):
            os.close(self._source)


SandboxKind = Literal["namespaces", "limits"]
WORK = "/sandbox"
"""The same name as in `sandbox_start`."""
LENGTH = struct.Struct("<I")
START, INTERPRETER = (Path(__file__).with_name(f"sandbox_{name}.py") for name in ("start", "interpreter"))
CPU_S = 600
"""Total CPU seconds of the interpreter, a limit for threads that continue between calls; each call has a time limit."""
NUM_FILES = 64
NUM_PROCESSES = 32
"""Most processes and threads of one sandbox. Only with namespaces are they counted for each sandbox; without
namespaces, only the interpreter itself is allowed."""
START_S = 30.0
END_S = 10.0
MESSAGE_BYTES = 4096
MIB = 1 << 20


class SandboxRefused(FlowrlError):
    """The machine does not allow the sandbox; the text says why."""


class SandboxEnded(FlowrlError):
    """The interpreter has ended, during a call or before it."""

    def __init__(self, text: str, *, out_of_memory: bool = False) -> None:
        super().__init__(text)
        self.out_of_memory = out_of_memory
        """Whether the limit of memory of the whole sandbox has ended it."""


@dataclass(frozen=True)
class SandboxSettings:
    """How an interpreter is isolated and limited."""

    kind: SandboxKind = "namespaces"
    memory_bytes: int = 1 << 30
    """Memory of all processes and files in memory together, and address space of each process."""
    disk_bytes: int = 64 << 20
    """Size of the working directory (with namespaces), or of each file (without)."""
    output_bytes: int = 8192
    nested: bool = False
    """The code may make namespaces, for a sandbox of its own."""


@dataclass(frozen=True)
class Ran:
    """The result of one call."""

    text: str
    failed: bool


class SandboxProcess:
    """One interpreter, from `start` to `end`."""

    def __init__(self, settings: SandboxSettings, *, seed: int) -> None:
        self._settings = settings
        self._work = tempfile.mkdtemp(prefix="flowrl-sandbox-") if settings.kind == "limits" else ""
        self._control, theirs = socket.socketpair()
        self._cgroup = SandboxCgroup.create_group(memory_bytes=settings.memory_bytes, num_processes=2 * NUM_PROCESSES)
        entrance = () if self._cgroup is None else (self._cgroup.entrance,)
        self._report, report = os.pipe()
        source, target = os.pipe()
        self._output = BoundedOutput(source, most_bytes=settings.output_bytes)
        try:
            self._process = subprocess.Popen(
                (
                    sys.executable,
                    "-I",
                    "-S",
                    str(START),
                    self._write_settings(theirs, report, seed),
                    INTERPRETER.read_text(encoding="utf-8"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                pass_fds=(theirs.fileno(), report, *entrance),
                env={},
            )
        except OSError as problem:
            self._control.close()
            self._output.close_output()
            self._leave_running()
            shutil.rmtree(self._work, ignore_errors=True)
            raise SandboxRefused(f"no process could be started: {problem.strerror}") from None
        finally:
            theirs.close()
            os.close(target)
            os.close(report)
        asyncio.get_running_loop().add_reader(source, self._read_answer)
        self._source = source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def start_sandbox(self) -> None:
        """Wait until the interpreter is ready. Raises SandboxRefused."""
        self._streams = await asyncio.open_connection(sock=self._control)
        reader, _ = self._streams
        try:
            async with asyncio.timeout(START_S):
                first = await reader.read(1)
                text = (await reader.read(MESSAGE_BYTES)).decode(errors="replace") if first == b"E" else ""
        except TimeoutError:
            raise SandboxRefused(f"the interpreter is not ready after {START_S:g} s") from None
        if first != b"R":
            raise SandboxRefused(
                text or self._output.take_text().strip()[-500:] or "its process ended while it started"
            )

    async def run_code(self, code: str) -> Ran:
        """Execute code. Raises SandboxEnded."""
        assert self._streams is not None
        reader, writer = self._streams
        body = code.encode(errors="replace")
        try:
            writer.write(LENGTH.pack(len(body)) + body)
            await writer.drain()
            answer = await reader.read(1)
        except ConnectionError:
            answer = b""
        if not answer:
            printed = self._output.take_text()
            how, out_of_memory = self._describe_end()
            raise SandboxEnded(f"{printed}\n{how}".strip(), out_of_memory=out_of_memory)
        return Ran(self._output.take_text(), failed=answer != b"0")

    async def end_sandbox(self) -> None:
        """End the interpreter and all that it has started. When this returns, they are gone."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._source)
        if self._streams is not None:
            self._streams[1].close()
        self._control.close()
        try:
            if self._process.poll() is None:
                self._process.terminate()
                handle, gone = os.pidfd_open(self._process.pid), asyncio.Event()
                loop.add_reader(handle, gone.set)
                try:
                    await asyncio.wait_for(gone.wait(), END_S)
                except TimeoutError:
                    self._process.kill()  # the interpreter then gets its parent-death signal
                finally:
                    loop.remove_reader(handle)
                    os.close(handle)
                self._process.wait()
        finally:
            self._output.close_output()
            self._leave_running()
            if self._work:
                shutil.rmtree(self._work, ignore_errors=True)

    def _describe_end(self) -> tuple[str, bool]:
        """(how the interpreter ended, as a sentence; whether because of the sandbox's memory). It has closed its
        connection, so it has ended, or ends now."""
        try:
            status = self._process.wait(1.0)
            number = -status if status < 0 else status - 128
            how = f"The interpreter ended with status {status}."
            with suppress(ValueError):
                how = f"The interpreter was ended by {signal.Signals(number).name}."
        except subprocess.TimeoutExpired:
            how = "The interpreter closed its connection."

        if self._cgroup is not None:
            held = "more memory than the limit;" if self._cgroup.out_of_memory else ""
        else:
            os.set_blocking(self._report, False)
            try:
                num_bytes = int(os.read(self._report, MESSAGE_BYTES) or 0)
            except BlockingIOError:  # its process has not ended
                num_bytes = 0
            held = f"{num_bytes / MIB:,.0f} MiB of memory, and" if num_bytes else ""
            if num_bytes == sys.maxsize:
                held = "memory that could not be counted, because processes ended all the time;"
        if not held:
            return how, False
        allowed = f"{self._settings.memory_bytes / MIB:,.0f} MiB"
        return f"The interpreter was ended: its processes and files held {held} {allowed} are allowed.", True

    def _leave_running(self) -> None:
        os.close(self._report)
        if self._cgroup is not None:
            self._cgroup.remove_group()

    def _read_answer(self) -> None:
        if not self._output.read_output():
            asyncio.get_running_loop().remove_reader(self._source)

    def _write_settings(self, control: socket.socket, report: int, seed: int) -> str:
        """The settings of `sandbox_start`, as JSON."""
        apart = self._settings.kind == "namespaces"
        limits = {
            "RLIMIT_AS": self._settings.memory_bytes,
            "RLIMIT_CPU": CPU_S,
            "RLIMIT_FSIZE": self._settings.disk_bytes,
            "RLIMIT_NOFILE": NUM_FILES,
            "RLIMIT_NPROC": NUM_PROCESSES if apart else 0,
            "RLIMIT_CORE": 0,
        }
        for name, most in limits.items():  # a limit may be lowered, but not raised
            hard = resource.getrlimit(getattr(resource, name))[1]
            limits[name] = most if hard == resource.RLIM_INFINITY else min(most, hard)

        # Python's folder decides which packages it finds, so links in the folder's path are resolved.
        folder, python = os.path.split(sys.executable)
        folder = os.path.realpath(folder)
        paths = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
        trees = {os.path.realpath(path) for path in paths if os.path.exists(path)}
        trees.add(os.path.dirname(os.path.realpath(sys.executable)))

        home = self._work or WORK
        one_thread = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
        variables = {
            **dict.fromkeys(one_thread, "1"),
            "HOME": home,
            "TMPDIR": home,
            "LANG": "C.UTF-8",
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "PYTHONHASHSEED": "0",
            "MPLBACKEND": "Agg",
        }
        return json.dumps(
            {
                "control": control.fileno(),
                "report": report,
                "cgroup": None if self._cgroup is None else self._cgroup.entrance,
                "total_bytes": self._settings.memory_bytes,
                "nested": self._settings.nested,
                "parent": os.getpid(),
                "namespaces": apart,
                "trees": list(trees),
                "work": self._work,
                "disk_bytes": self._settings.disk_bytes,
                "limits": limits,
                "python": f"{folder}/{python}",
                "environment": variables,
                "interpreter": json.dumps({"seed": seed, "apart": apart}),
            }
        )
