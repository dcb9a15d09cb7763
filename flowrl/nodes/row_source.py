"""A source of groups: rows in an order that depends only on seed and epoch, with a cursor that checkpoints keep."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar, get_args

from flowrl.graph.facts import Facts
from flowrl.graph.node import Node, Saved
from flowrl.graph.ports import Out
from flowrl.messages import Prompt

Part = Literal["train", "held_out", "all"]


class SourceRow(Protocol):
    """What a source asks of a row."""

    @property
    def prompt_id(self) -> str:
        """The same for the same row, in every run."""
        ...


R = TypeVar("R", bound=SourceRow)


class RowSource(Node):
    """Sends every row `repeat` times, as the members of one group. Subclasses say which rows, and what is sent.

    `epochs=None` continues until the run's `--steps` are reached; without `--steps` it means one epoch. `seed`
    None means the run's seed. `part` selects training rows, held-out rows or all; `num_prompts` the first that many.
    """

    prompts: Out[Prompt]

    def __init__(
        self, *, repeat: int, epochs: int | None, seed: int | None, part: Part, num_prompts: int | None
    ) -> None:
        self.repeat = repeat
        self.epochs = epochs
        self.seed = seed
        self.part: Part = part
        self.num_prompts = num_prompts
        self._rows: Sequence[Any] = ()
        self._epoch = 0
        self._position = 0
        self._digests: dict[int, str] = {}
        """Epoch -> digest of its prompts in their order."""

    def facts(self) -> Facts:
        return Facts(group_size=self.repeat)

    def check(self, facts: Any) -> list[str]:
        ranges = [(name, getattr(self, name)) for name in ("repeat", "epochs", "num_prompts")]
        problems = [
            f"{name} is {value}; it needs at least 1" for name, value in ranges if value is not None and value < 1
        ]
        if self.part not in get_args(Part):
            problems.append(f"part is {self.part!r}; choose one of {', '.join(get_args(Part))}")
        return problems

    async def setup(self) -> None:
        self._seed = self.context.seed if self.seed is None else self.seed
        self._rows = await self.blocking(self.rows)

    def rows(self) -> Sequence[Any]:
        """The rows of an epoch."""
        raise NotImplementedError

    def group(self, row: Any, epoch: int) -> list[Prompt]:
        """The members of the group of `row` in `epoch`."""
        raise NotImplementedError

    async def offer(self, group: list[Prompt]) -> bool:
        """Admit the group, or pass over it; False if no further group is wanted."""
        return await self.prompts.admit(group)

    async def run(self) -> None:
        for epoch, position, row in self._from_cursor():
            if not await self.offer(self.group(row, epoch)):
                return
            self._epoch, self._position = epoch, position + 1

    def members(self, prompt_id: str, epoch: int, **fields: Any) -> list[Prompt]:
        """The prompts of one group; `fields` are what all of them have alike."""
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

    def chosen(self, train: Sequence[R], held_out: Sequence[R]) -> tuple[R, ...]:
        """The rows of `part`, at most `num_prompts`."""
        parts = {"train": tuple(train), "held_out": tuple(held_out), "all": (*train, *held_out)}
        return parts[self.part][: self.num_prompts]

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

    def _from_cursor(self) -> Iterator[tuple[int, int, Any]]:
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
        return epoch_order(len(self._rows), self._seed, epoch)

    def _digest(self, order: Sequence[int]) -> str:
        """The digest of the prompts in this order."""
        names = "".join(self._rows[index].prompt_id for index in order)
        return hashlib.blake2b(names.encode(), digest_size=8).hexdigest()


def epoch_order(num_rows: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch: a permutation determined by (seed, epoch)."""
    order = list(range(num_rows))
    random.Random(f"{seed}/{epoch}").shuffle(order)
    return order


def sampling_seed(seed: int, prompt_id: str, epoch: int, member: int) -> int:
    """A 31-bit seed for the sampler of one member."""
    text = f"{seed}/{prompt_id}/{epoch}/{member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1
