"""Converts conversations to token ids with the model's own chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32

Turns = Sequence[Mapping[str, str]]
Messages = Sequence[Mapping[str, Any]]
"""Turns with all that chat templates know: tool calls, tools' answers, reasoning."""


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a model directory."""
    try:
        return _tokenizer_class(Path(model_dir)).from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except (OSError, ValueError, KeyError) as problem:
        first_line = str(problem).strip().splitlines()[0]
        raise ConfigError(
            f"{model_dir} holds no tokenizer that can be loaded ({first_line}); put its tokenizer files there"
        ) from None


def _tokenizer_class(model_dir: Path) -> Any:
    """The tokenizer class of the model's own type if its files name it; else AutoTokenizer, which determines it.

    For that AutoTokenizer imports torch and all of transformers' model code, which takes more than half of the
    four seconds that a process without a model needs to start.
    """
    import transformers

    saved, config = (_json(model_dir / name) for name in ("tokenizer_config.json", "config.json"))
    if saved.get("backend") == "tokenizers" and "auto_map" not in saved:
        named = getattr(transformers, str(saved.get("tokenizer_class")), None)
        if getattr(named, "__module__", "").startswith(f"transformers.models.{config.get('model_type')}."):
            return named
    return transformers.AutoTokenizer


def _json(path: Path) -> dict[str, Any]:
    """The file's content; {} if the file is invalid, because loading the tokenizer gives a better error."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def render(tokenizer: Any, messages: Messages, *, add_generation_prompt: bool = False, tools: Messages = ()) -> str:
    """What the tokenizer's chat template makes of `messages`, as text; raises what the template raises."""
    return str(
        tokenizer.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    )


def token_ids(tokenizer: Any, text: str) -> Int32:
    """The ids of rendered text, in which the template has written all special tokens itself."""
    return np.asarray(tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)


@dataclass(frozen=True)
class Chat:
    """Renders turns for one tokenizer, with its tools and a system message first if they are given."""

    tokenizer: Any
    system_prompt: str = ""
    tools: Messages = ()

    def prompt(self, turns: Messages) -> tuple[str, Int32]:
        """(text, ids) up to the start of the assistant's turn. Without a chat template: only the last turn's text."""
        if not self.tokenizer.chat_template:
            text = turns[-1]["content"]
            return text, np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        text = self._template(turns, add_generation_prompt=True)
        return text, self._ids(text)

    def demonstration(self, turns: Messages, answer: str) -> tuple[Int32, Bool]:
        """(ids, mask) of a conversation that ends with `answer`; the mask marks every assistant turn and its end.

        The mask comes from incremental template prefixes, compared by id.
        """
        turns = [*turns, {"role": "assistant", "content": answer}]
        if not self.tokenizer.chat_template:
            return self._bare(turns)
        ids = self._ids(self._template(turns))
        mask = np.zeros(ids.size, np.bool_)
        for n, turn in enumerate(turns):
            if turn["role"] == "assistant":
                before = self._ids(self._template(turns[:n], add_generation_prompt=True))
                until = self._ids(self._template(turns[: n + 1]))
                _require_prefix(before, ids)
                mask[before.size : _end(until, ids, self.tokenizer.eos_token_id)] = True
        return self._trimmed(ids, mask)

    def completion(self, turns: Messages, answer: str) -> tuple[Int32, Bool]:
        """Like `demonstration`, but the mask marks only `answer` and its end, not earlier assistant turns."""
        ids, mask = self.demonstration(turns, answer)
        if self.tokenizer.chat_template:
            mask[: self.prompt(turns)[1].size] = False
        return ids, mask

    def _trimmed(self, ids: Int32, mask: Bool) -> tuple[Int32, Bool]:
        """Cut off what the template writes after the last trained token (usually a newline)."""
        end = int(np.flatnonzero(mask)[-1]) + 1
        return ids[:end], mask[:end]

    def _bare(self, turns: Messages) -> tuple[Int32, Bool]:
        prompt = self._ids(turns[-2]["content"])
        answer = np.append(self._ids(turns[-1]["content"]), np.int32(self.tokenizer.eos_token_id))
        mask = np.zeros(prompt.size + answer.size, np.bool_)
        mask[prompt.size :] = True
        return np.concatenate([prompt, answer]).astype(np.int32), mask

    def _template(self, turns: Messages, *, add_generation_prompt: bool = False) -> str:
        own = bool(turns) and turns[0]["role"] == "system"
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt and not own else []
        return render(self.tokenizer, [*system, *turns], add_generation_prompt=add_generation_prompt, tools=self.tools)

    def _ids(self, text: str) -> Int32:
        return token_ids(self.tokenizer, text)


def _require_prefix(prefix: Int32, ids: Int32) -> None:
    if not np.array_equal(ids[: prefix.size], prefix):
        raise ConfigError(
            "the chat template rewrites earlier turns when later ones are added, so assistant turns cannot be "
            "found by token id; use a template whose prefixes stay the same"
        )


def _end(until: Int32, ids: Int32, eos: int) -> int:
    """Where the mask of the assistant turn at the end of `until` stops: after its last end token."""
    _require_prefix(until, ids)
    ends = np.flatnonzero(until == eos)
    return int(ends[-1]) + 1 if ends.size else until.size
