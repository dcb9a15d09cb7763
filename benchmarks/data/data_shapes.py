"""Each shape of data, whole and broken in five ways: how many rows are used, and what is said before a run starts.

    python -m benchmarks.data.data_shapes            # prints the table
    python -m benchmarks.data.data_shapes --docs     # writes it into docs/data-shapes.md, too

Every cell writes its files anew and does what a run does before it starts anything: rows are read, split, and checked
by the node that uses them. A cell is refused if that ends in one of flowrl's own errors; anything else that is raised
is a traceback for a user, and the status is then 1.
"""

from __future__ import annotations

import argparse
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.data.data_shape_cases import CASES, SHAPES, Case, Shape, cache_of_the_hub
from benchmarks.training.ladder_cases import ROOT
from flowrl.errors import FlowrlError
from flowrl.models import Policy
from flowrl.nodes import Demonstrations, PreferenceDataset, Preferences, PromptSource, Reward, Texts, TextSource
from flowrl.tasks import Rows, Task, load_demonstrations, load_preferences, load_rows, load_texts
from flowrl.tasks.row_reading.row_loading import all_demonstrations, all_rows, all_texts

PAGE = ROOT / "docs" / "data-shapes.md"
BEGIN, END = "<!-- shapes: begin -->", "<!-- shapes: end -->"
PATH = re.compile(r"[\w/.*-]*(?:rows|part-[\d*]|train[-\w]*)\.[a-z]+[a-z.0-9]*")
"""The name of a file that a shape writes."""
MOST_CHARACTERS = 500
"""What is said has to be one sentence; a longer one has something in it that nobody reads."""


@dataclass(frozen=True)
class Cell:
    """What became of one shape in one case."""

    rows: int | None
    """Rows used for training or held out; None if the data are refused."""
    said: str = ""
    fault: str = ""
    """What is wrong with what was said; "" if nothing is."""
    skipping: int | None = None
    """Rows used with malformed=skip, where the data are refused without it; None if refused then too."""


def cell_of(shape: Shape, case: Case, home: Path) -> Cell:
    """The result of one cell, whose files are written below `home`, and removed."""
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    with cache_of_the_hub(home):
        source = shape.write(home, case)
        try:
            return _tried(shape, source, home)
        finally:
            shutil.rmtree(home)


def _tried(shape: Shape, source: str, home: Path) -> Cell:
    try:
        return Cell(_used(shape, f"{source}:{shape.options}" if shape.options else source))
    except FlowrlError as refusal:
        said = str(refusal)
    except Exception as problem:  # what a user would see as a traceback
        return Cell(None, f"{type(problem).__name__}: {problem}"[:MOST_CHARACTERS], fault="a traceback")
    fault = "several lines" if "\n" in said else "too long" if len(said) > MOST_CHARACTERS else ""
    try:
        rows = _used(shape, f"{source}:{','.join(filter(None, (shape.options, 'malformed=skip')))}")
    except FlowrlError:
        rows = None
    return Cell(None, said.replace(f"{home}/", ""), fault, rows)


def _used(shape: Shape, name: str) -> int:
    """The number of rows of a task that a run would use. Raises what stops it before its start."""
    for read in (all_rows, all_demonstrations, all_texts, load_preferences):
        read.cache_clear()
    task, policy = Task(name), Policy(shape.policy)
    if shape.use == "prompts":
        PromptSource(task, policy, part="all").preflight()
        Reward(task).preflight()
        return _number(load_rows(task))
    if shape.use == "demonstrations":
        Demonstrations(task, policy, part="all").preflight()
        return _number(load_demonstrations(task))
    if shape.use == "texts":
        TextSource(Texts(task, policy, part="all")).preflight()
        return _number(load_texts(task, whole=True))
    PreferenceDataset(Preferences(task, policy, kind=shape.use)).preflight()
    return _number(load_preferences(task, shape.use))


def _number(rows: Rows) -> int:
    return len(rows.train) + len(rows.held_out)


Cells = Mapping[tuple[str, str], Cell]


def results(shapes: Sequence[Shape], home: Path) -> Iterator[tuple[tuple[str, str], Cell]]:
    """Every cell, one after the other."""
    for shape in shapes:
        for case in CASES:
            yield (shape.name, case.name), cell_of(shape, case, home)


def table(found: Cells, shapes: Sequence[Shape] = SHAPES) -> str:
    """Markdown: a line for each shape, and the sentences by number."""
    notes: dict[str, int] = {}
    """Sentence, without the file's own name -> its number."""
    lines = [f"| shape | {' | '.join(case.name for case in CASES)} |", "|---" * (len(CASES) + 1) + "|"]
    for shape in shapes:
        texts = [_text(found[shape.name, case.name], notes) for case in CASES]
        lines.append(f"| {shape.name} | {' | '.join(texts)} |")
    return "\n".join([*lines, "", *(f"{number}. `{said}`" for said, number in notes.items())])


def _text(cell: Cell, notes: dict[str, int]) -> str:
    if cell.rows is not None:
        return str(cell.rows)
    number = notes.setdefault(PATH.sub("FILE", cell.said), len(notes) + 1)
    if cell.fault:
        return f"**{cell.fault}** {number}"
    return f"refused {number}" + (f"; skipping {cell.skipping}" if cell.skipping is not None else "")


def write_page(text: str) -> None:
    """Put the table between the page's marks."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--docs", action="store_true", help="write the table into docs/data-shapes.md")
    options = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as home:
        found = dict(results(SHAPES, Path(home) / "cell"))
    text = table(found)
    print(text)
    if options.docs:
        write_page(text)
    faults = {place: cell for place, cell in found.items() if cell.fault}
    for (shape, case), cell in faults.items():
        print(f"data_shapes: {shape}, {case}: {cell.fault}: {cell.said}", file=sys.stderr)
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
