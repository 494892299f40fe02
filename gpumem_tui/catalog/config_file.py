"""A Hugging Face config.json on this machine: where it is, what is in it, and how its weights are quantized."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from gpumem_tui.catalog.hub import FILE, PREFIX, configuration, hub_model
from gpumem_tui.catalog.shapes import CatalogError
from gpumem_tui.text import printable

_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")
_LONGEST_UNSAID = {
    "whisper": 448, "blenderbot": 128, "ctrl": 256, "nystromformer": 510, "kyutai_speech_to_text": 750,
    **dict.fromkeys(("openai-gpt", "bert-generation", "trocr", "flaubert", "xlm"), 512),
    **dict.fromkeys(("gpt2", "gpt_bigcode", "gpt-sw3", "biogpt", "git", "rwkv"), 1024),
}  # fmt: skip
"""By model_type, what transformers takes where the file does not say, of those that take less than is usual."""

_USUAL_TOKENS = {True: 2048, False: 512}
"""Tokens a sample unless told otherwise: of a decoder, and of an encoder or an encoder–decoder."""


@dataclass(frozen=True)
class ConfigFile:
    """The contents of a `config.json`, for any architecture.

    Attributes:
        path: the file, absolute.
        name: what to call the model: the folder's name, or the file's where it has a name of its own.
        values: its keys.
    """

    path: str
    name: str
    values: Mapping[str, object]

    @property
    def model_type(self) -> str:
        """The network's kind by transformers' name; empty for none."""
        found = self.values.get("model_type")
        return printable(found) if isinstance(found, str) else ""

    @property
    def architecture(self) -> str:
        """The class that it names first; empty for none."""
        found = self.values.get("architectures")
        return printable(str(found[0])) if isinstance(found, list) and found else ""

    @property
    def text(self) -> Mapping[str, object]:
        """The keys of what reads and writes text, of a model that does other things as well."""
        found = self.values.get("text_config")
        return found if isinstance(found, dict) else self.values

    @property
    def takes_more_than_text(self) -> bool:
        """Return whether it takes images or sound besides tokens."""
        return "text_config" in self.values and len({"vision_config", "audio_config"} & self.values.keys()) > 0

    @property
    def takes_tokens(self) -> bool:
        """Return whether a sample is tokens, as far as the file states."""
        return "vision_config" in self.values or not {"image_size", "num_channels", "patch_size"} & self.values.keys()

    @property
    def usual_seq_len(self) -> int:
        """Tokens a sample is trained at unless told otherwise, or as many as it takes at most; 0 without tokens."""
        if not self.takes_tokens:
            return 0
        encodes = self.values.get("is_encoder_decoder") or any(
            self.architecture.endswith(head) for head in ("ForMaskedLM", "Classification", "ForQuestionAnswering")
        )
        said = (value for key in _LONGEST if isinstance(value := self.text.get(key), int) and value > 0)
        longest = next(said, _LONGEST_UNSAID.get(self.model_type))
        usual = _USUAL_TOKENS[not encodes and self.model_type not in ("t5", "mt5", "bart")]
        return usual if longest is None else min(longest, usual)


def looks_like_path(name: str) -> bool:
    """Return whether what was given as a model's name is rather the path of a configuration."""
    return os.sep in name or name.endswith(".json") or name in (".", "..") or os.path.isdir(name)


def read_config_file(path: str | Path, *, offline: bool = False) -> ConfigFile:
    """Read a `config.json` and return what it states.

    Args:
        path: the file, a folder that holds it, a model's folder in huggingface_hub's cache, or its name on the hub
            (``OWNER/NAME``, ``OWNER/NAME@REVISION``), which is asked where that cache has not got it.
        offline: never ask the hub.

    Raises:
        CatalogError: it cannot be read, or is no JSON object.
    """
    given = Path(path)
    if (model := hub_model(str(path))) is not None and not os.path.exists(given):
        given = configuration(model, offline=offline)
    try:
        file = _file(given)
        values: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"cannot read {error.filename or given}: {error.strerror}; check the path") from error
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{file} is not valid JSON, correct it: {error}") from error
    if not isinstance(values, dict):
        raise CatalogError(f"{file} is not a model's configuration; name a config.json that holds one JSON object")
    absolute = Path(os.path.abspath(file))
    return ConfigFile(str(absolute), _name(absolute), values)


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / FILE).exists() and (path / "snapshots").is_dir():
        main = path / "refs" / "main"
        revisions = [main.read_text().strip()] if main.is_file() else sorted(os.listdir(path / "snapshots"))
        if revisions:
            path = path / "snapshots" / revisions[-1]
    return path / FILE


