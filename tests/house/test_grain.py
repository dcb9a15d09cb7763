"""The grain of the code: how much there is to know. Each figure has a limit, which a change may lower but not raise."""

from __future__ import annotations

import ast
import functools
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

LIMITS: Mapping[str, float] = {
    "names for 1,000 lines of code": 112,
    "one-word function names in percent": 26,
    "satellites": 32,
    "small modules": 15,
    "longest chain of option classes": 3,
    "modules of more than 900 lines": 0,
    "modules whose name says no subject": 0,
    "names of flowrl with the word host": 8,
    "names of wire and runtime with the word session": 5,
    "names of wire and runtime with the word loss": 0,
    "Python files directly in tests": 2,
    "Python files directly in benchmarks": 2,
}
"""Figure -> the most that it may be. Whoever brings one down writes the new number here, in the same change."""

LONG, SMALL = 900, 80
WITH_ITS_OWNER = 700
"""Lines of a module and its only importer together, below which the two are one concept."""
NO_SUBJECT = {
    *("away", "once", "seen", "halves", "gathered", "judged", "seat", "fates", "terms", "spooled", "referenced"),
}
"""Names of modules that tell nothing to somebody who has not read them."""
WITHOUT_CONTENT = {"__init__", "__main__"}


@dataclass(frozen=True)
class Module:
    """One Python file."""

    path: Path
    """Relative to the root of the tree."""
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @functools.cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @property
    def name(self) -> str:
        return ".".join(self.path.with_suffix("").parts).removesuffix(".__init__")

    @property
    def length(self) -> int:
        return self.text.count("\n")

    @property
    def has_content(self) -> bool:
        return self.path.stem not in WITHOUT_CONTENT

    @property
    def functions(self) -> list[str]:
        return [node.name for node in self.nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]

    @property
    def classes(self) -> list[ast.ClassDef]:
        return [node for node in self.nodes if isinstance(node, ast.ClassDef)]

    def code_lines(self) -> int:
        """Lines with code: without docstrings, comments and empty lines."""
        documentation: set[int] = set()
        for node in self.nodes:
            match node:
                case ast.Expr(value=ast.Constant(value=str()), lineno=first, end_lineno=int(last)):
                    documentation.update(range(first, last + 1))
        lines: set[int] = set()
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type not in WITHOUT_CODE:
                lines.update(range(token.start[0], token.end[0] + 1))
        return len(lines - documentation)

    def imports(self) -> Iterator[str]:
        """Names of modules, among other names, that it imports anywhere."""
        for node in self.nodes:
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module
                yield from (f"{node.module}.{alias.name}" for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from (alias.name for alias in node.names)


WITHOUT_CODE = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE),
    *(tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER),
}


def modules(root: Path, *folders: str) -> list[Module]:
    """Those of the folders; a folder that is a link, as `flowrl/recipes`, is left out."""
    found = (path for folder in folders for path in sorted((root / folder).rglob("*.py")))
    return [Module(path.relative_to(root), path.read_text(encoding="utf-8")) for path in found]


def names_by_code(code: list[Module]) -> float:
    """Functions and classes for 1,000 lines of code."""
    names = sum(len(module.functions) + len(module.classes) for module in code)
    return 1000 * names / sum(module.code_lines() for module in code)


def one_word_names(code: list[Module]) -> float:
    """Percent of the functions, without Python's own `__name__`, that have no underscore within their name."""
    named = [name for module in code for name in module.functions if not name.startswith("__")]
    return 100 * sum("_" not in name.strip("_") for name in named) / len(named)


def satellites(code: list[Module]) -> list[str]:
    """Modules with one importer, in the same folder, with which they would be a file of ordinary length."""
    by_name = {module.name: module for module in code}
    importers: dict[str, set[str]] = defaultdict(set)
    for module in code:
        for name in {*module.imports()} & by_name.keys() - {module.name}:
            importers[name].add(module.name)
    found = []
    for name, (only, *others) in ((name, [*by]) for name, by in importers.items()):
        module, owner = by_name[name], by_name[only]
        fits = module.path.parent == owner.path.parent and module.length + owner.length < WITH_ITS_OWNER
        if not others and fits and module.path.stem != "__init__":
            found.append(name)
    return sorted(found)


def small_modules(code: list[Module]) -> list[str]:
    """Modules of flowrl that are shorter than a concept mostly is."""
    return [m.name for m in code if m.path.parts[0] == "flowrl" and m.has_content and m.length < SMALL]


def option_chain(code: list[Module]) -> int:
    """Classes of which the deepest class of a graph's file is made, by the names of bases, itself included."""
    bases: dict[str, set[str]] = {}
    for module in code:
        for kind in module.classes:
            bases[kind.name] = {getattr(base, "id", getattr(base, "attr", "")) for base in kind.bases}

    def chain(name: str, below: frozenset[str] = frozenset()) -> set[str]:
        inside = (chain(base, below | {name}) for base in bases[name] if base in bases and base not in below)
        return {name}.union(*inside)

    return max(len(chain(kind.name)) for module in code if module.path.parts[0] == "graphs" for kind in module.classes)


