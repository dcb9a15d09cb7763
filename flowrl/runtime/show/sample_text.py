"""Kept samples as text for a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from rich.text import Text

from flowrl.runtime.samples.sample_query import SampleRow
from flowrl.runtime.telemetry.safe_text import shown

MOST_ALIGNED = 100
"""Lines of texts up to which similar lines are put together: that takes a time of about the square of their number."""


def rows_text(rows: Sequence[SampleRow]) -> Iterator[Text]:
    """Each sample: its outcome, its prompt and its response."""
    for row in rows:
        yield from sample_text(row)
        yield Text("")


def sample_text(row: SampleRow) -> Iterator[Text]:
    """One sample."""
    yield Text(f"{shown(row['sample_id'])}  {_facts(row)}", style="red" if row["state"] == "failed" else "bold")
    yield from _marked("| ", row["prompt"], "dim")
    yield from _marked("> ", row["response"], "cyan")


def pair_text(before: SampleRow, after: SampleRow) -> Iterator[Text]:
    """Two answers to one prompt, and what differs, line by line."""
    yield Text(f"{shown(after['prompt_id'])}  {_change(before, after)}", style="bold")
    yield from _marked("| ", after["prompt"], "dim")
    lines = _compared(shown(before["response"]).split("\n"), shown(after["response"]).split("\n"))
    styles = {"- ": "red", "+ ": "green", "  ": ""}
    yield from (Text(line, style=styles[line[:2]]) for line in lines if line[:2] in styles)
    yield Text("")


def _compared(before: list[str], after: list[str]) -> Iterator[str]:
    """The lines of both texts, each after "- ", "+ " or "  ". Only in short texts are similar lines put together."""
    if max(len(before), len(after)) <= MOST_ALIGNED:
        yield from difflib.ndiff(before, after)
        return
    for _, low, high, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        same = before[low:high] == after[first:last]
        yield from (f"{'  ' if same else '- '}{line}" for line in before[low:high])
        yield from (f"+ {line}" for line in after[first:last] if not same)


def _change(before: SampleRow, after: SampleRow) -> str:
    sides = (
        f"step {row['step']}: {'no reward' if row['reward'] is None else format(row['reward'], 'g')}"
        for row in (before, after)
    )
    return "  ->  ".join(sides)


def _facts(row: SampleRow) -> str:
    state = row["state"] + (f": {row['reason']}" if row["reason"] else "")
    phase = "" if row["phase"] == "train" else f" {row['phase']} training{', ' + row['task'] if row['task'] else ''}"
    found = [f"step {row['step']}", state + phase]
    if row["reward"] is not None:
        raw = "" if row["raw_reward"] in (None, row["reward"]) else f" (raw {row['raw_reward']:g})"
        found.append(f"reward {row['reward']:g}{raw}")
    found += [f"{name} {value:g}" for name, value in (row["parts"] or {}).items()]
    if row["advantage"] is not None:
        found.append(f"advantage {row['advantage']:+.3g}")
    if versions := [span["version"] for span in row["spans"] or () if span["version"] >= 0]:
        found.append("version " + " ".join(dict.fromkeys(map(str, versions))))
    if row["response_tokens"] is not None:
        found.append(f"{row['response_tokens']} tokens{', cut off' if row['truncated'] else ''}")
    return "  ".join(found)


def _marked(mark: str, text: str, style: str) -> Iterator[Text]:
    return (Text.assemble((mark, "dim"), (line, style)) for line in shown(text).split("\n"))
