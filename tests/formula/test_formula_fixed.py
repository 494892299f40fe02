"""Fixed memory: weights, copies, gradients and optimizer state, and how ZeRO spreads them."""

from __future__ import annotations

from collections.abc import Iterable

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import FormulaPrediction, at_moment, largest_obstacle, max_batch_size, predict, terms
from gpumem_tui.formula.recipe import OPTIMIZERS, Optimizer, Precision, Recipe, Sharding
from gpumem_tui.formula.records import OPTIMIZER_RECORDS
from gpumem_tui.formula.rows import FormulaRow, Moment
from gpumem_tui.formula.weights import block_parameters, gathered_parameters
from gpumem_tui.memory import GIB, Breakdown, Bucket

GB = 10**9


def linear_stack(parameters: int) -> ModelShape:
    """A network of exactly `parameters` weights: one linear layer, its bias among them."""
    return ModelShape("stack", "mlp", layers=1, inputs=parameters - 1, hidden=1, classes=1)


def _lasting_bytes(prediction: FormulaPrediction) -> int:
    """The textbook's fixed memory: weights, gradients and optimizer state, without an update's scratch."""
    return prediction.peak_bytes - prediction.breakdown[Bucket.TEMPORARY]


def test_eight_billion_parameters_in_fp32_exceed_80_gib_before_the_first_sample() -> None:
    prediction = predict(linear_stack(8 * GB), Recipe(), 0)
    gib = {bucket: round(size / GIB, 1) for bucket, size in prediction.breakdown.buckets.items() if size}
    scratch = {Bucket.TEMPORARY: 29.8}  # foreach AdamW's square roots
    assert gib == {Bucket.PARAMETERS: 29.8, Bucket.GRADIENTS: 29.8, Bucket.OPTIMIZER: 59.6, **scratch}
    assert round(_lasting_bytes(prediction) / GIB, 1) == 119.2
    assert prediction.peak_bytes == prediction.fixed_bytes > 80 * GIB
    assert prediction.activation_bytes_per_sample == 0
    assert max_batch_size(linear_stack(8 * GB), Recipe(), 80 * GIB) == 0


@pytest.mark.parametrize(("billions", "expected_gb"), [(1, 16), (7, 112), (70, 1120)])
def test_sixteen_bytes_a_parameter(billions: int, expected_gb: int) -> None:
    assert _lasting_bytes(predict(linear_stack(billions * GB), Recipe(), 0)) == expected_gb * GB


def test_seventy_billion_need_fourteen_h100() -> None:
    assert _lasting_bytes(predict(linear_stack(70 * GB), Recipe(), 0)) == 14 * 80 * GB


@pytest.mark.parametrize(
    ("precision", "parameters", "gradients", "state", "copies"),
    [("fp32", 4, 4, 8, 0), ("amp-bf16", 4, 4, 8, 2), ("amp-fp16", 4, 4, 8, 2), ("bf16", 2, 2, 4, 0)],
)
def test_bytes_per_parameter_by_precision(
    precision: Precision, parameters: int, gradients: int, state: int, copies: int
) -> None:
    shape = find_model("gpt2")
    buckets = predict(shape, Recipe(precision), 0).breakdown
    count = count_parameters(shape)
    assert buckets[Bucket.PARAMETERS] == parameters * count
    assert buckets[Bucket.GRADIENTS] == gradients * count
    assert buckets[Bucket.OPTIMIZER] == state * count
    at_the_loss = at_moment(terms(shape, Recipe(precision), 0), Moment.LOSS)
    copied = sum(row.size_bytes for row in at_the_loss if row.bucket is Bucket.ACTIVATIONS)
    assert copied == copies * (count - shape.max_seq_len * shape.hidden)  # positions are looked up, not multiplied


@pytest.mark.parametrize(
    ("optimizer", "per_parameter"),
    [
        ("adam", 8),
        ("adamw", 8),
        ("adamw-fused", 8),
        ("sgd", 0),
        ("sgd-momentum", 4),
        ("adagrad", 4),
        ("rmsprop", 4),
        ("lion", 4),
    ],
)
def test_optimizer_state_per_parameter(optimizer: Optimizer, per_parameter: int) -> None:
    shape = find_model("gpt2")
    state_bytes = predict(shape, Recipe(optimizer=optimizer), 1).breakdown[Bucket.OPTIMIZER]
    assert state_bytes == per_parameter * count_parameters(shape)


