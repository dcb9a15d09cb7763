"""A pipeline of two stages with tickets and contention, event by event: what the cost model has to predict."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

EPSILON = 1e-9


@dataclass
class Job:
    """What one replica still has to do for one batch."""

    stage: str
    batch: int
    left_s: float


@dataclass
class Pipeline:
    """`replicas` generators that divide each batch, and one trainer.

    Batch k may be generated once version k - ahead is out, which is `publish_s` after the end of that update. In turns,
    one stage works at a time.
    """

    generate_s: Callable[[], float]
    train_s: Callable[[], float]
    ahead: int
    replicas: int = 1
    publish_s: float = 0.0
    slow: dict[str, float] = field(default_factory=dict)
    """Stage -> time beside the other one, as a multiple of that alone."""
    time_shared: bool = False

    def step_s(self, num_batches: int) -> float:
        """Mean time of a step in the steady state."""
        ends = list(self.ends(num_batches))
        skip = num_batches // 10 + 1
        return (ends[-1] - ends[skip]) / (num_batches - 1 - skip)

    def ends(self, num_batches: int) -> Iterator[float]:
        """The end of every update."""
        now, queues = 0.0, [self._parts(range(num_batches)) for _ in range(self.replicas)]
        waiting: list[Job | None] = [next(queue) for queue in queues]
        done, trained, published = [0] * num_batches, 0, [0.0]
        training: Job | None = None
        while trained < num_batches:
            if training is None and done[trained] == self.replicas:
                training = Job("train", trained, self.train_s())
            ready = [self._may_begin(job, published, now) for job in waiting]
            working = [job for job, begins in zip(waiting, ready, strict=True) if begins and job is not None]
            if self.time_shared and training is not None:
                working = []
            working += [training] if training is not None else []
            rate = {job.stage: 1 / self._slow(job.stage, working) for job in working}
            next_s = min((job.left_s / rate[job.stage] for job in working), default=float("inf"))
            next_s = min([next_s, *(at - now for at in published[-2 - self.ahead :] if at > now + EPSILON)])
            now += next_s
            for job in working:
                job.left_s -= next_s * rate[job.stage]
            for index, job in enumerate(waiting):
                if job is not None and job.left_s <= EPSILON:
                    done[job.batch] += 1
                    waiting[index] = next(queues[index], None)
            if training is not None and training.left_s <= EPSILON:
                training, trained = None, trained + 1
                published.append(now + self.publish_s)
                yield now

    def _parts(self, batches: range) -> Iterator[Job]:
        for batch in batches:
            yield Job("generate", batch, self.generate_s() / self.replicas)

    def _may_begin(self, job: Job | None, published: list[float], now: float) -> bool:
        if job is None:
            return False
        needed = max(0, job.batch - self.ahead)
        return needed < len(published) and published[needed] <= now + EPSILON

    def _slow(self, stage: str, working: list[Job]) -> float:
        return self.slow.get(stage, 1.0) if len({job.stage for job in working}) > 1 else 1.0


def normal(mean: float, spread: float, seed: int) -> Callable[[], float]:
    """Normal times, at least a tenth of the mean."""
    draw = random.Random(seed)
    return lambda: max(mean / 10, draw.gauss(mean, spread))
