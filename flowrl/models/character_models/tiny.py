"""`tiny`: a character model of a third of a million weights, created here in about a minute.

With a task it is warm-started by SFT until it answers some held-out prompts, but not most, so that RL can improve it
within minutes. `tiny_teacher` trains longer, only on right answers, until it answers nearly all. `tiny_agent` can call
a calculator, and does not call it in two of three episodes.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from flowrl.machine.cache import Progress, cached_model
from flowrl.models.character_models.tool_traces import ToolUse
from flowrl.models.character_models.warm_start import Recipe, Thorough, warm_start
from flowrl.models.policy import CHARACTER_CONTEXT
from flowrl.tasks.task import Task

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4}
INITIAL_STD = 0.06
"""Three times the usual value: with 0.02 a model of this size may stay on a plateau for a minute."""
VERSIONS = {"tiny": 3, "tiny_teacher": 3, "tiny_agent": 1}
"""Increased when a change of the code results in another model."""

RECIPES = {"tiny": Recipe(), "tiny_teacher": Thorough(), "tiny_agent": ToolUse()}


def tiny_model(name: str, task: Task | None, progress: Progress) -> Path:
    """The cached directory of a character model, warm-started on `task` if there is one."""
    recipe: dict[str, Any] = {"version": VERSIONS[name], "shape": SHAPE, "std": INITIAL_STD}
    sft = RECIPES[name]
    if task is not None:
        recipe |= {"task": task.name, "system_prompt": task.system_prompt, "sft": dataclasses.asdict(sft)}

    def make(target: Path) -> None:
        tokenizer = sft.tokenizer()
        model = _random_model(tokenizer)
        if task is not None:
            warm_start(model, tokenizer, task, sft, lambda text: progress(f"{name}: {text}"))
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)

    return cached_model(name, recipe, make, progress)


def _random_model(tokenizer: Any) -> Any:
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=len(tokenizer),
        num_key_value_heads=SHAPE["num_attention_heads"],
        max_position_embeddings=CHARACTER_CONTEXT,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=INITIAL_STD,
        **SHAPE,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Qwen2ForCausalLM(config).float()
