"""`flowrl show`: the list of the episodes that a run has kept, or one sample."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flowrl.errors import ConfigError
from flowrl.runtime.samples.sample_query import find_sample
from flowrl.runtime.show.booked_sample import BookedSample, booked_sample, booked_states
from flowrl.runtime.show.episode_text import attempt_text
from flowrl.runtime.show.sample_text import sample_text
from flowrl.runtime.telemetry.kept_episodes import FOLDER, EpisodeRow, read_kept
from flowrl.runtime.telemetry.safe_text import shown

HEADS = ("sample", "state", "attempts", "turns", "reward", "ended by")


def show(run_dir: Path, sample_id: str | None, console: Console) -> None:
    """Print one sample, or the list of the episodes kept. Raises ConfigError if there is nothing to print."""
    lines = _list(run_dir) if sample_id is None else _sample(run_dir, sample_id)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


# The list


def _list(run_dir: Path) -> Iterator[Text]:
    """The episodes, newest first."""
    attempts: dict[str, list[EpisodeRow]] = {}
    for record in read_kept(run_dir):
        attempts.setdefault(record["sample_id"], []).append(record)
    states = booked_states(run_dir, list(attempts))
    if not attempts:
        raise ConfigError(
            f"{run_dir / FOLDER} has no episode: the graph plays none, none has ended yet, or the run was started with "
            "--keep-episodes 0; flowrl samples RUN shows samples of any kind, and flowrl show RUN SAMPLE one of them"
        )
    newest = sorted(attempts.items(), key=lambda item: float(item[1][-1]["ended_s"]), reverse=True)
    rows = [_row(sample_id, mine, states.get(sample_id, "not in the ledger")) for sample_id, mine in newest]
    widths = [max(len(row[column]) for row in (HEADS, *rows)) for column in range(len(HEADS))]
    yield Text(_aligned(HEADS, widths), style="bold")
    for row in rows:
        yield Text(_aligned(row, widths), style="red" if "failed" in row[1] else "")


def _row(sample_id: str, records: Sequence[EpisodeRow], state: str) -> tuple[str, ...]:
    last = records[-1]
    reward = "" if last["reward"] is None else f"{last['reward']:g}"
    causes = dict.fromkeys(record["cause"] for record in records if record["cause"])
    ends = ", ".join([*causes, *([last["cut"]] if last["cut"] else [])])
    return shown(sample_id), state, str(last["attempt"] + 1), str(last["turns"]), reward, ends


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


# One sample


def _sample(run_dir: Path, sample_id: str) -> Iterator[Text]:
    booked, records = booked_sample(run_dir, sample_id), read_kept(run_dir, sample_id)
    if booked is None and not records:
        raise ConfigError(f"{run_dir} has no sample {sample_id!r}; {_hint(run_dir, sample_id)}")
    environment = next((f"  {record['environment']}" for record in records if record["environment"]), "")
    yield Text(f"sample {shown(sample_id)}{environment}", style="bold")
    if booked is not None:
        yield from (Text(line) for line in _booked(booked))
    for record in records:
        yield Text("")
        yield from attempt_text(record)
    if not records:
        yield Text("")
        kept = find_sample(run_dir, sample_id)
        yield from [Text(_why_without_text(booked))] if kept is None else sample_text(kept)


def _hint(run_dir: Path, sample_id: str) -> str:
    known = list(dict.fromkeys(record["sample_id"] for record in read_kept(run_dir)))
    near = difflib.get_close_matches(sample_id, known, 1)
    return f"did you mean {near[0]}?" if near else f"flowrl show {run_dir} lists the episodes that are kept"


def _why_without_text(booked: BookedSample | None) -> str:
    if booked is not None and booked.episode is None and not booked.void:
        return "Its text is not kept: --keep-samples says which samples are."
    return "Its text is not kept: --keep-episodes sets how many of the last ones are."


def _booked(booked: BookedSample) -> Iterator[str]:
    """What the ledger says, in a few lines."""
    sample = booked.sample
    step = "" if sample["step"] is None else f" in step {sample['step']}"
    reward = "" if sample["reward"] is None else f"  reward {sample['reward']:g}"
    yield f"state      {booked.state}{step}{reward}"
    yield (
        f"tokens     {sample['prompt_tokens']} of the prompt, {sample['response_tokens']} sampled, "
        f"{sample['trained_tokens']} trained, {sample['stale_tokens']} too old, {sample['redone_tokens']} redone"
    )
    yield f"staleness  {_staleness(sample)}"
    if (episode := booked.episode) is not None:
        cut = f", cut off by {episode['truncated']}" if episode["truncated"] else ""
        yield f"episode    {episode['attempts']} attempts, {episode['turns']} turns{cut}, {episode['seconds']:.1f} s"
    for void in booked.void:
        yield f"void       attempt {void['attempt']}: {void['cause']} (incarnation {void['incarnation']})"


def _staleness(sample: Mapping[str, Any]) -> str:
    if sample["oldest_version"] is None:
        return f"admitted at version {sample['born_version']}, nothing sampled"
    sampled = f"sampled by versions {sample['oldest_version']} to {sample['newest_version']}"
    if sample["trained_version"] is None or sample["oldest_trained_version"] is None:
        return f"{sampled}, not trained"
    age = sample["trained_version"] - sample["oldest_trained_version"]
    return f"{sampled}, trained on version {sample['trained_version']}: at most {age} old"
