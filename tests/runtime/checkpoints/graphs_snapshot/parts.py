"""Nodes that the graphs here share."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import numpy as np

from flowrl import In, Node, Out, Prompt
from flowrl.errors import SampleFailed
from tests.runtime.checkpoints.snapshot_rig import SEEN

NUM_PROMPTS = 40


def prompt(index: int, *, of: str = "s", group_size: int = 1) -> Prompt:
    group, member = divmod(index, group_size)
    ids = np.arange(3, dtype=np.int32)
    return Prompt(f"{of}{index}", f"g{group}", f"p{index}", 0, member, group_size, index, "t", ids)


class Source(Node):
    """Admits groups of prompts one after the other."""

    prompts: Out[Prompt]

    def __init__(self, group_size: int = 1) -> None:
        self.group_size = group_size
        self.next = 0

    async def run(self) -> None:
        while self.next < NUM_PROMPTS:
            members = range(self.next, self.next + self.group_size)
            if not await self.prompts.admit([prompt(i, group_size=self.group_size) for i in members]):
                return
            self.next += self.group_size

    def state(self) -> Mapping[str, Any]:
        return {"next": self.next}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.next = state["next"]


class Work(Node):
    """Passes prompts on after `seconds` each; fails every `fails`-th, at once."""

    prompts: In[Prompt]
    out: Out[Prompt]

    def __init__(self, seconds: float, concurrency: int, *, note: bool = False, fails: int = 0) -> None:
        self.seconds = seconds
        self.concurrency = concurrency
        self.note = note
        self.fails = fails

    async def run(self) -> None:
        await self.prompts.each(self.work, concurrency=self.concurrency)

    async def work(self, prompt: Prompt) -> None:
        if self.out.was_sent():
            return
        if self.note:
            SEEN.append((self.context.replica, prompt.sample_id))
        if self.fails and int(prompt.sample_id.removeprefix("s")) % self.fails == 0:
            raise SampleFailed("bad luck")
        await asyncio.sleep(self.seconds * (1 + 2 * self.context.replica))  # of virtual time: unequally slow
        await self.out.send(prompt)


class Sink(Node):
    """Takes its time, and notes what came."""

    prompts: In[Prompt]

    def __init__(self, seconds: float = 0) -> None:
        self.seconds = seconds

    async def run(self) -> None:
        async for item in self.prompts:
            await asyncio.sleep(self.seconds)  # slow, in virtual time
            SEEN.append(item.sample_id)
