"""The whole ladder on `tiny`, judged by the task's verifier on held-out prompts.

    python -m benchmarks.ladder                   # every rung, then the table
    python -m benchmarks.ladder --only grpo dpo   # these again; the table keeps the others' last results
    python -m benchmarks.ladder --table --readme  # runs nothing, writes README's table from what is there
    python -m benchmarks.ladder --chain           # SFT -> reward model -> PPO, and SFT -> DPO

A rung is one `flowrl run`; its command stands in the table. Every figure is the share of right answers over
256 held-out prompts, 4 answers to each, with the same seeds before and after; the error is the standard
error of the paired differences. The status is 1 if a gain is not above two of them, or an audit fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.ladder_table import markdown, write_table
from benchmarks.rungs import ROOT, Result, Rung, RungFailed, result_of, run_rung

SEEDS = 3
RANDOM = "random"
"""Stands for `tiny` before anything was trained."""
RUNGS = (
    Rung("sft", 450, online=False, start="{random}"),
    Rung("pairs", options=("--pairs", "{out}"), online=False, writes="pairs.jsonl"),
    Rung(
        "reward_model", 300, ("--pairs", "{pairs}"), online=False, start="tiny", pairs="{pairs}", floor=0.7, margin=0.1
    ),
    Rung("dpo", 200, ("--pairs", "{pairs}", "--nll-coef", "0.5"), online=False, seeds=SEEDS),
    Rung("kto", 200, ("--labelled", "{pairs}", "--beta", "0.5"), online=False, seeds=SEEDS),
    Rung("grpo", 150, ("--lr", "2e-4"), seeds=SEEDS),
    Rung("reinforce_pp", 150, ("--lr", "2e-4")),
    Rung("rloo", 150, ("--lr", "2e-4")),
    Rung("dapo", 100, ("--lr", "2e-4"), negated_steps=12),  # later no group has spread, and it samples for ever
    Rung("ppo", 60, ("--kl-coef", "0.3", "--reward-model", "{reward_model}"), minutes=10, seeds=SEEDS),
    Rung("raft", 150, ("--lr", "3e-4"), minutes=10),
    Rung("iterative_dpo", 60, ("--lr", "1e-4"), minutes=10, seeds=SEEDS),
    Rung("distill", 80, ("--lr", "3e-4")),
    Rung("distill", 80, ("--lr", "3e-4", "--exact"), name="distill_exact"),
)
CHAIN = (
    Rung("sft", 650, online=False, start="{random}"),
    Rung("pairs", options=("--policy", "{sft}", "--pairs", "{out}"), online=False, writes="pairs.jsonl"),
    Rung(
        "reward_model",
        1800,  # its pairs are wrong in any digit: to tell them is to add
        ("--policy", "{sft}", "--pairs", "{pairs}", "--schedule", "linear"),
        online=False,
        start="{sft}",
        pairs="{pairs}",
        floor=0.7,
        margin=0.1,
    ),
    Rung(
        "ppo",
        60,
        ("--policy", "{sft}", "--reward-model", "{reward_model}", "--critic", "{reward_model}", "--kl-coef", "0.3"),
        minutes=10,
    ),
    Rung("dpo", 200, ("--policy", "{sft}", "--pairs", "{pairs}", "--nll-coef", "0.5"), online=False),
)
README = ROOT / "README.md"


@dataclass(frozen=True)
class Ladder:
    """Rungs, each above those it starts from, and the directory of their runs and results."""

    rungs: tuple[Rung, ...]
    home: Path

    def climb(self, chosen: Sequence[Rung], seeds: Sequence[int] | None = None) -> Iterator[str]:
        """Run some rungs, before each what it needs and is not there; `seeds` None: their own. Yields failures."""
        for rung in chosen:
            try:
                self.run_missing(rung.needs)
                for seed in range(rung.seeds) if seeds is None else seeds:
                    self.run(rung, seed)
            except (RungFailed, ValueError) as failure:
                yield f"{rung.title}: {failure}"

    def run_missing(self, names: Sequence[str]) -> None:
        """Run those of the named rungs that have no result yet, after what they need themselves."""
        for rung in self.rungs:
            if rung.title in names and not self.record(rung, 0).exists():
                self.run_missing(rung.needs)
                self.run(rung, 0)

    def run(self, rung: Rung, seed: int) -> None:
        """One run of a rung, its result kept and told."""
        self.record(rung, seed).unlink(missing_ok=True)
        told = f"ladder: {rung.title}, seed {seed}"
        print(f"{told} ...", file=sys.stderr, flush=True)
        result = run_rung(rung, seed, self.models(rung), self.home)
        result.write(self.record(rung, seed))
        print(f"{told}: {result.gain or 'done'}, {result.minutes:.1f} min", file=sys.stderr, flush=True)

    def models(self, rung: Rung) -> Mapping[str, Path]:
        """What stands for the names in a rung's options: what other rungs left."""
        known = {other.title: other for other in self.rungs}
        return {name: random_model() if name == RANDOM else result_of(known[name], 0, self.home) for name in rung.needs}

    def record(self, rung: Rung, seed: int) -> Path:
        """Where the result of a run is kept."""
        return self.home / f"{rung.title}-{seed}.json"

    def results(self) -> list[Result]:
        """The last results of all rungs, in their order."""
        kept = [self.record(rung, seed) for rung in self.rungs for seed in range(rung.seeds)]
        return [Result.read(path) for path in kept if path.exists()]


def random_model() -> Path:
    """`tiny` before anything was trained."""
    from flowrl.models import Policy, resolve

    return Path(resolve(Policy("tiny")))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    ladder = Ladder(CHAIN, options.home / "chain") if options.chain else Ladder(RUNGS, options.home)
    chosen = [rung for rung in ladder.rungs if not options.only or rung.title in options.only]
    failures = [] if options.table else list(ladder.climb(chosen, options.seeds))
    found = ladder.results()
    table = markdown(ladder.rungs, found)
    print(table)
    for result in found:
        print(json.dumps({"benchmark": "ladder", "system": "flowrl", **asdict(result)}))
    if options.readme:
        write_table(README, table)
    rungs = {rung.title: rung for rung in ladder.rungs}
    failures += [f"{r.rung}, seed {r.seed}: learnt too little, or audit" for r in found if not rungs[r.rung].passed(r)]
    for failure in failures:
        print(f"ladder: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    titles = [rung.title for rung in (*RUNGS, *CHAIN)]
    parser.add_argument("--only", nargs="+", default=[], choices=titles, metavar="RUNG")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="training seeds instead of the rungs' own")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--chain", action="store_true", help="each stage from the one before, in place of the rungs")
    parser.add_argument("--home", type=Path, default=Path("runs") / "ladder", help="where runs and results lie")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
