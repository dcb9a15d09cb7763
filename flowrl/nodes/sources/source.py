"""Where groups enter the graph: the training rows of a task."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, get_args

from flowrl.graph.facts import Facts
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, check_model, check_prompts, tokenizer_of
from flowrl.nodes.curricula.curriculum import Curriculum
from flowrl.nodes.sources.row_source import RowPart, RowSource
from flowrl.nodes.sources.row_trial import prompt_texts, require_rendered
from flowrl.nodes.sources.too_long import DroppedRows, TooLong, prompt_length, refuse_long, rendered_alone
from flowrl.tasks import Row, Rows, Task, check_answers, load_rows
from flowrl.tasks.mixture import first_rows, mixed_order
from flowrl.tasks.row_reading.other_columns import RowUse, require_served


class PromptSource(RowSource):
    """Sends every training row `repeat` times, as the members of one group; `part` selects held-out or all rows.

    `epochs=None` continues until the run's `--steps` are reached; without `--steps` it means one epoch. `seed`
    None means the run's seed. `num_prompts` limits the source to the first that many rows; for a mixture, to the first
    rows of each source in proportion to its weight.

    `too_long` says what happens to prompts of more than `max_prompt_tokens`: they are dropped, they lose their
    beginning, or they are an error before the first prompt is sent. The metrics `prompts_too_long` and
    `prompts_too_long_share` give their number and their share of the prompts the source has reached. A prompt's text
    stays whole.

    Prompts that the policy's chat template refuses are named before the run, or left out and counted
    (`rows_unrendered`), see `flowrl.nodes.sources.row_trial`.

    `answers_compared`: the task's own verifier judges the responses to the prompts, so its rows' answers have to be of
    the form that the verifier compares with.
    """

    row_noun = "prompts"
    row_use: RowUse = "prompts"

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
        self._dropped: DroppedRows

    def facts(self) -> Facts:
        return dataclasses.replace(super().facts(), longest_prompt=self.max_prompt_tokens)

    def check(self, facts: Any) -> list[str]:
        problems = super().check(facts)
        if self.max_prompt_tokens < 1:
            problems.append(f"max_prompt_tokens is {self.max_prompt_tokens}; it needs at least 1")
        if self.too_long not in get_args(TooLong):
            problems.append(f"too_long is {self.too_long!r}; choose one of {', '.join(get_args(TooLong))}")
        return problems

    def preflight(self) -> str | None:
        check_model(self.policy)
        rows = self.rows()
        require_served(self.task, rows, self.row_use)
        if self.answers_compared:
            check_answers(self.task, rows)
        self._buckets(rows)
        check_prompts(self.policy, rows, self.task.system_prompt)
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(Chat(tokenizer_of(self.policy), self.task.system_prompt), rows)
        return "; ".join(filter(None, (self._try_rows(rows), *self.read().opened))) or None

    def _try_rows(self, rows: Sequence[Row]) -> str | None:
        """Raise ConfigError for prompts that the template refuses; returns what is to be said of those left out."""
        return require_rendered(self.policy, self.task, rows, prompt_texts)

    async def setup(self) -> None:
        tokenizer = await self.blocking(tokenizer_of, self.policy, progress=self.context.progress)
        self._chat = Chat(tokenizer, self.task.system_prompt)
        await super().setup()
        most, name = self.max_prompt_tokens, self.task.name
        self._dropped = DroppedRows(
            len(self._rows), most, option="max_prompt_tokens", task=name, noun="training prompts", context=self.context
        )
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
        """Its members; none if the template does not render the prompt."""
        self._seen += 1
        rendered = self._dropped.rendered(row, lambda: self._chat.with_tools(row.tools).prompt(row.turns))
        if rendered is None:
            return []
        text, token_ids = rendered
        if len(token_ids) > self.max_prompt_tokens:
            self._long += 1
            self.context.metric("prompts_too_long", 1)
            if self.too_long == "truncate":
                token_ids = token_ids[-self.max_prompt_tokens :]
        if self._long:
            self.context.gauge("prompts_too_long_share", self._long / self._seen)
        return self.members(row.prompt_id, epoch, text=text, token_ids=token_ids, columns=row.columns)

    async def offer(self, group: list[Prompt]) -> bool:
        if not group or not self._dropped.fits(group[:1]):
            return True
        return await super().offer(group)

    def _order(self, epoch: int) -> list[int]:
        if len(self.task.sources) > 1:
            return mixed_order(self._rows, self.task, self._seed, epoch)
        return super()._order(epoch)

    def _refuse_long(self, chat: Chat, rows: Sequence[Row]) -> None:
        """Raise ConfigError if a prompt is too long."""
        lengths = rendered_alone(rows, lambda row: prompt_length(chat, row))
        option = "max_prompt_tokens"
        refuse_long(lengths, self.max_prompt_tokens, option=option, task=self.task.name, noun="prompts")
