"""The systems that benchmarks/peers/trainers.py compares: how each runs one job, and what its records say."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

from benchmarks.peers.process_memory import CommandFailed, Watched, watch
from benchmarks.runs.overlap import pace
from flowrl.models import Policy, resolve
from flowrl.runtime.telemetry.metrics import read_lines
from flowrl.training.settings import Dtype

ROOT = Path(__file__).parents[2]
TORCH = "2.13.0"
"""As .ci/setup installs it."""
LR = 1e-6
LIMIT_S = 3600.0
TERMS = "min_terms=2,max_terms=3,min_digits=1,max_digits=1"
System = Literal["trl", "flowrl", "flowrl-sync"]


@dataclass(frozen=True)
class StepJob:
    """What one step samples and trains on."""

    prompts: int
    samples: int
    max_tokens: int

    @classmethod
    def parse(cls, text: str) -> StepJob:
        """The job that PROMPTSxSAMPLESxTOKENS names. Raises ValueError with a sentence."""
        try:
            prompts, samples, max_tokens = (int(part) for part in text.split("x"))
        except ValueError:
            raise ValueError(f"{text!r} is no job; write PROMPTSxSAMPLESxTOKENS, as 8x8x24") from None
        if prompts < 1 or samples < 2 or max_tokens < 1:
            raise ValueError(f"{text!r}: a job has at least one prompt, two samples and one token")
        return cls(prompts, samples, max_tokens)

    def __str__(self) -> str:
        return f"{self.prompts}x{self.samples}x{self.max_tokens}"


@dataclass(frozen=True)
class TrainerRun:
    """One run of the comparison."""

    job: StepJob
    dtype: Dtype
    system: System
    repetition: int


@dataclass(frozen=True)
class Setting:
    """What holds for all runs."""

    directory: Path
    cache: Path
    steps: int
    """Measured steps of a run."""
    skip: int
    staleness: int
    """The bound of asynchronous runs of flowrl."""
    trl_micro_batch: int
    flowrl_options: tuple[str, ...]

    @property
    def described(self) -> dict[str, Any]:
        """What results have to share to be compared."""
        return {
            "steps": self.steps,
            "skip": self.skip,
            "staleness": self.staleness,
            "flowrl_options": list(self.flowrl_options),
            "trl_micro_batch": self.trl_micro_batch,
        }


@dataclass(frozen=True)
class Found:
    """What one run measured, over its measured steps."""

    step_s: float
    """Mean seconds a step."""
    samples_per_s: float
    response_tokens: float
    """Mean of a sample: shows that both systems had the same work."""
    peak_bytes: int
    memory: Mapping[str, int] = field(default_factory=dict)
    """Process -> its bytes at the peak."""


def run(cell: TrainerRun, setting: Setting, data: Path) -> Found:
    """Run one cell; raises CommandFailed if it fails."""
    place = setting.directory / f"{cell.job}-{cell.dtype}-{cell.system}-{cell.repetition}"
    shutil.rmtree(place, ignore_errors=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    runs: Mapping[System, Callable[[TrainerRun, Setting, Path, Path], Found]] = {
        "trl": run_trl,
        "flowrl": run_flowrl,
        "flowrl-sync": run_flowrl,
    }
    return runs[cell.system](cell, setting, place, data)


# flowrl


def run_flowrl(cell: TrainerRun, setting: Setting, place: Path, data: Path) -> Found:
    staleness = 0 if cell.system == "flowrl-sync" else setting.staleness
    steps = setting.skip + setting.steps + staleness
    command = [sys.executable, "-m", "flowrl.cli", "run", "grpo", *flowrl_options(cell, data, setting.staleness)]
    command += setting.flowrl_options
    command += ["--steps", str(steps), "--run-dir", str(place), "--seed", str(cell.repetition), "--plain"]
    watched = watch(command, log=place.with_suffix(".log"), env=os.environ, cwd=ROOT, limit_s=LIMIT_S)
    lines = read_lines(place / "metrics.jsonl")
    here = pace(lines, skip=setting.skip, tail=staleness)
    measured = lines[setting.skip : len(lines) - staleness]
    tokens = fmean(line["response_tokens_mean"] for line in measured)
    return Found(here.step_s, here.samples_per_s, tokens, watched.peak_bytes, watched.parts)


def flowrl_options(cell: TrainerRun, data: Path, staleness: int) -> Sequence[str]:
    """Options of `flowrl run grpo` for a cell."""
    job = cell.job
    options = [
        "--policy",
        "smollm2",
        "--task",
        str(data),
        "--task.reward",
        f"{ROOT / 'benchmarks/peers/job_reward.py'}:correct",
    ]
    options += ["--groups-per-step", str(job.prompts), "--group-size", str(job.samples)]
    options += ["--max-tokens", str(job.max_tokens), "--lr", str(LR), "--evaluate", "0"]
    options += ["--dtype", cell.dtype, "--engine.dtype", cell.dtype]
    return [*options, "--staleness", "0" if cell.system == "flowrl-sync" else str(staleness)]


# TRL


def run_trl(cell: TrainerRun, setting: Setting, place: Path, data: Path) -> Found:
    place.mkdir(parents=True)
    result = place / "result.json"
    asked = asdict(cell.job) | {
        "data": str(data),
        "model": resolve(Policy("smollm2")),
        "dtype": cell.dtype,
        "micro_batch": min(setting.trl_micro_batch, cell.job.prompts * cell.job.samples),
        "lr": LR,
        "steps": setting.skip + setting.steps,
        "seed": cell.repetition,
        "run_dir": str(place),
        "result": str(result),
    }
    command = [str(trl_python(setting.cache)), "-m", "benchmarks.peers.trl_job", json.dumps(asked)]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    env.pop("PYTHONPATH", None)
    watched = watch(command, log=place.with_suffix(".log"), env=env, cwd=ROOT, limit_s=LIMIT_S)
    found = json.loads(result.read_text())
    return of_trl(found, cell.job, setting, watched)


def of_trl(found: Mapping[str, Any], job: StepJob, setting: Setting, watched: Watched) -> Found:
    """The figures of what benchmarks/peers/trl_job.py wrote."""
    ends_s = found["ends_s"]
    step_s = (ends_s[-1] - ends_s[setting.skip - 1]) / (len(ends_s) - setting.skip)
    tokens = fmean(found["response_tokens"][setting.skip :])
    return Found(step_s, job.prompts * job.samples / step_s, tokens, watched.peak_bytes, watched.parts)


def trl_python(cache: Path) -> Path:
    """The Python of TRL's environment, which is made on the first call: about two minutes and 2 GB.

    TRL and flowrl have the same versions of what both install, except that flowrl's PyPI wheels are not needed.
    """
    pins = [ROOT / "requirements" / name for name in ("test-templates.txt", "base.txt")]
    digest = hashlib.blake2b(b"".join(file.read_bytes() for file in pins) + TORCH.encode(), digest_size=6).hexdigest()
    home = cache / f"trl-{digest}"
    if not (home / "installed").exists():
        make_trl(home, *pins)
    return home / "bin" / "python"


def make_trl(home: Path, wanted: Path, pins: Path) -> None:
    """Install TRL into a new environment at `home`. Raises CommandFailed."""
    print(f"trainers: environment of TRL in {home} (some minutes, once)", file=sys.stderr, flush=True)
    shutil.rmtree(home, ignore_errors=True)
    _succeed([sys.executable, "-m", "venv", str(home)])
    pip = [str(home / "bin" / "pip"), "--disable-pip-version-check", "install", "--quiet", "--no-compile"]
    constrained = ["-r", str(wanted), "-c", str(pins)]
    try:
        # PyPI's torch is the CUDA build; the CPU build is taken from wherever pip is set up to find it.
        _succeed([*pip, f"torch=={TORCH}+cpu", *constrained])
    except CommandFailed:
        print("trainers: no CPU build of torch among pip's indexes, taking PyPI's build", file=sys.stderr, flush=True)
        _succeed([*pip, f"torch=={TORCH}", *constrained])
    (home / "installed").touch()


def _succeed(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CommandFailed(f"{' '.join(command)} ended with status {done.returncode}:\n{done.stderr[-2000:]}")


# Prompts


def write_prompts(path: Path, num_prompts: int) -> None:
    """Sums and differences of two or three one-digit numbers, as conversations; 33 tokens of SmolLM2 or a few more."""
    import reasoning_gym

    options = {name: int(value) for name, value in (part.split("=") for part in TERMS.split(","))}
    rows = reasoning_gym.create_dataset("chain_sum", size=num_prompts, seed=0, **options)
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = (
        {"prompt": [{"role": "system", "content": "Calculate."}, {"role": "user", "content": row["question"]}]}
        | {"answer": row["answer"]}
        for row in rows
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
