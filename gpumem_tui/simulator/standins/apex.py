"""Apex: its fused optimizers and normalizations, and what their kernels allocate.

Follows apex/optimizers, apex/normalization/fused_layer_norm.py, csrc/layer_norm_cuda.cpp,
csrc/layer_norm_cuda_kernel.cu and csrc/multi_tensor_*.cu of NVIDIA/apex, release 25.09. Tensors that an update only
reads and writes are passed to its kernels by address (csrc/multi_tensor_apply.cuh), which takes no memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gpumem_tui.simulator.standins.register import kernel, on_gpu

_PACKAGE = "apex"
_HALF = (torch.float16, torch.bfloat16)
_CHUNK = 2048 * 32
_BLOCKS = 320
"""Sums of a norm, one for each block (csrc/multi_tensor_l2norm_kernel.cu)."""
_PARTS = 16
"""Parts in which the gradient of a normalization's weight is summed (`part_size` of csrc/layer_norm_cuda_kernel.cu)."""


# Kernels on lists of tensors: (values of a block, flag that asks to do nothing, lists of tensors, …)


@kernel(_PACKAGE)
def update_in_place(_chunk: int, flag: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *_: Any) -> None:
    """Update tensors, as the kernels of Adam, SGD and Adagrad, and those that scale, do."""
    on_gpu(_PACKAGE, flag, *(tensor for tensors in lists for tensor in tensors))


