"""What a generator does to make faults happen in others: it knows who waits for a reply, and when a checkpoint is."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flowrl.messages.episode import Reply, Turn
from tests.faults.fault_parts import GENERATOR, GENERATORS, TURNS, Fault

NAMED = re.compile(r"pid (\d+) (\d+)")
FOUND_S = 0.5
"""For so long a checkpoint waits for an episode that can fail."""
CALL = {"id": "c1", "type": "function", "function": {"name": "probe", "arguments": '{"text": "7"}'}}


class Moments:
    """The moments of a fault, in the process of a generator. Making one says that the run has begun.

    `named`: whether this is the generator that the fault happens to, if it does to one.
    """

    def __init__(self, tokenizer: Any, *, named: bool = True) -> None:
        self.tokenizer = tokenizer
        self.fault = Fault.of_variable()
        self.asking: dict[str, int] = {}
        """Request -> the process that waits for it."""
        if named:
            (Path(self.fault.directory) / GENERATOR).write_text(str(os.getpid()))

    @asynccontextmanager
    async def generating(self, turn: Turn) -> AsyncIterator[None]:
        """Around the sampling of a reply."""
        named = NAMED.findall(self.tokenizer.decode(turn.token_ids.tolist()))
        if named:
            self.asking[turn.request_id] = int(named[-1][0])
        try:
            if self.fault.moment == "generating" and turn.turn and self.fault.is_due("generating"):
                await self._meddle(turn)
            yield
        finally:
            self.asking.pop(turn.request_id, None)

    async def _meddle(self, turn: Turn) -> None:
        """To the process that waits for this turn."""
        if self.fault.target in GENERATORS:
            self.fault.happen()
        elif turn.request_id in self.asking and self.fault.target != "client":
            os.kill(self.asking[turn.request_id], signal.SIGUSR1)
            await asyncio.sleep(0.1)  # it takes the signal, before it gets the reply

    def said(self, turn: Turn, reply: Reply) -> Reply:
        """The reply as the episode gets it: garbage, or a call of the tool where that is to fail."""
        if self.fault.target == "generator" and self.fault.way == "garbage" and self.fault.is_due("step"):
            return replace(reply, malformed="ValueError: no call", message={"role": "assistant", "content": "<"})
        if self.fault.target == "tool" and turn.turn + 1 < TURNS:
            return replace(reply, malformed="", message={"role": "assistant", "content": "", "tool_calls": [CALL]})
        return reply

    async def checkpoint(self) -> None:
        """A checkpoint is being taken; replies go on until this returns."""
        if self.fault.target in GENERATORS and self.fault.is_due("checkpoint"):
            self.fault.happen()
        waiting: list[int] = []
        ends_s = time.monotonic() + FOUND_S * (self.fault.moment == "checkpoint")
        while not waiting and time.monotonic() < ends_s:
            waiting = self._in_a_tool() if self.fault.target == "tool" else list(self.asking.values())
            await asyncio.sleep(0.01)  # episodes go on until they ask
        random.shuffle(waiting)
        for pid in waiting:
            if self.fault.is_due("checkpoint"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(0.05)  # they take the signal while the checkpoint is taken

    def _in_a_tool(self) -> list[int]:
        """Processes that are in one."""
        return [int(path.name.removeprefix("tool-")) for path in Path(self.fault.directory).glob("tool-*")]
