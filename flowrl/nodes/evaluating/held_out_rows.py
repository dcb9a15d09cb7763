"""The held-out rows that an evaluation asks: rows that are answered and scored, or played."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from flowrl.episode import Episode
from flowrl.errors import SampleFailed
from flowrl.graph.ports import Call
from flowrl.messages import Prompt, Sample
from flowrl.models import Chat
from flowrl.nodes.evaluating.held_out_scores import HeldOutScores, Marked
from flowrl.nodes.sources.row_source import SourceRow, sampling_seed
from flowrl.tasks import Row
from flowrl.tasks.evaluation_set import EvaluationSet


class HeldOutRows(Protocol):
    """The rows of one task or environment."""

    name: str
    num_samples: int
    """Number of answers to each row."""
    tells_right: bool
    """Whether answers are right or wrong, in addition to having a score."""

    @property
    def rows(self) -> Sequence[SourceRow]: ...

    def fields(self, row: Any) -> Mapping[str, Any]:
        """The fields of the row's prompt that depend on the row's kind."""
        ...

    async def judge(self, prompt: Prompt, row: Any) -> Marked | None:
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

    def fields(self, row: Row) -> Mapping[str, Any]:
        text, token_ids = self._chat.with_tools(row.tools).prompt(row.turns)
        asked = token_ids if self._most is None else token_ids[-self._most :]
        return {"text": text, "token_ids": asked, "columns": row.columns, **self._asked_as}

    async def judge(self, prompt: Prompt, row: Row) -> Marked | None:
        try:
            sample = await self._generate(prompt)
        except SampleFailed as failure:  # such as a prompt beyond --engine.max-model-len
            self._count(f"evaluation_{failure}", 1)
            return None
        return await self._scores.of(sample, row)

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
        self._fields, self._play, self._count = fields, play, count

    def fields(self, row: SourceRow) -> Mapping[str, Any]:
        return self._fields(row)

    async def judge(self, prompt: Prompt, row: SourceRow) -> Marked | None:
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
        **asked.fields(row),
    )
