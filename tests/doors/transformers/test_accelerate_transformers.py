"""Models of transformers in a plain Accelerate loop: a BERT classifier, a GPT-2 with tied weights, and LoRA adapters on
a frozen one."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from tests.support.comparison import assert_equal

from ..accelerate_loops import Worlds, make_accelerator, weights_of
from ..matrix import MODES

NUM_TOKENS, LENGTH, NUM_LABELS = 31, 12, 3


def make_bert(dropout: float = 0.1) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(3)
    config = BertConfig(
        vocab_size=NUM_TOKENS,
        hidden_size=20,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=28,
        max_position_embeddings=LENGTH,
        num_labels=NUM_LABELS,
        hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout,
    )
    return BertForSequenceClassification(config)


def make_gpt2() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(3)
    config = GPT2Config(
        vocab_size=NUM_TOKENS, n_positions=LENGTH, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


def make_lora() -> Any:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(make_gpt2(), LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True))


@dataclasses.dataclass
class Run:
    """On one rank: the loss of every batch, the weights at the end, and those that were saved and read again."""

    losses: list[float]
    weights: dict[str, Tensor]
    saved: dict[str, Tensor]


def train(name: str, mode: dict[str, Any], kind: str, checkpoints: str, folder: Path) -> Run:
    accelerator = make_accelerator(
        name, mode if name == "megatron_ddp" else None, find_unused=False, gradient_accumulation_steps=2
    )
    net = {"bert": make_bert, "gpt2": make_gpt2, "lora": make_lora}[kind]()
    if checkpoints:
        net.enable_input_require_grads()  # what re-entrant checkpoints need with a frozen base
        net.gradient_checkpointing_enable({"use_reentrant": checkpoints == "re-entrant"})
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(NUM_TOKENS, (LENGTH,), generator=generator) for _ in range(20)]
    optimizer = torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=1e-2)
    model, optimizer, data = accelerator.prepare(net, optimizer, DataLoader(tokens, batch_size=2))  # type: ignore[arg-type]
    torch.manual_seed(accelerator.process_index)  # of dropout
    losses = []
    for batch in data:
        with accelerator.accumulate(model):
            loss = model(input_ids=batch, labels=batch[:, 0] % NUM_LABELS if kind == "bert" else batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1e6)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    unwrapped = accelerator.unwrap_model(model)
    assert unwrapped is net
    unwrapped.save_pretrained(
        folder, is_main_process=accelerator.is_main_process, state_dict=accelerator.get_state_dict(model)
    )
    accelerator.wait_for_everyone()
    again = type(net).from_pretrained(*([make_gpt2()] if kind == "lora" else []), folder)
    return Run(losses, weights_of(net), weights_of(again))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES.values(), ids=MODES)
@pytest.mark.parametrize(
    ("kind", "checkpoints"),
    [("bert", ""), ("gpt2", ""), ("gpt2", "re-entrant"), ("lora", ""), ("lora", "not re-entrant")],
)
def test_a_model_of_transformers_ends_in_the_bits_of_torch_ddp(
    worlds: Worlds, kind: str, checkpoints: str, mode: dict[str, Any], tmp_path: Path
) -> None:
    ours = worlds.run(train, "megatron_ddp", mode, kind, checkpoints, tmp_path / "ours")
    assert_equal(ours, worlds.run(train, "ddp", mode, kind, checkpoints, tmp_path / "theirs"))
    for run in ours:
        assert_equal(run.weights, ours[0].weights)
        assert set(run.saved) == set(run.weights)
        assert_equal({name: run.saved[name] for name in run.weights}, run.weights)
