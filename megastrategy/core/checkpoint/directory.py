"""A sharded optimizer in directories: what this rank writes of the whole model's, and what it reads of it.

What stands in a directory, checkpoint.sharded_optimizer says. Here ranks that share a model are seen to. Every tensor
has the name that it has in the whole model. A parameter of which several stages have a copy is written by the first
alone, and read by all. The groups are written whole, the same on every rank, and of those a stage looks at what is its
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from ..errors import CheckpointError
from ..optimizer import ShardedStep
from ..shards import REMAINDER, FlatShard
from .directory_reader import OpenDirectory
from .full_state import load_own_state
from .pipeline_stages import is_staged, main_params_of_stage, own_options, whole_groups
from .sharded_optimizer import TensorParts, check_same_groups, read_optimizer, sharded_state_dict


def own_share(impl: ShardedStep) -> dict[str, Any]:
    """Returns what this rank writes; see :meth:`DistributedOptimizer.sharded_state_dict
    <megastrategy.DistributedOptimizer.sharded_state_dict>`. Collective over a pipeline's stages."""
    engine, local_parts, own_names = impl.engine, impl.engine.local_parts, impl.names_by_id()
    # Whoever writes them reads the device, which may wait for a rank that is gone.
    engine.collectives.wait_for_device(engine.device, "all-gather")
    impl.split_state()
    is_first = all(ranks.is_rank_zero for ranks in (engine.collectives, *local_parts.model_groups))
    of_others = set() if is_first else {id(param) for param in impl.strangers.params}
    of_others |= {key for key, name in own_names.items() if local_parts.name_in_model(name) != name}

    def stepped(param: Parameter) -> Tensor | None:
        if id(param) in of_others:
            return None  # rank 0's are saved, and the first stage's
        return impl.stepped_tensor(param) if impl.has_shards else param

    parts = _tensor_parts(impl)
    where = impl.followed_by_id, impl.shards, impl.layout, impl.element_names, parts
    state = sharded_state_dict(impl.inner, own_names, stepped, *where)
    if is_staged(impl):
        state["param_groups"] = whole_groups(impl, state["param_groups"])
    to_come = {
        name: value
        for name, value in impl.main_params_to_come.items()
        if local_parts.name_in_model(plain := name.removesuffix(REMAINDER)) == plain
    }
    main_params = {**state.pop("main_params", {}), **parts.placed(to_come)}
    return state | ({"main_params": main_params} if main_params else {})


def read_share(impl: ShardedStep, directory: OpenDirectory, key: str) -> Callable[[], None]:
    """Reads this rank's part, and returns what loads it; see :meth:`DistributedOptimizer.read_sharded
    <megastrategy.DistributedOptimizer.read_sharded>`. Not collective.

    Raises:
        CheckpointError: if it cannot be read, or is of another model.
    """
    local_parts = impl.engine.local_parts
    names = {id_: local_parts.name_in_model(name) for id_, name in impl.names_by_id().items()}
    followed = {
        local_parts.name_in_model(impl.layout.params[index].name): index for index in impl.followed_by_id.values()
    }
    own = impl.shards, impl.layout, impl.element_names, impl.whole_params, followed, _tensor_parts(impl).cut
    saved = read_optimizer(directory, key, names.values(), *own, local_parts.elsewhere)
    if "param_groups" not in saved:
        raise CheckpointError(f"{directory} has no optimizer under the key {key!r}")
    own_groups = [[names[id(param)] for param in group["params"]] for group in impl.inner.param_groups]
    check_same_groups(directory.path, saved["param_groups"], own_groups, local_parts.elsewhere)
    main_params = saved.get("main_params", {})

    def values_of(param: Parameter) -> dict[str, Any]:
        values = saved.get("state", {}).get(names[id(param)], {})
        return {name: value.local if isinstance(value, FlatShard) else value for name, value in values.items()}

    def apply() -> None:
        impl.split_state(replace=True)
        groups_of_shards = impl.groups_of_shards if impl.has_shards else contextlib.nullcontext
        index_by_id = impl.followed_by_id if impl.has_shards else {}
        groups = saved["param_groups"]
        if is_staged(impl):
            groups = [own_options(*pair) for pair in zip(groups, impl.inner.param_groups, strict=True)]
        load_own_state(impl.inner, groups, values_of, index_by_id, impl.shards, groups_of_shards, impl.stays_here)
        impl.keep_loaded()
        impl.load_main_params(main_params_of_stage(impl, main_params) if is_staged(impl) else main_params)

    return apply


def _tensor_parts(impl: ShardedStep) -> TensorParts:
    """The parameters of which each tensor rank has a part, by their names in the whole model."""
    local_parts = impl.engine.local_parts
    named = impl.engine.named_params().items()
    return TensorParts(local_parts.cut_params({local_parts.name_in_model(name): param for name, param in named}))
