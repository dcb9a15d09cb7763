"""Environments that do what an action tells them, right or wrong."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import gc
import io
import json
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.environments import Action, Env, Observation, Step
from flowrl.tasks.user_code import LENGTH, pack_message

KEPT: list[str] = []
"""What a process keeps from one episode to the next."""
SEEN: contextvars.ContextVar[str] = contextvars.ContextVar("SEEN", default="")


def said(text: object, **fields: Any) -> Step:
    return Step(Observation(str(text)), **fields)


class Obedient(Env):
    """Does what an action says, and what `at_reset` says when it is reset."""

    def __init__(self, at_reset: str = "", closed: str = "") -> None:
        self.at_reset, self.closed = at_reset, closed

    async def reset(self, task: Mapping[str, Any], seed: int) -> Any:
        if self.at_reset:
            return await self.obey(self.at_reset)
        return Observation(json.dumps({"pid": os.getpid(), **task}))

    async def step(self, action: Action) -> Step:
        return await self.obey(action.text)

    async def close(self) -> None:
        if self.closed:
            self.note("closed")

    def note(self, text: str) -> None:
        with open(self.closed, "a") as file:
            file.write(f"{text}\n")

    async def obey(self, text: str) -> Any:
        order, _, argument = text.partition(" ")
        found = getattr(self, f"do_{order}")(*([argument] if argument else []))
        return await found if asyncio.iscoroutine(found) else found

    def do_echo(self, text: str = "") -> Step:
        return said(text, reward=1.5, metrics={"length": len(text)}, max_tokens=7, stop=("\n",))

    def do_end(self) -> Step:
        return said("over", terminated=True)

    def do_loaded_here(self) -> Step:
        """Whether numpy's generators were loaded in this process: what was before the fork is not collected."""
        mine = vars(np.random)
        return said(any(one is mine for one in gc.get_objects()))

    def do_raise(self) -> Step:
        raise LookupError("no such move")

    def do_refused(self) -> Step:
        raise ConnectionRefusedError("nobody listens")

    def do_cancelled(self) -> Step:
        raise asyncio.CancelledError

    def do_late(self) -> Step:
        raise TimeoutError("of its own")

    def do_hang(self, fifo: str = "") -> Step:
        if fifo:
            Path(fifo).write_text(str(os.getpid()))
        while True:
            time.sleep(1000)  # the step that hangs

    async def do_await(self, fifo: str = "") -> Step:
        if fifo:
            await asyncio.to_thread(Path(fifo).write_text, str(os.getpid()))
        return await asyncio.get_running_loop().create_future()

    def do_exit(self) -> Step:
        os._exit(3)

    def do_sysexit(self) -> Step:
        sys.exit(4)

    def do_kill(self) -> Step:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError

    def do_objects(self) -> Step:
        held: list[tuple[int]] = []
        while True:
            held.append((len(held),))

    def do_array(self) -> Step:
        return said(np.ones(1 << 31, np.uint8).sum())

    def do_none(self) -> Any:
        return None

    def do_nan(self) -> Step:
        return said("", reward=float("nan"))

    def do_text(self) -> Any:
        return Step("text")  # type: ignore[arg-type]

    def do_garbage(self) -> Step:
        return self.written(b"\xff" * 100)

    def do_nonsense(self) -> Step:
        return self.written(LENGTH.pack(3) + b"\xc1\xc1\xc1")

    def do_stranger(self) -> Step:
        return self.written(pack_message([1, 2]))

    def do_half(self) -> Step:
        return self.written(pack_message({"answer": {"observation": {"text": 3}}}))

    def written(self, data: bytes) -> Step:
        """To every socket: one of them leads to the caller."""
        for link in list(Path("/proc/self/fd").iterdir()):
            if os.path.lexists(link) and os.readlink(link).startswith("socket:"):
                with socket.socket(fileno=os.dup(int(link.name))) as one:
                    one.send(data)
        return said("written")

    def do_print(self) -> Step:
        for number in range(200_000):
            print("line", number)
        print("to stderr", file=sys.stderr)
        raise LookupError("after much output")

    def do_random(self) -> Step:
        return said([random.random(), float(np.random.rand()), list({"a", "b", "c", "d", "e", "f"})])

    def do_processes(self) -> Step:
        """The pids of a child, its child, and one that has left both group and parent."""
        code = (
            "import subprocess, sys, os, time\n"
            "inner = subprocess.Popen(['sleep', '1000'])\n"
            "print(os.getpid(), inner.pid, flush=True)\n"
            "time.sleep(1000)\n"  # until it is killed
        )
        outer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
        assert outer.stdout is not None
        leaving = "import subprocess; print(subprocess.Popen(['sleep', '1000'], stdout=2, start_new_session=True).pid)"
        left = subprocess.run(
            [sys.executable, "-c", leaving], stdout=subprocess.PIPE, text=True, check=True, stdin=subprocess.DEVNULL
        )
        return said(f"{os.getpid()} {outer.stdout.readline().strip()} {left.stdout.strip()}")

    def do_keep(self, text: str) -> Step:
        """Change all that may outlive an episode."""
        KEPT.append(text)
        SEEN.set(text)
        os.environ["ONE_EPISODE"] = text
        os.chdir("/")
        os.umask(0)
        sys.path.insert(0, text)
        sys.stdout = io.StringIO()
        return said("kept")

    def do_kept(self) -> Step:
        umask = os.umask(0)
        os.umask(umask)
        around = [os.getcwd(), umask, sys.path[0], isinstance(sys.stdout, io.StringIO)]
        return said([KEPT, SEEN.get(), os.environ.get("ONE_EPISODE"), *around])

    async def do_leave_in_loop(self) -> Step:
        """What may be called later although no task waits for it. Says where to write, for one that reads."""
        loop = asyncio.get_running_loop()
        loop.call_later(0.3, KEPT.append, "a timer")
        read, write = os.pipe()
        loop.add_reader(read, KEPT.append, "a reader")
        signal.signal(signal.SIGALRM, lambda *_: KEPT.append("an alarm"))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        return said(write)

    async def do_write_and_sleep(self, descriptor: str) -> Step:
        os.write(int(descriptor), b"x")
        await asyncio.sleep(0.4)  # what was left would be called meanwhile
        return said(KEPT)

    def do_fill(self, megabytes: str) -> Step:
        """Memory that only the garbage collector frees."""
        self.itself, self.filled = self, bytearray(int(megabytes) << 20)
        return said("filled")

    def do_cache(self, megabytes: str) -> Step:
        KEPT.append("x" * (int(megabytes) << 20))
        return said("kept")

    def do_foreign_thread(self) -> Step:
        """A thread that Python has not started, knows, and cannot join."""
        done = threading.Event()
        _thread.start_new_thread(lambda: done.set() if threading.current_thread() else None, ())
        done.wait()
        return said([type(thread).__name__ for thread in threading.enumerate()])

    def do_remove_directory(self) -> Step:
        os.chdir(path := tempfile.mkdtemp())
        os.rmdir(path)
        return said("removed")

    def do_ended_child(self) -> Step:
        """A process that has ended, and for which nobody waits."""
        self.child = subprocess.Popen(["true"])
        os.waitid(os.P_PID, self.child.pid, os.WEXITED | os.WNOWAIT)
        return said("it has ended")

    def do_print_line(self, text: str) -> Step:
        print(text, flush=True)
        return said("printed")

    async def do_to_thread(self) -> Step:
        """A thread that the event loop keeps for later calls."""
        return said(await asyncio.to_thread(os.getpid))

    def do_thread(self) -> Step:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()  # it does not end by itself
        return said("left a thread")

    def do_task(self) -> Step:
        self.task = asyncio.create_task(asyncio.Event().wait())
        return said("left a task")

    def do_last_moment(self) -> Step:
        """A task and a thread that end soon after the episode."""
        self.task = asyncio.create_task(asyncio.sleep(0))  # it ends in the next tick
        threading.Thread(target=time.sleep, args=(0.05,)).start()
        return said("left them")

    def do_bomb(self) -> Step:
        """Processes that double until 64 of them wait."""
        for _ in range(6):
            os.fork()
        signal.pause()
        raise AssertionError


