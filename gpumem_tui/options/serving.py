"""From the options of `predict --serve` to an inference engine: its model's weights and layers, its GPU and share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil
from pathlib import Path

from gpumem_tui.catalog.config_file import ConfigFile, quantization_of, read_config_file
from gpumem_tui.catalog.hub import hub_model, weights_by_dtype
from gpumem_tui.catalog.kv_layers import KvLayers, kv_layers_of_config, kv_layers_of_shape
from gpumem_tui.catalog.loader import DEFAULT_MODEL, find_model, shape_from_hf_config
from gpumem_tui.catalog.shapes import CatalogError, ModelShape
from gpumem_tui.errors import OptionError
from gpumem_tui.formula.parameters import ParameterTensor, count_parameters, parameter_tensors
from gpumem_tui.memory import Range, Unknown
from gpumem_tui.options.configuration import Options, device_of
from gpumem_tui.search.serving import Served

_INDEX = "model.safetensors.index.json"
_WEIGHTS = "*.safetensors"


@dataclass(frozen=True)
class ServeTerms:
    """The options of `predict --serve`; None for what was not typed.

    Attributes:
        kv_type: of the KV cache, a key of `KV_BITS`; None for the type of the weights.
        weights_bits: of weights that no file quantizes.
    """

    context: int | None = None
    concurrency: int = 1
    kv_type: str | None = None
    weights_bits: int = 16


def served(options: Options, terms: ServeTerms) -> Served:
    """Return what an engine is asked to hold. Asks the driver for the GPUs, and the hub for a configuration.

    Raises:
        OptionError: no such model or GPU, an unreadable configuration, or a context that must be given.
    """
    trained = options.trained
    if trained.command or trained.workload is not None:
        raise OptionError("--serve: is for a model; give --model NAME, a hub name or a config.json")
    parallel = trained.tensor_parallel
    if trained.gpus > parallel:
        raise OptionError(f"--gpus {trained.gpus}: --serve divides by --tensor-parallel {trained.gpus}; give that")
    model = _of_catalog(options, terms.weights_bits) if trained.config is None else _of_file(options, terms)
    _check_cut(model, parallel)
    device = device_of(options)
    context = terms.context or (0 if isinstance(model.layers, Unknown) else model.layers.most_tokens)
    if not context and isinstance(model.layers, Unknown):
        raise OptionError(f"--serve: {model.layers.reason}; --context 8192 prints the rest")
    if not context:
        raise OptionError("--context: the configuration names no longest sequence; give the tokens of a sequence")
    engine = device.gpu.engine
    if engine is not None and not engine.share:
        raise OptionError("--serve: takes the engine's own share; give one such as `--beside 0.45`")
    return Served(
        model.name,
        device if engine is None else device_of(options, engine=False),
        model.weights,
        model.words,
        model.layers,
        1 - options.headroom if engine is None else engine.share,
        terms.kv_type or ("fp32" if terms.weights_bits == 32 else "bf16"),
        context,
        terms.concurrency,
        parallel,
    )


@dataclass(frozen=True)
class _Model:
    """A model to serve.

    Attributes:
        weights: bytes of one GPU. `words`: what they are.
    """

    name: str
    layers: KvLayers | Unknown
    weights: Range | Unknown
    words: str = ""


def _check_cut(model: _Model, gpus: int) -> None:
    """Refuse GPUs that an engine cannot divide the heads over, as vLLM does (`verify_with_parallel_config`).

    Raises:
        OptionError: they do not divide the heads of queries; or neither those of keys, nor are a multiple of them.
    """
    if isinstance(model.layers, Unknown) or not model.layers.heads:
        return
    heads = model.layers.heads
    grouped = [one.heads for one in model.layers.cached if not one.is_latent]

    def divides(ways: int) -> bool:
        return not heads % ways and all(not each % ways or not ways % each for each in grouped)

    if divides(gpus):
        return
    fewer = next(ways for ways in range(min(gpus, heads), 0, -1) if divides(ways))
    more = next((ways for ways in range(gpus, heads + 1) if divides(ways)), None)
    others = "" if more is None else f" or {more}"
    counted = f"{heads} heads" + "".join(f", {each} of keys and values" for each in sorted(set(grouped) - {heads}))
    raise OptionError(f"--tensor-parallel {gpus}: does not divide the {counted} of {model.name}; give {fewer}{others}")


def _of_catalog(options: Options, bits: int) -> _Model:
    try:
        shape = find_model(options.trained.model or DEFAULT_MODEL)
    except CatalogError as error:
        raise OptionError(f"--model: {error} (a model of the Hugging Face hub is OWNER/NAME)") from error
    shape = shape.overridden(**options.trained.changes)
    weights = _by_shape(shape, bits, bits, options.trained.tensor_parallel)
    return _Model(shape.name, kv_layers_of_shape(shape), weights, _counted(shape, bits))


def _of_file(options: Options, terms: ServeTerms) -> _Model:
    path = options.trained.config or ""
    try:
        file = read_config_file(path, offline=options.trained.offline)
    except CatalogError as error:
        raise OptionError(f"--model {path}: {error}") from error
    if options.trained.changes:
        option = next(iter(options.trained.changes)).replace("_", "-")
        raise OptionError(f"--{option}: --serve takes {file.name} as its file has it; leave it out")
    layers, gpus = kv_layers_of_config(file.values), options.trained.tensor_parallel
    stored, shape = _stored_bytes(Path(file.path).parent), _shape_of(file)
    quantized = quantization_of(file.values)
    if stored is not None and (terms.weights_bits == 16 or quantized is not None):
        return _Model(file.name, layers, _cut(stored, shape, gpus), "as stored next to the configuration")
    if isinstance(shape, Unknown) or (quantized is not None and quantized.bits is None):
        on_hub = _on_hub(path, terms.weights_bits, offline=options.trained.offline)
        if on_hub is not None:
            return _Model(file.name, layers, _cut(on_hub, shape, gpus), "as the hub lists their types")
    if isinstance(shape, Unknown):
        return _Model(file.name, layers, shape)
    if quantized is None:
        bits = terms.weights_bits
        return _Model(file.name, layers, _by_shape(shape, bits, bits, gpus), _counted(shape, bits))
    if quantized.bits is None:
        unknown = Unknown(f"the size of {quantized.title} depends on the format; give the folder with its {_WEIGHTS}")
        return _Model(file.name, layers, unknown)
    return _Model(file.name, layers, _by_shape(shape, quantized.bits, 16, gpus), quantized.words)


def _shape_of(file: ConfigFile) -> ModelShape | Unknown:
    values: Mapping[str, object] = {key: value for key, value in file.values.items() if key != "quantization_config"}
    try:
        return shape_from_hf_config(values, file.name)
    except CatalogError:
        kind = file.model_type or "this kind of"
        return Unknown(f"no formula for the weights of {kind} models; give the folder with its {_WEIGHTS}")


def _counted(shape: ModelShape, bits: int) -> str:
    return f"{count_parameters(shape):,} parameters of {bits} bits"


def _cut(size_bytes: int, shape: ModelShape | Unknown, gpus: int) -> Range:
    """Return one GPU's part of these bytes of weights: at least an even one, at most as the formula cuts tensors."""
    share = 1 / gpus
    if not isinstance(shape, Unknown):
        share = _by_shape(shape, 16, 16, gpus).high_bytes / _by_shape(shape, 16, 16, 1).high_bytes
    return Range(ceil(size_bytes / gpus), ceil(size_bytes * share))


