"""Private names of other packages that megastrategy uses: each is in the list, and in the installed versions."""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

PACKAGE = Path(__file__).parents[2] / "megastrategy"

LIVES_IN = {
    "torch._C": (
        "_autograd _current_graph_task_id _disabled_torch_function_impl _set_throw_on_mutable_data_ptr "
        "_current_autograd_node"
    ),
    "torch._C._autograd": "_profiler_enabled",
    "torch._C._VariableFunctions": (
        "_amp_foreach_non_finite_check_and_unscale_ _foreach_clamp_max_ _foreach_clamp_min_ _foreach_copy_ "
        "_foreach_mul_ _foreach_norm _foreach_zero_"
    ),
    "torch.ops.aten": "_foreach_zero_ _to_copy",
    "torch.distributed.tensor.DTensor": "_local_tensor",
    "torch.Tensor": "_make_wrapper_subclass _post_accumulate_grad_hooks _version",
    "torch": "_C",
    "torch._compile": "_disable_dynamo",
    "torch._C._distributed_c10d": "_DEFAULT_FIRST_BUCKET_BYTES",
    "torch.autograd.variable": "_execution_engine",
    "torch.utils._pytree": "tree_flatten tree_leaves tree_map tree_map_only tree_unflatten",
    "torch._subclasses.fake_tensor": "FakeTensorMode",
    "torch.testing._internal.distributed.fake_pg": "FakeStore",
    "torch.UntypedStorage": "_cdata",
    "torch.ops.aten.add.Tensor": "_schema",
    "torch.utils._python_dispatch": "TorchDispatchMode",
    "torch.utils.data.dataloader": "_BaseDataLoaderIter",
    "torch.nn.parallel.distributed": "_active_ddp_module _ddp_params_and_buffers_to_ignore",
    "torch.distributed.pipelining.stage": "_stage_meta",
    "torch.distributed.ProcessGroup": (
        "_allgather_base _device_types _get_backend _get_sequence_number_for_group _reduce_scatter_base "
        "_register_backend _set_default_backend _set_group_desc _set_group_name"
    ),
    "torch.distributed.ProcessGroupGloo": "_Options _set_sequence_number_for_group",
    "torch.distributed.ProcessGroupGloo.Options": "_timeout",
    "torch.distributed.ProcessGroupGloo._Options": "_devices",
    "torch.distributed.distributed_c10d": (
        "_get_default_group _get_default_store _new_process_group_helper _register_process_group _world"
    ),
    "torch.nn.modules.module": (
        "_buffers _load_from_state_dict _load_state_dict_post_hooks _load_state_dict_pre_hooks _modules "
        "_non_persistent_buffers_set _parameters"
    ),
    "torch.optim.optimizer": (
        "_global_optimizer_post_hooks _global_optimizer_pre_hooks _optimizer_load_state_dict_post_hooks "
        "_optimizer_load_state_dict_pre_hooks _optimizer_state_dict_post_hooks _optimizer_state_dict_pre_hooks "
        "_optimizer_step_post_hooks _optimizer_step_pre_hooks"
    ),
    "torch.optim.adam": "_step_supports_amp_scaling",
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "torch.distributed.checkpoint._fsspec_filesystem": "FileSystem FsspecReader FsspecWriter",
    "torch.distributed.checkpoint._nested_dict": "unflatten_state_dict",
    "torch.distributed.checkpoint.metadata": "_MEM_FORMAT_ENCODING",
    "torch.serialization": "_get_layout",
    "torch._dynamo.eval_frame": "_orig_mod",
    "lightning.pytorch.trainer.trainer": "_checkpoint_connector _run_stage _signal_connector",
    "lightning.pytorch.trainer.connectors.checkpoint_connector": "_get_loops_state_dict _loaded_checkpoint",
    "lightning.pytorch.loops.fit_loop": "_combined_loader",
    "lightning.pytorch.trainer.connectors.signal_connector": "_sigterm_notifier_fn _slurm_sigusr_handler_fn",
    "lightning.pytorch.loops.training_epoch_loop": "_batches_that_stepped _broadcast_sigterm_tensor",
    "lightning.pytorch.loops.evaluation_loop": "_evaluation_step",
    "lightning.pytorch.loops.prediction_loop": "_predict_step",
    "lightning.pytorch.core.module": "_device_mesh _trainer",
    "lightning.pytorch.strategies.strategy": "_lightning_module",
    "lightning.pytorch.strategies.ddp": "_start_method",
    "lightning.pytorch.callbacks.model_checkpoint": "_last_checkpoint_saved _last_global_step_saved _link_checkpoint",
    "lightning.pytorch.callbacks.finetuning": "_restarting",
    "lightning.pytorch.callbacks.stochastic_weight_avg": "_average_model",
    "lightning.pytorch.core.optimizer": "_MockOptimizer _optimizer",
    "pytorch_lightning.core.optimizer": "_MockOptimizer",
    "lightning.pytorch.plugins.io.wrapper": "_base_checkpoint_io_configured",
    "lightning.fabric.utilities.imports": "_IS_INTERACTIVE",
    "lightning_fabric.utilities.imports": "_IS_INTERACTIVE",
    "accelerate.accelerator": (
        "_dataloaders _is_accelerate_prepared _load_model_state_pre_hook _save_model_state_pre_hook"
    ),
    "transformers.trainer": ("_load_from_checkpoint _load_optimizer_and_scheduler _save _save_optimizer_and_scheduler"),
    "torchft.manager": "_commit_failures _executor _manager _quorum_id",
    "torchft.checkpointing.http_transport": "_server _streaming_load",
}
"""The object or module that has the names, or in whose source they are."""

