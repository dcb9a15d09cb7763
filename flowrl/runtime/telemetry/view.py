"""The view of a running run: live in a terminal, plain lines elsewhere.

Both kinds take the same calls from the driver. The live view redraws when its content has changed, at most
REDRAW_PER_S times per second, and leaves its last picture on the screen. Its content is a `Board`, which `draw` turns
into a rich renderable.
"""

from __future__ import annotations

import itertools
import math
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.live import Live
from rich.padding import Padding
from rich.panel import Panel
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from flowrl.runtime.telemetry.standard_streams import escape_controls
from flowrl.runtime.telemetry.statistics import EdgeNow, NodeNow, Statistics, find_bottleneck

BARS = "▁▂▃▄▅▆▇█"
SPARK_WIDTH = 32
BAR_WIDTH = 20
LABEL_WIDTH = 11
SAMPLE_WIDTH = 160
"""Number of characters shown of a prompt, and of a response."""
RECENT = 10
"""Number of last steps over which rates are computed."""
LAST_EVALUATIONS = 3
"""Number of last evaluations that are shown in addition to the first one."""

Evaluated = tuple[str, int, Mapping[str, float]]
"""(phase, step, figures of one set)"""


@dataclass
class Board:
    """Everything known about the run now. `steps` and `bound` are None if the run has no such number."""

    name: str
    run_dir: str = ""
    steps: int | None = None
    bound: int | None = None
    capacities: Mapping[str, int] = field(default_factory=dict)
    """Edge name -> number of messages that one lane can hold."""
    elapsed_s: float = 0.0
    progress: dict[str, str] = field(default_factory=dict)
    """Node replica -> the last line of its set-up."""
    records: deque[Mapping[str, Any]] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The last metrics lines of this run, oldest first."""
    rewards: array[float] = field(default_factory=lambda: array("d"))
    """The mean reward of every step that has one; nothing else is shown of older lines."""
    evaluations: dict[str, list[Evaluated]] = field(default_factory=dict)
    """Task ("" for the first one) -> its first result and the last ones."""
    judged: dict[str, list[tuple[str, float]]] = field(default_factory=dict)
    """Loss or accuracy on held-out rows -> its first value and the last ones, each with its time."""
    nodes: Sequence[NodeNow] = ()
    edges: Sequence[EdgeNow] = ()
    generated_per_s: float = 0.0
    admission: str = ""
    """What the next group waits for; "" if it waits for nothing."""
    warning: str = ""
    sample: Mapping[str, Any] | None = None
    """The newest sample that is kept."""

    def add_line(self, record: Mapping[str, Any]) -> None:
        """Take the metrics line of the newest step."""
        self.records.append(record)
        if (reward := record.get("reward_mean")) is not None:
            self.rewards.append(reward)
        self.add_judged(record)

    def add_judged(self, record: Mapping[str, Any]) -> None:
        """Take a trainer's own figures on held-out rows, if the record has any."""
        for when, found in judged_figures(record):
            for name, value in found.items():
                values = self.judged.setdefault(name, [])
                values.append((when, value))
                del values[1:-LAST_EVALUATIONS]

    def add_evaluation(self, task: str, found: Evaluated) -> None:
        """Take the result of an evaluation."""
        rows = self.evaluations.setdefault(task, [])
        rows.append(found)
        del rows[1:-LAST_EVALUATIONS]


def draw_board(board: Board) -> RenderableType:
    """The whole view: set-up lines before the first step, then the figures, nodes and edges."""
    figures = _make_grid(label_width=LABEL_WIDTH)
    if board.records:
        _add_figures(figures, board)
    else:
        figures.add_row("setting up", Text(format_clock(board.elapsed_s)))
        for replica_id, text in board.progress.items():
            figures.add_row(Text(replica_id, style="cyan"), Text(text))
        _add_evaluations(figures, board)

    parts: list[RenderableType] = [figures]
    if board.nodes and board.records:
        parts += _draw_flow(board)
    if board.warning:
        parts.append(Text(f"! {board.warning}", style="yellow"))
    title = Text.assemble(("flowrl", "bold"), f" {board.name}")
    if board.records and "driver" in board.progress:
        title.append(f" · {board.progress['driver']}", style="dim")
    body = Group(*(Padding(part, (0, 0, 1, 0)) for part in parts[:-1]), parts[-1])
    return Panel(body, title=title, title_align="left", subtitle=board.run_dir, subtitle_align="left", padding=(0, 1))


