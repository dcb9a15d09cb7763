"""Nodes that hold a model or make samples of answers: the reference and the demonstrations."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from flowrl.errors import ConfigError
from flowrl.messages import Prompt
from flowrl.models import Policy, resolve
from flowrl.nodes import Demonstrations, PromptSource, Reference
from flowrl.tasks import Task
from flowrl.testing import run_node, sample

TASK = Task("arithmetic:max_value=3")


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
def test_the_reference_gives_the_models_logprobs_at_policy_tokens() -> None:
    import torch
    from transformers import AutoModelForCausalLM

    given = [sample(0, response=4), sample(1, response=1), sample(2, response=7), sample(3, response=2)]
    reference = Reference(Policy("tiny"), temperature=2.0, token_budget=2 * len(given[2].token_ids))
    found = run_node(reference, {"rollouts": given}, timeout_s=100).sent("referenced")
    found.sort(key=lambda one: [sample.sample_id for sample in given].index(one.sample_id))
    model = AutoModelForCausalLM.from_pretrained(resolve(Policy("tiny")))
    for before, after in zip(given, found, strict=True):
        ids = torch.from_numpy(before.token_ids.astype(np.int64))[None]
        with torch.no_grad():
            logprobs = torch.log_softmax(model(ids).logits[0].double() / 2.0, -1)
        expected = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
        np.testing.assert_allclose(after.ref_logprobs[1:], np.where(before.policy_mask[1:], expected, 0.0), atol=1e-5)
        assert after.ref_logprobs[0] == 0.0


def prompts(task: Task) -> list[Prompt]:
    return run_node(PromptSource(task, Policy("tiny")), name="prompts").sent("prompts")


def test_a_demonstration_is_the_prompt_with_its_answer_trained() -> None:
    from flowrl.models import load_tokenizer

    asked = prompts(TASK)
    record = run_node(Demonstrations(TASK, Policy("tiny")), {"prompts": asked})
    groups = record.sent("groups")
    tokenizer = load_tokenizer(resolve(Policy("tiny")))
    assert len(groups) == len(asked)
    for prompt, group in zip(asked, groups, strict=True):
        (made,) = group.samples
        assert made.sample_id == prompt.sample_id
        np.testing.assert_array_equal(made.token_ids[: made.prompt_tokens], prompt.token_ids)
        assert tokenizer.decode(made.token_ids[made.policy_mask]) == f"{prompt.columns['answer']}<|end|>"
        assert made.response_tokens == len(str(prompt.columns["answer"])) + 1
        assert set(made.versions) == {-1}, "no version has sampled it, so none is older than its admission"
    assert [event[0] for event in record.ledger] == ["generated"] * len(asked)


def test_long_demonstrations_are_dropped_with_a_reason() -> None:
    node, asked = Demonstrations(TASK, Policy("tiny"), max_tokens=3), prompts(TASK)
    record = run_node(node, {"prompts": asked[1:]})
    assert not record.sent("groups")
    assert {one.reason for one in record.lost} == {"too_long"}
    with pytest.raises(ConfigError, match=rf"all {len(asked)} conversations of .* are longer than max_tokens = 3"):
        run_node(Demonstrations(TASK, Policy("tiny"), max_tokens=3), {"prompts": asked})


def test_rows_without_an_answer_are_refused_before_the_run(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{n}"}}' for n in range(20)))
    with pytest.raises(ConfigError, match="have no answer to learn from"):
        Demonstrations(Task(str(path)), Policy("tiny")).preflight()


def test_settings_out_of_range_are_problems() -> None:
    assert len(Reference(Policy("tiny"), temperature=0).check(None)) == 1
    assert len(Demonstrations(TASK, Policy("tiny"), max_tokens=1).check(None)) == 1
