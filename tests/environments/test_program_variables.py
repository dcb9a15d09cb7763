"""What environments, agents, commands and rewards get of the run's environment variables."""

from __future__ import annotations

import ast
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from flowrl.agents.programs import ProgramName
from flowrl.environments import Action, EnvironmentRow, Episodes
from flowrl.errors import ConfigError
from flowrl.models import Policy
from flowrl.nodes import AgentProgram
from flowrl.tasks.reward_calls.reward_client import RewardWorker
from flowrl.tasks.user_code import MARK, program_variables
from tests.house.test_layout import ROOT, modules, nodes

SECRETS = {
    "RAY_AUTH_TOKEN": "all machines",
    "RAY_AUTH_TOKEN_PATH": "/home/me/.ray/auth_token",
    "HF_TOKEN": "hf_1",
    "HUGGING_FACE_HUB_TOKEN": "hf_2",
    "WANDB_API_KEY": "w",
    "OPENAI_API_KEY": "sk",
    "AWS_SECRET_ACCESS_KEY": "a",
    "GITHUB_TOKEN": "g",
    "DATABASE_URL": "postgres://me:secret@db/",
}
NEEDED = {
    "LC_TIME": "C.UTF-8",
    "HF_HOME": "/hub",
    "https_proxy": "http://proxy:3128",
    "NO_PROXY": "10.0.0.1, .local",
    "PYTHONWARNINGS": "default",
    "FLOWRL_TEST_OWN": "1",
}
TELLS = "import json, os, sys\n{0}json.dump(dict(os.environ), open({1!r}, 'w'))\n"


@pytest.fixture(autouse=True)
def surroundings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARK, raising=False)
    monkeypatch.delenv("no_proxy", raising=False)
    for name, text in {**SECRETS, **NEEDED}.items():
        monkeypatch.setenv(name, text)


def environment_of_an_environment(folder: Path, seen: Path, **options: Any) -> None:
    (folder / "own.py").write_text(
        TELLS.format("from flowrl.environments import Env, Observation, Step\n", str(seen)) + "class Own(Env):\n"
        "    async def reset(self, task, seed): return Observation('x')\n"
        "    async def step(self, action): return Step(Observation(), terminated=True)\n"
    )

    async def play() -> None:
        async with Episodes(f"{folder}/own.py:Own", **options) as pool:
            await (await pool.reset(EnvironmentRow("own"))).close()

    asyncio.run(play())


def environment_of_a_function(folder: Path, seen: Path, **options: Any) -> None:
    body = f"subprocess.run([sys.executable, '-c', {WRITE!r}, task])"
    body = f"import subprocess, sys\nasync def agent(client, task): {body}"
    (folder / "agent.py").write_text(body)
    play_agent(
        ProgramName(f"{folder}/agent.py:agent"), {"function": f"{folder}/agent.py:agent", "task": str(seen)}, options
    )


def environment_of_a_command(folder: Path, seen: Path, **options: Any) -> None:
    (folder / "agent.py").write_text(TELLS.format("", str(seen)))
    command = f"{sys.executable} {folder}/agent.py"
    play_agent(ProgramName(command=command), {"command": command, "task": {}}, options)


WRITE = "import json, os, sys; json.dump(dict(os.environ), open(sys.argv[1], 'w'))"


def play_agent(program: ProgramName, task: dict[str, Any], options: dict[str, Any]) -> None:
    """With the variables of a session, which an agent is always given."""

    async def play() -> None:
        async with Episodes(program.environment, **options) as pool:
            episode = await pool.reset(EnvironmentRow("agent", task))
            await episode.step(
                Action(json.dumps({"OPENAI_BASE_URL": "http://here", "OPENAI_API_KEY": "of the session"}))
            )
            await episode.close()

    asyncio.run(play())


PROGRAMS = (environment_of_an_environment, environment_of_a_function, environment_of_a_command)


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_get_what_they_need_and_no_secret(program: Any, tmp_path: Path) -> None:
    program(tmp_path, seen := tmp_path / "seen")
    found = json.loads(seen.read_text())
    assert not (SECRETS.items() & found.items())
    if program is not environment_of_an_environment:
        assert (found["OPENAI_BASE_URL"], found["OPENAI_API_KEY"]) == ("http://here", "of the session")
    for name in ("PATH", "HOME", *NEEDED):
        assert name in found or name not in os.environ
    assert found["NO_PROXY"] == found["no_proxy"] == "10.0.0.1,.local,localhost,127.0.0.1,::1"


