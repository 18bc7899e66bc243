"""Everything that user code can do between wrap and close, as a table: methods of Module, Optimizer and Tensor; moves,
copies, pickles, hooks, state surgery, other forwards and backwards.

Each row is played under torch DDP and under megastrategy in the same place of the same training. Afterwards weights,
module buffers, the optimizer's state and everything that the row has read must be equal to the bit; or the row is
refused by name, and the training goes on as if nothing had been asked. ``tests.fuzzing`` draws from the rows that need
no second module.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import io
import pickle
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megastrategy.errors import MegastrategyError, ReducedGradError

Place = Literal["before backward", "before step", "after step"]

TORCH_DDP_MOVES_VERSIONS = tuple(map(int, torch.__version__.split(".")[:2])) < (2, 12)
WHY_TORCH_DDP_REFUSES = "torch DDP of 2.11, which is compared with, moves the versions of buffers that it broadcasts"

STEPS = 4
ACTING_STEPS = (1, 2)
"""The steps in which a row is played: twice, so that the second finds what the first has left."""


@dataclasses.dataclass
class Site:
    """The training of one rank; a row is played in the middle of it.

    Attributes:
        module: the user's.
        model: the wrapped one.
        optimizer: what user code holds.
        backward: the door's.
        forward: one of the model, with a batch of its own; returns the loss.
        direct: the same of the module, past the wrapper.
        no_sync: the door's, in which a backward is not synchronised.
        seen: what the row has read; compared with what it reads under torch DDP.
    """

    module: nn.Module
    model: Any
    optimizer: Any
    rank: int
    backward: Callable[[Tensor], object]
    forward: Callable[[], Tensor]
    direct: Callable[[], Tensor]
    no_sync: Callable[[], contextlib.AbstractContextManager[Any]]
    seen: list[Any] = dataclasses.field(default_factory=list)
    kept: list[Any] = dataclasses.field(default_factory=list)

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.module.parameters())

    @property
    def trained(self) -> list[nn.Parameter]:
        return [param for param in self.module.parameters() if param.requires_grad]


Code = Callable[[Site], Any]


@dataclasses.dataclass(frozen=True)
class UserCode:
    """A row.

    Attributes:
        run: plays it; before the backward it may return a loss, in place of the one there is.
        place: where in a step.
        refused: the error by which it is refused where gradients are sharded; None where it must work.
        drives: whether it runs backwards of the wrapper or steps itself, or changes the training from then on.
        rounds: whether sums over ranks are of other numbers than under torch DDP, so that last bits differ.
        parts_torch_ddp: whether torch DDP's ranks have different weights afterwards, unless it is wrapped again.
        ignored_by_fabric: whether Fabric's optimizer does it to itself, and not to the one that it has inside.
        needs_whole_grads: whether a step refuses what it leaves where gradients are sharded (test_reduced_grad.py).
        forwards: whether it calls the wrapper's forward.
        leaves_forward: whether it leaves a forward without its backward. Torch DDP then averages the next backward
            under no_sync() too, and once more with the last: on three ranks thirds of thirds are rounded.
        is_on_one_rank: whether it runs a backward on one rank only. After a forward without its backward that one
            waits for the other ranks, as under torch DDP.
    """

    run: Code
    place: Place
    refused: type[MegastrategyError] | None = None
    drives: bool = False
    rounds: bool = False
    parts_torch_ddp: bool = False
    ignored_by_fabric: bool = False
    needs_whole_grads: bool = False
    forwards: bool = False
    leaves_forward: bool = False
    is_on_one_rank: bool = False

    @property
    def torch_ddp_refuses(self) -> bool:
        """Whether torch DDP raises: until 2.12 it moves the versions of buffers that it broadcasts."""
        return self.forwards and self.place == "before backward" and TORCH_DDP_MOVES_VERSIONS

    @property
    def name(self) -> str:
        return f"{self.run.__name__} {self.place}"


ROWS: list[UserCode] = []


def row(*places: Place, **options: Any) -> Callable[[Code], Code]:
    def add(run: Code) -> Code:
        ROWS.extend(UserCode(run, place, **options) for place in places)
        return run

    return add


def some_state(optimizer: Any) -> dict[str, Any]:
    """A copy of a state dict that nothing changes any more."""
    state: dict[str, Any] = copy.deepcopy(optimizer.state_dict())
    return state


def pairs_of_one_shape(params: list[nn.Parameter]) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """The first two parameters of each shape that several have."""
    alike = collections.defaultdict(list)
    for param in params:
        alike[param.shape].append(param)
    return [(one, others[0]) for one, *others in alike.values() if others]


# --- moves and dtypes ------------------------------------------------------------------------------------------------


@row("after step", parts_torch_ddp=True)
def half_and_back(site: Site) -> None:
    site.module.half().float()


@row("after step", parts_torch_ddp=True)
def bfloat16_and_back_after_zero_grad(site: Site) -> None:
    site.optimizer.zero_grad()
    site.module.bfloat16().float()


@row("after step", parts_torch_ddp=True)
def double_and_back(site: Site) -> None:
    site.module.double().float()


@row("after step", "before backward", "before step")
def to_the_device_that_it_is_on(site: Site) -> None:
    site.module.cpu()
    site.module.to("cpu", torch.float32)


@row("after step")
def apply_a_function_that_copies(site: Site) -> None:
    """As a user's own move does."""
    site.optimizer.zero_grad()
    site.module.apply(lambda module: None)
    site.module._apply(lambda tensor: tensor.clone())


