"""`flowrl check --try`: shipped graphs pass, and each mistake is named at its node and line before a process starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from flowrl import GraphError, cli
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.option_types import check_value, compose_config, options_of
from flowrl.testing import TrialResult, run_graph, try_graph
from flowrl.testing.trial import GraphTrial

FEW = {"groups_per_step": 2, "group_size": 2, "evaluate": 0}
GRAPH = """
import asyncio
import time
from dataclasses import dataclass, replace
from typing import Any

from flowrl import Graph, In, Message, Node, Out, Sample
from flowrl.graph.option_types import compose_config
from flowrl.nodes import GroupAdvantage, Reward
from flowrl.options import (
    NormalisationOptions, OnlineConfig, PolicyLoss, make_batcher, make_generator, make_prompts, make_trainer,
)
from flowrl.training.advantages import Estimate
from flowrl.training.loss.policy_objective import PolicyObjective


@dataclass(frozen=True)
class Config(OnlineConfig):
    normalisation: NormalisationOptions = NormalisationOptions()
    loss: PolicyLoss = PolicyLoss()


class Middle(Node):
    rollouts: In[Sample]
    kept: Out[Sample]

    async def run(self):
        async for one in self.rollouts:
            await self.body(one)

    async def body(self, one):
        await self.kept.send(one)


class Loss(PolicyObjective):
    pass


MISTAKE


def graph(cfg: Config) -> Graph:
    g = Graph("tried")
    prompts = g.add("prompts", make_prompts(cfg))
    generator = g.add("generator", make_generator(cfg))
    middle = g.add("middle", Middle())
    reward = g.add("reward", Reward(cfg.data.task))
    advantage = g.add("advantage", GroupAdvantage(size=cfg.sampling.group_size))
    batcher = g.add("batcher", make_batcher(cfg, Estimate()))
    trainer = g.add("trainer", make_trainer(cfg, Loss()))
    g.connect(prompts.prompts, generator.prompts)
    g.connect(generator.rollouts, middle.rollouts)
    g.connect(middle.kept, reward.rollouts)
    g.connect(reward.scored, advantage.scored)
    g.connect(advantage.groups, batcher.groups)
    g.connect(batcher.batches, trainer.batches, dispatch="gang")
    g.latest(trainer.weights, generator.weights)
    g.admit(prompts.prompts, until=generator.weights, staleness=1)
    g.ignore(generator.requests)
    return g
