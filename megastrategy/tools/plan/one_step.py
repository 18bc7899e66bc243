"""Runs an unmodified script as rank 0 of many that do not exist, until its first step is done.

The process is the tool's own. Process groups are torch's fake ones, whatever the script asks for, so that the engine
plans and allocates as it would on so many ranks. Every :class:`~megastrategy.DistributedDataParallel` gets a listener
that marks the step's phases in what :class:`.LiveBytes` counts.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
import pickle
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from ...core import (
    BufferLayout,
    DistributedDataParallel,
    DistributedDataParallelConfig,
    Event,
    EventKind,
    combine_listeners,
    may_see_shards,
    memory_use,
)
from ..profiling import run_target
from ..timeline import BEGINS_STEP, completes_step
from .live_bytes import LiveBytes, local_tensor


@dataclasses.dataclass(frozen=True)
class ModelPlan:
    """One wrapped model, as the engine laid it out for so many ranks.

    Attributes:
        layout: before it moves to the order in which gradients are seen, as the lines at the start of a fit have it.
        config: the options.
        num_kept: by parameter, how many numbers optimizers keep for each element.
        rank_of: the owners of parameters that are stepped whole.
        groups: by parameter, its optimizer's group: neighbours of one group are stepped as one tensor.
        frozen_bytes: of parameters that are not trained.
        buffer_bytes: of the module's buffers.
        other_state_bytes: of optimizer state that is no number for each element of a parameter: counters, factors.
    """

    layout: BufferLayout
    config: DistributedDataParallelConfig
    num_kept: Mapping[int, int]
    rank_of: Mapping[int, int]
    groups: Mapping[int, Hashable]
    frozen_bytes: int
    buffer_bytes: int
    other_state_bytes: int


@dataclasses.dataclass(frozen=True)
class MeasuredStep:
    """The first step of a script on one of ``dp_size`` ranks, in bytes.

    Attributes:
        models: those that it wrapped.
        input_bytes: the largest batch that a forward was given.
        saved_bytes: alive at the end of the first forward, for its backward.
        backward_peak_bytes: the most temporaries at once in forwards and backwards, saved tensors among them.
        step_peak_bytes: the most temporaries at once while optimizers step.
        computes: whether large tensors had values.
        num_computed: operations that were carried out on large tensors without values.
        unknown: the parameters whose optimizer has made no step, and was not tested, so that its state is not counted.
    """

    dp_size: int
    models: tuple[ModelPlan, ...]
    input_bytes: int
    saved_bytes: int
    backward_peak_bytes: int
    step_peak_bytes: int
    computes: bool
    num_computed: int
    unknown: tuple[str, ...] = ()


class OneStep:
    """The listener of all models of a script, until each that has begun a step has ended it.

    Args:
        live: counts; it is started with the first forward that trains.
        dp_size: the number of ranks.
    """

    def __init__(self, live: LiveBytes, dp_size: int) -> None:
        self.live = live
        self._dp_size = dp_size
        self.shares_models = False
        """Returns whether a model has fewer data-parallel ranks than there are: others have parts of it."""
        self._models: dict[int, DistributedDataParallel] = {}  # by number, those that the script has not closed
        self._num_models = 0
        self._layouts: dict[int, BufferLayout] = {}
        self._optimizers: dict[int, torch.optim.Optimizer] = {}
        self._begun: set[int] = set()
        self._complete: set[int] = set()
        self._input_bytes = self._saved_bytes = 0
        self._steps: list[tuple[int, int]] = []  # places in the trace, of optimizers' steps
        self._step_start = 0

    @property
    def has_models(self) -> bool:
        """Returns whether the script has wrapped any."""
        return self._num_models > 0

    @property
    def is_complete(self) -> bool:
        """Returns whether all models that have begun a step have ended it."""
        return bool(self._begun) and self._begun == self._complete

    def install(
        self, on_done: Callable[[], object], wrapper: type[DistributedDataParallel] = DistributedDataParallel
    ) -> RemovableHandle:
        """Patches ``wrapper`` for the rest of the process; ``on_done`` is called once a second step begins, or ranks
        are found to share a model.

        It is also called before a model is closed whose step is complete: state and gradients are gone then.

        Returns:
            the hook on all optimizers' steps, to be removed where the process goes on.
        """
        init = wrapper.__init__

        @functools.wraps(init)
        def init_with_listener(model: DistributedDataParallel, *args: Any, **kwargs: Any) -> None:
            number = self._num_models
            self._num_models += 1
            self._models[number] = model

            def listen(event: Event) -> None:
                if number not in self._models:  # it was closed
                    return
                if self.is_complete and number in self._complete and event.kind in BEGINS_STEP:
                    on_done()
                self._hear(number, event)

            listener = kwargs.pop("listener", None)
            init(
                model, *args, listener=combine_listeners([listen] if listener is None else [listener, listen]), **kwargs
            )
            self._layouts[number] = model.layout
            if model.layout.dp_size != self._dp_size:
                self.shares_models = True
                on_done()
            model.register_forward_pre_hook(self._see_inputs, with_kwargs=True)

        wrapper.__init__ = init_with_listener  # type: ignore[method-assign,assignment]

        self._measure_before_close(on_done, wrapper)

        # Not watched: steps are to go in pieces where those of the run do.
        @may_see_shards
        def see_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            # Trials step copies before the first forward.
            if self._begun:
                self._optimizers[id(optimizer)] = optimizer

        return register_optimizer_step_post_hook(see_step)

    def _measure_before_close(self, on_done: Callable[[], object], wrapper: type[DistributedDataParallel]) -> None:
        close = wrapper.close

        @functools.wraps(close)
        def close_when_measured(model: DistributedDataParallel, **options: Any) -> None:
            if self.is_complete:
                on_done()
            for number in [number for number, other in self._models.items() if other is model]:
                del self._models[number]
                self._begun.discard(number)
                self._complete.discard(number)
            close(model, **options)

        wrapper.close = close_when_measured  # type: ignore[method-assign,assignment]

    def _hear(self, number: int, event: Event) -> None:
        model = self._models[number]
        live = self.live
        # A forward without gradients is an evaluation: its memory is another question.
        if event.kind is EventKind.BACKWARD_START or (event.kind is EventKind.FORWARD_START and event.index):
            if not self._begun:
                live.start()
            self._begun.add(number)
        elif event.kind is EventKind.FORWARD_END and event.index and not self._saved_bytes:
            self._saved_bytes = live.live_bytes
        elif event.kind is EventKind.GRAD_READY:
            # Before there is a plan, and without buffers, gradients are autograd's own: no temporaries.
            grad = model.engine.params[event.index].grad
            if grad is not None and (model.engine.reducer.memory is None or not model.layout.is_pooled):
                live.keep([grad])
        elif event.kind is EventKind.STEP_START:
            self._step_start = live.position()
        elif event.kind is EventKind.STEP_END:
            self._end_step()
        if number in self._begun and completes_step(event, model.engine.has_optimizer):
            self._complete.add(number)

    def _end_step(self) -> None:
        self._steps.append((self._step_start, self.live.position()))
        for optimizer in self._optimizers.values():
            self.live.keep(_state_of(optimizer))

    def _see_inputs(self, _: Any, args: Any, kwargs: Any) -> None:
        if torch.is_grad_enabled():
            tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            self._input_bytes = max(self._input_bytes, sum(tensor.nbytes for tensor in tensors))

    def measured(self) -> MeasuredStep:
        """Sums up the counts; to be called once all steps are complete."""
        live = self.live
        for model in self._models.values():
            live.keep([*_buffers(model.engine), *_mains(model.engine)])
        for optimizer in self._optimizers.values():
            live.keep(_state_of(optimizer))
        live.stop()
        outside = 0
        begin = 0
        for start, end in [*self._steps, (live.position(), live.position())]:
            outside = max(outside, live.peak_bytes(begin, start))
            begin = end
        inside = max((live.peak_bytes(start, end) for start, end in self._steps), default=0)
        models = {number: self._plan(number) for number in self._models}
        if models:  # of all optimizers, once
            per_element = sum(self._per_element_bytes(self._models[number], plan) for number, plan in models.items())
            first = next(iter(models))
            models[first] = dataclasses.replace(models[first], other_state_bytes=self._state_bytes() - per_element)
        unknown = self._add_what_was_not_reached(models)
        return MeasuredStep(
            self._dp_size,
            tuple(models.values()),
            self._input_bytes,
            self._saved_bytes,
            outside,
            inside,
            live.computes,
            live.num_computed,
            unknown,
        )

    def _add_what_was_not_reached(self, models: dict[int, ModelPlan]) -> tuple[str, ...]:
        """Counts the state of parameters that this step did not reach, by the state of similar ones.

        Similar parameters belong to the optimizer, or to another one of its class. Parameters are not reached if
        they are experts that no token chose, or a generator that is stepped every second time.

        Returns:
            the names of parameters whose state is unknown, since no optimizer of their class has made a step.
        """
        of_class: dict[type, int] = {}
        missing: list[tuple[int, int, type, int | None]] = []
        for number, model in self._models.items():
            num_kept = models[number].num_kept
            for stepping in _optimizers_of(model.engine):
                indices = list(stepping.neighbour_groups())
                # One that has stepped a trained model and has no state keeps none (SGD).
                least = 0 if number in self._begun and id(stepping.inner) in self._optimizers else None
                num_of_optimizer = max((num_kept[index] for index in indices if index in num_kept), default=least)
                kind = type(stepping.inner)
                missing += [(number, index, kind, num_of_optimizer) for index in indices if index not in num_kept]
                if num_of_optimizer is not None:
                    of_class[kind] = max(num_of_optimizer, of_class.get(kind, 0))
        unknown = []
        added = {number: dict(model.num_kept) for number, model in models.items()}
        for number, index, kind, num_of_optimizer in missing:
            num_of_param = of_class.get(kind) if num_of_optimizer is None else num_of_optimizer
            if num_of_param is None:
                unknown.append(models[number].layout.params[index].name)
            else:
                added[number][index] = num_of_param
        for number, num_kept in added.items():
            models[number] = dataclasses.replace(models[number], num_kept=num_kept)
        return tuple(unknown)

    def _plan(self, number: int) -> ModelPlan:
        model = self._models[number]
        layout = self._layouts[number]
        engine = model.engine
        module = engine.module
        frozen = {id(p): local_tensor(p).nbytes for p in module.parameters() if id(p) not in engine.index_by_id}
        buffers = {id(b): b.nbytes for b in module.buffers()}
        num_kept = self._num_kept(engine)
        rank_of: dict[int, int] = {}
        groups: dict[int, Hashable] = {}
        for optimizer in _optimizers_of(engine):
            rank_of |= optimizer.owners()
            groups |= optimizer.neighbour_groups()
        return ModelPlan(
            layout,
            model.engine.config,
            num_kept,
            rank_of,
            groups,
            sum(frozen.values()),
            sum(buffers.values()),
            0,
        )

    def _state_bytes(self) -> int:
        """The device's memory of what optimizers keep and step, weights and gradients apart."""
        others: list[Tensor] = []
        on_host: set[int] = set()  # by id, the tensors that are stepped on the host of an accelerator
        state: list[Tensor] = []
        for model in self._models.values():
            others += [*model.module.parameters(), *_buffers(model.engine)]
            if model.layout.offloads_state:
                on_host |= set(map(id, _mains(model.engine)))
            else:
                state += _mains(model.engine)
        for optimizer in self._optimizers.values():
            state += [tensor for tensor in optimizer.state if isinstance(tensor, Tensor) and id(tensor) not in on_host]
            for tensor, values in optimizer.state.items():
                state += [value for value in _tensors(values) if id(tensor) not in on_host or value.dim() == 0]
            state += [
                param for group in optimizer.param_groups for param in group["params"] if id(param) not in on_host
            ]
        return _covered_bytes([*others, *state]) - _covered_bytes(others)

    def _num_kept(self, engine: Any) -> dict[int, int]:
        num_kept: dict[int, int] = {}
        # As the test has shown, whether or not the step reached the parameters, or this rank's parts of them.
        for optimizer in _optimizers_of(engine):
            num_kept |= optimizer.num_kept() or {}
        # Steps of whole parameters need no test, so their state is counted.
        for stepped in self._optimizers.values():
            for tensor, values in stepped.state.items():
                alike = [value for value in _tensors(values) if value.dim() > 0]
                for index in _indices_of(engine, tensor):
                    num_kept.setdefault(index, sum(value.numel() == tensor.numel() for value in alike))
        return num_kept

    def _per_element_bytes(self, model: DistributedDataParallel, plan: ModelPlan) -> int:
        """The bytes on rank 0 of main params, and of the state for each element that the step has made.

        An optimizer has no state where the step has reached none of this rank's shards.
        """
        made: dict[int, int] = {}
        for stepped in self._optimizers.values():
            for tensor, values in stepped.state.items():
                for index in _indices_of(model.engine, tensor) if values else ():
                    made[index] = plan.num_kept.get(index, 0)
        device = device_of(model.layout)
        return memory_use(model.layout, 0, made, plan.rank_of, device, groups=plan.groups).state_bytes


