"""The options of the Accelerate door, and what it reports of them."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
from typing import Any

import pytest

from megastrategy import DistributedDataParallelConfig

from ..accelerate_loops import Worlds, assert_like_ddp, make_accelerator


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


def test_options(worlds: Worlds) -> None:
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
        ("no", "no", {}, None, None),
        ("no", "bf16", {}, None, None),
        ("fp16", "no", {}, "fp16", "comm_hook=fp16 became grad_wire_dtype='fp16'"),
        ("fp16", "bf16", {}, "bf16", "became grad_wire_dtype='bf16'"),
        ("bf16", "no", {"grad_wire_dtype": "bf16"}, "bf16", "became grad_wire_dtype='bf16'"),
        ("bf16", "no", {"grad_wire_dtype": "fp16"}, "fp16", "grad_wire_dtype='fp16' goes before"),
    ],
)
def test_hooks_for_sixteen_bits_become_an_option_and_are_told_of(
    worlds: Worlds, hook: str, wrapper: str, plugin: dict[str, Any], sent: str | None, line: str | None
) -> None:
    (first, lines), (second, others) = worlds.run(translated_hook, hook, wrapper, plugin)
    assert first == second == sent
    assert len(lines) == (line is not None)
    assert line is None or line in lines[0]
    assert not others, "rank 0 alone tells"


def report(name: str, mode: dict[str, Any]) -> tuple[str, str]:
    accelerator = make_accelerator(name, mode, mixed_precision="bf16")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        accelerator.print("said", accelerator.process_index)
        with accelerator.main_process_first():
            accelerator.on_last_process(print)("last")
    return printed.getvalue(), repr(accelerator.state)


def test_reports(worlds: Worlds) -> None:
    (first, state), (second, _) = assert_like_ddp(worlds, report, {"use_distributed_optimizer": True})
    assert (first, second) == ("said 0\n", "last\n")
    assert "Num processes: 2" in state


def test_the_plugin_has_every_field_of_the_config() -> None:
    from megastrategy.accelerate import MegatronDDPPlugin

    own = {field.name: (field.type, field.default) for field in dataclasses.fields(MegatronDDPPlugin)}
    hints = inspect.get_annotations(DistributedDataParallelConfig, eval_str=True)
    for field in dataclasses.fields(DistributedDataParallelConfig):
        assert own.pop(field.name) == (hints[field.name], field.default)
    others = {"bucket_cap_mb", "gradient_as_bucket_view", "state_dict_type", "expert_parallel_size", "replicas"}
    assert set(own) == others
    assert MegatronDDPPlugin().config() == DistributedDataParallelConfig()
    assert MegatronDDPPlugin(bucket_cap_mb=1).config().bucket_size == 2**18
    for wrong, named in [({"bucket_size": -1}, "bucket_size=-1"), ({"state_dict_type": "half"}, "'half'")]:
        with pytest.raises(ValueError, match=named):
            MegatronDDPPlugin(**wrong)
