"""The whole ladder on `tiny`, judged by the task's verifier on held-out prompts.

    python -m benchmarks.ladder                   # every rung, then the table that README shows
    python -m benchmarks.ladder --only grpo dpo   # these again; the table keeps the others' last results
    python -m benchmarks.ladder --table           # runs nothing, makes the table from what is there

A rung is one `flowrl run`; its command stands in the table. Every figure is the share of right answers over
256 held-out prompts, 4 answers to each, with the same seeds before and after; the error is the standard
error of the paired differences. The status is 1 if a gain is not above two of them, or an audit fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.rungs import ANSWERS, PROMPTS, ROOT, Result, Rung, RungFailed, checkpoint, run_dir_of, run_rung

SEEDS = 3
RUNGS = (
    Rung("sft", 450, online=False, start="{random}"),
    Rung("grpo", 150, ("--lr", "2e-4"), seeds=SEEDS),
    Rung("reinforce_pp", 150, ("--lr", "2e-4")),
    Rung("rloo", 150, ("--lr", "2e-4")),
    Rung("dapo", 100, ("--lr", "2e-4")),
    Rung("raft", 150, ("--lr", "3e-4"), minutes=10),
    Rung("distill", 100, ("--lr", "3e-4")),
)
README = ROOT / "README.md"
BEGIN, END = "<!-- ladder-table: begin -->", "<!-- ladder-table: end -->"


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    chosen = [rung for rung in RUNGS if not options.only or rung.title in options.only]
    failures = [] if options.table else list(climb(chosen, options.home, options.seeds))
    found = results(RUNGS, options.home)
    table = markdown(RUNGS, found)
    print(table)
    for result in found:
        print(json.dumps({"benchmark": "ladder", "system": "flowrl", **asdict(result)}))
    if options.readme:
        write_table(README, table)
    failures += [f"{r.rung}, seed {r.seed}: no gain above two errors, or no closed books" for r in found if not r.good]
    for failure in failures:
        print(f"ladder: {failure}", file=sys.stderr)
    return 1 if failures else 0


def climb(rungs: Sequence[Rung], home: Path, seeds: Sequence[int] | None) -> Iterator[str]:
    """Run the rungs, before each what it needs and is not there; with their own seeds or these. Yields what failed."""
    for rung in rungs:
        try:
            run_missing(rung.needs, home)
            for seed in range(rung.seeds) if seeds is None else seeds:
                run_one(rung, seed, home)
        except (RungFailed, ValueError) as failure:
            yield f"{rung.title}: {failure}"


def run_missing(names: Sequence[str], home: Path) -> None:
    """Run those of the named rungs that have no result yet, after what they need themselves."""
    for rung in RUNGS:
        if rung.title in names and not record(rung, 0, home).exists():
            run_missing(rung.needs, home)
            run_one(rung, 0, home)


def run_one(rung: Rung, seed: int, home: Path) -> Result:
    """One run of a rung, its result kept and told."""
    record(rung, seed, home).unlink(missing_ok=True)
    print(f"ladder: {rung.title}, seed {seed} ...", file=sys.stderr, flush=True)
    result = run_rung(rung, seed, paths(rung, home), home)
    result.write(record(rung, seed, home))
    gain = result.gain
    told = f"{gain.before:.3f} -> {gain.after:.3f}, {gain.gain:+.3f} ± {gain.error:.3f}"
    print(f"ladder: {rung.title}, seed {seed}: {told}, {result.minutes:.1f} min", file=sys.stderr, flush=True)
    return result


def paths(rung: Rung, home: Path) -> Mapping[str, Path]:
    """What stands for the names in a rung's options: models that other rungs ended with."""
    known = {other.title: other for other in RUNGS}
    return {
        name: random_model() if name == "random" else checkpoint(run_dir_of(known[name], 0, home))
        for name in rung.needs
    }


def random_model() -> Path:
    """`tiny` before anything was trained."""
    from flowrl.models import Policy, resolve

    return Path(resolve(Policy("tiny")))


def record(rung: Rung, seed: int, home: Path) -> Path:
    """Where the result of a run is kept."""
    return home / f"{rung.title}-{seed}.json"


def results(rungs: Sequence[Rung], home: Path) -> list[Result]:
    """The last results of all rungs, in their order."""
    kept = [record(rung, seed, home) for rung in rungs for seed in range(rung.seeds)]
    return [Result.read(path) for path in kept if path.exists()]


def markdown(rungs: Sequence[Rung], found: Sequence[Result]) -> str:
    """The table: a line a rung, with its gains for every training seed."""
    lines = [
        f"Share of right answers on {PROMPTS} held-out prompts × {ANSWERS} answers; ± is the paired standard error.",
        "",
        "| graph | before | after | gain by training seed | minutes | audit | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for rung in rungs:
        runs = [result for result in found if result.rung == rung.title]
        lines += [_line(rung, runs)] if runs else []
    return "\n".join(lines)


def _line(rung: Rung, runs: Sequence[Result]) -> str:
    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    gains = ", ".join(f"{run.gain.gain:+.3f} ± {run.gain.error:.3f}" for run in runs)
    audits = {None: "–", True: "ok", False: "failed"}
    cells = (
        rung.title,
        f"{mean([run.gain.before for run in runs]):.3f}",
        f"{mean([run.gain.after for run in runs]):.3f}",
        gains,
        f"{mean([run.minutes for run in runs]):.1f}",
        audits[min((run.audit for run in runs), key=lambda audit: audit is not False)],
        f"`{runs[0].command}`",
    )
    return f"| {' | '.join(cells)} |"


def write_table(readme: Path, table: str) -> None:
    """Put the table between its two marks. Raises ValueError if they are not there."""
    before, begin, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{readme} has no place for the table: it needs the lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{table}\n{END}{after}", encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=[rung.title for rung in RUNGS], metavar="RUNG")
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="training seeds instead of the rung's own")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--home", type=Path, default=Path("runs") / "ladder", help="where runs and results lie")
    parser.add_argument("--readme", action="store_true", help="write the table into README.md")
    return parser


if __name__ == "__main__":
    sys.exit(main())
