"""The generator on the real vLLM: what it samples, under which version, and what an update makes of it.

One engine serves the whole file, on an event loop in a thread of its own as in a run. Its tests may run in any order:
what only an engine without weights can show is noted when it starts, and each test looks at its own samples and at the
growth of versions. Logprobs are compared in float32.
"""

from __future__ import annotations

import asyncio
import copy
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import openai
import pytest

from flowrl.messages import Sample
from flowrl.messages.episode import Reply, Turn
from flowrl.messages.sampling import Sampling
from flowrl.models import Policy, stop_ids, tokenizer_of
from flowrl.nodes import AgentProgram, Limits
from flowrl.nodes.engine_options import Engine
from flowrl.testing import NodeRecord, NodeRig
from tests.agents.outside_workers import OutsideSession, Worker, a_worker
from tests.models.tiny_policy import score
from tests.nodes.episodes.test_nodes_agent_program import prompt as agent_prompt
from tests.nodes.generation.generator_rig import make_prompt
from tests.rigs.ticks import ticks
from tests.stack.live_generator import (
    MOST,
    TOLERANCE,
    Live,
    assert_equal_to_a_fresh_engine,
    difference,
    update_under_traffic,
)

pytestmark = [pytest.mark.slow, pytest.mark.stack, pytest.mark.timeout(300)]

NARROW = Engine(concurrency=32, max_model_len=256, extra=("max_num_batched_tokens=64", "enable_prefix_caching=false"))


class Waited(NamedTuple):
    """What became of a prompt that arrived before any weights."""

    sent: int
    """Samples that had been sent when the loop had nothing left to do."""
    running: int
    sample: Sample


TRIES = range(10_000, 210_000, 10_000)
"""Numbers of the first prompts: what has to come in the middle of a response is tried until it did, since a test that
gets no processor for a while reads whole responses at once."""


@pytest.fixture(scope="module")
def started_live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Live, Waited]]:
    live = Live(tmp_path_factory.mktemp("tied"), tied=True)
    try:
        live.loop.call_soon_threadsafe(live.rig.feed, "prompts", make_prompt(0))
        live.do(ticks())
        sent, running = len(live.sent), len(live.generator._responses.running)
        live.do(live.held(live.train()))
        (sample,) = live.do(live.arrived(1))
        yield live, Waited(sent, running, sample)
    finally:
        live.close()


@pytest.fixture
def live(started_live: tuple[Live, Waited]) -> Live:
    """The engine of all tests; it has weights, at whatever version the tests before have left it."""
    return started_live[0]


def test_nothing_is_sampled_before_the_first_version(started_live: tuple[Live, Waited]) -> None:
    _, waited = started_live
    assert (waited.sent, waited.running) == (0, 0)
    assert set(waited.sample.versions[12:]) == {0}


def test_a_sample_is_complete(live: Live) -> None:
    (sample,) = live.samples([make_prompt(1, columns={"answer": "7"})])
    count = sample.response_tokens
    assert sample.prompt_tokens == 12 and len(sample.token_ids) == 12 + count <= 12 + MOST
    assert not sample.policy_mask[:12].any() and sample.policy_mask[12:].all()
    assert (sample.versions[:12] == -1).all() and (sample.versions[12:] == live.version).all()
    assert sample.truncated == (sample.token_ids[-1] != 1)
    assert sample.generator == "generator/0" and sample.columns == {"answer": "7"}
    assert live.record.metrics["tokens_generated"] >= count


def test_behavior_logprobs_are_the_policys(live: Live) -> None:
    sample = live.samples([make_prompt(2)])[0]
    expected = score(live.model, [sample.token_ids])[0]
    assert difference([sample.behavior_logprobs[12:]], [expected[11:]]) <= TOLERANCE


def test_a_seed_gives_the_same_sample_again(live: Live) -> None:
    one, again, other = live.samples(
        [make_prompt(3), make_prompt(3, member=1), replace(make_prompt(3, member=2), seed=99)]
    )
    assert one.token_ids.tolist() == again.token_ids.tolist() != other.token_ids.tolist()


