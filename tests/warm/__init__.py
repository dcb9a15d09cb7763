"""Interpreters for the processes of the slow tests, forked from one that has imported their packages.

A run on the real stack starts five processes or more, and each imports torch and transformers, DeepSpeed or vLLM: half
of what a small run costs. `python()` is a path that is started as a Python interpreter is. For a process of a known
kind its client (client.py) asks a server (server.py) for a fork, and stands for it: passes signals on, ends as it ends,
and the fork ends with it. Anything else becomes the interpreter of the tests. A server has the environment variables of
those who ask it (others get another server), so whatever reads them while it is imported finds the same. The processes
of one test session share the servers, which end with it.

Started without it, as a user's run is: tests/stack/test_stack_run.py, and all tests of processes and their ends.
`FLOWRL_TESTS_COLD=1` starts everything so.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
import sysconfig
import tempfile
from functools import cache
from pathlib import Path

HERE = Path(__file__).parent
OWNER, COLD = "FLOWRL_TESTS_OWNER", "FLOWRL_TESTS_COLD"


@cache
def python() -> str:
    """The path of a Python whose known processes are forked; the interpreter itself where forks are not wanted."""
    if os.environ.get(COLD):
        return sys.executable
    os.environ[OWNER] = str(_session())
    directory = _directory()
    directory.mkdir(mode=0o700, exist_ok=True)
    with (directory / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (directory / "servers").exists():
            _fill(directory)
    return str(directory / "bin" / "python")


def refused() -> list[str]:
    """Of each process that was started anew because there were too many servers: its kind and variables."""
    file = _directory() / "refused"
    return file.read_text().splitlines() if file.exists() else []


def remove() -> None:
    """Remove what this session has made; its servers end with it."""
    shutil.rmtree(_directory(), ignore_errors=True)


def _session() -> int:
    """The process whose end is that of the session."""
    return os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()


def _directory() -> Path:
    return Path(tempfile.gettempdir()) / f"flowrl-warm-{os.getuid()}-{_session()}"


def _fill(directory: Path) -> None:
    """Make it a virtual environment like that of this process, with the client for a Python."""
    (directory / "bin").mkdir()
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", directory)
    (directory / "lib").symlink_to(Path(sysconfig.get_path("platlib")).parent.parent)
    (directory / "paths").write_text(f"{sys.executable}\n{HERE / 'server.py'}\n")
    client = directory / "bin" / "python"
    client.write_text(f"#!{sys.executable} -IS\n{(HERE / 'client.py').read_text()}")
    client.chmod(0o755)
    (directory / "servers").mkdir()
