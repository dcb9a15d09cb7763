"""What jobs learn, seed by seed, none left out: curves on held-out prompts, paired gains, audits.

    python -m benchmarks.training.seeds chat                     # SmolLM2 on sums, five seeds
    python -m benchmarks.training.seeds agent_game --seeds 0 1   # these only
    python -m benchmarks.training.seeds chat --table             # runs nothing, prints what is there

A seed that has a finished run in `--home` is not run again. A job's options may be followed by others after `--`, which
replace them; choose another `--home` for those. The status is 1 if an audit fails, or the interval of a gain is not
above 0.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import signal
import sqlite3
import statistics
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.training.gain import Gain, gain
from benchmarks.training.ladder_cases import CaseFailed, audited, flowrl

MINUTES = 60.0
"""What one run may take at most."""
CLOCK = re.compile(r"^\[\s*(?:(\d+):)?(\d+):(\d+)\]", re.MULTILINE)
"""How lines of a run without a terminal begin."""
SUMS = "reasoning_gym/chain_sum:min_terms=2,max_terms=2,min_digits=1,max_digits=2,extract=number"
JOBS: dict[str, tuple[int, str]] = {
    "chat": (
        5,
        f"grpo --policy smollm2 --task.name {SUMS} --task.system-prompt Calculate. --max-tokens 16 --temperature 1.0 "
        "--dtype bfloat16 --group-size 16 --groups-per-step 8 --dynamic-sampling --advantage dr_grpo --lr 2e-5 "
        "--schedule.decay linear --evaluate 200 --evaluate-every 15 --steps 45",
    ),
    "agent_tools": (3, "agent_tools --steps 40 --evaluate 512"),
    "agent_openai": (
        3,
        "agent_openai --steps 50 --schedule.decay linear --evaluate 128 --evaluate-samples 4 --episodes-per-process 16",
    ),
    "self_play": (3, "self_play --steps 40"),
    "judge": (3, "judge --steps 60 --evaluate 512"),
    "teachers": (3, "teachers --steps 60 --evaluate 512"),
    "agent_game": (3, "agent_game --steps 100 --evaluate 512"),
    "step_groups": (3, "step_groups --steps 100 --evaluate 512"),
}
"""Job -> number of its seeds, `flowrl run` arguments."""


@dataclass(frozen=True)
class Learnt:
    """One finished run."""

    job: str
    seed: int
    curve: tuple[tuple[int, float], ...]
    """(step, share of right answers), before training first and after it last."""
    gain: Gain
    minutes: float
    """From the command's first line to its last one."""
    staleness_max: int
    audit: bool | None

    @property
    def good(self) -> bool:
        return self.audit is not False and self.gain.low > 0


def command(job: str, seed: int, more: Sequence[str] = ()) -> list[str]:
    """The arguments of `flowrl`; what `more` gives replaces the job's own."""
    own = shlex.split(JOBS[job][1])
    given = {argument.partition("=")[0] for argument in more if argument.startswith("--")}
    kept: list[str] = []
    dropping = False
    for argument in own:
        if argument.startswith("--"):
            dropping = argument in given
        if not dropping:
            kept.append(argument)
    return ["run", *kept, *more, "--seed", str(seed)]


def learnt(job: str, seed: int, run_dir: Path) -> Learnt:
    """Read a run. Raises ValueError if it has not ended with an evaluation."""
    found = gain(run_dir)
    log = CLOCK.findall(run_dir.with_suffix(".log").read_text())
    hours, minutes, seconds = log[-1] if log else ("", "0", "0")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return Learnt(
        job,
        seed,
        tuple(_curve(run_dir)),
        found,
        minutes=int(hours or 0) * 60 + int(minutes) + int(seconds) / 60,
        staleness_max=max(line["staleness_max"] for line in lines if line.get("staleness_max") is not None),
        audit=audited(run_dir),
    )


def _curve(run_dir: Path) -> list[tuple[int, float]]:
    query = (
        "SELECT step, AVG(correct) FROM evaluations"
        " WHERE task = (SELECT task FROM evaluations ORDER BY rowid LIMIT 1) GROUP BY phase, step ORDER BY MIN(rowid)"
    )
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return [(int(step), float(share)) for step, share in db.execute(query)]


def table(found: Sequence[Learnt]) -> str:
    """Markdown: a line a seed, and what all seeds say together."""
    steps = sorted({step for one in found for step, _ in one.curve})
    head = ["seed", *(f"step {step}" for step in steps), "gain, paired 95% interval", "minutes", "audit"]
    lines = [f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
    for one in found:
        shares = dict(one.curve)
        gained = f"{one.gain.gain:+.3f} [{one.gain.low:+.3f}, {one.gain.high:+.3f}]"
        curve = [f"{shares[step]:.3f}" if step in shares else "–" for step in steps]
        audit = {True: "ok", False: "failed", None: "–"}[one.audit]
        lines.append(f"| {' | '.join([str(one.seed), *curve, gained, f'{one.minutes:.1f}', audit])} |")
    gains = [one.gain.gain for one in found]
    spread = f"{min(gains):+.3f} to {max(gains):+.3f}"
    return "\n".join([*lines, "", f"Mean gain {statistics.fmean(gains):+.3f} ({spread}) of {len(found)} seeds."])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", choices=JOBS)
    parser.add_argument("--seeds", nargs="+", type=int, default=None, help="instead of the job's own")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--home", type=Path, default=Path("runs") / "seeds", help="where runs lie")
    arguments = list(sys.argv[1:] if argv is None else argv)
    own, more = (arguments, []) if "--" not in arguments else _split(arguments)
    options = parser.parse_args(own)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    found, failures = [], []
    for seed in range(JOBS[options.job][0]) if options.seeds is None else options.seeds:
        run_dir = options.home / f"{options.job}-{seed}"
        try:
            if not options.table and not _is_finished(run_dir):
                print(f"seeds: {options.job}, seed {seed} ...", file=sys.stderr, flush=True)
                flowrl(command(options.job, seed, more), run_dir, limit_s=MINUTES * 60)
            found.append(learnt(options.job, seed, run_dir))
        except (CaseFailed, ValueError, OSError, sqlite3.Error) as failure:
            failures.append(f"{options.job}, seed {seed}: {failure}")
            continue
        print(json.dumps({"benchmark": "seeds", "system": "flowrl", **asdict(found[-1])}), flush=True)
        failures += [] if found[-1].good else [f"{options.job}, seed {seed}: learnt too little, or audit"]
    if found:
        print(f"`flowrl {shlex.join(command(options.job, 0, more)[:-1])} N`\n\n{table(found)}")
    for text in failures:
        print(f"seeds: {text}", file=sys.stderr)
    return 1 if failures else 0


def _split(arguments: list[str]) -> tuple[list[str], list[str]]:
    at = arguments.index("--")
    return arguments[:at], arguments[at + 1 :]


def _is_finished(run_dir: Path) -> bool:
    try:
        gain(run_dir)
    except (ValueError, OSError, sqlite3.Error):
        return False
    return True


if __name__ == "__main__":
    sys.exit(main())
