"""The start of flowrl's own Ray: it has the time that the user gives it, and says what it waits for.

Ray has limits of its own, which a machine with a high load exceeds. Most of them are settings (`ray_settings`), and two
are constants of Ray 2.60:

- The raylet ends itself if its agents, Python processes that import modules for seconds, have not told it their ports
  within 15 s (ray-project/ray#65983). So the ports are chosen here, and told to both before they start.
- Ray's library looks for the raylet for 30 s, in one call that waits: after these, the call is repeated here.

Ray has no options for three more things, so its library is changed while it starts:

- Its processes have their own process groups: `timeout` and some job schedulers send SIGTERM to the whole process group
  of a command, and Ray's raylet would then end the run before the driver can write its checkpoint.
- API server, autoscaler and log reader are not started: on two cores a start takes 3.8 to 4.8 s without them, and 6.2
  to 7.4 s with them, even with `include_dashboard=False`.
- What it prints in the driver about errors in its own processes is left out: flowrl itself reports what has died and
  what follows.

Waits: `unless_ended` waits for a call's end, the end of one of Ray's processes, or a time. It looks every LOOK_EVERY_S,
because the processes start while the call runs.
"""

from __future__ import annotations

import math
import os
import random
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotDone
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

from flowrl.machine.orphans import has_ended

STARTS = 3
"""Largest number of times that Ray is started."""
PORTS = ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port", "runtime_env_agent_port")
"""Ray's parameters with the ports of its agents; 0: the agent chooses."""
PORTS_FROM, PORTS_TO = 20_000, 32_768
"""Between the ports of Ray's workers and those that the system gives to connections: an agent binds its port late."""
NEEDS_A_PORT = ("Timed out waiting for file", "Address already in use", "address already in use", "Failed to bind")
"""What Ray's processes log if a port was not told in time, or if another program has taken it since it was chosen."""
AGAIN = "Ray's raylet has ended, because a port of its agents was taken or not told in time. Ray is started again"
LOOK_EVERY_S = 0.1
TOLD_AFTER_S = 30.0
"""Time after which the user is told that Ray's start takes long."""
NOT_STARTED, LOG_READER = ("start_api_server", "start_monitor"), "start_log_monitor"
"""The methods of Ray's library that start these processes for its head."""
PRINTS = "print_to_stdstream"
"""The function of Ray's library that prints these texts, and the output of other processes if `log_to_driver` is on."""
LOGS = ("raylet.err", "raylet.out", "gcs_server.out", "dashboard_agent.log", "runtime_env_agent.log")
LAST_LINES = 2
"""Number of lines of each log that an error shows."""
LINE_LENGTH = 200
HEALTH_PERIOD_S = 3
"""Ray's time between two looks at the health of a raylet."""
LOGS_KEPT = 10
"""Number of directories with the logs of earlier Rays that stay: one has some 400 KB, and Ray removes none."""


