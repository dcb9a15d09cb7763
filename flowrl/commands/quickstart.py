"""`flowrl quickstart`: a language model gets better at a task, asynchronously, and the records prove it.

Runs the graph `grpo` on `tiny` and two-number addition, then prints what the run's own records say.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.graph.load import load_file
from flowrl.runtime.driver.job import RunOptions
from flowrl.runtime.telemetry.standard_streams import print_text

GRAPH = "grpo"


@dataclass(frozen=True)
class QuickstartOptions:
    """Train a small character model on two-number addition by GRPO; a CPU is enough."""

    steps: int = 300
    """Batches to train; 300 take two and a half minutes on two cores, and twice as long the first time."""
    run_dir: Path | None = None
    """Where the run's records go; None: runs/quickstart-TIME."""
    control: bool = False
    """Shuffle the rewards within each group: then nothing can be learnt."""
    lr: float = 1e-4
    """Peak learning rate."""
    evaluate: int = 1024
    """Number of held-out problems, answered before and after training."""

    def __post_init__(self) -> None:
        for name in ("steps", "evaluate"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name} is {getattr(self, name)}; it needs at least 1")


def train_quickstart(options: QuickstartOptions) -> int:
    """Run and report. Returns the exit status, which is 1 if the audit fails. Raises FlowrlError."""
    from flowrl.runtime.driver.launch import run

    file = load_file(GRAPH)
    args = ["--lr", str(options.lr), "--evaluate", str(options.evaluate)]
    cfg = file.parse([*args, *(["--shuffle-rewards"] if options.control else [])])
    of_run = RunOptions(steps=options.steps, run_dir=options.run_dir)
    result = run(file.path, file.build(cfg), cfg, of_run, called="quickstart")
    return print_records(result.run_dir, result.outcome.evaluations, control=options.control)


def print_records(run_dir: Path, evaluations: dict[str, dict[str, float]], *, control: bool) -> int:
    """Print what the records say; of a run that was interrupted, what there is. Status 1 if the audit fails."""
    from flowrl.runtime.audit.audit import audit
    from flowrl.runtime.telemetry.metrics import read_lines

    lines, audited = read_lines(run_dir / "metrics.jsonl"), audit(run_dir)
    print_text(f"run directory        {run_dir}")
    print_text(f"rewards              {'shuffled within groups (control)' if control else 'exact match'}")
    if {"before", "after"} <= evaluations.keys():
        before, after = (evaluations[phase]["exact_match"] for phase in ("before", "after"))
        print_text(f"held-out problems    {int(evaluations['after']['num_answers'])}, disjoint from SFT and RL")
        print_text(f"held-out exact match {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
    else:
        print_text("held-out exact match not known, as the run was interrupted before its last evaluation")
    if lines and (seconds := lines[-1]["time_s"] - lines[0]["time_s"]) > 0:
        samples = sum(line["num_samples"] for line in lines[1:])
        print_text(f"samples/s            {samples / seconds:.0f} over {len(lines)} steps in {seconds:.0f} s")
    if lines:
        print_text(
            f"max staleness        {max(line['staleness_max'] for line in lines)} (bound {audited.figures['bound']})"
        )
    print_text("audit: ok" if audited.ok else str(audited))
    return 0 if audited.ok else 1
