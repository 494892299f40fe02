"""The fields of the form: one for each option of `search`, and which of them belong to what is trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.recipe import (
    ADAPTER_DTYPES,
    ADAPTERS,
    ALL_BUT_HEAD,
    ALL_LINEAR,
    ATTENTIONS,
    BASE_QUANTIZATIONS,
    DEFAULT_LORA_RANK,
    OPTIMIZERS,
    PRECISIONS,
    RECOMPUTES,
    SHARDINGS,
)
from gpumem_tui.memory import GIB, MIB
from gpumem_tui.search import strategy

Kind = Literal["model", "config", "file", "command"]
KINDS: dict[Kind, str] = {"model": "a model", "config": "a config.json", "file": "a file", "command": "a command"}
_NETWORKS: tuple[Kind, ...] = ("model", "config")
NO, YES = "no", "yes"


@dataclass(frozen=True)
class FormField:
    """One row of the form.

    Attributes:
        name: of its widget, and of the option in code.
        option: as an error names it.
        holds: one of several words, a whole number, a number, or any text.
        kinds: what is trained when it is shown; empty for always.
        empty: what stands in it when nothing does: what that means, or an example.
        among: the words of a choice that never change.
        of_host: shown for another machine only.
    """

    name: str
    label: str
    option: str
    holds: Literal["choice", "count", "number", "text"]
    kinds: tuple[Kind, ...] = ()
    empty: str = ""
    among: tuple[str, ...] = ()
    of_host: bool = False

    @property
    def is_long(self) -> bool:
        """Whether it is as wide as the form, with what is wrong below it."""
        return self.holds == "text"


def _shape(name: str, label: str) -> FormField:
    return FormField(name, label, f"--{name.replace('_', '-')}", "count", _NETWORKS, "the model's own")


def _recipe(name: str, among: tuple[str, ...]) -> FormField:
    return FormField(name, name.capitalize(), f"--{name}", "choice", _NETWORKS, among=among)


SHAPE_FIELDS = ("seq_len", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "image_size")
FIELDS = (
    FormField("kind", "Train", "", "choice"),
    FormField("model", "Model", "--model", "choice", ("model",)),
    FormField("config", "Config", "--config", "text", ("config",), "the path of a config.json, or of its folder"),
    FormField("file", "File", "--workload", "text", ("file",), "train.py"),
    FormField("command", "Command", "-- COMMAND", "text", ("command",), "python train.py --batch-size {batch}"),
    FormField("gpus", "GPUs", "--gpus", "count", (*_NETWORKS, "command"), "1, or the launcher's"),
    FormField("host", "Host", "--host", "text", empty="this machine; else HOST or USER@HOST:PORT, by ssh"),
    FormField(
        "remote_directory", "Folder", "--remote-directory", "text", empty="there; the login's home", of_host=True
    ),
    FormField("gpu", "GPU", "--gpu", "choice"),
    _recipe("precision", PRECISIONS),
    _recipe("optimizer", OPTIMIZERS),
    _recipe("recompute", RECOMPUTES),
    _recipe("attention", ATTENTIONS),
    _shape("seq_len", "Sequence"),
    FormField("strategy", "Strategy", "--strategy", "choice", among=strategy.NAMES),
    FormField("ramp_step", "Ramp step", "--step", "count", empty="suits the prediction"),
    FormField("target_batch", "Target", "--target-batch", "count", empty="none: no accumulation"),
    FormField("headroom", "Headroom", "--headroom", "number", empty="0.1"),
    FormField("limit", "Limit", "--limit", "text", empty="the whole GPU; else a size such as 20GiB"),
    FormField("share", "Share GPU", "--share", "choice", among=(NO, YES)),
    FormField("steps", "Steps", "--steps", "count", empty="3"),
    FormField("timeout", "Timeout s", "--timeout", "number", empty="300"),
    FormField("python", "Python", "--python", "text", empty="the one that this program runs in"),
    _recipe("sharding", SHARDINGS),
    FormField("freeze", "Freeze", "--freeze", "text", _NETWORKS, f"none; else the first N blocks, or {ALL_BUT_HEAD}"),
    _recipe("adapter", ADAPTERS),
    FormField("lora_rank", "LoRA rank", "--lora-rank", "count", _NETWORKS, f"{DEFAULT_LORA_RANK}"),
    FormField("adapter_dtype", "In", "--adapter-dtype", "choice", _NETWORKS, among=ADAPTER_DTYPES),
    FormField("base_quantization", "Base", "--base-quantization", "choice", _NETWORKS, among=BASE_QUANTIZATIONS),
    FormField("lora_targets", "LoRA on", "--lora-targets", "text", _NETWORKS, f"{ALL_LINEAR}, or q_proj,v_proj"),
    _shape("layers", "Layers"),
    _shape("hidden", "Hidden"),
    _shape("heads", "Heads"),
    _shape("kv_heads", "KV heads"),
    _shape("ffn", "FFN"),
    _shape("vocab", "Vocabulary"),
    _shape("image_size", "Image px"),
    FormField("dequantize", "Dequantize", "--dequantize", "choice", ("config",), among=(NO, YES)),
    FormField(
        "assumed_rows", "Assume rows", "--assume-rows", "text", ("file", "command"), "0.25, or FILE:LINE=0.25 …"
    ),
)  # fmt: skip
FIELD_OF_OPTION = {field.option: field.name for field in FIELDS}


def belongs(field: FormField, kind: Kind, shape: ModelShape | None, typed: str, *, on_host: bool) -> bool:
    """Whether the form shows a field: of a model's shape only those that it has, and those that hold something."""
    if (field.kinds and kind not in field.kinds) or (field.of_host and not on_host):
        return False
    return field.name not in SHAPE_FIELDS or shape is None or bool(typed) or field.name in shape.record.fields


def size_text(size_bytes: int | None) -> str:
    """A size as it is typed.

    >>> size_text(20 * GIB), size_text(512 * MIB), size_text(None)
    ('20GiB', '512MiB', '')
    """
    if size_bytes is None:
        return ""
    for unit, name in ((GIB, "GiB"), (MIB, "MiB")):
        if size_bytes % unit == 0:
            return f"{size_bytes // unit}{name}"
    return str(size_bytes)
