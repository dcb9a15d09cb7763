"""Every task of the `reasoning_gym` package, with its own verifier.

A row carries its index instead of the entry's metadata. The scorer generates the entry again from the
task's name, which is exact and keeps messages small.

The option `extract` selects the part of a response that the verifier sees: `extract=number` its last number
(evaluation harnesses call this flexible extraction), `extract=tag` the content of its last <answer> tag; by
default the whole response.
"""

from __future__ import annotations

import difflib
import functools
import re
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

from flowrl.errors import ConfigError
from flowrl.tasks.rows import Row
from flowrl.tasks.task import Task

OPEN_TAG, CLOSE_TAG = "<answer>", "</answer>"


def find_tagged(text: str) -> list[str]:
    """The texts between each <answer> and the next </answer>."""
    found, at = list[str](), text.find(OPEN_TAG)
    while at >= 0 and (end := text.find(CLOSE_TAG, at)) >= 0:
        found.append(text[at + len(OPEN_TAG) : end])
        at = text.find(OPEN_TAG, end)
    return found


NUMBER = re.compile(r"-?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?")


def find_numbers(text: str) -> list[str]:
    """The numbers of a text, without the commas between thousands. As in evaluation harnesses, a hyphen directly before
    a number is its sign, even in `12-5`."""
    return [number.replace(",", "") for number in NUMBER.findall(text)]


EXTRACTIONS: dict[str, Callable[[str], list[str]]] = {
    "number": find_numbers,
    "tag": find_tagged,
}
DEFAULT_SIZE = 5120
"""Entries generated, held-out ones included, unless the option `size` says otherwise."""


def generate_rows(task: Task) -> Iterator[Row]:
    """The entries of `task`, in the order of the package. The column `difficulty`, as num_terms=3,num_digits=2, is left
    out if the package does not report it."""
    for index, entry in enumerate(_dataset_of(task.name)):
        try:
            columns = {"answer": entry["answer"], "task": task.name, "entry": index}
            metadata: Mapping[str, Any] = entry["metadata"]
            ranges = metadata.get("difficulty")
            if isinstance(ranges, Mapping):
                told = [f"{name}={metadata[name]}" for name in ranges if isinstance(metadata.get(name), int)]
                columns |= {"difficulty": ",".join(told)} if told else {}
            yield Row.ask(entry["question"], **columns)
        except ConfigError as problem:
            raise ConfigError(f"task {task.name!r}, entry {index}: {problem}") from None


def score(
    prompts: Sequence[str], responses: Sequence[str], *, task: Sequence[str], entry: Sequence[int]
) -> list[float]:
    """Score with the verifier of each row's task: 1 is right, 0 is wrong, values in between are partial credit."""
    return [
        float(_dataset_of(name).score_answer(extract_answer(name, response), entry=_dataset_of(name)[index]))
        for response, name, index in zip(responses, task, entry, strict=True)
    ]


def prepare() -> None:
    """Import reasoning-gym if it is installed; if it is not, `check` reports that."""
    with suppress(ImportError):
        _dataset_names()


def _dataset_names() -> Mapping[str, Any]:
    """The package's datasets, by name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)  # from a package that it imports, when Python compiles that
        from reasoning_gym.factory import DATASETS
    return cast(Mapping[str, Any], DATASETS)


@dataclass(frozen=True)
class Problem:
    """One entry of a dataset, which only the seed determines."""

    task: Task
    entry: Mapping[str, Any]
    _source: Any

    @property
    def question(self) -> str:
        return str(self.entry["question"])

    @property
    def answer(self) -> str:
        """A right response."""
        return str(self.entry["answer"])

    def score(self, response: str) -> float:
        """The same as the function `score` computes."""
        return float(self._source.score_answer(extract_answer(self.task.name, response), entry=self.entry))


def make_problem(task: Task, seed: int) -> Problem:
    """The problem of that seed. Raises ConfigError if the task does not exist or rejects its options."""
    source = _create_dataset(task, size=1, seed=seed)
    return Problem(task, source[0], source)


def extract_answer(task: str, response: str) -> str:
    """The part of `response` that the verifier of the task named `task` sees; "" if `response` has no such part."""
    extraction = _extraction_of(task)
    if extraction is None:
        return response.strip()
    found = extraction(response)
    return found[-1].strip() if found else ""


@functools.lru_cache(maxsize=8)
def _extraction_of(name: str) -> Callable[[str], list[str]] | None:
    wanted = Task(name).options.get("extract")
    if wanted is not None and wanted not in EXTRACTIONS:
        raise ConfigError(f"task {name!r}: extract is {wanted!r}; it has to be one of {', '.join(EXTRACTIONS)}")
    return None if wanted is None else EXTRACTIONS[wanted]


def check_reasoning_task(task: Task) -> None:
    """Raise ConfigError if the task does not exist or rejects its options."""
    _dataset_of(task.name)


@functools.lru_cache(maxsize=8)
def _dataset_of(name: str) -> Any:
    try:
        names = _dataset_names()
    except ImportError:
        raise ConfigError(f"task {name!r} needs the package reasoning-gym; pip install reasoning-gym") from None
    task = Task(name)
    _extraction_of(name)
    dataset = task.source.removeprefix("reasoning_gym/")
    if dataset not in names:
        close = difflib.get_close_matches(dataset, names, 3) or sorted(names)[:5]
        raise ConfigError(f"reasoning_gym has no task {dataset!r} among its {len(names)}; try {', '.join(close)}")
    return _create_dataset(task, size=DEFAULT_SIZE, seed=0)


def _create_dataset(task: Task, **defaults: int) -> Any:
    import reasoning_gym

    options = {key: value for key, value in task.options.items() if key != "extract"}
    try:
        return reasoning_gym.create_dataset(task.source.removeprefix("reasoning_gym/"), **{**defaults, **options})
    except (TypeError, AssertionError, ValueError) as refusal:
        raise ConfigError(f"task {task.name!r}: reasoning_gym refuses these options: {refusal}") from None