def _make_grid(*, label_width: int | None = None) -> Table:
    """A grid of labels and figures, where a figure may take several lines; without `label_width`, a grid of names, bars
    and their values, where names are shortened in a narrow terminal."""
    table = Table.grid(padding=(0, 2))
    if label_width is not None:
        table.add_column(no_wrap=True, style="dim", width=label_width)
        table.add_column()
        return table
    table.add_column(no_wrap=True, overflow="ellipsis")
    for _ in range(3):
        table.add_column(no_wrap=True)
    return table


def _add_figures(table: Table, board: Board) -> None:
    """The rows of a run that has finished a step."""
    recent, record = board.records, board.records[-1]
    seconds = record["time_s"] - recent[0]["time_s"]

    step, elapsed = record["step"], format_clock(board.elapsed_s)
    if board.steps is None:
        table.add_row("step", Text(f"{step}   {elapsed}"))
    else:
        left = ""
        if len(recent) > 1:  # at the pace of the last steps
            left = f"{format_clock(seconds / (len(recent) - 1) * max(board.steps - step, 0))} left"
        table.add_row("step", Text(f"{step} of {board.steps}   {elapsed}   {left}"))

    reward = Text("none yet")
    if board.rewards:
        reward = Text(f"{board.rewards[-1]:.3f}  ")
        reward.append(draw_sparkline(board.rewards, SPARK_WIDTH), style="green")
        reward.append(f"  {min(board.rewards):.3f} to {max(board.rewards):.3f}", style="dim")
    table.add_row("reward", reward)
    if by_source := rewards_by_source(record):
        table.add_row("", Text("  ".join(f"{name} {reward:.3f}" for name, reward in by_source.items())))
    _add_evaluations(table, board)
    for name, values in board.judged.items():
        table.add_row("held-out", Text(f"{name} " + " → ".join(f"{value:.4g} {when}" for when, value in values)))

    tokens = f"{board.generated_per_s:,.0f}/s generated"
    if seconds > 0:
        trained = sum(line.get("tokens_trained") or 0 for line in [*recent][1:])
        tokens += f"   {trained / seconds:,.0f}/s trained"
    if (length := record.get("response_tokens_mean")) is not None:
        tokens += f"   {length:.0f} a response"
    table.add_row("tokens", Text(tokens))

    mean, largest = _format_number(record.get("staleness_mean")), _format_number(record.get("staleness_max"))
    bound = "" if board.bound is None else f", bound {board.bound}"
    table.add_row("staleness", Text(f"mean {mean}, max {largest}{bound}"))
    losses = ("loss", "kl", "entropy", "grad_norm", "clip_fraction")
    table.add_row("training", Text("  ".join(f"{name} {_format_number(record.get(name))}" for name in losses)))
    for name, text in (record.get("alarms") or {}).items():
        table.add_row("alarm", Text(f"{name}: {text}", style="bold red"))
    if board.sample is not None:
        table.add_row("sample", _draw_sample(board.sample))
    table.add_row("admission", Text(board.admission or "open", no_wrap=True, overflow="ellipsis"))


def _add_evaluations(table: Table, board: Board) -> None:
    """One row for each task: the first figure of the first result and of the last ones, then the last one's others."""
    for task, rows in board.evaluations.items():
        firsts = [
            f"{_first_figure(figures)} {phase if phase != 'during' else f'at step {step}'}"
            for phase, step, figures in rows
        ]
        others = _other_figures(rows[-1][2], task)
        table.add_row("held-out", Text(" → ".join(firsts)).append(f"   {others}", style="dim"))


def rewards_by_source(record: Mapping[str, Any]) -> dict[str, float]:
    """The mean reward of each source of a mixture, by the source's name."""
    parts = {tuple(name.split("/")): value for name, value in record.items() if name.startswith("source/")}
    return {name: value for (_, name, figure), value in parts.items() if figure == "reward_mean" and value is not None}


def _draw_sample(row: Mapping[str, Any]) -> Text:
    """The end of a prompt and the start of its response, one line each."""
    reward = row.get("reward")
    figures = f"step {row['step']}  {row['state']}" + ("" if reward is None else f"  reward {reward:g}")
    ends = ((" ".join(row["prompt"].split())[-SAMPLE_WIDTH:], "dim"), (" ".join(row["response"].split()), "cyan"))
    lines = [
        Text(escape_controls(text)[:SAMPLE_WIDTH], style, no_wrap=True, overflow="ellipsis") for text, style in ends
    ]
    return Text("\n").join([*lines, Text(figures)])


