"""Stand-ins by shape: packages compiled for CUDA that can be imported on the simulated GPU, and what each is.

A package here that is not installed is found by `import`, `importlib.util.find_spec` and `importlib.metadata` anyway;
of one that is installed its Python part is used, and its compiled modules alone are stood in for. The stand-ins
are plain Python on tensors without data: it makes the outputs, what is saved for backward and the scratch that the
published source makes, in its order. Only a followed program on the simulated GPU finds any of it.
"""

from __future__ import annotations

import ast
import functools
import sys
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from importlib.metadata import Distribution, DistributionFinder
from types import ModuleType
from typing import Any

import torch

from gpumem_tui.importing import after_import
from gpumem_tui.simulator.device.gpu import backend
from gpumem_tui.simulator.device.uses import source_tree
from gpumem_tui.workload.errors import LIBRARIES
from gpumem_tui.workload.extensions import STOOD_IN


@dataclass(frozen=True)
class StandIn:
    """A package of which the compiled part is stood in for.

    Attributes:
        package, version: as pip knows them; the version whose source is followed.
        source: the files whose allocations are followed, within the package's repository.
        body: the files of this folder that have the functions, in words, looked through in their order.
        compiled: by compiled module its names, in words; stood in for wherever the package is installed or not, as is
            a module of Python that works with its compiled part alone. ``name=other`` is called `other` in `body`.
        layer: by module of its Python part its names; these stand in only where the package is not installed.
        passed_by: packages that take it where it is installed, unasked, and continue without: they do not find it.
            ``*`` for every library that only tries to import it.
        gone: by module of its Python part that its later versions lack: what to say instead.
    """

    package: str
    version: str
    source: str
    body: str
    compiled: Mapping[str, str]
    layer: Mapping[str, str]
    passed_by: tuple[str, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)

    @property
    def is_installed(self) -> bool:
        """Return whether its Python part is there without us."""
        return all(map(_is_on_path, {name.partition(".")[0] for name in self.layer or self.compiled}))

    @property
    def note(self) -> str:
        """Say what the result rests on."""
        where = "" if self.is_installed else "; it is not installed here, so its Python part is as well"
        return (
            f"{self.package} is not run: its kernels are stood in for by shape, as the source of {self.version} "
            f"allocates ({self.source}){where}"
        )


_FLASH_FUNCTIONS = (
    "flash_attn_func flash_attn_qkvpacked_func flash_attn_kvpacked_func flash_attn_varlen_func "
    "flash_attn_varlen_qkvpacked_func flash_attn_varlen_kvpacked_func flash_attn_with_kvcache "
)
_FLASH_HALVES = " ".join(
    f"{name} _wrapped{name}={name}"
    for name in (
        "_flash_attn_forward", "_flash_attn_backward", "_flash_attn_varlen_forward", "_flash_attn_varlen_backward",
    )
)  # fmt: skip
_ROTARY = "apply_rotary_emb apply_rotary_emb_func=apply_rotary_emb apply_rotary_emb_qkv_ apply_rotary_emb_kv_"
_NORMS = "layer_norm_fn rms_norm_fn RMSNorm=FlashRMSNorm"
_ATTENTION = (
    "memory_efficient_attention memory_efficient_attention_forward AttentionOp "
    "MemoryEfficientAttentionFlashAttentionOp MemoryEfficientAttentionCutlassOp"
)
_BIASES = (
    "AttentionBias LowerTriangularMask LowerTriangularFromBottomRightMask LowerTriangularMaskWithTensorBias "
    "BlockDiagonalMask BlockDiagonalCausalMask"
)
_RECIPES = ("DelayedScaling", "Float8CurrentScaling", "MXFP8BlockScaling", "Float8BlockScaling", "NVFP4BlockScaling")
_CONVOLUTIONS = "causal_conv1d_fn causal_conv1d_update=causal_conv1d_step"
_TRITON_NORMS = "RMSNorm layer_norm_fn rms_norm_fn"
_APEX_NORMS = "FusedLayerNorm FusedRMSNorm MixedFusedLayerNorm MixedFusedRMSNorm"
_UPDATES = (
    "multi_tensor_adam", "multi_tensor_adam_capturable", "multi_tensor_adam_capturable_master", "multi_tensor_sgd",
    "multi_tensor_adagrad", "multi_tensor_scale", "multi_tensor_axpby",
)  # fmt: skip