@pytest.mark.parametrize("program", PROGRAMS)
def test_named_variables_are_kept_down_to_what_a_program_starts(program: Any, tmp_path: Path) -> None:
    program(tmp_path, seen := tmp_path / "seen", keep_variables=("WANDB_*", "AWS_SECRET_ACCESS_KEY"))
    found = json.loads(seen.read_text())
    assert dict(SECRETS.items() & found.items()) == {"WANDB_API_KEY": "w", "AWS_SECRET_ACCESS_KEY": "a"}


def test_everything_but_rays_token_may_be_kept(tmp_path: Path) -> None:
    environment_of_a_command(tmp_path, seen := tmp_path / "seen", keep_variables=("*",))
    found = json.loads(seen.read_text())
    assert set(os.environ) - set(found) == {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def test_rewards_do_what_the_runs_user_does_and_have_no_token_of_ray(tmp_path: Path) -> None:
    seen = tmp_path / "seen"
    (tmp_path / "mine.py").write_text(TELLS.format("", str(seen)) + "def f(prompts, completions): return [0.0]\n")

    async def ask() -> None:
        worker = RewardWorker(f"{tmp_path}/mine.py:f", timeout_s=20.0)
        await worker.start_child()
        await worker.close()

    asyncio.run(ask())
    found = json.loads(seen.read_text())
    assert set(SECRETS) - set(found) == {"RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}


def test_names_that_cannot_be_kept_are_refused_in_a_sentence(tmp_path: Path) -> None:
    for name, says in (
        ("OPENAI_API_KEY=sk", "it takes names of variables, such as OPENAI_API_KEY or WANDB_*"),
        ("", "it takes names"),
        ("RAY_AUTH_TOKEN", "gives whoever has it all machines of Ray's cluster"),
    ):
        (problem,) = AgentProgram(Policy("tiny"), agent="x.py:f", keep_variables=(name,)).check(None)
        assert says in problem
        with pytest.raises(ConfigError, match="keep_variables has"):
            Episodes("tools/arithmetic", keep_variables=(name,))
    told: list[str] = []
    environment_of_an_environment(tmp_path, tmp_path / "seen", keep_variables=("HF_*", "NO_SUCH"), progress=told.append)
    assert told == ["keep_variables names NO_SUCH, of which nothing is set on this machine"]


def test_without_a_proxy_nothing_is_exempt(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        monkeypatch.delenv(name)
    assert not [name for name in program_variables() if name.lower().endswith("_proxy")]


STARTS = (
    "Popen",
    "create_subprocess_exec",
    "create_subprocess_shell",
    "StdioServerParameters",
    "check_output",
    "execve",
)
OURS = {
    "runtime/driver/ray_guard.py": "flowrl's guard",
    "runtime/driver/ray_start.py": "Ray's own services",
    "runtime/checkpoints/rundir.py": "git",
    "graph/gpu_links.py": "nvidia-smi",
    "graph/machine.py": "nvidia-smi",
    "commands/machine_findings.py": "nvidia-smi",
    "commands/tune/measuring_run.py": "flowrl run",
    "commands/gpu_check/bench.py": "modules of flowrl",
    "commands/gpu_check/gpu_check.py": "nvidia-smi, and modules of flowrl",
    "training/scoring_models.py": "a rank of a model",
    "nodes/sources/row_checks.py": "the policy's tokenizer, which may need a token of the hub",
    "wire/run_files.py": "the heir of a run's files, which gets next to nothing",
    "machine/orphans.py": "what its callers name, with the variables that they give",
    "agents/parser_trial.py": "vLLM's parsers, and the policy's tokenizer, which may need a token of the hub",
    "environments/tools/sandbox/sandbox_process.py": "a sandbox, whose variables are fixed (`_write_settings`)",
    "environments/tools/sandbox/sandbox_start.py": "the same",
    "testing/trial.py": "flowrl itself, which rebuilds the graph as a host does",
}
"""Modules that start programs of flowrl's own, or of the machine; what the policy writes gets nothing of the run."""


def test_every_foreign_program_gets_its_variables_from_one_function() -> None:
    for path in modules():
        starts = [
            node
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and (node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")) in STARTS
        ]
        starts += [
            node
            for node in nodes(path)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "run"
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "subprocess"
        ]
        if starts and str(path.relative_to(ROOT / "flowrl")) not in OURS:
            assert "program_variables" in path.read_text(encoding="utf-8"), f"{path} starts a program"
            assert all(any(word.arg == "env" for word in node.keywords) for node in starts), path
