"""Samples with a cache of keys and values, then takes a policy-gradient step, with a frozen reference."""

import copy

import torch
from transformers import LlamaConfig, LlamaForCausalLM

config = LlamaConfig(
    vocab_size=32000,
    hidden_size=1024,
    intermediate_size=2816,
    num_hidden_layers=8,
    num_attention_heads=16,
    num_key_value_heads=4,
)
net = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
reference = copy.deepcopy(net).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(net.parameters(), 1e-6)


def log_probabilities(model, x):
    logits = torch.log_softmax(model(input_ids=x).logits[:, :-1].float(), -1)
    return logits.gather(-1, x[:, 1:, None]).squeeze(-1)


for step in range(4):
    prompts = torch.randint(0, 32000, (8, 64)).cuda().repeat_interleave(4, 0)
    with torch.no_grad():
        x = net.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            max_new_tokens=64,
            min_new_tokens=64,
            do_sample=True,
            pad_token_id=0,
        )
    rewards = torch.rand(32).cuda()
    advantages = (rewards - rewards.mean()) / rewards.std()
    with torch.no_grad():
        expected = log_probabilities(reference, x)
    found = log_probabilities(net, x)
    divergence = torch.exp(expected - found) - (expected - found) - 1
    loss = (-(torch.exp(found - found.detach()) * advantages[:, None]) + 0.04 * divergence)[:, 63:].mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
