"""Faults in flowrl.testing."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

OF_A_TRIAL = "tests/testing/test_testing_trial.py::"

MUTANTS = (
    Mutant(
        name="block_not_noted",
        fault="a trial does not note code that blocks the event loop",
        function="GraphTrial._watch_loop",
        before="self.blocked_s[culprit] += now_s - began_s",
        after="self.blocked_s[culprit] += 0.0",
        test=OF_A_TRIAL + "test_code_that_blocks_is_named_even_if_it_never_ends",
    ),
    Mutant(
        name="breakpoint_served",
        fault="a trial enters the debugger at breakpoint()",
        function="GraphTrial.run",
        before="with refuse_breakpoints():",
        after="with suppress():",
        test=OF_A_TRIAL + "test_a_mistake_is_named_at_its_node_and_line[breaks]",
    ),
    Mutant(
        name="messages_not_encoded",
        fault="a trial does not encode the messages of users' nodes",
        function="SentSamples.check_message",
        before="if _is_users(type(node)):",
        after="if False:",
        test=OF_A_TRIAL + "test_a_mistake_is_named_at_its_node_and_line[cannot be encoded]",
    ),
    Mutant(
        name="still_graph_not_noted",
        fault="a trial waits for its end where nothing moves",
        function="GraphTrial.watch",
        before="if now_s - moved_s > self.hang_s:",
        after="if False:",
        test=OF_A_TRIAL + "test_a_node_that_hangs_is_named",
    ),
    Mutant(
        name="tokens_not_compared",
        fault="a trial does not compare the tokens of a sample at each send",
        function="TriedReplica.trace_sent",
        before="if not envelope.lost:",
        after="if False:",
        test=OF_A_TRIAL + "test_a_mistake_is_named_at_its_node_and_line[relabels]",
    ),
    Mutant(
        name="trial_without_a_resume",
        fault="a trial does not resume",
        function="GraphTrial.run",
        before="if not problem and trains and len(steps) > 1:",
        after="if False:",
        test=OF_A_TRIAL + "test_a_mistake_is_named_at_its_node_and_line[state]",
    ),
)
