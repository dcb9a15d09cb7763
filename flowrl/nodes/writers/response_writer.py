"""Writes responses to a file of JSON lines, whole groups at a time, so that a second run continues where one ended.

Invariants
- A line has one response: `prompt` (text, or the messages of a longer conversation), `response`, `prompt_id`, `member`,
  what is known of its reward, and the row's other columns.
- The lines of a group are next to each other, and are written at once. `Written.read` leaves out an incomplete last
  group, which a killed run may leave and the writer cuts off. All other groups are complete, and `RemainingPrompts`
  does not ask them again.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In
from flowrl.messages import Sample, Scored
from flowrl.nodes.sources.source import PromptSource
from flowrl.nodes.writers.progress_count import ProgressCount
from flowrl.tasks import Task, load_demonstrations, load_rows
from flowrl.tasks.row_reading.indexed_rows import by_id, joined, prompt_ids
from flowrl.user_path import user_path

OWN = ("prompt", "response", "prompt_id", "member", "reward", "parts", "response_tokens", "truncated")


@dataclass(frozen=True)
class Written:
    """What a file has: the prompts whose groups are complete, and how many bytes these groups take."""

    prompt_ids: frozenset[str]
    num_bytes: int

    @staticmethod
    def read(path: Path, per_group: int) -> Written:
        """Raises ConfigError for a file with other lines. `per_group`: lines of a complete group, if none failed."""
        counted: Counter[str] = Counter()
        last, start, end = "", 0, 0
        if not path.exists():
            return Written(frozenset(), 0)
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                prompt_id = _prompt_id(path, number, line)
                if prompt_id != last:
                    last, start = prompt_id, end
                counted[prompt_id] += 1
                end += len(line)
        if last and counted[last] < per_group:
            del counted[last]
            end = start
        return Written(frozenset(counted), end)


def _prompt_id(path: Path, number: int, line: bytes) -> str:
    try:
        return str(json.loads(line)["prompt_id"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(f"{path}:{number} was not written by flowrl; name another file, or remove this one") from None


class RemainingPrompts(PromptSource):
    """Sends the prompts of a task for which the file `out` has no group yet."""

    def __init__(self, *args: Any, out: str, per_group: int, given: bool = False, **options: Any) -> None:
        """`given`: the rows are those of `load_demonstrations`, which may answer one prompt in several ways."""
        super().__init__(*args, **options)
        self.out = out
        self.per_group = per_group
        self.given = given

    def read(self) -> Any:
        return load_demonstrations(self.task, whole=self.part == "all") if self.given else super().read()

    def preflight(self) -> str | None:
        rows, done = self.rows(), self._done()
        if all(prompt_id in done for prompt_id in prompt_ids(rows)):
            raise ConfigError(f"{self.out} has all {len(rows)} {self.row_noun} already; name another file")
        return super().preflight()

    def _done(self) -> frozenset[str]:
        return Written.read(user_path(self.out), self.per_group).prompt_ids

    def num_left(self, seed: int) -> int:
        """Number of prompts for which the file has no group yet; `seed` is the run's."""
        self._seed = seed if self.seed is None else self.seed
        self._rows = self.rows()
        return len(self._order(0))

    def _order(self, epoch: int) -> list[int]:
        """The rows of the epoch that are not done. An epoch of a mixture has a share of each source, not all rows."""
        names, done = [*prompt_ids(self._rows)], self._done()
        if not (order := [index for index in super()._order(epoch) if names[index] not in done]):
            raise ConfigError(
                f"{self.out} has all {self.row_noun} of an epoch already; an epoch is a part of the mixture "
                f"{self.task.name!r}; name another file, or other weights"
            )
        return order


class ResponseWriter(Node):
    """Writes the `size` responses to each prompt of `task`, or only the one with the best reward (`best`), to `path`.

    `prompts` is the source of the graph, which knows how many prompts there are.
    """

    keyed_state = True

    samples: In[Sample]

    _progress: ProgressCount

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
        self.path = path
        self.task = task
        self.size = size
        self.best = best
        self.given = given
        self.prompts = prompts
        self._file: IO[bytes] | None = None
        self._lost = 0

    @property
    def per_group(self) -> int:
        """Lines of a group."""
        return 1 if self.best else self.size

    def facts(self) -> Facts:
        return Facts(group_size=self.size, drops=True, keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        return [] if self.path.endswith(".jsonl") else [f"path is {self.path!r}; name a file that ends in .jsonl"]

    def preflight(self) -> str | None:
        target = user_path(self.path)
        if not target.parent.is_dir():
            raise ConfigError(f"the directory {target.parent} for the responses does not exist; create it")
        found = Written.read(target, self.per_group)
        return f"{target} has {len(found.prompt_ids)} prompts already; the others follow" if found.prompt_ids else None

    async def setup(self) -> None:
        read = load_demonstrations if self.given else load_rows
        rows = await self.blocking(read, self.task, whole=True)
        self._rows = by_id(joined(rows.train, rows.held_out))
        self._file = await self.blocking(self._open)
        prompts = self.prompts
        left = None if prompts is None else await self.blocking(prompts.num_left, self.context.seed)
        total = None if left is None else left * self.per_group
        self._progress = ProgressCount("responses", self.context.progress, total=total)

    def _open(self) -> IO[bytes]:
        path = user_path(self.path)
        found = Written.read(path, self.per_group)
        file = path.open("ab")
        file.truncate(found.num_bytes)
        return file

    async def run(self) -> None:
        assert self._file is not None
        async for members in self.samples.groups(self.size):
            best = max(members.items, key=lambda one: one.reward if isinstance(one, Scored) else 0.0)
            kept = (best,) if self.best else members.items
            text = "".join(f"{json.dumps(self.line(sample), ensure_ascii=False, default=str)}\n" for sample in kept)
            self._file.write(text.encode())
            self._file.flush()
            for sample in members.items:
                self.samples.drop(sample, "written")
            self._lost += len(members.lost)
            self.context.metric("responses_written", len(kept))
            self._progress.add(len(kept), self._note)
        self._progress.end(self._note, always=True)

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def _note(self) -> str:
        return f" in {self.path}" + (f", {self._lost:,} failed" if self._lost else "")

    def line(self, sample: Sample) -> dict[str, Any]:
        """The line of one response."""
        turns = self._rows[sample.prompt_id].turns
        found: dict[str, Any] = {
            "prompt": turns[0]["content"] if len(turns) == 1 else [dict(turn) for turn in turns],
            "response": sample.response_text,
            "prompt_id": sample.prompt_id,
            "member": sample.member,
            "response_tokens": sample.response_tokens,
            "truncated": sample.truncated,
        }
        if isinstance(sample, Scored):
            found |= {"reward": sample.reward, "parts": dict(sample.reward_parts)}
        return found | {name: value for name, value in sample.columns.items() if name not in OWN}
