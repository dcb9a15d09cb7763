"""Episodes whose environments, tools or agents fail at a moment, which the generator, a stand-in, tells them."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flowrl import Graph
from flowrl.episode import Reply, Turn
from flowrl.models import Policy
from flowrl.models.tool_characters import tool_tokenizer
from flowrl.nodes import AgentProgram, Environment, EnvironmentSource, GroupAdvantage, Limits, TaskSource, TokenBatch
from flowrl.tasks import Task
from tests import fault_parts
from tests.fault_parts import VARIABLE, Fault
from tests.graphs_episodes.played import Speaker, Training

FILE = str(Path(fault_parts.__file__))
NAMED = re.compile(r"pid (\d+) (\d+)")
FOUND_S = 0.5
"""For so long a checkpoint waits for an episode that can fail."""
CALL = {"id": "c1", "type": "function", "function": {"name": "probe", "arguments": '{"text": "7"}'}}


class Meddling(Speaker):
    """Makes the fault happen in others while it samples, or while a checkpoint is taken."""

    cpus = 1

    async def setup(self) -> None:
        self.tokenizer = tool_tokenizer()
        self.fault = Fault.of_variable()
        self.asking: dict[str, int] = {}
        (Path(self.fault.directory) / fault_parts.GENERATOR).write_text(str(os.getpid()))

    async def answer(self, turn: Turn) -> Reply:
        named = NAMED.findall(self.tokenizer.decode(turn.token_ids.tolist()))
        if named:
            self.asking[turn.request_id] = int(named[-1][0])
        try:
            if self.fault.moment == "generating" and turn.turn and self.fault.is_due("generating"):
                await self.meddle(turn)
            reply = await super().answer(turn)
        finally:
            self.asking.pop(turn.request_id, None)
        if self.fault.target == "generator" and self.fault.way == "garbage" and self.fault.is_due("step"):
            return replace(reply, malformed="ValueError: no call", message={"role": "assistant", "content": "<"})
        if self.fault.target == "tool" and turn.turn + 1 < fault_parts.TURNS:
            return replace(reply, message={"role": "assistant", "content": "", "tool_calls": [CALL]})
        return reply

    async def meddle(self, turn: Turn) -> None:
        """To the process that waits for this turn."""
        if self.fault.target == "generator":
            self.fault.happen()
        elif turn.request_id in self.asking and self.fault.target != "client":
            os.kill(self.asking[turn.request_id], signal.SIGUSR1)
            await asyncio.sleep(0.1)  # it takes the signal, before it gets the reply

    async def snapshot(self) -> dict[str, Any]:
        """A checkpoint is being taken."""
        if self.fault.target == "generator" and self.fault.is_due("checkpoint"):
            self.fault.happen()
        waiting: list[int] = []
        ends_s = time.monotonic() + FOUND_S * (self.fault.moment == "checkpoint")
        while not waiting and time.monotonic() < ends_s:
            waiting = self.in_a_tool() if self.fault.target == "tool" else list(self.asking.values())
            await asyncio.sleep(0.01)  # episodes go on until they ask
        random.shuffle(waiting)
        for pid in waiting:
            if self.fault.is_due("checkpoint"):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGUSR1)
        await asyncio.sleep(0.05)  # they take the signal while the checkpoint is taken
        return {}

    def in_a_tool(self) -> list[int]:
        """Processes that are in one."""
        return [int(path.name.removeprefix("tool-")) for path in Path(self.fault.directory).glob("tool-*")]

    async def resume(self) -> None:
        """The checkpoint is taken."""


@dataclass(frozen=True)
class Config:
    agents: bool = False
    group_size: int = 3
    groups_per_step: int = 2
    retries: int = 1
    reset_s: float = 8.0
    step_s: float = 2.0
    fault: str = ""
    """What the variable of the fault says; every process that builds the graph tells it its children."""


def graph(cfg: Config) -> Graph:
    g = Graph("faulty")
    if cfg.fault:
        os.environ[VARIABLE] = cfg.fault
    limits = Limits(tokens=400, retries=cfg.retries, reset_s=cfg.reset_s)
    task, name = Task("arithmetic:min_value=30"), f"{FILE}:FaultyEnv"
    policy = Policy("tiny_agent", task=task)
    player: Environment | AgentProgram
    if cfg.agents:
        source: Any = TaskSource(task, repeat=cfg.group_size)
        limits = replace(limits, episode_s=cfg.step_s + 3)
        player = AgentProgram(policy, agent=f"{FILE}:agent", limits=limits, processes=8, idle_s=60.0)
    else:
        source = EnvironmentSource(name, repeat=cfg.group_size)
        player = Environment(name, policy, limits=replace(limits, step_s=cfg.step_s))
    prompts = g.add("prompts", source)
    episodes = g.add("player", player)
    speaker = g.add("generator", Meddling())
    advantage = g.add("advantage", GroupAdvantage(size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.05))
    g.connect(prompts.prompts, episodes.prompts)
    g.call(episodes.generate, speaker.turns, affinity_margin=2)
    g.connect(episodes.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    g.admit(prompts.prompts, until=speaker.weights, staleness=2)
    return g
