"""A process that plays episodes, forked from the zygote: it makes an environment for each and answers its calls.

After an episode that left no task, thread or process the caller may have it play another one: environment variables and
the directory are as they were before; what modules keep stays.

It waits for the next call, which its caller's end of the connection ends; a call ends as the environment pleases, or
by the SIGKILL that the caller has the zygote send. All processes that the environment starts join its group.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import socket
import traceback
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NoReturn

from flowrl.environments import exchange
from flowrl.environments.failure import EnvironmentFailed
from flowrl.environments.find import FoundEnvironment
from flowrl.environments.one_thread import one_thread_left
from flowrl.environments.player import Player, seed_global_state
from flowrl.environments.protocol import can_save
from flowrl.errors import ConfigError
from flowrl.orphans import adopt_orphans, child_pids
from flowrl.tasks import child

RESERVE_BYTES = 64 << 20
"""Memory beyond the limit, in which an episode that ran out of it can say so."""
ENDS_WITHIN_S = 1.0
"""For threads and tasks of an episode that is over: libraries end theirs a moment later."""


def play(
    found: FoundEnvironment, connection: socket.socket, output: int, *, zygote: int, memory_bytes: int
) -> NoReturn:
    """The whole life of the process. `output` takes what it prints."""
    status = 1
    try:
        os.setpgid(0, 0)
        child.die_with_parent()
        adopt_orphans()
        if os.getppid() != zygote:
            os._exit(1)
        _redirect(output)
        _limit_memory(memory_bytes)
        asyncio.run(_serve(found, connection))
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
    """Data of its own: a limit of the address space would also count what threads and libraries merely reserve."""
    most = _data_bytes() + memory_bytes
    _reserve[:] = [most + RESERVE_BYTES] * 2
    resource.setrlimit(resource.RLIMIT_DATA, (most, most + RESERVE_BYTES))


def _data_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            return int(line.split()[1]) << 10
    return 0


_reserve: list[int] = []
"""The limit with the reserve; made beforehand, because out of memory nothing can be made."""


async def _serve(found: FoundEnvironment, connection: socket.socket) -> None:
    reader, writer = await asyncio.open_connection(sock=connection)
    variables, directory = dict(os.environ), os.getcwd()
    while await asyncio.create_task(_play_one(found, reader, writer)):  # a task's context variables end with it
        os.environ.clear()
        os.environ.update(variables)
        os.chdir(directory)


async def _play_one(found: FoundEnvironment, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
    """Play one episode. Whether this process plays another one."""
    tasks, executor = asyncio.all_tasks(), ThreadPoolExecutor(thread_name_prefix="asyncio")
    asyncio.get_running_loop().set_default_executor(executor)
    episode = _Episode(found)
    failed = again = False
    while not episode.closed:
        try:
            request = await child.receive(reader)
        except (asyncio.IncompleteReadError, ConnectionError):
            return False
        answer = await _answer(episode, request)
        failed |= "answer" not in answer
        if episode.closed and request["again"] and not failed:
            again = answer["answer"] = await _left_nothing(tasks, executor)
        writer.write(child.packed(answer))
        await writer.drain()
    return again


async def _left_nothing(before: set[asyncio.Task[Any]], executor: ThreadPoolExecutor) -> bool:
    """Whether nothing of an episode that is over runs any more: no task, no thread, no process."""
    executor.shutdown(wait=False, cancel_futures=True)
    if left := asyncio.all_tasks() - before:
        await asyncio.wait(left, timeout=ENDS_WITHIN_S)
    return asyncio.all_tasks() <= before and one_thread_left(ENDS_WITHIN_S) and not child_pids()


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

    def _made(self, seed: int) -> Player:
        seed_global_state(seed)
        self._player = Player(self._found.text, self._found.make)
        return self._player
