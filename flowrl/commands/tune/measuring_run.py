"""One real run of a placement: `flowrl run` in a separate process, which leaves no process behind, however it ends.

Waits for the end of the run; the run is ended when its time is over, or when this process is interrupted.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from flowrl.errors import FlowrlError

ORDERLY_S = 1.0
"""Seconds between the interrupt that ends a run in order and the one that ends it at once."""
ENDED_WITHIN_S = 60.0
"""Seconds in which an interrupted run has to end before it is killed."""
TOLD_LINES = 15
HEAVY = ("checkpoints", "rollouts", "trace.json", "ledger.sqlite*")
"""Patterns of files that a measured run leaves and that are not needed any more."""


class RunTimedOut(FlowrlError):
    """The time for a run was over before it had ended."""


def run_graph(config: Path, run_dir: Path, *, steps: int, limit_s: float | None = None) -> float:
    """Run the run file `config` for `steps` steps, with its output in RUN_DIR.log; returns the seconds it took.

    Raises FlowrlError with the end of that output if the run fails, RunTimedOut after `limit_s`.
    """
    shutil.rmtree(run_dir, ignore_errors=True)
    log, began_s = run_dir.with_name(f"{run_dir.name}.log"), time.monotonic()
    with log.open("w", encoding="utf-8") as output:
        process = subprocess.Popen(
            run_command(config, run_dir, steps), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            raise RunTimedOut(f"{run_dir.name} had not ended after {limit_s:.3g} s") from None
        finally:
            end_process(process)
    if status:
        told = "\n".join(log.read_text(errors="replace", encoding="utf-8").splitlines()[-TOLD_LINES:])
        raise FlowrlError(f"a run that was to be measured ended with status {status}; the end of {log}:\n{told}")
    return time.monotonic() - began_s


def run_command(config: Path, run_dir: Path, steps: int) -> list[str]:
    """The command of a measured run: it keeps and saves nothing that takes time, and traces every event."""
    own = ("--steps", str(steps), "--run-dir", str(run_dir), "--plain", "--trace", "full")
    without = ("--save-minutes", "0", "--save-every", "0", "--keep-samples", "off", "--keep-episodes", "0")
    return [sys.executable, "-m", "flowrl.cli", "run", "--config", str(config), *own, *without]


def end_process(process: subprocess.Popen[bytes]) -> None:
    """End the run, unless it has ended: in order, then at once, then by SIGKILL to everything in its session."""
    for patience_s in (ORDERLY_S, ENDED_WITHIN_S):
        if process.poll() is not None:
            return
        process.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=patience_s)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def remove_heavy(run_dir: Path) -> None:
    """Remove what a measured run leaves besides its metrics and descriptions."""
    for path in [found for pattern in HEAVY for found in run_dir.glob(pattern)]:
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
