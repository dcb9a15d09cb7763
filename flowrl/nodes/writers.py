"""Nodes that write responses or pairs to a file of JSON lines, so that a second run continues where one ended.

Invariants
- A line has one response, or one pair, and the row's other columns.
- The lines of a group are next to each other, and are written at once, before the group is finished in the ledger.
  `Written.read_file` leaves out an incomplete last group, which a killed run may leave and the writer cuts off. All
  other groups are complete, and `RemainingPrompts` does not ask them again.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flowrl.errors import ConfigError
from flowrl.graph.node import Facts, Node
from flowrl.graph.ports import In
from flowrl.machine.disk import user_path
from flowrl.messages import Group, Sample, Scored
from flowrl.nodes.sources.row_source import PromptSource
from flowrl.tasks import Rows, Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading.rows_on_disk import join_rows, prompt_ids, rows_by_id

REPORT_EVERY_S = 5.0


class ProgressCount:
    """Counts items; `say` gets a text with their number every REPORT_EVERY_S. For use on one event loop."""

    def __init__(
        self,
        what: str,
        say: Callable[[str], None],
        *,
        total: int | None = None,
        there: int = 0,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`what` names the items; `there` of the `total` exist already, which is reported immediately."""
        self._what, self._say, self._total, self._now = what, say, total, now
        self._number = self._reported_number = there
        self._reported_s: float | None = None
        """Time of the last report, or of the first count: a node may wait long for its first item."""
        self._has_reported = False
        if there:
            self._say_number(f"{self._counted} are there already")

    def count_items(self, number: int = 1, note: str = "") -> None:
        """Count `number` more items; `note` follows the numbers in a report."""
        self._number += number
        if self._reported_s is None:
            self._reported_s, self._reported_number = self._now(), self._number
        elapsed_s = self._now() - self._reported_s
        if elapsed_s >= REPORT_EVERY_S:
            rate = (self._number - self._reported_number) / elapsed_s
            self._say_number(
                f"{self._counted} ({rate:,.0f}/s){note}" if rate >= 10 else f"{self._counted} ({rate:.2g}/s){note}"
            )

    def report_end(self, note: str = "", *, always: bool = False) -> None:
        """All items are counted. Reports if `always`, or if there was a report and items have been added since."""
        if always or (self._has_reported and self._number > self._reported_number):
            self._say_number(f"{self._counted}{note}")

    @property
    def _counted(self) -> str:
        return f"{self._number:,}{'' if self._total is None else f' of {self._total:,}'} {self._what}"

    def _say_number(self, text: str) -> None:
        self._say(text)
        self._has_reported, self._reported_number = True, self._number
        self._reported_s = None if self._reported_s is None else self._now()


OWN = ("prompt", "response", "prompt_id", "member", "reward", "parts", "response_tokens", "truncated")


@dataclass(frozen=True)
class Written:
    """What a file has: the prompts whose groups are complete, and how many bytes these groups take."""

    prompt_ids: frozenset[str]
    num_bytes: int

    @staticmethod
    def read_file(path: Path, per_group: int) -> Written:
        """Raises ConfigError for a file with other lines. `per_group`: lines of a complete group, if none failed."""
        counted: Counter[str] = Counter()
        last, start, end = "", 0, 0
        if not path.exists():
            return Written(frozenset(), 0)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    prompt_id = str(json.loads(line)["prompt_id"])
                except (ValueError, KeyError, TypeError):
                    raise ConfigError(
                        f"{path}:{number} was not written by flowrl; name another file, or remove this one"
                    ) from None
                if prompt_id != last:
                    last, start = prompt_id, end
                counted[prompt_id] += 1
                end += len(line)
        if last and counted[last] < per_group:
            del counted[last]
            end = start
        return Written(frozenset(counted), end)


class RemainingPrompts(PromptSource):
    """Sends the prompts of a task for which the file `out` has no group yet."""

    def __init__(self, *args: Any, out: str, per_group: int, given: bool = False, **options: Any) -> None:
        """`given`: the rows are those of `load_demonstrations`, which may answer one prompt in several ways."""
        super().__init__(*args, **options)
        self.out = out
        self.per_group = per_group
        self.given = given

    def read_rows(self) -> Any:
        return load_demonstrations(self.task, whole=self.part == "all") if self.given else super().read_rows()

    def preflight(self) -> str | None:
        rows, done = self.rows(), self._written_ids()
        if all(prompt_id in done for prompt_id in prompt_ids(rows)):
            raise ConfigError(f"{self.out} has all {len(rows)} {self.row_noun} already; name another file")
        return super().preflight()

    def _written_ids(self) -> frozenset[str]:
        return Written.read_file(user_path(self.out), self.per_group).prompt_ids

    def num_left(self, seed: int) -> int:
        """Number of prompts for which the file has no group yet; `seed` is the run's."""
        self._seed = seed if self.seed is None else self.seed
        self._rows = self.rows()
        return len(self._epoch_order(0))

    def _epoch_order(self, epoch: int) -> list[int]:
        """The rows of the epoch that are not done. An epoch of a mixture has a share of each source, not all rows."""
        names, done = [*prompt_ids(self._rows)], self._written_ids()
        if not (order := [index for index in super()._epoch_order(epoch) if names[index] not in done]):
            raise ConfigError(
                f"{self.out} has all {self.row_noun} of an epoch already; an epoch is a part of the mixture "
                f"{self.task.name!r}; name another file, or other weights"
            )
        return order


