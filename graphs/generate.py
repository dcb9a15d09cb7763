"""Responses of a model to the prompts of a task, written to a file; with rewards, or only the best of n.

flowrl run generate --policy tiny --task arithmetic --num-prompts 100 --out sums.jsonl
flowrl run generate --policy tiny --task arithmetic --group-size 8 --best --out best.jsonl
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import AnswerOptions
from flowrl.nodes import Generator, RemainingPrompts, ResponseWriter, TooLong
from flowrl.role_options import too_low, unused
from flowrl.scorer_options import ScorerOptions


@dataclass(frozen=True)
class Generate(ScorerOptions, AnswerOptions):
    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model that answers."""
    group_size: int = 1
    """Number of responses to one prompt. A single one may be greedy, with --temperature 0."""

    out: str = "responses.jsonl"
    """The file that is written. Prompts that are already in it are left out, so the same command continues it."""
    score: bool = False
    """Write each response's reward, too."""
    best: bool = False
    """Write only the response with the highest reward: the best of --group-size."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which prompts."""
    num_prompts: int | None = None
    """Number of prompts; None: all."""
    max_prompt_tokens: int = 512
    """Maximum number of tokens in a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before the first."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        yield from too_low(self, num_prompts=1, max_prompt_tokens=1)
        if self.best and self.group_size < 2:
            yield f"--best chooses among --group-size responses, which is {self.group_size}; it needs at least 2"
        if not self.scored:
            names = ("reward_timeout_s", "reward_concurrency", "reward_away_s", "task.reward", "task.reward_weights")
            yield from unused(self, names, "responses have no rewards; give --score or --best too")

    @property
    def scored(self) -> bool:
        """Whether responses get a reward."""
        return self.score or self.best or bool(self.reward_model.model)


def graph(cfg: Generate) -> Graph:

    g = Graph("generate")
    source = RemainingPrompts(
        cfg.task,
        cfg.model,
        repeat=cfg.group_size,
        part=cfg.part,
        num_prompts=cfg.num_prompts,
        epochs=1,
        max_prompt_tokens=cfg.max_prompt_tokens,
        too_long=cfg.too_long,
        out=cfg.out,
        per_group=1 if cfg.best else cfg.group_size,
        answers_compared=cfg.scored and cfg.answers_compared,
    )
    prompts = g.add("prompts", source)
    answers = Generator(cfg.model, sampling=cfg.sampling, engine=cfg.engine, trained=False)
    generator = g.add("generator", answers, **cfg.place_generator())
    writes = ResponseWriter(cfg.out, cfg.task, size=cfg.group_size, best=cfg.best, prompts=source)
    writer = g.add("writer", writes)

    g.connect(prompts.prompts, generator.prompts)
    if cfg.scored:
        reward = g.add("reward", cfg.make_scorer(cfg.task), **cfg.place_reward())
        g.connect(generator.rollouts, reward.rollouts)
        g.connect(reward.scored, writer.samples)
    else:
        g.connect(generator.rollouts, writer.samples)
    g.ignore(generator.requests)
    g.ignore(generator.weights)
    cfg.share_devices(g)
    return g
