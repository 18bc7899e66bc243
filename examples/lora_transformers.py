"""Fine-tunes a language model by LoRA with Transformers and PEFT; nothing here is megastrategy's.

    megastrategy launch --config_file examples/accelerate.yaml examples/lora_transformers.py
    ... examples/lora_transformers.py --model Qwen/Qwen3-0.6B --data my.txt    # a model of the Hub, a text of yours

Without options a small GPT-2 is made from its configuration, which reads this file's bytes, and nothing is downloaded.
Only the adapter is trained, so only its gradients are sent and only its optimizer state is sharded. Writes
OUT/adapter_model.safetensors.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WINDOW = 64  # tokens


def model_and_tokens(name: str | None, text: str) -> tuple[Any, torch.Tensor]:
    if name is None:
        config = GPT2Config(
            vocab_size=256, n_positions=WINDOW, n_embd=64, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
        return GPT2LMHeadModel(config), torch.tensor(list(text.encode()))
    tokens = AutoTokenizer.from_pretrained(name)(text, return_tensors="pt").input_ids[0]
    return AutoModelForCausalLM.from_pretrained(name), tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", metavar="NAME", help="of the Hub, or a folder")
    parser.add_argument("--data", type=Path, default=Path(__file__), metavar="FILE", help="a text")
    parser.add_argument("--epochs", type=float, default=10)
    parser.add_argument("--out", type=Path, default=Path("runs/lora"), metavar="DIR")
    args = parser.parse_args()
    torch.manual_seed(0)
    model, tokens = model_and_tokens(args.model, args.data.read_text(encoding="utf-8"))
    model = get_peft_model(model, LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM"))
    windows = tokens[: len(tokens) // WINDOW * WINDOW].view(-1, WINDOW)
    arguments = TrainingArguments(
        str(args.out), num_train_epochs=args.epochs, per_device_train_batch_size=4, learning_rate=1e-2, report_to=[]
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in windows])
    result = trainer.train()
    trainer.save_model(str(args.out))
    if trainer.is_world_process_zero():
        print(f"mean loss {result.training_loss:.4f} nats a token; the adapter is in {args.out}")


if __name__ == "__main__":
    main()
