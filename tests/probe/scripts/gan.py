"""Two models that train against each other, two discriminator steps for each of the generator; a moving average."""

import copy

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(0)
generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 16))
discriminator = nn.Sequential(nn.Linear(16, 32), nn.LeakyReLU(), nn.Linear(32, 1))
average = copy.deepcopy(generator).requires_grad_(False)
generator_optimizer = torch.optim.RMSprop(generator.parameters())
discriminator_optimizer = torch.optim.Adam(discriminator.parameters())
for _ in range(40):
    for _ in range(2):
        real, fake = torch.randn(4, 16), generator(torch.randn(4, 8)).detach()
        loss = F.softplus(discriminator(fake)).mean() + F.softplus(-discriminator(real)).mean()
        discriminator_optimizer.zero_grad()
        loss.backward()
        discriminator_optimizer.step()
    generator_optimizer.zero_grad()
    F.softplus(-discriminator(generator(torch.randn(4, 8)))).mean().backward()
    generator_optimizer.step()
    with torch.no_grad():
        for kept, new in zip(average.parameters(), generator.parameters(), strict=True):
            kept.lerp_(new, 0.01)