def device_of(layout: BufferLayout) -> torch.device:
    """Returns the device that is planned for: state is only on the host of an accelerator."""
    return torch.device("cuda" if layout.offloads_state else "cpu")


def _covered_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory of the tensors' storages, overlaps counted once."""
    total = reached = 0
    storages = [local_tensor(tensor).untyped_storage() for tensor in tensors]
    for start, nbytes in sorted({(storage.data_ptr(), storage.nbytes()) for storage in storages}):
        total += max(0, start + nbytes - max(start, reached))
        reached = max(reached, start + nbytes)
    return total


def _optimizers_of(engine: Any) -> list[Any]:
    """The optimizers of a model that are alive."""
    return [optimizer for ref in engine.optimizers if (optimizer := ref()) is not None]


def _mains(engine: Any) -> list[Tensor]:
    """The tensors that optimizers step in place of parameters on this rank."""
    return [run.main for optimizer in _optimizers_of(engine) for run in optimizer.runs]


def _indices_of(engine: Any, tensor: Tensor) -> list[int]:
    """The parameters that a tensor with state is stepped for."""
    if id(tensor) in engine.index_by_id:
        return [engine.index_by_id[id(tensor)]]
    runs = [run for optimizer in _optimizers_of(engine) for run in optimizer.runs if run.main is tensor]
    return [member.param for run in runs for member in run.members]


