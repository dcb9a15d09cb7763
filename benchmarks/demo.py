"""`make demo`: a language model gets better at a task, asynchronously, and the records prove it.

Runs graphs/grpo.py on `tiny` and two-number addition, then prints what the run's own records say. With
--control the rewards are dealt out at random within each group: then nothing may be learnt.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from flowrl.errors import FlowrlError
from flowrl.graph.load import load_file
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.telemetry.metrics import read

GRAPH = Path(__file__).parent.parent / "graphs" / "grpo.py"
STEPS = 300
LEARNING_RATE = 1e-4
HELD_OUT = 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="shuffle the rewards within each group")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--run-dir", type=Path, default=None, help="default: runs/demo or runs/demo-control, replaced")
    options = parser.parse_args()
    run_dir = options.run_dir or Path("runs") / ("demo-control" if options.control else "demo")
    if options.run_dir is None and run_dir.exists():
        shutil.rmtree(run_dir)
    from flowrl.runtime.driver.launch import run
    from flowrl.runtime.driver.options import RunOptions

    file = load_file(GRAPH)
    args = ["--lr", str(LEARNING_RATE), "--evaluate", str(HELD_OUT)]
    cfg = file.parse([*args, *(["--shuffle-rewards"] if options.control else [])])
    try:
        result = run(file.path, file.build(cfg), cfg, RunOptions(steps=options.steps, run_dir=run_dir))
    except FlowrlError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    return report(run_dir, result.outcome.evaluations, control=options.control)


def report(run_dir: Path, evaluations: dict[str, dict[str, float]], *, control: bool) -> int:
    """Print what the records say. Status 1 if the audit fails."""
    lines, audited = read(run_dir / "metrics.jsonl"), audit(run_dir)
    before, after = (evaluations[phase]["exact_match"] for phase in ("before", "after"))
    seconds = lines[-1]["time_s"] - lines[0]["time_s"]
    samples = sum(line["num_samples"] for line in lines[1:])
    print(f"run directory        {run_dir}")
    print(f"rewards              {'shuffled within groups (control)' if control else 'exact match'}")
    print(f"held-out problems    {int(evaluations['after']['num_answers'])}, disjoint from SFT and RL")
    print(f"held-out exact match {before:.3f} before, {after:.3f} after ({after - before:+.3f})")
    print(f"samples/s            {samples / seconds:.0f} over {len(lines)} steps in {seconds:.0f} s")
    print(f"max staleness        {max(line['staleness_max'] for line in lines)} (bound {audited.figures['bound']})")
    print("audit: ok" if audited.ok else str(audited))
    return 0 if audited.ok else 1


if __name__ == "__main__":
    sys.exit(main())