"""


def write_graph(folder: Path, mistake: str, *, within: str = "Middle") -> Path:
    """A graph whose class `within` has a mistake: the methods in the text `mistake`."""
    path = folder / "tried.py"
    lines = "".join(f"    {line}\n" for line in mistake.strip().splitlines())
    path.write_text(GRAPH.replace("MISTAKE", f"class Wrong({within}):\n{lines or '    pass'}\n\n\n{within} = Wrong"))
    return path


def try_here(path: Path, folder: Path, config: dict[str, object] | None = None) -> TrialResult:
    """The trial in this process, where the packages of earlier tests are imported already; without its watch."""
    loaded = load_file(path)
    return GraphTrial(loaded, compose_config(loaded.config_type, FEW if config is None else config), folder).run()


DATA = {
    "process_reward_model": {"prompt": "1+1=", "steps": ["1+1", "2"], "labels": [True, True]},
    "score": {"prompt": "1+1=", "answer": "2", "response": "2"},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_names())
def test_a_shipped_graph_passes(name: str, tmp_path: Path) -> None:
    loaded, config = load_file(name), {}
    if (row := DATA.get(name)) is not None:
        rows = [row | {"prompt": f"{row['prompt']}{n}"} for n in range(40)]
        (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in rows))
        config = {"task": f"{tmp_path / 'rows.jsonl'}"}
    kinds = options_of(loaded.config_type)
    given = {field: check_value(field, {"name": value}, kinds[field].hint) for field, value in config.items()}
    result = GraphTrial(loaded, compose_config(loaded.config_type, given), tmp_path).run()
    assert not result.problem
    trains = name not in ("evaluate", "generate", "pairs", "score")
    assert (result.num_batches, result.resumed) == ((2, True) if trains else (0, False))


MISTAKES = {
    "raises": (
        "async def body(self, one):\n    await self.kept.send(one)\n    if one.member: raise ValueError('odd')",
        r"node middle: ValueError: odd\n  tried.py:\d+, in body: if one.member: raise ValueError\('odd'\)",
    ),
    "set-up": (
        "async def setup(self):\n    import a_package_that_is_not_there",
        r"node middle: ModuleNotFoundError: .*\n  tried.py:\d+, in setup: import a_package_that_is_not_there",
    ),
    "each": (
        "async def run(self):\n    await self.rollouts.each(self.body, concurrency=4)\n"
        "async def body(self, one):\n    one.columns['no_such_column']",
        r"node middle: KeyError: 'no_such_column'\n  tried.py:\d+, in body: one.columns",
    ),
    "forgets": (
        "async def body(self, one):\n    if one.member:\n        await self.kept.send(one)",
        r"(?s)node middle: it finished a Sample .* without a send, hold or drop.*\n  tried.py:\d+, Middle.run",
    ),
    "edits": (
        "async def body(self, one):\n    one.token_ids[-1] = 7\n    await self.kept.send(one)",
        r"node middle: ValueError: assignment destination is read-only\n  tried.py:\d+, in body: one.token_ids",
    ),
    "retokenises": (
        "async def body(self, one):\n    ids = one.token_ids.copy()\n    ids[-1] = 60\n"
        "    await self.kept.send(replace(one, token_ids=ids))",
        r"(?s)node middle: ChangedTokens: sample .* has token_ids 60 instead of \d+ at token \d+.*"
        r"\n  tried.py:\d+, in body: await self.kept.send",
    ),
    "relabels": (
        "async def body(self, one):\n    await self.kept.send(replace(one, versions=one.versions + 1))",
        r"(?s)node middle: ChangedTokens: sample .* has versions 1 instead of 0.*in body: await self.kept.send",
    ),
    "cannot be encoded": (
        "async def body(self, one):\n    await self.kept.send(replace(one, columns={'seen': {1, 2}}))",
        r"(?s)node middle: .*set.*\n  tried.py:\d+",
    ),
    "breaks": (
        "async def body(self, one):\n    breakpoint()\n    await self.kept.send(one)",
        r"node middle: RuntimeError: it calls breakpoint\(\).*--here\n  tried.py:\d+, in body: breakpoint\(\)",
    ),
    "state": (
        "def state(self):\n    return {'seen': 1}\ndef load_state(self, state):\n    self.seen = state['missing']",
        r"after a resume, node middle: KeyError: 'missing'\n  tried.py:\d+, in load_state: self.seen",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_at_its_node_and_line(mistake: str, tmp_path: Path) -> None:
    text, named = MISTAKES[mistake]
    problem = try_here(write_graph(tmp_path, text), tmp_path).problem
    assert re.fullmatch(f"{named}.*", problem), problem


def test_a_loss_is_called_with_the_graphs_own_samples(tmp_path: Path) -> None:
    text = "def columns(self, sample):\n    return {**super().columns(sample), 'mine': sample.columns['no']}"
    problem = try_here(write_graph(tmp_path, text, within="Loss"), tmp_path).problem
    assert "node trainer: KeyError: 'no'\n  tried.py:" in problem


def test_a_graph_without_mistakes_makes_two_batches_and_resumes(tmp_path: Path) -> None:
    result = try_here(write_graph(tmp_path, ""), tmp_path)
    assert not (result.problem or result.unfinished or result.warnings)
    assert (result.num_batches, result.resumed, result.audited) == (2, True, True)
    assert str(result).startswith("2 batches with stand-ins, a resume, the audit: ok (")


def test_a_node_that_hangs_is_named(tmp_path: Path) -> None:
    path = write_graph(tmp_path, "async def body(self, one):\n    await asyncio.Event().wait()")
    problem = try_graph(path, hang_s=1.0).problem
    assert "nothing has moved for 1 s: node middle is inside Wrong.body (tried.py:" in problem
    assert "self.context.outside" in problem


def test_code_that_blocks_is_named_even_if_it_never_ends(tmp_path: Path) -> None:
    path = write_graph(tmp_path, "async def body(self, one):\n    time.sleep(3600)")
    result = try_graph(path, time_s=40.0)
    assert not result.problem and result.num_batches == 0
    assert result.unfinished.startswith("node middle: tried.py:") and "self.blocking" in result.unfinished


def test_a_trial_ends_with_its_time(tmp_path: Path) -> None:
    path = write_graph(tmp_path, "async def setup(self):\n    await asyncio.sleep(3600)")
    result = try_graph(path, time_s=8.0)
    assert result.unfinished.startswith("stopped after 8.")
    assert "node middle is inside Wrong.setup (tried.py:" in result.unfinished


def test_what_check_finds_is_not_tried(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"node middle: Wrong.run .* is a plain function"):
        try_graph(write_graph(tmp_path, "def run(self): ..."))


def test_the_command_prints_one_message(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_graph(tmp_path, "async def body(self, one):\n    raise ValueError('odd')")
    assert cli.main(["check", str(path), "--try"]) == 2
    out, err = capfd.readouterr()
    assert err.startswith("flowrl: --try has found a mistake: node middle: ValueError: odd\n  tried.py:")
    assert "Traceback" not in out + err


def test_a_run_is_refused_before_its_processes(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = write_graph(tmp_path, "async def body(self, one):\n    raise ValueError('odd')")
    assert cli.main(["run", str(path), "--run-dir", str(tmp_path / "run"), "--steps", "1", "--try-s", "60"]) == 2
    out, err = capfd.readouterr()
    assert "a trial of the graph, before its run, has found a mistake: node middle: ValueError: odd" in err
    assert "--try-s 0 leaves the trial out" in err and "starting Ray" not in out
    assert not (tmp_path / "run").exists()


def test_run_graph_takes_stand_ins(tmp_path: Path) -> None:
    ran = run_graph("sft", tmp_path / "run", steps=2, stand_ins=True, preflight=False)
    assert ran.steps == [1, 2] and ran.audit().ok
