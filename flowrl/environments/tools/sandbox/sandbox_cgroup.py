"""A control group (cgroup v2) for the processes of one sandbox, where the machine lets this process make one.

The kernel then counts all memory of the sandbox, that of its files and buffers included, and ends all of its processes
when it exceeds the limit. A group can be made beside or above this process's own group, in a directory that this user
may write to and whose `cgroup.subtree_control` has the controllers: as root outside of containers, or in a scope of
systemd with delegation (`systemd-run --user --scope -p Delegate=yes`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

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
    def create(cls, *, memory_bytes: int, num_processes: int) -> SandboxCgroup | None:
        """A group with these limits; None where none can be made."""
        for above in _directories():
            cls._made += 1
            directory = above / NAME.format(pid=os.getpid(), number=cls._made)
            try:
                _remove_abandoned(above)
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
                _remove(directory)
        return None

    @property
    def out_of_memory(self) -> bool:
        """Whether the kernel has ended processes of the group because of its limit."""
        try:
            lines = (self.directory / "memory.events").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return any(line.split()[0] == "oom_kill" and int(line.split()[1]) > 0 for line in lines if line.strip())

    def remove(self) -> None:
        """Remove the group, whose processes have ended."""
        os.close(self.entrance)
        _remove(self.directory)


def _directories() -> Iterator[Path]:
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


def _remove_abandoned(above: Path) -> None:
    """Remove the groups of processes that were killed. The kernel refuses to remove one that has processes."""
    for directory in above.iterdir():
        found = MADE_BY.fullmatch(directory.name)
        if found and not Path(f"/proc/{found[1]}").exists():
            _remove(directory)


def _remove(directory: Path) -> None:
    with suppress(OSError):
        directory.rmdir()
