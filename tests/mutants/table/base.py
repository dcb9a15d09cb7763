"""Faults in what every part uses."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="hub_moves_on",
        fault="a process ignores the commit that the run has settled on",
        function="pinned_commit",
        before="return name.commit or _commits.get(name.key)",
        after="return name.commit",
        test="tests/hub/test_hub_models.py::test_another_process_of_the_run_uses_the_commit_that_the_first_found",
    ),
    Mutant(
        name="pairs_torn",
        fault="a pair may be cut between ranks",
        function="join_pairs",
        before="if pair and runs and pairs[runs[-1][-1]] == pair:",
        after="if not pair and runs and pairs[runs[-1][-1]] == pair:",
        test="tests/training/test_training_packing.py::test_split_keeps_pairs_together_in_their_order",
    ),
    Mutant(
        name="tree_budget_of_one_neighbour",
        fault="unique tokens are counted against the sequence before alone",
        function="Prefixes.add",
        before="beside = self._sequences[max(0, at - 1) : at + 1]  # the longest common prefix is shared with a neighbour",
        after="beside = self._sequences[max(0, at - 1) : at]  # the longest common prefix is shared with a neighbour",
        test="tests/training/test_forest.py::test_every_prefix_stands_once",
    ),
    Mutant(
        name="tree_ends_too_late",
        fault="a branch that is not the first of its stem sees one place of its sibling",
        function="make_forest",
        before="ends[before[shared:]] = size",
        after="ends[before[shared:]] = size + (shared > 0)",
        test="tests/training/test_forest.py::test_a_place_sees_its_ancestors_and_nothing_else",
    ),
    Mutant(
        name="tree_place_twice",
        fault="the place where sequences part stands once for each of them",
        function="make_forest",
        before="shared = num_shared(last, sequence)",
        after="shared = max(0, num_shared(last, sequence) - 1)",
        test="tests/training/test_forest.py::test_every_prefix_stands_once",
    ),
)
