"""An unmodified script of ``transformers.Trainer`` under the launcher trains, saves and resumes as under torch DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megastrategy.accelerate.checkpoint import MAIN_PARAMS_FILE
from tests.support.comparison import assert_equal
from tests.support.scripts import run_script

SCRIPT = '''
"""Ordinary user code: train.py OUT [CHECKPOINT]"""
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed


class Tokens(torch.utils.data.Dataset):
    def __len__(self):
        return 48

    def __getitem__(self, index):
        tokens = torch.randint(0, 31, (12,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": tokens, "labels": tokens}


def train(out, checkpoint=None, dtype=torch.float32, **options):
    set_seed(3)
    config = GPT2Config(
        vocab_size=31, n_positions=16, n_embd=24, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    model = GPT2LMHeadModel(config).to(dtype)
    arguments = TrainingArguments(
        out, max_steps=6, save_steps=3, logging_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2,
        optim="adamw_torch", learning_rate=1e-3, max_grad_norm=0.0, use_cpu=True, report_to=[], disable_tqdm=True,
        **options,
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens())
    trainer.train(resume_from_checkpoint=checkpoint)
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "rates": [entry["learning_rate"] for entry in trainer.state.log_history if "loss" in entry],
        "weights": model.state_dict(),
        "optimizer": type(trainer.optimizer.optimizer).__name__,
        "rank": trainer.accelerator.process_index,
    }


def main(out, *checkpoints):
    runs = {"whole": train(f"{out}/whole"), "resumed": train(f"{out}/resumed", f"{out}/whole/checkpoint-3")}
    for checkpoint in checkpoints:
        runs["given"] = train(f"{out}/given", checkpoint)
    options = {"dtype": torch.bfloat16, "save_on_each_node": True}
    runs["bf16"] = train(f"{out}/bf16", **options)
    runs["bf16 resumed"] = train(f"{out}/bf16_resumed", f"{out}/bf16/checkpoint-3", **options)
    torch.save(runs, f"{out}/runs.{runs['whole']['rank']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
'''


def train(folder: Path, *before: str, arguments: tuple[str, ...] = ()) -> list[dict[str, Any]]:
    """By rank."""
    script = folder / "train.py"
    script.write_text(SCRIPT)
    done = run_script(script, folder, *arguments, cwd=folder, before=before, environment={"ACCELERATE_USE_CPU": "true"})
    assert done.returncode == 0, done.stdout + done.stderr
    return [torch.load(folder / f"runs.{rank}") for rank in range(2)]


@pytest.mark.long
def test_a_trainer_trains_saves_and_resumes_to_the_bits_of_torch_ddp(tmp_path: Path) -> None:
    stock_folder, folder = tmp_path / "stock", tmp_path / "ours"
    stock_folder.mkdir()
    folder.mkdir()
    stock = train(stock_folder)
    options = folder / "options.yaml"
    options.write_text("megatron_ddp_config:\n  bucket_size: 1000\n")
    checkpoint = str(stock_folder / "whole" / "checkpoint-3")
    ours = train(folder, "megastrategy.launch", "--config", str(options), arguments=(checkpoint,))
    for theirs, run in zip(stock, ours, strict=True):
        assert (theirs["whole"]["optimizer"], run["whole"]["optimizer"]) == ("AdamW", "DistributedOptimizer")
        assert len(run["whole"]["losses"]) == 6
        for name, expected in (("whole", "whole"), ("resumed", "resumed"), ("given", "resumed")):
            for part in ("losses", "rates", "weights"):
                assert_equal(run[name][part], theirs[expected][part], where=f"{name} {part}")
        assert_equal(run["resumed"]["weights"], run["whole"]["weights"])
        # fp32 main params are saved beside what Trainer saves, or the steps below the weights' precision would be lost
        assert_equal(run["bf16 resumed"]["weights"], run["bf16"]["weights"])
        assert_equal(run["bf16 resumed"]["losses"], run["bf16"]["losses"])
    assert (folder / "bf16" / "checkpoint-3" / MAIN_PARAMS_FILE).is_file()
    states = [torch.load(path / "whole" / "checkpoint-6" / "optimizer.pt") for path in (stock_folder, folder)]
    assert_equal({**states[1], "state": dict(sorted(states[1]["state"].items()))}, states[0])
