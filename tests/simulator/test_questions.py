"""Questions about tensors without data get the answers of a GPU's tensors."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.in_process import as_cuda
from tests.simulator.simulated_steps import on, simulated_gpu

WIDE = 1024
"""A layer of so many units on the host is a weight without data."""


@pytest.fixture
def layer() -> Iterator[nn.Linear]:
    """A layer on the host, where the simulated GPU is CUDA."""
    with as_cuda(simulated_gpu()):
        yield nn.Linear(WIDE, WIDE)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_no_tensor_is_a_fake_one_to_a_program(layer: nn.Linear, place: str) -> None:
    from torch._subclasses.fake_tensor import FakeTensor, is_fake

    layer.to(place)
    for tensor in (layer.weight, layer.weight * 1, layer.weight.data, layer.weight.detach()):
        assert not isinstance(tensor, FakeTensor)
        assert not isinstance(tensor, torch._subclasses.FakeTensor)
        assert not is_fake(tensor)
    with torch._subclasses.FakeTensorMode() as mode:  # a program's own are
        own = mode.from_tensor(torch.zeros(2, device="cpu"))
    assert isinstance(own, FakeTensor)
    assert is_fake(own)
    assert issubclass(type(own), FakeTensor)


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_what_torch_gives_is_of_its_own_class(layer: nn.Linear, place: str) -> None:
    layer.to(place)
    made = layer.weight * 1
    made.backward(torch.ones_like(made))
    halves = made.detach().split(WIDE // 2)
    torch._subclasses.FakeTensorMode.cache_clear()  # what torch gives the first time is a named tuple
    normed = nn.functional.layer_norm(made.detach(), (WIDE,))
    for tensor in (
        normed,
        made,
        layer.weight.grad,
        layer.weight.data,
        *halves,
        copy.deepcopy(halves[0]),
        copy.copy(made),
    ):
        assert type(tensor) is torch.Tensor
        assert tensor.device.type == place
        assert {torch.Tensor: "found"}[type(tensor)] == "found"
        assert pickle.loads(pickle.dumps(type(tensor))) is torch.Tensor
        assert pickle.loads(pickle.dumps(tensor)).device.type == place
    kinds: list[type] = []
    again = layer.weight * 1
    again.register_hook(lambda gradient: kinds.append(type(gradient)))
    (again * again).sum().backward()
    assert kinds == [torch.Tensor]


def test_tensors_of_the_gpu_are_taken_where_torch_leaves_its_modes(layer: nn.Linear) -> None:
    made = layer.cuda().bias.detach() * 0
    found = torch.tensor([made[0], 1])
    assert found.tolist() == [pytest.approx(0, abs=1e-5), 1]
    assert torch.as_tensor(made).is_cuda
    assert torch.vmap(lambda row: row * 2)(made).shape == made.shape


@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_parameter_is_of_the_class_of_parameters(layer: nn.Linear, place: str) -> None:
    layer.to(place)
    for parameter in (layer.weight, layer.bias, copy.deepcopy(layer).weight, nn.Parameter(layer.weight)):
        assert type(parameter) is nn.Parameter
        assert parameter.__class__ is nn.Parameter
        assert isinstance(parameter, nn.Parameter)
        assert parameter.is_leaf
        assert parameter.requires_grad
        assert parameter.device.type == place
    kind: Any = type(layer.weight)
    made = kind(torch.zeros(2, device="cpu"), requires_grad=False)
    assert type(made) is nn.Parameter
    assert not made.requires_grad


def test_a_parameter_goes_to_the_meta_device_as_accelerate_sends_it(layer: nn.Linear) -> None:
    attributes = {**vars(layer.weight), "requires_grad": True}
    kind: Any = type(layer.weight)
    moved = kind(layer.weight.to(torch.device("meta")), **attributes)
    assert type(moved) is nn.Parameter
    assert moved.device.type == "meta"
    assert moved.shape == (WIDE, WIDE)
    assert moved.stride() == (WIDE, 1)


def test_a_copied_parameter_has_no_gradient_and_a_pickled_one_its_shape(layer: nn.Linear) -> None:
    layer.cuda()
    layer(torch.zeros(2, WIDE, device="cuda")).sum().backward()
    assert copy.deepcopy(layer.weight).grad is None
    read = pickle.loads(pickle.dumps(layer.weight))
    assert read.shape == layer.weight.shape
    assert read.device.type == "cuda"
    assert read.requires_grad


COPIES: dict[str, Callable[[Any], Any]] = {
    "protocol 0": lambda one: pickle.loads(pickle.dumps(one, 0)),
    "protocol 5": lambda one: pickle.loads(pickle.dumps(one, 5)),
    "torch.save": lambda one: _saved(one),
    "another process": lambda one: pickle.loads(ForkingPickler.dumps(one)),
    "copy": copy.deepcopy,
    "shared": lambda one: one.share_memory(),
}  # fmt: skip
"""Ways by which a program has a model once more, or sends it to another process."""


def _saved(thing: Any) -> Any:
    file = io.BytesIO()
    torch.save(thing, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("place", ["cpu", "cuda"])
def test_a_model_is_pickled_wherever_it_is(layer: nn.Linear, place: str, way: str) -> None:
    model = nn.Sequential(layer, nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE)).to(place)
    model[1].weight = layer.weight
    model[0].bias.requires_grad_(False)
    weight: Any = layer.weight
    weight.is_tied = True
    made = COPIES[way](model)
    assert made[0].weight is made[1].weight
    if "protocol" in way:
        assert made[0].weight.is_tied
    for one, other in zip((*model.parameters(), *model.buffers()), (*made.parameters(), *made.buffers()), strict=True):
        assert type(one) is type(other)
        assert (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype)
        assert (one.device, one.requires_grad) == (other.device, other.requires_grad)
    made.cuda()(torch.zeros(2, WIDE, device="cuda")).sum().backward()
    assert made[0].weight.grad is not None


def test_pickled_tensors_of_one_storage_take_its_memory_once(layer: nn.Linear) -> None:
    whole = torch.zeros(WIDE, WIDE, device="cuda")
    before = torch.cuda.memory_allocated()
    first, last = pickle.loads(pickle.dumps((whole[:10], whole[10:])))
    assert torch.cuda.memory_allocated() - before == WIDE * WIDE * 4
    assert first.untyped_storage()._cdata == last.untyped_storage()._cdata
    again = copy.copy(whole)
    assert again.untyped_storage()._cdata == whole.untyped_storage()._cdata


@pytest.mark.parametrize(("to", "place"), [
    (None, "cuda"), ("cpu", "cpu"), (torch.device("cuda"), "cuda"), ({"cuda:0": "cpu"}, "cpu"),
    (lambda storage, _: storage, "cpu"), (lambda storage, _: storage.cuda(), "cuda"),
])  # fmt: skip
def test_what_was_saved_without_data_is_loaded_to_where_it_is_told(layer: nn.Linear, to: Any, place: str) -> None:
    file = io.BytesIO()
    torch.save({"weight": layer.cuda().weight.detach()}, file)
    file.seek(0)
    assert torch.load(file, map_location=to)["weight"].device.type == place


def test_the_type_of_a_tensor_is_pickled_as_torchs(layer: nn.Linear) -> None:
    made = layer.cuda()(torch.zeros(2, WIDE, device="cuda"))
    for kind, expected in (
        (type(made), torch.Tensor),
        (type(layer.weight), nn.Parameter),
        (torch.Tensor, torch.Tensor),
    ):
        assert pickle.loads(pickle.dumps(kind)) is expected


def test_tensors_of_the_default_type_lie_on_the_gpu_where_it_is_a_gpus(layer: nn.Linear) -> None:
    with torch.device("cuda"):  # which does not mean what is made by its type
        assert torch.Tensor([1e10]).device.type == "cpu"
    torch.set_default_tensor_type("torch.cuda.HalfTensor")
    try:
        for made in (
            torch.Tensor([1e10]),
            torch.Tensor(1),
            torch.Tensor(torch.Size([1])),
            nn.Parameter(torch.Tensor(1)),
        ):
            assert (made.device.type, made.dtype, made.shape) == ("cuda", torch.float16, (1,))
        assert torch.Tensor().shape == (0,)
        assert torch.FloatTensor([1]).device.type == "cpu"
    finally:
        torch.set_default_tensor_type(torch.FloatTensor)
    assert torch.Tensor([1e10]).device.type == "cpu"
    cuda: Any = torch.cuda
    assert cuda.FloatTensor().shape == (0,)
    assert cuda.FloatTensor(torch.Size((2, 3))).shape == (2, 3)
    assert cuda.FloatTensor((2, 3)).tolist() == [2, 3]


def test_scalars_of_the_gpu_are_read_into_a_new_tensor(layer: nn.Linear) -> None:
    known = torch.tensor([3, 5], device="cuda").max()
    assert torch.tensor([known, 7]).tolist() == [5, 7]
    unknown = layer.cuda()(torch.zeros(2, WIDE, device="cuda")).sum().detach()
    made = torch.tensor([unknown, unknown], device="cuda")
    assert made.device.type == "cuda"
    assert made.shape == (2,)


def test_lengths_of_the_host_divide_a_ctc_loss(layer: nn.Linear) -> None:
    scores = layer.cuda()(torch.zeros(10, 2, WIDE, device="cuda")).log_softmax(2)
    targets, lengths = torch.ones(2, 3, dtype=torch.long, device="cuda"), torch.tensor([10, 9], device="cpu")
    loss = nn.functional.ctc_loss(scores, targets, lengths, torch.tensor([3, 2], device="cpu"), reduction="mean")
    loss.backward()
    assert layer.weight.grad is not None


LAYOUTS: dict[str, Callable[[torch.Tensor], Any]] = {
    "svd": lambda x: torch.linalg.svd(x, full_matrices=False),
    "full svd": torch.linalg.svd,
    "eig": lambda x: torch.linalg.eig(x.narrow(1, 0, 8)),
    "eigh": lambda x: torch.linalg.eigh(x.narrow(1, 0, 8)),
    "fft": lambda x: torch.fft.fft(x, dim=0),
    "rfft": lambda x: torch.fft.rfft(x, dim=0),
    "two-dimensional fft": torch.fft.rfft2,
    "and back": lambda x: torch.fft.irfft2(torch.complex(x, x)),
    "median": lambda x: x.median(dim=1),
    "histc": lambda x: x.int().histc(5, 0, 4),
}


@pytest.mark.parametrize("operator", LAYOUTS.values(), ids=LAYOUTS)
def test_results_lie_in_memory_as_on_cuda(operator: Callable[[torch.Tensor], Any]) -> None:
    def layouts(made: Any) -> list[Any]:
        tensors = [made] if isinstance(made, torch.Tensor) else made
        return [(one.dtype, one.shape, one.stride()) for one in tensors]

    with FakeTensorMode():
        expected = layouts(operator(torch.empty(8, 12, device="cuda")))
    with on() as (device, _):
        assert layouts(operator(torch.empty(8, 12, device=device))) == expected


def test_what_programs_do_with_parameters_works_on_those_without_data(layer: nn.Linear) -> None:
    weight = layer.cuda().weight
    kind: Any = type(weight)
    again = kind(weight.data, **vars(weight))  # as accelerate and PEFT make another one
    assert type(again) is type(copy.copy(weight)) is nn.Parameter
    assert again.data_ptr() == weight.data_ptr() != layer.bias.data_ptr()
    assert len(weight.tolist()) == WIDE
    with pytest.raises(TypeError, match="device type tensor to numpy"):
        weight.numpy()
    weight.data = weight.data.half()
    assert (type(weight), weight.dtype) == (nn.Parameter, torch.float16)
    layer.load_state_dict({name: one.clone() for name, one in layer.state_dict().items()}, assign=True)
    assert type(layer.weight) is nn.Parameter
    layer.cpu()
    assert type(layer.weight) is nn.Parameter
    assert layer.weight.device.type == "cpu"
    assert not any("fake" in name for name in vars(layer.weight))
    found: list[type] = []
    thread = threading.Thread(target=lambda: found.append(type(layer.cuda().weight)))
    thread.start()
    thread.join()
    assert found == [nn.Parameter]


class _Packed(nn.Parameter):
    """As bitsandbytes' parameters of 4 bits: made on the host with data, which is given others on the GPU."""

    def __new__(cls, data: torch.Tensor) -> Any:
        made: Any = torch.Tensor._make_subclass(cls, data)
        made.state, made.data = "unpacked", data
        return made