def names_with(word: str, code: list[Module], *folders: str) -> list[str]:
    """Functions and classes of these folders that have the word, or its plural, in their names (CONTRIBUTING.md)."""
    inside = [m for m in code if m.path.as_posix().startswith(folders)]
    names = (name for m in inside for name in [*m.functions, *(kind.name for kind in m.classes)])
    plural = f"{word}es" if word.endswith("s") else f"{word}s"
    return [name for name in names if {word, plural} & {part.lower() for part in WORD.findall(name)}]


WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
ENGINE = ("flowrl/wire/", "flowrl/runtime/")


def figures(root: Path) -> dict[str, float]:
    """Each figure of `LIMITS`, of the tree at `root`."""
    code = modules(root, "flowrl", "graphs")
    every = [*code, *modules(root, "benchmarks")]
    return {
        "names for 1,000 lines of code": names_by_code(code),
        "one-word function names in percent": one_word_names(code),
        "satellites": len(satellites(code)),
        "small modules": len(small_modules(code)),
        "longest chain of option classes": option_chain(code),
        "modules of more than 900 lines": sum(module.length > LONG for module in every),
        "modules whose name says no subject": sum(module.path.stem in NO_SUBJECT for module in every),
        "names of flowrl with the word host": len(names_with("host", code, "flowrl/")),
        "names of wire and runtime with the word session": len(names_with("session", code, *ENGINE)),
        "names of wire and runtime with the word loss": len(names_with("loss", code, *ENGINE)),
        "Python files directly in tests": len(list((root / "tests").glob("*.py"))),
        "Python files directly in benchmarks": len(list((root / "benchmarks").glob("*.py"))),
    }


@functools.cache
def measured() -> Mapping[str, float]:
    return figures(ROOT)


@pytest.mark.parametrize("figure", LIMITS)
def test_there_is_no_more_to_know(figure: str) -> None:
    found = measured()[figure]
    assert found <= LIMITS[figure], f"{figure}: {found:.2f}, at most {LIMITS[figure]}"


def test_every_figure_has_a_limit() -> None:
    assert measured().keys() == LIMITS.keys()


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    helper = 'def one():\n    """Text\n    of two lines."""\n\n    # why\n    return (\n        1\n    )\n'
    shared = "class A:\n    def do_it(self): ...\n    def __len__(self): ...\n\n\nclass B(A): ...\n"
    files = {
        "flowrl/__init__.py": "",
        "flowrl/room/owner.py": "from flowrl.room import helper\nfrom flowrl.room.shared import a\n" + "x = 1\n" * 90,
        "flowrl/room/helper.py": helper,
        "flowrl/room/shared.py": shared,
        "flowrl/other.py": "import flowrl.room.shared\n" + "x = 1\n" * 901,
        "graphs/graph.py": "from flowrl.room import shared\n\n\nclass C(shared.B): ...\n",
        "benchmarks/seen.py": "",
        "tests/conftest.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_the_figures_of_a_small_tree(tree: Path) -> None:
    code = modules(tree, "flowrl", "graphs")
    assert {module.name: module.code_lines() for module in code} == {
        "flowrl": 0,
        "flowrl.other": 902,
        "flowrl.room.helper": 4,
        "flowrl.room.owner": 92,
        "flowrl.room.shared": 4,
        "graphs.graph": 2,
    }
    assert satellites(code) == ["flowrl.room.helper"], "shared has three importers"
    assert small_modules(code) == ["flowrl.room.helper", "flowrl.room.shared"]
    assert figures(tree) == {
        "names for 1,000 lines of code": pytest.approx(1000 * 6 / 1004),
        "one-word function names in percent": 50.0,
        "satellites": 1,
        "small modules": 2,
        "longest chain of option classes": 3,
        "modules of more than 900 lines": 1,
        "modules whose name says no subject": 1,
        "names of flowrl with the word host": 0,
        "names of wire and runtime with the word session": 0,
        "names of wire and runtime with the word loss": 0,
        "Python files directly in tests": 1,
        "Python files directly in benchmarks": 1,
    }


def test_a_module_that_would_make_its_owner_long_is_no_satellite(tree: Path) -> None:
    owner = tree / "flowrl" / "room" / "owner.py"
    owner.write_text(owner.read_text() + "x = 1\n" * (WITH_ITS_OWNER - 100))
    assert satellites(modules(tree, "flowrl", "graphs")) == []


def test_words_within_names_are_seen() -> None:
    text = "class HostLosses:\n    def ghost(self): ...\n    def lose_sessions(self): ...\n    def host(self): ...\n"
    code = [Module(Path("flowrl/wire/a.py"), text), Module(Path("flowrl/agents/b.py"), text)]
    assert names_with("host", code, "flowrl/") == ["host", "HostLosses"] * 2
    assert names_with("loss", code, *ENGINE) == ["HostLosses"]
    assert names_with("session", code, *ENGINE) == ["lose_sessions"]
