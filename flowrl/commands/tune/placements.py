"""The placements of a graph among which `flowrl tune` chooses: those that its checks let through. Pure.

On CPUs: cores of the generators (half a core, then powers of two) and of the trainer (the others, without those that
further nodes keep), divided among replicas; or all cores time-shared. On GPUs: GPUs of the generators by replicas and
tensor parallel parts, the other GPUs as trainer ranks; or all GPUs time-shared. Each of these has the memory savings of
`fit` if it does not fit without them. Models that are time-shared with the trainer have its cores. All of these are
tried with every staleness up to a limit, and with look-ahead where the staleness leaves room for it. What the user has
given stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product

from flowrl.commands.fit import MEMORY, Overrides
from flowrl.commands.tune.device_ways import device_ways
from flowrl.commands.tune.tuned_graph import TooLarge, TunedGraph
from flowrl.commands.tune.tuned_placement import TunedPlacement
from flowrl.graph.analysis.numbers import derive_numbers
from flowrl.graph.option_types import has_option, value_of

SHARE = 0.85
"""gpu_memory_utilization of a time-shared engine, if the graph does not fit with vLLM's own value."""
STALENESS = (0, 1, 2, 4, 8)


def find_placements(tuned: TunedGraph, *, wide: bool = False) -> list[TunedPlacement]:
    """All placements that fit, each once, the default first. `wide`: those to measure, with any staleness and in
    admission order, regardless of what the user gave for these."""
    found = [] if wide else [*_default_placement(tuned)]
    free = replace(tuned, fixed=tuned.fixed - {"staleness", "look_ahead"}) if wide else tuned
    for devices, time in product(device_ways(tuned), _staleness_options(free, wide=wide)):
        if "time_share" in devices and time.get("staleness") and free.may_change("staleness"):
            continue  # stages work one after the other: staleness gains nothing
        if (placement := _fitting(free, {**devices, **time})) is not None:
            found.append(placement)
    if tuned.cluster.num_gpus:
        found = [one for one in found if any(stage.size.on_gpus for stage in one.stages)]
    once: dict[tuple[object, ...], TunedPlacement] = {}
    for placement in found:
        once.setdefault(placement.identity, placement)
    return list(once.values())


def _default_placement(tuned: TunedGraph) -> Iterator[TunedPlacement]:
    """The placement of a run without further options, if it fits."""
    with suppress(TooLarge):
        default = tuned.place_options({}, is_default=True)
        yield from (default,) if default is not None else ()


def _fitting(tuned: TunedGraph, options: Overrides) -> TunedPlacement | None:
    """The placement of these options; on GPUs, with the first memory savings with which it fits."""
    savings: list[Overrides] = [{}]
    if tuned.cluster.num_gpus:
        shares = [{}, {"engine.gpu_memory_utilization": SHARE}] if "time_share" in options else [{}]
        ways = ({**way, **share} for some in MEMORY for way in some for share in shares)
        savings = [way for way in ways if tuned.may_change(*way)]
    for saving in savings:
        with suppress(TooLarge):
            return tuned.place_options({**options, **saving})
    return None


def _staleness_options(tuned: TunedGraph, *, wide: bool) -> list[Overrides]:
    """Staleness and look-ahead. `wide`: in admission order, so that a staleness of 0 is possible."""
    if not has_option(tuned.cfg, "staleness") or tuned.base_graph.admission is None:
        return [{}]
    own = value_of(tuned.cfg, "staleness")
    most = own if tuned.most_staleness is None else tuned.most_staleness
    free = tuned.may_change("staleness")
    bounds = sorted({bound for bound in (*STALENESS, most) if bound <= most}) if free else [own]
    found: list[Overrides] = [{"staleness": bound} for bound in bounds]
    if not tuned.may_change("look_ahead"):
        return found
    if wide or tuned.base_graph.admission.look_ahead > 1:
        ordered: list[Overrides] = [{"staleness": bound, "look_ahead": 1} for bound in bounds]
        return ordered if wide else [*found, *ordered]
    groups = derive_numbers(tuned.base_graph).groups_per_batch
    if groups and value_of(tuned.cfg, "on_limit") == "wait":
        found += [{"staleness": bound, "look_ahead": groups + 1} for bound in bounds if bound >= 2]
    return found
