"""A program can read back its copies on the device: branches and shapes that depend on its data are a GPU's."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

MODEL = """
    import torch
    from torch.nn import functional as F

    device = torch.device("cuda")
    model = torch.nn.Linear(16, 4).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(batch):
        loss = model(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss
"""


def test_values_of_the_data_are_read_back(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    lengths = torch.tensor([5, 3, 8])
    mask = torch.arange(8)[None, :] < lengths[:, None]
    labels = torch.tensor([3, 1, 7]).to(device)
    for _ in range(3):
        here = mask.to(device, non_blocking=True)
        assert not here.all() and here.any() and here.sum().item() == 16
        assert here.sum(1).tolist() == [5, 3, 8] and (here.cpu() == mask).all()
        hidden = model(torch.randn(3, 8, 16, device=device))
        assert hidden[here].shape == (16, 4)
        assert torch.masked_select(hidden, here[..., None]).shape == (64,)
        assert here.nonzero().shape == (16, 2) and torch.where(~here)[0].shape == (8,)
        assert labels.max().item() == 7 and F.one_hot(labels).shape == (3, 8)
        assert torch.unique(torch.stack([labels, labels])).tolist() == [1, 3, 7]
        assert torch.repeat_interleave(labels, lengths.to(device)).shape == (16,)
        assert [part.shape[0] for part in hidden[here].split(here.sum(1).tolist())] == [5, 3, 8]
        count = torch.zeros((), dtype=torch.long, device=device)
        count += (labels != 3).sum()
        assert int(count) == 2 and f"{labels.float().mean():.2f}" == "3.67"
        assert str(labels) == "tensor([3, 1, 7], device='cuda:0')"
        masked = torch.rand(3, 8, device=device) < 0.5
        assert 0 < hidden[masked].shape[0] < 24
        step(torch.randn(8, 16, device=device))
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_what_the_model_computes_is_finite_and_small(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    import math

    for _ in range(3):
        known = torch.zeros(4, device=device)
        out = model(torch.randn(8, 16, device=device))
        loss = step(torch.randn(8, 16, device=device))
        assert torch.isfinite(loss) and not torch.isnan(loss) and not torch.isinf(out).any() and not loss != loss
        assert torch.isfinite(out).all() and out[torch.isfinite(out)].shape == (32,)
        assert math.log10(1 / loss.item()) > 4 and loss < 1e9 and not loss > 0.5
        assert (out >= 0).all() and not loss <= 1e-7
        known += out[0].detach()
        assert max(known.tolist()) < 1e-5
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert "taken as passed" not in done.stdout


def test_what_only_raises_is_not_where_unknown_values_lead(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    went = set()
    for _ in range(3):
        out = model(torch.randn(8, 16, device=device))
        assert out.std() > 0.1, f"dead: {out.std().item():.3f}"
        assert not (out < 1e-3).any()
        assert out.mean() < 1 and out.max() > 2 or out.min() < -1
        torch._assert((out.norm() > 1), "small")
        if out.norm() < 1:
            raise ValueError("small")
        if out.norm() > 1:
            went.add("large")
        else:
            went.add("small")
        step(torch.randn(8, 16, device=device))
    assert went == {"small"}
    """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert done.stdout.count("a check of values computed on the GPU is taken as passed") == 5  # a line each


def test_a_check_of_known_values_fails_as_on_a_gpu(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    labels = torch.tensor([3, 1, 7]).to(device)
    assert labels.max() < 4, "a label of no class"
    step(torch.randn(8, 16, device=device))
    """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "AssertionError: a label of no class" in done.stderr


def test_what_is_drawn_from_the_model_lies_within_its_distribution(project: Project) -> None:
    """As policies of reinforcement learning do: sampled actions are validated when their probability is asked for."""
    project.write(
        "train.py",
        MODEL
        + """
    from torch.distributions import Bernoulli, Beta, Categorical, Normal

    for _ in range(3):
        hidden = model(torch.randn(8, 16, device=device))
        for policy in (
            Categorical(logits=hidden), Normal(hidden, hidden.exp()), Bernoulli(logits=hidden),
            Beta(hidden.exp(), hidden.exp()),
        ):
            action = policy.sample()
            assert policy.log_prob(action).isfinite().all() and policy.entropy().shape[0] == 8
        step(torch.randn(8, 16, device=device))
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_places_are_what_packing_sorts_and_what_is_drawn(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    for _ in range(3):
        padded = torch.randn(3, 8, 16, device=device)
        packed = pack_padded_sequence(padded, torch.tensor([5, 3, 8]), batch_first=True, enforce_sorted=False)
        assert pad_packed_sequence(packed, batch_first=True)[1].tolist() == [5, 3, 8]
        order = torch.tensor([2, 0, 1]).to(device)
        where = torch.empty_like(order)
        where[order] = torch.arange(3, device=device)
        assert where.tolist() == [1, 2, 0]
        drawn = torch.multinomial(model(torch.randn(8, 16, device=device)).softmax(-1), 1)
        print("classes", drawn.max().item() + 1)
        step(torch.randn(int(drawn.max()) + 1, 16, device=device))
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert "classes 4" in done.stderr or "classes 1" in done.stderr
    assert {one["high"] for one in done.json["traced"]["assumptions"]} == {3}


def test_parts_of_a_size_that_no_number_gives_end_in_one_line(project: Project) -> None:
    """The error of a shape that cannot be is raised from itself, and its causes have no end."""
    parts = "counts = (model(x) > 0).long().argmax(-1).bincount(minlength=2).tolist()"
    project.write(
        "train.py",
        f"{MODEL}\n    x = torch.randn(8, 16, device=device)\n    {parts}\n    x.split([0 * one for one in counts])\n",
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert "train.py:18: RuntimeError: split_with_sizes expects split_sizes to sum exactly to 8" in done.complaint


def test_the_length_of_a_sampler_may_come_from_a_count(project: Project) -> None:
    """As one that leaves out what is learnt: no line calls its ``__len__``."""
    project.write(
        "train.py",
        MODEL
        + """
    class Rest:
        def __init__(self):
            self.number = 1

        def update(self, learnt):
            self.number = len(data) - int(learnt.sum())

        def __len__(self):
            return self.number

    data, rest = torch.randn(4096, 16), Rest()
    for _ in range(3):
        rest.update(model(data.to(device)).mean(1) > 0)
        step(data[list(range(len(rest)))].to(device))
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    (found,) = done.json["traced"]["assumptions"]
    assert (found["low"], found["high"]) == (0, 4096)


def test_a_shape_that_depends_on_what_the_model_computes_and_has_no_bound_is_one_clear_line(project: Project) -> None:
    """As a length regulator repeats the states of a text by the durations that it predicts."""
    line = "step(hidden.repeat_interleave(hidden.sum(1).abs().long(), dim=0).repeat(1, 4))"
    project.write(
        "train.py",
        f"{MODEL}\n    for _ in range(3):\n        hidden = model(torch.randn(8, 16, device=device))\n        {line}\n",
    )
    done = project.predict("python", "train.py")
    assert done.code != 0
    assert done.complaint.startswith("gpumem-tui: aten.repeat_interleave")
    assert done.complaint.endswith("at train.py:18 (--assume-rows train.py:18=NUMBER gives it)")
    given = project.predict("python", "train.py", options=("--assume-rows", "train.py:18=64"))
    assert given.code == 0, given.stderr
    assert "train.py:18: 64 rows in all (--assume-rows)" in given.stdout


def test_a_shape_that_depends_on_what_the_model_computes_is_the_largest_that_it_can_be(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    for _ in range(3):
        hidden = model(torch.randn(8, 16, device=device))
        large = hidden > 0.5
        best = hidden.argmax(-1)
        print("kept", [
            len(hidden[large]), len(hidden[~large]), len(large.nonzero()), len(torch.masked_select(hidden, large)),
            len(torch.where(hidden > 1)[0]), len(torch.unique(best)), len(torch.unique(hidden)),
            len(torch.unique(hidden, dim=0)), len(torch.bincount(best)), len(hidden.repeat_interleave(best, 0)),
        ])
        step(torch.randn(8, 16, device=device))
""",
    )
    done = project.predict("python", "train.py")
    assert "kept [32, 1, 32, 32, 32, 4, 32, 8, 4, 24]" in done.stderr, done.stderr
    assert "kept [2, 30, 2, 2, 2, 1, 1, 1, 4, 2]" in done.stderr, "at the other end"
    found = {one["place"]: one for one in done.json["traced"]["assumptions"]}
    assert found["train.py:21"]["high"] == 32
    assert not any(one["changes_sizes"] for one in found.values()), "512 bytes each"


def test_a_mask_as_index_is_allocated_as_its_values_say(project: Project) -> None:
    project.write(
        "train.py",
        MODEL
        + """
    mask = torch.zeros(1 << 18, dtype=torch.bool)
    mask[: 1 << 16] = True
    here, rows = mask.to(device), torch.randn(1 << 18, 16, device=device)
    for _ in range(3):
        before = torch.cuda.memory_allocated()
        taken = rows[here]
        print("taken", torch.cuda.memory_allocated() - before)
        step(taken)
""",
    )
    assert f"taken {(1 << 16) * 16 * 4}" in project.predict("python", "train.py").stderr


def test_masks_too_large_to_keep_are_worked_out_where_a_shape_depends_on_them(project: Project) -> None:
    """As ultralytics' assigner asks which of 8,400 anchors lie in which of the known boxes of a batch."""
    project.write(
        "train.py",
        """
        import torch

        def corners(boxes):
            made = torch.empty_like(boxes)
            made[..., :2] = boxes[..., :2] - boxes[..., 2:] / 2
            made[..., 2:] = boxes[..., :2] + boxes[..., 2:] / 2
            return made

        def candidates(boxes, valid, like):
            side = torch.arange(80).type_as(like) * 8 + 4
            points = torch.stack(torch.meshgrid(side, side, indexing="ij"), -1).view(-1, 2)
            step = like.new_full((6400, 1), 1.0)
            low, high = corners(boxes).unsqueeze(2).chunk(2, 3)
            mask = (points * step)[:, 0] - low[..., 0] > 1e-9
            mask &= points[:, 1] - low[..., 1] > 1e-9
            mask &= high[..., 0] - points[:, 0] > 1e-9
            mask &= high[..., 1] - points[:, 1] > 1e-9
            return (mask * valid).bool()

        layer = torch.nn.Linear(16, 4).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        boxes, valid = torch.rand(16, 30, 4) * 400 + 80, torch.rand(16, 30, 1) < 0.5
        wanted = candidates(boxes, valid, boxes)
        for _ in range(3):
            hidden = torch.randn(16, 6400, 16, device="cuda")
            mask = candidates(boxes.cuda(), valid.cuda(), hidden)
            image, box, anchor = mask.nonzero(as_tuple=True)
            assert mask.numel() == 3072000 and len(anchor) == int(wanted.sum()) == int(mask.sum())
            assert mask.any() and not mask.all() and torch.equal(mask.cpu(), wanted)
            boxes[0, 0] = 80.0
            mask &= False
            assert not mask.any()
            layer(hidden[image, anchor]).square().mean().backward()
            optimizer.step()
            wanted = candidates(boxes, valid, boxes)
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_weights_take_the_place_of_what_inference_mode_left_in_theirs(project: Project) -> None:
    """As FSDP1, which leaves each parameter empty between evaluation and training."""
    project.write(
        "train.py",
        """
        import torch

        layer = torch.nn.Linear(64, 1024).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        kept = layer.weight.data
        for _ in range(3):
            with torch.inference_mode():
                layer.weight.data = torch.empty(0, device="cuda")
                before = torch.cuda.memory_allocated()
                layer.weight.data = kept.flatten()[:64].view(1, 64)
                assert layer.weight.data_ptr() == kept.data_ptr() and torch.cuda.memory_allocated() == before
            layer.weight.data = kept
            layer(torch.randn(8, 64).cuda()).square().mean().backward()
            assert layer.weight.grad.shape == (1024, 64)
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_weights_that_are_looked_through_in_inference_mode_are_followed(project: Project) -> None:
    """As unsloth looks for tokens that were never trained; operators made of others arrive there as they are."""
    project.write(
        "train.py",
        """
        import torch

        layer = torch.nn.Linear(64, 1000).cuda()
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
        with torch.inference_mode():
            untrained = torch.where(layer.weight.amax(1) <= 1e-16)[0]
            assert untrained.shape == (0,) and layer.weight[untrained].shape == (0, 64)
            x, y = torch.randn(1000, 1000, device="cuda"), torch.zeros(1000, device="cuda").long()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.nn.functional.cross_entropy(x, y)
            assert torch.cuda.max_memory_allocated() - before > x.nbytes, "its logarithms"
        for _ in range(3):
            layer(torch.randn(8, 64).cuda()).square().mean().backward()
            optimizer.step()
        """,
    )
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert "train.py:7: no value of a network is taken for zero in inference mode" in notes
