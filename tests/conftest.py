"""Settings of all tests, and the Ray that many of them join."""

from __future__ import annotations

import gc
import os
import re
import secrets
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from benchmarks.channels.machines import HEAD, free_ports
from tests import warm
from tests.house.further_cases import further, unknown

ROOT = Path(__file__).parent.parent
SPREAD = {"test_ladder_stack.py"}
"""Every test there has a run of its own; in other files they share what took long to make."""

WAITING = (
    "test_gpu_check.py",
    "test_guard.py",
    "test_environments_mcp.py",
    "test_environments_python_tool.py",
    "test_environments_processes.py",
    "test_code_answers.py",
)
"""Their tests wait for processes more than they compute: in `make test` they begin, while `lint` computes beside."""

LONG = (
    "test_ray_jobs.py",
    "test_tickets.py",
    "test_clusters.py",
    "test_oracle.py",
    "test_stack_run.py",
    "test_agents_stack.py",
    "test_ladder_stack.py",
    "test_training_options.py",
    "test_training_sequence.py",
    "test_agents_openai_stack.py",
    "test_training_loading.py",
    "test_fp8_stack.py",
    "test_agent_faults.py",
    "test_ppo_stack.py",
    "test_scoring_sharded.py",
    "test_generator_processes.py",
)
"""Few tests, each of them long: begun early, so that no process ends alone with one of them."""

EARLY = WAITING + LONG

THOROUGH = frozenset(
    {
        "accounting_property",
        "agents_conversation",
        "agents_endpoint_docs",
        "agents_endpoint_openai",
        "agents_endpoint_sessions",
        "agents_endpoint_tree",
        "agents_examination",
        "around_training",
        "audit_falsified",
        "audit_kills",
        "benchmark_data_shapes",
        "benchmark_kernels",
        "channel_cancel",
        "channel_cost",
        "channel_endpoint",
        "channel_failures",
        "code_answers",
        "device_leases",
        "docs_tutorial",
        "environments_docs",
        "environments_mcp",
        "environments_processes",
        "environments_python_tool",
        "environments_tools",
        "failing_by_length",
        "fit_shared",
        "flex_mask",
        "fp8",
        "gpu_check",
        "graphs_online",
        "guard",
        "long_reports",
        "memory_formulas",
        "mutants",
        "nodes_agent_outside",
        "nodes_critic",
        "nodes_curriculum",
        "nodes_pairs",
        "nodes_pairwise",
        "nodes_preferences",
        "nodes_refreshed",
        "nodes_reward_model",
        "nodes_time_shared",
        "process_reward",
        "random_graphs",
        "ranks",
        "residence",
        "rewards_conventions",
        "run_file",
        "runtime_alive",
        "runtime_branches",
        "runtime_endings",
        "runtime_episodes",
        "runtime_half_done",
        "runtime_losses",
        "runtime_manifest",
        "runtime_resume",
        "runtime_seats",
        "runtime_snapshot",
        "shared_options",
        "size_defaults",
        "tasks_evaluation_sets",
        "tasks_formats",
        "tasks_on_disk",
        "tasks_rewards",
        "testing_graph_run",
        "tickets",
        "tiny_agent",
        "token_proof",
        "tools_docs",
        "training_ring",
        "training_sequence",
        "training_value_model",
        "trees",
        "tune",
        "tune_placements",
        "unfinished_evaluation",
        "vllm_processes",
        "warm",
        "weights_tcp",
    }
)
"""Files that start processes, wait, try thousands of cases, or take seconds: most of the time of the tests that are not
slow. Their tests have the mark of that name, unless they are slow."""

# How long an example takes depends on what else the machine does; pytest's timeout ends what hangs.
settings.register_profile("flowrl", deadline=None)
settings.load_profile("flowrl")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile`, but for the files of SPREAD: their tests go to whichever process is free."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def schedule(self) -> None:
            self.config.option.loadscopereorder = False  # xdist orders by the number of tests
            super().schedule()

        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return nodeid if Path(file).name in SPREAD else file

    return Scheduling(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files of which no test is wanted: importing all takes longer than a test."""
    wanted = config.option.markexpr
    if not collection_path.match("test_*.py") or not wanted.startswith(("slow", "not slow")):
        return None
    text = collection_path.read_text()
    if wanted.startswith("slow"):
        left_out = "mark.slow" not in text
    else:
        whole = re.search(r"^pytestmark = .*mark\.slow\b", text, re.MULTILINE) is not None
        left_out = whole or ("not thorough" in wanted and _name(collection_path) in THOROUGH)
    return True if left_out else None


def _name(path: Path) -> str:
    return path.stem.removeprefix("test_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the files of THOROUGH, and further cases. Begin with files of EARLY; end with files of few tests."""
    whole_files = not any("::" in argument for argument in config.args)
    if config.option.markexpr == "matrix" and whole_files and (names := list(unknown(items))):
        raise pytest.UsageError(f"tests/house/further_cases.py names cases that do not exist: {', '.join(names)}")
    for item in further(items):
        item.add_marker("matrix")
    for item in items:
        if _name(item.path) in THOROUGH:
            item.add_marker("thorough")
    tests = Counter(item.path.name for item in items)

    def place(item: pytest.Item) -> tuple[int, int]:
        name = item.path.name
        return (0, EARLY.index(name)) if name in EARLY else (1, -tests[name])

    items.sort(key=place)


def pytest_configure() -> None:
    """A million objects are made by imports and collection, and stay: the garbage collector never looks at them."""
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


_environment: dict[str, str] = {}
_search: list[str] = []


def pytest_sessionstart() -> None:
    _environment.update(os.environ)
    _search.extend(sys.path)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Each file begins in the environment of the session: what imports, engines and graphs set in it stays in their
    file, the directories of graphs in sys.path included."""
    if nextitem is None or nextitem.path != item.path:
        kept = {name: text for name, text in os.environ.items() if name.startswith(("PYTEST_", warm.OWNER))}
        os.environ.clear()
        os.environ.update(_environment | kept)
        sys.path[:] = _search


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if refused := warm.refused():
        terminalreporter.write_line(f"{len(refused)} processes were started cold, as the first of these:\n{refused[0]}")


def pytest_unconfigure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        warm.remove()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Torch computes with one thread: threads that wait for each other cost more than small products."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The environment in which a run joins the Ray of all tests, as a cluster; it has to be there at the end."""
    ports = free_ports(4)
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    options = [
        f"--port={ports[0]}",
        f"--ray-client-server-port={ports[1]}",
        f"--dashboard-agent-listen-port={ports[2]}",
        f"--dashboard-agent-grpc-port={ports[3]}",
        "--num-cpus=8",
        "--include-dashboard=false",
        "--disable-usage-stats",
    ]
    head = subprocess.Popen(
        [warm.python(), Path(sys.executable).with_name("ray"), "start", "--head", "--block", *options],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=tmp_path_factory.mktemp("ray"),
        env={**os.environ, **token, **HEAD, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    assert head.stdout is not None
    for line in head.stdout:
        if "Ray runtime started" in line:
            break
    try:
        yield {"RAY_ADDRESS": f"127.0.0.1:{ports[0]}", **token}
        assert head.poll() is None, "a run ended the Ray that it had joined"
    finally:
        head.terminate()
        head.stdout.read()
        head.wait(30)
