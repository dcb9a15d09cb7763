"""`metrics.jsonl`: one line per batch, and `evaluations.jsonl`: one per evaluation of held-out prompts.

On request the same records go to TensorBoard, W&B or Trackio (`sinks`).

The counters of all nodes since the previous line are added to the trainer's record, which takes precedence. A name in
METRIC_NAMES that no node reported is null.

Two readers look at every line. Alarms show common RL failures early and change nothing in the run: an alarm checks the
mean over the last `window` lines that have its figure, and rings from the line at which this mean crosses the limit
until a line at which it is within the limit again. An early stop ends the run: a figure has passed a bound, or has not
improved for a number of values.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flowrl.errors import ConfigError
from flowrl.graph.graph import Graph
from flowrl.graph.node import METRIC_NAMES
from flowrl.runtime.telemetry.sinks import SampleTables, Sink, Tracking
from flowrl.runtime.telemetry.statistics import Statistics


@dataclass(frozen=True)
class AlarmThresholds:
    """The limits at which alarms start to ring; 0 disables an alarm."""

    entropy: float = 0.1
    """entropy_collapse: below this fraction of the entropy at the start of the run."""
    kl: float = 0.5
    """kl_drift: above this KL to the reference per token."""
    equal: float = 0.9
    """all_equal_groups: above this share of groups whose rewards are all equal and so give no training signal."""
    mismatch: float = 0.05
    """logprob_mismatch: above this mean difference between the trainer's and the generator's logprobs."""
    truncated: float = 0.5
    """truncation: above this share of responses cut off at the maximum length."""
    failing: float = 4.0
    """failing_by_length: above this dependence of failing on an episode's length, in standard deviations: the episodes
    that are left are then biased."""
    window: int = 5
    """Number of lines in a mean."""

    def __post_init__(self) -> None:
        for name in ("entropy", "kl", "equal", "mismatch", "truncated", "failing"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"--alarms.{name} is {getattr(self, name)}; it has to be 0 (silent) or more")
        if self.window < 1:
            raise ConfigError(f"--alarms.window is {self.window}; it needs at least 1 line")


FIGURES = {
    "kl_drift": ("kl", "kl"),
    "all_equal_groups": ("all_equal_groups_share", "equal"),
    "logprob_mismatch": ("logprob_mismatch", "mismatch"),
    "truncation": ("truncated_share", "truncated"),
    "failing_by_length": ("failing_by_length", "failing"),
}
"""Alarm -> (figure of a metrics line, limit), for the alarms that ring above a limit."""
ALARMS = ("entropy_collapse", *FIGURES)


class Alarms:
    """Checks every metrics line; `before` are the existing lines of a resumed run."""

    def __init__(self, limits: AlarmThresholds, before: Iterable[Mapping[str, Any]] = ()) -> None:
        self._limits = limits
        self._recent: dict[str, deque[float]] = {}
        self._first: list[float] = []
        """The entropies of the run's first lines that have one, at most `window`."""
        for record in before:
            self.look_at_line(record)

    def look_at_line(self, record: Mapping[str, Any]) -> dict[str, str]:
        """The alarms that ring at this line, with their messages."""
        ringing = {}
        for name, (figure, limit_name) in FIGURES.items():
            limit, mean = getattr(self._limits, limit_name), self._recent_mean(figure, record)
            if limit and mean is not None and mean > limit:
                ringing[name] = f"{figure} is {mean:.3g}, above {limit:g}"
        mean, part = self._recent_mean("entropy", record), self._limits.entropy
        if record.get("entropy") is not None and len(self._first) < self._limits.window:
            self._first.append(record["entropy"])
        if mean is not None and len(self._first) == self._limits.window:
            began = sum(self._first) / len(self._first)
            if mean < part * began:
                text = f"entropy is {mean:.3g}, below {part:g} of the {began:.3g} at the start"
                ringing["entropy_collapse"] = text
        return ringing

    def _recent_mean(self, figure: str, record: Mapping[str, Any]) -> float | None:
        """The mean over the last lines that have the figure; None while there are fewer than `window`."""
        recent = self._recent.setdefault(figure, deque(maxlen=self._limits.window))
        if record.get(figure) is not None:
            recent.append(float(record[figure]))
        return sum(recent) / len(recent) if len(recent) == self._limits.window else None


METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
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
        before = read_lines(run_dir / METRICS)
        self._alarms = Alarms(limits or AlarmThresholds(), before)
        self._start_s = time.monotonic() - (before[-1]["time_s"] if before else 0.0)
        self._file = (run_dir / METRICS).open("a", encoding="utf-8")
        self._evaluations = run_dir / EVALUATIONS
        self.evaluated = {(str(line.get("phase")), int(line["step"])) for line in read_lines(self._evaluations)}
        """(phase, version) of each evaluation that has a line."""

    def write_line(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Complete, write and return the record of a finished batch."""
        full: dict[str, Any] = dict.fromkeys(METRIC_NAMES)
        full["time_s"] = round(time.monotonic() - self._start_s, 3)
        for name, value in self._statistics.since_line().items():
            node = name.removesuffix("_busy_s")
            full[name if node == name else f"{self._roles.get(node, node)}_busy_s"] = value
        full.update({name: value for name, value in record.items() if value is not None})
        full.update({name: full[part] / full[of] for name, (part, of) in SHARES.items() if full.get(of)})
        full = _drop_infinite(full)
        full["alarms"] = self._alarms.look_at_line(full)
        text = json.dumps(full)
        self._file.write(text + "\n")
        self._file.flush()
        self._step = full["step"]
        if self._record_line is not None:
            self._record_line(self._step, line_hash(text))
        scalars = {name: value for name, value in flatten_numbers(full).items() if name != "step"}
        self._watch(scalars)
        scalars |= {f"alarm/{name}": float(name in full["alarms"]) for name in ALARMS}
        rows = self._tables.take_trained(self._step) if self._sinks else []
        for sink in self._sinks:
            sink.write(self._step, scalars)
            if rows:
                sink.table(self._step, "samples", rows)
        return full

    def write_evaluation(self, phase: str, step: int, values: Mapping[str, float]) -> None:
        """Write the results of an evaluation of version `step`; the ledger has every single answer.

        `phase` is before, during or after training; `end` if a trainer itself has measured held-out rows after its last
        batch, and then `values` have the names that they have in a line of metrics. An evaluation during training ends
        some steps later, and W&B does not accept earlier steps. So the sinks get the results at the newest step, and
        `evaluation/step` gives the step that was evaluated.
        """
        self._watch_evaluation(phase, values)
        time_s = round(time.monotonic() - self._start_s, 3)
        record = _drop_infinite({"step": step, "phase": phase, "time_s": time_s, **values})
        with self._evaluations.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
        self.evaluated.add((phase, step))
        rows = self._tables.take_held_out()
        for sink in self._sinks:
            sink.write(max(step, self._step), {**values, "evaluation/step": step})
            if rows:
                sink.table(max(step, self._step), "held_out_samples", rows)

    def close(self) -> None:
        self._file.close()
        for sink in self._sinks:
            sink.close()


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


def read_lines(path: Path) -> list[dict[str, Any]]:
    """All complete lines of a metrics file, parsed. Raises ConfigError for a line that is no valid record."""
    found = []
    for number, line in enumerate(whole_lines(path), start=1):
        try:
            found.append(parse_line(line))
        except ValueError as problem:
            raise ConfigError(f"{path}:{number} is damaged: {problem}; remove that line, or the file") from None
    return found


def parse_line(line: str) -> dict[str, Any]:
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


def rewind_lines(path: Path, step: int, *, phases: Collection[str] | None = None) -> None:
    """Keep only the lines up to `step`, unchanged: a resumed run continues from the checkpoint of that step.

    Of the lines of `step` itself, only those of the `phases` are kept, if these are given.
    """
    lines = zip(whole_lines(path), read_lines(path), strict=True)
    temporary = path.with_name(f".{path.name}.tmp")
    kept = "".join(
        line + "\n"
        for line, record in lines
        if record["step"] < step or (record["step"] == step and (phases is None or record.get("phase") in phases))
    )
    temporary.write_bytes(kept.encode(errors="surrogateescape"))
    temporary.replace(path)


def flatten_numbers(record: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a record, with nested names joined by "/", for sinks that accept only scalars."""
    scalars: dict[str, float] = {}
    for name, value in record.items():
        if isinstance(value, Mapping):
            scalars |= flatten_numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            scalars[prefix + name] = float(value)
    return scalars


def _drop_infinite(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON has no NaN."""
    if isinstance(value, dict):
        return {name: _drop_infinite(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_drop_infinite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def node_roles(graph: Graph) -> dict[str, str]:
    """Node name -> role, so that `generator_busy_s` is the generator's, whatever its name in the graph.

    If there are several nodes of one kind (actor and critic are trainers), the first one has the role.
    """
    found: dict[str, str] = {}
    for name, node in graph.nodes.items():
        for role in ("generator", "trainer"):
            if type(node).__name__.lower().endswith(role):
                found.setdefault(role, name)
    return {name: role for role, name in found.items()}


@dataclass(frozen=True)
class StopRule:
    """When a run ends before its last step: as by an interrupt, it finishes groups in flight and saves a checkpoint."""

    metric: str = ""
    """Name of a number in metrics.jsonl, or of one from evaluations during training, such as evaluation/score; empty:
    the run does not end early."""
    above: float | None = None
    """End the run when the metric is above this."""
    below: float | None = None
    """End the run when the metric is below this."""
    patience: int = 0
    """End the run after this many values without an improvement, starting from the value before training. 0: never."""
    best: Literal["highest", "lowest"] = "highest"
    """Whether a higher or a lower value is an improvement."""
    for_values: int = 1
    """Number of values in a row that must be above, or below."""

    def __post_init__(self) -> None:
        rules = self.above is not None or self.below is not None or self.patience > 0
        if bool(self.metric) != rules:
            raise ConfigError(
                "--stop.metric and a rule go together: --stop.above, --stop.below or --stop.patience; give both, or "
                "neither"
            )
        if self.patience < 0 or self.for_values < 1:
            raise ConfigError("--stop.patience has to be 0 or more, and --stop.for-values 1 or more")
        if self.for_values > 1 and self.above is None and self.below is None:
            raise ConfigError("--stop.for-values is for --stop.above and --stop.below; give one of them too")
        if self.best != "highest" and not self.patience:
            raise ConfigError("--stop.best is for --stop.patience; give that too, or leave it out")


class EarlyStop:
    """Looks at every line of metrics and every evaluation; calls `stop` once, with the reason.

    An evaluation before training sets the value to beat and does not end the run. One after training is ignored.
    """

    def __init__(self, rule: StopRule, stop: Callable[[str], None]) -> None:
        self._rule = rule
        self._stop = stop
        self._beyond = 0
        """Number of values in a row, up to the newest, that are above, or below."""
        self._best = -math.inf
        self._since_best = 0
        self._stopped = self._seen = False

    @property
    def unseen(self) -> str:
        """The metric of the rule if it has had no value yet, otherwise ""."""
        return "" if self._seen else self._rule.metric

    def look_at_line(self, values: Mapping[str, object]) -> None:
        """Take the value of the metric, if it is among `values`, and end the run if the rule says so."""
        rule = self._rule
        value = self._finite_value(values)
        if value is None:
            return
        above = rule.above is not None and value > rule.above
        below = rule.below is not None and value < rule.below
        self._beyond = self._beyond + 1 if above or below else 0
        if self._beyond >= rule.for_values:
            side = f"above {rule.above:g}" if above else f"below {rule.below:g}"
            reason = f"{rule.metric} is {value:.4g}, {side}"
        else:
            signed = value if rule.best == "highest" else -value
            self._since_best = 0 if signed > self._best else self._since_best + 1
            self._best = max(self._best, signed)
            if not rule.patience or self._since_best < rule.patience:
                return
            times = "value" if self._since_best == 1 else "values"  # more than the patience in a resumed run
            reason = f"{rule.metric} has not improved for {self._since_best} {times}"
        if not self._stopped:
            self._stopped = True
            self._stop(reason)

    def look_at_evaluation(self, phase: str, values: Mapping[str, object]) -> None:
        """Take the value of the metric of an evaluation before, during or after training."""
        if phase == "during":
            self.look_at_line(values)
        elif phase == "before" and (value := self._finite_value(values)) is not None:
            self._best = value if self._rule.best == "highest" else -value

    def recall_records(self, run_dir: Path) -> None:
        """Take the values in the records of a resumed run, without ending it: the counts continue from there."""
        if not self._rule.metric:
            return
        stopped, self._stopped = self._stopped, True
        for line in read_lines(run_dir / METRICS):
            self.look_at_line(flatten_numbers(line))
        for line in read_lines(run_dir / EVALUATIONS):
            self.look_at_evaluation(line.get("phase", ""), line)
        self._stopped = stopped

    def _finite_value(self, values: Mapping[str, object]) -> float | None:
        """The value of the metric, if `values` has one that is a finite number."""
        value = values.get(self._rule.metric)
        self._seen |= value is not None
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
