"""Several machines on one: a Ray for each in one cluster, all but the first with a host name and a /dev/shm of its own.

`unshare` makes the others: what lies between machines is tcp alone, because neither a socket in the file system nor
shared memory is used between machines of different names.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RAY = Path(sys.executable).with_name("ray")
HEAD = {"RAY_prestart_worker_first_driver": "0"}
"""As in the Ray that a run starts by itself."""
OTHERS = ("flowrl-second", "flowrl-third")
"""Host names."""
OTHER = "hostname {name} && mount -t tmpfs -o size={shm} tmpfs /dev/shm && exec "


def are_possible() -> bool:
    """Whether this user may make namespaces."""
    return subprocess.run(["unshare", "--uts", "--mount", "true"], capture_output=True).returncode == 0


@contextmanager
def machines(number: int = 2, *, shm: str = "512m", gpus: int = 0) -> Iterator[dict[str, str]]:
    """The environment in which a run joins a cluster of two or three machines with two cores each.

    `shm` is the size of the /dev/shm of each but the first, which have `gpus` declared GPUs: Ray counts them, and there
    are none.
    """
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    ports = iter(free_ports(4 + 2 * (number - 1)))
    address = f"127.0.0.1:{next(ports)}"
    head = [str(RAY), "start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={address.split(':')[1]}"]
    head += ["--num-cpus=2", "--num-gpus=0", f"--ray-client-server-port={next(ports)}", "--disable-usage-stats"]
    head += [f"--dashboard-agent-listen-port={next(ports)}", f"--dashboard-agent-grpc-port={next(ports)}"]
    head += ["--include-dashboard=false"]
    started = {**HEAD, **token}
    processes = [start_ray(head, started)]
    try:
        for index, name in enumerate(OTHERS[: number - 1], 2):
            other = f"{RAY} start --block --address={address} --node-ip-address=127.0.0.{index} --num-cpus=2 "
            other += f"--num-gpus={gpus} --dashboard-agent-listen-port={next(ports)} "
            other += f"--dashboard-agent-grpc-port={next(ports)}"
            command = ["unshare", "--uts", "--mount", "sh", "-c", OTHER.format(name=name, shm=shm) + other]
            processes.append(start_ray(command, started))
        yield {"RAY_ADDRESS": address, **token}
    finally:
        end_ray(*reversed(processes))


def start_ray(command: list[str], environment: dict[str, str]) -> subprocess.Popen[str]:
    """A `ray start --block` that has started."""
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **environment, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert process.stdout is not None
    said = []
    for line in process.stdout:
        said.append(line)
        if "Ray runtime started" in line:
            return process
    raise AssertionError("".join(said))


def end_ray(*processes: subprocess.Popen[str], within_s: float = 3.0) -> None:
    """End what `start_ray` has started. Ray's own orderly end takes half a minute more, for nobody."""
    for process in processes:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(within_s)
        assert process.stdout is not None
        process.stdout.read()
        process.wait(30)


def free_ports(number: int) -> list[int]:
    """Between those of Ray's workers and those that the system gives to connections: Ray binds the last of them ten
    seconds later."""
    ports: set[int] = set()
    while len(ports) < number:
        port = random.randrange(20_000, 32_768)
        with suppress(OSError), socket.create_server(("", port)):
            ports.add(port)
    return sorted(ports)
