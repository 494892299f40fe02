"""Programs with apex, mamba-ssm and Transformer Engine, which are not here: what stays, counted by hand."""

from __future__ import annotations

import pytest

from tests.command.running import Project

PROGRAM = """
    import sys
    import torch
    from apex.optimizers import FusedAdam

    if sys.argv[1] == "mamba":
        from mamba_ssm.models.config_mamba import MambaConfig
        from mamba_ssm.models.mixer_seq_simple import MambaLMHeadModel

        config = MambaConfig(d_model=256, n_layer=2, vocab_size=4096)
        model = MambaLMHeadModel(config, device="cuda", dtype=torch.bfloat16)
        batch, tokens = torch.randint(0, 4096, (4, 512)), lambda out: out.logits
    else:
        import transformer_engine.pytorch as te

        layers = [te.TransformerLayer(256, 1024, 4, params_dtype=torch.bfloat16) for _ in range(2)]
        model = torch.nn.Sequential(*layers)
        batch, tokens = torch.randn(512, 4, 256).bfloat16(), lambda out: out
    counted = sum(parameter.numel() for parameter in model.parameters())
    print("parameters", counted, sum(parameter.nbytes for parameter in model.parameters()))
    optimizer = FusedAdam(model.parameters(), lr=1e-4)
    for _ in range(3):
        optimizer.zero_grad()
        tokens(model(batch.cuda())).float().square().mean().backward()
        optimizer.step()
"""

# A block has in_proj, conv1d and its bias, x_proj, dt_proj and its bias, out_proj and the norm in bf16, A_log and D in
# fp32; next to blocks there are the embedding and a norm. A layer has 12 matrices of 256 × 256, biases and two norms.
MAMBA = 2 * (256 * 1024 + 512 * 5 + 512 * 48 + 16 * 512 + 512 + 512 * 256 + 256) + 4096 * 256 + 256
WIDE = 2 * 512 * (16 + 1)
LAYERS = 2 * (12 * 256 * 256 + 4 * 256 + 5 * 256 + 4 * 256)


@pytest.mark.parametrize(("which", "half", "wide"), [("mamba", MAMBA, WIDE), ("engine", LAYERS, 0)])
def test_what_stays_is_weights_and_moments_in_fp32(project: Project, which: str, half: int, wide: int) -> None:
    project.write("train.py", PROGRAM)
    traced = project.predict("python", "train.py", which).json["traced"]
    packages = ["apex", "mamba-ssm", "causal-conv1d"] if which == "mamba" else ["apex", "transformer-engine"]
    for package in packages:
        assert any(f"{package} is not run: its kernels are stood in for by shape" in note for note in traced["notes"])
    rounded = 40 * 512  # of small tensors
    assert 0 <= traced["buckets"]["parameters"] - (2 * half + 4 * wide) <= rounded
    assert 0 <= traced["buckets"]["optimizer"] - 8 * (half + wide) <= rounded
