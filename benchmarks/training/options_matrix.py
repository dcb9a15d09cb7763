"""Every graph that learns from its own samples, with every option that all of them should take: two real steps each.

    python -m benchmarks.training.options_matrix                    # what has no result yet, then the table
    python -m benchmarks.training.options_matrix --only ppo rloo    # of these graphs
    python -m benchmarks.training.options_matrix --most 3           # three of them
    python -m benchmarks.training.options_matrix --again failed     # these results anew: failed, refused or all
    python -m benchmarks.training.options_matrix --table --docs     # runs nothing, writes the table into its page

A cell is one `flowrl run` of `tiny` on the real stack. It is ok if the run ends well and its audit is ok; refused, if
one sentence says so before anything starts; else it failed. Results are kept as JSON lines, one when a cell is done, so
the same command goes on where it was stopped; what the page has counts as done. The status is 1 if a cell failed.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from benchmarks.data.counting_reward import CountingReward
from benchmarks.training.ladder_cases import ROOT, audited, end
from flowrl import check
from flowrl.errors import ConfigError
from flowrl.graph.load import load_file

GRAPHS = (
    *("grpo", "reinforce_pp", "rloo", "dapo", "raft", "iterative_dpo", "distill", "ppo", "custom_node"),
    *("judge", "teachers", "replay", "proposer", "tree_rollouts", "planner_executor"),
    *("agent_tools", "agent_game", "step_groups", "agent_openai", "self_play"),
)
REWARD_MODEL, URL = "{reward_model}", "{url}"
KL_COV = ("--objective.kind", "kl_cov", "--objective.cov-share", "0.05")
OPTIONS: Mapping[str, tuple[str, ...]] = {
    "--reward-model": ("--reward-model", REWARD_MODEL),
    "--objective.dual-clip": ("--objective.dual-clip", "3"),
    "--objective.kind": KL_COV,
    "--dynamic-sampling": ("--dynamic-sampling",),
    "--on-limit mask": ("--on-limit", "mask", "--staleness", "1"),
    "--lora.rank 8": ("--lora.rank", "8"),
    "2 generators": ("--generator.replicas", "2", "--generator.cpus", "0.5"),
    "HTTP reward": ("--task.reward", URL),
    "--time-share": ("--time-share", "generator", "trainer"),
    "--curriculum.chosen": ("--curriculum.chosen", "0.5", "--curriculum.replayed", "0.2"),
    "--reference.refresh-every": ("--reference.refresh-every", "1"),
    "--lmbda": ("--lmbda", "0.5", "--beta", "0.5"),
}
"""The matrix's column -> what is added to the command."""
REFRESHED = OPTIONS["--reference.refresh-every"]
OWN_NAMES = {
    ("dapo", "--objective.kind"): (*KL_COV, "--objective.clip-high", "None"),  # it has no ratio to clip
    ("ppo", "--time-share"): ("--time-share", "generator", "actor", "critic_trainer"),
    **{
        (graph, "--reference.refresh-every"): (*REFRESHED, "--objective.kl-coef", "0.01")
        for graph in GRAPHS
        if graph not in ("rloo", "reinforce_pp", "ppo")  # they have a KL by themselves
    },
    ("iterative_dpo", "--reference.refresh-every"): (*REFRESHED, "--reference.weights", "initial"),
}
SMALL = ("--steps", "2", "--group-size", "4", "--evaluate", "0")
GROUPS = {
    "proposer": "4",
    "agent_tools": "4",
    "agent_game": "8",
    "step_groups": "8",
    "agent_openai": "4",
    "self_play": "4",
}
"""Groups of a step where their look-ahead needs more than two."""
LIMIT_S = 600.0
Outcome = Literal["ok", "refused", "failed"]
PAGE = ROOT / "docs" / "options-matrix.md"
BEGIN, END = "<!-- matrix: begin -->", "<!-- matrix: end -->"


