"""What Ask ports ask of the real vLLM: conversations, schemas, entropies and the likeliest tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from flowrl.messages import no_ids
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import ReplySchema, Sampling
from tests.stack.live_generator import Live

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(400)]
GREEDY = Sampling(temperature=0.0, max_tokens=12)
MEASURED = Sampling(max_tokens=16, entropy=True, top_logprobs=5, ignore_eos=True)


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    made = Live(tmp_path_factory.mktemp("policy"), tied=True)
    made.train()
    made.do(made.held(0))
    yield made
    made.close()


def ask(live: Live, number: int, **fields: Any) -> Reply:
    turn = Turn(f"a/{number}", f"s{number}", "g", 0, 0, 1, number, no_ids(), 64, trained=False, sampling=GREEDY)
    return live.do(live.rig.ask("turns", replace(turn, **fields)))


def text_of(live: Live, reply: Reply) -> str:
    return str(live.generator._sampler.tokenizer.decode(reply.token_ids.tolist(), skip_special_tokens=True))


def test_a_reply_has_the_form_of_its_schema(live: Live) -> None:
    messages = ({"role": "user", "content": "which?"},)
    for number, choice in enumerate((("yes", "no"), ("A", "B", "C"))):
        reply = ask(live, number, messages=messages, schema=ReplySchema(choice=choice))
        assert text_of(live, reply) in choice
    digits = ask(live, 10, messages=messages, schema=ReplySchema(regex="[0-9]{3}"))
    assert len(text_of(live, digits)) == 3 and text_of(live, digits).isdecimal()
    told = ask(live, 11, messages=messages, schema=ReplySchema(json={"type": "string", "enum": ["yes", "no"]}))
    assert json.loads(text_of(live, told)) in ("yes", "no")


def test_the_context_of_messages_is_what_the_reply_continues(live: Live) -> None:
    rendered = ask(live, 20, messages=({"role": "user", "content": "1+1="},))
    given = ask(live, 21, token_ids=rendered.context_ids)
    assert rendered.context_ids.size > 0 and given.token_ids.tolist() == rendered.token_ids.tolist()


def test_entropies_are_those_of_the_model(live: Live) -> None:
    import torch

    context = np.arange(20, 30, dtype=np.int32)
    reply = ask(live, 30, token_ids=context, sampling=MEASURED)
    ids = np.concatenate([context, reply.token_ids])
    with torch.no_grad():
        logits = live.model(torch.tensor(ids[None].astype(np.int64))).logits[0, len(context) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1).numpy()
    exact = -(np.exp(logprobs) * logprobs).sum(axis=1)
    likeliest = np.sort(logprobs, axis=1)[:, ::-1]
    rest = 1 - np.exp(likeliest[:, :20]).sum(axis=1)
    found = reply.columns["entropy"]
    assert found.shape == (16,) and (found <= exact + 1e-3).all()
    assert (exact - found <= rest * np.log(logprobs.shape[1] - 20) + 1e-3).all() and rest.max() > 1e-3
    assert np.abs(reply.columns["top_logprobs"] - likeliest[:, :5]).max() < 1e-3
    assert reply.columns["top_token_ids"].tolist() == np.argsort(-logprobs, axis=1, kind="stable")[:, :5].tolist()
    own = logprobs[np.arange(16), reply.token_ids]
    assert np.abs(reply.behavior_logprobs - own).max() < 1e-3
