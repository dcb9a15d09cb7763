"""`flowrl new`: a copy of a graph that comes with flowrl, or the skeleton of a part of a graph, to be edited."""

from __future__ import annotations

import difflib
import importlib.util
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from flowrl.commands.node_skeletons import SKELETONS
from flowrl.errors import ConfigError
from flowrl.graph.load import FOLDER, companion_files, graph_source, shipped_names

FROM, NODE = "--from", "--node"


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
        check_target(self.target)

    def write_files(self) -> list[Path]:
        """Write the copy; returns all files that it wrote. Raises ConfigError if one of them already exists."""
        beside = {FOLDER / path: self.target.parent / path for path in companion_files(self.name)}
        refuse_present(self.target, *beside.values())
        # The commands in the graph's docstring are changed to name the copy.
        text = graph_source(self.name).replace(f"flowrl run {self.name} ", f"flowrl run {self.target} ")
        self.target.write_text(text, encoding="utf-8")
        for origin, copy in beside.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(origin, copy)
        return [self.target, *beside.values()]


@dataclass(frozen=True)
class Skeleton:
    """A new module `target` with a part of a graph of one's own, of the given kind, and its test beside it."""

    kind: str
    target: Path

    def __post_init__(self) -> None:
        if self.kind not in SKELETONS:
            near = difflib.get_close_matches(self.kind, SKELETONS, 1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(SKELETONS)}"
            raise ConfigError(f"{NODE} {self.kind}: there is no skeleton of this kind; {hint}")
        check_target(self.target)
        if not self.target.stem.isidentifier():
            raise ConfigError(f"{self.target} has to have a name that its test can import, such as my_{self.kind}.py")

    def write_files(self) -> list[Path]:
        """Write module and test; returns them. Raises ConfigError if one of them already exists."""
        found = [self.target, self.target.with_name(f"test_{self.target.name}")]
        refuse_present(*found)
        for path, text in zip(found, SKELETONS[self.kind], strict=True):
            path.write_text(text.replace("NAME", self.target.stem), encoding="utf-8")
        return found


def parse_new(args: list[str]) -> GraphCopy | Skeleton:
    """What `flowrl new TARGET.py --from NAME`, or `--node KIND`, asks for. Raises ConfigError."""
    names, asked = [], []
    rest = iter(args)
    for arg in rest:
        option, _, value = arg.partition("=")
        if option in (FROM, NODE):
            asked.append((option, value or next(rest, "")))
        elif arg.startswith("-"):
            raise ConfigError(
                f"flowrl new has no option {arg}; it has {FROM} and {NODE}: flowrl new my_graph.py {FROM} grpo"
            )
        else:
            names.append(arg)
    if len(names) != 1 or len(asked) != 1 or not asked[0][1]:
        raise ConfigError(
            f"flowrl new needs the file to write, and the graph to copy or the kind of a node: flowrl new my_graph.py "
            f"{FROM} grpo, or flowrl new my_filter.py {NODE} filter; flowrl graphs lists the graphs, and the kinds are "
            f"{', '.join(SKELETONS)}"
        )
    ((option, value),) = asked
    return (GraphCopy if option == FROM else Skeleton)(value, Path(names[0]))


def check_target(target: Path) -> None:
    """Raise ConfigError unless `target` can be a new module of the user's."""
    if target.suffix != ".py":
        raise ConfigError(f"{target} has to end in .py, as every graph file does; write {target}.py")
    if hides_a_module(target.stem):
        raise ConfigError(f"{target} would hide the Python module {target.stem} from the graph; choose another name")
    if not target.parent.is_dir():
        raise ConfigError(f"there is no folder {target.parent} for {target.name}; make it first")


def refuse_present(*paths: Path) -> None:
    """Raise ConfigError if one of the files exists."""
    for path in paths:
        if path.exists():
            raise ConfigError(f"{path} is there already and is not replaced; choose another name or remove it")


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
