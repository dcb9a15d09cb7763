"""What a run is told and where it stands: its options on the command line, the job made from them, its state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flowrl.errors import ConfigError
from flowrl.graph.analysis.branches import find_trainers
from flowrl.graph.analysis.plan import Plan
from flowrl.graph.graph import Graph
from flowrl.runtime.samples.sample_notes import SampleShare
from flowrl.runtime.telemetry.metrics import AlarmThresholds, StopRule
from flowrl.runtime.telemetry.sinks import Tracking, check_sinks
from flowrl.runtime.telemetry.trace import TraceMode
from flowrl.wire.tickets import Tickets

if TYPE_CHECKING:
    from flowrl.runtime.driver.resources import ProcessSlot
    from flowrl.runtime.process.engine import ProcessSpec


@dataclass(frozen=True)
class RunOptions:
    """Options of `flowrl run`."""

    steps: int | None = None
    """Stop after this version, and repeat the data as needed; None: stop after one pass over the data."""
    run_dir: Path | None = None
    """Directory for the run's records; None: runs/GRAPH-TIME."""
    resume: bool = False
    """Go on from the newest checkpoint in `run_dir`."""
    save_every: int = 0
    """Save a checkpoint every n steps; 0: only by time, and at the end."""
    save_minutes: float = 10.0
    """Save a checkpoint at the end of a batch if this many minutes have passed without one; 0: none by time."""
    keep: int = 2
    """Number of checkpoints to keep; 0: all."""
    keep_best: bool = False
    """Also keep the checkpoint with the best held-out score; `best.json` names it."""
    seed: int = 0
    """Determines the order of the data, sampling and initial values."""
    plain: bool = False
    """Plain lines instead of the live view."""
    track: tuple[str, ...] = ()
    """Further sinks of the metrics: tensorboard, wandb, trackio."""
    trace: TraceMode = "sampled"
    """sampled: at most 16 MiB in `trace.json`; for a long run, every nth group, from prompt to gradient; full:
    everything, however large; off: no trace."""
    keep_episodes: int = 200
    """For `flowrl show`, keep at least this many of the last episodes, all failed ones, 1% of the others; 0: none."""
    keep_samples: str = "auto"
    """Keep samples for `flowrl samples`: auto (as many as take at most 0.4% of their process's time), all, a share of
    the groups such as 0.1 plus all that failed, none (only held-out answers, which the choices before also keep), or
    off."""
    keep_token_ids: bool = False
    """Also keep the token ids of these samples."""
    tracking: Tracking = field(default_factory=Tracking)
    """Names and samples in the sinks of --track."""
    max_hours: float | None = None
    """End the run, with a checkpoint, this many hours after the command was given; --resume continues it."""
    term_minutes: float = 10.0
    """After SIGTERM, and when --max-hours are over: end without a new checkpoint if the current batch and its
    checkpoint take longer than this many minutes (0.4: 24 s)."""
    start_minutes: float = 10.0
    """How long each part of the start may take: Ray, a process, the meeting of the ranks, vLLM's load of a model. More
    for a machine with a high load, or for a large model on a slow disk."""
    stop: StopRule = field(default_factory=StopRule)
    """When a figure of the metrics ends the run early."""
    alarms: AlarmThresholds = field(default_factory=AlarmThresholds)
    """Thresholds at which the alarms in the view and the metrics start."""

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"--steps is {self.steps}; it needs at least 1, or leave it out to use all the data")
        for name in ("save_every", "save_minutes", "keep", "seed", "keep_episodes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"--{name.replace('_', '-')} is {getattr(self, name)}; it has to be 0 or more")
        if self.resume and self.run_dir is None:
            raise ConfigError("--resume needs to know which run: give its directory with --run-dir")
        if self.max_hours is not None and not self.max_hours > 0:
            raise ConfigError(f"--max-hours is {self.max_hours}; it has to be above 0")
        if not self.start_minutes > 0:
            raise ConfigError(f"--start-minutes is {self.start_minutes}; it has to be above 0")
        if not self.term_minutes > 0:
            raise ConfigError(
                f"--term-minutes is {self.term_minutes}; it has to be above 0 (0.4 is 24 s); a second signal ends a "
                "run at once"
            )
        SampleShare.parse(self.keep_samples)
        check_sinks(self.track)
        if self.tracking != Tracking() and not self.track:
            raise ConfigError("--tracking has no effect without --track; give --track wandb too")
        if self.keep_token_ids and self.keep_samples == "off":
            raise ConfigError(
                "--keep-token-ids is for the samples of --keep-samples, which is off; leave one of them out"
            )


def check_options(options: RunOptions, graph: Graph) -> None:
    """Raise ConfigError for an option that has no effect with this graph."""
    evaluations = [node for node in graph.nodes.values() if hasattr(node, "evaluate")]
    if options.keep_best and not find_trainers(graph):
        raise ConfigError(
            "--keep-best chooses among the checkpoints of a trainer, and the graph has none; leave --keep-best out"
        )
    if options.keep_best and not evaluations:
        raise ConfigError(
            "--keep-best needs held-out scores, but the graph evaluates nothing; add an Evaluation node (in the "
            "graphs of flowrl: --evaluate N), or leave --keep-best out"
        )
    metric = options.stop.metric
    if metric.startswith("evaluation/") and not any(getattr(node, "every", 0) for node in evaluations):
        raise ConfigError(
            f"--stop.metric {metric} has values only from evaluations during training, and there are none; add an "
            "Evaluation node with every=N (in the graphs of flowrl: --evaluate-every N)"
        )
    if graph.admission is None and not any(node.gang for node in graph.nodes.values()):
        for option, value in (("--steps", options.steps), ("--save-every", options.save_every)):
            if value:
                raise ConfigError(
                    f"{option} counts the batches of a trainer, and the graph has none: it runs until the end of its "
                    f"data; leave {option} out"
                )


UNBOUNDED = 1 << 40
"""Number of batches that admission may run ahead if no weights flow back; then only the lanes' credits bound it."""


@dataclass(frozen=True)
class Job:
    """One run, checked and planned."""

    graph: Graph
    plan: Plan
    options: RunOptions
    run_dir: Path
    slots: tuple[ProcessSlot, ...]
    specs: Mapping[str, ProcessSpec]
    resume_from: Path | None
    start_version: int
    start_versions: Mapping[str, int]
    """Trainer -> the version with which it starts, if that is not `start_version`."""
    rewind: Callable[[], None]
    """Rewinds the run's files to `resume_from`."""
    advise: Callable[[Mapping[str, Any]], str] | None = None
    """Takes each line of metrics and returns what the user should know of the placement, mostly ""."""

    def make_tickets(self) -> Tickets:
        """The tickets of the run; none of them is taken yet."""
        numbers, steps = self.plan.numbers, self.options.steps
        per_batch = numbers.groups_per_batch or 1
        return Tickets(
            per_batch,
            numbers.ahead if numbers.ahead is not None else UNBOUNDED,
            consumers=self.plan.consumers,
            trainers=self.plan.trainers,
            publish_every=numbers.publish_every,
            start_version=self.start_version,
            start_versions=self.start_versions,
            max_groups=None if steps is None else (steps - self.start_version) * per_batch,
        )


@dataclass
class RunState:
    """The state of one run."""

    version: int
    """The main trainer's newest version that is booked."""
    interrupted: bool = False
    """Whether admission has ended before the last step; the groups in flight are finished."""
    running: bool = False
    """Whether all nodes are set up."""
