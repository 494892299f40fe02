"""Shapes that depend on what the GPU computes: one line notes this, and a share of the rows can be assumed."""

from __future__ import annotations

import sys

import pytest

from tests.command.running import Project

ROWS, WIDTH, EXPERTS = 8192, 256, 8
SCRIPT = f"""
import torch
from torch import nn

router = nn.Linear({WIDTH}, {EXPERTS}).cuda()
experts = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}) for _ in range({EXPERTS})).cuda()
optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
for _ in range(10):
    x = torch.randn({ROWS}, {WIDTH}).cuda()
    chosen = router(x).argmax(-1)
    y = torch.zeros_like(x)
    for number, expert in enumerate(experts):
        rows = (chosen == number).nonzero().squeeze(-1)
        y[rows] = expert(x[rows])
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def project_with_experts(project: Project) -> Project:
    project.write("train.py", SCRIPT)
    return project


EVERY_INPUT = ROWS * WIDTH * 4
"""Backward's need of the experts: each row goes to one of them."""


def test_without_a_share_the_experts_have_all_rows_together(project_with_experts: Project) -> None:
    """All to one of them at the most, each an equal share at the fewest, which takes less for a moment."""
    done = project_with_experts.predict("python", "train.py")
    traced = done.json["traced"]
    assert traced["assumptions"] == [
        {"place": "train.py:13", "kind": "classes", "rows": ROWS, "low": ROWS // EXPERTS, "high": ROWS,
         "changes_sizes": True},
    ]  # fmt: skip
    assert EVERY_INPUT + 8 * ROWS <= traced["buckets"]["activations"] <= 3.5 * EVERY_INPUT
    shared = next(one for one in traced["unknowns"] if one["name"] == "rows kept")
    assert 0 < shared["high_bytes"] < EVERY_INPUT * EXPERTS
    assert shared["source"] == f"assumes all {ROWS:,} rows kept by one of the masks at train.py:13"


ONE_HOT = f"""
import torch
from torch import nn
from torch.nn import functional as F

router = nn.Linear({WIDTH}, {EXPERTS}).cuda()
experts = nn.ModuleList(nn.Linear({WIDTH}, {WIDTH}) for _ in range({EXPERTS})).cuda()
optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn({ROWS}, {WIDTH}).cuda()
    weights, chosen = torch.topk(router(x).softmax(-1), 2)
    mask = F.one_hot(chosen, {EXPERTS}).permute(2, 1, 0)
    y, taken = torch.zeros_like(x), []
    for number in torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero():
        best, rows = torch.where(mask[number[0]])
        taken.append(len(rows))
        y.index_add_(0, rows, experts[number[0]](x[rows]) * weights[rows, best, None])
    loads = torch.bincount(chosen.flatten(), minlength={EXPERTS}).tolist()
    parts = x.repeat_interleave(2, 0).split(loads)
    print("taken", taken, "any", (chosen == 3).any(-1).sum().item(), "parts", [len(part) for part in parts])
    y.sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_best_two_experts_of_a_row_differ(project: Project) -> None:
    """As in Hugging Face's mixtures of experts: two of them have all rows, and the others one each."""
    project.write("train.py", ONE_HOT)
    done = project.predict("python", "train.py")
    assert "taken [8192, 8192, 1, 1, 1, 1, 1, 1] any 8192 parts [8186, 8192, 1, 1, 1, 1, 1, 1]" in done.stderr
    assert "taken [2048, 2048, 2048, 2048, 2048, 2048, 2048, 2048] any 2048" in done.stderr, done.stderr


