"""What metrics, check and preflight say of episodes."""

from __future__ import annotations

import re
from heapq import heappop, heappush
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from flowrl import Graph
from flowrl.agents import Examination, examine
from flowrl.environments import Observation
from flowrl.environments.protocol import MalformedValue
from flowrl.errors import ConfigError
from flowrl.graph.analysis.check import check
from flowrl.graph.analysis.size_rules import EpisodeTime
from flowrl.graph.load import load_file
from flowrl.models import Policy
from flowrl.models.tokens.characters import character_tokenizer
from flowrl.nodes import Environment, Generator, Limits
from flowrl.nodes.episodes.episode_node import template_findings
from flowrl.nodes.episodes.episode_reports import is_retokenized
from flowrl.runtime.telemetry.metrics import Metrics
from flowrl.runtime.telemetry.statistics import Statistics
from flowrl.training.batch_stats import ages_by_turn, length_name
from tests.agents.chat_templates import ADD, characters, templates, with_template
from tests.environments import play_envs
from tests.nodes.episodes.test_nodes_environment import Script, failing
from tests.nodes.episodes.test_nodes_environment import play as play_node
from tests.runtime.runs.test_runtime_episodes import play

ROOT = Path(__file__).parents[3]
PLAYED = str(Path(play_envs.__file__))


def test_the_figures_of_a_played_episode(tmp_path: Path) -> None:
    record = play_node(Script("go"), failing(tmp_path, times=2), limits=Limits(tokens=400, retries=2))
    gauges, metrics = record.gauges, record.metrics
    assert gauges["episode_turns"] == [1] and len(gauges["turn_slot_s"]) == len(gauges["turn_environment_s"]) == 1
    (sent,) = record.sent("episodes")
    assert gauges["episode_tokens"] == [sent.token_ids.size]
    assert metrics[f"lengths_offered/{length_name(sent.response_tokens)}"] == 1, "the failed attempt offers none"
    assert (metrics["attempts"], metrics["attempts_failed"], metrics["attempts_failed/env_raised"]) == (2, 1, 1)
    assert (metrics["episodes"], metrics["episodes_truncated"], metrics["replies_checked"]) == (1, 0, 1)
    assert [one["cause"] for one in record.episodes] == ["env_raised", ""]
    assert [one["turns"] for one in record.episodes] == [1, 1], "the turns of a failed attempt are known"


def test_shares_of_a_line(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path, Statistics(), roles={})
    line = metrics.write_line({"step": 1, "later_cached_tokens": 30, "later_context_tokens": 40, "replies_checked": 0})
    metrics.close()
    assert line["prefix_cache_share"] == 0.75 and "retokenized_share" not in line


def test_a_reply_that_tokenizing_would_change() -> None:
    tokenizer = character_tokenizer()
    assert not is_retokenized(tokenizer, tokenizer("12<|end|>")["input_ids"])

    class Merging:
        def decode(self, ids: list[int], **options: Any) -> str:
            return "ab"

        def __call__(self, text: str, **options: Any) -> dict[str, list[int]]:
            return {"input_ids": [7]}

    assert is_retokenized(Merging(), [1, 2])


def test_ages_by_turn() -> None:
    policy = np.array([0, 1, 1, 0, 1, 0, 1, 0, 1], bool)
    sample: Any = SimpleNamespace(whole_mask=policy, whole_versions=np.where(policy, [0, 1, 2, 0, 3, 0, 3, 0, 4], -1))
    mask = policy.copy()
    mask[1] = False
    assert ages_by_turn(sample, mask, 5) == {"turn_1": (3, 1), "turn_2": (2, 1), "turns_3_4": (3, 2)}


def test_every_figure_of_a_run_is_in_the_table(tmp_path: Path) -> None:
    ran = play(tmp_path / "run", fails=0.6, most_turns=3).raise_for_error()
    table = (ROOT / "docs" / "episodes.md").read_text()
    lines = ran.metrics()
    names = {name for line in lines for name in line}
    for figure in re.findall(
        r"`([a-z_]+)`", "".join(row.split("|")[1] for row in table.splitlines() if row[:2] == "| ")
    ):
        if figure not in (
            "figure",
            "generators_lost",
            "requests_moved",
            "oldest_wait_s",
            "failing_by_length",
            "turns_3_4",
            "turns_5_8",
            "turn_2",
            "repeated_tokens_share",
            "sequences_per_sample",
            "tokens_of_opponents",
            "tokens_untrained",
            "checkpoint_pause_s",
        ):
            assert figure in names, figure
    assert any(line.get("attempts_failed/env_raised") for line in lines)
    assert any(name.startswith("lengths_offered/tokens_") for name in names)


