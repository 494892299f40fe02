"""What is known of each optimizer, in one record, and what it keeps per parameter between steps.

Another optimizer is its name in `recipe.Optimizer` and a record here; that both agree is a test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import ceil, prod
from types import MappingProxyType

from gpumem_tui.formula.parameters import ParameterTensor
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.price import Price
from gpumem_tui.formula.recipe import Optimizer, Recipe
from gpumem_tui.formula.rows import FormulaRow, Moment, fixed_row, there
from gpumem_tui.memory import Bucket

_FP32_BYTES = 4
_BF16_BYTES = 2


@dataclass(frozen=True, slots=True)
class OptimizerTechnique:
    """An optimizer as a way to need less memory than AdamW.

    Attributes:
        name: as a reader knows it.
        cost: of changing to it, in words; `source`: where that is from; `price`: as a comparison sees it.
        arithmetic: what becomes of AdamW's 8 bytes a parameter.
        caveat: what else to know.
        code: what to write in a program of one's own; empty where a plan does not change a program to it.
        is_remedy: whether a search that finds nothing proposes it; the others are left to the Plan.
    """

    name: str
    cost: str
    source: str
    price: Price
    arithmetic: str
    caveat: str
    code: str = ""
    is_remedy: bool = True


@dataclass(frozen=True, slots=True)
class OptimizerRecord:
    """One optimizer.

    Attributes:
        states: values that it keeps per parameter; None for what `_KEPT` counts instead.
        keeps: the same in a few words, for a choice; `note`: in more, for the ledger; `source`: of both.
        class_names: of the classes that are this optimizer in a running program, torch's own first. One
            that records share is taken for the last of them.
        options: what torch's class is made with. Everything but the learning rate stays at torch's default: `foreach`
            decides how much scratch a step takes, and what users run is the default. The learning rates only have to
            keep random data finite.
        scratch: values per parameter that one update makes on the way, all tensors at once (`foreach`, torch's default
            on CUDA): Adam's square roots. 0 where it works in place.
        of_largest: values per parameter of the largest tensor that it makes, where it goes from one to the next.
        technique: None where it saves nothing.
    """

    states: int | None
    keeps: str
    note: str
    source: str
    class_names: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=dict)
    scratch: int = 0
    of_largest: int = 0
    technique: OptimizerTechnique | None = None


_RETUNED = Price(retuned=1, changes=1)
_RETUNED_AND_WORSE = Price(retuned=1, risk=2, changes=1)

OPTIMIZER_RECORDS: Mapping[Optimizer, OptimizerRecord] = MappingProxyType(
    {
        "adamw-fused": OptimizerRecord(
            states=2,
            keeps="two moments, updated in one kernel",
            note="first and second moment; fused=True updates in one kernel, without the copy that foreach makes",
            source="Loshchilov & Hutter 2019; torch.optim.AdamW, fused",
            class_names=("AdamW",),
            options={"lr": 3e-4, "fused": True},
            technique=OptimizerTechnique(
                "fused AdamW",
                "none: one kernel updates all, and usually faster",
                "torch.optim.AdamW, fused",
                Price(changes=1),
                "the copy of foreach, N · w, is not made",
                "the same arithmetic; parameters on CUDA, in floating point",
                is_remedy=False,
            ),
        ),
        "adamw-for-loop": OptimizerRecord(
            states=2,
            keeps="two moments, one tensor after the other",
            note="first and second moment; foreach=False updates one tensor after the other",
            source="Loshchilov & Hutter 2019; torch.optim.AdamW, foreach",
            class_names=("AdamW",),
            options={"lr": 3e-4, "foreach": False},
            of_largest=2,
            technique=OptimizerTechnique(
                "AdamW tensor by tensor",
                "several kernels for each tensor: a slower update",
                "torch.optim.AdamW, foreach",
                Price(slower_percent=1.0, changes=1),
                "the copy of foreach, N · w, becomes two of the largest tensor",
                "where the fused kernel does not run",
                is_remedy=False,
            ),
        ),
        "adamw": OptimizerRecord(
            states=2,
            keeps="two moments",
            note="first and second moment",
            source="Loshchilov & Hutter 2019; torch.optim.AdamW",
            class_names=("AdamW",),
            scratch=1,
            options={"lr": 3e-4},
        ),
        "adam": OptimizerRecord(
            states=2,
            keeps="two moments",
            note="first and second moment",
            source="Kingma & Ba 2015; torch.optim.Adam",
            class_names=("Adam",),
            scratch=1,
            options={"lr": 3e-4},
        ),
        "adamw-8bit": OptimizerRecord(
            states=None,
            keeps="two moments in 8 bits; needs bitsandbytes",
            note="both moments in 8 bits, an fp32 scale a block of 256; tensors of fewer than 4,096 values in fp32",
            source="Dettmers et al. 2022; bitsandbytes optim/optimizer.py",
            class_names=("AdamW8bit", "PagedAdamW8bit"),
            options={"lr": 3e-4},
            technique=OptimizerTechnique(
                "8-bit AdamW",
                "moments quantized in blocks; needs the bitsandbytes package",
                "Dettmers et al. 2022",
                Price(risk=1, changes=1),
                "8N → 2N + N/32",
                "tensors of fewer than 4,096 values stay in 32 bits",
                "bitsandbytes.optim.AdamW8bit(parameters, …)",
            ),
        ),
        "adafactor": OptimizerRecord(
            states=None,
            keeps="row and column sums",
            note="row and column sums of each weight's squared gradients, vectors in full, no momentum; variants "
            "that keep a first moment need about half of Adam's",
            source="Shazeer & Stern 2018; torch.optim.Adafactor",
            class_names=("Adafactor",),
            of_largest=2,
            options={"lr": 1e-2},
            technique=OptimizerTechnique(
                "Adafactor",
                "second moments as row and column sums, no momentum",
                "Shazeer & Stern 2018",
                _RETUNED,
                "8N → row and column sums",
                "without momentum; variants that keep it need about half of Adam's",
                "torch.optim.Adafactor(parameters, …)",
            ),
        ),
        "lion": OptimizerRecord(
            states=1,
            keeps="one momentum",
            note="momentum; updates by its sign",
            source="Chen et al. 2023",
            class_names=("Lion",),
            of_largest=2,
            options={"lr": 1e-4},
            technique=OptimizerTechnique(
                "Lion",
                "a smaller learning rate and a larger weight decay; needs the lion-pytorch package",
                "Chen et al. 2023",
                _RETUNED,
                "8N → 4N",
                "a learning rate 3 to 10 times smaller",
                is_remedy=False,
            ),
        ),
        "muon": OptimizerRecord(
            states=None,
            keeps="one momentum of the blocks' matrices, two moments of the rest",
            note="momentum of the matrices in the blocks (Muon); first and second moment of embeddings, head, "
            "normalizations and biases (AdamW)",
            source="Jordan et al. 2024; torch.optim.Muon and AdamW",
            class_names=("MuonWithAdamW", "MuonWithAuxAdam", "SingleDeviceMuonWithAuxAdam"),
            options={"lr": 1e-3},
            technique=OptimizerTechnique(
                "Muon + AdamW",
                "the learning rate must be tuned anew; five products of each matrix an update",
                "Jordan et al. 2024",
                _RETUNED,
                "8N → 4N of the blocks' matrices, 8N of the rest",
                "matrices of the blocks only",
                is_remedy=False,
            ),
        ),
        "adagrad": OptimizerRecord(
            states=1,
            keeps="one sum",
            note="sum of squared gradients",
            source="Duchi et al. 2011; torch.optim.Adagrad",
            class_names=("Adagrad",),
            scratch=2,  # the steps and the square roots
            options={"lr": 1e-3},
        ),
        "rmsprop": OptimizerRecord(
            states=1,
            keeps="one mean",
            note="running mean of squared gradients; neither centred nor with momentum",
            source="torch.optim.RMSprop",
            class_names=("RMSprop",),
            scratch=1,
            options={"lr": 1e-4},
        ),
        "sgd-momentum": OptimizerRecord(
            states=1,
            keeps="one buffer",
            note="momentum buffer",
            source="torch.optim.SGD",
            class_names=("SGD",),
            options={"lr": 1e-2, "momentum": 0.9},
            technique=OptimizerTechnique(
                "SGD with momentum",
                "the learning rate must be tuned anew; transformers usually train worse than with Adam",
                "Zhang et al. 2020",
                _RETUNED_AND_WORSE,
                "8N → 4N",
                "convolutional networks take it well, transformers do not",
                "torch.optim.SGD(parameters, momentum=0.9, …)",
            ),
        ),
        "sgd": OptimizerRecord(
            states=0,
            keeps="nothing",
            note="keeps nothing between steps",
            source="torch.optim.SGD",
            class_names=("SGD",),
            options={"lr": 1e-2},
            technique=OptimizerTechnique(
                "SGD",
                "no momentum: the learning rate must be tuned anew; transformers usually train worse than with Adam",
                "Zhang et al. 2020",
                _RETUNED_AND_WORSE,
                "8N → 0",
                "convolutional networks take it well, transformers do not",
                "torch.optim.SGD(parameters, …)",
                is_remedy=False,
            ),
        ),
    }
)

OPTIMIZER_TECHNIQUES: Mapping[Optimizer, OptimizerTechnique] = MappingProxyType(
    {key: record.technique for key, record in OPTIMIZER_RECORDS.items() if record.technique is not None}
)
"""Those that save memory, the least change to the training first."""


def optimizer_row(recipe: Recipe, tensors: Iterable[ParameterTensor]) -> FormulaRow:
    """The optimizer's state over all `tensors`, unsharded."""
    record = OPTIMIZER_RECORDS[recipe.optimizer]
    state_bytes = PRECISION_RECORDS[recipe.precision].state_bytes
    factors: tuple[int, ...]
    if record.states is None:
        factors = (sum(_KEPT[recipe.optimizer](tensor, state_bytes) for tensor in tensors),)
    else:
        factors = (sum(tensor.values for tensor in tensors), record.states, state_bytes)
    return fixed_row(Bucket.OPTIMIZER, "optimizer state", factors, record.source, record.note)


