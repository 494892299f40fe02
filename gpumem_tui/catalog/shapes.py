"""The shapes of a GPU and of a network, for the rest of the program. Standard library only: children import it too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from gpumem_tui.catalog.tables import changed, made, records
from gpumem_tui.errors import OptionError
from gpumem_tui.memory import Range, format_bytes, size_text

Family = Literal["gpt2", "llama", "moe", "bert", "vit", "resnet", "mlp"]

MULTIPROCESSORS_OF_OTHERS = 108
"""Multiprocessors assumed for a GPU whose number is not known: an A100's."""


class CatalogError(ValueError):
    """A name that the catalog does not have, or a description that cannot be read: one line for the user."""


class LackingFamily(OptionError):
    """A family of networks without one of the pieces that the program needs of each: one line that names both."""

    def __init__(self, family: str, piece: str, file: str) -> None:
        super().__init__(f"--model: the family {family!r} of networks has no {piece}: add it to gpumem_tui/{file}")


class ShapeError(OptionError, ValueError):
    """A network that cannot exist, or cannot have the adapters that are asked for.

    Attributes:
        option: the command line's, to change as the message names it.
    """

    def __init__(self, option: str, message: str) -> None:
        super().__init__(f"{option}: {message}")
        self.option = option


@dataclass(frozen=True, slots=True)
class FamilyRecord:
    """A family of networks that has a closed form and a network of ours.

    Attributes:
        inputs: what a sample is.
        fields: of a shape, those that a user may set.
        predicts_tokens: has a head over the vocabulary, and predicts every next token; else it is a classifier.
        has_attention: is made of transformer blocks.
        positions: how blocks know the order of tokens: from a table that ends, by rotation, or not at all.
        is_gated: feed-forward networks are SwiGLU, three matrices instead of two.
        projects_apart: queries, keys and values come from a projection each, instead of one for all three.
        has_batch_norm: is made of convolutions that are normalized over the batch.
        normalizes_sums: its blocks normalize after each residual sum, so the lone normalization comes before them.
        is_cut: PyTorch's tensor parallel cuts its plain networks here.
        head: what our network calls its last layer.
        training_seq_len: tokens per sample that it is trained at unless told otherwise, or as many as it takes at most;
            0 for none.
        remark: what the closed form takes for granted of its blocks; empty where they are those of its source.
    """

    inputs: Literal["tokens", "images", "features"]
    fields: tuple[str, ...]
    predicts_tokens: bool = False
    has_attention: bool = False
    positions: Literal["learned", "rotary", "none"] = "none"
    is_gated: bool = False
    projects_apart: bool = False
    has_batch_norm: bool = False
    normalizes_sums: bool = False
    is_cut: bool = False
    head: str = "head"
    training_seq_len: int = 0
    remark: str = ""


