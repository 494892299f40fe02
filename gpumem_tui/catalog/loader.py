"""Reads the catalog (gpus.toml, models.toml) and Hugging Face configurations into the shapes of `shapes`."""

from __future__ import annotations

import re
import reprlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec

from gpumem_tui.catalog.custom import described, is_custom, of_settings
from gpumem_tui.catalog.huggingface import CONFIGS, HEADS, NEWER_KEYS, HfConfig
from gpumem_tui.catalog.shapes import FAMILIES, CatalogError, Gpu, GpuSpeed, ModelShape, ShapeError
from gpumem_tui.decoding import decodable
from gpumem_tui.memory import MIB, format_bytes
from gpumem_tui.text import printable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DEFAULT_MODEL = "gpt2"
DEFAULT_GPU = "a100-80gb"
"""The entries that are taken where none is named."""

_SUGGESTIONS = 4
_A_WORD, _LIKE_A_WORD = 3, 0.65
"""A shorter text, or one less like it, resembles too many words of names."""

_ANOTHER_WORD = "Invalid enum value"
"""How msgspec reports that a value is none of a Literal's."""
_ALIKE_PERCENT = 2
"""How far the memory of one kind of GPU differs, with the driver and error correction."""
Entry = TypeVar("Entry")


class NoClosedFormError(CatalogError):
    """A configuration of a network that `ModelShape` cannot describe, though transformers may know it."""


@cache
def gpus() -> Mapping[str, Gpu]:
    """Return every GPU of the catalog by name, in the file's order, and those of the user's settings after them.

    Raises:
        CatalogError: gpus.toml is damaged.
        OptionError: the settings are.
    """
    found = {name: _gpu(name, table) for name, table in toml_tables("gpus.toml").items()}
    return MappingProxyType({**found, **of_settings(found)})


class GpuPrice(msgspec.Struct, frozen=True):
    """The price of an hour of one GPU, in US dollars.

    Attributes:
        source: who published it, and when.
    """

    an_hour: float
    source: str
    currency: Literal["USD"] = "USD"

    @property
    def words(self) -> str:
        """An hour's price with its currency."""
        return f"{self.an_hour:g} {self.currency}"


@cache
def list_prices() -> Mapping[str, GpuPrice]:
    """Return the list prices of the catalog, by the GPU's name.

    Raises:
        CatalogError: prices.toml is damaged.
    """
    try:
        return MappingProxyType(msgspec.convert(toml_tables("prices.toml"), decodable(dict[str, GpuPrice])))
    except msgspec.ValidationError as error:
        raise CatalogError(f"prices.toml: {error}") from error


@cache
def models() -> Mapping[str, ModelShape]:
    """Return every model of the catalog by name, in the file's order.

    Raises:
        CatalogError: models.toml is damaged.
    """
    return MappingProxyType({name: _model(name, table) for name, table in toml_tables("models.toml").items()})


def find_gpu(name: str) -> Gpu:
    """Return the GPU of that name, or of the one name that it is short for: ``4090``, ``rtx4090``, ``H100-80GB``.

    None is chosen of those that differ in their memory alone, nor one whose name has a further word: ``h100`` is not
    ``h100-nvl-94gb``, ``4070-ti`` no ``rtx-4070-ti-super-16gb``. ``custom-20GiB-sm_89`` describes one of its own.

    Raises:
        CatalogError: none exists, or there are several; the message lists them with their memory, or the nearest.
    """
    if name in gpus():
        return gpus()[name]
    if (custom := described(name, gpus())) is not None:
        return custom
    wanted = _name_parts(name)
    named = {
        entry: frozenset[str]()
        for entry, gpu in gpus().items()
        if wanted in [_name_parts(known) for known in (gpu.title, *gpu.also)]
    }
    meant = named or {entry: words for entry in gpus() if (words := _further_words(name, entry)) is not None}
    several = [entry for entry, words in meant.items() if not words] or list(meant)
    if len(several) == 1 and not meant[several[0]]:
        return gpus()[several[0]]
    if len(several) > 1:
        listed = ", ".join(f"{entry} ({format_bytes(gpus()[entry].total_bytes)})" for entry in several)
        raise CatalogError(f"{name!r} is short for several GPUs, choose one: {listed}")
    return _found("GPU", name, gpus())


