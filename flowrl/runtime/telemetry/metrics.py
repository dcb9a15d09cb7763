"""`metrics.jsonl`: one line per batch, and `evaluations.jsonl`: one per evaluation of held-out prompts.

On request the same records go to TensorBoard, W&B or Trackio.

The counters of all nodes since the previous line are added to the trainer's record, which takes precedence. A name in
NAMES that no node reported is null.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph
from flowrl.runtime.telemetry.alarms import NAMES as ALARMS
from flowrl.runtime.telemetry.alarms import Alarms, AlarmThresholds
from flowrl.runtime.telemetry.sinks import Sink
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.runtime.telemetry.tracking import SampleTables, Tracking

METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
NAMES = (
    "step",
    "optimizer_steps",
    "time_s",
    "reward_mean",
    "loss",
    "kl",
    "entropy",
    "grad_norm",
    "clip_fraction",
    "staleness_mean",
    "staleness_max",
    "logprob_mismatch",
    "behavior_gap",
    "tokens_generated",
    "tokens_trained",
    "response_tokens_mean",
    "generator_busy_s",
    "trainer_busy_s",
    "weight_update_pause_s",
    "ledger_head",
)

SHARES = {
    "prefix_cache_share": ("later_cached_tokens", "later_context_tokens"),
    "retokenized_share": ("replies_retokenized", "replies_checked"),
}
"""Figure of a line -> the counters of which it is the ratio."""


class Metrics:
    """Writes the lines. `roles` maps a node's name to the name under which its busy time is reported.

    A graph may call its generator "actor": `generator_busy_s` is still the busy time of that node. `time_s` counts
    from the start of the run; in a resumed run it continues from the last line of the file. `record_line` gets the step
    and the hash of each written line, for the ledger. `tables` has samples for the sinks.
    `watch` gets the numbers of each line, `watch_evaluation` the phase and the numbers of each evaluation.
    """

    def __init__(
        self,
        run_dir: Path,
        statistics: Statistics,
        *,
        roles: Mapping[str, str],
        sinks: Sequence[Sink] = (),
        limits: AlarmThresholds | None = None,
        record_line: Callable[[int, str], None] | None = None,
        tables: SampleTables | None = None,
        watch: Callable[[Mapping[str, float]], None] = lambda values: None,
        watch_evaluation: Callable[[str, Mapping[str, float]], None] = lambda phase, values: None,
    ) -> None:
        self._statistics = statistics
        self._roles = dict(roles)
        self._sinks = tuple(sinks)
        self._record_line = record_line
        self._tables = tables or SampleTables(Tracking())
        self._watch, self._watch_evaluation = watch, watch_evaluation
        self._step = 0
        before = read(run_dir / METRICS)
        self._alarms = Alarms(limits or AlarmThresholds(), before)
        self._start_s = time.monotonic() - (before[-1]["time_s"] if before else 0.0)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")
        self._evaluations = run_dir / EVALUATIONS
        self.evaluated = {(str(line.get("phase")), int(line["step"])) for line in read(self._evaluations)}
        """(phase, version) of each evaluation that has a line."""

    def line(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Complete, write and return the record of a finished batch."""
        full: dict[str, Any] = dict.fromkeys(NAMES)
        full["time_s"] = self._time_s
        for name, value in self._statistics.since_line().items():
            full[self._public(name)] = value
        full.update({name: value for name, value in record.items() if value is not None})
        full.update(shares(full))
        full = _finite(full)
        full["alarms"] = self._alarms.look(full)
        text = json.dumps(full)
        self._file.write(text + "\n")
        self._file.flush()
        self._step = full["step"]
        if self._record_line is not None:
            self._record_line(self._step, line_hash(text))
        scalars = {name: value for name, value in flat(full).items() if name != "step"}
        self._watch(scalars)
        scalars |= {f"alarm/{name}": float(name in full["alarms"]) for name in ALARMS}
        for sink in self._sinks:
            sink.write(self._step, scalars)
        if self._sinks:
            self._table("samples", self._step, self._tables.of_step(self._step))
        return full

    @property
    def _time_s(self) -> float:
        """Seconds from the start of the run."""
        return round(time.monotonic() - self._start_s, 3)

    def evaluation(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Write the results of an evaluation of version `step`; the ledger has every single answer.

        `phase` is before, during or after training; `end` if a trainer itself has measured held-out rows after its last
        batch, and then `values` have the names that they have in a line of metrics. An evaluation during training ends
        some steps later, and W&B does not accept earlier steps. So the sinks get the results at the newest step, and
        `evaluation/step` gives the step that was evaluated.
        """
        self._watch_evaluation(phase, values)
        record = _finite({"step": step, "phase": phase, "time_s": self._time_s, **values})
        with self._evaluations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.evaluated.add((phase, step))
        for sink in self._sinks:
            sink.write(max(step, self._step), {**values, "evaluation/step": step})
        self._table("held_out_samples", max(step, self._step), self._tables.of_evaluation())

    def _table(self, name: str, step: int, rows: Sequence[Sequence[Any]]) -> None:
        for sink in self._sinks if rows else ():
            sink.table(step, name, rows)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()

    def _public(self, name: str) -> str:
        node = name.removesuffix("_busy_s")
        return f"{self._roles.get(node, node)}_busy_s" if node != name else name


def line_hash(text: str) -> str:
    """The hash of a line, without its newline, that the ledger stores."""
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()


def whole_lines(path: Path) -> list[str]:
    """The exact lines of a metrics file, without an incomplete last one; [] if there is no file.

    Damaged bytes are kept as surrogates: the hash of such a line differs from the hash as written, and `rewind` keeps
    the line.
    """
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().decode(errors="surrogateescape").rpartition("\n")
    return whole.split("\n") if whole else []


def read(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file, parsed. Raises ConfigError for a line that is no valid record."""
    return [_parse(path, number, line) for number, line in enumerate(whole_lines(path), start=1)]


def _parse(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        return parse(line)
    except ValueError as problem:
        raise ConfigError(f"{path}:{number} is damaged: {problem}; remove that line, or the file") from None


def parse(line: str) -> dict[str, Any]:
    """The record of one line. Raises ValueError with the reason if the line is no valid record."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as problem:
        raise ValueError(f"invalid JSON ({problem.msg})") from None
    except RecursionError:
        raise ValueError("invalid JSON (nested too deeply)") from None
    if not isinstance(record, dict) or not isinstance(record.get("step"), int):
        raise ValueError("it has no step")
    return record


def rewind(path: Path, step: int, *, phases: Collection[str] | None = None) -> None:
    """Keep only the lines up to `step`, unchanged: a resumed run continues from the checkpoint of that step.

    Of the lines of `step` itself, only those of the `phases` are kept, if these are given.
    """
    lines = zip(whole_lines(path), read(path), strict=True)
    temporary = path.with_name(f".{path.name}.tmp")
    kept = "".join(
        line + "\n"
        for line, record in lines
        if record["step"] < step or (record["step"] == step and (phases is None or record.get("phase") in phases))
    )
    temporary.write_bytes(kept.encode(errors="surrogateescape"))
    temporary.replace(path)


def flat(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, with nested names joined by "/", for sinks that accept only scalars."""
    scalars: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            scalars |= flat(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            scalars[prefix + name] = float(value)
    return scalars


def _finite(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _finite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def shares(line: Mapping[str, Any]) -> dict[str, float]:
    """The ratios of SHARES for which the line has counts."""
    return {name: line[part] / line[of] for name, (part, of) in SHARES.items() if line.get(of)}


def roles(graph: Graph) -> dict[str, str]:
    """Node name -> role, so that `generator_busy_s` is the generator's, whatever its name in the graph.

    If there are several nodes of one kind (actor and critic are trainers), the first one has the role.
    """
    found: dict[str, str] = {}
    for name, node in graph.nodes.items():
        for role in ("generator", "trainer"):
            if type(node).__name__.lower().endswith(role):
                found.setdefault(role, name)
    return {name: role for role, name in found.items()}
