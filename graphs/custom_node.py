"""GRPO with a custom node, which filters samples that repeat the question, and a custom reward.

flowrl run custom_node --steps 60
"""

from dataclasses import dataclass

from flowrl import Facts, Graph, In, Node, Out, Sample
from flowrl.nodes import GroupAdvantage
from flowrl.options import (
    EvaluationOptions,
    GroupOptions,
    NormalisationOptions,
    OnlineConfig,
    ResponseShaping,
    RewardKLLoss,
    RewardOptions,
    make_batcher,
    make_generator,
    make_prompts,
    make_reward,
    make_trainer,
    train_on_answers,
)
from flowrl.training.advantages import Estimate


class NoEcho(Node):
    """Filters samples whose response begins with the question."""

    rollouts: In[Sample]
    kept: Out[Sample]

    def facts(self) -> Facts:
        return Facts(drops=True)

    async def run(self) -> None:
        async for sample in self.rollouts:
            if sample.response_text.startswith(sample.prompt_text):
                self.rollouts.drop(sample, "echo", state="filtered")
            else:
                await self.kept.send(sample)


def short_and_right(prompt: str, response: str, *, answer: str) -> dict[str, object]:
    """1 for the right answer, less 0.01 for each character beyond the answer's length."""
    excess = max(0, len(response) - len(answer))
    return {"reward": float(response.strip() == answer) - 0.01 * excess, "logs": {"excess": float(excess)}}


@dataclass(frozen=True)
class Custom(OnlineConfig):
    reward: RewardOptions = RewardOptions()
    shaping: ResponseShaping = ResponseShaping()
    groups: GroupOptions = GroupOptions()
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: RewardKLLoss = RewardKLLoss()
    evaluation: EvaluationOptions = EvaluationOptions(evaluate=0)


def graph(cfg: Custom) -> Graph:
    estimate = Estimate("group_norm", **cfg.loss.of_estimate)
    objective = cfg.loss.build(cfg.sampling.max_tokens)

    g = Graph("custom_node")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg), **cfg.place_generator())
    no_echo = g.add("no_echo", NoEcho())
    reward = g.add("reward", make_reward(cfg, function=short_and_right), **cfg.reward.place_in(cfg))
    filtering = cfg.groups.build(cfg.steps.groups_per_step)
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.sampling.group_size, dynamic=filtering))
    batcher = g.add("batcher", make_batcher(cfg, estimate))
    trainer = g.add("trainer", make_trainer(cfg, objective), **cfg.place(cfg.trainer.size))

    reference, through = cfg.loss.compared_with(cfg), (no_echo.rollouts, no_echo.kept)
    return train_on_answers(
        g, cfg, prompts, generator, reward, advantage, batcher, trainer, reference=reference, through=through
    )
