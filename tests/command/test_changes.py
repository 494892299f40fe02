"""The parts that changes to a command find in it: the blocks that repeat, the losses that can be cut."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn


from gpumem_tui.catalog.loader import find_gpu  # noqa: E402
from gpumem_tui.formula.techniques import INJECTED, MORE_RANKS, injected  # noqa: E402
from gpumem_tui.run.changes import KEYS  # noqa: E402  they need torch
from gpumem_tui.run.parts import repeated_blocks  # noqa: E402
from gpumem_tui.run.replacements import CHUNKED_FROM, chunked_cross_entropy, why_not_chunked  # noqa: E402

pytestmark = pytest.mark.scripts


class Block(nn.Module):  # type: ignore[misc,name-defined]
    """A module made of others."""

    def __init__(self, *parts: Any) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts or [nn.Linear(2, 2), nn.ReLU()])


def _named(root: Any) -> list[str]:
    found = list(repeated_blocks(root))
    return [name for name, module in root.named_modules() if any(module is block for block in found)]


def test_every_change_has_a_name_and_a_way_to_make_it() -> None:
    assert set(KEYS) == set(INJECTED) - {MORE_RANKS}
    assert {change.key for change in injected(find_gpu("a100-80gb"), ranks=2)} == set(INJECTED)


@pytest.mark.parametrize("container", [nn.ModuleList, lambda blocks: nn.Sequential(*blocks)])
def test_a_list_and_a_sequence_of_blocks(container: Any) -> None:
    assert _named(container([Block(), Block(), Block()])) == ["0", "1", "2"]


def test_layers_without_parts_are_no_blocks() -> None:
    assert _named(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))) == []


def test_of_blocks_within_blocks_the_outer_ones() -> None:
    experts = [Block(Block(), Block()), Block(Block(), Block())]
    assert _named(nn.ModuleDict({"layers": nn.ModuleList(experts), "head": Block()})) == ["layers.0", "layers.1"]


def test_of_stages_that_are_sequences_of_blocks_the_blocks() -> None:
    stages = nn.Sequential(nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block()))
    assert _named(stages) == ["0.0", "0.1", "1.0", "1.1"]


def _logits(*shape: int) -> Any:
    return torch.zeros(*shape, requires_grad=True)


def test_a_loss_over_many_classes_can_be_cut() -> None:
    target = torch.zeros(2, dtype=torch.long)
    assert why_not_chunked(_logits(2, CHUNKED_FROM), target, ignore_index=-1, weight=None) == ""


@pytest.mark.parametrize(
    ("shape", "target", "options", "said"),
    [
        ((2, 10), torch.zeros(2, dtype=torch.long), {}, "no cross-entropy of torch over 8,192 classes or more"),
        ((2, CHUNKED_FROM), torch.zeros(2, CHUNKED_FROM), {}, "the loss is against probabilities, not classes"),
        (
            (2, CHUNKED_FROM), torch.zeros(2, dtype=torch.long), {"weight": torch.ones(CHUNKED_FROM)},
            "the loss weighs its classes",
        ),
        ((2, CHUNKED_FROM), torch.zeros(2, dtype=torch.long), {"reduction": "none"}, "the loss is not summed"),
    ],
)  # fmt: skip
def test_a_loss_that_is_left_as_it_is(shape: tuple[int, ...], target: Any, options: dict[str, Any], said: str) -> None:
    assert why_not_chunked(_logits(*shape), target, **options) == said


@pytest.mark.parametrize("options", [{}, {"reduction": "sum"}, {"ignore_index": 3, "label_smoothing": 0.1}])
def test_a_loss_in_pieces_is_the_same_loss(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.functional.cross_entropy
    monkeypatch.setattr(nn.functional, "cross_entropy", plain)  # put back at the end
    cut: list[None] = []
    chunked_cross_entropy(lambda: cut.append(None))
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(19, CHUNKED_FROM, generator=generator, dtype=torch.float64)
    target = torch.arange(19) % 7
    results = []
    for function in (plain, nn.functional.cross_entropy):
        logits = values.clone().requires_grad_()
        loss = function(logits, target, **options)
        (3 * loss).backward()
        results.append((loss.detach(), logits.grad))
    assert len(cut) == 1
    torch.testing.assert_close(results[0], results[1])
