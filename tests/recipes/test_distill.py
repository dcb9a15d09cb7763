"""Distillation: advantages against their formula and expected gradient, the teacher's nodes, vocabularies."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flowrl.errors import ConfigError, FlowrlError
from flowrl.messages import Sample, Trainable
from flowrl.models import Policy, require_same_vocabulary, resolve, tokenizer_of
from flowrl.models.tokens.characters import character_vocabulary
from flowrl.models.tokens.vocabulary import read_vocabulary, untold_vocabulary, vocabulary_problem
from flowrl.nodes import Teacher, TeacherAdvantage, Trainer
from flowrl.nodes.scoring.teacher import describe_bad_text, scored_by_teacher, shown_before
from flowrl.testing import lost, run_node, sample, scored
from flowrl.training.advantages import distillation_advantages
from flowrl.training.loss.loss_formulas import policy_loss
from flowrl.training.loss.objective import LossInputs, Totals
from flowrl.training.loss.token_objectives import ReverseKL
from flowrl.training.model.logprobs import Taught, chunked_logprobs
from flowrl.training.model.policy_model import OutputLayer, load_output_layer
from flowrl.training.model.row_layout import lay_out


def taught(member: int, *teacher: float) -> Sample:
    """A rollout whose policy tokens have the behavior logprob −0.5, and these under the teacher."""
    logprobs = np.array([0.0, 0.0, 0.0, *teacher], np.float32)
    return sample(member, response=len(teacher), teacher_logprobs=logprobs)


def test_each_token_has_its_own_advantage_and_no_other() -> None:
    mask = np.array([False, True, True, False, True])
    teacher = np.array([9.0, -1.0, -0.25, 9.0, -3.0], np.float32)
    behavior = np.array([0.0, -2.0, -0.5, 0.0, -1.0], np.float32)
    found = distillation_advantages(teacher, behavior, mask)
    np.testing.assert_allclose(found, [0.0, 1.0, 0.25, 0.0, -2.0])


def test_the_expected_gradient_is_that_of_the_reverse_kl() -> None:
    """Summed over every token with its probability, on a categorical of five."""
    generator = torch.Generator().manual_seed(0)
    logits_V, teacher_V = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    logits_V.requires_grad_()
    log_p_V, log_q_V = logits_V.log_softmax(-1), teacher_V.log_softmax(-1)
    (exact_V,) = torch.autograd.grad((log_p_V.exp() * (log_p_V - log_q_V)).sum(), logits_V, retain_graph=True)

    fixed_V, every_V = log_p_V.detach(), np.ones(5, np.bool_)
    advantages_V = torch.from_numpy(distillation_advantages(log_q_V.numpy(), fixed_V.numpy(), every_V)).double()
    loss = torch.zeros((), dtype=torch.float64)
    for token in range(5):
        one = [tensor_V[token].view(1, 1) for tensor_V in (log_p_V, fixed_V, advantages_V, torch.ones(5))]
        loss = loss + fixed_V[token].exp() * policy_loss(*one)[0]
    (expected_V,) = torch.autograd.grad(loss, logits_V)
    torch.testing.assert_close(expected_V, exact_V, atol=1e-6, rtol=1e-6)


def test_the_reward_is_the_mean_distance_to_the_teacher() -> None:
    teacher = np.array([0.0, 0.0, 0.0, -1.0, -0.25], np.float32)
    found = scored_by_teacher(sample(0, response=2), teacher)
    assert found.reward == found.raw_reward == pytest.approx((-0.5 + 0.25) / 2)
    assert found.teacher_logprobs is teacher


@pytest.mark.parametrize("negate", [False, True])
def test_groups_carry_the_advantages_of_their_tokens(negate: bool) -> None:
    given = [scored_by_teacher(s, s.teacher_logprobs) for s in (taught(0, -1.0, -0.25), taught(1, -0.5))]
    record = run_node(TeacherAdvantage(size=4, negate=negate), {"scored": [*given, lost(2), lost(3)]})
    (group,) = record.sent("groups")
    sign = -1 if negate else 1
    assert group.group_size == 4 and record.made_from("groups") == [tuple(given)]
    np.testing.assert_allclose(group.samples[0].advantages, np.array([0, 0, 0, -0.5, 0.25]) * sign)
    np.testing.assert_allclose(group.samples[1].advantages, np.zeros(4))


def test_samples_that_no_teacher_saw_are_refused() -> None:
    node = TeacherAdvantage(size=4)
    with pytest.raises(ConfigError, match="connect a Teacher node"):
        run_node(node, {"scored": [scored(0, 1.0), *(lost(member) for member in (1, 2, 3))]})


# A teacher that is shown something


@pytest.fixture(scope="module")
def tiny() -> tuple[Any, Any]:
    """(transformers' model, tokenizer) of `tiny`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(resolve(Policy("tiny")), dtype=torch.float32), tokenizer_of(
        Policy("tiny")
    )


