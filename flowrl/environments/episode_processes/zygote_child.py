"""The zygote: a process with one thread that has imported an environment's package; and the processes of episodes that
it forks.

Control messages arrive over one socket, one message in each packet. `fork` carries the ends of the episode's connection
and of its output; `kill` names an episode. The zygote reports `forked` with the pid, and `exited` with the status when
the episode's process, its group and everything that it left behind are gone.

An episode's process adopts its orphans while it lives, and the zygote does after that. So a child of the zygote that is
no episode's process was left by one that has ended, and is killed.

The zygote waits for messages, deaths of children, SIGTERM and the end of the socket, all at once. When the caller is
gone, or its thread has ended (SIGTERM, requested as the parent-death signal), the zygote kills all episodes and ends.

The process of an episode makes an environment for it and answers its calls. After an episode that has left no task,
thread or process, the caller may let the process play another one, in a new event loop. Environment variables, working
directory and similar state are restored before (`ProcessState`); state that modules keep stays. The process waits for
the next call until the caller closes its end of the connection. A call ends when the environment returns, or by the
SIGKILL that the zygote sends at the caller's request. All processes that the environment starts join the group of this
process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import msgpack

from flowrl.environments.environment_class import FoundEnvironment, find_environment
from flowrl.environments.episode_processes.zygote import MESSAGE_BYTES
from flowrl.environments.open_episode import EnvironmentFailed, Player, num_threads, one_thread_left, seed_global_state
from flowrl.environments.protocol import as_plain, can_save, read_action
from flowrl.errors import ConfigError
from flowrl.machine.orphans import adopt_orphans, child_pids, die_with_parent, end_children
from flowrl.tasks.user_code import keep_to_this_process, pack_message, receive_message

RESERVE_BYTES = 64 << 20
"""Memory beyond the limit, with which an episode that has run out of memory can report it."""
ENDS_WITHIN_S = 0.1
"""Time for threads and tasks of an episode that is over to end: those of libraries end a moment later."""
MOST_KEPT = 0.25
"""Share of the process's memory limit that earlier episodes in it may keep."""


def play_episodes(
    found: FoundEnvironment, connection: socket.socket, output: int, *, zygote: int, memory_bytes: int
) -> NoReturn:
    """The whole life of the process. `output` takes what it prints. It plays episodes until none is to follow."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        adopt_orphans()
        if os.getppid() != zygote:
            os._exit(1)
        null = os.open(os.devnull, os.O_RDONLY)
        for source, target in ((null, 0), (output, 1), (output, 2)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)
        for name in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(name, signal.SIG_DFL)
        keep_to_this_process(connection)

        # The data segment is limited: a limit of the address space would count what libraries only reserve, too.
        most = data_bytes() + memory_bytes
        _reserve[:] = [most + RESERVE_BYTES] * 2
        resource.setrlimit(resource.RLIMIT_DATA, (most, most + RESERVE_BYTES))
        most_kept = data_bytes() + int(MOST_KEPT * memory_bytes)

        before = ProcessState()
        while asyncio.run(_play_one(found, connection.dup(), most_kept)):  # what is left in the loop ends with it
            before.put_back()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the process ends here, and says why in its output
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def data_bytes() -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


_reserve: list[int] = []
"""The limit with the reserve; created beforehand, because nothing can be created when memory has run out."""


class ProcessState:
    """The state of the process, apart from its modules, that an episode may change, as it was when this was created."""

    def __init__(self) -> None:
        self._variables, self._search = dict(os.environ), list(sys.path)
        self._outputs = sys.stdout, sys.stderr
        self._directory = os.open(".", os.O_PATH)  # its path may be renamed or removed
        self._umask = os.umask(0)
        os.umask(self._umask)

    def put_back(self) -> None:
        os.environ.clear()
        os.environ.update(self._variables)
        sys.path[:] = self._search
        sys.stdout, sys.stderr = self._outputs
        os.fchdir(self._directory)
        os.umask(self._umask)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


async def _play_one(found: FoundEnvironment, connection: socket.socket, most_bytes: int) -> bool:
    """Play one episode. Returns whether this process plays another one, for which it may have at most `most_bytes` of
    data."""
    keep_to_this_process(connection)
    reader, writer = await asyncio.open_connection(sock=connection)
    executor = ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(executor)
    episode = _Episode(found)
    failed = again = False
    while not episode.closed:
        try:
            request = await receive_message(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        answer = await answer_call(episode, request)
        failed |= "answer" not in answer
        if episode.closed and request["again"] and not failed:
            episode.player = None  # so that it can be collected as garbage
            again = answer["answer"] = await _left_nothing(executor) and data_bytes() <= most_bytes
        writer.write(pack_message(answer))
        await writer.drain()
    writer.close()
    await writer.wait_closed()
    return again


async def _left_nothing(executor: ThreadPoolExecutor) -> bool:
    """Whether no task, thread or process of an episode that is over still runs. Also collects the episode's garbage."""
    executor.shutdown(wait=False, cancel_futures=True)
    until_s = time.monotonic() + ENDS_WITHIN_S
    if left := asyncio.all_tasks() - {asyncio.current_task()}:
        _, running = await asyncio.wait(left, timeout=ENDS_WITHIN_S)
        if running:
            return False
    gc.collect()  # garbage would count towards the limit of the next episode
    reap_children()
    return one_thread_left(until_s - time.monotonic()) and not child_pids()


