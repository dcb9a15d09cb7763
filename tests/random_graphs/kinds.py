"""The kinds of nodes by the names that a shape gives them."""

from __future__ import annotations

from flowrl import Node
from tests.random_graphs.groups import Grouping, GroupSink, JoinedGrouping, Joining, Joining3, SampleSink
from tests.random_graphs.nodes import (
    Asking,
    Deriving,
    Generator,
    GroupRouter,
    GroupWork,
    Judge,
    Judged,
    Router,
    Sampler,
    Server,
    Solver,
    Source,
    Unwrap,
    Work,
    Wrap,
    WrappedWork,
)
from tests.random_graphs.trainer import Batcher, FakeTrainer

KINDS: dict[str, type[Node]] = {
    "source": Source,
    "generator": Generator,
    "solver": Solver,
    "sampler": Sampler,
    "judged": Judged,
    "judge": Judge,
    "work": Work,
    "group_work": GroupWork,
    "derive": Deriving,
    "wrap": Wrap,
    "wrapped_work": WrappedWork,
    "unwrap": Unwrap,
    "ask": Asking,
    "server": Server,
    "router": Router,
    "group_router": GroupRouter,
    "join2": Joining,
    "join3": Joining3,
    "group": Grouping,
    "join_groups": JoinedGrouping,
    "batcher": Batcher,
    "trainer": FakeTrainer,
    "sample_sink": SampleSink,
    "group_sink": GroupSink,
}
