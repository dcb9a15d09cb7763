"""Distillation: a teacher scores every token that the student sampled."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Float32, Group, Sample, Scored
from flowrl.models import Policy, check_model, known_directory, resolve, tokenizer_of
from flowrl.models.model_layout import note, scoring_layout
from flowrl.models.vocabulary import difference, untold, vocabulary_problem
from flowrl.nodes.one_sequence import require_one_sequence
from flowrl.nodes.scoring_model import ScoringNode
from flowrl.nodes.shared_pass import SharedPass
from flowrl.training.advantage.advantages import Array, distillation_advantages
from flowrl.training.advantage.estimate import trainable
from flowrl.training.layouts import refused
from flowrl.training.model.trainable import check_policy
from flowrl.training.settings import Dtype, Layout
from flowrl.tree_packing import passes_over

if TYPE_CHECKING:
    from flowrl.training.model.policy_model import PolicyModel

Judgement = tuple[Float32, Float32]
"""(log p of the policy tokens at their positions, 0 elsewhere; the last hidden state of each policy token)."""


class Teacher(ScoringNode):
    """Adds `teacher_logprobs` to the samples of `student`, whose vocabulary has to equal the teacher's.

    A sample's reward is the mean over its policy tokens of log π_teacher − log π_b, a per-token estimate
    of −KL(π_b‖π_teacher). `temperature` has to equal the generator's: logits are divided by it. With
    `exact`, samples also carry the teacher's hidden states, which the objective `ReverseKL` needs.

    At most `batch` samples wait for a pass at the same time. One pass takes at most `token_budget` tokens, padding
    included, or a single longer sample. `layout`: whether prefixes that samples share are computed once, see
    `ZeroSettings`.
    """

    cpus = 1

    rollouts: In[Sample]
    scored: Out[Scored]

    def __init__(
        self,
        policy: Policy,
        *,
        student: Policy,
        temperature: float = 1.0,
        dtype: Dtype = "float32",
        exact: bool = False,
        token_budget: int = 8192,
        batch: int = 64,
        layout: Layout = "auto",
    ) -> None:
        self.policy = policy
        self.student = student
        self.temperature = temperature
        self.dtype: Dtype = dtype
        self.exact = exact
        self.token_budget = token_budget
        self.batch = batch
        self.layout: Layout = layout
        self._pass = SharedPass(self._judge_all)

    def facts(self) -> Facts:
        return Facts(concurrency=self.batch)

    def check(self, facts: Any) -> list[str]:
        problem = vocabulary_problem(self.student, self.policy)
        problems = [problem] if problem else []
        if self.temperature <= 0:
            problems.append(f"temperature is {self.temperature}; it has to be above 0, and the generator's")
        for name in ("token_budget", "batch"):
            if getattr(self, name) < 1:
                problems.append(f"{name} is {getattr(self, name)}; it needs at least 1")
        return problems + refused(self.layout, scoring_layout(self.policy, self.layout))

    def notes(self) -> list[str]:
        return [note(scoring_layout(self.policy, self.layout))]

    def preflight(self) -> None:
        check_model(self.policy)
        if (model_dir := known_directory(self.policy)) is not None:
            check_policy(model_dir, trust_remote_code=self.policy.trust_remote_code)
        if untold(self.student, self.policy):
            _require_same_vocabulary(self.student, self.policy)

    async def setup(self) -> None:
        self._model = await self.blocking(self._load)

    def _load(self) -> PolicyModel:
        source = resolve(self.policy, progress=self.context.progress)
        import torch

        from flowrl.training.model.policy_model import load_policy_model

        torch.set_num_threads(max(1, len(self.context.cores)))
        return (
            load_policy_model(
                source, dtype=self.dtype, trust_remote_code=self.policy.trust_remote_code, layout=self.layout
            )
            .eval()
            .to(self.load_device)
        )

    def scoring_model(self) -> PolicyModel:
        return self._model

    async def run(self) -> None:
        await self.rollouts.each(self._judge, concurrency=self.batch)

    async def _judge(self, sample: Sample) -> None:
        require_one_sequence([sample], "a Teacher")
        logprobs, hidden = await self._pass.ask(sample)
        scored = scored_by_teacher(sample, logprobs, hidden if self.exact else None)
        self.context.ledger.scored(scored)
        await self.scored.send(scored)

    async def _judge_all(self, samples: list[Sample]) -> list[Judgement]:
        with self.context.busy("teach"):
            return await self.blocking(
                judgements, self._model, samples, self.temperature, token_budget=self.token_budget
            )


class TeacherAdvantage(Node):
    """Collects the `size` members of a group and computes each policy token's advantage from the teacher.

    The members are not compared with each other, so a group of one is enough. `negate` inverts the sign: a
    control experiment that has to make the student worse.
    """

    keyed_state = True

    scored: In[Scored]
    groups: Out[Group]

    def __init__(self, *, size: int, negate: bool = False) -> None:
        self.size = size
        self.negate = negate

    def facts(self) -> Facts:
        return Facts(group_size=self.size, keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        return [] if self.size >= 1 else [f"the group size is {self.size}; it needs at least 1"]

    async def run(self) -> None:
        async for members in self.scored.groups(self.size):
            samples = tuple(trainable(sample, self.advantages(sample)) for sample in members.items)
            await self.groups.send(Group(members.group_id, samples, members.size), made_from=members.items)

    def advantages(self, sample: Scored) -> Array:
        """The advantages of every token of `sample`. Raises ConfigError if no teacher has scored it."""
        if sample.teacher_logprobs is None:
            raise ConfigError(
                f"{self.name}: sample {sample.sample_id} carries no teacher logprobs; connect a Teacher node "
                "between generator and advantage"
            )
        advantages = distillation_advantages(sample.teacher_logprobs, sample.behavior_logprobs, sample.policy_mask)
        return -advantages if self.negate else advantages


def judgements(
    model: PolicyModel, samples: Sequence[Sample], temperature: float, *, token_budget: int
) -> list[Judgement]:
    """The judgement of each sample."""
    import torch

    from flowrl.training.model.row_layout import lay_out, policy_places

    device = next(model.parameters()).device
    found: dict[int, Judgement] = {}
    passes, trees = passes_over([sample.token_ids for sample in samples], token_budget, model.layout)
    for passed in passes:
        chosen = [samples[i] for i in passed]
        token_ids, masks = [s.token_ids for s in chosen], [s.policy_mask for s in chosen]
        rows = lay_out(token_ids, masks, layout="tree" if trees else "padded", device=device)
        with torch.no_grad():
            hidden_NK = model.hidden(rows)
            logprobs_N, _ = model.causal_lm.get_output_embeddings()(hidden_NK, rows.targets_N, temperature)
        places = [policy_places(mask) for mask in masks]
        ends = np.cumsum([len(where) for where in places])[:-1]
        parts = (np.split(tensor.float().cpu().numpy(), ends) for tensor in (logprobs_N, hidden_NK))
        for index, where, logprobs, hidden in zip(passed, places, *parts, strict=True):
            logprobs_T = np.zeros(len(samples[index].token_ids), np.float32)
            logprobs_T[where] = logprobs
            found[index] = logprobs_T, hidden
    return [found[index] for index in range(len(samples))]


def scored_by_teacher(sample: Sample, teacher_logprobs: Float32, hidden: Float32 | None = None) -> Scored:
    """`sample` with the teacher's logprobs, and their mean distance from the behavior policy's as its reward."""
    gap_T = distillation_advantages(teacher_logprobs, sample.behavior_logprobs, sample.policy_mask)
    reward = float(gap_T.sum()) / max(1, sample.response_tokens)
    fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(Sample)}
    fields |= {"teacher_logprobs": teacher_logprobs, "teacher_hidden": hidden}
    return Scored(**fields, reward=reward, raw_reward=reward, scored_s=time.time())


def _require_same_vocabulary(student: Policy, teacher: Policy) -> None:
    """Check what the files alone do not show. Raises ConfigError."""
    mine, other = (tokenizer_of(policy).get_vocab() for policy in (student, teacher))
    if mine != other:
        raise ConfigError(difference(student.model, mine, teacher.model, other))
