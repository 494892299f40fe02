"""Finding by name, and what a wrong name is answered with."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpumem_tui.catalog.loader import find_gpu, find_model, gpus, models
from gpumem_tui.catalog.shapes import CatalogError


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("GPT2", "gpt2"),
        ("gpt-2", "gpt2"),
        ("gpt2-larg", "gpt2-large"),
        ("Llama-3-8B", "llama-3-8b"),
        ("llama3.2-1b", "llama-3.2-1b"),
        ("Qwen2.5_7B", "qwen2.5-7b"),
        ("resnet50", "resnet-50"),
        ("bert", "bert-base"),
        ("vit_b_16", "vit-b-16"),
    ],
)
def test_suggests_the_model_that_was_meant(wrong: str, meant: str) -> None:
    with pytest.raises(CatalogError) as caught:
        find_model(wrong)
    message = str(caught.value)
    assert message.startswith(f"unknown model {wrong!r}: did you mean ")
    assert meant in message.removesuffix("?").partition("did you mean ")[2].split(", ")


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("a100", {"a100-40gb", "a100-80gb"}),
        ("A100-80G", {"a100-80gb"}),
        ("4090", {"rtx-4090-24gb"}),
        ("h200", {"gh200-96gb", "h200-141gb"}),
        ("h100_80gb", {"h100-80gb"}),
    ],
)
def test_suggests_the_gpu_that_was_meant(wrong: str, meant: set[str]) -> None:
    with pytest.raises(CatalogError) as caught:
        find_gpu(wrong)
    assert meant <= set(str(caught.value).removesuffix("?").partition("did you mean ")[2].split(", "))


def test_the_same_letters_are_the_first_suggestion() -> None:
    with pytest.raises(CatalogError, match=r"did you mean gpt2, "):
        find_model("GPT-2")


@pytest.mark.parametrize("wrong", ["", "---", "zzzz", "!"])
def test_names_a_few_when_nothing_is_near(wrong: str) -> None:
    with pytest.raises(CatalogError, match=rf"^unknown GPU '{wrong}': the catalog has {len(gpus())}, such as "):
        find_gpu(wrong)


@given(st.text().filter(lambda name: name not in models() and name not in gpus()))
def test_any_other_name_gets_one_line(name: str) -> None:
    for find in (find_model, find_gpu):
        with pytest.raises(CatalogError) as caught:
            find(name)
        assert len(str(caught.value).splitlines()) == 1


def test_names_stay_apart_without_their_punctuation() -> None:
    for names in (models(), gpus()):
        letters = {"".join(filter(str.isalnum, name)) for name in names}
        assert len(letters) == len(names)
        assert all(name == name.lower() for name in names)


def test_reads_each_file_once() -> None:
    assert models() is models()
    assert gpus() is gpus()
