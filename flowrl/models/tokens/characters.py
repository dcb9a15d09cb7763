"""The tokenizers of `tiny` and `tiny_agent`: one token per byte, so one per ASCII character; decoding restores every
text exactly.

It uses the components of Qwen2's own tokenizer (byte-level BPE) without any merges. transformers builds
that class for every Qwen2 model directory, even if another tokenizer was saved there, and a word-level
tokenizer would silently lose blanks and newlines.

That of `tiny_agent` has tokens for tools after all other tokens. Its template writes as little as it can, because every
character is a token: a tool is its name, and a call is `<|call|>NAME{"argument":"value"}`. `response_template` does the
reverse: it turns a reply into a message.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SPECIAL = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def character_vocabulary(further: Sequence[str] = ()) -> dict[str, int]:
    """Every token with its id; `further` special tokens have the last ids."""
    from tokenizers import pre_tokenizers

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    return {token: index for index, token in enumerate((*SPECIAL, *pieces, *further))}


def character_tokenizer(further: Sequence[str] = (), chat_template: str = CHAT_TEMPLATE) -> Any:
    """A fast tokenizer, ready for `save_pretrained`."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import Qwen2Tokenizer

    core = Tokenizer(models.BPE(character_vocabulary(further), []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in (*SPECIAL, *further)])
    return Qwen2Tokenizer(
        tokenizer_object=core,
        pad_token="<|pad|>",
        eos_token="<|end|>",
        unk_token="<|pad|>",
        chat_template=chat_template,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


TOOL_TOKENS = ("<|tools|>", "<|call|>", "<|tool|>")
TOOL_CHAT_TEMPLATE = (
    "{% if tools %}<|tools|>"
    "{% for tool in tools %}{{ '' if loop.first else ',' }}{{ (tool.function or tool).name }}{% endfor %}"
    "<|end|>{% endif %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<|call|>{{ call.function.name }}{{ call.function.arguments | tojson(separators=(',', ':')) }}"
    "{% endfor %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
RESPONSE_TEMPLATE: Mapping[str, Any] = {
    "start_anchor": "<|assistant|>",
    "defaults": {"role": "assistant", "content": ""},
    "fields": {
        "tool_calls": {
            "open_pattern": r"<\|call\|>(?P<name>[^{<]*)",
            "close_pattern": r"<\|end\|>|(?=<\|call\|>)",
            "content": "json",
            "repeats": True,
            "transform": {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}},
        },
        "content": {"close": "<|end|>", "content_args": {"strip": False}},
    },
}
"""In the form that transformers defines; it raises ValueError for a call without valid JSON."""


def tool_tokenizer() -> Any:
    """A fast tokenizer, ready for `save_pretrained`."""
    tokenizer = character_tokenizer(TOOL_TOKENS, TOOL_CHAT_TEMPLATE)
    tokenizer.response_template = dict(RESPONSE_TEMPLATE)
    return tokenizer
