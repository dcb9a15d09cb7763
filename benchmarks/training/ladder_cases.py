"""The cases of the ladder: which graphs are run, with what, and what a finished one is judged by.

Every case starts from what `flowrl` itself makes (`tiny` and the like) or from the result of a case above
it, written as `{name}` in its options. It is judged by the task's verifier: the same held-out prompts,
answers to a prompt and seeds, before and after. A graph that does not ask them itself is judged by one that
does: the model it starts from and the one it ends with answer in runs that train nothing.
"""

from __future__ import annotations

import json
import shutil
import signal
import string
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.training.gain import Gain, Preference, Shares, gain, paired, preference, shares

ROOT = Path(__file__).parents[2]
PROMPTS, ANSWERS = 256, 4
EVALUATION = ("--evaluate", str(PROMPTS), "--evaluate-samples", str(ANSWERS))
PREFERRED = 0.57
"""Accuracy on held-out pairs, two standard errors above chance for 256 of them."""
OUT = "out"
JUDGE = ("--lr", "0", "--groups-per-step", "1", "--group-size", "2", "--staleness", "0")
"""With these graphs/grpo.py evaluates a model and leaves it alone."""


class CaseFailed(Exception):
    """A run that did not end well; the message says where to read why."""


@dataclass(frozen=True)
class LadderCase:
    """One graph with its settings."""

    graph: str
    steps: int = 0
    """0: until the data end."""
    options: tuple[str, ...] = ()
    minutes: float = 5.0
    """What a run of it may take."""
    seeds: int = 1
    """Training seeds it is run with."""
    online: bool = True
    """It trains on its own samples, so its rewards can be negated."""
    negated_steps: int = 0
    """Steps with negated rewards after which the control looks at the score; 0: a part of `steps`."""
    start: str = ""
    """The model it starts from, or a `{case}`, where it does not ask the held-out prompts itself."""
    writes: str = ""
    """Name of a file that it makes instead of a better model, `{out}` in its options. Nothing is judged then."""
    pairs: str = ""
    """A reward model is judged on the held-out part of these pairs: before is the best baseline, after its accuracy."""
    floor: float = 0.0
    """After has to be as much ..."""
    margin: float = 0.0
    """... and as much more than before."""
    name: str = ""
    """Where it is not the graph's: two cases of one graph."""

    @property
    def title(self) -> str:
        return self.name or self.graph

    @property
    def needs(self) -> tuple[str, ...]:
        """Cases whose results its options name."""
        texts = (*self.options, self.start, self.pairs)
        names = dict.fromkeys(name for text in texts for _, name, _, _ in string.Formatter().parse(text) if name)
        return tuple(name for name in names if name != OUT)

    def command(self, results: Mapping[str, Path], seed: int, home: Path) -> list[str]:
        """What stands behind `flowrl`, without the run directory."""
        known = {name: str(path) for name, path in results.items()} | {OUT: str(file_of(self, seed, home))}
        options = [option.format_map(known) for option in self.options]
        evaluation = () if self.start or self.writes or self.pairs else EVALUATION
        steps = ("--steps", str(self.steps)) if self.steps else ()
        return [
            "run",
            f"graphs/{self.graph}.py",
            *options,
            *evaluation,
            *steps,
            "--seed",
            str(seed),
        ]

    def passed(self, result: Result) -> bool:
        """A gain of more than two standard errors, of what the case asks for besides, and a ledger that closes."""
        gain, preference = result.gain, result.preference
        learnt = gain is None or (gain.gain > 2 * gain.error and gain.gain >= self.margin and gain.after >= self.floor)
        preferred = preference is None or preference.accuracy > PREFERRED
        return learnt and preferred and result.audit is not False


