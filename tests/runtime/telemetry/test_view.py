"""The view: what a user reads, in a terminal and in a log."""

from __future__ import annotations

import io
import math
import tracemalloc
from collections.abc import Mapping
from typing import Any

import pytest
from rich.console import Console

from flowrl.runtime.telemetry import view as view_module
from flowrl.runtime.telemetry.statistics import EdgeNow, NodeNow, Statistics
from flowrl.runtime.telemetry.view import (
    BARS,
    Board,
    LiveView,
    PlainView,
    draw_bar,
    draw_board,
    draw_sparkline,
    format_clock,
    open_view,
)

EDGE = "generator.rollouts -> trainer.batches"


def record(step: int, **values: Any) -> Mapping[str, Any]:
    return {
        "step": step,
        "time_s": 2.0 * step,
        "reward_mean": 0.25 + step / 100,
        "loss": -0.5,
        "kl": None,
        "staleness_mean": 0.5,
        "staleness_max": 1,
        "tokens_trained": 3000,
    } | values


def answered(right: float) -> dict[str, float]:
    """The figures of an evaluation."""
    return {"exact_match": right, "score": right, "num_answers": 512}


def busy_board() -> Board:
    board = Board(
        "grpo",
        run_dir="runs/grpo-1",
        steps=40,
        bound=1,
        capacities={EDGE: 2},
        elapsed_s=63.4,
        progress={"driver": "training"},
        evaluations={"": [("before", 0, answered(0.25)), ("during", 5, answered(0.5))]},
        nodes=[NodeNow("generator", 2, 0.4), NodeNow("trainer", 1, 0.97)],
        edges=[EdgeNow(EDGE, "generator", "trainer", 4, 2, 0.6)],
        generated_per_s=1234.5,
    )
    for step in range(1, 11):
        board.add_line(record(step))
    return board


def test_the_newest_sample_is_shown_without_what_moves_the_cursor() -> None:
    board = busy_board()
    board.sample = {"step": 7, "state": "trained", "prompt": "2+2=\n", "response": "\x1b[2J4", "reward": 0.5}
    text = screen(board)
    assert "2+2=" in text and "\\x1b[2J4" in text and "step 7  trained  reward 0.5" in text


def screen(board: Board, width: int = 100) -> str:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(draw_board(board))
    return console.export_text()


def row(text: str, label: str) -> str:
    """The line of the view that begins with `label`, without the frame."""
    (line,) = [line.strip("│ ") for line in text.splitlines() if line.strip("│ ").startswith(label)]
    return line.removeprefix(label).strip()


def test_set_up_shows_how_far_each_node_is() -> None:
    board = Board("grpo", elapsed_s=7.0, progress={"driver": "starting Ray", "generator/0": "loading the model"})
    text = screen(board)
    assert row(text, "setting up") == "0:07"
    assert row(text, "driver") == "starting Ray"
    assert row(text, "generator/0") == "loading the model"