def _buffers(engine: Any) -> list[Tensor]:
    """The engine's own memory for weights and gradients, with the copies of gradients that are stepped."""
    memory = engine.reducer.memory
    grads = [main.grad for main in _mains(engine) if main.grad is not None]
    if memory is None:
        return grads
    sums = [tensor for tensor in memory.sums if tensor is not None]
    return [*grads, *memory.grads, *sums, *(memory.weights.flats if memory.weights is not None else ())]


def _tensors(values: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor))


def _state_of(optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """State, and what is stepped: main params are made in the first step."""
    yield from (tensor for tensor in optimizer.state if isinstance(tensor, Tensor))
    yield from _tensors(list(optimizer.state.values()))
    yield from (param for group in optimizer.param_groups for param in group["params"])


# --- the process -----------------------------------------------------------------------------------------------------

RANKS_SHARE_A_MODEL = (
    "Its ranks share a model (tensor ranks or stages), and scripts of data-parallel ranks only are planned: leave that "
    "out of the script to plan the rest; megastrategy.plan() divides layers into stages"
)


TRAINS_WITH_DDP = (
    "the script trains with torch DDP, and megastrategy's memory is planned: give it strategy='megatron_ddp', wrap the "
    "model in megastrategy.DistributedDataParallel, or plan -m megastrategy.launch SCRIPT where it uses Accelerate"
)
STARTS_PROCESSES = (
    "the script starts its ranks itself (torch.multiprocessing: spawn, fork, a notebook launcher), and those are not "
    "seen: plan it with strategy='megatron_ddp', or a script that calls the training function in its own process"
)
WRAPPED_NOTHING = (
    "the script wrapped no model, so it does not train with megastrategy: give it strategy='megatron_ddp', or plan "
    "-m megastrategy.launch SCRIPT where it uses Accelerate"
)
PREPARED_NOTHING = (
    "the script wrapped no model: under megastrategy.launch those are wrapped that an Accelerator, or a Trainer of "
    "Transformers', prepares for training"
)
REFUSALS = (RANKS_SHARE_A_MODEL, TRAINS_WITH_DDP, STARTS_PROCESSES, WRAPPED_NOTHING, PREPARED_NOTHING)
"""Reasons that are the same with and without values."""


def refuse_other_ranks(refuse: Callable[[str], object]) -> None:
    """Calls ``refuse`` with the reason when the script wraps a model in torch DDP, or starts ranks itself. For the rest
    of the process."""
    init = torch.nn.parallel.DistributedDataParallel.__init__

    @functools.wraps(init)
    def init_refused(*_: Any, **__: Any) -> None:
        refuse(TRAINS_WITH_DDP)

    def start_refused(*_: Any, **__: Any) -> None:
        refuse(STARTS_PROCESSES)

    torch.nn.parallel.DistributedDataParallel.__init__ = init_refused  # type: ignore[method-assign]
    # The function of the same name hides the module as an attribute of its package.
    for module in (torch.multiprocessing, importlib.import_module("torch.multiprocessing.spawn")):
        vars(module)["start_processes"] = start_refused


def pretend_ranks(dp_size: int) -> None:
    """Makes every process group of this process a fake one, for the rest of it."""
    # It registers the backend with torch.
    from torch.testing._internal.distributed.fake_pg import FakeStore  # noqa: F401

    init = dist.init_process_group
    new = dist.new_group

    @functools.wraps(init)
    def init_fake(*_: Any, **__: Any) -> None:
        init("fake", store=dist.HashStore(), rank=0, world_size=dp_size)  # type: ignore[attr-defined]

    @functools.wraps(new)
    def new_fake(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return new(ranks, backend="fake")

    for module in (dist, dist.distributed_c10d):
        module.init_process_group = init_fake  # type: ignore[attr-defined]
        module.new_group = new_fake  # type: ignore[attr-defined]
    if not torch.accelerator.is_available():
        # As accelerate launch --cpu says it. Accelerate would otherwise look for GPUs, find none, and make no groups.
        os.environ.setdefault("ACCELERATE_USE_CPU", "true")
    # Not torchrun's own: Lightning would insist on as many devices as there are ranks.
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE=str(dp_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="29500")


def main() -> None:
    """``python -m megastrategy.tools.plan.one_step RANKS FILE (shapes | values) (SCRIPT | -m MODULE) [ARGUMENTS]``

    Writes a pickled :class:`MeasuredStep`, or the sentence that says why there is none.
    """
    dp_size, file, way, *command = sys.argv[1:]
    live = LiveBytes(computes=way == "values")
    step = OneStep(live, int(dp_size))

    def write(result: MeasuredStep | str) -> None:
        Path(file).write_bytes(pickle.dumps(result))

    def done() -> None:
        end(RANKS_SHARE_A_MODEL if step.shares_models else step.measured())

    def end(result: MeasuredStep | str) -> None:
        write(result)
        sys.stdout.flush()
        sys.stderr.flush()
        # Not an exception, which a script could catch: a Trainer would write a checkpoint.
        os._exit(0)

    pretend_ranks(int(dp_size))
    step.install(done)
    refuse_other_ranks(end)
    with live:
        run_target(command)
    if step.is_complete:
        write(step.measured())
    else:
        write(_why_nothing(command, int(dp_size), has_models=step.has_models))


def _why_nothing(command: list[str], dp_size: int, *, has_models: bool) -> str:
    """Says why a script that ended well has made no step, and what to do."""
    if has_models:
        more = f"more batches, of which a rank has one in {dp_size}" if dp_size > 1 else "more batches"
        return f"the script ended before its first optimizer step: let it make one (a larger max_steps, {more})"
    return PREPARED_NOTHING if command[:2] == ["-m", "megastrategy.launch"] else WRAPPED_NOTHING


if __name__ == "__main__":
    # by its own name: __main__ is the script's from here on
    from megastrategy.tools.plan.one_step import main as run_rank

    run_rank()
