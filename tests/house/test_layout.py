"""Imports point one way, and declaring a graph loads nothing heavy."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Container, Iterator
from pathlib import Path

import pytest

from tests.house.layout_rooms import ROOMS

ROOT = Path(__file__).parents[2]
CHECKED = (
    "import flowrl, flowrl.cli; from tests.graph.graph_nodes import grpo; "
    "flowrl.check(grpo().graph).raise_for_problems()"
)
HEAVY = ("ray", "torch", "vllm", "transformers", "deepspeed", "zmq", "reasoning_gym", "gymnasium", "datasets")

BASE = {
    "errors",
    "messages",
    "hub",
    "machine",
}
LIBRARIES = {"training", "weights", "tasks", "environments", "models", "agents"}
ENGINE = BASE | {"graph", "wire", "runtime"}
MAY_IMPORT: dict[str, set[str]] = {
    "errors": set(),
    "hub": {"errors"},
    "machine": {"errors", "hub"},
    "messages": {"errors"},
    "graph": BASE,
    "wire": BASE | {"graph"},
    "runtime": BASE | {"graph", "wire"},
    "training": BASE,
    "weights": BASE | {"graph", "wire"},
    "tasks": BASE,
    "environments": BASE | {"tasks"},
    "models": BASE | {"tasks", "training"},
    "agents": BASE | {"models", "tasks", "environments"},
    "nodes": ENGINE | LIBRARIES,
    "options": BASE | LIBRARIES | {"graph", "nodes"},
    "recipes": LIBRARIES | {"__init__", "graph", "nodes", "options"},
    "testing": ENGINE | LIBRARIES | {"nodes"},
    "commands": ENGINE | LIBRARIES | {"nodes", "options", "testing"},
    "cli": ENGINE | LIBRARIES | {"nodes", "commands"},
    "__init__": BASE | {"graph"},
    "__main__": {"cli"},
}


def modules() -> list[Path]:
    """Those of flowrl. The graphs are modules of `flowrl.recipes`, which is a link that `rglob` does not follow."""
    return [*sorted((ROOT / "flowrl").rglob("*.py")), *sorted((ROOT / "flowrl" / "recipes").glob("*.py"))]


@functools.cache
def tree(path: Path) -> ast.Module:
    """The module's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """Of the module's syntax tree."""
    return tuple(ast.walk(tree(path)))


def part(path: Path) -> str:
    """ "graph" for flowrl/graph/analysis/plan.py, "errors" for flowrl/errors.py"""
    return path.relative_to(ROOT / "flowrl").with_suffix("").parts[0]


def imported(path: Path) -> Iterator[str]:
    """Parts of flowrl that a module imports, anywhere in it."""
    for node in nodes(path):
        names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom) and node.module == "flowrl":
            names += [f"flowrl.{_home(alias.name)}" for alias in node.names]
        for name in names:
            head, _, rest = name.partition(".")
            if head == "flowrl" and rest:
                yield rest.split(".")[0]


def _home(name: str) -> str:
    """The part that `from flowrl import name` reaches: a part of that name, or what `flowrl` itself exports."""
    return name if name in MAY_IMPORT else "__init__"


def test_imports_point_one_way() -> None:
    wrong = []
    for path in modules():
        mine = part(path)
        others = {other for other in imported(path) if other != mine} - MAY_IMPORT[mine]
        wrong += [f"{path.relative_to(ROOT)} imports {other}" for other in others]
    assert not wrong


def test_the_recipes_are_the_graphs() -> None:
    recipes = ROOT / "flowrl" / "recipes"
    assert recipes.is_symlink() and recipes.resolve() == ROOT / "graphs"
    assert {part(path) for path in modules()} == MAY_IMPORT.keys() - {"__main__"}


@functools.cache
def imports() -> dict[str, set[str]]:
    """Module of flowrl -> those that it imports, anywhere in it, for types alone too."""
    paths = {module_name(path): path for path in modules()}
    return {name: set(_imports(path, paths)) - {name} for name, path in paths.items()}


def module_name(path: Path) -> str:
    """ "flowrl.graph.analysis.plan"; a package by its own name"""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, known: Container[str]) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if whole in known else node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_modules_import_each_other_in_a_circle() -> None:
    found = imports()
    left = {name: others & found.keys() for name, others in found.items()}
    while free := {name for name, others in left.items() if not others}:
        left = {name: others - free for name, others in left.items() if name not in free}
    assert not left, "each of these imports another of them, directly or through others"


def room(module: str, of: str) -> str:
    """ "analysis" for flowrl.graph.analysis.plan; "" for what is not in a room of that part, as for the part itself"""
    part, within, rest = module.partition(f"flowrl.{of}.")
    return rest.split(".")[0] if within and not part else ""


@pytest.mark.parametrize("of", ROOMS)
def test_the_rooms_of_a_part_point_one_way(of: str) -> None:
    wrong = []
    for name, others in imports().items():
        mine = room(name, of)
        allowed = {"", mine, *ROOMS[of].get(mine, ())}
        wrong += [f"{name} imports {other}" for other in others if mine and room(other, of) not in allowed]
    assert not wrong


@pytest.mark.parametrize("of", ROOMS)
def test_the_table_of_rooms_is_complete_and_has_no_circle(of: str) -> None:
    assert set(ROOMS[of]) == {room(name, of) for name in imports()} - {""}
    order: list[str] = []
    while free := [name for name, others in ROOMS[of].items() if name not in order and others <= set(order)]:
        order += free
    assert set(order) == set(ROOMS[of])


def test_a_folder_says_what_it_holds() -> None:
    packages = [path for path in (ROOT / "flowrl").rglob("__init__.py") if "recipes" not in path.parts]
    assert [str(path) for path in packages if not ast.get_docstring(tree(path))] == []


@pytest.mark.parametrize(
    ("folder", "directly"), [("tests", {"__init__", "conftest"}), ("benchmarks", {"__init__", "demo"})]
)
def test_tests_and_benchmarks_have_rooms(folder: str, directly: set[str]) -> None:
    assert {path.stem for path in (ROOT / folder).glob("*.py")} == directly


def test_no_two_test_files_have_one_name() -> None:
    """The tables of tests/conftest.py and tests/house/further_cases.py know them by their names alone."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def test_every_benchmark_is_in_the_index() -> None:
    named = set(re.findall(r"(?<=[ `])benchmarks(?:\.\w+)+", (ROOT / "benchmarks" / "README.md").read_text()))
    paths = [path for path in (ROOT / "benchmarks").rglob("*.py") if '"__main__"' in path.read_text()]
    assert named == {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in paths}


