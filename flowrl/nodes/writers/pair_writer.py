"""Writes pairs to a file, for later training of a reward model or DPO.

Each pair is one line, `{"prompt", "chosen", "rejected", "prompt_id"}` and the row's other columns; the prompt is text,
or the messages of a longer conversation. A line is complete when the pair is finished in the ledger. A second run
continues the file: `RemainingPrompts` skips prompts that have a pair in the file, and an incomplete line that a killed
run left is cut off.
"""

from __future__ import annotations

import json
from typing import IO, Any

from flowrl.errors import ConfigError
from flowrl.graph.facts import Facts
from flowrl.graph.node import Node
from flowrl.graph.ports import In
from flowrl.messages import Group, Trainable
from flowrl.nodes.writers.progress_count import ProgressCount
from flowrl.nodes.writers.response_writer import Written
from flowrl.tasks import Task, load_rows
from flowrl.tasks.row_reading.indexed_rows import by_id, joined
from flowrl.user_path import user_path

PAIR_COLUMNS = ("prompt", "chosen", "rejected", "prompt_id", "margin")


class PairWriter(Node):
    """Writes each pair of a PairMaker to the file `path`; `task` is the task that the prompts come from.

    The margin of a pair is the difference of the two rewards. In the ledger pairs end as dropped with the reason
    `written`. A pair with an empty answer is not written; it is filtered as `empty_answer`.
    """

    groups: In[Group]

    _progress: ProgressCount

    def __init__(self, path: str, task: Task) -> None:
        self.path = path
        self.task = task
        self._file: IO[bytes] | None = None

    def facts(self) -> Facts:
        return Facts(drops=True, keeps_lineage=False)

    def check(self, facts: Any) -> list[str]:
        return [] if self.path.endswith(".jsonl") else [f"path is {self.path!r}; name a file that ends in .jsonl"]

    def preflight(self) -> str | None:
        target = user_path(self.path)
        if not target.parent.is_dir():
            raise ConfigError(f"the directory {target.parent} for the pairs does not exist; create it")
        found = Written.read(target, 1)
        return f"{target} has {len(found.prompt_ids)} pairs already; the others follow" if found.prompt_ids else None

    async def setup(self) -> None:
        rows = await self.blocking(load_rows, self.task)
        self._rows = by_id(joined(rows.train, rows.held_out))
        self._file = await self.blocking(self._open)
        self._progress = ProgressCount("pairs", self.context.progress)

    def _open(self) -> IO[bytes]:
        path = user_path(self.path)
        found = Written.read(path, 1)
        file = path.open("ab")
        file.truncate(found.num_bytes)
        return file

    async def run(self) -> None:
        assert self._file is not None
        async for group in self.groups:
            chosen, rejected = group.samples
            if not (chosen.response_text and rejected.response_text):
                self.groups.drop(group, "empty_answer", state="filtered")
                continue
            self._file.write(f"{json.dumps(self.line(chosen, rejected), ensure_ascii=False, default=str)}\n".encode())
            self._file.flush()
            self.context.metric("pairs_written", 1)
            self.groups.drop(group, "written")
            self._progress.add(1, f" in {self.path}")
        self._progress.end(f" in {self.path}", always=True)

    async def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def line(self, chosen: Trainable, rejected: Trainable) -> dict[str, Any]:
        """The line of the file for this pair."""
        assert (chosen.label, rejected.label) == (1, -1)
        turns = self._rows[chosen.prompt_id].turns
        kept = {name: value for name, value in chosen.columns.items() if name not in PAIR_COLUMNS}
        return {
            "prompt": turns[0]["content"] if len(turns) == 1 else [dict(turn) for turn in turns],
            "chosen": chosen.response_text,
            "rejected": rejected.response_text,
            "prompt_id": chosen.prompt_id,
            "margin": chosen.reward - rejected.reward,
            **kept,
        }
