"""The ladder's table in Markdown, and its place in a page of the documents."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from benchmarks.runs.page import put
from benchmarks.training.ladder_cases import ANSWERS, EVALUATION, PROMPTS, LadderCase, Result

BEGIN, END = "<!-- ladder-table: begin -->", "<!-- ladder-table: end -->"
HEADING = (
    f"Share of right answers on {PROMPTS} held-out prompts × {ANSWERS} answers, same seeds before and after; ± is the "
    f"standard error of the paired differences. Graphs that ask them take `{' '.join(EVALUATION)}` besides. For a "
    "reward model: accuracy on held-out pairs, before being the best baseline (length, the policy's logprobs)."
)

PREFERENCES = "Accuracy of the implicit rewards on held-out pairs (0.5 is chance), and what moved:"


def markdown(cases: Sequence[LadderCase], found: Sequence[Result]) -> str:
    """A line a case that has results, with its gains for every training seed."""
    lines = [
        HEADING,
        "",
        "| graph | before | after | gain by training seed | minutes | audit | command |",
        "|---|---|---|---|---|---|---|",
    ]
    for case in cases:
        runs = [result for result in found if result.case == case.title]
        lines += [_line(case, runs)] if runs else []
    preferred = [f"- {result.case}, seed {result.seed}: {result.preference}" for result in found if result.preference]
    return "\n".join([*lines, *(["", PREFERENCES, "", *preferred] if preferred else [])])


def _line(case: LadderCase, runs: Sequence[Result]) -> str:
    gains = [run.gain for run in runs if run.gain is not None]
    cells = (
        case.title,
        f"{_mean([gain.before for gain in gains]):.3f}" if gains else "–",
        f"{_mean([gain.after for gain in gains]):.3f}" if gains else "–",
        ", ".join(f"{gain.gain:+.3f} ± {gain.error:.3f}" for gain in gains) or "–",
        f"{_mean([run.minutes for run in runs]):.1f}",
        _audits(runs),
        f"`{runs[0].command}`",
    )
    return f"| {' | '.join(cells)} |"


def _audits(runs: Sequence[Result]) -> str:
    verdicts = {run.audit for run in runs}
    return "failed" if False in verdicts else "ok" if True in verdicts else "–"


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def write_table(page: Path, table: str) -> None:
    """Put the table between its two marks. Raises ValueError if they are not there."""
    put(page, table, BEGIN, END)
