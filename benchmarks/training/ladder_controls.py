"""What must not work: every online case at learning rate 0, and with the sign of its rewards turned.

    python -m benchmarks.training.ladder_controls [--only grpo ppo]

At learning rate 0 the weights after a run are those from before, bit for bit, and so is every held-out
answer's score. With rewards negated the score falls by more than two paired standard errors within a part
of the case's steps. The status is 1 if one of the two is otherwise, or an audit fails.
"""

from __future__ import annotations

import argparse
import json
import signal
import sqlite3
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from benchmarks.training.gain import gain
from benchmarks.training.ladder import CASES, Ladder
from benchmarks.training.ladder_cases import CaseFailed, LadderCase, audited, checkpoint, flowrl
from flowrl.weights.shm import Checksum

STILL_STEPS = 4
NEGATED_PART = 3
"""A third of a case's steps is far enough to fall."""


@dataclass(frozen=True)
class Control:
    """One control of one case; `text` is what was seen."""

    case: str
    name: str
    good: bool
    text: str

    def __str__(self) -> str:
        return f"{self.case:<16}{self.name:<10}{'ok' if self.good else 'FAILED':<8}{self.text}"


def main(argv: Sequence[str] | None = None) -> int:
    online = {case.title: case for case in CASES if case.online}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=online, metavar="CASE")
    parser.add_argument("--home", type=Path, default=Path("runs") / "ladder", help="where runs lie")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    failed = 0
    for name in options.only or online:
        for control in controls(online[name], Ladder(CASES, options.home)):
            failed += not control.good
            print(control, flush=True)
            print(json.dumps({"benchmark": "ladder_controls", "system": "flowrl", **vars(control)}), flush=True)
    return 1 if failed else 0


def controls(case: LadderCase, ladder: Ladder) -> list[Control]:
    """Both controls of a case; a run that failed is one that failed."""
    found = []
    for name, control in (("lr 0", still), ("negated", negated)):
        try:
            ladder.run_missing(case.needs)
            found.append(control(case, ladder))
        except (CaseFailed, ValueError) as failure:
            found.append(Control(case.title, name, False, str(failure)))
    return found


def still(case: LadderCase, ladder: Ladder) -> Control:
    """A few steps at learning rate 0."""
    run_dir = ladder.home / f"{case.title}-still"
    run(replace(case, steps=STILL_STEPS), ("--lr", "0"), run_dir, ladder, save_every=1)
    sums = [checksum(checkpoint(run_dir, step)) for step in (1, STILL_STEPS)]
    before, after = scores(run_dir, "before"), scores(run_dir, "after")
    changed = sum(after[answer] != score for answer, score in before.items())
    good = len(set(sums)) == 1 and not changed and before.keys() == after.keys() and audited(run_dir) is True
    text = f"weights {sums[0]:x} -> {sums[1]:x}, {changed} of {len(before)} answers scored otherwise"
    return Control(case.title, "lr 0", good, text)


def negated(case: LadderCase, ladder: Ladder) -> Control:
    """A part of the case, with every reward's sign turned."""
    run_dir = ladder.home / f"{case.title}-negated"
    steps = case.negated_steps or case.steps // NEGATED_PART
    run(replace(case, steps=steps), ("--negate-rewards",), run_dir, ladder)
    found = gain(run_dir)
    return Control(case.title, "negated", found.gain < -2 * found.error and audited(run_dir) is True, str(found))


def run(case: LadderCase, options: Sequence[str], run_dir: Path, ladder: Ladder, *, save_every: int = 0) -> None:
    """Later options win over those of the case."""
    command = [
        *case.command(ladder.models(case), 0, ladder.home),
        *options,
        "--save-every",
        str(save_every),
        "--keep",
        "0",
    ]
    flowrl(command, run_dir, limit_s=60 * case.minutes + 60)


def scores(run_dir: Path, phase: str) -> dict[tuple[str, int], float]:
    """The score of every answer of an evaluation."""
    query = "SELECT prompt_id, member, score FROM evaluations WHERE phase = ?"
    with closing(sqlite3.connect(f"file:{run_dir / 'ledger.sqlite'}?mode=ro", uri=True)) as db:
        return {(prompt, member): score for prompt, member, score in db.execute(query, (phase,))}


def checksum(model_dir: Path) -> int:
    """Over all weights of a Hugging Face directory: names, shapes and bytes."""
    total = Checksum()
    for file in sorted(model_dir.glob("*.safetensors")):
        content = np.fromfile(file, np.uint8)
        length = int(content[:8].view("<u8")[0])
        header = json.loads(content[8 : 8 + length].tobytes())
        header.pop("__metadata__", None)
        for name, tensor in sorted(header.items()):
            start, end = tensor["data_offsets"]
            total.add_tensor(name, tensor["dtype"], tensor["shape"], content[8 + length + start : 8 + length + end])
    return total.value


if __name__ == "__main__":
    sys.exit(main())