def test_prompts_that_are_computed_in_parts_are_sampled_by_their_seeds(tmp_path: Path) -> None:
    """vLLM discards the draws of all parts but the last, and cannot take them back on CPU by itself."""
    live = Live(tmp_path, tied=True, engine=NARROW)
    try:
        live.do(live.held(live.train()))
        prompts = [make_prompt(number, length=90) for number in range(6)]
        together = live.samples(prompts)
        again = [replace(prompt, sample_id=f"again {prompt.sample_id}") for prompt in prompts]
        alone = [live.samples([prompt])[0] for prompt in again]
        assert [one.token_ids.tolist() for one in together] == [one.token_ids.tolist() for one in alone]
    finally:
        live.close()


def test_what_a_checkpoint_kept_is_not_sampled_again(live: Live, monkeypatch: pytest.MonkeyPatch) -> None:
    out: Any = live.generator.rollouts.live
    was_sent, asked = out.was_sent, asyncio.Event()

    def kept(made_from: None) -> bool:
        """As if the run had begun with the message that would be made now."""
        out.sent_before.add(out._next_id(out._parents_of(made_from)))
        asked.set()
        return bool(was_sent(made_from))

    async def ask() -> None:
        live.rig.feed("prompts", replace(make_prompt(3), sample_id="kept"))
        await asked.wait()

    requests = live.generator._responses._num_requests
    with monkeypatch.context() as patch:
        patch.setattr(out, "was_sent", kept)
        live.do(ask())
    (sample,) = live.samples([replace(make_prompt(3), sample_id="another")])
    assert sample in live.sent and all(s.sample_id != "kept" for s in live.sent)
    assert live.generator._responses._num_requests == requests + 1


def test_updates_during_live_traffic_tied(live: Live, tmp_path: Path) -> None:
    samples = update_under_traffic(live)
    crossing = [s for s in samples if len(set(s.versions[s.policy_mask].tolist())) > 1]
    assert crossing, "requests that were running at an update go on across it"
    for sample in samples:
        versions = sample.versions[sample.policy_mask]
        assert (np.diff(versions) >= 0).all() and versions.min() >= 0
    assert max(live.mismatches) <= TOLERANCE
    assert_equal_to_a_fresh_engine(live, tmp_path / "export")


def test_updates_during_live_traffic_untied(tmp_path: Path) -> None:
    live = Live(tmp_path / "untied", tied=False)
    try:
        live.do(live.held(live.train()))
        update_under_traffic(live)
        assert max(live.mismatches) <= TOLERANCE
        assert_equal_to_a_fresh_engine(live, tmp_path / "export")
    finally:
        live.close()


def test_logprobs_across_an_update_are_those_of_the_weights_that_sampled(live: Live) -> None:
    """Before the update exactly the old weights'; every token is the old version's or the new one's."""

    async def crossing(number: int) -> list[Sample]:
        before = len(live.sent)
        asked = await live.train_amid(number)
        return (await live.arrived(before + asked))[before:]

    found = False
    for number in TRIES:
        old, old_model = live.version, copy.deepcopy(live.model)
        samples = live.do(crossing(number))
        for sample in samples:
            expected = score(old_model, [sample.token_ids])[0]
            places = np.flatnonzero(sample.versions == old)
            assert (
                len(places) == 0
                or difference([sample.behavior_logprobs[places]], [[expected[i - 1] for i in places]]) <= TOLERANCE
            )
            assert set(sample.versions[sample.policy_mask].tolist()) <= {old, old + 1}
        if found := any(set(sample.versions[12:].tolist()) == {old, old + 1} for sample in samples):
            break
    assert found, "a response has tokens of both versions"


def test_the_prefix_cache_does_not_outlive_a_version(live: Live) -> None:
    prompt = make_prompt(600, length=100)
    live.samples([prompt])
    live.do(live.held(live.train()))
    sample = live.samples([replace(prompt, sample_id="again")])[0]
    expected = score(live.model, [sample.token_ids])[0]
    assert difference([sample.behavior_logprobs[100:]], [expected[99:]]) <= TOLERANCE


