"""A Hugging Face config.json on this machine: where it is, and what is in it."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpumem_tui.catalog.shapes import CatalogError, ModelShape
from gpumem_tui.text import printable

_FILE = "config.json"
_HUB_PREFIX = "models--"
"""How huggingface_hub's cache names the folder of a model: ``models--OWNER--NAME`` with ``refs`` and ``snapshots``."""

_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
_LONGEST = ("max_position_embeddings", "n_positions", "max_target_positions", "max_sequence_length", "seq_length")
_USUAL_TOKENS = {True: 2048, False: 512}
"""Tokens a sample unless told otherwise: of a decoder, and of an encoder or an encoder–decoder."""


@dataclass(frozen=True)
class ModelFile:
    """The file that a model's shape was read from.

    Attributes:
        path: its config.json, absolute.
        shape: as the file has it.
        dequantize: a quantized one, taken unquantized.
    """

    path: str
    shape: ModelShape
    dequantize: bool = False


@dataclass(frozen=True)
class ConfigFile:
    """What a config.json says, whatever it is of.

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
        """Whether it takes images or sound beside tokens."""
        return "text_config" in self.values and len({"vision_config", "audio_config"} & self.values.keys()) > 0

    @property
    def takes_tokens(self) -> bool:
        """Whether a sample is tokens, as far as the file says."""
        return "vision_config" in self.values or not {"image_size", "num_channels", "patch_size"} & self.values.keys()

    @property
    def usual_seq_len(self) -> int:
        """Tokens a sample is trained at unless told otherwise, or as many as it takes at most; 0 without tokens."""
        if not self.takes_tokens:
            return 0
        encodes = self.values.get("is_encoder_decoder") or any(
            self.architecture.endswith(head) for head in ("ForMaskedLM", "Classification", "ForQuestionAnswering")
        )
        longest = next((value for key in _LONGEST if isinstance(value := self.text.get(key), int) and value > 0), None)
        usual = _USUAL_TOKENS[not encodes and self.model_type not in ("t5", "mt5", "bart")]
        return usual if longest is None else min(longest, usual)


def looks_like_path(name: str) -> bool:
    """Whether what was given as a model's name is rather the path of a configuration."""
    return os.sep in name or name.endswith(".json") or name in (".", "..") or os.path.isdir(name)


def read_config_file(path: str | Path) -> ConfigFile:
    """A config.json.

    Args:
        path: the file, a folder that holds it, a model's folder in huggingface_hub's cache, or its name on the hub
            (``OWNER/NAME``) where that cache has it.

    Raises:
        CatalogError: it cannot be read, or is no JSON object.
    """
    given = Path(path)
    if _HUB_NAME.fullmatch(str(path)) and given.suffix != ".json" and not os.path.exists(given):
        cached = _hub_cache() / f"{_HUB_PREFIX}{str(path).replace('/', '--')}"
        if not cached.is_dir():
            raise CatalogError(
                f"there is no file or folder {path}, and no model of that name in {_hub_cache()}: give the path of its "
                f"{_FILE}, which https://huggingface.co/{path}/blob/main/{_FILE} shows"
            )
        given = cached
    try:
        file = _file(given)
        values: object = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CatalogError(f"cannot read {error.filename or given}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CatalogError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CatalogError(f"{file} is not a model's configuration: expected a JSON object")
    absolute = Path(os.path.abspath(file))
    return ConfigFile(str(absolute), _name(absolute), values)


def _hub_cache() -> Path:
    """Where huggingface_hub keeps models (its documentation, "Environment variables")."""
    home = os.environ.get("HF_HOME") or "~/.cache/huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / _FILE).exists() and (path / "snapshots").is_dir():
        main = path / "refs" / "main"
        revisions = [main.read_text().strip()] if main.is_file() else sorted(os.listdir(path / "snapshots"))
        if revisions:
            path = path / "snapshots" / revisions[-1]
    return path / _FILE


def _name(file: Path) -> str:
    if file.name != _FILE:
        return file.stem
    for folder in file.parents:
        if folder.name.startswith(_HUB_PREFIX):
            return folder.name.split("--")[-1]
    return file.parent.name
