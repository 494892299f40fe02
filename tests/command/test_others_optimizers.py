"""Optimizers that torch lacks, or has not had for long, by their real packages: each keeps what it does on the host."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.command.running import Project

pytestmark = [pytest.mark.scripts, pytest.mark.slow]

STEPS = 2
SCALARS_BYTES = 16 * 512
"""Bytes of numbers on the GPU, or on the host, that are not counted there."""
WAYS = {
    "torch's Muon": ("torch.optim", "Muon(MATRICES)"),
    "Adafactor": ("torch.optim", "Adafactor(WEIGHTS)"),
    "Prodigy": ("prodigyopt", "Prodigy(WEIGHTS)"),
    "AdamWScheduleFree": ("schedulefree", "AdamWScheduleFree(WEIGHTS)"),
    "SOAP": ("pytorch_optimizer", "SOAP(WEIGHTS)"),
    "Shampoo": ("pytorch_optimizer", "Shampoo(WEIGHTS)"),
    "ScalableShampoo": ("pytorch_optimizer", "ScalableShampoo(WEIGHTS)"),
    "SophiaH": ("pytorch_optimizer", "SophiaH(WEIGHTS)"),
    "Lion": ("pytorch_optimizer", "Lion(WEIGHTS)"),
    "CAME": ("pytorch_optimizer", "CAME(WEIGHTS)"),
    "AdamMini": ("pytorch_optimizer", "AdamMini(net)"),
    "APOLLO": ("pytorch_optimizer", "APOLLO(WEIGHTS)"),
    "Muon": ("pytorch_optimizer", "Muon([dict(params=MATRICES, use_muon=True), dict(params=REST, use_muon=False)])"),
    "SingleDeviceMuonWithAuxAdam": (
        "muon",
        "SingleDeviceMuonWithAuxAdam([dict(params=MATRICES, use_muon=True), dict(params=REST, use_muon=False)])",
    ),
    "GaLoreAdamW": ("galore_torch", "GaLoreAdamW([dict(params=REST), dict(params=MATRICES, **LOW_RANK)])"),
    "APOLLOAdamW": (
        "apollo_torch",
        "APOLLOAdamW([dict(params=REST), dict(params=MATRICES, **LOW_RANK, proj='random', scale_type='channel')])",
    ),
    "Adam_mini": ("adam_mini", "Adam_mini(net.named_parameters(), dim=64, n_heads=4)"),
}
"""By name the package and how it is made."""

TRAINING = """
    import torch

    LOW_RANK = dict(rank=16, update_proj_gap=2, scale=1.0, proj_type="std")
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"

    for kind in (torch.float32, torch.bfloat16):
        square = torch.zeros(8, 8, dtype=kind, device=device)
        square @ square  # CUDA's library takes its workspace

    def kept(value, seen):
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, torch.Tensor) and value.dim():
            storage = value.untyped_storage()
            yield storage._cdata, -(-storage.nbytes() // 512) * 512
        elif isinstance(value, dict):
            for one in value.values():
                yield from kept(one, seen)
        elif isinstance(value, (list, tuple)):
            for one in value:
                yield from kept(one, seen)
        elif hasattr(value, "__dict__"):
            yield from kept(vars(value), seen)

    def follow(name, package, expression):
        try:
            exec(f"from {package} import {expression.partition('(')[0]}", globals())
        except ImportError:
            return print("lacks", name)
        global net, WEIGHTS, MATRICES, REST
        torch.manual_seed(0)
        net = torch.nn.ModuleDict({
            "embed": torch.nn.Embedding(200, 128), "up": torch.nn.Linear(128, 512), "down": torch.nn.Linear(512, 128),
        }).to(device)
        WEIGHTS = list(net.parameters())
        MATRICES = [net["up"].weight, net["down"].weight]
        REST = [one for one in WEIGHTS if not any(one is matrix for matrix in MATRICES)]
        optimizer = eval(expression)
        if hasattr(optimizer, "train"):
            optimizer.train()
        torch.stack([(one**2).sum() for one in WEIGHTS]).sum().backward(create_graph=name == "SophiaH")
        before = torch.cuda.memory_allocated() if on_gpu else 0
        for _ in range(%d):
            optimizer.step()
        if on_gpu:
            print("keeps", torch.cuda.memory_allocated() - before, name)
        else:
            print("keeps", sum(dict(kept(dict(optimizer.state), set())).values()), name)

    for name, (package, expression) in %r.items():
        try:
            follow(name, package, expression)
        except Exception as error:
            print("fails", name, repr(error))
"""


Kept = dict[str, int]


def _kept(text: str) -> Kept:
    lines = [line.partition("keeps ")[2].split(" ", 1) for line in text.splitlines() if "keeps " in line]
    return {name: int(size) for size, name in lines}


@pytest.fixture(scope="module")
def on_both(tmp_path_factory: pytest.TempPathFactory) -> tuple[tuple[Kept, str], Kept]:
    """The state of each on the simulated GPU, with the program's own figure, and on the host."""
    project = Project(tmp_path_factory.mktemp("optimizers"))
    program = project.write("train.py", TRAINING % (STEPS, WAYS))
    done = project.predict("python", "train.py", options=("--steps", "1000"))
    assert done.code == 0, done.stderr
    host = subprocess.run([sys.executable, program], capture_output=True, text=True, check=True)
    return (_kept(done.stderr), done.stderr), _kept(host.stdout)


@pytest.mark.parametrize("name", WAYS)
def test_an_optimizer_keeps_what_it_keeps_on_the_host(name: str, on_both: tuple[tuple[Kept, str], Kept]) -> None:
    (here, said), host = on_both
    if f"lacks {name}" in said:
        pytest.skip(f"not installed here: {WAYS[name][0]}")
    assert here[name] == pytest.approx(host[name], abs=SCALARS_BYTES)
