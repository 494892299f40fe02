"""A Llama of about 0.4 B by transformers' Trainer, bf16 autocast, or pure bf16 with --pure."""

import argparse

import torch
from torch.utils.data import Dataset, Subset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

parser = argparse.ArgumentParser()
for name in ("ckpt", "lora", "liger", "pure", "compile", "eval"):
    parser.add_argument(f"--{name}", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
parser.add_argument("--accum", type=int, default=1)
parser.add_argument("--bs", type=int, default=4)
parser.add_argument("--attn", default="sdpa")
parser.add_argument("--len", type=int, default=1024)
options = parser.parse_args()


class Words(Dataset):
    def __len__(self):
        return 256

    def __getitem__(self, i):
        g = torch.Generator().manual_seed(i)
        x = torch.randint(0, 32000, (options.len,), generator=g)
        return {"input_ids": x, "labels": x.clone(), "attention_mask": torch.ones_like(x)}


config = LlamaConfig(
    vocab_size=32000,
    hidden_size=1536,
    intermediate_size=4096,
    num_hidden_layers=12,
    num_attention_heads=12,
    num_key_value_heads=4,
    attn_implementation=options.attn,
)
model = LlamaForCausalLM(config)
if options.pure:
    model = model.to(torch.bfloat16)
if options.lora:
    from peft import LoraConfig, get_peft_model

    lora = LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")
    model = get_peft_model(model.to(torch.bfloat16), lora)
arguments = TrainingArguments(
    "out",
    per_device_train_batch_size=options.bs,
    gradient_accumulation_steps=options.accum,
    max_steps=6,
    bf16=not options.pure,
    gradient_checkpointing=options.ckpt,
    optim=options.optim,
    report_to=[],
    save_strategy="no",
    logging_steps=1,
    dataloader_num_workers=0,
    use_liger_kernel=options.liger,
    torch_compile=options.compile,
    eval_strategy="steps" if options.eval else "no",
    eval_steps=3,
    per_device_eval_batch_size=8,
)
evaluated = Subset(Words(), range(16)) if options.eval else None
Trainer(model, arguments, train_dataset=Words(), eval_dataset=evaluated).train()
