"""What a node's class has to be, as far as it can be seen without running it.

The engine calls a node's methods, matches its messages by type and counts its groups; a mistake in one of these would
otherwise show after the models are loaded. Each finding names the line of the user's class or call. The source is read
where a class alone does not tell: the size in `self.scored.groups(4)` and the name in `self.context.metric("loss", x)`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from flowrl.graph.analysis.numbers import Numbers
from flowrl.graph.graph import Graph
from flowrl.graph.node import METRIC_NAMES, Node
from flowrl.graph.ports import In
from flowrl.messages import Message

ASYNC = {name for name, value in vars(Node).items() if inspect.iscoroutinefunction(value)}
PLAIN = {name for name, value in vars(Node).items() if inspect.isfunction(value)} - ASYNC - {"__new__"}

OWN_FIGURES = {*METRIC_NAMES} - {"tokens_generated", "weight_update_pause_s", "loss", "logprob_mismatch"}
"""Figures that are computed for every line; the others a generator or a trainer of one's own reports."""


def class_problems(graph: Graph, numbers: Numbers) -> Iterator[str]:
    """Check 11: what the classes of nodes and messages lack."""
    for name, node in graph.nodes.items():
        yield from (f"node {name}: {problem}" for problem in _method_problems(node))
        yield from (f"node {name}: {problem}" for problem in _body_problems(node, numbers))
    carried = dict.fromkeys(
        kind for node in graph.nodes.values() for port in node.ports.values() for kind in port.types
    )
    for kind in carried:
        if isinstance(kind, type) and issubclass(kind, Message) and not _is_frozen_dataclass(kind):
            yield (
                f"{kind.__name__} ({_place_of(kind)}) is a message but no frozen dataclass, so its fields would not "
                f"be sent; write @dataclass(frozen=True) above the class."
            )


def hidden_methods(graph: Graph) -> Iterator[str]:
    """Attributes in the place of methods. No other check can be made with them: it would call them."""
    for name, node in graph.nodes.items():
        kind = type(node)
        for method in sorted(ASYNC | PLAIN):
            if not callable(getattr(node, method)):
                yield (
                    f"node {name}: {kind.__name__} ({_place_of(kind)}) has an attribute {method}, which hides a method "
                    f"that the engine calls; give the attribute another name."
                )


def _method_problems(node: Node) -> Iterator[str]:
    kind = type(node)
    if kind.run is Node.run:
        yield f"{kind.__name__} ({_place_of(kind)}) has no run; write `async def run(self) -> None:` with its body."
    for name in sorted(ASYNC | PLAIN):
        method = inspect.getattr_static(kind, name)
        if not inspect.isfunction(method):
            continue
        if name in ASYNC and not inspect.iscoroutinefunction(inspect.unwrap(method)):
            is_generator = inspect.isasyncgenfunction(method)
            found = "has a yield, which makes it a generator" if is_generator else "is a plain function"
            change = "send what it yields through an Out port" if is_generator else f"write `async def {name}`"
            yield f"{kind.__name__}.{name} ({_place_of(method)}) {found}; {change}."
        elif name in PLAIN and inspect.iscoroutinefunction(method):
            yield f"{kind.__name__}.{name} ({_place_of(method)}) is async, but nobody awaits it; write `def {name}`."


def _body_problems(node: Node, numbers: Numbers) -> Iterator[str]:
    """Calls in the methods of a user's class with an argument that the graph contradicts."""
    if type(node).__module__.partition(".")[0] == "flowrl":
        return
    for call, line in _calls_of(type(node)):  # type: ignore[arg-type]  # a class can be hashed
        match call:
            case ast.Call(func=ast.Attribute(ast.Attribute(ast.Name("self"), port), "groups"), args=[size]):
                waited = _number_of(node, size)
                declared = node.facts().group_size or numbers.group_size
                if isinstance(node.ports.get(port), In) and None not in (waited, declared) and waited != declared:
                    yield (
                        f"it waits for groups of {waited} samples ({line}), but a group has {declared}: the node would "
                        f"fail at the first group; pass the group size of the graph."
                    )
            case ast.Call(
                func=ast.Attribute(ast.Attribute(ast.Name("self"), "context"), "metric" | "gauge" as method),
                args=[ast.Constant(str(name)), *_],
            ) if name in OWN_FIGURES or name.endswith("_busy_s"):
                yield (
                    f"it reports the {method} {name!r} ({line}), which is a figure of flowrl's own and would replace "
                    f"yours in metrics.jsonl; choose another name."
                )


def _number_of(node: Node, size: ast.expr) -> int | None:
    """The value of a literal or of an attribute such as `self.size`; None if it is another expression."""
    found: Any = node
    if isinstance(size, ast.Constant):
        found = size.value
    elif (names := ast.unparse(size).split("."))[0] == "self" and all(name.isidentifier() for name in names):
        for name in names[1:]:
            found = getattr(found, name, None)
    return found if isinstance(found, int) else None


@functools.cache
def _calls_of(kind: type[Any]) -> tuple[tuple[ast.Call, str], ...]:
    """The calls in a class and its bases outside of flowrl, with file and line; none of a class without source."""
    found = []
    for part in kind.__mro__:
        if part.__module__.partition(".")[0] in ("flowrl", "builtins", "typing"):
            continue
        try:
            lines, first = inspect.getsourcelines(part)
            tree = ast.parse(textwrap.dedent("".join(lines)))
        except (OSError, TypeError, SyntaxError):
            continue
        file = Path(inspect.getsourcefile(part) or part.__module__).name
        calls = [call for call in ast.walk(tree) if isinstance(call, ast.Call)]
        found += [(call, f"{file}:{first + call.lineno - 1}") for call in calls]
    return tuple(found)


def _is_frozen_dataclass(kind: type[Message]) -> bool:
    """Whether all that the class and its bases declare are fields; a dataclass that is not frozen cannot inherit from
    Message."""
    declared = [
        name
        for part in kind.__mro__
        if issubclass(part, Message)
        for name, hint in inspect.get_annotations(part).items()
        if "ClassVar" not in str(hint)
    ]
    return dataclasses.is_dataclass(kind) and {*declared} <= {field.name for field in dataclasses.fields(kind)}


def _place_of(thing: Any) -> str:
    try:
        _, line = inspect.getsourcelines(inspect.unwrap(thing))
        return f"{Path(inspect.getsourcefile(thing) or '').name}:{line}"
    except (OSError, TypeError):
        return str(getattr(thing, "__module__", "built in"))
