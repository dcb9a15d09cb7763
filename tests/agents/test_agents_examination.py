"""What preflight says of chat templates, which of them take tools, and which are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from flowrl.agents import ChatTemplate, Conversation, ReplyParser, examine
from flowrl.agents.call_parser import ReplyParts, SampledText
from flowrl.environments.tools import Tools
from flowrl.errors import ConfigError
from flowrl.models import Policy, load_tokenizer, resolve
from flowrl.models.tokens.characters import character_tokenizer
from tests.agents.chat_templates import ADD, characters, merging, response_templates, templates, with_template
from tests.environments.tool_cases import add, every

NO_CALLS = "shows neither tools nor tool calls"
BASES = {
    "cohere": "wants user and assistant in turn",
    "cohere2": NO_CALLS,
    "deepseek_r1_distill": "does not end a reply with one call",
    "gemma": "wants user and assistant in turn",
    "gemma3": "wants user and assistant in turn",
    "idefics3": NO_CALLS,
    "lfm2": NO_CALLS,
    "llama3": NO_CALLS,
    "llava_next": "knows user and assistant alone",
    "phi3": NO_CALLS,
    "phi3_5": NO_CALLS,
    "qwen2_5_vl": NO_CALLS,
    "smolvlm": NO_CALLS,
}
"""Templates that are refused with tools, as are their variants for training, and why; without tools none is."""

REWRITING = {
    "deepseek_r1_distill",
    "deepseekv3",
    "diffusion_gemma",
    "glm4moe",
    "lfm2_2_5",
    "lfm2_2_5_v2",
    "lfm2_2_5_vl",
    "nemotron_3_5_lightning",
    "nemotron_3_nano",
    "nemotron_3_super",
    "nemotron_3_ultra",
    "qwen3",
    "qwen3_5_nothink",
    "qwen3_5_think",
    "qwen3_6",
    "qwen3_8",
}
NOT_FOR_TRAINING = {"qwen3", "qwen3_5_think", "qwen3_6"}
"""Rewriting templates whose variants for training keep what they are given."""


def tokenizer_of(name: str) -> Any:
    return with_template(characters(), templates()[name])


def base(name: str) -> str:
    return name.removesuffix("_training")


def rewriting(name: str) -> bool:
    return base(name) in REWRITING and (name == base(name) or base(name) not in NOT_FOR_TRAINING)


@pytest.mark.parametrize("name", templates())
def test_preflight_says_what_a_template_does(name: str) -> None:
    found = examine(tokenizer_of(name), [ADD])
    assert bool(found.rewrites) == rewriting(name)
    assert bool(found.no_tools) == (base(name) in BASES)
    assert (found.sequences > 1) == (found.repeated > 1) == bool(found.rewrites)
    said = str(found)
    assert ("rewrites earlier replies" in said) == rewriting(name)
    assert ("Tool calls cannot be fed: " in said) == bool(found.no_tools)
    assert ("does not show which tools there are" in said) == found.hides_tools == (base(name) in WITHOUT_DESCRIPTIONS)
    if found.no_tools:
        with pytest.raises(ConfigError, match="chat template"):
            ChatTemplate(tokenizer_of(name), [ADD]).boundary_before("tool", calls=True)


WITHOUT_DESCRIPTIONS = {"deepseekv3"}
"""Templates that take calls and answers, and leave it to the system prompt to say which tools there are."""


@pytest.mark.parametrize("name", sorted(name for name in templates() if base(name) not in BASES))
def test_tools_of_functions_are_shown(name: str) -> None:
    """With every type that a function's hints can have: templates read `type`, `nullable`, `enum` and `default`."""
    known = tokenizer_of(name)
    text = ChatTemplate(known, Tools([every, add]).descriptions).render_text([{"role": "user", "content": "a"}])
    shown = [part in text for part in ("every", "numbers", "Takes every type", "The second one")]
    assert set(shown) == {base(name) not in WITHOUT_DESCRIPTIONS}