STAND_INS: tuple[StandIn, ...] = (
    StandIn(
        package="flash-attn",
        version="2.8.3",
        source="csrc/flash_attn/flash_api.cpp",
        body="flash_attn flash_attn_layers",
        compiled={"flash_attn_2_cuda": "fwd bwd varlen_fwd varlen_bwd fwd_kvcache"},
        layer={
            "flash_attn": _FLASH_FUNCTIONS,
            "flash_attn.flash_attn_interface": _FLASH_FUNCTIONS + _FLASH_HALVES,
            "flash_attn.bert_padding": "index_first_axis index_put_first_axis pad_input unpad_input rearrange repeat",
            "flash_attn.layers": "",
            "flash_attn.layers.rotary": f"{_ROTARY} RotaryEmbedding=FlashRotaryEmbedding",
            "flash_attn.losses": "",
            "flash_attn.losses.cross_entropy": "CrossEntropyLoss",
            "flash_attn.ops": "",
            "flash_attn.ops.activations": "swiglu",
            "flash_attn.ops.rms_norm": "RMSNorm=FlashRMSNorm rms_norm",
            "flash_attn.ops.triton": "",
            "flash_attn.ops.triton.cross_entropy": "cross_entropy_loss",
            "flash_attn.ops.triton.layer_norm": _NORMS,
            "flash_attn.ops.triton.rotary": "apply_rotary",
            "flash_attn.utils": "",
            "flash_attn.utils.distributed": "all_gather all_gather_raw",
        },
    ),
    StandIn(
        package="flash-attn-3",
        version="3.0.0",
        source="hopper/flash_api.cpp of Dao-AILab/flash-attention",
        body="flash_attn_3",
        compiled={},
        layer={
            "flash_attn_interface": "flash_attn_func flash_attn_qkvpacked_func flash_attn_varlen_func "
            "flash_attn_with_kvcache"
        },
    ),
    StandIn(
        package="xformers",
        version="0.0.32.post2",
        source="xformers/ops/fmha, xformers/csrc/swiglu",
        body="xformers",
        compiled={
            "xformers": "",
            "xformers.ops": f"{_ATTENTION} {_BIASES} SwiGLU swiglu unbind index_select_cat scaled_index_add",
            "xformers.ops.fmha": f"{_ATTENTION} {_BIASES}",
            "xformers.ops.fmha.attn_bias": _BIASES,
            "xformers.ops.swiglu_op": "SwiGLU swiglu",
            "xformers.ops.unbind": "unbind",
        },
        layer={},
    ),
    StandIn(
        package="apex",
        version="25.9",
        source="apex/optimizers, csrc/layer_norm_cuda.cpp, csrc/multi_tensor_*.cu",
        body="apex",
        compiled={
            "amp_C": "multi_tensor_l2norm multi_tensor_l2norm_mp=multi_tensor_l2norm multi_tensor_lamb "
            "multi_tensor_l2norm_scale=multi_tensor_l2norm multi_tensor_unscale_l2norm=multi_tensor_l2norm "
            "multi_tensor_lamb_mp=multi_tensor_lamb multi_tensor_novograd "
            + " ".join(f"{name}=update_in_place" for name in _UPDATES),
            "fused_layer_norm_cuda": "forward forward_affine=forward forward_affine_mixed_dtypes rms_forward "
            "rms_forward_affine=rms_forward rms_forward_affine_mixed_dtypes backward backward_affine rms_backward "
            "rms_backward_affine",
        },
        layer={
            "apex": "",
            "apex.multi_tensor_apply": "multi_tensor_applier MultiTensorApply",
            "apex.normalization": _APEX_NORMS,
            "apex.normalization.fused_layer_norm": f"{_APEX_NORMS} fused_layer_norm fused_layer_norm_affine "
            "mixed_dtype_fused_layer_norm_affine fused_rms_norm fused_rms_norm_affine "
            "mixed_dtype_fused_rms_norm_affine",
            "apex.optimizers": "FusedAdam FusedLAMB FusedMixedPrecisionLamb FusedSGD FusedAdagrad FusedNovoGrad",
        },
        passed_by=("*",),
        gone={
            "apex.amp": "apex.amp is not in apex since its release 25.09 (NVIDIA/apex#1896), and is not stood in for: "
            "use torch.autocast and torch.amp.GradScaler, which are traced"
        },
    ),
    StandIn(
        package="causal-conv1d",
        version="1.6.1",
        source="csrc/causal_conv1d.cpp",
        body="causal_conv1d",
        compiled={"causal_conv1d_cuda": "causal_conv1d_fwd causal_conv1d_bwd causal_conv1d_update"},
        layer={
            "causal_conv1d": _CONVOLUTIONS,
            "causal_conv1d.causal_conv1d_interface": _CONVOLUTIONS,
            "causal_conv1d.causal_conv1d_varlen": "causal_conv1d_varlen_states",
            "causal_conv1d.cpp_functions": "causal_conv1d_fwd_function causal_conv1d_bwd_function "
            "causal_conv1d_update_function",
        },
        passed_by=("*",),
    ),
    StandIn(
        package="mamba-ssm",
        version="2.3.2",
        source="csrc/selective_scan/selective_scan.cpp, mamba_ssm/ops",
        body="mamba_models mamba_ssd mamba_scan",
        compiled={"selective_scan_cuda": "fwd bwd"},
        layer={
            "mamba_ssm": "selective_scan_fn mamba_inner_fn Mamba Mamba2 MambaLMHeadModel",
            "mamba_ssm.models": "",
            "mamba_ssm.models.config_mamba": "MambaConfig",
            "mamba_ssm.models.mixer_seq_simple": "MambaLMHeadModel MixerModel create_block Block=MambaBlock Mamba",
            "mamba_ssm.modules": "",
            "mamba_ssm.modules.block": "Block=MambaBlock",
            "mamba_ssm.modules.mamba2": "Mamba2",
            "mamba_ssm.modules.mamba_simple": "Mamba Block=MambaBlock",
            "mamba_ssm.modules.mlp": "GatedMLP",
            "mamba_ssm.ops": "",
            "mamba_ssm.ops.selective_scan_interface": "selective_scan_fn mamba_inner_fn",
            "mamba_ssm.ops.triton": "",
            "mamba_ssm.ops.triton.layer_norm": _TRITON_NORMS,
            "mamba_ssm.ops.triton.layernorm": _TRITON_NORMS,
            "mamba_ssm.ops.triton.layernorm_gated": "RMSNorm=GatedRMSNorm rmsnorm_fn",
            "mamba_ssm.ops.triton.ssd_combined": "mamba_chunk_scan_combined mamba_split_conv1d_scan_combined",
        },
        passed_by=("*",),
    ),
    StandIn(
        package="transformer-engine",
        version="2.20",
        source="transformer_engine/pytorch/module, transformer_engine/pytorch/csrc/extensions",
        body="transformer_engine",
        compiled={},
        layer={
            "transformer_engine": "",
            "transformer_engine.common": "",
            "transformer_engine.common.recipe": "Format=Format8Bit "
            + " ".join(f"{name}=Recipe8Bit" for name in _RECIPES),
            "transformer_engine.pytorch": "Linear=TELinear LayerNorm=TELayerNorm LayerNormLinear LayerNormMLP "
            "TransformerLayer DotProductAttention MultiheadAttention=TEMultiheadAttention autocast "
            "fp8_autocast=autocast fp8_model_init=autocast quantized_model_init=autocast checkpoint",
        },
        passed_by=("*",),
    ),
)
"""All packages that are stood in for."""


