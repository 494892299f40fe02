"""Networks that mila-iqia/milabench trains, written anew: what a device held at the most, by batch size.

Its config/scaling has the MiB of one H100 (dc0617d), L40S and H200 (fc4054a3): torch 2.6.0 (CUDA 12.6), transformers
4.49, diffusers 0.32. BERT and Reformer take what is reserved and a constant more at all batch sizes and
in both precisions, to 20 MiB; this (`BESIDE_MIB`) is added to what is traced of all networks of a machine.

`bert`: masked words, 512 a text; `t5`: t5-small, 1,024; `reformer`: 4,096; `whisper`: tiny, a classifier of sounds that
are padded to 30 s; `diffusion`: Stable Diffusion 2's UNet on images of 512 x 512, encoded on the way by its VAE and its
text encoder, which do not train; `resnet50` of images in NHWC order. In float16 by autocast but for BERT in fp32 and
diffusion in bfloat16. Not among the rows: runs at the end of the device, those that two runs give differently (LLaVA:
14.5 and 15.3 GiB), ResNet-50 on images made up there, 244 pixels wide (twice what is traced), and graph networks: PNA
took 24.3 GiB with 3,608 molecules and 35.9 with 3,768, as batches whose sizes change leave blocks unused.

`gpumem-tui predict --gpu sim:h100-80gb --torch-version 2.6 -- python -m tests.published.milabench bert-fp16 64`
predicts what is reserved, `python -m tests.published milabench` prints all rows.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import MIB, Range
from gpumem_tui.simulator.allocator.finder import BatchFinder
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.allocator.replay import UNLIMITED_BYTES, AffineTrace
from gpumem_tui.simulator.device.gpu import SimulatedGpu, simulate
from gpumem_tui.workload.models import build_model

BESIDE_MIB = {"h100-80gb": 1221, "l40s-48gb": 873, "h200-141gb": 1376}
_MEASURED_MIB = {
    ("h100-80gb", "bert-fp32"): "1:3915 16:12343 24:16231 40:25887 48:30679 64:40341 80:50003 96:59649 128:78959",
    ("h100-80gb", "bert-fp16"): "1:3885 16:9895 24:12421 40:19399 48:22889 64:29845 104:47353 136:61365",
    ("h100-80gb", "reformer"): "1:1767 16:7307 24:10291 40:16277 48:19261 64:25229 72:28213 160:61037 208:78941",
    ("h100-80gb", "resnet50"): "1:1607 128:7669 248:13327 272:14579 512:25839 608:30491 1248:60845 1560:75693",
    ("h100-80gb", "t5"): "1:4201 8:18065 24:50417 32:66597",
    ("h100-80gb", "whisper"): "1:1525 32:5423 56:8175 128:16837 240:29757 504:60983 664:79909",
    ("h100-80gb", "diffusion"): "1:19285 16:33909 24:43769 32:53980 40:63469 48:73777",
    ("l40s-48gb", "bert-fp32"): "8:7159 16:11967 32:20659 64:39949 72:44803",
    ("l40s-48gb", "bert-fp16"): "8:6025 16:9541 24:12067 40:19045 64:29483 96:43471",
    ("l40s-48gb", "reformer"): "16:6969 32:12939 64:24889 112:42795 120:45779",
    ("l40s-48gb", "resnet50"): "128:7257 248:12927 512:25443 856:41787",
    ("l40s-48gb", "t5"): "1:3811 8:17715 16:33875",
    ("l40s-48gb", "whisper"): "32:4995 64:8751 128:16207 248:30389 376:45541",
    ("l40s-48gb", "diffusion"): "1:18823 8:23549 16:33461 24:43391",
    ("h200-141gb", "bert-fp32"): "32:21188 232:141882",
    ("h200-141gb", "bert-fp16"): "32:16048",
    ("h200-141gb", "reformer"): "32:13438 376:141770",
    ("h200-141gb", "resnet50"): "256:13862",
}  # fmt: skip
_WHY = {
    **dict.fromkeys(
        ("bert", "reformer", "resnet50"),
        "what the device held next to the allocator's differs by 20 MiB from run to run",
    ),
    "t5": "transformers 4.49's attention, written here as 5 has it but for its biases: 12 MiB a text less",
    "whisper": "cuDNN's workspaces: 1.5 copies of a convolution's tensors explain all to 1 %; one is documented",
    "diffusion": "where cuDNN's workspaces lie decides what is cached",
}
_ALONE = "of one sample 170 MiB less to 11 MiB more is next to the allocator's than of BERT; why is not known"
_STEPS = 3
_PIXELS, _CLASSES = 224, 1000


@dataclass(frozen=True)
class Observed:
    """One run: the most MiB that its device held."""

    gpu: str
    program: str
    batch_size: int
    measured_mib: int

    @property
    def id(self) -> str:
        """As the table calls it."""
        return f"milabench-{self.gpu.partition('-')[0]}-{self.program}-{self.batch_size}"

    @property
    def why(self) -> str:
        """The cause where it is outside."""
        return _ALONE if self.batch_size == 1 else _WHY[self.program.partition("-")[0]]

    def predicted(self) -> Range:
        """Trace its steps, and return between what totals of the device they lie."""
        gpu = find_gpu(self.gpu)
        simulated = SimulatedGpu(gpu, profile_for("2.6", gpu), unlimited=True)
        gc.collect()
        with simulate(simulated) as device:
            train(self.program, self.batch_size, device)
        finder = BatchFinder(AffineTrace.constant(simulated.finish()))
        room = Range(UNLIMITED_BYTES, UNLIMITED_BYTES)
        beside_bytes = BESIDE_MIB[self.gpu] * MIB
        return finder.reserved_range(self.batch_size, UNLIMITED_BYTES, room) + Range(beside_bytes, beside_bytes)


def load() -> list[Observed]:
    """All runs."""
    runs = ((gpu, program, size.split(":")) for (gpu, program), all_ in _MEASURED_MIB.items() for size in all_.split())
    return [Observed(gpu, program, int(batch_size), int(mib)) for gpu, program, (batch_size, mib) in runs]


def train(program: str, batch_size: int, device: torch.device) -> None:
    """Make steps on the GPU."""
    name, _, precision = program.partition("-")
    _PROGRAMS[name](batch_size, device, precision)


# Programs


def _transformer(
    batch_size: int, device: torch.device, precision: str, make: Callable[[], nn.Module], inputs: dict[str, list[int]]
) -> None:
    """Adam, whose gradients are never dropped, so they are added up; what the network gives lives through a step."""
    with torch.device(device):
        model = make().train()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler(device.type, enabled=device.type == "cuda" and precision != "fp32")
    for _ in range(_STEPS):
        batch: dict[str, Any] = {
            name: torch.zeros(batch_size, *shape, dtype=torch.float if name == "input_features" else torch.long)
            for name, shape in inputs.items()
        }
        batch = {name: values.to(device) for name, values in batch.items()}
        with torch.autocast(device.type, torch.float16, enabled=precision != "fp32"):
            outputs = model(**batch)
        scaler.scale(outputs.loss).backward()
        scaler.step(optimizer)
        scaler.update()
        del batch, outputs


def _bert(batch_size: int, device: torch.device, precision: str) -> None:
    from transformers import BertConfig, BertForMaskedLM

    words = {"input_ids": [512], "labels": [512]}
    _transformer(batch_size, device, precision, lambda: BertForMaskedLM(BertConfig()), words)


def _reformer(batch_size: int, device: torch.device, precision: str) -> None:
    from transformers import ReformerConfig, ReformerForMaskedLM

    config = ReformerConfig(num_buckets=128)
    words = {"input_ids": [4096], "labels": [4096]}
    _transformer(batch_size, device, precision, lambda: ReformerForMaskedLM(config), words)


def _t5(batch_size: int, device: torch.device, precision: str) -> None:
    from transformers import T5Config, T5ForConditionalGeneration
    from transformers.models.t5 import modeling_t5

    config = T5Config(
        d_ff=2048, vocab_size=32128, decoder_start_token_id=0, pad_token_id=0, attn_implementation="eager"
    )  # fmt: skip
    words = {"input_ids": [1024], "attention_mask": [1024], "labels": [1024]}
    before = modeling_t5.eager_attention_forward
    modeling_t5.eager_attention_forward = _t5_attention
    try:
        _transformer(batch_size, device, precision, lambda: T5ForConditionalGeneration(config), words)
    finally:
        modeling_t5.eager_attention_forward = before


def _t5_attention(
    module: Any, query: Any, key: Any, value: Any, attention_mask: Any, position_bias: Any, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """As transformers 4.49: biases and mask are added up once for all layers, scores are softened in 32 bits."""
    scores = torch.matmul(query, key.transpose(3, 2))
    if not hasattr(position_bias, "masked"):
        position_bias.masked = position_bias if attention_mask is None else position_bias + attention_mask
    scores += position_bias.masked
    weights = F.softmax(scores.float(), dim=-1).type_as(scores)
    weights = F.dropout(weights, p=module.dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights


def _whisper(batch_size: int, device: torch.device, precision: str) -> None:
    from transformers import WhisperConfig, WhisperForAudioClassification

    shape = dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 1536)
    shape |= dict.fromkeys(("encoder_layers", "decoder_layers"), 4)
    shape |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 6)
    config = WhisperConfig(d_model=384, **shape)
    sounds = {"input_features": [80, 3000], "labels": []}
    _transformer(batch_size, device, precision, lambda: WhisperForAudioClassification(config), sounds)


def _resnet50(batch_size: int, device: torch.device, _precision: str) -> None:
    with torch.device(device):
        model = build_model(find_model("resnet-50"), Recipe("fp32")).train().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(_STEPS):
        images = torch.zeros(batch_size, 3, _PIXELS, _PIXELS)
        images = images.to(device=device, dtype=torch.float16, memory_format=torch.channels_last)
        labels = torch.zeros(batch_size, dtype=torch.long).to(device)
        optimizer.zero_grad()
        with torch.autocast(device.type, torch.float16):
            outputs = model(images)
            loss = F.cross_entropy(outputs, labels)
            loss.backward()
            optimizer.step()


def _diffusion(batch_size: int, device: torch.device, _precision: str) -> None:
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel

    with torch.device(device):
        network = UNet2DConditionModel(
            sample_size=96, cross_attention_dim=1024, attention_head_dim=(5, 10, 20, 20), use_linear_projection=True
        )  # fmt: skip
        pictures = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        ).to(torch.bfloat16).requires_grad_(False)  # fmt: skip
        shape = {"num_hidden_layers": 23, "num_attention_heads": 16, "vocab_size": 49408, "max_position_embeddings": 77}
        config = CLIPTextConfig(hidden_size=1024, intermediate_size=4096, hidden_act="gelu", **shape)
        texts = CLIPTextModel(config).to(torch.bfloat16).requires_grad_(False)
    optimizer = torch.optim.AdamW(network.train().parameters(), lr=1e-4)
    for _ in range(_STEPS):
        images = torch.zeros(batch_size, 3, 512, 512).to(device)
        words = torch.zeros(batch_size, 77, dtype=torch.long).to(device)
        encoded = pictures.encode(images.to(torch.bfloat16)).latent_dist.sample() * pictures.config.scaling_factor
        noise = torch.randn_like(encoded)
        times = torch.zeros(batch_size, dtype=torch.long).to(device)
        share = torch.zeros(batch_size, 1, 1, 1, dtype=encoded.dtype).to(device)
        noisy = share * encoded + share * noise
        said = texts(words, return_dict=False)[0]
        with torch.autocast(device.type, torch.bfloat16):
            guess = network(noisy, times, said, return_dict=False)[0]
        guess = guess.float()  # accelerate's, of what a network returns
        loss = F.mse_loss(guess.float(), noise.float())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


_PROGRAMS: dict[str, Callable[[int, torch.device, str], None]] = {
    "bert": _bert, "diffusion": _diffusion, "reformer": _reformer, "resnet50": _resnet50, "t5": _t5,
    "whisper": _whisper,
}  # fmt: skip

if __name__ == "__main__":
    train(sys.argv[1], int(sys.argv[2]), torch.device("cuda", 0))