def test_adafactor_keeps_row_and_column_sums_of_matrices_and_whole_vectors() -> None:
    shape = ModelShape("two", "mlp", layers=2, inputs=7, hidden=5, classes=3)
    matrices, vectors = (5 + 7) + (3 + 5), 5 + 3
    assert predict(shape, Recipe(optimizer="adafactor"), 1).breakdown[Bucket.OPTIMIZER] == 4 * (matrices + vectors)


def test_adafactor_of_a_convolution_factors_its_kernel_as_pytorch_does() -> None:
    torch = pytest.importorskip("torch")
    shape = find_model("resnet-18").overridden(image_size=32)
    weights = {(64, 3, 7, 7): 1, (64, 64, 3, 3): 4}
    kept = 0
    for dims, copies in weights.items():
        weight = torch.zeros(dims, requires_grad=True)
        weight.grad = torch.zeros(dims)
        optimizer = torch.optim.Adafactor([weight])
        optimizer.step()
        state = optimizer.state[weight]
        kept += copies * (state["row_var"].numel() + state["col_var"].numel())
    first_stage = kept + 5 * 2 * 64  # and a BatchNorm weight and bias for each convolution
    one_stage_less = ModelShape("r", "resnet", image_size=32, classes=1000, stages=(0, 2, 2, 2))
    difference = [
        predict(each, Recipe(optimizer="adafactor"), 1).breakdown[Bucket.OPTIMIZER] for each in (shape, one_stage_less)
    ]
    stem = 64 * 3 * (7 + 7) + 2 * 64
    assert difference[0] - difference[1] == 4 * (first_stage - stem)


def test_every_optimizer_says_what_it_keeps() -> None:
    for optimizer in OPTIMIZERS:
        row = next(
            row
            for row in predict(find_model("gpt2"), Recipe(optimizer=optimizer), 1).rows
            if row.bucket is Bucket.OPTIMIZER
        )
        assert row.note
        assert row.source


@pytest.mark.parametrize(
    ("sharding", "shared"),
    [
        ("none", set()),
        ("zero1", {Bucket.OPTIMIZER}),
        ("zero2", {Bucket.OPTIMIZER, Bucket.GRADIENTS, Bucket.PARAMETERS}),  # FSDP2 shards weights between steps
        ("zero3", {Bucket.OPTIMIZER, Bucket.GRADIENTS, Bucket.PARAMETERS}),
    ],
)
def test_a_zero_stage_divides_its_buckets(sharding: Sharding, shared: set[Bucket]) -> None:
    shape = find_model("gpt2")
    whole, share = (
        Breakdown(_by_bucket(at_moment(terms(shape, recipe, 4), Moment.FIRST_BLOCK)))
        for recipe in (Recipe(), Recipe(sharding=sharding, gpus=8))
    )
    outside = gathered_parameters(shape) - 2 * block_parameters(shape)
    exchanged = {"none": 0, "zero1": count_parameters(shape)}
    # The weights outside of the blocks and of two blocks, and what is sent of these two; or what is outside, twice.
    more_bytes = 4 * exchanged.get(sharding, max(outside + 4 * block_parameters(shape), 2 * outside))
    for bucket, size_bytes in whole.buckets.items():
        expected = size_bytes // 8 if bucket in shared else size_bytes
        if (sharding, bucket) == ("zero1", Bucket.OPTIMIZER):
            expected = (
                2 * 4 * 50_257 * 768
            )  # ZeroRedundancyOptimizer spreads whole tensors, of which this is the largest
        assert share[bucket] == expected + (more_bytes if bucket is Bucket.TEMPORARY else 0)


def test_zero3_shards_neither_the_working_copy_of_the_weights_nor_an_activation() -> None:
    """Traced with FSDP2: autocast casts each gathered weight, and autograd keeps the copy until backward."""
    shape = find_model("gpt2")
    whole, share = (
        _by_bucket(at_moment(terms(shape, Recipe("amp-bf16", sharding="zero3", gpus=gpus), 4), Moment.LOSS))
        for gpus in (1, 8)
    )
    assert share[Bucket.ACTIVATIONS] == whole[Bucket.ACTIVATIONS]
    assert share[Bucket.PARAMETERS] == whole[Bucket.PARAMETERS] // 8
    assert share[Bucket.TEMPORARY] == whole[Bucket.TEMPORARY] + 4 * gathered_parameters(shape)