def answered(tokenizer: Any, member: int, answer: str) -> Sample:
    """A rollout of a prompt of the arithmetic task, whose row has an answer."""
    asked = tokenizer("<|user|>7+5=<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    token_ids = np.array([*asked, *tokenizer("12", add_special_tokens=False)["input_ids"]], np.int32)
    mask = np.arange(token_ids.size) >= len(asked)
    return sample(
        member,
        token_ids=token_ids,
        policy_mask=mask,
        behavior_logprobs=np.where(mask, -0.5, 0.0).astype(np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        prompt_tokens=len(asked),
        columns={"answer": answer},
    )


def test_a_teacher_reads_what_it_is_shown_before_the_sample(tiny: tuple[Any, Any]) -> None:
    """Its logprobs and hidden states are those of one text: what it is shown, rendered, and the sample."""
    model, tokenizer = tiny
    given = [answered(tokenizer, 0, "12"), answered(tokenizer, 1, "13")]
    node = Teacher(Policy("tiny"), student=Policy("tiny"), temperature=0.8, exact=True, shown="Answer {answer}!")
    found = {one.sample_id: one for one in run_node(node, {"rollouts": given}).sent("scored")}
    for one in given:
        text = f"<|system|>Answer {one.columns['answer']}!<|end|>"
        before = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids = torch.tensor([[*before, *one.token_ids.tolist()]])
        with torch.no_grad():
            outputs = model(input_ids=ids, output_hidden_states=True)
        log_p = (outputs.logits[0] / 0.8).log_softmax(-1)
        places = [len(before) + t for t in range(one.token_ids.size) if one.policy_mask[t]]
        expected = [float(log_p[t - 1, ids[0, t]]) for t in places]
        taught_by = found[one.sample_id]
        assert taught_by.teacher_logprobs[one.policy_mask].tolist() == pytest.approx(expected, abs=1e-5)
        assert not taught_by.teacher_logprobs[~one.policy_mask].any()
        hidden = outputs.hidden_states[-1][0, [t - 1 for t in places]]
        np.testing.assert_allclose(taught_by.teacher_hidden, hidden.numpy(), atol=1e-5)
    first, second = (found[one.sample_id].teacher_logprobs for one in given)
    assert np.abs(first - second).max() > 1e-4, "what is shown matters"


class Beginning:
    """A tokenizer of bytes without a chat template, whose texts begin with token 0."""

    chat_template = None
    bos_token_id = 0

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [0, *text.encode()]}


def test_a_token_that_begins_texts_comes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    node = Teacher(Policy("tiny"), student=Policy("tiny"), shown="{answer}")
    seen = []

    def score_items(_: object, items: Any, temperature: float) -> list[Any]:
        seen.extend(items)
        return [(np.arange(tokens.size, dtype=np.float32), None) for tokens, _ in items]

    monkeypatch.setattr(node, "score_items", score_items)
    node._tokenizer = Beginning()
    one = sample(0, response=2, columns={"answer": "A"})
    assert one.token_ids[0] == 0
    ((logprobs, _),) = node._judge_samples([one])
    ((tokens, mask),) = seen
    assert tokens.tolist() == [0, 65, *one.token_ids[1:].tolist()]
    assert mask.tolist() == [False, False, *one.policy_mask[1:].tolist()]
    assert logprobs.tolist() == [1.0, 2.0, 3.0, 4.0, 5.0]


def test_a_row_without_the_column_is_named() -> None:
    with pytest.raises(ConfigError, match="the row of sample g:0 has no column 'answer'; it has hint"):
        shown_before(sample(0, columns={"hint": "x"}), "{answer}", Beginning())


@pytest.mark.parametrize(
    ("shown", "says"),
    [("{answer", "expected '}' before end of string; write"), ("{}", "names no column of a row"), ("{a.b}", "{a.b}")],
)
def test_texts_with_wrong_braces_are_problems_of_the_check(shown: str, says: str) -> None:
    (problem,) = Teacher(Policy("tiny"), student=Policy("tiny"), shown=shown).check(None)
    assert says in problem
    assert describe_bad_text("an answer: {answer}, {{as it is}}") is None


# The whole distribution


def taught_case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Taught]:
    """(hidden, weight, targets, teacher): five places, a student of width 4 and a teacher of width 6, seven tokens."""
    random = torch.Generator().manual_seed(1)
    draw = [torch.randn(*shape, generator=random, dtype=dtype) for shape in ((5, 4), (7, 4), (5, 6), (7, 6), (7,))]
    targets = torch.randint(7, (5,), generator=random)
    return draw[0].requires_grad_(), draw[1].requires_grad_(), targets, Taught(draw[2], draw[3], draw[4])