# --- writes into weights ---------------------------------------------------------------------------------------------


@row("after step")
def scale_weights_in_place(site: Site) -> None:
    with torch.no_grad():
        for param in site.params:
            param.mul_(0.5)


@row("after step")
def scale_data(site: Site) -> None:
    for param in site.params:
        param.data.mul_(0.5)


@row("after step")
def scale_a_detached_weight(site: Site) -> None:
    site.params[0].detach().mul_(0.5)


@row("after step")
def point_weights_elsewhere(site: Site) -> None:
    for param in site.params:
        param.data = param.data * 0.5


@row("after step")
def exchange_the_data_of_two_weights(site: Site) -> None:
    for one, other in pairs_of_one_shape(site.params):
        one.data, other.data = other.data, one.data


@row("after step")
def weights_to_a_vector_and_back(site: Site) -> None:
    vector = nn.utils.parameters_to_vector(site.params)
    nn.utils.vector_to_parameters(vector.detach() * 0.5, site.params)


@row("after step")
def write_by_numpy(site: Site) -> None:
    for param in site.params:
        param.detach().numpy()[...] *= 0.5


@row("after step", parts_torch_ddp=True)
def set_weights_to_another_tensor(site: Site) -> None:
    with torch.no_grad():
        for param in site.params:
            param.set_(param.detach() * 0.5)


@row("after step")
def reset_a_layer(site: Site) -> None:
    with torch.no_grad():
        site.params[0].normal_(generator=torch.Generator().manual_seed(7))


@row("after step", "before step")
def load_own_weights(site: Site) -> None:
    site.module.load_state_dict(copy.deepcopy(site.module.state_dict()))


@row("after step")
def load_own_weights_into_the_wrapper(site: Site) -> None:
    site.model.load_state_dict({name: value.clone() for name, value in site.model.state_dict().items()})


@row("after step", "before backward", "before step")
def swap_weights_and_back(site: Site) -> None:
    """As averaging callbacks do for a validation."""
    kept = [param.detach().clone() for param in site.params]
    for param in site.params:
        param.data.copy_(torch.zeros_like(param))
    for param, value in zip(site.params, kept, strict=True):
        param.data.copy_(value)


# --- copies and pickles ----------------------------------------------------------------------------------------------


@row("after step", "before step", "before backward")
def copy_the_module_and_train_the_copy(site: Site) -> None:
    if any(param.grad_fn is not None for param in site.params):
        return
    other = copy.deepcopy(site.module)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    optimizer.zero_grad()
    sum((param**2).sum() for param in other.parameters()).backward()
    optimizer.step()
    site.seen.append([param.detach().clone() for param in other.parameters()])


@row("after step", "before step")
def pickle_the_module(site: Site) -> None:
    other = pickle.loads(pickle.dumps(site.module))
    site.seen.append([param.detach().clone() for param in other.parameters()])


@row("after step", "before step")
def save_and_load_weights(site: Site) -> None:
    file = io.BytesIO()
    torch.save(site.module.state_dict(), file)
    file.seek(0)
    site.seen.append(torch.load(file, weights_only=True))


@row("after step")
def average_weights(site: Site) -> None:
    if not site.kept:
        site.kept.append(torch.optim.swa_utils.AveragedModel(site.module))
    site.kept[0].update_parameters(site.module)
    site.seen.append([param.detach().clone() for param in site.kept[0].parameters()])


# --- gradients -------------------------------------------------------------------------------------------------------


@row("after step", "before step")
def drop_gradients_by_hand(site: Site) -> None:
    for param in site.params:
        param.grad = None


@row("before step")
def drop_one_gradient(site: Site) -> None:
    site.params[0].grad = None


@row("after step", "before step")
def zero_grad_of_the_module(site: Site) -> None:
    site.module.zero_grad()


@row("after step", "before step")
def zero_grad_of_the_wrapper_to_zeros(site: Site) -> None:
    site.model.zero_grad(set_to_none=False)


