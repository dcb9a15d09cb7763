"""The environment node with several seats, in the hands of a test; scripts stand for the generators."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from flowrl.environments import Observation
from flowrl.errors import ConfigError
from flowrl.messages import Prompt
from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.nodes import Environment, Limits, Shaping
from flowrl.nodes.episodes.attempt import join_observations
from flowrl.testing import NodeRecord, NodeRig
from tests.environments import play_envs
from tests.nodes.episodes.test_nodes_environment import TOKENIZER, Script, prompt

PLAYED = str(Path(play_envs.__file__))


def play(
    script: Any, *, environment: str = "Bids", opponent: Any = None, seed: int = 0, prompts: int = 1, **options: Any
) -> NodeRecord:
    """Play games to their end."""

    async def life() -> NodeRecord:
        node = Environment(f"{PLAYED}:{environment}", Policy("tiny"), **{"limits": Limits(tokens=400), **options})
        answers = {"generate": script} | ({} if opponent is None else {"opponent": opponent})
        async with NodeRig(node, name="environment", answers=answers) as rig:
            rig.feed("prompts", *(prompt(member, seed=seed) for member in range(prompts)), ticket=3)
            return await rig.finished()

    return asyncio.run(life())


def only_game(record: NodeRecord) -> Episode:
    (episode,) = record.sent("episodes")
    assert isinstance(episode, Episode)
    return episode


def texts(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(one.token_ids.tolist()) for one in episode.sequences]


def sampled(episode: Episode) -> list[str]:
    return [TOKENIZER.decode(one.token_ids[one.policy_mask].tolist()) for one in episode.sequences]


def test_each_seat_has_a_sequence_of_what_it_saw_and_said() -> None:
    script = Script("3", "5", "4", "end")
    episode = only_game(play(script))
    assert episode.seats == (0, 1) and episode.turns == 4
    assert texts(episode) == [
        "<|user|>you are 0<|end|><|assistant|>3<|end|><|user|>other said 5<|end|><|assistant|>4<|end|>",
        "<|user|>you are 1\nother said 3<|end|><|assistant|>5<|end|><|user|>other said 4<|end|><|assistant|>end<|end|>",
    ]
    assert sampled(episode) == ["3<|end|>4<|end|>", "5<|end|>end<|end|>"]
    assert [(turn.turn, turn.trained) for turn in script.turns] == [(number, True) for number in range(4)]
    assert len({turn.seed for turn in script.turns}) == 4


def test_each_seat_gets_its_own_reward_at_its_last_turn() -> None:
    episode = only_game(play(Script("3", "5", "4", "end")))
    assert episode.seat_rewards == ((0, 7.0), (1, 15.0)) and episode.reward == episode.raw_reward == 11.0
    assert [reward for _, reward in episode.rewards_by_turn] == [3.0, 4.0, 5.0, 10.0]
    places = [place for place, _ in episode.rewards_by_turn]
    assert places == sorted(places) and all(episode.whole_mask[place] for place in places)
    assert episode.metrics["seat_0_reward"] == 7.0 and episode.metrics["seat_1_reward"] == 15.0


def test_an_environment_in_a_process_of_its_own_is_played_alike() -> None:
    here, apart = (only_game(play(Script("3", "5", "4", "end"), environment=name)) for name in ("Bids", "BidsApart"))
    assert texts(here) == texts(apart) and here.rewards_by_turn == apart.rewards_by_turn


def test_a_reward_for_what_another_seat_did_is_added_to_the_last_turn() -> None:
    episode = only_game(play(Script("3", "5", "give", "end")))
    assert episode.seat_rewards == ((0, 3.0), (1, 25.0))
    assert [reward for _, reward in episode.rewards_by_turn] == [3.0, 0.0, 15.0, 10.0]


def test_a_reward_before_the_first_turn_belongs_to_the_first_turn() -> None:
    episode = only_game(play(Script("give", "end")))
    assert [reward for _, reward in episode.rewards_by_turn] == [0.0, 20.0]


def test_shaping_applies_to_each_seat() -> None:
    shaping = Shaping(negate=True, clip=(0.0, 8.0))
    episode = only_game(play(Script("3", "5", "4", "end"), shaping=shaping))
    assert episode.seat_rewards == ((0, -7.0), (1, -8.0)) and episode.raw_reward == 11.0
    assert sum(reward for _, reward in episode.rewards_by_turn) == -15.0


@pytest.mark.parametrize(("limits", "cut"), [(Limits(tokens=400, turns=3), "turns"), (Limits(tokens=60), "tokens")])
def test_limits_are_those_of_the_game_and_of_each_sequence(limits: Limits, cut: str) -> None:
    episode = only_game(play(Script("3"), limits=limits))
    assert episode.cut == cut and episode.seats == (0, 1)
    assert max(one.token_ids.size for one in episode.sequences) <= 60
    assert cut == "tokens" or episode.turns == 3


def test_a_call_that_cannot_be_made_is_told_to_the_seat_that_made_it() -> None:
    episode = only_game(play(Script("x", malformed="no closing brace")))
    assert (episode.cut, episode.turns, episode.seats) == ("malformed_calls", 3, (0,))
    assert texts(episode)[0].count("Nothing was called.") == 2


@pytest.mark.parametrize("seat", [0, 1])
def test_an_opponents_tokens_are_no_part_of_the_episode(seat: int) -> None:
    policy, opponent = Script("3", "end"), Script("7")
    record = play(policy, opponent=opponent, seed=seat)
    episode = only_game(record)
    assert episode.seats == (seat,) and [seat for seat, _ in episode.seat_rewards] == [seat]
    assert sampled(episode) == ["3<|end|>end<|end|>"] and "other said 7" in texts(episode)[0]
    assert episode.turns == 2 and [turn.turn for turn in policy.turns] == [0, 1]
    assert [turn.turn for turn in opponent.turns] == list(range(len(opponent.turns)))
    assert all(turn.trained for turn in policy.turns) and not any(turn.trained for turn in opponent.turns)
    ids = [turn.request_id for turn in (*policy.turns, *opponent.turns)]
    assert len(set(ids)) == len(ids) == len({turn.seed for turn in (*policy.turns, *opponent.turns)})
    assert episode.reward == episode.raw_reward == dict(episode.seat_rewards)[seat] == 13.0
    assert episode.metrics[f"seat_{1 - seat}_reward"] == 7.0 * len(opponent.turns)


def test_a_game_that_the_opponent_ends_before_the_policys_turn_is_dropped() -> None:
    record = play(Script("3"), opponent=Script("end"), seed=1)
    assert not record.sent("episodes") and [lost.reason for lost in record.lost] == ["no_turn"]
    assert len(record.events("episode")) == 1


def test_a_held_out_game_that_is_over_before_the_policys_turn_has_its_score() -> None:
    async def life() -> Episode:
        node = Environment(f"{PLAYED}:Bids", Policy("tiny"), limits=Limits(tokens=400))
        answers = {"generate": Script("3"), "opponent": Script("end")}
        async with NodeRig(node, name="environment", answers=answers) as rig:
            episode: Episode = await rig.ask("requests", prompt(seed=1))
            await rig.finished()
            return episode

    episode = asyncio.run(life())
    assert episode.turns == episode.response_tokens == 0 and episode.raw_reward == 0.0
    assert episode.prompt_tokens == episode.token_ids.size
    assert texts(episode) == ["<|user|>you are 1<|end|><|assistant|>"]


def test_members_of_a_group_play_the_same_seat_and_the_next_epoch_another() -> None:
    opponent, policy = Script("7"), Script("end")
    episodes = play(policy, opponent=opponent, seed=1, prompts=3).sent("episodes")
    assert [episode.seats for episode in episodes] == [(1,)] * 3
    node = Environment(f"{PLAYED}:Bids", Policy("tiny"))
    node.opponent.connected = True
    node._pool = type("Pool", (), {"seats": 2})()
    later = {epoch: node._trained_seats(Prompt(**{**prompt(seed=1).__dict__, "epoch": epoch})) for epoch in range(3)}
    assert later == {0: (1,), 1: (0,), 2: (1,)}


def test_an_opponent_needs_a_second_seat() -> None:
    with pytest.raises(ConfigError, match=r"has one seat, so there is no opponent to play; leave"):
        play(Script("end"), environment="Echo", opponent=Script("end"))


def test_a_seat_that_is_shown_nothing_at_first_reads_what_the_other_did() -> None:
    episode = only_game(play(Script("3", "end"), environment="Silent"))
    assert texts(episode) == [
        "<|user|><|end|><|assistant|>3<|end|>",
        "<|user|>other said 3<|end|><|assistant|>end<|end|>",
    ]


def test_texts_that_a_seat_has_not_read_are_one_message() -> None:
    shown = [Observation("a"), Observation("b")]
    assert join_observations(shown, (), 999) == [{"role": "user", "content": "a\nb"}]
    assert join_observations([], (), 999) == [{"role": "user", "content": ""}]
    told = Observation(messages=({"role": "user", "content": "c"},))
    assert [message["content"] for message in join_observations([told, *shown], (), 999)] == ["c", "a", "b"]
