"""Tests of nodes and graphs without Ray, child processes or sleeps: docs/testing.md shows how.

- `run_node` and `NodeRig` run one node in the real engine, its ports in the hands of the test
- `run_graph` runs a whole graph in this process, with its driver, ledger and audit
- `try_graph` tries a whole graph with stand-ins for models, as `flowrl check --try` does
- `VirtualClock` lets code wait without taking time
- `prompt`, `sample`, `scored` and `lost` make messages, `said` and `script` replies to what a node asks
"""

from flowrl.testing.clock import Stuck, VirtualClock
from flowrl.testing.graph_run import EIGHT_CORES, GraphRun, run_graph
from flowrl.testing.node_rig import Fed, NodeRig, run_node
from flowrl.testing.record import Lost, NodeRecord, Sent
from flowrl.testing.rig_failures import Leaked, RigTimeout
from flowrl.testing.rollouts import lost, prompt, said, sample, scored, script
from flowrl.testing.trial import TrialResult, try_graph

__all__ = [
    "EIGHT_CORES",
    "Fed",
    "GraphRun",
    "Leaked",
    "Lost",
    "NodeRecord",
    "NodeRig",
    "RigTimeout",
    "Sent",
    "Stuck",
    "TrialResult",
    "VirtualClock",
    "lost",
    "prompt",
    "run_graph",
    "run_node",
    "said",
    "sample",
    "scored",
    "script",
    "try_graph",
]