SELECTING = """
import torch

net = torch.nn.Sequential(*[torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU()) for _ in range(4)]).cuda()
score = torch.nn.Linear(256, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.empty({batch}, 256).cuda()
    kept = x[score(x).squeeze(1) > 0.5]
    {more}
    net(kept).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_the_most_rows_decide_whether_it_fits(project: Project) -> None:
    project.write("train.py", SELECTING.format(batch=3 << 20, more=""))
    words = "--", sys.executable, "train.py"
    first = project.run("predict", "--gpu", "sim:rtx-3090-24gb", *words).stdout.splitlines()[0]
    assert first.startswith("Its own batch may fit")
    assert "assumes all 3,145,728 rows kept at train.py:9 (--assume-rows takes fewer)" in first
    told = project.predict("python", "train.py", gpu="rtx-3090-24gb", options=("--assume-rows", "0.001")).json["traced"]
    assert told["fit"] == "fits"
    assert told["assumptions"] == []
    found = project.predict("python", "train.py", gpu="a100-80gb").json["traced"]
    assert found["fit"] == "fits"
    assert found["assumptions"][0]["changes_sizes"]
    assert found["device_used_range"]["high_bytes"] > found["device_used_range"]["low_bytes"] + 8 * 2**30


def test_largest_batches_are_known_at_both_ends(project: Project) -> None:
    project.write("train.py", SELECTING.format(batch="int(__import__('sys').argv[1])", more=""))
    found = project.predict("python", "train.py", "{batch}", options=("--batch-size", "4096")).json["traced"]
    assert found["max_batch_size"] * 3 < found["may_fit_batch_size"]
    assert found["fit"] == "fits"


def test_an_error_with_all_rows_says_which_are_assumed_and_what_to_type(project: Project) -> None:
    project.write("train.py", SELECTING.format(batch=1 << 10, more="assert len(kept) < 999, 'too many'"))
    done = project.predict("python", "train.py")
    assert done.code == 2
    assumed = "the trace assumes all 1,024 rows kept at train.py:9 (--assume-rows takes fewer)"
    assert done.complaint == f"gpumem-tui: train.py:10: AssertionError: too many; {assumed}"
    copied = done.stderr.splitlines()[-2]
    assert copied.startswith("  gpumem-tui predict --json --gpu sim:a100-80gb --assume-rows train.py:9=0.5 -- ")
    assert project.predict("python", "train.py", options=("--assume-rows", "train.py:9=0.5")).code == 0


def test_what_cannot_be_followed_with_few_rows_is_not_certain_not_to_fit(project: Project) -> None:
    project.write("train.py", SELECTING.format(batch=3 << 20, more="assert len(kept) > 99, 'too few'"))
    traced = project.predict("python", "train.py", gpu="rtx-3090-24gb").json["traced"]
    assert traced["fit"] == "may not fit"
    assert traced["assumptions"][0]["changes_sizes"]


def test_values_that_only_steer_are_assumed(project: Project) -> None:
    """As trl's GRPO finds the end of what was generated, and torchmetrics checks classes and counts them."""
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Linear(10, 10).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)

        def validated(classes):
            if len(torch.unique(classes)) > 2:
                raise ValueError("more than two classes")

        for _ in range(3):
            ids = net(torch.randn(4, 7, 10).cuda()).argmax(-1)
            validated(ids)
            assert torch.bincount(ids.flatten(), minlength=10).shape == (10,)
            is_end = torch.isin(ids, torch.tensor([1, 2]).cuda())
            end = torch.full((4,), 7, device="cuda")
            end[is_end.any(dim=1)] = is_end.int().argmax(dim=1)[is_end.any(dim=1)]
            mask = torch.arange(7, device="cuda").expand(4, -1) <= end.unsqueeze(1)
            assert all(len(row[kept]) == 7 for row, kept in zip(ids.cpu(), mask.cpu()))
            net(torch.randn(4, 10).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert "train.py:8: values that are checked are taken as valid, and as one" in notes
    assert "assumes all 4 rows kept at train.py:17" in notes


EDGES = """
import torch

N, E = 5_000, 600_000
edges = {edges}
layer = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn(N, 64, device="cuda")
    mask = edges[0] != edges[1]
    kept = edges[:, mask]
    print("kept", kept.shape[1], "of", int((edges[0] != edges[1]).sum()), edges[:, ~mask].shape[1])
    layer(x)[kept[0]].square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_a_mask_on_whole_numbers_keeps_the_most_that_it_may(project: Project) -> None:
    """As graphs lose their loops and Hugging Face's masks choose tokens: none of them can be less on a GPU."""
    project.write("train.py", EDGES.format(edges='torch.randint(0, N, (2, E), device="cuda")'))
    done = project.predict("python", "train.py")
    assert "kept 600000 of 600000 1" in done.stderr, "the others"
    assert "kept 2 of 2 599998" in done.stderr, "at the other end"
    traced = done.json["traced"]
    assert traced["buckets"]["activations"] >= 600_000 * 64 * 4
    assert "assumes all 600,000 rows kept at train.py:11" in traced["notes"]
    verdict = project.run("predict", "--gpu", "sim:a100-80gb", "--", sys.executable, "train.py").stdout.splitlines()[0]
    assert "; assumes all 600,000 rows kept at train.py:11 and at 1 other place (--assume-rows takes fewer)" in verdict


def test_a_mask_on_the_data_of_the_host_keeps_what_it_keeps_there(project: Project) -> None:
    project.write("train.py", EDGES.format(edges="torch.arange(2 * E).view(E, 2).T.contiguous().remainder(7).cuda()"))
    done = project.predict("python", "train.py")
    assert "kept 600000 of 600000 0" in done.stderr
    assert not any(note.startswith("assumes") for note in done.json["traced"]["notes"])


def test_large_data_of_the_host_is_known_on_the_device(project: Project) -> None:
    """Unless it is so large that only its range remains."""
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Linear(16, 16).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        short = torch.full((512, 1), 1000)
        for _ in range(3):
            mask = (torch.arange(16384)[None] < short).cuda()
            given = torch.empty(512, 16384, dtype=torch.bool, device="cuda")
            given.copy_(torch.arange(16384)[None] < short)
            ids = torch.arange(1 << 23).remainder(777).cuda()
            shares = torch.linspace(0, 1, 1 << 22).cuda()
            huge = torch.zeros(1 << 26, dtype=torch.bool).cuda()
            print("known", len(mask.nonzero()), int(given.sum()), ids.max().item(), int((shares > 0.5).sum()))
            print("lengths", mask.sum(1).tolist()[:2], "not known", int(huge.sum()) >> 26)
            net(torch.randn(8, 16).cuda()).sum().backward()
            optimizer.step()
        """,
    )
    written = project.predict("python", "train.py").stderr
    assert "known 512000 512000 776 2097152" in written
    assert "lengths [1000, 1000] not known 1" in written


def test_a_count_is_the_most_as_a_size_and_the_least_where_it_decides(project: Project) -> None:
    """A loop until nothing is left ends, as before; what is as long as what a mask keeps is as long as it can be."""
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        for _ in range(3):
            hidden = net(torch.randn(500, 64).cuda())
            ids = hidden.argmax(-1)
            while (ids > 10).sum() > 0 or (ids > 10).sum().item() > 0:
                raise AssertionError("went on")
            made = torch.zeros((ids > 10).sum().item(), 4, device="cuda")
            lengths = (ids.view(5, 100) > 3).sum(1)
            print("made", len(made), "lengths", lengths.tolist(), lengths.max().item())
            unfinished = torch.ones(500, dtype=torch.long, device="cuda")
            for count in range(4):
                unfinished = unfinished.mul((net(hidden).argmax(-1) != 2).long())
                if unfinished.max() == 0:
                    break
            else:
                print("went to the end")
            hidden.square().mean().backward()
            optimizer.step()
        """,
    )
    written = project.predict("python", "train.py").stderr
    assert "made 500 lengths [100, 100, 100, 100, 100] 100" in written
    assert "went to the end" in written


