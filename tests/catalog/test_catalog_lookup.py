"""Finding by name, and what a wrong name is answered with."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.catalog.shapes import CatalogError, Gpu, ModelShape


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("GPT2", "gpt2"),
        ("gpt-2", "gpt2"),
        ("Llama-3-8B", "llama-3-8b"),
        ("llama3.2-1b", "llama-3.2-1b"),
        ("Qwen2.5_7B", "qwen2.5-7b"),
        ("resnet50", "resnet-50"),
        ("vit_b_16", "vit-b-16"),
    ],
)
def test_a_model_is_found_however_its_words_are_joined(written: str, meant: str) -> None:
    assert find_model(written).name == meant


@pytest.mark.parametrize(
    ("wrong", "meant"), [("gpt2-larg", "gpt2-large"), ("bert", "bert-base"), ("lama-3-8b", "llama-3-8b")]
)
def test_suggests_the_model_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(CatalogError) as caught:
        find_model(wrong)
    message = str(caught.value)
    assert message.startswith(f"unknown model {wrong!r}: did you mean ")
    assert meant in message.removesuffix("?").partition("did you mean ")[2].split(", ")


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("4090", "rtx-4090-24gb"),
        ("rtx4090", "rtx-4090-24gb"),
        ("RTX 4090", "rtx-4090-24gb"),
        ("NVIDIA GeForce RTX 3090", "rtx-3090-24gb"),
        ("h100", "h100-80gb"),
        ("H100-80GB", "h100-80gb"),
        ("h100_80gb", "h100-80gb"),
        ("A100-SXM4-80GB", "a100-80gb"),
        ("4080", "rtx-4080-16gb"),
        ("4080 super", "rtx-4080-super-16gb"),
        ("l4", "l4-24gb"),
        ("h200", "h200-141gb"),
        ("4070 ti", "rtx-4070-ti-12gb"),
        ("4060", "rtx-4060-8gb"),
        ("4060 ti 16GB", "rtx-4060-ti-16gb"),
        ("gb10", "gb10-128gb"),
        ("DGX Spark", "gb10-128gb"),
        ("GB200", "gb200-186gb"),
        ("b300", "b300-288gb"),
        ("mi355x", "mi355x-288gb"),
        ("NVIDIA A800-SXM4-80GB", "a800-80gb"),
        ("orin nano", "jetson-orin-nano-8gb"),
        ("NVIDIA Thor", "jetson-thor-128gb"),
    ],
)
def test_a_gpu_is_found_by_what_people_call_it(written: str, meant: str) -> None:
    assert find_gpu(written).name == meant


def test_a_name_that_is_short_for_several_gpus_lists_them_with_their_memory() -> None:
    with pytest.raises(
        CatalogError, match=r"^'a100' is short for several GPUs, choose one: a100-40gb \(40.00 GiB\), a100-80gb \(80.00"
    ):
        find_gpu("a100")
    with pytest.raises(CatalogError, match=r"^'Orin' is short .*agx-orin-64gb \(61.35 GiB\), jetson-orin-nano-8gb \("):
        find_gpu("Orin")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("A100-80G", {"a100-80gb"}),
        ("mi250", {"mi250x-64gb"}),
        ("rtx4091", {"rtx-4090-24gb"}),
        ("4091", {"rtx-4090-24gb"}),
        ("h101", {"h100-80gb"}),
    ],
)
def test_suggests_the_gpu_that_was_meant(wrong: str, meant: set[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        find_gpu(wrong)
    assert meant <= set(str(caught.value).removesuffix("?").partition("did you mean ")[2].split(", "))


@pytest.mark.parametrize("number", ["6", "8", "10", "32"])
def test_a_number_of_a_gpu_is_not_how_much_memory_one_has(number: str) -> None:
    with pytest.raises(CatalogError):
        find_gpu(number)


@pytest.mark.parametrize("wrong", ["", "---", "zzzz", "!"])
def test_names_a_few_when_nothing_is_near(wrong: str) -> None:
    with pytest.raises(CatalogError, match=rf"^unknown GPU '{wrong}': `gpumem-tui gpus` lists {len(gpus())}, such as "):
        find_gpu(wrong)


@given(st.text())
def test_any_other_name_gets_one_line(name: str) -> None:
    for find in (find_model, find_gpu):
        assert len(_said(find, name).splitlines()) == 1


@pytest.mark.parametrize("name", gpus())
def test_each_gpu_is_found_by_what_the_driver_calls_it_or_listed_with_those_of_other_memory(name: str) -> None:
    title = gpus()[name].title.partition(",")[0]
    assert name in _said(find_gpu, title)


def _said(find: Callable[[str], Gpu | ModelShape], name: str) -> str:
    """The entry found, or the error."""
    try:
        return find(name).name
    except CatalogError as error:
        return str(error)


def test_names_stay_apart_without_their_punctuation() -> None:
    for names in (models(), gpus()):
        letters = {"".join(filter(str.isalnum, name)) for name in names}
        assert len(letters) == len(names)
        assert all(name == name.lower() for name in names)


def test_reads_each_file_once() -> None:
    assert models() is models()
    assert gpus() is gpus()
