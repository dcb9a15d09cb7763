"""DAPO (arXiv 2503.14476): replaces groups that teach nothing, clips wider above, and penalises long responses.

flowrl run dapo --steps 60
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.blocks import evaluate
from flowrl.nodes import DynamicSampling, GroupAdvantage, Overlong, Shaping
from flowrl.prompt_options import RewardOptions
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class DAPO(RewardOptions):
    clip_low: float = 0.2
    """The importance ratio is clipped below at 1 - clip_low."""
    clip_high: float = 0.28
    """And above at 1 + clip_high: more than `clip_low`, so that unlikely tokens can grow."""
    mean_between: tuple[float, float] | None = None
    """Keep groups whose mean raw reward lies between these; None: all groups whose rewards are not equal."""
    max_filtered_per_step: int = 256
    """The run ends with an error if more groups are filtered before a batch is full."""
    overlong_buffer: int = 8
    """Tokens before `max_tokens` over which the penalty grows; 0: no penalty."""
    overlong_factor: float = 1.0
    """The penalty at `max_tokens`."""


def graph(cfg: DAPO) -> Graph:
    objective = PolicyObjective(clip_low=cfg.clip_low, clip_high=cfg.clip_high)
    dynamic = DynamicSampling(
        cfg.groups_per_step, mean_between=cfg.mean_between, max_filtered_per_step=cfg.max_filtered_per_step
    )
    overlong = Overlong(cfg.max_tokens, cfg.overlong_buffer, cfg.overlong_factor) if cfg.overlong_buffer else None

    g = Graph("dapo")
    prompts = g.add("prompts", cfg.prompts())
    generator = g.add("generator", cfg.make_generator(cfg.sampling), **cfg.place_generator())
    shaping = Shaping(overlong=overlong, negate=cfg.negate_rewards)
    reward = g.add("reward", cfg.make_reward(shaping=shaping), **cfg.place_reward())
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=cfg.group_size, dynamic=dynamic))
    batcher = g.add("batcher", cfg.batcher())
    trainer = g.add("trainer", cfg.make_trainer(objective), **cfg.place(cfg.trainer))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(
        prompts.prompts,
        until=generator.weights,
        staleness=cfg.staleness,
        on_limit=cfg.on_limit,
        look_ahead=cfg.look_ahead,
    )
    evaluate(g, cfg, generator)
    cfg.take_turns(g, ("trainer", "reward"))
    return g
