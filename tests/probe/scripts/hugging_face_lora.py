"""Hugging Face's Trainer with LoRA: a frozen model with small adapters."""

import tempfile

import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(0)
base = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=64, n_positions=32))
model = get_peft_model(base, LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"))
tokens = [torch.randint(0, 64, (16,)) for _ in range(40)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        tempfile.mkdtemp(),
        max_steps=10,
        per_device_train_batch_size=4,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": ids, "labels": ids} for ids in tokens],
)
trainer.train()
optimizer = trainer.optimizer
