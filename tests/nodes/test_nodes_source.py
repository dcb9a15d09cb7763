"""The source: an order that seed and epoch decide, members with seeds of their own, a cursor to go on from."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from flowrl.errors import ConfigError
from flowrl.graph.node import Saved
from flowrl.messages import Prompt
from flowrl.models import Policy
from flowrl.nodes import PromptSource, TaskSource
from flowrl.nodes.sources.row_source import epoch_order, sampling_seed
from flowrl.tasks import Task, load_rows
from flowrl.testing import NodeRecord, run_node

TASK = Task("arithmetic:max_value=3")
NUM_TRAIN = 13


@pytest.fixture(autouse=True, scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FLOWRL_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


RUN_SEED = 7


def admitted(source: PromptSource, *, tickets: int | None = None, steps: int | None = None) -> NodeRecord:
    return run_node(source, name="prompts", num_groups=tickets, steps=steps, seed=RUN_SEED)


def groups(source: PromptSource, *, tickets: int | None = None, steps: int | None = None) -> list[list[Prompt]]:
    return admitted(source, tickets=tickets, steps=steps).groups("prompts")


def texts(source: PromptSource, **options: int | None) -> list[str]:
    return [group[0].text for group in groups(source, **options)]  # type: ignore[arg-type]


def test_an_epoch_is_a_permutation_of_seed_and_epoch() -> None:
    assert sorted(epoch_order(20, 1, 0)) == list(range(20))
    assert epoch_order(20, 1, 0) == epoch_order(20, 1, 0)
    assert len({tuple(epoch_order(20, seed, epoch)) for seed in (1, 2) for epoch in (0, 1)}) == 4


def test_seeds_differ_by_each_of_their_parts_and_fit_31_bits() -> None:
    places = [(s, p, e, m) for s in (0, 1) for p in ("a", "b") for e in (0, 1) for m in (0, 1)]
    seeds = [sampling_seed(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**31 for seed in seeds)
    assert sampling_seed(0, "a", 0, 0) == seeds[0]


def test_without_steps_every_training_row_is_one_group_once() -> None:
    found = groups(PromptSource(TASK, Policy("tiny"), repeat=3))
    assert len(found) == len({group[0].prompt_id for group in found}) == NUM_TRAIN
    for group in found:
        assert [prompt.member for prompt in group] == [0, 1, 2]
        assert {prompt.group_id for prompt in group} == {f"prompts:0:{group[0].prompt_id}"}
        assert len({prompt.sample_id for prompt in group}) == len({prompt.seed for prompt in group}) == 3
        question = group[0].text.removeprefix("<|user|>").removesuffix("<|end|><|assistant|>")
        assert len(group[0].token_ids) == len(question) + 3
        assert group[0].columns["answer"] == str(sum(map(int, question.rstrip("=").split("+"))))


def test_with_steps_epochs_follow_each_other_in_other_orders() -> None:
    seen = texts(PromptSource(TASK, Policy("tiny")), tickets=2 * NUM_TRAIN, steps=9)
    first, second = seen[:NUM_TRAIN], seen[NUM_TRAIN:]
    assert sorted(first) == sorted(second)
    assert first != second


def test_an_explicit_number_of_epochs_ends_the_stream() -> None:
    assert len(groups(PromptSource(TASK, Policy("tiny"), epochs=3), steps=1000)) == 3 * NUM_TRAIN


def test_the_cursor_goes_on_after_the_last_admitted_group() -> None:
    whole = texts(PromptSource(TASK, Policy("tiny"), epochs=2))
    first = PromptSource(TASK, Policy("tiny"), epochs=2)
    begin = texts(first, tickets=NUM_TRAIN + 3)
    rest = PromptSource(TASK, Policy("tiny"), epochs=2)
    rest.load_state(first.state())
    assert begin + texts(rest) == whole


def test_the_order_is_that_of_the_seed_given_else_of_the_run() -> None:
    assert texts(PromptSource(TASK, Policy("tiny"), seed=RUN_SEED)) == texts(PromptSource(TASK, Policy("tiny")))
    assert texts(PromptSource(TASK, Policy("tiny"), seed=1)) != texts(PromptSource(TASK, Policy("tiny")))


def test_long_prompts_are_passed_over_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{"x" * n}"}}' for n in range(1, 41)))
    source = PromptSource(Task(str(path)), Policy("tiny"), max_prompt_tokens=23)
    record = admitted(source)
    found = record.groups("prompts")
    assert found
    assert all(len(group[0].token_ids) <= 23 for group in found)
    assert record.metrics["prompts_too_long"] + len(found) == len(load_rows(Task(str(path))).train)
    with pytest.raises(ConfigError, match="longer than max_prompt_tokens = 2; raise it"):
        groups(PromptSource(Task(str(path)), Policy("tiny"), max_prompt_tokens=2))


def long_rows(tmp_path: Path) -> tuple[Task, int, int]:
    """A task, and of its training prompts how many there are, and how many have more than 23 tokens."""
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(f'{{"prompt": "{"x" * n}"}}' for n in range(1, 41)))
    record = admitted(PromptSource(Task(str(path)), Policy("tiny"), max_prompt_tokens=99))
    lengths = [len(group[0].token_ids) for group in record.groups("prompts")]
    return Task(str(path)), len(lengths), sum(length > 23 for length in lengths)


def test_long_prompts_lose_their_beginning_and_are_counted(tmp_path: Path) -> None:
    task, total, long = long_rows(tmp_path)
    whole = admitted(PromptSource(task, Policy("tiny"), max_prompt_tokens=99)).groups("prompts")
    record = admitted(PromptSource(task, Policy("tiny"), max_prompt_tokens=23, too_long="truncate"))
    found = record.groups("prompts")
    assert (len(found), record.metrics["prompts_too_long"]) == (total, long) and 0 < long < total
    for (cut, *_), (before, *_) in zip(found, whole, strict=True):
        assert cut.token_ids.tolist() == before.token_ids[-23:].tolist() and cut.text == before.text


def test_the_share_of_long_prompts_is_told(tmp_path: Path) -> None:
    task, total, long = long_rows(tmp_path)
    record = admitted(PromptSource(task, Policy("tiny"), max_prompt_tokens=23))
    assert (len(record.groups("prompts")), record.metrics["prompts_too_long"]) == (total - long, long)
    assert record.gauges["prompts_too_long_share"][-1] == pytest.approx(long / total)


def test_long_prompts_are_an_error_where_that_is_asked_for(tmp_path: Path) -> None:
    task, total, long = long_rows(tmp_path)
    with pytest.raises(ConfigError, match=f"{long} of {total} prompts of .* longer than max_prompt_tokens = 23"):
        groups(PromptSource(task, Policy("tiny"), max_prompt_tokens=23, too_long="error"))
    assert len(groups(PromptSource(task, Policy("tiny"), max_prompt_tokens=99, too_long="error"))) == total
    (problem,) = PromptSource(task, Policy("tiny"), too_long="cut").check(None)  # type: ignore[arg-type]
    assert problem == "too_long is 'cut'; choose one of drop, truncate, error"


def test_settings_out_of_range_are_problems() -> None:
    assert PromptSource(TASK, Policy("tiny")).check(None) == []
    problems = PromptSource(TASK, Policy("tiny"), repeat=0, epochs=0, max_prompt_tokens=0).check(None)
    assert [problem.split()[0] for problem in problems] == ["repeat", "epochs", "max_prompt_tokens"]


def test_a_cursor_is_good_for_the_same_prompts_in_the_same_order(tmp_path: Path) -> None:
    source = PromptSource(TASK, Policy("tiny"))
    groups(source, tickets=5)
    assert (source.state()["epoch"], source.state()["position"]) == (0, 5)
    saved = Saved(tmp_path, 1, RUN_SEED, {0: source.state()})
    assert PromptSource(TASK, Policy("tiny"), repeat=4).check_resume(saved) == []
    for other in (
        PromptSource(Task("arithmetic:max_value=4"), Policy("tiny")),
        PromptSource(TASK, Policy("tiny"), num_prompts=8),
        PromptSource(TASK, Policy("tiny"), seed=3),
    ):
        (problem,) = other.check_resume(saved)
        assert "the prompts of epoch 0 differ from those that the run was started with" in problem
    reseeded = replace(saved, seed=1)
    assert PromptSource(TASK, Policy("tiny")).check_resume(reseeded), "another --seed is another order"
    assert PromptSource(TASK, Policy("tiny"), seed=RUN_SEED).check_resume(reseeded) == []


def test_a_cursor_at_the_begin_of_an_epoch_is_good_for_any_prompts(tmp_path: Path) -> None:
    saved = Saved(tmp_path, 1, 0, {0: PromptSource(TASK, Policy("tiny")).state()})
    assert PromptSource(Task("arithmetic:max_value=4"), Policy("tiny")).check_resume(saved) == []


# Mixtures


def mixed(tmp_path: Path, a: int, b: int, weights: tuple[float, float], first: str = "b") -> Task:
    for name, number, prefix in (("a", a, "a"), ("b", b, first)):
        lines = [json.dumps({"prompt": f"{prefix}{n}", "answer": str(n)}) for n in range(number)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    return Task(f"{weights[0]}*{tmp_path}/a.jsonl + {weights[1]}*{tmp_path}/b.jsonl")


@pytest.mark.parametrize(("most", "a", "b"), [(20, 15, 5), (2, 1, 1), (10, 8, 2)])
def test_the_first_prompts_of_a_mixture_are_those_of_each_source_by_its_weight(
    tmp_path: Path, most: int, a: int, b: int
) -> None:
    source = PromptSource(mixed(tmp_path, 60, 60, (0.75, 0.25)), Policy("tiny"), num_prompts=most)
    source.preflight()
    asked = Counter(row.columns["of_task"][-7] for row in source.rows())
    assert (asked["a"], asked["b"]) == (a, b)


def test_a_mixture_of_fewer_prompts_than_sources_is_refused(tmp_path: Path) -> None:
    source = PromptSource(mixed(tmp_path, 60, 60, (0.75, 0.25)), Policy("tiny"), num_prompts=1)
    with pytest.raises(ConfigError, match=r"num_prompts is 1, and task .* has 2 sources"):
        source.preflight()


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_a_mixture_with_a_source_without_rows_is_refused(tmp_path: Path, where: str) -> None:
    task = mixed(tmp_path, 40, 40, (0.5, 0.5), first="a")
    task = Task(" + ".join(f"{term.weight}*{term.text}:rows={where}" for term in task.sources))
    for source in (PromptSource(task, Policy("tiny")), TaskSource(task)):
        with pytest.raises(
            ConfigError, match=rf"has no row of \S+b.jsonl:rows={where} to ask: they are all held out, or"
        ):
            source.preflight()


def test_a_share_below_one_row_is_asked_in_some_epochs(tmp_path: Path) -> None:
    source = PromptSource(mixed(tmp_path, 60, 60, (0.99, 0.01)), Policy("tiny"), epochs=4)
    of_b = [group[0].epoch for group in groups(source) if group[0].columns["of_task"].endswith("b.jsonl")]
    assert 0 in of_b and len(of_b) == 3, "4 epochs of 0.54 rows of b beside 53 of a, rounded up"


def test_an_epoch_without_rows_ends_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PromptSource, "_epoch_order", lambda self, epoch: [])
    assert groups(PromptSource(TASK, Policy("tiny")), steps=5, tickets=3) == []
