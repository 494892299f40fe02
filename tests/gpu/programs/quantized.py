"""LoRA on top of frozen weights of 4 or 8 bits (bitsandbytes), recomputed: --bits 4 or 8."""

import argparse

import bitsandbytes
import torch
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--bits", type=int, default=4, choices=[4, 8])
options = parser.parse_args()


def quantize(module):
    for name, child in module.named_children():
        if not isinstance(child, nn.Linear) or name == "lm_head":
            quantize(child)
            continue
        if options.bits == 4:
            made = bitsandbytes.nn.Linear4bit(
                child.in_features, child.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            made.weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
        else:
            made = bitsandbytes.nn.Linear8bitLt(
                child.in_features, child.out_features, bias=False, has_fp16_weights=False, threshold=6.0
            )
            made.weight = bitsandbytes.nn.Int8Params(child.weight.data, requires_grad=False, has_fp16_weights=False)
        setattr(module, name, made)


config = LlamaConfig(
    vocab_size=32000,
    hidden_size=2048,
    intermediate_size=5632,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
)
net = LlamaForCausalLM(config).to(torch.bfloat16)
quantize(net)
net.is_loaded_in_4bit, net.is_loaded_in_8bit = options.bits == 4, options.bits == 8
net = prepare_model_for_kbit_training(net.cuda())
targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
net = get_peft_model(net, LoraConfig(r=16, target_modules=targets, task_type="CAUSAL_LM"))
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-4)
for step in range(6):
    x = torch.randint(0, 32000, (4, 1024)).cuda()
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(input_ids=x, labels=x).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
