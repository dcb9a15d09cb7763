"""A `flowrl run` in a process of its own, as a user starts it, and what it leaves on the machine."""

from __future__ import annotations

import ipaddress
import os
import re
import select
import signal
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from flowrl.wire.run_files import socket_root

ROOT = Path(__file__).parents[2]
GRAPHS = ROOT / "tests" / "runtime" / "driver" / "graphs_failing"
LISTEN = "0A"
"""The state in /proc/net/tcp of a socket that waits for connections."""
MARK = "FLOWRL_TEST_RUN"
"""Environment variable by which every process that a run has started is known again."""


class Run:
    """One run. It is in a session of its own: signals reach all of it as they do from a terminal."""

    def __init__(
        self,
        graph: Path,
        run_dir: Path,
        *options: str,
        timeout_s: float = 90,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.run_dir = run_dir
        self.mark = uuid.uuid4().hex
        self.lines: list[str] = []
        self.start_s = time.monotonic()
        self.stderr = ""
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "flowrl.cli",
                "run",
                str(graph),
                "--run-dir",
                str(run_dir),
                "--plain",
                "--try-s=0",
                *options,
            ],
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": str(ROOT), MARK: self.mark, **(env or {})},
            start_new_session=True,
        )
        self._guard = threading.Timer(timeout_s, self.process.kill)
        self._guard.start()

    def until(self, pattern: str) -> str:
        """Read on until a line has `pattern`; fails the test if the run ends before."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if re.search(pattern, line):
                return line
        self.wait()
        raise AssertionError(f"no line with {pattern!r} in\n{self.stdout}\n{self.stderr}")

    def wait(self) -> int:
        """Read to the end; the exit status."""
        assert self.process.stdout is not None
        self.lines += self.process.stdout
        status = self.process.wait()
        self._guard.cancel()
        self.process.stdout.close()
        with self._stderr:
            self._stderr.seek(0)
            self.stderr = self._stderr.read()
        return status

    def signal(self, number: int) -> None:
        """To the whole process group, as Ctrl-C in a terminal."""
        os.killpg(self.process.pid, number)

    def words(self, track: str) -> list[str]:
        """What a node replica left in the run directory, "generator-0"; its pid first."""
        return (self.run_dir / track).read_text().split("\n")[:-1]

    @property
    def stdout(self) -> str:
        return "".join(self.lines)

    @property
    def socket_dirs(self) -> list[Path]:
        return [path for path in socket_root().iterdir() if path.name.endswith(f"-{self.process.pid}")]

    def pid_of(self, name: str) -> int:
        """Of the run's one process of this name, as the kernel calls it."""
        (pid,) = [pid for pid in pids_of(self.mark) if Path(f"/proc/{pid}/comm").read_text().strip() == name]
        return pid

    def left_after(self, seconds: float) -> list[str]:
        """Names of the processes of the run that have not ended in this time; their ends are waited for."""
        ends = time.monotonic() + seconds
        found = {pid: _name(pid) for pid in pids_of(self.mark)}
        return [name for pid, name in found.items() if not _ended(pid, ends)]


def pids_of(mark: str) -> list[int]:
    """Processes that have the mark in their environment."""
    return [int(path.name) for path in _processes() if f"{MARK}={mark}".encode() in _environment(path)]


def listening(pids: Iterable[int]) -> dict[str, set[str]]:
    """IP address -> names of those of these processes that listen for connections there."""
    at = dict(_listening_sockets("tcp", 4)) | dict(_listening_sockets("tcp6", 16))
    found: dict[str, set[str]] = defaultdict(set)
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):  # it has been closed meanwhile
                if (address := at.get(os.readlink(file))) is not None:
                    found[address].add(Path(f"/proc/{pid}/comm").read_text().strip())
    return found


def is_loopback(address: str) -> bool:
    """Also as an IPv6 socket has it."""
    ip = ipaddress.ip_address(address)
    return (getattr(ip, "ipv4_mapped", None) or ip).is_loopback


def _listening_sockets(table: str, num_bytes: int) -> Iterator[tuple[str, str]]:
    """(what a descriptor of it links to, IP address); the kernel writes addresses as words of the machine."""
    for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
        fields = line.split()
        words = bytes.fromhex(fields[1].partition(":")[0])
        address = b"".join(words[i : i + 4][::-1] for i in range(0, num_bytes, 4))
        if fields[3] == LISTEN:
            yield f"socket:[{fields[9]}]", str(ipaddress.ip_address(address))


def _processes() -> Iterator[Path]:
    return (path for path in Path("/proc").iterdir() if path.name.isdigit())


def _environment(path: Path) -> list[bytes]:
    try:
        return (path / "environ").read_bytes().split(b"\0")
    except OSError:  # it has ended, or belongs to somebody else
        return []


def _name(pid: int) -> str:
    """As the kernel calls it; "" if it has ended meanwhile."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text().strip()
    return ""


def _ended(pid: int, ends: float) -> bool:
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], max(ends - time.monotonic(), 0))[0])
    finally:
        os.close(handle)


def audit(run_dir: Path) -> str:
    """What `flowrl audit` prints."""
    command = [sys.executable, "-m", "flowrl.cli", "audit", str(run_dir)]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, cwd=ROOT).stdout


def states(run_dir: Path) -> dict[tuple[str, str | None], int]:
    """(state, reason) -> number of samples in the ledger."""
    with sqlite3.connect(run_dir / "ledger.sqlite") as db:
        rows = db.execute("SELECT state, reason, COUNT(*) FROM samples GROUP BY state, reason")
        return {(state, reason): count for state, reason, count in rows}


__all__ = ["GRAPHS", "ROOT", "Run", "audit", "is_loopback", "listening", "pids_of", "signal", "states"]
