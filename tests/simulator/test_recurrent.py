"""Recurrent layers as cuDNN runs them: its reserve against published sizes, weights and gradients in one buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from gpumem_tui.catalog.loader import find_gpu
from gpumem_tui.memory import MIB
from gpumem_tui.simulator.allocator.profile import profile_for
from gpumem_tui.simulator.device.gpu import SimulatedGpu
from tests.in_process import as_cuda
from tests.simulator.simulated_steps import simulated_gpu


@pytest.fixture
def gpu() -> Iterator[SimulatedGpu]:
    found = simulated_gpu()
    with as_cuda(found):
        yield found


PUBLISHED = [
    # pytorch/pytorch#2895: 4 layers of 320 units; what was printed fits 25,000 steps and sequences
    (lambda: nn.LSTM(123, 320, 4), (250, 100, 123), torch.float32, 736_000_000),
    (lambda: nn.GRU(123, 320, 4), (250, 100, 123), torch.float32, 864_000_000),
    # SeanNaren/deepspeech.pytorch#172
    (lambda: nn.GRU(672, 800, bias=False, bidirectional=True), (326, 64, 672), torch.float32, 801_177_600),
    # pytorch, benchmarks/dynamo/microbenchmarks/operator_inp_logs/torchbench_train/tts_angular_training.txt
    (lambda: nn.LSTM(40, 768), (50, 64, 40), torch.float16, 24_576_016),
]


@pytest.mark.parametrize(("make", "shape", "dtype", "reserve"), PUBLISHED, ids=range(len(PUBLISHED)))
def test_the_reserve_is_as_published(
    gpu: SimulatedGpu, make: Callable[[], nn.RNNBase], shape: tuple[int, ...], dtype: torch.dtype, reserve: int
) -> None:
    layer = make().cuda().to(dtype)
    output, _ = layer(torch.randn(shape, device="cuda", dtype=dtype))
    kept = output.grad_fn._saved_result3.nbytes
    at_ends = layer.num_layers * (1 + layer.bidirectional) * shape[1] * layer.hidden_size * 2 * output.element_size()
    assert 0 <= kept - at_ends - reserve <= 256  # cuDNN 9 keeps two states more, and 256 bytes; 8 had 16 bytes
    assert torch.cuda.memory_allocated() > reserve


def test_an_lstm_takes_what_it_took_on_an_h200() -> None:
    """The events of `lstm` in shared histories: torch 2.11, cuDNN 9.19, 2 layers, 1,024 units, 32 times 128 steps."""
    gpu = simulated_gpu(unlimited=True)
    with as_cuda(gpu):
        layer = nn.LSTM(1024, 1024, 2, dropout=0.2, batch_first=True).cuda()
        values = torch.randn(32, 128, 1024, device="cuda", requires_grad=True)
        before = gpu.recorder.allocations
        layer(values)[0].sum().backward()
    timeline = gpu.finish()
    sizes = [size for size in timeline.sizes[before:] if size > 16 * MIB]
    mib16, weights, workspace, reserve = 16 * MIB, 67_174_400, 203_948_544, 185_073_920
    kinds = [size for size in timeline.sizes[before:] if size in (weights, workspace, reserve)]
    assert kinds == [workspace, reserve, workspace, weights, workspace], sizes
    assert timeline.sizes[before:].count(mib16) >= 6


def test_in_evaluation_there_is_none(gpu: SimulatedGpu) -> None:
    layer = nn.LSTM(64, 256).cuda().eval()
    values = torch.randn(100, 64, 64, device="cuda")
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        output, _ = layer(values)
    held = torch.cuda.memory_allocated() - before - output.nbytes
    assert held <= 4 * 64 * 256 * 4


@pytest.mark.parametrize("move", [lambda make: make().cuda(), lambda make: make(device="cuda")], ids=["cuda", "device"])
@pytest.mark.parametrize(
    ("make", "per_layer"),
    [
        (lambda **where: nn.LSTM(40, 96, 2, bidirectional=True, **where), 4 * 96 * (40 + 96 + 2)),
        (lambda **where: nn.GRU(40, 96, bias=False, **where), 3 * 96 * (40 + 96 + 2)),
        (lambda **where: nn.LSTM(40, 96, proj_size=24, **where), 4 * 96 * (40 + 24 + 2) + 96 * 24),
    ],
    ids=["LSTM", "GRU", "projected"],
)
def test_weights_and_gradients_lie_in_one_buffer(
    gpu: SimulatedGpu,
    make: Callable[..., nn.RNNBase],
    per_layer: int,
    move: Callable[[Callable[..., nn.RNNBase]], nn.RNNBase],
) -> None:
    layer = move(make)
    (storage,) = {one.untyped_storage() for one in layer.parameters()}
    if layer.bidirectional:
        per_layer = 2 * per_layer + 2 * 4 * 96 * (2 * 96 + 96 + 2)
    assert storage.nbytes() == 4 * per_layer
    assert {one.untyped_storage() for one in copy.deepcopy(layer).parameters()} != {storage}
    output, _ = layer(torch.randn(7, 3, 40, device="cuda", requires_grad=True))
    output.sum().backward()
    assert len({one.grad.untyped_storage() for one in layer.parameters() if one.grad is not None}) == 1
    del output
    torch.optim.SGD(layer.parameters(), lr=0.1).step()


def test_sequences_first_are_copied_for_cudnn_while_it_runs(gpu: SimulatedGpu) -> None:
    peaks = []
    for first in (False, True):
        layer = nn.LSTM(512, 64, batch_first=first).cuda()
        values = torch.randn(256, 256, 512, device="cuda")
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        output, _ = layer(values)
        assert output.is_contiguous() is not first
        peaks.append(torch.cuda.max_memory_allocated() - before)
        del output, values
    assert peaks[1] - peaks[0] == 256 * 256 * 512 * 4


def test_packed_sequences_count_to_the_longest_ones_end(gpu: SimulatedGpu) -> None:
    layer = nn.GRU(80, 64, batch_first=True).cuda()
    packed = nn.utils.rnn.pack_padded_sequence(
        torch.randn(3, 2000, 80, device="cuda"), torch.tensor([2000, 800, 1600]), True, enforce_sorted=False
    )
    output, _state = layer(packed)
    assert output.data.shape == (4400, 64)
    assert output.data.grad_fn._saved_result3.nbytes == pytest.approx((6 * 2000 + 2) * 3 * 64 * 4, abs=256)


def test_dropout_between_layers_has_its_random_states_once(gpu: SimulatedGpu) -> None:
    values = torch.randn(5, 2, 8, device="cuda")
    layers = [nn.LSTM(8, 16, 2, dropout=0.5).cuda() for _ in range(2)]
    before = torch.cuda.memory_allocated()
    for layer in layers:
        layer(values)
    assert torch.cuda.memory_allocated() - before == 108 * 48 * 1024  # an A100's multiprocessors


def test_autocast_runs_float16_whatever_its_type(gpu: SimulatedGpu) -> None:
    layer = nn.LSTM(40, 96).cuda()
    with torch.autocast("cuda", dtype=torch.bfloat16):
        output, _ = layer(torch.randn(7, 3, 40, device="cuda"))
    assert output.dtype is torch.float16
    output.float().sum().backward()
    assert {one.grad.dtype for one in layer.parameters() if one.grad is not None} == {torch.float32}


@pytest.mark.parametrize(
    ("name", "version", "is_cudnns"),
    [
        ("h200-141gb", "2.11.0+cu130", True),
        ("h200-141gb", "2.11.0+cu128", False),  # whose cuDNN is 9.10
        ("h200-141gb", "2.9.1+cu130", False),  # before pytorch/pytorch#164411
        ("v100-32gb", "2.11.0+cu130", False),
    ],
)
def test_cudnn_runs_bfloat16_since_9_13(name: str, version: str, is_cudnns: bool) -> None:
    card = find_gpu(name)
    with as_cuda(SimulatedGpu(card, profile_for(version, card))):
        layer = nn.LSTM(40, 96).cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):  # asked of what comes in, before that is cast
            output, _ = layer(torch.randn(7, 3, 40, device="cuda", dtype=torch.bfloat16))
        assert ("Cudnn" in type(output.grad_fn).__name__) == is_cudnns
        output.float().sum().backward()


def test_without_cudnn_the_cells_are_composed(gpu: SimulatedGpu) -> None:
    layer = nn.GRU(40, 96).cuda()
    with torch.backends.cudnn.flags(enabled=False):
        output, _ = layer(torch.randn(7, 3, 40, device="cuda"))
    assert "Cudnn" not in type(output.grad_fn).__name__
    output.sum().backward()
    assert not gpu.notes


def test_the_assumption_is_said(gpu: SimulatedGpu) -> None:
    nn.RNN(8, 16).cuda()(torch.randn(5, 2, 8, device="cuda"))
    assert any("cuDNN's reserve is as measured" in note for note in gpu.notes)
