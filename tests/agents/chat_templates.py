"""Every chat template of TRL's wheel, read from its files, with tokenizers that know their special tokens."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path
from typing import Any

from flowrl.models.tokens.characters import SPECIAL, character_tokenizer

SPECIAL_TOKEN = re.compile(r"<[^<>\s'\"{}]{1,40}>|\[/?[A-Z_]+\]")
ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds two numbers.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "string", "description": "Both, with a blank between."}},
            "required": ["a"],
        },
    },
}


def _wheel() -> Path:
    spec = importlib.util.find_spec("trl")
    assert spec is not None and spec.origin is not None, (
        "the package trl is missing, whose chat templates are tested: "
        "pip install --no-deps -r requirements/test-templates.txt"
    )
    return Path(spec.origin).parent


@functools.cache
def templates() -> dict[str, str]:
    """Name -> template."""
    files = sorted((_wheel() / "chat_templates").glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


@functools.cache
def response_templates() -> dict[str, Any]:
    """Name -> the wheel's `response_template`, of those that are written out in its source."""
    tree = ast.parse((_wheel() / "chat_template_utils.py").read_text(encoding="utf-8"))
    found = {}
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            try:
                found[ast.unparse(node.targets[0])] = ast.literal_eval(node.value)
            except ValueError:
                continue  # made of other names
    return found


@functools.cache
def merging_tokenizer() -> str:
    """A byte-level BPE trained on the templates, whose merges cross words, blanks and newlines, as JSON."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=1200, initial_alphabet=alphabet, show_progress=False)
    lines = [line for text in templates().values() for line in re.findall(r".{1,200}\n?", text)]
    core.train_from_iterator(lines, trainer)
    return str(core.to_str())


def merging() -> Any:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer.from_str(merging_tokenizer())
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


def characters() -> Any:
    return character_tokenizer()


def with_template(tokenizer: Any, template: str) -> Any:
    """`tokenizer` with the template and its special tokens."""
    from tokenizers import AddedToken

    found = sorted({*SPECIAL_TOKEN.findall(template), *SPECIAL})
    tokenizer.add_tokens([AddedToken(token, special=True, normalized=False) for token in found])
    tokenizer.add_special_tokens({"bos_token": "<s>", "eos_token": "</s>"})
    tokenizer.chat_template = template
    return tokenizer
