"""Activations: the textbook's identities for transformers, and independent sums for the other families."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpumem_tui.catalog.loader import find_model
from gpumem_tui.catalog.shapes import ModelShape
from gpumem_tui.formula.activations import block_rows
from gpumem_tui.formula.parameters import count_parameters
from gpumem_tui.formula.predict import at_moment, max_batch_size, predict, terms
from gpumem_tui.formula.recipe import Attention, Precision, Recipe, Recompute
from gpumem_tui.formula.resolved import resolve
from gpumem_tui.formula.rows import Moment
from gpumem_tui.memory import GIB, Bucket

BATCH = 3
BEYOND_THE_TEXTBOOK = ("residual stream", "inputs cast again", "repeated keys and values")
GPT_NAMES = ["gpt2", "gpt2-medium", "gpt2-xl", "megatron-175b"]
SIXTEEN_BIT: list[Precision] = ["amp-bf16", "amp-fp16", "bf16"]


def blocks_bytes(shape: ModelShape, recipe: Recipe, bucket: Bucket | None = None) -> int:
    """The bytes that the textbook's blocks keep for a batch of BATCH, in one bucket or in all."""
    rows = [row for row in block_rows(resolve(shape, recipe), BATCH) if not row.name.startswith(BEYOND_THE_TEXTBOOK)]
    return sum(row.size_bytes for row in rows if bucket in (None, row.bucket))


def row_bytes(shape: ModelShape, recipe: Recipe, name: str) -> int:
    """The terms of a step whose name contains `name`, whenever they are there."""
    return sum(row.size_bytes for row in terms(shape, recipe, BATCH) if name in row.name)


def activation_bytes(shape: ModelShape, recipe: Recipe, moment: Moment = Moment.LOSS_BACKWARD) -> int:
    """All activations at a moment."""
    rows = at_moment(terms(shape, recipe, BATCH), moment)
    return sum(row.size_bytes for row in rows if row.bucket is Bucket.ACTIVATIONS)


def sbh(shape: ModelShape) -> int:
    return shape.seq_len * BATCH * shape.hidden


def textbook(precision: Precision = "bf16", recompute: Recompute = "none", attention: Attention = "math") -> Recipe:
    return Recipe(precision, recompute=recompute, attention=attention)


@pytest.mark.parametrize("name", GPT_NAMES)
@pytest.mark.parametrize("precision", SIXTEEN_BIT)
class TestTextbookIdentities:
    def test_no_recompute(self, name: str, precision: Precision) -> None:
        shape = find_model(name)
        scores = 5 * shape.heads * shape.seq_len**2 * BATCH
        assert blocks_bytes(shape, textbook(precision)) == shape.layers * (34 * sbh(shape) + scores)

    def test_selective(self, name: str, precision: Precision) -> None:
        shape = find_model(name)
        kept_bytes = blocks_bytes(shape, textbook(precision, "selective"), Bucket.ACTIVATIONS)
        assert kept_bytes == 34 * shape.layers * sbh(shape)

    def test_full_keeps_the_inputs_and_one_block(self, name: str, precision: Precision) -> None:
        shape = find_model(name)
        one_block = replace(shape, layers=1)
        own_bytes = blocks_bytes(one_block, textbook(precision))
        width = 4 if precision.startswith("amp") else 2  # the residual stream is in the weights' dtype
        assert blocks_bytes(shape, textbook(precision, "full")) == width * shape.layers * sbh(shape) + own_bytes

    def test_prediction_holds_the_blocks_the_head_and_what_lies_between(self, name: str, precision: Precision) -> None:
        shape = find_model(name)
        recipe = textbook(precision)
        outside = row_bytes(shape, recipe, "outside the blocks")
        logits = shape.seq_len * BATCH * shape.vocab
        autocast = precision.startswith("amp")
        assert outside == sbh(shape) * ((4 if autocast else 2) + 2 + 1)
        wider = 2 * 2 * shape.layers * sbh(shape) if autocast else 0
        copies = 2 * (count_parameters(shape) - shape.max_seq_len * shape.hidden) if autocast else 0
        expected = blocks_bytes(shape, recipe) + wider + outside + logits * (2 + 4) + copies
        assert activation_bytes(shape, recipe) == expected


