"""Faults in flowrl.models."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="assistant_end_untrained",
        fault="the end of an assistant turn is not trained",
        function="Chat._find_end",
        before="end = len(stripped) if len(stripped) > start and stripped.endswith(special) else len(until)",
        after="end = len(stripped) - 1 if len(stripped) > start and stripped.endswith(special) else len(until)",
        test="tests/models/test_models.py::test_every_assistant_turn_and_its_end_are_trained",
    ),
    Mutant(
        name="eos_counted_twice",
        fault="the end token is appended where it stands already",
        function="Chat.close_response",
        before="return np.append(ids[: ids.size - there], closing).astype(np.int32)",
        after="return np.append(token_ids, closing).astype(np.int32)",
        test="tests/nodes/test_nodes_reward_model.py::test_the_end_token_is_appended_exactly_once_and_by_id",
    ),
    Mutant(
        name="label_not_chosen",
        fault="the score is always the first label",
        function="label_weights",
        before="weights[index] += weight",
        after="weights[0 * index] += weight",
        test="tests/models/test_reward_labels.py::test_the_score_is_what_the_option_makes_of_the_labels",
    ),
    Mutant(
        name="own_default_replaced",
        fault="a default in somebody's own graph file is replaced by that of the table",
        function="_is_of_flowrl",
        before="return file.is_relative_to(OURS) or file.parent == SHIPPED",
        after="return file.is_relative_to(OURS) or file.parent == SHIPPED or True",
        test="tests/recipes/test_size_defaults.py::test_a_default_of_ones_own_graph_is_kept",
    ),
    Mutant(
        name="tool_answer_trained",
        fault="what a tool answers is trained as if the policy had written it",
        function="Chat.find_turns",
        before='marked = [n for n in range(first, len(told)) if told[n]["role"] == "assistant" and told[n].get(WEIGHT) != 0]',
        after='marked = [n for n in range(first, len(told)) if told[n]["role"] in ("assistant", "tool") and told[n].get(WEIGHT) != 0]',
        test="tests/tasks/test_tool_data.py::test_completions_may_call_tools_and_go_on[pairs]",
    ),
)
