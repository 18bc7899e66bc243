"""Requests that an Accelerate user makes in vain are refused by name, with the way out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ..accelerate_loops import Worlds, inputs, make_accelerator, net_of, sgd


def _prepare(*make_optimizers: Callable[[list[nn.Module]], Any], num_models: int = 1, **options: Any) -> None:
    accelerator = make_accelerator("megatron_ddp", **options)
    nets: list[nn.Module] = [net_of(seed) for seed in range(num_models)]
    accelerator.prepare(*nets, *(make(nets) for make in make_optimizers))


def _comm_hook() -> None:
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    make_accelerator(
        "megatron_ddp", kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.POWER_SGD)]
    )


def _local_sgd() -> None:
    from accelerate.local_sgd import LocalSGD

    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, _ = accelerator.prepare(net, sgd(net.parameters()))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False):
        pass
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
        pass


def _uneven() -> None:
    accelerator = make_accelerator("megatron_ddp")
    net = net_of()
    model, _ = accelerator.prepare(net, sgd(net.parameters()))
    with accelerator.join_uneven_inputs([model], even_batches=True):
        model(inputs(accelerator)).sum().backward()
    with accelerator.join_uneven_inputs([model], even_batches=False), accelerator.no_sync(model):
        model(inputs(accelerator)).sum().backward()
    with accelerator.join_uneven_inputs([model], even_batches=False):
        loss = model(inputs(accelerator)).sum()
        loss.backward()


def _environment(variable: str) -> None:
    os.environ[variable] = "true"
    try:
        make_accelerator("megatron_ddp")
    finally:
        del os.environ[variable]


def _plugins(**arguments: Any) -> None:
    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    if "twice" in arguments:
        Accelerator(megatron_ddp_plugin=MegatronDDPPlugin(), kwargs_handlers=[MegatronDDPPlugin()])
    Accelerator(**arguments)


def _nan_check_with_fp16() -> None:
    accelerator = make_accelerator("megatron_ddp", {"check_for_nan_in_grad": True})
    accelerator.scaler = torch.amp.GradScaler("cpu")
    net = net_of()
    accelerator.prepare(net, sgd(net.parameters()))


def _optimizer_first() -> None:
    accelerator, net = make_accelerator("megatron_ddp"), net_of()
    optimizer = accelerator.prepare(sgd(net.parameters()))
    accelerator.prepare(net)
    del optimizer


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "comm hook": (_comm_hook, "comm_hook="),
    "local sgd": (_local_sgd, "LocalSGD"),
    "uneven": (_uneven, "even_batches=False"),
    "deepspeed": (lambda: _plugins(deepspeed_plugin=object()), "deepspeed_plugin="),
    "fsdp": (lambda: _plugins(fsdp_plugin=object()), "fsdp_plugin="),
    "megatron": (lambda: _plugins(megatron_lm_plugin=object()), "megatron_lm_plugin="),
    "deepspeed environment": (lambda: _environment("ACCELERATE_USE_DEEPSPEED"), "ACCELERATE_USE_DEEPSPEED"),
    "fsdp environment": (lambda: _environment("ACCELERATE_USE_FSDP"), "ACCELERATE_USE_FSDP"),
    "megatron environment": (lambda: _environment("ACCELERATE_USE_MEGATRON_LM"), "ACCELERATE_USE_MEGATRON_LM"),
    "two plugins": (lambda: _plugins(twice=True), "2 MegatronDDPPlugins"),
    "no plugin": (lambda: _plugins(megatron_ddp_plugin={"bucket_size": 3}), "expected a MegatronDDPPlugin, got dict"),
    "optimizer first": (_optimizer_first, "prepare the model before the optimizer"),
    "one optimizer of two models": (
        lambda: _prepare(lambda nets: sgd([*nets[0].parameters(), *nets[1].parameters()]), num_models=2),
        "belong to 2 models",
    ),
    "not element-wise": (lambda: _prepare(lambda nets: torch.optim.LBFGS(nets[0].parameters())), "cannot be sharded"),
    "nan check with fp16": (_nan_check_with_fp16, "check_for_nan_in_grad=True contradicts"),
}


def refusal(case: str) -> str:
    job, pattern = REFUSED[case]
    with pytest.raises((ValueError, NotImplementedError), match=pattern) as caught:
        job()
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(worlds: Worlds, case: str) -> None:
    first, second = worlds.run(refusal, case)
    assert first == second


def refusals_with(plugin: Any) -> dict[str, str]:
    """The messages whose way out is an all-reduce."""
    from megastrategy.accelerate import Accelerator

    accelerator = Accelerator(megatron_ddp_plugin=plugin)
    nets = net_of(1), net_of(2)
    models = accelerator.prepare(*nets)
    both = itertools.chain(nets[0].parameters(), nets[1].parameters())
    said = {}
    for name, make in {
        "two models": lambda: accelerator.prepare(sgd(both)),
        "not element-wise": lambda: accelerator.prepare(torch.optim.LBFGS(nets[0].parameters())),
        "not prepared": lambda: [
            accelerator.backward(models[0](inputs(accelerator)).sum()),
            sgd(nets[0].parameters()).step(),
        ],
    }.items():
        with pytest.raises((ValueError, RuntimeError)) as caught:
            make()
        said[name] = str(caught.value)
    return said


def refusals_in_both_forms(file: Any) -> list[dict[str, str]]:
    from megastrategy.accelerate import MegatronDDPPlugin
    from megastrategy.accelerate.launch_config import plugin_from_launch

    return [refusals_with(plugin) for plugin in (MegatronDDPPlugin(), plugin_from_launch(file, {}))]


def test_the_way_out_is_named_in_the_form_in_which_the_options_came(worlds: Worlds, tmp_path: Any) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("megatron_ddp_config: {bucket_size: 100}")
    for by_hand, launched in worlds.run(refusals_in_both_forms, file):
        assert len(by_hand) == len(launched) == 3
        for message in by_hand.values():
            assert "pass MegatronDDPPlugin(use_distributed_optimizer=False)" in message.replace("Pass", "pass")
        for message in launched.values():
            assert f"`use_distributed_optimizer: false` under megatron_ddp_config: in {file}" in message
            assert "MEGATRON_DDP_USE_DISTRIBUTED_OPTIMIZER=false in the environment" in message
            assert "MegatronDDPPlugin(" not in message