BROAD_EXCEPTS = {
    "wire/control.py: Control._run_note",
    "agents/chat_template.py: ChatTemplate.render_text",
    "agents/call_parser.py: ReplyParser.parse",
    "agents/parser_trial.py: parser_reads",
    "agents/endpoint/call_sampler.py: CallSampler._sample_reply",
    "wire/control.py: Control._run_work",
    "wire/connection.py: Listener._drain_socket",
    "commands/talk.py: Talk.stream_reply.generate",
    "machine/disk.py: told_if_full",
    "environments/environment_class.py: import_package",
    "environments/adapters/skyrl_env.py: SkyrlEnv.load_maker",
    "environments/adapters/textarena_env.py: count_players",
    "environments/adapters/verifiers_env.py: load_examples",
    "environments/adapters/verifiers_env.py: load_environment",
    "environments/episode_processes/zygote_child.py: play_episodes",
    "environments/episodes.py: Episodes.__aenter__",
    "environments/episodes.py: Episodes._begin_episode",
    "environments/episodes.py: Episodes._open_episode",
    "environments/open_episode.py: guard_calls",
    "environments/environment_class.py: FoundEnvironment.make_environment",
    "environments/episode_processes/episode_process.py: EpisodeProcess.ask_process",
    "environments/tools/collection.py: run_function",
    "environments/tools/sandbox/python_tool.py: PythonSession.python",
    "environments/tools/sandbox/sandbox_interpreter.py: execute_code",
    "environments/tools/sandbox/sandbox_interpreter.py: show_traceback",
    "environments/tools/sandbox/sandbox_interpreter.py: main",
    "environments/episode_processes/zygote.py: ZygoteClient.start_zygote",
    "graph/load.py: user_code",
    "models/tokens/chat.py: Chat._apply_template",
    "models/tokens/chat.py: template_end",
    "models/tokens/chat.py: takes_parts",
    "models/tokens/chat.py: template_next",
    "models/tokens/chat.py: load_tokenizer",
    "models/tokens/tool_form.py: render_text",
    "training/model/logprobs.py: call_with_stand_ins",
    "wire/activity.py: Lease._change_hands",
    "wire/activity.py: Lease.begin",
    "wire/activity.py: _run_hook",
    "runtime/driver/ray_cluster.py: RayCluster.start",
    "runtime/driver/ray_start.py: _call_and_wait",
    "runtime/driver/driver.py: Driver.run",
    "runtime/process/actor.py: ProcessActor._run_loop",
    "runtime/process/context.py: _call_in_thread",
    "runtime/process/engine.py: attribute_failures",
    "runtime/process/engine.py: ProcessEngine._run_named",
    "runtime/process/replica.py: Replica._run_body",
    "runtime/ledger/ledger_file.py: open_to_read",
    "runtime/ledger/ledger_file.py: open_to_write",
    "wire/in_ports.py: Inbound._run_body",
    "wire/in_ports.py: Inbound.each",
    "wire/items.py: OpenItems.noting_failure",
    "wire/out_ports.py: Outbound._send_on_all",
    "wire/requests.py: LiveServe._run_body",
    "tasks/reward_calls/reward_client.py: Gathered._answer_questions",
    "tasks/reward_calls/http.py: HttpReward._answer_questions",
    "tasks/reward_calls/judge.py: Judge.__call__",
    "tasks/reward_calls/judge.py: Judge.ask",
    "tasks/reward_calls/worker_child.py: run_child",
    "tasks/user_code.py: _import_problems",
    "training/loss/function_trial.py: objective_problem",
    "training/loss/function_trial.py: try_function",
    "training/scoring_rank.py: serve_parent",
    "testing/clock.py: VirtualLoop.run_in_executor",
    "commands/here.py: HereRun._run",
    "testing/graph_run.py: run_in_process",
    "testing/trial.py: run_trial",
    "testing/node_rig.py: NodeRig.__aenter__",
}
"""Where any exception is caught: boundaries to foreign code, and places that undo something and raise again, or that
hand the exception to those who wait."""


