"""The caller's side of the zygote: starts it, makes it fork and kill, and receives its reports of exits.

Waits: `start` for the import, ended by its limit or the zygote's death; `Birth.exited` for the zygote's report, ended
by the zygote's death. A zygote that neither takes nor reports anything within KILLED_WITHIN_S, while it has to kill an
episode or messages wait for it, counts as dead and is killed: its children then get their parent-death signal.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgpack

from flowrl.errors import ConfigError
from flowrl.tasks.user_code import program_variables

KEPT_BYTES = 8192
READ_BYTES = 1 << 16
READS = 64
"""Number of reads for the last lines; together they take more than a pipe holds."""


class Output:
    """A pipe for a process's standard output and error. Only one event loop may use it. Owns both ends.

    Keeps the last `kept_bytes`; if it is `copied`, it also goes to this process's standard output.
    """

    def __init__(self, *, kept_bytes: int = KEPT_BYTES, copied: bool = False) -> None:
        self._end = b""
        self._kept_bytes, self._copied = kept_bytes, copied
        self._source, self.target = os.pipe()
        """`target` is for the process; call `handed_over` when the process has it."""
        os.set_blocking(self._source, False)
        asyncio.get_running_loop().add_reader(self._source, self._read_output)

    def handed_over(self) -> None:
        """Close this process's copy of the target."""
        if self.target >= 0:
            os.close(self.target)
            self.target = -1

    def _read_output(self) -> bool:
        """Read what has arrived; False if there is nothing more for now."""
        try:
            found = os.read(self._source, READ_BYTES)
        except BlockingIOError:
            return False
        if not found:
            asyncio.get_running_loop().remove_reader(self._source)
        if self._copied:
            os.write(1, found)
        self._end = (self._end + found)[-self._kept_bytes :]
        return bool(found)

    def tail(self, lines: int = 20) -> str:
        """The last lines; "" if nothing was printed. They are complete if the process has ended."""
        if self._source >= 0:
            for _ in range(READS):  # bounded, because the process, or one that it has started, may keep printing
                if not self._read_output():
                    break
        return "\n".join(self._end.decode(errors="replace").rstrip().splitlines()[-lines:])

    def forget_output(self) -> None:
        """Leave out of `tail` what was printed until now."""
        self.tail()
        self._end = b""

    def close_output(self) -> None:
        """Stop reading."""
        self.handed_over()
        if self._source >= 0:
            asyncio.get_running_loop().remove_reader(self._source)
            os.close(self._source)
            self._source = -1


def with_tail(text: str, tail: str) -> str:
    """A text, followed by what was printed last."""
    return f"{text}; its last output:\n{tail}" if tail else text


MESSAGE_BYTES = 1 << 16
"""Control messages are shorter than this."""
KILLED_WITHIN_S = 10.0
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS")
"""Variables that keep libraries from starting threads at import if they are 1."""


@dataclass(frozen=True)
class Exit:
    """How an episode's process ended."""

    status: int | None
    """Negative for a signal; None if it is not known."""
    text: str = ""
    event: str = ""
    """The event that ended all processes of that time, if it has ended this process."""


@dataclass(eq=False)
class Birth:
    """An episode's process, from the request to fork it."""

    number: int
    exited: asyncio.Future[Exit]
    """Done when the process, its group and what it left behind are gone."""
    pid: int | None = None


