"""The whole ladder on `tiny`, judged by the task's verifier on held-out prompts.

    python -m benchmarks.training.ladder                   # every case, then the table
    python -m benchmarks.training.ladder --only grpo dpo   # these again; the table keeps the others' last results
    python -m benchmarks.training.ladder --table --page    # runs nothing, writes the table of docs/ladder.md
    python -m benchmarks.training.ladder --chain           # SFT -> reward model -> PPO, and SFT -> DPO

A case is one `flowrl run`; its command stands in the table. Every figure is the share of right answers over
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

from benchmarks.training.ladder_cases import ROOT, CaseFailed, LadderCase, Result, result_of, run_case
from benchmarks.training.ladder_table import markdown, write_table

SEEDS = 3
RANDOM = "random"
"""Stands for `tiny` before anything was trained."""
CASES = (
    LadderCase("sft", 450, online=False, start="{random}"),
    LadderCase("pairs", options=("--pairs", "{out}"), online=False, writes="pairs.jsonl"),
    LadderCase(
        "reward_model", 300, ("--pairs", "{pairs}"), online=False, start="tiny", pairs="{pairs}", floor=0.7, margin=0.1
    ),
    LadderCase("dpo", 200, ("--pairs", "{pairs}", "--nll-coef", "0.5"), online=False, seeds=SEEDS),
    LadderCase("kto", 200, ("--labelled", "{pairs}", "--beta", "0.5"), online=False, seeds=SEEDS),
    LadderCase("grpo", 150, ("--lr", "2e-4"), seeds=SEEDS),
    LadderCase("reinforce_pp", 150, ("--lr", "2e-4")),
    LadderCase("rloo", 150, ("--lr", "2e-4")),
    LadderCase("dapo", 100, ("--lr", "2e-4"), negated_steps=12),  # later no group has spread, and it samples for ever
    LadderCase("ppo", 60, ("--kl-coef", "0.3", "--reward-model", "{reward_model}"), minutes=10, seeds=SEEDS),
    LadderCase("raft", 150, ("--lr", "3e-4"), minutes=10),
    LadderCase("iterative_dpo", 60, ("--lr", "1e-4"), minutes=10, seeds=SEEDS),
    LadderCase("distill", 80, ("--lr", "3e-4")),
    LadderCase("distill", 80, ("--lr", "3e-4", "--exact"), name="distill_exact"),
)
CHAIN = (
    LadderCase("sft", 650, online=False, start="{random}"),
    LadderCase("pairs", options=("--policy", "{sft}", "--pairs", "{out}"), online=False, writes="pairs.jsonl"),
    LadderCase(
        "reward_model",
        1800,  # its pairs are wrong in any digit: to tell them is to add
        ("--policy", "{sft}", "--pairs", "{pairs}", "--schedule", "linear"),
        online=False,
        start="{sft}",
        pairs="{pairs}",
        floor=0.7,
        margin=0.1,
    ),
    LadderCase(
        "ppo",
        60,
        ("--policy", "{sft}", "--reward-model", "{reward_model}", "--critic", "{reward_model}", "--kl-coef", "0.3"),
        minutes=10,
    ),
    LadderCase("dpo", 200, ("--policy", "{sft}", "--pairs", "{pairs}", "--nll-coef", "0.5"), online=False),
)
PAGE = ROOT / "docs" / "ladder.md"


@dataclass(frozen=True)
class Ladder:
    """Cases, each above those it starts from, and the directory of their runs and results."""

    cases: tuple[LadderCase, ...]
    home: Path

    def climb(self, chosen: Sequence[LadderCase], seeds: Sequence[int] | None = None) -> Iterator[str]:
        """Run some cases, before each what it needs and is not there; `seeds` None: their own. Yields failures."""
        for case in chosen:
            try:
                self.run_missing(case.needs)
                for seed in range(case.seeds) if seeds is None else seeds:
                    self.run(case, seed)
            except (CaseFailed, ValueError) as failure:
                yield f"{case.title}: {failure}"

    def run_missing(self, names: Sequence[str]) -> None:
        """Run those of the named cases that have no result yet, after what they need themselves."""
        for case in self.cases:
            if case.title in names and not self.record(case, 0).exists():
                self.run_missing(case.needs)
                self.run(case, 0)

    def run(self, case: LadderCase, seed: int) -> None:
        """One run of a case, its result kept and told."""
        self.record(case, seed).unlink(missing_ok=True)
        told = f"ladder: {case.title}, seed {seed}"
        print(f"{told} ...", file=sys.stderr, flush=True)
        result = run_case(case, seed, self.models(case), self.home)
        result.write(self.record(case, seed))
        print(f"{told}: {result.gain or 'done'}, {result.minutes:.1f} min", file=sys.stderr, flush=True)

    def models(self, case: LadderCase) -> Mapping[str, Path]:
        """What stands for the names in a case's options: what other cases left."""
        known = {other.title: other for other in self.cases}
        return {name: random_model() if name == RANDOM else result_of(known[name], 0, self.home) for name in case.needs}

    def record(self, case: LadderCase, seed: int) -> Path:
        """Where the result of a run is kept."""
        return self.home / f"{case.title}-{seed}.json"

    def results(self) -> list[Result]:
        """The last results of all cases, in their order."""
        kept = [self.record(case, seed) for case in self.cases for seed in range(case.seeds)]
        return [Result.read(path) for path in kept if path.exists()]


def random_model() -> Path:
    """`tiny` before anything was trained."""
    from flowrl.models import Policy, resolve

    return Path(resolve(Policy("tiny")))


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    ladder = Ladder(CHAIN, options.home / "chain") if options.chain else Ladder(CASES, options.home)
    chosen = [case for case in ladder.cases if not options.only or case.title in options.only]
    failures = [] if options.table else list(ladder.climb(chosen, options.seeds))
    found = ladder.results()
    table = markdown(ladder.cases, found)
    print(table)
    for result in found:
        print(json.dumps({"benchmark": "ladder", "system": "flowrl", **asdict(result)}))
    if options.page:
        write_table(PAGE, table)
    cases = {case.title: case for case in ladder.cases}
    failures += [f"{r.case}, seed {r.seed}: learnt too little, or audit" for r in found if not cases[r.case].passed(r)]
    for failure in failures:
        print(f"ladder: {failure}", file=sys.stderr)
    return 1 if failures else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    titles = [case.title for case in (*CASES, *CHAIN)]
    parser.add_argument("--only", nargs="+", default=[], choices=titles, metavar="CASE")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="training seeds instead of the cases' own")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--chain", action="store_true", help="each stage from the one before, in place of the cases")
    parser.add_argument("--home", type=Path, default=Path("runs") / "ladder", help="where runs and results lie")
    parser.add_argument("--page", action="store_true", help="write the table into docs/ladder.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
