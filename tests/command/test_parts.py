"""Parts of buckets: frozen weights, and copies of the model that nobody trains."""

from __future__ import annotations

from tests.command.running import Project

WIDTH, WORDS = 256, 1000
SCRIPT = f"""
    import copy
    import torch
    from torch import nn
    from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.words = nn.Embedding({WORDS}, {WIDTH}).requires_grad_(False)
            self.base = nn.Linear({WIDTH}, {WIDTH}, bias=False).requires_grad_(False).bfloat16()
            self.trained = nn.Linear({WIDTH}, {WIDTH}, bias=False)

        def forward(self, ids):
            return self.trained(self.base(self.words(ids).bfloat16()).float())

    model = Model().cuda()
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))
    by_hand, before = copy.deepcopy(model), copy.deepcopy(model)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(5):
        model(torch.randint(0, {WORDS}, (4, 16), device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        averaged.update_parameters(model)
        with torch.no_grad():
            for mine, new in zip(by_hand.parameters(), model.parameters()):
                mine.lerp_(new, 0.01)
"""
FROZEN_32, FROZEN_16, TRAINED = 4 * WORDS * WIDTH, 2 * WIDTH * WIDTH, 4 * WIDTH * WIDTH
COPY = FROZEN_32 + FROZEN_16 + TRAINED


def test_frozen_weights_and_copies_of_the_model_have_names(project: Project) -> None:
    project.write("train.py", SCRIPT)
    done = project.predict("python", "train.py")
    traced = done.json["traced"]
    found = {(one["bucket"], one["part"]): one["bytes"] for one in traced["parts"]}
    assert found == {
        ("parameters", "frozen float32"): FROZEN_32,
        ("parameters", "frozen bfloat16"): FROZEN_16,
        ("parameters", "trained float32"): TRAINED,
        ("parameters", "EMA copies"): 2 * COPY,
        ("parameters", "model copies"): COPY,
    }
    assert traced["buckets"]["parameters"] == sum(found.values())
    assert traced["frozen_saving_bytes"] == FROZEN_32 // 2


def test_what_is_never_called_as_a_model_has_names_too(project: Project) -> None:
    project.write(
        "train.py",
        f"""
        import copy
        import torch
        from torch import nn

        class Encoder(nn.Module):  # as the autoencoder of a diffusion model: it has no forward
            def __init__(self):
                super().__init__()
                self.inner = nn.Linear({WIDTH}, {WIDTH}, bias=False)

            def encode(self, x):
                return x @ self.inner.weight

        class ModelEMA:  # as ultralytics has it: validated, and with lists of both models' tensors
            def __init__(self, model):
                self.ema = copy.deepcopy(model).eval().requires_grad_(False)
                self.pairs = list(self.ema.state_dict().values()), list(model.state_dict().values())

            def update(self):
                torch._foreach_lerp_(*self.pairs, 0.1)

        encoder = Encoder().requires_grad_(False).cuda()
        model = nn.Linear({WIDTH}, {WORDS}, bias=False).cuda()
        average = ModelEMA(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            batch = encoder.encode(torch.randn(4, {WIDTH}, device="cuda"))
            model(batch).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update()
            with torch.no_grad():
                average.ema(batch)
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    assert {one["part"]: one["bytes"] for one in traced["parts"]} == {
        "trained float32": FROZEN_32,
        "EMA copies": FROZEN_32,
        "frozen float32": TRAINED,
    }


def test_a_moving_average_that_holds_the_model_as_well_is_counted_without_it(project: Project) -> None:
    """As ema_pytorch's `EMA` of `include_online_model` does."""
    project.write(
        "train.py",
        """
        import copy
        import torch

        class EMA(torch.nn.Module):
            def __init__(self, model):
                super().__init__()
                self.online_model = model
                self.ema_model = copy.deepcopy(model)

        class Task(torch.nn.Module):  # as timm's: what is trained and its average in one module, which is called
            def __init__(self, model):
                super().__init__()
                self.model, self.average = model, EMA(model)

            def forward(self, x):
                return self.model(x).sum()

        model = torch.nn.Sequential(torch.nn.Linear(256, 256, bias=False), torch.nn.BatchNorm1d(256)).cuda()
        task = Task(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            task(torch.randn(4, 256, device="cuda")).backward()
            optimizer.step()
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    held = 256 * 256 * 4 + 4 * 256 * 4 + 512  # the weights, and what BatchNorm has, its count in a block of its own
    found = {one["part"]: one["bytes"] for one in traced["parts"]}
    assert found["EMA copies"] == held
    assert found["trained float32"] == 256 * 256 * 4 + 2 * 256 * 4
    assert "the rest" not in found


def test_a_model_that_is_all_trained_has_no_parts(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(5):
            model(torch.randn(4, 64, device="cuda")).sum().backward()
            optimizer.step()
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    assert traced["parts"] == []
    assert traced["frozen_saving_bytes"] == 0


def test_data_kept_on_the_gpu_and_what_is_made_of_it_is_batch_data(project: Project) -> None:
    """As airbench keeps its images, after a first evaluation, and flips and pads all of them once an epoch."""
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        images = torch.zeros(4000, 3, 32, 32, dtype=torch.uint8).cuda().half() / 255
        model = nn.Sequential(nn.Flatten(), nn.Linear(3072, 10)).cuda().half()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with torch.no_grad():
            model(images[:10])
        normal = (images - torch.tensor(0.5).cuda().half()) / 0.25
        flips = torch.rand(len(images), device="cuda") < 0.5
        flipped = torch.where(flips.view(-1, 1, 1, 1), normal.flip(-1), normal)
        average = [parameter.detach().clone() for parameter in model.parameters()]
        for step in range(4):
            picked = flipped.index_select(0, torch.randperm(4000, device="cuda")[:500])
            optimizer.zero_grad()
            model(picked).float().sum().backward()
            optimizer.step()
        """,
    )
    found = project.predict("python", "train.py").json["traced"]
    images_bytes = 4000 * 3072 * 2
    assert 3 * images_bytes <= found["highest"]["batch_data"]["bytes"] < 4 * images_bytes
    assert found["highest"]["activations"]["bytes"] < images_bytes // 4


def test_tensors_in_objects_of_an_optimizers_state_are_its_state(project: Project) -> None:
    """As GaLore's projector, an object in each parameter's state."""
    project.write(
        "train.py",
        """
        import torch

        class Projector:
            def __init__(self, gradient):
                self.matrix = gradient[:, :128].clone()

        class Projected(torch.optim.Optimizer):
            def __init__(self, parameters):
                super().__init__(parameters, {})

            @torch.no_grad()
            def step(self):
                for parameter in self.param_groups[0]["params"]:
                    if "projector" not in self.state[parameter]:
                        self.state[parameter]["projector"] = Projector(parameter.grad)

        model = torch.nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = Projected(model.parameters())
        for step in range(4):
            model(torch.ones(4, 1024, device="cuda")).sum().backward()
            optimizer.step()
        """,
    )
    found = project.predict("python", "train.py").json["traced"]
    assert found["highest"]["optimizer"]["bytes"] == 1024 * 128 * 4
