"""A process that plays episodes, forked from the zygote: it makes an environment for each and answers its calls.

After an episode that has left no task, thread or process, the caller may let the process play another one, in a new
event loop. Environment variables, working directory and similar state are restored before (`ProcessState`); state that
modules keep stays.

The process waits for the next call until the caller closes its end of the connection. A call ends when the environment
returns, or by the SIGKILL that the zygote sends at the caller's request. All processes that the environment starts join
the group of this process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
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

from flowrl.environments.episode_processes import exchange
from flowrl.environments.episode_processes.one_thread import one_thread_left
from flowrl.environments.failure import EnvironmentFailed
from flowrl.environments.find import FoundEnvironment
from flowrl.environments.player import Player, seed_global_state
from flowrl.environments.protocol import can_save
from flowrl.errors import ConfigError
from flowrl.machine.orphans import adopt_orphans, child_pids, die_with_parent
from flowrl.tasks.user_code import keep_to_this_process, pack_message, receive_message

RESERVE_BYTES = 64 << 20
"""Memory beyond the limit, with which an episode that has run out of memory can report it."""
ENDS_WITHIN_S = 0.1
"""Time for threads and tasks of an episode that is over to end: those of libraries end a moment later."""
MOST_KEPT = 0.25
"""Share of the process's memory limit that earlier episodes in it may keep."""


def play(
    found: FoundEnvironment, connection: socket.socket, output: int, *, zygote: int, memory_bytes: int
) -> NoReturn:
    """The whole life of the process. `output` takes what it prints."""
    status = 1
    try:
        os.setpgid(0, 0)
        die_with_parent()
        adopt_orphans()
        if os.getppid() != zygote:
            os._exit(1)
        _redirect(output)
        keep_to_this_process(connection)
        _limit_memory(memory_bytes)
        _serve(found, connection, _data_bytes() + int(MOST_KEPT * memory_bytes))
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # the process ends here, and says why in its output
        traceback.print_exc()
    finally:
        os._exit(status & 0xFF)


def _redirect(output: int) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    for name in (signal.SIGTERM, signal.SIGCHLD):
        signal.signal(name, signal.SIG_DFL)


def _limit_memory(memory_bytes: int) -> None:
    """Limit the data segment: a limit of the address space would also count what threads and libraries only reserve."""
    most = _data_bytes() + memory_bytes
    _reserve[:] = [most + RESERVE_BYTES] * 2
    resource.setrlimit(resource.RLIMIT_DATA, (most, most + RESERVE_BYTES))


def _data_bytes() -> int:
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


def _serve(found: FoundEnvironment, connection: socket.socket, most_bytes: int) -> None:
    """Play episodes until none is to follow. What an episode leaves in its event loop ends with that loop."""
    before = ProcessState()
    while asyncio.run(_play_one(found, connection.dup(), most_bytes)):
        before.put_back()


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
        answer = await _answer(episode, request)
        failed |= "answer" not in answer
        if episode.closed and request["again"] and not failed:
            episode.forget()
            again = answer["answer"] = await _left_nothing(executor) and _data_bytes() <= most_bytes
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
    _reap()
    return one_thread_left(until_s - time.monotonic()) and not child_pids()


def _reap() -> None:
    """Reap children that have ended and that nothing has waited for."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


async def _answer(episode: _Episode, request: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"answer": await episode.call(request)}
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
        self._player: Player | None = None
        self.closed = False

    async def call(self, request: Mapping[str, Any]) -> Any:
        match request["call"]:
            case "try":
                env = self._found.made()
                await env.close()
                return {"seats": env.seats, "replays": env.replays, "saves": can_save(type(env))}
            case "reset":
                player = self._made(request["seed"])
                observations = await player.reset(request["task"], request["seed"])
                return [exchange.plain(one) for one in observations]
            case "restore":
                await self._made(request["seed"]).restore(request["state"])
            case "step":
                assert self._player is not None
                return exchange.plain(await self._player.step(exchange.action(request["action"]), request["seat"]))
            case "save":
                assert self._player is not None
                return self._player.save()
            case "close":
                self.closed = True
                if self._player is not None:
                    await self._player.close()
        return None

    def forget(self) -> None:
        """Drop the environment, so that it can be collected as garbage."""
        self._player = None

    def _made(self, seed: int) -> Player:
        seed_global_state(seed)
        self._player = Player(self._found.text, self._found.make)
        return self._player
