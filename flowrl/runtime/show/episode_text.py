"""Kept attempts as text for a terminal: what was fed and what was sampled, in order.

Lines of the policy begin with "> ", lines that were fed to it with "| ". Where the version changes within a reply, the
new version is named in angle brackets. Each version also has a colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

from flowrl.runtime.telemetry.safe_text import shown

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
        seat = sequence["seat"]
        found.append(_of_sequence(sequence, turns.get(seat, 0), start))
        turns[seat] = turns.get(seat, 0) + sum(block.sampled for block in found[-1])
        start += len(sequence["pieces"])
    return found


def _of_sequence(sequence: Mapping[str, Any], turn: int, start: int) -> list[Block]:
    """The blocks of one sequence. The sequences before it contain `turn` replies of its seat and `start` tokens."""
    blocks: list[Block] = []
    place = 0
    for size, version in sequence["spans"]:
        sampled = version != FED
        if not blocks or blocks[-1].sampled != sampled:
            if not blocks or not sampled:
                turn += 1
            blocks.append(Block(sampled, turn, start + place))
        blocks[-1].pieces.append(("".join(sequence["pieces"][place : place + size]), version))
        blocks[-1].num_tokens += size
        place += size
    return blocks


def attempt_text(record: Mapping[str, Any]) -> Iterator[Text]:
    """One kept attempt, line by line."""
    yield Text(_heading(record), style="bold")
    seats: set[int | None] = set()
    for number, (sequence, blocks) in enumerate(
        zip(record["sequences"], blocks_of(record["sequences"]), strict=True), start=1
    ):
        if len(record["sequences"]) > 1 or sequence["seat"] is not None:
            yield Text(f"sequence {number}{_seat(sequence, record)}", style="bold")
        yield from _sequence_lines(blocks, sequence["roles"], record, first=sequence["seat"] not in seats)
        seats.add(sequence["seat"])
    if record["metrics"]:
        yield Text("metrics  " + "  ".join(f"{name} {value:g}" for name, value in record["metrics"].items()))
    if record["text"]:
        yield from (Text(f"! {shown(line)}", style="red") for line in record["text"].split("\n"))


def _heading(record: Mapping[str, Any]) -> str:
    cut = f"cut off by {record['cut']}" if record["cut"] else "ended"
    end = f"failed: {record['cause']}" if record["cause"] else f"{cut}, reward {record['reward']:g}"
    return f"attempt {record['attempt']}  {end}  ({record['turns']} turns, {record['seconds']:.1f} s)"


def _seat(sequence: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """The seat of a sequence, and the reward of this seat; "" in an environment of one seat."""
    if (seat := sequence["seat"]) is None:
        return ""
    return f"  seat {seat}  reward {dict(record['seat_rewards'])[seat]:g}"


def _sequence_lines(
    blocks: Sequence[Block], roles: Sequence[list[str]], record: Mapping[str, Any], *, first: bool
) -> Iterator[Text]:
    """A heading and the text of each block, line by line.

    `roles`: for each reply of the seat, in all its sequences, the roles of the messages before it; [] if not known.
    `first`: this is the seat's first sequence; later ones begin with text that earlier ones also have.
    """
    for number, block in enumerate(blocks):
        facts = _sampled(block, record) if block.sampled else _fed(block, roles, again=not number and not first)
        yield Text(facts, style="dim")
        yield from _lines(block)


def _fed(block: Block, roles: Sequence[list[str]], *, again: bool) -> str:
    """The facts of a fed block. `again`: it begins with text that earlier sequences also have."""
    before = block.turn - 1
    found = roles[before] if before < len(roles) else []
    whose = ["context"] * (again or not found) + found
    return f"turn {block.turn}  {', '.join(whose)}  {block.num_tokens} tokens"


def _sampled(block: Block, record: Mapping[str, Any]) -> str:
    versions = ", ".join(dict.fromkeys(f"v{version}" for _, version in block.pieces))
    end = block.start + block.num_tokens
    given = [reward for place, reward in record["rewards"] if block.start <= place < end]
    rewards = "".join(f"  reward {reward:g}" for reward in given)
    return f"turn {block.turn}  policy  {block.num_tokens} tokens  {versions}{rewards}"


def _lines(block: Block) -> Iterator[Text]:
    """The block's text; a mark at the start of each line shows whether it was sampled or fed."""
    text = Text()
    for number, (piece, version) in enumerate(block.pieces):
        text.append(f"⟨v{version}⟩" if number else "", style="dim")
        text.append(shown(piece), style=colour(version) if block.sampled else "")
    mark = "> " if block.sampled else "| "
    return (Text.assemble((mark, "dim"), line) for line in text.split("\n", allow_blank=True))


def colour(version: int) -> str:
    """Neighbouring versions have different colours."""
    return COLOURS[version % len(COLOURS)]
