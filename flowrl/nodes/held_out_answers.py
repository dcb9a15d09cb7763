"""How one set of held-out rows is asked, and how its answers are scored: generated and scored, or played as episodes.

Functions and servers score answers, or a reward model, alone or in a sum. If a reward model scores, an answer's score
is the reward of training before shaping. Whether the answer is right is then a separate question, which the rows' own
verifier answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flowrl.errors import SampleFailed
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.messages.episode import Episode
from flowrl.models import Chat
from flowrl.nodes.scoring.reward_model import ModelScore, ScoreQuestion, score_question
from flowrl.nodes.sources.row_source import SourceRow, sampling_seed
from flowrl.tasks import Row, Task, asked_columns, parts_of, reward_parts
from flowrl.tasks.checks.answer_checks import STRUCTURED
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.tasks.reward_calls.judge import BadReward, Verdicts
from flowrl.tasks.reward_calls.reward_client import RewardClient
from flowrl.tasks.rewards import MODEL, Part, beside_model, check_reward, is_sum, named_parts


class HeldOutRows(Protocol):
    """The rows of one task or environment."""

    name: str
    num_samples: int
    """Number of answers to each row."""
    tells_right: bool
    """Whether answers are right or wrong, in addition to having a score."""

    @property
    def rows(self) -> Sequence[SourceRow]: ...

    def prompt_fields(self, row: Any) -> Mapping[str, Any]:
        """The fields of the row's prompt that depend on the row's kind."""
        ...

    async def ask_and_score(self, prompt: Prompt, row: Any) -> Marked | None:
        """Ask and score; None if there is no score, so that the answer does not count."""
        ...

    async def close(self) -> None: ...


class HeldOutTask:
    """A task: a generator answers, and `scores` scores the answers."""

    def __init__(
        self,
        asked: EvaluationSet,
        rows: Sequence[Row],
        chat: Chat,
        scores: HeldOutScores,
        *,
        most: int | None,
        generate: Call[Prompt, Sample],
        tells_right: bool,
        count: Callable[[str, float], None],
    ) -> None:
        """Prompts of more than `most` tokens lose their beginning. A prompt that is not answered has no score."""
        self.name, self.num_samples, self.rows, self.tells_right = asked.name, asked.samples, rows, tells_right
        self._chat, self._asked_as, self._most = chat, asked.asked_as, most
        self._generate, self._scores, self._count = generate, scores, count

    def prompt_fields(self, row: Row) -> Mapping[str, Any]:
        text, token_ids = self._chat.with_tools(row.tools).encode_prompt(row.turns)
        asked = token_ids if self._most is None else token_ids[-self._most :]
        return {"text": text, "token_ids": asked, "columns": row.columns, **self._asked_as}

    async def ask_and_score(self, prompt: Prompt, row: Row) -> Marked | None:
        try:
            sample = await self._generate(prompt)
        except SampleFailed as failure:  # such as a prompt beyond --engine.max-model-len
            self._count(f"evaluation_{failure}", 1)
            return None
        return await self._scores.score_answer(sample, row)

    async def close(self) -> None:
        await self._scores.close()


class HeldOutEpisodes:
    """Rows that a node plays as episodes: the reward is the score. An episode that fails has no score.

    `fields` gives the fields of a row's prompt: for a row of an environment, or for a row of a task for agents.
    """

    tells_right = True

    def __init__(
        self,
        name: str,
        rows: Sequence[SourceRow],
        *,
        num_samples: int,
        fields: Callable[[Any], Mapping[str, Any]],
        play: Call[Prompt, Episode],
        count: Callable[[str, float], None],
    ) -> None:
        self.name, self.num_samples, self.rows = name, num_samples, rows
        self.prompt_fields, self._play, self._count = fields, play, count

    async def ask_and_score(self, prompt: Prompt, row: SourceRow) -> Marked | None:
        try:
            episode = await self._play(prompt)
        except SampleFailed as failure:
            self._count(f"evaluation_{failure}", 1)
            return None
        return Marked(episode, episode.raw_reward)

    async def close(self) -> None: ...


def held_out_prompt(asked: HeldOutRows, row: SourceRow, *, member: int, where: tuple[str, str, int]) -> Prompt:
    """The prompt of one member; `where` is the evaluation's name, phase and step."""
    name, phase, step = where
    group_id = f"{name}:{asked.name}:{phase}:{step}:{row.prompt_id}"
    return Prompt(
        sample_id=f"{group_id}:{member}",
        group_id=group_id,
        prompt_id=row.prompt_id,
        epoch=0,
        member=member,
        group_size=asked.num_samples,
        seed=sampling_seed(0, row.prompt_id, 0, member),
        **asked.prompt_fields(row),
    )


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