class LineWriter(Node):
    """The common part of nodes that append lines to the file `path`. `noun` says what they write, for messages."""

    noun: str
    asked_noun: str
    """What a group of lines is about."""
    per_group = 1
    """Lines of a group."""

    _progress: ProgressCount
    _file: IO[bytes] | None = None

    def __init__(self, path: str, task: Task) -> None:
        self.path = path
        self.task = task

    def check(self, facts: Any) -> list[str]:
        return [] if self.path.endswith(".jsonl") else [f"path is {self.path!r}; name a file that ends in .jsonl"]

    def preflight(self) -> str | None:
        target = user_path(self.path)
        if not target.parent.is_dir():
            raise ConfigError(f"the directory {target.parent} for the {self.noun} does not exist; create it")
        number = len(Written.read_file(target, self.per_group).prompt_ids)
        return f"{target} has {number} {self.asked_noun} already; the others follow" if number else None

    async def open_file(self, rows: Rows) -> None:
        """Open the file after its last complete group, to write of these rows."""
        self._rows = rows_by_id(join_rows(rows.train, rows.held_out))
        found = await self.blocking(Written.read_file, user_path(self.path), self.per_group)
        self._file = user_path(self.path).open("ab")
        self._file.truncate(found.num_bytes)

    def write_lines(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Write the lines of a group at once."""
        assert self._file is not None, "`open_file` opens it"
        self._file.write("".join(f"{json.dumps(one, ensure_ascii=False, default=str)}\n" for one in lines).encode())
        self._file.flush()

    def prompt_of(self, prompt_id: str) -> Any:
        """The prompt as a line has it: its text, or the messages of a longer conversation."""
        turns = self._rows[prompt_id].turns
        return turns[0]["content"] if len(turns) == 1 else [dict(turn) for turn in turns]

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()


class ResponseWriter(LineWriter):
    """Writes the `size` responses to each prompt of `task`, or only the one with the best reward (`best`), to `path`.

    `prompts` is the source of the graph, which knows how many prompts there are.
    """

    keyed_state = True
    noun, asked_noun = "responses", "prompts"

    samples: In[Sample]

    def __init__(
        self,
        path: str,
        task: Task,
        *,
        size: int,
        best: bool = False,
        given: bool = False,
        prompts: RemainingPrompts | None = None,
    ) -> None:
        super().__init__(path, task)
        self.size = size
        self.best = best
        self.per_group = 1 if best else size
        self.given = given
        self.prompts = prompts

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False)

    async def setup(self) -> None:
        await self.open_file(
            await self.blocking(load_demonstrations if self.given else load_rows, self.task, whole=True)
        )
        prompts = self.prompts
        left = None if prompts is None else await self.blocking(prompts.num_left, self.context.seed)
        total = None if left is None else left * self.per_group
        self._progress = ProgressCount("responses", self.context.progress, total=total)

    async def run(self) -> None:
        num_lost, note = 0, f" in {self.path}"
        async for members in self.samples.groups(self.size):
            best = max(members.items, key=lambda one: one.reward if isinstance(one, Scored) else 0.0)
            kept = (best,) if self.best else members.items
            lines = []
            for sample in kept:
                line: dict[str, Any] = {
                    "prompt": self.prompt_of(sample.prompt_id),
                    "response": sample.response_text,
                    "prompt_id": sample.prompt_id,
                    "member": sample.member,
                    "response_tokens": sample.response_tokens,
                    "truncated": sample.truncated,
                }
                if isinstance(sample, Scored):
                    line |= {"reward": sample.reward, "parts": dict(sample.reward_parts)}
                lines.append(line | {name: value for name, value in sample.columns.items() if name not in OWN})
            self.write_lines(lines)
            for sample in members.items:
                self.samples.drop(sample, "written")
            num_lost += len(members.lost)
            note = f" in {self.path}" + (f", {num_lost:,} failed" if num_lost else "")
            self.context.metric("responses_written", len(kept))
            self._progress.count_items(len(kept), note)
        self._progress.report_end(note, always=True)


PAIR_COLUMNS = ("prompt", "chosen", "rejected", "prompt_id", "margin")


class PairWriter(LineWriter):
    """Writes each pair of a PairMaker to the file `path`; `task` is the task that the prompts come from.

    Each pair is one line, `{"prompt", "chosen", "rejected", "prompt_id"}` and the row's other columns; the prompt is
    text, or the messages of a longer conversation.

    The margin of a pair is the difference of the two rewards. In the ledger pairs end as dropped with the reason
    `written`. A pair with an empty answer is not written; it is filtered as `empty_answer`.
    """

    noun, asked_noun = "pairs", "pairs"

    groups: In[Group]

    def facts(self) -> Facts:
        return Facts(drops=True, keeps_lineage=False)

    async def setup(self) -> None:
        await self.open_file(await self.blocking(load_rows, self.task))
        self._progress = ProgressCount("pairs", self.context.progress)

    async def run(self) -> None:
        async for group in self.groups:
            chosen, rejected = group.samples
            if not (chosen.response_text and rejected.response_text):
                self.groups.drop(group, "empty_answer", state="filtered")
                continue
            assert (chosen.label, rejected.label) == (1, -1)
            others = {name: value for name, value in chosen.columns.items() if name not in PAIR_COLUMNS}
            line = {
                "prompt": self.prompt_of(chosen.prompt_id),
                "chosen": chosen.response_text,
                "rejected": rejected.response_text,
                "prompt_id": chosen.prompt_id,
                "margin": chosen.reward - rejected.reward,
                **others,
            }
            self.write_lines([line])
            self.context.metric("pairs_written", 1)
            self.groups.drop(group, "written")
            self._progress.count_items(1, f" in {self.path}")
        self._progress.report_end(f" in {self.path}", always=True)
