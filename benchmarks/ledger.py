"""What the ledger costs: processor time a sample, with the hash chain and without, and the seconds of an audit.

Events come as in the demo, four a sample and eight samples a group: a commit for each group that is admitted, one for
what was generated meanwhile, one a step. `--samples 1000000` takes some minutes.
"""

from __future__ import annotations

import json
import resource
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import tyro

from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.ledger import Ledger
from flowrl.runtime.ledger.terms import Terms
from flowrl.runtime.telemetry.metrics import line_hash

MEMBERS, GROUPS = 8, 4
TERMS = Terms(("trainer",), (), ("generator",), 1, 2 * GROUPS, 1, GROUPS, MEMBERS)


@dataclass(frozen=True)
class Options:
    samples: int = 20_000
    repeats: int = 3


def write(directory: Path, samples: int) -> tuple[float, int]:
    """A run's records in `directory`: (seconds of processor time, commits)."""
    book, began_s, commits = Ledger(directory / "ledger.sqlite", TERMS), time.process_time(), 0
    with open(directory / "metrics.jsonl", "w") as lines:
        for step in range(1, samples // (MEMBERS * GROUPS) + 1):
            version = max(step - 2, 0)
            for group in range((step - 1) * GROUPS, step * GROUPS):
                admit(book, group, version)
                generate(book, group, version)
                commits += 2
            train(book, step, version)
            commits += 1
            figures = {"tokens_trained": GROUPS * sum(map(tokens, range(MEMBERS))), "staleness_max": step - 1 - version}
            line = json.dumps({"step": step, **figures, "ledger_head": book.head})
            lines.write(line + "\n")
            book.add("line", line_hash(line), "trainer", step)
    book.add("ended in order", time.time())
    book.close()
    return time.process_time() - began_s, commits


def tokens(member: int) -> int:
    return 100 + member


def admit(book: Ledger, group: int, version: int) -> None:
    book.add("ticket", group, f"group{group:08d}", json.dumps({"trainer": version}))
    for member in range(MEMBERS):
        name = f"group{group:08d}"
        book.add("admitted", f"{name}/{member}", name, f"prompt{group:08d}", 0, member, 60, version, time.time())
    book.commit()


def generate(book: Ledger, group: int, version: int) -> None:
    for member in range(MEMBERS):
        sample = f"group{group:08d}/{member}"
        book.add("generated", "generator/0", tokens(member), version, version, time.time(), sample)
        book.add("scored", 0.5, time.time(), sample)
    book.commit()


def train(book: Ledger, step: int, version: int) -> None:
    for group in range((step - 1) * GROUPS, step * GROUPS):
        for member in range(MEMBERS):
            sample = f"group{group:08d}/{member}"
            book.add("used", sample, "trainer", step - 1, step, tokens(member), 0, 0, version)
            book.add("trained", tokens(member), 0, 0, version, step - 1, step, time.time(), sample)
        book.add("settled", "trained", step, group)
    book.add("step", "trainer", step, time.time())
    book.commit()


def main() -> int:
    options = tyro.cli(Options)
    spent: dict[str, list[float]] = {"with the chain": [], "without": []}
    for _ in range(options.repeats):
        for name, tables in (("with the chain", ledger_file.TABLES), ("without", ())):
            with tempfile.TemporaryDirectory() as directory, mock.patch.object(ledger_file, "TABLES", tables):
                seconds, commits = write(Path(directory), options.samples)
            spent[name].append(seconds / options.samples * 1e6)
    for name, micros in spent.items():
        print(f"{name:<16}{statistics.median(micros):6.0f} µs a sample ({min(micros):.0f} to {max(micros):.0f})")
    with tempfile.TemporaryDirectory() as directory:
        write(Path(directory), options.samples)
        began_s, size = time.process_time(), (Path(directory) / "ledger.sqlite").stat().st_size
        report, seconds = audit(Path(directory)), time.process_time() - began_s
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    print(f"audit of {options.samples} samples, {size >> 20} MiB: {seconds:.1f} s, at most {peak} MiB of memory")
    medians = {name: statistics.median(micros) for name, micros in spent.items()}
    print(json.dumps({"samples": options.samples, "commits": commits, "micros": medians, "audit_s": seconds}))
    return 0 if report.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
