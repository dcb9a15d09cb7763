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
from flowrl.commands.tune.tuned_graph import TooLarge, TunedGraph
from flowrl.commands.tune.tuned_placement import TunedPlacement
from flowrl.graph.analysis.numbers import derive_numbers
from flowrl.graph.analysis.place import device_pools, unit_need
from flowrl.graph.graph import Graph
from flowrl.graph.option_types import changed_config, has_option, value_of

SHARE = 0.85
"""gpu_memory_utilization of a time-shared engine, if the graph does not fit with vLLM's own value."""
STALENESS = (0, 1, 2, 4, 8)
HALF = 0.5
COUNTS = (1, 2, 4, 8, 16, 32, 64, 128)
MOST_PARTS = 8
"""Maximum number of tensor parallel parts of a generator, and of replicas of a role on cores."""


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


def device_ways(tuned: TunedGraph) -> Iterator[Overrides]:
    """Ways to divide the devices, the user's first. If the trainer's role has no size options, only time-sharing is
    varied."""
    yield {}
    if tuned.trainer in tuned.roles:
        yield from _gpu_ways(tuned) if tuned.cluster.num_gpus else _core_ways(tuned)
    elif has_option(tuned.cfg, "time_share") and tuned.generator:
        yield {"time_share": _all_time_shared(tuned)}


def _core_ways(tuned: TunedGraph) -> Iterator[Overrides]:
    trainer, generator = tuned.roles[tuned.trainer], tuned.roles.get(tuned.generator)
    cores = tuned.cluster.num_cores
    if generator is None:
        yield from _divide_cores(tuned, trainer, cores - _kept_cores(tuned))
        return
    free = cores - _kept_cores(tuned)
    for of_generator in (HALF, *(count for count in COUNTS if count < free)):
        for one in _divide_cores(tuned, generator, of_generator):
            yield from ({**one, **other} for other in _divide_cores(tuned, trainer, free - of_generator))
    if has_option(tuned.cfg, "time_share"):
        shared: Overrides = {"time_share": _all_time_shared(tuned)}
        for one in _divide_cores(tuned, generator, cores):
            yield from (
                {**_all_cores(tuned, cores, other), **one, **other, **shared}
                for other in _divide_cores(tuned, trainer, cores)
            )


def _divide_cores(tuned: TunedGraph, role: str, cores: float) -> Iterator[Overrides]:
    """`cores` divided among 1, 2, 4 … replicas; models that are time-shared with the trainer get as many cores as all
    of its ranks together."""
    trains = tuned.roles.get(tuned.trainer) == role
    for replicas in (count for count in COUNTS if count <= MOST_PARTS):
        each = cores / replicas
        if cores > 0 and (replicas == 1 or (each >= 1 and each == int(each))):
            beside = {f"{other}.cpus": float(cores) for other in _beside_trainer(tuned)} if trains else {}
            yield {f"{role}.cpus": each, f"{role}.replicas": replicas, **beside}


def _all_cores(tuned: TunedGraph, cores: int, of_trainer: Overrides) -> Overrides:
    """All cores for every role, for the case that all are time-shared; further trainers have as many ranks as the main
    one."""
    ranks = of_trainer[f"{tuned.roles[tuned.trainer]}.replicas"]
    gangs = {role for name, role in tuned.roles.items() if tuned.base_graph.nodes[name].gang}
    return {f"{role}.cpus": cores / ranks if role in gangs else float(cores) for role in tuned.roles.values()}


def _beside_trainer(tuned: TunedGraph) -> list[str]:
    """The roles that are time-shared with the trainer, except gangs and the generator."""
    for _, units in device_pools(tuned.base_graph, tuned.cluster):
        names = [placed.name for unit in units for placed in unit.nodes]
        if tuned.trainer in names:
            others = [name for name in names if name not in (tuned.trainer, tuned.generator)]
            return [
                tuned.roles[name] for name in others if name in tuned.roles and not tuned.base_graph.nodes[name].gang
            ]
    return []


def _kept_cores(tuned: TunedGraph) -> float:
    return _kept_devices(tuned, tuned.whole_graph)[0]


def _kept_devices(tuned: TunedGraph, graph: Graph) -> tuple[float, float]:
    """(cores, GPUs) of the nodes that neither generate nor train, and are not time-shared with one that does."""
    kept = [
        unit_need(units)
        for _, units in device_pools(graph, tuned.cluster)
        if not {placed.name for unit in units for placed in unit.nodes} & {tuned.trainer, tuned.generator}
    ]
    return sum(cores for cores, _ in kept), sum(gpus for _, gpus in kept)


def _all_time_shared(tuned: TunedGraph) -> tuple[str, ...]:
    """Every node with cores or GPUs of its own."""
    return tuple(name for name, placed in tuned.base_graph.placed.items() if placed.heavy)


def _gpu_ways(tuned: TunedGraph) -> Iterator[Overrides]:
    trainer, generator = tuned.roles[tuned.trainer], tuned.roles.get(tuned.generator)
    gpus = tuned.cluster.num_gpus
    if generator is None:
        yield from (_rank_options(trainer, count) for count in COUNTS if count <= gpus)
        return
    kept = _kept_gpus(tuned)
    for one in _engine_sizes(tuned, generator, gpus):
        used = one[f"{generator}.gpus"] * one[f"{generator}.replicas"]
        left = int(gpus - kept - used)
        yield from (
            {**one, **_rank_options(trainer, count)} for count in dict.fromkeys((left, _power_below(left))) if count
        )
        if used == gpus and has_option(tuned.cfg, "time_share"):
            yield {**one, **_rank_options(trainer, gpus), "time_share": _all_time_shared(tuned)}


def _engine_sizes(tuned: TunedGraph, generator: str, gpus: int) -> Iterator[Overrides]:
    """Numbers of generators, each with some GPUs for its tensor parallel parts."""
    parallel = has_option(tuned.cfg, "engine.tensor_parallel_size")
    for parts, replicas in product((count for count in COUNTS if count <= MOST_PARTS), COUNTS):
        if parts * replicas <= gpus and (parallel or parts == 1):
            sized: Overrides = {f"{generator}.gpus": float(parts), f"{generator}.replicas": replicas}
            yield sized | ({"engine.tensor_parallel_size": parts} if parallel else {})


def _rank_options(trainer: str, count: int) -> Overrides:
    return {f"{trainer}.replicas": count, f"{trainer}.gpus": 1.0}


def _power_below(count: int) -> int:
    """The largest power of two up to `count`, 0 for 0."""
    return 1 << count.bit_length() - 1 if count else 0


def _kept_gpus(tuned: TunedGraph) -> float:
    """GPUs of the other nodes, computed with a GPU for the trainer: roles without a size get a GPU once any role has
    one."""
    probe = {f"{tuned.roles[tuned.trainer]}.gpus": 1.0}
    return _kept_devices(tuned, tuned.file.build(changed_config(tuned.cfg, probe)))[1]
