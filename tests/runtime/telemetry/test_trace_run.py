"""`--trace`: what a whole run leaves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flowrl.runtime.process.engine import ProcessEngine
from flowrl.runtime.telemetry import trace
from flowrl.runtime.telemetry.trace import OFF
from flowrl.testing import run_graph

STAGES = Path(__file__).parents[3] / "benchmarks" / "runs" / "stages.py"


def items(run_dir: Path) -> set[str]:
    """Names of the items that the trace has."""
    events: list[dict[str, Any]] = json.loads((run_dir / "trace.json").read_bytes())
    return {event["name"] for event in events if event.get("cat") == "item"}


def test_a_run_keeps_the_limit_and_its_hosts_hear_of_the_level(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "LIMIT_BYTES", 30_000)
    heard: list[int] = []
    monkeypatch.setattr(ProcessEngine, "_set_trace_level", lambda engine, host, level: heard.append(level))
    quick = {"generate_s": 0.0, "train_s": 0.0}
    for mode in ("sampled", "full", "off"):
        ran = run_graph(STAGES, tmp_path / mode, quick, steps=12, trace=mode)
        assert ran.steps == list(range(1, 13))
    assert (tmp_path / "sampled" / "trace.json").stat().st_size <= 30_000
    assert (tmp_path / "full" / "trace.json").stat().st_size > 30_000
    assert not (tmp_path / "off" / "trace.json").exists()
    assert heard.count(0) == 2 * heard.count(OFF) > 0, "every host hears where the run begins"
    assert set(heard) - {0, OFF}, "and of what it has come to"
    prompts = {f"Prompt {ticket}" for ticket in range(48)}
    assert prompts <= items(tmp_path / "full")
    assert items(tmp_path / "sampled") & prompts < prompts