@dataclass(frozen=True)
class Cell:
    """The result of one graph with one option."""

    graph: str
    option: str
    command: str
    outcome: Outcome
    said: str
    """The sentence of a refusal, or the last line of a failure."""
    seconds: float


def cells_of(path: Path) -> dict[tuple[str, str], Cell]:
    """The last result of every cell in a file of JSON lines; a line that was cut off is left out."""
    found: dict[tuple[str, str], Cell] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            cell = Cell(**json.loads(line))
        except (ValueError, TypeError):
            continue
        found[cell.graph, cell.option] = cell
    return found


def cells_of_page(text: str) -> dict[tuple[str, str], Cell]:
    """The results that a page has, without their commands and times."""
    lines = text.partition(BEGIN)[2].partition(END)[0].splitlines()
    sentences = dict(re.findall(r"^(\d+)\. (.*)$", "\n".join(lines), re.MULTILINE))
    header, *rows = [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines if "|" in line]
    found: dict[tuple[str, str], Cell] = {}
    for graph, *cells in rows[1:]:
        for option, (outcome, _, number) in zip(header[1:], (cell.partition(" ") for cell in cells), strict=True):
            if outcome in get_args(Outcome):
                found[graph, option] = Cell(graph, option, "", outcome, sentences.get(number, ""), 0.0)  # type: ignore[arg-type]
    return found


def all_cells(results: Path) -> dict[tuple[str, str], Cell]:
    """The results of the file, and those of the page where the file has none."""
    return {**cells_of_page(PAGE.read_text()), **cells_of(results)}


def command_of(graph: str, option: str) -> list[str]:
    """What stands behind `flowrl`, with placeholders."""
    groups = ("--groups-per-step", GROUPS.get(graph, "2"))
    return ["run", graph, *SMALL, *groups, *OWN_NAMES.get((graph, option), OPTIONS[option])]


def run_cell(graph: str, option: str, values: Mapping[str, str], home: Path, server: CountingReward) -> Cell:
    """One run in `home`, which is replaced."""
    command = command_of(graph, option)
    run_dir = home / f"{graph}-{option.strip('-').replace(' ', '_')}"
    shutil.rmtree(run_dir, ignore_errors=True)
    begun, asked = time.monotonic(), server.asked
    status, errors = flowrl([part.format_map(values) for part in command], run_dir)
    seconds = round(time.monotonic() - begun, 1)
    lines = [line for line in errors.splitlines() if line.strip()]
    outcome: Outcome = "failed"
    said = lines[-1] if lines else f"status {status}"
    if status == 2 and len(lines) <= 2 and not (run_dir / "config.json").exists():
        outcome, said = "refused", said.removeprefix("- ")  # one sentence, or that of one problem under its heading
    elif status == 0 and audited(run_dir) is not True:
        said = "audit: not ok"
    elif status == 0 and option == "HTTP reward" and server.asked == asked:
        said = "the server was not asked"
    elif status == 0:
        outcome, said = "ok", ""
    for value, name in ((values["reward_model"], "REWARD_MODEL"), (values["url"], "URL")):
        said = said.replace(value, name)
    text = " ".join(command).replace(REWARD_MODEL, "REWARD_MODEL").replace(URL, "URL")
    return Cell(graph, option, f"flowrl {text}", outcome, said, seconds)


