"""Distillation: a teacher scores every token that the student sampled."""

from __future__ import annotations

import string
from dataclasses import replace
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In, Out
from flowrl.messages import Bool, Float32, Group, Int32, Sample, Scored, Trainable
from flowrl.models import Policy, require_same_vocabulary, tokenizer_of
from flowrl.models.tokens.chat import render_chat, token_ids
from flowrl.models.tokens.vocabulary import untold_vocabulary, vocabulary_problem
from flowrl.nodes.scoring.scoring_model import ScoringNode, SharedPass, require_one_sequence
from flowrl.training.advantages import Array, distillation_advantages
from flowrl.training.settings import Dtype, Layout

Judgement = tuple[Float32, Float32]
"""(log p of the policy tokens at their positions, 0 elsewhere; the last hidden state of each policy token)."""


class Teacher(ScoringNode):
    """Adds `teacher_logprobs` to the samples of `student`, whose vocabulary has to equal the teacher's.

    A sample's reward is the mean over its policy tokens of log π_teacher − log π_b, a per-token estimate
    of −KL(π_b‖π_teacher). `temperature` has to equal the generator's: logits are divided by it. With
    `exact`, samples also carry the teacher's hidden states, which the objective `ReverseKL` needs.

    `shown` is what the teacher reads before each sample and the student does not, with columns of the sample's row in
    braces, as in "An answer: {answer}". It is a system message where the teacher has a chat template, else the text as
    it is. A teacher that is the student itself then teaches by what it is shown (SDFT, arXiv 2601.19897).

    At most `batch` samples wait for a pass at the same time. One pass takes at most `token_budget` tokens, padding
    included, or a single longer sample. `layout` says whether prefixes that samples share are computed once, see
    `ZeroSettings`.
    """

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
        shown: str = "",
        token_budget: int = 8192,
        batch: int = 64,
        layout: Layout = "auto",
    ) -> None:
        super().__init__(
            policy, dtype=dtype, token_budget=token_budget, layout=layout, batch=batch, temperature=temperature
        )
        self.student = student
        self.exact = exact
        self.shown = shown
        self._tokenizer: Any = None
        self._pass = SharedPass(self, "teach", self._judge_samples)

    def facts(self) -> Facts:
        return Facts(concurrency=self.batch)

    def check(self, facts: Any) -> list[str]:
        problems = [vocabulary_problem(self.student, self.policy), describe_bad_text(self.shown)]
        return [*filter(None, problems), *super().check(facts)]

    def preflight(self) -> str | None:
        said = super().preflight()
        if untold_vocabulary(self.student, self.policy):
            require_same_vocabulary(self.student, self.policy)
        return said

    async def setup(self) -> None:
        await super().setup()
        if self.shown:
            self._tokenizer = await self.blocking(tokenizer_of, self.policy)

    async def run(self) -> None:
        await self.rollouts.each(self._score_sample, concurrency=self.batch)

    async def _score_sample(self, sample: Sample) -> None:
        require_one_sequence([sample], "a Teacher")
        logprobs, hidden = await self._pass.ask_model(sample)
        scored = scored_by_teacher(sample, logprobs, hidden if self.exact else None)
        await self.scored.send(scored)

    def _judge_samples(self, samples: list[Sample]) -> list[Judgement]:
        from flowrl.training.scoring_models import judgements_of

        items: list[tuple[Int32, Bool]] = []
        starts = []
        for sample in samples:
            before = shown_before(sample, self.shown, self._tokenizer)
            # A token that begins texts begins only what the teacher is shown.
            cut = int(bool(before.size) and before[0] == sample.token_ids[0] == self._tokenizer.bos_token_id)
            nothing = np.zeros(before.size, np.bool_)
            tokens = np.concatenate([before, sample.token_ids[cut:]])
            items.append((tokens, np.concatenate([nothing, sample.policy_mask[cut:]])))
            starts.append(before.size - cut)
        judged = self.score_items(judgements_of, items, self.temperature)
        return [(logprobs[start:], hidden) for start, (logprobs, hidden) in zip(starts, judged, strict=True)]


def describe_bad_text(shown: str) -> str | None:
    """What is wrong with the braces of a text that a teacher is shown; None: nothing."""
    try:
        names = [name for _, name, _, _ in string.Formatter().parse(shown) if name is not None]
    except ValueError as problem:
        return f"shown is {shown!r}: {problem}; write {{{{ and }}}} for braces that name no column"
    wrong = [name for name in names if not name.isidentifier()]
    if wrong:
        return f"shown is {shown!r}, and {{{wrong[0]}}} names no column of a row; write {{answer}}, for instance"
    return None


def shown_before(sample: Sample, shown: str, tokenizer: Any) -> Int32:
    """The tokens that a teacher reads before those of the sample. Raises ConfigError if its row lacks a column."""
    if not shown:
        return np.zeros(0, np.int32)
    try:
        text = shown.format_map(sample.columns)
    except KeyError as lacking:
        raise ConfigError(
            f"the teacher is shown {shown!r}, but the row of sample {sample.sample_id} has no column {lacking}; it has "
            f"{', '.join(sample.columns) or 'none'}"
        ) from None
    if tokenizer.chat_template:
        text = render_chat(tokenizer, [{"role": "system", "content": text}])
    return token_ids(tokenizer, text)


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
            samples = tuple(Trainable.of(sample, self.token_advantages(sample)) for sample in members.items)
            await self.groups.send(Group(members.group_id, samples, members.size), made_from=members.items)

    def token_advantages(self, sample: Scored) -> Array:
        """The advantages of every token of `sample`. Raises ConfigError if no teacher has scored it."""
        if sample.teacher_logprobs is None:
            raise ConfigError(
                f"{self.name}: sample {sample.sample_id} carries no teacher logprobs; connect a Teacher node "
                "between generator and advantage"
            )
        advantages = distillation_advantages(sample.teacher_logprobs, sample.behavior_logprobs, sample.policy_mask)
        return -advantages if self.negate else advantages


def scored_by_teacher(sample: Sample, teacher_logprobs: Float32, hidden: Float32 | None = None) -> Scored:
    """`sample` with the teacher's logprobs, and their mean distance from the behavior policy's as its reward."""
    gap_T = distillation_advantages(teacher_logprobs, sample.behavior_logprobs, sample.policy_mask)
    reward = float(gap_T.sum()) / max(1, sample.response_tokens)
    taught = replace(sample, teacher_logprobs=teacher_logprobs, teacher_hidden=hidden)
    return Scored.of(taught, reward)