def test_fp32_doubles_all_but_the_dropout_masks() -> None:
    shape = find_model("gpt2")
    scores = shape.heads * shape.seq_len**2 * BATCH
    expected = shape.layers * ((2 * 32 + 2) * sbh(shape) + (2 * 4 + 1) * scores)
    assert blocks_bytes(shape, textbook("fp32")) == expected


@pytest.mark.parametrize("attention", ["auto", "flash", "efficient"])
def test_fused_attention_keeps_a_log_sum_exp_instead_of_the_scores(attention: Attention) -> None:
    shape = find_model("gpt2")
    logsumexp = 4 * shape.heads * shape.seq_len * BATCH
    expected = shape.layers * (34 * sbh(shape) + logsumexp)
    assert blocks_bytes(shape, textbook(attention=attention)) == expected


def test_selective_recompute_says_what_one_block_needs_again() -> None:
    shape = find_model("gpt2")
    again_bytes = blocks_bytes(shape, textbook(recompute="selective"), Bucket.TEMPORARY)
    assert again_bytes == 5 * shape.heads * shape.seq_len**2 * BATCH


def test_savings_at_gpt3_scale() -> None:
    shape = find_model("megatron-175b")
    assert (shape.layers, shape.hidden, shape.heads, shape.seq_len) == (96, 12288, 96, 2048)
    none, selective, full = (
        blocks_bytes(shape, textbook(recompute=recompute), Bucket.ACTIVATIONS)
        for recompute in ("none", "selective", "full")
    )
    assert 1 - selective / none == pytest.approx(0.70, abs=0.01)
    assert 1 - full / none > 0.9


def test_without_dropout_no_mask_is_kept() -> None:
    shape = replace(find_model("gpt2"), dropout=0.0)
    scores = 2 * shape.heads * shape.seq_len**2 * BATCH
    assert blocks_bytes(shape, textbook()) == shape.layers * (32 * sbh(shape) + scores)
    assert not any("mask" in row.name for row in predict(shape, textbook(), BATCH).rows)


def test_llama_counts_grouped_keys_and_the_four_operands_of_swiglu() -> None:
    shape = find_model("llama-3-8b")
    keys = shape.hidden // 4  # 8 key/value heads for 32 query heads
    attention = shape.hidden + shape.hidden + 2 * keys + shape.hidden
    feed_forward = shape.hidden + 4 * shape.ffn
    norms = 2 * shape.hidden
    tokens = shape.seq_len * BATCH
    logsumexp = 4 * shape.heads * tokens
    expected = shape.layers * (2 * tokens * (attention + feed_forward + norms) + logsumexp)
    assert blocks_bytes(shape, textbook(attention="flash")) == expected
    rows = block_rows(resolve(shape, textbook()), BATCH)
    sources = {row.source for row in rows if not row.name.startswith(BEYOND_THE_TEXTBOOK)}
    assert sources == {"adapted from Korthikanti et al. 2022"}
    every = sum(row.size_bytes for row in rows if row.name == "repeated keys and values")
    assert every == shape.layers * tokens * 2 * 2 * (3 * keys)
    # RMSNorm written out keeps 4 bytes in fp32 and the normalized values: 6 a value, where LayerNorm keeps 2.
    wider = sum(row.size_bytes for row in rows if row.name == "residual stream")
    assert wider == shape.layers * tokens * 2 * shape.hidden * 4


def test_explicit_head_width_counts_instead_of_the_hidden_size() -> None:
    narrow = find_model("mistral-nemo-12b")
    wide = replace(narrow, head_dim=2 * narrow.head_dim)
    per_head = 2 * narrow.layers * narrow.seq_len * BATCH * narrow.head_dim
    difference = blocks_bytes(wide, textbook()) - blocks_bytes(narrow, textbook())
    assert difference == per_head * (2 * narrow.heads + 2 * narrow.kv_heads)


