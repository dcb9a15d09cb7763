"""Kept attempts as text for a terminal: what was fed and what was sampled, in order.

Lines of the policy begin with "> ", lines that were fed to it with "| ". Where the version changes within a reply, it
is named in angle brackets; each version has a colour besides.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from rich.text import Text

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red")
FED = -1
"""The version of a span that was fed."""
REORDERING = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that reorder the text around them."""


@dataclass
class Block:
    """Neighbouring tokens that were all fed, or all sampled."""

    sampled: bool
    start: int
    pieces: list[tuple[str, int]] = field(default_factory=list)
    """(text, version) of each span."""
    num_tokens: int = 0


def blocks_of(sequence: Mapping[str, Any]) -> list[Block]:
    """The blocks of a record's sequence, fed and sampled in turn."""
    blocks: list[Block] = []
    place = 0
    for size, version in sequence["spans"]:
        sampled = version != FED
        if not blocks or blocks[-1].sampled != sampled:
            blocks.append(Block(sampled, place))
        blocks[-1].pieces.append(("".join(sequence["pieces"][place : place + size]), version))
        blocks[-1].num_tokens += size
        place += size
    return blocks


def attempt_text(record: Mapping[str, Any]) -> Iterator[Text]:
    """One kept attempt, line by line."""
    yield Text(_heading(record), style="bold")
    start = 0
    for number, sequence in enumerate(record["sequences"], start=1):
        if len(record["sequences"]) > 1 or sequence["seat"] is not None:
            yield Text(f"sequence {number}{_seat(sequence, record)}", style="bold")
        yield from _sequence(sequence, record, start)
        start += len(sequence["pieces"])
    if record["metrics"]:
        yield Text("metrics  " + "  ".join(f"{name} {value:g}" for name, value in record["metrics"].items()))
    if record["text"]:
        yield from (Text(f"! {shown(line)}", style="red") for line in record["text"].split("\n"))


def _heading(record: Mapping[str, Any]) -> str:
    cut = f"cut off by {record['cut']}" if record["cut"] else "ended"
    end = f"failed: {record['cause']}" if record["cause"] else f"{cut}, reward {record['reward']:g}"
    return f"attempt {record['attempt']}  {end}  ({record['turns']} turns, {record['seconds']:.1f} s)"


def _seat(sequence: Mapping[str, Any], record: Mapping[str, Any]) -> str:
    """Which seat it is, and what this one got; "" in an environment of one seat."""
    if (seat := sequence["seat"]) is None:
        return ""
    return f"  seat {seat}  reward {dict(record['seat_rewards'])[seat]:g}"


def _sequence(sequence: Mapping[str, Any], record: Mapping[str, Any], start: int) -> Iterator[Text]:
    """`start` is the number of tokens of the sequences before it."""
    num_fed = num_sampled = 0
    for block in blocks_of(sequence):
        if block.sampled:
            num_sampled += 1
            yield Text(f"turn {num_sampled}  policy  {_facts(block, record, start + block.start)}", style="dim")
        else:
            roles = sequence["roles"][num_fed] if num_fed < len(sequence["roles"]) else []
            num_fed += 1
            yield Text(f"turn {num_fed}  {', '.join(roles) or 'context'}  {block.num_tokens} tokens", style="dim")
        yield from _lines(block)


def _facts(block: Block, record: Mapping[str, Any], start: int) -> str:
    """`start` is the number of tokens before the block, through all sequences."""
    versions = ", ".join(dict.fromkeys(f"v{version}" for _, version in block.pieces))
    given = [reward for place, reward in record["rewards"] if start <= place < start + block.num_tokens]
    return f"{block.num_tokens} tokens  {versions}" + "".join(f"  reward {reward:g}" for reward in given)


def _lines(block: Block) -> Iterator[Text]:
    """The block's text; a mark at the beginning of each line says whose it is."""
    text = Text()
    for number, (piece, version) in enumerate(block.pieces):
        text.append(f"⟨v{version}⟩" if number else "", style="dim")
        text.append(shown(piece), style=colour(version) if block.sampled else "")
    mark = "> " if block.sampled else "| "
    return (Text.assemble((mark, "dim"), line) for line in text.split("\n", allow_blank=True))


def colour(version: int) -> str:
    """Neighbouring versions have different colours."""
    return COLOURS[version % len(COLOURS)]


def shown(text: str) -> str:
    """`text` without what would move the cursor, change colours or reorder: such characters are written as escapes."""
    return "".join(_escaped(character) if _is_unsafe(character) else character for character in text)


def _is_unsafe(character: str) -> bool:
    if character in "\n\t":
        return False
    return unicodedata.category(character) in ("Cc", "Cs") or character in REORDERING


def _escaped(character: str) -> str:
    return character.encode("unicode_escape").decode()
