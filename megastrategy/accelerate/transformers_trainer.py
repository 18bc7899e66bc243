"""Lets ``transformers.Trainer`` save a sharded optimizer, although it asks for the state only on the rank that writes.

No call of all ranks comes just before that, so the methods that save and load are wrapped, in a process that makes an
Accelerator of this package. With any other optimizer they are unchanged. Trainers of other libraries are subclasses.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import torch

from .._checkpoints.files import save_file
from ..core import dtensors_of
from .checkpoint import MAIN_PARAMS_FILE, load_main_params, sharded_inside
from .tensor_parallel import full_state, load_full_states


def wrap_trainer() -> None:
    """Wraps the methods that save and load, unless there is no Trainer, or they are wrapped already.

    Called when an Accelerator is made, which a Trainer does first.
    """
    trainer = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if trainer is None or trainer._save_optimizer_and_scheduler.__module__ == __name__:
        return
    save = trainer._save_optimizer_and_scheduler
    load = trainer._load_optimizer_and_scheduler

    def save_on_all_ranks(self: Any, output_dir: str) -> None:
        optimizer = sharded_inside(self.optimizer)
        if optimizer is None:
            save(self, output_dir)
            return
        gathered = [optimizer.state_dict(), optimizer.main_params()]  # full on rank 0
        if self.args.save_on_each_node and self.args.world_size > 1:
            torch.distributed.broadcast_object_list(gathered, src=0)
        state, main_params = gathered
        self.optimizer.state_dict = lambda: state
        try:
            save(self, output_dir)
        finally:
            del self.optimizer.state_dict
        if self.args.should_save and main_params:
            save_file({0: main_params}, Path(output_dir) / MAIN_PARAMS_FILE)

    def load_with_main_params(self: Any, checkpoint: str | None) -> None:
        load(self, checkpoint)
        if checkpoint is not None:
            load_main_params(Path(checkpoint), [sharded_inside(self.optimizer)])

    train = trainer.train

    @functools.wraps(train)
    def train_without_replicas(self: Any, *args: Any, **kwargs: Any) -> Any:
        plugin = getattr(self.accelerator, "megatron_ddp_plugin", None)
        if plugin is not None and plugin.replicas is not None:
            raise ValueError(
                "MegatronDDPPlugin(replicas=...) and transformers.Trainer: its place is in its files, and a replica "
                "that comes back would not have it. Leave replicas out, or train in a loop of your own"
            )
        return train(self, *args, **kwargs)

    trainer.train = train_without_replicas
    trainer._save_optimizer_and_scheduler = save_on_all_ranks
    trainer._load_optimizer_and_scheduler = load_with_main_params
    _wrap_weights(trainer)


def _wrap_weights(trainer: Any) -> None:
    """Wraps the methods that save and load weights, for models that ``parallelize_module`` has cut."""
    save_weights = trainer._save
    load_weights = trainer._load_from_checkpoint

    def save_full(self: Any, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        # on all ranks: one of them writes, or one of each node; Transformers gathers a model that it has cut itself
        if state_dict is None and _is_cut(self):
            state_dict = full_state(self.accelerator.unwrap_model(self.model), keeps=self.args.should_save)
        save_weights(self, output_dir, state_dict)

    def load_full(self: Any, checkpoint: str, model: Any = None) -> None:
        if _is_cut(self):  # the weights come before the model is prepared
            load_full_states(self.model)
        load_weights(self, checkpoint, model)

    trainer._save = save_full
    trainer._load_from_checkpoint = load_full


def _is_cut(trainer: Any) -> bool:
    """Whether torch's ``parallelize_module`` has cut the model of one of this package's Accelerators, and Transformers
    has not."""
    is_ours = hasattr(trainer.accelerator, "megatron_ddp_config") and bool(dtensors_of(trainer.model))
    return is_ours and not getattr(trainer, "is_distributed_loading_by_transformers", False)
