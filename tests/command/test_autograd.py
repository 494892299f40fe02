"""Hooks, transforms and functions that programs put into autograd, and operators that torch has no shapes for."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts


def test_hooks_and_transforms_of_autograd(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from torch import nn
        from torch.func import functional_call, hessian, stack_module_state, vmap

        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].weight.register_hook(lambda gradient: gradient + torch.zeros_like(gradient, device="cuda"))
        parts, _ = stack_module_state([nn.Linear(256, 4).cuda() for _ in range(3)])
        base = nn.Linear(256, 4, device="meta")
        assert hessian(lambda x: (x**3).sum())(torch.randn(3, device="cuda")).shape == (3, 3)
        for step in range(10):
            batch = torch.randn(8, 256, device="cuda")
            assert vmap(lambda p: functional_call(base, p, (batch,)))(parts).shape == (3, 8, 4)
            with torch.autograd.graph.saved_tensors_hooks(lambda kept: kept.cpu(), lambda kept: kept.cuda()):
                loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_an_error_in_a_backward_of_the_programs_own(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        class Scaled(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return 2 * x

            @staticmethod
            def backward(ctx, gradient):
                return ctx.factor * gradient

        Scaled.apply(torch.nn.Parameter(torch.randn(3, device="cuda"))).sum().backward()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: train.py:11: AttributeError")


def test_operators_without_a_shape_function(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from torch.ao.quantization import default_fake_quant
        from torch.distributions import Dirichlet

        model = torch.nn.Linear(64, 8).cuda()
        fake_quantized = default_fake_quant().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(10):
            hidden = fake_quantized(model(torch.randn(16, 64).cuda()))
            assert torch.logcumsumexp(hidden, 1).cummax(1).values.shape == (16, 8)
            Dirichlet(hidden.exp()).rsample().square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert done.json["traced"]["buckets"]["gradients"] + done.json["traced"]["buckets"]["parameters"] > 0


def test_nvml_answers_for_the_simulated_gpu(project: Project) -> None:
    pytest.importorskip("pynvml")
    project.write(
        "train.py",
        """
        import pynvml
        import torch

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        before = pynvml.nvmlDeviceGetMemoryInfo(handle)
        model = torch.nn.Linear(8192, 8192).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        after = pynvml.nvmlDeviceGetMemoryInfo(handle)
        print("used", after.used - before.used, after.total == after.used + after.free)
        for step in range(10):
            model(torch.randn(2, 8192).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    assert f"used {(4 * 8192 * 8192) + (2 << 20)} True" in project.predict("python", "train.py").stderr


def test_attention_that_is_not_compiled_makes_all_scores(project: Project) -> None:
    """In backward of `flex_attention`: the scores, what the mask leaves, what the softmax gives, and its gradient."""
    project.write(
        "train.py",
        """
        import torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        mask = create_block_mask(lambda b, h, row, column: row >= column, None, None, 512, 512, device="cuda")
        layer = torch.nn.Linear(64, 3 * 64).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        for step in range(3):
            with torch.autocast("cuda", torch.bfloat16):
                query, key, value = layer(torch.randn(2, 1, 512, 64, device="cuda")).chunk(3, -1)
                found = flex_attention(query, key, value, block_mask=mask)
            found.float().square().mean().backward()
            optimizer.step()
        """,
    )
    traced = project.predict("python", "train.py").json["traced"]
    scores_bytes, workspaces_bytes = 4 * 2 * 512 * 512, 2 * (17 << 19)
    assert traced["highest"]["temporary"]["bytes"] - workspaces_bytes > 5 * scores_bytes
