"""The environment node with history="template": branches, places of rewards, texts, and what is refused."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from flowrl.messages.episode import Episode
from flowrl.models import Policy
from flowrl.nodes import Environment, Limits, Shaping
from flowrl.testing import NodeRig
from tests.nodes.episodes.test_nodes_environment import PLAYED, TOKENIZER, Script, prompt
from tests.runtime.runs.graphs_episodes.played import Rewriting


def played(script: Script, **options: Any) -> Episode:
    """One episode whose template shows of earlier replies what follows their last "c"."""

    async def life() -> Episode:
        node = Rewriting(f"{PLAYED}:Echo", Policy("tiny"), history="template", **options)
        async with NodeRig(node, name="environment", answers={"generate": script}) as rig:
            rig.feed("prompts", prompt(), ticket=3)
            (episode,) = (await rig.finished()).sent("episodes")
            assert isinstance(episode, Episode)
            return episode

    return asyncio.run(life())


def text(ids: Any) -> str:
    return str(TOKENIZER.decode(ids.tolist()))


def test_a_rewritten_context_begins_a_branch_and_every_sampled_token_is_in_one_loss() -> None:
    script = Script("acb", "b", "bca", "end")
    episode = played(script, limits=Limits(tokens=400))
    assert episode.turns == 4 and len(episode.sequences) == 3
    said = [text(turn.token_ids) for turn in script.turns]
    assert said[1] == "<|user|>start 0<|end|><|assistant|>b<|end|><|user|>acb<|end|><|assistant|>"
    # the second reply is kept as it was sampled, so the third context goes on after it
    assert [text(one.token_ids) for one in episode.sequences] == [
        said[0] + "acb<|end|>",
        said[2] + "bca<|end|>",
        said[3] + "end<|end|>",
    ]
    trained = [text(one.token_ids[one.policy_mask]) for one in episode.sequences]
    assert trained == ["acb<|end|>", "b<|end|>bca<|end|>", "end<|end|>"]
    assert [one.versions[one.policy_mask].tolist() for one in episode.sequences] == [
        [0] * 4,
        [1] * 2 + [2] * 4,
        [3] * 4,
    ]
    whole = np.concatenate([one.token_ids for one in episode.sequences])
    places = [place for place, _ in episode.rewards_by_turn]
    assert text(whole[places]) == "<|end|>" * 4 and episode.whole_mask[places].all()
    assert places == np.flatnonzero(episode.whole_mask)[[3, 5, 9, 13]].tolist()
    assert episode.response_text.startswith("acb<|end|>b<|end|>") and episode.response_text.endswith("end<|end|>")


def test_the_limit_of_tokens_holds_for_each_sequence() -> None:
    script = Script("xxxxcb", "yyyyyc", "zzzzzzc")
    episode = played(script, limits=Limits(tokens=60, turns=9))
    assert episode.cut == "tokens" and episode.num_tokens > 60
    assert max(one.token_ids.size for one in episode.sequences) <= 60


def test_negated_rewards_are_negated_in_every_turn() -> None:
    episode = played(Script("acb", "end"), limits=Limits(tokens=400), shaping=Shaping(negate=True))
    assert [reward for _, reward in episode.rewards_by_turn] == [-0.5, -0.5]
    assert episode.reward == -1.0 == -episode.raw_reward


def test_another_history_is_refused() -> None:
    (problem,) = Environment("gymnasium/X", Policy("tiny"), history="both").check(None)  # type: ignore[arg-type]
    assert problem == "history is 'both'; it has to be one of append, template"
