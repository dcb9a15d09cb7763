"""Evaluation on whole files: what a set's text says, which rows are asked, and which rows remain for training."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from flowrl.cli import main
from flowrl.environments import Action, EnvironmentRow
from flowrl.environments.environment_class import find_environment
from flowrl.environments.task_questions import with_sets
from flowrl.errors import ConfigError, SampleFailed
from flowrl.graph.load import load_file
from flowrl.messages import Prompt
from flowrl.models import Policy
from flowrl.nodes import Environment, EnvironmentSource, Evaluation, Generator, PromptSource, Sampling, TaskSource
from flowrl.nodes.sources.demonstrations import DemonstrationSource
from flowrl.nodes.sources.row_source import prompt_fields, question_fields
from flowrl.runtime.driver.phases import shown_sets
from flowrl.tasks import Task, load_demonstrations, load_rows
from flowrl.tasks.evaluation_set import EvaluationSet
from flowrl.testing import NodeRig
from tests.nodes.test_nodes_evaluation import Answers, rows

TRAIN = Task("arithmetic:max_value=9", system_prompt="Add.")


def file_of(path: Path, count: int, first: int = 0) -> str:
    """GSM8K's shape: worked solutions that end with the answer."""
    records = [
        {"question": f"{n}+1", "answer": f"One more than {n}.\n#### {n + 1}"} for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return f"{path}:prompt=question,check=math"


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


def parse(text: str, like: Task = TRAIN) -> EvaluationSet:
    return EvaluationSet.parse(text, like=like, samples=2)


def test_the_text_of_a_set() -> None:
    plain, named = parse("test.jsonl"), parse("gsm8k=t.jsonl:num=7,check=math,samples=4")
    assert (plain.name, plain.task, plain.num, plain.samples, plain.whole) == (
        "test.jsonl",
        Task("test.jsonl", system_prompt="Add."),
        None,
        2,
        True,
    )
    assert (named.name, named.task.name, named.num, named.samples) == ("gsm8k", "t.jsonl:check=math", 7, 4)
    assert parse("a=t.jsonl:num=7").task.name == "t.jsonl"
    assert parse("data/x=1.jsonl").name == "data/x=1.jsonl", "a path is no name"
    assert parse("t.jsonl:prompt=q").name == "t.jsonl:prompt=q"


def test_what_scores_a_set() -> None:
    own = Task("train.jsonl", reward="rules.py:score")
    assert parse("t.jsonl", own).task.verifier == "rules.py:score"
    assert parse("t.jsonl:check=math", own).task.verifier == "flowrl.tasks.checks.maths:score"
    assert parse("t.jsonl:reward=other.py:score,check=math", own).task.verifier == "other.py:score"
    assert parse("t.jsonl").task.verifier == "flowrl.tasks.checks.answer_checks:exact_match"


@pytest.mark.parametrize("text", ["t.jsonl:num=0", "t.jsonl:num=few", "t.jsonl:samples=1.5"])
def test_numbers_of_a_set(text: str) -> None:
    with pytest.raises(ConfigError, match="it needs an integer of at least 1"):
        parse(text)


@pytest.mark.parametrize(("text", "said"), [("0.5x", "a number from 0 up"), ("-1", "from 0 up"), ("0", "all the same")])
def test_temperatures_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(f"t.jsonl:temperature={text}")


@pytest.mark.parametrize(
    ("options", "temperature"),
    [("samples=1", 0.0), ("samples=4", None), ("samples=4,temperature=0.6", 0.6), ("samples=1,temperature=1", 1.0)],
)
def test_each_set_is_asked_at_its_own_temperature(options: str, temperature: float | None, tmp_path: Path) -> None:
    """A set with one answer is greedy, also where another has several; None leaves it to the generator."""
    text = f"{file_of(tmp_path / 'test.jsonl', 3).replace(',check=math', '')},{options}"
    _, _, answers = ask(EvaluationSet.parse(text, like=TRAIN, samples=1))
    assert {prompt.temperature for prompt in answers.asked} == {temperature}


@pytest.mark.parametrize(
    ("text", "said"), [("top_p=0", "above 0 and at most 1"), ("top_p=x", "above 0"), ("top_k=0.5", "from 0 up")]
)
def test_truncations_that_are_none(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse(f"t.jsonl:{text}")


def test_truncation_changes_nothing_in_greedy_answers() -> None:
    asked = EvaluationSet.parse("t.jsonl:top_k=5", like=TRAIN, samples=1)
    (problem,) = Evaluation((), Policy("tiny"), sets=(asked,)).check(None)
    assert "the set 't.jsonl' has top_p or top_k, but its answers are greedy" in problem
    assert parse("t.jsonl:top_k=5").asked_as == {"top_k": 5}
    assert Evaluation((), Policy("tiny"), sets=(parse("t.jsonl:top_k=5"),)).check(None) == []


@pytest.mark.parametrize(("own", "used"), [(None, 0.9), (0.25, 0.25), (0.0, 0.0)])
def test_the_generator_samples_at_the_prompts_temperature(own: float | None, used: float) -> None:
    generator = Generator(Policy("tiny"), evaluation=Sampling(temperature=0.9, max_tokens=5))
    seen: list[Sampling] = []

    async def answer(prompt: Prompt, sampling: Sampling, priority: int) -> Any:
        seen.append(sampling)
        raise SampleFailed("seen")

    prompt = Prompt("s", "g", "p", 0, 0, 1, 7, "", np.zeros(1, np.int32), temperature=own, top_p=own or None, top_k=3)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SampleFailed):
        patch.setattr(generator, "_sample_prompt", answer)
        asyncio.run(generator._generate_held_out(prompt))
    assert seen == [Sampling(temperature=used, max_tokens=5, top_p=own or 1.0, top_k=3)]


def test_sets_of_agents_have_no_temperature() -> None:
    asked = parse("t.jsonl:temperature=0.5")
    node = Evaluation((), Policy("tiny"), sets=(asked,), agents=True)
    assert [problem for problem in node.check(None) if "agents answer it" in problem]


def ask(asked: EvaluationSet, training: Task | None = None, right: int = 99) -> tuple[dict[str, float], Any, Answers]:
    answers = Answers(right=right)
    node = Evaluation((), Policy("tiny"), sets=(asked,), training=training)

    async def life() -> tuple[dict[str, float], Any]:
        async with NodeRig(node, name="evaluation", answers={"generate": answers}, preflight=False) as rig:
            figures = await node.evaluate(phase="before", step=0)
            await node.finish()
            return figures, await rig.finished()

    return (*asyncio.run(life()), answers)


def test_all_rows_of_a_file_are_asked_by_name_with_several_answers(tmp_path: Path) -> None:
    text = f"gsm8k={file_of(tmp_path / 'test.jsonl', 1319)},samples=4".replace("check=math,", "")
    figures, record, answers = ask(EvaluationSet.parse(text, like=TRAIN, samples=1), right=1)
    assert figures["gsm8k/num_answers"] == figures["num_answers"] == 1319 * 4
    assert (figures["gsm8k/pass_at_4"], figures["pass_at_4"], figures["gsm8k/pass_at_2"]) == (1.0, 1.0, 0.5)
    assert figures["mean_at_4"] == 0.25
    assert shown_sets(figures) == ["gsm8k/"], "one set is told once, by its name"
    assert shown_sets({"num_answers": 1, "b/num_answers": 1, "b/reward/num": 1}) == ["", "b/"]
    assert len({prompt.prompt_id for prompt in answers.asked}) == 1319
    (booked,) = rows(record)
    assert {row.task for row in booked} == {"gsm8k"}


def test_of_30_rows_30_are_asked_and_fewer_by_num(tmp_path: Path) -> None:
    file = file_of(tmp_path / "test.jsonl", 30).replace(",check=math", "")
    assert len(load_rows(Task(file)).held_out) < 6
    assert len(parse(file).chosen(load_rows(Task(file)))) == 30
    some = parse(f"{file},num=7")
    assert len(some.chosen(load_rows(some.task))) == 7
    many = parse(f"{file},num=31")
    with pytest.raises(ConfigError, match="has 30 rows, but num is 31; leave num out to ask all"):
        many.require_enough(many.chosen(load_rows(many.task)))


def test_a_file_of_one_row_can_be_asked_and_trained(tmp_path: Path) -> None:
    for n in range(12):  # one of them is in the part that is held out elsewhere
        task = Task(file_of(tmp_path / f"{n}.jsonl", 1, first=n).replace(",check=math", ""))
        assert len(parse(task.name).chosen(load_rows(task, whole=True))) == 1
        assert len(PromptSource(task, Policy("tiny"), part="all").rows()) == 1


def test_the_log_counts_prompts_that_are_trained_too(tmp_path: Path) -> None:
    train = Task(file_of(tmp_path / "train.jsonl", 40))
    asked = parse(f"mine={file_of(tmp_path / 'test.jsonl', 20, first=35)}", train)
    node = Evaluation((), Policy("tiny"), sets=(asked,), training=train)
    assert node.preflight() == "mine: 20 prompts, 2 answers each, 5 of them are in the training data too"


def config(graph: str, *args: str) -> Any:
    file = load_file(graph)
    cfg = file.parse(args)
    return cfg, file.build(cfg)


@pytest.mark.parametrize(
    "graph", ["grpo", "dapo", "ppo", "rloo", "raft", "reinforce_pp", "distill", "sft", "custom_node"]
)
def test_an_explicit_set_leaves_the_training_file_whole(tmp_path: Path, graph: str) -> None:
    train, test = file_of(tmp_path / "train.jsonl", 40), file_of(tmp_path / "test.jsonl", 30, first=100)
    _, built = config(graph, "--task", train, "--evaluate-task", f"mine={test}", "--evaluate-samples", "4")
    prompts, evaluation = (built.nodes[name] for name in ("prompts", "evaluation"))
    assert isinstance(prompts, PromptSource) and isinstance(evaluation, Evaluation)
    assert len(prompts.rows()) == 40
    (asked,) = evaluation.sets
    assert (asked.name, asked.samples, len(asked.chosen(load_rows(asked.task)))) == ("mine", 4, 30)
    _, without = config(graph, "--task", train, "--evaluate", "3")
    held_out = without.nodes["prompts"]
    assert isinstance(held_out, PromptSource)
    assert len(held_out.rows()) + len(load_rows(Task(train)).held_out) == 40 > len(held_out.rows())


def test_agents_get_whole_sets_and_games_refuse_them(tmp_path: Path) -> None:
    test = file_of(tmp_path / "test.jsonl", 30)
    _, built = config("agent_openai", "--evaluate-task", f"mine={test}")
    evaluation = built.nodes["evaluation"]
    assert isinstance(evaluation, Evaluation)
    assert ([one.name for one in evaluation.agent_sets], evaluation.sets) == (["mine"], ())
    with pytest.raises(ConfigError, match=r"names questions, and environment .* asks no questions of a task"):
        config("agent_game", "--evaluate-task", test, "--environment", "gymnasium/FrozenLake-v1")
    with pytest.raises(ConfigError, match="games are evaluated with --evaluate"):
        config("self_play", "--evaluate-task", test)


def numbers(path: Path, *answers: str) -> str:
    rows = [{"prompt": f"{path.stem} {n}", "answer": answer} for n, answer in enumerate(answers)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_environments_with_questions_are_asked_whole_sets_and_train_all_rows(tmp_path: Path) -> None:
    """Each set by its name, its own rows and its own check; the training task's rows are all trained."""
    train = numbers(tmp_path / "train.jsonl", *map(str, range(16)))
    easy, hard = numbers(tmp_path / "easy.jsonl", *["7"] * 11), numbers(tmp_path / "hard.jsonl", *["#### 8"] * 5)
    sets = [f"easy={easy}", f"hard={hard}:check=gsm8k"]
    _, built = config("agent_tools", "--task", train, "--evaluate-task", *sets)
    evaluation, source, player = (built.nodes[name] for name in ("evaluation", "prompts", "environment"))
    assert isinstance(evaluation, Evaluation) and isinstance(source, EnvironmentSource)
    assert isinstance(player, Environment)
    assert ([one.name for one in evaluation.agent_sets], evaluation.environments) == (["easy", "hard"], ())
    env = find_environment(player.environment).make_environment()

    async def score(fields: Mapping[str, Any], answer: str) -> tuple[str, float | None]:
        columns = fields["columns"]
        row = EnvironmentRow(columns["environment"], columns["options"], columns["seed"])
        asked = await env.reset(row.task, row.seed)
        step = await env.step(Action(answer))
        return str(asked.text), step.reward

    for one, answer, right in zip(evaluation.agent_sets, ("7", "it is 8"), (11, 5), strict=True):
        rows = one.chosen(load_rows(one.task, whole=True))
        found = [asyncio.run(score(question_fields(player.environment, one.name, row), answer)) for row in rows]
        assert {text for text, _ in found} == {f"{one.name} {n}" for n in range(right)}
        assert [reward for _, reward in found] == [1.0] * right
    trained = {asyncio.run(score(prompt_fields(row), "?"))[0] for row in (*source.rows()[:200], *source.rows()[-99:])}
    assert trained == {f"train {n}" for n in range(16)}


def test_a_reward_of_a_set_is_refused_where_the_environment_scores(tmp_path: Path) -> None:
    train, test = numbers(tmp_path / "train.jsonl", *map(str, range(16))), numbers(tmp_path / "test.jsonl", "1")
    name = with_sets(f"tools/{train}:tools=calculator", [f"mine={test}:reward=rules.py:score"])
    with pytest.raises(ConfigError, match="the evaluation set 'mine' has a reward, but environment"):
        find_environment(name).make_environment()


def test_an_environment_of_verifiers_has_its_own_questions(tmp_path: Path) -> None:
    name = "verifiers/some-env:size=3"
    _, built = config("agent_openai", "--agent", name, "--evaluate", "3")
    prompts, evaluation = (built.nodes[name] for name in ("prompts", "evaluation"))
    assert isinstance(prompts, EnvironmentSource) and isinstance(evaluation, Evaluation)
    assert (prompts.environment, prompts.repeat) == (name, 8)
    assert (evaluation.environments, evaluation.agent_sets, evaluation.tasks) == ((name,), (), ())
    with pytest.raises(ConfigError, match="one of verifiers has its own questions"):
        config("agent_openai", "--agent", name, "--evaluate-task", file_of(tmp_path / "test.jsonl", 30))
    _, own = config("agent_openai", "--agent", "verifiers/mine.py:play")
    assert isinstance(own.nodes["prompts"], TaskSource), "a function of a file"


def sets_of(*args: str) -> list[tuple[str, int | None, bool, int]]:
    """Name, number, whether all rows are asked, and number of prompts of what `flowrl evaluate` asks."""
    _, built = config("evaluate", *args)
    evaluation = built.nodes["evaluation"]
    assert isinstance(evaluation, Evaluation)
    found = [(one, one.chosen(load_rows(one.task, whole=one.whole))) for one in evaluation.sets]
    for one, chosen in found:
        one.require_enough(chosen)
    return [(one.name, one.num, one.whole, len(chosen)) for one, chosen in found]


def test_evaluate_asks_all_rows_of_a_file_and_the_held_out_rows_of_others(tmp_path: Path) -> None:
    test, made = file_of(tmp_path / "test.jsonl", 700), "arithmetic:max_value=99"
    assert sets_of("--task", test) == [(test, None, True, 700)]
    assert sets_of("--task", test, "--prompts", "40") == [(test, 40, True, 40)]
    assert sets_of("--task", test, "--prompts", "900") == [(test, 900, True, 700)]
    assert sets_of("--task", made) == [(made, 512, False, 512)]
    assert sets_of("--task", made, "--evaluate-also", test) == [(made, 512, False, 512), (test, None, True, 700)]
    named = ("--evaluate-task", f"a={test}", f"b={test},num=7", "--prompts", "9")
    assert sets_of("--task", made, *named) == [("a", 9, True, 9), ("b", 7, True, 7)]
    with pytest.raises(ConfigError, match="two sets are named a; give one another name with --evaluate-task"):
        config("evaluate", "--evaluate-task", f"a={test}", f"a={test},num=7")


def test_evaluate_says_how_many_of_how_many_prompts_are_asked(tmp_path: Path) -> None:
    test = file_of(tmp_path / "test.jsonl", 1319)
    said = {(): "1,319 prompts", ("--prompts", "40"): "40 of 1,319 prompts", ("--prompts", "2000"): "1,319 prompts"}
    for given, text in said.items():
        _, built = config("evaluate", "--task", test, *given)
        assert built.nodes["evaluation"].preflight() == f"{test}: {text}, 1 answer each"
    held_out = len(load_rows(Task(test)).held_out)
    assert Evaluation(Task(test), Policy("tiny"), num_prompts=9).preflight() == (
        f"{test}: 9 of {held_out} held-out prompts, 1 answer each"
    )


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ((), [{"temperature": 0.0}]),
        (("--temperature", "0.6"), [{"temperature": 0.6, "top_p": 1.0, "top_k": 0}]),
        (("--evaluate-samples", "4", "--top-p", "0.9"), [{"temperature": 1.0, "top_p": 0.9, "top_k": 0}]),
        (
            ("--top-k", "5", "--evaluate-task", "a=t.jsonl:samples=2,temperature=0.5,top_p=0.7", "b=t.jsonl"),
            [{"temperature": 0.5, "top_p": 0.7, "top_k": 5}, {"temperature": 0.0}],
        ),
    ],
)
def test_how_evaluate_samples(given: tuple[str, ...], asked: list[dict[str, float]]) -> None:
    _, built = config("evaluate", *given)
    evaluation = built.nodes["evaluation"]
    assert isinstance(evaluation, Evaluation)
    assert [one.asked_as for one in evaluation.sets] == asked


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--temperature", "0", "--evaluate-samples", "2"), "the 2 answers to a prompt of arithmetic would be all"),
        (("--top-p", "0.9"), "--top-p and --top-k change nothing in greedy answers; leave them out, or set"),
        (("--top-p", "0", "--temperature", "1"), "--top-p is 0.0; it has to be above 0 and at most 1"),
        (("--samples", "4"), "there is no option --samples; did you mean --evaluate_samples?"),
        (("--also", "a.jsonl"), "there is no option --also; did you mean --evaluate_also?"),
        (("--max-prompt-tokens", "4"), "did you mean --evaluate_max_prompt_tokens?"),
    ],
)
def test_what_evaluate_refuses(given: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "evaluate", *given]) == 2
    assert said in capsys.readouterr().err