@kernel(_PACKAGE)
def multi_tensor_l2norm(
    chunk: int, flag: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the norm of all tensors of a list, and of each if that is asked for (the last argument)."""
    on_gpu(_PACKAGE, flag, *lists[0])
    return _norms(chunk, lists[0], by_tensor=more[-1] is True)


def _norms(chunk: int, tensors: Sequence[torch.Tensor], *, by_tensor: bool) -> tuple[torch.Tensor, torch.Tensor]:
    first = tensors[0]
    sums = [first.new_zeros(_BLOCKS, dtype=torch.float32)]
    count = len(tensors) if by_tensor else 0
    if by_tensor:
        most = max(math.ceil(tensor.numel() / chunk) for tensor in tensors)
        sums.append(first.new_zeros(count * most, dtype=torch.float32))
    each = first.new_empty(count, dtype=torch.float32)
    return first.new_empty(1, dtype=torch.float32), each


@kernel(_PACKAGE)
def multi_tensor_lamb(chunk: int, flag: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *_: Any) -> None:
    """Update parameters, (gradients, parameters, moments, …), whose gradients then hold the update."""
    on_gpu(_PACKAGE, flag, *(tensor for tensors in lists for tensor in tensors))
    of_parameters = _norms(chunk, lists[1], by_tensor=True)
    of_updates = _norms(chunk, lists[0], by_tensor=True)
    del of_parameters, of_updates


@kernel(_PACKAGE)
def multi_tensor_novograd(chunk: int, flag: torch.Tensor, lists: Sequence[Sequence[torch.Tensor]], *_: Any) -> None:
    """Update (gradients, parameters, moments), with norms by gradient (`multi_tensor_norm_out_cuda`)."""
    on_gpu(_PACKAGE, flag, *(tensor for tensors in lists for tensor in tensors))
    sums = _norms(chunk, lists[0], by_tensor=True)
    del sums


class MultiTensorApply:
    """Calls a kernel on lists of tensors."""

    available = True

    def __init__(self, chunk_size: int) -> None:
        self.chunk_size = chunk_size

    def __call__(self, kernel: Callable[..., Any], flag: Any, lists: Any, *args: Any) -> Any:
        """Call a kernel with the values of a block, the flag and the lists."""
        return kernel(self.chunk_size, flag, lists, *args)


multi_tensor_applier = MultiTensorApply(_CHUNK)


# Optimizers


class _Fused(torch.optim.Optimizer):
    """Common to the optimizers: a flag on the GPU, and steps counted by group.

    `set_grad_none` shows what torch does today anyway.
    """

    _types: tuple[torch.dtype, ...] = (torch.float16, torch.float32)
    _update: Callable[..., Any] = staticmethod(update_in_place)

    def __init__(self, params: Any, *, amsgrad: bool = False, **defaults: Any) -> None:
        if amsgrad:
            raise RuntimeError(f"{type(self).__name__} does not support the AMSGrad variant.")
        super().__init__(params, defaults)
        self._dummy_overflow_buf = torch.tensor([0], dtype=torch.int, device="cuda")

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, **_: Any) -> Any:
        """Make the state of every parameter that has a gradient, and update those of one type at once."""
        with torch.enable_grad():
            loss = None if closure is None else closure()
        self._begin()
        for group in self.param_groups:
            self._count(group)
            for parameters in self._by_type(group):
                for parameter in parameters:
                    if not self.state[parameter]:
                        self._make(parameter)
                states = [list(self.state[parameter].values()) for parameter in parameters]
                lists = [[one.grad for one in parameters], parameters, *map(list, zip(*states, strict=True))]
                multi_tensor_applier(self._update, self._dummy_overflow_buf, lists)
        return loss

    def _by_type(self, group: dict[str, Any]) -> Iterator[list[Any]]:
        with_gradient = [one for one in group["params"] if one.grad is not None]
        if any(one.dtype not in self._types for one in with_gradient):
            raise RuntimeError(f"{type(self).__name__} only support fp16 and fp32.")
        for dtype in self._types:
            if found := [one for one in with_gradient if one.dtype == dtype]:
                yield found

    def _begin(self) -> None:
        """Do what comes before any group."""

    def _count(self, group: dict[str, Any]) -> None:
        group["step"] = group.get("step", 0) + 1

    def _make(self, parameter: torch.Tensor) -> None:
        """Make a parameter's state."""
        raise NotImplementedError


class FusedAdam(_Fused):
    """Adam with moments in fp32 for parameters of any type, and fp32 copies of these if they are asked for."""

    _types = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(
        self,
        params: Any,
        lr: Any = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,  # noqa: ARG002 - as apex's is called
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        set_grad_none: bool = True,  # noqa: ARG002
        capturable: bool = False,
        master_weights: bool = False,
    ) -> None:
        if master_weights and not capturable:
            raise RuntimeError("Master weights is currently only supported with the capturable version.")
        super().__init__(
            params, amsgrad=amsgrad,
            lr=torch.tensor(lr, dtype=torch.float32) if capturable else lr,
            bias_correction=bias_correction, betas=betas, eps=eps, weight_decay=weight_decay,
        )  # fmt: skip
        self.capturable, self.master_weights = capturable, master_weights
        every = [one for group in self.param_groups for one in group["params"]]
        self._masters = [one.clone().detach().float() for one in every] if master_weights else []
        for group in self.param_groups if capturable else ():
            group["lr"] = group["lr"].to(group["params"][0].device)

    def _count(self, group: dict[str, Any]) -> None:
        if not self.capturable:
            super()._count(group)
        elif "step" in group:
            group["step"] += (self._dummy_overflow_buf != 1).to(torch.int)
        else:
            group["step"] = torch.tensor([1], dtype=torch.int, device="cuda")

    def _make(self, parameter: torch.Tensor) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(parameter).float()


class FusedLAMB(_Fused):
    """LAMB with moments in the parameters' type."""

    _update = staticmethod(multi_tensor_lamb)

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0.01,
        amsgrad: bool = False,
        adam_w_mode: bool = True,  # noqa: ARG002 - as apex's is called
        grad_averaging: bool = True,
        set_grad_none: bool = True,  # noqa: ARG002
        max_grad_norm: float = 1.0,
        use_nvlamb: bool = False,  # noqa: ARG002
    ) -> None:
        super().__init__(
            params, amsgrad=amsgrad, lr=lr, bias_correction=bias_correction, betas=betas,
            eps=eps, weight_decay=weight_decay, grad_averaging=grad_averaging, max_grad_norm=max_grad_norm,
        )  # fmt: skip

    def _begin(self) -> None:
        gradients = [one.grad for group in self.param_groups for one in group["params"] if one.grad is not None]
        norms = [torch.zeros(1, device="cuda") for _ in range(2)]
        for place, dtype in enumerate((torch.float32, torch.float16)):
            if of_type := [one for one in gradients if one.dtype == dtype]:
                norms[place] = multi_tensor_applier(multi_tensor_l2norm, self._dummy_overflow_buf, [of_type], False)[0]
        multi_tensor_applier(multi_tensor_l2norm, self._dummy_overflow_buf, [norms], False)

    def _make(self, parameter: torch.Tensor) -> None:
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(parameter)