def _draw_flow(board: Board) -> list[RenderableType]:
    """The bottleneck, the nodes and the edges."""
    slowest, why = find_bottleneck(board.nodes, board.edges)
    nodes = _make_grid()
    for now in board.nodes:
        name = Text(now.node, style="bold magenta" if now.node == slowest else "cyan")
        replicas = f"×{now.num_replicas}" if now.num_replicas > 1 else ""
        nodes.add_row(name, replicas, draw_bar(now.busy), f"{now.busy:4.0%} busy")
    edges = _make_grid()
    edges.add_row(*(Text(head, style="dim") for head in ("edge", "full", "depth", "sender waits")))
    for edge in board.edges:
        capacity = board.capacities.get(edge.edge, 0) * edge.num_lanes
        depth = f"{edge.depth}/{capacity}" if capacity else f"{edge.depth}"
        waits = Text(f"{edge.blocked:.0%}", style="yellow" if edge.blocked >= 0.5 else "")
        edges.add_row(edge.edge, draw_bar(edge.depth / capacity, 10) if capacity else "", depth, waits)
    return [Text.assemble("bottleneck  ", (slowest or "none", "bold magenta"), f"  {why}"), nodes, edges]


def draw_bar(fraction: float, width: int = BAR_WIDTH) -> Text:
    """A bar of `width` cells."""
    full = round(min(max(fraction, 0.0), 1.0) * width)
    return Text("█" * full + "░" * (width - full), style="blue")


