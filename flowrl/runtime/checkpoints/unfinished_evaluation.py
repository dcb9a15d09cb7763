"""An evaluation that trains nothing and ended early: the same command continues it in its directory.

Invariants
- `unfinished.json` is in the directory of such a run from its start to its end. It says what the answers depend on, and
  a run takes the answers over only if all of that is the same.
- The answers are those in `rollouts/`. Everything else that the earlier run has written is started again: the ledger's
  evaluations are booked from the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from shutil import rmtree
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import find_trainers
from flowrl.graph.graph import Graph
from flowrl.hub import forget_commits, take_commits
from flowrl.machine.disk import user_path
from flowrl.runtime.checkpoints.checkpoint import steps_of
from flowrl.runtime.checkpoints.rundir import RunDir, flatten_config
from flowrl.runtime.samples.rollout_files import columns_of, rollout_files
from flowrl.runtime.samples.sample_notes import SampleRecord

ELSEWHERE = ("generator.", "time_share")
"""Prefixes of the options that say where the model answers, and not how."""
BETWEEN = re.compile(r"[:,\s]+|(?<![\w.])[\d.]+\*")
"""Matches the text between the names of files in an option."""
TEXTS = ("system_prompt", "template")
"""Options that are texts for the model, which name no files."""
BEGIN_ANEW = (
    "ledger.sqlite",
    "ledger.sqlite-wal",
    "ledger.sqlite-shm",
    "metrics.jsonl",
    "evaluations.jsonl",
    "trace.json",
)


@dataclass(frozen=True)
class UnfinishedEvaluation:
    """What the answers of a graph that evaluates and trains nothing depend on."""

    graph: Graph
    options: Mapping[str, Any]
    """Option of the graph -> its value, for the options that matter to an answer."""
    files: Mapping[str, str]
    """File or directory named in an option -> sizes and times of change."""

    @classmethod
    def of(cls, graph: Graph, config: Mapping[str, Any]) -> UnfinishedEvaluation | None:
        """None for a graph that trains, has tickets, or evaluates nothing that can be taken over."""
        asking = [node for node in graph.nodes.values() if hasattr(node, "evaluate")]
        if not asking or graph.admission is not None or find_trainers(graph):
            return None
        if not all(hasattr(node, "asked_rows") for node in asking):
            return None
        found = dict(flatten_config(json.loads(json.dumps(config))))
        options = {name: value for name, value in found.items() if not name.startswith(ELSEWHERE)}
        return cls(graph, options, dict(_stamp_files(options)))

    @staticmethod
    def is_in(run_dir: Path | None) -> bool:
        """Whether the directory contains such an evaluation that has not ended."""
        return run_dir is not None and (run_dir / UNFINISHED).is_file()

    def claim_directory(self, named: Path | None) -> RunDir:
        """The claimed directory of the run: that of an unfinished evaluation with the same answers, if there is one
        (`named`, or else the newest in `runs/`). Raises ConfigError if the answers in `named` differ."""
        if named is None:
            return self._find_unfinished() or RunDir.claimed_fresh(self.graph.name)
        if self.is_in(named):
            directory = RunDir.open_claimed(named, goes_on=True)
            if others := self._find_differences(directory):
                directory.release()
                raise ConfigError(
                    f"--run-dir {named} has answers of an evaluation that ended early, and this one differs: "
                    f"{'; '.join(others)}; name another directory, or remove that one"
                )
            return directory
        return RunDir.open_claimed(named)

    def _find_unfinished(self) -> RunDir | None:
        begun = Path("runs").glob(f"{self.graph.name}-*/{UNFINISHED}")
        for path in sorted((path.parent for path in begun), reverse=True):
            try:
                directory = RunDir.open_claimed(path, goes_on=True)
            except ConfigError:  # in use, or not writable
                continue
            if rollout_files(path) and not self._find_differences(directory):
                return directory
            directory.release()
            forget_commits()
        return None

    def _find_differences(self, directory: RunDir) -> list[str]:
        """The differences between what the answers in a directory depend on and what is so now."""
        try:
            before = json.loads((directory.path / UNFINISHED).read_text(encoding="utf-8"))
            found = _compare_values(before["options"], self.options) + _compare_values(
                before["files"], self.files, "has changed"
            )
            if found:
                return found
            take_commits(directory.hub_commits())
            return _compare_values(before["rows"], self._digest_rows(), "has other rows")
        except (OSError, ValueError, KeyError, TypeError, RecursionError):
            return [f"{UNFINISHED} there cannot be read"]

    def _digest_rows(self) -> dict[str, str]:
        """Set -> digest of the rows that are asked of the model."""
        found: dict[str, str] = {}
        for name, node in self.graph.nodes.items():
            if hasattr(node, "asked_rows"):
                found |= {f"{name}/{asked}": digest for asked, digest in node.asked_rows().items()}
        return found

    def mark_begun(self, directory: RunDir) -> None:
        """Write what the answers depend on; remove ledger, metrics, trace and checkpoints of an earlier run."""
        for name in BEGIN_ANEW:
            (directory.path / name).unlink(missing_ok=True)
        for _, made in steps_of(directory.checkpoints):
            rmtree(made)
        content = {"options": self.options, "files": self.files, "rows": self._digest_rows()}
        directory.write_json(UNFINISHED, content)

    @staticmethod
    def mark_ended(directory: RunDir) -> None:
        """The evaluation has ended."""
        (directory.path / UNFINISHED).unlink(missing_ok=True)


def _compare_values(before: Mapping[str, Any], now: Mapping[str, Any], how: str = "") -> list[str]:
    return [
        f"{name} {how}" if how else f"{name} is {now.get(name)!r}, was {before.get(name)!r}"
        for name in sorted({*before, *now})
        if now.get(name) != before.get(name)
    ]


def _stamp_files(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Every file and directory on this machine that an option names, such as a model, a reward or a template."""
    named = [value for name, value in options.items() if name.rpartition(".")[2] not in TEXTS]
    texts = [text for value in named for text in (value if isinstance(value, list) else [value])]
    for name in dict.fromkeys(part for text in texts if isinstance(text, str) for part in BETWEEN.split(text) if part):
        with suppress(ConfigError, OSError):  # a word that is no path, such as one of 300 characters
            path = user_path(name)
            if path.is_file():
                yield name, _stamp_file(path)
            elif path.is_dir():
                yield (
                    name,
                    " ".join(f"{one.name} {_stamp_file(one)}" for one in sorted(path.iterdir()) if one.is_file()),
                )


