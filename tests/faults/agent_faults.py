"""Whatever fails at whatever moment of an episode: the books close, no reward is made up, and nothing is left running.

    python -m tests.faults.agent_faults [--real] [--only PART ...] [--results FILE]

One line for each cell of {zygote, process, agent, client, generator, replica, tool} x {kill, stop, hang, garbage} x
{reset, step, generating, scoring, checkpoint}; those that make no sense say why. Environments' and agents' processes,
zygotes and the endpoint are real; the generator is a stand-in, and its cells run in processes of their own on Ray. With
`--real` everything does, with vLLM and ZeRO: the generator's cells, and one of each other target; others with `--only`.
A run whose only generator is killed ends with status 2, and its books have to close after a resume; one of two
(`replica`) is done without. With a file for the results, cells that are `ok` there are not done again. The exit status
is 1 if a cell is not ok.
"""

from __future__ import annotations

import argparse
import itertools
import json
import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from flowrl.environments.episode_processes import episode_process, zygote
from flowrl.testing import GraphRun, run_graph
from flowrl.testing.graph_run import KeptView
from tests.faults.fault_parts import GENERATOR, Fault
from tests.rigs.run_process import MARK, Run, pids_of

GRAPH = Path(__file__).parents[1] / "runtime" / "runs" / "graphs_episodes" / "faulty.py"
REAL_GRAPH = GRAPH.with_name("faulty_real.py")
TARGETS = ("zygote", "process", "agent", "client", "generator", "replica", "tool")
WAYS = ("kill", "stop", "hang", "garbage")
MOMENTS = ("reset", "step", "generating", "scoring", "checkpoint")
STEPS, SAMPLES = 4, 24
TIMES = {"zygote": 2, "generator": 1, "replica": 1}
"""How often the fault happens in a run; else OFTEN times."""
OFTEN = 4
RUN_S = 120.0
REAL_RUN_S = 600.0
KILLED_WITHIN_S = 2.0
"""In place of the 10 s after which a zygote that does not answer is given up."""
ENDED_WITHIN_S = 10.0
STOPPED_S = 12.0
"""For so long a generator stands still."""
CUT = "sample_id IN (SELECT sample_id FROM episodes WHERE truncated NOT NULL)"
REWARDS = f"SELECT reward FROM samples WHERE reward NOT NULL AND NOT {CUT}"
CUT_OFF = f"SELECT 1 FROM samples WHERE reward != 0 AND {CUT}"
"""A real policy may write what is no call three times in a row; nothing was given for such an episode."""
STATES = {"trained", "filtered: group_too_small", "dropped: run_end"}
CAUSES = {
    "zygote": {"env_died", "env_timed_out"},
    "process": {"env_died", "env_timed_out", "env_malformed"},
    "agent": {"agent_died", "agent_raised", "no_reward"},
    "client": set[str](),
    "generator": set[str](),
    "replica": set[str](),
    "tool": {"env_died", "env_timed_out", "env_malformed"},
}


@dataclass(frozen=True)
class Cell:
    target: str
    way: str
    moment: str

    def __str__(self) -> str:
        return f"{self.target} {self.way} {self.moment}"

    @property
    def senseless(self) -> str:
        """Why it is not done; "" if it is."""
        match self.target, self.way, self.moment:
            case "zygote", "hang", _:
                return "it runs nothing of the environment after the import: it hangs only if it is stopped"
            case "zygote", "garbage", _:
                return "no code but its own has its socket"
            case "client", "hang", _:
                return "to a server a client that hangs is one that is stopped"
            case "generator", "hang", _:
                return "it runs no code of users: it hangs only if it is stopped"
            case "generator", "garbage", moment if moment != "step":
                return "garbage of the policy is a reply, and the answer to it is a step"
            case "replica", "hang" | "garbage", _:
                return "as of the only generator"
            case "tool", _, moment if moment not in ("step", "checkpoint"):
                return "tools run in steps alone"
        return ""


REAL = frozenset(
    {
        *(Cell("generator", way, moment) for way in ("kill", "stop", "garbage") for moment in MOMENTS),
        *(Cell("replica", "kill", moment) for moment in MOMENTS),
        Cell("zygote", "kill", "step"),
        Cell("process", "garbage", "generating"),
        Cell("agent", "kill", "generating"),
        Cell("client", "kill", "generating"),
        Cell("tool", "stop", "checkpoint"),
    }
)
"""The cells that `--real` does without `--only`; those that make no sense among them are told."""


def cells() -> Iterator[Cell]:
    return itertools.starmap(Cell, itertools.product(TARGETS, WAYS, MOMENTS))


def play(cell: Cell, directory: Path, *, real: bool = False) -> list[str]:
    """What is wrong after a run with this fault."""
    fault = Fault(cell.target, cell.way, cell.moment, str(directory), TIMES.get(cell.target, OFTEN))
    os.environ[MARK] = mark = uuid.uuid4().hex
    if real or (cell.target in ("generator", "replica") and cell.way != "garbage"):
        return list(_with_processes(cell, fault, directory, real=real))
    config = {"agents": cell.target in ("agent", "client"), "fault": fault.told}
    options = {"steps": STEPS, "save_every": 1, "timeout_s": RUN_S, "must_succeed": False, "preflight": False}
    ran = run_graph(GRAPH, directory / "run", config, **options)  # type: ignore[arg-type]
    problems = list(_wrong(cell, ran, directory))
    if not list(directory.glob("fault-*")):
        problems.append("the fault has not happened")
    if left := _left(mark):
        problems.append(f"left running: {left}")
    return problems