FAMILIES: Mapping[Family, FamilyRecord] = records("families.toml", FamilyRecord)
"""Every family that a shape can name."""


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Highest rates that the vendor publishes, without sparsity; None where a GPU has none or none was found.

    Attributes:
        fp32: TFLOP/s of the CUDA cores in fp32.
        tf32: of the tensor cores on fp32 values rounded to 19 bits.
        half: of the tensor cores on fp16 with fp32 accumulation, and on bf16 where the architecture has that.
        memory: GB/s of the GPU's memory.
        pcie: GB/s of its PCIe link in one direction.
        nvlink: GB/s of all its NVLinks together in one direction.
        source: of the figures.
    """

    fp32: float
    memory: float
    pcie: float
    source: str
    tf32: float | None = None
    half: float | None = None
    nvlink: float | None = None


TYPED_CONTEXT = "--context-bytes"
"""The source of a context that was typed."""


@dataclass(frozen=True, slots=True)
class Context:
    """The bytes that a process holds of a GPU outside its allocator, and their source."""

    low_bytes: int
    expected_bytes: int
    high_bytes: int
    source: str

    @property
    def between(self) -> Range:
        """From the least to the most."""
        return Range(self.low_bytes, self.high_bytes)

    @property
    def typed_bytes(self) -> int | None:
        """A typed value; None for a measured one."""
        return self.expected_bytes if self.source == TYPED_CONTEXT else None


@dataclass(frozen=True, slots=True)
class InferenceEngine:
    """An inference engine in the same GPU as the step (`--beside`).

    Attributes:
        size_bytes: that it takes of the GPU.
        share: of CUDA's total that was typed, as vLLM's `gpu_memory_utilization`; 0 for a typed size.
    """

    size_bytes: int
    share: float = 0.0

    @property
    def words(self) -> str:
        """How much it takes, for the title of the GPU; empty for nothing."""
        return f" next to an inference engine of {format_bytes(self.size_bytes)}" if self.size_bytes else ""

    @property
    def typed(self) -> str:
        """It as ``--beside`` takes it."""
        return f"{self.share:g}" if self.share or not self.size_bytes else size_text(self.size_bytes)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A kind of GPU.

    `total_bytes` is what the driver (NVML, nvidia-smi) reports; `cuda_total_bytes` what `cudaMemGetInfo` and
    PyTorch's out-of-memory message report. The difference is the driver's own reserve. `multiprocessors` is None where
    their number is not known. `reserves`: if it moves with the driver, bytes by its major version.
    `speed` is None without known rates; `no_speed` gives the reason. `arch`: what ROCm's compilers call a GPU that
    runs no CUDA ("gfx942"); `compute_capability` is what HIP states of it then, and `multiprocessors` are its compute
    units. `also`: further names of it. `unified`: it shares the system's memory with the CPU.
    `context`: what was measured or said of one of them, which makes it no other kind of GPU; None for what we know
        about
    its architecture. `engine`: an inference engine in it, whose memory neither total has; None for none.
    """

    name: str
    title: str
    kind: Literal["consumer", "workstation", "datacenter"]
    total_bytes: int
    cuda_total_bytes: int
    compute_capability: tuple[int, int]
    source: str
    multiprocessors: int | None = None
    reserves: tuple[tuple[int, int], ...] = ()
    speed: GpuSpeed | None = None
    no_speed: str = ""
    arch: str = ""
    also: tuple[str, ...] = ()
    unified: bool = False
    context: Context | None = field(default=None, compare=False)
    engine: InferenceEngine | None = None

    @property
    def engine_bytes(self) -> int:
        """The bytes that an inference engine takes; 0 without one."""
        return 0 if self.engine is None else self.engine.size_bytes

    @property
    def whole(self) -> Gpu:
        """This GPU without the inference engine."""
        return self if self.engine is None else self._with(None, self.engine_bytes)

    def beside(self, engine: InferenceEngine) -> Gpu:
        """Return what an engine leaves of this GPU, as a GPU of its own."""
        return self._with(engine, -engine.size_bytes)

    def _with(self, engine: InferenceEngine | None, more_bytes: int) -> Gpu:
        title = self.title.removesuffix("" if self.engine is None else self.engine.words)
        return replace(
            self,
            title=title + ("" if engine is None else engine.words),
            total_bytes=self.total_bytes + more_bytes,
            cuda_total_bytes=self.cuda_total_bytes + more_bytes,
            engine=engine,
        )

    @property
    def runtime(self) -> str:
        """The version of CUDA or ROCm that programs for this GPU are compiled for."""
        return "ROCm" if self.arch else "CUDA"

    @property
    def reserve_bytes(self) -> int:
        """The bytes that the driver keeps for itself."""
        return self.total_bytes - self.cuda_total_bytes

    @property
    def cuda_total_range(self) -> Range:
        """The least and the most that CUDA reports as the total, by driver where its reserve moves with it."""
        reserves = [self.reserve_bytes, *(size_bytes for _, size_bytes in self.reserves)]
        return Range(self.total_bytes - max(reserves), self.total_bytes - min(reserves))

    @property
    def sm(self) -> str:
        """The architecture as CUDA's tools write it, e.g. ``sm_80``; as ROCm's do, ``gfx942``."""
        return self.arch or "sm_{}{}".format(*self.compute_capability)


