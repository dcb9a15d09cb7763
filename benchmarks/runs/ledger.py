"""What the ledger costs: processor time a sample, with the hash chain and without, of digests, and of an audit.

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

import numpy as np
import tyro

from flowrl.messages import Sample
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.ledger import ledger_file
from flowrl.runtime.ledger.ledger import Ledger
from flowrl.runtime.ledger.ledger_file import Terms
from flowrl.runtime.ledger.token_digest import policy_spans
from flowrl.runtime.telemetry.metrics import line_hash

MEMBERS, GROUPS = 8, 4
TERMS = Terms(("trainer",), (), ("generator",), 1, 2 * GROUPS, 1, GROUPS, MEMBERS)


@dataclass(frozen=True)
class Options:
    samples: int = 20_000
    repeats: int = 3


def write(directory: Path, samples: int) -> tuple[float, int]:
    """A run's records in `directory`: (seconds of processor time, commits)."""
    ledger, began_s, commits = Ledger(directory / "ledger.sqlite", TERMS), time.process_time(), 0
    with open(directory / "metrics.jsonl", "w") as lines:
        for step in range(1, samples // (MEMBERS * GROUPS) + 1):
            version = max(step - 2, 0)
            for group in range((step - 1) * GROUPS, step * GROUPS):
                admit(ledger, group, version)
                generate(ledger, group, version)
                commits += 2
            train(ledger, step, version)
            commits += 1
            figures = {"tokens_trained": GROUPS * sum(map(tokens, range(MEMBERS))), "staleness_max": step - 1 - version}
            line = json.dumps({"step": step, **figures, "ledger_head": ledger.head})
            lines.write(line + "\n")
            ledger.add_row("line", line_hash(line), "trainer", step)
    ledger.add_row("ended in order", time.time())
    ledger.close()
    return time.process_time() - began_s, commits


def tokens(member: int) -> int:
    return 100 + member


def digest(sample: str) -> str:
    """Stands for the digest of its policy span."""
    return f"{hash(sample) % (1 << 64):032x}"


def admit(ledger: Ledger, group: int, version: int) -> None:
    ledger.add_row("ticket", group, f"group{group:08d}", json.dumps({"trainer": version}))
    for member in range(MEMBERS):
        name = f"group{group:08d}"
        ledger.add_row("admitted", f"{name}/{member}", name, f"prompt{group:08d}", 0, member, 60, version, time.time())
    ledger.commit_rows()


def generate(ledger: Ledger, group: int, version: int) -> None:
    for member in range(MEMBERS):
        sample = f"group{group:08d}/{member}"
        ledger.add_row("generated", "generator/0", tokens(member), version, version, time.time(), sample)
        place, ages = (sample, sample, 0, 0, digest(sample)), (version, version)
        number = group * MEMBERS + member
        ledger.add_row("request", number, *place, tokens(member), 60, None, *ages, "generator/0", "stop", time.time())
        ledger.add_row("scored", 0.5, time.time(), sample)
    ledger.commit_rows()


def train(ledger: Ledger, step: int, version: int) -> None:
    for group in range((step - 1) * GROUPS, step * GROUPS):
        for member in range(MEMBERS):
            sample = f"group{group:08d}/{member}"
            ledger.add_row("used", sample, "trainer", step - 1, step, tokens(member), 0, 0, version)
            ledger.add_row("span", sample, "trainer", step, 60, tokens(member), digest(sample))
            ledger.add_row("trained", tokens(member), 0, 0, version, step - 1, step, time.time(), sample)
        ledger.add_row("settled", "trained", step, group)
    ledger.add_row("step", "trainer", step, time.time())
    ledger.commit_rows()


def sequence(turns: int, said: int, replied: int) -> Sample:
    """A sample of `turns` replies, each after what the environment said."""
    mask = np.tile(np.arange(said + replied) >= said, turns)
    rng = np.random.default_rng(0)
    return Sample(
        *("g/0", "g", "p", 0, 0, 1, "", ""),
        token_ids=rng.integers(0, 1 << 17, mask.size, dtype=np.int32),
        policy_mask=mask,
        behavior_logprobs=rng.normal(size=mask.size).astype(np.float32),
        versions=np.where(mask, 7, -1).astype(np.int32),
        prompt_tokens=said,
        truncated=False,
        generator="generator/0",
    )


def digest_micros(sample: Sample, times: int = 500) -> float:
    """Microseconds of processor time for all digests of a sample."""
    began_s = time.process_time()
    for _ in range(times):
        policy_spans(sample)
    return (time.process_time() - began_s) / times * 1e6


SEQUENCES = {
    "1,000 tokens, one reply": (1, 100, 900),
    "32 replies, 10,240 tokens": (32, 120, 200),
}


def main() -> int:
    options = tyro.cli(Options)
    for name, shape in SEQUENCES.items():
        micros = sorted(digest_micros(sequence(*shape)) for _ in range(options.repeats))
        print(f"digests of {name}: {statistics.median(micros):.0f} µs ({micros[0]:.0f} to {micros[-1]:.0f})")
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