class Cooperative(Obedient):
    """The same, in the caller's event loop."""

    cooperative = True


class Counter(Env):
    """A sum that can be saved."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.total = seed
        return Observation(str(seed))

    async def step(self, action: Action) -> Step:
        self.total += int(action.text)
        return said(self.total, terminated=self.total >= 10, reward=self.total)

    def save(self) -> bytes:
        return str(self.total).encode()

    def restore(self, state: bytes) -> None:
        self.total = int(state)


class Duel(Env):
    """Two seats; the higher bid wins."""

    seats = 2
    replays = False

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        return Observation("You are first."), Observation("You are second.")

    async def step(self, action: Action, seat: int = 0) -> Step:
        if seat == 0:
            self.bid = int(action.text)
            return Step((Observation(), Observation("Bid.")), (0.0, 0.0))
        won = int(action.text) > self.bid
        return Step((Observation(), Observation()), (float(not won), float(won)), terminated=True)


class Lonely(Duel):
    """Forgets a seat."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> tuple[Observation, ...]:
        return (Observation("alone"),)


class NotAsync(Env):
    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    def step(self, action: Action) -> Step:  # type: ignore[override]
        return said("")


class Refusing(Env):
    def __init__(self, size: int = 3) -> None:
        raise ValueError(f"size {size} is too small")

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation()

    async def step(self, action: Action) -> Step:
        return said("")


class Unfinished(Env):
    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        return Observation()
