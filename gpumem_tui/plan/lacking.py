"""What a plan asks of a GPU that its architecture has not, by compute capability."""

from __future__ import annotations

from gpumem_tui.formula.changes import BF16_SINCE
from gpumem_tui.plan.plan import Plan

_FLASH_SINCE = (8, 0)
_TENSOR_CORES_SINCE = (7, 0)
_CUDA_GUIDE = "CUDA C++ Programming Guide, arithmetic instructions by compute capability"
_SDPA = "aten/src/ATen/native/transformers/cuda/sdp_utils.cpp"


def lacking(plan: Plan) -> tuple[str, ...]:
    """A sentence each, with its source; none where the GPU has all that the plan asks for."""
    capability, title = plan.gpu.compute_capability, plan.gpu.title
    recipe = plan.recipe
    found = []
    if recipe.precision in ("bf16", "amp-bf16") and capability < BF16_SINCE:
        found.append(
            f"{title} ({plan.gpu.sm}) has no bfloat16 arithmetic: it is emulated, slowly; amp-fp16 is what it has "
            f"({_CUDA_GUIDE}; bfloat16 since 8.0)"
        )
    if recipe.precision == "amp-fp16" and capability < _TENSOR_CORES_SINCE:
        found.append(f"{title} ({plan.gpu.sm}) has no tensor cores: 16 bits save memory, not time ({_CUDA_GUIDE})")
    if plan.shape.record.has_attention and capability < _FLASH_SINCE:
        if recipe.attention == "flash":
            found.append(f"{title} ({plan.gpu.sm}) has no flash attention: --attention auto takes another ({_SDPA})")
        elif recipe.attention == "auto" and recipe.precision in ("bf16", "amp-bf16"):
            found.append(
                f"no fused attention kernel takes bfloat16 on {title} ({plan.gpu.sm}): attention writes its scores, "
                f"S² of them ({_SDPA})"
            )
        elif recipe.attention == "auto":
            found.append(f"no flash attention on {title} ({plan.gpu.sm}): PyTorch takes the efficient kernel ({_SDPA})")
    return tuple(found)