class ZygoteClient:
    """One zygote, from `start` to its death or `stop`. Only one event loop may use it."""

    def __init__(self, name: str, *, memory_bytes: int, start_s: float, keep_variables: Sequence[str] = ()) -> None:
        self._name, self._memory_bytes, self._start_s = name, memory_bytes, start_s
        self._keep_variables = keep_variables
        self._births: dict[int, Birth] = {}
        self._killed: set[int] = set()
        """Numbers of the processes that are to be killed and whose exit has not been reported."""
        self._numbers = 0
        self.output = Output()
        self._control, self._theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._control.setblocking(False)
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._process: asyncio.subprocess.Process | None = None
        self._unsent: deque[tuple[bytes, tuple[int, ...]]] = deque()
        """Messages for which the socket had no room, each with its own copies of the descriptors."""
        self._moved_s = 0.0
        """When the zygote last took a message or reported something."""
        self._watch: asyncio.TimerHandle | None = None
        """Set while the zygote has to take a message or report something."""
        self.dead = False

    @property
    def pid(self) -> int | None:
        """The zygote's pid; None before it is started."""
        return None if self._process is None else self._process.pid

    async def start_zygote(self) -> None:
        """Start the zygote and wait for its import. Raises ConfigError for a mistake of the user in the name."""
        mine = {
            **dict.fromkeys(ONE_THREAD, "1"),
            "JE_ARROW_MALLOC_CONF": "background_thread:false",  # pyarrow's allocator starts a thread when imported
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONHASHSEED": "0",  # the same seed has to repeat the order of sets
        }
        module, control = "flowrl.environments.episode_processes.zygote_child", self._theirs.fileno()
        command = (sys.executable, "-u", "-m", module, self._name, str(control), str(self._memory_bytes))
        try:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=self.output.target,
                stderr=self.output.target,
                pass_fds=(control,),
                env=program_variables(mine, keep=self._keep_variables),
            )
            self._theirs.close()
            self.output.handed_over()
            asyncio.get_running_loop().add_reader(self._control.fileno(), self._receive_report)
            async with asyncio.timeout(self._start_s):
                await self._ready
        except TimeoutError:
            await self.stop_zygote(at_once=True)
            raise ConfigError(
                f"environment {self._name!r} is not imported after {self._start_s:g} s; raise reset_s, or import less"
            ) from None
        except BaseException:  # a start that was cancelled or refused leaves no process
            await self.stop_zygote(at_once=True)
            raise

    def fork_process(self, connection: socket.socket, output: int) -> Birth:
        """Ask for an episode's process with these ends of its connection and its output."""
        self._numbers += 1
        birth = Birth(self._numbers, asyncio.get_running_loop().create_future())
        self._births[birth.number] = birth
        self._send_message({"fork": birth.number}, (connection.fileno(), output))
        return birth

    def kill_episode(self, birth: Birth) -> None:
        """Have an episode's process and its group killed; `birth.exited` is done when they are gone."""
        if birth.exited.done():
            return
        self._send_message({"kill": birth.number})
        self._killed.add(birth.number)
        self._expect_report()

    def _send_message(self, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
        """Send the message now, or as soon as the socket has room: many episodes may begin and end at once."""
        packed = msgpack.packb(message)
        try:
            if not self._unsent:
                socket.send_fds(self._control, [packed], descriptors)
                return
        except BlockingIOError:
            pass
        except OSError:  # the zygote is dead
            self.kill_now()
            return
        if not self._unsent:
            asyncio.get_running_loop().add_writer(self._control.fileno(), self._send_more)
        self._unsent.append((packed, tuple(map(os.dup, descriptors))))
        self._expect_report()

    def _send_more(self) -> None:
        while self._unsent:
            packed, descriptors = self._unsent[0]
            try:
                socket.send_fds(self._control, [packed], descriptors)
            except BlockingIOError:
                return
            except OSError:
                self.kill_now()
                return
            self._moved_s = time.monotonic()
            self._unsent.popleft()
            for descriptor in descriptors:
                os.close(descriptor)
        asyncio.get_running_loop().remove_writer(self._control.fileno())

    def _expect_report(self) -> None:
        """From now on the zygote has to take or report something in time, until it has no message to take and nothing
        to kill."""
        if self._watch is None and not self.dead:
            self._moved_s = time.monotonic()
            self._watch = asyncio.get_running_loop().call_later(KILLED_WITHIN_S, self._look_after_kills)

    def _look_after_kills(self) -> None:
        self._watch = None
        if not (self._unsent or self._killed) or self.dead:
            return
        left_s = self._moved_s + KILLED_WITHIN_S - time.monotonic()
        if left_s <= 0:
            self.kill_now()
        else:
            self._watch = asyncio.get_running_loop().call_later(left_s, self._look_after_kills)

    def kill_now(self) -> None:
        """Kill the zygote, and with it all episodes."""
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                self._process.kill()
        self._on_death()

    async def stop_zygote(self, *, at_once: bool = False) -> None:
        """End the zygote, and with it all episodes. Returns when all of them are gone."""
        if at_once:
            self.kill_now()
        self._shut_socket()
        if self._process is not None:
            try:
                await asyncio.wait_for(asyncio.shield(self._process.wait()), KILLED_WITHIN_S)
            except (TimeoutError, asyncio.CancelledError) as problem:
                self.kill_now()
                if isinstance(problem, asyncio.CancelledError):
                    raise
                await self._process.wait()
        self._on_death()

    def _receive_report(self) -> None:
        try:
            message = self._control.recv(MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            message = b""
        if not message:
            self._on_death()
            return
        self._moved_s = time.monotonic()
        report: dict[str, Any] = msgpack.unpackb(message)
        if "ready" in report and not self._ready.done():
            self._ready.set_result(None)
        if "refused" in report and not self._ready.done():
            self._ready.set_exception(ConfigError(report["refused"]))
        if "forked" in report and (birth := self._births.get(report["forked"])):
            birth.pid = report["pid"]
        if "exited" in report and (birth := self._births.pop(report["exited"], None)):
            self._killed.discard(birth.number)
            birth.exited.set_result(Exit(report["status"], report["text"]))

    def _on_death(self) -> None:
        """Every episode's process dies with the zygote by its parent-death signal. Its group does not, and is killed
        here."""
        self.dead = True
        self._shut_socket()
        births, self._births = self._births, {}
        self._killed.clear()
        for birth in births.values():
            if birth.pid is not None:
                # Pids are assigned cyclically, so this number still belongs to the group, or to nothing.
                with suppress(ProcessLookupError, PermissionError):
                    os.killpg(birth.pid, signal.SIGKILL)
            birth.exited.set_result(Exit(None, "the process that starts episodes ended", f"zygote {self.pid}"))
        if not self._ready.done():
            text = f"environment {self._name!r}: its process ended while it imported the package"
            self._ready.set_exception(ConfigError(with_tail(text, self.output.tail())))
            self._ready.exception()  # mark it as retrieved: there may be no waiter
        self.output.tail()
        self.output.close_output()

    def _shut_socket(self) -> None:
        if self._control.fileno() >= 0:
            asyncio.get_running_loop().remove_reader(self._control.fileno())
            asyncio.get_running_loop().remove_writer(self._control.fileno())
            self._control.close()
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        while self._unsent:
            for descriptor in self._unsent.popleft()[1]:
                os.close(descriptor)
        self._theirs.close()
