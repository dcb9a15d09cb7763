"""Output in another charset, and texts with escape sequences: every command prints, and no text commands a terminal."""

from __future__ import annotations

import ast
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.panel import Panel
from rich.table import Table

from flowrl.cli import COMMANDS, main
from flowrl.runtime.samples.rollout_files import write_rollouts
from flowrl.runtime.telemetry.standard_streams import PLAIN, LastingOutput, print_text, replace_unwritable
from flowrl.runtime.telemetry.view import LiveView, PlainView, SafeConsole
from tests.commands.test_output import opened_view
from tests.commands.test_samples import row

ROOT = Path(__file__).parents[2]
CHARSETS = ("ascii", "latin-1", "utf-8")
ODD = "没有服务器 \x1b[31mred\x1b[2J \x9b2J \r\b\x07 \u202eback \udc80"
"""Not of Latin-1, with what colours, clears, moves, rings and reorders, and with a byte of a file name that is no
UTF-8."""


class Terminal(io.TextIOWrapper):
    """A standard stream of a charset."""

    def __init__(self, charset: str, *, is_terminal: bool = False) -> None:
        super().__init__(io.BytesIO(), encoding=charset, write_through=True)
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal

    @property
    def written(self) -> str:
        return self.buffer.getvalue().decode(self.encoding)  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONIOENCODING", "")
    monkeypatch.setenv("COLUMNS", "120")


def printed(monkeypatch: pytest.MonkeyPatch, charset: str, *args: str) -> str:
    """What a command prints on both streams."""
    streams = {"stdout": Terminal(charset), "stderr": Terminal(charset)}
    for name, stream in streams.items():
        monkeypatch.setattr(sys, name, stream)
    try:
        status = main(args)
    except SystemExit as end:  # of --help
        status = int(end.code or 0)
    assert status in (0, 1, 2)
    return "".join(stream.written for stream in streams.values())


def is_safe(text: str) -> bool:
    return not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", text)


@pytest.mark.parametrize("charset", CHARSETS)
@pytest.mark.parametrize("argument", ["--help", ODD, f"--{ODD}"])
@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_prints(monkeypatch: pytest.MonkeyPatch, command: str, argument: str, charset: str) -> None:
    text = printed(monkeypatch, charset, command, argument)
    assert text and is_safe(text)


@pytest.mark.parametrize("charset", CHARSETS)
def test_a_plan_is_readable_in_every_charset(monkeypatch: pytest.MonkeyPatch, charset: str) -> None:
    text = printed(monkeypatch, charset, "check", "grpo")
    assert ("→" in text) == (charset == "utf-8") and "generator.weights" in text and "\\u" not in text and is_safe(text)


@pytest.mark.parametrize("charset", CHARSETS)
def test_kept_samples_command_no_terminal(monkeypatch: pytest.MonkeyPatch, charset: str, tmp_path: Path) -> None:
    odd = ODD.replace("\udc80", "")
    (tmp_path / "config.json").write_text("{}")
    write_rollouts(tmp_path, [row(1, prompt=odd, response=odd, reason=odd)], 1)
    for command in (["samples", str(tmp_path)], ["samples", str(tmp_path), "--json"]):
        text = printed(monkeypatch, charset, *command)
        assert "red" in text and is_safe(text)


