"""Lists faults of what stands beside the way of a gradient: owners, parts, checkpoints, data, doors, tools."""

from __future__ import annotations

from .breakage import Breakage

ROOMS = (
    # --- whole parameters --------------------------------------------------------------------------------------------
    Breakage(
        "an owner steps with gradients that have not arrived",
        "core/whole_params.py",
        "                handle.wait()\n",
        "                pass\n",
        "tests/ranks/test_whole_params.py --collectives lazy-at-wait",
    ),
    Breakage(
        "weights that an owner has stepped are gathered from those that hold their gradients",
        "core/param_gather.py",
        "            self._handles[bucket] = (\n",
        "            spans = None\n            self._handles[bucket] = (\n",
        "tests/ranks/test_whole_params.py",
    ),
    Breakage(
        "an owner takes its own part of a gradient for all of it",
        "core/whole_params.py",
        "                pieces[part.param].append((part.start, came))\n",
        "                pieces[part.param].append((part.start, came * 0))\n",
        "tests/ranks/test_whole_params.py",
    ),
    Breakage(
        "the largest parameters are all owned by the first rank",
        "core/owners.py",
        "            loads[rank] += numel[param]\n        return Owners",
        "        return Owners",
        "tests/ranks/test_whole_params.py",
    ),
    Breakage(
        "state of whole parameters is left out of a checkpoint",
        "core/checkpoint/full_state.py",
        "gather.whole(parts.whole) if parts.whole is not None else ()",
        "()",
        "tests/checkpoints/test_interchange.py",
    ),
    Breakage(
        "state of whole parameters is lost when the layout changes",
        "core/optimizer_shards.py",
        "            if kept:\n                state[self.shards[index].main] = kept\n",
        "",
        "tests/ranks/test_whole_params.py",
    ),
    Breakage(
        "an optimizer that estimates one number from all parameters is divided by parameters",
        "core/trials/per_parameter.py",
        "        return self.problem.rerun_alone(lambda: self._double(lr), whole)\n",
        "        return [Trial(self._double(lr), [param.detach()]) for param in whole.params]\n",
        "tests/unit/test_per_parameter.py",
    ),
    Breakage(
        "an owner's gradient lacks the part that lay there already",
        "core/whole_params.py",
        "else [(own[0], engine.grad_buffers.reduced(bucket, *own))]\n",
        "else [(own[0], engine.grad_buffers.reduced(bucket, *own) * 0)]\n",
        "tests/ranks/test_whole_params.py",
    ),
    Breakage(
        "an optimizer takes whole what another steps as shards",
        "core/whole_params.py",
        "        if rank_of and (taken := [",
        "        if not rank_of and (taken := [",
        "tests/ranks/test_whole_params.py",
    ),
    # --- parts of parameters, on tensor ranks ------------------------------------------------------------------------
    Breakage(
        "what all tensor ranks have counts once for each of them in the norm",
        "core/dtensor_parts.py",
        "        return self.ranks is None or self.ranks.is_rank_zero or self.is_cut(param)\n",
        "        return True\n",
        "tests/ranks/test_tensor_parallel.py",
    ),
    Breakage(
        "a tensor rank's summand is taken for the gradient of a replicated parameter",
        "core/dtensor_parts.py",
        "            if grad.placements != whole.placements:\n",
        "            if False:\n",
        "tests/ranks/test_tensor_parallel.py",
    ),
    Breakage(
        "gradients of tensor ranks are averaged as if their parts were the same",
        "core/dtensor_parts.py",
        "        if len(shared) > 1:\n",
        "        if len(shared) > 99:\n",
        "tests/ranks/test_tensor_parallel.py",
    ),
    Breakage(
        "tensor ranks begin with replicas that differ",
        "core/dtensor_parts.py",
        "            self.ranks.broadcast_all(",
        "            list(",
        "tests/ranks/test_tensor_groups.py",
    ),
    Breakage(
        "each tensor rank loads the first part of a parameter's state",
        "core/local_parts.py",
        "            return value.narrow(self.dim, start, end - start)\n",
        "            return value.narrow(self.dim, 0, end - start)\n",
        "tests/checkpoints/test_tensor_parallel_checkpoints.py",
    ),
    # --- data --------------------------------------------------------------------------------------------------------
    Breakage(
        "what was read ahead is not trained after a restart",
        "data.py",
        "        return max(0, self.num_batches - self.num_waiting()) * self.samples_per_batch\n",
        "        return self.num_batches * self.samples_per_batch\n",
        "tests/unit/test_data.py tests/doors/test_resumable_loops.py",
    ),
    Breakage(
        "the place in an epoch is lost when a framework sets the epoch",
        "data.py",
        "        if epoch != self.epoch or self._pass is not None:\n",
        "        if True:\n",
        "tests/unit/test_data.py",
    ),
    Breakage(
        "a checkpoint has the samples of one rank for those of all",
        "data.py",
        "        return self.count(loader, self.num_replicas * batch_size_of(loader))\n",
        "        return self.count(loader, batch_size_of(loader))\n",
        "tests/unit/test_data.py",
    ),
    # --- checkpoints -------------------------------------------------------------------------------------------------
    Breakage(
        "every rank loads the first part of a parameter's state",
        "core/checkpoint/full_state.py",
        "    return in_memory_order(value, spec)[shard.start : shard.end].clone()",
        "    return in_memory_order(value, spec)[: shard.numel].clone()",
        "tests/checkpoints/test_interchange.py",
    ),
    Breakage(
        "saved main params are not loaded",
        "core/checkpoint/full_state.py",
        "        main.copy_(saved)\n",
        "        pass\n",
        "tests/checkpoints/test_interchange.py tests/ranks/test_precision.py",
    ),
    Breakage(
        "rank 0 takes a state that another rank has stepped meanwhile",
        "core/checkpoint/hand_over.py",
        "            if lender.version() == wanted:\n",
        "            if lender.version():\n",
        "tests/unit/test_hand_over.py",
    ),
    # --- doors -------------------------------------------------------------------------------------------------------
    Breakage(
        "a prepared model has not the attributes of torch DDP",
        "accelerate/torch_ddp_by_name.py",
        '    "find_unused_parameters": lambda model: model.config.find_unused_parameters,\n',
        "",
        "tests/doors/test_accelerate_torch_attributes.py",
    ),
    Breakage(
        "a stage of torch's pipelining trains with gradients that were reduced once a microbatch",
        "core/callers.py",
        "    if _STAGE not in sys.modules:\n",
        "    if _STAGE in sys.modules:\n",
        "tests/ranks/test_pipelining.py",
    ),
    Breakage(
        "on one rank SIGTERM is remembered and not obeyed",
        "_lightning/signals.py",
        "        if self._posted is None:\n            self._connector.received_sigterm = True\n",
        "        if self._posted is None:\n            pass\n",
        "tests/doors/test_slurm_requeue.py",
    ),
    Breakage(
        "on one rank the requeue signal is remembered and not obeyed",
        "_lightning/signals.py",
        "            self._requeue(self._num_requeues, self._requeue_signal)\n"
        "            return method(*arguments, **options)\n",
        "            return method(*arguments, **options)\n",
        "tests/doors/test_slurm_requeue.py",
    ),
    Breakage(
        "Slurm's signal makes each rank save by itself",
        "_lightning/signals.py",
        "        self._requeue(num_requeues, requeue_signal)\n        if terminated:",
        "        self._requeue(self._num_requeues, requeue_signal)\n        if terminated:",
        "tests/doors/test_signals_in_evaluation.py",
    ),
    Breakage(
        "Lightning's clipping reads the stand-ins of scattered gradients",
        "_lightning/trainer_strategy.py",
        "        lend(plugin, self._engine_precision)  #",
        "        #",
        "tests/doors/test_lightning_clipping.py",
    ),
    Breakage(
        "weights in several files are taken for the first of them",
        "tools/folders.py",
        "(?:_(\\d+))?\\.(?:safetensors|bin)(?:\\.index\\.json)?",
        "(?:_(\\d+))?\\.(?:safetensors|bin)",
        "tests/tools/test_folders.py",
    ),
)