PARSERS = {
    "qwen2_5": "qwen3_template",
    "qwen3": "qwen3_template",
    "llama3_1": "llama3_template",
    "gptoss": "gptoss_template",
    "gemma4": "gemma4_template",
}


@pytest.mark.parametrize("name", PARSERS)
def test_a_rendered_tool_call_is_parsed_back(name: str) -> None:
    tokenizer = tokenizer_of(name)
    tokenizer.response_template = response_templates()[PARSERS[name]]
    found = examine(tokenizer, [ADD])
    assert found.no_parsing == "" and "was parsed back by the tokenizer's response_template." in str(found)
    other = PARSERS["llama3_1" if name.startswith("qwen") else "qwen3"]
    tokenizer.response_template = response_templates()[other]
    assert "instead of {'name': 'add'" in examine(tokenizer, [ADD]).no_parsing


def test_a_parser_that_raises_is_quoted() -> None:
    def extract(sampled: SampledText) -> ReplyParts:
        raise ValueError("no call here")

    tokenizer = tokenizer_of("qwen3")
    assert "could not be read (ValueError: no call here)" in str(
        examine(tokenizer, [ADD], ReplyParser(tokenizer, extract))
    )
    assert "no response_template" in examine(tokenizer_of("qwen3"), [ADD]).no_parsing


def chat(content: str) -> str:
    return "{% for m in messages %}<|user|>{{ CONTENT }}<|end|>{% endfor %}".replace("CONTENT", content)


REFUSED = {
    "0 times instead of once": chat("m['role']"),
    "2 times instead of once": chat("m['content'] + m['content']"),
    "does not render a conversation": "{{ raise_exception('never') }}",
    "writes nothing between": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    "has no chat template": "",
}