def is_named(gpu: Gpu) -> bool:
    """Return whether its name is enough to find this GPU again."""
    return gpus().get(gpu.name) == gpu.whole or is_custom(gpu)


_OF_EVERY_NAME = frozenset({"nvidia", "geforce", "tesla", "amd", "instinct", "jetson", "rtx", "gtx"})
"""Words of a GPU's name that distinguish it from no other."""
_BOARD_OR_UNIT = re.compile(r"sxm\d?|(?<=\d)[ _-]?gi?b(?![a-z\d])")
"""Its board, and the unit of its memory: ``gb`` alone is no such, as GB10 and GB200 begin with it."""


def _name_parts(name: str) -> list[str]:
    """Return words and numbers: ``["a", "100", "80"]`` of ``A100-SXM4-80GB``."""
    return [part for part in _parts(_BOARD_OR_UNIT.sub("", name.lower())) if part not in _OF_EVERY_NAME]


def _further_words(short: str, name: str) -> frozenset[str] | None:
    """Return the words of a GPU's name that a shorter one leaves out, but for its memory; None where it is no part.

    Its memory alone, which comes last, is no name of it: ``8`` is the ninth GPU, not the card that has 8 GB.

    >>> _further_words("4070", "rtx-4070-ti-super-16gb") == {"ti", "super"}, _further_words("4070", "rtx-4080-16gb")
    (True, None)
    """
    wanted, parts = _name_parts(short), _name_parts(name)
    for start in range(min(len(parts) - len(wanted) + 1, len(parts) - 1) if wanted else 0):
        if parts[start : start + len(wanted)] == wanted:
            left = parts[:start] + parts[start + len(wanted) :]
            return frozenset(part for part in left if not part.isdigit())
    return None


def multiprocessors_of(total_bytes: int, compute_capability: tuple[int, int]) -> int | None:
    """Return what the catalog's GPUs of this architecture and size agree on; None if missing, or they differ."""
    alike = {
        gpu.multiprocessors
        for gpu in gpus().values()
        if gpu.compute_capability == compute_capability and not gpu.arch and _about(total_bytes, gpu.total_bytes)
    }
    return alike.pop() if len(alike) == 1 else None


def speed_of(title: str, total_bytes: int) -> GpuSpeed | None:
    """Return the rates of the GPU that the driver calls `title`; None for one that is not clearly in the catalog.

    Names that differ in the memory or the board (``NVIDIA A100-SXM4-80GB``) are the same GPU where its size is; a PCIe
    card is slower than the module of that name, and not taken for it.
    """
    on_card = "pcie" in re.split(r"\W", title.lower())
    found = {
        gpu.speed
        for gpu in gpus().values()
        if _model_words(gpu.title) == _model_words(title)
        and _about(total_bytes, gpu.total_bytes)
        and not (on_card and gpu.speed is not None and "module" in gpu.speed.source)
    }
    return found.pop() if len(found) == 1 else None


def is_same_product(title: str, total_bytes: int, gpu: Gpu) -> bool:
    """Return whether what the driver calls `title` is a GPU of this kind: by its model's name and its memory."""
    return _model_words(title) == _model_words(gpu.title) and _about(total_bytes, gpu.total_bytes)


def _model_words(title: str) -> frozenset[str]:
    """Return the words of a GPU's name that distinguish it: without its maker, memory and board."""
    words = re.findall(r"[a-z0-9]+", re.sub(r"\d+ ?GB", "", title).lower())
    return frozenset(words) - {"nvidia", "geforce", "tesla", "pcie", "sxm", "sxm2", "sxm3", "sxm4", "hbm3", "hbm3e"}


