"""GRPO on episodes with any environment; the graph is that of agent_tools.

    flowrl run agent_game --steps 60
    flowrl run agent_game --policy smollm2 --environment gymnasium/FrozenLake-v1:actions=left/down/right/up
    flowrl run agent_game --policy /models/Qwen3-8B --environment my_env.py:MyEnv:size=4 --limits.turns 8

The default is a game of some turns that `tiny` can learn, against an opponent that makes half of its moves at random.
"""

from dataclasses import dataclass

from flowrl import Graph
from flowrl.options import EnvironmentOptions, EpisodeConfig, EpisodeData, ReplySampling
from flowrl.recipes.agent_tools import episode_graph
from flowrl.tasks import Task


@dataclass(frozen=True)
class AgentGame(EpisodeConfig):
    help_texts = {"task": "What `tiny` is warm-started on; other policies ignore it."}

    data: EpisodeData = EpisodeData(Task("sticks"))
    sampling: ReplySampling = ReplySampling(max_tokens=16)
    episodes: EnvironmentOptions = EnvironmentOptions()

    environment: str = "flowrl.environments.sticks_env:SticksAgainst"
    """The environment's name, as in docs/environments.md."""


def graph(cfg: AgentGame) -> Graph:
    return episode_graph("agent_game", cfg, cfg.environment)
