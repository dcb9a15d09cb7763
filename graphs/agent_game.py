"""GRPO on episodes with any environment; the graph is that of agent_tools.

    flowrl run agent_game --steps 60
    flowrl run agent_game --policy smollm2 --environment gymnasium/FrozenLake-v1:actions=left/down/right/up
    flowrl run agent_game --policy /models/Qwen3-8B --environment my_env.py:MyEnv:size=4 --limits.turns 8

The default is a sum with two tries: a reply that is wrong is told so, and the policy may try again.
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.recipes.agent_tools import GroupedEpisodes, episode_graph
from flowrl.tasks import Task

SUM = "reasoning_gym/chain_sum:min_terms=2,max_terms=2,min_digits=2,max_digits=2"


@dataclass(frozen=True)
class AgentGame(GroupedEpisodes):
    environment: str = f"{SUM},tries=2"
    """The environment's name, as in docs/environments.md."""
    task: Task = Task(SUM)
    """What `tiny` is warm-started on; other policies do not look at it."""
    max_tokens: int = 16
    groups_per_step: int = 16
    look_ahead: int = 16
    lr: float = 1e-4


def graph(cfg: AgentGame) -> Graph:
    return episode_graph("agent_game", cfg, cfg.environment)
