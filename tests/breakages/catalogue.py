"""Lists lines that are broken, how, and the tests that have to see it."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Breakage:
    """A fault, and the tests that fail with it.

    Attributes:
        what: in words, as it would stand in a bug report.
        file: in the package.
        before, after: text of the file, which has ``before`` once.
        tests: what pytest is given, and what fails.
    """

    what: str
    file: str
    before: str
    after: str
    tests: str

    def apply(self, text: str) -> str:
        """The file's text with the fault in it."""
        if text.count(self.before) != 1:
            raise ValueError(f"{self.file} has {text.count(self.before)} times: {self.before!r}")
        return text.replace(self.before, self.after)


BREAKAGES = (
    # --- gradients ---------------------------------------------------------------------------------------------------
    Breakage(
        "gradients are used before their reduction has ended",
        "core/reducer.py",
        "            handle.wait()\n"
        "            self._emit(EventKind.REDUCE_END, bucket, handle.ran_ns)\n            if publish:",
        "            self._emit(EventKind.REDUCE_END, bucket, handle.ran_ns)\n            if publish:",
        "tests/ranks/test_every_pair_of_switches.py",
    ),
    Breakage(
        "the sum over ranks is not divided by their number",
        "core/reducer.py",
        "mean, average = 1.0 / self._collectives.size, ",
        "mean, average = 1.0, ",
        "tests/ranks/test_gradients.py",
    ),
    Breakage(
        "what other ranks used is not taken over",
        "core/reducer.py",
        "        has_grad[:] = agreement.used\n",
        "",
        "tests/ranks/test_every_pair_of_switches.py",
    ),
    Breakage(
        "a gradient that comes after its bucket was launched is forgotten",
        "core/reducer.py",
        "        self._late.add(index)\n",
        "",
        "tests/ranks/test_backwards.py",
    ),
    Breakage(
        "a bucket is launched when its first gradient arrives",
        "core/reducer.py",
        "while len(self._handles) < len(self._missing) and self._missing[len(self._handles)] == 0:",
        "while len(self._handles) < len(self._missing):",
        "tests/ranks/test_order.py tests/ranks/test_gradients.py",
    ),
    Breakage(
        "a bucket that was complete before its turn waits for the end of backward",
        "core/reducer.py",
        "                self._launch_ready()\n",
        "                if bucket == len(self._handles):\n                    self._launch(bucket)\n",
        "tests/ranks/test_order.py tests/ranks/test_order_seen.py",
    ),
    Breakage(
        "gradients of different microbatches are added up",
        "core/agreement.py",
        "return self.microbatch is None or self.has_nonfinite or",
        "return self.has_nonfinite or",
        "tests/ranks/test_checks.py",
    ),
    Breakage(
        "no_sync sends all the same",
        "core/distributed_data_parallel.py",
        "        self.require_backward_grad_sync = False\n        try:",
        "        try:",
        "tests/ranks/test_gradients.py",
    ),
    Breakage(
        "a second backward before the step adds to a mean that was divided already",
        "core/contiguous_buffers.py",
        "                flat[shard_start:shard_end].mul_(self.layout.num_shards)\n",
        "",
        "tests/ranks/test_gradients.py",
    ),
    Breakage(
        "what other ranks own is sent once more by a second backward",
        "core/contiguous_buffers.py",
        "                flat[place.start : shard_start].zero_()\n",
        "",
        "tests/ranks/test_gradients.py",
    ),
    Breakage(
        "gradients of the step before are added to the next ones",
        "core/buffers.py",
        "        if len(stale) == len(params):\n            self._zero_bucket(bucket)\n",
        "        if len(stale) == len(params):\n            pass\n",
        "tests/ranks/test_gradients.py",
    ),
    Breakage(
        "a gradient that does not come is the one of the step before",
        "core/contiguous_buffers.py",
        "                self._zero_param(index)\n                has_grad[index] = False\n",
        "                has_grad[index] = False\n",
        "tests/ranks/test_contiguous_buffers.py",
    ),
    Breakage(
        "an owner has the exact weights, and the others rounded ones",
        "core/wire.py",
        "        held.add_(read_wire(sent, end - start))\n",
        "        held.copy_(left)\n",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "what rounding left out of weights is lost",
        "core/wire.py",
        "        left.sub_(held)\n",
        "        left.zero_()\n",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "changes that came with another optimizer's gather are added once more",
        "core/wire.py",
        "    if not is_even:\n        fill_nothing_(change)\n",
        "",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "of 8-bit blocks, nothing is zero with another sign",
        "core/wire_format.py",
        "    scales.fill_(NOTHING)\n",
        "    scales.zero_()\n",
        "tests/unit/test_wire_format.py",
    ),
    Breakage(
        "8-bit changes of owned parameters are looked for where 16-bit ones would be",
        "core/param_gather.py",
        "[[wire_span(start, end, flat.dtype) for start, end in parts] for parts in spans]",
        "[list(parts) for parts in spans]",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "a rank rounds its gradients twice, and a later sum with them",
        "core/layout.py",
        "pooled or sum_dtype != sent, sent, weights_sent",
        "pooled, sent, weights_sent",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "a step that failed is doubled by the next one",
        "core/sharded_step.py",
        "            drop_remainders(run for run, _ in begun)\n",
        "            pass\n",
        "tests/ranks/test_wire_dtypes.py",
    ),
    Breakage(
        "a staging buffer is filled while it is on the wire",
        "core/reducer.py",
        "if len(self._in_flight) == self.buffers.max_in_flight:",
        "if False:",
        "tests/ranks/test_pooled.py",
    ),
    Breakage(
        "pooled gradients start at the wrong element of a piece",
        "core/pooled_buffers.py",
        "copies.append(_Copy(first + shift, last + shift, index, first - slot.start))",
        "copies.append(_Copy(first + shift, last + shift, index, 0))",
        "tests/ranks/test_pooled.py",
    ),
    Breakage(
        "sums of 16-bit gradients are made in 16 bits",
        "core/collectives/tensor_parts.py",
        "        total = torch.zeros_like(sums[piece])\n",
        "        total = torch.zeros_like(sums[piece], dtype=parts[0].dtype)\n",
        "tests/ranks/test_fp32_sums.py",
    ),
    # --- averages by tokens ------------------------------------------------------------------------------------------
    Breakage(
        "the mean over tokens is of this rank's alone",
        "core/loss_tokens.py",
        "            self._reduced_tokens += tokens\n",
        "            self._reduced_tokens += tokens if not self._reduced_tokens else 0.0\n",
        "tests/ranks/test_loss_tokens.py",
    ),
    Breakage(
        "a mean over no tokens leaves NaN in the gradients of all ranks",
        "core/loss_tokens.py",
        "        if self._count == 0:\n            return torch.zeros_like(grad)\n",
        "",
        "tests/ranks/test_loss_tokens.py",
    ),
    Breakage(
        "pooled sums are corrected to the mean over tokens once more after each microbatch",
        "core/loss_tokens.py",
        "        factor, self._unit = self._unit / mean, mean\n",
        "        factor = self._unit / mean\n",
        "tests/ranks/test_loss_tokens.py",
    ),
    Breakage(
        "what accumulated before a count, or without one, is averaged with the rest",
        "core/loss_tokens.py",
        "            self._counting = Counting.IN_PART\n",
        "            self._counting = Counting.COUNTED\n",
        "tests/ranks/test_loss_tokens_windows.py",
    ),
    Breakage(
        "the tokens of gradients that were dropped count in the next mean",
        "core/loss_tokens.py",
        "            if dropped == self._joined:\n                self._begin_window()\n",
        "            if dropped == self._joined:\n                pass\n",
        "tests/ranks/test_loss_tokens_windows.py",
    ),
    # --- layout ------------------------------------------------------------------------------------------------------
    Breakage(
        "a rank takes another rank's shard for its own",
        "core/layout.py",
        "start = bucket.start + dp_rank % self.num_shards * shard_numel",
        "start = bucket.start + (dp_rank + 1) % self.num_shards * shard_numel",
        "tests/ranks/test_parity.py",
    ),
    Breakage(
        "the last element of a shard belongs to nobody",
        "core/layout.py",
        "start, end = max(slot.start, shard_start), min(slot.end, shard_end)\n        return",
        "start, end = max(slot.start, shard_start), min(slot.end, shard_end) - (slot.end > shard_end)\n        return",
        "tests/ranks/test_parity.py",
    ),
    Breakage(
        "a bucket is padded to one element too few",
        "core/layout.py",
        "                position = _round_up(position, alignment)\n",
        "                position = _round_up(position, alignment) - 1\n",
        "tests/unit/test_layout.py",
    ),
    Breakage(
        "ranks with different models begin to train",
        "core/module_plan.py",
        "if all(byte == 255 - other for byte, other",
        "if all(byte <= 255 for byte, other",
        "tests/ranks/test_errors.py",
    ),
    # --- the wire ----------------------------------------------------------------------------------------------------
    Breakage(
        "a ring on three ranks adds the part of the wrong rank",
        "core/collectives/gloo_rings.py",
        ", target = parts[(self._rank - step) % self._size], parts[(self._rank - step - 1) % self._size]",
        ", target = parts[(self._rank - step) % self._size], parts[(self._rank + step) % self._size]",
        "tests/ranks/test_collectives.py",
    ),
    Breakage(
        "a ring on three ranks scales a sum in every step",
        "core/collectives/gloo_rings.py",
        "outgoing = map(scaled, sent) if step == 1 else sent",
        "outgoing = map(scaled, sent)",
        "tests/ranks/test_collectives.py",
    ),
    Breakage(
        "instances of the optimizer keep their sums to themselves",
        "core/collectives/instanced.py",
        "        self.across.allreduce([tensor]).wait()\n",
        "        return\n",
        "tests/ranks/test_instances.py",
    ),
    Breakage(
        "new weights are read before they have arrived",
        "core/param_gather.py",
        "                    self._handles[bucket].wait()\n",
        "",
        "tests/ranks/test_param_gather.py",
    ),
    Breakage(
        "a rank that waits in vain is never told",
        "core/collectives/interface.py",
        "            self._give_up(what, reason)\n",
        "            return\n",
        "tests/doors/test_lightning_failures.py",
    ),
    # --- the step ----------------------------------------------------------------------------------------------------
    Breakage(
        "a main param that no longer belongs to its weight is stepped",
        "core/param_shard.py",
        "    torch.where(changed, weights.float(), main, out=main)\n",
        "    torch.where(changed, main, main, out=main)\n",
        "tests/ranks/test_precision.py",
    ),
    Breakage(
        "16-bit weights do not get what their main params have become",
        "core/param_shard.py",
        "        weights.copy_(main)\n",
        "        pass\n",
        "tests/ranks/test_precision.py",
    ),
    Breakage(
        "the norm of the gradients is that of this rank's shards",
        "core/clip_grads.py",
        "    collectives.all_gather(parts.view(-1)).wait()\n",
        "",
        "tests/ranks/test_optimizer.py",
    ),
    Breakage(
        "a rank alone skips the step in which it found infinities",
        "core/clip_grads.py",
        "        collectives.all_reduce_max(found_inf).wait()\n",
        "        pass\n",
        "tests/ranks/test_precision.py",
    ),
    Breakage(
        "what has been stepped by itself is stepped with the state of its neighbour",
        "core/step_tensors.py",
        "                whole[name][start:end] = state[name]\n",
        "                whole[name][start:end] = states[0][name][:1]\n",
        "tests/ranks/test_step_tensors.py",
    ),
    Breakage(
        "an optimizer that couples elements is sharded",
        "core/trials/elementwise.py",
        "        moved, is_exact = self._moves_otherwise(whole, pieces)\n",
        "        moved, is_exact = None, True\n",
        "tests/unit/test_elementwise.py",
    ),
    Breakage(
        "state moves to the wrong place of another layout",
        "core/rebucketing/relayout.py",
        "    shift = present.slots[param].start - first - layout.slots[param].start\n",
        "    shift = -first\n",
        "tests/ranks/test_relayout.py",
    ),
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