@functools.cache
def broad_excepts(path: Path) -> tuple[tuple[str, int], ...]:
    """("wire/connection.py: Listener._drain_socket", line) for each place that catches or suppresses any exception."""

    def visit(node: ast.AST, within: tuple[str, ...]) -> Iterator[tuple[str, int]]:
        for child in ast.iter_child_nodes(node):
            if is_broad(child):
                yield f"{path.relative_to(ROOT / 'flowrl')}: {'.'.join(within)}", child.lineno
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from visit(child, (*within, child.name) if named else within)

    return tuple(visit(tree(path), ()))


BROAD = {"Exception", "BaseException"}


def is_broad(node: ast.AST) -> bool:
    """Whether it catches or suppresses any exception, also as one of several."""
    match node:
        case ast.ExceptHandler(type=None):
            return True
        case ast.ExceptHandler(type=ast.Tuple(elts=caught)) | ast.Call(func=ast.Name(id="suppress"), args=caught):
            return any(ast.unparse(one) in BROAD for one in caught)
        case ast.ExceptHandler(type=ast.expr() as caught):
            return ast.unparse(caught) in BROAD
    return False


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("try: f()\nexcept: pass", True),
        ("try: f()\nexcept Exception: pass", True),
        ("try: f()\nexcept (Exception, KeyError): pass", True),
        ("with suppress(BaseException): f()", True),
        ("try: f()\nexcept (KeyError, OSError): pass", False),
        ("with suppress(KeyError): f()", False),
    ],
)
def test_what_catches_any_exception_is_seen(code: str, expected: bool) -> None:
    assert any(is_broad(node) for node in ast.walk(ast.parse(code))) == expected


def test_any_exception_is_caught_at_known_boundaries_alone() -> None:
    assert {place for path in modules() for place, _ in broad_excepts(path)} == BROAD_EXCEPTS


def test_whoever_catches_any_exception_says_why_in_its_line() -> None:
    silent = []
    for path in modules():
        lines = path.read_text(encoding="utf-8").splitlines()
        silent += [f"{place}:{line}" for place, line in broad_excepts(path) if ":  # " not in lines[line - 1]]
    assert not silent