def flowrl(command: Sequence[str], run_dir: Path) -> tuple[int, str]:
    """(status, standard error) of `flowrl ...` in a process of its own."""
    arguments = [sys.executable, "-m", "flowrl.cli", *command, "--run-dir", str(run_dir), "--plain"]
    process = subprocess.Popen(
        arguments, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    try:
        _, errors = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return 124, f"stopped after {LIMIT_S:g} s"
    finally:
        end(process)
    return process.returncode, errors


def reward_model(home: Path) -> Path:
    """A reward model for `tiny`, trained for two steps; made once."""
    run_dir = home / "reward_model"
    found = sorted((run_dir / "checkpoints").glob("step_*"))
    if not found:
        status, errors = flowrl(["run", "reward_model", "--steps", "2", "--batch", "8", "--held-out", "8"], run_dir)
        if status:
            raise SystemExit(f"options_matrix: the reward model was not trained: {errors.strip()}")
        found = sorted((run_dir / "checkpoints").glob("step_*"))
    return found[-1]


def table(found: Mapping[tuple[str, str], Cell]) -> str:
    """The matrix as Markdown, and the sentences of what is refused."""
    rows = [f"| graph | {' | '.join(f'`{name}`' if name[0] == '-' else name for name in OPTIONS)} |"]
    rows.append("|---" * (len(OPTIONS) + 1) + "|")
    notes: dict[str, int] = {}
    for graph in GRAPHS:
        texts = []
        for option in OPTIONS:
            cell = found.get((graph, option))
            if cell is not None and cell.said:
                said = cell.said.removeprefix("flowrl: ").partition("; flowrl run")[0]
                texts.append(f"{cell.outcome} {notes.setdefault(said, len(notes) + 1)}")
            else:
                texts.append("–" if cell is None else cell.outcome)
        rows.append(f"| {graph} | {' | '.join(texts)} |")
    return "\n".join([*rows, "", *(f"{number}. {said}" for said, number in notes.items())])


def write_page(text: str) -> None:
    """Put the table between the page's marks."""
    page = PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def main(argv: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the run under way ends too
    results = options.home / "results.jsonl"
    if not options.table:
        options.home.mkdir(parents=True, exist_ok=True)
        _run_all(options, results)
    found = all_cells(results)
    text = table(found)
    print(text)
    if options.docs:
        write_page(text)
    failed = [cell for cell in found.values() if cell.outcome == "failed"]
    for cell in failed:
        print(f"options_matrix: {cell.command}: {cell.said}", file=sys.stderr)
    return 1 if failed else 0


def _run_all(options: argparse.Namespace, results: Path) -> None:
    home = options.home.resolve()
    with CountingReward() as server, results.open("a") as kept:
        values = {"reward_model": str(reward_model(home)), "url": server.url}
        done = all_cells(results)
        wanted = [
            place
            for place in across(options.only or GRAPHS)
            if place not in done or options.again in ("all", done[place].outcome)
        ]
        wanted.sort(key=lambda place: not refused_by_check(place[0], place[1], values))
        for graph, option in wanted[: options.most]:
            cell = run_cell(graph, option, values, home, server)
            kept.write(json.dumps(asdict(cell)) + "\n")
            kept.flush()
            print(f"{graph} {option}: {cell.outcome} {cell.said} ({cell.seconds} s)", file=sys.stderr, flush=True)


def across(graphs: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Every (graph, option), so that the first of them have every graph and every option already."""
    options = list(OPTIONS)
    for shift in range(len(options)):
        yield from ((graph, options[(shift + number) % len(options)]) for number, graph in enumerate(graphs))


def refused_by_check(graph: str, option: str, values: Mapping[str, str]) -> bool:
    """Whether the graph does not take the option: those cells take a second, and are done first."""
    added = OWN_NAMES.get((graph, option), OPTIONS[option])
    file = load_file(graph)
    try:
        return not check(file.build(file.parse([part.format_map(values) for part in added]))).ok
    except ConfigError:
        return True


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], choices=GRAPHS, metavar="GRAPH")
    parser.add_argument("--most", type=int, help="run so many cells")
    parser.add_argument("--again", choices=["failed", "refused", "ok", "all"], help="run cells with this result anew")
    parser.add_argument("--table", action="store_true", help="run nothing")
    parser.add_argument("--docs", action="store_true", help="write the table into docs/options-matrix.md")
    parser.add_argument("--home", type=Path, default=Path("runs") / "options_matrix", help="where runs and results lie")
    return parser


if __name__ == "__main__":
    sys.exit(main())
