"""Paths that a user names: `~` is the home directory, and one that nobody knows is told in a sentence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from flowrl.cli import main
from flowrl.errors import ConfigError
from flowrl.machine.disk import user_path
from flowrl.models import Policy, check_model, check_template
from flowrl.models.model_layout import known_shape
from flowrl.nodes import PairWriter, RemainingPrompts, ResponseWriter
from flowrl.tasks import Task, load_rows
from flowrl.tasks.reward_calls.judge import load_judge
from flowrl.tasks.reward_calls.signatures import declared_convention
from flowrl.tasks.rewards import parse_reward

NOBODY = "~no_such_user/file"
ASKED: dict[str, Callable[[], object]] = {
    "a reward": lambda: load_judge(f"{NOBODY}.py:f"),
    "a file of one reward": lambda: parse_reward(f"{NOBODY}.py"),
    "the convention of a reward": lambda: declared_convention(f"{NOBODY}.py:f"),
    "rows": lambda: load_rows(Task(f"{NOBODY}.jsonl")),
    "a model": lambda: check_model(Policy(NOBODY)),
    "the shape of a model": lambda: known_shape(Policy(f"{NOBODY}.json")),
    "a chat template": lambda: check_template(Policy("tiny", chat_template=NOBODY)),
    "pairs": PairWriter(f"{NOBODY}.jsonl", Task()).preflight,
    "responses": ResponseWriter(f"{NOBODY}.jsonl", Task(), size=1).preflight,
    "what is left": RemainingPrompts(Task(), Policy("tiny"), out=f"{NOBODY}.jsonl", per_group=1).preflight,
}


@pytest.mark.parametrize("what", ASKED)
def test_a_home_directory_that_is_unknown_is_told(what: str) -> None:
    with pytest.raises(ConfigError, match=r"^~no_such_user/file.* begins with ~no_such_user, and there is no user of"):
        ASKED[what]()


@pytest.mark.parametrize("command", [("export", NOBODY, "--name", "x"), ("merge", NOBODY, "--out", "x")])
def test_commands_tell_it_too(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*command]) == 2
    assert capsys.readouterr().err.startswith("flowrl: ~no_such_user/file begins with ~no_such_user")


def test_the_home_directory_is_put_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert user_path("~/a/b") == Path("/home/me/a/b") and user_path("a/~/b") == Path("a/~/b")
