"""The manual's table of calculators is what the command next to it prints."""

from __future__ import annotations

from pathlib import Path

import pytest

import gpumem_tui
from gpumem_tui.memory import GIB
from tests.published import calculators

MANUAL = Path(gpumem_tui.__file__).parent / "manual" / "plan.md"


def row(asked: calculators.Asked) -> list[float]:
    """The table's figures of a network, in GiB: trace, formula, accelerate, EleutherAI, DeepSpeed."""
    [line] = [line for line in MANUAL.read_text().splitlines() if line.startswith(f"| {asked.title} |")]
    return [float(cell) for cell in line.strip("|").split("|")[1:]]


@pytest.mark.parametrize("asked", calculators.ASKED, ids=lambda asked: asked.model)
def test_the_formulas(asked: calculators.Asked) -> None:
    batch_size = calculators.BATCH_SIZE
    sizes = (
        calculators.formula_bytes(asked.shape, batch_size),
        calculators.accelerate_bytes(asked.shape),
        calculators.eleuther_bytes(asked.shape, batch_size),
        calculators.deepspeed_bytes(asked.shape),
    )
    assert row(asked)[1:] == [round(size / GIB, 2) for size in sizes]


@pytest.mark.parametrize("asked", calculators.ASKED[:1], ids=lambda asked: asked.model)
def test_the_trace(asked: calculators.Asked) -> None:
    assert row(asked)[0] == round(calculators.traced_bytes(asked.shape, calculators.BATCH_SIZE) / GIB, 2)


@pytest.mark.parametrize("asked", calculators.ASKED, ids=lambda asked: asked.model)
def test_our_formula_is_nearest_to_the_trace(asked: calculators.Asked) -> None:
    traced, formula, *others = row(asked)
    assert abs(formula - traced) < 0.02 * traced < min(abs(other - traced) for other in others)
