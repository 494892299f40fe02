"""Letters from frames of sound by recurrent layers and CTC: --cell gru or lstm, both ways; --packed for own lengths."""

import argparse

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

parser = argparse.ArgumentParser()
parser.add_argument("--cell", default="gru", choices=["gru", "lstm"])
parser.add_argument("--packed", action="store_true")
parser.add_argument("--amp", action="store_true")
options = parser.parse_args()

FRAMES, BANDS, WIDTH, LETTERS, BATCH = 600, 80, 800, 29, 32


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv2d(1, 32, (11, 41), stride=2, padding=(5, 20)), nn.BatchNorm2d(32), nn.Hardtanh(0, 20)
        )
        cell = nn.GRU if options.cell == "gru" else nn.LSTM
        self.layers = cell(32 * BANDS // 2, WIDTH, 3, bidirectional=True, batch_first=True, dropout=0.1)
        self.head = nn.Linear(2 * WIDTH, LETTERS)

    def forward(self, x, lengths):
        x = self.front(x[:, None]).transpose(1, 2).flatten(2)
        if options.packed:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            x, _ = pad_packed_sequence(self.layers(packed)[0], batch_first=True, total_length=FRAMES // 2)
        else:
            x, _ = self.layers(x)
        return self.head(x)


net = Net().cuda()
optimizer = torch.optim.AdamW(net.parameters(), 3e-4)
g = torch.Generator().manual_seed(0)
for step in range(6):
    x = torch.randn(BATCH, FRAMES, BANDS, generator=g).cuda()
    lengths = torch.linspace(FRAMES // 4, FRAMES // 2, BATCH).long()
    letters = torch.randint(1, LETTERS, (BATCH, 80), generator=g).cuda()
    sizes = torch.full((BATCH,), 80)
    with torch.autocast("cuda", torch.bfloat16, enabled=options.amp):
        y = net(x, lengths)
    loss = nn.functional.ctc_loss(y.float().log_softmax(-1).transpose(0, 1), letters, lengths, sizes)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), 400)
    optimizer.step()
    print(step, loss.item(), flush=True)
