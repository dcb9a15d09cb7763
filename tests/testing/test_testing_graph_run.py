"""A whole graph in one process: its steps, ledger, audit and metrics, and how it fails."""

from __future__ import annotations

from pathlib import Path

import pytest

from flowrl import ConfigError, GraphError, NodeFailed
from flowrl.testing import VirtualClock, run_graph

GRAPH = """
import asyncio
from dataclasses import dataclass

from flowrl import ConfigError, Graph, In, Node, Out, Prompt
from flowrl.testing import prompt


class Source(Node):
    prompts: Out[Prompt]

    def __init__(self, cfg): self.cfg = cfg

    def preflight(self):
        if self.cfg.num_prompts < 0:
            raise ConfigError("there are no prompts")

    async def run(self):
        for number in range(self.cfg.num_prompts):
            await self.prompts.send(prompt(number))


class Sink(Node):
    prompts: In[Prompt]

    def __init__(self, cfg): self.cfg = cfg

    async def run(self):
        async for one in self.prompts:
            await asyncio.sleep(self.cfg.each_s)
            self.context.metric("seen", 1)
            self.context.progress(f"seen {one.member}")
            if one.member == self.cfg.fails_at:
                raise ValueError("bad prompt")


@dataclass(frozen=True)
class Config:
    num_prompts: int = 3
    each_s: float = 0.0
    fails_at: int = -1
    capacity: int = 8


def graph(cfg: Config) -> Graph:
    g = Graph("line")
    g.connect(g.add("source", Source(cfg)).prompts, g.add("sink", Sink(cfg), cpus=1).prompts, capacity=cfg.capacity)
    return g
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "line.py").write_text(GRAPH)
    return tmp_path / "line.py"


def test_a_graph_without_trainer_runs_to_the_end_of_its_data(file: Path, tmp_path: Path) -> None:
    ran = run_graph(file, tmp_path / "run", {"num_prompts": 4})
    assert [line for line in ran.view.lines if line.startswith("sink/0")] == [f"sink/0: seen {n}" for n in range(4)]
    assert ran.error is None and ran.outcome is not None and not ran.outcome.interrupted
    assert (ran.steps, ran.metrics(), ran.states()) == ([], [], {})
    assert (tmp_path / "run" / "graph.json").exists()


def test_a_failure_is_raised_or_kept(file: Path, tmp_path: Path) -> None:
    with pytest.raises(NodeFailed, match=r"node 'sink', replica 0, failed.*bad prompt"):
        run_graph(file, tmp_path / "run", {"fails_at": 1})
    ran = run_graph(file, tmp_path / "again", {"fails_at": 1}, must_succeed=False)
    assert isinstance(ran.error, NodeFailed) and ran.outcome is None
    with pytest.raises(NodeFailed):
        ran.raise_for_error()


def test_what_the_checks_and_the_preflight_refuse_never_starts(file: Path, tmp_path: Path) -> None:
    with pytest.raises(GraphError, match="capacity=0"):
        run_graph(file, tmp_path / "run", {"capacity": 0})
    with pytest.raises(ConfigError, match="there are no prompts"):
        run_graph(file, tmp_path / "run", {"num_prompts": -1})
    assert not (tmp_path / "run").exists()
    assert run_graph(file, tmp_path / "run", {"num_prompts": -1}, preflight=False).error is None


def test_it_takes_no_time_under_a_clock_and_ends_by_its_timeout(file: Path, tmp_path: Path) -> None:
    clock = VirtualClock()
    run_graph(file, tmp_path / "run", {"num_prompts": 10, "each_s": 600.0}, clock=clock, timeout_s=1e5)
    assert 6000 <= clock.now_s < 6100
    with pytest.raises(TimeoutError):
        run_graph(file, tmp_path / "late", {"num_prompts": 10, "each_s": 600.0}, clock=VirtualClock(), timeout_s=3000)


STAGES = Path(__file__).parents[2] / "benchmarks" / "runs" / "stages.py"


def test_the_records_of_a_run_can_be_asked(tmp_path: Path) -> None:
    config = {"generate_s": 0.0, "train_s": 0.0, "groups_per_step": 2, "group_size": 2}
    ran = run_graph(STAGES, tmp_path / "run", config, steps=3, save_every=1, seed=5)
    assert ran.steps == [line["step"] for line in ran.metrics()] == [1, 2, 3]
    assert ran.states() == {"trained": 12}
    assert ran.rows("SELECT COUNT(*) FROM uses WHERE version = ?", 0) == [(4,)]
    assert ran.audit().ok
    again = run_graph(STAGES, tmp_path / "run", config, steps=5, resume=True, seed=5)
    assert again.steps == [4, 5] and len(again.metrics()) == 5
