"""GRPO with a node of one's own: samples that merely repeat the question are filtered before they are scored."""

from dataclasses import dataclass

from flowrl import Facts, Graph, In, Node, Out, Sample
from flowrl.models import Policy
from flowrl.nodes import Generator, GroupAdvantage, PromptSource, Reward, Sampling, TokenBatch, Trainer
from flowrl.tasks import Task


class NoEcho(Node):
    """Lets pass what does not begin with the question."""

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
    """The second thing of one's own, a reward: right answers count 1, every character too many costs 0.01."""
    excess = max(0, len(response) - len(answer))
    return {"reward": float(response.strip() == answer) - 0.01 * excess, "logs": {"excess": float(excess)}}


@dataclass(frozen=True)
class Custom:
    policy: str = "tiny"
    task: Task = Task("arithmetic")
    group_size: int = 8
    groups_per_step: int = 16
    staleness: int = 1
    lr: float = 1e-4


def graph(cfg: Custom) -> Graph:
    policy = Policy(cfg.policy, task=cfg.task)
    g = Graph("custom_node")
    prompts = g.add("prompts", PromptSource(cfg.task, policy, repeat=cfg.group_size))
    generator = g.add("generator", Generator(policy, sampling=Sampling(max_tokens=32)))
    no_echo = g.add("no_echo", NoEcho())
    reward = g.add("reward", Reward(cfg.task, function=short_and_right))
    advantage = g.add("advantage", GroupAdvantage("group_norm", size=cfg.group_size))
    batcher = g.add("batcher", TokenBatch(cfg.groups_per_step))
    trainer = g.add("trainer", Trainer(policy, lr=cfg.lr))

    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, no_echo.rollouts)
    g.connect(no_echo.kept, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=cfg.staleness)
    g.ignore(generator.requests)
    return g
