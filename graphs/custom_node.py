"""GRPO with a custom node, which filters samples that repeat the question, and a custom reward.

flowrl run custom_node --steps 60
"""

from dataclasses import dataclass

from flowrl import Facts, Graph, In, Node, Out, Sample
from flowrl.blocks import evaluate, refer
from flowrl.loss_options import RewardKLOptions
from flowrl.nodes import GroupAdvantage
from flowrl.prompt_options import RewardOptions
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
class Custom(RewardKLOptions, RewardOptions):
    evaluate: int = 0


def graph(cfg: Custom) -> Graph:
    estimate = Estimate("group_norm", **cfg.reward_kl_settings)
    filtering = cfg.filtering(cfg.groups_per_step)

    g = Graph("custom_node")
    prompts = g.add("prompts", cfg.prompts(curriculum=cfg.curriculum))
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    no_echo = g.add("no_echo", NoEcho())
    reward = g.add("reward", cfg.make_reward(function=short_and_right), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage(estimate, size=cfg.group_size, dynamic=filtering))
    batcher = g.add("batcher", cfg.batcher(**cfg.of_advantages(estimate), adaptive_kl=cfg.adaptive_kl))
    trainer = g.add("trainer", cfg.make_trainer(cfg.loss(cfg.max_tokens)), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, no_echo.rollouts)
    rollouts, followers = refer(g, cfg, cfg.compared_with, no_echo.kept, trainer)
    g.connect(rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    if cfg.curriculum.used:
        g.call(advantage.outcomes, prompts.outcomes)
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