NOT_YET = {"_bucket_config": "2.12", "_stage_meta": "2.12", "_require_manual_backward_finalization": "2.15"}
"""Names that torch has since a later version: a prepared model answers for them on older ones, too."""

NOT_THEIRS = {
    *("_exit", "_current_frames", "_getframe"),
    *("_extra_state", "_saved_self"),
    *("_notebook", "_norm_total"),
}
"""Python's own; a key of torch's state_dicts and a saved tensor of a graph, both documented; names of ours."""


def used_names() -> set[str]:
    """Returns each private name that is used and that is not defined by megastrategy.

    A name that both define counts as another package's on an object other than ``self``, if the file does not define
    it or the table has it.
    """
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in sorted(PACKAGE.rglob("*.py"))]
    defined = [set(_defined(tree)) for tree in trees]
    own = set[str]().union(*defined)
    known = {name for names in LIVES_IN.values() for name in names.split()}
    found = set[str]()
    for tree, in_file in zip(trees, defined, strict=True):
        of_others = known | own - in_file
        for name, owner in _used(tree):
            is_ours = name in own and (owner in ("", "self", "cls", "super()") or name not in of_others)
            if not is_ours and name not in NOT_THEIRS:
                found.add(name)
    return found


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and _is_self(node.value):
            yield node.attr


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _used(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Attributes, strings that may name one, and imports: of private names, or from private modules. With each the
    object whose attribute it is, as the source has it; empty for the others."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level == 0 and "._" in (node.module or ""):
            yield from ((alias.name, "") for alias in node.names)
            continue
        names, owner = list[str](), ""
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            names, owner = [node.attr], ast.unparse(node.value)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [alias.name for alias in node.names]
        yield from ((name, owner) for name in names if re.fullmatch(r"_[A-Za-z]\w*", name))


def lives(name: str, where: str) -> bool:
    """Whether the installed version of a package has the name there."""
    parts = where.split(".")
    for count in range(len(parts), 0, -1):
        try:
            module = importlib.import_module(".".join(parts[:count]))
        except ImportError:
            continue
        there: Any = module
        for part in parts[count:]:
            there = getattr(there, part)
        if hasattr(there, name):
            return True
        return count == len(parts) and re.search(rf"\b{name}\b", inspect.getsource(module)) is not None
    raise ImportError(where)


KNOWN = [(where, name) for where, names in LIVES_IN.items() for name in names.split()]


@pytest.mark.parametrize(("where", "name"), KNOWN)
def test_it_is_there(where: str, name: str) -> None:
    if where.startswith("torchft"):
        pytest.importorskip("torchft", reason="torchft is not installed: pip install 'megastrategy[replicas]'")
    torch = tuple(map(int, importlib.metadata.version("torch").split("+")[0].split(".")[:2]))
    is_there = name not in NOT_YET or torch >= tuple(map(int, NOT_YET[name].split(".")))
    assert lives(name, where) == is_there


def test_none_is_used_that_is_not_in_the_table() -> None:
    assert used_names() == {name for _, name in KNOWN}