@pytest.mark.parametrize("logits_bytes", [1, 2 * 7 * 8, 1 << 20], ids=["one place a chunk", "two", "one chunk"])
def test_the_relative_entropy_is_the_reverse_kl_and_so_is_its_gradient(logits_bytes: int) -> None:
    hidden, weight, targets, teacher = taught_case()
    upstream = torch.linspace(-1.0, 2.0, 5, dtype=torch.float64)
    log_p = (hidden @ weight.T / 2.0).log_softmax(-1)
    log_q = ((teacher.hidden_NK @ teacher.weight_VK.T + teacher.bias_V) / 2.0).log_softmax(-1)
    kl = (log_p.exp() * (log_p - log_q)).sum(-1)
    expected = torch.autograd.grad((upstream * -kl).sum(), (hidden, weight))

    logprobs, entropies = chunked_logprobs(
        hidden, weight, None, targets, temperature=2.0, entropy_gradient=True, taught=teacher, logits_bytes=logits_bytes
    )
    torch.testing.assert_close(-entropies, kl.detach(), atol=1e-9, rtol=1e-9)
    torch.testing.assert_close(logprobs, log_p.detach().gather(-1, targets[:, None])[:, 0])
    found = torch.autograd.grad((upstream * entropies).sum(), (hidden, weight))
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)


def test_both_gradients_pass_together_with_a_teacher() -> None:
    hidden, weight, targets, teacher = taught_case()

    def function(h: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        logprobs, entropies = chunked_logprobs(h, w, None, targets, entropy_gradient=True, taught=teacher)
        return (logprobs * 0.3 + entropies).sum()

    assert torch.autograd.gradcheck(function, (hidden, weight))


@pytest.mark.parametrize(("aggregation", "expected"), [("token", (1 + 2 + 6) / 3), ("sequence", (1.5 + 6) / 2)])
@pytest.mark.parametrize("negate", [False, True])
def test_the_loss_is_the_mean_reverse_kl(aggregation: str, expected: float, negate: bool) -> None:
    mask = torch.tensor([[True, True], [True, False]])
    entropies = -torch.tensor([[1.0, 2.0], [6.0, 99.0]])
    empty = torch.zeros(2, 0)
    seen = LossInputs(
        empty, entropies, empty, mask, {}, Totals(3, 2), empty, torch.zeros(2), torch.zeros(0, 2, dtype=torch.long)
    )
    loss, stats = ReverseKL(aggregation=aggregation, negate=negate).loss(seen)
    assert float(loss) == pytest.approx(-expected if negate else expected)
    assert float(stats["reverse_kl"]) == pytest.approx(3.0)


def test_the_exact_objective_says_what_it_needs() -> None:
    with pytest.raises(ConfigError, match="choose token or sequence"):
        ReverseKL(aggregation="constant")
    bare = Trainable.of(scored(0, 1.0), np.zeros(5))
    with pytest.raises(FlowrlError, match="Teacher node with exact=True"):
        ReverseKL().columns(bare)
    (problem,) = Trainer(Policy("tiny"), objective=ReverseKL()).check(None)
    assert "ReverseKL and a teacher= go together" in problem
    (problem,) = Trainer(Policy("tiny"), teacher=Policy("tiny_teacher")).check(None)
    assert "give both, or neither" in problem


def test_rows_carry_the_hidden_states_of_their_samples_in_order() -> None:
    layer = OutputLayer(torch.zeros(7, 2), None)
    given = [taught(0, -1.0, -0.25), taught(1, -0.5)]
    samples = [
        Trainable.of(
            scored_by_teacher(s, s.teacher_logprobs, np.full((s.response_tokens, 2), n, np.float32)), np.zeros(5)
        )
        for n, s in enumerate(given)
    ]
    rows = lay_out([s.token_ids for s in samples], [s.policy_mask for s in samples], layout="padded")
    found = layer.add_teacher(rows, samples).taught
    assert found is not None
    torch.testing.assert_close(found.hidden_NK, torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 1.0]]))
    assert layer.add_teacher(rows, []) is rows, "padding has no teacher"


# Vocabularies