def _wrong(cell: Cell, ran: GraphRun, directory: Path) -> Iterator[str]:
    if ran.error is not None:
        yield f"the run ended with {ran.error!r}"
        return
    if not (report := ran.audit()).ok:
        yield f"audit: {report}"
    failed = {f"failed: {cause}" for cause in CAUSES[cell.target]}
    found = ran.states()
    if not found.keys() <= STATES | failed:
        yield f"samples: {found}"
    if not CAUSES[cell.target] and found != {"trained": SAMPLES}:
        yield f"samples: {found}"
    causes = {cause for (cause,) in ran.rows("SELECT DISTINCT cause FROM attempts")}
    if not causes <= CAUSES[cell.target]:
        yield f"causes of void attempts: {causes}"
    yield from _made_up(directory, [reward for (reward,) in ran.rows(REWARDS)])
    if ran.rows(CUT_OFF):
        yield "an episode that was cut off before its last step has a reward"
    if ran.rows("SELECT 1 FROM samples WHERE state = 'failed' AND reward NOT NULL"):
        yield "a sample that failed has a reward"


def _made_up(directory: Path, rewards: list[float]) -> Iterator[str]:
    given = {float(line) for line in (directory / "rewards").read_text().splitlines()}
    if len(set(rewards)) < len(rewards) or not {*rewards} <= given:
        yield "a sample has a reward that nobody gave for it"


def _left(mark: str) -> list[str]:
    """Names of the children that are left of the run."""
    ends_s = time.monotonic() + ENDED_WITHIN_S
    while (pids := pids_of(mark)) and time.monotonic() < ends_s:
        time.sleep(0.05)  # only the kernel's tables say when they have ended
    names = []
    for pid in pids:
        with suppress(OSError):
            names.append(Path(f"/proc/{pid}/comm").read_text().strip())
            os.kill(pid, signal.SIGKILL)
    return names


def _with_processes(cell: Cell, fault: Fault, directory: Path, *, real: bool) -> Iterator[str]:
    """Nodes in processes of their own: a killed generator ends the run if it is the only one; a stopped one goes on."""
    options = ("--steps", str(STEPS), "--save-every", "1", "--fault", fault.told)
    by_agents = ("--by-agents",) * (cell.target in ("agent", "client"))
    options += ("--evaluate", "0", *by_agents) if real else ("--reset-s", "60")
    if cell.target == "replica":
        options += ("--generator.replicas", "2", "--generator.cpus", "0.5") if real else ("--generators", "2")
    graph, timeout_s = (REAL_GRAPH, REAL_RUN_S) if real else (GRAPH, 2 * RUN_S)
    run = Run(graph, directory / "run", *options, timeout_s=timeout_s)
    stopped = cell.target in ("generator", "replica") and cell.way == "stop"
    killed = cell.target == "generator" and cell.way == "kill"
    if stopped:
        try:
            run.until("is stopped, or its code")
        except AssertionError as ended:
            yield f"nothing was said of the stopped generator: {ended}"
            return
        os.kill(int((directory / GENERATOR).read_text()), signal.SIGCONT)
    status = run.wait()
    if left := run.left_after(ENDED_WITHIN_S):
        yield f"left running: {left}"
    if "(raylet)" in run.stdout:
        yield f"Ray speaks beside flowrl: {run.stdout}"
    if killed:
        lines = run.stderr.splitlines()
        if status != 2 or len(lines) != 1 or "generator" not in lines[0]:
            yield f"status {status}, stderr {run.stderr!r}"
        run = Run(graph, directory / "run", *options, "--resume", timeout_s=timeout_s)
        status = run.wait()
    if status:
        yield f"the run failed: {run.stderr}"
        return
    ran = GraphRun(directory / "run", None, None, KeptView())
    yield from _wrong(cell, ran, directory)
    lost = sum(line.get("generators_lost", 0) for line in ran.metrics())
    if lost != (cell.target == "replica" and cell.way == "kill"):
        yield f"generators_lost is {lost}"
    if not list(directory.glob("fault-*")):
        yield "the fault has not happened"


def done_before(file: Path | None) -> set[str]:
    if file is None or not file.exists():
        return set()
    found = map(json.loads, file.read_text().splitlines())
    return {one["cell"] for one in found if one["result"] == "ok"}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--real", action="store_true", help="with vLLM and ZeRO, on Ray")
    parser.add_argument("--only", nargs="*", default=[], help="words that the names of cells have all of")
    parser.add_argument("--results", type=Path, default=None, help="a file of results to add to")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    for module in (zygote, episode_process):
        module.KILLED_WITHIN_S = KILLED_WITHIN_S  # type: ignore[attr-defined]
    known, failed = done_before(args.results), 0
    for cell in cells():
        name = f"real {cell}" if args.real else str(cell)
        asked = {*args.only} <= {*str(cell).split()} if args.only else not args.real or cell in REAL
        if not asked or name in known:
            continue
        if cell.senseless:
            print(f"{name:<33} no sense: {cell.senseless}", flush=True)
            continue
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            result = "; ".join(play(cell, Path(directory), real=args.real)) or "ok"
        print(f"{name:<33} {result} ({time.monotonic() - began_s:.0f} s)", flush=True)
        failed += result != "ok"
        if args.results is not None:
            with args.results.open("a") as file:
                file.write(json.dumps({"cell": name, "result": result}) + "\n")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
