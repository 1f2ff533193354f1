"""Each difference that docs/how-to/port-from-determined.md lists names a test here, and there is no test of another."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_promises import CHECKOUT, names_in

pytestmark = pytest.mark.integration

TESTS = {
    "`startup-hook.sh`": "tests/launch/test_startup_hook.py::test_ranks_see_what_the_hook_exports",
    "`on_training_workload_end`": "tests/conformance/test_callbacks.py::test_hooks_are_called_as_often",
    "Tensors of several elements in `evaluate_batch`": "tests/pytorch/loop/test_validation.py::"
    "test_tensors_beside_the_metrics_reach_the_callbacks_and_are_reported_as_null",
    "Validation loaders that are iterators": "tests/pytorch/data/test_external_loader.py::"
    "test_a_validation_takes_as_many_batches_of_an_iterator_as_its_length_says",
    "`get_tensorboard_writer`, `set_profiler` without a run": "tests/core/test_tensorboard.py::"
    "test_without_a_run_only_the_trial_writes_to_a_temporary_folder",
    "Variables `DET_...`": "tests/launch/test_determined_variables.py::"
    "test_a_new_trial_has_numbers_values_and_the_place_of_the_node",
    "`bind_mounts` with two different paths": "tests/plan/test_pool.py::"
    "test_a_mount_with_two_paths_is_accepted_without_a_container_and_noted",
    "`${...}` in an experiment file": "tests/config/test_interpolation.py::test_both_commands_read_the_same",
    "Checkpoints": "tests/pytorch/state/test_load.py::test_a_checkpoint_of_determined_loads",
    "State of callbacks": "tests/pytorch/test_exactness.py::"
    "test_what_cannot_be_saved_is_refused_before_the_first_batch",
    "Resume": "tests/pytorch/test_elastic.py::test_a_window_that_one_gang_began_another_ends",
    "Preemption": "tests/pytorch/loop/test_loop.py::test_a_stop_at_any_tick_changes_no_bit",
    "Time limit of a job": "tests/e2e/test_time_limit.py::"
    "test_a_job_saves_before_its_time_limit_and_the_run_goes_on_bit_for_bit",
    "Order of shuffled records": "tests/pytorch/data/test_order.py::test_it_is_the_same_with_every_version",
    "`profiling`": "tests/pytorch/profiling/test_measurements.py::"
    "test_the_timings_of_an_epoch_add_up_to_its_wall_time_and_each_slow_part_is_found",
    "Errors of the context": "tests/pytorch/trial/test_pytorch_context.py::"
    "test_a_global_batch_below_the_slots_is_refused",
    "Images": "tests/launch/test_container.py::test_the_entrypoint_sees_what_was_set_for_it_and_nothing_of_the_host",
    "Horovod": "tests/compat/test_ported_trial.py::test_every_entrypoint_of_a_ported_trial_leads_to_the_same_weights",
    "`torch_batch_process`": "tests/pytorch/test_inference.py::"
    "test_each_record_is_processed_once_through_stops_kills_damage_and_other_numbers_of_ranks",
    "apex": "tests/pytorch/strategies/test_amp.py::test_apex_is_off_or_an_error_that_names_what_to_use",
    "Trial IDs": "tests/compat/test_experimental_client.py::test_a_trial_needs_the_number_of_its_experiment",
    "`source_trial_id`": "tests/pytorch/state/test_weights.py::test_the_weights_are_the_others_and_the_rest_is_its_own",
    "`DeepSpeedTrial`": "tests/pytorch/deepspeed/test_strategy.py::"
    "test_each_micro_batch_is_a_call_with_the_number_of_its_batch",
    "`det` command line": "tests/cli/test_install_det.py::test_det_is_hpc_det_under_its_name",
    "weights of experiments, projects, users, model registry, web interface": "tests/cli/job/test_update.py::"
    "test_what_cannot_be_asked_for_is_refused_with_a_reason",
    "`det.keras`, `LightningAdapter`, `dsat`, the model registry's functions of the client": (
        "tests/compat/test_names.py::test_what_hpc_det_does_not_have_is_named"
    ),
    "`fit(max_length=...)` and `searcher.max_length` (`max_time`) differ": "tests/pytorch/loop/test_script.py::"
    "test_a_halving_search_and_a_script_that_says_a_length_train_to_the_smaller_one",
    "Additional checkpoints": "tests/pytorch/loop/test_last_validation.py::"
    "test_an_error_in_the_last_validation_costs_no_batch",
    "`STEP_EVERY_OPTIMIZER_STEP` with a `frequency`": "tests/pytorch/trial/test_lr_scheduler.py::"
    "test_only_batches_with_an_optimizer_step_step_schedulers",
    "Schedules of `set_profiler`": "tests/core/test_tensorboard.py::test_a_schedule_counts_batches_and_gives_one_trace",
    "Random generators": "tests/pytorch/loop/test_loop.py::test_a_gang_stops_at_any_tick_without_a_changed_bit",
    "Keys without a meaning on Slurm and PBS": "tests/config/test_determined_keys.py::"
    "test_a_key_without_effect_is_accepted_with_a_note",
    "Keys and searchers of older versions": "tests/config/test_determined_keys.py::"
    "test_a_key_that_only_determined_has_comes_with_a_remedy",
    "Lists in templates": "tests/conformance/test_merges.py::test_a_template_and_a_configuration_are_merged",
    "`entrypoint: model_def:MyTrial`": "tests/compat/test_ported_trial.py::"
    "test_every_entrypoint_of_a_ported_trial_leads_to_the_same_weights",
    "Trial classes without a required method": "tests/config/test_trial_code.py::"
    "test_a_trial_that_cannot_train_is_told",
    "An entrypoint's module that the login node cannot find": "tests/config/test_trial_code.py::"
    "test_a_module_that_this_host_cannot_find_is_noted_with_what_there_is",
    "Names of `determined` that hpc_det lacks": "tests/config/test_determined_uses.py::"
    "test_an_import_that_certainly_fails_is_a_problem_with_its_line",
    "Links to folders in the context directory": "tests/submit/test_snapshot.py::"
    "test_a_link_to_a_folder_is_refused_unless_it_is_ignored",
    "More slots than a node has": "tests/plan/test_placement.py::"
    "test_part_of_a_node_is_an_error_that_names_what_would_fit",
    "`resources.priority`": "tests/plan/test_priority.py::test_a_priority_has_a_number_of_each_scheduler",
    "`max_restarts`": "tests/test_requeue.py::test_what_follows_a_history",
    "`sbatch_args` and `pbsbatch_args`": "tests/config/test_managed_flags.py::"
    "test_a_managed_flag_is_refused_in_every_form",
    "Grids": "tests/search/test_sample.py::test_a_grid_goes_through_its_points_in_natural_order_the_last_key_fastest",
    "Nested hyperparameters": "tests/search/test_sample.py::test_keys_are_drawn_in_sorted_order_in_nested_maps_too",
    "ASHA": "tests/search/test_asha.py::test_a_paused_trial_is_promoted_when_its_rung_fills",
    "NaN as a trial's metric": "tests/search/test_asha.py::test_nan_is_worse_than_infinity",
    "Custom search methods": "tests/search/test_custom.py::"
    "test_successive_halving_by_rounds_trains_half_of_the_trials_on",
}
"""A test of each row, by the row's topic."""


def topics() -> list[str]:
    page = (CHECKOUT / "docs" / "how-to" / "port-from-determined.md").read_text()
    tables = re.findall(r"\| Topic \| Here \|\n\| --- \| --- \|\n((?:\|.*\n)+)", page)
    return [row.split(" | ")[0].removeprefix("| ") for table in tables for row in table.splitlines()]


def test_each_difference_has_a_test_that_exists() -> None:
    assert sorted(topics()) == sorted(TESTS)
    named = [test.partition("::") for test in TESTS.values()]
    names = {path: names_in(CHECKOUT / path) for path, _, _ in named}
    assert [f"{path}::{test}" for path, _, test in named if test not in names[path]] == []
