"""What grows in a long run: memory, descriptors, threads and disk per 1,000 steps, extrapolated to a week.

    python -m benchmarks.runs.soak                          # an hour of GRPO on `tiny`, into runs/soak
    python -m benchmarks.runs.soak --minutes 20 -- --staleness 4
    python -m benchmarks.runs.soak --table                  # runs nothing, prints the table of what is there
    python -m benchmarks.runs.soak --table --page           # and puts it into docs/runs.md

The run saves checkpoints, evaluates, keeps samples and traces as a user's would. Every ten seconds each process below
the command is looked at. A process is known by what it is: the command itself, Ray's daemons, vLLM, and the processes
of nodes, which are told apart by whether they started vLLM or loaded torch. The growth of a figure is the slope of a
line fitted to what came after `--warm-minutes`, when allocators and caches have filled; "off the line" is the largest
distance of a look from that line: a figure that has risen by less is not extrapolated.

The status is 1 if the run failed, if its audit did, or if a number of descriptors, threads or processes grows
by more than 2 and more than its distance from the line.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import psutil

from benchmarks.runs.page import put

PAGE = Path(__file__).parents[2] / "docs" / "runs.md"
BEGIN, END = "<!-- soak -->", "<!-- end of soak -->"
EVERY_S = 10.0
WEEK_H = 168.0
MIB = 2**20
Look = dict[str, Any]
"""A line of looks.jsonl: `time_s`, `step`, `processes` and `disk`, as the functions below return them."""
JOB = (
    "run grpo --policy tiny --steps 10000000 --plain --lr 1e-6 --staleness 1 --save-minutes 2 --evaluate 64 "
    "--evaluate-every 500"
)
"""A small learning rate: the policy must stay as it is for as long as the run does."""


def look_at_processes(root: psutil.Process) -> dict[str, dict[str, int]]:
    """Role -> memory (bytes; shared pages are divided among those that share them), descriptors, threads, processes."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    below = [root, *root.children(recursive=True)]
    starters = {child.ppid() for child in below if _is_vllm(child)}
    for process in below:
        try:
            proc = Path("/proc") / str(process.pid)
            role = _role(process, root, starters)
            memory = re.search(r"^Pss:\s+(\d+) kB", (proc / "smaps_rollup").read_text(), re.MULTILINE)
            of_role = found[role]
            of_role["memory_bytes"] += int(memory.group(1)) * 1024 if memory else 0
            of_role["descriptors"] += process.num_fds()
            of_role["threads"] += process.num_threads()
            of_role["processes"] += 1
        except (psutil.NoSuchProcess, FileNotFoundError, ProcessLookupError):
            continue  # it has ended while it was looked at
    return {role: dict(figures) for role, figures in found.items()}


def _is_vllm(process: psutil.Process) -> bool:
    try:
        return "VLLM" in " ".join(process.cmdline()[:1])
    except psutil.NoSuchProcess:
        return False


def _role(process: psutil.Process, root: psutil.Process, starters: set[int]) -> str:
    command = " ".join(process.cmdline()) or process.name()
    if process.pid == root.pid:
        return "the command"
    if _is_vllm(process):
        return "vLLM's engine"
    if command.startswith("ray::ProcessActor"):
        if process.pid in starters:
            return "generator"
        return "trainer" if "libtorch_cpu" in (Path("/proc") / str(process.pid) / "maps").read_text() else "other nodes"
    if "reward" in command or "worker_child" in command:
        return "workers of rewards"
    if any(word in command for word in ("ray::", "raylet", "gcs_server", "/ray/")):
        return "Ray"
    return "other processes"


