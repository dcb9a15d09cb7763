"""`flowrl run --here` and `flowrl.run`: all nodes in this process, without Ray."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

import flowrl
from flowrl import ConfigError, Graph, GraphError, In, Node, Out, Prompt
from flowrl.runtime.audit.audit import audit
from flowrl.runtime.driver.local_cluster import HereLoop, fit_here
from flowrl.testing import run_node, sample

ROOT = Path(__file__).parents[3]
STAGES = ROOT / "benchmarks" / "runs" / "stages.py"
FAST = {"generate_s": 0.0, "train_s": 0.0, "groups_per_step": 2}

LINE = """
import asyncio
from dataclasses import dataclass

from flowrl import Graph, In, Node, Out, Prompt
from flowrl.testing import prompt


class Source(Node):
    prompts: Out[Prompt]

    async def run(self):
        for number in range(3):
            await self.prompts.send(prompt(number))


class Sink(Node):
    prompts: In[Prompt]

    async def run(self):
        async for one in self.prompts:
            BODY


@dataclass(frozen=True)
class Config:
    capacity: int = 8


def graph(cfg: Config) -> Graph:
    g = Graph("line")
    g.connect(g.add("source", Source()).prompts, g.add("sink", Sink()).prompts, capacity=cfg.capacity)
    return g
"""


def flowrl_here(file: Path, *options: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, with `stdin` as what a user types."""
    command = [sys.executable, "-m", "flowrl.cli", "run", str(file), "--here", *options]
    return subprocess.run(
        command, input=stdin, capture_output=True, text=True, encoding="utf-8", cwd=file.parent, timeout=120
    )


def write_line(folder: Path, body: str) -> Path:
    path = folder / "line.py"
    path.write_text(LINE.replace("BODY", body.replace("\n", "\n            ")))
    return path


def test_a_run_here_leaves_the_records_of_any_run(tmp_path: Path) -> None:
    (tmp_path / "stages.py").write_text(STAGES.read_text())
    options = [f"--{name.replace('_', '-')}={value}" for name, value in FAST.items()]
    ran = flowrl_here(tmp_path / "stages.py", *options, "--steps", "3", "--run-dir", str(tmp_path / "run"))
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "audit: ok" in ran.stdout and "starting Ray" not in ran.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    again = flowrl_here(
        tmp_path / "stages.py", *options, "--steps", "4", "--run-dir", str(tmp_path / "run"), "--resume"
    )
    assert again.returncode == 0 and "resumed from step_000003" in again.stdout
    assert audit(tmp_path / "run").ok


def test_breakpoint_stands_in_the_node_with_the_users_input_and_output(tmp_path: Path) -> None:
    path = write_line(tmp_path, "breakpoint()\nprint('seen', one.member)")
    ran = flowrl_here(path, stdin="p one.member + 40\nc\nc\nc\n")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "(Pdb) 40" in ran.stdout and "print('seen', one.member)" in ran.stdout
    assert [line for line in ran.stdout.splitlines() if "seen" in line and "print" not in line][-1].endswith("seen 2")


def test_time_in_a_debugger_counts_for_no_time_out() -> None:
    async def stands() -> str:
        async with asyncio.timeout(0.5):
            time.sleep(0.8)  # noqa: ASYNC251  # the loop stands, as in a debugger
            await asyncio.sleep(0.1)  # a timer that is due before the time-out
            return "in time"

    with asyncio.Runner(loop_factory=HereLoop) as runner:
        assert runner.run(stands()) == "in time"
        with pytest.raises(TimeoutError):
            runner.run(asyncio.wait_for(asyncio.Event().wait(), 0.05))


class Ranks(Node):
    gang = True
    sequence_parallel_size = 2
    prompts: In[Prompt]


class Judge(Node):
    prompts: In[Prompt]


def test_what_does_not_fit_is_scaled_down_and_said_or_refused() -> None:
    g = Graph("g")
    g.add("trainer", Ranks(), replicas=4)
    assert fit_here(g) == [
        "trainer has sequence_parallel_size 1, because its ranks need processes",
        "trainer has 1 rank instead of 4, because ranks need processes",
    ]
    assert g.placed["trainer"].replicas == 1 and fit_here(g) == []
    g.add("judge", Judge(), gpus=1)
    with pytest.raises(ConfigError, match=r"--here: node judge has 1 GPUs, .*FLOWRL_DEVICE=cpu"):
        fit_here(g)


def test_flowrl_run_from_a_running_loop(tmp_path: Path) -> None:
    async def cell() -> None:
        run = flowrl.run(STAGES, FAST, steps=3, run_dir=tmp_path / "run", plain=True)
        assert not run.done
        result = await run
        assert result.audit is not None and result.audit.ok and result.outcome.steps == 3
        assert [line["step"] for line in run.metrics] == [1, 2, 3]
        assert run.done and "ended, 3 batches" in repr(run)

    asyncio.run(cell())


def test_flowrl_run_reads_an_edited_file_again(tmp_path: Path) -> None:
    path = write_line(tmp_path, "pass")
    flowrl.run(path, run_dir=tmp_path / "first", plain=True).wait()
    write_line(tmp_path, "raise ValueError('edited')")
    with pytest.raises(flowrl.NodeFailed, match="edited"):
        flowrl.run(path, run_dir=tmp_path / "second", plain=True).wait()


def test_mistakes_are_raised_where_the_run_is_begun(tmp_path: Path) -> None:
    path = write_line(tmp_path, "pass")
    with pytest.raises(TypeError, match="'group_size'; options of the graph belong into config"):
        flowrl.run(path, group_size=4)
    with pytest.raises(ConfigError, match="no option --size"):
        flowrl.run(path, {"size": 4})
    with pytest.raises(GraphError, match="capacity=0"):
        flowrl.run(path, {"capacity": 0}, run_dir=tmp_path / "run").wait()
    assert not (tmp_path / "run").exists()


def test_a_run_here_can_be_stopped(tmp_path: Path) -> None:
    run = flowrl.run(STAGES, {**FAST, "train_s": 0.05}, run_dir=tmp_path / "run", plain=True)
    while len(run.metrics) < 2:
        time.sleep(0.01)  # the run's thread makes batches
    run.stop()
    result = run.wait(60)
    assert result.outcome.interrupted and result.audit is not None and result.audit.ok


def test_a_rig_runs_in_a_notebook(tmp_path: Path) -> None:
    class Keep(Node):
        samples: In[flowrl.Sample]
        kept: Out[flowrl.Sample]

        async def run(self) -> None:
            async for one in self.samples:
                await self.kept.send(one)

    async def cell() -> int:
        return len(run_node(Keep(), {"samples": [sample(0), sample(1)]}).sent("kept"))

    assert asyncio.run(cell()) == 2
