"""Direct preference optimization of a small Llama, with its frozen copy, written out."""

import copy

import torch
import torch.nn.functional as F
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
reference = copy.deepcopy(net).requires_grad_(False)
net.gradient_checkpointing_enable()
optimizer = torch.optim.RMSprop(net.parameters(), 1e-6)


def log_probabilities(model, x):
    logits = model(input_ids=x).logits[:, :-1].float()
    return -F.cross_entropy(logits.flatten(0, 1), x[:, 1:].flatten(), reduction="none").view(len(x), -1).sum(1)


for step in range(6):
    x = torch.randint(0, 32000, (8, 512)).cuda()  # four that are chosen, then four that are rejected
    with torch.no_grad():
        expected = log_probabilities(reference, x)
    better, worse = (log_probabilities(net, x) - expected).chunk(2)
    loss = -F.logsigmoid(0.1 * (better - worse)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