def test_vit_counts_patches_and_class_token() -> None:
    shape = find_model("vit-b-16")
    tokens = 14 * 14 + 1
    logsumexp = 4 * shape.heads * tokens * BATCH
    expected = shape.layers * (32 * tokens * BATCH * shape.hidden + logsumexp)
    assert blocks_bytes(shape, textbook(attention="auto")) == expected


@pytest.mark.parametrize(("precision", "compute"), [("fp32", 4), ("amp-bf16", 2), ("bf16", 2)])
def test_language_model_head(precision: Precision, compute: int) -> None:
    shape = find_model("gpt2")
    logits = BATCH * shape.seq_len * shape.vocab
    assert _head_bytes(shape, precision) == logits * (compute + 4 + 4 + 4)


def _head_bytes(shape: ModelShape, precision: Precision) -> int:
    rows = at_moment(terms(shape, Recipe(precision), BATCH), Moment.LOSS_BACKWARD)
    return sum(row.size_bytes for row in rows if row.name.startswith("output head"))


def test_language_model_head_is_what_pytorch_holds_at_most() -> None:
    """The loss's peak in real PyTorch, in bytes per logit, found by watching every storage that it makes."""
    torch = pytest.importorskip("torch")
    positions, vocab = 64, 5000
    precisions: list[tuple[Precision, object]] = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
    for precision, dtype in precisions:
        logits = torch.randn(positions, vocab, dtype=dtype, requires_grad=True)
        with torch.profiler.profile(profile_memory=True) as profiler:
            torch.nn.functional.cross_entropy(logits.float(), torch.zeros(positions, dtype=torch.long)).backward()
        held = peak = 0
        for event in profiler.profiler.kineto_results.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        shape = replace(find_model("gpt2"), vocab=vocab, seq_len=positions)
        predicted = _head_bytes(shape, precision) / BATCH
        assert logits.nbytes + peak == pytest.approx(predicted, rel=0.01)


def test_classifier_head_is_counted_for_classes_not_tokens() -> None:
    shape = find_model("bert-base")
    assert _head_bytes(shape, "fp32") == BATCH * shape.classes * 16


def test_doubling_the_sequence_more_than_halves_the_batch() -> None:
    short = find_model("llama-3.2-1b")
    long = short.overridden(seq_len=2 * short.seq_len)
    recipe = textbook("amp-bf16")
    fitting = max_batch_size(short, recipe, 80 * GIB)
    assert 0 < max_batch_size(long, recipe, 80 * GIB) < fitting / 2


@pytest.mark.parametrize(("precision", "width"), [("fp32", 4), ("amp-bf16", 2), ("bf16", 2)])
def test_mlp(precision: Precision, width: int) -> None:
    shape = find_model("mlp")
    assert row_bytes(shape, Recipe(precision), "layer outputs") == BATCH * shape.layers * shape.hidden * width