READING = """
import torch
from torch import nn

def count_of(mask):
    return int(mask.sum())

net = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
rows, correct, told = torch.randn(1000, 8).numpy(), 0, []
for _ in range(3):
    x = net(torch.randn(1000, 64).cuda())
    best = x.argmax(-1)
    correct += (best == 3).sum().item()
    print(f"seen {(best == 5).sum().item()}", correct / 1000, best[0].item())
    mask = x[:, 0] > 0.5
    if mask.any():
        told.append(len(x[mask]))
    if not mask.any():
        continue
    if mask.sum().item() == 0:
        continue
    kept = count_of(mask)
    told.append(len(x[x[:, 0].argsort()[:kept]]))
    for period in 64 // (x[:, 1:].mean(0).topk(2).indices + 1).cpu().numpy():
        told.append(x[0, : 64 // period * period].view(64 // period, period).shape[0])
    told += [len(x[:n]) for n in (x[:, 2:6].argmax(1) + 1).tolist()[:1]]
    longest = (x.view(10, 100, 64)[..., 0] > 0).sum(1).max()
    told.append(torch.zeros(10, longest).shape[1])
    chosen = (x[:, 3] > 0.7).cpu().numpy()
    told.append(len(rows[chosen]))
    of = torch.arange(1000).div(100, rounding_mode="floor").cuda()[x[:, 4].argsort()]
    pooled = torch.arange(1000, device="cuda").scatter_(0, torch.arange(1000).cuda(), of[x[:, 5].argsort()])
    told.append(torch.zeros(int(pooled.max()) + 1, 4).shape[0])
    print("told", told[:8])
    x.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_values_that_a_program_reads_are_taken_at_both_ends_where_it_takes_sizes_from_them(project: Project) -> None:
    """As TimesNet takes its periods from `topk`; a tally that is printed changes nothing, and is not named."""
    project.write("train.py", READING)
    done = project.predict("python", "train.py")
    assert "told [1000, 1000, 1, 1, 1, 100, 1000, 10]" in done.stderr, done.stderr
    assert "told [2, 2, 64, 64, 4, 2, 2, 3]" in done.stderr, "at the other end"
    found = {one["place"]: (one["kind"], one["low"], one["high"]) for one in done.json["traced"]["assumptions"]}
    assert found == {
        "train.py:18": ("mask", 2, 1000),
        "train.py:6": ("count", 0, 1000),
        "train.py:25": ("place", 1, 63),
        "train.py:27": ("place", 1, 4),
        "train.py:29": ("count", 0, 100),
        "train.py:30": ("mask", 2, 1000),
        "train.py:34": ("count", 0, 9),
    }
    told = project.predict("python", "train.py", options=("--assume-rows", "train.py:6=0.25"))
    assert "told [1000, 250," in told.stderr


def test_what_a_program_passes_to_its_own_functions_is_a_size_where_these_take_it_for_one(project: Project) -> None:
    """As scripts of segmentation do, whose table of confusions nothing bounds: no size depends on it."""
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        def table_of(classes, labels, number):
            return torch.bincount(number * labels + classes, minlength=number * number).reshape(number, number)

        def share(table):
            return table.diag() / table.sum(1).clamp(min=1)

        def log(step, **values):
            print(step, values)

        def doubled(count, depth=3):
            return doubled(count, depth - 1) if depth else 2 * count

        def first(values, *, count):
            return values[:count]

        net = nn.Linear(64, 19).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for step in range(3):
            labels = torch.randint(0, 19, (1000,)).cuda()
            out = net(torch.randn(1000, 64).cuda())
            nn.functional.cross_entropy(out, labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            wrong = (out.argmax(1) - labels).abs().sum().item()
            log(step, wrong=wrong, right=(out.argmax(1) == labels).sum().item())
            print(share(table_of(out.argmax(1), labels, 19).cpu()).shape)
            kept = (out[:, 0] > 0.5).sum().item()
            print(len(first(out, count=kept).exp()), len(out[: doubled(kept) // 2]))
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert [(one["place"], one["high"]) for one in done.json["traced"]["assumptions"]] == [("train.py:31", 1000)]


LOOPS = """
import torch

