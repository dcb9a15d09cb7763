"""What `flowrl show` and `flowrl samples` print: the list of kept episodes, or samples, as text for a terminal.

An attempt shows what was fed and what was sampled, in order. Lines of the policy begin with "> ", lines that were fed
to it with "| ". Where the version changes within a reply, the new version is named in angle brackets; each version also
has a colour. The state of a sample is what the ledger says.
"""

from __future__ import annotations

import difflib
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

from flowrl.errors import ConfigError
from flowrl.runtime.ledger.ledger_file import DAMAGE, LEDGER, describe_unreadable, open_to_read
from flowrl.runtime.samples.kept_episodes import FOLDER, EpisodeRow, read_kept
from flowrl.runtime.samples.rollout_files import SampleRow, find_sample
from flowrl.runtime.telemetry.standard_streams import escape_controls

MOST_ALIGNED = 100
"""Lines of texts up to which similar lines are put together: that takes a time of about the square of their number."""


def rows_text(rows: Sequence[SampleRow]) -> Iterator[Text]:
    """Each sample: its outcome, its prompt and its response."""
    for row in rows:
        yield from sample_text(row)
        yield Text("")


def sample_text(row: SampleRow) -> Iterator[Text]:
    """One sample."""
    yield Text(
        f"{escape_controls(row['sample_id'])}  {_sample_facts(row)}",
        style="red" if row["state"] == "failed" else "bold",
    )
    yield from _mark_lines("| ", row["prompt"], "dim")
    yield from _mark_lines("> ", row["response"], "cyan")


def pair_text(before: SampleRow, after: SampleRow) -> Iterator[Text]:
    """Two answers to one prompt, and what differs, line by line."""
    old, new = (
        f"step {row['step']}: {'no reward' if row['reward'] is None else format(row['reward'], 'g')}"
        for row in (before, after)
    )
    yield Text(f"{escape_controls(after['prompt_id'])}  {old}  ->  {new}", style="bold")
    yield from _mark_lines("| ", after["prompt"], "dim")
    lines = _compare_lines(
        escape_controls(before["response"]).split("\n"), escape_controls(after["response"]).split("\n")
    )
    styles = {"- ": "red", "+ ": "green", "  ": ""}
    yield from (Text(line, style=styles[line[:2]]) for line in lines if line[:2] in styles)
    yield Text("")


def _compare_lines(before: list[str], after: list[str]) -> Iterator[str]:
    """The lines of both texts, each after "- ", "+ " or "  ". Only in short texts are similar lines put together."""
    if max(len(before), len(after)) <= MOST_ALIGNED:
        yield from difflib.ndiff(before, after)
        return
    for _, low, high, first, last in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        same = before[low:high] == after[first:last]
        yield from (f"{'  ' if same else '- '}{line}" for line in before[low:high])
        yield from (f"+ {line}" for line in after[first:last] if not same)


def _sample_facts(row: SampleRow) -> str:
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


def _mark_lines(mark: str, text: str, style: str) -> Iterator[Text]:
    return (Text.assemble((mark, "dim"), (line, style)) for line in escape_controls(text).split("\n"))


COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
FED = -1
"""The version of a span that was fed."""


@dataclass
class Block:
    """Neighbouring tokens that were all fed, or all sampled."""

    sampled: bool
    turn: int
    """Number of the turn, from 1, in the episode or its seat, across sequences; fed tokens belong to the next reply."""
    start: int
    """Index of the first token, counted through all sequences."""
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """(text, version) of each span."""
    num_tokens: int = 0


def blocks_of(sequences: Sequence[Mapping[str, Any]]) -> list[list[Block]]:
    """The blocks of each of a record's sequences, fed and sampled ones alternating."""
    found: list[list[Block]] = []
    turns: dict[int | None, int] = {}
    start = 0
    for sequence in sequences:
        seat, blocks, place = sequence["seat"], list[Block](), 0
        turn = turns.get(seat, 0)
        for size, version in sequence["spans"]:
            sampled = version != FED
            if not blocks or blocks[-1].sampled != sampled:
                if not blocks or not sampled:
                    turn += 1
                blocks.append(Block(sampled, turn, start + place))
            blocks[-1].pieces.append(("".join(sequence["pieces"][place : place + size]), version))
            blocks[-1].num_tokens += size
            place += size
        found.append(blocks)
        turns[seat] = turns.get(seat, 0) + sum(block.sampled for block in blocks)
        start += len(sequence["pieces"])
    return found


