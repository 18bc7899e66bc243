"""transformers.Trainer on two processes, with no word of megastrategy:

megastrategy launch --config_file examples/accelerate.yaml examples/templates/with_transformers.py
"""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

tokens = torch.arange(32).repeat(512, 1) % 7  # a sequence that is easy to continue
data = [{"input_ids": row, "labels": row} for row in tokens]
config = GPT2Config(vocab_size=32, n_positions=32, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
arguments = TrainingArguments("out", per_device_train_batch_size=8, num_train_epochs=2, learning_rate=3e-3)
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
result = trainer.train()
if trainer.is_world_process_zero():
    print(f"loss {result.training_loss:.4f}")
