"""`flowrl new FILE.py --node KIND`: a skeleton of one's own part of a graph, with its test.

Each skeleton does something, so that its test has something to show. Both pass `mypy --strict`, and the test passes.
The texts below are the files; `NAME` in them is the name of the new module.
"""

from __future__ import annotations

REWARD = (
    '''"""A reward: a number for each response. In a run: --task.reward NAME.py:score"""

from __future__ import annotations

from collections.abc import Sequence


def score(prompts: Sequence[str], responses: Sequence[str], answer: Sequence[str]) -> list[float]:
    """1 for a response that ends with the row's answer, else 0.

    Further parameters are columns of the rows, as `answer` is: one value for each response.
    """
    return [float(response.strip().endswith(right)) for response, right in zip(responses, answer, strict=True)]
''',
    """from __future__ import annotations

from NAME import score


def test_a_response_that_ends_with_the_answer_is_right() -> None:
    assert score(["1+1="] * 3, ["2", "it is 2 ", "3"], ["2"] * 3) == [1.0, 1.0, 0.0]
""",
)

FILTER = (
    '''"""A filter: a node that lets some samples through. docs/nodes.md says what a node may do."""

from __future__ import annotations

from flowrl import Facts, In, Node, Out, Sample


class Filter(Node):
    """Lets responses of at least `least` tokens through.

    In `graph(cfg)`: `kept = g.add("filter", Filter(2))`, `g.connect(generator.rollouts, kept.samples)`, and
    `g.connect(kept.kept, reward.rollouts)` in place of the edge from the generator to the reward.
    """

    samples: In[Sample]
    kept: Out[Sample]

    def __init__(self, least: int) -> None:
        self.least = least

    def facts(self) -> Facts:
        return Facts(drops=True)

    def check(self, facts: object) -> list[str]:
        return [] if self.least > 0 else [f"least is {self.least}; it has to be above 0"]

    async def run(self) -> None:
        async for sample in self.samples:
            if sample.response_tokens >= self.least:
                await self.kept.send(sample)
            else:
                self.samples.drop(sample, "too_short", state="filtered")
''',
    """from __future__ import annotations

from NAME import Filter

from flowrl.testing import run_node, sample


def test_short_responses_are_filtered() -> None:
    node = Filter(least=2)
    record = run_node(node, {"samples": [sample(0, response=1), sample(1, response=2)]})
    assert [one.member for one in record.sent(node.kept)] == [1]
    assert record.reasons() == [("filtered", "too_short")]
""",
)

ENVIRONMENT = (
    '''"""An environment: what an agent talks to. In a run: flowrl run agent_game --environment NAME.py:Environment"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flowrl.environments import Action, Env, Observation, Step


class Environment(Env):
    """Find a number below `size` in at most `most` guesses. Options follow the name: NAME.py:Environment:size=8"""

    def __init__(self, size: int = 8, most: int = 4) -> None:
        self.size = size
        self.most = most

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        self.number = random.Random(seed).randrange(self.size)
        self.num_guesses = 0
        return Observation(f"I think of a number below {self.size}. Guess it.")

    async def step(self, action: Action) -> Step:
        self.num_guesses += 1
        last = self.num_guesses == self.most
        if not action.text.strip().isdigit():
            return Step(Observation("Answer with a number alone."), truncated=last)
        guess = int(action.text)
        if guess == self.number:
            return Step(Observation(), reward=1.0 / self.num_guesses, terminated=True)
        return Step(Observation(f"{guess} is too {'low' if guess < self.number else 'high'}."), truncated=last)
''',
    """from __future__ import annotations

import asyncio

from NAME import Environment

from flowrl.environments import Action


def test_a_number_is_found() -> None:
    async def play() -> None:
        env = Environment()
        assert "below 8" in (await env.reset({}, seed=0)).text
        wrong = await env.step(Action("no number"))
        assert not wrong.terminated
        right = await env.step(Action(str(env.number)))
        assert right.terminated and right.reward == 0.5

    asyncio.run(play())
""",
)