@pytest.mark.parametrize("reason", REFUSED)
def test_a_template_without_a_boundary_is_refused(reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as refused:
        examine(with_template(characters(), REFUSED[reason]))
    assert any(change in str(refused.value) for change in ("use another template", "use a template", "name a chat"))


def test_a_boundary_inside_a_token_is_refused() -> None:
    plain = "{% for m in messages %}{{ m['content'] }}qqq{% endfor %}"
    tokenizer = with_template(merging(), plain)
    tokenizer.add_tokens(["7qqqq"])
    with pytest.raises(ConfigError, match="boundary cannot be found by id"):
        examine(tokenizer)


def test_a_rewriting_template_keeps_ids_of_what_it_keeps_and_makes_branches_of_the_rest() -> None:
    """qwen3 removes reasoning once a user has spoken again; the second reply has none and stays."""
    template = ChatTemplate(tokenizer_of("qwen3"))
    conversation = Conversation(template, history="template")
    split = np.concatenate([template.render_ids(text) for text in ("fo", "ur<|im_end|>")])
    for reply in (
        template.render_ids("<think>\nhm\n</think>\n\n4<|im_end|>"),
        split,
        template.render_ids("end<|im_end|>"),
    ):
        conversation.feed([{"role": "user", "content": "2+2?"}])
        conversation.context()
        conversation.sampled(reply, np.full(reply.size, -0.5), np.full(reply.size, 3))
    first, second = conversation.sequences()
    assert template.decode(first.token_ids).count("<think>") == 1 and first.policy_mask.sum() > split.size
    assert "<think>" not in template.decode(second.token_ids)
    assert template.decode(second.token_ids[second.policy_mask]) == "four<|im_end|>end<|im_end|>"
    assert (second.versions[second.policy_mask] == 3).all()


def test_phi3s_end_of_a_rendering_is_not_taken_for_history() -> None:
    template = ChatTemplate(tokenizer_of("phi3"))
    conversation = Conversation(template)
    conversation.feed([{"role": "user", "content": "a"}])
    assert template.decode(conversation.context()) == "<|user|>\na<|end|>\n<|assistant|>\n"
    conversation.sampled(template.render_ids("b"), [0.0], [0])  # cut off by a limit, without its end
    conversation.feed([{"role": "user", "content": "c"}])
    expected = "<|user|>\na<|end|>\n<|assistant|>\nb<|end|>\n<|user|>\nc<|end|>\n<|assistant|>\n"
    assert template.decode(conversation.context()) == expected


LINES = "{% for m in messages %}{{ m['content'] }}\n<|end|>{% endfor %}"


def test_a_separator_in_a_reply_is_not_its_end() -> None:
    """A reply that a limit cut off after a newline; the template's own newline and end token follow."""
    template = ChatTemplate(with_template(characters(), LINES))
    asked = [{"role": "user", "content": "a"}]
    said = {"role": "assistant", "content": "b\n"}
    after = template.ids_following([*asked, said], template.render_ids("b\n"), asked)
    assert template.decode(after) == "\n<|end|>a\n<|end|>"
    after = template.ids_following([*asked, said], template.render_ids("b\n<|end|>"), asked)
    assert template.decode(after) == "a\n<|end|>"


def test_a_call_that_is_written_in_another_way_ends_with_its_end_token() -> None:
    template = ChatTemplate(tokenizer_of("gptoss"), [ADD])
    call, answer = template.probe_call("1 2"), template.probe_answer("3")
    sampled = template.render_ids(' to=functions.add<|channel|>commentary json<|message|>{"a":"1 2" }<|call|>')
    after = template.decode(template.ids_following([{"role": "user", "content": "a"}, call], sampled, [answer]))
    assert after.startswith("<|start|>functions.add to=assistant") and after.endswith("<|end|><|start|>assistant")
    with pytest.raises(ConfigError, match="ends a reply with tool calls in its own way"):
        template.ids_following([{"role": "user", "content": "a"}, call], sampled[:-1], [answer])


def test_a_tokenizer_that_begins_text_with_a_blank_does_not_put_one_into_the_middle() -> None:
    from tokenizers import pre_tokenizers

    tokenizer = with_template(characters(), LINES)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)
    template = ChatTemplate(tokenizer)
    asked = [{"role": "user", "content": "a"}]
    after = template.ids_following([*asked, {"role": "assistant", "content": "b"}], template.render_ids("b"), asked)
    assert template.decode(after).startswith("\n<|end|>")


def test_what_cannot_be_is_refused() -> None:
    conversation = Conversation(ChatTemplate(character_tokenizer()))
    with pytest.raises(ConfigError, match="nothing was fed"):
        conversation.context()
    conversation.feed([{"role": "user", "content": "a"}])
    with pytest.raises(ConfigError, match="2 token ids, 1 logprobs and 2 versions"):
        conversation.sampled([9, 9], [0.0], [0, 0])
    with pytest.raises(ConfigError, match="neither 'append' nor 'template'"):
        Conversation(ChatTemplate(character_tokenizer()), history="whole")  # type: ignore[arg-type]
    assert conversation.sequences() == ()
    assert not conversation.context().flags.writeable


@pytest.mark.slow
@pytest.mark.parametrize(("length", "share"), [(8, 0.25), (32, 0.73)])
def test_smollm2_would_re_tokenize_many_sequences_differently(length: int, share: float) -> None:
    """How often text is no identity: random ids, decoded and tokenized again."""
    tokenizer = load_tokenizer(resolve(Policy("smollm2")))
    words = [n for n in range(len(tokenizer)) if n not in tokenizer.added_tokens_decoder]
    ids = np.random.default_rng(0).choice(words, (4000, length)).tolist()
    again = tokenizer(tokenizer.batch_decode(ids, clean_up_tokenization_spaces=False))["input_ids"]
    assert np.mean([a != b for a, b in zip(ids, again, strict=True)]) == pytest.approx(share, abs=0.03)
