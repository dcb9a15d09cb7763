"""Parts of graphs whose episodes a checkpoint finds half done: environments, and vLLM as a clock that says letters."""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from flowrl.agents.call_parser import ParsedReply
from flowrl.environments import Action, Env, Observation, Step
from flowrl.messages.sampling import Sampling
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes.generation.completions import Completion
from flowrl.nodes.generation.generator import Generator, Standby
from flowrl.nodes.generation.responses import Prefix, Responses
from flowrl.nodes.generation.vllm_processes import engine_died

TOKENIZER = character_tokenizer()
LETTERS = TOKENIZER("abc")["input_ids"]
(END,) = TOKENIZER("<|end|>")["input_ids"]


@dataclass
class Seen:
    """What happened in one life of a run."""

    life: int = 0
    slow: float = 1.0
    """How many times longer than usual a step takes."""
    resets: int = 0
    steps: int = 0
    restored: int = 0
    sampled: Counter[str] = field(default_factory=Counter)
    """Request -> number of its tokens that were sampled."""
    prefixed: Counter[str] = field(default_factory=Counter)
    """Request -> number of tokens that it came with."""
    ending: int = 0
    """Requests that a checkpoint found ended, with their result under way."""
    pauses_s: list[float] = field(default_factory=list)
    """How long generators stood still for a checkpoint."""


SEEN = Seen()


def new_life(*, slow: float = 1.0) -> None:
    """Forget what was seen; the environments know that it is another life."""
    SEEN.__dict__.update(Seen(life=SEEN.life + 1, slow=slow).__dict__)


class Paced(Env):
    """`turns` turns; what it shows follows from its seed and the actions."""

    cooperative = True

    def __init__(self, turns: int = 6, step_s: float = 0.1) -> None:
        self.turns, self.step_s = turns, step_s

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        await asyncio.sleep(self.step_s / 2)  # in virtual time
        SEEN.resets += 1
        self.seed, self.heard = seed, [0]
        return Observation(f"{seed}?", metrics={"time": random.random()})

    async def step(self, action: Action) -> Step:
        await asyncio.sleep(self.step_s * SEEN.slow)  # in virtual time
        SEEN.steps += 1
        self.heard.append(len(action.text))
        text = f"{self.seed + sum(self.heard)}{self.mark()}"
        reward, over = float(len(action.text) % 2), len(self.heard) > self.turns
        return Step(Observation(text), reward=reward, terminated=over, metrics={"time": random.random()})

    def mark(self) -> str:
        return ""


class Drifting(Paced):
    """Shows something else in each life of the run, from its second step on."""

    def mark(self) -> str:
        return str(SEEN.life % 10) if len(self.heard) > 2 else ""


class Once(Drifting):
    """Says that it does not replay."""

    replays = False


class Saving(Once):
    """Does not replay, but saves its state."""

    def save(self) -> bytes:
        return json.dumps([self.seed, self.heard]).encode()

    def restore(self, state: bytes) -> None:
        self.seed, self.heard = json.loads(state)
        SEEN.restored += 1


class Clock:
    """Stands for the sampler: a letter every `token_s`, and a moment between a request's end and its result.

    From `dies_s` of the loop's time on its engine is dead.
    """

    tokenizer = TOKENIZER

    def __init__(self, token_s: float, dies_s: float = math.inf) -> None:
        self.token_s, self.dies_s = token_s, dies_s
        self.parts: dict[str, list[int] | None] = {}
        self.version = -1

    def required(self) -> AbstractAsyncContextManager[None]:
        """There is no engine process that could end."""
        return nullcontext()

    async def complete(
        self, request_id: str, token_ids: Sequence[int], sampling: Sampling, *, generated: int, seed: int, **_: Any
    ) -> Completion:
        key = request_id.partition("#")[0]
        draws, part = random.Random(sampling.vllm_arguments(generated=generated, seed=seed)["seed"]), list[int]()
        if generated:
            SEEN.prefixed[key] = generated
        self.parts[request_id] = part
        try:
            while (not part or part[-1] != END) and len(part) + generated < sampling.max_tokens:
                await asyncio.sleep(self.token_s)  # in virtual time
                part.append(END if draws.random() < 0.15 else draws.choice(LETTERS))
                SEEN.sampled[key] += 1
                self.require_alive(part)
            self.parts[request_id] = None
            await asyncio.sleep(self.token_s / 2)  # in virtual time
        finally:
            del self.parts[request_id]
        return self.completion(part, "stop" if part[-1] == END else "length")

    def require_alive(self, part: Sequence[int] = ()) -> None:
        if asyncio.get_running_loop().time() >= self.dies_s:
            death = engine_died()
            death.arrived = self.completion(part, "")
            raise death

    def so_far(self, request_id: str) -> Completion | None:
        part = self.parts.get(request_id, [])
        SEEN.ending += part is None
        return None if part is None else self.completion(part, "")

    def completion(self, part: Sequence[int], reason: str) -> Completion:
        logprobs = [-(1 + at % 7) / 8 for at, _ in enumerate(part)]
        return Completion.copy_of(part, logprobs, [self.version] * len(part), reason)

    def decode_text(self, token_ids: Any) -> str:
        return str(TOKENIZER.decode(token_ids))

    def close(self) -> None:
        pass


class Parser:
    """A reply is its text."""

    def parse(self, reply: Any, context: Any, tools: Any = ()) -> ParsedReply:
        text = TOKENIZER.decode([token for token in reply.tolist() if token != END])
        return ParsedReply({"role": "assistant", "content": text}, "")


class Speaker(Generator):
    """The generator without vLLM and without weights."""

    cpus = 0
    token_s = 0.02
    dies_s = 0.0
    """Seconds after which the engine of replica 1 dies; 0: never."""

    async def setup(self) -> None:
        internals: Any = self
        ends = bool(self.dies_s) and self.context.replica == 1
        dies_s = asyncio.get_running_loop().time() + self.dies_s if ends else math.inf
        internals._sampler, internals._parser, internals._receiver = Clock(self.token_s, dies_s), Parser(), Clock(0)
        internals._updates = self
        self._responses = Responses(internals._sampler, internals._updates, self._gate, self.context)
        self._standby = Standby(self.context, self.replica_name)

    @property
    def version(self) -> int:
        """As the node's updates have it."""
        sampler: Any = self._sampler
        return int(sampler.version)

    async def take_version(self, manifest: Any) -> bool:
        sampler: Any = self._sampler
        sampler.require_alive()
        sampler.version = manifest.version
        self._gate.open_for("weights")
        self.context.ledger.holds(self.replica_name, manifest.policy, manifest.version)
        return True

    async def snapshot(self) -> dict[str, Prefix]:
        self.stopped_s = asyncio.get_running_loop().time()
        return await super().snapshot()

    async def resume(self) -> None:
        SEEN.pauses_s.append(asyncio.get_running_loop().time() - self.stopped_s)
        await super().resume()

    def skip_version(self, manifest: Any) -> None:
        self.context.ledger.holds(self.replica_name, manifest.policy, manifest.version)