def named(package: str) -> StandIn:
    """Return a package's stand-in."""
    return next(one for one in STAND_INS if one.package == package)


@contextmanager
def offered() -> Iterator[None]:
    """Have programs find the stand-ins within the context; what they have imported stays with them."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    after_import("transformers.utils.import_utils", _forget)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)


def _forget(module: ModuleType) -> None:
    """Have a module that remembers what is installed look again, as it may have been imported before torch was."""
    for function in vars(module).values():
        if callable(clear := getattr(function, "cache_clear", None)):
            clear()


@functools.cache
def _is_on_path(name: str) -> bool:
    spec = getattr(sys.modules.get(name), "__spec__", None) or PathFinder.find_spec(name)
    return spec is not None and not isinstance(spec.loader, _Loader)


class _Finder(DistributionFinder):
    """Finds modules and metadata of what is stood in for."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002 - the import system's protocol
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        """Return the spec of a module that is stood in for; None of any other, and to whom it passes by."""
        for one in STAND_INS:
            if fullname in one.compiled:
                return _spec(fullname, one, one.compiled)
            of_python = {**one.layer, **one.gone}
            if fullname in of_python and not one.is_installed and not _passes_by(one.passed_by):
                return _spec(fullname, one, of_python)
        return None

    def find_distributions(self, context: Any = DistributionFinder.Context()) -> Iterator[Distribution]:  # noqa: B008
        """Yield metadata of packages that are not installed, under pip's name or the module's."""
        wanted = getattr(context, "name", None)
        for one in STAND_INS:
            names = {_normalized(name) for name in (one.package, *one.layer)}
            if (wanted is None or _normalized(wanted) in names) and not one.is_installed:
                yield _Metadata(one)