@pytest.mark.parametrize("width", [80, 100, 160])
def test_a_running_graph_shows_figures_nodes_and_edges(width: int) -> None:
    text = screen(busy_board(), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "flowrl grpo · training" in text
    assert row(text, "step") == "10 of 40   1:03   1:00 left"
    assert row(text, "reward").startswith("0.350  ▁")
    assert row(text, "reward").endswith("█  0.260 to 0.350")
    assert row(text, "held-out").startswith("0.250 before → 0.500 at step 5   512 answers")
    assert row(text, "tokens") == "1,234/s generated   1,500/s trained"
    assert row(text, "staleness") == "mean 0.5, max 1, bound 1"
    assert row(text, "admission") == "open"
    assert row(text, "bottleneck") == "trainer  works 97% of the time, generator waits for it 60%"
    assert row(text, "generator  ×2") == "████████░░░░░░░░░░░░   40% busy"
    assert row(text, EDGE) == "██████████  4/4    60%"


def test_a_graph_without_rewards_steps_or_bound_is_shown_too() -> None:
    board = Board("sft")
    board.add_line({"step": 3, "time_s": 9.0, "loss": 2.5})
    text = screen(board)
    assert row(text, "step") == "3   0:00"
    assert row(text, "reward") == "none yet"
    assert row(text, "staleness") == "mean –, max –"
    assert "loss 2.5" in row(text, "training")


def test_a_long_run_keeps_few_lines_and_shows_all_of_its_rewards() -> None:
    board, figures = Board("grpo", steps=50_000), {f"figure/{number}": 0.0 for number in range(40)}
    kept: list[int] = []
    tracemalloc.start()
    try:
        for step in range(1, 20_001):
            board.add_line(record(step, reward_mean=step / 20_000) | figures)
            if not step % 10:
                board.add_evaluation("", ("during", step, answered(step / 20_000)))
            if step in (10_000, 20_000):
                kept.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert kept[1] - kept[0] < 16 * 10_000, f"{kept} bytes after 10,000 and 20,000 steps"
    text = screen(board)
    assert row(text, "reward") == f"1.000  {draw_sparkline(range(20_000), 32)}  0.000 to 1.000"
    assert row(text, "step") == "20000 of 50000   0:00   16:40:00 left"
    scores = " → ".join(f"{step / 20_000:.3f} at step {step}" for step in (10, 19_980, 19_990, 20_000))
    assert row(text, "held-out").startswith(scores[:60])


def test_the_last_warning_stays_in_sight() -> None:
    board = busy_board()
    board.warning = "reward/0: the event loop was blocked for 2.0 s"
    assert row(screen(board), "!") == board.warning


def test_a_sparkline_has_one_character_a_value_or_one_a_mean() -> None:
    assert draw_sparkline([1.0, 2.0, 3.0], 10) == "▁▅█"
    assert draw_sparkline([0.5, 0.5], 10) == "▁▁"
    wave = [math.sin(i / 10) for i in range(1000)]
    assert len(draw_sparkline(wave, 32)) == 32
    assert draw_sparkline([float(i) for i in range(800)], 8) == BARS


@pytest.mark.parametrize(("fraction", "full"), [(-1.0, 0), (0.0, 0), (0.5, 10), (1.0, 20), (3.0, 20)])
def test_a_bar_stays_within_its_width(fraction: float, full: int) -> None:
    assert draw_bar(fraction).plain == "█" * full + "░" * (20 - full)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (59.6, "1:00"), (3599, "59:59"), (3725, "1:02:05")])
def test_a_clock_has_hours_only_when_needed(seconds: float, text: str) -> None:
    assert format_clock(seconds) == text


def report(busy_s: float) -> Statistics:
    statistics = Statistics()
    for now_s, busy in ((0.0, 0.0), (1.0, busy_s)):
        statistics.add_report({"nodes": {"trainer/0": {"busy_s": busy, "counters": {}, "observed": {}}}}, now_s)
    return statistics


def test_figures_of_now_are_of_the_replicas_that_are_left() -> None:
    statistics, lanes = Statistics(), {1: "trainer/0.weights -> generator/1.weights"}

    def absorb(replica: int, now_s: float) -> None:
        meters = {"busy_s": 0.8 * now_s, "counters": {"tokens_generated": 100.0 * now_s}, "observed": {}}
        sent = {lanes[1]: {"sent": 3, "depth": 2, "blocked_s": 0.0}}
        statistics.add_report({"nodes": {f"generator/{replica}": meters}, "lanes": sent}, now_s)

    for now_s in range(10):
        absorb(0, now_s)
        absorb(1, now_s)
    assert statistics.counter_rate("tokens_generated") == pytest.approx(200.0)
    statistics.note_lost("generator/1", "generators_lost", 10.0)
    for now_s in range(10, 20):
        absorb(0, now_s)
    assert statistics.counter_rate("tokens_generated") == pytest.approx(100.0)
    assert [(now.node, now.num_replicas) for now in statistics.nodes()] == [("generator", 1)]
    assert statistics.edges() == []
    line = statistics.since_line()
    assert (line["generators_lost"], line["tokens_generated"]) == (1, 2800)


