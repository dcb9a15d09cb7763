"""Converts conversations to token ids with the model's own chat template."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from flowrl.errors import ConfigError
from flowrl.messages import Bool, Int32
from flowrl.models.model_files import examine_json, read_json_if_valid
from flowrl.models.tokens.tool_form import cached_by_template, plain_value, show_reasoning, tool_form, uses_tools
from flowrl.tasks.rows import WEIGHT, without_weight

Messages = Sequence[Mapping[str, Any]]
"""Roles and contents, with everything that chat templates read: tool calls, tools' answers, reasoning."""
ReplyMessage = str | Messages
"""A response: text, or the turns that begin with the assistant's first one."""

TurnSpan = tuple[int, int]
"""Where a part of a text begins and ends, in characters."""

TOKENIZER = "tokenizer.json"
ANSWER = "probe7answer"
"""The text of the answer with which a template is tried."""
SHOWN = 40
"""Number of characters that an error shows of each of two texts that differ."""


class Unrendered(ConfigError):
    """A conversation cannot be rendered, or its assistant's turns cannot be found. The text says why, without the
    row."""


def load_tokenizer(model_dir: str | Path, *, trust_remote_code: bool = False) -> Any:
    """The Hugging Face tokenizer of a model directory. Raises ConfigError, which names the file that is damaged, if one
    is."""
    import transformers

    directory = Path(model_dir)
    saved, config = (read_json_if_valid(directory / name) for name in ("tokenizer_config.json", "config.json"))
    # AutoTokenizer finds out the class, for which it imports torch and all of transformers' model code: more than half
    # of the four seconds that a process without a model needs to start. The class of the model's own type is enough.
    own_class: Any = None
    if saved.get("backend") == "tokenizers" and "auto_map" not in saved:
        named = getattr(transformers, str(saved.get("tokenizer_class")), None)
        if getattr(named, "__module__", "").startswith(f"transformers.models.{config.get('model_type')}."):
            own_class = named
    try:
        chosen = own_class or transformers.AutoTokenizer
        return chosen.from_pretrained(str(directory), local_files_only=True, trust_remote_code=trust_remote_code)
    except ImportError:
        raise  # a package is missing, and the files are fine
    except Exception as problem:  # the boundary to tokenizers, which raises Exception itself, and to transformers
        why = (str(problem).strip().splitlines() or [type(problem).__name__])[0]
        text = f"{directory} holds no tokenizer that can be loaded ({why}); put its tokenizer files there"
        if (directory / TOKENIZER).is_file() and type(problem) is Exception:  # what the package tokenizers raises
            text = (
                f"{directory / TOKENIZER} is no tokenizer that can be loaded ({why}); put the file of the model there"
            )
        for name in (TOKENIZER, "tokenizer_config.json", "config.json"):
            if (directory / name).is_file() and (defect := examine_json(directory / name)[1]):
                text = f"{directory / name} is damaged ({defect}); put the file of the model there"
                break
        raise ConfigError(text) from problem


def render_chat(
    tokenizer: Any,
    messages: Messages,
    *,
    add_generation_prompt: bool = False,
    tools: Messages = (),
    in_parts: bool | None = None,
) -> str:
    """`messages` rendered as text by the tokenizer's chat template. Raises what the template raises.

    `in_parts`: texts are given as lists of parts; by default if the template takes no others.
    """
    told = [dict(message) for message in messages]
    if takes_parts(tokenizer) if in_parts is None else in_parts:
        for message in told:
            if isinstance(text := message.get("content"), str):
                message["content"] = [{"type": "text", "text": text}]
    return str(
        tokenizer.apply_chat_template(
            told,
            tools=[dict(tool) for tool in tools] or None,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
        )
    )


