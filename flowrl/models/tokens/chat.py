"""Converts conversations to token ids with the model's own chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models.tokens.tool_form import plain_tools, tool_form, uses_tools

Messages = Sequence[Mapping[str, Any]]
"""Roles and contents, with everything that chat templates read: tool calls, tools' answers, reasoning."""
ReplyMessage = str | Messages
"""A response: text, or the turns that begin with the assistant's first one."""

TOKENIZER = "tokenizer.json"


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a model directory."""
    try:
        return _tokenizer_class(Path(model_dir)).from_pretrained(
            str(model_dir), local_files_only=True, trust_remote_code=trust_remote_code
        )
    except ImportError:
        raise  # a package is missing, and the files are fine
    except Exception as problem:  # the boundary to tokenizers, which raises Exception itself, and to transformers
        raise ConfigError(_not_loaded(Path(model_dir), problem)) from problem


def _not_loaded(model_dir: Path, problem: Exception) -> str:
    """Why a tokenizer cannot be loaded; names the file that is damaged, if one is."""
    why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
    of_tokenizer = model_dir / TOKENIZER
    for path in (of_tokenizer, model_dir / "tokenizer_config.json", model_dir / "config.json"):
        if path.is_file() and (defect := _defect(path)):
            return f"{path} is damaged ({defect}); put the file of the model there"
    if of_tokenizer.is_file() and type(problem) is Exception:  # what the package tokenizers raises
        return f"{of_tokenizer} is no tokenizer that can be loaded ({why}); put the file of the model there"
    return f"{model_dir} holds no tokenizer that can be loaded ({why}); put its tokenizer files there"


def _defect(path: Path) -> str:
    """Why the file is not one JSON object, "" if it is."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as problem:
        return str(problem)
    return "" if isinstance(content, dict) else f"a {type(content).__name__} where an object was needed"