# Check and preflight


def test_images_are_refused_in_a_sentence() -> None:
    parts: Any = [{"type": "image_url", "image_url": {"url": "data:"}}]
    with pytest.raises(MalformedValue, match="images are not supported"):
        Observation(messages=({"role": "user", "content": parts},))


def test_episodes_longer_than_the_model_or_a_micro_batch_are_refused() -> None:
    def problems(tokens: int | None, budget: int | None, model: str = "tiny") -> list[str]:
        node = Environment("gymnasium/FrozenLake-v1", Policy(model), limits=Limits(tokens=tokens))
        return node.check(SimpleNamespace(token_budget=budget))

    assert problems(2048, 4096) == problems(None, 2048) == problems(None, None) == []
    assert "the context of tiny takes 2048" in problems(2049, None)[0]
    for made, context in (("tiny", 2048), ("tiny_agent", 2048), ("smollm2", 8192)):
        assert problems(None, context, made) == []
        (text,) = problems(None, 1024, made)
        assert f"as the context of {made}, {context}, but a micro-batch takes token_budget=1024" in text
        assert f"the context of {made} takes {context}" in problems(context + 1, None, made)[0]


def test_more_episodes_than_places_are_a_warning() -> None:
    file = load_file(str(ROOT / "graphs" / "agent_tools.py"))

    def warnings(*options: str) -> list[str]:
        graph = file.build(file.parse(list(options), prog="test", others={}))
        return [text for text in check(graph).warnings if "wait and grow old" in text]

    assert warnings() == []
    (text,) = warnings("--limits.episodes", "16")
    assert text.startswith("environment plays 16 episodes at a time but ")


def simulated(seconds: float, update_s: float, *, ahead: int, places: int, batch: int, steps: int = 400) -> list[float]:
    """When the trainer begins each step: tickets for `ahead` + 1 batches, `places` episodes at a time, in order."""
    free = [0.0] * places
    begins, trained = [], [0.0] * (ahead + 1)
    for step in range(steps):
        ends = []
        for _ in range(batch):
            begin = max(heappop(free), trained[step])
            ends.append(begin + seconds)
            heappush(free, begin + seconds)
        begins.append(max(max(ends), trained[-1]))
        trained.append(begins[-1] + update_s)
    return begins


@pytest.mark.parametrize(("ahead", "places"), [(1, 99), (2, 99), (3, 99), (1, 5), (2, 7), (1, 3)])
def test_the_least_time_of_a_step_is_that_of_a_simulation(ahead: int, places: int) -> None:
    found = EpisodeTime("environment", 60.0, min(places, 4 * (ahead + 1)), batch=4, ahead=ahead)

    def step_s(update_s: float) -> float:
        begins = simulated(60.0, update_s, ahead=ahead, places=found.places, batch=4)
        return (begins[-1] - begins[99]) / 300

    assert step_s(0.0) == pytest.approx(found.step_s, rel=0.02)
    assert found.update_s is not None
    assert step_s(0.8 * found.update_s) > 1.05 * 0.8 * found.update_s, "the trainer waits"
    if places >= found.admitted:
        assert step_s(found.update_s) == pytest.approx(found.update_s, rel=0.02), "it never does"