@cached_by_template
def takes_parts(tokenizer: Any) -> bool | None:
    """Whether the tokenizer's chat template shows the text of a message only if it is a list of parts, as templates of
    some vision models do. None if it shows no text at all."""
    asked, refused = [{"role": "user", "content": ANSWER}], 0
    for in_parts in (False, True):
        try:
            if ANSWER in render_chat(tokenizer, asked, add_generation_prompt=True, in_parts=in_parts):
                return in_parts
        except Exception:  # the boundary to the template, which is the model author's program
            refused += 1
    return False if refused == 2 else None


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

    def encode_prompt(self, turns: Messages) -> tuple[str, Int32]:
        """(text, ids) up to the start of the assistant's turn. Without a chat template: only the last turn's text.

        Raises Unrendered.
        """
        text = self.prompt_text(turns)
        return text, self._prompt_ids(text)

    def prompt_text(self, turns: Messages) -> str:
        """The text of `encode_prompt`."""
        if self.tokenizer.chat_template:
            return self._apply_template(turns, add_generation_prompt=True)
        self._require_plain(turns)
        return str(turns[-1]["content"])

    def encode_demonstration(self, turns: Messages, reply: ReplyMessage) -> tuple[Int32, Bool]:
        """(ids, mask) of a conversation that ends with `reply`; the mask marks every assistant turn and its end.

        The tokens are those of rollouts: the text up to an assistant's turn, with its generation prompt, and the turn
        with its end are tokenized apart. Tools' answers are not marked. Raises Unrendered.
        """
        return self._tokens_of(*self.find_turns(turns, reply, first=0))

    def encode_completion(self, turns: Messages, reply: ReplyMessage) -> tuple[Int32, Bool]:
        """Like `encode_demonstration`, but the mask marks only the assistant's turns of `reply`, not earlier ones."""
        return self._tokens_of(*self.find_turns(turns, reply, first=len(turns)))

    def encode_scored(self, turns: Messages, reply: ReplyMessage, *, sampled: bool = False) -> tuple[Int32, Bool]:
        """`encode_completion` as a reward model reads it, in training and in scoring: with one end token of the
        tokenizer behind the template's own end, where the score is.

        A reply that a policy has `sampled` may hold end tokens in its middle, which a row to be trained may not. Raises
        Unrendered for a turn of the reply with a weight: the score is of the whole reply.
        """
        if not isinstance(reply, str) and any(turn.get(WEIGHT) == 0 for turn in reply):
            raise Unrendered(f"a turn of the response has {WEIGHT} 0, but a reward model scores the whole response")
        ids, mask = self._tokens_of(*self.find_turns(turns, reply, first=len(turns), sampled=sampled))
        ended = self.close_response(ids)
        return ended, np.append(mask[: ended.size], np.ones(max(0, ended.size - mask.size), np.bool_))

    def close_response(self, token_ids: Int32) -> Int32:
        """The tokens of a prompt and its response, with the end that `encode_scored` gives a response, exactly once."""
        closing, eos = self._closing_text, self.tokenizer.eos_token_id
        ids = token_ids
        while ids.size and ids[-1] == eos:
            ids = ids[:-1]
        # A policy may have stopped anywhere in the end: what of it is there already is not written twice.
        there = next(n for n in range(closing.size, -1, -1) if np.array_equal(ids[ids.size - n :], closing[:n]))
        return np.append(ids[: ids.size - there], closing).astype(np.int32)

    @functools.cached_property
    def _closing_text(self) -> Int32:
        """What follows a response in `encode_scored`: the template's own end, and the tokenizer's end token."""
        eos = self.tokenizer.eos_token_id
        if eos is None:
            raise ConfigError(
                f"the tokenizer {self.tokenizer.name_or_path} has no end token, where a reward model's score is read; "
                "add eos_token to its files"
            )
        end = template_end(self.tokenizer) if self.tokenizer.chat_template else None
        written = continued_ids(self.tokenizer, end) if end else ()
        return np.asarray([*(one for one in written if one != eos), eos], np.int32)

    def find_turns(
        self, turns: Messages, reply: ReplyMessage, *, first: int, sampled: bool = False
    ) -> tuple[str, list[TurnSpan]]:
        """(text, spans) of a conversation that ends with `reply`: the text as the template renders it, and where in it
        each of the assistant's turns from index `first` on begins and ends. Raises Unrendered.

        Turns are found by what the template does to the text. Of what a row itself writes at the end of its turns, end
        tokens are left out, because the template writes one; a row with an end token in the middle of a turn, where
        generation would have stopped, is refused unless it was `sampled`.
        """
        replied = ({"role": "assistant", "content": reply},) if isinstance(reply, str) else tuple(reply)
        ends = end_texts(self.tokenizer)
        told = [*turns, *replied]
        for n, turn in enumerate(told[first:], first):
            if turn["role"] == "assistant" and isinstance(turn.get("content"), str):
                told[n] = {**turn, "content": without_ends(turn["content"], ends)}
        marked = [n for n in range(first, len(told)) if told[n]["role"] == "assistant" and told[n].get(WEIGHT) != 0]
        if not marked:
            raise Unrendered(f"every turn that would be trained has {WEIGHT} 0, so there is nothing to train")
        told = [without_weight(turn) for turn in told]
        if not sampled:
            require_no_end((str(told[n].get("content") or "") for n in marked), ends)
        if not self.tokenizer.chat_template:
            self._require_plain(told)
            asked, answer = self.prompt_text(told[:-1]), f"{told[-1]['content']}{self.tokenizer.eos_token}"
            return asked + answer, [(len(asked), len(asked) + len(answer))]
        text = self._apply_template(told)
        found = [(start := self._find_start(told, n, text), self._find_end(told, n, text, start)) for n in marked]
        shown, given = text[slice(*found[-1])], str(told[marked[-1]].get("content") or "")
        if not shown or (given.strip() and not without_ends(shown, ends).strip()):
            raise Unrendered("the chat template shows nothing of the answer, so there is nothing to train")
        return text, found

    def _tokens_of(self, text: str, spans: list[TurnSpan]) -> tuple[Int32, Bool]:
        """(ids, mask) of a rendered text up to its last span; the mask marks the spans."""
        parts: list[Int32] = []
        marks: list[Bool] = []
        at = 0
        for start, end in spans:
            before, answer, eos = text[at:start], text[start:end], self.tokenizer.eos_token
            parts += [continued_ids(self.tokenizer, before) if at else self._prompt_ids(before)]
            if self.tokenizer.chat_template:
                parts += [continued_ids(self.tokenizer, answer)]
            else:
                ids = continued_ids(self.tokenizer, answer.removesuffix(str(eos)))
                parts += [np.append(ids, np.int32(self.tokenizer.eos_token_id))]
            marks += [np.full(part.size, n == 1, np.bool_) for n, part in enumerate(parts[-2:])]
            at = end
        return np.concatenate(parts).astype(np.int32), np.concatenate(marks)

    def _prompt_ids(self, text: str) -> Int32:
        """The ids of a prompt; without a chat template, the tokenizer adds its begin token, if it has one."""
        if self.tokenizer.chat_template:
            return token_ids(self.tokenizer, text)
        return np.asarray(self.tokenizer(text)["input_ids"], np.int32)

    def _find_start(self, turns: Messages, n: int, text: str) -> int:
        """Where the assistant's turn `n` begins in `text`, the whole conversation: after its generation prompt."""
        before = self._apply_template(turns[:n], add_generation_prompt=True)
        if text.startswith(before):
            return len(before)
        if n == len(turns) - 1:
            raise Unrendered(
                f"the chat template rewrites earlier turns when the answer follows: {show_difference(before, text)}, "
                "which a policy that answers never sees; write the answer as the template does (with a thought, if the "
                "prompt begins one), set the template's values (--chat-template-kwargs), or use another template"
            )
        # The template shows earlier turns differently. The turn begins after the last generation prompt before its
        # mark. If the prompt opens a thought, which a template may leave out of earlier turns, it begins in its place.
        place, _ = self._seen_turn(turns, n, text)
        prompt = before.removeprefix(self._apply_template(turns[:n]))
        added = [str(token) for token in self.tokenizer.added_tokens_decoder.values()]
        head = prompt[: min((at for token in added if (at := prompt.find(token, 1)) > 0), default=len(prompt))]
        at = text.rfind(head, self._seen_turn(turns, n - 1, text)[0] if n else 0, place)
        if at < 0 or not head:
            raise Unrendered(rewritten_turn(before, text))
        return at + len(prompt if text.startswith(prompt, at) else head)

    def _find_end(self, turns: Messages, n: int, text: str, start: int) -> int:
        """Where the assistant's turn `n`, which begins at `start`, ends in `text`, the whole conversation."""
        until = self._apply_template(turns[: n + 1]) if n < len(turns) - 1 else text
        eos = str(self.tokenizer.eos_token)
        if not text.startswith(until):
            until = until.removesuffix(eos)  # which some templates write behind the last turn alone
        special = special_texts(self.tokenizer)
        if text.startswith(until):
            stripped = until.rstrip()
            end = len(stripped) if len(stripped) > start and stripped.endswith(special) else len(until)
        else:
            # The template writes the last turn differently. The turn ends with an end token that both forms have,
            # whatever blanks they leave before it.
            place, alone = self._seen_turn(turns, n, text)
            rest = text[place:].lstrip()
            alike = common_prefix(alone.lstrip(), rest)
            length = max((at + len(token) for token in special if (at := alike.rfind(token)) >= 0), default=0)
            if not length:
                raise Unrendered(rewritten_turn(self._apply_template(turns[: n + 1]), text))
            end = len(text) - len(rest) + length
        if n < len(turns) - 1 and not text[:end].endswith(special) and text.startswith(eos, end):
            return end + len(eos)  # a template that writes no end: the end token begins the next turn (GLM's <|user|>)
        return end

    def _seen_turn(self, turns: Messages, n: int, text: str) -> tuple[int, str]:
        """(position in `text` of a mark in turn `n`, what follows the mark if the turn is the last one).

        The mark follows the turn's text, with or without the blanks at its end, which some templates strip; or it
        follows the name of its last call.
        """
        known, mark = json.dumps([dict(turn) for turn in turns], ensure_ascii=False, default=str), "mark7q"
        while mark in known:
            mark += "q"
        if calls := turns[n].get("tool_calls"):
            function = {**calls[-1]["function"], "name": calls[-1]["function"]["name"] + mark}
            tried = [{**turns[n], "tool_calls": (*calls[:-1], {**calls[-1], "function": function})}]
        else:
            said = str(turns[n]["content"])
            kept = said.rstrip()
            contents = dict.fromkeys((said + mark, kept + mark + said.removeprefix(kept)))
            tried = [{**turns[n], "content": content} for content in contents]
        for marked_turn in tried:
            marked = [*turns[:n], marked_turn, *turns[n + 1 :]]
            shown, alone = self._apply_template(marked), self._apply_template(marked[: n + 1])
            if alone.count(mark) == 1 and shown.replace(mark, "", 1) == text:
                return shown.find(mark), alone.partition(mark)[2]
        raise Unrendered(rewritten_turn(self._apply_template(turns[: n + 1]), text))

    def _reasoned_turn(self, turns: Messages) -> Messages:
        """The turns with their reasoning where the template shows it. Raises Unrendered if it does not."""
        if (told := show_reasoning(self.tokenizer, turns)) is None:
            raise Unrendered(
                "a message has reasoning apart from its text, which the model's chat template does not show; "
                "--task.reasoning inline writes it before the text as <think>...</think>, --task.reasoning drop leaves "
                "it out"
            )
        return told

    def _require_plain(self, turns: Messages) -> None:
        self._reasoned_turn(turns)
        if uses_tools(turns, self.tools):
            raise ConfigError(
                "the data have tools or their calls, and the model has no chat template that could show them; name a "
                "chat model, or a --chat-template that knows tools"
            )

    def _apply_template(self, turns: Messages, *, add_generation_prompt: bool = False) -> str:
        own = bool(turns) and turns[0]["role"] == "system"
        system = [{"role": "system", "content": self.system_prompt}] if self.system_prompt and not own else []
        told = self._reasoned_turn([*system, *map(without_weight, turns)])
        if uses_tools(told, self.tools):
            form = tool_form(self.tokenizer)
            form.require_shown(told, self.tools)
            told = form.form_messages(told)
        tools = [plain_value(tool) for tool in self.tools]
        if takes_parts(self.tokenizer) is None:
            raise Unrendered(
                "the chat template shows nothing of what a message says; name a template that does with --chat-template"
            )
        try:
            return render_chat(self.tokenizer, told, add_generation_prompt=add_generation_prompt, tools=tools)
        except Exception as problem:  # the boundary to the template, which is the model author's program
            raise Unrendered(f"the chat template refuses it ({problem})") from problem