def test_a_checkpoint_takes_unfinished_responses_and_they_go_on_undisturbed(live: Live) -> None:
    """With the KV that they have: no request is made again, and what they come to is what they would have come to."""

    async def checkpoint(first: int) -> tuple[dict[str, Any], list[Sample]]:
        before, requests = len(live.sent), live.generator._responses._num_requests
        for number in range(first, first + 32):
            live.rig.feed("prompts", make_prompt(number))
        await live.arrived(before + 1)
        prefixes = await live.generator.snapshot()
        if ends := [work for _, work in live.generator._responses.running.values()]:
            await asyncio.wait(ends)  # vLLM samples on, but nobody looks at it before the checkpoint is over
        sent = {sample.sample_id for sample in live.sent[before:]}  # a finished one may have been on its way
        await live.generator.resume()
        assert not sent & prefixes.keys()
        samples = (await live.arrived(before + 32))[before:]
        assert live.generator._responses._num_requests == requests + 32
        return prefixes, samples

    for first in TRIES:
        prefixes, samples = live.do(checkpoint(first))
        if prefixes:
            break
    assert prefixes and {len(tokens) > 0 for tokens, _, _ in prefixes.values()} == {True}
    again = {s.sample_id: s for s in live.samples([make_prompt(number) for number in range(first, first + 32)])}
    for sample in samples:
        tokens, logprobs, versions = prefixes.get(sample.sample_id, ((), (), ()))
        response = sample.token_ids[sample.policy_mask]
        assert response[: len(tokens)].tolist() == list(tokens) and len(response) <= MOST
        assert sample.behavior_logprobs[12 : 12 + len(tokens)].tolist() == list(logprobs)
        assert list(versions) == [live.version] * len(tokens)
        assert response.tolist() == again[sample.sample_id].token_ids[12:].tolist()
        expected = score(live.model, [sample.token_ids])[0]
        assert difference([sample.behavior_logprobs[12:]], [expected[11:]]) <= TOLERANCE


def test_a_checkpoint_knows_the_versions_of_what_is_unfinished(live: Live) -> None:
    """One is taken whenever a sample arrives, while an update comes in between."""

    async def crossing(number: int) -> list[tuple[str, Any]]:
        before, kept = len(live.sent), []
        training = asyncio.ensure_future(live.train_amid(number))
        while not training.done() or len(live.sent) < before + training.result():
            await live.arrived(len(live.sent) + 1)
            kept += (await live.generator.snapshot()).items()
            await live.generator.resume()
        return kept

    before, kept, seen = len(live.sent), [], set[int]()
    for number in TRIES:
        kept += live.do(crossing(number))
        seen = {len(set(versions.tolist())) for _, (_, _, versions) in kept}
        if seen == {1, 2}:
            break
    whole = {sample.sample_id: sample for sample in live.sent[before:]}
    for key, (tokens, logprobs, versions) in kept:
        place = slice(12, 12 + len(tokens))
        assert tokens.tolist() == whole[key].token_ids[place].tolist()
        assert logprobs.tolist() == whole[key].behavior_logprobs[place].tolist()
        assert versions.tolist() == whole[key].versions[place].tolist()
    assert seen == {1, 2}, "some have tokens of one version, and some of both"


def test_a_prefix_from_a_checkpoint_is_continued(live: Live) -> None:
    prefix = np.array([30, 31, 32], np.int32)
    prompt = make_prompt(
        400,
        prefix_token_ids=prefix,
        prefix_logprobs=np.full(3, -1.5, np.float32),
        prefix_versions=np.zeros(3, np.int32),
    )
    generated = live.record.metrics["tokens_generated"]
    (sample,) = live.samples([prompt])
    assert sample.token_ids[12:15].tolist() == [30, 31, 32] and sample.policy_mask[12:].all()
    assert sample.versions[12:15].tolist() == [0, 0, 0] and (sample.versions[15:] == live.version).all()
    assert sample.response_tokens <= MOST
    assert live.record.metrics["tokens_generated"] - generated == sample.response_tokens - 3


def test_cancelling_aborts_in_vllm(live: Live) -> None:
    async def cancel() -> int:
        sampler = live.generator._sampler
        sampling = Sampling(max_tokens=200, ignore_eos=True)
        task = asyncio.create_task(sampler.complete("doomed", [5, 6, 7], sampling))
        await ticks()
        assert sampler._engine.get_num_unfinished_requests() == 1
        task.cancel()
        await asyncio.wait([task])
        return int(sampler._engine.get_num_unfinished_requests())

    assert live.do(cancel()) == 0


def test_evaluation_is_greedy_and_counted_apart(live: Live) -> None:
    generated = live.record.metrics["tokens_generated"]
    one, two = (live.do(live.rig.ask("requests", make_prompt(120, member=member))) for member in (0, 1))
    assert one.token_ids.tolist() == two.token_ids.tolist()
    assert live.record.metrics["tokens_generated"] == generated
    assert live.record.metrics["tokens_evaluated"] == one.response_tokens + two.response_tokens


