"""The reward-model node and its scorer: whose tokens are scored, the end token, and what waits together."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl.errors import ConfigError, FlowrlError, SampleFailed
from flowrl.messages import Int32, Sample
from flowrl.models import Chat, Policy
from flowrl.models.scorer import Scorer, load_scorer
from flowrl.nodes import Evaluation, RewardModel, Shaping
from flowrl.nodes.scoring.reward import FAILURES_IN_A_ROW
from flowrl.nodes.scoring.reward_model import ModelScore, ScoreQuestion, renders_alike, score_question
from flowrl.nodes.scoring.reward_service import AskModel
from flowrl.nodes.sources.preferences import Preferences, Renderer
from flowrl.recipes import reward_model as reward_model_graph
from flowrl.tasks import Row, Task, load_preferences, load_rows, reward_parts
from flowrl.tasks.reward_calls.http import may_be_one_sample
from flowrl.tasks.reward_calls.judge import BadReward
from flowrl.testing import NodeRecord, NodeRig, run_node, sample
from flowrl.training.model.value_model import load_scalar_model
from tests.models.test_models_chat import merging
from tests.models.word_policy import EOS, make_policy
from tests.models.write_model import write_model


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("policy"), pad="<eos>")


@pytest.fixture(scope="module")
def reward_model(policy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reward_model")
    model = load_scalar_model(policy, start="policy", seed=1)
    model.network.config.reward_mean, model.network.config.reward_std = 0.5, 2.0
    write_model(model, policy, path)
    return path


@pytest.fixture(scope="module")
def scorer(reward_model: Path) -> Scorer:
    return load_scorer(reward_model)


@pytest.fixture
def task(tmp_path: Path) -> Task:
    rows = [{"prompt": f"w{n} w{n + 1}", "answer": "w2"} for n in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Task(str(tmp_path / "rows.jsonl"))


def ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_end_token_is_appended_exactly_once_and_by_id(scorer: Scorer) -> None:
    assert scorer.render_ids(ask("w1 w2"), "w3").tolist() == [1, 2, 3, EOS]
    assert scorer.render_ids(ask("w1 w2"), "w3<eos>").tolist() == [1, 2, 3, EOS]
    assert scorer.chat.close_response(np.array([1, 2], np.int32)).tolist() == [1, 2, EOS]
    assert scorer.chat.close_response(np.array([1, EOS, EOS], np.int32)).tolist() == [1, EOS]


def test_conversations_and_pairs_of_prompt_and_response_are_the_same(scorer: Scorer) -> None:
    whole = [*ask("w1 w2"), {"role": "assistant", "content": "w3"}]
    assert scorer.score([whole]) == scorer.score([(ask("w1 w2"), "w3")])
    assert scorer.score([]) == []


def test_scores_keep_their_order_and_do_not_depend_on_neighbours(
    scorer: Scorer, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = [(ask("w1 w2"), " ".join(f"w{n}" for n in range(length))) for length in (3, 9, 1, 5)]
    alone = [scorer.score([one])[0] for one in asked]
    assert scorer.score(asked) == pytest.approx(alone, abs=1e-6)
    monkeypatch.setattr(scorer, "token_budget", 16)
    assert scorer.score(asked) == pytest.approx(alone, abs=1e-6)
    assert len({round(score, 4) for score in alone}) == 4


def test_mean_and_deviation_come_from_the_config(scorer: Scorer, policy: Path) -> None:
    assert (scorer.mean, scorer.std) == (0.5, 2.0)
    assert scorer.normalise_scores([0.5, 4.5]) == [0.0, 2.0]


@pytest.mark.parametrize("turns", [[], ask("w1")])
def test_a_conversation_without_response_is_refused(scorer: Scorer, turns: Any) -> None:
    with pytest.raises(ConfigError, match="its last turn has to be the assistant's"):
        scorer.score([turns])


def score(node: RewardModel, samples: list[Sample]) -> NodeRecord:
    return run_node(node, {"rollouts": samples}, preflight=False)


def test_a_sample_of_the_same_tokenizer_is_scored_by_its_own_ids(
    policy: Path, reward_model: Path, scorer: Scorer, task: Task
) -> None:
    ids = np.array([1, 2, 0, 7, EOS], np.int32)
    given = [sample(0, token_ids=ids), sample(1, token_ids=ids[:4])]
    record = score(RewardModel(str(reward_model), Policy(str(policy)), task), given)
    found = record.sent("scored")
    expected = scorer.sum_labels(scorer.label_scores([ids])[0])
    assert [s.reward for s in found] == pytest.approx([expected] * 2), "a truncated response is ended for it"
    assert [s.raw_reward for s in found] == [s.reward_parts["reward_model"] for s in found]
    assert record.progress == []
    assert [event[0] for event in record.ledger] == ["scored"] * 2


def test_the_reward_is_normalised_and_shaped_and_the_raw_one_is_not(
    policy: Path, reward_model: Path, scorer: Scorer, task: Task
) -> None:
    node = RewardModel(str(reward_model), Policy(str(policy)), task, normalise=True, shaping=Shaping(negate=True))
    given = sample(0, token_ids=np.array([1, 2, 3, EOS], np.int32))
    (out,) = score(node, [given]).sent("scored")
    raw = scorer.sum_labels(scorer.label_scores([given.token_ids])[0])
    assert out.raw_reward == pytest.approx(raw)
    assert out.reward == pytest.approx(-(raw - 0.5) / 2.0)


def test_in_a_sum_the_functions_are_asked_too_and_every_part_is_logged(
    policy: Path, reward_model: Path, scorer: Scorer, task: Task
) -> None:
    summed = replace(task, reward="3*verifier as right + 0.5*reward_model")
    node = RewardModel(str(reward_model), Policy(str(policy)), summed, normalise=True)
    assert node.preflight() is None
    given = sample(0, token_ids=np.array([1, 2, EOS], np.int32), response_text="w2", columns={"answer": "w2"})
    (out,) = score(node, [given]).sent("scored")
    raw = scorer.sum_labels(scorer.label_scores([given.token_ids])[0])
    assert out.reward == pytest.approx(3.0 + 0.5 * (raw - 0.5) / 2.0)
    assert out.raw_reward == pytest.approx(3.0 + 0.5 * raw)
    assert out.reward_parts == {"reward_model": pytest.approx(raw), "right": 1.0}
    plain = RewardModel(str(reward_model), Policy(str(policy)), replace(task, reward="verifier + 0.5*reward_model"))
    assert score(plain, [given]).sent("scored")[0].reward_parts["verifier"] == 1.0
    held_out = Evaluation(summed, Policy(str(policy))).scored_by[summed.name]
    assert (held_out.weight, held_out.functions) == (0.5, reward_parts(replace(task, reward="3*verifier as right")))


def test_scores_that_are_never_finite_end_the_run(
    policy: Path, reward_model: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failed sample counts for no step: the run would sample without an end."""
    monkeypatch.setattr(Scorer, "label_scores", lambda self, asked: [(float("nan"),)] * len(asked))
    node = RewardModel(str(reward_model), Policy(str(policy)), task)
    given = [sample(n, token_ids=np.array([1, 2, EOS], np.int32)) for n in range(FAILURES_IN_A_ROW)]
    few = score(node, given[:3])
    assert few.reasons() == [("failed", "reward_not_finite")] * 3 and few.metrics == {"reward_not_finite": 3}
    with pytest.raises(FlowrlError, match=f"failed for {FAILURES_IN_A_ROW} samples in a row; .*not a finite number"):
        score(RewardModel(str(reward_model), Policy(str(policy)), task), given)