def rewritten_turn(before: str, text: str) -> str:
    """What a template does that shows `before`, the beginning of a conversation, differently in the whole `text`."""
    return (
        f"the chat template rewrites earlier turns when later ones are added: {show_difference(before, text)}, so the "
        "assistant's turns cannot be found; train the last turn alone where there is such an option (--assistant "
        "last), or use a template whose prefixes stay the same"
    )


def show_difference(before: str, text: str) -> str:
    same = len(common_prefix(before, text))
    return f"it shows {before[same : same + SHOWN]!r}, and then {text[same : same + SHOWN]!r}"


def without_ends(text: str, ends: tuple[str, ...]) -> str:
    """The text without end tokens at its end."""
    while end := next((end for end in ends if text.rstrip().endswith(end)), ""):
        text = text.rstrip().removesuffix(end)
    return text


def require_no_end(texts: Iterable[str], ends: tuple[str, ...]) -> None:
    """Raise Unrendered if one of the texts holds an end token."""
    for end in (end for text in texts for end in ends if end in text):
        raise Unrendered(
            f"an answer holds the end token {end!r} in its middle, where generation would stop; take it out of the "
            "answer, or divide the answer into turns"
        )


def common_prefix(one: str, other: str) -> str:
    """The longest common prefix of both texts."""
    length = next((n for n, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    return one[: min(len(one), len(other)) if length is None else length]


@functools.lru_cache(maxsize=8)
def special_texts(tokenizer: Any) -> tuple[str, ...]:
    """The texts of all special tokens, ascending by id; one of them ends a turn."""
    added = [index for index, token in tokenizer.added_tokens_decoder.items() if token.special]
    ids = sorted({tokenizer.eos_token_id, *tokenizer.all_special_ids, *added} - {None})
    return tuple(map(str, tokenizer.convert_ids_to_tokens(ids)))


@cached_by_template
def template_end(tokenizer: Any) -> str | None:
    """What the tokenizer's chat template writes after an answer, up to the token that ends the turn; "" if it writes no
    such token, None if it cannot be tried."""
    turns = [{"role": "user", "content": "probe7q"}, {"role": "assistant", "content": ANSWER}]
    try:
        text = render_chat(tokenizer, turns).rstrip()
    except Exception:  # the boundary to the template, which is the model author's program
        return None
    if ANSWER not in text:
        return None
    return text.rpartition(ANSWER)[2] if text.endswith(special_texts(tokenizer)) else ""


def template_next(tokenizer: Any) -> str:
    """What the tokenizer's chat template writes between an answer and the user's next message; "" if it cannot be
    tried."""
    asked = {"role": "user", "content": "probe7q"}
    try:
        text = render_chat(tokenizer, [asked, {"role": "assistant", "content": ANSWER}, asked])
    except Exception:  # the boundary to the template, which is the model author's program
        return ""
    return text.rpartition(ANSWER)[2].lstrip()


def end_texts(tokenizer: Any) -> tuple[str, ...]:
    """The tokens that end a turn: the tokenizer's end token, and the one with which its template ends an answer."""
    written = template_end(tokenizer) if tokenizer.chat_template else None
    found = (
        max((token for token in special_texts(tokenizer) if written.endswith(token)), key=len, default="")
        if written
        else ""
    )
    return tuple({token: None for token in (tokenizer.eos_token, found) if token})


def continued_ids(tokenizer: Any, text: str) -> Int32:
    """The ids of a text that goes on from tokens before it, with which it is not merged."""
    anchor = find_anchor(tokenizer)
    ids = token_ids(tokenizer, anchor + text)
    before = token_ids(tokenizer, anchor) if anchor else ids[:0]
    return ids[before.size :] if np.array_equal(ids[: before.size], before) else token_ids(tokenizer, text)


@functools.lru_cache(maxsize=8)
def find_anchor(tokenizer: Any) -> str:
    """What is put before a text that goes on from another one, and its tokens left out again: some tokenizers put a
    blank before every text. "" if this one does not, or if no anchor helps."""
    word = token_ids(tokenizer, "word").tolist()
    anchors = ("", str(tokenizer.eos_token or ""), "\n", ".")
    for anchor in anchors:
        before, ids = (token_ids(tokenizer, text).tolist() for text in (anchor, anchor + "word"))
        if ids[: len(before)] != before:
            continue
        alone = word + ids[len(before) :]
        text = str(tokenizer.decode(alone, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        if text.strip() == "wordword":
            return anchor
    return ""
