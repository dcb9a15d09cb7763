"""Faults in flowrl.wire."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="begun_batch_forgotten",
        fault="a resumed batcher forgets how much of its batch it has sent",
        function="Window.load_state",
        before='self._begun = int(state.get("begun", 0))',
        after="self._begun = 0",
        test="tests/nodes/test_nodes_batch_pieces.py::test_a_snapshot_between_pieces_has_those_sent_and_a_resumed_run_goes_on_with_the_rest",
    ),
    Mutant(
        name="keys_of_any_type",
        fault="keys that are equal and of other types are one in a table",
        function="Encoder.make_column",
        before="if all((*value,) == keys and {*map(type, value)} <= {str} for value in values):",
        after="if all((*value,) == keys for value in values):",
        test="tests/wire/test_channel_table.py::test_keys_keep_their_types",
    ),
    Mutant(
        name="piece_of_the_next_batch",
        fault="a piece may have a group of the next batch",
        function="Window._choose_tickets",
        before="if len(chosen) == self.missing or (waits and not (early and self._num_older(ticket) < self.missing)):",
        after="if len(chosen) == self.missing or (waits and not (early and self._num_older(ticket) <= self.missing)):",
        test="tests/nodes/test_nodes_batch_pieces.py::test_groups_that_will_be_in_the_batch_do_not_wait_for_older_ones",
    ),
    Mutant(
        name="table_without_padding",
        fault="a table brings no more bytes than its columns",
        function="Encoder._carry_table",
        before="if missing > 0:  # as a third part of the pair",
        after="if missing > 1 << 62:  # as a third part of the pair",
        test="tests/wire/test_channel_table.py::test_what_a_table_saves_in_bytes_does_not_make_it_too_costly",
    ),
    Mutant(
        name="untrained_counted_twice",
        fault="a group that is left out stays among the untrained",
        function="Tickets._settle_ticket",
        before="self._num_untrained -= 1",
        after="self._num_untrained -= version is not None",
        test="tests/wire/test_tickets.py::test_the_number_of_untrained_groups_is_counted_right",
    ),
    Mutant(
        name="derived_place_left_out",
        fault="a sample that was not derived leaves no tombstone",
        function="DerivedSamples.finish_derived",
        before="self._leave_out(parent, label, ordinal)",
        after="pass",
        test="tests/wire/test_derived_samples.py::test_the_place_of_what_was_not_derived_is_taken_by_a_tombstone",
    ),
    Mutant(
        name="derived_numbers_collide",
        fault="two members of a group may have one number",
        function="DerivedNumbers.member_of",
        before="parent.member * sum(self.derives.values())",
        after="parent.member * max(self.derives.values())",
        test="tests/wire/test_derived_samples.py::test_numbers_differ_for_all_members_also_of_what_is_derived_from_derived_samples",
    ),
    Mutant(
        name="derived_after_send",
        fault="samples are derived from one that was sent on",
        function="DerivedSamples._require_parent",
        before="elif item.sent_on and not item.derived:",
        after="elif item.sent_on and item.derived:",
        test="tests/wire/test_derived_samples.py::test_a_mistake_is_refused_when_it_is_made",
    ),
    Mutant(
        name="derived_sent_twice",
        fault="what a derived sample has sent before a checkpoint is sent again after it",
        function="OpenItems.note_child",
        before="item.derived_from.children.append(child_id)",
        after="pass",
        test="tests/wire/test_derived_samples.py::test_a_resumed_invocation_gets_its_samples_again_and_sends_only_what_was_not_sent",
    ),
    Mutant(
        name="groups_without_derived",
        fault="a group is complete without its derived samples",
        function="Inbound.group_items",
        before="self._add_member(item, size * self._members)",
        after="self._add_member(item, size)",
        test="tests/random_graphs/test_random_graphs.py::test_graphs_in_which_samples_are_derived_hold_what_is_promised",
    ),
)