class FusedMixedPrecisionLamb(FusedLAMB):
    """LAMB with moments in fp32, and fp32 copies of the parameters of a reduced type."""

    _types = (torch.float16, torch.bfloat16, torch.float32)

    def __init__(self, params: Any, lr: float = 1e-3, step: int = 0, **options: Any) -> None:
        self.reduced_precision_dtype = options.pop("reduced_precision_dtype", None)
        super().__init__(params, lr, **options)
        for group in self.param_groups:
            group["step"] = torch.tensor([step], dtype=torch.int, device="cuda")
        self._masters: list[torch.Tensor] | None = None

    def _begin(self) -> None:
        every = [one for group in self.param_groups for one in group["params"]]
        if self._masters is None:
            self._masters = [one.clone().detach().float() for one in every if one.dtype == self.reduced_precision_dtype]
        gradients = [one.grad for one in every if one.grad is not None]
        multi_tensor_applier(multi_tensor_l2norm, self._dummy_overflow_buf, [gradients], False)

    def _make(self, parameter: torch.Tensor) -> None:
        dtype = torch.float32 if parameter.dtype == self.reduced_precision_dtype else parameter.dtype
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(parameter, dtype=dtype)


class FusedSGD(_Fused):
    """SGD, whose momentum is kept even where it is 0."""

    def __init__(
        self,
        params: Any,
        lr: float,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        wd_after_momentum: bool = False,  # noqa: ARG002 - as apex's is called
        materialize_master_grads: bool = True,  # noqa: ARG002
        set_grad_none: bool = False,  # noqa: ARG002
    ) -> None:
        super().__init__(
            params, lr=lr, momentum=momentum, dampening=dampening,
            weight_decay=weight_decay, nesterov=nesterov,
        )  # fmt: skip

    def _make(self, parameter: torch.Tensor) -> None:
        self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


class FusedAdagrad(_Fused):
    """Adagrad with sums in the parameters' type."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        set_grad_none: bool = True,  # noqa: ARG002
        adagrad_w_mode: bool = False,  # noqa: ARG002 - as apex's is called
    ) -> None:
        super().__init__(params, lr=lr, eps=eps, weight_decay=weight_decay)

    def _make(self, parameter: torch.Tensor) -> None:
        self.state[parameter]["sum"] = torch.zeros_like(parameter)


class FusedNovoGrad(_Fused):
    """NovoGrad: a moment in the parameter's type, and a norm for each parameter."""

    _update = staticmethod(multi_tensor_novograd)

    def __init__(self, params: Any, lr: float = 1e-3, **options: Any) -> None:
        options.pop("set_grad_none", None)
        defaults = {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, **options}
        super().__init__(params, lr=lr, **defaults)

    def _count(self, group: dict[str, Any]) -> None:
        super()._count(group)
        if "exp_avg_sq" not in group:
            by_type = list(self._by_type(group))
            for one in (one for parameters in by_type for one in parameters):
                one.grad.float().pow(2).sum().sqrt()  # read, so that the first norms are those of the first gradients
            group["exp_avg_sq"] = [torch.zeros(len(one), device="cuda") for one in by_type]

    def _make(self, parameter: torch.Tensor) -> None:
        self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


# Normalizations. Their kernels: statistics in fp32 of 16-bit inputs, the output in the input's or the weight's type


