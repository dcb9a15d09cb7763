"""Rewards for the responses in a file: by functions, servers or a reward model, written next to the responses.

flowrl run score --task sums.jsonl --task.reward rules.py:short --out scored.jsonl
flowrl run score --task sums.jsonl --reward-model runs/reward_model/checkpoints/step_000300 --out scored.jsonl
"""

from dataclasses import dataclass, replace

from flowrl import Graph
from flowrl.models import Policy
from flowrl.nodes import GivenResponses, RemainingPrompts, ResponseWriter
from flowrl.options import GraphConfig, PolicyOptions, RewardOptions
from flowrl.tasks import Task


@dataclass(frozen=True)
class Score(GraphConfig):
    help_texts = {
        "policy": "Model whose tokenizer renders the responses; empty: the reward model, or tiny without one."
    }

    policy: PolicyOptions = PolicyOptions("")
    reward: RewardOptions = RewardOptions()

    response: str = "response"
    """The column of the file that has the responses."""
    out: str = "scored.jsonl"
    """The file that is written. Rows that are already in it are left out, so the same command continues it."""

    @property
    def model(self) -> Policy:
        """The model whose tokenizer renders the responses."""
        named = self.policy.name or self.reward.reward_model.model or "tiny"
        return replace(self.policy, name=named).build(Task())


def graph(cfg: Score) -> Graph:
    # Take every row, even if an earlier run has written its column `score`, unless min_score asks for that column.
    task = cfg.data.task.with_option("score", "-", unless="min_score")

    g = Graph("score")
    source = RemainingPrompts(
        task,
        cfg.model,
        part="all",
        epochs=1,
        max_prompt_tokens=1 << 20,
        out=cfg.out,
        per_group=1,
        given=True,
        answers_compared=cfg.reward.compares_answers(cfg.data.task),
    )
    prompts = g.add("prompts", source)
    responses = g.add("responses", GivenResponses(task, cfg.model, column=cfg.response))
    reward = g.add("reward", cfg.reward.build_scorer(task, cfg.model), **cfg.reward.place_in(cfg))
    writer = g.add("writer", ResponseWriter(cfg.out, task, size=1, given=True, prompts=source))

    g.connect(prompts.prompts, responses.prompts)
    g.connect(responses.rollouts, reward.rollouts)
    g.connect(reward.scored, writer.samples)
    cfg.share_devices(g)
    return g