def _stamp_file(path: Path) -> str:
    found = path.stat()
    return f"{found.st_size} {found.st_mtime_ns}"


UNFINISHED = "unfinished.json"
"""The file that marks a run directory whose answers are taken over: that of a pure evaluation that has not ended."""
COLUMNS = ("task", "prompt_id", "member", "phase", "step", "reward", "correct", "response_tokens", "spans", "parts")
AnswerKey = tuple[str, str, int]
"""task, prompt_id, member"""


def kept_answers(run_dir: Path, *, phase: str, step: int) -> dict[AnswerKey, SampleRecord]:
    """The answers of that evaluation; {} unless the run continues an evaluation.

    Raises ConfigError for a file that cannot be read.
    """
    if not (run_dir / UNFINISHED).is_file():
        return {}
    found: dict[AnswerKey, SampleRecord] = {}
    for file in rollout_files(run_dir):
        if not (file.held_out and file.first <= step <= file.last):
            continue
        for row in columns_of(file.path, COLUMNS).to_pylist():
            if row["phase"] == phase and row["step"] == step:
                found[(row["task"], row["prompt_id"], row["member"])] = row | {"parts": dict(row["parts"] or ())}
    return found


def versions_in(record: SampleRecord) -> list[int]:
    """The versions that sampled an answer, in the order of its tokens; [] for an answer without tokens."""
    return [span["version"] for span in record["spans"] or () if span["version"] >= 0]