net = torch.nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
eos = 0
for step in range(3):
    x, rounds = torch.randn(100, 64).cuda(), []
    done, token, made = torch.zeros(100, dtype=torch.bool, device="cuda"), x[0, 0], []
    for _ in range(20):
        best = net(x).argmax(-1)
        made.append(best)
        done |= best == eos
        if done.all():
            break
    rounds.append(len(made))
    for count in range(1, 20):
        if net(x)[0].argmax().item() == eos or count > 15:
            break
    rounds.append(count)
    halted = torch.zeros(100, device="cuda")
    count = 0
    while not (halted + net(x).mean(1) > 0.9).all() and count < 10:
        count += 1
    rounds.append(count)
    while (net(x).abs() > 0.5).any():
        x = net(x)
        rounds.append("once")
    print("rounds", *rounds)
    loss = net(x).square().mean()
    loss.backward()
    optimizer.step()
    if loss.item() < 0.1:
        break
"""


def test_loops_that_a_value_may_end_go_on_and_end_at_once_at_the_other_end(project: Project) -> None:
    """As texts are generated until each has its end, and a loop that nothing else ends makes one round."""
    project.write("train.py", LOOPS)
    done = project.predict("python", "train.py")
    assert done.stderr.count("rounds 20 16 10 once") == 3, done.stderr
    assert done.stderr.count("rounds 1 1 0") == 3, "at the other end"
    found = {(one["place"], one["kind"]) for one in done.json["traced"]["assumptions"]}
    assert found == {
        ("train.py:14", "loop"), ("train.py:18", "loop"), ("train.py:23", "loop"), ("train.py:26", "round")
    }  # fmt: skip
    told = project.predict("python", "train.py", options=("--assume-rows", "train.py:26=3"))
    assert "10 once once once" in told.stderr


NOTHING_BOUNDS = """
import torch
from sizes import padded