@pytest.mark.parametrize("is_terminal", [False, True])
@pytest.mark.parametrize("charset", CHARSETS)
def test_a_view_shows_warnings_of_any_text(
    monkeypatch: pytest.MonkeyPatch, charset: str, is_terminal: bool, tmp_path: Path
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    output = Terminal(charset, is_terminal=is_terminal)  # not told to replace: an embedding program's own
    monkeypatch.setattr(sys, "stdout", output)
    view = opened_view(tmp_path)
    assert isinstance(view, LiveView if is_terminal else PlainView)
    view.progress("driver", ODD)
    view.step({"step": 1, "time_s": 1.0, "loss": 0.5, "alarms": {"bell": ODD}})
    view.warning(ODD)
    view.close()
    text = output.written
    assert "\\x1b[31m" in text and "\x1b[31mred" not in text and not re.search("[\x9b\x07\b\u202e]", text)
    assert "没有服务器" in text if charset == "utf-8" else "\\u6ca1" in text
    assert is_terminal or is_safe(text)


def test_what_flowrl_colours_keeps_its_colours_and_its_width() -> None:
    file = io.StringIO()
    console = SafeConsole(file=file, force_terminal=True, color_system="standard", width=40)
    console.print("[red]a[/red]", highlight=False)
    assert file.getvalue() == "\x1b[31ma\x1b[0m\n"
    table = Table("a name of a file")
    table.add_row("\x1b[2J")
    console.print(Panel(table))
    assert "\x1b[2J" not in file.getvalue() and "\\x1b[2J" in file.getvalue()
    plain = re.sub("\x1b\\[[0-9;]*m", "", file.getvalue())
    assert {len(line) for line in plain.splitlines()[1:]} == {40}


@pytest.mark.parametrize("charset", ["ascii", "latin-1"])
def test_characters_of_our_own_texts_have_plain_ones(monkeypatch: pytest.MonkeyPatch, charset: str) -> None:
    stream = Terminal(charset)
    monkeypatch.setattr(sys, "stdout", stream)
    replace_unwritable()
    print_text("a → b … 没 \udc80")
    assert stream.written == "a -> b ... \\u6ca1 \\udc80\n"
    assert all(text.isascii() for text in PLAIN.values())


def test_programs_that_a_command_starts_do_not_fail_to_print(monkeypatch: pytest.MonkeyPatch) -> None:
    for charset in ("latin-1", "ascii", ""):
        monkeypatch.setenv("PYTHONIOENCODING", charset)
        replace_unwritable()
        assert os.environ["PYTHONIOENCODING"].partition(":")[0] == charset
        told = subprocess.check_output([sys.executable, "-c", "print('\\u6ca1')"])
        assert told == ("没\n".encode() if not charset else b"\\u6ca1\n")


def test_a_stream_of_another_program_gets_what_it_can_write() -> None:
    stream = Terminal("latin-1")
    LastingOutput(stream, lambda error: None).write("没 → é\n")
    assert stream.written == "\\u6ca1 -> é\n"


PRINTS = {
    "agents/parser_trial.py": "JSON for the process that asked",
    "environments/tools/sandbox/sandbox_interpreter.py": "what code of the policy prints",
    "graph/command_line.py": "help, whose values are escaped; its part is below the one that prints",
    "hub/__init__.py": "names that were checked; its part is below the one that prints",
    "runtime/driver/ray_guard.py": "a process without flowrl",
    "runtime/telemetry/standard_streams.py": "print_text itself",
}


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def name_of(call: ast.Call) -> str:
    return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")


def test_texts_are_printed_in_one_way() -> None:
    flowrl = ROOT / "flowrl"
    found = {
        str(path.relative_to(flowrl))
        for path in flowrl.rglob("*.py")
        for call in calls(path)
        if isinstance(call.func, ast.Name) and call.func.id in ("print", "Console")
    }
    assert found == PRINTS.keys()


TEXT_MODE = re.compile(r"[rwax](t?\+?|\+?t?)")


def without_charset(call: ast.Call) -> bool:
    """Whether a call opens text in the charset of the locale."""
    name, given = name_of(call), {keyword.arg for keyword in call.keywords}
    if {"encoding", None} & given:
        return False
    if name in ("read_text", "write_text"):
        return len(call.args) == (name == "write_text")
    if name in ("Popen", "run", "check_output"):
        return bool({"text", "universal_newlines"} & given)
    values = [*call.args, *(keyword.value for keyword in call.keywords if keyword.arg == "mode")]
    modes = [value.value for value in values if isinstance(value, ast.Constant) and isinstance(value.value, str)]
    plain = isinstance(call.func, ast.Name) and len(call.args) == 1 and "mode" not in given
    return name in ("open", "fdopen") and (plain or any(map(TEXT_MODE.fullmatch, modes)))


def test_files_and_pipes_are_utf_8_whatever_the_locale() -> None:
    paths = [*(ROOT / "flowrl").rglob("*.py"), *(ROOT / "graphs").rglob("*.py"), ROOT / "flowrl_setup.py"]
    assert [f"{path.relative_to(ROOT)}:{c.lineno}" for path in paths for c in calls(path) if without_charset(c)] == []


def test_the_rule_finds_what_it_looks_for() -> None:
    wrong = "open(p); open(p, 'w'); p.open('a'); p.read_text(); p.write_text(t); os.fdopen(1, 'w'); run(c, text=True)"
    right = "open(p, 'rb'); p.open('wb'); p.read_text('utf-8'); open(p, encoding='utf-8'); Popen(c); lane.open()"
    found = [node for node in ast.walk(ast.parse(f"{wrong}; {right}")) if isinstance(node, ast.Call)]
    assert sum(map(without_charset, found)) == wrong.count(";") + 1
