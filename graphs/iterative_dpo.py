"""Iterative DPO: the best and the worst answer to a prompt make a pair; each round samples from the trained policy.

    loss        −log σ(β·(log π/π_ref of the best answer − log π/π_ref of the worst)), mean over the pairs

flowrl run iterative_dpo --steps 60
flowrl run iterative_dpo --reward-model runs/reward_model/checkpoints/step_000300 --steps 60
flowrl run iterative_dpo --reference.weights initial --kind ipo --steps 60
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from flowrl import Graph
from flowrl.nodes import PairMaker
from flowrl.options import (
    AnswerSteps,
    ConfigPart,
    GroupOptions,
    OnlineConfig,
    PairReferenceSize,
    ResponseShaping,
    RewardOptions,
    find_unused,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    train_on_answers,
)
from flowrl.training.loss.preference_objectives import DPOObjective


@dataclass(frozen=True)
class PairLoss(ConfigPart):
    """The loss on pairs, and the reference that it needs."""

    reference: PairReferenceSize = PairReferenceSize()
    """What DPO compares the policy with."""
    beta: float = 0.1
    """Larger values keep the policy closer to the reference."""
    kind: Literal["dpo", "ipo", "cdpo"] = "dpo"
    """The loss: DPO, IPO on means per token, or conservative DPO."""
    label_smoothing: float = 0.0
    """For cdpo: the assumed share of pairs with the wrong order."""
    nll_coef: float = 0.0
    """Weight of the negative log likelihood of the chosen answers."""

    @property
    def compared_with(self) -> PairReferenceSize | None:
        """The size of the reference, if it has the initial weights."""
        return self.reference if self.reference.weights == "initial" else None


@dataclass(frozen=True)
class IterativeDPO(OnlineConfig):
    help_texts = {
        "staleness": "0: a round is admitted when every generator has the weights of the round before. Above 0, that "
        "many rounds overlap.",
        "groups_per_step": "Prompts of one batch, which is a round.",
        "optimizer_steps": "Mini-batches into which a round is split.",
    }

    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    loss: PairLoss = PairLoss()
    steps: AnswerSteps = AnswerSteps(staleness=0, groups_per_step=32, optimizer_steps=4)

    prefer: str = ""
    """A function (prompts, firsts, seconds), as FILE.py:FUNCTION, or a server, that says which of two answers is
    better; the pair is then the answers that win the most and the fewest comparisons. Empty: the answers with the
    highest and the lowest reward."""

    @property
    def asks_functions(self) -> bool:
        return super().asks_functions or bool(self.prefer)

    def problems(self) -> Iterator[str]:
        yield from super().problems()
        if self.steps.overlong_filter:
            yield "--overlong-filter keeps one answer of a pair out of the loss and not the other; leave it out"
        if self.steps.on_limit == "mask":
            yield "--on-limit is 'mask', which can mask one answer of a pair and not the other; use wait"
        if self.loss.compared_with is None:
            why = "this run has no reference; take --reference.weights initial"
            yield from find_unused(self, ("reference",), why)


def graph(cfg: IterativeDPO) -> Graph:
    loss = cfg.loss
    objective = DPOObjective(
        beta=loss.beta, kind=loss.kind, label_smoothing=loss.label_smoothing, nll_coef=loss.nll_coef, online=True
    )

    g = Graph("iterative_dpo")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    reward = g.add("reward", make_reward(cfg), **cfg.reward.place_in(cfg))
    judge = PairMaker(
        size=cfg.sampling.group_size,
        reference=loss.reference.weights,
        prefer=cfg.prefer,
        task=cfg.data.task,
        dynamic=cfg.groups.build(cfg.steps.groups_per_step),
        timeout_s=cfg.reward.reward_timeout_s,
        away_s=cfg.reward.reward_away_s,
    )
    pairs = g.add("pairs", judge)
    batcher = g.add("batcher", make_batcher(cfg))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))
    reference = loss.compared_with
    return train_on_answers(g, cfg, prompts, generator, reward, pairs, batcher, trainer, reference=reference)
