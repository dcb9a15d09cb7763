"""`flowrl samples RUN_DIR`: what the model said, from the samples that the run keeps; `flowrl show RUN_DIR [SAMPLE]`: a
sample token by token, or the list of the episodes kept."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl.errors import ConfigError
from flowrl.graph.command_line import parse_options
from flowrl.runtime.telemetry.standard_streams import print_text
from flowrl.runtime.telemetry.view import SafeConsole

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
    pairs = None if options.diff is None else _find_pairs(run_dir, options)
    found = _find_samples(run_dir, options) if pairs is None else []
    if options.json:
        for row in found if pairs is None else ({"before": before, "after": after} for before, after in pairs):
            print_text(json.dumps(row))
        return 0
    from flowrl.runtime.show import pair_text, rows_text

    console = readers_console(plain=options.plain)
    if pairs is None and not found:
        console.print("no sample of this kind is kept", soft_wrap=True, highlight=False)
    lines = rows_text(found) if pairs is None else (line for pair in pairs for line in pair_text(*pair))
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)
    return 0


def _find_samples(run_dir: Path, options: SamplesOptions) -> Any:
    from flowrl.runtime.samples.rollout_files import SampleQuery, find_rows

    return find_rows(run_dir, SampleQuery(options.step, options.order, options.held_out, options.limit))


def _find_pairs(run_dir: Path, options: SamplesOptions) -> Any:
    from flowrl.runtime.samples.rollout_files import find_pairs, rollout_files

    files = rollout_files(run_dir)
    newest = max((file.last for file in files if file.held_out), default=max((f.last for f in files), default=0))
    return find_pairs(run_dir, newest if options.step is None else options.step, options.diff or 0, limit=options.limit)


def show_sample(args: Sequence[str]) -> int:
    """The command; returns its exit status."""
    plain = "--plain" in args
    names = [arg for arg in args if arg != "--plain"]
    if not 1 <= len(names) <= 2 or any(name.startswith("-") for name in names):
        raise ConfigError("flowrl show needs a run directory, and maybe a sample: flowrl show runs/NAME prompts:0:1")
    if not Path(names[0]).is_dir():
        raise ConfigError(f"there is no run directory {names[0]}; name the one given to flowrl run --run-dir")
    from flowrl.runtime.show import show_sample_or_list as print_sample

    print_sample(Path(names[0]), names[1] if len(names) == 2 else None, readers_console(plain=plain))
    return 0


class ReadersConsole(SafeConsole):
    """A console on which a closed pipe ends the command as it does elsewhere (see `flowrl.cli`)."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def readers_console(*, plain: bool) -> ReadersConsole:
    """The console on standard output; `plain`: without colours."""
    return ReadersConsole(force_terminal=False if plain else None, color_system=None if plain else "auto")
