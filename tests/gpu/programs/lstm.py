"""Two layers of LSTM over words, its state carried from batch to batch, gradients clipped."""

import torch
from torch import nn

WORDS, WIDTH = 20_000, 1024


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2, batch_first=True)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, x, state):
        y, state = self.layers(self.words(x), state)
        return self.head(y), state


net = LanguageModel().cuda()
optimizer = torch.optim.Adam(net.parameters(), 1e-3)
state = None
for step in range(6):
    x = torch.randint(0, WORDS, (32, 129)).cuda()
    if state is not None:
        state = tuple(part.detach() for part in state)
    y, state = net(x[:, :-1], state)
    loss = nn.functional.cross_entropy(y.flatten(0, 1), x[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 0.25)
    optimizer.step()
    print(step, loss.item(), flush=True)
