"""mypy --strict refuses wrong graphs: the port types alone say which edges can be."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from mypy import api

ROOT = Path(__file__).parents[2]

PRELUDE = """\
from flowrl import Call, Graph, In, Message, Node, Out, Prompt, Sample, Scored, Serve, Weights
from tests.graph.graph_nodes import Advantage, Batcher, Evaluation, Generator, Prompts, Reward, Trainer

g = Graph("typed")
prompts = g.add("prompts", Prompts())
generator = g.add("generator", Generator())
reward = g.add("reward", Reward())
advantage = g.add("advantage", Advantage())
batcher = g.add("batcher", Batcher())
trainer = g.add("trainer", Trainer())
evaluation = g.add("evaluation", Evaluation())


class TakesSamples(Node):
    samples: In[Sample]


class ServesScores(Node):
    requests: Serve[Prompt, Scored]


takes = g.add("takes", TakesSamples())
serves = g.add("serves", ServesScores())
"""

RIGHT = [
    "g.connect(prompts.prompts, generator.prompts)",
    "g.connect(generator.rollouts, reward.rollouts, capacity=4, dispatch='key')",
    "g.connect(reward.scored, takes.samples)  # a subclass may be sent",
    "g.latest(trainer.weights, generator.weights)",
    "g.call(evaluation.generate, generator.requests)",
    "g.admit(prompts.prompts, until=(generator.weights,), staleness=1)",
    "g.together(reward, advantage)",
]

WRONG = [
    "g.connect(generator.rollouts, advantage.scored)  # Sample is no Scored",
    "g.connect(prompts.prompts, reward.rollouts)",
    "g.connect(generator.prompts, reward.rollouts)  # an In port sends nothing",
    "g.connect(generator.rollouts, reward.scored)  # an Out port takes nothing",
    "g.connect(batcher.batches, trainer.batches, dispatch='random')",
    "g.latest(batcher.batches, generator.weights)",
    "g.call(evaluation.generate, serves.requests)  # another reply",
    "g.call(generator.requests, evaluation.generate)",
    "g.admit(prompts.prompts, until=trainer.weights, staleness=1)",
    "g.admit(prompts.prompts, until=generator.weights, staleness='one')",
    "g.connect(generator.rollout, reward.rollouts)  # misspelt",
    "g.together(reward, 'advantage')",
]


@pytest.mark.slow
def test_strict_mypy_refuses_exactly_the_wrong_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "typed_graph.py"
    path.write_text(PRELUDE + "\n".join(RIGHT + WRONG) + "\n")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    args = ["--strict", "--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    stdout, stderr, _ = api.run([*args, str(path)])
    assert not stderr
    found = {int(line) for line in re.findall(r"typed_graph\.py:(\d+): error", stdout)}
    first = len(PRELUDE.splitlines()) + len(RIGHT) + 1
    assert found == set(range(first, first + len(WRONG))), stdout
