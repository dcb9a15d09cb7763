"""The addresses of endpoints, and the keys that protect connections between machines."""

from __future__ import annotations

import os
import socket
import stat
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

import zmq

from flowrl.errors import ConfigError

SOCKET_PATH_LIMIT = 107


@dataclass(frozen=True)
class CurveKeys:
    """One key pair for the whole run: only processes that have it can connect."""

    public: bytes
    secret: bytes = field(repr=False)

    @classmethod
    def new(cls) -> CurveKeys:
        return cls(*zmq.curve_keypair())


@dataclass(frozen=True)
class Address:
    """The address of an open endpoint. Plain data: Ray carries it to the other processes."""

    host: str
    incarnation: int
    machine: str
    pid: int
    ipc: str
    tcp: str = ""
    """"tcp://host:port", "" if the endpoint listens only on its machine."""


def this_machine() -> str:
    """Identifies this machine: two processes with the same value share /dev/shm and can connect over ipc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    shared = os.stat("/dev/shm").st_dev if os.path.isdir("/dev/shm") else 0
    return f"{socket.gethostname()}:{boot.read_text(encoding='utf-8').strip() if boot.exists() else ''}:{shared}"


def socket_root() -> Path:
    """The directory of all flowrl sockets of this user; only the user has access."""
    root = Path(tempfile.gettempdir()) / f"flowrl-{os.getuid()}"
    with suppress(FileExistsError):  # a directory, or what the error below names
        root.mkdir(mode=0o700)
    status = root.lstat()
    if status.st_uid != os.getuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{root} is not a directory of this user; remove it, or set TMPDIR to a directory of your own"
        )
    if status.st_mode & 0o077:
        root.chmod(0o700)
    return root


def run_name(run_id: str) -> str:
    """The prefix of every file name of a run on the machine; `presence` finds the run's files by it."""
    return blake2b(run_id.encode(), digest_size=6).hexdigest()


def run_prefix(run_id: str, pid: int) -> str:
    """The run's name and a process id, which shows people which process made the files."""
    return f"{run_name(run_id)}-{pid}"


def ipc_path(run_id: str, driver_pid: int, host: str, incarnation: int) -> Path:
    """The path of an endpoint's unix socket. Creates its directory."""
    folder = socket_root() / run_prefix(run_id, driver_pid)
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / f"{blake2b(host.encode(), digest_size=5).hexdigest()}-{incarnation}"
    if len(str(path)) > SOCKET_PATH_LIMIT:
        raise ConfigError(f"{path} is too long for a unix socket; set TMPDIR to a shorter path")
    return path


def remove_socket(path: str) -> None:
    """Remove an endpoint's socket, and the directory if the socket was the last one in it."""
    Path(path).unlink(missing_ok=True)
    with suppress(OSError):
        Path(path).parent.rmdir()


def local_ip() -> str:
    """The IP address at which other machines reach this one (sends no packet).

    In a process that has joined Ray, the address that Ray uses for this machine: it may be of another network than the
    default route.
    """
    ray = sys.modules.get("ray")  # never imported here
    if ray is not None and ray.is_initialized():
        return str(ray.util.get_node_ip_address())
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.1"
        return str(probe.getsockname()[0])
