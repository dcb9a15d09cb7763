"""Responses of a model to the prompts of a task, written to a file; with rewards, or only the best of n.

flowrl run generate --policy tiny --task arithmetic --num-prompts 100 --out sums.jsonl
flowrl run generate --policy tiny --task arithmetic --group-size 8 --best --out best.jsonl
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.nodes import Generator, RemainingPrompts, ResponseWriter
from flowrl.options import (
    AnswerOptions,
    GeneratorOptions,
    GraphConfig,
    PromptData,
    RewardOptions,
    TruncationOptions,
    find_unused,
)


@dataclass(frozen=True)
class Generate(GraphConfig):
    learning = "samples"
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model that answers.",
        "num_prompts": "Number of prompts; None: all.",
        "too_long": "Prompts over the limit are dropped and counted, lose their beginning, or are an error before the "
        "first.",
    }

    data: PromptData = PromptData()
    generator: GeneratorOptions = GeneratorOptions()
    sampling: AnswerOptions = AnswerOptions()
    truncation: TruncationOptions = TruncationOptions()
    reward: RewardOptions = RewardOptions()

    out: str = "responses.jsonl"
    """The file that is written. Prompts that are already in it are left out, so the same command continues it."""
    score: bool = False
    """Write each response's reward, too."""
    best: bool = False
    """Write only the response with the highest reward: the best of --group-size."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which prompts."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.best and self.sampling.group_size < 2:
            size = self.sampling.group_size
            yield f"--best chooses among --group-size responses, which is {size}; it needs at least 2"
        if not self.scored:
            names = ("reward_timeout_s", "reward_concurrency", "reward_away_s", "task.reward", "task.reward_weights")
            yield from find_unused(self, names, "responses have no rewards; give --score or --best too")

    @property
    def scored(self) -> bool:
        """Whether responses get a reward."""
        return self.score or self.best or bool(self.reward.reward_model.model)


def graph(cfg: Generate) -> Graph:
    sampling = cfg.sampling.build(cfg.generator.stop_strings, cfg.truncation)

    g = Graph("generate")
    source = RemainingPrompts(
        cfg.data.task,
        cfg.model,
        repeat=cfg.sampling.group_size,
        part=cfg.part,
        num_prompts=cfg.data.num_prompts,
        epochs=1,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        too_long=cfg.data.too_long,
        out=cfg.out,
        per_group=1 if cfg.best else cfg.sampling.group_size,
        answers_compared=cfg.scored and cfg.reward.compares_answers(cfg.data.task),
    )
    prompts = g.add("prompts", source)
    answers = Generator(cfg.model, sampling=sampling, engine=cfg.generator.engine, trained=False)
    generator = g.add("generator", answers, **cfg.place_generator())
    writes = ResponseWriter(cfg.out, cfg.data.task, size=cfg.sampling.group_size, best=cfg.best, prompts=source)
    writer = g.add("writer", writes)

    g.connect(prompts.prompts, generator.prompts)
    if cfg.scored:
        reward = g.add("reward", cfg.reward.build_scorer(cfg.data.task, cfg.model), **cfg.reward.place_in(cfg))
        g.connect(generator.rollouts, reward.rollouts)
        g.connect(reward.scored, writer.samples)
    else:
        g.connect(generator.rollouts, writer.samples)
    g.ignore(generator.requests)
    g.ignore(generator.weights)
    cfg.share_devices(g)
    return g
