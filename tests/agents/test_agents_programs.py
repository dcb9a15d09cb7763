"""Agents' programs apart from the node that runs them: names, results, the example, the documentation."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.agents.programs import AGENT_CAUSES, AgentResult, ProgramName
from flowrl.environments.episode_processes.zygote import ONE_THREAD
from flowrl.environments.tools import named_tools
from flowrl.environments.tools.named_tools import calculator
from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import AgentProgram, Limits
from flowrl.tasks.user_code import load_user_module

ROOT = Path(__file__).parents[2]


def test_warming_up_leaves_no_thread_behind() -> None:
    """A process with more than one thread is not forked."""
    code = (
        "import os\nfrom flowrl.agents.agent_envs import warm_up\nwarm_up()\nprint(len(os.listdir('/proc/self/task')))"
    )
    env = {**os.environ, **dict.fromkeys(ONE_THREAD, "1")}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


def test_the_documentation_has_every_cause() -> None:
    page = (ROOT / "docs" / "endpoint.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(AGENT_CAUSES)


def test_the_example_offers_the_calculator_of_the_built_in_environment() -> None:
    example = load_user_module(str(ROOT / "graphs" / "agents" / "calculator_agent.py"), owner="agent")
    assert list(named_tools("calculator").descriptions) == [example.CALCULATOR]

    def asked(expression: str) -> str:
        return json.dumps({"expression": expression})

    for expression in ("37+58", "(3 + 4) * -12", "7 // 2", "7 / 2", "8 / 2", "2 ** 9", "7 % 3"):
        assert example.calculated("calculator", asked(expression)) == calculator(expression)
    for wrong in ("{", "{}", *map(asked, ("1 // 0", "2 ** 65", "10 ** 60 ** 2", "1e300 * 1e300", "x", "(-8) ** 0.5"))):
        assert example.calculated("calculator", wrong).startswith("This cannot be calculated")
    assert "There is no tool sum" in example.calculated("sum", "{}")


def test_settings_out_of_range_are_said_in_sentences() -> None:
    wrong = AgentProgram(Policy("tiny"), agent="x", limits=Limits(turns=0), processes=0, idle_s=0, command="y")
    found = wrong.check(None)
    assert len(found) == 4 and "give one of them" in found[-1]
    for limits in (Limits(step_s=5), Limits(observation_bytes=999)):
        (problem,) = AgentProgram(Policy("tiny"), agent="x.py:f", limits=limits).check(None)
        assert problem.endswith("has no effect on agents; leave it out")
    assert "names no function" in AgentProgram(Policy("tiny"), agent="x.py").check(None)[0]
    for command in ("'", " "):
        with pytest.raises(ConfigError, match="the agent's command"):
            ProgramName(command=command)


@pytest.mark.parametrize(
    ("line", "reward", "metrics"),
    [
        ("1", 1.0, {}),
        ('{"reward": 0.5, "steps": 3}', 0.5, {"steps": 3.0}),
        ('{"steps": 3}', None, {"steps": 3.0}),
        ("null", None, {}),
        ("", None, {}),
        ("done", None, {}),
        ("true", None, {}),
        ("NaN", None, {}),
        ('{"reward": "1"}', None, {}),
        ("[1]", None, {}),
    ],
)
def test_the_last_line_of_a_program_is_a_result_or_none(line: str, reward: float | None, metrics: Any) -> None:
    found = AgentResult.of_line(line)
    assert (found.reward, dict(found.metrics)) == (reward, metrics)
    assert AgentResult.unpacked(found.packed()) == found
