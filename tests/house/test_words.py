"""One word for one thing: names that were given up do not come back, and no two things have one name."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
CODE = [path for folder in ("flowrl", "graphs", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]

GIVEN_UP = {
    "in_turn": "in_invocation",
    "turning": "time_shared",
    "Cut": "Snapshot",
    "_told": "metrics or _reported",
    "Piece": "MicroBatch",
    "make_piece": "make_micro_batch",
    "Crossed": "MismatchedRows",
    "pass_on": "forward",
    "Asking": "RewardClient",
    "way_of_asking": "route_of",
    "rungs": "cases",
    "tallies": "stats",
    "producer_epoch": "producer_incarnation",
    "consumer_epoch": "consumer_incarnation",
}
"""Identifier -> what the thing is called."""

ELSEWHERE = {
    "turn": (
        "conversations: tasks, models and nodes that render them, and episodes",
        r"graph/ports|wire/(asks|items)|testing/|tasks/|models/|training/|nodes/|agents/|environments/|episode|runtime/show|ledger|audit/|benchmarks/agents|graphs/(agent|self_play|tree_rollouts|judge|planner)",
    ),
    "turns": (
        "conversations",
        r"graph/ports|wire/(asks|items)|testing/|tasks/|models/|training/|nodes/|agents/|environments/|episode|runtime/show|ledger|audit/|benchmarks/(training/reward_accuracy|agents)|graphs/(agent|self_play|tree_rollouts|judge|planner)",
    ),
    "epoch": (
        "passes over data",
        r"tasks/|nodes/|training/|messages|ledger|audit/|samples/|benchmarks/(runs/stages|agents/episodes|training/layouts)",
    ),
    "track": (
        "traces, the option --track, an argument of zmq's send",
        r"telemetry/|driver/|wire/connection|channel_peers",
    ),
    "freeze": (
        "arrays made read-only, gc",
        r"wire/|process/actor|vllm_process/vllm_worker|training/|episode_processes/zygote_child",
    ),
}
"""Identifier -> what it means where it stays, and the files that may have it."""

FILES_GIVEN_UP = {"books.py", "cutter.py", "pieces.py", "tally.py", "asking.py", "rungs.py", "recipes.py"}

SAME_FILE_NAMES = {"__init__.py", "__main__.py"}


@functools.cache
def identifiers(path: Path) -> frozenset[tuple[str, int]]:
    """Names that a file defines, binds, reads or passes, with their lines."""
    return frozenset(_identifiers(path))


def _identifiers(path: Path) -> Iterator[tuple[str, int]]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name, line
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name, line
            case ast.keyword(arg=str(name)) | ast.alias(asname=str(name)):
                yield name, line


def short(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_names_that_were_given_up_do_not_come_back() -> None:
    found = [
        f"{short(path)}:{line}: {name} is {GIVEN_UP[name]} now"
        for path in CODE
        for name, line in identifiers(path)
        if name in GIVEN_UP
    ]
    assert not found


def test_a_word_with_another_meaning_stays_where_it_has_that() -> None:
    found = [
        f"{short(path)}:{line}: {name} means {ELSEWHERE[name][0]}"
        for path in CODE
        for name, line in identifiers(path)
        if name in ELSEWHERE and not re.search(ELSEWHERE[name][1], short(path))
    ]
    assert not found


IPC = ("ipc://", "process | ipc | tcp", 'return "ipc" if', 'TransferEngine("ipc"')
"""Where "ipc" may stand outside of the wire: zmq's transport, and vLLM's name of its engine."""


def test_ipc_is_zmqs_transport_within_one_machine() -> None:
    found = [
        f"{short(path)}:{number}: {line.strip()}"
        for path in CODE
        if not short(path).startswith(("flowrl/wire/", "benchmarks/channel"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(r"\bipc\b", line, re.IGNORECASE) and not any(phrase in line for phrase in IPC)
    ]
    assert not found


def test_options_that_were_given_up_do_not_come_back() -> None:
    texts = [*CODE, ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    assert [short(path) for path in texts if "--turns" in path.read_text(encoding="utf-8")] == []


WORDS_GIVEN_UP = {
    "desk": "open items",
    "tally": "stats",
    "bury": "send a tombstone",
    "hasty": "urgent",
    "ripe": "due",
    "owe": "unflushed, or expect",
    "owes": "unflushed, or expect",
    "owed": "unflushed, or expected",
    "owing": "unflushed",
    "doorman": "authenticator",
    "inlet": "listener",
    "mend": "fix or recover",
    "rung": "case",
    "thaw": "resume",
    "cutter": "snapshotter",
    "standing": "waiting",
    "books": "ledger",
}
"""Word of an identifier -> what is said in its place."""


def test_no_part_of_a_name_is_a_word_that_was_given_up() -> None:
    found = [
        f"{short(path)}:{line}: {name}: {WORDS_GIVEN_UP[word]}"
        for path in CODE
        for name, line in identifiers(path)
        for word in map(str.lower, re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name))
        if word in WORDS_GIVEN_UP
    ]
    assert not found


def test_no_text_about_a_name_begins_with_of() -> None:
    """ "Of a reply." says whose it is, and not what it is: "Tokens of a reply."."""
    found = [
        f"{short(path)}:{number}: {line.strip()}"
        for path in CODE
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if re.match(r"\s*\"\"\"Of ", line)
    ]
    assert not found


SLEEP = re.compile(r"\bsleep\(")


def test_a_test_that_sleeps_says_what_for() -> None:
    """Sleep is no synchronisation: it belongs to what is under test, or takes place in virtual time."""
    silent = [
        f"{short(path)}:{number}: {line.strip()}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        if path.name not in ("ticks.py", "test_words.py") and not path.name.startswith("test_testing_")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if SLEEP.search(line) and "#" not in line and "def asleep(" not in line
    ]
    assert not silent


def types_named(path: Path) -> Iterator[tuple[str, bool]]:
    """Names of the classes (True) and of the module's aliases of types (False) that a file defines."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    yield from ((node.name, True) for node in ast.walk(tree) if isinstance(node, ast.ClassDef))
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id=name)]) if name[0].isupper() and not name.isupper():
                yield name, False


def test_no_two_classes_have_one_name_and_no_alias_has_that_of_a_class() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    classes = set()
    for path in CODE:
        if not path.is_relative_to(ROOT / "benchmarks"):  # flowrl and its recipes
            for name, is_class in types_named(path):
                places[name].append(short(path))
                classes |= {name} if is_class else set()
    assert {name: found for name, found in places.items() if len(found) > 1 and name in classes} == {}


def test_no_two_files_have_one_name() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in CODE:
        if path.is_relative_to(ROOT / "flowrl") and path.name not in SAME_FILE_NAMES:
            places[path.name].append(short(path))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
    assert not FILES_GIVEN_UP & places.keys()
