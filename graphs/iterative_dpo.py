"""Iterative DPO: the best and the worst answer to a prompt make a pair; each round samples from the trained policy.

flowrl run iterative_dpo --steps 60
flowrl run iterative_dpo --reward-model runs/reward_model/checkpoints/step_000300 --steps 60
flowrl run iterative_dpo --reference.weights initial --kind ipo --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import FilterOptions
from flowrl.nodes import PairMaker
from flowrl.prompt_options import RewardOptions
from flowrl.role_options import PairReferenceSize, unused
from flowrl.training.loss.preference_objectives import DPOObjective


@dataclass(frozen=True)
class IterativeDPO(FilterOptions, RewardOptions):
    staleness: int = 0
    """0: a round is admitted when every generator has the weights of the round before. Above 0, that many rounds
    overlap."""
    groups_per_step: int = 32
    """Prompts of one batch, which is a round."""
    optimizer_steps: int = 4
    """Mini-batches into which a round is split."""

    reference: PairReferenceSize = PairReferenceSize()
    """What DPO compares the policy with."""
    prefer: str = ""
    """A function (prompts, firsts, seconds), as FILE.py:FUNCTION, or a server, that says which of two answers is
    better; the pair is then the answers that win the most and the fewest comparisons. Empty: the answers with the
    highest and the lowest reward."""
    beta: float = 0.1
    """Larger values keep the policy closer to the reference."""
    kind: Literal["dpo", "ipo", "cdpo"] = "dpo"
    """The loss: DPO, IPO on means per token, or conservative DPO."""
    label_smoothing: float = 0.0
    """For cdpo: the assumed share of pairs with the wrong order."""
    nll_coef: float = 0.0
    """Weight of the negative log likelihood of the chosen answers."""

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.overlong_filter:
            yield "--overlong-filter keeps one answer of a pair out of the loss and not the other; leave it out"
        if self.on_limit == "mask":
            yield "--on-limit is 'mask', which can mask one answer of a pair and not the other; use wait"
        if self.compared_with is None:
            why = "this run has no reference; take --reference.weights initial"
            yield from unused(self, ("reference",), why)

    @property
    def compared_with(self) -> PairReferenceSize | None:
        """The size of the reference, if it has the initial weights."""
        return self.reference if self.reference.weights == "initial" else None


def graph(cfg: IterativeDPO) -> Graph:
    objective = DPOObjective(
        beta=cfg.beta, kind=cfg.kind, label_smoothing=cfg.label_smoothing, nll_coef=cfg.nll_coef, online=True
    )

    g = Graph("iterative_dpo")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    reward = g.add("reward", cfg.make_reward(), **cfg.place_reward())
    judge = PairMaker(
        size=cfg.group_size,
        reference=cfg.reference.weights,
        prefer=cfg.prefer,
        task=cfg.task,
        dynamic=cfg.filtering(cfg.groups_per_step),
        timeout_s=cfg.reward_timeout_s,
        away_s=cfg.reward_away_s,
    )
    pairs = g.add("pairs", judge)
    batcher = g.add("batcher", cfg.batcher())
    trainer = g.add("trainer", cfg.make_trainer(objective), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    rollouts, followers = refer(g, cfg, cfg.compared_with, generator.rollouts, trainer)
    g.connect(rollouts, reward.rollouts)
    g.connect(reward.scored, pairs.scored)
    g.connect(pairs.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(pairs.outcomes, prompts.outcomes)
    g.admit(
        prompts.prompts,
        until=(generator.weights, *followers),
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.share_devices(g, ("trainer", "reward", "reference"))
    return g