def ray_settings(limit_s: float) -> dict[str, str]:
    """Environment variables by which Ray's processes wait for each other for so long. The kernel tells the driver of
    the end of any of them, so that no run waits for a process that has ended."""
    seconds = max(1, round(limit_s))
    return {
        "RAY_gcs_server_port_wait_time_s": str(seconds),
        "RAY_gcs_rpc_server_connect_timeout_s": str(seconds),
        "RAY_agent_register_timeout_ms": str(1000 * seconds),
        "RAY_worker_register_timeout_seconds": str(seconds),
        "RAY_health_check_failure_threshold": str(max(5, seconds // HEALTH_PERIOD_S)),
    }


@contextmanager
def change_library(limit_s: float, given_up: threading.Event, *, logs: bool) -> Iterator[None]:
    """Inside, Ray's library starts its processes as this module says, and looks for its raylet for `limit_s` seconds,
    or until the start is given up. With `logs`, it starts the log reader.

    What a version of Ray names otherwise stays as it is there.
    """
    from ray import _raylet
    from ray._private import services
    from ray._private.node import Node

    start, find = getattr(Node, "start_ray_processes", None), getattr(services, "get_node", None)
    persist = getattr(_raylet, "persist_port", None)
    until_s = time.monotonic() + limit_s

    def start_with_ports(node: Any) -> None:
        for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True):
            if not getattr(node._ray_params, name, None):
                setattr(node._ray_params, name, port)
            # The raylet waits for the file of a port that Ray's library does not pass on to it.
            if persist is not None:
                persist(node._session_dir, node._node_id, name, getattr(node._ray_params, name))
        assert start is not None
        start(node)

    def find_patiently(*args: Any) -> Any:
        while True:
            try:
                assert find is not None
                return find(*args)
            except RuntimeError:  # the raylet has not registered yet
                if time.monotonic() >= until_s or given_up.wait(LOOK_EVERY_S):
                    raise

    with ExitStack() as changes:
        if start is not None:
            changes.enter_context(mock.patch.object(Node, "start_ray_processes", start_with_ports))
        if find is not None:
            changes.enter_context(mock.patch.object(services, "get_node", find_patiently))
        if (popen := getattr(services, "ConsolePopen", None)) is not None:  # its children share the process group
            changes.enter_context(mock.patch.object(services, "ConsolePopen", partial(popen, process_group=0)))
        for name in NOT_STARTED if logs else (*NOT_STARTED, LOG_READER):
            if hasattr(Node, name):
                changes.enter_context(mock.patch.object(Node, name, lambda node, **settings: None))
        yield


def keep_quiet() -> None:
    """Make Ray's library print none of these texts in this process. A version that prints in another way still does."""
    from ray._private import worker

    if hasattr(worker, PRINTS):
        setattr(worker, PRINTS, lambda data, *settings, **more: None)


def free_ports(number: int) -> list[int]:
    """Ports on which no process of this machine listens."""
    ports: set[int] = set()
    while len(ports) < number:
        with suppress(OSError), socket.create_server(("", port := random.randrange(PORTS_FROM, PORTS_TO))):
            ports.add(port)
    return list(ports)


def remove_old_logs(directory: Path) -> None:
    """Remove all but the newest LOGS_KEPT directories of Rays in `directory` whose driver has ended.

    Ray names one `session_DATE_TIME_MICROSECONDS_PID`, with the driver's process id.
    """
    found = directory.glob("session_2*_*")
    ended = [path for path in found if not Path("/proc", path.name.rpartition("_")[2]).exists()]
    for path in sorted(ended)[:-LOGS_KEPT]:
        shutil.rmtree(path, ignore_errors=True)


def may_start_again(logs: Path, process: str) -> bool:
    """Whether Ray's process with this name, whose logs are in `logs`, has ended for want of a port."""
    said = "".join(_read_log(logs / name) for name in LOGS)
    return process == "raylet" and any(text in said for text in NEEDS_A_PORT)


def describe_wait(processes: Mapping[str, int]) -> str:
    """What a start of Ray waits for, which has these processes by now."""
    if "gcs_server" not in processes:
        return "its gcs_server, which has not begun"
    if "raylet" not in processes:
        return "its gcs_server, which does not answer yet"
    return "its raylet, which has not registered yet"


def describe_load() -> str:
    """How busy this machine is, in words."""
    return f"the load of this machine is {os.getloadavg()[0]:.0f} on {os.cpu_count()} cores"


def last_lines(logs: Path) -> str:
    """The end of each log of Ray, each in a line of its own after a sentence; "" if there is none."""
    found = []
    for name in LOGS:
        lines = [line for line in _read_log(logs / name).splitlines() if line.strip()]
        found += [f"\n  {name}: {line[:LINE_LENGTH]}" for line in lines[-LAST_LINES:]]
    return f". The last lines of Ray's logs in {logs}:{''.join(found)}" if found else ""


def _read_log(path: Path) -> str:
    with suppress(OSError):
        return path.read_text(errors="replace", encoding="utf-8")
    return ""


R = TypeVar("R")


class TookTooLong(Exception):
    """The call has not ended in time; it is still running."""


class ProcessEnded(Exception):
    """One of the processes has ended before the call."""

    def __init__(self, name: str, call: Future[Any]) -> None:
        super().__init__(name)
        self.name = name
        self.call = call
        """The call, which is still running."""


def unless_ended(
    call: Callable[[], R],
    processes: Callable[[], Mapping[str, int]],
    *,
    within_s: float = math.inf,
    told_after_s: float = math.inf,
    tell: Callable[[], None] = lambda: None,
) -> R:
    """The result of `call()`. `processes()` returns name -> pid of the processes that run, or are zombies, now.
    `tell()` is called once if the call takes `told_after_s` or longer.

    Raises what `call` raises, or ProcessEnded, or TookTooLong after `within_s`; `call` then continues in a daemon
    thread, and its result is dropped. The thread never ends: if it did, the kernel would also end the processes that
    `call` has started and that ask for this (Ray's do).
    """
    result: Future[R] = Future()
    threading.Thread(target=_call_and_wait, args=(result, call), daemon=True).start()
    handles: dict[str, int] = {}
    start_s = time.monotonic()
    try:
        while True:
            with suppress(NotDone):
                return result.result(LOOK_EVERY_S)
            took_s = time.monotonic() - start_s
            if took_s >= within_s:
                raise TookTooLong
            if took_s >= told_after_s:
                told_after_s = math.inf
                tell()
            for name, pid in processes().items():
                if name not in handles:
                    with suppress(ProcessLookupError):
                        handles[name] = os.pidfd_open(pid)
            for name, handle in handles.items():
                if has_ended(handle) and not result.done():
                    raise ProcessEnded(name, result)
    finally:
        for handle in handles.values():
            os.close(handle)


def _call_and_wait(result: Future[R], call: Callable[[], R]) -> None:
    try:
        result.set_result(call())
    except BaseException as error:  # it is raised in the thread that waits
        result.set_exception(error)
    threading.Event().wait()
