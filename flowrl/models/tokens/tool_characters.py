"""The tokenizer of `tiny_agent`: the one of `tiny`, with tokens for tools after all other tokens.

Its template writes as little as it can, because every character is a token: a tool is its name, and a call is
`<|call|>NAME{"argument":"value"}`. `response_template` does the reverse: it turns a reply into a message.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flowrl.models.tokens.characters import character_tokenizer

TOOL_TOKENS = ("<|tools|>", "<|call|>", "<|tool|>")
CHAT_TEMPLATE = (
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
    tokenizer = character_tokenizer(TOOL_TOKENS, CHAT_TEMPLATE)
    tokenizer.response_template = dict(RESPONSE_TEMPLATE)
    return tokenizer
