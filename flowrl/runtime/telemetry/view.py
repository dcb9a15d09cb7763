"""The view of a running run: live in a terminal, plain lines elsewhere.

Both kinds take the same calls from the driver. The live view redraws when its content has changed, at most
REDRAW_PER_S times per second, and leaves its last picture on the screen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from rich.console import Console, ConsoleOptions, RenderableType
from rich.live import Live
from rich.segment import Segment

from flowrl.runtime.telemetry.board import Board, clock, draw, evaluation_text, rewards_by_source
from flowrl.runtime.telemetry.judged_figures import judged
from flowrl.runtime.telemetry.safe_text import shown
from flowrl.runtime.telemetry.statistics import Statistics, bottleneck

REDRAW_PER_S = 4.0


class SafeConsole(Console):
    """A console on which texts have no escape sequences; those of the styles, and rich's own controls, remain."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(shown(segment.text), segment.style)


class View(Protocol):
    """The calls from the driver to a view."""

    def progress(self, replica_id: str, text: str) -> None:
        """Show how far a node replica (or the driver itself) is with its set-up."""

    def step(self, record: Mapping[str, Any]) -> None:
        """Show a finished batch; `record` is its metrics line."""

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        """Show new statistics; `admission` says why the next group cannot be admitted now, "" if it can.

        Each of hundreds of hosts reports every second, so figures are read only when they are shown.
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
        self._board.add(record)
        self._redraw()

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        self._figures = statistics, admission
        self._redraw()

    def evaluation(self, phase: str, step: int, figures: Mapping[str, float], task: str = "") -> None:
        self._board.evaluated(task, (phase, step, figures))
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
        return draw(board)


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
        self._print(f"step {record['step']}{of}  {figures}{by_source}{self._bottleneck()}")
        self.held_out(record)
        self._alarms(record.get("alarms") or {})

    def held_out(self, record: Mapping[str, Any]) -> None:
        for when, found in judged(record):
            self._print(f"held-out {when}: {'  '.join(f'{name} {value:.4g}' for name, value in found.items())}")

    def _alarms(self, ringing: Mapping[str, str]) -> None:
        """Print the alarms that start and those that end."""
        for name in ringing.keys() - self._ringing:
            self._print(f"alarm: {name}: {ringing[name]}")
        for name in self._ringing - ringing.keys():
            self._print(f"alarm over: {name}")
        self._ringing = set(ringing)

    def statistics(self, statistics: Statistics, admission: Callable[[], str]) -> None:
        self._statistics = statistics

    def _bottleneck(self) -> str:
        """The bottleneck, as text for a step's line."""
        if self._statistics is None:
            return ""
        node, why = bottleneck(self._statistics.nodes(), self._statistics.edges())
        return f"  bottleneck {node} ({why})" if node else ""

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
            f"[{clock(time.monotonic() - self._start_s):>7}] {text}", markup=False, highlight=False, soft_wrap=True
        )


def open_view(board: Board, console: Console | None = None) -> View:
    """The live view if the console is a terminal, else the plain view."""
    console = console or SafeConsole()
    return LiveView(board, console) if console.is_terminal else PlainView(board, console)