def _tokenizer_class(model_dir: Path) -> Any:
    """The tokenizer class of the model's own type if its files name it; else AutoTokenizer, which determines the class.

    To do so, AutoTokenizer imports torch and all of transformers' model code, which takes more than half of the four
    seconds that a process without a model needs to start.
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
    """`messages` rendered as text by the tokenizer's chat template. Raises what the template raises."""
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
    """Renders turns for one tokenizer, with tools and an initial system message if they are given."""

    tokenizer: Any
    system_prompt: str = ""
    tools: Messages = ()

    def with_tools(self, tools: Messages) -> Chat:
        """This chat with these tools, if the conversation has any of its own."""
        return replace(self, tools=tools) if tools else self

    def prompt(self, turns: Messages) -> tuple[str, Int32]:
        """(text, ids) up to the start of the assistant's turn. Without a chat template: only the last turn's text."""
        if not self.tokenizer.chat_template:
            self._require_plain(turns)
            text = turns[-1]["content"]
            return text, np.asarray(self.tokenizer(text)["input_ids"], np.int32)
        text = self._template(turns, add_generation_prompt=True)
        return text, self._ids(text)

    def demonstration(self, turns: Messages, reply: ReplyMessage) -> tuple[Int32, Bool]:
        """(ids, mask) of a conversation that ends with `reply`; the mask marks every assistant turn and its end.

        The mask comes from incremental template prefixes, compared by id. Tools' answers are not marked.
        """
        return self._masked(turns, reply, first=0)

    def completion(self, turns: Messages, reply: ReplyMessage) -> tuple[Int32, Bool]:
        """Like `demonstration`, but the mask marks only the assistant's turns of `reply`, not earlier ones."""
        return self._masked(turns, reply, first=len(turns))

    def _masked(self, turns: Messages, reply: ReplyMessage, *, first: int) -> tuple[Int32, Bool]:
        """(ids, mask); the mask marks the assistant's turns from index `first` on."""
        replied = ({"role": "assistant", "content": reply},) if isinstance(reply, str) else tuple(reply)
        turns = [*turns, *replied]
        if not self.tokenizer.chat_template:
            self._require_plain(turns)
            return self._bare(turns)
        ids = self._ids(self._template(turns))
        mask = np.zeros(ids.size, np.bool_)
        for n in range(first, len(turns)):
            if turns[n]["role"] == "assistant":
                start = self._start(turns, n, ids)
                mask[start : self._end(turns, n, ids, start)] = True
        return self._trimmed(ids, mask)

    def _start(self, turns: Messages, n: int, ids: Int32) -> int:
        """Where the assistant's turn `n` begins in `ids`: after its generation prompt."""
        before = self._ids(self._template(turns[:n], add_generation_prompt=True))
        if _begins_with(ids, before):
            return before.size
        if n == len(turns) - 1:
            raise ConfigError(REWRITES)
        return self._start_by_mark(turns, n, ids)

    def _start_by_mark(self, turns: Messages, n: int, ids: Int32) -> int:
        """For templates that show earlier turns differently: a turn begins after the last generation prompt before its
        mark.

        If the generation prompt opens a thought, a template may leave the thought out of earlier turns. Such a turn
        begins where the thought would begin.
        """
        text, place, _ = self._seen(turns, n)
        asked = self._template(turns[:n])
        prompt = self._template(turns[:n], add_generation_prompt=True).removeprefix(asked)
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        head = prompt[: min((at for token in added if (at := prompt.find(token, 1)) > 0), default=len(prompt))]
        at = text.rfind(head, self._seen(turns, n - 1)[1] if n else 0, place)
        if at < 0 or not head:
            raise ConfigError(REWRITES)
        return self._size(ids, text[: at + len(prompt if text.startswith(prompt, at) else head)])

    def _end(self, turns: Messages, n: int, ids: Int32, start: int) -> int:
        """Where the assistant's turn `n`, which begins at `start`, ends in `ids`, the ids of the whole conversation."""
        until = self._ids(self._template(turns[: n + 1]))
        return self._end_alone(until, start) if _begins_with(ids, until) else self._end_by_mark(turns, n, ids)

    def _end_alone(self, until: Int32, start: int) -> int:
        """Where the last turn of `until` ends: after its last end token, or at the end of `until` if more than blanks
        follow."""
        found = np.flatnonzero(np.isin(until[start:], end_ids(self.tokenizer)))
        end = start + int(found[-1]) + 1 if found.size else until.size
        return until.size if self.tokenizer.decode(until[end:].tolist()).strip() else end

    def _end_by_mark(self, turns: Messages, n: int, ids: Int32) -> int:
        """For templates that write the last turn differently: the turn ends with an end token that both forms have."""
        text, place, alone = self._seen(turns, n)
        alike = _common(alone, text[place:])
        tokens = self.tokenizer.convert_ids_to_tokens(end_ids(self.tokenizer).tolist())
        length = max((at + len(token) for token in tokens if (at := alike.rfind(token)) >= 0), default=0)
        if not length:
            raise ConfigError(REWRITES)
        return self._size(ids, text[: place + length])

    def _seen(self, turns: Messages, n: int) -> tuple[str, int, str]:
        """(text of the conversation, position of a mark in turn `n`, what follows the mark if the turn is the last
        one).

        The mark follows the turn's text, or the name of its last call.
        """
        mark = _unused_mark(turns)
        marked = [*turns[:n], _marked(turns[n], mark), *turns[n + 1 :]]
        text, shown, alone = self._template(turns), self._template(marked), self._template(marked[: n + 1])
        if alone.count(mark) != 1 or shown.replace(mark, "", 1) != text:
            raise ConfigError(REWRITES)
        return text, shown.find(mark), alone.partition(mark)[2]

    def _size(self, ids: Int32, beginning: str) -> int:
        """The number of tokens of `beginning`, the text that `ids` begin with."""
        found = self._ids(beginning)
        if not _begins_with(ids, found):
            raise ConfigError(REWRITES)
        return found.size

    def _trimmed(self, ids: Int32, mask: Bool) -> tuple[Int32, Bool]:
        """Cut off what the template writes after the last trained token (usually a newline)."""
        end = int(np.flatnonzero(mask)[-1]) + 1
        return ids[:end], mask[:end]

    def _bare(self, turns: Messages) -> tuple[Int32, Bool]:
        prompt = self.prompt(turns[:-1])[1]  # as a rollout begins: with the tokenizer's begin token, if it adds one
        answer = np.append(self._ids(turns[-1]["content"]), np.int32(self.tokenizer.eos_token_id))
        mask = np.zeros(prompt.size + answer.size, np.bool_)
        mask[prompt.size :] = True
        return np.concatenate([prompt, answer]).astype(np.int32), mask

    def _require_plain(self, turns: Messages) -> None:
        if uses_tools(turns, self.tools):
            raise ConfigError(
                "the data have tools or their calls, and the model has no chat template that could show them; name a "
                "chat model, or a --chat-template that knows tools"
            )

    def _template(self, turns: Messages, *, add_generation_prompt: bool = False) -> str:
        own = bool(turns) and turns[0]["role"] == "system"
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt and not own else []
        told: Messages = [*system, *turns]
        if uses_tools(told, self.tools):
            form = tool_form(self.tokenizer)
            form.require(told, self.tools)
            told = form.formed(told)
        tools = plain_tools(self.tools)
        return render(self.tokenizer, told, add_generation_prompt=add_generation_prompt, tools=tools)

    def _ids(self, text: str) -> Int32:
        return token_ids(self.tokenizer, text)


REWRITES = (
    "the chat template rewrites earlier turns when later ones are added, so assistant turns cannot be found by token "
    "id; train the last turn alone where there is such an option (--assistant last), or use a template whose prefixes "
    "stay the same"
)


def _begins_with(ids: Int32, prefix: Int32) -> bool:
    return np.array_equal(ids[: prefix.size], prefix)


def _common(one: str, other: str) -> str:
    """The longest common prefix of both texts."""
    length = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


def _unused_mark(turns: Messages) -> str:
    text, mark = json.dumps([dict(turn) for turn in turns], ensure_ascii=False, default=str), "mark7q"
    while mark in text:
        mark += "q"
    return mark


def _marked(turn: Mapping[str, Any], mark: str) -> Mapping[str, Any]:
    """The turn with a mark after its text, or after the name of its last call."""
    if not turn.get("tool_calls"):
        return {**turn, "content": turn["content"] + mark}
    *others, last = turn["tool_calls"]
    function = {**last["function"], "name": last["function"]["name"] + mark}
    return {**turn, "tool_calls": (*others, {**last, "function": function})}


@functools.lru_cache(maxsize=8)
def end_ids(tokenizer: Any) -> Int32:
    """The ids of all special tokens; one of them ends a turn."""
    added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    return np.asarray(sorted({tokenizer.eos_token_id, *tokenizer.all_special_ids, *added}), np.int32)
