"""Where groups enter the graph: the training rows of a task, in an order that depends only on seed and epoch."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, get_args

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node, Saved
from flowrl.graph.ports import Out
from flowrl.messages import Prompt
from flowrl.models import Chat, Policy, check_model, check_prompts, load_tokenizer, resolve
from flowrl.tasks import Row, Rows, Task, load_rows
from flowrl.tasks.maths import check as check_answers
from flowrl.tasks.mixture import mixed_order

Part = Literal["train", "held_out", "all"]


class PromptSource(Node):
    """Sends every training row `repeat` times, as the members of one group; `part` selects held-out or all rows.

    `epochs=None` continues until the run's `--steps` are reached; without `--steps` it means one epoch. `seed`
    None means the run's seed. Prompts of more than `max_prompt_tokens` are skipped and counted. `num_prompts`
    limits the source to the first that many rows.
    """

    prompts: Out[Prompt]

    def __init__(
        self,
        task: Task,
        policy: Policy,
        *,
        repeat: int = 1,
        epochs: int | None = None,
        seed: int | None = None,
        max_prompt_tokens: int = 512,
        part: Part = "train",
        num_prompts: int | None = None,
    ) -> None:
        self.task = task
        self.policy = policy
        self.repeat = repeat
        self.epochs = epochs
        self.seed = seed
        self.max_prompt_tokens = max_prompt_tokens
        self.part: Part = part
        self.num_prompts = num_prompts
        self._epoch = 0
        self._position = 0
        self._digests: dict[int, str] = {}
        """Epoch -> digest of its prompts in their order."""
        self._passed_over = 0
        """Number of too long prompts since the last one of valid length."""

    def facts(self) -> Facts:
        return Facts(group_size=self.repeat, longest_prompt=self.max_prompt_tokens)

    def check(self, facts: Any) -> list[str]:
        names = ("repeat", "epochs", "max_prompt_tokens", "num_prompts")
        ranges = [(name, getattr(self, name)) for name in names]
        problems = [
            f"{name} is {value}; it needs at least 1" for name, value in ranges if value is not None and value < 1
        ]
        if self.part not in get_args(Part):
            problems.append(f"part is {self.part!r}; choose one of {', '.join(get_args(Part))}")
        return problems

    def preflight(self) -> None:
        check_model(self.policy)
        rows = self.rows()
        for term in self.task.sources:
            if Task(term.text).options.get("check") == "math":
                check_answers([row.answer for row in load_rows(Task(term.text)).train if row.answer is not None])
        check_prompts(self.policy, [row.turns for row in rows], self.task.system_prompt)

    async def setup(self) -> None:
        self._seed = self.context.seed if self.seed is None else self.seed
        model_dir = await self.blocking(resolve, self.policy, progress=self.context.progress)
        self._chat = Chat(await self.blocking(load_tokenizer, model_dir), self.task.system_prompt)
        self._rows = await self.blocking(self.rows)
        self.context.progress(f"{len(self._rows)} prompts")
        if skipped := (await self.blocking(self.read)).skipped:
            self.context.metric("rows_skipped", len(skipped))
            self.context.progress(f"{len(skipped)} malformed rows are skipped, the first: {skipped[0]}")

    def rows(self) -> tuple[Row, ...]:
        """The rows of an epoch."""
        rows = self.read()
        parts = {"train": rows.train, "held_out": rows.held_out, "all": (*rows.train, *rows.held_out)}
        return parts[self.part][: self.num_prompts]

    def read(self) -> Rows:
        """All rows; a process reads them only once."""
        return load_rows(self.task)

    async def run(self) -> None:
        for epoch, position, row in self._from_cursor():
            group = self.group(row, epoch)
            if len(group[0].token_ids) > self.max_prompt_tokens:
                self._pass_over()
            elif await self.prompts.admit(group):
                self._passed_over = 0
            else:
                return
            self._epoch, self._position = epoch, position + 1

    def group(self, row: Row, epoch: int) -> list[Prompt]:
        """The members of the group of `row` in `epoch`."""
        text, token_ids = self._chat.prompt(row.turns)
        group_id = f"{self.name}:{epoch}:{row.prompt_id}"
        return [
            Prompt(
                sample_id=f"{group_id}:{member}",
                group_id=group_id,
                prompt_id=row.prompt_id,
                epoch=epoch,
                member=member,
                group_size=self.repeat,
                seed=sampling_seed(self._seed, row.prompt_id, epoch, member),
                text=text,
                token_ids=token_ids,
                columns=row.columns,
            )
            for member in range(self.repeat)
        ]

    def state(self) -> Mapping[str, Any]:
        return {"epoch": self._epoch, "position": self._position, "order": self._digests.get(self._epoch, "")}

    def check_resume(self, saved: Saved) -> list[str]:
        """The cursor is not valid for another order: prompts would be sent twice or never."""
        self._seed = saved.seed if self.seed is None else self.seed
        self._rows = self.rows()
        epochs = {int(s["epoch"]): s["order"] for s in saved.states.values() if s["position"] and s.get("order")}
        return [
            f"the prompts of epoch {epoch} differ from those that the run was started with, or their order does; "
            "resume with the task, data and seed it was started with, or start a new run from the checkpoint's model"
            for epoch, order in epochs.items()
            if order != self._digest(self._order(epoch))
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])

    def _from_cursor(self) -> Iterator[tuple[int, int, Row]]:
        """(epoch, position, row) of all rows not sent yet."""
        epochs = self.epochs if self.epochs is not None or self.context.steps is not None else 1
        epoch, start = self._epoch, self._position
        while epochs is None or epoch < epochs:
            order = self._order(epoch)
            self._digests[epoch] = self._digest(order)
            for position in range(start, len(order)):
                yield epoch, position, self._rows[order[position]]
            epoch, start = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        if len(self.task.sources) > 1:
            return mixed_order(self._rows, self.task, self._seed, epoch)
        return epoch_order(len(self._rows), self._seed, epoch)

    def _digest(self, order: Sequence[int]) -> str:
        """The digest of the prompts in this order."""
        names = "".join(self._rows[index].prompt_id for index in order)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()

    def _pass_over(self) -> None:
        self._passed_over += 1
        self.context.metric("prompts_too_long", 1)
        if self._passed_over >= len(self._rows):
            raise ConfigError(
                f"all {len(self._rows)} training prompts of {self.task.name!r} are longer than max_prompt_tokens = "
                f"{self.max_prompt_tokens}; raise it"
            )


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a permutation determined by (seed, epoch)."""
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def sampling_seed(seed: int, prompt_id: str, epoch: int, member: int) -> int:
    """A 31-bit seed for the sampler of one member."""
    text = f"{seed}/{prompt_id}/{epoch}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
