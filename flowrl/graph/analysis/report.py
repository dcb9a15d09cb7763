"""The plan of a graph as text, as `flowrl check` prints it if there are no problems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from flowrl.graph.analysis.check import Report
from flowrl.graph.analysis.memory_use import TERMS, device_rows, machine_rows, process_rows
from flowrl.graph.analysis.plan import Plan

UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def render_report(report: Report) -> str:
    """Derived numbers, edges and processes as aligned columns, then warnings."""
    plan = report.plan
    lines = [f"{plan.graph}: {len(plan.nodes)} nodes, {len(plan.edges)} edges, {len(plan.hosts) + 1} processes", ""]
    lines += [f"  {name:<18}{text}" for name, text in number_lines(plan)]
    edges = [
        (
            edge.name,
            " → ".join(edge.types),
            "call" if edge.kind == "call" else edge.dispatch,
            f"{edge.capacity}{' (derived)' if edge.capacity_derived else ''}",
            ", ".join(edge.transports),
            size_text(edge.retained_bytes),
        )
        for edge in plan.edges
    ]
    lines += ["", *_table_lines(("edge", "carries", "dispatch", "capacity", "transport", "retains"), edges), ""]
    if plan.columns:
        columns = [
            (
                column.name,
                node,
                f"{column.dtype}{[*column.shape] if column.shape else ''}",
                f"{column.value_bytes} B a {column.per}",
                "yes" if column.in_digest else "no",
            )
            for column, node in plan.columns
        ]
        lines += [*_table_lines(("column", "added by", "value", "size", "in digest"), columns), ""]
    lines += _branch_lines(plan)
    hosts = [
        (
            host.name,
            " ".join(host.nodes) + (f" (time share: {host.lease})" if host.lease else ""),
            _cores_text(host.cores),
            host.cores_from or "-",
            ",".join(map(str, host.gpus)) or "-",
            f"{host.machine}",
        )
        for host in plan.hosts
    ]
    lines += _table_lines(("process", "nodes", "cores", "from", "GPUs", "machine"), hosts)

    # A note that several nodes have is printed once.
    said: dict[str, list[str]] = {}
    for note in report.notes:
        name, _, text = note.partition(": ")
        said.setdefault(text, []).append(name)
    lines += [f"\nnote: {', '.join(names)}: {text}" for text, names in said.items()]
    lines += _memory_lines(report)
    lines += [f"\nwarning: {warning}" for warning in report.warnings]
    return "\n".join(lines)


def _memory_lines(report: Report) -> Iterator[str]:
    """What takes memory where and when, for the processes whose model has a known size."""
    if not report.residents:
        return
    yield "\n  memory in GiB, predicted from sizes (docs/memory.md); host: checkpoints and published weights, too"
    yield from _table_lines(("process", "in", *TERMS, "host"), list(process_rows(report.residents)))
    if report.devices:
        yield ""
        yield from _table_lines(("device", "has", "most", "there"), list(device_rows(report.devices)))
    yield ""
    yield from _table_lines(("machine", "memory", "/dev/shm"), list(machine_rows(report.machines)))


def size_text(num_bytes: float) -> str:
    """ "1.5 MiB" """
    for unit in UNITS[:-1]:
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} {UNITS[-1]}"


def number_lines(plan: Plan) -> Iterator[tuple[str, str]]:
    """The derived numbers that this graph has, as (name, text)."""
    numbers = plan.numbers
    if numbers.group_size is not None:
        yield "group_size", f"{numbers.group_size}"
    if numbers.derives:
        most = ", ".join(f"{label}: {number}" for label, number in numbers.derives.items())
        yield "derives", f"{most} (up to {numbers.most_members} members in a group)"
    if numbers.groups_per_batch is not None:
        yield "groups_per_batch", f"{numbers.groups_per_batch}"
    if numbers.tickets is not None:
        yield "tickets", f"{numbers.tickets}"
        yield "window", f"{numbers.window}" if numbers.window else "none"
        reused = numbers.max_reused_age
        again = "" if reused is None else f", replay up to {reused - (numbers.max_staleness or 0)}"
        yield "max_staleness", f"{numbers.max_staleness}{again and f'{again}: no token older than {reused}'}"
    if numbers.longest_sample is not None:
        yield "longest_sample", f"{numbers.longest_sample} tokens"
    if transports := dict.fromkeys(weights.transport for weights in plan.weights):
        yield "weights", ", ".join(transport or "none" for transport in transports)
    yield "retained", size_text(plan.retained_bytes)


def _branch_lines(plan: Plan) -> list[str]:
    """Which nodes lead to which trainer, if the graph is more than one line of nodes."""
    reached: dict[str, set[str]] = {}
    for port in plan.ports:
        reached.setdefault(port.name.partition(".")[0], set()).update(port.trainers)
    # Nodes that receive only weights are not a branch of samples.
    fed = {edge.into.partition(".")[0] for edge in plan.edges if edge.kind == "queue"}
    readers = {edge.into.partition(".")[0] for edge in plan.edges if edge.kind == "latest"} - fed
    taps = [name for name, trainers in reached.items() if not trainers and name not in readers]
    if not plan.trainers or (len(plan.trainers) == 1 and not taps):
        return []
    rows = [(name, " ".join(node for node, ends in reached.items() if name in ends)) for name in plan.trainers]
    if taps:
        rows.append(("no trainer", " ".join(taps) + " (a loss there ends no sample)"))
    return [*_table_lines(("branch to", "nodes"), rows), ""]


def _cores_text(cores: Sequence[int]) -> str:
    """ "0-3,8" """
    runs: list[list[int]] = []
    for core in cores:
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs) or "any"


def _table_lines(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(len(heads))]
    for row in (heads, *rows):
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
