"""`flowrl samples RUN_DIR`: what the model said, from the samples that the run keeps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.runtime.telemetry.standard_streams import print_text

USAGE = (
    "flowrl samples needs one run directory first: flowrl samples runs/NAME [--step N] [--best | --worst | --failed] "
    "[--held-out] [--diff STEP] [--limit N] [--json]"
)


@dataclass(frozen=True)
class SamplesOptions:
    """Options of `flowrl samples`."""

    step: int | None = None
    """Show samples of this step; None: the newest samples or, with --best, --worst and --failed, those of all steps."""
    best: bool = False
    """Show the samples with the highest rewards."""
    worst: bool = False
    """Show the samples with the lowest rewards."""
    failed: bool = False
    """Show the samples that failed, newest first, with the reason."""
    held_out: bool = False
    """Show answers of evaluations in place of training samples."""
    diff: int | None = None
    """Compare answers to the same prompts at this step and at --step; the largest changes of reward come first."""
    limit: int = 8
    """Maximum number of samples shown."""
    json: bool = False
    """Print whole rows as lines of JSON."""
    plain: bool = False
    """Print without colours."""

    def __post_init__(self) -> None:
        if self.limit < 1:
            raise ConfigError(f"--limit is {self.limit}; it has to be 1 or more")
        chosen = [name for name in ("best", "worst", "failed") if getattr(self, name)]
        if len(chosen) > 1 or (self.diff is not None and chosen):
            both = [*chosen, *(["diff"] if self.diff is not None else [])]
            raise ConfigError(f"--{' and --'.join(both)} do not go together; choose one")

    @property
    def order(self) -> Any:
        """Which samples come first."""
        return next((name for name in ("best", "worst", "failed") if getattr(self, name)), "last")


def print_samples(args: Sequence[str]) -> int:
    """The command; prints the samples found."""
    if args and args[0] in ("-h", "--help"):
        parse_options(SamplesOptions, ["--help"], prog="flowrl samples RUN_DIR")
    if not args or args[0].startswith("-"):
        raise ConfigError(USAGE)
    run_dir = Path(args[0])
    if not run_dir.is_dir():
        raise ConfigError(f"there is no run directory {run_dir}; name the one given to flowrl run --run-dir")
    options = parse_options(SamplesOptions, args[1:], prog="flowrl samples RUN_DIR")
    if options.json:
        for row in _rows(run_dir, options):
            print_text(json.dumps(row))
        return 0
    from flowrl.commands.reader import readers_console

    console = readers_console(plain=options.plain)
    for line in _lines(run_dir, options):
        console.print(line, soft_wrap=True, highlight=False)
    return 0


def _rows(run_dir: Path, options: SamplesOptions) -> Iterator[Any]:
    if options.diff is None:
        yield from _find_samples(run_dir, options)
        return
    yield from ({"before": before, "after": after} for before, after in _find_pairs(run_dir, options))


def _lines(run_dir: Path, options: SamplesOptions) -> Iterator[Any]:
    from flowrl.runtime.show import pair_text, rows_text

    if options.diff is not None:
        for pair in _find_pairs(run_dir, options):
            yield from pair_text(*pair)
        return
    found = _find_samples(run_dir, options)
    if not found:
        yield "no sample of this kind is kept"
    yield from rows_text(found)


def _find_samples(run_dir: Path, options: SamplesOptions) -> Any:
    from flowrl.runtime.samples.rollout_files import SampleQuery, find_rows

    return find_rows(run_dir, SampleQuery(options.step, options.order, options.held_out, options.limit))


def _find_pairs(run_dir: Path, options: SamplesOptions) -> Any:
    from flowrl.runtime.samples.rollout_files import find_pairs, rollout_files

    files = rollout_files(run_dir)
    newest = max((file.last for file in files if file.held_out), default=max((f.last for f in files), default=0))
    return find_pairs(run_dir, newest if options.step is None else options.step, options.diff or 0, limit=options.limit)