def look_at_disk(run_dir: Path, root: psutil.Process) -> dict[str, int]:
    """What takes disk -> bytes; a file with several names counts once. Memory files of the run are `/dev/shm`."""
    found = {
        "ledger": sum(_size(path) for path in run_dir.glob("ledger.sqlite*")),
        "metrics, evaluations": sum(_size(path) for path in run_dir.glob("*.jsonl")),
        "trace": _size(run_dir / "trace.json"),
        "checkpoints": _tree_size(run_dir / "checkpoints"),
        "samples": _tree_size(run_dir / "rollouts"),
        "/dev/shm": _tree_size(Path("/dev/shm")),
    }
    for child in root.children(recursive=True):
        if session := re.search(r"--log_dir=(\S+)/logs", " ".join(child.cmdline())):
            found["Ray's session"] = _tree_size(Path(session.group(1)))
            break
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def _tree_size(root: Path) -> int:
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(root):
        for name in names:
            try:
                status = os.lstat(os.path.join(folder, name))
            except OSError:
                continue
            seen[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(seen.values())


def last_step(metrics: Path) -> int:
    """The step of the newest whole line; 0 before the first."""
    if not metrics.exists():
        return 0
    with metrics.open("rb") as lines:
        lines.seek(max(0, metrics.stat().st_size - 65536))
        for line in reversed(lines.read().splitlines()):
            try:
                return int(json.loads(line)["step"])
            except (ValueError, KeyError):
                continue
    return 0


def soak(home: Path, minutes: float, options: Sequence[str]) -> int:
    """Run the job for so many minutes of training and write what was seen into home/looks.jsonl."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    run_dir = home / "run"
    command = [sys.executable, "-m", "flowrl.cli", *JOB.split(), "--run-dir", str(run_dir), *options]
    with (home / "log.txt").open("w") as log, (home / "looks.jsonl").open("w") as looks:
        root = psutil.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        trained_since = None
        try:
            while True:
                try:
                    root.wait(EVERY_S)
                    break
                except psutil.TimeoutExpired:
                    step = last_step(run_dir / "metrics.jsonl")
                if step and trained_since is None:
                    trained_since = monotonic()
                if trained_since is None:
                    continue
                time_s = monotonic() - trained_since
                look = {
                    "time_s": time_s,
                    "step": step,
                    "processes": look_at_processes(root),
                    "disk": look_at_disk(run_dir, root),
                }
                looks.write(json.dumps(look) + "\n")
                looks.flush()
                if time_s > minutes * 60 and root.is_running():
                    root.terminate()  # as a scheduler ends a run: with a checkpoint
                    root.wait(600)
                    break
        finally:
            if root.is_running():
                root.terminate()
                root.wait(600)
    return int(root.returncode or 0)


@dataclass(frozen=True)
class Growth:
    """One figure over the looks."""

    first: float
    last: float
    per_step: float
    off_line: float

    @classmethod
    def fit(cls, steps: Sequence[float], values: Sequence[float]) -> Growth:
        """Least squares."""
        mean_x, mean_y = sum(steps) / len(steps), sum(values) / len(values)
        spread = sum((x - mean_x) ** 2 for x in steps)
        slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(steps, values, strict=True)) / spread if spread else 0.0
        off = max(abs(y - mean_y - slope * (x - mean_x)) for x, y in zip(steps, values, strict=True))
        return cls(values[0], values[-1], slope, off)


def growths(looks: Sequence[Look], warm_s: float) -> Iterator[tuple[str, str, Growth]]:
    """(what, of which role or file, growth), of the looks after the first `warm_s`."""
    kept = [look for look in looks if look["time_s"] >= warm_s]
    if len(kept) < 10:
        raise SystemExit(f"{len(kept)} looks after {warm_s / 60:.0f} minutes; a line needs 10: a longer --minutes")
    steps = [float(look["step"]) for look in kept]
    roles = sorted({role for look in kept for role in look["processes"]})
    for figure in ("memory_bytes", "descriptors", "threads", "processes"):
        for role in roles:
            values = [float(look["processes"].get(role, {}).get(figure, 0)) for look in kept]
            yield figure, role, Growth.fit(steps, values)
    for name in kept[-1]["disk"]:
        yield "disk", name, Growth.fit(steps, [float(look["disk"].get(name, 0)) for look in kept])


def table(home: Path, warm_minutes: float) -> tuple[str, bool]:
    """The table, and whether descriptors, threads and processes stay as many."""
    looks = [json.loads(line) for line in (home / "looks.jsonl").read_text().splitlines()]
    kept = [look for look in looks if look["time_s"] >= warm_minutes * 60]
    found = list(growths(looks, warm_minutes * 60))
    hours = (kept[-1]["time_s"] - kept[0]["time_s"]) / 3600
    steps = kept[-1]["step"] - kept[0]["step"]
    per_week = steps / hours * WEEK_H
    lines = [
        f"{looks[-1]['step']:,} steps in {looks[-1]['time_s'] / 60:.0f} minutes; the first {warm_minutes:.0f} minutes "
        f"are left out of the lines. A week at this rate is {per_week / 1e6:.2f} million steps.",
        "",
        "| | of | first | last | per 1,000 steps | off the line | after a week |",
        "|---|---|---|---|---|---|---|",
    ]
    for figure, name, growth in found:
        if figure == "processes":
            continue
        unit, scale = ("MiB", MIB) if figure in ("memory_bytes", "disk") else ("", 1)
        shown = [growth.first, growth.last, growth.per_step * 1000, growth.off_line]
        # What the line has risen by is no growth if looks were as far off it.
        grows = growth.per_step * steps > growth.off_line
        week = growth.last + growth.per_step * per_week * grows
        cells = [f"{value / scale:,.2f} {unit}".strip() for value in (*shown, week)]
        lines.append(f"| {figure.removesuffix('_bytes')} | {name} | {' | '.join(cells)} |")
    # Counts are small and whole: a line through one that was opened and closed once has a slope, too.
    steady = all(
        growth.per_step * steps <= max(2.0, growth.off_line)
        for figure, _, growth in found
        if figure in ("descriptors", "threads", "processes")
    )
    return "\n".join(lines), steady


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--warm-minutes", type=float, default=10.0)
    parser.add_argument("--home", type=Path, default=Path("runs/soak"))
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--page", action="store_true", help=f"put the table into docs/{PAGE.name}")
    parser.add_argument("options", nargs="*", help="further options of `flowrl run grpo`, after --")
    args = parser.parse_args()
    failed = False
    if not args.table:
        failed = soak(args.home, args.minutes, args.options) != 0
        audit = [sys.executable, "-m", "flowrl.cli", "audit", str(args.home / "run")]
        failed |= subprocess.run(audit).returncode != 0
    text, steady = table(args.home, args.warm_minutes)
    print(text)
    if args.page:
        put(PAGE, text, BEGIN, END)
    return int(failed or not steady)


if __name__ == "__main__":
    sys.exit(main())
