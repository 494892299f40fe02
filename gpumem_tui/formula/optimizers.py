"""What is known of each optimizer, in one record, and what it keeps per parameter between steps.

Another optimizer is its name in `recipe.Optimizer` and a record here; that both agree is a test.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from types import MappingProxyType

from gpumem_tui.formula.parameters import ParameterTensor
from gpumem_tui.formula.precision import PRECISION_RECORDS
from gpumem_tui.formula.price import Price
from gpumem_tui.formula.recipe import Optimizer, Recipe
from gpumem_tui.formula.rows import FormulaRow, Moment, fixed_row, there
from gpumem_tui.memory import Bucket

_OF_THE_LARGEST = 2
_FP32_BYTES = 4


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
        states: values that it keeps per parameter; None for row and column sums instead.
        keeps: the same in a few words, for a choice; `note`: in more, for the ledger; `source`: of both.
        class_names: of the classes that are this optimizer in a running program, torch's own first.
        state_bytes: of one such value; None for the precision's own.
        options: what torch's class is made with. Everything but the learning rate stays at torch's default: `foreach`
            decides how much scratch a step takes, and what users run is the default. The learning rates only have to
            keep random data finite.
        scratch: values per parameter that one update makes on the way, all tensors at once (`foreach`, torch's default
            on CUDA): Adam's square roots. 0 where it works in place; None: two of the largest tensor, one at a time.
        elsewhere: where PyTorch does not implement it, how to run it all the same.
        technique: None where it saves nothing.
    """

    states: int | None
    keeps: str
    note: str
    source: str
    class_names: tuple[str, ...]
    state_bytes: int | None = None
    options: Mapping[str, float] = field(default_factory=dict)
    scratch: int | None = 0
    elsewhere: str = ""
    technique: OptimizerTechnique | None = None


_RETUNED = Price(retuned=1, changes=1)
_RETUNED_AND_WORSE = Price(retuned=1, risk=2, changes=1)

OPTIMIZER_RECORDS: Mapping[Optimizer, OptimizerRecord] = MappingProxyType(
    {
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
            states=2,
            keeps="two moments in 8 bits; needs bitsandbytes",
            note="both moments in 8 bits; the scale of each quantization block and tensors too small to quantize "
            "are left out",
            source="Dettmers et al. 2022; bitsandbytes",
            class_names=("AdamW8bit", "PagedAdamW8bit"),
            state_bytes=1,
            elsewhere="use bitsandbytes in a workload file (--workload)",
            technique=OptimizerTechnique(
                "8-bit AdamW",
                "moments quantized in blocks; needs the bitsandbytes package",
                "Dettmers et al. 2022",
                Price(risk=1, changes=1),
                "8N → 2N",
                "the scale of each block of 256 values is left out",
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
            scratch=None,
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
            elsewhere="use lion-pytorch in a workload file (--workload)",
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
        "adagrad": OptimizerRecord(
            states=1,
            keeps="one sum",
            note="sum of squared gradients",
            source="Duchi et al. 2011; torch.optim.Adagrad",
            class_names=("Adagrad",),
            scratch=1,
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
    state_bytes = record.state_bytes or PRECISION_RECORDS[recipe.precision].state_bytes
    factors: tuple[int, ...]
    if record.states is None:
        factors = (sum(factored_values(tensor) for tensor in tensors), state_bytes)
    else:
        factors = (sum(tensor.values for tensor in tensors), record.states, state_bytes)
    return fixed_row(Bucket.OPTIMIZER, "optimizer state", factors, record.source, record.note)


def scratch_row(recipe: Recipe, tensors: Sequence[ParameterTensor]) -> FormulaRow | None:
    """What one update makes on the way, on one GPU's share of the state; None where it works in place."""
    record = OPTIMIZER_RECORDS[recipe.optimizer]
    state_bytes = record.state_bytes or PRECISION_RECORDS[recipe.precision].state_bytes
    factors: tuple[int, ...]
    if record.scratch is None:
        factors = (max(tensor.values // tensor.copies for tensor in tensors), _OF_THE_LARGEST, _FP32_BYTES)
    elif record.scratch:
        factors = (sum(tensor.values for tensor in tensors), record.scratch, state_bytes)
    else:
        return None
    row = fixed_row(
        Bucket.TEMPORARY,
        "scratch of the update",
        factors,
        "torch.optim's foreach implementation",
        "made for all parameters at once and freed; a fused or for-loop optimizer has none",
    )
    return there({Moment.UPDATE}, [row])[0]


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
