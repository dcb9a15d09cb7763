"""Stages that are whole runs: processes of Ray on the devices of their plan, and a lease."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import make_small_model

HERE = Path(__file__).parent
STEPS = 4
PRETENDED = "4,5"
"""GPUs that a machine without any claims to have: Ray trusts the variable."""


def devices(bench: Bench) -> None:
    """What every process sees: the devices of its plan, or none if it has none."""
    count = bench.num_gpus or 2
    env = {} if bench.on_gpu else {"CUDA_VISIBLE_DEVICES": PRETENDED}
    run_dir = bench.directory / "run"
    options = ["--gpus", str(count), "--ask-torch" if bench.on_gpu else "--no-ask-torch", "--run-dir", str(run_dir)]
    bench.run(["flowrl.cli", "run", str(HERE / "seen_graph.py"), *options, "--plain"], env=env)
    seen = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in run_dir.glob("*-[0-9]*.json")}
    for name, found in sorted(seen.items()):
        bench.figure(name, f"planned {found['plan']}, sees {found['visible'] or 'none'}")
    names = {"reader-0", "judge-0", *(f"ranks-{rank}" for rank in range(count))}
    bench.require(seen.keys() == names, f"only {', '.join(sorted(seen))} reported the GPUs they see")
    _require_plan(bench, seen, count)


def _require_plan(bench: Bench, seen: dict[str, Any], count: int) -> None:
    def visible(name: str) -> list[str]:
        return [one for one in seen[name]["visible"].split(",") if one]

    ranks = [visible(f"ranks-{rank}") for rank in range(count)]
    bench.require(all(len(one) == 1 for one in ranks), f"ranks see {ranks}, not one GPU each")
    bench.require(len({one[0] for one in ranks}) == count, f"ranks see {ranks}: two see the same GPU")
    bench.require(
        sorted(visible("reader-0")) == sorted(one[0] for one in ranks), "the reader sees other GPUs than the ranks"
    )
    bench.require(not visible("judge-0"), f"a node without GPUs sees {visible('judge-0')}")
    if bench.on_gpu:
        uuids = [seen[f"ranks-{rank}"]["uuids"] for rank in range(count)]
        bench.require(all(len(one) == 1 for one in uuids), f"torch sees {uuids} in the ranks")
        bench.require(len({one[0] for one in uuids}) == count, "torch sees the same device in two ranks")
        bench.require(seen["judge-0"]["uuids"] == [], "torch sees a GPU in a node that has none")


def lease(bench: Bench) -> None:
    """Four steps with two checkpoints. A trainer that stays on the device would leave no room for 90% of it."""
    dtype = "bfloat16" if bench.on_gpu else "float32"
    model = make_small_model(bench.directory / "model", large=bench.on_gpu, dtype=dtype)
    run_dir = bench.directory / "run"
    options = ["--policy", str(model), "--gpus", str(int(bench.on_gpu)), "--dtype", dtype]
    own = ["--steps", str(STEPS), "--save-every", "2", "--run-dir", str(run_dir), "--plain"]
    told = bench.run(["flowrl.cli", "run", str(HERE / "lease_graph.py"), *options, *own])
    bench.require("audit: ok" in told, "the audit of the run is not ok")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    bench.figure("steps", str(len(lines)))
    bench.figure("checkpoints", str(len(list((run_dir / "checkpoints").glob("step_*")))))
    for name in ("device_leave_s", "device_return_s"):
        found = [line[name] for line in lines if isinstance(line.get(name), int | float)]
        if found:
            bench.figure(name, f"{max(found):.3f} s at most")
    bench.require(len(lines) == STEPS, f"the run made {len(lines)} steps, not {STEPS}")