def _by_bucket(rows: Iterable[FormulaRow]) -> dict[Bucket, int]:
    found: dict[Bucket, int] = {}
    for row in rows:
        found[row.bucket] = found.get(row.bucket, 0) + row.size_bytes
    return found


class TestGathered:
    """The parameters that FSDP2 holds whole: all outside the blocks, and two blocks."""

    def test_gpt2(self) -> None:
        outside = 50_257 * 768 + 1024 * 768 + 2 * 768
        block = 12 * 768**2 + 13 * 768
        assert gathered_parameters(find_model("gpt2")) == outside + 2 * block

    def test_an_untied_head_is_outside_too(self) -> None:
        shape = find_model("llama-3-8b")
        block = (count_parameters(shape) - 2 * 128_256 * 4096 - 4096) // 32
        assert gathered_parameters(shape) == 2 * 128_256 * 4096 + 4096 + 2 * block

    def test_a_resnet_gathers_its_largest_blocks(self) -> None:
        """Its last stage: one block of 512·512·9 weights twice, and one that also halves the side."""
        shape = find_model("resnet-18")
        last = 2 * (512 * 512 * 9 + 1024)
        halving = 256 * 512 * 9 + 512 * 512 * 9 + 256 * 512 + 3 * 1024
        outside = 64 * 3 * 49 + 128 + 512 * 1000 + 1000
        assert gathered_parameters(shape) == last + halving + outside

    @pytest.mark.parametrize("layers", [1, 2])
    def test_a_network_of_two_blocks_gathers_all(self, layers: int) -> None:
        shape = find_model("gpt2").overridden(layers=layers)
        assert gathered_parameters(shape) == count_parameters(shape)

    def test_only_fsdp2_over_several_gpus_gathers_and_zero2_all(self) -> None:
        def gathered(sharding: Sharding, gpus: int) -> int:
            rows = predict(find_model("gpt2"), Recipe(sharding=sharding, gpus=gpus), 1).rows
            return sum(row.size_bytes for row in rows if row.name == "gathered parameters")

        assert gathered("zero3", 2) == 4 * gathered_parameters(find_model("gpt2"))
        assert gathered("zero2", 2) == 4 * count_parameters(find_model("gpt2"))
        assert gathered("zero3", 1) == gathered("zero1", 2) == 0


@pytest.mark.parametrize(("batch_size", "gpus"), [(-1, 1), (1, 0)])
def test_impossible_numbers_are_refused(batch_size: int, gpus: int) -> None:
    with pytest.raises(ValueError, match="must"):
        predict(find_model("gpt2"), Recipe(gpus=gpus), batch_size)


class TestObstacle:
    def test_names_the_bucket_that_alone_exceeds_the_card(self) -> None:
        obstacle = largest_obstacle(predict(linear_stack(8 * GB), Recipe(), 0), 24 * GIB)
        assert obstacle is not None
        assert obstacle == ("nothing fits: optimizer state alone needs 59.60 GiB of the card's 24.00 GiB")

    def test_names_the_fewest_that_together_exceed_it(self) -> None:
        obstacle = largest_obstacle(predict(linear_stack(8 * GB), Recipe(optimizer="sgd"), 0), 40 * GIB)
        assert obstacle is not None
        assert obstacle.endswith("parameters and gradients together need 59.60 GiB of the card's 40.00 GiB")

    def test_a_large_batch_is_not_nothing(self) -> None:
        obstacle = largest_obstacle(predict(find_model("gpt2"), Recipe(), 4096), 24 * GIB)
        assert obstacle is not None
        assert obstacle.startswith("batch size 4096 does not fit: activations alone needs")

    def test_none_when_it_fits(self) -> None:
        prediction = predict(find_model("gpt2"), Recipe(), 1)
        assert largest_obstacle(prediction, prediction.needed_bytes) is None


def test_every_optimizer_has_one_record() -> None:
    assert set(OPTIMIZER_RECORDS) == set(OPTIMIZERS)
    for record in OPTIMIZER_RECORDS.values():
        assert record.options["lr"] > 0
