"""A sandbox, seen from outside: starts an isolated interpreter, gives it code, and ends it.

`sandbox_start` describes the isolation. Everything that comes from inside is treated as text only.

Waits: for the interpreter's start and its answers, until they arrive, the interpreter ends, or the caller cancels,
after which `end` has to be called; and in `end` for the interpreter's end, which SIGTERM to its parent causes.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import sysconfig
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flowrl.environments.tools.sandbox.bounded_output import BoundedOutput
from flowrl.environments.tools.sandbox.sandbox_cgroup import SandboxCgroup
from flowrl.errors import FlowrlError

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
        self._cgroup = SandboxCgroup.create(memory_bytes=settings.memory_bytes, num_processes=2 * NUM_PROCESSES)
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
                    self._text(theirs, report, seed),
                    INTERPRETER.read_text(encoding="utf-8"),
                ),
                stdin=subprocess.DEVNULL,
                stdout=target,
                stderr=target,
                pass_fds=(theirs.fileno(), report, *self._entrance),
                env={},
            )
        except OSError as problem:
            self._control.close()
            self._output.close()
            self._leave()
            shutil.rmtree(self._work, ignore_errors=True)
            raise SandboxRefused(f"no process could be started: {problem.strerror}") from None
        finally:
            theirs.close()
            os.close(target)
            os.close(report)
        asyncio.get_running_loop().add_reader(source, self._read)
        self._source = source
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def start(self) -> None:
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
            raise SandboxRefused(text or self._output.taken().strip()[-500:] or "its process ended while it started")

    async def run(self, code: str) -> Ran:
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
            printed = self._output.taken()
            how = self._how_it_ended()
            held = self._too_much()
            raise SandboxEnded(f"{printed}\n{held or how}".strip(), out_of_memory=bool(held))
        return Ran(self._output.taken(), failed=answer != b"0")

    async def end(self) -> None:
        """End the interpreter and all that it has started. When this returns, they are gone."""
        self._stop_reading()
        if self._streams is not None:
            self._streams[1].close()
        self._control.close()
        try:
            await self._ended()
        finally:
            self._output.close()
            self._leave()
            if self._work:
                shutil.rmtree(self._work, ignore_errors=True)

    async def _ended(self) -> None:
        if self._process.poll() is not None:
            return
        self._process.terminate()
        loop, gone = asyncio.get_running_loop(), asyncio.Event()
        process = os.pidfd_open(self._process.pid)
        loop.add_reader(process, gone.set)
        try:
            await asyncio.wait_for(gone.wait(), END_S)
        except TimeoutError:
            self._process.kill()  # the interpreter then gets its parent-death signal
        finally:
            loop.remove_reader(process)
            os.close(process)
        self._process.wait()

    def _how_it_ended(self) -> str:
        """How the interpreter ended. It has closed its connection, so it has ended, or ends now."""
        try:
            status = self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            return "The interpreter closed its connection."
        number = -status if status < 0 else status - 128
        with suppress(ValueError):
            return f"The interpreter was ended by {signal.Signals(number).name}."
        return f"The interpreter ended with status {status}."

    def _too_much(self) -> str:
        """The sentence for a sandbox that ended because of its memory; "" if it has ended for another reason."""
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
        allowed = f"{self._settings.memory_bytes / MIB:,.0f} MiB"
        return f"The interpreter was ended: its processes and files held {held} {allowed} are allowed." if held else ""

    @property
    def _entrance(self) -> tuple[int, ...]:
        return () if self._cgroup is None else (self._cgroup.entrance,)

    def _leave(self) -> None:
        os.close(self._report)
        if self._cgroup is not None:
            self._cgroup.remove()

    def _read(self) -> None:
        if not self._output.read():
            self._stop_reading()

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self._source)

    def _text(self, control: socket.socket, report: int, seed: int) -> str:
        apart = self._settings.kind == "namespaces"
        return json.dumps(
            {
                "control": control.fileno(),
                "report": report,
                "cgroup": next(iter(self._entrance), None),
                "total_bytes": self._settings.memory_bytes,
                "nested": self._settings.nested,
                "parent": os.getpid(),
                "namespaces": apart,
                "trees": list(interpreter_trees()),
                "work": self._work,
                "disk_bytes": self._settings.disk_bytes,
                "limits": self._limits(),
                "python": interpreter(),
                "environment": _variables(self._work or WORK),
                "interpreter": json.dumps({"seed": seed, "apart": apart}),
            }
        )

    def _limits(self) -> dict[str, int]:
        wanted = {
            "RLIMIT_AS": self._settings.memory_bytes,
            "RLIMIT_CPU": CPU_S,
            "RLIMIT_FSIZE": self._settings.disk_bytes,
            "RLIMIT_NOFILE": NUM_FILES,
            "RLIMIT_NPROC": NUM_PROCESSES if self._settings.kind == "namespaces" else 0,
            "RLIMIT_CORE": 0,
        }
        return {name: _allowed(name, most) for name, most in wanted.items()}


def interpreter() -> str:
    """The path of this Python inside the sandbox. Python's folder decides which packages it finds, so links in the
    folder's path are resolved."""
    folder, name = os.path.split(sys.executable)
    return f"{os.path.realpath(folder)}/{name}"


def interpreter_trees() -> set[str]:
    """The folders that hold this Python, its library and its packages."""
    found = {sys.prefix, sys.base_prefix, sys.exec_prefix, sys.base_exec_prefix, *sysconfig.get_paths().values()}
    known = {os.path.realpath(path) for path in found if os.path.exists(path)}
    return known | {os.path.dirname(os.path.realpath(sys.executable))}


def _allowed(name: str, most: int) -> int:
    """The limit to set: a limit may be lowered, but not raised."""
    hard = resource.getrlimit(getattr(resource, name))[1]
    return most if hard == resource.RLIM_INFINITY else min(most, hard)


def _variables(home: str) -> dict[str, str]:
    one = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
    return {
        **dict.fromkeys(one, "1"),
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "PYTHONHASHSEED": "0",
        "MPLBACKEND": "Agg",
    }
