"""Preference pairs for a reward model or DPO: two answers of one policy, one of which the reward prefers.

flowrl run pairs --pairs pairs.jsonl --num-prompts 4000
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.nodes import Generator, PairMaker, PairWriter, RemainingPrompts
from flowrl.options import AnswerOptions, GeneratorOptions, GraphConfig, PromptData, RewardOptions, TruncationOptions


@dataclass(frozen=True)
class Pairs(GraphConfig):
    learning = "samples"
    help_texts = {
        "policy": "tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model whose answers "
        "are compared.",
        "group_size": "Number of answers to one prompt; the best and the worst make a pair.",
        "num_prompts": "Number of prompts; None: all.",
    }

    data: PromptData = PromptData()
    generator: GeneratorOptions = GeneratorOptions()
    sampling: AnswerOptions = AnswerOptions(group_size=4)
    truncation: TruncationOptions = TruncationOptions()
    reward: RewardOptions = RewardOptions()

    pairs: str = "pairs.jsonl"
    """The file that is written. Prompts that already have a pair in it are left out, so the same command continues
    it."""
    prefer: str = ""
    """A function (prompts, firsts, seconds), as FILE.py:FUNCTION, or a server, that says which of two answers is
    better; empty: the reward."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which prompts. Readers of the file hold out the same prompts again, so with `all` it has both parts."""

    @property
    def asks_functions(self) -> bool:
        return bool(self.prefer)


def graph(cfg: Pairs) -> Graph:
    sampling = cfg.sampling.build(cfg.generator.stop_strings, cfg.truncation)

    g = Graph("pairs")
    source = RemainingPrompts(
        cfg.data.task,
        cfg.model,
        repeat=cfg.sampling.group_size,
        part=cfg.part,
        num_prompts=cfg.data.num_prompts,
        epochs=1,
        max_prompt_tokens=cfg.data.max_prompt_tokens,
        too_long=cfg.data.too_long,
        out=cfg.pairs,
        per_group=1,
        answers_compared=cfg.reward.compares_answers(cfg.data.task),
    )
    prompts = g.add("prompts", source)
    answerer = Generator(cfg.model, sampling=sampling, engine=cfg.generator.engine, trained=False)
    generator = g.add("generator", answerer, **cfg.place_generator())
    reward = g.add("reward", cfg.reward.build_scorer(cfg.data.task, cfg.model), **cfg.reward.place_in(cfg))
    maker = PairMaker(
        size=cfg.sampling.group_size,
        reference="initial",
        prefer=cfg.prefer,
        task=cfg.data.task,
        timeout_s=cfg.reward.reward_timeout_s,
        away_s=cfg.reward.reward_away_s,
    )
    pair_maker = g.add("pair_maker", maker)
    writer = g.add("writer", PairWriter(cfg.pairs, cfg.data.task))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, pair_maker.scored)
    g.connect(pair_maker.groups, writer.groups)
    g.ignore(generator.requests)
    g.ignore(generator.weights)
    cfg.share_devices(g)
    return g
