"""Episodes in one process: the real environment node, and a generator and a trainer that compute nothing."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from benchmarks.runs.stages import SleepingTrainer
from flowrl import Graph, In, Node, Out, Serve, Weights
from flowrl.agents.chat_template import Templates
from flowrl.environments import Action, Env, Observation, Step
from flowrl.graph.node import Facts
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.models import Policy
from flowrl.models.tokens.characters import CHAT_TEMPLATE, character_tokenizer
from flowrl.nodes import Environment, EnvironmentSource, Evaluation, GroupAdvantage, Limits, TokenBatch
from flowrl.training.advantages import Estimate

TOKENS = 400


class Unsteady(Env):
    """One to `most` turns, by its seed. Each attempt fails with the chance `fails`, in one of three ways."""

    cooperative = True
    draws = random.Random(0)

    def __init__(self, fails: float = 0.0, step_s: float = 0.1, most: int = 4) -> None:
        self.fails, self.step_s, self.most = fails, step_s, most

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.left = 1 + seed % self.most
        self.fate = self.draws.choice(("raise", "hang", "garbage")) if self.draws.random() < self.fails else ""
        return Observation(f"{self.left} to go")

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.step_s)  # in virtual time
        self.left -= 1
        if self.fate and not self.left:
            return await self.fail()
        return Step(Observation(f"{self.left} to go"), reward=float(len(action.text) % 2), terminated=not self.left)

    async def fail(self) -> Any:
        if self.fate == "raise":
            raise LookupError("a bug of the environment")
        if self.fate == "hang":
            await asyncio.get_running_loop().create_future()
        return "garbage"


class Rewriting(Environment):
    """The template shows of earlier replies only what follows their last "c", as others drop reasoning."""

    def _load_tokenizer(self, model_dir: str) -> None:
        super()._load_tokenizer(model_dir)
        content, shown = "{{ message['content'] }}", "{{ message['content'].split('c')[-1] }}"
        choice = f"{{% if message['role'] == 'assistant' %}}{shown}{{% else %}}{content}{{% endif %}}"
        self._templates = Templates(character_tokenizer(chat_template=CHAT_TEMPLATE.replace(content, choice)))


class Speaker(Node):
    """Answers turns with a few random letters of the newest version."""

    turns: Serve[Turn, Reply]
    weights: In[Weights]

    def __init__(self) -> None:
        self.version = -1
        self.ready = asyncio.Event()
        self.tokenizer = character_tokenizer()

    async def run(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.follow())
            await self.ready.wait()
            await self.turns.each(self.answer, concurrency=64)

    async def follow(self) -> None:
        async for weights in self.weights:
            self.version = weights.version
            self.ready.set()
            self.context.ledger.holds(f"{self.name}/{self.context.replica}", weights.policy, weights.version)

    def says(self, draws: random.Random) -> str:
        return "".join(draws.choices("abc", k=draws.randrange(1, 6)))

    async def answer(self, turn: Turn) -> Reply:
        version, draws = self.version, random.Random(turn.seed)
        await asyncio.sleep(draws.random() * 0.1)  # in virtual time
        text = self.says(draws)
        ids = np.array(self.tokenizer(f"{text}<|end|>")["input_ids"], np.int32)
        reply = Reply(
            request_id=turn.request_id,
            token_ids=ids,
            behavior_logprobs=np.array([-draws.random() for _ in ids], np.float32),
            versions=np.full(ids.size, version, np.int32),
            finish_reason="stop",
            message={"role": "assistant", "content": text},
            malformed="",
            cached_tokens=0,
            queued_s=0.0,
            generated_s=0.0,
            generator=f"{self.name}/{self.context.replica}",
        )
        self.context.ledger.request(turn, reply)
        return reply


class Meddler(Node):
    """Changes one id of every episode between generator and trainer: in its last branch, if it has any."""

    episodes: In[Episode]
    out: Out[Episode]

    async def run(self) -> None:
        async for episode in self.episodes:
            *others, last = episode.sequences
            ids = last.token_ids.copy()
            ids[-1] += 1
            changed = replace(last, token_ids=ids)
            await self.out.send(replace(episode, branches=(*others[1:], changed)) if others else changed)


class Training(SleepingTrainer):
    cpus = 0

    def facts(self) -> Facts:
        return Facts(token_budget=4096)


@dataclass(frozen=True)
class Config:
    fails: float = 0.0
    retries: int = 2
    step_s: float = 0.1
    group_size: int = 3
    groups_per_step: int = 2
    staleness: int = 2
    generators: int = 1
    on_truncated: str = "train"
    most_turns: int = 32
    meddle: bool = False
    evaluate: int = 0
    most: int = 4
    history: str = "append"
    credit: str = "episode"
    environment: str = ""
    """In place of this file's."""


def graph(cfg: Config) -> Graph:
    g = Graph("played")
    name = f"{__file__}:Unsteady:fails={cfg.fails},step_s={cfg.step_s}" + (f",most={cfg.most}" if cfg.most != 4 else "")
    name = cfg.environment or name
    limits = Limits(
        tokens=TOKENS,
        retries=cfg.retries,
        step_s=1.0,
        turns=cfg.most_turns,
        on_truncated=cfg.on_truncated,  # type: ignore[arg-type]
    )
    source = g.add("prompts", EnvironmentSource(name, repeat=cfg.group_size))
    history: Any = cfg.history
    kind = Environment if cfg.history == "append" else Rewriting
    environment = g.add("environment", kind(name, Policy("tiny"), limits=limits, history=history))
    speaker = g.add("generator", Speaker(), replicas=cfg.generators)
    estimate = Estimate(credit=cfg.credit)  # type: ignore[arg-type]
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step, token_budget=4096))
    trainer = g.add("trainer", Training(0.2))
    g.connect(source.prompts, environment.prompts)
    g.call(environment.generate, speaker.turns, affinity_margin=2)
    if cfg.meddle:
        meddler = g.add("meddler", Meddler())
        g.connect(environment.episodes, meddler.episodes)
        g.connect(meddler.out, advantage.scored)
    else:
        g.connect(environment.episodes, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, speaker.weights)
    g.admit(source.prompts, until=speaker.weights, staleness=cfg.staleness)
    if cfg.evaluate:
        held_out = Evaluation((), Policy("tiny"), num_prompts=cfg.evaluate, environments=(name,))
        g.call(g.add("evaluation", held_out).play, environment.requests)
    return g
