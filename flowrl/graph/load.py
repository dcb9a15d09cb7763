"""Loads a graph file: finds it, runs it, and reads its configuration from the command line or a plain dict.

A graph file defines `graph(cfg)`, whose parameter is annotated with one frozen dataclass. Other processes build
the graph again from (path, configuration as a dict). A process runs a file only once, even if it builds
the graph several times, so that the file's message classes exist once.

The graphs that come with flowrl are found by name: `grpo` is the file `flowrl/recipes/grpo.py`.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import difflib
import functools
import hashlib
import importlib.util
import inspect
import os
import sys
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

from flowrl.errors import ConfigError, FlowrlError
from flowrl.graph.annotations import declared_types
from flowrl.graph.command_line import parse_options
from flowrl.graph.graph import Graph
from flowrl.graph.option_types import adapter_of, compose_config, options_of
from flowrl.messages.base import name_module

FOLDER = Path(__file__).resolve().parent.parent / "recipes"


def shipped_names() -> list[str]:
    """The names of the graphs that come with flowrl."""
    return sorted(path.stem for path in FOLDER.glob("*.py") if path.stem != "__init__")


def find_graph(graph: str | Path) -> Path:
    """The file of a graph that is named by path or by name. Raises ConfigError if it is neither.

    Text that ends in .py or contains a folder is a path, and the file need not exist.
    """
    text = str(graph)
    if text in shipped_names():
        return FOLDER / f"{text}.py"
    if text.endswith(".py") or os.sep in text or Path(text).exists():
        return Path(text)
    here = [path.name for path in Path.cwd().glob("*.py")]
    near = difflib.get_close_matches(text.lower().replace("-", "_"), [*shipped_names(), *here], 1)
    hint = f"did you mean {near[0]}?" if near else "flowrl graphs lists those of flowrl; a file of your own ends in .py"
    raise ConfigError(f"there is no graph {text!r}; {hint}")


def is_shipped(path: Path) -> bool:
    """Whether this is the file of a graph that comes with flowrl."""
    return path.resolve().parent == FOLDER.resolve()


def graph_summary(name: str) -> str:
    """The first line of the graph's docstring. The file is not run."""
    text = ast.get_docstring(ast.parse(graph_source(name))) or ""
    return text.partition("\n")[0]


def graph_source(name: str) -> str:
    """The text of the graph's file."""
    return (FOLDER / f"{name}.py").read_text(encoding="utf-8")


def companion_files(name: str) -> Iterator[Path]:
    """Files in folders next to the graphs that this graph names in its text, relative to the graphs' folder."""
    texts = {node.value for node in ast.walk(ast.parse(graph_source(name))) if isinstance(node, ast.Constant)}
    for path in sorted(FOLDER.glob("*/**/*.py")):
        if path.name in texts:
            yield path.relative_to(FOLDER)


EXAMPLE = "def graph(cfg: MyConfig) -> Graph, with MyConfig a frozen dataclass"


@dataclass(frozen=True)
class GraphFile:
    """A loaded graph file."""

    path: Path
    module: ModuleType
    config_type: type[Any]
    shown: str
    """What the user called it: its path, or the name of a graph of flowrl."""

    def parse(
        self, args: Sequence[str], *, prog: str = "flowrl run", others: Iterable[str] = (), default: Any = None
    ) -> Any:
        """The configuration with `--field value` overrides. Raises ConfigError for invalid options or values.

        `others` are further valid options, which suggestions for an unknown option also consider. `default` has the
        values of the fields that no option sets; its values need not be checked yet.
        """
        with user_code(self.path):
            return parse_options(self.config_type, args, prog=f"{prog} {self.shown}", others=others, default=default)

    def build(self, cfg: Any) -> Graph:
        """The graph of `cfg`. Errors raised in the file become a ConfigError with file and line."""
        with user_code(self.path):
            graph = self.module.graph(cfg)
        if not isinstance(graph, Graph):
            raise ConfigError(f"graph(cfg) in {self.path} returned {graph!r}; it needs to return the Graph it built")
        return graph


def load_file(graph: str | Path) -> GraphFile:
    """Run the file of a graph, given by path or name, and find its `graph` and configuration. Raises ConfigError."""
    path = find_graph(graph)
    _require_graph_file(path)
    with user_code(path):
        module = _run_file(str(path.resolve()))
        function = getattr(module, "graph", None)
        if not inspect.isfunction(function):
            tree = ast.parse(path.read_text(encoding="utf-8"))
            names = [part.name for part in tree.body if isinstance(part, ast.FunctionDef)]
            near = difflib.get_close_matches("graph", names, 1, 0.5)
            hint = f" (rename {near[0]}?)" if near else ""
            raise ConfigError(f"{path} is not a graph file: it has no function `graph`{hint}; write {EXAMPLE}")
        hints = declared_types(function)
    parameters = list(inspect.signature(function).parameters)
    config_type = hints.get(parameters[0]) if len(parameters) == 1 else None
    if config_type is None:
        raise ConfigError(f"graph({', '.join(parameters)}) in {path} needs exactly one annotated parameter: {EXAMPLE}")
    frozen = getattr(getattr(config_type, "__dataclass_params__", None), "frozen", False)
    if not (dataclasses.is_dataclass(config_type) and frozen):
        name = getattr(config_type, "__name__", config_type)
        raise ConfigError(
            f"{name}, the configuration of {path}, is not a frozen dataclass; decorate it with @dataclass(frozen=True)"
        )
    assert isinstance(config_type, type)
    return GraphFile(path, module, config_type, str(graph))


