"""What the documents hold: their links, headings, blocks of code, and the command lines that they show."""

from __future__ import annotations

import re
import shlex
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("*.md"))
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *PAGES]

FENCED = re.compile(r"^ *```(\w*)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:^    \S.*\n)+)", re.MULTILINE)
INLINE = re.compile(r"`(flowrl [^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"^(?:\$ )?(?:[A-Z_]+=\S+ )*(flowrl(?: .*)?)$")
ENDS = ("|", ">", "&&", "...", "…", ";")
"""What ends a command on its line."""


def without_code(text: str) -> str:
    """The text with its fenced blocks emptied."""
    return FENCED.sub("", text)


def links(text: str) -> list[str]:
    """Targets of links that lead to files or headings of the repository."""
    return [link for link in LINK.findall(without_code(text)) if not re.match(r"[a-z]+:", link)]


def headings(text: str) -> list[str]:
    """The headings of a page, without markup."""
    found = re.findall(r"^#{1,6} +(.*?) *$", without_code(text), re.MULTILINE)
    return [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).replace("`", "") for heading in found]


def slugs_on_github(text: str) -> set[str]:
    """The anchors of a page on a forge."""
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings(text)}


def slugs_on_the_site(text: str) -> set[str]:
    """The anchors of a page on the site."""
    plain = (unicodedata.normalize("NFKD", one).encode("ascii", "ignore").decode() for one in headings(text))
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", one).strip().lower()) for one in plain}


@dataclass(frozen=True)
class Shown:
    """A command line of a document: the words behind `flowrl`."""

    words: tuple[str, ...]
    whole: bool
    """It stands in a block, to be copied; else in a sentence, where a part may stand for the whole."""

    def __str__(self) -> str:
        return " ".join(("flowrl", *self.words))


def commands(text: str) -> Iterator[Shown]:
    """Every command line that begins with `flowrl`, once."""
    blocks = [code for language, code in FENCED.findall(text) if language in ("", "sh", "bash", "console")]
    blocks += INDENTED.findall(without_code(text))
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    found = [Shown(_words(match[1]), True) for line in lines if (match := COMMAND.match(line))]
    found += [Shown(_words(code), False) for code in INLINE.findall(without_code(text))]
    yield from dict.fromkeys(found)


def _words(line: str) -> tuple[str, ...]:
    words = shlex.split(line, comments=True)[1:]
    end = next((place for place, word in enumerate(words) if word in ENDS), len(words))
    return tuple(words[:end])


def options_named(text: str) -> set[str]:
    """Names in code within sentences that look like options of flowrl: "zero.stage" for `--zero.stage 2`.

    Those of other commands, as in `python -m benchmarks.training.layouts --case`, are left out.
    """
    spans = re.findall(r"`([^`\n]+)`", without_code(text))
    mine = [span for span in spans if span.startswith(("--", "flowrl "))]
    return {name for span in mine for name in re.findall(r"(?:^|(?<= ))--([a-z][a-z0-9.-]*)", span)}
