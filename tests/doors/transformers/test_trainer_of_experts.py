"""``transformers.Trainer`` with experts over data-parallel ranks: a Qwen3-MoE that is divided over
``accelerator.expert_mesh`` trains, is saved and resumes as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import Dataset, SequentialSampler

from tests.support.tensor_parallel import whole

from ..accelerate_loops import Worlds
from .test_experts import RANKS, batch, divide_experts

transformers = pytest.importorskip("transformers")

from .test_experts import make_net  # noqa: E402 - needs transformers

STEPS = 3


class Sequences(Dataset[Any]):
    def __len__(self) -> int:
        return STEPS * RANKS

    def __getitem__(self, number: int) -> dict[str, Tensor]:
        tokens = batch(number, 0)[0]
        return {"input_ids": tokens, "labels": tokens}


def make_model() -> Any:
    net = make_net("Qwen3Moe")
    net.config.output_router_logits = False  # type: ignore[union-attr] # the loss of labels only
    return net


def train(ep: int, folder: Path, resume: Path | None) -> dict[str, Tensor]:
    """``resume``: a checkpoint. The model is made from it: Trainer restores no experts of Transformers 5.24, which have
    other names in the file, under torch DDP and in one process neither."""
    from megastrategy.accelerate import Accelerator, MegatronDDPPlugin, replace_accelerators

    plugin = MegatronDDPPlugin(expert_parallel_size=ep, bucket_size=5000)
    accelerator = Accelerator(megatron_ddp_plugin=plugin)
    net = make_model() if resume is None else type(make_model()).from_pretrained(resume)
    one_rank = init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("dp", "tp"))["tp"]
    divide_experts(net, accelerator.expert_mesh["expert_parallel"], one_rank, "all_to_all")
    arguments = transformers.TrainingArguments(
        str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=1,
        optim="sgd",
        learning_rate=0.5,
        lr_scheduler_type="constant",
        max_grad_norm=0.1,
        save_steps=1,
        report_to=[],
        disable_tqdm=True,
    )

    class InOrder(transformers.Trainer):
        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return SequentialSampler(dataset or self.train_dataset)

    with replace_accelerators(plugin):
        trainer = InOrder(net, arguments, train_dataset=Sequences())
        trainer.train(resume_from_checkpoint=resume and str(resume))
    return {name: whole(param) for name, param in net.named_parameters()}


def train_alone() -> Any:
    net, data = make_model(), Sequences()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    for step in range(STEPS):
        for rank in range(RANKS):
            sample = data[step * RANKS + rank]
            (net(**{name: value.unsqueeze(0) for name, value in sample.items()}).loss / RANKS).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return net


def test_a_trainer_trains_and_saves_divided_experts_as_one_process_does(worlds: Worlds, tmp_path: Path) -> None:
    alone = train_alone()
    expected = {name: param.detach() for name, param in alone.named_parameters()}
    for weights in worlds.run(train, 2, tmp_path / "saved", None, size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
    loaded = type(alone).from_pretrained(tmp_path / "saved" / f"checkpoint-{STEPS}")
    torch.testing.assert_close(dict(loaded.state_dict()), dict(alone.state_dict()), rtol=0.0, atol=1e-6)
    # and goes on from a step before, with experts that are divided otherwise
    for weights in worlds.run(train, 4, tmp_path / "resumed", tmp_path / "saved" / "checkpoint-2", size=RANKS):
        torch.testing.assert_close(weights, expected, rtol=0.0, atol=1e-6)