def _by_shape(shape: ModelShape, bits: float, others_bits: int, gpus: int) -> Range:
    """Return the bytes of the weights of one of several GPUs.

    Args:
        bits: of a weight of a linear layer in a block. `others_bits`: of the rest, which a format may quantize too.
    """
    least = most = 0.0
    for one in parameter_tensors(shape):
        values = one.values / _ways(one, shape, gpus)
        least += values * (others_bits if len(one.dims) == 1 else bits)
        most += values * (bits if one.linear else others_bits)
    return Range(ceil(least / 8), ceil(most / 8))


_LATENT = ("q_a_proj", "kv_a_proj_with_mqa")


def _ways(tensor: ParameterTensor, shape: ModelShape, gpus: int) -> int:
    """Return over how many GPUs an engine cuts a tensor: each has vectors, routers and the ways to latents whole.

    Heads of keys and values are copied where there are fewer than GPUs (vLLM's `QKVParallelLinear`; `deepseek_v2.py`
    there has `ReplicatedLinear` for the router, `q_a_proj` and `kv_a_proj_with_mqa`).
    """
    is_router = shape.experts is not None and tensor.dims == (shape.experts.count, shape.hidden)
    if len(tensor.dims) == 1 or is_router or tensor.linear in _LATENT:
        return 1
    return min(gpus, shape.kv_heads) if tensor.linear in ("k_proj", "v_proj") else gpus


def _on_hub(path: str, bits: int, *, offline: bool) -> int | None:
    """Return the bytes of a hub model's weights, those of 32 and 16 bits in `bits`; None if the hub does not tell."""
    model = None if os.path.exists(path) else hub_model(path)
    counts = {} if model is None else weights_by_dtype(model, offline=offline)
    bits_of = {**dict.fromkeys(("F32", "F16", "BF16"), bits), **dict.fromkeys(("F8_E4M3", "F8_E5M2"), 8)}
    if not counts or counts.keys() - bits_of.keys():  # packed values of other types are not counted alike
        return None
    return sum(count * bits_of[name] // 8 for name, count in counts.items())


def _stored_bytes(folder: Path) -> int | None:
    """Return the bytes of the weights in a folder, by their index or by the files; None for none."""
    try:
        index = json.loads((folder / _INDEX).read_text("utf-8"))
        return int(index["metadata"]["total_size"])
    except (OSError, ValueError, KeyError, TypeError):
        sizes = [path.stat().st_size for path in folder.glob(_WEIGHTS) if path.is_file()]
        return sum(sizes) or None