def test_two_sets_need_two_names(tmp_path: Path) -> None:
    test = file_of(tmp_path / "test.jsonl", 30)
    cfg, _ = config("grpo", "--evaluate-task", f"a={test}", f"b={test},num=5")
    assert [(one.name, one.num) for one in cfg.evaluation.sets(cfg)] == [("a", None), ("b", 5)]
    with pytest.raises(ConfigError, match="--evaluate-task has two sets named a; give one another name"):
        config("grpo", "--evaluate-task", f"a={test}", f"a={test},num=5")


def test_a_file_with_few_held_out_rows_is_asked_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = file_of(tmp_path / "train.jsonl", 30)
    held_out = len(load_rows(Task(train)).held_out)
    assert main(["run", "grpo", "--task", train, "--dry-run"]) == 0
    assert f"{held_out} prompts, 1 answer each: all that are held out, fewer than the 512" in capsys.readouterr().out
    with pytest.raises(ConfigError, match="or name a file whose rows are all asked with --evaluate-task"):
        EvaluationSet("none", Task(train), num=5).require_enough([])


def test_a_split_that_is_not_there_is_no_other_split(tmp_path: Path) -> None:
    file_of(tmp_path / "train-0.jsonl", 30)
    assert len(load_rows(Task(f"{tmp_path}:prompt=question"), whole=True).train) > 20
    with pytest.raises(ConfigError, match="has no file of the split 'test', whose name begins with it"):
        load_rows(Task(f"{tmp_path}:prompt=question,split=test"))


