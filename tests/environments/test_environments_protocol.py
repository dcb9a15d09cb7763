"""The protocol's values, the names of environments, and the rows of a task that is played."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.environments import (
    Action,
    EnvironmentName,
    EnvironmentRow,
    MalformedValue,
    Observation,
    Step,
    ToolCall,
    environment_rows,
)
from flowrl.environments.environment_class import find_environment, import_package
from flowrl.environments.protocol import as_plain, read_action, read_step
from flowrl.errors import ConfigError
from flowrl.tasks.user_code import LENGTH, _unpack_message, pack_message

CASES = "tests/environments/environment_cases.py"
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

MALFORMED: dict[str, tuple[Callable[[], object], str]] = {
    "text that is none": (lambda: Observation(3), "an observation's text is 3; it needs text"),  # type: ignore[arg-type]
    "half a surrogate pair": (lambda: Observation("\ud800"), "half of a surrogate pair"),
    "text and messages": (
        lambda: Observation("a", messages=({"role": "user", "content": "b"},)),
        "both text and messages",
    ),
    "messages as text": (lambda: Observation(messages="hi"), "messages is 'hi'; it needs a tuple"),  # type: ignore[arg-type]
    "a message without content": (lambda: Observation(messages=({"role": "user"},)), "it needs role and content"),
    "a message of the policy": (
        lambda: Observation(messages=({"role": "assistant", "content": ""},)),
        "has to be one of system, user, tool",
    ),
    "a tool without a name": (lambda: Observation(tools=({"type": "function"},)), "it needs {'type'"),
    "a tool with an object": (
        lambda: Observation(tools=({"function": {"name": "f", "x": object()}},)),
        "'f' has values that JSON cannot represent",
    ),
    "a metric that is text": (lambda: Observation(metrics={"a": "b"}), "the metric 'a' is 'b'"),  # type: ignore[dict-item]
    "a step of text": (lambda: Step("text"), "a step's observation is 'text'"),  # type: ignore[arg-type]
    "no reward": (lambda: Step(Observation(), None), "a reward is None; it needs a finite number"),  # type: ignore[arg-type]
    "an infinite reward": (lambda: Step(Observation(), float("inf")), "a reward is inf"),
    "a reward of a seat": (lambda: Step(Observation(), (0.0, float("nan"))), "a reward is nan"),
    "an end that is a number": (lambda: Step(Observation(), terminated=1), "terminated is 1; it needs True or False"),  # type: ignore[arg-type]
    "no tokens": (lambda: Step(Observation(), max_tokens=0), "max_tokens is 0"),
    "an empty stop": (lambda: Step(Observation(), stop=("",)), "a stop text is empty"),
    "stops as text": (lambda: Step(Observation(), stop="ab"), "stop is 'ab'; it needs a tuple"),  # type: ignore[arg-type]
    "an unknown finish": (lambda: Action("a", finish_reason="tired"), "finish_reason is 'tired'"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_an_illegal_value_does_not_construct(name: str) -> None:
    make, says = MALFORMED[name]
    with pytest.raises(MalformedValue) as error:
        make()
    assert says in str(error.value)


def test_values_of_numpy_become_pythons_own() -> None:
    step = Step(Observation(), np.float32(0.5), np.bool_(True), metrics={"a": np.int64(2)})  # type: ignore[arg-type, dict-item]
    assert (type(step.reward), step.reward) == (float, 0.5)
    assert step.terminated is True and step.metrics == {"a": 2.0} and step.over
    with pytest.raises(dataclasses.FrozenInstanceError):
        step.reward = 1.0  # type: ignore[misc]


finite = st.floats(allow_nan=False, allow_infinity=False)
text = st.text(st.characters(exclude_categories=["Cs"]))
observations = st.builds(
    Observation, text, tools=st.just((TOOL,)) | st.just(()), metrics=st.dictionaries(text, finite)
) | st.builds(Observation, messages=st.lists(st.fixed_dictionaries({"role": st.just("user"), "content": text})))
steps = st.builds(
    Step,
    observations | st.tuples(observations, observations),
    finite | st.tuples(finite, finite),
    st.booleans(),
    st.booleans(),
    st.dictionaries(text, finite),
    st.none() | st.integers(1, 99),
    st.lists(text.filter(bool)).map(tuple),
)
halves = st.text(st.characters())
calls = st.builds(ToolCall, halves, st.dictionaries(halves, st.integers() | st.just(1 << 99) | halves), halves)
actions = st.builds(
    Action, text, st.lists(calls).map(tuple), st.lists(st.integers(0, 1 << 31)).map(tuple), st.just("length")
)


@given(step=steps, action=actions)
def test_values_come_through_a_connection_as_they_were(step: Step, action: Action) -> None:
    assert read_step(sent(as_plain(step))) == step
    assert read_action(sent(as_plain(action))) == action


def sent(value: Any) -> Any:
    return _unpack_message(pack_message(value)[LENGTH.size :])


@pytest.mark.parametrize("found", [None, 3, [], {}, {"observation": None}, {"observation": {"txt": ""}}, {"new": 1}])
def test_an_answer_that_is_no_step_is_malformed(found: Any) -> None:
    with pytest.raises(MalformedValue):
        read_step(found)


def test_a_parsed_message_is_an_action() -> None:
    asked = {"name": "add", "arguments": '{"a": 123456789012345678901, "b": [null]}'}
    calls = [{"id": "c1", "type": "function", "function": asked}, {"function": {"name": "now", "arguments": {}}}]
    found = Action.of_message({"role": "assistant", "content": "hm", "tool_calls": calls}, token_ids=(1, 2))
    expected = (ToolCall("add", {"a": 123456789012345678901, "b": [None]}, "c1"), ToolCall("now"))
    assert found == Action("hm", expected, (1, 2), "stop")
    assert Action.of_message({"role": "assistant", "content": None}) == Action("")


# Names


@pytest.mark.parametrize(
    ("name", "adapter", "place", "options"),
    [
        ("gymnasium/FrozenLake-v1", "gymnasium", "FrozenLake-v1", {}),
        ("gymnasium/A/B-v1:x=False,y=[1,2]", "gymnasium", "A/B-v1", {"x": False, "y": [1, 2]}),
        ("reasoning_gym/chain_sum:extract=tag", "reasoning_gym", "chain_sum", {"extract": "tag"}),
        ("envs/own.py:Class", "", "envs/own.py:Class", {}),
        ("own.py:Class:size=4", "", "own.py:Class", {"size": 4}),
        ("package.module:Class:size=4", "", "package.module:Class", {"size": 4}),
        ("gymnasium.py:Class", "", "gymnasium.py:Class", {}),
        ("tools/own.py:Class", "", "tools/own.py:Class", {}),
        ("tools/data/q.jsonl:tools=own.py:f", "tools", "data/q.jsonl", {"tools": "own.py:f"}),
    ],
)
def test_a_name_has_a_place_and_options(name: str, adapter: str, place: str, options: dict[str, Any]) -> None:
    found = EnvironmentName(name)
    assert (found.adapter, found.place, dict(found.options)) == (adapter, place, options)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "names no class"),
        ("FrozenLake-v1", "names no class; write gymnasium/NAME"),
        ("own.py", "names no class"),
        ("own.py:", "names no class"),
        ("own.py:size=4", "names no class"),
        ("own.py:Class:size", "environment 'own.py:Class:size': 'size' is no option"),
        ("own.py:Class:size={1}", "options are numbers, texts"),
        ("textworld/game", "names no class"),
        ("no/such.py:Class", "the environment's file no/such.py does not exist"),
        ("no_such_package.envs:Class", "the environment's module 'no_such_package.envs' does not import"),
        (f"{CASES}:Obedien", "has no class 'Obedien'; its environments are Cooperative, Counter, Duel"),
        (f"{CASES}:said", "is no environment; derive the class from flowrl.environments.Env"),
        (f"{CASES}:Obedient:at_rest=raise", "has no option 'at_rest'; did you mean at_reset?"),
        (f"{CASES}:NotAsync", "NotAsync.step is not async; write async def"),
        (f"{CASES}:Unfinished", "Unfinished has no method step; define it"),
    ],
)
def test_a_users_mistake_gets_one_message(name: str, says: str) -> None:
    with pytest.raises(ConfigError) as error:
        find_environment(name)
    assert says in str(error.value)


def test_a_file_that_does_not_import_is_named(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import no_such_package")
    with pytest.raises(ConfigError, match=r"broken.py does not import: ModuleNotFoundError"):
        find_environment(f"{tmp_path / 'broken.py'}:Class")
    (tmp_path / "script.py").write_text("exit()")
    with pytest.raises(ConfigError, match=r"script.py calls sys.exit\(None\) while it is imported; put what it does"):
        find_environment(f"{tmp_path / 'script.py'}:Class")


def test_a_package_that_ends_python_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a_script_of_games.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    said = r"environment 'verifiers/x': the package x calls sys.exit\(3\) while it is imported; put what it does"
    with pytest.raises(ConfigError, match=said):
        import_package(EnvironmentName("verifiers/x"), "a_script_of_games", distribution="x")


# Rows


def test_one_row_in_eight_is_held_out_and_the_parts_are_disjoint() -> None:
    rows = environment_rows("own.py:Class:size=4", number=4000)
    assert len(rows.train) + len(rows.held_out) == 4000
    assert 440 < len(rows.held_out) < 560
    assert not {row.seed for row in rows.train} & {row.seed for row in rows.held_out}
    assert rows.train[0].task == {"name": "own.py:Class", "options": {"size": 4}, "seed": rows.train[0].seed}


def test_a_rows_part_depends_on_its_name_options_and_seed_alone() -> None:
    few = environment_rows("gymnasium/FrozenLake-v1", number=100)
    assert environment_rows("gymnasium/FrozenLake-v1", number=4000).held_out[: len(few.held_out)] == few.held_out
    others = (EnvironmentRow("a"), EnvironmentRow("a", {"b": 1}), EnvironmentRow("a", {"b": 2}), EnvironmentRow("b"))
    assert len({row.prompt_id for row in (*others, EnvironmentRow("a", seed=1))}) == 5
    assert EnvironmentRow("a", {"b": 1, "c": 2}).prompt_id == EnvironmentRow("a", {"c": 2, "b": 1}).prompt_id
