"""Preference pairs for a reward model or DPO: two answers of one policy, of which the task's verifier prefers one.

flowrl run graphs/pairs.py --pairs pairs.jsonl --num-prompts 4000
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import Generator, PairMaker, PairWriter, PromptSource, Reward, Sampling
from flowrl.tasks import Task


@dataclass(frozen=True)
class Pairs:
    policy: str = "tiny"
    """tiny, smollm2, or the path of a Hugging Face model directory: whose answers are compared."""
    task: Task = Task("arithmetic")
    """arithmetic, reasoning_gym/NAME, a .jsonl file or a dataset directory; options follow a colon."""
    pairs: str = "pairs.jsonl"
    """The file that is written."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which prompts. Readers of the file hold out the same prompts again, so `all` has both parts."""
    num_prompts: int | None = None
    """How many of them; None: all."""
    group_size: int = 4
    """Answers to one prompt; the best and the worst are paired."""
    max_tokens: int = 32
    """Longest response."""
    temperature: float = 1.0
    num_generators: int = 1
    gpus: float = 0
    """GPUs of each generator."""


def graph(cfg: Pairs) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    sampling = Sampling(temperature=cfg.temperature, max_tokens=cfg.max_tokens)

    g = Graph("pairs")
    source = PromptSource(cfg.task, policy, repeat=cfg.group_size, part=cfg.part, num_prompts=cfg.num_prompts, epochs=1)
    prompts = g.add("prompts", source)
    generator = g.add("generator", Generator(policy, sampling=sampling), replicas=cfg.num_generators, gpus=cfg.gpus)
    reward = g.add("reward", Reward(cfg.task))
    maker = g.add("pair_maker", PairMaker(size=cfg.group_size, reference="initial"))
    writer = g.add("writer", PairWriter(cfg.pairs, cfg.task))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, maker.scored)
    g.connect(maker.groups, writer.groups)
    g.ignore(generator.requests)
    g.ignore(generator.weights)
    return g
