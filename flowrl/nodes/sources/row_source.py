"""Where groups enter the graph: rows in an order that depends only on seed and epoch, with a cursor for checkpoints.

`RowSource` is what all sources have in common; the others say which rows they send: the prompts of a task as tokens, a
task's questions as messages for agents, or the rows of an environment.

With a curriculum, further rows, chosen by the outcomes of earlier groups, come between the rows of this order
(`flowrl.nodes.curriculum`).
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol, TypeVar, get_args

import numpy as np

from flowrl.environments import EnvironmentName, EnvironmentRow, EnvironmentRows, environment_rows
from flowrl.environments.task_questions import question_row
from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node, Saved
from flowrl.graph.ports import Out, Serve
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, check_model, check_prompts
from flowrl.nodes.curriculum import ChosenRow, Curriculum, GroupOutcome, Noted, PassRates
from flowrl.nodes.sources.row_checks import (
    DroppedRows,
    TooLong,
    open_chat,
    prompt_length,
    prompt_texts,
    refuse_long_rows,
    rendered_alone,
    require_rendered,
)
from flowrl.tasks import Row, Rows, Task, check_answers, conversation, load_rows
from flowrl.tasks.mixture import first_rows, mixed_order
from flowrl.tasks.row_reading.row_loading import RowUse, require_served
from flowrl.tasks.row_reading.rows_on_disk import join_rows, prompt_ids
from flowrl.training.advantages import all_equal

RowPart = Literal["train", "held_out", "all"]


class SourceRow(Protocol):
    """What a source needs of a row."""

    @property
    def prompt_id(self) -> str:
        """The same for the same row, in every run."""
        ...


R = TypeVar("R", bound=SourceRow)


class RowSource(Node):
    """Sends every row `repeat` times, as the members of one group. Subclasses say which rows, and what is sent.

    `epochs=None` continues until the run's `--steps` are reached; without `--steps` it means one epoch. `seed`
    None means the run's seed. `part` selects training rows, held-out rows or all; `num_prompts` limits the source to
    the first that many rows.

    With a `curriculum`, the node that collects groups has to be joined to `outcomes`: `g.call(advantage.outcomes,
    source.outcomes)`. Rows that the curriculum chooses come in addition to the rows of an epoch, and the `epoch` of a
    prompt is then how often its row was asked before.
    """

    prompts: Out[Prompt]
    outcomes: Serve[GroupOutcome, Noted]

    def __init__(
        self,
        *,
        repeat: int,
        epochs: int | None,
        seed: int | None,
        part: RowPart,
        num_prompts: int | None,
        curriculum: Curriculum | None = None,
    ) -> None:
        self.repeat = repeat
        self.epochs = epochs
        self.seed = seed
        self.part: RowPart = part
        self.num_prompts = num_prompts
        self._rows: Sequence[Any] = ()
        self._epoch = 0
        self._position = 0
        self._digests: dict[int, str] = {}
        """Epoch -> digest of its prompts in their order."""
        self.curriculum = curriculum if curriculum is not None and curriculum.used else None
        self._rates: PassRates | None = None
        self._saved: Mapping[str, Any] = {}
        self._waiting: ChosenRow | None = None
        """With a curriculum: the row of the group that waits for its ticket."""
        self.task: Task | None = None
        """The task whose rows are sent, if they are those of a task: a mixture has an order and shares of its own."""

    def facts(self) -> Facts:
        return Facts(group_size=self.repeat, optional=() if self.curriculum else ("outcomes",))

    def check(self, facts: Any) -> list[str]:
        ranges = [(name, getattr(self, name)) for name in ("repeat", "epochs", "num_prompts")]
        problems = [
            f"{name} is {value}; it needs at least 1" for name, value in ranges if value is not None and value < 1
        ]
        if self.part not in get_args(RowPart):
            problems.append(f"part is {self.part!r}; choose one of {', '.join(get_args(RowPart))}")
        return problems + list(self.curriculum.find_problems() if self.curriculum else ())

    async def setup(self) -> None:
        self._seed = self.context.seed if self.seed is None else self.seed
        self._rows = await self.blocking(self.rows)
        if self.curriculum is not None:
            names = [*prompt_ids(self._rows)]
            self._rates = PassRates(self.curriculum, names, self._row_buckets(self._rows), seed=self._seed)
            self._load_curriculum()

    def _row_buckets(self, rows: Sequence[Any]) -> list[str] | None:
        """The bucket of each row; None if each row has its own. Raises ConfigError if no row has the column."""
        by = self.curriculum.by if self.curriculum else ""
        if by and rows and not any(by in row.columns for row in rows):
            raise ConfigError(
                f"curriculum.by is {by!r}, and no row has this column; choose one of "
                f"{', '.join(sorted(rows[0].columns)) or 'none, and leave it out'}"
            )
        return [str(row.columns.get(by)) for row in rows] if by else None

    def rows(self) -> Sequence[Any]:
        """The rows of an epoch."""
        raise NotImplementedError

    def group(self, row: Any, epoch: int) -> list[Prompt]:
        """The members of the group of `row` in `epoch`; none if the row is left out."""
        raise NotImplementedError

    async def run(self) -> None:
        if self._rates is None:
            for epoch, position, row in self._from_cursor():
                group = self.group(row, epoch)
                if group and not await self.prompts.admit(group):
                    return
                self._epoch, self._position = epoch, position + 1
            return
        notes = asyncio.create_task(self.outcomes.each(self._note_outcome))
        try:
            await self._send_chosen_rows(self._rates)
            self.prompts.close()
            await notes
        finally:
            notes.cancel()

    async def _send_chosen_rows(self, rates: PassRates) -> None:
        """Send groups until no further group is wanted, or the last epoch has ended."""
        ordered = self._from_cursor()
        numbers = {prompt_id: index for index, prompt_id in enumerate(prompt_ids(self._rows))}
        while True:
            # A group that was waiting when a checkpoint was taken comes first: some of its members may have been sent.
            found = self._waiting or rates.choose_row()
            place = None
            if found is None or found.reason == "order":
                if (place := next(ordered, None)) is None:
                    return
                found = ChosenRow(numbers[place[2].prompt_id], "order")
            if self._waiting is None:
                rates.note_asked(found.row)  # before it is sent: its outcome may arrive while the last member is sent
                self._waiting = found
            group = self.group(self._rows[found.row], rates.num_visits(found.row) - 1)
            if group and not await self.prompts.admit(group):
                return
            self._waiting = None
            if place is not None:
                self._epoch, self._position = place[0], place[1] + 1
            self.context.metric("prompts_chosen", found.reason == "chosen")
            self.context.metric("prompts_replayed", found.reason == "replayed")
            if found.pass_rate is not None and found.reason == "chosen":
                self.context.gauge("chosen_pass_rate", found.pass_rate)

    async def _note_outcome(self, outcome: GroupOutcome) -> Noted:
        assert self._rates is not None
        is_new = self._rates.note_outcome(outcome)
        if is_new:
            self.context.gauge("all_equal_share", all_equal(outcome.raw_rewards))
            self.context.gauge("prompts_solved", self._rates.num_at(1.0))
            self.context.gauge("prompts_unsolved", self._rates.num_at(0.0))
        return Noted(is_new)

    def make_members(self, prompt_id: str, epoch: int, **fields: Any) -> list[Prompt]:
        """The prompts of one group; `fields` are the fields that are the same in all of them."""
        group_id = f"{self.name}:{epoch}:{prompt_id}"
        return [
            Prompt(
                sample_id=f"{group_id}:{member}",
                group_id=group_id,
                prompt_id=prompt_id,
                epoch=epoch,
                member=member,
                group_size=self.repeat,
                seed=sampling_seed(self._seed, prompt_id, epoch, member),
                **fields,
            )
            for member in range(self.repeat)
        ]

    def part_rows(self, found: Rows | EnvironmentRows) -> Sequence[Any]:
        """The rows of `part`, at most `num_prompts`; a mixture keeps its weights in them."""
        rows: Sequence[Any] = found.train if self.part == "train" else found.held_out
        if self.part == "all":
            rows = join_rows(found.train, found.held_out)
        return rows[: self.num_prompts] if self.task is None else first_rows(rows, self.task, self.num_prompts)

    def state(self) -> Mapping[str, Any]:
        cursor = {"epoch": self._epoch, "position": self._position, "order": self._digests.get(self._epoch, "")}
        if self._rates is None:
            return cursor
        waits = [self._waiting.row, self._waiting.reason] if self._waiting else []
        return {**cursor, "curriculum": self._rates.state(), "waiting": waits}

    def check_resume(self, saved: Saved) -> list[str]:
        """Refuse another order, for which the cursor is not valid: prompts would be sent twice or never."""
        self._seed = saved.seed if self.seed is None else self.seed
        self._rows = self.rows()
        if any(("curriculum" in state) != (self.curriculum is not None) for state in saved.states.values()):
            return ["the run was started with a curriculum, or without one; resume it as it was started"]
        epochs = {int(s["epoch"]): s["order"] for s in saved.states.values() if s["position"] and s.get("order")}
        return [
            f"the prompts of epoch {epoch} differ from those that the run was started with, or their order does; "
            "resume with the task, data and seed it was started with, or start a new run from the checkpoint's model"
            for epoch, order in epochs.items()
            if order != self._digest_of_order(self._epoch_order(epoch))
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._saved = state
        self._load_curriculum()

    def _load_curriculum(self) -> None:
        """Load the curriculum's state from a checkpoint, as soon as both the curriculum and that state exist."""
        if self._rates is not None and "curriculum" in self._saved:
            self._rates.load_state(self._saved["curriculum"])
            self._waiting = ChosenRow(*self._saved["waiting"]) if self._saved["waiting"] else None

    def _from_cursor(self) -> Iterator[tuple[int, int, Any]]:
        """(epoch, position, row) of all rows that are not sent yet."""
        epochs = self.epochs if self.epochs is not None or self.context.steps is not None else 1
        epoch, start = self._epoch, self._position
        while epochs is None or epoch < epochs:
            if not (order := self._epoch_order(epoch)):  # no rows: this epoch and all later ones would be empty
                return
            self._digests[epoch] = self._digest_of_order(order)
            for position in range(start, len(order)):
                yield epoch, position, self._rows[order[position]]
            epoch, start = epoch + 1, 0

    def _epoch_order(self, epoch: int) -> list[int]:
        """The order of an epoch; that of a mixture draws from each source by its weight."""
        if self.task is not None and len(self.task.sources) > 1:
            return mixed_order(self._rows, self.task, self._seed, epoch)
        return epoch_order(len(self._rows), self._seed, epoch)

    def _digest_of_order(self, order: Sequence[int]) -> str:
        """The digest of the prompts in this order."""
        names = [*prompt_ids(self._rows)]
        found = hashlib.blake2b(digest_size=8)
        for index in order:
            found.update(names[index].encode())
        return found.hexdigest()


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a permutation determined by (seed, epoch)."""
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def sampling_seed(seed: int, prompt_id: str, epoch: int, member: int) -> int:
    """A 31-bit seed for the sampler of one member."""
    text = f"{seed}/{prompt_id}/{epoch}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


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
    (`rows_unrendered`), see `flowrl.nodes.sources.row_checks`.

    `answers_compared`: the task's own verifier judges the responses to the prompts, so its rows' answers have to be of
    the form that the verifier compares with.
    """

    row_noun = "prompts"
    row_use: RowUse = "prompts"
    prompts_alone = True
    """Whether prompts are all that is rendered of a row; else another node renders whole rows, limits and tries them.
    """
    task: Task

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
        longest = self.max_prompt_tokens if self.prompts_alone else None
        return dataclasses.replace(super().facts(), longest_prompt=longest)

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
        self._row_buckets(rows)
        check_prompts(self.policy, rows, self.task.system_prompt)
        if self.too_long == "error" and not self.policy.built_in:
            self._refuse_long(open_chat(self.task, self.policy), rows)
        said = require_rendered(self.policy, self.task, rows, prompt_texts) if self.prompts_alone else None
        return "; ".join(filter(None, (said, *self.read_rows().opened))) or None

    async def setup(self) -> None:
        self._chat = await self.blocking(open_chat, self.task, self.policy, self.context.progress)
        await super().setup()
        most, name = self.max_prompt_tokens, self.task.name
        self._dropped = DroppedRows(
            len(self._rows), most, option="max_prompt_tokens", task=name, noun="training prompts", context=self.context
        )
        if self.too_long == "error":
            await self.blocking(self._refuse_long, self._chat, self._rows)
        self._report_rows(await self.blocking(self.read_rows))

    def _report_rows(self, found: Rows) -> None:
        """Report how many rows are used, and why the others are not."""
        unused = len(found.train) + len(found.held_out) - len(self._rows)
        others = [f"{unused} held out or not asked for"] if unused else []
        others += [f"{found.repeated} with the prompt of another row left out"] if found.repeated else []
        others += [f"{found.low_scores} with a score below min_score left out"] if found.low_scores else []
        self.context.progress(", ".join([f"{len(self._rows)} {self.row_noun}", *others]))
        for name, number in (("rows_repeated", found.repeated), ("rows_below_min_score", found.low_scores)):
            if number:
                self.context.metric(name, number)
        self.report_skipped(found)

    def report_skipped(self, found: Rows) -> None:
        """Report the rows that were skipped because they are malformed."""
        if skipped := found.skipped:
            self.context.metric("rows_skipped", len(skipped))
            self.context.progress(f"{len(skipped)} malformed rows are skipped, the first: {skipped[0]}")

    def rows(self) -> Sequence[Row]:
        return self.part_rows(self.read_rows())

    def read_rows(self) -> Rows:
        """All rows; a process reads them only once."""
        return load_rows(self.task, whole=self.part == "all")

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        """Its members; none if the template does not render the prompt, or if the prompt is too long."""
        self._seen += 1
        rendered = self._dropped.render_row(row, lambda: self._chat.with_tools(row.tools).encode_prompt(row.turns))
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
        if not self._dropped.lengths_fit([len(token_ids)]):
            return []
        return self.make_members(row.prompt_id, epoch, text=text, token_ids=token_ids, columns=row.columns)

    def _refuse_long(self, chat: Chat, rows: Sequence[Row]) -> None:
        """Raise ConfigError if a prompt is too long."""
        lengths = rendered_alone(rows, lambda row: prompt_length(chat, row))
        option = "max_prompt_tokens"
        refuse_long_rows(lengths, self.max_prompt_tokens, option=option, task=self.task.name, noun="prompts")


