"""One stage: `python -m flowrl.commands.gpu_check.stage_process TARGET DEVICE NUM_GPUS DIRECTORY`.

It leaves `figures.json` in its directory, and `failure.txt` with a sentence if a requirement does not hold. When the
parent command has ended, the stage ends, and so does everything that it has started.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from importlib import import_module
from pathlib import Path

from flowrl.commands.gpu_check.bench import Bench
from flowrl.errors import FlowrlError
from flowrl.machine.orphans import die_with_parent
from flowrl.runtime.telemetry.standard_streams import print_text


def main() -> int:
    """The exit status: 0, 1 if a requirement does not hold, another one for an exception."""
    target, device, num_gpus, directory = sys.argv[1:]
    assert device in ("cuda", "cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # so that equal steps give bitwise equal results
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    signal.signal(signal.SIGTERM, lambda *_: os.killpg(0, signal.SIGKILL))  # the group is the stage's own
    die_with_parent(signal.SIGTERM)
    bench = Bench("cuda" if device == "cuda" else "cpu", int(num_gpus), Path(directory))
    module, _, name = target.partition(":")
    try:
        getattr(import_module(module), name)(bench)
    except FlowrlError as failure:
        print_text(failure, flush=True)
        (bench.directory / "failure.txt").write_text(str(failure), encoding="utf-8")
        return 1
    finally:
        (bench.directory / "figures.json").write_text(json.dumps(bench.figures), encoding="utf-8")
    return 0


if __name__ == "__main__":
    status = main()
    sys.stdout.flush()
    os._exit(status)  # GPU libraries have threads that outlive the interpreter
