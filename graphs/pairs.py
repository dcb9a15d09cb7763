"""Preference pairs for a reward model or DPO: two answers of one policy, one of which the reward prefers.

flowrl run pairs --pairs pairs.jsonl --num-prompts 4000
"""

from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import AnswerOptions
from flowrl.nodes import Generator, PairMaker, PairWriter, RemainingPrompts, TooLong
from flowrl.scorer_options import ScorerOptions


@dataclass(frozen=True)
class Pairs(ScorerOptions, AnswerOptions):
    policy: str = "tiny"
    """tiny, smollm2, a Hugging Face model directory, or OWNER/NAME of the Hub: the model whose answers are compared."""
    group_size: int = 4
    """Number of answers to one prompt; the best and the worst make a pair."""

    pairs: str = "pairs.jsonl"
    """The file that is written. Prompts that already have a pair in it are left out, so the same command continues
    it."""
    prefer: str = ""
    """A function (prompts, firsts, seconds), as FILE.py:FUNCTION, or a server, that says which of two answers is
    better; empty: the reward."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which prompts. Readers of the file hold out the same prompts again, so with `all` it has both parts."""
    num_prompts: int | None = None
    """Number of prompts; None: all."""
    max_prompt_tokens: int = 512
    """Maximum number of tokens in a prompt."""
    too_long: TooLong = "drop"
    """Prompts over the limit are dropped and counted, lose their beginning, or are an error before training."""


def graph(cfg: Pairs) -> Graph:
    g = Graph("pairs")
    source = RemainingPrompts(
        cfg.task,
        cfg.model,
        repeat=cfg.group_size,
        part=cfg.part,
        num_prompts=cfg.num_prompts,
        epochs=1,
        max_prompt_tokens=cfg.max_prompt_tokens,
        too_long=cfg.too_long,
        out=cfg.pairs,
        per_group=1,
        answers_compared=cfg.answers_compared,
    )
    prompts = g.add("prompts", source)
    answerer = Generator(cfg.model, sampling=cfg.sampling, engine=cfg.engine, trained=False)
    generator = g.add("generator", answerer, **cfg.place_generator())
    reward = g.add("reward", cfg.make_scorer(cfg.task), **cfg.place_reward())
    maker = PairMaker(
        size=cfg.group_size,
        reference="initial",
        prefer=cfg.prefer,
        task=cfg.task,
        timeout_s=cfg.reward_timeout_s,
        away_s=cfg.reward_away_s,
    )
    pair_maker = g.add("pair_maker", maker)
    writer = g.add("writer", PairWriter(cfg.pairs, cfg.task))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, pair_maker.scored)
    g.connect(pair_maker.groups, writer.groups)
    g.ignore(generator.requests)
    g.ignore(generator.weights)
    cfg.share_devices(g)
    return g