@row("after step", "before step")
def zero_grad_of_the_optimizer_twice(site: Site) -> None:
    site.optimizer.zero_grad(set_to_none=False)
    site.optimizer.zero_grad()


@row("before step")
def assign_gradients(site: Site) -> None:
    for number, param in enumerate(site.trained):
        param.grad = torch.full_like(param, 0.25 * number)


@row("before step", refused=ReducedGradError)
def scale_gradients_in_place(site: Site) -> None:
    for param in site.params:
        if param.grad is not None:
            param.grad.mul_(0.5)


@row("before step", refused=ReducedGradError)
def assign_scaled_gradients(site: Site) -> None:
    for param in site.params:
        if param.grad is not None:
            param.grad = param.grad * 0.5


@row("before step", refused=ReducedGradError)
def clip_by_norm_with_torch(site: Site) -> None:
    site.seen.append(nn.utils.clip_grad_norm_(site.params, 0.1).clone())


@row("before step", refused=ReducedGradError)
def clip_by_value_with_torch(site: Site) -> None:
    nn.utils.clip_grad_value_(site.params, 0.01)


@row("before step", refused=ReducedGradError)
def read_gradients(site: Site) -> None:
    site.seen.append([param.grad.clone() for param in site.params if param.grad is not None])


@row("before step")
def drop_gradients_and_assign_others(site: Site) -> None:
    site.optimizer.zero_grad()
    for param in site.trained:
        param.grad = torch.ones_like(param)


@row("before step", needs_whole_grads=True)
@row("after step")
def exchange_the_gradients_of_two_weights(site: Site) -> None:
    for one, other in pairs_of_one_shape(site.params):
        one.grad, other.grad = other.grad, one.grad


# --- other forwards --------------------------------------------------------------------------------------------------


@row("before backward", forwards=True)
def add_another_forward(site: Site) -> Tensor:
    return site.forward()


@row("before backward")
def add_a_direct_forward(site: Site) -> Tensor:
    return site.direct()


@row("before backward", "before step", "after step", forwards=True)
def validate(site: Site) -> None:
    site.model.eval()
    with torch.no_grad():
        site.seen.append(site.forward())
    site.model.train()


@row("before backward", "before step", "after step", forwards=True)
def predict_in_inference_mode(site: Site) -> None:
    site.model.eval()
    with torch.inference_mode():
        site.seen.append(site.forward().item())
    site.model.train()


@row("before backward", "before step", "after step", forwards=True)
def forward_without_gradients_in_training_mode(site: Site) -> None:
    with torch.no_grad():
        site.forward()


@row("before step", "after step", leaves_forward=True)
def forward_without_a_backward(site: Site) -> None:
    site.seen.append(site.forward().detach())


@row("before backward", "before step", "after step")
def call_functionally(site: Site) -> None:
    values = {name: value.detach() * 0.5 for name, value in site.module.named_parameters()}
    with torch.no_grad(), torch.nn.utils.stateless._reparametrize_module(site.module, values):
        site.module.eval()
        site.seen.append(site.direct().detach())
        site.module.train()


@row("before backward")
def call_functionally_with_gradients(site: Site) -> Tensor:
    """With gradients of the values that were passed, which are no parameters."""
    values = {name: (value.detach() * 0.5).requires_grad_() for name, value in site.module.named_parameters()}
    with torch.nn.utils.stateless._reparametrize_module(site.module, values):
        loss = site.direct()
    site.seen.append(torch.autograd.grad(loss, list(values.values()), allow_unused=True))
    return 0 * loss.detach()


@row("after step", forwards=True)
def forward_that_fails(site: Site) -> None:
    for module in (site.module, site.model):
        try:
            module(torch.ones(3, 5))
        except (RuntimeError, TypeError) as error:  # the module's own, whatever it is
            site.seen.append(type(error).__name__)


@row("before backward")
def zero_grad_before_the_backward(site: Site) -> None:
    site.optimizer.zero_grad()
    site.module.zero_grad(set_to_none=False)


# --- other backwards -------------------------------------------------------------------------------------------------


@row("before backward", "before step", "after step")
def gradients_of_weights_past_grad(site: Site) -> None:
    site.seen.append(torch.autograd.grad(site.direct(), site.trained, allow_unused=True))


@row("after step")
def local_backward_that_is_dropped(site: Site) -> None:
    """A saliency map, or an initialisation by gradients: no forward of the wrapper prepared it."""
    site.optimizer.zero_grad()
    site.direct().backward()
    site.seen.append([param.grad.clone() for param in site.params if param.grad is not None])
    site.optimizer.zero_grad()