def draw_sparkline(values: Sequence[float], width: int) -> str:
    """One character for each of at most `width` means of neighbouring values."""
    num = min(len(values), width)
    bounds = [round(i * len(values) / num) for i in range(num + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(bounds)]
    low, high = min(means), max(means)
    if high == low:
        return BARS[0] * num
    return "".join(BARS[min(int((mean - low) / (high - low) * len(BARS)), len(BARS) - 1)] for mean in means)


def evaluation_text(phase: str, step: int, figures: Mapping[str, float], task: str) -> str:
    """Formats a result as "0.412 at step 30 (512 answers, sums.jsonl, score 0.532, pass@4 0.611)".

    The first number is the share of right answers, or the mean score if nothing decides which answers are right.
    """
    where = f"at step {step}" if phase == "during" else f"{phase or 'without'} training"
    return f"{_first_figure(figures)} {where} ({_other_figures(figures, task)})"


def _first_figure(figures: Mapping[str, float]) -> str:
    """The share of right answers, else the mean score, named as such."""
    return f"{figures['exact_match']:.3f}" if "exact_match" in figures else f"score {figures['score']:.3f}"


def _other_figures(figures: Mapping[str, float], task: str) -> str:
    """The figures of a result besides the share of right answers; the mean score only if it is a different number."""
    told = [f"{figures['num_answers']:.0f} answers", *([task] if task else [])]
    right = figures.get("exact_match")
    if right is not None and f"{(score := figures.get('score', right)):.3f}" != f"{right:.3f}":
        told.append(f"score {score:.3f}")
    several = {name: value for name, value in figures.items() if name.startswith(("mean_at_", "pass_at_"))}
    return ", ".join([*told, *(f"{name.replace('_at_', '@')} {value:.3f}" for name, value in several.items())])


def format_clock(seconds: float) -> str:
    """Formats a duration as 1:02:03 or 2:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _format_number(value: Any) -> str:
    return "–" if value is None else f"{value:.3g}"


BEFORE, AFTER = "held_out_before/", "held_out/"


def judged_figures(record: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    """(when, name -> value) for each time for which the line has such figures; other figures stay in metrics.jsonl."""
    for prefix, when in ((BEFORE, "before training"), (AFTER, f"at step {record['step']}")):
        found = {name.removeprefix(prefix): value for name, value in record.items() if name.startswith(prefix)}
        shown = {
            name: value
            for name, value in found.items()
            if (name == "loss" or name.endswith("accuracy")) and value is not None
        }
        if shown:
            yield when, shown


REDRAW_PER_S = 4.0


class SafeConsole(Console):
    """A console on which texts have no escape sequences; those of the styles, and rich's own controls, remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)


class View(Protocol):
    """The calls from the driver to a view."""

    def progress(self, replica_id: str, text: str) -> None:
        """Show how far a node replica (or the driver itself) is with its set-up."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a finished batch; `record` is its metrics line."""

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        """Show new statistics; `admission` says why the next group cannot be admitted now, "" if it can.

        Each of hundreds of processes reports every second, so figures are read only when they are shown.
        """

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        """Show the figures of a finished evaluation; `task` is given for all tasks but the first.

        `phase` is before, during or after training; it is empty if nothing is trained.
        """

    def held_out(self, record: Mapping[str, Any]) -> None:
        """Show the figures on held-out rows in `record`, which a trainer has measured itself; others are ignored."""

    def sample(self, row: Mapping[str, Any]) -> None:
        """Show a sample that is kept; the newest one is enough."""

    def warning(self, text: str) -> None:
        """Show a problem that does not end the run."""

    def close(self) -> None:
        """Restore the terminal; the last picture stays."""


class LiveView:
    """A `View` that draws the board in place, in a terminal."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board = board
        self._start_s = time.monotonic()
        self._drawn_s = 0.0
        self._figures: tuple[Statistics, Callable[[], str]] | None = None
        self._live = Live(get_renderable=self._draw, console=console, auto_refresh=False)
        self._live.start()

    def progress(self, replica_id: str, text: str) -> None:
        self._board.progress[replica_id] = text
        self._redraw()

    def step(self, record: Mapping[str, Any]) -> None:
        self._board.add_line(record)
        self._redraw()

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        self._figures = statistics, admission
        self._redraw()

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        self._board.add_evaluation(task, (phase, step, figures))
        self._redraw()

    def held_out(self, record: Mapping[str, Any]) -> None:
        self._board.add_judged(record)
        self._redraw()

    def sample(self, row: Mapping[str, Any]) -> None:
        self._board.sample = row
        self._redraw()

    def warning(self, text: str) -> None:
        self._board.warning = text
        self._redraw()

    def close(self) -> None:
        self._live.update(self._draw(), refresh=True)
        self._live.stop()

    def stop_drawing(self) -> None:
        """Leave the terminal to a debugger; `close` shows the last picture."""
        self._live.stop()
        self._drawn_s = math.inf

    def _redraw(self) -> None:
        """Draw the board, unless it was drawn just now: then the next call, or `close`, shows what is new."""
        now = time.monotonic()
        if now - self._drawn_s >= 1 / REDRAW_PER_S:
            self._drawn_s = now
            self._live.refresh()

    def _draw(self) -> RenderableType:
        board = self._board
        board.elapsed_s = time.monotonic() - self._start_s
        if self._figures is not None:
            statistics, admission = self._figures
            board.nodes, board.edges = statistics.nodes(), statistics.edges()
            board.generated_per_s = statistics.counter_rate("tokens_generated")
            board.admission = admission()
        return draw_board(board)


class PlainView:
    """A `View` that prints one line per event, for logs and pipes. Statistics go into the next step's line."""

    def __init__(self, board: Board, console: Console) -> None:
        self._board = board
        self._console = console
        self._start_s = time.monotonic()
        self._statistics: Statistics | None = None
        self._ringing: set[str] = set()
        """Names of the alarms that ring now."""

    def progress(self, replica_id: str, text: str) -> None:
        if self._board.progress.get(replica_id) != text:
            self._board.progress[replica_id] = text
            self._print(f"{replica_id}: {text}")

    def step(self, record: Mapping[str, Any]) -> None:
        of = f"/{self._board.steps}" if self._board.steps is not None else ""
        names = ("reward_mean", "loss", "kl", "staleness_max", "tokens_generated", "tokens_trained")
        figures = "  ".join(f"{name} {record[name]:.4g}" for name in names if record.get(name) is not None)
        by_source = "".join(f"  {name} {reward:.4g}" for name, reward in rewards_by_source(record).items())
        limiting = ""
        if self._statistics is not None:
            node, why = find_bottleneck(self._statistics.nodes(), self._statistics.edges())
            limiting = f"  bottleneck {node} ({why})" if node else ""
        self._print(f"step {record['step']}{of}  {figures}{by_source}{limiting}")
        self.held_out(record)
        ringing = record.get("alarms") or {}
        for name in ringing.keys() - self._ringing:
            self._print(f"alarm: {name}: {ringing[name]}")
        for name in self._ringing - ringing.keys():
            self._print(f"alarm over: {name}")
        self._ringing = set(ringing)

    def held_out(self, record: Mapping[str, Any]) -> None:
        for when, found in judged_figures(record):
            self._print(f"held-out {when}: {'  '.join(f'{name} {value:.4g}' for name, value in found.items())}")

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        self._statistics = statistics

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        self._print(f"held-out {evaluation_text(phase, step, figures, task)}")

    def sample(self, row: Mapping[str, Any]) -> None:
        """Print nothing: `flowrl samples` shows samples."""

    def warning(self, text: str) -> None:
        self._print(f"warning: {text}")

    def close(self) -> None:
        """Do nothing: this view holds no resources."""

    def _print(self, text: str) -> None:
        self._console.print(
            f"[{format_clock(time.monotonic() - self._start_s):>7}] {text}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )


def open_view(board: Board, console: Console | None = None) -> View:
    """The live view if the console is a terminal or a notebook's cell, else the plain view."""
    console = console or SafeConsole()
    return LiveView(board, console) if console.is_terminal or console.is_jupyter else PlainView(board, console)
