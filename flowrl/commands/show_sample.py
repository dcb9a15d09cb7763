"""`flowrl show RUN_DIR [SAMPLE]`: prints a sample, or the list of the episodes kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from flowrl.errors import ConfigError


def show_sample(args: Sequence[str]) -> int:
    """The command; returns its exit status."""
    plain = "--plain" in args
    names = [arg for arg in args if arg != "--plain"]
    if not 1 <= len(names) <= 2 or any(name.startswith("-") for name in names):
        raise ConfigError("flowrl show needs a run directory, and maybe a sample: flowrl show runs/NAME prompts:0:1")
    if not Path(names[0]).is_dir():
        raise ConfigError(f"there is no run directory {names[0]}; name the one given to flowrl run --run-dir")
    from flowrl.commands.reader import readers_console
    from flowrl.runtime.show import show_sample_or_list as print_sample

    print_sample(Path(names[0]), names[1] if len(names) == 2 else None, readers_console(plain=plain))
    return 0
