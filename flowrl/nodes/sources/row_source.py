"""A source of groups: rows in an order that depends only on seed and epoch, with a cursor that checkpoints keep.

With a curriculum, further rows, chosen by the outcomes of earlier groups, come between the rows of this order
(`flowrl.nodes.curricula.curriculum`).
"""

from __future__ import annotations

import asyncio
import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, get_args

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node, Saved
from flowrl.graph.ports import Out, Serve
from flowrl.messages import Prompt
from flowrl.nodes.curricula.curriculum import Curriculum, GroupOutcome, Noted
from flowrl.nodes.curricula.pass_rates import ChosenRow, PassRates
from flowrl.tasks.row_reading.indexed_rows import joined, prompt_ids
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

    def facts(self) -> Facts:
        return Facts(group_size=self.repeat, optional=() if self.curriculum else ("outcomes",))

    def check(self, facts: Any) -> list[str]:
        ranges = [(name, getattr(self, name)) for name in ("repeat", "epochs", "num_prompts")]
        problems = [
            f"{name} is {value}; it needs at least 1" for name, value in ranges if value is not None and value < 1
        ]
        if self.part not in get_args(RowPart):
            problems.append(f"part is {self.part!r}; choose one of {', '.join(get_args(RowPart))}")
        return problems + list(self.curriculum.problems() if self.curriculum else ())

    async def setup(self) -> None:
        self._seed = self.context.seed if self.seed is None else self.seed
        self._rows = await self.blocking(self.rows)
        if self.curriculum is not None:
            names = [*prompt_ids(self._rows)]
            self._rates = PassRates(self.curriculum, names, self._buckets(self._rows), seed=self._seed)
            self._take_up()

    def _buckets(self, rows: Sequence[Any]) -> list[str] | None:
        """The bucket of each row; None if each row has its own. Raises ConfigError if no row has the column."""
        by = self.curriculum.by if self.curriculum else ""
        if by and rows and not any(by in self.columns(row) for row in rows):
            raise ConfigError(
                f"curriculum.by is {by!r}, and no row has this column; choose one of "
                f"{', '.join(sorted(self.columns(rows[0]))) or 'none, and leave it out'}"
            )
        return [str(self.columns(row).get(by)) for row in rows] if by else None

    def columns(self, row: Any) -> Mapping[str, Any]:
        """The columns by which a curriculum can distinguish rows."""
        return dict(row.columns)

    def rows(self) -> Sequence[Any]:
        """The rows of an epoch."""
        raise NotImplementedError

    def group(self, row: Any, epoch: int) -> list[Prompt]:
        """The members of the group of `row` in `epoch`."""
        raise NotImplementedError

    async def offer(self, group: list[Prompt]) -> bool:
        """Admit the group, or skip it; False if no further group is wanted."""
        return await self.prompts.admit(group)

    async def run(self) -> None:
        if self._rates is None:
            for epoch, position, row in self._from_cursor():
                if not await self.offer(self.group(row, epoch)):
                    return
                self._epoch, self._position = epoch, position + 1
            return
        notes = asyncio.create_task(self.outcomes.each(self._note))
        try:
            await self._send_chosen(self._rates)
            self.prompts.close()
            await notes
        finally:
            notes.cancel()

    async def _send_chosen(self, rates: PassRates) -> None:
        """Send groups until no further group is wanted, or the last epoch has ended."""
        ordered = self._from_cursor()
        numbers = {prompt_id: index for index, prompt_id in enumerate(prompt_ids(self._rows))}
        while True:
            # A group that was waiting when a checkpoint was taken comes first: some of its members may have been sent.
            found = self._waiting or rates.choose()
            place = None
            if found is None or found.reason == "order":
                if (place := next(ordered, None)) is None:
                    return
                found = ChosenRow(numbers[place[2].prompt_id], "order")
            if self._waiting is None:
                rates.asked(found.row)  # before it is sent: its outcome may arrive while the last member is sent
                self._waiting = found
            if not await self.offer(self.group(self._rows[found.row], rates.visits(found.row) - 1)):
                return
            self._waiting = None
            if place is not None:
                self._epoch, self._position = place[0], place[1] + 1
            self._count(found)

    def _count(self, found: ChosenRow) -> None:
        self.context.metric("prompts_chosen", found.reason == "chosen")
        self.context.metric("prompts_replayed", found.reason == "replayed")
        if found.pass_rate is not None and found.reason == "chosen":
            self.context.gauge("chosen_pass_rate", found.pass_rate)

    async def _note(self, outcome: GroupOutcome) -> Noted:
        assert self._rates is not None
        is_new = self._rates.note(outcome)
        if is_new:
            self.context.gauge("all_equal_share", all_equal(outcome.raw_rewards))
            self.context.gauge("prompts_solved", self._rates.num_at(1.0))
            self.context.gauge("prompts_unsolved", self._rates.num_at(0.0))
        return Noted(is_new)

    def members(self, prompt_id: str, epoch: int, **fields: Any) -> list[Prompt]:
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

    def chosen(self, train: Sequence[R], held_out: Sequence[R]) -> Sequence[R]:
        """The rows of `part`, at most `num_prompts`."""
        return self.of_part(train, held_out)[: self.num_prompts]

    def of_part(self, train: Sequence[R], held_out: Sequence[R]) -> Sequence[R]:
        """All rows of `part`."""
        return joined(train, held_out) if self.part == "all" else train if self.part == "train" else held_out

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
            if order != self._digest(self._order(epoch))
        ]

    def load_state(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._position = int(state["epoch"]), int(state["position"])
        self._saved = state
        self._take_up()

    def _take_up(self) -> None:
        """Load the curriculum's state from a checkpoint, as soon as both the curriculum and that state exist."""
        if self._rates is not None and "curriculum" in self._saved:
            self._rates.load_state(self._saved["curriculum"])
            self._waiting = ChosenRow(*self._saved["waiting"]) if self._saved["waiting"] else None

    def _from_cursor(self) -> Iterator[tuple[int, int, Any]]:
        """(epoch, position, row) of all rows that are not sent yet."""
        epochs = self.epochs if self.epochs is not None or self.context.steps is not None else 1
        epoch, start = self._epoch, self._position
        while epochs is None or epoch < epochs:
            if not (order := self._order(epoch)):  # no rows: this epoch and all later ones would be empty
                return
            self._digests[epoch] = self._digest(order)
            for position in range(start, len(order)):
                yield epoch, position, self._rows[order[position]]
            epoch, start = epoch + 1, 0

    def _order(self, epoch: int) -> list[int]:
        return epoch_order(len(self._rows), self._seed, epoch)

    def _digest(self, order: Sequence[int]) -> str:
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