def _spec(name: str, one: StandIn, modules: Mapping[str, str]) -> ModuleSpec:
    below = [other for other in modules if other.rpartition(".")[0] == name]
    loader = _Loader(one, modules[name], [other for other in below if other not in one.gone])
    spec = ModuleSpec(name, loader, is_package=bool(below), origin=f"{one.package}{STOOD_IN}")
    if below and "." not in name and (real := PathFinder.find_spec(name)) is not None:
        spec.submodule_search_locations = list(real.submodule_search_locations or ())  # its other modules are its own
    return spec


def _passes_by(packages: Sequence[str]) -> bool:
    """Return whether the code that asks for a module, past the import system, is one of those that continue without."""
    frame, searches = sys._getframe(2), False
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("importlib"):
        searches = searches or frame.f_globals["__name__"] == "importlib.util"
        frame = frame.f_back
    if str(frame.f_globals.get("__name__", "")).partition(".")[0] in packages:
        return True
    path = frame.f_code.co_filename
    return "*" in packages and bool(LIBRARIES.search(path)) and (searches or _is_tried(path, frame.f_lineno))


def _is_tried(path: str, line: int) -> bool:
    """Return whether a line of a file is one of those that a program tries."""
    tree = source_tree(path)
    tries = [node for node in ast.walk(tree) if isinstance(node, ast.Try)] if tree is not None else []
    return any(
        one.handlers and part.lineno <= line <= (part.end_lineno or part.lineno) for one in tries for part in one.body
    )


def _normalized(name: str) -> str:
    return name.replace("_", "-").lower()


class _Loader(Loader):
    """Fills a module with functions of a stand-in's body."""

    def __init__(self, one: StandIn, names: str, below: Sequence[str]) -> None:
        self._one = one
        self._names = names
        self._below = below

    def exec_module(self, module: ModuleType) -> None:
        """Set each name, and the version.

        Raises:
            ImportError: the package no longer has such a module.
        """
        if module.__name__ in self._one.gone:
            raise ImportError(self._one.gone[module.__name__])
        for name in self._below:  # first, as a function may have its module's name
            import_module(name)
        bodies = [vars(import_module(f"gpumem_tui.simulator.standins.{file}")) for file in self._one.body.split()]
        for name in self._names.split():
            public, _, own = name.partition("=")
            setattr(module, public, ChainMap(*bodies)[own or public])
        vars(module)["__version__"] = self._one.version


class _Metadata(Distribution):
    """The distribution that `importlib.metadata` answers of a package that is stood in for."""

    def __init__(self, one: StandIn) -> None:
        self._one = one

    def read_text(self, filename: str) -> str | None:
        """Return the file's text; None of those that are not there."""
        tops = sorted({name.partition(".")[0] for name in (*self._one.layer, *self._one.compiled)})
        return {
            "METADATA": f"Metadata-Version: 2.1\nName: {self._one.package}\nVersion: {self._one.version}\n",
            "top_level.txt": "\n".join(tops),
        }.get(filename)

    def locate_file(self, path: Any) -> Any:
        """Return a place where no file is."""
        return path


# Common to the bodies


def kernel(package: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a function stand for one of a package's compiled ones.

    Its body makes with torch what the compiled one makes (`torch.empty_like`, `x.new_empty`), in its order, and lets go
    of its scratch by returning. Values of what it returns are unknown. The result of the trace states that the package
    is stood in for.
    """

    def marked(body: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(body)
        def run(*args: Any, **kwargs: Any) -> Any:
            backend._gpu.notes[named(package).note] = None
            with torch.no_grad():
                return body(*args, **kwargs)

        return run

    return marked


def on_gpu(package: str, *tensors: torch.Tensor | None) -> None:
    """Raise as compiled code does of a tensor that does not lie on the GPU.

    Raises:
        RuntimeError: one is elsewhere.
    """
    for tensor in tensors:
        if tensor is not None and not tensor.is_cuda:
            raise RuntimeError(f"{package}: input tensor must be on CUDA device, and is on {tensor.device}")