@row("after step", is_on_one_rank=True)
def local_backward_on_the_first_rank(site: Site) -> None:
    site.optimizer.zero_grad()
    if site.rank == 0:
        site.direct().backward()
        site.seen.append([param.grad.clone() for param in site.params if param.grad is not None])
    site.optimizer.zero_grad()


@row("before backward", forwards=True)
def penalise_the_gradient(site: Site) -> Tensor:
    grads = torch.autograd.grad(site.forward(), site.trained, create_graph=True, allow_unused=True)
    return sum((grad**2).sum() for grad in grads if grad is not None)  # type: ignore[return-value]


@row("before step", drives=True, rounds=True)
def accumulate_another_synchronised_backward(site: Site) -> None:
    site.backward(site.forward())


@row("before step")
def accumulate_without_synchronisation(site: Site) -> None:
    """And drop all of it."""
    with site.no_sync():
        site.backward(site.forward())
    site.optimizer.zero_grad()


# --- the optimizer ---------------------------------------------------------------------------------------------------


@row("after step")
def load_own_state(site: Site) -> None:
    site.optimizer.load_state_dict(some_state(site.optimizer))


@row("after step")
def load_own_state_as_plain_dictionaries(site: Site) -> None:
    state = some_state(site.optimizer)
    plain = {"state": {index: dict(values) for index, values in dict(state["state"]).items()}}
    site.optimizer.load_state_dict({**plain, "param_groups": list(state["param_groups"])})


@row("after step")
def save_state_to_a_file_and_load_it(site: Site) -> None:
    file = io.BytesIO()
    torch.save(site.optimizer.state_dict(), file)
    file.seek(0)
    site.optimizer.load_state_dict(torch.load(file, weights_only=True))


@row("after step", "before step")
def read_groups(site: Site) -> None:
    groups = site.optimizer.param_groups
    site.seen.append([[tuple(param.shape) for param in group["params"]] for group in groups])
    site.seen.append(len(site.optimizer.state_dict()["param_groups"]))


@row("after step")
def clear_state(site: Site) -> None:
    site.optimizer.state.clear()


@row("after step", "before step")
def set_options(site: Site) -> None:
    for group in site.optimizer.param_groups:
        group["lr"] *= 0.5
        if "weight_decay" in group:
            group["weight_decay"] = 0.1


@row("after step", drives=True)
def step_without_gradients(site: Site) -> None:
    site.optimizer.zero_grad()
    site.optimizer.step()


@row("after step")
def step_again_with_the_same_gradients(site: Site) -> None:
    site.optimizer.step()


@row("after step", drives=True)
def schedule_the_learning_rate(site: Site) -> None:
    if not site.kept:
        site.kept.append(torch.optim.lr_scheduler.LambdaLR(site.optimizer, lambda step: 0.5**step))
        return
    site.kept[0].step()


@row("after step", drives=True)
def step_with_a_closure(site: Site) -> None:
    def closure() -> Tensor:
        site.optimizer.zero_grad()
        loss = site.forward()
        site.backward(loss)
        return loss

    site.optimizer.step(closure)


@row("after step")
def hook_into_state_dicts(site: Site) -> None:
    calls: list[str] = []
    handles = [
        site.optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before save")),
        site.optimizer.register_state_dict_post_hook(lambda _, state: calls.append("after save")),
        site.optimizer.register_load_state_dict_pre_hook(lambda _, state: calls.append("before load")),
        site.optimizer.register_load_state_dict_post_hook(lambda *_: calls.append("after load")),
    ]
    site.optimizer.load_state_dict(some_state(site.optimizer))
    site.seen.append(list(calls))
    for handle in handles:
        handle.remove()


@row("after step", drives=True)
def hook_into_a_step(site: Site) -> None:
    calls: list[str] = []
    before = site.optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    after = site.optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    site.optimizer.zero_grad()
    site.optimizer.step()
    site.seen.append(list(calls))
    before.remove()
    after.remove()


@row("before step", drives=True)
def freeze_and_thaw_one(site: Site) -> None:
    site.params[0].requires_grad_(False)
    site.params[0].requires_grad_(True)


# --- hooks of modules and tensors ------------------------------------------------------------------------------------


@row("after step", drives=True)
def hook_into_the_module(site: Site) -> None:
    site.module.register_forward_pre_hook(lambda *_: site.kept.append("before forward"))
    site.module.register_forward_hook(lambda *_: site.kept.append("after forward"))
    site.seen.append(len(site.kept))


@row("after step", drives=True)
def double_a_gradient_in_a_hook(site: Site) -> None:
    site.params[0].register_hook(lambda grad: 2 * grad)


@row("after step", drives=True)
def register_a_hook_on_accumulated_gradients(site: Site) -> None:
    site.params[0].register_post_accumulate_grad_hook(lambda param: site.kept.append(param.grad is not None))
    site.seen.append(all(site.kept))
