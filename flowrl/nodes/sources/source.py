"""Where groups enter the graph: the training rows of a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, check_model, check_prompts, tokenizer_of
from flowrl.nodes.curricula.curriculum import Curriculum
from flowrl.nodes.sources.row_source import RowPart, RowSource
from flowrl.nodes.sources.too_long import TooLong, prompt_length, refuse_long
from flowrl.tasks import Row, Rows, Task, check_answers, load_rows
from flowrl.tasks.mixture import first_rows, mixed_order


class PromptSource(RowSource):
    """Sends every training row `repeat` times, as the members of one group; `part` selects held-out or all rows.

    `epochs=None` continues until the run's `--steps` are reached; without `--steps` it means one epoch. `seed`
    None means the run's seed. `num_prompts` limits the source to the first that many rows; for a mixture, to the first
    rows of each source in proportion to its weight.

    `too_long` says what happens to prompts of more than `max_prompt_tokens`: they are dropped, they lose their
    beginning, or they are an error before the first prompt is sent. The metrics `prompts_too_long` and
    `prompts_too_long_share` give their number and their share of the prompts the source has reached. A prompt's text
    stays whole.

    `answers_compared`: the task's own verifier judges the responses to the prompts, so its rows' answers have to be of
    the form that the verifier compares with.
    """

    row_noun = "prompts"

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        repeat: int = 1,
        epochs: int | None = None,
        seed: int | None = None,
        max_prompt_tokens: int = 512,
        part: RowPart = "train",
        num_prompts: int | None = None,
        too_long: TooLong = "drop",
        curriculum: Curriculum | None = None,
        answers_compared: bool = True,
    ) -> None:
        super().__init__(
            repeat=repeat, epochs=epochs, seed=seed, part=part, num_prompts=num_prompts, curriculum=curriculum
        )
        self.task = task
        self.policy = policy
        self.max_prompt_tokens = max_prompt_tokens
        self.too_long: TooLong = too_long
        self.answers_compared = answers_compared
        self._seen = self._long = 0
        """Number of prompts so far, and number of those that were too long."""
        self._passed_over = 0
        """Number of prompts that were too long since the last prompt of valid length."""

    def facts(self) -> Facts:
        return dataclasses.replace(super().facts(), longest_prompt=self.max_prompt_tokens)

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.max_prompt_tokens < 1:
            problems.append(f"max_prompt_tokens is {self.max_prompt_tokens}; it needs at least 1")
        if self.too_long not in get_args(TooLong):
            problems.append(f"too_long is {self.too_long!r}; choose one of {', '.join(get_args(TooLong))}")
        return problems

    def preflight(self) -> None:
        check_model(self.policy)
        rows = self.rows()
        if self.answers_compared:
            check_answers(self.task, rows)
        self._buckets(rows)
        check_prompts(self.policy, rows, self.task.system_prompt)
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(Chat(tokenizer_of(self.policy), self.task.system_prompt), rows)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        await super().setup()
        if self.too_long == "error":
            await self.blocking(self._refuse_long, self._chat, self._rows)
        self._say(await self.blocking(self.read))

    def _say(self, found: Rows) -> None:
        """Report how many rows are used, and why the others are not."""
        unused = len(found.train) + len(found.held_out) - len(self._rows)
        others = [f"{unused} held out or not asked for"] if unused else []
        others += [f"{found.repeated} with the prompt of another row left out"] if found.repeated else []
        others += [f"{found.low_scores} with a score below min_score left out"] if found.low_scores else []
        self.context.progress(", ".join([f"{len(self._rows)} {self.row_noun}", *others]))
        for name, number in (("rows_repeated", found.repeated), ("rows_below_min_score", found.low_scores)):
            if number:
                self.context.metric(name, number)
        self.say_skipped(found)

    def say_skipped(self, found: Rows) -> None:
        """Report the rows that were skipped because they are malformed."""
        if skipped := found.skipped:
            self.context.metric("rows_skipped", len(skipped))
            self.context.progress(f"{len(skipped)} malformed rows are skipped, the first: {skipped[0]}")

    def rows(self) -> Sequence[Row]:
        rows = self.read()
        return first_rows(self.of_part(rows.train, rows.held_out), self.task, self.num_prompts)

    def read(self) -> Rows:
        """All rows; a process reads them only once."""
        return load_rows(self.task, whole=self.part == "all")

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        text, token_ids = self._chat.with_tools(row.tools).prompt(row.turns)
        self._seen += 1
        if len(token_ids) > self.max_prompt_tokens:
            self._long += 1
            self.context.metric("prompts_too_long", 1)
            if self.too_long == "truncate":
                token_ids = token_ids[-self.max_prompt_tokens :]
        if self._long:
            self.context.gauge("prompts_too_long_share", self._long / self._seen)
        return self.members(row.prompt_id, epoch, text=text, token_ids=token_ids, columns=row.columns)

    async def offer(self, group: list[Prompt]) -> bool:
        if len(group[0].token_ids) > self.max_prompt_tokens:
            self._pass_over()
            return True
        admitted = await super().offer(group)
        self._passed_over = 0
        return admitted

    def _order(self, epoch: int) -> list[int]:
        if len(self.task.sources) > 1:
            return mixed_order(self._rows, self.task, self._seed, epoch)
        return super()._order(epoch)

    def _pass_over(self) -> None:
        self._passed_over += 1
        if self._passed_over >= len(self._rows):
            raise ConfigError(
                f"all {len(self._rows)} training prompts of {self.task.name!r} are longer than max_prompt_tokens = "
                f"{self.max_prompt_tokens}; raise it"
            )

    def _refuse_long(self, chat: Chat, rows: Sequence[Row]) -> None:
        """Raise ConfigError if a prompt is too long."""
        lengths = (prompt_length(chat, row) for row in rows)
        option = "max_prompt_tokens"
        refuse_long(lengths, self.max_prompt_tokens, option=option, task=self.task.name, noun="prompts")