def loaded_by(code: str) -> set[str]:
    """Heavy packages that a fresh interpreter has loaded after `code`."""
    probe = f"{code}\nimport sys\nprint(*[name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", probe], cwd=ROOT, capture_output=True, text=True, check=True)
    return set(done.stdout.split("\n")[-2].split())


PURE = {
    *("all", "any", "bool", "callable", "dict", "frozenset", "hasattr", "isinstance", "issubclass", "len", "list"),
    *("max", "min", "range", "set", "sorted", "str", "sum", "tuple", "type", "zip"),
    *("get", "items", "keys", "values", "startswith", "endswith"),
}
"""What an assert may call: functions and methods that change nothing, whatever they are given."""


def effects_of_asserts(code: ast.AST) -> list[int]:
    """Lines of asserts that may do something: `python -O` leaves them out, and what they do with them."""
    found = []
    for node in (one for one in ast.walk(code) if isinstance(one, ast.Assert)):
        inside = list(ast.walk(node))
        called = {getattr(one.func, "attr", getattr(one.func, "id", "")) for one in inside if isinstance(one, ast.Call)}
        if called - PURE or any(isinstance(one, ast.NamedExpr | ast.Await | ast.Yield) for one in inside):
            found.append(node.lineno)
    return found


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("assert opened.pop(name) is session", [1]),
        ("assert segment.lock(exclusive=True)", [1]),
        ("assert (found := find())", [1]),
        ("async def f():\n    assert await read(), 'closed'", [2]),
        ("assert x, log('no x')", [1]),
        ("assert isinstance(x, int) and all(len(y) for y in x.values())", []),
    ],
)
def test_an_assert_that_does_something_is_seen(code: str, expected: list[int]) -> None:
    assert effects_of_asserts(ast.parse(code)) == expected


def test_no_assert_does_anything() -> None:
    found = {
        str(path.relative_to(ROOT)): effects_of_asserts(tree(path)) for path in [*modules(), ROOT / "flowrl_setup.py"]
    }
    assert {path: lines for path, lines in found.items() if lines} == {}


def test_importing_flowrl_and_building_a_graph_loads_nothing_heavy() -> None:
    assert loaded_by(CHECKED) == set()


def test_importing_the_testing_package_loads_nothing_that_a_test_of_a_node_does_without() -> None:
    assert loaded_by("import flowrl.testing") <= {"zmq"}


def test_a_graph_runs_in_one_process_without_ray() -> None:
    run = (
        "run_graph('benchmarks/runs/stages.py', Path(directory) / 'run', {'generate_s': 0.0, 'train_s': 0.0}, steps=2)"
    )
    code = f"with tempfile.TemporaryDirectory() as directory: assert {run}.audit().ok"
    assert loaded_by(f"import tempfile\nfrom pathlib import Path\nfrom flowrl.testing import run_graph\n{code}") <= {
        "zmq"
    }


def test_the_probe_can_see_a_heavy_package() -> None:
    assert loaded_by("import zmq") == {"zmq"}


def test_checking_a_graph_file_loads_nothing_heavy() -> None:
    """One process checks them all; the first that loads something ends it."""
    files = [str(path) for path in sorted((ROOT / "graphs").glob("*.py"))]
    heavy = f"[name for name in {HEAVY!r} if name in sys.modules]"
    check = f"for file in {files!r}:\n    assert main(['check', file]) == 0\n    assert not {heavy}, (file, {heavy})"
    assert loaded_by(f"import sys\nfrom flowrl.cli import main\n{check}") == set()


PIPES = re.compile(
    r"capture_output|subprocess\.PIPE|\.communicate\(|check_output|getoutput|os\.popen|create_subprocess_"
)
"""Ways to start a program that wait for the end of its pipes, which any process that it has started can prolong."""
PIPES_WITHOUT_A_WAIT = {
    "runtime/driver/ray_guard.py": "it is written to",
    "environments/episode_processes/zygote.py": "it has no pipe of asyncio's",
    "nodes/sources/row_checks.py": "it starts nothing",
}


def test_no_wait_is_for_the_end_of_a_pipe() -> None:
    found = {str(path.relative_to(ROOT / "flowrl")) for path in modules() if PIPES.search(path.read_text())}
    assert found == set(PIPES_WITHOUT_A_WAIT)
