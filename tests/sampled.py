"""Sampled: of files that are long and have never failed, a run of all tests takes some cases; which ones, a seed says.

Owns the table of those files. The seed is the commit's, so that all processes of a run agree and each commit takes other cases;
`--sample-seed` repeats a run. `--long` (scripts/test_long.sh) takes every case, and so does a run that names its files.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections import defaultdict
from pathlib import Path

import pytest

SHARES: dict[str, int] = {
    "tests/sim/test_walk.py::test_walk": 128,
    "tests/sim/test_simulator.py": 8,
    "tests/sim/test_crashes.py::test_a_crash_after_every_event_changes_no_answer": 24,
    "tests/sim/planted/test_planted.py::test_a_planted_bug_is_found": 8,
    "tests/sim/planted/test_planted_compiled.py::test_a_bug_in_c_is_found": 6,
    "tests/sim/planted/test_planted_crashes.py": 6,
    "tests/sim/planted/test_planted_stories.py": 16,
    "tests/sim/planted/test_shrink.py": 14,
    "tests/log/test_snapshot.py": 8,
    "tests/state/test_purity.py": 4,
    "tests/cuda/test_planted_kernel_bugs.py": 24,
    "tests/cuda/test_compile_gate.py::test_a_source_compiles_within_its_budget": 18,
    "tests/cuda/test_cuda_attention.py": 24,
    "tests/cuda/test_cuda_exchange.py": 3,
    "tests/cuda/steps/test_cuda_graphs.py": 12,
    "tests/cuda/test_cuda_operations.py": 3,
    "tests/cuda/test_cuda_rows.py": 6,
    "tests/cuda/steps/test_cuda_adapters.py": 6,
    "tests/cuda/steps/test_short_device.py::test_no_stream_is_lost_whichever_request_of_a_step_is_refused": 4,
    "tests/cuda/steps/test_drafted_graphs.py": 12,
    "tests/cuda/test_sanitized.py": 5,
    "tests/cuda/shim/test_shim.py": 3,
    "tests/replay/causes/test_causes.py": 9,
    "tests/kernels/test_batch_index.py": 4,
    "tests/kernels/test_cpu_attention.py": 4,
    "tests/kernels/test_cpu_codes.py::test_a_product_is_that_of_the_definition": 4,
    "tests/kernels/test_cpu_codes.py::test_a_product_in_bfloat16_is_that_of_the_definition": 4,
    "tests/e2e/test_attacks.py": 9,
    "tests/e2e/test_determinism.py": 8,
    "tests/e2e/test_drafted_adapters.py": 12,
    "tests/e2e/test_drafted_tokens.py": 20,
    "tests/e2e/test_llm_adapters.py": 15,
    "tests/e2e/test_parity.py::test_tokens_are_the_oracle_s_under_every_schedule": 15,
    "tests/models/test_family_windows.py": 5,
    "tests/models/test_model_invariance.py::test_logits_are_bitwise_invariant": 12,
    "tests/replay/reading/test_ended.py::test_every_command_says_how_the_log_ends": 12,
    "tests/replay/test_guide.py::test_a_story_prints_what_it_says": 6,
    "tests/replay/test_hostile.py": 9,
    "tests/replay/test_replay_commands.py": 9,
    "tests/replay/answers/test_replay_watch.py::test_no_false_alarm_in_many_steps": 5,
    "tests/replay/futures/test_replay_what_if.py": 9,
    "tests/replay/answers/test_slices.py": 6,
    "tests/replay/answers/test_cache_curve.py::test_a_rerun_with_such_a_cache_has_these_hits": 6,
    "tests/replay/answers/test_cache_curve.py::test_at_its_own_size_it_is_what_happened": 6,
    "tests/replay/answers/test_replay_trace.py::test_any_log_is_drawn_in_runs_as_event_by_event": 5,
    "tests/replay/futures/test_replay_fork.py::test_a_failing_future_of_a_ring_is_written_from_its_snapshot_on": 3,
    "tests/replay/ui/test_ui_browser.py::test_a_running_engine_is_followed_until_it_ends": 3,
    "tests/rollouts/test_scores.py": 9,
    "tests/runtime/transport/test_collectives.py": 6,
    "tests/runtime/transport/test_exchange_killing.py::test_a_rank_killed_at_any_change_of_the_memory": 12,
    "tests/runtime/processes/test_killed_ranks.py": 6,
    "tests/stages/test_stage_processes.py": 8,
    "tests/sampling/test_sampling_fit.py::test_a_million_draws_fit": 2,
    "tests/hosts/test_two_hosts.py::test_streams_outlive_a_lost_host": 6,
    "tests/runtime/rank/test_without_torch.py::test_steps_need_no_torch": 11,
    "tests/replay/rerun/test_replayed_drafts.py::test_it_comes_out_again": 6,
    "tests/cuda/test_verification_rows.py::test_rows_of_one_request_have_the_bits_of_single_rows": 6,
    "tests/test_peers.py::test_a_run_measures_every_row_of_vnext": 5,
    "tests/runtime/gpu/test_device_heads.py": 12,
    "tests/runtime/gpu/test_device_drafts.py": 9,
    "tests/runtime/rank/test_without_torch.py::test_several_ranks_need_no_torch": 6,
    "tests/cuda/steps/test_flex.py": 15,
    "tests/cuda/steps/test_split_groups.py": 5,
    "tests/cuda/test_gpu_check.py::test_a_dry_run_makes_every_call_and_claims_no_time": 8,
    "tests/cuda/test_cuda_exchange.py::test_processes_have_the_bits_of_the_tree": 6,
    "tests/runtime/transport/test_ring_killing.py": 5,
    "tests/runtime/rank/test_not_a_number.py": 3,
    "tests/runtime/rank/test_on_arrays.py": 5,
    "tests/runtime/rank/test_device_loading.py": 3,
    "tests/e2e/test_mtp_layer.py": 12,
    "tests/e2e/test_eagle_head.py": 12,
    "tests/e2e/test_speculation.py": 8,
    "tests/e2e/test_drafted_device.py": 5,
    "tests/e2e/test_kv_cache_dtype.py": 5,
    "tests/e2e/test_draft_model.py": 6,
    "tests/sim/test_faults.py": 8,
    "tests/sim/test_turns_of_clients.py": 4,
    "tests/recovery/test_streams_survive.py": 6,
    "tests/recovery/test_several_engines.py": 5,
    "tests/recovery/test_restart.py": 5,
    "tests/recovery/test_programs_survive.py": 6,
    "tests/recovery/test_apart.py": 6,
    "tests/recovery/test_device_tier.py": 3,
    "tests/recovery/test_packed_weights.py": 9,
    "tests/recovery/test_disk_tier.py": 3,
    "tests/replay/rerun/test_replayed_adapters.py": 8,
    "tests/replay/rerun/test_replayed_weights.py": 5,
    "tests/replay/futures/test_replay_shrink.py": 3,
    "tests/replay/rerun/test_audit.py": 9,
    "tests/replay/rerun/test_exec.py": 6,
    "tests/replay/rerun/test_bisect.py": 5,
    "tests/replay/reading/test_index.py::test_any_step_at_once_is_the_step_by_folding": 5,
    "tests/runtime/record/test_packing.py::test_an_engine_packs_what_it_closed_and_keeps_its_bound": 3,
    "tests/models/loading/test_dummy.py::test_ranks_and_stages_have_the_same_model": 9,
    "tests/models/test_families_transformers.py": 18,
    "tests/models/test_adapters.py": 5,
    "tests/models/layers/test_hybrid_engine.py": 12,
    "tests/models/layers/test_hybrids.py": 6,
    "tests/models/layers/test_hybrid_mtp.py::test_tokens_do_not_depend_on_its_drafts": 6,
    "tests/models/layers/test_hybrid_mtp.py::test_an_engine_drafts_with_it": 5,
    "tests/models/layers/test_hybrid_step.py": 6,
    "tests/models/test_fused_decoder.py::test_one_call_is_the_calls": 6,
    "tests/models/loading/test_stored_formats.py::test_a_checkpoint_answers_as_its_floats_on_one_rank_and_two": 6,
    "tests/models/layers/test_latent_engine.py::test_answers_are_those_of_transformers_with_hits_and_when_a_rank_is_killed": 12,
    "tests/models/families/towers/test_seeing.py": 12,
    "tests/models/families/towers/test_hearing.py::test_answers_are_those_of_transformers": 6,
    "tests/models/families/towers/test_seeing_films.py": 9,
    "tests/models/families/towers/test_images.py::test_answers_are_those_of_transformers": 5,
    "tests/models/families/towers/test_listener.py::test_answers_are_those_of_transformers": 5,
    "tests/models/families/towers/test_steered_images.py::test_a_grammar_holds_behind_images": 6,
    "tests/models/families/towers/test_steered_images.py::test_guidance_leads_away_from_a_text_with_no_image": 5,
    "tests/media/test_real_sounds.py": 4,
    "tests/models/families/towers/test_units.py": 12,
    "tests/recovery/test_encode_apart.py::test_answers_are_those_of_one_engine_and_only_one_encodes": 12,
    "tests/recovery/test_encode_servers.py::test_every_door_has_its_images_encoded_apart": 2,
    "tests/recovery/test_encode_servers.py::test_vectors_go_from_the_server_that_encodes_to_the_others": 2,
    "tests/recovery/test_hybrid_tier.py": 5,
    "tests/recovery/test_hybrid_apart.py": 3,
    "tests/recovery/test_hybrids_survive.py": 5,
    "tests/recovery/test_short_memory.py::test_no_stream_is_lost_and_no_text_differs": 5,
    "tests/rollouts/test_guidance.py": 5,
    "tests/models/test_whole_step.py": 9,
    "tests/cuda/steps/test_cuda_few_bits.py": 24,
    "tests/cuda/steps/test_few_bits_model.py": 3,
    "tests/models/gguf/test_gguf_families.py": 6,
    "tests/models/loading/test_dummy.py::test_every_family_generates_from_its_configuration_alone": 9,
    "tests/models/loading/test_unread.py::test_nothing_is_left_of_what_transformers_writes": 6,
    "tests/models/test_family_weights.py::test_a_model_that_was_saved_without_its_head": 3,
    "tests/models/test_rank_bits.py": 9,
    "tests/models/hosted/test_hosted.py::test_logits_tokens_and_bits": 15,
    "tests/models/hosted/test_hosted.py::test_functions_have_the_same_bits_at_any_place": 6,
    "tests/kernels/test_mxint8.py": 4,
    "tests/kernels/test_cpu_sampling.py": 3,
    "tests/kernels/test_paged_attention.py": 2,
    "tests/runtime/processes/test_launch.py": 3,
    "tests/runtime/record/test_indexing.py": 3,
    "tests/runtime/batch/test_prompts.py": 2,
    "tests/runtime/batch/test_batch_fed.py": 2,
    "tests/runtime/batch/test_batch.py::test_places_of_images_equal_the_rebuilt_ones": 3,
    "tests/runtime/batch/test_batch.py::test_persistent_batch_equals_rebuilt_batch": 3,
    "tests/runtime/engine/test_rank_recovery.py": 12,
    "tests/e2e/test_server_life.py": 3,
    "tests/sched/test_policies.py": 6,
    "tests/sched/test_explain.py": 4,
    "tests/text/dialects/test_hostile_texts.py": 9,
    "tests/text/structured/test_exact.py::test_random_numbers_and_their_neighbours": 2,
    "tests/text/dialects/test_forced_calls.py": 6,
    "tests/text/dialects/test_damaged_texts.py": 6,
    "tests/sim/test_routing.py": 4,
    "tests/sim/test_guided.py::test_a_crash_after_every_event_changes_no_guided_answer": 3,
    "tests/sim/test_snapshots.py": 3,
    "tests/sim/test_crashes.py": 2,
    "tests/rollouts/test_routed_experts.py": 8,
    "tests/rollouts/test_training.py": 9,
    "tests/rollouts/test_served_weights.py": 3,
    "tests/rollouts/test_llm_weights.py": 3,
    "tests/api/test_examples.py": 3,
    "tests/e2e/test_served_adapters.py": 5,
    "tests/runtime/transport/test_shared_group.py": 6,
    "tests/state/test_drafts.py": 6,
    "tests/state/store/test_columns.py::test_the_two_forms_agree_on_every_call": 2,
    "tests/e2e/test_parity.py::test_two_ranks_give_the_same_tokens_and_digests": 3,
    "tests/server/http/test_resuming.py": 3,
    "tests/replay/test_time_holes.py": 6,
    "tests/stages/test_stages.py": 6,
    "tests/sim/test_crashes.py::test_copies_crash_as_stories_do_from_their_beginning": 4,
    "tests/sim/test_guided.py::test_both_halves_hold_what_their_tokens_say": 2,
    "tests/sim/test_dense_shortages.py::test_answers_are_right_where_rows_go_back_again_and_again": 2,
    "tests/replay/futures/test_auto.py::test_what_helps_is_found": 2,
    "tests/replay/futures/test_auto.py::test_a_weight_is_found_and_the_file_of_keys_named": 3,
    "tests/replay/futures/test_intervals.py::test_another_run_is_within_its_interval_nine_times_in_ten": 2,
    "tests/replay/futures/test_intervals.py::test_without_a_part_it_is_not": 2,
    "tests/replay/answers/test_cache_curve.py::test_the_command_has_the_curve": 2,
    "tests/replay/answers/test_replay_trace.py::test_a_busy_log_is_drawn_in_runs_as_event_by_event": 2,
    "tests/replay/causes/test_gate.py": 2,
    "tests/models/families/towers/test_kept_inputs.py::test_what_ranks_find_is_decided_with": 2,
    "tests/models/families/towers/test_hearing.py::test_no_number_depends_on_how_it_is_computed": 4,
    "tests/models/families/towers/test_reader_films.py::test_answers_are_those_of_transformers": 2,
    "tests/models/families/towers/test_square_films.py::test_answers_are_those_of_transformers": 2,
    "tests/models/families/encoders/test_decoder_rerankers.py::test_two_ranks_score_as_one": 2,
    "tests/commands/bench/test_bench_all_reduce.py::test_every_form_is_timed_by_size_and_ranks": 3,
    "tests/commands/test_real_model.py::test_in_floats_its_text_is_that_of_transformers": 3,
    "tests/commands/test_real_model.py::test_drafts_give_the_same_text": 3,
    "tests/test_control_plane.py::test_a_run_measures_every_row_of_vnext_beside_another": 3,
    "tests/run/test_benchmarks.py::test_each_runs_once": 3,
    "tests/media/test_sounds.py::test_mutated_sounds_are_read_or_get_a_sentence": 5,
    "tests/replay/tables/test_report.py::test_a_browser_shows_it_whole": 4,
}
"""File, or file::function, which takes precedence -> N: of each function a run takes one case in N; of a function with fewer cases, it
takes one for some seeds and none for others."""
WHOLE: dict[str, int] = {
    "tests/arm/test_arm.py": 4, "tests/e2e/test_agent.py": 2, "tests/hosts/test_on_ray.py": 3, "tests/media/test_heard_again.py": 2,
    "tests/media/test_sound_lives.py": 2,
}  # fmt: skip
"""File whose fixture costs more than its cases -> of so many seeds one takes it, with all its cases."""
DEAR, TIMES = re.compile(r"\[(.*-)?(two )?(ranks|stages)\]$"), 3
"""Cases that start two ranks, which each import torch: of those of a function here, so many times fewer than of its others."""
ROOT = Path(__file__).resolve().parents[1]


def seed_of(config: pytest.Config) -> str:
    """By what this run samples: what was asked for, else the commit; "" where it takes every case. Asked of the process that
    hands out the tests, whose options all others get."""
    takes_everything = config.args_source is not pytest.Config.ArgsSource.ARGS and not config.getoption("--long")
    return config.getoption("--sample-seed") or (commit() if takes_everything else "")


def commit() -> str:
    """Its name; "none" outside of a repository."""
    command = ("git", "-C", str(ROOT), "rev-parse", "--short=12", "HEAD")
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stdout.strip()
    except OSError:
        said = ""
    return said or "none"


def sample(items: list[pytest.Item], seed: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """(what is run, what is left out), each in its order."""
    groups: dict[str, list[str]] = defaultdict(list)
    for item in items:
        groups[item.nodeid.partition("[")[0] + "[" * bool(DEAR.search(item.nodeid))].append(item.nodeid)
    left_out: set[str] = set()
    for name, cases in groups.items():
        share = SHARES.get(name.rstrip("[")) or SHARES.get(name.partition("::")[0], 1)
        share *= TIMES if share > 1 and name.endswith("[") else 1
        count, rest = divmod(len(cases), share)
        count += draw(seed, name) % share < rest
        left_out |= set(sorted(cases, key=lambda case: draw(seed, turn_of(case)))[count:])
    files = {file for file, share in WHOLE.items() if draw(seed, file) % share}
    left_out |= {item.nodeid for item in items if item.nodeid.partition("::")[0] in files}
    return [item for item in items if item.nodeid not in left_out], [item for item in items if item.nodeid in left_out]


def turn_of(case: str) -> str:
    """Its file and parameters: functions of a file that have the same cases take the same ones, whose fixtures they share."""
    file, _, rest = case.partition("::")
    return f"{file}[{rest.partition('[')[2]}"


def draw(seed: str, name: str) -> int:
    """A number that follows from both."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")
