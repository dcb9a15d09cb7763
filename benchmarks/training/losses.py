"""Six policy losses at a staleness of 0, 1 and 4, with equal tokens: what each learns, seed by seed.

    python -m benchmarks.training.losses                  # what has no result yet, then the table
    python -m benchmarks.training.losses --most 3         # three of the runs
    python -m benchmarks.training.losses --table --docs   # runs nothing, writes the table into its page

A run is `flowrl run grpo` on `tiny`, on the real stack. All losses have the same ratio, that to the policy that
sampled, and no correction besides, so that what differs is the loss. Runs are interleaved: every loss at every
staleness with one seed, then with the next one. Results are JSON lines, one when a run is done and its audit is ok, so
the same command goes on where it was stopped. The status is 1 if a run or an audit failed.

Equal tokens: a run's reward is the mean over the last fifth of its first N trained tokens, where N is the least that
any run has trained on; it is weighted by tokens, batch by batch. Held-out answers are those after the last step.
"""

from __future__ import annotations

import argparse
import json
import shlex
import signal
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.training.gain import gain
from benchmarks.training.ladder_cases import ROOT, CaseFailed, audited, flowrl

LOSSES: Mapping[str, tuple[str, ...]] = {
    "ppo": (),
    "gspo": (),
    "cispo": ("--objective.clip-high", "2"),
    "sapo": (),
    "vespo": (),
    "dppo": (),
}
"""Loss -> its options, beside those of all."""
STALENESS = (0, 1, 4)
SEEDS = (0, 1, 2)
JOB = (
    "run grpo --lr 5e-4 --steps 60 --evaluate 256 --evaluate-samples 2 "
    "--objective.old behavior --objective.correction None"
)
LIMIT_S = 900.0
"""What one run may take."""
LAST = 0.2
"""Share of the compared tokens over which a reward is the mean."""
PAGE = ROOT / "docs" / "losses-compared.md"
BEGIN, END = "<!-- losses: begin -->", "<!-- losses: end -->"


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    loss: str
    staleness: int
    seed: int
    curve: tuple[tuple[int, float], ...]
    """(trained tokens, mean reward) of each batch."""
    before: float
    after: float
    """Share of right held-out answers."""
    staleness_mean: float
    """Over trained tokens."""
    staleness_max: int
    clip_fraction: float
    """Mean over the batches."""

    def reward_within(self, tokens: int) -> float:
        """The mean reward over the last part of the first `tokens`."""
        start, weighted, counted = 0, 0.0, 0.0
        for number, reward in self.curve:
            low, high = max(start, tokens * (1 - LAST)), min(start + number, tokens)
            weighted, counted = weighted + max(0.0, high - low) * reward, counted + max(0.0, high - low)
            start += number
        return weighted / counted

    @property
    def tokens(self) -> int:
        return sum(number for number, _ in self.curve)


def read_outcomes(path: Path) -> dict[tuple[str, int, int], Outcome]:
    """The results of a file of JSON lines; a line that was cut off is left out."""
    found: dict[tuple[str, int, int], Outcome] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            one = Outcome(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[one.loss, one.staleness, one.seed] = one
    return found


def command_of(loss: str, staleness: int, seed: int) -> list[str]:
    """What stands behind `flowrl`."""
    own = ("--objective.kind", loss, *LOSSES[loss], "--staleness", str(staleness), "--seed", str(seed))
    return [*shlex.split(JOB), *own]


def run_loss(loss: str, staleness: int, seed: int, home: Path) -> Outcome:
    """Run it afresh below `home`. Raises CaseFailed."""
    run_dir = home / f"{loss}-{staleness}-{seed}"
    flowrl(command_of(loss, staleness, seed), run_dir, limit_s=LIMIT_S)
    if not audited(run_dir):
        raise CaseFailed(f"{run_dir.name}: its audit failed; see flowrl audit {run_dir}")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    aged = [(line["tokens_trained"], line["staleness_mean"]) for line in lines if line["staleness_mean"] is not None]
    held_out = gain(run_dir)
    return Outcome(
        loss,
        staleness,
        seed,
        tuple((line["tokens_trained"], line["reward_mean"]) for line in lines),
        held_out.before,
        held_out.after,
        staleness_mean=sum(tokens * mean for tokens, mean in aged) / max(1, sum(tokens for tokens, _ in aged)),
        staleness_max=max((line["staleness_max"] or 0 for line in lines), default=0),
        clip_fraction=statistics.fmean(line["clip_fraction"] or 0.0 for line in lines),
    )


def table(found: Sequence[Outcome]) -> str:
    """Markdown: a row for each loss and staleness, with the mean and each seed."""
    tokens = min(one.tokens for one in found)
    head = "loss | staleness | its mean | reward, mean | reward of each seed | held-out answers right | clipped"
    lines = [f"| {head} |", "|---" * 7 + "|"]
    for staleness in STALENESS:
        for loss in LOSSES:
            runs = sorted((r for r in found if (r.loss, r.staleness) == (loss, staleness)), key=lambda run: run.seed)
            if not runs:
                continue
            rewards = [run.reward_within(tokens) for run in runs]
            cells = (
                f"{loss} | {staleness} | {statistics.fmean(run.staleness_mean for run in runs):.2f}",
                f"{statistics.fmean(rewards):.3f}",
                ", ".join(f"{reward:.3f}" for reward in rewards),
                ", ".join(f"{run.after:.3f}" for run in runs),
                f"{statistics.fmean(run.clip_fraction for run in runs):.4f}",
            )
            lines.append(f"| {' | '.join(cells)} |")
    before = statistics.fmean(run.before for run in found)
    seeds = len({run.seed for run in found})
    said = (
        f"{len(found)} of {len(LOSSES) * len(STALENESS) * len(SEEDS)} runs, {seeds} seeds; N is {tokens:,} trained "
        f"tokens. Before training {before:.3f} of the held-out answers are right."
    )
    return "\n".join([*lines, "", said])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--most", type=int, default=None, help="number of runs, at most")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", action="store_true", help="write the table into its page")
    parser.add_argument("--home", type=Path, default=Path("runs") / "losses", help="where runs and results lie")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    results = options.home / "results.jsonl"
    cells = [(loss, staleness, seed) for seed in SEEDS for staleness in STALENESS for loss in LOSSES]
    left = [] if options.table else [cell for cell in cells if cell not in read_outcomes(results)][: options.most]
    failures = []
    for cell in left:
        try:
            outcome = run_loss(*cell, options.home)
        except (CaseFailed, ValueError, OSError) as failure:
            failures.append(str(failure))
            continue
        with results.open("a") as file:
            file.write(json.dumps(asdict(outcome)) + "\n")
    if found := list(read_outcomes(results).values()):
        print(table(found))
        if options.docs:
            before, _, rest = PAGE.read_text().partition(BEGIN)
            PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{rest.partition(END)[2]}")
    for text in failures:
        print(f"losses: {text}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
