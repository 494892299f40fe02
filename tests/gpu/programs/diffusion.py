"""Denoisers of diffusers from their configurations: --model unet or dit, with an average of the weights."""

import argparse

import torch
from diffusers import DDPMScheduler, DiTTransformer2DModel, UNet2DConditionModel

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="unet", choices=["unet", "dit"])
parser.add_argument("--ckpt", action="store_true")
options = parser.parse_args()

if options.model == "unet":
    net = UNet2DConditionModel(
        sample_size=32, cross_attention_dim=768, block_out_channels=(192, 384, 768, 768), attention_head_dim=8
    )
else:
    net = DiTTransformer2DModel(num_attention_heads=16, attention_head_dim=64, num_layers=16, sample_size=32)
net = net.cuda()
if options.ckpt:
    net.enable_gradient_checkpointing()
average = torch.optim.swa_utils.AveragedModel(net, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
noising = DDPMScheduler()
optimizer = torch.optim.AdamW(net.parameters(), 1e-4)
for step in range(6):
    latents = torch.randn(16, 4, 32, 32).cuda()
    noise = torch.randn_like(latents)
    times = torch.randint(0, 1000, (16,), device="cuda")
    noisy = noising.add_noise(latents, noise, times)
    with torch.autocast("cuda", torch.bfloat16):
        if options.model == "unet":
            found = net(noisy, times, encoder_hidden_states=torch.randn(16, 77, 768).cuda()).sample
        else:
            classes = torch.randint(0, 1000, (16,)).cuda()
            found = net(noisy, timestep=times, class_labels=classes).sample[:, :4]
        loss = torch.nn.functional.mse_loss(found.float(), noise)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    average.update_parameters(net)
    print(step, loss.item(), flush=True)
