"""What each file of tests is about, as markers: ``pytest -m checkpoints``, ``pytest -m "faults and accelerate"``.

``-m`` on the command line takes the place of ``make test``'s own, ``-m "not long"``: add ``and not long`` for its cases
alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

CAPABILITIES: dict[str, tuple[str, ...]] = {
    "gradients": (
        "doors/test_accelerate_gradients.py",
        "doors/test_fabric.py",
        "doors/test_lightning_clipping.py",
        "doors/test_lightning_hooks.py",
        "doors/test_lightning_manual.py",
        "doors/test_loss_tokens.py",
        "fuzzing/*",
        "ranks/test_backwards.py",
        "ranks/test_contiguous_buffers.py",
        "ranks/test_checks.py",
        "ranks/test_every_pair_of_switches.py",
        "ranks/test_grad_accumulators.py",
        "ranks/test_gradients.py",
        "ranks/test_instances.py",
        "ranks/test_loss_tokens*.py",
        "ranks/test_order*.py",
        "ranks/test_parity.py",
        "ranks/test_pipelining.py",
        "ranks/test_pooled*.py",
        "ranks/test_reduced_grad.py",
        "ranks/test_unfreezing.py",
        "ranks/test_wire_dtypes.py",
        "unit/test_agreement.py",
        "unit/test_clip_grads.py",
        "unit/test_layout.py",
        "unit/test_wire.py",
        "unit/test_wire_format.py",
        "tools/test_wire_benchmarks.py",
    ),
    "optimizers": (
        "*/test_users_step.py",
        "doors/test_accelerate_optimizers.py",
        "doors/test_fabric_setup.py",
        "examples/test_lightning_muon.py",
        "fuzzing/*",
        "ranks/test_every_pair_of_switches.py",
        "ranks/test_instances.py",
        "ranks/test_modes.py",
        "ranks/test_optimizer.py",
        "ranks/test_options_set_later.py",
        "ranks/test_parity.py",
        "ranks/test_relayout.py",
        "ranks/test_state_at_construction.py",
        "ranks/test_step_*.py",
        "ranks/test_strangers.py",
        "ranks/test_whole_params*.py",
        "ranks/test_wire_dtypes.py",
        "tools/test_optimizers_page.py",
        "unit/test_elementwise.py",
        "unit/test_known_findings.py",
        "unit/test_known_params.py",
        "unit/test_trial_tensors.py",
        "unit/test_method_trial.py",
        "unit/test_per_parameter.py",
    ),
    "modules": (
        "*/test_copies.py",
        "doors/test_accelerate_models.py",
        "doors/test_accelerate_torch_attributes.py",
        "doors/test_fabric_copies.py",
        "doors/test_fabric_setup.py",
        "doors/test_lightning_modules.py",
        "ranks/test_module_watch.py",
        "ranks/test_other_engines.py",
        "ranks/test_unfreezing.py",
    ),
    "precision": (
        "doors/test_fabric_precision.py",
        "doors/test_lightning_precision.py",
        "ranks/test_fp32_sums.py",
        "ranks/test_precision.py",
        "ranks/test_state_at_construction.py",
        "unit/test_tensor_parts.py",
    ),
    "compile": (
        "ranks/test_captured_modules.py",
        "ranks/test_compiled.py",
        "ranks/test_graph_splits.py",
    ),
    "overlap": (
        "doors/test_communication_monitor.py",
        "doors/test_exposed_communication.py",
        "doors/test_listeners.py",
        "ranks/test_budgets.py",
        "ranks/test_buffers_under_gathers.py",
        "ranks/test_graph_splits.py",
        "ranks/test_lazy_collectives.py",
        "ranks/test_order*.py",
        "ranks/test_param_gather.py",
        "ranks/test_profiler_ranges.py",
        "tools/test_profile.py",
        "tools/test_timeline*.py",
        "tools/test_tuning.py",
        "unit/test_bucket_order.py",
    ),
    "collectives": (
        "doors/test_collectives_underneath.py",
        "ranks/test_collectives.py",
        "ranks/test_fp32_sums.py",
        "ranks/test_host_exchange.py",
        "ranks/test_host_staged.py",
        "ranks/test_hosts.py",
        "ranks/test_lazy_collectives.py",
        "ranks/test_lent_tensors.py",
        "ranks/test_part_exchange.py",
        "ranks/test_uneven_collectives.py",
        "ranks/test_waiting_for_a_meeting.py",
        "unit/test_sent_bytes.py",
        "unit/test_tensor_parts.py",
    ),
    "memory": (
        "checkpoints/test_checkpoint_memory.py",
        "doors/test_checkpoint_files.py",
        "doors/test_lightning_teardown.py",
        "ranks/test_budgets.py",
        "ranks/test_memory.py",
        "ranks/test_pooled.py",
        "unit/test_host_copies.py",
    ),
    "checkpoints": (
        "*/test_interchange.py",
        "checkpoints/*",
        "doors/test_accelerate_alone.py",
        "doors/test_accelerate_checkpoints.py",
        "doors/test_checkpoint_*.py",
        "doors/test_crash_safety.py",
        "doors/test_fabric_checkpoints.py",
        "doors/test_lightning_checkpoints.py",
        "doors/test_loading_directories.py",
        "doors/test_saving_from_hooks.py",
        "doors/test_sharded_directories.py",
        "doors/test_slurm_requeue.py",
        "examples/test_lightning_resume.py",
        "fuzzing/*",
        "ranks/test_whole_params_checkpoints.py",
        "tools/test_conversion.py",
        "tools/test_folders.py",
        "tools/test_inspection.py",
        "unit/test_hand_over.py",
        "unit/test_host_copies.py",
    ),
    "faults": (
        "checkpoints/test_owners_that_differ.py",
        "checkpoints/test_roll_call.py",
        "doors/test_accelerate_refusals.py",
        "doors/test_crash_safety.py",
        "doors/test_deadlocks.py",
        "doors/test_lightning_data_errors.py",
        "doors/test_lightning_errors.py",
        "doors/test_lightning_failures.py",
        "doors/test_lightning_interrupts.py",
        "doors/test_lightning_missing_ranks.py",
        "doors/test_nan_check.py",
        "doors/test_signals_in_evaluation.py",
        "doors/test_slurm_requeue.py",
        "doors/test_timeouts.py",
        "ranks/test_checks.py",
        "ranks/test_errors.py",
        "ranks/test_lent_tensors.py",
        "ranks/test_waiting_for_a_meeting.py",
    ),
    "options": (
        "doors/test_accelerate_options.py",
        "doors/test_cli.py",
        "doors/test_coming_from.py",
        "doors/test_fabric_options.py",
        "doors/test_lightning_options.py",
        "tools/test_launch_config.py",
        "unit/test_config.py",
    ),
    "launchers": (
        "doors/test_autoload.py",
        "doors/test_launch*.py",
        "doors/test_one_rank.py",
        "doors/test_slurm_requeue.py",
        "examples/test_notebook.py",
        "tools/test_launch_config.py",
    ),
    "lightning": (
        "doors/test_cli.py",
        "doors/test_communication_monitor.py",
        "doors/test_lightning_*.py",
        "doors/test_matrix.py",
        "doors/test_one_rank.py",
        "doors/test_pytorch_lightning.py",
        "doors/test_saving_from_hooks.py",
        "examples/test_lightning_*.py",
        "examples/test_train_gpt.py",
        "lightning_suite/*",
    ),
    "fabric": ("*/test_fabric*.py", "doors/test_matrix.py"),
    "accelerate": ("*/test_accelerate*.py", "*/test_transformers_trainer.py", "doors/test_launch*.py"),
    "tools": ("tools/*",),
    "docs": ("doors/test_coming_from.py", "docs/*", "examples/*", "tools/test_optimizers_page.py"),
    "structure": (
        "breakages/*",
        "doors/test_lightning_names.py",
        "doors/test_versions.py",
        "unit/test_architecture.py",
        "unit/test_capabilities.py",
        "unit/test_durations.py",
        "unit/test_private_names.py",
        "unit/test_versions_page.py",
    ),
}
"""Files below ``tests``, by what they are about; each is in one row at least. pyproject.toml says what rows mean."""


def capabilities(path: Path) -> list[str]:
    """The rows that a file of tests is in."""
    name = path.relative_to(TESTS).as_posix()
    return [row for row, patterns in CAPABILITIES.items() if any(fnmatch(name, pattern) for pattern in patterns)]


def mark_capabilities(items: Iterable[pytest.Item]) -> None:
    """Marks each test with what its file is about."""
    found: dict[Path, list[str]] = {}
    for item in items:
        for row in found.setdefault(item.path, capabilities(item.path)):
            item.add_marker(row)