OBJECTIVE = (
    '''"""A loss. In `graph(cfg)`: make_trainer(cfg, Loss()), or Trainer(policy, objective=Loss())."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl.messages import Trainable
from flowrl.training.loss.objective import LossInputs, Objective, SampleColumns

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Loss(Objective):
    """The mean of −A·log π over the tokens of the optimizer step; the axes are B samples and T policy tokens."""

    stats = ("entropy",)
    mean_over = "tokens"

    def columns(self, sample: Trainable) -> SampleColumns:
        return {"advantages": sample.advantages}

    def loss(self, inputs: LossInputs) -> tuple[Tensor, Mapping[str, Tensor]]:
        gain_BT = inputs.columns["advantages"] * inputs.logprobs_BT
        num_tokens = inputs.totals.num_tokens
        entropy = inputs.entropies_BT.detach()[inputs.mask_BT].sum() / num_tokens
        return -gain_BT[inputs.mask_BT].sum() / num_tokens, {"entropy": entropy}
''',
    """from __future__ import annotations

import torch
from NAME import Loss

from flowrl.training.loss.function_trial import objective_problem
from flowrl.training.loss.objective import LossInputs, Totals


def test_a_trainer_can_use_the_loss() -> None:
    assert objective_problem(Loss()) is None


def test_the_loss_by_hand() -> None:
    logprobs_BT = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    inputs = LossInputs(
        logprobs_BT=logprobs_BT,
        entropies_BT=torch.tensor([[0.5, 1.5]]),
        old_logprobs_BT=logprobs_BT.detach(),
        mask_BT=torch.tensor([[True, True]]),
        columns={"advantages": torch.tensor([[1.0, -0.5]])},
        totals=Totals(num_tokens=2, num_sequences=1),
        values_BT=torch.zeros(1, 0),
        labels_B=torch.zeros(1),
        pairs_P2=torch.zeros(0, 2, dtype=torch.int64),
    )
    loss, stats = Loss().loss(inputs)
    assert loss.item() == 0.0 and stats["entropy"].item() == 1.0
    (gradient_BT,) = torch.autograd.grad(loss, logprobs_BT)
    assert gradient_BT.tolist() == [[-0.5, 0.25]]
""",
)

SOURCE = (
    '''"""A source: a node that sends prompts, each to be answered several times."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from flowrl import Facts, Node, Out, Prompt
from flowrl.models import Chat, Policy, tokenizer_of


class Source(Node):
    """Asks sums without end; the members of a group answer the same one.

    In `graph(cfg)`: `prompts = g.add("prompts", Source(cfg.model, size=cfg.sampling.group_size))` in place of
    `make_prompts(cfg)`.
    """

    prompts: Out[Prompt]

    def __init__(self, policy: Policy, *, size: int) -> None:
        self.policy = policy
        self.size = size
        self.num_asked = 0

    def facts(self) -> Facts:
        return Facts(group_size=self.size, longest_prompt=64)

    async def setup(self) -> None:
        self.chat = Chat(await self.blocking(tokenizer_of, self.policy))

    async def run(self) -> None:
        while await self.prompts.admit(self.group(self.num_asked)):  # it waits for a ticket
            self.num_asked += 1

    def group(self, number: int) -> list[Prompt]:
        """The prompts of group `number`, which depend on the run's seed alone."""
        draw = random.Random(f"{self.context.seed}/{number}")
        first, second = draw.randrange(100), draw.randrange(100)
        text, name = f"{first}+{second}=", f"sum{number}"
        shown, token_ids = self.chat.encode_prompt([{"role": "user", "content": text}])
        return [
            Prompt(
                sample_id=f"{name}:{member}",
                group_id=name,
                prompt_id=name,
                epoch=0,
                member=member,
                group_size=self.size,
                seed=draw.getrandbits(32),
                text=shown,
                token_ids=token_ids,
                columns={"answer": str(first + second)},
            )
            for member in range(self.size)
        ]

    def state(self) -> Mapping[str, Any]:
        return {"num_asked": self.num_asked}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.num_asked = state["num_asked"]
''',
    """from __future__ import annotations

from NAME import Source

from flowrl.models import Policy
from flowrl.testing import run_node


def source() -> Source:
    return Source(Policy("tiny"), size=2)


def test_a_group_is_one_sum() -> None:
    groups = run_node(source(), num_groups=3, preflight=False).groups("prompts")
    assert [len(group) for group in groups] == [2, 2, 2]
    assert all(first.text == second.text and first.seed != second.seed for first, second in groups)


def test_a_resumed_source_goes_on() -> None:
    first, again = source(), source()
    run_node(first, num_groups=2)
    again.load_state(first.state())
    (group,) = run_node(again, num_groups=1).groups("prompts")
    assert group[0].prompt_id == "sum2"
""",
)

SKELETONS = {
    "reward": REWARD,
    "filter": FILTER,
    "environment": ENVIRONMENT,
    "objective": OBJECTIVE,
    "source": SOURCE,
}
"""Kind -> the texts of the module and of its test."""
