"""The options of the Accelerate door, and requests that are refused by name, with the way out."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megastrategy import DistributedDataParallelConfig

from ..accelerate_loops import (
    Worlds,
    inputs,
    make_accelerator,
    net_of,
    sgd,
)


def look_at_options() -> None:
    import accelerate
    from accelerate.utils import DistributedDataParallelKwargs, DistributedType

    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin

    plugin = MegatronDDPPlugin(bucket_size=77, static_graph=True)
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, broadcast_buffers=False, gradient_as_bucket_view=True)
    accelerator = Accelerator(kwargs_handlers=[handler, plugin])
    assert accelerator.megatron_ddp_config == DistributedDataParallelConfig(
        bucket_size=77, static_graph=True, broadcast_buffers=False
    )
    assert accelerator.state.megatron_ddp_plugin is plugin
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert "MULTI_CPU" in str(accelerator.state)
    assert Accelerator().megatron_ddp_plugin is plugin, "a second one is set up as the first"
    own, theirs = (inspect.signature(cls.__init__).parameters for cls in (Accelerator, accelerate.Accelerator))
    assert [*theirs, "megatron_ddp_plugin"] == list(own)
    assert Accelerator(True, False, None, 4).gradient_accumulation_steps == 4, "by position too"
    with pytest.raises(TypeError, match="bucket_sise"):
        Accelerator(bucket_sise=3)


def test_options_reach_the_config(worlds: Worlds) -> None:
    worlds.run(look_at_options)


def test_plugin_names_what_to_write() -> None:
    from megastrategy.accelerate import MegatronDDPPlugin

    with pytest.raises(ValueError, match=r"^unknown argument 'bucket_sze': did you mean 'bucket_size'\?$"):
        MegatronDDPPlugin(bucket_sze=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^the option 'store_param_remainders' was removed: leave it out"):
        MegatronDDPPlugin(store_param_remainders=True)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"^grad_wire_dtype='int8' was removed: write 'bf16' or 'fp16'"):
        MegatronDDPPlugin(grad_wire_dtype="int8")  # type: ignore[arg-type]


def translated_hook(hook: str, wrapper: str, plugin: dict[str, Any]) -> tuple[str | None, list[str]]:
    """The dtype in which gradients are sent, and the lines about it."""
    import logging

    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    kinds = DDPCommunicationHookType
    handler = DistributedDataParallelKwargs(comm_hook=kinds(hook), comm_wrapper=kinds(wrapper))
    logger, keep = logging.getLogger("megastrategy.accelerate.accelerator"), Keep()
    level = logger.level
    logger.addHandler(keep)
    logger.setLevel(logging.INFO)
    try:
        accelerator = make_accelerator("megatron_ddp", plugin, kwargs_handlers=[handler])
    finally:
        logger.removeHandler(keep)
        logger.setLevel(level)
    return accelerator.megatron_ddp_config.grad_wire_dtype, [line for line in lines if "comm_hook" in line]


@pytest.mark.parametrize(
    ("hook", "wrapper", "plugin", "sent", "line"),
    [
        ("no", "bf16", {}, None, None),
        ("fp16", "no", {}, "fp16", "comm_hook=fp16 became grad_wire_dtype='fp16'"),
        ("fp16", "bf16", {}, "bf16", "became grad_wire_dtype='bf16'"),
        ("bf16", "no", {"grad_wire_dtype": "fp16"}, "fp16", "grad_wire_dtype='fp16' goes before"),
    ],
)
def test_16_bit_hook_becomes_an_option(
    worlds: Worlds, hook: str, wrapper: str, plugin: dict[str, Any], sent: str | None, line: str | None
) -> None:
    (first, lines), (second, others) = worlds.run(translated_hook, hook, wrapper, plugin)
    assert first == second == sent
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]
    assert not others, "rank 0 alone tells"


def test_plugin_has_every_field_of_the_config() -> None:
    from megastrategy.accelerate import MegatronDDPPlugin

    own = {field.name: (field.type, field.default) for field in dataclasses.fields(MegatronDDPPlugin)}
    hints = inspect.get_annotations(DistributedDataParallelConfig, eval_str=True)
    for field in dataclasses.fields(DistributedDataParallelConfig):
        assert own.pop(field.name) == (hints[field.name], field.default)
    others = {"bucket_cap_mb", "gradient_as_bucket_view", "state_dict_type", "expert_parallel_size", "replicas"}
    assert set(own) == others
    assert MegatronDDPPlugin().config() == DistributedDataParallelConfig()
    assert MegatronDDPPlugin(bucket_cap_mb=1).config().bucket_size == 2**18
    for wrong, named in [
        ({"bucket_size": -1}, "bucket_size=-1"),
        ({"state_dict_type": "half"}, "'half'"),
        ({"expert_parallel_size": 0}, "expert_parallel_size=0: expected a number of ranks"),
        ({"expert_parallel_size": True}, "expert_parallel_size=True: expected a number of ranks"),
        (
            {"expert_parallel_size": 2, "find_unused_parameters": False},
            "Leave both out with expert_parallel_size",
        ),
    ]:
        with pytest.raises(ValueError, match=named):
            MegatronDDPPlugin(**wrong)


# --- refusals ---------------------------------------------------------------------------------------------------------


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
    "nan check with fp16": (_nan_check_with_fp16, "check_for_nan_in_grad=True contradicts"),
}


def refusal(case: str) -> str:
    job, pattern = REFUSED[case]
    with pytest.raises((ValueError, NotImplementedError), match=pattern) as caught:
        job()
    return str(caught.value)


@pytest.mark.parametrize("case", REFUSED)
def test_request_is_refused_by_name(worlds: Worlds, case: str) -> None:
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


def test_way_out_has_the_form_of_the_options(worlds: Worlds, tmp_path: Any) -> None:
    file = tmp_path / "options.yaml"
    file.write_text("megatron_ddp_config: {bucket_size: 100}")
    for by_hand, launched in worlds.run(refusals_in_both_forms, file):
        assert len(by_hand) == len(launched) == 3
        assert "belong to 2 models" in by_hand["two models"]
        assert "cannot be sharded" in by_hand["not element-wise"]
        for message in by_hand.values():
            assert "pass MegatronDDPPlugin(use_distributed_optimizer=False)" in message.replace("Pass", "pass")
        for message in launched.values():
            assert f"`use_distributed_optimizer: false` under megatron_ddp_config: in {file}" in message
            assert "MEGATRON_DDP_USE_DISTRIBUTED_OPTIMIZER=false in the environment" in message
            assert "MegatronDDPPlugin(" not in message