class TestResNet:
    def test_resnet_50_counts_11_million_convolution_outputs(self) -> None:
        """Radosavovic et al. 2020 give ResNet-50 11.1 million activations, the outputs of its convolutions."""
        shape = find_model("resnet-50")
        assert row_bytes(shape, Recipe(), "convolution outputs") == BATCH * 4 * 11_113_984

    def test_resnet_50_in_total(self) -> None:
        """Written out stage by stage, apart from the program's own layers."""
        convolved, activated = 112**2 * 64, 112**2 * 64 + 56**2 * 64
        for side, width, depth in ((56, 64, 3), (28, 128, 4), (14, 256, 6), (7, 512, 3)):
            entry = side if side == 56 else 2 * side
            first = entry**2 * width + side**2 * width + side**2 * 4 * width
            later = side**2 * (width + width + 4 * width)
            activated += first + (depth - 1) * later
            convolved += first + (depth - 1) * later + side**2 * 4 * width
        indices = 56**2 * 64 * 8
        head = 1000 * 8
        expected = BATCH * (4 * (convolved + activated) + indices + head)
        assert activation_bytes(find_model("resnet-50"), Recipe()) == expected

    def test_resnet_18_against_saved_tensors_of_pytorch(self) -> None:
        """The distinct storages that autograd saves in a stem and one basic block, counted by PyTorch itself."""
        torch = pytest.importorskip("torch")
        nn = torch.nn
        side, sizes = 32, dict[int, int]()

        def seen(tensor: object) -> object:
            assert isinstance(tensor, torch.Tensor)
            if tensor.dim() == 4 and not isinstance(tensor, nn.Parameter):  # feature maps, not weights or statistics
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        norms = [nn.BatchNorm2d(64) for _ in range(2)]
        convs = [nn.Conv2d(64, 64, 3, 1, 1, bias=False) for _ in range(2)]
        image = torch.randn(BATCH, 3, side, side)
        with torch.autograd.graph.saved_tensors_hooks(seen, lambda tensor: tensor):
            pooled = nn.MaxPool2d(3, 2, 1)(stem(image))
            inner = norms[0](convs[0](pooled)).relu_()
            out = (norms[1](convs[1](inner)) + pooled).relu_()
        del sizes[image.untyped_storage().data_ptr()]
        one_block = ModelShape("r", "resnet", image_size=side, classes=1, stages=(1, 0, 0, 0))
        head_bytes = row_bytes(one_block, Recipe(), "output head: lo")
        predicted = activation_bytes(one_block, Recipe()) - head_bytes
        assert out.shape[-1] == 8
        assert sum(sizes.values()) == predicted

    def test_halving_the_width_of_values_spares_the_pooling_indices(self) -> None:
        shape = find_model("resnet-50")
        wide, narrow = activation_bytes(shape, Recipe("fp32")), activation_bytes(shape, Recipe("bf16"))
        indices_and_loss = BATCH * (56**2 * 64 * 8 + 1000 * 4)
        assert narrow - indices_and_loss == (wide - indices_and_loss) // 2

    def test_odd_image_sizes_round_up_at_every_stride(self) -> None:
        odd = find_model("resnet-18").overridden(image_size=225)
        stem_side, stages = 113, [(57, 64), (29, 128), (15, 256), (8, 512)]
        outputs = stem_side**2 * 64
        for index, (side, width) in enumerate(stages):
            outputs += side**2 * width * (4 if index == 0 else 5)
        assert row_bytes(odd, Recipe(), "convolution outputs") == BATCH * 4 * outputs

    def test_full_recompute_keeps_stem_and_block_inputs_and_the_block_that_runs(self) -> None:
        stem = 2 * 112**2 * 64 + 56**2 * 64
        inputs = 3 * 56**2 * 256 + 4 * 28**2 * 512 + 6 * 14**2 * 1024 + 2 * 7**2 * 2048
        first_block = 2 * 56**2 * (64 + 64 + 256) + 56**2 * 256
        last_block = 2 * 7**2 * (512 + 512 + 2048)
        shape, recipe = find_model("resnet-50"), Recipe(recompute="full")
        rest = BATCH * (56**2 * 64 * 8 + 1000 * 4)  # pooling indices, logits
        at_last, at_first = (activation_bytes(shape, recipe, at) for at in (Moment.LAST_BLOCK, Moment.FIRST_BLOCK))
        assert at_last - rest == BATCH * 4 * (stem + inputs + last_block)
        assert at_first - rest == BATCH * 4 * (stem + first_block)


@pytest.mark.parametrize(
    ("name", "per_sample"),
    [
        ("gpt2", 2 * 1024 * 8),
        ("bert-base", 512 * 8 + 8),
        ("vit-b-16", 3 * 224 * 224 * 4 + 8),
        ("mlp", 784 * 4 + 8),
    ],
)
def test_batch_data(name: str, per_sample: int) -> None:
    assert predict(find_model(name), Recipe(), BATCH).breakdown[Bucket.BATCH_DATA] == BATCH * per_sample