def tokenizer_dir(path: Path, pieces: object, added: tuple[tuple[str, int], ...] = ()) -> Policy:
    path.mkdir()
    tokens = [{"id": index, "content": content} for content, index in added]
    (path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": pieces}, "added_tokens": tokens}))
    return Policy(str(path))


def test_vocabularies_are_read_from_the_files(tmp_path: Path) -> None:
    plain = tokenizer_dir(tmp_path / "bpe", {"a": 0, "b": 1}, (("<end>", 2),))
    unigram = tokenizer_dir(tmp_path / "unigram", [["a", -1.0], ["b", -2.5]], (("<end>", 2),))
    assert read_vocabulary(plain) == read_vocabulary(unigram) == {"a": 0, "b": 1, "<end>": 2}
    assert vocabulary_problem(plain, unigram) is None
    assert read_vocabulary(Policy(str(tmp_path / "nowhere"))) is None


def test_unequal_vocabularies_are_refused_by_check(tmp_path: Path) -> None:
    student = tokenizer_dir(tmp_path / "student", {"a": 0, "b": 1, "c": 2})
    teacher = tokenizer_dir(tmp_path / "teacher", {"a": 0, "c": 1, "b": 2})
    (problem,) = Teacher(teacher, student=student).check(None)
    assert "(3 tokens)" in problem and "first in 'b': id 1 and id 2" in problem
    assert Teacher(student, student=student).check(None) == []
    (problem,) = Teacher(teacher, student=Policy("tiny")).check(None)
    assert f"tiny ({len(character_vocabulary())} tokens)" in problem
    (problem,) = Teacher(Policy("smollm2"), student=Policy("tiny")).check(None)
    assert "tiny and smollm2 have different tokenizers" in problem
    assert untold_vocabulary(student, Policy("smollm2")) and not untold_vocabulary(student, teacher)


def test_the_tiny_models_speak_one_language() -> None:
    assert Teacher(Policy("tiny_teacher"), student=Policy("tiny")).check(None) == []
    assert len(character_vocabulary()) == 261


def test_temperature_is_checked() -> None:
    (problem,) = Teacher(Policy("tiny"), student=Policy("tiny"), temperature=0.0).check(None)
    assert "temperature is 0.0" in problem


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.mark.slow
def test_the_teacher_scores_the_students_tokens(cache: object) -> None:
    from transformers import AutoModelForCausalLM

    from flowrl.models import resolve

    given = sample(0, response=4)
    node = Teacher(Policy("tiny"), student=Policy("tiny"), temperature=2.0)
    record = run_node(node, {"rollouts": [given]}, timeout_s=100)
    (found,) = record.sent("scored")
    ids = torch.from_numpy(given.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits_TV = AutoModelForCausalLM.from_pretrained(resolve(Policy("tiny")))(ids).logits[0].double()
    logprobs = torch.log_softmax(logits_TV / 2.0, -1)[:-1].gather(1, ids[0, 1:, None])[:, 0].numpy()
    np.testing.assert_allclose(found.teacher_logprobs[3:], logprobs[2:], atol=1e-5)
    assert found.reward == pytest.approx(logprobs[2:].mean() + 0.5, abs=1e-5)
    assert record.events("scored") == [(given.sample_id, found.reward, found.scored_s)]
    assert found.teacher_hidden is None


@pytest.mark.slow
def test_hidden_states_and_output_layer_give_the_teachers_distribution(cache: object) -> None:
    from transformers import AutoModelForCausalLM

    from flowrl.models import resolve

    path, given = resolve(Policy("tiny")), sample(0, response=4)
    node = Teacher(Policy("tiny"), student=Policy("tiny"), exact=True)
    scored_samples = run_node(node, {"rollouts": [given]}, timeout_s=100).sent("scored")
    layer = load_output_layer(path, vocab_size=261, dtype="float32", device=torch.device("cpu"))
    rows = lay_out([given.token_ids], [given.policy_mask], layout="padded")
    found = layer.add_teacher(rows, scored_samples).taught
    assert found is not None
    ids = torch.from_numpy(given.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(path)(ids).logits[0, 2:6].log_softmax(-1)
    torch.testing.assert_close(found.compute_logprobs(slice(0, 4), 1.0), expected, atol=1e-5, rtol=1e-5)
    with pytest.raises(ConfigError, match="has 261 tokens, the student's has 260"):
        load_output_layer(path, vocab_size=260, dtype="float32", device=torch.device("cpu"))


@pytest.mark.slow
def test_tokenizers_are_loaded_before_the_start_where_files_do_not_tell(cache: object, tmp_path: Path) -> None:
    import shutil

    from flowrl.models import resolve

    other = tmp_path / "other"
    shutil.copytree(resolve(Policy("tiny")), other)
    described = json.loads((other / "tokenizer.json").read_text())
    vocab = described["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
    (other / "tokenizer.json").write_text(json.dumps(described))
    Teacher(Policy(str(other)), student=Policy(str(other))).preflight()
    with pytest.raises(ConfigError, match="differ, first in 'a'"):
        require_same_vocabulary(Policy("tiny"), Policy(str(other)))


def test_the_command_refuses_a_teacher_of_another_language(capsys: pytest.CaptureFixture[str]) -> None:
    from flowrl.cli import main

    graph = str(Path(__file__).parents[2] / "graphs" / "distill.py")
    assert main(["check", graph, "--teacher", "smollm2"]) == 2
    assert "node teacher: tiny and smollm2 have different tokenizers" in capsys.readouterr().err
    assert main(["check", graph, "--exact", "--negate-rewards"]) == 0
