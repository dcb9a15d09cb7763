"""`flowrl new`: a copy of a graph that comes with flowrl, to be edited."""

from __future__ import annotations

import difflib
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from flowrl.errors import ConfigError
from flowrl.graph.load import FOLDER, companion_files, graph_source, shipped_names

FROM = "--from"


@dataclass(frozen=True)
class GraphCopy:
    """A copy of the graph `name` as `target`, with the files that it needs next to it."""

    name: str
    target: Path

    def __post_init__(self) -> None:
        if self.name not in shipped_names():
            near = difflib.get_close_matches(self.name.lower().replace("-", "_"), shipped_names(), 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(shipped_names())}"
            raise ConfigError(f"{FROM} {self.name}: flowrl has no graph of this name; {hint}")
        if self.target.suffix != ".py":
            raise ConfigError(f"{self.target} has to end in .py, as every graph file does; write {self.target}.py")
        if hides_a_module(self.target.stem):
            raise ConfigError(
                f"{self.target} would hide the Python module {self.target.stem} from the graph; choose another name"
            )
        if not self.target.parent.is_dir():
            raise ConfigError(f"there is no folder {self.target.parent} for {self.target.name}; make it first")

    def write_files(self) -> list[Path]:
        """Write the copy; returns all files that it wrote. Raises ConfigError if one of them already exists."""
        beside = {FOLDER / path: self.target.parent / path for path in companion_files(self.name)}
        for path in (self.target, *beside.values()):
            if path.exists():
                raise ConfigError(f"{path} is there already and is not replaced; choose another name or remove it")
        # The commands in the graph's docstring are changed to name the copy.
        text = graph_source(self.name).replace(f"flowrl run {self.name} ", f"flowrl run {self.target} ")
        self.target.write_text(text, encoding="utf-8")
        for origin, copy in beside.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, copy)
        return [self.target, *beside.values()]


def parse_new(args: list[str]) -> GraphCopy:
    """The copy that `flowrl new TARGET.py --from NAME` asks for. Raises ConfigError."""
    names, origins = [], []
    rest = iter(args)
    for arg in rest:
        if arg == FROM or arg.startswith(f"{FROM}="):
            origins.append(arg.partition("=")[2] or next(rest, ""))
        elif arg.startswith("-"):
            raise ConfigError(
                f"flowrl new has no option {arg}; its only option is {FROM}: flowrl new my_graph.py {FROM} grpo"
            )
        else:
            names.append(arg)
    if len(names) != 1 or len(origins) != 1 or not origins[0]:
        raise ConfigError(
            f"flowrl new needs the file to write and the graph to copy: flowrl new my_graph.py {FROM} grpo; "
            "flowrl graphs lists the graphs"
        )
    return GraphCopy(origins[0], Path(names[0]))


def hides_a_module(stem: str) -> bool:
    """Whether a file of this name, whose folder comes first in Python's path, would be imported in place of another
    module."""
    if stem in sys.stdlib_module_names:
        return True
    if not stem.isidentifier():
        return False
    found = importlib.util.find_spec(stem)
    if found is None or found.origin is None:
        return False
    return Path(found.origin).resolve().parent not in (Path.cwd(), FOLDER.resolve())
