"""The training loop of `column_nodes` as a graph file."""

from tests.runtime.ledger.column_nodes import Added as Added
from tests.runtime.ledger.column_nodes import graph as graph
