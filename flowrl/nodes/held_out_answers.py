"""How one set of held-out rows is asked, and how its answers are scored: generated and scored, or played as episodes.

Functions and servers score answers, or a reward model, alone or in a sum. If a reward model scores, an answer's score
is the reward of training before shaping. Whether the answer is right is then a separate question, which the rows' own
verifier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flowrl.errors import SampleFailed
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.messages.episode import Episode
from flowrl.nodes.scoring.reward_model import ModelScore, ScoreQuestion, score_question
from flowrl.nodes.sources.row_source import SourceRow, sampling_seed
from flowrl.tasks import Row, Task, asked_columns, parts_of, reward_parts
from flowrl.tasks.checks.answer_checks import STRUCTURED
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.reward_calls.reward_client import RewardClient
from flowrl.tasks.rewards import MODEL, Part, beside_model, check_reward, is_sum, named_parts


@dataclass(frozen=True)
class Marked:
    """One answer, or one episode, with its score."""

    sample: Sample
    score: float
    correct: bool | None = None
    """Whether the answer is right; None if its score says so."""
    parts: Mapping[str, float] = field(default_factory=dict)
    """The parts of the score if a reward model is asked, by the names that training logs."""


@dataclass(frozen=True)
class ScoredBy:
    """The parts of the reward that scores a set."""

    functions: tuple[Part, ...]
    """Functions and servers."""
    weight: float | None = None
    """Weight of the reward model; None: none is asked."""
    verifier: tuple[Part, ...] = ()
    """The parts that decide whether an answer is right, if a model scores; () if the rows have no answers."""

    @classmethod
    def of_task(cls, task: Task, function: str | Callable[..., Any] | None = None) -> ScoredBy:
        """The parts of the reward of `task`, or of `function`, which is a function or a reward as text."""
        if function is not None and not isinstance(function, str):
            return cls(reward_parts(task, function))
        parts = parts_of(task, function or task.verifier)
        if all(part.place != MODEL for part in parts):
            return cls(parts)
        weight, others = beside_model(parts)
        return cls(others, weight)

    @property
    def by_model(self) -> bool:
        """Whether a reward model is asked."""
        return self.weight is not None

    @property
    def tells_right(self) -> bool:
        """Whether answers are right or wrong, in addition to having a score."""
        return bool(self.verifier) or not self.by_model

    def with_verifier(self, task: Task, rows: Sequence[Row]) -> ScoredBy:
        """This with the verifier that recognises right answers, if a model scores and all of `rows` have answers."""
        check = str(task.options.get("check", "exact")) if len(task.sources) == 1 else ""
        if not self.by_model or not all(
            row.answer is not None and (row.text_answer or check in STRUCTURED) for row in rows
        ):
            return self
        return replace(self, verifier=parts_of(task, task.own_verifier))

    def load_functions(self, rows: Sequence[Row]) -> ScoredBy:
        """This with all functions loaded. Raises ConfigError unless each of `rows` has the columns that they need."""
        functions, verifier = check_reward(self.functions, rows), check_reward(self.verifier, rows)
        return replace(self, functions=functions, verifier=verifier)

    @property
    def among_functions(self) -> Part | None:
        """The verifier, if it is one of the functions."""
        places = {part.place for part in self.verifier}
        return next((part for part in self.functions if part.place in places), None)


class HeldOutScores:
    """Scores the answers to rows of `task` as `by` says: by functions and servers, by the reward model behind `score`,
    or by a sum of both.

    `open_client` opens functions and servers, and is slow.
    """

    def __init__(
        self,
        by: ScoredBy,
        task: Task,
        score: Call[ScoreQuestion, ModelScore],
        *,
        open_client: Callable[[Sequence[Part]], RewardClient],
        count: Callable[[str, float], None],
    ) -> None:
        self.by, self._task, self._score, self._count = by, task, score, count
        self._functions = open_client(by.functions) if by.functions else None
        verifier = () if by.among_functions or not by.by_model else by.verifier
        self._verifier = open_client(verifier) if verifier else None
        """What decides whether answers are right; None if nothing does, or if one of the functions does."""

    async def _ask_verdicts(self, client: RewardClient, parts: Sequence[Part], sample: Sample, row: Row) -> Verdicts:
        """The verdicts about one answer to `row`. Raises BadReward."""
        columns = {**row.columns, **asked_columns(parts, self._task, row)}
        return await client.ask([sample.prompt_text], [sample.response_text], [columns])

    async def score_answer(self, sample: Sample, row: Row) -> Marked | None:
        """The score of an answer to `row`; None if there is none, and the answer does not count."""
        if not self.by.by_model:
            assert self._functions is not None, "a reward has parts"
            try:
                verdicts = await self._ask_verdicts(self._functions, self.by.functions, sample, row)
                return Marked(sample, verdicts.scores[0])
            except BadReward as bad:  # where functions give no score, it is 0
                self._count(f"evaluation_{bad.reason}", 1)
                return Marked(sample, 0.0)
        try:
            model = await self._score(score_question(sample, row))
            beside = None
            if self._functions is not None:
                beside = await self._ask_verdicts(self._functions, self.by.functions, sample, row)
        except (SampleFailed, BadReward) as bad:
            self._count(f"evaluation_{getattr(bad, 'reason', bad)}", 1)
            return None
        assert self.by.weight is not None
        score, parts = self.by.weight * model.reward, {MODEL: model.score, **model.parts}
        if beside is not None:
            score += beside.scores[0]
            parts |= named_parts(self.by.functions, beside)
        return Marked(sample, score, await self._is_right(sample, row, beside), parts)

    async def _is_right(self, sample: Sample, row: Row, beside: Verdicts | None) -> bool:
        """Whether the verifier gives full marks; False if there is no verifier."""
        among = self.by.among_functions
        if among is not None and beside is not None:
            return full_marks(beside.logs[among.name][0] if is_sum(self.by.functions) else beside.scores[0])
        if self._verifier is None:
            return False
        try:
            verdicts = await self._ask_verdicts(self._verifier, self.by.verifier, sample, row)
            return full_marks(verdicts.scores[0])
        except BadReward as bad:
            self._count(f"evaluation_{bad.reason}", 1)
            return False

    async def close(self) -> None:
        for client in (self._functions, self._verifier):
            if client is not None:
                await client.close()


@dataclass(frozen=True)
class HeldOutSet:
    """The rows of one task or environment, and how they are asked and scored."""

    name: str
    rows: Sequence[Any]
    num_samples: int
    """Number of answers to each row."""
    prompt_fields: Callable[[Any], Mapping[str, Any]]
    """The fields of a row's prompt that depend on the row's kind."""
    ask: Call[Prompt, Any]
    """What answers a prompt: a generator, or a node that plays it as an episode."""
    count: Callable[[str, float], None]
    scores: HeldOutScores | None = None
    """What scores an answer; None: the reward of an episode is its score."""

    @property
    def tells_right(self) -> bool:
        """Whether answers are right or wrong, in addition to having a score."""
        return self.scores is None or self.scores.by.tells_right

    def make_prompt(self, row: SourceRow, *, member: int, where: tuple[str, str, int]) -> Prompt:
        """The prompt of one member; `where` is the evaluation's name, phase and step."""
        name, phase, step = where
        group_id = f"{name}:{self.name}:{phase}:{step}:{row.prompt_id}"
        return Prompt(
            sample_id=f"{group_id}:{member}",
            group_id=group_id,
            prompt_id=row.prompt_id,
            epoch=0,
            member=member,
            group_size=self.num_samples,
            seed=sampling_seed(0, row.prompt_id, 0, member),
            **self.prompt_fields(row),
        )

    async def ask_and_score(self, prompt: Prompt, row: Any) -> Marked | None:
        """Ask and score; None if there is no answer or no score, so that the answer does not count."""
        try:
            sample: Sample = await self.ask(prompt)
        except SampleFailed as failure:  # such as a prompt beyond --engine.max-model-len, or an episode that fails
            self.count(f"evaluation_{failure}", 1)
            return None
        if self.scores is None:
            assert isinstance(sample, Episode)
            return Marked(sample, sample.raw_reward)
        return await self.scores.score_answer(sample, row)


CORRECT = 1.0 - 1e-6
"""A score of at least this is an exact match."""


def full_marks(score: float) -> bool:
    """Whether a verifier's score is that of a right answer."""
    return score >= CORRECT
