"""Kept samples as text for a terminal."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence

from rich.text import Text

from flowrl.runtime.samples.sample_query import SampleRow
from flowrl.runtime.telemetry.safe_text import shown


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
    lines = difflib.ndiff(shown(before["response"]).split("\n"), shown(after["response"]).split("\n"))
    styles = {"- ": "red", "+ ": "green", "  ": ""}
    yield from (Text(line, style=styles[line[:2]]) for line in lines if line[:2] in styles)
    yield Text("")


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