def reap_children() -> None:
    """Reap children that have ended and that nothing has waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def answer_call(episode: _Episode, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": await episode.answer_call(request)}
    except EnvironmentFailed as failed:
        if failed.cause == "env_out_of_memory":
            resource.setrlimit(resource.RLIMIT_DATA, _reserve)  # type: ignore[arg-type]
        return {"cause": failed.cause, "text": str(failed)}
    except MemoryError:
        resource.setrlimit(resource.RLIMIT_DATA, _reserve)  # type: ignore[arg-type]
        return {"cause": "env_out_of_memory", "text": f"{request['call']} ran out of memory"}
    except ConfigError as refused:
        return {"refused": str(refused)}


class _Episode:
    """The calls that the process answers."""

    def __init__(self, found: FoundEnvironment) -> None:
        self._found = found
        self.player: Player | None = None
        self.closed = False

    async def answer_call(self, request: Mapping[str, Any]) -> Any:
        match request["call"]:
            case "try":
                env = self._found.make_environment()
                await env.close()
                return {"seats": env.seats, "replays": env.replays, "saves": can_save(type(env))}
            case "reset":
                player = self._make_environment(request["seed"])
                observations = await player.reset(request["task"], request["seed"])
                return [as_plain(one) for one in observations]
            case "restore":
                await self._make_environment(request["seed"]).restore(request["state"])
            case "step":
                assert self.player is not None
                return as_plain(await self.player.step(read_action(request["action"]), request["seat"]))
            case "save":
                assert self.player is not None
                return self.player.save()
            case "close":
                self.closed = True
                if self.player is not None:
                    await self.player.close()
        return None

    def _make_environment(self, seed: int) -> Player:
        seed_global_state(seed)
        self.player = Player(self._found.text, self._found.make)
        return self.player


def main(text: str, control: socket.socket, memory_bytes: int) -> None:
    """The life of the process."""
    die_with_parent()
    control.set_inheritable(False)
    try:
        found = find_environment(text)
        found.before_fork()
        if (threads := num_threads()) > 1:
            raise ConfigError(
                f"environment {text!r} has {threads - 1} thread(s) running after its import, and a process forked from "
                "it could hang; start threads in reset instead of at import"
            )
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
        serving.serve_messages()
    serving.end_processes()


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

    def serve_messages(self) -> None:
        """Serve until the caller is gone."""
        with selectors.DefaultSelector() as selector:
            for source in (self._control.fileno(), self._wakeup):
                selector.register(source, selectors.EVENT_READ)
            while not self._told_to_end:
                ready = {key.fd for key, _ in selector.select()}
                if self._wakeup in ready:
                    with suppress(BlockingIOError):
                        os.read(self._wakeup, MESSAGE_BYTES)
                with suppress(ChildProcessError):
                    while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                        self._report_exit(ended)
                if self._control.fileno() not in ready:
                    continue
                message, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE_BYTES, 2)
                if not message:
                    return
                asked = msgpack.unpackb(message)
                if "fork" in asked:
                    self._fork_process(asked["fork"], descriptors, selector)
                for pid, episode in self._episodes.items():
                    if episode == asked.get("kill"):
                        kill_group(pid)

    def end_processes(self) -> None:
        """Kill all episodes, and wait until no child is left."""
        for pid in self._episodes:
            kill_group(pid)
        while self._episodes:
            with suppress(BrokenPipeError, ConnectionResetError):
                self._report_exit(os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT))
        end_children(but=self._episodes)

    def _fork_process(self, episode: int, descriptors: list[int], selector: selectors.BaseSelector) -> None:
        zygote = os.getpid()
        try:
            pid = os.fork()
        except OSError as problem:
            self._send_report(
                {"exited": episode, "status": None, "text": f"no process could be started: {problem.strerror}"}
            )
            pid = -1
        if pid == 0:
            signal.set_wakeup_fd(-1)
            selector.close()
            for descriptor in (self._wakeup, self._wakes, self._control.detach()):
                os.close(descriptor)
            connection = socket.socket(fileno=descriptors[0])
            play_episodes(self._found, connection, descriptors[1], zygote=zygote, memory_bytes=self._memory_bytes)
        for descriptor in descriptors:
            os.close(descriptor)
        if pid > 0:
            with suppress(OSError):  # the child has done this itself, or has ended
                os.setpgid(pid, pid)
            self._episodes[pid] = episode
            self._send_report({"forked": episode, "pid": pid})

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
            self._send_report({"exited": episode, "status": status, "text": ""})

    def _send_report(self, message: dict[str, Any]) -> None:
        self._control.send(msgpack.packb(message))


def kill_group(pid: int) -> None:
    """Kill a child and its group, or only the child if it has no group of its own yet."""
    for kill in (os.kill, os.killpg):
        with suppress(ProcessLookupError):
            kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1], socket.socket(fileno=int(sys.argv[2])), int(sys.argv[3]))