@dataclass(frozen=True, slots=True)
class Experts:
    """The feed-forward networks of a block among which each token is routed (Shazeer et al. 2017).

    Attributes:
        count: of a block. `active`: that one token goes through.
        scoring: how the router weighs them: the softmax of all, of the active ones, or the sigmoid of each, in groups
            (DeepSeek-V3).
        shared: further experts as wide, that every token goes through.
        dense_layers: first blocks that have one feed-forward network instead, `dense_ffn` wide.
        weighs_in_fp32: the router's weights stay in fp32, so that what experts made is multiplied in it.
        has_bias: router and experts have biases, and values are clamped (gpt-oss).
        spread: GPUs over which those of a block are spread: each holds `count` / `spread`.
    """

    count: int
    active: int
    scoring: Literal["softmax", "softmax-of-active", "sigmoid"] = "softmax"
    shared: int = 0
    dense_layers: int = 0
    dense_ffn: int = 0
    weighs_in_fp32: bool = False
    has_bias: bool = False
    spread: int = 1

    @property
    def held(self) -> int:
        """Experts on one GPU."""
        return self.count // self.spread


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention whose queries, keys and values come from narrow projections (DeepSeek-AI 2024, DeepSeek-V2).

    Attributes:
        q_rank, kv_rank: widths that they come from; a `q_rank` of 0 for queries that come from the residual stream.
        rope_width: of a head's width, the part that knows positions; the keys' is shared by all heads.
        value_width: of one head.
    """

    q_rank: int
    kv_rank: int
    rope_width: int
    value_width: int


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The architecture of one network. A field that its family does not have is 0 (or False, or empty).

    Attributes:
        layers: transformer blocks; for an MLP its linear layers; 0 for a ResNet, whose `stages` count its blocks.
        hidden: width of the residual stream; for an MLP the width of every hidden layer.
        heads: attention heads; `kv_heads`: key/value heads (equal to `heads` unless queries are grouped).
        ffn: inner width of the feed-forward network; of one expert where there are several.
        vocab: vocabulary size. `seq_len`: sequence length to train at, and `max_seq_len` the longest the
            model can take (learned positions) or was trained at (rotary).
        tied_head: the output head shares the embedding's weight.
        qkv_bias: query, key and value projections have a bias (Llama family only; GPT-2, BERT, ViT always do).
        out_bias: attention's output projection has one too (Llama and MoE families).
        qk_norm: queries and keys are normalized, head by head (Qwen3).
        sinks: every head has a learned score that no value belongs to (gpt-oss): no fused kernel of PyTorch's has that.
        experts: among which tokens are routed; None for one feed-forward network.
        latent: attention from narrow projections; None for the usual.
        head_dim: width of one attention head, 0 for ``hidden / heads``; of its queries and keys.
        image_size, patch_size: pixels a side. `classes`: outputs of a classifier. `inputs`: MLP input features.
        dropout: probability of every dropout layer the published configuration has; 0 for none.
        stages: ResNet blocks per stage; `bottleneck`: 1×1-3×3-1×1 blocks rather than two 3×3.
        part: which stage of a pipeline it is, with the `layers` of that stage: only the first has the embedding, only
            the last what follows the blocks.
        published_parameters: the count its authors (or the reference implementation) give; None once overridden.
    """

    name: str
    family: Family
    layers: int = 0
    hidden: int = 0
    heads: int = 0
    kv_heads: int = 0
    head_dim: int = 0
    ffn: int = 0
    vocab: int = 0
    seq_len: int = 0
    max_seq_len: int = 0
    tied_head: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    experts: Experts | None = None
    latent: LatentAttention | None = None
    image_size: int = 0
    patch_size: int = 0
    classes: int = 0
    inputs: int = 0
    dropout: float = 0.0
    stages: tuple[int, ...] = ()
    bottleneck: bool = False
    published_parameters: int | None = None
    source: str = ""
    part: Literal["whole", "first", "middle", "last"] = "whole"

    @property
    def record(self) -> FamilyRecord:
        """The record of this network's family.

        Raises:
            LackingFamily: there is no record of it.
        """
        try:
            return FAMILIES[self.family]
        except KeyError:
            raise LackingFamily(self.family, "record", "catalog/families.toml") from None

    @property
    def has_embedding(self) -> bool:
        """Return whether this part of the network has what precedes the blocks."""
        return self.part in ("whole", "first")

    @property
    def has_head(self) -> bool:
        """Return whether this part of the network has what follows the blocks, and the loss."""
        return self.part in ("whole", "last")

    @property
    def has_patches(self) -> bool:
        """Return whether it cuts an image into the tokens that its blocks see."""
        return self.record.has_attention and self.record.inputs == "images"

    @property
    def attention_width(self) -> int:
        """Width of one attention head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def dense_layers(self) -> int:
        """Blocks with one feed-forward network, which every token goes through."""
        return self.layers if self.experts is None else min(self.layers, self.experts.dense_layers)

    @property
    def tokens(self) -> int:
        """Positions per sample in the residual stream: the sequence, or a ViT's patches and its class token."""
        if self.has_patches:
            return (self.image_size // self.patch_size) ** 2 + 1
        return self.seq_len

    def overridden(self, **changes: int | None) -> ModelShape:
        """Return this shape with the given fields changed; those that are None stay.

        Key/value heads that are not grouped follow a change of `heads`, and the feed-forward width keeps its proportion
        to `hidden`, unless they are given too.

        Raises:
            ShapeError: a field that the family does not have, or a shape that cannot exist.
        """
        given: dict[str, int] = {name: value for name, value in changes.items() if value is not None}
        for name in given:
            if name not in self.record.fields:
                raise ShapeError(
                    _option(name),
                    f"{self.name} is a {self.family} model and has no {name.replace('_', ' ')} to set",
                )
        if not given:
            return self
        if "hidden" in given and "ffn" not in given and self.ffn:
            given["ffn"] = max(1, self.ffn * given["hidden"] // self.hidden)
        if "heads" in given and "kv_heads" not in given and self.kv_heads == self.heads:
            given["kv_heads"] = given["heads"]
        if given.get("seq_len", 0) > self.max_seq_len and self.record.positions == "rotary":
            given["max_seq_len"] = given["seq_len"]  # rotary positions have no table to outgrow
        architecture = given.keys() - {"seq_len", "max_seq_len", "image_size"}
        resized_vit = self.has_patches and "image_size" in given
        published = None if architecture or resized_vit else self.published_parameters
        shape = changed(self, {**given, "published_parameters": published})
        shape.check()
        return shape

    def check(self) -> None:
        """Raise ShapeError for the first field that makes this shape impossible."""
        for name in sorted(self.record.fields):
            value = getattr(self, name)
            if value <= 0:
                raise ShapeError(_option(name), f"give at least 1, not {value}")
        if self.record.has_attention:
            if not self.head_dim and self.hidden % self.heads:
                raise ShapeError("--heads", f"{self.heads} heads do not divide a hidden size of {self.hidden}")
            if self.heads % self.kv_heads:
                raise ShapeError("--kv-heads", f"{self.kv_heads} key/value heads do not divide {self.heads} heads")
        if self.experts is not None and not 0 < self.experts.active <= self.experts.count:
            raise ShapeError(
                "--config", f"of {self.experts.count} experts a token cannot go through {self.experts.active}"
            )
        if self.record.positions == "rotary" and self.attention_width % 2:
            raise ShapeError("--heads", f"rotary positions need an even head width, not {self.attention_width}")
        if self.record.positions == "learned" and self.seq_len > self.max_seq_len:
            raise ShapeError(
                "--seq-len", f"{self.name} has {self.max_seq_len} positions, {self.seq_len} is beyond them"
            )
        if self.has_patches and self.image_size % self.patch_size:
            raise ShapeError(
                "--image-size",
                f"{self.image_size} pixels are not a multiple of the {self.patch_size} pixel patch",
            )
        if self.record.has_batch_norm and self.image_size < 32:
            raise ShapeError("--image-size", f"must be at least 32 for a ResNet, not {self.image_size}")


@dataclass(frozen=True)
class ModelFile:
    """The file that a model's shape was read from.

    Attributes:
        path: its config.json, absolute.
        shape: as the file has it.
        dequantize: a quantized one, taken unquantized.
        model_type, architecture: as in the file; empty for none.
        is_text_alone: the model takes images or sound as well, and is trained without.
    """

    path: str
    shape: ModelShape
    dequantize: bool = False
    model_type: str = ""
    architecture: str = ""
    is_text_alone: bool = False


def shape_from_wire(values: Mapping[str, object]) -> ModelShape:
    """Return the inverse of `dataclasses.asdict` after a trip through JSON, where fields may be left out."""
    shape = made(ModelShape, values)  # with lists and tables in it, as JSON has them
    return replace(
        shape,
        stages=tuple(shape.stages),
        experts=None if shape.experts is None else made(Experts, shape.experts),
        latent=None if shape.latent is None else made(LatentAttention, shape.latent),
    )


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")
