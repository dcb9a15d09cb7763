"""The matrix of options: results that are kept, what is run next, and how a run is judged."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks.data.counting_reward import CountingReward, ninths
from benchmarks.training import options_matrix
from benchmarks.training.options_matrix import (
    GRAPHS,
    OPTIONS,
    Cell,
    across,
    cells_of,
    command_of,
    refused_by_check,
    table,
)
from flowrl.graph.load import load_file, shipped_names
from flowrl.graph.option_types import options_of

ROOT_PAGE = options_matrix.PAGE
VALUES = {"reward_model": "a/reward/model", "url": "http://127.0.0.1:1/score"}


def cell(graph: str, option: str, outcome: Any = "ok", said: str = "") -> Cell:
    return Cell(graph, option, "flowrl run", outcome, said, 1.0)


def test_every_online_graph_is_in_it() -> None:
    online = {name for name in shipped_names() if "staleness" in options_of(load_file(name).config_type)}
    assert set(GRAPHS) == online and len(OPTIONS) == 12


def test_the_first_cells_have_every_graph_and_every_option() -> None:
    places = list(across(GRAPHS))
    assert len(set(places)) == len(places) == len(GRAPHS) * len(OPTIONS)
    first = places[: len(GRAPHS)]
    assert {graph for graph, _ in first} == set(GRAPHS) and {option for _, option in first} == set(OPTIONS)


@pytest.mark.parametrize("graph", GRAPHS)
def test_what_a_small_run_asks_for_is_accepted(graph: str) -> None:
    """No cell is refused for its size."""
    _, _, *options = command_of(graph, "2 generators")
    file = load_file(graph)
    made = file.build(file.parse([part for part in options[2:] if part]))
    from flowrl import Cluster, Machine, check
    from flowrl.graph.machine import GB

    assert check(made, Cluster((Machine(cores=(0, 1, 2, 3), memory_bytes=16 * GB),))).problems == ()


def test_a_result_is_the_last_one_and_a_line_that_was_cut_off_is_none(tmp_path: Path) -> None:
    lines = [json.dumps(asdict(cell("grpo", "--lora.rank 8", "failed", "it ended"))), "", '{"graph": "gr']
    lines.insert(1, json.dumps(asdict(cell("grpo", "--lora.rank 8"))))
    (tmp_path / "results.jsonl").write_text("\n".join(lines))
    assert cells_of(tmp_path / "results.jsonl") == {("grpo", "--lora.rank 8"): cell("grpo", "--lora.rank 8")}
    assert cells_of(tmp_path / "none.jsonl") == {}


def test_what_the_check_refuses_is_known_before() -> None:
    assert refused_by_check("iterative_dpo", "--objective.dual-clip", VALUES)
    assert not refused_by_check("grpo", "--objective.dual-clip", VALUES)


class Asked:
    asked = 0


@pytest.mark.parametrize(
    ("option", "status", "errors", "audit", "outcome", "said"),
    [
        ("--lora.rank 8", 0, "", True, "ok", ""),
        ("--lora.rank 8", 0, "", False, "failed", "audit: not ok"),
        ("--lora.rank 8", 2, "flowrl: no such option\n", None, "refused", "flowrl: no such option"),
        ("--lora.rank 8", 2, "flowrl: 1 problem:\n- it is too small\n", None, "refused", "it is too small"),
        ("--lora.rank 8", 2, "Traceback\n  line\nFlowrlError: x\n", None, "failed", "FlowrlError: x"),
        ("--lora.rank 8", 124, "stopped after 600 s", None, "failed", "stopped after 600 s"),
        ("HTTP reward", 0, "", True, "failed", "the server was not asked"),
        ("--reward-model", 2, "flowrl: a/reward/model is none", None, "refused", "flowrl: REWARD_MODEL is none"),
    ],
)
def test_a_run_is_judged(
    option: str, status: int, errors: str, audit: bool, outcome: str, said: str, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.setattr(options_matrix, "flowrl", lambda command, run_dir: (status, errors))
    monkeypatch.setattr(options_matrix, "audited", lambda run_dir: audit)
    found = options_matrix.run_cell("grpo", option, VALUES, tmp_path, Asked())  # type: ignore[arg-type]
    assert (found.outcome, found.said) == (outcome, said)
    assert VALUES["reward_model"] not in found.command


def test_a_run_that_began_was_not_refused(monkeypatch: Any, tmp_path: Path) -> None:
    def begun(command: Any, run_dir: Path) -> tuple[int, str]:
        run_dir.mkdir()
        (run_dir / "config.json").touch()
        return 2, "flowrl: node 'trainer' failed\n"

    monkeypatch.setattr(options_matrix, "flowrl", begun)
    assert options_matrix.run_cell("grpo", "--lora.rank 8", VALUES, tmp_path, Asked()).outcome == "failed"  # type: ignore[arg-type]


def test_the_table_numbers_each_sentence_once() -> None:
    sentence = "flowrl: there is no option --x; flowrl run distill --help-all lists the options"
    cells = [cell("grpo", "--reward-model"), *(cell(name, "HTTP reward", "refused", sentence) for name in GRAPHS[1:3])]
    text = table({(one.graph, one.option): one for one in cells})
    assert text.splitlines()[2] == f"| grpo | ok |{' – |' * 11}"
    assert text.count("refused 1") == 2 and text.endswith("1. there is no option --x")


def test_what_the_page_has_is_done(tmp_path: Path, monkeypatch: Any) -> None:
    given = [
        cell("grpo", "--reward-model"),
        cell("grpo", "HTTP reward", "failed", "it ended"),
        cell("rloo", "--objective.dual-clip", "refused", "there is no option --x; leave it out"),
        cell("rloo", "2 generators", "refused", "it ended"),
    ]
    found = {(one.graph, one.option): one for one in given}
    monkeypatch.setattr(options_matrix, "PAGE", tmp_path / "page.md")
    (tmp_path / "page.md").write_text(f"before | it\n{options_matrix.BEGIN}\n{options_matrix.END}\n1. after")
    options_matrix.write_page(table(found))
    read = options_matrix.all_cells(tmp_path / "none.jsonl")
    assert {place: (one.outcome, one.said) for place, one in read.items()} == {
        place: (one.outcome, one.said) for place, one in found.items()
    }
    (tmp_path / "results.jsonl").write_text(json.dumps(asdict(cell("grpo", "HTTP reward"))))
    assert options_matrix.all_cells(tmp_path / "results.jsonl")["grpo", "HTTP reward"].outcome == "ok"
    assert len(options_matrix.cells_of_page(ROOT_PAGE.read_text())) > 80


def test_the_server_counts_its_requests() -> None:
    with CountingReward() as server:
        body = json.dumps({"prompts": ["a", "b"], "responses": ["19", ""]}).encode()
        with urllib.request.urlopen(urllib.request.Request(server.url, body)) as answer:
            assert json.load(answer) == [1.0, 0.0]
        assert server.asked == 1
    assert ninths("13") == 1 / 3 and ninths("3x") == 0