def scratch_row(recipe: Recipe, tensors: Sequence[ParameterTensor]) -> FormulaRow | None:
    """What one update makes on the way, on one GPU's share of the state; None where it works in place."""
    record = OPTIMIZER_RECORDS[recipe.optimizer]
    state_bytes = PRECISION_RECORDS[recipe.precision].state_bytes
    factors: tuple[int, ...]
    if recipe.optimizer == "muon":
        factors = (_muon_scratch_bytes(tensors, state_bytes),)
    elif record.of_largest:
        factors = (max(prod(tensor.dims) for tensor in tensors), record.of_largest, state_bytes)
    elif record.scratch:
        factors = (sum(tensor.values for tensor in tensors), record.scratch, state_bytes)
    else:
        return None
    row = fixed_row(
        Bucket.TEMPORARY,
        "scratch of the update",
        factors,
        record.source if record.of_largest or recipe.optimizer == "muon" else "torch.optim's foreach implementation",
        "made for one parameter after the other and freed"
        if record.of_largest
        else "made for all parameters at once and freed; a fused or for-loop optimizer has none",
    )
    return there({Moment.UPDATE}, [row])[0]


_QUANTIZED_FROM, _QUANTIZATION_BLOCK = 4096, 256
"""bitsandbytes, optim/optimizer.py: `min_8bit_size`, `blocksize`."""


