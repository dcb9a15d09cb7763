"""What message classes are called: alike in every process, and a user's beside flowrl's own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from flowrl import messages
from flowrl.errors import SchemaError
from flowrl.graph.load import load_file
from flowrl.messages import Message
from flowrl.messages.base import message_type, schema_hash, type_name
from flowrl.wire.encoding.codec import FORMAT, Encoder, dump_value, load_message, load_value
from flowrl.wire.encoding.schema import schema_of
from tests.wire.test_channel_wire import there_and_back

OWN = messages.Group("g", (), 4)


@dataclass(frozen=True)
class Group(Message):
    """Called what one of flowrl's own is."""

    label: str = ""


def test_a_users_class_may_be_called_what_one_of_flowrls_is() -> None:
    assert message_type("Group") is messages.Group
    assert message_type("tests.wire.test_message_names.Group") is Group
    for body in (OWN, Group("x")):
        (envelope,) = there_and_back(body)
        assert type(envelope.body) is type(body) and envelope.body == body
        assert load_message(dump_value(body)) == body and type(load_message(dump_value(body))) is type(body)


def test_what_was_stored_before_users_classes_had_their_modules_in_their_names_still_loads() -> None:
    stored = Encoder(beside=False).pack(
        (FORMAT, {"a": {"\0type": "LongAgo", "x": 1}, "b": {"\0type": "Group", "label": ""}})
    )
    with pytest.raises(SchemaError, match="'LongAgo'"):
        load_value(stored)

    @dataclass(frozen=True)
    class LongAgo(Message):
        x: int

    with pytest.raises(SchemaError, match=r"a stored Group does not fit .* 'label' is unknown"):
        load_value(stored)
    own = Encoder(beside=False).pack((FORMAT, {"\0type": "LongAgo", "x": 1}))
    assert load_message(own) == LongAgo(1)


def test_a_name_that_may_be_several_is_refused() -> None:
    def first() -> None:
        @dataclass(frozen=True)
        class Twice(Message):
            x: int

    def second() -> None:
        @dataclass(frozen=True)
        class Twice(Message):
            y: int

    first()
    second()
    with pytest.raises(SchemaError, match=r"'Twice' may be .*first.<locals>.Twice or .*second.<locals>.Twice; give"):
        message_type("Twice")


DIALOGUE = """
from dataclasses import dataclass
from collections.abc import Mapping
from flowrl import Message, Graph, Node, Out

@dataclass(frozen=True)
class Turn(Message):
    text: str

@dataclass(frozen=True)
class Dialogue(Message):
    turns: tuple[Turn, ...] = ()
    last: Turn | None = None
    by_name: Mapping[str, "Turn"] | None = None

@dataclass(frozen=True)
class Config:
    n: int = 1

class Speaker(Node):
    out: Out[Dialogue]

def graph(cfg: Config) -> Graph:
    g = Graph("dialogue")
    speaker = g.add("speaker", Speaker())
    g.ignore(speaker.out)
    return g
"""


def dialogue(folder: Path) -> Path:
    folder.mkdir()
    (folder / "dialogue.py").write_text(DIALOGUE)
    return folder / "dialogue.py"


def test_the_schema_does_not_depend_on_where_the_graph_file_lies(tmp_path: Path) -> None:
    here, there = (load_file(dialogue(tmp_path / name)).module for name in ("project", "working_dir"))
    for name in ("Dialogue", "Turn"):
        one, other = getattr(here, name), getattr(there, name)
        assert one is not other and type_name(one) == f"dialogue.{name}"
        assert schema_hash(one) == schema_hash(other) == schema_of(one).hash
    assert schema_hash(here.Turn) != schema_hash(here.Dialogue)


def test_another_process_that_loads_another_file_first_agrees(tmp_path: Path) -> None:
    here, there = dialogue(tmp_path / "project"), dialogue(tmp_path / "elsewhere")
    other = tmp_path / "other.py"
    other.write_text(DIALOGUE.replace("text: str", "text: bytes"))
    code = (
        "import sys\nfrom flowrl.graph.load import load_file\nfrom flowrl.messages.base import schema_hash\n"
        "print([schema_hash(load_file(path).module.Dialogue) for path in sys.argv[1:]][-1])"
    )
    done = subprocess.run([sys.executable, "-c", code, other, there], capture_output=True, text=True, check=True)
    assert int(done.stdout) == schema_hash(load_file(here).module.Dialogue)
    assert schema_hash(load_file(other).module.Turn) != schema_hash(load_file(here).module.Turn)


PROGRAM = """
from dataclasses import dataclass
from flowrl.messages.base import type_name, schema_hash
from flowrl.messages import Message

@dataclass(frozen=True)
class Word(Message):
    text: str
    next: "Word | None" = None

if __name__ == "__main__":
    print(type_name(Word), schema_hash(Word))
"""


@pytest.mark.parametrize("how", [["-m", "program_of_words"], ["program_of_words.py"]])
def test_a_program_and_who_imports_it_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: list[str]) -> None:
    (tmp_path / "program_of_words.py").write_text(PROGRAM)
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parents[2]}:{tmp_path}")
    said = [sys.executable, *how]
    asked = [sys.executable, "-c", "from program_of_words import *; print(type_name(Word), schema_hash(Word))"]
    answers = [
        subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True) for command in (said, asked)
    ]
    assert answers[0].stdout == answers[1].stdout
    assert answers[0].stdout.startswith("program_of_words.Word ")