def _about(size_bytes: int, other_bytes: int) -> bool:
    return abs(size_bytes - other_bytes) * 100 <= other_bytes * _ALIKE_PERCENT


def find_model(name: str) -> ModelShape:
    """Return the model of that name, however its words are joined: ``llama3-8b`` is ``llama-3-8b``.

    Raises:
        CatalogError: none exists; the message suggests the nearest names.
    """
    same = [entry for entry in models() if _parts(entry) == _parts(name)]
    return _found("model", same[0] if len(same) == 1 else name, models())


def _parts(name: str) -> list[str]:
    return re.findall(r"[a-z]+|\d+", name.lower())


def shape_from_hf_config(config: Mapping[str, object], name: str) -> ModelShape:
    """Return the shape that the contents of a Hugging Face config.json describe.

    Raises:
        NoClosedFormError: a model_type or kind of network that a `ModelShape` cannot describe, or a missing key.
        CatalogError: no model_type, a key that holds a value that it cannot, or a shape that cannot exist.
    """
    model_type = config.get("model_type")
    kind = CONFIGS.get(model_type) if isinstance(model_type, str) else None
    if kind is None:
        problem = "has no 'model_type'" if model_type is None else f"has model_type {reprlib.repr(model_type)}"
        refusal = NoClosedFormError if isinstance(model_type, str) and model_type else CatalogError
        raise refusal(f"the configuration of {name} {problem}: supported are {', '.join(CONFIGS)}")
    heads = config.get("architectures")
    if isinstance(heads, list) and heads and HEADS[str(model_type)] not in heads[:1]:
        head = printable(str(heads[0]))
        raise NoClosedFormError(
            f"{name} is a {head}; the formula is of {HEADS[str(model_type)]}: use `--python PATH` with transformers"
        )
    newer = NEWER_KEYS.get(str(model_type), {})
    config = {**{old: config[key] for key, old in newer.items() if key in config}, **config}
    _check_keys(config, name, kind)
    try:
        shape = msgspec.convert(config, decodable(kind)).shape(name)
        shape.check()
    except ShapeError as error:
        reason = str(error).removeprefix(f"{error.option}: ")  # what to change is in the file, not in an option
        raise CatalogError(f"the configuration of {name} cannot exist: {reason}") from error
    except ValueError as error:
        raise NoClosedFormError(
            f"the configuration of {name} is not supported, use `--python PATH` with transformers: {error}"
        ) from error
    return replace(shape, source=f"Hugging Face configuration, model_type {model_type}")


def _check_keys(config: Mapping[str, object], name: str, kind: type[HfConfig]) -> None:
    for field in msgspec.structs.fields(kind):
        key = field.encode_name
        if key not in config:
            if field.required:
                raise NoClosedFormError(f"the configuration of {name} has no {key!r}: add it to the file")
            continue
        try:
            msgspec.convert(config[key], field.type)
        except msgspec.ValidationError as error:
            has = f"the configuration of {name} has {key!r} = {reprlib.repr(config[key])}"
            if str(error).startswith(_ANOTHER_WORD):
                raise NoClosedFormError(
                    f"{has}, which has no formula: use `--python PATH` with transformers"
                ) from error
            raise CatalogError(f"{has}: {error}") from error


