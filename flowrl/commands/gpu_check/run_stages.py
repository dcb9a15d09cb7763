"""Stages that are whole runs: processes of Ray on the devices of their plan, a lease, and GRPO from start to end."""

from __future__ import annotations

import json
import sqlite3
import statistics
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from flowrl.commands.gpu_check.bench import Bench
from flowrl.commands.gpu_check.small_model import make_small_model

HERE = Path(__file__).parent
STEPS = 4
LEARNING_STEPS, SHORT_STEPS = 120, 12
LEAST_GAIN = 0.1
"""Held-out gain that `LEARNING_STEPS` have to reach; on a CPU they reach 0.58."""
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


def whole_run(bench: Bench) -> None:
    """GRPO learns to add two numbers: vLLM, rewards, trainer, weights, evaluation, ledger. One GPU is time-shared."""
    gain = _grpo(bench, LEARNING_STEPS, ("--evaluate", "512", *_devices_of_both(bench)))
    bench.require(gain >= LEAST_GAIN, f"the held-out score rose by {gain:.3f} only, not by {LEAST_GAIN:g}")


def adapter_run(bench: Bench) -> None:
    """The same with LoRA: each version is an adapter, and vLLM serves several versions at once."""
    _grpo(bench, SHORT_STEPS, ("--lora.rank", "8", "--evaluate", "64", *_devices_of_both(bench)))


def wide_run(bench: Bench) -> None:
    """Two ranks at ZeRO 3 publish to two engines: over NCCL on four GPUs, through shared memory on a CPU."""
    cores = () if bench.on_gpu else ("--generator.cpus", "0.5")
    _grpo(bench, SHORT_STEPS, ("--trainer", "2", "--zero.stage", "3", "--generator", "2", "--evaluate", "64", *cores))


def _devices_of_both(bench: Bench) -> Sequence[str]:
    return ("--time-share", "generator", "trainer") if bench.num_gpus == 1 else ()


def _grpo(bench: Bench, steps: int, options: Sequence[str]) -> float:
    """Run `grpo` on the built-in model; returns the held-out gain. Requires an audit without a violation."""
    run_dir = bench.directory / "run"
    gpus = ("--generator.gpus", "1", "--trainer.gpus", "1") if bench.on_gpu else ()
    own = ("--policy", "tiny", "--steps", str(steps), "--run-dir", str(run_dir), "--plain")
    told = bench.run(["flowrl.cli", "run", "grpo", *own, *gpus, *options])
    bench.require("audit: ok" in told, "the audit of the run is not ok")
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    bench.require(len(lines) == steps, f"the run made {len(lines)} steps, not {steps}")
    with closing(sqlite3.connect(run_dir / "ledger.sqlite")) as ledger:
        scores: dict[str, float] = dict(ledger.execute("SELECT phase, AVG(correct) FROM evaluations GROUP BY phase"))
    bench.figure("held-out score", f"{scores['before']:.3f} before, {scores['after']:.3f} after {steps} steps")
    seconds, tokens = lines[-1]["time_s"] - lines[0]["time_s"], sum(line["tokens_trained"] for line in lines[1:])
    bench.figure("trained", f"{tokens / seconds:.0f} tokens/s, {(steps - 1) / seconds:.2f} steps/s")
    bench.figure("pause of generation for an update", f"{_median_of(lines, 'weight_update_pause_s') * 1000:.0f} ms")
    bench.figure("probe, trainer to vLLM", f"{_median_of(lines, 'logprob_mismatch'):.1e}")
    bench.figure("behavior gap", f"{_median_of(lines, 'behavior_gap'):.1e}")
    bench.figure("max staleness", str(max(line["staleness_max"] for line in lines)))
    return scores["after"] - scores["before"]


def _median_of(lines: Sequence[dict[str, Any]], name: str) -> float:
    found: list[float] = [line[name] for line in lines if line.get(name) is not None]
    return statistics.median(found)
