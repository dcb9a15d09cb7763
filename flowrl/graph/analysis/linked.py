"""Which of the free GPUs a process, or the ranks of a gang, get: those with the fastest links between them. Pure.

Sets of GPUs are compared first by their worst link (NVLink, one NUMA node, several nodes), then by the sum of their
links, then by their links to the free GPUs that are left: these should be few and slow. Ties are decided by plain
order. So on a machine where all links are equal, the choice is the same as on a machine whose links are not known.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import combinations
from math import comb

from flowrl.graph.gpu_links import NVLINK, GpuLinks

MOST_SETS = 2000
"""If there are at most this many sets, all are compared; if more, only those that grow from each GPU by its best
links."""


def neighbours(free: Sequence[int], count: int) -> list[int]:
    """`count` of the free devices: a block of consecutive numbers that starts at a multiple of its size if there is
    one, else any block, else the first devices. Devices with neighbouring numbers usually have the fastest link and the
    same memory."""
    there = set(free)
    blocks = [range(first, first + count) for first in free if there.issuperset(range(first, first + count))]
    aligned = [block for block in blocks if count and block[0] % count == 0]
    return list(next(iter([*aligned, *blocks]), free[:count]))


def linked(
    links: GpuLinks, free: Sequence[int], count: int, *, near: Sequence[int] = (), further: int = 0
) -> list[int]:
    """Choose `count` of the free GPUs, for a process or for the next rank of a gang.

    `near`: the GPUs of the gang's ranks so far, in their order. `further`: how many more GPUs its later ranks need.
    """
    size = min(len(free), count + further)
    if not count or size < count:
        return list(free[:count])
    sets = _sets(links, free, size, near)
    best = max(sets, key=lambda chosen: _worth(links, chosen, near, free))
    return _chain(links, best, near)[:count]


def _worth(links: GpuLinks, chosen: Sequence[int], near: Sequence[int], free: Sequence[int]) -> tuple[int, int, int]:
    inside = [links.closeness(one, other) for one, other in combinations((*near, *chosen), 2)]
    left = [gpu for gpu in free if gpu not in chosen]
    broken = sum(links.closeness(one, other) for one in chosen for other in left)
    return _kind(min(inside, default=0)), sum(inside), -broken


def _kind(closeness: int) -> int:
    """2 NVLink, 1 on one NUMA node, 0 between nodes."""
    return 2 if closeness > NVLINK else min(closeness, 1)


def _sets(links: GpuLinks, free: Sequence[int], size: int, near: Sequence[int]) -> Iterator[Sequence[int]]:
    yield neighbours(free, size)
    known = sorted({*free, *near})
    if len({links.closeness(one, other) for one, other in combinations(known, 2)}) == 1:
        return
    yield from combinations(free, size) if comb(len(free), size) <= MOST_SETS else _grown(links, free, size, near)


def _grown(links: GpuLinks, free: Sequence[int], size: int, near: Sequence[int]) -> Iterable[Sequence[int]]:
    for first in free:
        chosen = [first]
        while len(chosen) < size:
            rest = [gpu for gpu in free if gpu not in chosen]
            chosen.append(max(rest, key=lambda gpu: sum(links.closeness(gpu, one) for one in (*near, *chosen))))
        yield sorted(chosen)


def _chain(links: GpuLinks, chosen: Sequence[int], near: Sequence[int]) -> list[int]:
    """`chosen` in an order in which each GPU has the best link to the previous one: consecutive ranks exchange most."""
    left = sorted(chosen)
    chain = [*near[-1:]] or [left.pop(0)]
    begins = len(near[-1:])
    while left:
        chain.append(max(left, key=lambda gpu: links.closeness(chain[-1], gpu)))
        left.remove(chain[-1])
    return chain[begins:]