def _statistics(values: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    rows = values.numel() // math.prod(shape)
    return values.new_empty(rows, dtype=torch.float32 if values.dtype in _HALF else values.dtype)


def _normalized(values: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, count: int) -> tuple[torch.Tensor, ...]:
    on_gpu(_PACKAGE, values)
    return torch.empty_like(values, dtype=dtype), *(_statistics(values, shape) for _ in range(count))


def _gradients(values: torch.Tensor, shape: Sequence[int], *parameters: torch.Tensor) -> tuple[torch.Tensor, ...]:
    made = torch.empty_like(values), *(torch.empty_like(one) for one in parameters)
    dtype = torch.float32 if values.dtype in _HALF else values.dtype
    parts = [values.new_empty(_PARTS, math.prod(shape), dtype=dtype) for _ in parameters]
    del parts
    return made


@kernel(_PACKAGE)
def forward(values: torch.Tensor, shape: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """Return output, mean and inverse deviation: (input, shape, weight and bias where it has them, eps)."""
    return _normalized(values, shape, values.dtype, 2)


@kernel(_PACKAGE)
def forward_affine_mixed_dtypes(
    values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    """Return output, in the weight's type, mean and inverse deviation."""
    return _normalized(values, shape, weight.dtype, 2)


@kernel(_PACKAGE)
def rms_forward(values: torch.Tensor, shape: Sequence[int], *_: Any) -> tuple[torch.Tensor, ...]:
    """Return output and inverse deviation: (input, shape, weight where it has one, eps)."""
    return _normalized(values, shape, values.dtype, 1)


@kernel(_PACKAGE)
def rms_forward_affine_mixed_dtypes(
    values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    """Return output, in the weight's type, and inverse deviation."""
    return _normalized(values, shape, weight.dtype, 1)


@kernel(_PACKAGE)
def backward(_gradient: Any, _mean: Any, _deviation: Any, values: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the gradient of the input; `values` is the input, or the output where that is kept."""
    return torch.empty_like(values)


@kernel(_PACKAGE)
def backward_affine(
    _gradient: Any,
    _mean: Any,
    _deviation: Any,
    values: torch.Tensor,
    shape: Sequence[int],
    weight: torch.Tensor,
    bias: torch.Tensor,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of input, weight and bias."""
    return _gradients(values, shape, weight, bias)


@kernel(_PACKAGE)
def rms_backward(_gradient: Any, _deviation: Any, values: torch.Tensor, *_: Any) -> torch.Tensor:
    """Return the gradient of the input."""
    return torch.empty_like(values)


@kernel(_PACKAGE)
def rms_backward_affine(
    _gradient: Any, _deviation: Any, values: torch.Tensor, shape: Sequence[int], weight: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, ...]:
    """Return gradients of input and weight."""
    return _gradients(values, shape, weight)


class _Normalization(torch.autograd.Function):
    """Keeps input or output, weight and bias, and statistics, which are results, as the operators of apex have them."""

    @staticmethod
    def forward(
        ctx: Any, values: Any, weight: Any, bias: Any, shape: Any, is_rms: bool, keeps_output: bool, is_mixed: bool
    ) -> Any:
        values = values.contiguous()
        parameters = [one.contiguous() for one in (weight, bias) if one is not None]
        normalize = {
            (False, False): forward,
            (True, False): rms_forward,
            (False, True): forward_affine_mixed_dtypes,
            (True, True): rms_forward_affine_mixed_dtypes,
        }[is_rms, is_mixed]
        output, *statistics = normalize(values, shape, *parameters, 0.0)
        kept = [statistics[-1]] if keeps_output else statistics
        ctx.save_for_backward(output if keeps_output else values, *kept, *parameters)
        ctx.shape, ctx.is_rms, ctx.count = shape, is_rms, len(kept)
        return output, *statistics

    @staticmethod
    def backward(ctx: Any, gradient: Any, *_: Any) -> Any:
        values, *rest = ctx.saved_tensors
        statistics, parameters = rest[: ctx.count], rest[ctx.count :]
        first = (gradient.contiguous(), *([None] if ctx.is_rms else [None, None])[: -len(statistics)], *statistics)
        if parameters:
            differentiate = rms_backward_affine if ctx.is_rms else backward_affine
            found = differentiate(*first, values, ctx.shape, *parameters, 0.0)
        else:
            found = [(rms_backward if ctx.is_rms else backward)(*first, values, ctx.shape, 0.0)]
        return *found, *[None] * (7 - len(found))


def _normalize(
    values: Any, weight: Any, bias: Any, shape: Any, *, is_rms: bool, keeps_output: bool, is_mixed: bool = False
) -> Any:
    """Cast what is normalized, and the parameters, where autocast is on."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        values, weight, bias = (one if one is None else one.to(dtype) for one in (values, weight, bias))
    apply: Any = _Normalization.apply
    with torch.amp.autocast("cuda", enabled=False):
        return apply(values, weight, bias, shape, is_rms, keeps_output, is_mixed)[0]


def _function(parameters: int, *, is_rms: bool, is_mixed: bool = False) -> Callable[..., Any]:
    """Return apex's function of an input, as many parameters, a shape, eps and whether to keep the output."""

    def normalize(
        input: Any,  # noqa: A002 - as apex's is called
        *given: Any,
        eps: float = 1e-6,
        memory_efficient: bool = False,
        **named: Any,
    ) -> Any:
        values = [*given, *(named[name] for name in ("weight", "bias", "normalized_shape") if name in named)]
        weight, bias = (*values[:parameters], None, None)[:2]
        keeps_output = bool(values[parameters + 2]) if len(values) > parameters + 2 else memory_efficient
        shape = values[parameters]
        return _normalize(input, weight, bias, shape, is_rms=is_rms, keeps_output=keeps_output, is_mixed=is_mixed)

    return normalize


fused_layer_norm = _function(0, is_rms=False)
fused_layer_norm_affine = _function(2, is_rms=False)
mixed_dtype_fused_layer_norm_affine = _function(2, is_rms=False, is_mixed=True)
fused_rms_norm = _function(0, is_rms=True)
fused_rms_norm_affine = _function(1, is_rms=True)
mixed_dtype_fused_rms_norm_affine = _function(1, is_rms=True, is_mixed=True)


class FusedLayerNorm(nn.Module):
    """Normalizes the last dimensions; on the host by torch's own."""

    _is_rms, _is_mixed = False, False

    def __init__(
        self,
        normalized_shape: Any,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        memory_efficient: bool = False,
    ) -> None:
        super().__init__()
        self.normalized_shape = torch.Size(
            [normalized_shape] if isinstance(normalized_shape, int) else normalized_shape
        )
        self.eps, self.elementwise_affine, self.memory_efficient = eps, elementwise_affine, memory_efficient
        self.weight = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
        if not self._is_rms:
            self.bias = nn.Parameter(torch.empty(self.normalized_shape)) if elementwise_affine else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the weight with ones, the bias with zeros."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        bias = getattr(self, "bias", None)
        if bias is not None:
            nn.init.zeros_(bias)

    def forward(self, input: torch.Tensor) -> Any:  # noqa: A002 - as apex's is called
        """Normalize; the class shows how."""
        bias = getattr(self, "bias", None)
        if not input.is_cuda:
            if self._is_rms:
                return F.rms_norm(input, self.normalized_shape, self.weight, self.eps)
            return F.layer_norm(input, self.normalized_shape, self.weight, bias, self.eps)
        return _normalize(
            input, self.weight, bias, self.normalized_shape,
            is_rms=self._is_rms, keeps_output=self.memory_efficient, is_mixed=self._is_mixed,
        )  # fmt: skip


class FusedRMSNorm(FusedLayerNorm):
    """Normalizes by the root mean square."""

    _is_rms = True


class MixedFusedLayerNorm(FusedLayerNorm):
    """Gives the weight's type."""

    _is_mixed = True


class MixedFusedRMSNorm(FusedRMSNorm):
    """Gives the weight's type."""

    _is_mixed = True
