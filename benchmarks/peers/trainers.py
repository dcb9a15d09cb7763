"""flowrl beside TRL on one job: the same model, prompts, reward, group size and dtype, in turns with each other.

    python -m benchmarks.peers.trainers [--job 8x8x24 8x4x24 8x16x24] [--dtype bfloat16 float32]
        [--systems trl flowrl flowrl-sync] [--repetitions N] [--steps 6] [--skip 3] [--staleness 2]
        [--trl-micro-batch 8] [--cache DIR] [--dir DIR] [--docs] [options of flowrl run grpo]

A job is PROMPTSxSAMPLESxTOKENS: prompts of a step, samples of a prompt, most tokens of a sample. The model is
SmolLM2-135M, the prompts are sums of one-digit numbers. `flowrl` has --staleness and a core each for generator and
trainer, or what its options say; `flowrl-sync` has staleness 0, and generator and trainer have all cores in turns. Both
sample in the dtype in which they train. TRL samples by transformers and trains in one process on all cores, with
--trl-micro-batch samples a pass, in an environment that the first run makes in --cache. Without --repetitions the
headline job 8x8x24 has 5, others 3.

Every run is a process of its own; a repetition runs all systems, each time another one first. Measured are --steps
steps after the first --skip. `flowrl` goes on for --staleness more, so that as many batches are ahead of the last
measured step as of the first. Results are in DIR/results.jsonl; a command that is repeated with the same DIR runs
what is missing there. --docs puts the table into docs/benchmarks.md, and below it the trainer alone, if
`python -m benchmarks.training.layouts --json DIR/layouts.jsonl` has measured that.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

from benchmarks.peers.process_memory import CommandFailed
from benchmarks.peers.trainer_systems import Setting, StepJob, System, TrainerRun, run, trl_python, write_prompts
from benchmarks.peers.trainer_tables import BEGIN, END, TrainerResult, alone_table, table
from benchmarks.runs.page import put
from flowrl.errors import FlowrlError
from flowrl.machine.cache import cache_dir
from flowrl.machine.cpu import describe_cpu
from flowrl.training.settings import Dtype

HEADLINE = StepJob(8, 8, 24)
DEFAULT_JOBS = (HEADLINE, StepJob(8, 4, 24), StepJob(8, 16, 24))
PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"


def main(argv: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if argv is None else argv)
    options, further = _parser().parse_known_args(given)
    if problem := problem_of(options):
        print(f"trainers: {problem}", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    setting = Setting(
        options.dir,
        options.cache,
        steps=options.steps,
        skip=options.skip,
        staleness=options.staleness,
        trl_micro_batch=options.trl_micro_batch,
        flowrl_options=tuple(further),
    )
    results = options.dir / "results.jsonl"
    status = 0
    try:
        measure(cells(options), setting, results)
    except (CommandFailed, FlowrlError, ValueError) as error:
        print(f"trainers: {error}", file=sys.stderr)
        status = 2
    tables = _tables(options.dir, setting, shlex.join(["python", "-m", "benchmarks.peers.trainers", *given]))
    print(tables)
    if options.docs and status == 0:
        put(PAGE, tables, BEGIN, END)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--job", nargs="+", type=_job, default=list(DEFAULT_JOBS), help="PROMPTSxSAMPLESxTOKENS")
    parser.add_argument("--dtype", nargs="+", choices=get_args(Dtype), default=["bfloat16", "float32"])
    parser.add_argument("--systems", nargs="+", choices=get_args(System), default=list(get_args(System)))
    parser.add_argument("--repetitions", type=int, help="default: 5 for 8x8x24, 3 for others")
    parser.add_argument("--steps", type=int, default=6, help="measured steps of a run")
    parser.add_argument("--skip", type=int, default=3, help="first steps, which are not measured")
    parser.add_argument("--staleness", type=int, default=2, help="of flowrl's asynchronous runs")
    parser.add_argument("--trl-micro-batch", type=int, default=8, help="samples of a pass of TRL's")
    parser.add_argument("--cache", type=Path, default=cache_dir() / "benchmarks", help="for the environment of TRL")
    parser.add_argument("--dir", type=Path, default=Path("runs/trainers"), help="for results, logs and runs")
    parser.add_argument("--docs", action="store_true", help=f"write the table into {PAGE.name}")
    return parser


def _job(text: str) -> StepJob:
    try:
        return StepJob.parse(text)
    except ValueError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def problem_of(options: argparse.Namespace) -> str | None:
    """What is wrong with the options, as a sentence."""
    least = {"steps": 1, "skip": 1, "staleness": 1, "trl_micro_batch": 1}
    if options.repetitions is not None:
        least["repetitions"] = 1
    for name, low in least.items():
        if getattr(options, name) < low:
            return f"--{name.replace('_', '-')} is {getattr(options, name)}; it has to be {low} or more"
    if options.skip <= options.staleness:
        return f"--skip is {options.skip}; it has to be above --staleness {options.staleness}, as first batches fill up"
    for job in options.job:
        if (
            job.prompts * job.samples
        ) % options.trl_micro_batch and job.prompts * job.samples > options.trl_micro_batch:
            return f"--trl-micro-batch {options.trl_micro_batch} does not divide the samples of a step of {job}"
    return None


def cells(options: argparse.Namespace) -> Iterator[TrainerRun]:
    """All runs in their order: repetition by repetition, in each the systems of a job and dtype side by side."""
    times = {job: options.repetitions or (5 if job == HEADLINE else 3) for job in options.job}
    for repetition in range(max(times.values())):
        first = repetition % len(options.systems)
        systems = options.systems[first:] + options.systems[:first]
        for job in (job for job, most in times.items() if repetition < most):
            for dtype in options.dtype:
                yield from (TrainerRun(job, dtype, system, repetition) for system in systems)


def measure(planned: Iterator[TrainerRun], setting: Setting, results: Path) -> None:
    """Run the cells that have no result yet; each result is on disk before the next cell starts."""
    known = {result.cell for result in read_results(results, setting)}
    missing = [cell for cell in planned if cell not in known]
    if not missing:
        return
    if any(cell.system == "trl" for cell in missing):
        trl_python(setting.cache)
    for number, cell in enumerate(missing, start=1):
        data = setting.directory.resolve() / f"prompts-{cell.job}.jsonl"
        write_prompts(data, cell.job.prompts * (setting.skip + setting.steps + 8))
        load = os.getloadavg()[0]
        found = run(cell, setting, data)
        record = {"cell": asdict(cell), "found": asdict(found), "setting": setting.described, **_machine(load)}
        with results.open("a") as file:
            file.write(json.dumps(record) + "\n")
        told = f"{found.step_s:.2f} s a step, {found.samples_per_s:.2f} samples/s"
        print(f"{number}/{len(missing)} {cell.job} {cell.dtype} {cell.system}: {told}", file=sys.stderr, flush=True)


def _machine(load: float) -> dict[str, Any]:
    when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    return {"load_before": load, "cores": len(os.sched_getaffinity(0)), "processor": describe_cpu(), "ended": when}


def read_results(path: Path, setting: Setting) -> list[TrainerResult]:
    """The results of this setting. Those of other settings stay in the file and are left out."""
    if not path.exists():
        return []
    records = [json.loads(line) for line in path.read_text().splitlines()]
    return [TrainerResult.of(record) for record in records if record["setting"] == setting.described]


def _tables(directory: Path, setting: Setting, command: str) -> str:
    parts = [table(read_results(directory / "results.jsonl", setting), setting.steps, command)]
    layouts = directory / "layouts.jsonl"
    return "\n\n".join([*parts, alone_table(layouts)] if layouts.exists() else parts)


if __name__ == "__main__":
    sys.exit(main())