def attempt_text(record: Mapping[str, Any]) -> Iterator[Text]:
    """One kept attempt, line by line."""
    cut = f"cut off by {record['cut']}" if record["cut"] else "ended"
    end = f"failed: {record['cause']}" if record["cause"] else f"{cut}, reward {record['reward']:g}"
    heading = f"attempt {record['attempt']}  {end}  ({record['turns']} turns, {record['seconds']:.1f} s)"
    yield Text(heading, style="bold")

    sequences = record["sequences"]
    seats: set[int | None] = set()
    for number, (sequence, blocks) in enumerate(zip(sequences, blocks_of(sequences), strict=True), start=1):
        seat = sequence["seat"]
        if len(sequences) > 1 or seat is not None:
            whose = "" if seat is None else f"  seat {seat}  reward {dict(record['seat_rewards'])[seat]:g}"
            yield Text(f"sequence {number}{whose}", style="bold")
        for index, block in enumerate(blocks):
            # Later sequences of a seat begin with text that earlier ones also have.
            again = not index and seat in seats
            facts = (
                _sampled_facts(block, record) if block.sampled else _fed_facts(block, sequence["roles"], again=again)
            )
            yield Text(facts, style="dim")
            yield from _block_lines(block)
        seats.add(seat)

    if record["metrics"]:
        yield Text("metrics  " + "  ".join(f"{name} {value:g}" for name, value in record["metrics"].items()))
    if record["text"]:
        yield from (Text(f"! {escape_controls(line)}", style="red") for line in record["text"].split("\n"))


def _fed_facts(block: Block, roles: Sequence[list[str]], *, again: bool) -> str:
    """The facts of a fed block.

    `roles`: for each reply of the seat, in all its sequences, the roles of the messages before it; [] if not known.
    `again`: the block begins with text that earlier sequences also have.
    """
    before = block.turn - 1
    found = roles[before] if before < len(roles) else []
    whose = ["context"] * (again or not found) + found
    return f"turn {block.turn}  {', '.join(whose)}  {block.num_tokens} tokens"


def _sampled_facts(block: Block, record: Mapping[str, Any]) -> str:
    versions = ", ".join(dict.fromkeys(f"v{version}" for _, version in block.pieces))
    end = block.start + block.num_tokens
    given = [reward for place, reward in record["rewards"] if block.start <= place < end]
    rewards = "".join(f"  reward {reward:g}" for reward in given)
    return f"turn {block.turn}  policy  {block.num_tokens} tokens  {versions}{rewards}"


def _block_lines(block: Block) -> Iterator[Text]:
    """The block's text; a mark at the start of each line shows whether it was sampled or fed."""
    text = Text()
    for number, (piece, version) in enumerate(block.pieces):
        text.append(f"⟨v{version}⟩" if number else "", style="dim")
        text.append(escape_controls(piece), style=COLOURS[version % len(COLOURS)] if block.sampled else "")
    mark = "> " if block.sampled else "| "
    return (Text.assemble((mark, "dim"), line) for line in text.split("\n", allow_blank=True))


AT_ONCE = 500
"""Number of samples in one query."""


@dataclass(frozen=True)
class BookedSample:
    """Rows of the ledger, by their columns. `episode` is None for a sample that is no episode, or has not ended."""

    sample: Mapping[str, Any]
    episode: Mapping[str, Any] | None
    void: Sequence[Mapping[str, Any]]
    """Attempts that failed or were given up."""

    @property
    def state(self) -> str:
        """The state and its reason, for example "failed: env_raised"."""
        return state_text(self.sample["state"], self.sample["reason"])


def booked_sample(run_dir: Path, sample_id: str) -> BookedSample | None:
    """What is booked for a sample; None if the run has none with that id. Raises ConfigError without a ledger."""
    with _open_ledger(run_dir) as db:
        row = _fetch_row(db, "SELECT * FROM samples WHERE sample_id = ?", sample_id)
        if row is None:
            return None
        episode = _fetch_row(db, "SELECT * FROM episodes WHERE sample_id = ?", sample_id)
        void = db.execute("SELECT * FROM attempts WHERE sample_id = ? ORDER BY rowid", (sample_id,)).fetchall()
    return BookedSample(row, episode, [dict(found) for found in void])


def booked_states(run_dir: Path, sample_ids: Sequence[str]) -> dict[str, str]:
    """Sample -> its state with the reason, for those that the ledger has. Raises ConfigError without a ledger."""
    found: dict[str, str] = {}
    with _open_ledger(run_dir) as db:
        for start in range(0, len(sample_ids), AT_ONCE):
            part = sample_ids[start : start + AT_ONCE]
            marks = ", ".join("?" * len(part))
            rows = db.execute(f"SELECT sample_id, state, reason FROM samples WHERE sample_id IN ({marks})", part)
            found |= {row["sample_id"]: state_text(row["state"], row["reason"]) for row in rows}
    return found


def state_text(state: str, reason: str | None) -> str:
    """The state, with its reason if it has one."""
    return state if reason is None else f"{state}: {reason}"


