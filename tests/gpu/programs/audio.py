"""Speech models of transformers from their configurations: --model wav2vec2 or whisper."""

import argparse

import torch
from transformers import (
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    WhisperConfig,
    WhisperForConditionalGeneration,
)

parser = argparse.ArgumentParser()
parser.add_argument("--model", default="wav2vec2", choices=["wav2vec2", "whisper"])
options = parser.parse_args()

if options.model == "wav2vec2":
    net = Wav2Vec2ForCTC(Wav2Vec2Config(mask_time_prob=0.0, layerdrop=0.0, ctc_zero_infinity=True)).cuda()
    net.freeze_feature_encoder()
else:
    config = WhisperConfig(
        d_model=512,
        encoder_layers=6,
        decoder_layers=6,
        encoder_attention_heads=8,
        decoder_attention_heads=8,
        encoder_ffn_dim=2048,
        decoder_ffn_dim=2048,
    )
    net = WhisperForConditionalGeneration(config).cuda()
net.train()
optimizer = torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 1e-4)
for step in range(6):
    if options.model == "wav2vec2":
        batch = {"input_values": torch.randn(8, 160_000), "labels": torch.randint(1, 31, (8, 60))}
    else:
        batch = {"input_features": torch.randn(8, 80, 3000), "labels": torch.randint(0, 50000, (8, 128))}
    batch = {name: value.cuda() for name, value in batch.items()}
    with torch.autocast("cuda", torch.bfloat16):
        loss = net(**batch).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(step, loss.item(), flush=True)