def test_another_template_means_rendering_the_row_anew(
    policy: Path, reward_model: Path, scorer: Scorer, task: Task, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    other = make_policy(tmp_path / "other", pad="<pad>")
    tokenizer: Any = AutoTokenizer.from_pretrained(other)
    tokenizer.chat_template = "{% for m in messages %}w5 {{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(other)
    assert not renders_alike(tokenizer, scorer.chat.tokenizer, [ask("w1")])
    from flowrl.tasks import load_rows

    row = load_rows(task).train[0]
    given = sample(0, prompt_id=row.prompt_id, response_text="w9", token_ids=np.array([5, 1, 5, 9], np.int32))
    expected = scorer.score([(row.turns, "w9")])[0]
    node = RewardModel(str(reward_model), Policy(str(other)), task)
    record = score(node, [given])
    assert record.sent("scored")[0].reward == pytest.approx(expected)
    assert "rendered again" in record.progress[0]
    (of_row, of_another) = answered(
        RewardModel(str(reward_model), Policy(str(other)), task),
        [score_question(given, row), score_question(given, Row(tuple(ask("w3 w4"))))],
    )
    assert of_row.score == pytest.approx(expected)
    assert of_another.score == pytest.approx(scorer.score([(ask("w3 w4"), "w9")])[0]), "its row is in no task"


def answered(node: RewardModel, asked: list[ScoreQuestion]) -> list[ModelScore]:
    async def main() -> list[ModelScore]:
        async with NodeRig(node, preflight=False) as rig:
            found = [await rig.ask(node.requests, one) for one in asked]
            record = await rig.finished()
        assert record.ledger == [] and record.sent("scored") == [], "held-out answers are in no books of samples"
        return found

    return asyncio.run(main())


def test_a_held_out_answer_has_the_score_of_a_sample(
    policy: Path, reward_model: Path, scorer: Scorer, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = sample(0, token_ids=np.array([1, 2, 3, EOS], np.int32))
    node = RewardModel(str(reward_model), Policy(str(policy)), task, normalise=True, shaping=Shaping(negate=True))
    (found,) = answered(node, [score_question(given, None)])
    raw = scorer.sum_labels(scorer.label_scores([given.token_ids])[0])
    assert found == ModelScore(pytest.approx(raw), pytest.approx((raw - 0.5) / 2.0), {})
    monkeypatch.setattr(Scorer, "label_scores", lambda self, ids: [(float("nan"),)] * len(ids))
    with pytest.raises(SampleFailed, match="reward_not_finite"):
        answered(RewardModel(str(reward_model), Policy(str(policy)), task), [score_question(given, None)])


def test_held_out_answers_wait_for_samples(policy: Path, reward_model: Path, task: Task) -> None:
    """A pass is under way when a held-out answer and then three samples come; they go first."""
    node = RewardModel(str(reward_model), Policy(str(policy)), task)
    passes: list[int] = []

    async def main() -> None:
        begun, there, go_on, read = asyncio.Event(), asyncio.Event(), asyncio.Event(), list[int]()

        async def blocking(fn: Any, *args: Any) -> Any:
            passes.append(len(args[0]))
            begun.set()
            await go_on.wait()
            return fn(*args)

        def read_tokens(asked: ScoreQuestion) -> Int32:
            read.append(1)
            if len(read) == 3:
                there.set()
            return RewardModel.read_tokens(node, asked)

        async with NodeRig(node, preflight=False) as rig:
            node.context.blocking, node.read_tokens = blocking, read_tokens  # type: ignore[method-assign]
            samples = [sample(n, token_ids=np.array([n, 1, 2, EOS], np.int32)) for n in range(4)]
            rig.feed(node.rollouts, samples[0])
            await begun.wait()
            held_out = [asyncio.create_task(rig.ask(node.requests, score_question(one, None))) for one in samples[:2]]
            await there.wait()
            rig.feed(node.rollouts, *samples[1:])
            await rig.taken(node.rollouts)
            go_on.set()
            await asyncio.gather(*held_out)
            await rig.finished()

    asyncio.run(main())
    assert passes == [1, 3, 2]


def test_what_waits_is_scored_in_one_pass(policy: Path, reward_model: Path, task: Task) -> None:
    """Five arrive while the first is being scored; they make the second pass together."""
    node = RewardModel(str(reward_model), Policy(str(policy)), task)
    passes: list[int] = []

    async def main() -> NodeRecord:
        begun, go_on = asyncio.Event(), asyncio.Event()

        async def blocking(fn: Any, *args: Any) -> Any:
            passes.append(len(args[0]))
            begun.set()
            await go_on.wait()
            return fn(*args)

        async with NodeRig(node, preflight=False) as rig:
            node.context.blocking = blocking  # type: ignore[method-assign]
            first, *rest = (sample(n, token_ids=np.array([n, 1, 2, EOS], np.int32)) for n in range(6))
            rig.feed(node.rollouts, first)
            await begun.wait()
            rig.feed(node.rollouts, *rest)
            await rig.taken(node.rollouts)
            go_on.set()
            return await rig.finished()

    assert len(asyncio.run(main()).sent(node.scored)) == 6
    assert passes == [1, 5]


def test_a_cancelled_pass_leaves_the_others_waiting(policy: Path, reward_model: Path, task: Task) -> None:
    """The first one's group is given up while its pass, which the second waits for, is under way."""
    node = RewardModel(str(reward_model), Policy(str(policy)), task)

    async def main() -> NodeRecord:
        begun, calls = asyncio.Event(), list[int]()

        async def blocking(fn: Any, *args: Any) -> Any:
            calls.append(1)
            begun.set()
            if len(calls) == 1:
                await asyncio.Event().wait()
            return fn(*args)

        async with NodeRig(node, preflight=False) as rig:
            node.context.blocking = blocking  # type: ignore[method-assign]
            first, second = (sample(0, group=f"g{n}", token_ids=np.array([n, 1, 2, EOS], np.int32)) for n in range(2))
            rig.feed(node.rollouts, first)
            await begun.wait()
            rig.feed(node.rollouts, second)
            await rig.taken(node.rollouts)
            rig.give_up("g0")
            return await rig.finished()

    record = asyncio.run(main())
    assert [s.group_id for s in record.sent(node.scored)] == ["g1"]
    assert [one.message.group_id for one in record.lost] == ["g0"]  # type: ignore[attr-defined]


def test_a_score_that_is_no_number_fails_its_sample(
    policy: Path, reward_model: Path, task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Scorer, "label_scores", lambda self, ids: [(float("nan"),)] * len(ids))
    record = score(RewardModel(str(reward_model), Policy(str(policy)), task), [sample(0)])
    assert record.sent("scored") == []
    assert record.reasons() == [("failed", "reward_not_finite")]
    assert record.metrics == {"reward_not_finite": 1}


def test_what_is_no_reward_model_is_said_before_the_run(policy: Path, reward_model: Path, task: Task) -> None:
    RewardModel(str(reward_model), Policy(str(policy)), task).preflight()
    with pytest.raises(ConfigError, match=r"is not a reward model: its config.json names LlamaForCausalLM"):
        RewardModel(str(policy), Policy(str(policy)), task).preflight()
    with pytest.raises(ConfigError, match="tiny is no reward model"):
        RewardModel("tiny", Policy(str(policy)), task).preflight()
    assert len(RewardModel("", Policy(str(policy)), task, batch=0).check(None)) == 2


def test_a_pad_token_on_top_is_no_difference(policy: Path, scorer: Scorer) -> None:
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(policy)
    assert len(scorer.chat.tokenizer.get_vocab()) == len(theirs.get_vocab()) + 1
    assert renders_alike(theirs, scorer.chat.tokenizer, [ask("w1 w2")])


@pytest.fixture
def refusing(reward_model: Path, tmp_path: Path) -> Path:
    """The reward model with a template that refuses an answer of w5."""
    path = tmp_path / "refusing"
    shutil.copytree(reward_model, path)
    (path / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m['content'] == 'w5' %}{{ raise_exception('no w5') }}{% endif %}"
        "{{ m['content'] + ' ' }}{% endfor %}"
    )
    return path


def test_a_response_that_the_models_template_refuses_fails_its_sample_alone(
    policy: Path, refusing: Path, task: Task
) -> None:
    prompt_id = next(iter(load_rows(task).train)).prompt_id
    given = [sample(n, prompt_id=prompt_id, response_text=text) for n, text in enumerate(("w4", "w5", "w6"))]
    record = score(RewardModel(str(refusing), Policy(str(policy)), task), given)
    assert [one.response_text for one in record.sent("scored")] == ["w4", "w6"]
    (lost,) = record.lost
    assert (lost.message.response_text, lost.state, lost.reason) == ("w5", "failed", "reward_unrendered")
    assert record.metrics["reward_unrendered"] == 1
    assert record.progress[-1] == "a sample failed: reward_unrendered: the chat template refuses it (no w5)"


def test_a_served_model_that_refuses_a_response_says_so_and_answers_the_others(refusing: Path) -> None:
    served = AskModel(load_scorer(refusing))
    with pytest.raises(BadReward, match=r"cannot be scored: the chat template refuses it \(no w5\)") as bad:
        asyncio.run(served.ask(["w1", "w1"], ["w4", "w5"], [{}, {}]))
    assert may_be_one_sample(bad.value.reason), "its client asks again without it"
    assert len(asyncio.run(served.ask(["w1"], ["w4"], [{}])).rewards) == 1


@pytest.mark.parametrize("eos", ["<|im_end|>", "<|endoftext|>"])
def test_a_model_is_scored_at_the_token_at_which_it_was_trained(eos: str, tmp_path: Path) -> None:
    """In training, in a graph's node by text and by the sample's own tokens, by `Scorer`, and on held-out pairs."""
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "\\n\\nHello", "rejected": "no"}\n')
    data = Preferences(Task(str(tmp_path / "pairs.jsonl")), Policy(), scored=True)
    tokenizer = merging(eos=eos)
    scorer = Scorer(SimpleNamespace(facts={}), tokenizer)  # type: ignore[arg-type]
    rows = load_preferences(data.task, "pairs")
    row = [*rows.train, *rows.held_out][0]
    (chosen, _) = Renderer(data, Chat(tokenizer), [row]).render_row(row.prompt_id)
    assert tokenizer.decode(chosen.token_ids[-2:]) == ("Hello<|im_end|>" if eos == "<|im_end|>" else f"<|im_end|>{eos}")
    assert scorer.render_ids(row.turns, "\n\nHello").tolist() == chosen.token_ids.tolist()
    node = RewardModel("anywhere", Policy(), data.task)
    node._scorer = scorer
    sampled = Chat(tokenizer).encode_completion(row.turns, "\n\nHello")[0]
    for ids, node.reads_text in ((sampled, False), (sampled[:-1], False), (sampled[:1], True)):
        asked = ScoreQuestion("\n\nHello", ids, row.turns)
        assert node.read_tokens(asked).tolist() == chosen.token_ids.tolist()


def test_the_graph_of_reward_models_trains_what_is_scored(tmp_path: Path) -> None:
    (tmp_path / "pairs.jsonl").write_text('{"prompt": "q", "chosen": "Hello", "rejected": "no"}\n')
    options = reward_model_graph.RewardModelTraining(pairs=str(tmp_path / "pairs.jsonl"))
    found = reward_model_graph.graph(options)
    data = [node.data for node in found.nodes.values() if hasattr(node, "data")]
    assert len(data) == 3 and all(one.scored for one in data)
