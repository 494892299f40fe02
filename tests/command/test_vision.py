"""Losses of vision and speech whose shapes come from the data: anchors matched to boxes, masks, lengths."""

from __future__ import annotations

import pytest

from tests.command.running import Project

pytestmark = pytest.mark.scripts

DETECTOR = """
    import torch
    from torch import nn

    device = torch.device("cuda")

    def area(boxes):
        return (boxes[:, 2] - boxes[:, 0]) * (boxes[:, 3] - boxes[:, 1])

    def overlap(a, b):
        left, right = torch.max(a[:, None, :2], b[:, :2]), torch.min(a[:, None, 2:], b[:, 2:])
        both = (right - left).clamp(min=0).prod(-1)
        return both / (area(a)[:, None] + area(b) - both)

    class Detector(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = nn.Sequential(nn.Conv2d(3, 32, 3, 8, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU())
            self.scores, self.shifts = nn.Conv2d(64, 9, 1), nn.Conv2d(64, 36, 1)

        def forward(self, images, targets):
            features = self.body(images)
            places = (torch.arange(size, device=images.device) * 16 for size in features.shape[-2:])
            ys, xs = torch.meshgrid(*places, indexing="ij")
            corners = torch.tensor([[-a, -b, a, b] for a in (32.0, 64, 128) for b in (32.0, 64, 128)], device=device)
            anchors = (torch.stack((xs, ys, xs, ys), -1).reshape(-1, 1, 4) + corners).reshape(-1, 4)
            scores = self.scores(features).permute(0, 2, 3, 1).flatten(1)
            shifts = self.shifts(features).permute(0, 2, 3, 1).reshape(len(images), -1, 4)
            loss = 0
            for index, boxes in enumerate(targets):
                shared = overlap(boxes, anchors)
                best, matched = shared.max(0)
                positive, negative = best >= 0.5, best < 0.3
                positive[torch.where(shared == shared.max(1)[0][:, None])[1]] = True
                here, there = torch.nonzero(positive).squeeze(1), torch.nonzero(negative & ~positive).squeeze(1)
                there = there[torch.randperm(there.numel(), device=device)[: 256 - here.numel()]]
                wanted = torch.zeros(256, device=device)
                wanted[: len(here)] = 1
                print("sampled", here.numel(), there.numel())
                sampled = scores[index][torch.cat([here, there])]
                loss = loss + nn.functional.binary_cross_entropy_with_logits(sampled, wanted)
                loss = loss + nn.functional.smooth_l1_loss(shifts[index][here], boxes[matched[here]] - anchors[here])
            return loss

    model = Detector().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    for step in range(3):
        images = torch.stack([torch.rand(3, 256, 320).to(device) for _ in range(2)])
        targets = [torch.tensor([[10.0, 20, 100, 120], [50, 60, 200, 220]]).to(device) for _ in range(2)]
        with torch.amp.autocast("cuda"):
            loss = model(images, targets)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        print("scale", scaler.get_scale())
"""


def test_anchors_are_matched_to_boxes_as_on_a_gpu(project: Project) -> None:
    project.write("train.py", DETECTOR)
    project.write("on_cpu.py", DETECTOR.replace('"cuda"', '"cpu"'))
    done = project.predict("python", "train.py")
    parameters = 4 * (3 * 32 * 9 + 32 + 32 * 64 * 9 + 64 + 64 * 45 + 45)
    assert parameters <= done.json["traced"]["buckets"]["parameters"] < parameters + 8 * 512
    sampled = {line for line in done.stderr.splitlines() if "sampled" in line}
    assert sampled == {"  | sampled 68 188"}  # what the same script prints on the CPU
    assert "  | scale 65536.0" in done.stderr.splitlines()


def test_segmentation_with_ignored_pixels(project: Project) -> None:
    project.write(
        "train.py",
        """
    import torch
    from torch import nn
    from torch.nn import functional as F

    model = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 5, 1)).cuda()
    optimizer = torch.optim.RMSprop(model.parameters())
    for _ in range(3):
        labels = torch.randint(0, 5, (2, 128, 128))
        labels[:, :32] = 255
        labels = labels.to("cuda", non_blocking=True)
        out = model(torch.randn(2, 3, 128, 128, device="cuda"))
        valid = labels != 255
        kept = out.softmax(1).permute(0, 2, 3, 1)[valid]
        assert kept.shape == (2 * 96 * 128, 5)
        wanted = F.one_hot(labels[valid], 5).float()
        both, total = (kept * wanted).sum(0), kept.sum(0) + wanted.sum(0)
        loss = F.cross_entropy(out, labels, ignore_index=255) + (1 - 2 * both / total.clamp(min=1)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_sequences_of_their_lengths_and_the_ctc_loss(project: Project) -> None:
    project.write(
        "train.py",
        """
    import torch
    from torch import nn
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    rnn, head = nn.GRU(80, 64, batch_first=True).cuda(), nn.Linear(64, 30).cuda()
    optimizer = torch.optim.AdamW([*rnn.parameters(), *head.parameters()])
    loss_of = nn.CTCLoss(zero_infinity=True)
    for _ in range(3):
        lengths, wanted = torch.tensor([20, 8, 16]).cuda(), torch.tensor([5, 2, 4]).cuda()
        packed = pack_padded_sequence(torch.randn(3, 20, 80).cuda(), lengths.cpu(), True, enforce_sorted=False)
        assert packed.data.shape == (44, 80) and packed.batch_sizes.tolist() == [3] * 8 + [2] * 8 + [1] * 4
        out, _ = pad_packed_sequence(rnn(packed)[0], batch_first=True)
        words = torch.randint(1, 30, (3, 5), device="cuda")
        loss_of(head(out).log_softmax(-1).transpose(0, 1), words, lengths, wanted).backward()
        optimizer.step()
        optimizer.zero_grad()
""",
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert "cuDNN" in " ".join(done.json["traced"]["notes"])