# Supervised fine-tuning keeps every row


def answered(path: Path, prompts: int, answers: int, **columns: Any) -> Task:
    records = [
        {"prompt": f"q{p}", "answer": f"a{p}.{a % 7}", **columns} for a in range(answers) for p in range(prompts)
    ]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return Task(str(path))


def test_sft_keeps_all_answers_to_a_prompt_repeated_ones_too(tmp_path: Path) -> None:
    task = answered(tmp_path / "rows.jsonl", 100, 10)
    found = load_demonstrations(task)
    assert len(found.train) + len(found.held_out) == 1000 and found.repeated == 0
    ids = [row.prompt_id for row in (*found.train, *found.held_out)]
    assert len(set(ids)) == 1000
    assert not {row.prompt for row in found.train} & {row.prompt for row in found.held_out}
    assert load_rows(task).repeated == 900, "where answers are sampled, a prompt is one row"
    _, built = config("sft", "--task", task.name)
    source = built.nodes["prompts"]
    assert isinstance(source, DemonstrationSource) and len(source.rows()) == 1000


def test_the_first_row_of_a_prompt_keeps_its_id(tmp_path: Path) -> None:
    task = answered(tmp_path / "rows.jsonl", 10, 3)
    assert {row.prompt_id for row in load_rows(task).train} <= {r.prompt_id for r in load_demonstrations(task).train}


def test_of_scored_answers_the_best_are_kept_and_the_others_counted(tmp_path: Path) -> None:
    records = [{"prompt": f"q{p}", "answer": f"a{n}", "score": n % 2} for p in range(20) for n in range(4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = load_demonstrations(Task(str(tmp_path / "rows.jsonl")))
    assert len(found.train) + len(found.held_out) == 40 and found.repeated == 40
    assert {row.answer for row in found.train} == {"a1", "a3"}
