"""FLUX.2 klein 4B, a diffusion transformer, as huggingface/peft's method_comparison/image-gen trains it, written anew.

`diffusion.csv` has what each of its results states (`accelerator_memory_max`: the most reserved by training,
evaluations left out), for an L40S, torch 2.12 or 2.13, diffusers 0.38 and PEFT 0.19.2.dev0: 2 images of 512 x 512
pixels, encoded before, with checkpointed blocks in bf16. On the device next to it: 14 prompts and images, encoded, and
the DINOv2 of its evaluations. Not among the rows: AdaLoRA, whose ranks at the peak are not known, HRA, which grows to
the whole device, SHiRA, whose set-up depends on computed values, and those whose set-up takes minutes.

`python -m tests.published diffusion` prints them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from tests.published import adapters
from tests.published.adapters import Adapted

SOURCE = "huggingface/peft method_comparison/image-gen/results at 5d602fd"
WHY = "not resolved: what is idle in segments, as its source does not state what is allocated"
_TABLE = Path(__file__).with_name("diffusion.csv")
_STEPS = 2
_BATCH, _ENCODED, _WORDS, _WORD_WIDTH, _CHANNELS, _SIDE = 2, 14, 512, 7680, 128, 32


def load() -> list[Adapted]:
    """All rows of the table."""
    return adapters.load(_TABLE)


def reserved_bytes(row: Adapted) -> int:
    """The most that two steps reserve on a simulated L40S."""
    return adapters.reserved_on_l40s(lambda device, empty_cache: _train(row, device, empty_cache))


def _train(row: Adapted, device: Any, empty_cache: Any) -> None:
    from diffusers import Flux2KleinPipeline

    model = row.adapted(_transformer(device)).train()
    evaluator = _evaluator(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=1e-4)
    every_prompt = torch.zeros(_ENCODED, _WORDS, _WORD_WIDTH, dtype=torch.bfloat16).to(device)
    every_id = torch.zeros(_ENCODED, _WORDS, 4, dtype=torch.long).to(device)
    every_image = torch.zeros(_ENCODED, _CHANNELS, _SIDE, _SIDE, dtype=torch.bfloat16).to(device)
    empty_cache()
    for _ in range(_STEPS):
        chosen = torch.arange(_BATCH).to(device)
        images, prompts, ids = (every.index_select(0, chosen) for every in (every_image, every_prompt, every_id))
        places = Flux2KleinPipeline._prepare_latent_ids(images).to(device)
        noise = torch.randn_like(images)
        share = torch.zeros(_BATCH, 1, 1, 1, dtype=torch.bfloat16).to(device)
        noisy = Flux2KleinPipeline._pack_latents((1.0 - share) * images + share * noise)
        optimizer.zero_grad()
        [guess] = model(
            hidden_states=noisy, timestep=torch.zeros(_BATCH).to(device), guidance=None, encoder_hidden_states=prompts,
            txt_ids=ids, img_ids=places, return_dict=False,
        )  # fmt: skip
        guess = torch.stack([one.T.reshape(_CHANNELS, _SIDE, _SIDE) for one in guess[:, : noisy.size(1)]])
        target = noise - images
        weights = torch.ones_like(share)
        apart = (weights.float() * (guess.float() - target.float()) ** 2).reshape(_BATCH, -1)
        loss = torch.mean(apart, 1).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        loss = loss.detach()
        loss.item()
    del evaluator


def _transformer(device: Any) -> Any:
    """The share of 3,875,544,576 parameters, as the results count them."""
    from diffusers import Flux2Transformer2DModel

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = Flux2Transformer2DModel(
                num_layers=5, num_single_layers=20, num_attention_heads=24, attention_head_dim=128,
                in_channels=_CHANNELS, joint_attention_dim=_WORD_WIDTH, guidance_embeds=False,
            )  # fmt: skip
    finally:
        torch.set_default_dtype(before)
    model.enable_gradient_checkpointing()
    return model


def _evaluator(device: Any) -> Any:
    from transformers import Dinov2Config, Dinov2Model

    with torch.device(device):
        return Dinov2Model(Dinov2Config())