def _name(file: Path) -> str:
    if file.name != FILE:
        return file.stem
    for folder in file.parents:
        if folder.name.startswith(PREFIX):
            return folder.name.split("--")[-1]
    return file.parent.name


# How the weights are quantized

_SCALE_BITS = 32
_NF4_BLOCK, _NF4_BLOCKS_OF_SCALES, _NF4_SCALE_BITS = 64, 256, 8
"""Weights that share a scale; with double quantization, scales of 8 bits that share one of 32 (Dettmers et al. 2023,
"QLoRA", section 3)."""
_MXFP4_BLOCK, _MXFP4_SCALE_BITS = 32, 8
"""OCP Microscaling Formats (MX) Specification 1.0, section 5.1."""


@dataclass(frozen=True, slots=True)
class Quantization:
    """A format in which a `config.json` states that weights are kept.

    Attributes:
        title: what it is called.
        bits: a weight takes with its share of the constants; None where that depends on the shape of its matrix, or is
            not known here.
        source: where the figure is from; empty without one.
        base: what a recipe calls it, for adapters over it; empty for what is not trained over here.
    """

    title: str
    bits: float | None = None
    source: str = ""
    base: Literal["", "nf4", "nf4-dq"] = ""

    @property
    def words(self) -> str:
        """The format and its size, in words."""
        return self.title if self.bits is None else f"{self.title}, {self.bits:.4g} bits a weight"


def quantization_of(config: Mapping[str, object]) -> Quantization | None:
    """Return the format that a config.json's ``quantization_config`` names; None for weights that are not quantized."""
    said = config.get("quantization_config")
    if not isinstance(said, Mapping) or not said:
        return None
    method = str(said.get("quant_method", "bitsandbytes"))
    if method == "bitsandbytes" and said.get("load_in_4bit"):
        return _four_bit(said)
    if method == "bitsandbytes":
        return Quantization("8-bit LLM.int8() of bitsandbytes")
    if method == "mxfp4":
        bits = 4 + _MXFP4_SCALE_BITS / _MXFP4_BLOCK
        return Quantization("4-bit MXFP4 (experts)", bits, "OCP Microscaling Formats 1.0")
    if method == "fp8":
        block = said.get("weight_block_size")
        if isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(side, int) for side in block):
            bits = 8 + _SCALE_BITS / (block[0] * block[1])
            return Quantization(
                f"8-bit FP8 in blocks of {block[0]} × {block[1]}", bits, "transformers, finegrained_fp8"
            )
        return Quantization("8-bit FP8")
    bits_said = said.get("bits")
    return Quantization(f"{bits_said}-bit {method.upper()}" if isinstance(bits_said, int) else method)


def _four_bit(said: Mapping[str, object]) -> Quantization:
    """Describe 4 bits, and a 32-bit scale for each block, or that in 8 bits with a 32-bit one for 256 of them."""
    kind = str(said.get("bnb_4bit_quant_type", "fp4")).upper()
    title = f"4-bit {kind} of bitsandbytes"
    if not said.get("bnb_4bit_use_double_quant"):
        return Quantization(title, 4 + _SCALE_BITS / _NF4_BLOCK, "Dettmers et al. 2023 (QLoRA)", "nf4")
    scales = (_NF4_SCALE_BITS + _SCALE_BITS / _NF4_BLOCKS_OF_SCALES) / _NF4_BLOCK
    return Quantization(f"{title} with double quantization", 4 + scales, "Dettmers et al. 2023 (QLoRA)", "nf4-dq")