def _eight_bit_bytes(tensor: ParameterTensor, state_bytes: int) -> int:
    """Two moments, each a byte a value and an fp32 scale a block; of small tensors two fp32 values."""
    values = prod(tensor.dims)
    if values < _QUANTIZED_FROM:
        return 2 * _FP32_BYTES * tensor.values
    return 2 * (values + _FP32_BYTES * ceil(values / _QUANTIZATION_BLOCK)) * tensor.copies


def _by_muon(tensor: ParameterTensor) -> bool:
    """Whether it is a matrix of the blocks."""
    return bool(tensor.linear) and len(tensor.dims) == 2


def _muon_bytes(tensor: ParameterTensor, state_bytes: int) -> int:
    return tensor.values * state_bytes * (1 if _by_muon(tensor) else 2)


_KEPT: Mapping[Optimizer, Callable[[ParameterTensor, int], int]] = MappingProxyType(
    {
        "adafactor": lambda tensor, state_bytes: factored_values(tensor) * state_bytes,
        "adamw-8bit": _eight_bit_bytes,
        "muon": _muon_bytes,
    }
)
"""What is kept of a weight by the optimizers that do not keep whole values for each parameter."""


def _muon_scratch_bytes(tensors: Sequence[ParameterTensor], state_bytes: int) -> int:
    """The larger of AdamW's copy of all that it updates, and of what Muon makes for one matrix.

    That is the update, its 16-bit copy where it is fp32, the next iterate, and two products of the narrow side with
    itself (torch/optim/_muon.py).
    """
    rest = sum(tensor.values for tensor in tensors if not _by_muon(tensor))
    of_matrix = [
        (state_bytes + (_BF16_BYTES if state_bytes == _FP32_BYTES else 0) + _BF16_BYTES) * prod(tensor.dims)
        + 2 * _BF16_BYTES * min(tensor.dims) ** 2
        for tensor in tensors
        if _by_muon(tensor)
    ]
    return max(rest * state_bytes, *of_matrix, 0)


def offloaded_row(recipe: Recipe) -> FormulaRow:
    """The optimizer's state where it lies in host memory, and the update runs there."""
    return fixed_row(
        Bucket.OPTIMIZER,
        "optimizer state",
        (0,),
        "Ren et al. 2021",
        f"{recipe.optimizer}'s state lies in host memory; gradients stay on the GPU until the update",
    )


def factored_values(tensor: ParameterTensor) -> int:
    """Values Adafactor keeps for `tensor`: sums over the last and over the last but one dimension."""
    if len(tensor.dims) < 2:
        return tensor.values
    *leading, rows, columns = tensor.dims
    return prod(leading) * (rows + columns) * tensor.copies
