"""`verifiers/PACKAGE`: an environment of the package verifiers, which itself asks the policy, over HTTP.

It is an agent's program rather than an environment: the node AgentProgram runs it, one process per episode. The only
action has, as JSON, the environment variables that lead to the episode's session at the endpoint. The observation has
the result as JSON: the reward and the metrics of the environment's rubric.

PACKAGE is a module, or a FILE.py, with the function `load_environment` that verifiers defines; options are its
arguments. The row's seed picks the example: for a held-out row one of those for evaluation, for another row one of
those for training.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from flowrl.environments.environment_class import import_package
from flowrl.environments.environment_row import EnvironmentName, EnvironmentRow
from flowrl.environments.protocol import Action, Env, Observation, Step
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import load_user_module, one_line

MODEL = "policy"
"""The endpoint's name of the model."""
LIMITS = ("limit_reached", "context_length_exceeded")
"""The endpoint's codes for a session at its limit: the rollout then ends, and keeps the reward that it has."""
NEEDED = (
    "the reward of verifiers is for rows of its own: take EnvironmentSource('verifiers/…') as the source of prompts"
)


class VerifiersEnv(Env):
    """One rollout. In a resumed run, its calls get the same replies as before."""

    @classmethod
    def load_maker(cls, name: EnvironmentName) -> Callable[[], VerifiersEnv]:
        """Load the environment with its examples, once for all episodes. Raises ConfigError."""
        # tqdm's progress bars start a thread, and a process with threads cannot fork the processes of episodes.
        import_package(name, "tqdm", distribution="tqdm").tqdm.monitor_interval = 0
        import_package(name, "verifiers", distribution="verifiers")
        environment = load_environment(name)
        examples = load_examples(name, environment)
        return lambda: cls(environment, examples)

    def __init__(self, environment: Any, examples: Mapping[bool, Any]) -> None:
        self._environment, self._examples = environment, examples

    async def reset(self, task: Mapping[str, Any], seed: int) -> Observation:
        row = task["options"].get("task", {})
        if not {"environment", "options", "seed"} <= row.keys():
            raise ValueError(NEEDED)
        asked = EnvironmentRow(row["environment"], row["options"], row["seed"])
        examples = self._examples[asked.held_out]
        self._example = dict(examples[asked.seed % len(examples)])
        return Observation()

    async def step(self, action: Action) -> Step:
        import openai

        try:
            access = json.loads(action.text)
        except ValueError:
            access = None
        if not isinstance(access, dict):
            raise ValueError(
                "environments of verifiers ask the policy themselves: play them with the node AgentProgram"
            )
        os.environ.update(access)
        direct = openai.DefaultAsyncHttpxClient(trust_env=False)  # the endpoint is never behind a proxy
        async with openai.AsyncOpenAI(http_client=direct) as client:
            found = await self._environment.run_rollout(self._example, client, MODEL, {})
        if found.get("error") is not None and not any(limit in str(found["error"]) for limit in LIMITS):
            raise RuntimeError(f"the rollout of verifiers failed: {found['error']}")
        metrics = {key: float(value) for key, value in (found.get("metrics") or {}).items()}
        return Step(Observation(json.dumps({"reward": float(found["reward"]), "metrics": metrics})), terminated=True)


def load_environment(name: EnvironmentName) -> Any:
    """What `load_environment` of the package, or of the file, returns."""
    if name.place.endswith(".py"):
        module = load_user_module(name.place, owner="environment")
    else:
        module = import_package(name, name.place.replace("-", "_"), distribution=name.place)
    if not hasattr(module, "load_environment"):
        raise ConfigError(
            f"environment {name.text!r}: {name.place} has no function load_environment, as verifiers needs"
        )
    try:
        return module.load_environment(**name.options)
    except Exception as problem:  # the boundary to the environment's code
        raise ConfigError(f"environment {name.text!r} cannot be loaded: {one_line(problem)}") from None


def load_examples(name: EnvironmentName, environment: Any) -> Mapping[bool, Any]:
    """The examples for evaluation (True) and for training (False)."""
    try:
        found = {True: environment.get_eval_dataset().to_list(), False: environment.get_dataset().to_list()}
    except Exception as problem:  # the boundary to the environment's code
        raise ConfigError(f"environment {name.text!r}: its examples cannot be read: {one_line(problem)}") from None
    if not all(found.values()):
        raise ConfigError(
            f"environment {name.text!r} has no examples for training, or none for evaluation; it needs both"
        )
    if kinds := {kind for rows in found.values() for row in rows for kind in list_media(row.get("prompt"))}:
        raise ConfigError(
            f"the examples of environment {name.text!r} have parts of the kind {', '.join(sorted(kinds))} in their "
            "prompts; images and other media are not supported: choose examples of text alone"
        )
    return found


def list_media(prompt: Any) -> Iterator[str]:
    """The kinds of parts other than text in the messages of an example."""
    for message in prompt if isinstance(prompt, list) else ():
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if isinstance(part, Mapping) and part.get("type", "text") != "text":
                yield str(part["type"])