MESSAGES = "messages"


class TaskSource(RowSource):
    """Sends every training row of a task `repeat` times, as the members of one group.

    A prompt has no tokens; its columns are those of the row and `messages`, which is the conversation. The other
    options are those of PromptSource.
    """

    def __init__(
        self,
        task: Task,
        *,
        repeat: int = 1,
        epochs: int | None = None,
        seed: int | None = None,
        part: RowPart = "train",
        num_prompts: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(
            repeat=repeat, epochs=epochs, seed=seed, part=part, num_prompts=num_prompts, curriculum=curriculum
        )
        self.task: Task = task

    def preflight(self) -> str | None:
        rows = self.rows()
        if rows and MESSAGES in rows[0].columns:
            raise ConfigError(f"the task {self.task.name!r} has a column {MESSAGES!r}, which agents get; rename it")
        require_served(self.task, rows, "prompts")
        self._row_buckets(rows)
        return "; ".join(load_rows(self.task, whole=self.part == "all").opened) or None

    def rows(self) -> Sequence[Row]:
        return self.part_rows(load_rows(self.task, whole=self.part == "all"))

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        return self.make_members(row.prompt_id, epoch, **task_fields(self.task, row))


def task_fields(task: Task, row: Row) -> Mapping[str, Any]:
    """The fields of a prompt that tell an agent its task."""
    columns = {**row.columns, MESSAGES: conversation(task, row)}
    return {"text": "", "token_ids": np.zeros(0, np.int32), "columns": columns}


class EnvironmentSource(RowSource):
    """Sends every training row of an environment `repeat` times, as the members of one group.

    `environment` is a name as in docs/environments.md. A prompt has no tokens: the episode begins with what the
    environment shows. The other options are those of PromptSource.
    """

    def __init__(
        self,
        environment: str,
        *,
        repeat: int = 1,
        epochs: int | None = None,
        seed: int | None = None,
        part: RowPart = "train",
        num_prompts: int | None = None,
        curriculum: Curriculum | None = None,
    ) -> None:
        super().__init__(
            repeat=repeat, epochs=epochs, seed=seed, part=part, num_prompts=num_prompts, curriculum=curriculum
        )
        self.environment = environment

    def check(self, facts: Any) -> list[str]:
        if self.curriculum is None or not self.curriculum.by:
            return super().check(facts)
        problem = (
            f"curriculum.by is {self.curriculum.by!r}, but rows of an environment differ only by their seed, and each "
            "has a pass rate of its own; leave it out"
        )
        return [*super().check(facts), problem]

    def preflight(self) -> None:
        EnvironmentName(self.environment)

    @cached_property
    def _read(self) -> EnvironmentRows:
        return environment_rows(self.environment)

    def rows(self) -> Sequence[EnvironmentRow]:
        return self.part_rows(self._read)

    def group(self, row: EnvironmentRow, epoch: int) -> list[Prompt]:
        return self.make_members(row.prompt_id, epoch, **prompt_fields(row))


def prompt_fields(row: EnvironmentRow) -> Mapping[str, Any]:
    """The fields of a prompt that say where its episode starts."""
    columns = {"environment": row.name, "options": dict(row.options), "seed": row.seed}
    return {"text": "", "token_ids": np.zeros(0, np.int32), "columns": columns}


def question_fields(environment: str, asked_set: str, row: Row) -> Mapping[str, Any]:
    """The fields of a prompt that asks a question of an evaluation set in an environment."""
    return prompt_fields(question_row(environment, asked_set, row))


def row_of(prompt: Prompt) -> EnvironmentRow:
    """The row that the fields from `prompt_fields` describe."""
    columns = prompt.columns
    return EnvironmentRow(columns["environment"], columns["options"], columns["seed"])
