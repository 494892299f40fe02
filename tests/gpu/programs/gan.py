"""WGAN with a gradient penalty: the critic's loss has a gradient of a gradient."""

import torch
from torch import nn

WIDTH, BATCH = 128, 64


def up(i, o):
    return nn.Sequential(nn.ConvTranspose2d(i, o, 4, 2, 1), nn.BatchNorm2d(o), nn.ReLU(True))


def down(i, o):
    return nn.Sequential(nn.Conv2d(i, o, 4, 2, 1), nn.InstanceNorm2d(o, affine=True), nn.LeakyReLU(0.2))


generator = nn.Sequential(
    nn.ConvTranspose2d(128, 8 * WIDTH, 4),
    nn.BatchNorm2d(8 * WIDTH),
    nn.ReLU(True),
    up(8 * WIDTH, 4 * WIDTH),
    up(4 * WIDTH, 2 * WIDTH),
    up(2 * WIDTH, WIDTH),
    nn.ConvTranspose2d(WIDTH, 3, 4, 2, 1),
    nn.Tanh(),
).cuda()
critic = nn.Sequential(
    down(3, WIDTH), down(WIDTH, 2 * WIDTH), down(2 * WIDTH, 4 * WIDTH), nn.Conv2d(4 * WIDTH, 1, 8)
).cuda()
for_generator = torch.optim.Adam(generator.parameters(), 1e-4, betas=(0.0, 0.9))
for_critic = torch.optim.Adam(critic.parameters(), 1e-4, betas=(0.0, 0.9))
for step in range(6):
    real = torch.randn(BATCH, 3, 64, 64).cuda()
    fake = generator(torch.randn(BATCH, 128, 1, 1, device="cuda"))
    share = torch.rand(BATCH, 1, 1, 1, device="cuda")
    between = (share * real + (1 - share) * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
    penalty = (slope.flatten(1).norm(dim=1) - 1).square().mean()
    critic_loss = critic(fake.detach()).mean() - critic(real).mean() + 10 * penalty
    for_critic.zero_grad()
    critic_loss.backward()
    for_critic.step()
    loss = -critic(fake).mean()
    for_generator.zero_grad()
    loss.backward()
    for_generator.step()
    print(step, critic_loss.item(), loss.item(), flush=True)
