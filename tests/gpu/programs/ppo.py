"""Proximal policy optimization from pictures: a rollout without gradients, then epochs of minibatches over it."""

import torch
from torch import nn
from torch.distributions import Categorical

STEPS, WORLDS, ACTIONS, MINIBATCH = 64, 64, 18, 1024


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Conv2d(4, 32, 8, stride=4),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4, stride=2),
            nn.ReLU(),
            nn.Conv2d(64, 64, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64 * 7 * 7, 512),
            nn.ReLU(),
        )
        self.policy = nn.Linear(512, ACTIONS)
        self.value = nn.Linear(512, 1)

    def forward(self, x):
        y = self.trunk(x)
        return Categorical(logits=self.policy(y)), self.value(y).squeeze(-1)


agent = Agent().cuda()
optimizer = torch.optim.Adam(agent.parameters(), 2.5e-4, eps=1e-5)
observations = torch.zeros(STEPS, WORLDS, 4, 84, 84, device="cuda")
actions = torch.zeros(STEPS, WORLDS, dtype=torch.long, device="cuda")
logs, rewards, values = (torch.zeros(STEPS, WORLDS, device="cuda") for _ in range(3))
for update in range(2):
    for t in range(STEPS):
        observations[t] = torch.rand(WORLDS, 4, 84, 84).cuda()
        with torch.no_grad():
            policy, values[t] = agent(observations[t])
            actions[t] = policy.sample()
            logs[t] = policy.log_prob(actions[t])
        rewards[t] = torch.rand(WORLDS).cuda()
    advantages = torch.zeros_like(rewards)
    last = torch.zeros(WORLDS, device="cuda")
    for t in reversed(range(STEPS)):
        ahead = values[t + 1] if t + 1 < STEPS else torch.zeros(WORLDS, device="cuda")
        last = rewards[t] + 0.99 * ahead - values[t] + 0.99 * 0.95 * last
        advantages[t] = last
    flat = [each.flatten(0, 1) for each in (observations, actions, logs, advantages, advantages + values)]
    for chosen in torch.randperm(STEPS * WORLDS).split(MINIBATCH)[:3]:
        x, action, log, advantage, goal = (each[chosen.cuda()] for each in flat)
        policy, value = agent(x)
        ratio = (policy.log_prob(action) - log).exp()
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        clipped = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.9, 1.1)).mean()
        loss = clipped + 0.5 * (value - goal).square().mean() - 0.01 * policy.entropy().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
        optimizer.step()
        print(update, loss.item(), flush=True)
