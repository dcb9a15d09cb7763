"""The environment node in the hands of a test; a script stands for the generator."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl.environments import EnvironmentName, EnvironmentRow, Observation, ToolCall, environment_rows
from flowrl.environments.adapters import gymnasium_env, verifiers_env
from flowrl.errors import ConfigError, FlowrlError, NodeFailed
from flowrl.messages import Prompt
from flowrl.messages.episode import Episode, Reply, Turn
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes import Environment, EnvironmentSource, Limits
from flowrl.nodes.episodes.attempt import after_system_prompt, messages_of, read_action
from flowrl.nodes.episodes.attempt_outcomes import FIRST_ATTEMPTS
from flowrl.nodes.episodes.episode_node import turn_seed
from flowrl.nodes.sources.row_source import prompt_fields
from flowrl.testing import NodeRecord, NodeRig
from tests.environments import play_envs

PLAYED = str(Path(play_envs.__file__))
TOKENIZER = character_tokenizer()


def prompt(member: int = 0, seed: int = 0) -> Prompt:
    row = EnvironmentRow("played", seed=seed)
    return Prompt(
        sample_id=f"g:{member}",
        group_id="g",
        prompt_id=row.prompt_id,
        epoch=0,
        member=member,
        group_size=8,
        seed=100 + member,
        **prompt_fields(row),
    )


class Script:
    """Stands for the generator: says the texts in turn, from the beginning for each attempt."""

    def __init__(self, *texts: str, calls: Sequence[Any] = (), malformed: str = "", ended: bool = True) -> None:
        self.texts, self.calls, self.malformed, self.ended = texts, calls, malformed, ended
        self.turns: list[Turn] = []

    def __call__(self, turn: Turn) -> Reply:
        self.turns.append(turn)
        text = self.texts[turn.turn % len(self.texts)]
        ids = TOKENIZER(text + ("<|end|>" if self.ended else ""))["input_ids"][: turn.max_tokens]
        whole = self.ended and len(ids) == len(text) + 1
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self.calls and turn.turn < len(self.calls):
            call = {"name": self.calls[turn.turn], "arguments": {"of": "1"}}
            message["tool_calls"] = [{"id": "c1", "type": "function", "function": call}]
        size = len(ids)
        return Reply(
            request_id=turn.request_id,
            token_ids=np.array(ids, np.int32),
            behavior_logprobs=-np.arange(1, size + 1, dtype=np.float32),
            versions=np.full(size, turn.turn, np.int32),
            finish_reason="stop" if whole else "length",
            message=message,
            malformed=self.malformed,
            cached_tokens=0,
            queued_s=0.0,
            generated_s=0.0,
            generator="generator/0",
        )


def play(
    script: Any, environment: str = "Echo", *, prompts: int = 1, limits: Limits | None = None, **options: Any
) -> NodeRecord:
    """Play episodes to their end."""

    async def life() -> NodeRecord:
        node = Environment(f"{PLAYED}:{environment}", Policy("tiny"), limits=limits or Limits(tokens=400), **options)
        async with NodeRig(node, name="environment", answers={"generate": script}) as rig:
            rig.feed("prompts", *(prompt(member, seed=member) for member in range(prompts)), ticket=3)
            return await rig.finished()

    return asyncio.run(life())


def failing(tmp_path: Path, *, times: int, hang: int = 0) -> str:
    """The trial episode of the preflight is the first that fails."""
    return f"Failing:begun={tmp_path / 'begun'},times={times},hang={hang}"


def only_episode(record: NodeRecord) -> Episode:
    (episode,) = record.sent("episodes")
    assert isinstance(episode, Episode)
    return episode


def test_an_episode_begins_with_the_system_prompt() -> None:
    script = Script("one", "end")
    play(script, system_prompt="Short.")
    said = [TOKENIZER.decode(turn.token_ids.tolist()) for turn in script.turns]
    assert said[0] == "<|system|>Short.<|end|><|user|>start 0<|end|><|assistant|>"
    assert said[1] == said[0] + "one<|end|><|user|>one<|end|><|assistant|>"


def test_two_system_prompts_are_refused() -> None:
    own = Observation(messages=({"role": "system", "content": "own"}, {"role": "user", "content": "?"}))
    with pytest.raises(ConfigError, match=r"leave --task\.system-prompt out"):
        after_system_prompt(own, "Short.")
    assert after_system_prompt(own, "") is own
    empty = Observation(tools=(play_envs.CALCULATOR,))
    shown = after_system_prompt(empty, "Short.")
    assert (shown.messages, shown.tools) == (({"role": "system", "content": "Short."},), empty.tools)


def test_an_episode_is_what_was_sampled_and_what_was_fed_by_id() -> None:
    script = Script("one", "two", "end")
    episode = only_episode(play(script))
    said = [TOKENIZER.decode(turn.token_ids.tolist()) for turn in script.turns]
    assert said[0] == "<|user|>start 0<|end|><|assistant|>"
    assert said[1] == said[0] + "one<|end|><|user|>one<|end|><|assistant|>"
    assert TOKENIZER.decode(episode.token_ids.tolist()) == said[2] + "end<|end|>"
    assert TOKENIZER.decode(episode.token_ids[episode.policy_mask].tolist()) == "one<|end|>two<|end|>end<|end|>"
    assert episode.versions[episode.policy_mask].tolist() == [0] * 4 + [1] * 4 + [2] * 4
    assert episode.behavior_logprobs[episode.policy_mask].tolist() == [-1.0, -2.0, -3.0, -4.0] * 3
    assert episode.prompt_tokens == script.turns[0].token_ids.size
    assert (episode.turns, episode.reward, episode.truncated, episode.cut) == (3, 1.5, False, "")
    places = [place for place, _ in episode.rewards_by_turn]
    assert all(episode.policy_mask[place] for place in places) and places[-1] == episode.token_ids.size - 1
    assert episode.metrics == {"steps": 1.0, "turns": 3.0}


def test_where_metrics_of_episodes_are_is_said_once_for_each_name() -> None:
    said = [text for text in play(Script("end"), prompts=3).progress if "metrics" in text]
    assert said == [
        "metrics of episodes (steps) are shown by flowrl show, episode by episode; they are not in metrics.jsonl"
    ]


def test_a_turn_names_its_place_and_its_seed_differs_from_every_other() -> None:
    script = Script("a", "end")
    play(script, prompts=2)
    assert {(turn.sample_id, turn.turn, turn.attempt, turn.ticket) for turn in script.turns} == {
        (f"g:{member}", number, 0, 3) for member in range(2) for number in range(2)
    }
    assert len({turn.request_id for turn in script.turns}) == len({turn.seed for turn in script.turns}) == 4
    assert turn_seed(1, 0, 1) != turn_seed(1, 1, 0) and 0 <= turn_seed(7, 0, 0) < 1 << 63


@pytest.mark.parametrize(
    ("limits", "cut"),
    [
        (Limits(tokens=400, turns=2), "turns"),
        (Limits(tokens=60), "tokens"),
        (Limits(tokens=400, episode_s=1e-9), ""),
    ],
)
def test_limits_cut_an_episode_off_before_the_model_does(limits: Limits, cut: str) -> None:
    if limits.episode_s < 1:
        with pytest.raises(FlowrlError, match="mostly by no_room"):
            play(Script("on"), limits=limits, prompts=FIRST_ATTEMPTS)
        return
    script = Script("on and on")
    episode = only_episode(play(script, limits=limits))
    assert (episode.cut, episode.truncated) == (cut, True)
    assert episode.token_ids.size <= 60 or cut == "turns"
    assert all(turn.token_ids.size + turn.max_tokens <= (limits.tokens or 0) for turn in script.turns)
    assert episode.policy_mask[-1], "an episode ends with what the policy sampled last"


def test_a_reply_is_limited_by_the_turn_the_room_and_the_sampling() -> None:
    script = Script("on and on", "end")
    play(script, limits=Limits(tokens=400, turn_tokens=4))
    assert {turn.max_tokens for turn in script.turns} == {4}


@pytest.mark.parametrize("wanted", ["train", "mask", "drop"])
def test_what_was_cut_off_is_trained_masked_or_dropped(wanted: Any) -> None:
    record = play(Script("on"), limits=Limits(tokens=400, turns=2, on_truncated=wanted))
    if wanted == "drop":
        assert record.reasons() == [("dropped", "truncated")] and not record.sent("episodes")
    else:
        assert only_episode(record).masked == (wanted == "mask")
    ((*_, row),) = record.events("episode")
    assert row[3] == "turns", "the ledger says what cut it off"


def test_an_attempt_that_the_environment_fails_is_void_and_the_next_begins_anew(tmp_path: Path) -> None:
    script = Script("go")
    record = play(script, failing(tmp_path, times=3), limits=Limits(tokens=400, retries=2))
    episode = only_episode(record)
    assert (episode.attempts, episode.turns, episode.reward) == (3, 1, 1.0)
    assert record.events("void") == [("g:0", 0, "env_raised"), ("g:0", 1, "env_raised")]
    assert [turn.attempt for turn in script.turns] == [0, 1, 2]
    assert len({turn.seed for turn in script.turns}) == 3


@pytest.mark.parametrize(("hang", "cause"), [(0, "env_raised"), (1, "env_timed_out")])
def test_after_the_last_attempt_the_sample_fails_by_its_cause_and_has_no_reward(
    hang: int, cause: str, tmp_path: Path
) -> None:
    limits = Limits(tokens=400, retries=1, step_s=0.05)
    record = play(Script("go"), failing(tmp_path, times=9, hang=hang), limits=limits)
    assert record.reasons() == [("failed", cause)] and not record.sent("episodes")
    assert not record.events("scored") and not record.events("episode")
    ((sample_id, row),) = record.events("episode failed")
    assert sample_id == "g:0" and row[1] == 2 and row[3] == cause


def test_a_run_of_failures_ends_with_the_commonest_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl.nodes.episodes.attempt_outcomes.PATIENCE_S", 0.0)
    with pytest.raises(FlowrlError, match=r"16 of the last 16 attempts .* mostly by env_raised(.|\n)*no such move"):
        play(Script("go"), failing(tmp_path, times=999), prompts=8, limits=Limits(tokens=400, retries=3))


def test_calls_reach_the_environment_and_its_text_is_the_tools_answer() -> None:
    script = Script("", "end", calls=["sum"])
    with pytest.raises(ConfigError, match="tool"):  # the template of tiny knows no calls
        play(script, "Echo:tools=1")


def test_what_cannot_be_called_comes_back_and_three_in_a_row_cut_off() -> None:
    script = Script("hm", malformed="no closing brace")
    episode = only_episode(play(script, "Echo:tools=0"))
    assert (episode.cut, episode.turns, episode.reward) == ("malformed_calls", 3, 0.0)
    told = TOKENIZER.decode(script.turns[1].token_ids.tolist())
    assert "The call could not be read: no closing brace. Nothing was called." in told


def test_a_call_that_was_cut_off_is_not_made() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "sum", "arguments": {}}}
    reply = Script("text")(turn())
    message = {"role": "assistant", "content": "text", "tool_calls": [call]}
    made, unread = read_action(replaced(reply, message=message))
    assert [one.name for one in made.tool_calls] == ["sum"] and unread == ""
    cut, unread = read_action(replaced(reply, message=message, finish_reason="length"))
    assert cut.tool_calls == () and "cut off" in unread


def turn(**fields: Any) -> Turn:
    given = {
        "request_id": "r",
        "sample_id": "s",
        "group_id": "g",
        "turn": 0,
        "attempt": 0,
        "ticket": 0,
        "seed": 0,
        "token_ids": np.zeros(1, np.int32),
        "max_tokens": 99,
    }
    return Turn(**{**given, **fields})


def replaced(reply: Reply, **fields: Any) -> Reply:
    return Reply(**{**{name: getattr(reply, name) for name in reply.__dataclass_fields__}, **fields})


def test_observations_become_messages_of_the_user_or_answers_to_the_calls() -> None:
    calls = (ToolCall("sum", {}, "c1"), ToolCall("sum", {}, "c2"))
    assert messages_of(Observation("seen"), (), 999) == [{"role": "user", "content": "seen"}]
    assert messages_of(Observation("seen"), calls, 999) == [
        {"role": "tool", "content": "seen", "name": "sum", "tool_call_id": "c1"},
        {"role": "tool", "content": "", "name": "sum", "tool_call_id": "c2"},
    ]
    own = Observation(messages=({"role": "tool", "content": "a" * 200, "name": "x"},))
    (message,) = messages_of(own, calls, 64)
    assert message["name"] == "x" and len(message["content"].encode()) <= 64 and "left out" in message["content"]


def test_held_out_episodes_come_last_and_are_not_booked() -> None:
    script = Script("a", "end")

    async def life() -> tuple[Episode, NodeRecord]:
        node = Environment(f"{PLAYED}:Echo", Policy("tiny"), limits=Limits(tokens=400))
        async with NodeRig(node, name="environment", answers={"generate": script}) as rig:
            episode = await rig.ask("requests", prompt())
            return episode, await rig.finished()

    episode, record = asyncio.run(life())
    assert episode.reward == 1.0 and {turn.ticket for turn in script.turns} == {-1}
    assert not record.events("episode") and not record.events("request")


def test_an_environment_that_cannot_be_played_is_refused_before_anything_starts(tmp_path: Path) -> None:
    for name, text in (("Nothing", "has no class 'Nothing'"),):
        with pytest.raises(ConfigError, match=text):
            Environment(f"{PLAYED}:{name}", Policy("tiny")).preflight()
    bad = tmp_path / "bad.py"
    bad.write_text(
        "from flowrl.environments import Env\nclass Bad(Env):\n    async def reset(self, task, seed):\n"
        "        raise KeyError('map')\n    async def step(self, action): ...\n"
    )
    with pytest.raises(ConfigError, match=r"the trial episode of .*bad.py:Bad.* failed: (.|\n)*KeyError: 'map'"):
        Environment(f"{bad}:Bad", Policy("tiny")).preflight()
    bad.write_text(bad.read_text().replace("raise KeyError('map')", SHOWS_IMAGE))
    with pytest.raises(ConfigError, match=r"the trial episode of .*bad.py:Bad.* failed: (.|\n)*images are not su"):
        Environment(f"{bad}:Bad", Policy("tiny")).preflight()


SHOWS_IMAGE = (
    "from flowrl.environments import Observation; "
    "return Observation(messages=[{'role': 'user', 'content': [{'type': 'image_url', 'image_url': {'url': 'a'}}]}])"
)


def test_images_are_refused_by_the_space_or_the_examples_before_anything_is_played() -> None:
    spaces = pytest.importorskip("gymnasium").spaces
    pixels = spaces.Dict({"seen": spaces.Box(0, 255, (96, 96, 3), np.uint8)})
    with pytest.raises(ConfigError, match=r"shows images, uint8 of the shape \(96, 96, 3\); images are not sup"):
        gymnasium_env.check_observations(EnvironmentName("gymnasium/CarRacing-v3"), pixels)
    rows = [{"prompt": [{"role": "user", "content": [{"type": "text", "text": "a"}]}]}, {"prompt": "a text"}]
    shown = [{"prompt": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}]

    def examples(training: list[Any]) -> Any:
        datasets = {"get_dataset": training, "get_eval_dataset": rows}
        made = {name: lambda found=found: SimpleNamespace(to_list=lambda: found) for name, found in datasets.items()}
        return verifiers_env.load_examples(EnvironmentName("verifiers/seen"), SimpleNamespace(**made))

    assert examples(rows) == {True: rows, False: rows}
    with pytest.raises(ConfigError, match=r"'verifiers/seen' have parts of the kind image_url .* are not supported"):
        examples(shown)


def test_settings_out_of_range_are_said_in_sentences() -> None:
    wrong = Limits(turns=0, tokens=1, episodes=0, retries=-1, step_s=0, observation_bytes=3, on_truncated="no")  # type: ignore[arg-type]
    found = Environment("gymnasium/X", Policy("tiny"), limits=wrong, processes=0).check(None)
    assert len(found) == 8 and all(text.count(";") or "has to be" in text for text in found)
    assert "names no class" in Environment("nothing", Policy("tiny")).check(None)[0]


def test_the_source_sends_rows_and_keeps_held_out_ones_apart() -> None:
    source = EnvironmentSource("gymnasium/FrozenLake-v1", repeat=2, num_prompts=3)
    rows = environment_rows("gymnasium/FrozenLake-v1")
    assert source.rows() == rows.train[:3]
    held_out = EnvironmentSource("gymnasium/FrozenLake-v1", part="held_out").rows()
    assert not {row.prompt_id for row in held_out} & {row.prompt_id for row in rows.train}


def test_a_node_that_fails_names_itself() -> None:
    def broken(turn: Turn) -> Reply:
        raise RuntimeError("no generator")

    with pytest.raises((RuntimeError, NodeFailed, FlowrlError)):
        play(broken)