def _fetch_row(db: sqlite3.Connection, query: str, sample_id: str) -> Mapping[str, Any] | None:
    row = db.execute(query, (sample_id,)).fetchone()
    return None if row is None else dict(row)


@contextmanager
def _open_ledger(run_dir: Path) -> Iterator[sqlite3.Connection]:
    """A connection to a run's ledger whose rows have names; what SQLite cannot read becomes a ConfigError."""
    path = run_dir / LEDGER
    if not path.is_file():
        raise ConfigError(f"{run_dir} has no {LEDGER}; name the directory of a run that has begun")
    with closing(open_to_read(path)) as db:
        db.row_factory = sqlite3.Row
        try:
            yield db
        except DAMAGE as problem:
            raise ConfigError(describe_unreadable(path, problem)) from None


HEADS = ("sample", "state", "attempts", "turns", "reward", "ended by")


def show_sample_or_list(run_dir: Path, sample_id: str | None, console: Console) -> None:
    """Print one sample, or the list of the episodes kept. Raises ConfigError if there is nothing to print."""
    lines = _list_episodes(run_dir) if sample_id is None else _show_sample(run_dir, sample_id)
    for line in lines:
        console.print(line, soft_wrap=True, highlight=False)


# The list


def _list_episodes(run_dir: Path) -> Iterator[Text]:
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
    rows = []
    for sample_id, mine in newest:
        last = mine[-1]
        reward = "" if last["reward"] is None else f"{last['reward']:g}"
        causes = dict.fromkeys(record["cause"] for record in mine if record["cause"])
        ends = ", ".join([*causes, *([last["cut"]] if last["cut"] else [])])
        state = states.get(sample_id, "not in the ledger")
        rows.append((escape_controls(sample_id), state, str(last["attempt"] + 1), str(last["turns"]), reward, ends))
    widths = [max(len(row[column]) for row in (HEADS, *rows)) for column in range(len(HEADS))]
    yield Text(_align_cells(HEADS, widths), style="bold")
    for row in rows:
        yield Text(_align_cells(row, widths), style="red" if "failed" in row[1] else "")


def _align_cells(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


# One sample


def _show_sample(run_dir: Path, sample_id: str) -> Iterator[Text]:
    booked, records = booked_sample(run_dir, sample_id), read_kept(run_dir, sample_id)
    if booked is None and not records:
        known = list(dict.fromkeys(record["sample_id"] for record in read_kept(run_dir)))
        near = difflib.get_close_matches(sample_id, known, 1)
        hint = f"did you mean {near[0]}?" if near else f"flowrl show {run_dir} lists the episodes that are kept"
        raise ConfigError(f"{run_dir} has no sample {sample_id!r}; {hint}")
    environment = next((f"  {record['environment']}" for record in records if record["environment"]), "")
    yield Text(f"sample {escape_controls(sample_id)}{environment}", style="bold")
    if booked is not None:
        yield from (Text(line) for line in _ledger_lines(booked))
    for record in records:
        yield Text("")
        yield from attempt_text(record)
    if not records:
        yield Text("")
        if (kept := find_sample(run_dir, sample_id)) is not None:
            yield from sample_text(kept)
        elif booked is not None and booked.episode is None and not booked.void:
            yield Text("Its text is not kept: --keep-samples says which samples are.")
        else:
            yield Text("Its text is not kept: --keep-episodes sets how many of the last ones are.")


def _ledger_lines(booked: BookedSample) -> Iterator[str]:
    """What the ledger says, in a few lines."""
    sample = booked.sample
    step = "" if sample["step"] is None else f" in step {sample['step']}"
    reward = "" if sample["reward"] is None else f"  reward {sample['reward']:g}"
    yield f"state      {booked.state}{step}{reward}"
    yield (
        f"tokens     {sample['prompt_tokens']} of the prompt, {sample['response_tokens']} sampled, "
        f"{sample['trained_tokens']} trained, {sample['stale_tokens']} too old, {sample['redone_tokens']} redone"
    )
    if sample["oldest_version"] is None:
        yield f"staleness  admitted at version {sample['born_version']}, nothing sampled"
    else:
        trained_on, oldest = sample["trained_version"], sample["oldest_trained_version"]
        is_trained = trained_on is not None and oldest is not None
        use = f"trained on version {trained_on}: at most {trained_on - oldest} old" if is_trained else "not trained"
        yield f"staleness  sampled by versions {sample['oldest_version']} to {sample['newest_version']}, {use}"
    if (episode := booked.episode) is not None:
        cut = f", cut off by {episode['truncated']}" if episode["truncated"] else ""
        yield f"episode    {episode['attempts']} attempts, {episode['turns']} turns{cut}, {episode['seconds']:.1f} s"
    for void in booked.void:
        yield f"void       attempt {void['attempt']}: {void['cause']} (incarnation {void['incarnation']})"