@dataclass(frozen=True)
class Result:
    """What one run of a case came to."""

    case: str
    seed: int
    command: str
    gain: Gain | None
    """None where nothing was judged."""
    minutes: float
    audit: bool | None
    """None where there is nothing to audit."""
    preference: Preference | None = None
    """Where held-out preferences are measured."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @staticmethod
    def read(path: Path) -> Result:
        found = json.loads(path.read_text())
        known = {"gain": found["gain"] and Gain(**found["gain"])}
        if found.get("preference"):
            known["preference"] = Preference(**found["preference"])
        return Result(**found | known)


def run_case(case: LadderCase, seed: int, results: Mapping[str, Path], home: Path) -> Result:
    """Run it afresh below `home`, and judge it. Raises CaseFailed."""
    command, run_dir = case.command(results, seed, home), run_dir_of(case, seed, home)
    if case.writes:
        file_of(case, seed, home).unlink(missing_ok=True)
    start_s = time.monotonic()
    flowrl(command, run_dir, limit_s=60 * case.minutes + 60)
    minutes = (time.monotonic() - start_s) / 60
    found = judged(case, run_dir, results, home)
    text = " ".join(["flowrl", *_short(command, home)])
    return Result(case.title, seed, text, found, minutes, audited(run_dir), preference(run_dir))


def judged(case: LadderCase, run_dir: Path, results: Mapping[str, Path], home: Path) -> Gain | None:
    """What the verifier says of a finished run."""
    known = {name: str(path) for name, path in results.items()}
    if case.writes:
        return None
    if case.pairs:
        return pair_accuracy(str(checkpoint(run_dir)), case.pairs.format_map(known), case.start.format_map(known))
    if not case.start:
        return gain(run_dir)
    return paired(answers(case.start.format_map(known), home), answers(str(checkpoint(run_dir)), home))


def pair_accuracy(model: str, pairs: str, policy: str) -> Gain:
    """How often a reward model prefers the right answer of a held-out pair, beside the best that needs no model."""
    command = [sys.executable, "-m", "benchmarks.training.reward_accuracy", model, pairs, "--policy", policy]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        error = done.stderr.strip()
        raise CaseFailed(f"benchmarks.training.reward_accuracy ended with status {done.returncode}: {error}")
    judge, *baselines = json.loads(done.stdout.splitlines()[-1])
    best = max(line["accuracy"] for line in baselines)
    return Gain(prompts=judge["pairs"], before=best, after=judge["accuracy"], error=judge["error"])


def flowrl(command: Sequence[str], run_dir: Path, *, limit_s: float) -> None:
    """`flowrl ...` in a process of its own; what it prints goes to a file beside `run_dir`, replaced."""
    shutil.rmtree(run_dir, ignore_errors=True)
    log = run_dir.with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    arguments = [sys.executable, "-m", "flowrl.cli", *command, "--run-dir", str(run_dir), "--plain"]
    with log.open("w") as out:
        process = subprocess.Popen(arguments, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT)
        try:
            status = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            raise CaseFailed(f"{run_dir.name} was stopped after {limit_s / 60:.0f} minutes; see {log}") from None
        finally:
            end(process)
    if status:
        last = (log.read_text().strip().splitlines() or ["it printed nothing"])[-1]
        raise CaseFailed(f"{run_dir.name} ended with status {status}: {last}; see {log}")


def end(process: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """Interrupt a run that still goes on, and if it does not stop, kill it."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def answers(model: str, home: Path) -> Shares:
    """How `model` (a name or directory) does on the held-out prompts; asked once below `home`."""
    run_dir = home / ("answers-" + model.replace("/", "_"))
    if not (run_dir / "ledger.sqlite").exists() or not shares(run_dir, "before"):
        command = ["run", "graphs/grpo.py", "--policy", model, *JUDGE, *EVALUATION, "--steps", "1"]
        flowrl(command, run_dir, limit_s=300)
    return shares(run_dir, "before")


def audited(run_dir: Path) -> bool | None:
    """What `flowrl audit` says of a run; None where the graph has no tickets."""
    from flowrl.runtime.audit.audit import audit

    tickets = json.loads((run_dir / "graph.json").read_text())["tickets"]
    return None if tickets is None else audit(run_dir).ok


def run_dir_of(case: LadderCase, seed: int, home: Path) -> Path:
    return home / f"{case.title}-{seed}"


def file_of(case: LadderCase, seed: int, home: Path) -> Path:
    """The file that a run of the case makes."""
    return home / f"{case.title}-{seed}-{case.writes}"


def result_of(case: LadderCase, seed: int, home: Path) -> Path:
    """What a finished run leaves to the cases above it: its file, or the model it ended with."""
    return file_of(case, seed, home) if case.writes else checkpoint(run_dir_of(case, seed, home))


def checkpoint(run_dir: Path, step: int | None = None) -> Path:
    """The model that a run ended with, or that of one step."""
    found = sorted((run_dir / "checkpoints").glob("step_*" if step is None else f"step_{step:06d}"))
    if not found:
        raise CaseFailed(f"{run_dir} holds no checkpoint")
    return found[-1]


def _short(command: Sequence[str], home: Path) -> list[str]:
    """The command as a reader would type it: without the fixed evaluation, results by their case's name."""
    text = " ".join(command).replace(" ".join(EVALUATION) + " ", "")
    return text.replace(f"{home}/", f"{home.name}/").split()