def test_check_says_how_long_a_step_takes_by_the_expected_time_of_an_episode() -> None:
    def said(name: str, *options: str) -> tuple[list[str], list[str]]:
        file = load_file(name)
        report = check(file.build(file.parse(["--limits.expected-s", "60", *options])))
        assert not [text for text in report.problems if "expected" in text]
        return [one for one in report.notes if "(limits.expected_s)" in one], [
            one for one in report.warnings if "has places for" in one
        ]

    notes, warned = said("agent_tools")
    assert (notes, warned) == (
        [
            "environment: 128 episodes of 60 s at a time (limits.expected_s) give 2.1 a second, so a step of 64 takes "
            "30 s or more; the trainer waits for episodes where an update takes less than 60 s"
        ],
        [],
    )
    assert "with a staleness of 0 nothing is played meanwhile" in said("self_play", "--staleness", "0")[0][0]
    assert said("agent_openai")[1] == []
    assert said("agent_openai", "--processes", "32")[1] == [
        "agents has places for 32 episodes at a time, of 60 s each, so a step of 64 takes 120 s or more, where its "
        "tickets allow 30 s; raise limits.episodes and processes to 128."
    ]
    assert "ends an attempt after 1800 s; raise episode_s" in next(Limits(expected_s=2000).find_problems())


def test_the_preflight_tells_of_the_template_and_refuses_tools_that_it_cannot_take() -> None:
    without = Environment(f"{PLAYED}:Echo", Policy("tiny")).preflight() or ""
    assert "both histories give the same" in without and "Tool calls" not in without
    with pytest.raises(ConfigError, match=r"has tools, but the chat template of tiny cannot take them"):
        Environment(f"{PLAYED}:Echo:tools=1", Policy("tiny")).preflight()
    found = Environment(f"{PLAYED}:Echo:tools=1", Policy("tiny_agent")).preflight() or ""
    assert "Tool calls can be fed. A rendered tool call was parsed back by the tokenizer's response_template." in found


@pytest.fixture
def without_parser(monkeypatch: pytest.MonkeyPatch) -> Generator:
    """A generator of a model whose tokenizer has a template for calls and nothing that reads them."""
    known = with_template(characters(), templates()["qwen2_5"])
    monkeypatch.setattr("flowrl.nodes.episodes.episode_node.known_tokenizer", lambda policy: known)
    return Generator(Policy("tiny"))


def test_an_environment_with_tools_needs_what_reads_calls(
    monkeypatch: pytest.MonkeyPatch, without_parser: Generator
) -> None:
    """Every call would be taken for the episode's final answer, and be scored."""

    def reading(*names: str) -> None:
        monkeypatch.setattr("flowrl.nodes.episodes.episode_node.parsers_that_read", lambda policy, tools: list(names))

    reading("hermes", "qwen2")
    with pytest.raises(ConfigError) as raised:
        template_findings(Policy("tiny"), "tools/x", [ADD], without_parser)
    text = str(raised.value)
    assert text.startswith(
        "environment 'tools/x' has tools, but nothing reads the policy's calls (the tokenizer has no"
    )
    assert text.endswith("name one of vLLM's parsers that do: --tool-parser hermes (or qwen2)")
    reading()
    with pytest.raises(ConfigError, match="none of vLLM's parsers reads a call that its chat template renders; name"):
        template_findings(Policy("tiny"), "tools/x", [ADD], without_parser)
    assert "Tool calls" not in (template_findings(Policy("tiny"), "x", [], without_parser) or "")


def test_agents_whose_requests_may_have_tools_are_warned(without_parser: Generator) -> None:
    found = template_findings(Policy("tiny"), "agent.py:play", None, without_parser) or ""
    assert "Warning: if requests have tools, agents get the calls of replies as text" in found
    assert "--tool-parser" in found


def test_the_preflight_parses_with_the_parsers_of_the_generator_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def examined(policy: Policy, tools: Any, **parsers: str | None) -> Examination:
        asked.append((policy.model, len(tools), parsers))
        return examine(character_tokenizer())

    monkeypatch.setattr("flowrl.nodes.episodes.episode_node.examine_with_parsers", examined)
    policy, graph = Policy("tiny_agent"), Graph("asks")
    plays = graph.add("environment", Environment(f"{PLAYED}:Echo:tools=1", policy))
    answers = graph.add("generator", Generator(policy, tool_parser="hermes"))
    graph.call(plays.generate, answers.turns)
    with pytest.raises(ConfigError, match="cannot take them"):
        plays.preflight()
    assert asked == [("tiny_agent", 1, {"tool_parser": "hermes", "reasoning_parser": None})]