def test_a_parameter_of_another_class_is_given_data_on_the_gpu(layer: nn.Linear) -> None:
    packed = _Packed(torch.zeros(8, WIDE, device="cpu"))
    packed.data = torch.empty(WIDE, 2, device="cuda")
    assert (packed.device.type, tuple(packed.shape), packed.state) == ("cuda", (WIDE, 2), "unpacked")
    assert packed.sum().device.type == "cuda"
    assert isinstance(packed, _Packed)
    packed.data = torch.zeros(3, device="cpu")
    assert (packed.device.type, packed.tolist()) == ("cpu", [0.0] * 3)


class _Image(torch.Tensor):
    """As the images of torchvision's `tv_tensors` and fastai's: an image stays one after any operation."""


def test_a_tensor_of_a_class_of_the_programs_stays_one(layer: nn.Linear) -> None:
    on_host = torch.zeros(2, WIDE, device="cpu").as_subclass(_Image)
    on_gpu = torch.zeros(2, WIDE, device="cuda").as_subclass(_Image)
    images: tuple[Any, ...] = (on_gpu, on_host.cuda(), on_host.to("cuda") + 1, torch.relu(on_gpu), on_host * 2)
    for image in images:
        assert isinstance(image, _Image)
        assert type(image).__name__ == "_Image"
    assert [image.device.type for image in images] == ["cuda"] * 4 + ["cpu"]
    assert isinstance(on_gpu.cpu(), _Image)
    assert not isinstance(on_gpu.as_subclass(torch.Tensor), _Image)
    weight = nn.Linear(WIDE, 1, device="cuda").weight
    (on_gpu @ weight.T).sum().backward()
    assert weight.grad is not None


class _Scan(torch.Tensor):
    """As MONAI's images: each result has all attributes of what it was made of, and one is made with its affine."""

    affine: list[int]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made: Any = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        if isinstance(made, _Scan) and (known := [one for one in args if isinstance(one, _Scan)]):
            made.__dict__ = known[0].__dict__.copy()
        return made

    def new_empty(self, *size: Any, **kwargs: Any) -> Any:
        raise AssertionError("a GPU's kernels call no method of a program's class")


def test_a_class_with_attributes_and_methods_of_its_own_is_followed(layer: nn.Linear) -> None:
    scan = torch.zeros(2, 3, 8, 8, device="cpu").as_subclass(_Scan)
    scan.affine = [1, 2]
    on_gpu = scan.cuda()
    scores = nn.Conv2d(3, 4, 3, device="cuda")(on_gpu)
    assert (scores.affine, scores.shape, scores.device.type) == ([1, 2], (2, 4, 6, 6), "cuda")
    scores.sigmoid().sum().backward()
    assert type(scores).__name__ == "_Scan"
    assert scores.cpu().affine == [1, 2]