def test_without_a_terminal_there_is_a_line_for_every_event() -> None:
    out = io.StringIO()
    view = open_view(Board("grpo", steps=40), Console(file=out))
    assert isinstance(view, PlainView)
    view.progress("generator/0", "loading [the] model")
    view.progress("generator/0", "loading [the] model")
    view.evaluation("before", 0, {"exact_match": 0.25, "score": 0.2501, "num_answers": 512})
    several = {"score": 0.5, "mean_at_4": 0.0, "pass_at_2": 0.1, "pass_at_4": 0.2}
    view.evaluation("before", 0, {"exact_match": 0.0, "num_answers": 64, **several}, "sums.jsonl")
    view.evaluation("after", 1, {"score": -0.5, "num_answers": 64})
    view.statistics(report(0.9), str)
    view.step(record(1))
    view.warning("something")
    view.close()
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines()]
    assert lines == [
        "generator/0: loading [the] model",
        "held-out 0.250 before training (512 answers)",
        "held-out 0.000 before training"
        " (64 answers, sums.jsonl, score 0.500, mean@4 0.000, pass@2 0.100, pass@4 0.200)",
        "held-out score -0.500 after training (64 answers)",
        "step 1/40  reward_mean 0.26  loss -0.5  staleness_max 1  tokens_trained 3000"
        "  bottleneck trainer (works 90% of the time)",
        "warning: something",
    ]


def test_what_a_trainer_judges_of_held_out_rows_has_a_line() -> None:
    out = io.StringIO()
    view = PlainView(Board("reward_model"), Console(file=out))
    figures = {"loss": 0.693, "preference_accuracy": 0.5, "score_margin": 0.01}
    before = {f"held_out_before/{name}": value for name, value in figures.items()}
    view.step(record(1, **before))
    view.step(record(2))
    view.step(record(3, **{"held_out/loss": 0.25, "held_out/preference_accuracy": None}))
    lines = [line.partition("] ")[2] for line in out.getvalue().splitlines() if "held-out" in line]
    assert lines == [
        "held-out before training: loss 0.693  preference_accuracy 0.5",
        "held-out at step 3: loss 0.25",
    ]


def test_the_board_shows_what_a_trainer_judged_first_and_last() -> None:
    board = Board("reward_model")
    board.add_line(record(1, **{"held_out_before/preference_accuracy": 0.5}))
    for step in range(1, 9):
        board.add_line(record(step, **{"held_out/preference_accuracy": 0.5 + step / 100}))
    first, *last = board.judged["preference_accuracy"]
    assert first == ("before training", 0.5) and [when for when, _ in last] == ["at step 6", "at step 7", "at step 8"]
    assert row(screen(board), "held-out").startswith("preference_accuracy 0.5 before training → 0.56 at step 6")


def test_in_a_terminal_the_board_is_drawn_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(view_module, "REDRAW_PER_S", math.inf)
    out = io.StringIO()
    view = open_view(Board("grpo", steps=40), Console(file=out, force_terminal=True, width=100, height=50))
    assert isinstance(view, LiveView)
    view.progress("driver", "starting Ray")
    assert "starting Ray" in out.getvalue()
    view.step(record(1))
    view.statistics(report(0.9), lambda: "all 4 tickets are out")
    view.evaluation("during", 1, {"exact_match": 0.5, "score": 0.625, "num_answers": 64})
    view.evaluation("during", 1, {"exact_match": 0.75, "num_answers": 64}, "sums.jsonl")
    view.warning("careful")
    view.close()
    last = out.getvalue().rpartition("╭")[2]
    for text in (
        "1 of 40",
        "all 4 tickets are out",
        "0.500 at step 1",
        "64 answers, score 0.625",
        "64 answers, sums.jsonl",
        "careful",
        "90% busy",
    ):
        assert text in last


def test_the_board_is_not_drawn_for_every_event() -> None:
    out = io.StringIO()
    view = open_view(Board("grpo"), Console(file=out, force_terminal=True, width=100, height=50))
    for step in range(1, 200):
        view.step(record(step))
    drawn = out.getvalue().count("╭")
    view.close()
    assert drawn < 10
    assert "199" in out.getvalue().rpartition("╭")[2]
