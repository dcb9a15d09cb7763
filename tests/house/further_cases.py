"""What `make test` leaves to `make matrices`: mostly further cases, moments and kinds of what it shows with others.

By file and test, what `make test` keeps: every n-th case, the cases of these names (`*` stands for anything), or with
`()` none. The rest has the mark `matrix`. Each real part (Ray, vLLM, ZeRO-3, agents, environments, rewards, machines)
is run by `make test` in one way, and by `make matrices` in all. What a test with `()` shows, `make test` does not: it
takes seconds, and no promise to users rests on it alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest

NONE: tuple[str, ...] = ()

KEPT: dict[str, dict[str, int | tuple[str, ...]]] = {
    # Slow: the real stack, and ranks
    "agent_faults": {"test_a_cell": ("replica kill generating",)},
    "agents_stack": {"test_a_resumed_run_goes_on_and_its_tokens_are_proven_too": NONE},
    "agents_vllm_parser": {"test_a_run_tries_the_generators_parsers_in_a_process_of_their_own": NONE},
    "channel_replay": {"test_a_stage_that_is_killed_loses_and_repeats_nothing": 2},
    "clusters": {
        "test_a_generator_on_another_machine_may_die": NONE,
        "test_messages_and_weights_go_between_machines": ("on three machines",),
        "test_doctor_tries_the_links_of_all_machines": NONE,
    },
    "environments_adapters": {"test_a_users_mistake_gets_one_message_before_anything_starts": 4},
    "environments_packages": {
        "test_the_same_seed_and_actions_give_the_same_episode_alone_and_among_32": 4,
        "test_a_users_mistake_gets_one_message_before_anything_starts": 4,
        "test_an_agent_that_gives_tensors_is_played_and_its_images_are_refused": NONE,
        "test_an_action_of_several_fields_is_a_json_object": NONE,
        "test_what_the_server_does_wrong_has_its_cause": ("die-*",),
    },
    "environments_verifiers": {"test_the_same_row_is_the_same_episode_alone_and_among_32_others": NONE},
    "fp8_stack": {"test_adapters_are_served_on_a_base_in_fp8": NONE},
    "generator_processes": {
        "test_the_death_of_vllms_process_ends_a_call_that_it_would_have_answered": NONE,
        "test_vllms_process_ends_with_a_generator_that_is_killed": ("while it loads",),
    },
    "generator_stack": {
        "test_updates_during_live_traffic_untied": NONE,
        "test_vllm_stops_at_the_tokenizers_end_token_and_at_each_that_the_generation_config_names": NONE,
    },
    "ladder_stack": {
        "test_two_steps_of_an_online_graph": ("distill",),
        "test_two_steps_of_an_offline_graph": ("dpo",),
        "test_pairs_of_a_policys_own_answers_are_written": NONE,
    },
    "lora_stack": {
        "test_vllms_logprobs_are_the_trainers": ("adapter",),
        "test_samples_carry_the_version_of_their_adapter": ("adapter",),
        "test_running_requests_keep_their_adapter": ("adapter",),
        "test_the_export_is_the_policy_with_the_adapter_merged_in": ("adapter",),
    },
    "nodes_agent_program": {
        "test_a_client_that_leaves_has_its_reply_cancelled_and_its_turn_booked_as_abandoned": NONE,
        "test_a_reward_may_be_posted_again_and_returned_too": NONE,
        "test_a_run_of_failures_ends_with_the_commonest_cause": NONE,
        "test_a_command_gets_the_task_and_gives_a_reward": ("prints-*", "helped-*"),
        "test_a_context_that_is_full_cuts_the_episode_off": ("mask",),
        "test_a_process_plays_as_many_episodes_as_it_may": ("3-*",),
        "test_an_agent_that_cannot_be_run_is_refused_before_anything_starts": 3,
        "test_an_agent_that_takes_too_long_is_killed_with_all_that_it_started": ("True",),
        "test_every_reply_is_in_the_loss_of_one_sequence_after_its_own_context": ("branches-*",),
        "test_the_limit_of_turns_is_told_to_the_agent_and_cuts_the_episode_off": ("True",),
        "test_what_an_agent_does_wrong_is_a_failure_with_its_cause": ("raises-*", "dies-*"),
    },
    "oracle": {"test_a_batch_in_pieces_equals_the_plain_loop": 2},
    "ppo_stack": {"test_a_run_goes_on_from_its_newest_checkpoint": NONE},
    "random_graphs": {"test_a_fault_is_found": 6, "test_random_graphs_hold_what_is_promised": 3},
    "ray_jobs": {"test_a_job_whose_graph_has_a_mistake_fails_with_its_sentence": NONE},
    "runtime_agents": {
        "test_every_reply_of_an_agent_with_branches_is_proven": ("branches-*",),
        "test_half_done_agents_get_the_replies_that_they_had_in_a_resumed_run": ("takes_its_time",),
        "test_half_done_agents_that_ask_something_else_begin_anew_and_use_up_no_retry": NONE,
        "test_half_done_agents_that_make_fewer_calls_begin_anew_and_use_up_no_retry": NONE,
    },
    "requirements": {"test_both_sets_resolve": NONE},
    "runtime_devices": {"test_hosts_of_a_real_ray_see_the_gpus_of_their_plan": NONE},
    "runtime_failures": {
        "test_a_node_that_forgets_an_item_or_cannot_be_set_up_ends_the_run_once": NONE,
        "test_nothing_survives_the_driver_or_ray_and_the_run_can_be_resumed": ("driver",),
        "test_the_death_of_a_host_is_named_and_nothing_is_left": ("trainer-1",),
    },
    "runtime_ray": {
        "test_a_run_ends_in_order_before_ray_gives_up_the_head_of_its_cluster": NONE,
        "test_a_run_whose_ray_dies_says_so_and_can_be_resumed": ("gcs_server",),
    },
    "scoring_sharded": {"test_a_sharded_reference_equals_the_whole": ("5 passes on 2 ranks-trees",)},
    "training_reshard": {"test_one_rank_below_stage_3_loads_what_it_saved": 2},
    # Fast, but in files that take their time
    "accumulation": {"test_batches_come_whole_for_a_reason_that_is_told_and_that_refuses_on": 4},
    "agents_conversation": {
        "test_appended_history": 3,
        "test_the_templates_history": 3,
        "test_what_re_tokenizing_gives_where_the_policy_samples_it": 3,
    },
    "agents_endpoint_docs": {"test_the_agent_of_the_page_is_served": NONE},
    "agents_endpoint_sessions": {"test_a_session_that_is_idle_ends_and_one_that_waits_does_not": NONE},
    "agents_endpoint_tree": {"test_each_reply_is_in_one_loss_with_every_template": 4},
    "agents_examination": {"test_preflight_says_what_a_template_does": 4},
    "around_training": {"test_a_task_that_makes_its_rows_has_no_responses_to_score": 3},
    "audit_kills": {"test_what_goes_on_after_a_kill_audits_well": 2},
    "benchmark_data_shapes": {"test_no_cell_is_a_traceback_or_several_lines": 3},
    "benchmark_kernels": {
        "test_the_share_of_the_rate_is_the_time_of_the_products_alone_over_that_of_an_update": NONE,
        "test_a_batched_product_counts_each_of_its_matrices": NONE,
    },
    "channel_cost": {
        "test_smaller_ones_cost_no_more_than_they_may": 5,
        "test_what_costs_more_than_its_bytes_allow_is_refused_before_it_costs_that": 4,
        "test_what_is_large_and_made_of_larger_things_passes": 3,
        "test_whatever_a_sender_takes_its_receiver_takes_whatever_it_came_with": 3,
    },
    "channel_table": {"test_what_a_table_saves_in_bytes_does_not_make_it_too_costly": 4},
    "code_answers": {
        "test_a_program_that_takes_too_long_is_logged_as_such": NONE,
        "test_all_tests_have_to_pass_and_their_share_is_known": ("limits",),
        "test_programs_that_do_something_else_fail_and_leave_nothing": 6,
        "test_tests_that_call_their_check_are_run_as_they_are": 4,
        "test_the_process_of_a_reward_is_not_killed_while_its_programs_may_run": NONE,
        "test_the_time_is_for_each_test_and_all_of_them_have_a_bound": NONE,
    },
    "device_leases": {"test_one_node_is_on_the_device_from_its_set_up_to_the_last_checkpoint": 4},
    "docs_commands": {"test_a_command_to_copy_is_parsed": 2},
    "environments_mcp": {
        "test_a_call_that_takes_too_long_is_a_text_and_is_not_repeated": ("http",),
        "test_a_server_that_dies_during_a_call_voids_the_attempt_and_the_call_is_not_repeated": ("stdio",),
        "test_a_server_that_was_started_anew_does_not_know_the_session": NONE,
        "test_a_servers_tools_are_those_of_the_episode_with_their_schemas": ("stdio",),
        "test_a_session_ends_with_its_episode": ("http",),
        "test_every_episode_has_a_session_of_its_own": ("stdio-2",),
        "test_of_several_episodes_only_those_of_the_dead_server_fail": NONE,
        "test_what_the_policy_gets_wrong_is_a_text": ("http",),
    },
    "environments_processes": {
        "test_a_fault_at_reset_leaves_nothing_and_frees_its_place": 3,
        "test_a_step_that_hangs_is_killed": ("hang",),
        "test_a_zygote_that_takes_no_messages_is_replaced": NONE,
        "test_processes_that_double_end_with_their_episode": NONE,
    },
    "environments_python_tool": {
        "test_a_gigabyte_of_output_is_its_begin_and_its_end": ("namespaces",),
        "test_a_loop_without_end_is_stopped_and_the_next_call_has_a_new_interpreter": ("namespaces",),
        "test_a_pause_that_catches_everything_is_stopped": ("limits",),
        "test_an_interpreter_that_ends_itself_is_a_text": 5,
        "test_processes_are_few_and_end": 4,
        "test_when_the_owner_is_killed_the_interpreter_ends": 2,
    },
    "environments_tools": {"test_an_alarm_that_is_caught_comes_again": NONE},
    "failing_by_length": {"test_failing_without_regard_to_length_is_silent": 4},
    "fit_shared": {"test_only_sizes_that_the_checks_let_through": 4},
    "flex_mask": {
        "test_attention_by_a_compiled_kernel_equals_that_by_a_dense_mask": NONE,
        "test_attention_by_the_mask_equals_that_by_a_dense_one": 4,
    },
    "gpu_check": {
        "test_a_command_that_is_ended_leaves_no_stage_running": 3,
        "test_a_rank_that_fails_ends_the_others": NONE,
        "test_a_stage_about_passes_holds_on_a_cpu": ("trees",),
        "test_a_stage_about_ranks_that_share_a_model_holds_on_a_cpu": NONE,
    },
    "guard": {
        "test_a_guard_whose_looks_are_slow_still_ends_what_is_left": NONE,
        "test_a_process_that_hides_its_environment_ends_although_its_parent_ended_first": ("True",),
        "test_the_guard_speaks_for_a_driver_that_cannot_while_ray_starts": ("False",),
    },
    "long_reports": {
        "test_a_batch_of_many_samples_is_one_step": NONE,
        "test_an_evaluation_of_a_whole_benchmark_is_booked_at_once": NONE,
    },
    "memory_formulas": {
        "test_a_layer_of_a_real_rank_keeps_exactly_what_is_predicted": NONE,
        "test_a_real_rank_has_the_terms_that_are_predicted": NONE,
        "test_the_most_that_a_pass_has_at_once_is_predicted_and_not_by_much_too_high": 3,
    },
    "metrics": {"test_who_is_not_logged_in_is_told_before_the_run": ("WANDB_MODE--True",)},
    "mistakes": {"test_rewards_that_cannot_work": 2},
    "nodes_agent_outside": {"test_a_worker_that_takes_too_long_is_told_and_its_reward_counts": 2},
    "nodes_pairs": {"test_a_second_run_goes_on_behind_the_last_whole_pair": ("1",)},
    "odd_rows": {
        "test_odd_rows_are_trained_as_rollouts_see_them_or_named": (
            *("qwen3-sft", "llama3-dpo", "gemma3-kto", "qwen2_5-reward_model", "phi3-grpo", "cohere-process_*"),
            *("glm4moe-sft", "smolvlm-sft", "qwen3_5_think-dpo", "deepseekv3-kto"),
        )
    },
    "reward_processes": {"test_a_reward_with_processes_of_its_own": 9},
    "ranks": {"test_ranks_that_take_too_long_say_where_they_stand": NONE},
    "run_file": {"test_every_option_of_every_graph_is_read_as_it_was_written": 4},
    "runtime_alive": {"test_a_node_with_something_of_its_own_pending_is_never_dead": 2},
    "runtime_half_done": {
        "test_a_pause_waits_for_no_environment": NONE,
        "test_a_second_resume_goes_on_from_the_middle_of_a_replay": NONE,
    },
    "runtime_losses": {
        "test_a_process_that_dies_costs_requests_and_no_episode": NONE,
        "test_at_each_moment_of_a_checkpoint": 4,
    },
    "runtime_seats": {
        "test_an_opponent_is_part_of_the_environment": 3,
        "test_half_done_games_go_on_after_a_resume": 2,
    },
    "runtime_snapshot": {"test_a_cut_at_any_moment_loses_nothing": 4},
    "shared_options": {
        "test_a_kl_in_the_loss_adds_the_reference": 3,
        "test_episodes_look_ahead_by_the_groups_of_a_step": 4,
        "test_how_rewards_are_asked_is_an_option_wherever_a_node_asks_them": 3,
        "test_what_a_graph_cannot_do_is_one_sentence": 3,
    },
    "shipped_graphs": {"test_every_graph_says_that_its_policy_may_be_on_the_hub": 4},
    "tasks_formats": {"test_a_huge_row_is_a_row": 5},
    "tasks_on_disk": {
        "test_mixtures_are_the_same": 4,
        "test_trained_and_held_out_preferences_are_the_same": 2,
    },
    "tasks_rewards": {
        "test_a_verifier_has_imported_what_it_needs_before_a_call_is_timed": 2,
        "test_the_verifier_of_a_mixture_has_imported_what_its_sources_need": 3,
    },
    "tiny_agent": {"test_a_reply_is_parsed_into_the_message_that_it_was": NONE},
    "tools_docs": {"test_the_notebook_of_the_page": NONE},
    "training_sequence": {"test_windows_and_soft_caps_are_seen_from_slices": 4},
    "tree_cascade": {
        "test_a_cascade_in_bfloat16_differs_by_rounding": 3,
        "test_a_cascade_is_exact_for_deep_trees_and_any_heads": 3,
    },
    "tickets": {"test_the_bound_holds_in_a_thousand_more_settings": NONE},
    "tune": {
        "test_mistakes_are_told_before_anything_runs": 3,
        "test_predictions_hold_on_the_engine": 2,
        "test_without_time_what_was_not_measured_is_left_out": NONE,
    },
    "tune_placements": {
        "test_every_graph_that_trains_has_placements_and_runs": 5,
        "test_every_placement_passes_the_checks": 4,
    },
    "turn_ends": {"test_with_the_option_every_template_trains_an_end_once": 8},
    "warm": {
        "test_a_killed_server_is_replaced": NONE,
        "test_a_server_is_no_descendant_of_who_asked_first": NONE,
        "test_processes_of_several_rays_and_numbers_of_threads_share_a_server": NONE,
        "test_variables_that_an_import_may_read_have_a_server_of_their_own": NONE,
    },
}


FURTHER: dict[str, frozenset[str]] = {
    "oracle_episodes": frozenset(
        {
            *("constant", "sequence", "sequence_stale-tree", "turn_constant-tree", "turn_gspo", "turn_reinforce"),
            *("turn_sequence", "turn_token"),
        }
    ),
    "residence": frozenset({"stage 1, bfloat16", "stage 2, average", "stage 3"}),
    "training_gang": frozenset(
        {
            *("balanced_checkpointed", "bfloat16_stage_1", "bfloat16_stage_2", "constant", "epochs", "experts"),
            *("gradient_checkpointing", "offloaded_optimizer", "one_micro_batch", "onednn_stage_2", "onednn_tree"),
            *("packed", "pieces_bfloat16_stage_1", "pieces_bfloat16_stage_3", "pieces_offloaded"),
            *("pieces_stage_0", "pieces_stage_1", "pieces_stage_2", "sequence_checkpointed"),
            *("pieces_stale", "pieces_tree", "sequence_mean", "sequence_of_one", "sequence_packed", "sequence_rows"),
            *("stage_2", "tensor_bfloat16_stage_1", "tensor_checkpointed", "tensor_stage_2", "tree", "tree_bfloat16"),
            *("tree_checkpointed", "untied"),
        }
    ),
    "training_options": frozenset(
        {
            *("ema_stage_0", "ema_stage_2", "lora", "lora_checkpointing", "lora_offloaded", "lora_reference_in_pieces"),
            *("lora_stage_0", "lora_stage_2", "lora_untied", "muon_lora", "muon_stage_2"),
        }
    ),
    "training_reshard": frozenset({"adapter"}),
    "training_sequence": frozenset(
        {"adapter", "kto", "ring_of_four", "rings_of_two", "scores", "sft", "teacher", "two_and_two"}
        | {"two_copies_stage_0", "two_copies_stage_1", "values", "windows"}
    ),
}
"""Cases that a gang of ranks trains for several tests of a file, by name: `make matrices` has them with their tests."""


def further(items: Iterable[pytest.Item]) -> Iterator[pytest.Item]:
    """The tests among these, of whole files, that `make test` leaves to `make matrices`."""
    numbers: Counter[tuple[Path, str]] = Counter()
    for item in items:
        file = item.path.stem.removeprefix("test_")
        function = item.name.partition("[")[0]
        kept = KEPT.get(file, {}).get(function, 1)
        if isinstance(kept, int):
            stays = numbers[item.path, function] % kept == 0
            numbers[item.path, function] += 1
        else:
            stays = any(fnmatchcase(_case(item.name), pattern) for pattern in kept)
        if not stays or not FURTHER.get(file, frozenset()).isdisjoint(_names(item)):
            yield item


def unknown(items: Iterable[pytest.Item]) -> Iterator[str]:
    """What the tables name of the files of these that is no case of a test."""
    cases: dict[str, list[str]] = {}
    names: dict[str, set[str]] = {}
    for item in items:
        file = item.path.stem.removeprefix("test_")
        cases.setdefault(file, []).append(item.name)
        names.setdefault(file, set()).update(_names(item))
    for file, found in cases.items():
        for function, kept in KEPT.get(file, {}).items():
            for pattern in () if isinstance(kept, int) else kept:
                if not any(name.startswith(f"{function}[") and fnmatchcase(_case(name), pattern) for name in found):
                    yield f"{file}: {function}[{pattern}]"
        yield from (f"{file}: {name}" for name in sorted(FURTHER.get(file, frozenset()) - names[file]))


def _case(name: str) -> str:
    return name.partition("[")[2].removesuffix("]")


def _names(item: pytest.Item) -> set[str]:
    """Names among the values of its parameters."""
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    return {name for name in (getattr(value, "name", value) for value in values) if isinstance(name, str)}


def chosen(request: pytest.FixtureRequest, cases: Iterable[str]) -> list[str]:
    """Those of a file's cases that are not deselected: tests with them are run, or they are never left out."""
    asked = {name for item in request.session.items if item.path == request.path for name in _names(item)}
    file = request.path.stem.removeprefix("test_")
    return [name for name in cases if name in asked or name not in FURTHER[file]]