def forget_file(graph: str | Path) -> None:
    """Let the next `load_file` run the files of graphs again: this one may have been edited."""
    sys.modules.pop(_module_name(str(find_graph(graph).resolve())), None)
    _run_file.cache_clear()


def rebuild_graph(path: str | Path, config: Mapping[str, Any]) -> tuple[Graph, Any]:
    """Rebuild the graph and configuration from what `dump` returned. Every call creates new nodes."""
    file = load_file(path)
    cfg = restore_options(file, config)
    return file.build(cfg), cfg


def dump_options(cfg: Any) -> dict[str, Any]:
    """A configuration as JSON-able plain data, by option; blocks become dicts."""
    options = options_of(type(cfg)).values()
    return {one.name: adapter_of(one.hint).dump_python(one.value_in(cfg), mode="json") for one in options}


def restore_options(file: GraphFile, config: Mapping[str, Any]) -> Any:
    """The inverse of `dump`. Raises ConfigError that names the fields that do not match."""
    from pydantic import ValidationError

    options = options_of(file.config_type)
    if strange := [name for name in config if name not in options]:
        raise ConfigError(f"the configuration has the fields {', '.join(strange)}, which {file.path} does not define")
    values, faults = dict[str, Any](), list[str]()
    for name, value in config.items():
        try:
            values[name] = adapter_of(options[name].hint).validate_python(value)
        except ValidationError as error:
            faults += [f"{'.'.join(map(str, (name, *e['loc'])))}: {e['msg']}" for e in error.errors()]
    if faults:
        raise ConfigError(f"the configuration does not fit {file.path}: {'; '.join(faults)}")
    return compose_config(file.config_type, values)


@contextlib.contextmanager
def user_code(path: Path) -> Iterator[None]:
    """Turn an exception from the graph file into one line with file and line number.

    Catches broadly, because user code may raise anything. An exception whose traceback does not include
    the file is a flowrl bug, or the end of a command that prints help, and propagates unchanged.
    """
    try:
        yield
    except FlowrlError:
        raise
    except SystemExit as end:
        if _line_in(path, end) is None:
            raise
        raise _file_error(path, end) from end
    except Exception as error:  # the boundary to the graph file's code
        if _line_in(path, error) is None:
            raise
        raise _file_error(path, error) from error


def _file_error(path: Path, error: BaseException) -> ConfigError:
    """The last line of Python's traceback, with the closest name for a misspelt attribute."""
    lines = traceback.TracebackException.from_exception(error).format_exception_only()
    text = " ".join(line.strip() for line in lines)
    if isinstance(error, SystemExit):
        text = (
            f"it calls sys.exit({error.code!r}), which ends flowrl; leave it out, or put it under "
            "if __name__ == '__main__':"
        )
    elif isinstance(error, SyntaxError):
        text = f"{type(error).__name__}: {error.msg}"
    elif isinstance(error, AttributeError) and error.name is not None and "Did you mean" not in text:
        near = difflib.get_close_matches(error.name, dir(error.obj), 1)
        text += f". Did you mean: {near[0]!r}?" if near else ""
    return ConfigError(f"{path}:{_line_in(path, error)}: {text}")


def _line_in(path: Path, error: BaseException) -> int | None:
    """The line of the graph file that was running, from the deepest frame."""
    if isinstance(error, SyntaxError) and error.filename in (None, str(path.resolve())):
        return error.lineno or 1
    if isinstance(error, UnicodeDecodeError):
        return 1
    frames: list[int] = []
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path.resolve()):
            frames.append(trace.tb_lineno)
        trace = trace.tb_next
    return frames[-1] if frames else None


def _require_graph_file(path: Path) -> None:
    if path.is_file() and path.suffix == ".py":
        return
    if path.is_file():
        raise ConfigError(f"{path} is not a Python file; a graph file ends in .py and defines {EXAMPLE}")
    if path.is_dir():
        files = ", ".join(str(file) for file in sorted(path.glob("*.py"))) or "none"
        raise ConfigError(f"{path} is a directory; name a graph file (the directory contains {files})")
    if path.stem in shipped_names() and str(path) in (path.name, f"graphs/{path.name}"):
        raise ConfigError(
            f"graph file {path} does not exist here; the graph of flowrl is called {path.stem}, and "
            f"flowrl new {path.name} --from {path.stem} copies it"
        )
    near = difflib.get_close_matches(path.name, [file.name for file in path.parent.glob("*.py")], 1)
    hint = f"; did you mean {path.parent / near[0]}?" if near else f" (looked in {path.parent.resolve()})"
    raise ConfigError(f"graph file {path} does not exist{hint}")


def _module_name(path: str) -> str:
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return f"flowrl_graph_{Path(path).stem}_{digest}"


@functools.cache
def _run_file(path: str) -> ModuleType:
    """Run the file as a module; it can import from its own directory, as with `python FILE`."""
    name = _module_name(path)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    name_module(name, Path(path).stem)
    if (folder := str(Path(path).parent)) not in sys.path:
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module
