"""The zygote: a process with one thread that has imported an environment's package and forks the processes of episodes.

Control messages arrive over one socket, one message in each packet. `fork` carries the ends of the episode's connection
and of its output; `kill` names an episode. The zygote reports `forked` with the pid, and `exited` with the status when
the episode's process, its group and everything that it left behind are gone.

An episode's process adopts its orphans while it lives, and the zygote does after that. So a child of the zygote that is
no episode's process was left by one that has ended, and is killed.

Waits: for messages, deaths of children, SIGTERM and the end of the socket, all at once. When the caller is gone, or its
thread has ended (SIGTERM, requested as the parent-death signal), the zygote kills all episodes and ends.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress
from typing import Any

import msgpack

from flowrl.environments.episode_processes import episode_child
from flowrl.environments.episode_processes.one_thread import num_threads
from flowrl.environments.episode_processes.zygote import MESSAGE_BYTES
from flowrl.environments.find import FoundEnvironment, find_environment
from flowrl.environments.player import seed_global_state
from flowrl.errors import ConfigError
from flowrl.machine.orphans import adopt_orphans, die_with_parent, end_children


def main(text: str, control: socket.socket, memory_bytes: int) -> None:
    """The life of the process."""
    die_with_parent()
    control.set_inheritable(False)
    try:
        found = find_environment(text)
        found.before_fork()
        _check_threads(text)
    except ConfigError as problem:
        control.send(msgpack.packb({"refused": str(problem)[: MESSAGE_BYTES // 8]}))
        return
    seed_global_state(0)  # numpy and torch load their generators at first use: here, once for all episodes
    gc.collect()
    gc.freeze()  # a collection in a child would write to, and so copy, the pages of every object
    adopt_orphans()
    serving = Zygote(found, control, memory_bytes)
    die_with_parent(signal.SIGTERM)
    with suppress(BrokenPipeError, ConnectionResetError):
        control.send(msgpack.packb({"ready": True}))
        serving.serve()
    serving.end()


def _check_threads(text: str) -> None:
    if (threads := num_threads()) > 1:
        raise ConfigError(
            f"environment {text!r} has {threads - 1} thread(s) running after its import, and a process forked from it "
            "could hang; start threads in reset instead of at import"
        )


class Zygote:
    """The processes of the episodes that are being played."""

    def __init__(self, found: FoundEnvironment, control: socket.socket, memory_bytes: int) -> None:
        self._found, self._control, self._memory_bytes = found, control, memory_bytes
        self._episodes: dict[int, int] = {}
        """pid -> number of the episode."""
        self._told_to_end = False
        self._wakeup, wakes = os.pipe()
        self._wakes = wakes
        os.set_blocking(self._wakeup, False)
        os.set_blocking(wakes, False)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.signal(signal.SIGTERM, self._on_term)
        signal.set_wakeup_fd(wakes, warn_on_full_buffer=False)

    def _on_term(self, number: int, frame: Any) -> None:
        self._told_to_end = True

    def serve(self) -> None:
        """Serve until the caller is gone."""
        with selectors.DefaultSelector() as selector:
            for source in (self._control.fileno(), self._wakeup):
                selector.register(source, selectors.EVENT_READ)
            while not self._told_to_end:
                ready = {key.fd for key, _ in selector.select()}
                if self._wakeup in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup, MESSAGE_BYTES)
                self._reap()
                if self._control.fileno() in ready and not self._receive(selector):
                    return

    def end(self) -> None:
        """Kill all episodes, and wait until no child is left."""
        for pid in self._episodes:
            _kill(pid)
        while self._episodes:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._report_exit(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT))
        end_children(but=self._episodes)

    def _receive(self, selector: selectors.BaseSelector) -> bool:
        """Do what one message asks for. Returns False if the caller is gone."""
        message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 2)
        if not message:
            return False
        asked = msgpack.unpackb(message)
        if "fork" in asked:
            self._fork(asked["fork"], descriptors, selector)
        for pid, episode in self._episodes.items():
            if episode == asked.get("kill"):
                _kill(pid)
        return True

    def _fork(self, episode: int, descriptors: list[int], selector: selectors.BaseSelector) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as problem:
            self._send({"exited": episode, "status": None, "text": f"no process could be started: {problem.strerror}"})
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            selector.close()
            for descriptor in (self._wakeup, self._wakes, self._control.detach()):
                os.close(descriptor)
            connection = socket.socket(fileno=descriptors[0])
            episode_child.play(self._found, connection, descriptors[1], zygote=zygote, memory_bytes=self._memory_bytes)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            with suppress(OSError):  # the child has done this itself, or has ended
                os.setpgid(pid, pid)
            self._episodes[pid] = episode
            self._send({"forked": episode, "pid": pid})

    def _reap(self) -> None:
        with suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                self._report_exit(ended)

    def _report_exit(self, ended: Any) -> None:
        """Kill the group of a child that has ended, reap the child, and report its exit. The pid is not reused before
        `waitpid`, so the group that is killed is the child's."""
        pid: int = ended.si_pid
        episode = self._episodes.pop(pid, None)
        with suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end_children(but=self._episodes)
        if episode is not None:
            self._send({"exited": episode, "status": status, "text": ""})

    def _send(self, message: dict[str, Any]) -> None:
        self._control.send(msgpack.packb(message))


def _kill(pid: int) -> None:
    """Kill a child and its group, or only the child if it has no group of its own yet."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