TEMPLATE = (
    "{% for m in messages %}{{ '<' + m.role + '>' + m.content + '<eos>' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
DYING = """
import sys, time, httpx, openai
url, key = sys.argv[1:]
session = httpx.post(url + "/sessions", headers={"Authorization": "Bearer " + key}, timeout=30).json()
client = openai.OpenAI(base_url=session["openai_base_url"], api_key=session["api_key"])
client.chat.completions.create(model="policy", messages=session["task"]["messages"])
print(session["id"], flush=True)
time.sleep(100)  # until it is killed
"""


def test_outside_workers_are_answered_by_vllm_and_those_that_fail_are_followed_by_others(
    live: Live, tmp_path: Path
) -> None:
    """One of them plays, one is killed, one is idle and one posts no reward: with the real client, over HTTP."""
    (tmp_path / "template").write_text(TEMPLATE)
    replies: dict[str, list[Reply]] = {}

    async def ask(turn: Turn) -> Reply:
        reply = await live.rig.ask("turns", turn)
        replies.setdefault(f"{turn.sample_id}/{turn.attempt}", []).append(reply)
        return reply  # type: ignore[no-any-return]

    async def plays(session: OutsideSession) -> None:
        reply = await session.say()
        again = {"role": "user", "content": "sure?"}
        await session.say([*session.task["messages"], {"role": "assistant", "content": reply.content}, again])
        await session.finish(0.5)

    async def killed(worker: Worker) -> None:
        key = worker.key_file.read_text()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", DYING, worker.url, key, stdout=asyncio.subprocess.PIPE
        )
        assert process.stdout is not None and await process.stdout.readline()
        process.kill()
        await process.wait()

    async def work() -> NodeRecord:
        policy = Policy(str(live.path), chat_template=str(tmp_path / "template"))
        limits = Limits(tokens=200, turn_tokens=8, retries=1)
        node = AgentProgram(policy, agent="outside", sampling=Sampling(max_tokens=8), limits=limits, idle_s=1.0)
        rig = NodeRig(node, name="agents", answers={"generate": ask}, run_dir=str(tmp_path), preflight=False)
        async with rig:
            rig.feed("prompts", *(agent_prompt(member) for member in range(4)), ticket=3)
            async with a_worker(rig.record.progress) as worker:
                await killed(worker)
                idle, forgetful, good = [await worker.take() for _ in range(3)]
                await idle.say()
                await forgetful.say()
                await forgetful.post("end")
                await plays(good)
                for _ in range(3):
                    await plays(await worker.take())
                with pytest.raises(openai.ConflictError):
                    await idle.say()
            return await rig.finished()

    record = live.do(work())
    assert sorted(cause for *_, cause in record.events("void")) == ["no_reward", "session_idle", "session_idle"]
    episodes = record.sent("episodes")
    assert record.reasons() == [] and sorted(one.attempts for one in episodes) == [1, 2, 2, 2]
    for episode in episodes:
        used = replies[f"{episode.sample_id}/{episode.attempts - 1}"]
        ids = [token for reply in used for token in reply.token_ids.tolist()]
        assert episode.token_ids[episode.policy_mask].tolist() == ids and episode.turns == len(used) == 2
        assert set(episode.versions[episode.policy_mask].tolist()) == {live.version} and episode.reward == 0.5


def test_vllm_stops_at_the_tokenizers_end_token_and_at_each_that_the_generation_config_names(tmp_path: Path) -> None:
    """`--tokenizer.eos` writes all its tokens there."""
    ended = Live(tmp_path / "ended", tied=True, ends=(3, 2))
    try:
        policy = Policy(str(ended.path))
        ends = stop_ids(policy, tokenizer_of(policy))
        assert ends == [1, 3, 2]
        ended.do(ended.held(ended.train()))
        prompts = list(map(make_prompt, range(64)))
        replies = [sample.token_ids[sample.policy_mask].tolist() for sample in ended.samples(prompts)]
    finally:
        ended.close()
    assert {reply[-1] for reply in replies if len(reply) < MOST} == {*ends}
    assert not any({*ends} & {*reply[:-1]} for reply in replies)