def _found(what: str, name: str, entries: Mapping[str, Entry]) -> Entry:
    if name in entries:
        return entries[name]
    names = list(entries)
    near = _near_misses(name, names)
    if near:
        raise CatalogError(f"unknown {what} {name!r}: did you mean {', '.join(near)}?")
    some = names[:: max(1, len(names) // _SUGGESTIONS)][:_SUGGESTIONS]
    listed = f"`gpumem-tui {what.lower()}s` lists {len(names)}, such as {', '.join(some)}"
    raise CatalogError(f"unknown {what} {name!r}: {listed}")


def _near_misses(name: str, names: Iterable[str]) -> list[str]:
    """Return the names that `name` may be a misspelling of, likeliest first.

    Only letters and digits count; `name` may be the whole, the beginning or a part of one, or resemble it or a word of
    it: ``4091`` is near ``rtx-4090-24gb``.
    """
    by_letters = {_letters(candidate): candidate for candidate in names}
    wanted = _letters(name)
    same = [wanted] if wanted in by_letters else []
    begun = [letters for letters in by_letters if wanted and letters.startswith(wanted)]
    containing = [letters for letters in by_letters if wanted and wanted in letters]
    similar = get_close_matches(wanted, by_letters, n=_SUGGESTIONS)
    words = {word for name in by_letters.values() for word in name.split("-")}
    near = get_close_matches(wanted, words, n=_SUGGESTIONS, cutoff=_LIKE_A_WORD) if len(wanted) >= _A_WORD else []
    with_word = [letters for word in near for letters, name in by_letters.items() if word in name.split("-")]
    ranked = dict.fromkeys([*same, *begun, *containing, *similar, *with_word])
    return [by_letters[letters] for letters in ranked][:_SUGGESTIONS]


def _letters(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.lower())


class _GpuEntry(msgspec.Struct, forbid_unknown_fields=True):
    title: str
    kind: Literal["consumer", "workstation", "datacenter"]
    total_mib: int
    cuda_total_mib: int
    compute_capability: tuple[int, int]
    multiprocessors: int
    source: str
    reserves_mib: dict[str, int] = {}
    speed: GpuSpeed | None = None
    no_speed: str = ""
    arch: str = ""
    also: tuple[str, ...] = ()
    unified: bool = False


def toml_tables(file_name: str) -> dict[str, dict[str, object]]:
    """Read a file of the catalog that only a viewer reads: its tables by name, in the file's order.

    Raises:
        CatalogError: it is damaged.
    """
    text = files("gpumem_tui.catalog").joinpath(file_name).read_text(encoding="utf-8")
    try:
        return msgspec.convert(parse_toml(text, file_name), dict[str, dict[str, object]])
    except msgspec.ValidationError as error:
        raise CatalogError(f"{file_name}: {error}") from error


def parse_toml(text: str, name: str) -> dict[str, object]:
    """Read a TOML text; `name` is what errors call it.

    Raises:
        CatalogError: it is none.
    """
    try:
        found: dict[str, object] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{name}: {error}") from error
    return found


def _gpu(name: str, table: Mapping[str, object]) -> Gpu:
    try:
        entry = msgspec.convert(table, decodable(_GpuEntry))
    except msgspec.ValidationError as error:
        raise CatalogError(f"gpus.toml: {name}: {error}") from error
    return Gpu(
        name=name,
        title=entry.title,
        kind=entry.kind,
        total_bytes=entry.total_mib * MIB,
        cuda_total_bytes=entry.cuda_total_mib * MIB,
        compute_capability=entry.compute_capability,
        source=entry.source,
        multiprocessors=entry.multiprocessors,
        reserves=tuple((int(driver), mib * MIB) for driver, mib in sorted(entry.reserves_mib.items())),
        speed=entry.speed,
        no_speed=entry.no_speed,
        arch=entry.arch,
        also=entry.also,
        unified=entry.unified,
    )


def _model(name: str, table: Mapping[str, object]) -> ModelShape:
    unknown = table.keys() - {field.name for field in fields(ModelShape)}
    if unknown:
        raise CatalogError(f"models.toml: {name}: unknown key {min(unknown)!r}")
    entry = {"name": name, **table}
    if any(name == entry.get("family") and record.has_attention for name, record in FAMILIES.items()):
        entry.setdefault("kv_heads", entry.get("heads"))
    try:
        shape = msgspec.convert(entry, decodable(ModelShape))
        shape.check()
    except (msgspec.ValidationError, ShapeError) as error:
        raise CatalogError(f"models.toml: {name}: {error}") from error
    return shape
