"""What fails on purpose in agent_faults.py: an environment with a tool, and agents. All of it runs in children.

The fault is told by the variable FLOWRL_TEST_FAULT. Where a child cannot know the moment (while the generator samples,
while a checkpoint is taken), the stand-in of the generator sends it SIGUSR1; that is why observations name the process.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import struct
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from flowrl.environments import Action, Env, Observation, Step
from flowrl.environments.tools import Tools

VARIABLE = "FLOWRL_TEST_FAULT"
TURNS = 3
STEP_S = 0.05
TOOL_S = 1.0
"""Limit of a tool's call."""
FOREVER_S = 3600.0
GARBAGE = b"\xff\xff\xff\xff garbage"
GENERATOR = "generator"
"""File with the id of the generator's process; it is there when the run has begun, and not in the trial before it."""
GENERATORS = ("generator", "replica")
"""Targets: the only generator, or one of several."""
OUTSIDE = ("generating", "checkpoint")
"""Moments at which a signal tells a child that they have come."""


@dataclass(frozen=True)
class Fault:
    target: str
    way: str
    moment: str
    directory: str
    times: int

    @staticmethod
    def of_variable() -> Fault:
        return Fault(**json.loads(os.environ[VARIABLE]))

    @property
    def told(self) -> str:
        """The variable's value."""
        return json.dumps(asdict(self))

    def is_due(self, moment: str) -> bool:
        """Whether it happens now. It does `times` times in a run, whichever processes come first."""
        begun = (Path(self.directory) / GENERATOR).exists()
        if self.target in GENERATORS:  # a killed one is to leave something to resume
            begun = begun and any(Path(self.directory).glob("run/checkpoints/step_*"))
        if moment != self.moment or not begun:
            return False
        for number in range(self.times):
            try:
                (Path(self.directory) / f"fault-{number}").touch(exist_ok=False)
                return True
            except FileExistsError:
                continue
        return False

    def happen(self) -> None:
        """To the process that calls it, to the one that started it, to the generator's, or on a new connection."""
        if self.target == "client":
            self._on_connection()
            return
        pid = os.getppid() if self.target == "zygote" else os.getpid()
        if self.target in GENERATORS:
            pid = int((Path(self.directory) / GENERATOR).read_text())
        match self.way:
            case "kill":
                os.kill(pid, signal.SIGKILL)
            case "stop":
                os.kill(pid, signal.SIGSTOP)
            case "hang":
                time.sleep(FOREVER_S)  # this is the fault
            case "garbage":
                for descriptor in sockets():
                    os.write(descriptor, GARBAGE)

    def _on_connection(self) -> None:
        """A client of the endpoint asks and leaves, asks half and waits, or says garbage."""
        whole = self.moment in OUTSIDE
        connection = asked(whole=whole)
        time.sleep(STEP_S / 2 if whole else 0)  # now the policy is sampled
        match self.way:
            case "kill":
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.close()
            case "stop":
                left_open.append(connection)
            case "garbage":
                connection.sendall(GARBAGE)
                left_open.append(connection)

    def listen(self) -> None:
        """Let the signal of the generator make it happen."""
        signal.signal(signal.SIGUSR1, lambda number, frame: self.happen())

    def reward(self) -> float:
        """One that nobody else has; it is noted, so that a reward which nobody gave is known."""
        number = int.from_bytes(os.urandom(6)) / (1 << 48)
        with (Path(self.directory) / "rewards").open("a") as file:
            file.write(f"{number!r}\n")
        return number

    @property
    def shown(self) -> str:
        """What an observation begins with."""
        signalled = self.moment in OUTSIDE and self.target not in GENERATORS
        return f"pid {os.getpid()} {os.getppid()} " if signalled else "go "


def sockets() -> list[int]:
    """This process's, the connection to its caller among them."""
    found = [int(name) for name in os.listdir("/proc/self/fd")]
    return [one for one in found if one > 2 and _is_socket(one)]


def _is_socket(descriptor: int) -> bool:
    try:
        return stat.S_ISSOCK(os.fstat(descriptor).st_mode)
    except OSError:
        return False


# An environment and its tool


def probe(text: str) -> Any:
    """Says what it was told.

    Args:
        text: Anything.
    """
    fault = Fault.of_variable()
    if fault.target != "tool":
        return text
    if fault.is_due("step"):
        if fault.way == "garbage":
            return object()
        fault.happen()
    if fault.moment == "checkpoint":
        running = Path(fault.directory) / f"tool-{os.getpid()}"
        running.touch()
        time.sleep(TOOL_S / 3)  # a checkpoint is to find it here
        running.unlink()
    return text


TOOLS = Tools([probe], call_s=TOOL_S)


class FaultyEnv(Env):
    """TURNS turns; a reply with calls of the tool is answered by it."""

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.fault, self.left = Fault.of_variable(), TURNS
        self.fault.listen()
        self.at("reset")
        return Observation(f"{self.fault.shown}{seed}", tools=TOOLS.descriptions)

    async def step(self, action: Action) -> Step:
        time.sleep(STEP_S)  # noqa: ASYNC251 (so slow is the environment)
        self.left -= 1
        self.at("step" if self.left else "scoring")
        if not self.left:
            return Step(Observation(), reward=self.fault.reward(), terminated=True)
        if not action.tool_calls:
            return Step(Observation(f"{self.left} to go"))
        results = [await TOOLS.execute(call, limit_s=TOOL_S) for call in action.tool_calls]
        answers = [{"role": "tool", "content": result.text, "name": "probe"} for result in results]
        return Step(Observation(messages=answers))

    def at(self, moment: str) -> None:
        if self.fault.target != "tool" and self.fault.is_due(moment):
            self.fault.happen()


# Agents


async def agent(client: Any, task: Mapping[str, Any]) -> float:
    """TURNS replies, with its own work between them."""
    fault = Fault.of_variable()
    fault.listen()
    messages: list[Any] = [{"role": "user", "content": fault.shown}]
    for number in range(TURNS):
        if fault.is_due("step" if number else "reset") or (fault.target == "client" and fault.is_due("generating")):
            fault.happen()
        answer = await client.chat.completions.create(model="policy", messages=messages)
        messages += [answer.choices[0].message.to_dict(), {"role": "user", "content": "more"}]
    if fault.is_due("scoring"):
        fault.happen()
    return fault.reward()


left_open: list[socket.socket] = []
"""Connections that their client forgot."""


def asked(*, whole: bool) -> socket.socket:
    """A connection on which a request was sent, or half of it."""
    address = urlsplit(os.environ["OPENAI_BASE_URL"])
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": "one more"}]}).encode()
    head = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: {address.netloc}\r\n"
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    connection = socket.create_connection((address.hostname, address.port))
    connection.sendall(head + body if whole else head + body[: len(body) // 2])
    return connection
