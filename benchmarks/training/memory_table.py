"""What fits where: published model sizes on usual machines, with the options that `flowrl check` proposes.

    python -m benchmarks.training.memory_table            # the table of docs/memory.md
    python -m benchmarks.training.memory_table --graph ppo

Each row begins with `--dtype bfloat16 --trainer.gpus 1` and the sizes of a usual task (prompts of 1,024 tokens,
responses of 1,024). The options are the first with which the graph passes every check, with adapters where training all
weights does not fit. The bytes are those of one process.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from pathlib import Path

from flowrl.commands.fit import find_fitting, option_text
from flowrl.graph.analysis.check import Report, check
from flowrl.graph.analysis.memory_use import TERMS, gib_text
from flowrl.graph.load import load_file
from flowrl.graph.machine import Cluster
from flowrl.graph.node import Footprint
from flowrl.graph.option_types import changed_config

SHAPES = Path(__file__).parents[2] / "tests" / "graph" / "shapes"
MODELS = {"0.5B": "qwen2.5-0.5b", "7B": "qwen2.5-7b", "32B": "qwen2.5-32b", "70B": "llama-70b"}
CLUSTERS = ("1 x 1 x 24GB", "1 x 1 x 80GB", "1 x 8 x 80GB", "2 x 8 x 80GB")
USUAL = ("--dtype", "bfloat16", "--trainer.gpus", "1", "--max-tokens", "1024", "--max-prompt-tokens", "1024")
ADAPTERS = ("--lora.rank", "16")
"""Where training all weights does not fit."""
HEADS = ("model", "machines", "options", "process", *TERMS, "host")


def rows(graph: str) -> Iterator[tuple[str, ...]]:
    file = load_file(graph)
    for name, shape in MODELS.items():
        for text in CLUSTERS:
            cluster = Cluster.parse(text)
            for adapters in ((), ADAPTERS):
                cfg = file.parse(["--policy", str(SHAPES / f"{shape}.json"), *USUAL, *adapters])
                if (found := find_fitting(file, cfg, cluster)) is not None:
                    break
            if found is None:
                yield name, text, "does not fit", *("",) * (len(HEADS) - 3)
                continue
            options = " ".join(filter(None, (*adapters, option_text(found))))
            yield from _processes(name, text, options, check(file.build(changed_config(cfg, found)), cluster))


def _processes(name: str, cluster: str, options: str, report: Report) -> Iterator[tuple[str, ...]]:
    """A row for each role; the replicas of one are alike."""
    first = True
    for resident in report.residents:
        if not resident.replica.endswith("/0"):
            continue
        node = next(node for node in report.plan.nodes if node["name"] == resident.replica.partition("/")[0])
        process = f"{node['replicas']} × {node['name']}"
        shown = (name, cluster, f"`{options}`" if options else "as they are") if first else ("", "", "")
        yield *shown, process, *(_of(resident.footprint, term) for term in TERMS), gib_text(_host(resident.footprint))
        first = False


def _of(footprint: Footprint, name: str) -> str:
    terms = [term for term in footprint.terms if term.place == "device" and term.name == name]
    return gib_text(sum(term.num_bytes for term in terms))


def _host(footprint: Footprint) -> int:
    return sum(term.num_bytes for term in footprint.terms if term.place != "device" and term.stay != "loading")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graph", default="grpo")
    print(f"| {' | '.join(HEADS)} |\n|{'---|' * len(HEADS)}")
    for row in rows(parser.parse_args().graph):
        print(f"| {' | '.join(row)} |")


if __name__ == "__main__":
    main()