class Lengths:
    def __init__(self, net):
        self.net, self.longest = net, 0

    def read(self, x):
        {read}

    def made(self):
        return torch.zeros(50, {size}, device="cuda")

net = torch.nn.Linear(16, 16).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
lengths, found = Lengths(net), []
for _ in range(3):
    x = torch.randn(50, 16).cuda()
    lengths.read(x)
    print("made", lengths.made().shape)
    net(x).mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("read", "size"),
    [
        ("self.longest = self.net(x).sum(1).exp().round().long().max().item()", "self.longest"),
        pytest.param("self.longest = int(self.net(x).exp().sum()) // 2", "self.longest + 24", marks=pytest.mark.slow),
        pytest.param(
            "share = self.net(x).sigmoid().mean().item(); self.longest = int(share)", "self.longest",
            marks=pytest.mark.slow,
        ),
        pytest.param("self.longest = len(padded(x, int(self.net(x).exp().sum())))", "50", marks=pytest.mark.slow),
        pytest.param(
            "all = []; all.append(self.net(x).exp().sum().long().item()); self.longest = max(all)", "self.longest",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_a_size_from_a_number_that_nothing_bounds_is_one_clear_line(project: Project, read: str, size: str) -> None:
    """Also where an attribute holds it, another file's function takes it, or the program makes it whole."""
    project.write("train.py", NOTHING_BOUNDS.format(read=read, size=size))
    project.write("sizes.py", "import torch\n\ndef padded(x, count):\n    return x.new_zeros(count)\n")
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: a size is taken from a number that only the GPU computes")
    assert done.complaint.endswith("read at train.py:10 (--assume-rows train.py:10=NUMBER gives it)")
    copied = done.stderr.splitlines()[-2]
    assert copied.startswith("  gpumem-tui predict --json --gpu sim:a100-80gb --assume-rows train.py:10=1024 -- ")
    told = project.predict("python", "train.py", options=("--assume-rows", "train.py:10=48"))
    assert told.code == 0, told.stderr
    assert "made torch.Size([50, 48])" in told.stderr or size != "self.longest"
    assert "train.py:10: 48 is read (--assume-rows)" in told.json["traced"]["notes"]


BY_WAYS = """
import numpy as np
import torch
import kept

net = torch.nn.Linear(64, 64).cuda()
score = torch.nn.Linear(64, 1).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    x = torch.randn({count}, 64).cuda()
    {rows}
    net(x).square().mean().backward()
    optimizer.step()
"""


def test_the_count_of_rows_is_taken_at_both_ends_whatever_way_it_goes(project: Project) -> None:
    """Through text, and another module's table; the rest of all rows is the most where the count is the fewest."""
    project.write("kept.py", "import json\n\nTABLE = {}\n\ndef rest(x):\n    return x[: json.loads(TABLE['n'])[0]]\n")
    rows = "kept.TABLE['n'] = kept.json.dumps([30_000 - (score(x) > 0).sum().item()]); x = kept.rest(x); print(len(x))"
    project.write("train.py", BY_WAYS.format(rows=rows, count=30_000))
    done = project.predict("python", "train.py")
    assert "\n  | 0\n" in done.stderr
    assert "\n  | 29998\n" in done.stderr, "at the other end"
    traced = done.json["traced"]
    assert [(one["place"], one["kind"], one["rows"]) for one in traced["assumptions"]] == [("train.py:11", "count", 2)]
    assert traced["peak_allocated_bytes"] >= 2 * 30_000 * 64 * 4


def test_rows_that_the_host_chooses_by_fractions_are_one_clear_line(project: Project) -> None:
    rows = "s = score(x)[:, 0].detach().cpu().numpy(); x = x[np.flatnonzero(s < s.mean()).tolist()]"
    project.write("kept.py", "")
    project.write("train.py", BY_WAYS.format(rows=rows, count=1000))
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: a size is taken from a number that only the GPU computes")
    assert "read at train.py:11 (--assume-rows train.py:11=NUMBER gives it)" in done.complaint


def test_host_arrays_and_plots_may_be_sized_by_any_number(project: Project) -> None:
    """Nothing on the GPU is; counts that a program only divides by are neither none nor all."""
    rows = (
        "kept.LOSSES.append(score(x).square().sum().item()); bins = np.zeros(int(max(kept.LOSSES)) + 1); "
        "right = (net(x).argmax(1) == 3).sum().item(); print(bins.shape, right / (1000 - right))"
    )
    project.write("kept.py", "LOSSES = []")
    project.write("train.py", BY_WAYS.format(rows=rows, count=1000))
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert "(1,) 1.0" in done.stderr
    assert "(65,) 1.0" in done.stderr, "with another number"
    assert done.json["traced"]["assumptions"] == []
    assert not any(note.startswith("assumes") for note in done.json["traced"]["notes"])


def test_a_program_whose_runs_differ_anyway_goes_on(project: Project) -> None:
    """A number that only a host array is sized by is not taken for the cause."""
    rows = "values = np.zeros(int(score(x).square().sum().item()) + 1); x = x[: kept.length()]"
    project.write("kept.py", "import os\n\ndef length():\n    return 1 + int.from_bytes(os.urandom(2), 'big') % 900\n")
    project.write("train.py", BY_WAYS.format(rows=rows, count=1000))
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr


def test_a_number_that_only_tells_when_memory_is_released_is_no_size(project: Project) -> None:
    """As when cycles of references are collected at another moment: the run that holds them longest counts."""
    read = "values = np.zeros(int(score(x).square().sum().item()) + 1)"
    rows = f"{read}; cycle = [x.square()]; cycle.append(cycle); del cycle; len(values) > 1 and gc.collect()"
    project.write("kept.py", "")
    project.write("train.py", "import gc\n" + BY_WAYS.format(rows=rows, count=1000))
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert done.json["traced"]["assumptions"] == []


def test_an_error_after_a_count_was_read_names_its_read(project: Project) -> None:
    rows = "right = (net(x).argmax(1) == 3).sum().item(); wrong = 500 - right; print(right / wrong)"
    project.write("kept.py", "")
    project.write("train.py", BY_WAYS.format(rows=rows, count=1000))
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint == (
        "gpumem-tui: train.py:11: ZeroDivisionError: division by zero; it works with a number that only the GPU "
        "computes, read at train.py:11 (--assume-rows train.py:11=NUMBER gives it)"
    )
    assert project.predict("python", "train.py", options=("--assume-rows", "train.py:11=400")).code == 0


def test_an_error_that_works_with_an_unknown_number_names_its_read(project: Project) -> None:
    """Also where its source does not tell that a size is taken from it."""
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Linear(16, 16).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        names = ["none", "one", "two"]
        for _ in range(3):
            made = net(torch.randn(50, 16).cuda())
            index = (made.exp().sum() * 3).long().item()
            chosen = names[index - 9]
            made.mean().backward()
            optimizer.step()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 2
    assert done.complaint == (
        "gpumem-tui: train.py:10: IndexError: list index out of range; it works with a number that only the GPU "
        "computes, read at train.py:9 (--assume-rows train.py:9=NUMBER gives it)"
    )
    assert "--assume-rows train.py:9=1024 -- " in done.stderr
    assert project.predict("python", "train.py", options=("--assume-rows", "train.py:9=10")).code == 0


def test_numbers_that_are_only_logged_or_compared_end_nothing(project: Project) -> None:
    project.write(
        "train.py",
        """
        import math
        import torch

        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        best, losses, history = math.inf, [], {}
        for step in range(3):
            loss = net(torch.randn(100, 64).cuda()).square().mean()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            value = loss.item()
            losses.append(value)
            if not math.isfinite(value) or math.isnan(float(norm)):
                raise SystemExit("not finite")
            best = min(best, value)
            history[step] = losses[-10:], sum(losses) / len(losses), losses[: len(losses) // 2]
            print(f"{value:.3f} {float(norm):.2f} {round(value)} {int(100 * value)} %", "#" * int(10 * value))
            plateau.step(value)
            rounds = 0
            while loss.item() > 1.0 and rounds < 3:
                rounds += 1
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    assert [(one["kind"], one["changes_sizes"]) for one in done.json["traced"]["assumptions"]] == [("loop", False)]


def test_what_functions_change_is_no_size(project: Project) -> None:
    """As pictures are, which a GPU makes; the padding itself is one."""
    script = """
        import numpy as np
        import torch
        from torch.nn import functional as F

        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            made = net(torch.randn(16, 64).cuda())
            made.square().mean().backward()
            optimizer.step()
            bytes_made = (made.detach() * 255).byte().cpu().numpy()
            whole = made.detach().round().long().cpu()
            np.tile(bytes_made, (2, 2))
            np.split(bytes_made, 4)
            torch.topk(whole, 3)
            F.pad(made, PADDING)
        """
    project.write("train.py", script.replace("PADDING", "(1, 1)"))
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    project.write("train.py", script.replace("PADDING", "(0, whole.max())"))
    assert project.predict("python", "train.py").complaint.startswith("gpumem-tui: a size is taken from a number")


PERIODS = """
import torch

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Conv2d(8, 8, 3, padding=1)

    def periods(self, x):
        strength = torch.fft.rfft(x, dim=1).abs()
        mean = strength.mean(0).mean(-1)
        mean[0] = 0
        best = torch.topk(mean, 5)[1].detach().cpu().numpy()
        return x.shape[1] // best, strength.mean(-1)[:, best]

    def forward(self, x):
        found, weights = self.periods(x)
        print("periods", found.tolist())
        made = []
        for period in found:
            whole = -(-x.shape[1] // period) * period
            padded = torch.cat((x, x.new_zeros(len(x), whole - x.shape[1], 8)), 1)
            images = padded.reshape(len(x), whole // period, period, 8).permute(0, 3, 1, 2)
            made.append(self.layer(images).permute(0, 2, 3, 1).reshape(len(x), whole, 8)[:, : x.shape[1]])
        return x + (torch.stack(made, -1) * weights.softmax(1)[:, None, None]).sum(-1)

net = Block().cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(3):
    net(torch.randn(4, 192, 8).cuda()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_periods_are_of_places_that_differ_and_none_is_divided_by_zero(project: Project) -> None:
    """As TimesNet folds a series by its five strongest frequencies."""
    project.write("train.py", PERIODS)
    done = project.predict("python", "train.py")
    assert "periods [192, 96, 64, 48, 38]" in done.stderr, done.stderr
    assert "periods [2, 2, 2, 2, 2]" in done.stderr, "at the other end"


@pytest.mark.parametrize("option", [pytest.param("0.125", marks=pytest.mark.slow), "train.py:13=0.125"])
def test_a_share_of_the_rows(project_with_experts: Project, option: str) -> None:
    done = project_with_experts.predict("python", "train.py", options=("--assume-rows", option))
    traced = done.json["traced"]
    every_input = ROWS * WIDTH * 4  # each row goes to one expert, whose backward needs it
    indices = ROWS * 8
    assert every_input + indices <= traced["buckets"]["activations"] <= 3.2 * every_input
    assert any("train.py:13: aten.nonzero.default is assumed to keep 12.5 %" in note for note in traced["notes"])


@pytest.mark.slow
def test_a_place_that_is_another(project_with_experts: Project) -> None:
    """The share is of that place alone: elsewhere both ends are traced, and the first line notes this."""
    as_it_is = project_with_experts.predict("python", "train.py").json["traced"]
    told = project_with_experts.predict("python", "train.py", options=("--assume-rows", "train.py:3=0.5")).json[
        "traced"
    ]
    assert told["assumptions"] == as_it_is["assumptions"] != []
    assert told["buckets"] == as_it_is["buckets"]


DETECTOR = """
import torch
from torch import nn

torchvision = torch.library.Library("torchvision", "DEF")
torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


@torch.library.register_fake("torchvision::nms")
def nms(boxes, scores, threshold):
    return boxes.new_empty(torch._custom_ops.get_ctx().create_unbacked_symint(), dtype=torch.long)


net = nn.Linear(64, 256).cuda()
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
anchors = torch.rand(10_000, 4).cuda()
for _ in range(5):
    features = net(torch.randn(10_000, 64).cuda())
    kept = torch.ops.torchvision.nms(anchors, features.mean(1), 0.5)
    near = features[kept].square()
    near[anchors[kept].sum(1) > 2].sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_boxes_that_overlap_no_better_one(project: Project) -> None:
    project.write("train.py", DETECTOR)
    (assumed,) = project.predict("python", "train.py").json["traced"]["assumptions"]
    assert (assumed["place"], assumed["high"]) == ("train.py:19", 10_000)
    shares = [project.predict("python", "train.py", options=("--assume-rows", share)).json for share in ("0.1", "0.2")]
    few, more = (found["traced"]["buckets"]["activations"] for found in shares)
    kept = 1000 * 256 * 4
    assert kept <= more - few <= 4 * kept  # what `square` has picked, for its backward, and what follows


SAMPLING = """
import torch

def subsample_labels(labels, count):
    positive, negative = (labels == 1).nonzero().squeeze(1), (labels == 0).nonzero().squeeze(1)
    taken = min(positive.numel(), count // 4)
    some = positive[torch.randperm(positive.numel(), device=labels.device)[:taken]]
    rest = negative[torch.randperm(negative.numel(), device=labels.device)[: count - taken]]
    sampled = torch.zeros_like(labels, dtype=torch.bool)
    sampled[some] = True
    sampled[rest] = True
    return sampled
"""


def test_a_detector_keeps_as_many_boxes_as_it_can(project: Project) -> None:
    """As detectron2 and torchvision sample what their losses count: of 300,000 anchors 512, none of them twice."""
    project.write("detectron2/modeling/sampling.py", SAMPLING)
    project.write(
        "train.py",
        """
        import torch
        from detectron2.modeling.sampling import subsample_labels

        net = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(3):
            features = net(torch.randn(300_000, 64).cuda())
            labels = features.argmax(1).clamp(max=1)
            sampled = subsample_labels(labels, 512)
            near = features[sampled]
            assert len(near) == 512, len(near)
            near.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    notes = project.predict("python", "train.py").json["traced"]["notes"]
    assert any("as many boxes and anchors are taken as detectron2 can keep" in note for note in notes)


@pytest.mark.slow
def test_what_no_share_can_be_assumed_of_does_not_advise_one(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch

        net = torch.nn.Linear(16, 16).cuda()
        made = net(torch.randn(50, 16).cuda())
        made.repeat_interleave(made.sum(1).abs().long(), dim=0)
        """,
    )
    done = project.predict("python", "train.py", options=("--assume-rows", "0.5"))
    assert done.code == 2
    assert done.complaint.startswith("gpumem-tui: aten.repeat_interleave.Tensor gives a result whose shape depends")
    assert "--assume-rows" not in done.complaint
    assert done.complaint.endswith("(train.py:6)")


@pytest.mark.slow
def test_lengths_that_the_gpu_computes_are_the_longest_for_the_ctc_loss(project: Project) -> None:
    project.write(
        "train.py",
        """
        import torch
        from torch import nn

        net = nn.Linear(16, 30).cuda()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        for _ in range(5):
            made = net(torch.randn(500, 64, 16).cuda())
            lengths = (made.sum(2) > 0).sum(0)
            targets = torch.randint(1, 30, (64, 100)).cuda()
            before = torch.cuda.memory_allocated()
            loss = nn.functional.ctc_loss(made.log_softmax(2), targets, lengths, (made[:64, :, 0] > 0).sum(0))
            print("holds", torch.cuda.memory_allocated() - before)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        """,
    )
    done = project.predict("python", "train.py")
    assert done.code == 0, done.stderr
    held = next(int(line.split()[-1]) for line in done.stderr.splitlines() if "holds" in line)
    paths = 64 * 500 * (2 * 100 + 1) * 4
    assert paths + 500 * 64 * 30 * 4 <= held <= 1.05 * (paths + 500 * 64 * 30 * 4)


@pytest.mark.parametrize("option", ["2", "half", "train.py=0.5", "nan"])
def test_what_is_no_share(project: Project, option: str) -> None:
    done = project.predict("python", "train.py", options=("--assume-rows", option))
    assert done.code == 2
    assert "is not a share from 0 to 1" in done.complaint


def test_the_catalogs_models_need_none(project: Project) -> None:
    done = project.run(
        "predict", "--model", "gpt2", "--batch-size", "1", "--gpu", "sim:a100-40gb", "--assume-rows", "1"
    )
    assert done.code == 2
    assert "--assume-rows: is for a --workload file or a command" in done.complaint