class HeldOutScores(Protocol):
    """Scores one set."""

    async def score_answer(self, sample: Sample, row: Row) -> Marked | None:
        """The score of an answer to `row`; None if there is none, and the answer does not count."""
        ...

    async def close(self) -> None: ...


class AskedFunctions:
    """A client of functions and servers, and the columns that it gets for a row."""

    def __init__(self, client: RewardClient, parts: Sequence[Part], task: Task) -> None:
        self._client, self._parts, self._task = client, parts, task

    async def ask_verdicts(self, sample: Sample, row: Row) -> Verdicts:
        """The verdicts about one answer to `row`. Raises BadReward."""
        columns = {**row.columns, **asked_columns(self._parts, self._task, row)}
        return await self._client.ask([sample.prompt_text], [sample.response_text], [columns])

    async def close(self) -> None:
        await self._client.close()


class FunctionScores:
    """Scores by functions and servers, with 0 where they give no score."""

    def __init__(self, asked: AskedFunctions, count: Callable[[str, float], None]) -> None:
        self._asked, self._count = asked, count

    async def score_answer(self, sample: Sample, row: Row) -> Marked:
        try:
            return Marked(sample, (await self._asked.ask_verdicts(sample, row)).scores[0])
        except BadReward as bad:
            self._count(f"evaluation_{bad.reason}", 1)
            return Marked(sample, 0.0)

    async def close(self) -> None:
        await self._asked.close()


class ModelScores:
    """Scores by the reward model behind `score`, with the weight of `by`, and by `functions` if the reward is a sum."""

    def __init__(
        self,
        by: ScoredBy,
        score: Call[ScoreQuestion, ModelScore],
        *,
        functions: AskedFunctions | None,
        verifier: AskedFunctions | None,
        count: Callable[[str, float], None],
    ) -> None:
        """`verifier` decides whether answers are right; None if nothing does, or if one of the functions does."""
        self._by, self._score, self._count = by, score, count
        self._functions, self._verifier = functions, verifier

    async def score_answer(self, sample: Sample, row: Row) -> Marked | None:
        try:
            model = await self._score(score_question(sample, row))
            beside = None if self._functions is None else await self._functions.ask_verdicts(sample, row)
        except (SampleFailed, BadReward) as bad:
            self._count(f"evaluation_{getattr(bad, 'reason', bad)}", 1)
            return None
        assert self._by.weight is not None
        score, parts = self._by.weight * model.reward, {MODEL: model.score, **model.parts}
        if beside is not None:
            score += beside.scores[0]
            parts |= named_parts(self._by.functions, beside)
        return Marked(sample, score, await self._is_right(sample, row, beside), parts)

    async def _is_right(self, sample: Sample, row: Row, beside: Verdicts | None) -> bool:
        """Whether the verifier gives full marks; False if there is no verifier."""
        among = self._by.among_functions
        if among is not None and beside is not None:
            return full_marks(beside.logs[among.name][0] if is_sum(self._by.functions) else beside.scores[0])
        if self._verifier is None:
            return False
        try:
            return full_marks((await self._verifier.ask_verdicts(sample, row)).scores[0])
        except BadReward as bad:
            self._count(f"evaluation_{bad.reason}", 1)
            return False

    async def close(self) -> None:
        for asked in (self._functions, self._verifier):
            if asked is not None:
                await asked.close()


def open_scores(
    by: ScoredBy,
    task: Task,
    score: Call[ScoreQuestion, ModelScore],
    *,
    open_client: Callable[[Sequence[Part]], RewardClient],
    count: Callable[[str, float], None],
) -> HeldOutScores:
    """The object that scores the answers to rows of `task`; `open_client` opens functions and servers, and is slow."""

    def open_functions(parts: Sequence[Part]) -> AskedFunctions | None:
        return AskedFunctions(open_client(parts), parts, task) if parts else None

    functions = open_functions(by.functions)
    if not by.by_model:
        assert functions is not None, "a reward has parts"
        return FunctionScores(functions, count)
    verifier = None if by.among_functions else open_functions(by.verifier)
    return ModelScores(by, score, functions=functions, verifier=verifier, count=count)


CORRECT = 1.0 - 1e-6
"""A score of at least this is an exact match."""


def full_marks(score: float) -> bool:
    """Whether a verifier's score is that of a right answer."""
    return score >= CORRECT
