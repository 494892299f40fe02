"""The field's calculators on a training step, next to our formula and our trace of it.

`python -m tests.published.calculators` prints the table of `gpumem-tui manual plan`. Each calculator's formula is
stated here as its project publishes it; all are asked about the same step: AdamW under bf16 autocast, one GPU, nothing
recomputed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpumem_tui.catalog.loader import find_gpu, find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import predict
from gpumem_tui.formula.recipe import Recipe
from gpumem_tui.memory import GIB

RECIPE = Recipe(precision="amp-bf16", optimizer="adamw")
BATCH_SIZE = 4
_GPU = "h200-141gb"
_STEPS = 2
"""From the second on the optimizer's state is there."""


@dataclass(frozen=True)
class Asked:
    """A network and the tokens of one of its samples."""

    model: str
    seq_len: int

    @property
    def shape(self) -> ModelShape:
        """The catalog's, at this length."""
        return replace(find_model(self.model), seq_len=self.seq_len)

    @property
    def title(self) -> str:
        """Its first cell."""
        return f"{self.model}, {self.seq_len:,} tokens"


ASKED = (
    Asked("gpt2", 1024),
    Asked("gpt2-xl", 1024),
    Asked("bert-large", 512),
    Asked("qwen2.5-0.5b", 2048),
    Asked("llama-3.2-1b", 2048),
    Asked("mistral-7b", 2048),
)


def accelerate_bytes(shape: ModelShape) -> int:
    """`accelerate estimate-memory`, the column "Training using Adam": twice the fp32 weights, regardless of the batch.

    Source: huggingface/accelerate v1.15.0, src/accelerate/commands/estimate.py: the largest of what 16-bit training
    takes for weights, gradients, optimizer and step.
    """
    return 2 * 4 * count_parameters(shape)


def deepspeed_bytes(shape: ModelShape) -> int:
    """DeepSpeed's ZeRO-2 estimate on one GPU: 4 + 16 bytes a parameter; activations are not in it.

    Source: deepspeedai/DeepSpeed docs/code-docs/source/memory.rst@0cca5393.
    """
    return (4 + 16) * count_parameters(shape)


def eleuther_bytes(shape: ModelShape, batch_size: int) -> int:
    """EleutherAI's calculator for one GPU: 2 + 4 + 12 bytes a parameter, and activations by Korthikanti et al.

    It counts parameters from the shape by itself, an embedding and a head of their own and two matrices an MLP.
    Source: EleutherAI/cookbook calc/calc_transformer_mem.py@827ee3b2, its defaults; arXiv:2205.05198 table 2.
    """
    layers, hidden, tokens = shape.layers, shape.hidden, shape.seq_len
    attention = 2 * (1 + 1) * layers * hidden**2
    norms = 8 * hidden * layers + 2 * hidden
    parameters = 2 * shape.vocab * hidden + hidden * tokens + norms + attention + 2 * layers * hidden * shape.ffn
    activations = tokens * batch_size * hidden * layers * (16 * 2 + 2) + (
        tokens * batch_size * layers * (2 * 2 + 1) * shape.heads * tokens
    )
    return (2 + 4 + 12) * parameters + activations


def formula_bytes(shape: ModelShape, batch_size: int) -> int:
    """The allocated peak by our closed form."""
    return predict(shape, RECIPE, batch_size).peak_bytes


def traced_bytes(shape: ModelShape, batch_size: int) -> int:
    """The allocated peak of the step that ran on the simulated GPU."""
    import torch

    from gpumem_tui.simulator.allocator.profile import profile_for
    from gpumem_tui.simulator.device.gpu import SimulatedGpu
    from gpumem_tui.workload.standard import CatalogWorkload
    from tests.in_process import trained

    gpu = find_gpu(_GPU)
    simulated = SimulatedGpu(gpu, profile_for(torch.__version__, gpu), unlimited=True)
    with trained(CatalogWorkload(shape, RECIPE), batch_size, _STEPS, simulated, RECIPE):
        return simulated.allocator.stats.peak_allocated_bytes


def main() -> None:
    """Print the table in the manual's format, in GiB."""
    print(f"| model, micro-batch {BATCH_SIZE} | trace | our formula | accelerate | EleutherAI | DeepSpeed |")
    print("|---|---:|---:|---:|---:|---:|")
    for asked in ASKED:
        shape = asked.shape
        sizes = (
            traced_bytes(shape, BATCH_SIZE),
            formula_bytes(shape, BATCH_SIZE),
            accelerate_bytes(shape),
            eleuther_bytes(shape, BATCH_SIZE),
            deepspeed_bytes(shape),
        )
        cells = " | ".join(f"{size / GIB:.2f}" for size in sizes)
        print(f"| {asked.title} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
